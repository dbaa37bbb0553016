"""Reader of positions, policies and values of AlphaZero-style programs: a pickle or an ``.npz`` file.

A pickle is a list, or a list of lists or deques, of (board, policy, value), or of dicts with these under one
of the usual names. An ``.npz`` file, or a pickled dict, has one array of each. These layouts do not state
whose stones are 1, which edges a player connects, and whose view a value has: the convention, such as
``mover/top-bottom/mover``.

The reader tries all conventions. If exactly one of them agrees with the rules of Hex, it is that of the file:
each board follows from the one before by one move, the games end one move before or at a winning chain, and
the values name its winner. Otherwise the user must state the convention. Then positions in any order are
read, too, and those that follow each other from the empty board are games.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain, islice, product
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hexdata.board import MAX_SIZE, MIN_SIZE, RED, pack_boards, winner_of
from hexdata.errors import FormatError, Reason
from hexdata.formats.gunzip import GunzipFile, GunzipLimits
from hexdata.formats.legacy.allowlist import PickledArray, is_number, layout_of, plain
from hexdata.formats.legacy.limits import DEFAULT_LIMITS
from hexdata.formats.legacy.stream import PickleStream
from hexdata.formats.legacy.unpickler import Unpickler
from hexdata.formats.npz import LOCAL_HEADER, ArrayHeader, NpzFile
from hexdata.formats.source import (
    BATCH_ROWS,
    OWN_READER,
    FileReader,
    RawBatch,
    Rejection,
    SourceFormat,
    raw_batch,
)
from hexdata.policy import SparsePolicies
from hexdata.schema import raw_schema
from hexdata.storage import AnyPath, storage_of
from hexdata.text import shortened

Array = npt.NDArray[Any]

_NAMES: Final = (
    ("boards", "board", "states", "state", "x", "s", "observations", "observation", "obs"),
    ("policies", "policy", "pi", "pis", "p", "probs", "policy_targets", "policy_target"),
    ("values", "value", "z", "v", "y", "value_targets", "value_target"),
    ("winners", "winner", "outcomes", "outcome", "results", "result"),
)
"""Names of boards, policies, values and winners. Without a value, the winner is the value."""
_MAX_KEYS: Final = 64
"""Maximum number of keys of a record. A list may contain the same dict many times."""
_PICKLE: Final = re.compile(
    rb"\x80[\x02-\x05](?:\x95.{8})?"
    rb"(?:\]|(?:c|\x8c\x0b)collections[\n\x94\x8c]|[})](?:\x94|q\0)?\."
    rb"|\}(?:\x94|q\0)?\((?:X.{4}|\x8c.)(?i:boards?|states?|polic(?:y|ies)|values?)[\x94q])",
    re.DOTALL,
)
"""Beginning of a list, a deque, an empty dict or tuple, or a dict that begins with one of ``_NAMES``."""
_EMPTY_ARCHIVE: Final = b"PK\x05\x06"
"""The zip directory of an archive without members, as ``np.savez`` writes it without arrays."""
_LIMITS: Final = replace(
    DEFAULT_LIMITS, held_bytes=256 << 20, items=64 << 20, memo=1 << 21, array_bytes=16 << 20, ratio=250
)
"""Limits of a file, which is held in memory as a whole. Those of legacy files hold between two examples."""
_ARCHIVE_LIMITS: Final = GunzipLimits(decompressed_bytes=256 << 20, ratio=250, ratio_floor=16 << 20)
_MAX_RECORDS: Final = 1 << 19
"""Maximum number of records, which take about 1 kB each. Records that are not the same object several times
reach the limit on the memo first."""
_MAX_CELLS: Final = 1 << 25
"""Maximum number of cells of all boards, which take 24 bytes each on boards of 11 x 11: 0.8 GB."""
_MAX_LISTED: Final = 4096
"""Maximum number of numbers and lists of a board or policy as lists. Three planes of the largest board have
3,171."""
_MAX_DEPTH: Final = 8
"""Maximum nesting of these lists."""
_PLAYERS: Final = ("first", "second", "mover", "other")
"""Whose stones are 1, or in the first plane; and for whom a value of 1 is a win. The mover is the player to
move, the other one its opponent."""
_EDGES: Final = ("top-bottom", "left-right", "mover-top-bottom", "mover-left-right")
"""The edges that the first player connects; with "mover-", those of the player to move, so that the boards of
the second player's moves are transposed."""
CONVENTIONS: Final = tuple(map("/".join, product(_PLAYERS, _EDGES, _PLAYERS)))
"""Names of the conventions: stones, edges and values."""
WORDS: Final = f"stones and values {', '.join(_PLAYERS)}; edges {', '.join(_EDGES)}"
"""The words of a convention."""
_EXPECTED: Final = (
    "board, policy and value, as a list or under the names that docs/howto/formats.md lists; " + OWN_READER
)
_STATED: Final = "whole games, or --alphazero-convention STONES/EDGES/VALUES (docs/howto/formats.md)"

