"""Reader of legacy pickles of self-play games, which have a top-level list ``games`` instead of examples.

Each game is a dict of ``moves`` (the TRMPH text of the position before each move), ``policies`` and
``values`` (one of each per move), ``winner`` and ``final_trmph``. The legacy tool wrote the outputs of its
network, without search: ``policies`` are logits of all cells, and ``values`` are logits of the probability
that red wins. No code of the pickle is run, and only a few games are in memory at a time.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from itertools import accumulate
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from hexdata.board import cell_name, check_no_repeats, parse_moves, split_trmph
from hexdata.errors import FormatError, HexdataError, Reason
from hexdata.formats.games import GameReader, GameRecord
from hexdata.formats.gunzip import GunzipFile
from hexdata.formats.legacy.allowlist import PickledArray, is_number, kind_of, layout_of, plain
from hexdata.formats.legacy.dialect import ESCAPE, header_json
from hexdata.formats.legacy.limits import DEFAULT_LIMITS, METADATA_BYTES, LegacyLimits
from hexdata.formats.legacy.stream import PickleStream
from hexdata.formats.legacy.unpickler import Unpickler
from hexdata.formats.legacy.validate import read_winner
from hexdata.formats.run_header import model_of
from hexdata.policy import SparsePolicies
from hexdata.storage import AnyPath, storage_of
from hexdata.text import shortened

Float64Array = npt.NDArray[np.float64]

_KEYS: Final = ("moves", "policies", "values", "winner", "final_trmph")
_RESERVED: Final = ("continues", "convention", "counts", "run", "sidecar", "stated_format")
"""Keys of the header that hexdata writes. A key of the file with the same name is stored with a prefix."""


def has_games(path: AnyPath) -> bool:
    """Return whether a pickle has a top-level list ``games`` before any list ``examples``.

    Reads the file up to the beginning of the list. A file that cannot be read so far has none.
    """
    with GunzipFile(storage_of(path).open(), DEFAULT_LIMITS, salvage=True) as file:
        unpickler = Unpickler(PickleStream(file))
        with suppress(HexdataError):  # the reader of the file reports the error
            next(unpickler.run(), None)  # the first yield is at the beginning of the list
        return unpickler.key == "games"


class SelfPlayGamesReader(GameReader):
    """Reader of one pickle of self-play games: a SourceReader and a context manager.

    A game of m moves yields m + 1 positions; ``line_idx`` is its number in the file, from 1. ``move`` is the
    move that was played. If the policies of a game contain negative numbers, they are logits: ``policy`` is
    their softmax over the empty cells, and ``root_value`` is the sigmoid of the value. Otherwise ``policy``
    contains the numbers of the file, or is null if it is one-hot at ``move``; the values are stored unchanged
    as "values" in ``metadata``, since their scale is unknown. Other keys of a game are in ``metadata`` of its
    first position.

    A game that is not valid counts as one record and is rejected with one of these reasons: "game-layout",
    "game-mismatch", "trmph-syntax", "no-moves", "trmph-cell", "repeated-move", "board-size", "policy-type",
    "policy-shape", "policy-dtype", "policy-values", "value-type", "value-range", "winner-value", "no-winner",
    "metadata-size".

    Args:
        path: The file, gzipped or plain.
        salvage: If True, a damaged file yields the complete games before the damage instead of raising.

    Attributes:
        format: "selfplay-games".
        board_size: Cells along an edge, from the first valid game; None before it.
        targets: ("root_value",).
        header: All top-level keys except ``games``; ``run`` with the model, temperature and date; and
            ``counts`` of the games whose policies are logits or probabilities, and of winners decided by the
            chain.
        damage: The error at which salvaging stopped; None if there was none.
    """

    format: str = "selfplay-games"
    targets: tuple[str, ...] = ("root_value",)
    limits: ClassVar[LegacyLimits] = DEFAULT_LIMITS
    unit: ClassVar[str] = "game"
    winner_hint: ClassVar[str] = "red or blue as winner"

    def __init__(self, path: str | AnyPath, *, salvage: bool = False) -> None:
        super().__init__(path, salvage=salvage)
        self.header = {}
        self._counts = Counter(logits=0, probabilities=0, winners_from_chain=0)

    def _games(self) -> Iterator[GameRecord]:
        unpickler = Unpickler(PickleStream(self._stream, self.limits))
        number = 0
        try:
            for games in unpickler.run():
                for content in games:
                    number += 1
                    yield self._game(content, number, number)
            top: Any = unpickler.result
            # With examples beside the games, one of the two lists would be left out silently.
            if unpickler.key != "games" or not isinstance(top, dict) or isinstance(top.get("examples"), list):
                expected = 'a list under "games"'
                raise FormatError("not a pickle of games", found=kind_of(top), expected=expected)
        except FormatError as error:
            self._stop_at(error)
            top = unpickler.result if isinstance(unpickler.result, dict) else {}
        content = {key: value for key, value in top.items() if key != "games"}
        found = header_json(content)
        self.header |= {ESCAPE + key if key in _RESERVED else key: found[key] for key in found}
        self.header |= {"run": _run_of(content.get("metadata")), "counts": self._counts}

    def _read_game(self, content: Any, game: GameRecord) -> None:
        is_game = isinstance(content, dict) and all(key in content for key in _KEYS)
        given: Any = [content[key] if is_game else None for key in _KEYS]
        moves, policies, values, winner, final = given
        has_lists = all(isinstance(each, list) for each in (moves, policies, values))
        if not (has_lists and all(isinstance(text, str) for text in (final, *moves))):
            found, expected = shortened(layout_of(content)), f"a dict of {', '.join(_KEYS)}"
            raise FormatError("the game has another layout", Reason.GAME_LAYOUT, found, expected)
        _read_moves(game, final, moves)
        if {len(policies), len(values)} != {len(game.moves)}:
            found = f"{len(policies):,} policies and {len(values):,} values"
            raise FormatError("lists of other lengths", Reason.GAME_MISMATCH, found, len(game.moves))
        if isinstance(winner, str):
            winner = winner.upper() if len(winner) > 1 else winner.lower()  # also "red" and "R"
        game.winner = None if winner is None else read_winner(winner)
        self._counts[self._read_outputs(game, content)] += 1

    def _read_outputs(self, game: GameRecord, content: dict[Any, Any]) -> str:
        """Read policies, values and other keys; return the kind of the policies."""
        policies = _policies(content["policies"], game.board_size**2)
        values = np.array([_value(ply, value) for ply, value in enumerate(content["values"])])
        metadata: list[dict[str, object]] = [{} for _ in range(len(game.moves) + 1)]
        metadata[0] = {key: value for key, value in content.items() if key not in _KEYS}
        # No key names the scale, but a probability is never negative.
        kind = "logits" if (policies < 0).any() else "probabilities"
        if kind == "logits":
            stored = _softmax(policies, game.moves).astype(np.float32)
            game.root_values = _sigmoid(values)
        else:
            stored = policies.astype(np.float32)
            if (stored != policies).any():
                raise FormatError("float32 cannot represent the policies exactly", Reason.POLICY_DTYPE)
            game.root_values = np.full(len(values), np.nan)
            for ply, value in enumerate(values.tolist()):
                metadata[ply]["values"] = value
        one_hot = (stored[np.arange(len(stored)), game.moves] == 1) & (np.count_nonzero(stored, axis=1) == 1)
        game.policies = SparsePolicies.from_dense(stored[~one_hot])
        game.has_policy = ~one_hot
        game.metadata = [self._metadata(values) if values else None for values in metadata]
        return kind

    def _metadata(self, values: dict[Any, Any]) -> str:
        """Return metadata as JSON text.

        Raises:
            FormatError: "metadata-size".
        """
        with suppress(FormatError):
            text = json.dumps(dict(sorted(header_json(values).items())), separators=(",", ":"))
            if len(text) <= METADATA_BYTES:
                return text
        raise FormatError("the other keys of the game are too large", Reason.METADATA_SIZE)


# Values of the pickle


def _read_moves(game: GameRecord, final: str, positions: list[str]) -> None:
    """Read the moves from the TRMPH text of the final position, and compare all positions before it."""
    line = split_trmph(final)
    n = line.board_size
    if not line.moves:
        raise FormatError("a game without moves", Reason.NO_MOVES, expected="#13,a1b2c3")
    moves = parse_moves(line.moves, n)
    check_no_repeats(moves, n)
    expected = [*accumulate((cell_name(move, n) for move in moves[:-1].tolist()), initial=f"#{n},")]
    # There may be an address before the "#", which is not compared.
    if [text[text.find("#") :] for text in positions] != expected:
        raise FormatError("moves are not the positions of final_trmph", Reason.GAME_MISMATCH)
    game.board_size, game.moves = n, moves


def _value(ply: int, value: object) -> float:
    number = plain(value)
    if not is_number(value):
        raise FormatError(f"values[{ply}] is not a number", Reason.VALUE_TYPE, kind_of(value), "a number")
    # Up to here floats hold every integer, and ``float`` cannot overflow.
    if not (abs(number) < 1 << 53 and math.isfinite(number)):
        raise FormatError(f"values[{ply}] is not finite or is too large", Reason.VALUE_RANGE)
    return float(number)


def _policies(arrays: list[Any], cells: int) -> Float64Array:
    """Return the policies of a game, (m, cells).

    Raises:
        FormatError: "policy-type", "policy-shape" or "policy-values".
    """
    result = np.empty((len(arrays), cells))
    for ply, array in enumerate(arrays):
        reason, expected = f"policies[{ply}] is {kind_of(array)}", f"an array of {cells} floats"
        if not isinstance(array, PickledArray) or array.dtype[1:] not in ("f2", "f4", "f8"):
            raise FormatError(reason, Reason.POLICY_TYPE, expected=expected)
        if array.shape != (cells,):
            raise FormatError(reason, Reason.POLICY_SHAPE, expected=expected)
        result[ply] = np.frombuffer(array.payload, array.dtype)
        if not np.isfinite(result[ply]).all():
            raise FormatError(f"policies[{ply}] contains NaN or infinite numbers", Reason.POLICY_VALUES)
    return result


def _run_of(metadata: Any) -> dict[str, object]:
    """Return the facts of the run that the legacy tool writes to the top-level key ``metadata``."""
    facts: dict[Any, Any] = metadata if isinstance(metadata, dict) else {}
    model: Any = facts.get("model_path")
    temperature: Any = facts.get("temperature")
    seconds: Any = facts.get("generation_time")
    run: dict[str, object] = {}
    if isinstance(model, str) and (named := model_of(model[:512])):
        run["model"] = named
    if type(temperature) in (int, float) and abs(temperature) < 1 << 53:
        run["temperature"] = float(temperature)
    # Up to the year 2242, as ``datetime`` refuses numbers that are far larger.
    if isinstance(seconds, float) and 0 < seconds < 1 << 33:
        run["date"] = datetime.fromtimestamp(seconds, UTC).date().isoformat()
    return run


# Functions of logits. They use only operations that IEEE 754 defines exactly, so that the results are the
# same on every machine; exp of a C library is not.


def _softmax(logits: Float64Array, moves: npt.NDArray[np.uint16]) -> Float64Array:
    """Return the softmax over the empty cells of each position of a game, 0 for the others.

    Args:
        logits: (m, cells).
        moves: The moves of the game, (m,). At row k, the cells of the first k moves are occupied.
    """
    played_at = np.full(logits.shape[1], len(moves))
    played_at[moves] = np.arange(len(moves))
    empty = played_at >= np.arange(len(moves))[:, None]
    masked = np.where(empty, logits, -np.inf)
    # The largest logit is subtracted, so that no power overflows and the largest is 1.
    powers = np.where(empty, _exp(np.where(empty, masked - masked.max(axis=1, keepdims=True), 0.0)), 0.0)
    result: Float64Array = powers / np.cumsum(powers, axis=1)[:, -1:]  # its order of addition is defined
    return result


def _sigmoid(logits: Float64Array) -> Float64Array:
    """Return 1 / (1 + exp(-x))."""
    small = _exp(-np.abs(logits))
    result: Float64Array = np.where(logits < 0, small, 1.0) / (1.0 + small)
    return result


_LOG2_E: Final = 1.4426950408889634
_LN2_HIGH: Final = 0.6931471803691238
"""The first 33 bits of log(2), so that products with small integers are exact."""
_LN2_LOW: Final = 1.9082149292705877e-10
"""log(2) less ``_LN2_HIGH``."""
_TERMS: Final = tuple(1 / math.factorial(k) for k in range(14, -1, -1))
"""Coefficients of the Taylor series of exp, the highest first. Up to log(2) / 2, the next one adds less than
1e-19, which float64 cannot hold beside 1."""


def _exp(x: Float64Array) -> Float64Array:
    """Return exp(x) for x up to 0, with a relative error of about 1e-16."""
    # Below about -708, results would be subnormal and lose digits; exp(-700) is 0 as float32 already.
    x = np.maximum(x, -700.0)
    power = np.rint(x * _LOG2_E)
    # exp(x) is 2^power times exp(rest), where rest is at most log(2) / 2. The large part is exact.
    rest = (x - power * _LN2_HIGH) - power * _LN2_LOW
    result = np.full_like(x, _TERMS[0])
    for term in _TERMS[1:]:
        # Two roundings for each term: a fused multiply-add has one, on machines that have it.
        result = result * rest
        result = result + term
    scaled: Float64Array = np.ldexp(result, power.astype(np.int32))
    return scaled
