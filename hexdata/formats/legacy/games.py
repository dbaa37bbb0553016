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
from dataclasses import dataclass
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hexdata.board import (
    BLUE,
    RED,
    check_no_repeats,
    format_moves,
    parse_moves,
    replay_packed,
    split_trmph,
    unpack_boards,
    winner_of,
)
from hexdata.errors import FormatError, HexdataError, Reason
from hexdata.formats.gunzip import GunzipFile
from hexdata.formats.legacy.allowlist import EnumValue, PickledArray, PickledScalar, kind_of
from hexdata.formats.legacy.dialect import header_json
from hexdata.formats.legacy.limits import DEFAULT_LIMITS, LegacyLimits
from hexdata.formats.legacy.memo import Memo
from hexdata.formats.legacy.unpickler import Event, ExamplesPlaceholder, Unpickler
from hexdata.formats.run_header import model_of
from hexdata.formats.source import BATCH_ROWS, SALVAGEABLE, RawBatch, Rejection
from hexdata.policy import SparsePolicies
from hexdata.schema import raw_schema
from hexdata.storage import AnyPath, as_path, storage_of

__all__ = ["SelfPlayGamesReader", "has_games"]

Float64Array = npt.NDArray[np.float64]

_KEYS: Final = ("moves", "policies", "values", "winner", "final_trmph")
_WINNERS: Final = {"BLUE": BLUE, "B": BLUE, "1": BLUE, "RED": RED, "R": RED, "2": RED}
_MAX_DETAIL: Final = 60
"""Maximum number of characters of a text from the file in the detail of a rejection."""


def has_games(path: AnyPath, limits: LegacyLimits = DEFAULT_LIMITS) -> bool:
    """Return whether a pickle has a top-level list ``games`` before any list ``examples``.

    Reads the file up to the beginning of the list. A file that cannot be read so far has none.

    Args:
        path: The file, gzipped or plain.
        limits: Limits on the resources that the file may use.
    """
    with GunzipFile(storage_of(path).open(), limits, salvage=True) as file:
        unpickler = Unpickler(file, limits, keys=("examples", "games"))
        with suppress(HexdataError):  # the reader of the file reports the error
            unpickler.run()
        return unpickler.key == "games"


@dataclass(slots=True)
class _Game:
    """A game of the file, or a rejected one if ``reason`` is set."""

    number: int
    """Number of the game in the file, from 1."""
    board_size: int = 0
    moves: npt.NDArray[np.uint16] | None = None
    winner: int | None = None
    policies: SparsePolicies | None = None
    """The policies that are not one-hot at the move."""
    has_policy: npt.NDArray[np.bool_] | None = None
    """Whether each position has one of ``policies``, (m + 1,)."""
    root_values: Float64Array | None = None
    """(m,), NaN where unknown."""
    metadata: list[str | None] | None = None
    """JSON text of each position, (m + 1,)."""
    reason: Reason | None = None
    detail: str = ""

    @property
    def records(self) -> int:
        """Number of positions of the game; 1 for a rejected game."""
        return 1 if self.moves is None or self.reason else len(self.moves) + 1