_MIN_FAULTS: Final = 8
"""Policies with a probability on an occupied cell from which another order of their cells is looked for."""
_ORDER: Final = "the number of cell (row, column) at row · n + column, and that of a pass last"


class _Records:
    """Valid records of a file.

    Attributes:
        number: Number of each in the file, ascending, (k,).
        planes: Cells that are 1 and -1, or the stones of both planes, (k, 2, n, n) bool.
        policies: Numbers of the cells, and of a pass, (k, n · n + 1) float32.
        shares: Share of the player for whom a value of 1 is a win: 0 to 1, (k,).
        results: The same of the winners beside the values: 0, 1, or NaN for none, (k,).
        stones: Number of stones, (k,).
        players: The player that each of ``_PLAYERS`` is, (k,).
    """

    def __init__(self, rows: Sequence[_Row], low: int) -> None:
        self.number, planes, self.policies, values, winners = map(np.array, zip(*rows, strict=True))
        first, second, empty = np.count_nonzero(planes, axis=(2, 3)).T
        # Of three planes, the first one may contain the empty cells: the players have equally many stones.
        is_shifted = (abs(first - second) > 1).any() and (abs(second - empty) <= 1).all()
        is_shifted &= planes.any(axis=1).all()  # each board has a plane of empty cells
        self.planes = planes[:, 1:] if is_shifted else planes[:, :2]
        self.shares = (values - low) / (1 - low)
        # Winners are 1 and -1, or 1 and 0, or 1 and 2.
        low = 2 if 2 in winners else -1 if -1 in winners else 0
        results = (winners - low) / (1 - low)
        self.results = np.where(np.isin(results, (0, 1)), results, np.nan)
        self.stones = np.count_nonzero(self.planes, axis=(1, 2, 3))
        mover = self.stones % 2
        self.players = dict(zip(_PLAYERS, (0 * mover, 0 * mover + 1, mover, 1 - mover), strict=True))

    def boards(self, owner: str, edges: str) -> tuple[Array, Array, Array]:
        """Return the boards in a convention.

        Returns:
            The boards, with blue, the first player, in plane 0, connecting top and bottom, (k, 2, n, n);
            which of them, and of the policies, are transposed in the file, (k,); and which do not follow from
            the one before by one move a record, (k,).
        """
        # Two transpositions cancel each other.
        turned = (edges.startswith("mover") & (self.stones % 2 == 1)) ^ edges.endswith("left-right")
        planes, is_red = self.planes.copy(), self.players[owner] == RED
        planes[is_red] = planes[is_red][:, ::-1]
        planes[turned] = planes[turned].swapaxes(2, 3)
        # A rejected record between two boards accounts for one more stone.
        grows = (planes[:-1] <= planes[1:]).all(axis=(1, 2, 3))
        starts = np.append([True], ~grows | (np.diff(self.stones) != np.diff(self.number)))
        return planes, turned, starts

    def red(self, view: str, shares: Array) -> Array:
        """Return the share of red in shares, (k,), that are for one of ``_PLAYERS``."""
        return np.where(self.players[view] == RED, shares, 1 - shares)


class AlphaZeroReader(FileReader):
    """Reader of one file of (board, policy, value): a :class:`hexdata.formats.source.SourceReader`.

    A board is (n, n) or n · n cells of 0, of 1, and of -1 or 2; or two planes of the stones of each player,
    which are the first or the last axis, or three of which the last one is constant, or one of which contains
    the empty cells. A policy has n · n numbers, and may have one more for a swap or pass, which is left out;
    None is no policy. A value is 1 for a win and -1 or 0 for a loss. If the convention is stated, it may be
    any number between them, such as that of a search. A winner beside a result must agree with it. Beside a
    search it is kept if chains show which player is 1. A record of another kind is rejected:
    "example-layout", "board-type", "board-shape", "board-cells", "board-overlap", "policy-type",
    "policy-shape", "policy-values", "value-type" or "value-range".

    Args:
        path: The file, gzipped or plain.
        alphazero_convention: One of ``CONVENTIONS`` that the user states. Default None: the only one that
            agrees with the rules of Hex.

    Attributes:
        header: ``convention``, that of the file, and ``counts``. Empty without positions.

    Raises:
        FormatError: "unknown-layout", with the layout that was found, if it is another one, if the
            convention cannot be determined, or if the boards contradict the stated one; and the errors of
            pickles and archives.
    """

    def __init__(self, path: AnyPath, *, alphazero_convention: str | None = None) -> None:
        super().__init__(path)
        self._stated = alphazero_convention

    def batches(self) -> Iterator[RawBatch]:
        """Read the file as a whole, and yield its records in order, at most ``BATCH_ROWS`` per batch."""
        try:
            positions, rejected = self._read()
        except FormatError as error:
            raise error.at(self.path) from None
        for start in range(0, len(positions) + len(rejected), BATCH_ROWS):
            # Batches end at numbers of records, so that a rejection is in the batch of its neighbours.
            first, stop = np.searchsorted(positions["record"], [start, start + BATCH_ROWS]).tolist()
            part = [each for each in rejected if start <= each.record < start + BATCH_ROWS]
            yield RawBatch(positions.slice(first, stop - first), part)

    def _read(self) -> tuple[pa.RecordBatch, list[Rejection]]:
        # Two bytes can be read before any damage, which the reader of the content then reports.
        with GunzipFile(storage_of(self.path).open(), _LIMITS, salvage=True) as file:
            is_archive = file.read(2) == b"PK"
        items, layout, others = (_read_archive if is_archive else _read_pickle)(self.path)
        records, rejected = _check_records(items, self.board_size, self._stated is not None)
        count = len(items)
        del items  # as large as the records
        if records is None:
            # The layout of a file that has no records, or none of the selected size, is fine.
            if count and all(each.board_size is None for each in rejected):
                raise _unknown(f"{layout}; {rejected[0].detail}", f"(board, policy, value); {OWN_READER}")
            return pa.RecordBatch.from_pylist([], raw_schema(MIN_SIZE)), rejected
        if rejected:
            layout += f"; {len(rejected):,} of {count:,} rejected, such as {rejected[0].detail}"
        convention, positions = _read_as(records, self._stated, layout)
        self.board_size = records.planes.shape[2]
        passes, sums = int(np.count_nonzero(records.policies[:, -1])), records.policies.sum(axis=1)
        counts = {"passes": passes, "sums": int(np.count_nonzero(sums > 1.01))}
        # Winners are among the other keys: they are read if they agree with the values, or take their place.
        if unread := others - (not (np.isnan(records.results).all() or positions["winner"].null_count)):
            counts["arrays"] = unread
        self.header |= {"convention": convention, "counts": counts}
        return positions, rejected


def _unknown(found: str, expected: str) -> FormatError:
    return FormatError("not boards, policies and values", found=found, expected=expected)