class SelfPlayGamesReader:
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
        limits: Limits on the resources that the file may use.
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

    def __init__(
        self, path: str | AnyPath, *, limits: LegacyLimits = DEFAULT_LIMITS, salvage: bool = False
    ) -> None:
        self.path = as_path(path)
        self.board_size: int | None = None
        self.damage: FormatError | None = None
        self.header: dict[str, object] = {}
        self._salvage = salvage
        self._limits = limits
        self._counts = Counter(logits=0, probabilities=0, winners_from_chain=0)
        self._games = 0
        self._file = GunzipFile(storage_of(self.path).open(), limits, salvage=salvage)
        # The network was called through a cache, so games share arrays.
        memo = Memo(limits, keep_arrays=True)
        self._unpickler = Unpickler(self._file, limits, memo, keys=("games",))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def batches(self) -> Iterator[RawBatch]:
        """Read the file once, from front to back, in memory that does not grow with the file.

        All positions of a game are in the same batch. The board size is unknown before the first valid game:
        batches before it contain only rejections.

        Yields:
            The records of the file in order, at most ``BATCH_ROWS`` per batch.

        Raises:
            FormatError: The file is not a pickle of games, exceeds a limit, or is damaged and was not opened
                for salvage. The batches yielded so far are then invalid.
            UnsafePickleError: The pickle uses a name, call or opcode that is not allowed.
        """
        try:
            yield from self._batches()
        except FormatError as error:
            raise error.at(self.path) from None

    def _batches(self) -> Iterator[RawBatch]:
        first_record = 0
        pending: list[_Game] = []
        records = 0
        for content in self._contents():
            self._games += 1
            game = self._read(content)
            if records + game.records > BATCH_ROWS:
                yield self._batch(pending, first_record)
                first_record += records
                pending, records = [], 0
            pending.append(game)
            records += game.records
        self._finish()
        if pending:
            yield self._batch(pending, first_record)

    def _contents(self) -> Iterator[object]:
        """Yield each game as in the pickle.

        Raises:
            FormatError: "irregular-examples", if a game that was yielded is not an item of the list.
        """
        taken = 0
        while (event := self._next_event()) not in (Event.STOP, None):
            if event is Event.BATCH:
                items = self._unpickler.items
                others = [item for item in items if not isinstance(item, ExamplesPlaceholder)]
                if len(items) - len(others) != taken:
                    raise FormatError("games nested in each other", code=Reason.IRREGULAR_EXAMPLES)
                taken = 0
                yield from others
                self._unpickler.memo.compact()
            elif (game := self._unpickler.take_example()) is not None:
                taken += 1
                yield game

    def _next_event(self) -> Event | None:
        """Read up to the next event and return it; None at damage, if the file is opened for salvage."""
        try:
            return self._unpickler.run()
        except FormatError as error:
            if not self._salvage or error.code not in SALVAGEABLE:
                raise
            self.damage = error
            return None

    def _finish(self) -> None:
        """Set the header.

        Raises:
            FormatError: The pickle is not a dict with a list of games.
        """
        top = self._unpickler.result
        if self.damage is not None and top is None:
            top = {}
        elif not (isinstance(top, dict) and isinstance(top.get("games"), ExamplesPlaceholder)):
            raise FormatError("not a pickle of games", found=kind_of(top), expected='a list under "games"')
        elif "examples" in top:
            raise FormatError("a pickle of both games and examples", expected="one of them in a file")
        content = {key: value for key, value in top.items() if key != "games"}
        run = _run_of(content.get("metadata"))
        self.header = header_json(content, self._limits) | {"run": run, "counts": dict(self._counts)}

    # Games

    def _read(self, content: object) -> _Game:
        game = _Game(self._games)
        try:
            if not isinstance(content, dict):
                raise _layout_error(kind_of(content), f"a dict of {', '.join(_KEYS)}")
            missing = [key for key in _KEYS if key not in content]
            if missing:
                raise _layout_error(f"no {', '.join(missing)}", f"a dict of {', '.join(_KEYS)}")
            self._read_moves(game, content)
            self._read_winner(game, content["winner"])
            kind = self._read_outputs(game, content)
        except FormatError as error:
            game.reason, game.detail = error.code, f"game {game.number}: {error}"
            return game
        self.board_size = game.board_size
        self._counts[kind] += 1
        return game

    def _read_moves(self, game: _Game, content: dict[Any, Any]) -> None:
        """Read the moves from ``final_trmph``, and compare all positions in ``moves`` with them."""
        final, texts = content["final_trmph"], content["moves"]
        if not isinstance(final, str) or not isinstance(texts, list):
            found = f"final_trmph {kind_of(final)}, moves {kind_of(texts)}"
            raise _layout_error(found, "a text, and a list of texts")
        line = split_trmph(final)
        if not line.moves:
            raise FormatError("a game without moves", code=Reason.NO_MOVES, expected="#13,a1b2c3")
        moves = parse_moves(line.moves, line.board_size)
        check_no_repeats(moves, line.board_size)
        if self.board_size not in (None, line.board_size):
            raise FormatError(
                "another board size than the file's first game",
                code=Reason.BOARD_SIZE,
                found=line.board_size,
                expected=self.board_size,
            )
        lengths = {name: len(content[name]) for name in ("policies", "values") if _is_list(content[name])}
        if len(lengths) < 2:
            kinds = ", ".join(f"{name} {kind_of(content[name])}" for name in ("policies", "values"))
            raise _layout_error(kinds, "two lists")
        lengths["moves"] = len(texts)
        if set(lengths.values()) != {len(moves)}:
            listed = ", ".join(f"{count:,} {name}" for name, count in sorted(lengths.items()))
            raise _mismatch_error("the lists of the game have other lengths", listed, f"{len(moves):,} each")
        self._compare_positions(texts, moves, line.board_size)
        game.board_size, game.moves = line.board_size, moves

    def _compare_positions(self, texts: list[Any], moves: npt.NDArray[np.uint16], n: int) -> None:
        """Check that each text is the position after as many moves of the game as its index."""
        names = [format_moves([move], n) for move in moves.tolist()]
        expected = f"#{n},"
        for ply, text in enumerate(texts):
            if not isinstance(text, str):
                raise _layout_error(f"moves[{ply}] {kind_of(text)}", "a text such as #13,a1b2")
            if text[text.find("#") :] != expected:
                raise _mismatch_error(
                    f"moves[{ply}] is not the position of final_trmph after {ply} moves",
                    repr(text[-_MAX_DETAIL:]),
                    repr(expected[-_MAX_DETAIL:]),
                )
            expected += names[ply]

    def _read_winner(self, game: _Game, winner: object) -> None:
        """Set the winner: the stated one, or if none is stated, the one with the winning chain."""
        assert game.moves is not None
        n = game.board_size
        if winner is not None:
            game.winner = _winner(winner)
            return
        board = replay_packed(game.moves, np.array([len(game.moves)]), n)[-1:]
        found = int(winner_of(unpack_boards(board, n, np.uint8))[0])
        if found not in (BLUE, RED):
            raise FormatError(
                "no winner is stated and the final board has no winning chain",
                code=Reason.NO_WINNER,
                found=f"{len(game.moves)} moves",
                expected="red or blue as winner",
            )
        game.winner = found
        self._counts["winners_from_chain"] += 1

    def _read_outputs(self, game: _Game, content: dict[Any, Any]) -> str:
        """Read policies, values and other keys; return the kind of the policies."""
        assert game.moves is not None
        policies = _policies(content["policies"], game.board_size**2)
        values = np.array([_value(ply, value) for ply, value in enumerate(content["values"])])
        metadata: list[dict[str, object]] = [{} for _ in range(len(game.moves) + 1)]
        metadata[0] = {key: value for key, value in content.items() if key not in _KEYS}
        if (policies < 0).any():
            kind = "logits"
            stored = _softmax(policies, game.moves).astype(np.float32)
            game.root_values = _sigmoid(values)
        else:
            kind = "probabilities"
            stored = policies.astype(np.float32)
            if (stored != policies).any():
                raise FormatError("float32 cannot represent the policies exactly", code=Reason.POLICY_DTYPE)
            game.root_values = np.full(len(values), np.nan)
            for ply, value in enumerate(values.tolist()):
                metadata[ply]["values"] = value
        one_hot = (stored[np.arange(len(stored)), game.moves] == 1) & (np.count_nonzero(stored, axis=1) == 1)
        game.policies = SparsePolicies.from_dense(stored[~one_hot])
        game.has_policy = np.append(~one_hot, False)
        game.metadata = [self._metadata(values) if values else None for values in metadata]
        return kind

    def _metadata(self, values: dict[Any, Any]) -> str:
        """Return metadata as JSON text.

        Raises:
            FormatError: "metadata-size".
        """
        try:
            text = json.dumps(dict(sorted(header_json(values, self._limits).items())), separators=(",", ":"))
        except FormatError as error:
            raise self._metadata_error(str(error)) from None
        if len(text) > self._limits.metadata_bytes:
            raise self._metadata_error(f"{len(text):,} bytes")
        return text

    def _metadata_error(self, found: str) -> FormatError:
        return FormatError(
            "the other keys of the game are too large",
            code=Reason.METADATA_SIZE,
            found=found,
            expected=self._limits.metadata_expected,
        )

    # Batches

    def _batch(self, games: list[_Game], first_record: int) -> RawBatch:
        counts = np.array([game.records for game in games])
        firsts = first_record + np.cumsum(counts) - counts
        rejected = [
            Rejection(first, game.reason, game.detail)
            for first, game in zip(firsts.tolist(), games, strict=True)
            if game.reason
        ]
        valid = [index for index, game in enumerate(games) if not game.reason]
        size = self.board_size or 3
        return RawBatch(_positions([games[index] for index in valid], firsts[valid], size), rejected)