def _read_pickle(path: AnyPath) -> tuple[Sequence[object], str, int]:
    """Return the items of a pickle, its layout in words, and the number of their other keys."""
    with GunzipFile(storage_of(path).open(), _LIMITS) as file:
        unpickler = Unpickler(PickleStream(file, _LIMITS))
        for _ in unpickler.run():
            pass
    # An empty dict or tuple is a file without records, as an empty list is.
    top: Any = unpickler.result or []
    layout = layout_of(top)
    if isinstance(top, dict) and len(top) <= _MAX_KEYS and (names := _named(tuple(top))):
        return _joined({name: _column(top[name]) for name in names}, layout), layout, len(top) - 3
    for _ in range(2):
        if isinstance(top, list) and all(isinstance(item, list) and not _row(item) for item in top):
            # A list or deque for each iteration or game. One record too many is enough for the error.
            top = list(islice(chain.from_iterable(top), _MAX_RECORDS + 1))
    if not isinstance(top, list) or (top and not any(map(_row, top))):
        raise _unknown(layout, _EXPECTED)
    _check_count(len(top), layout)
    kinds = {tuple(item) for item in top if isinstance(item, dict) and len(item) <= _MAX_KEYS}
    return top, layout, len({key for keys in kinds for key in set(keys).difference(_named(keys)[:3])})


def _is_column(header: ArrayHeader | str, other: ArrayHeader | str) -> bool:
    """Return whether an array has numbers, and as many rows as another."""
    if not (isinstance(header, ArrayHeader) and isinstance(other, ArrayHeader)):
        return False
    return header.dtype.kind in "biuf" and header.shape[:1] == other.shape[:1]


def _column(value: Any) -> Sequence[Any] | None:
    """Return the items of a list or an array of a pickle; None of another object."""
    if isinstance(value, PickledArray) and value.shape:
        # Without cells, any number of rows takes no bytes.
        return _plain(value, [0], _MAX_DEPTH) if value.payload else range(value.shape[0])
    return value if isinstance(value, (list, tuple)) else None


def _joined(columns: Mapping[str, Any], layout: str) -> list[Any]:
    """Return records whose boards, policies, values and, perhaps, winners are columns of these names.

    Raises:
        FormatError: "unknown-layout" or "limit-items".
    """
    counts = [-1 if column is None else len(column) for column in columns.values()]
    _check_count(max(counts), layout)
    first = counts[0]
    if first < 0 or counts[:3] != [first] * 3:
        raise _unknown(layout, "as many boards as policies and values")
    if counts[3:] == [first]:
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return [*zip(*[*columns.values()][:3], strict=True)]


def _check_count(count: int, layout: str) -> None:
    if count > _MAX_RECORDS:
        raise FormatError("too many records", Reason.LIMIT_ITEMS, layout, f"at most {_MAX_RECORDS:,}")


def _row(item: object) -> Sequence[Any] | None:
    """Return board, policy, value and, if there is one, winner of a record; None if an item is no record."""
    if isinstance(item, dict) and len(item) <= _MAX_KEYS:
        return [item[name] for name in _named(tuple(item))] or None
    if not isinstance(item, (tuple, list)) or len(item) != 3:
        return None
    # A list of three may also be an iteration of training that has three records.
    is_record = isinstance(item, tuple) or isinstance(item[0], PickledArray) or is_number(item[2])
    return item if is_record else None


@lru_cache(maxsize=64)
def _named(keys: tuple[object, ...]) -> tuple[Any, ...]:
    """Return the keys of board, policy, value and, if there is one, winner; none if they are not plain."""
    names = [key for key in keys if isinstance(key, str)]
    *groups, winners = ([name for name in names if name.lower() in group] for group in _NAMES)
    groups += [winners] if winners and groups[2] else []
    groups[2] = groups[2] or winners
    return tuple(name for (name,) in groups) if all(len(group) == 1 for group in groups) else ()


def _read_archive(path: AnyPath) -> tuple[Sequence[object], str, int]:
    """Return the rows of an ``.npz`` file, its layout in words, and the number of its other arrays."""
    with NpzFile(path) as file:
        layout = f"arrays {', '.join(f'{name} {header}' for name, header in file.headers.items())}"
        if not file.headers:
            return [], layout, 0
        names = _named(tuple(file.headers))
        if not names:
            raise _unknown(layout, _EXPECTED)
        # Winners that are no numbers, or one for each game, are among the arrays that are not read.
        needed = [n for n in names if n in names[:3] or _is_column(file.headers[n], file.headers[names[0]])]
        others = len(file.headers) - 3
        file.headers = {name: file.headers[name] for name in needed}  # the others may be anything
        file.select(needed, _ARCHIVE_LIMITS)
        _check_count(file.rows, layout)
        blocks = list(file.blocks(BATCH_ROWS))
    return [record for block in blocks for record in _joined(block, layout)], layout, others


# Records


_Row = tuple[int, Array, Array, float, float]
"""Number of a record, its planes, policy, value and winner."""


def _check_records(
    items: Sequence[Any], wanted_size: int | None, is_stated: bool
) -> tuple[_Records | None, list[Rejection]]:
    """Return the valid records, None if there are none, and why the others are rejected.

    Args:
        items: The records.
        wanted_size: Board size of the records to keep. None: that of the first valid one.
        is_stated: Whether the convention is stated, so that values other than results are valid.

    Raises:
        FormatError: "limit-items": they have too many cells.
    """
    rejected: list[Rejection] = []
    rows: list[_Row] = []
    n = wanted_size
    for number, item in enumerate(items):
        size = None
        if n and len(items) * n * n > _MAX_CELLS:
            reason, limit = f"{len(items):,} records of {n * n} cells", f"at most {_MAX_CELLS:,} cells"
            raise FormatError("too large records", Reason.LIMIT_ITEMS, reason, limit)
        try:
            row = _row(item)
            if row is None:
                raise FormatError("no record", Reason.EXAMPLE_LAYOUT, _shown(item), "board, policy, value")
            planes = _planes(row[0])
            edge = planes.shape[1]
            if edge != (n or edge):
                size = edge
                raise FormatError("another board size", Reason.BOARD_SIZE, size, n)
            policy, value = _policy(row[1], edge), _value(row[2], is_stated)
            rows.append((number, planes, policy, value, _winner_of(*row[3:])))
            n = edge  # only now: a record that is rejected does not decide the size of the others
        except FormatError as error:
            rejected.append(Rejection(number, error.code, f"record {number}: {error}", size))
    found = {row[3] for row in rows}
    # A loss is -1 in some files and 0 in others; one negative value shows which.
    low = -1 if min(found, default=0) < 0 else 0
    if low < 0 and found <= {-1, 0, 1}:  # Hex has no draws, so 0 is a game without a result
        detail = "a value of 0 in a file whose values are 1 and -1"
        drawn = [row[0] for row in rows if row[3] == 0]
        rejected += [Rejection(n, Reason.VALUE_RANGE, f"record {n}: {detail}") for n in drawn]
        rows = [row for row in rows if row[3] != 0]
    return _Records(rows, low) if rows else None, sorted(rejected, key=lambda each: each.record)


def _numbers(value: object, name: str, code: Reason) -> Array:
    """Return the numbers of an array, a scalar, or lists of numbers.

    Raises:
        FormatError: It is another object.
    """
    try:
        array = np.squeeze(np.asarray(_plain(value, [_MAX_LISTED], _MAX_DEPTH)))
    except ValueError:  # lists of different lengths, or too large
        array = np.empty(0, object)
    if array.dtype.kind not in "biuf":
        raise FormatError(f"no numbers as {name}", code, _shown(value))
    return array


def _shown(value: object) -> str:
    """Return a short layout of a value, as each of many records may be rejected for it."""
    return shortened(layout_of(value, 2))


def _plain(value: Any, left: list[int], depth: int) -> Any:
    """Return a value with its placeholders of NumPy objects replaced.

    Args:
        value: The value.
        left: One number, from which the numbers and lists within lists are subtracted. A list may contain the
            same list many times, so that a small pickle has any number of them.
        depth: Number of lists that may contain each other.

    Raises:
        ValueError: There are too many numbers or lists, or they are nested too deeply.
    """
    if isinstance(value, PickledArray):
        array = np.frombuffer(value.payload, value.dtype)
        left[0] -= array.size * (depth < _MAX_DEPTH)  # an array that is in no list is not copied
    elif isinstance(value, (list, tuple)):
        left[0] -= len(value)
    else:
        return plain(value)
    if left[0] < 0 or not depth:
        raise ValueError("too many numbers or lists, or nested too deeply")
    if isinstance(value, PickledArray):
        return array.reshape(value.shape, order="F" if value.fortran else "C")
    return [_plain(each, left, depth - 1) for each in value]