def _positions(games: list[_Game], firsts: npt.NDArray[np.int64], n: int) -> pa.RecordBatch:
    """Return the positions of games as ``raw_schema(n, ("root_value",))``.

    Args:
        games: The games, all valid.
        firsts: Record number of the first position of each game, (len(games),).
        n: Cells along an edge.
    """
    lengths = np.array([len(game.moves) for game in games if game.moves is not None], np.int64)
    moves = np.concatenate([np.empty(0, np.uint16), *(g.moves for g in games if g.moves is not None)])
    totals = lengths + 1
    rows = int(totals.sum())
    boards = replay_packed(moves, lengths, n)
    ply = np.arange(rows) - np.repeat(np.cumsum(totals) - totals, totals)
    is_final = ply == np.repeat(lengths, totals)
    next_move = np.zeros(rows, np.uint16)
    next_move[~is_final] = moves
    values = np.zeros(rows)
    values[~is_final] = np.concatenate([np.empty(0), *(_required(game.root_values) for game in games)])
    winner = np.repeat(np.array([game.winner for game in games], np.uint8), totals)
    has_policy = np.concatenate([np.empty(0, bool), *(_required(game.has_policy) for game in games)])
    policies = SparsePolicies.join([_required(game.policies) for game in games])
    columns = {
        "record": np.repeat(firsts, totals) + ply,
        "board": pa.Array.from_buffers(pa.binary(boards.shape[1]), rows, [None, pa.py_buffer(boards)]),
        "move": pa.array(next_move, mask=is_final),
        "policy": policies.to_arrow(has_policy),
        "value": winner.astype(np.float64),
        "player_to_move": (ply % 2).astype(np.uint8),
        "line_idx": np.repeat(np.array([game.number for game in games], np.int32), totals),
        "position_in_game": ply.astype(np.uint16),
        "total_positions": np.repeat(totals, totals).astype(np.uint16),
        "winner": winner,
        "metadata": pa.array([text for game in games for text in _required(game.metadata)], pa.string()),
        "root_value": pa.array(values, mask=is_final | np.isnan(values)),
    }
    schema = raw_schema(n, SelfPlayGamesReader.targets)
    arrays = [
        pa.array(columns[field.name], field.type) if field.name in columns else pa.nulls(rows, field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _required(value: Any) -> Any:
    """Return a field that every valid game has."""
    assert value is not None
    return value


# Values of the pickle


def _layout_error(found: str, expected: str) -> FormatError:
    return FormatError("the game has another layout", code=Reason.GAME_LAYOUT, found=found, expected=expected)


def _mismatch_error(reason: str, found: str, expected: str) -> FormatError:
    return FormatError(reason, code=Reason.GAME_MISMATCH, found=found, expected=expected)


def _is_list(value: object) -> bool:
    return isinstance(value, list)


def _winner(value: object) -> int:
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if isinstance(text, str) and text.upper() in _WINNERS:
        return _WINNERS[text.upper()]
    if isinstance(value, EnumValue) and type(value.value) is int and value.value in (BLUE, RED):
        return value.value
    raise FormatError(
        "an unknown winner",
        code=Reason.WINNER_VALUE,
        found=repr(value[:_MAX_DETAIL]) if isinstance(value, str) else kind_of(value),
        expected="red, blue or None",
    )


def _value(ply: int, value: object) -> float:
    number = value.value if isinstance(value, PickledScalar) else value
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise FormatError(
            f"values[{ply}] is not a number",
            code=Reason.VALUE_TYPE,
            found=kind_of(value),
            expected="a number",
        )
    if not (abs(number) < 1 << 53 and math.isfinite(number)):
        raise FormatError(f"values[{ply}] is not finite or is too large", code=Reason.VALUE_RANGE)
    return float(number)


def _policies(arrays: list[Any], cells: int) -> Float64Array:
    """Return the policies of a game, (m, cells).

    Raises:
        FormatError: "policy-type", "policy-shape" or "policy-values".
    """
    result = np.empty((len(arrays), cells))
    for ply, array in enumerate(arrays):
        if not isinstance(array, PickledArray) or array.dtype[1:] not in ("f2", "f4", "f8"):
            raise FormatError(
                f"policies[{ply}] is not an array of floats",
                code=Reason.POLICY_TYPE,
                found=kind_of(array),
                expected=f"an array of {cells} floats",
            )
        if array.shape != (cells,):
            raise FormatError(
                f"policies[{ply}] has another shape",
                code=Reason.POLICY_SHAPE,
                found=array.shape,
                expected=(cells,),
            )
        result[ply] = np.frombuffer(array.payload, array.dtype)
        if not np.isfinite(result[ply]).all():
            raise FormatError(f"policies[{ply}] contains NaN or infinite numbers", code=Reason.POLICY_VALUES)
    return result


def _run_of(metadata: object) -> dict[str, object]:
    """Return the facts of the run that the legacy tool writes to the top-level key ``metadata``."""
    if not isinstance(metadata, dict):
        return {}
    run: dict[str, object] = {}
    model: Any = metadata.get("model_path")
    temperature: Any = metadata.get("temperature")
    if isinstance(model, str) and (named := model_of(model[:512])):
        run["model"] = named
    if type(temperature) in (int, float) and abs(temperature) < 1 << 53:
        run["temperature"] = float(temperature)
    seconds = metadata.get("generation_time")
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
_TERMS: Final = tuple(1 / math.factorial(k) for k in range(14, -1, -1))


def _exp(x: Float64Array) -> Float64Array:
    """Return exp(x) for x up to 0, with a relative error of about 1e-16."""
    x = np.maximum(x, -700.0)
    power = np.rint(x * _LOG2_E)
    rest = (x - power * _LN2_HIGH) - power * _LN2_LOW
    result = np.full_like(x, _TERMS[0])
    for term in _TERMS[1:]:
        result = result * rest
        result = result + term
    scaled: Float64Array = np.ldexp(result, power.astype(np.int32))
    return scaled