def _planes(board: object) -> Array:
    """Return the cells of both kinds, and the empty ones if they have a plane, of a board (3, n, n) bool.

    Raises:
        FormatError: The board is not valid.
    """
    cells = _numbers(board, "board", Reason.BOARD_TYPE)
    if cells.ndim == 3 and cells.shape[0] == cells.shape[1] != cells.shape[2]:
        cells = np.moveaxis(cells, 2, 0)  # the planes are the last axis
    n = math.isqrt(cells.size) if cells.ndim == 1 else (cells.shape or (0,))[-1]
    shapes = ((n * n,), (n, n), (2, n, n), (3, n, n))
    if cells.shape not in shapes or not MIN_SIZE <= n <= MAX_SIZE:
        raise FormatError("not a board", Reason.BOARD_SHAPE, cells.shape, "(n, n), (2, n, n) or (3, n, n)")
    planes = cells.reshape(-1, n, n)
    second = planes[1] == 1 if len(planes) > 1 else planes[0] == (2 if (planes[0] == 2).any() else -1)
    stones = np.array([planes[0] == 1, second])
    occupied = stones[0] | stones[1]
    if np.count_nonzero(stones) != np.count_nonzero(occupied):
        raise FormatError("a cell is in both planes", Reason.BOARD_OVERLAP)
    third = planes[2:]  # the player to move, or the empty cells, both of which the stones show
    has_empty = len(third) > 0 and bool((third == ~occupied).all())
    is_known = has_empty or not len(third) or (third == third[0, 0, 0]).all()
    if not is_known or np.count_nonzero(planes[:2]) != np.count_nonzero(occupied):
        reason = "a cell is neither 1 nor 0, nor -1 or 2 on a board without planes"
        raise FormatError(reason, Reason.BOARD_CELLS)
    return np.array([*stones, ~occupied & has_empty])


def _policy(policy: object, n: int) -> Array:
    """Return the numbers of a policy, (n · n + 1,): the last one is for a pass. Those of None are 0."""
    if policy is None:  # of the board after the last move
        return np.zeros(n * n + 1, np.float32)
    numbers = _numbers(policy, "policy", Reason.POLICY_TYPE)
    if numbers.shape not in ((n * n,), (n * n + 1,), (n, n)):
        raise FormatError("not a policy", Reason.POLICY_SHAPE, numbers.shape, (n * n,))
    single = np.zeros(n * n + 1, np.float32)
    with np.errstate(over="ignore"):  # numbers beyond float32 become infinite, and are rejected as such
        single[: numbers.size] = numbers.reshape(-1)
    if not (np.isfinite(single) & (single >= 0)).all():
        raise FormatError("a number of the policy is negative or not finite", Reason.POLICY_VALUES)
    return single


def _value(value: object, is_stated: bool) -> float:
    numbers = _numbers(value, "value", Reason.VALUE_TYPE)
    number = float(numbers.item()) if numbers.size == 1 else np.nan
    if not (-1 <= number <= 1 if is_stated else number in (-1, 0, 1)):
        expected = "the result of the game, 1 or -1, or 1 or 0; from -1 to 1 with --alphazero-convention"
        raise FormatError("not a value", Reason.VALUE_RANGE, number, expected)
    return number


def _winner_of(winner: object = None) -> float:
    """Return the winner as a number; NaN if it is none."""
    try:
        numbers = _numbers(winner, "winner", Reason.WINNER_VALUE)
    except FormatError:  # a text, or None
        return np.nan
    return float(numbers.item()) if numbers.size == 1 else np.nan


# Conventions


def _read_as(records: _Records, stated: str | None, layout: str) -> tuple[str, pa.RecordBatch]:
    """Return the convention of the records and their positions.

    Raises:
        FormatError: "unknown-layout".
    """
    # The first player has as many stones as the second, or one more after its moves.
    ahead = np.subtract(*np.count_nonzero(records.planes, axis=(2, 3)).T)
    signed = {name: np.where(player == RED, -ahead, ahead) for name, player in records.players.items()}
    owners = [name for name in _PLAYERS if (signed[name] == records.stones % 2).all()]
    # Values of a search name no winner with which a convention could be compared.
    are_results = bool(np.isin(records.shares, (0, 1)).all())
    agreeing = [
        f"{owner}/{edges}/{view}"
        for owner, edges in (product(owners, _EDGES) if are_results else ())
        for view in _agreeing_views(records, owner, edges, records.shares)
    ]
    convention = stated or (agreeing[0] if len(agreeing) == 1 else "")
    # Without whole games, a stated convention holds if the numbers of stones fit it, or fit none at all,
    # since they then show nothing.
    is_possible = not agreeing and convention.partition("/")[0] in (owners or _PLAYERS)
    if convention in agreeing or is_possible:
        winners = _winners(records, convention, are_results=are_results)
        if winners is None:
            reason, expected = "the winners contradict the values", "the same results, or no winners"
            raise FormatError(reason, found=layout, expected=expected)
        return convention, _positions(records, convention, winners, is_whole=bool(agreeing))
    names = f": {', '.join(agreeing[:4])}" if agreeing else ""
    found = f"{len(agreeing)} conventions agree with the rules of Hex{names}"
    if not agreeing and owners:
        found += f", but the numbers of stones agree with {', '.join(owners)} as the first part"
    found += f"; {stated} is stated" if stated else ""
    reason = "the file does not show whose stones, edges and values it contains"
    raise FormatError(reason, found=f"{layout}; {found}", expected=_STATED)


def _winners(records: _Records, convention: str, *, are_results: bool) -> Array | None:
    """Return the winner of each record, (k,), NaN where it is unknown; None if winners contradict values.

    Args:
        records: The records.
        convention: Their convention.
        are_results: Whether all values are results of games, not of a search.
    """
    owner, edges, view = convention.split("/")
    if are_results:
        red, given = records.red(view, records.shares), ~np.isnan(records.results)
        stated = [records.red(each, records.results) for each in _PLAYERS]
        return red if any((red == each)[given].all() for each in stated) else None
    # Nothing but chains shows whose winners these are.
    views = _agreeing_views(records, owner, edges, records.results)
    found = [records.red(each, records.results) for each in views]
    is_known = bool(found) and all((each == found[0]).all() for each in found)
    return found[0] if is_known else np.full(len(records.results), np.nan)


def _agreeing_views(records: _Records, owner: str, edges: str, shares: Array) -> list[str]:
    """Return the last parts of conventions with which all records are whole games by the rules of Hex.

    Args:
        records: The records.
        owner: Whose stones are 1.
        edges: The edges.
        shares: Results of the games, (k,), for the player that the last part names.
    """
    planes, _, starts = records.boards(owner, edges)
    stones, gaps = records.stones, np.diff(records.number)
    # The first boards of a game may be missing only where a record was rejected.
    may_start = (stones == 0) | np.append([True], gaps > 1)
    # The first move is the same in several conventions, so it shows nothing.
    if (starts & ~may_start).any() or not (~starts[1:] & (stones[:-1] > 0)).any():
        return []
    # The end of the file or a rejected record may cut a game before its winner is decided.
    last = np.append(starts[1:], True)
    whole = np.flatnonzero(last & np.append(gaps == 1, False))
    ends = whole if len(whole) else np.flatnonzero(last)
    winners = np.array([_winner(planes[end], int(stones[end] % 2)) for end in ends])
    if (winners < 0).all() or (len(whole) and (winners < 0).any()):
        return []
    agreeing = []
    for view in _PLAYERS:
        red = records.red(view, shares)
        # All positions of a game have its result, and the result is the winner on its last board.
        is_constant = (red == red[starts][np.cumsum(starts) - 1]).all()
        if is_constant and ((red[ends] == winners) | (winners < 0)).all():
            agreeing.append(view)
    return agreeing


def _winner(planes: Array, player: int) -> int:
    """Return the winner on a board (2, n, n), or if the player to move wins by one move; otherwise -1."""
    winner = int(winner_of(planes[np.newaxis])[0])
    if winner >= 0:
        return -1 if winner == player else winner
    # A file may lack the boards after the winning moves, so each empty cell is tried.
    cells = np.argwhere(~planes.any(axis=0))
    moved = np.repeat(planes[np.newaxis], len(cells), axis=0)
    moved[np.arange(len(cells)), player, cells[:, 0], cells[:, 1]] = True
    return player if (winner_of(moved) == player).any() else -1


def _positions(records: _Records, convention: str, winners: Array, *, is_whole: bool) -> pa.RecordBatch:
    """Return the positions, blue to move first and connecting top and bottom, as ``raw_schema(n)``.

    Args:
        records: The records.
        convention: Their convention.
        winners: The winner of each, NaN where it is unknown, (k,).
        is_whole: Whether they are whole games. Otherwise only positions that follow each other from the empty
            board, with one result, are a game.
    """
    owner, edges, view = convention.split("/")
    planes, turned, starts = records.boards(owner, edges)
    _check_order(records, planes)
    stones, n, are_known = records.stones, planes.shape[2], not np.isnan(winners).any()
    if are_known:
        # Positions with different results are of different games, even if one move lies between their boards.
        starts[1:] |= winners[1:] != winners[:-1]
    game = np.cumsum(starts) - 1
    is_game = is_whole | ((stones[starts] == 0) & (np.bincount(game) > 1))[game]
    cells = records.policies[:, : n * n].reshape(-1, n, n)
    cells[turned] = cells[turned].swapaxes(1, 2)
    policies = cells.reshape(-1, n * n)
    has_policy = np.count_nonzero(policies, axis=1) > 0
    # In parts, as the indices of the cells that are not 0 take four times the memory of the policies.
    numbers = np.flatnonzero(has_policy)
    parts = [numbers[start : start + BATCH_ROWS] for start in range(0, len(numbers), BATCH_ROWS)]
    sparse = SparsePolicies.join([SparsePolicies.from_dense(policies[part]) for part in parts])
    columns: dict[str, Any] = {
        "record": records.number,
        "policy": sparse.to_arrow(has_policy),
        "value": records.red(view, records.shares),
        "player_to_move": stones % 2,
        "line_idx": pa.array(game + 1, mask=~is_game),
        "position_in_game": stones,
        "total_positions": pa.array(stones[np.append(starts[1:], True)][game] + 1, mask=~is_game),
        "winner": pa.array(winners) if are_known else None,
    }
    return raw_batch(n, (), pack_boards(planes), columns)


def _check_order(records: _Records, planes: Array) -> None:
    """Check that the policies have their cells in the order of the boards.

    Args:
        records: The records.
        planes: Their boards in the store, (k, 2, n, n).

    Raises:
        FormatError: "unknown-layout": policies are on occupied cells, and in another order on none.
    """
    own = records.planes[:, 0] | records.planes[:, 1]
    stored = planes[:, 0] | planes[:, 1]
    positive = records.policies > 0
    cells = positive[:, :-1]

    def faults(numbers: Array, occupied: Array) -> int:
        return int((numbers.reshape(occupied.shape) & occupied).any(axis=(1, 2)).sum())

    # A few may be there by chance, and none in another order.
    if faults(cells, own) < _MIN_FAULTS:
        return
    # Columns first, or not transposed where the boards are; or the number of a pass is the first one.
    if not all(faults(cells, each) for each in (own.swapaxes(1, 2), stored, stored.swapaxes(1, 2))):
        order = "rows and columns exchanged"
    elif positive[:, -1].any() and not faults(positive[:, 1:], own):
        order = "the first number as that of a pass"
    else:
        return
    found = f"probabilities on occupied cells, but none with {order}"
    raise FormatError("policies in another order than boards", found=found, expected=_ORDER)


def _is_alphazero(head: bytes, _name: str) -> bool:
    """Return whether a file is a pickle of a list, or a zip archive of arrays or of nothing."""
    if head.startswith(LOCAL_HEADER):  # it states the length of the name that follows its 30 bytes
        return head[30 : 30 + int.from_bytes(head[26:28], "little")].endswith(b".npy")
    return head.startswith(_EMPTY_ARCHIVE) or _PICKLE.match(head) is not None


FORMAT: Final = SourceFormat(
    "alphazero",
    ("*.examples",),
    _is_alphazero,
    AlphaZeroReader,
    "AlphaZero data",
    options=("alphazero_convention",),
)
