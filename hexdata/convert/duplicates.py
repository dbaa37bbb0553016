"""The search for duplicate games: equal hashes, the first game of each hash, and the kind of duplicate.

The games are divided by ranges of their hashes, so that the memory does not depend on their number.

1. ``write_runs`` writes the games of some sources, sorted by hash, to temporary files, the runs. Of the games
   of a run with equal hashes it lists the first one. ``write_stored_runs`` does the same for those games of
   the store that are no duplicates, as far as their hashes may be those of new games.
2. ``find_first_games`` reads one range of hashes from all runs and finds the first game of each hash.
3. ``write_duplicates`` reads these for the games of some sources, and writes the table ``duplicates`` into
   the spool of each source.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Final, NamedTuple, TypeVar
from zlib import crc32

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hexdata.board import symmetry_table
from hexdata.convert.spool import Spool, write_arrow
from hexdata.errors import StoreError
from hexdata.games.convention import Convention
from hexdata.games.find import binary_matrix, column
from hexdata.games.findings import Flag, count_flags, flags_of
from hexdata.games.labels import winners_of
from hexdata.progress import SILENT, Progress
from hexdata.storage import AnyPath, storage_of
from hexdata.store.arrow_memory import release_memory
from hexdata.store.files import write_bytes
from hexdata.store.originals import WINNERS
from hexdata.store.parquet import open_parquet

__all__ = [
    "DUPLICATES",
    "FlagCounts",
    "NewGames",
    "SearchLimits",
    "StoredGames",
    "find_duplicates",
    "sorted_counts",
]

Array = npt.NDArray[Any]
Result = TypeVar("Result")
RunTasks = Callable[[Callable[..., Any], list[tuple[Any, ...]]], Iterator[tuple[int, Any]]]
"""Runs a function once per tuple of arguments; yields the index and the result of each."""

DUPLICATES: Final = pa.schema(
    [pa.field("duplicate_of", pa.int64()), pa.field("flags", pa.uint32(), nullable=False)]
)
"""The table ``duplicates`` of a spool, one row per game: ``game_id`` of the first game with the same hash,
null where the game is itself the first; and bits of ``findings.Flag``."""

_COLUMNS: Final = ("game_hash", "moves", "first_player", "winner")
"""The columns of games that are compared."""
_FRAGMENT: Final = 255
_UNKNOWN: Final = 255

_LEADER: Final = np.dtype(
    [("high", "<u8"), ("low", "<u8"), ("row", "<u4"), ("frame", "u1"), ("winner", "u1")]
)
"""The first game of each hash in a run: the hash as two numbers, and the row relative to the run's first
game."""
_COPY: Final = np.dtype([("leader", "<u4"), ("frame", "u1"), ("winner", "u1")])
"""A game of a run: the index of the leader with the same hash."""
_FIRST: Final = np.dtype([("game", "<i8"), ("frame", "u1"), ("winner", "u1")])
"""The first of all games with the hash of a leader."""

_GAMES_IN_A_WORKER: Final = 1 << 20
"""Maximum number of games of a run, and of a range of hashes: a task needs about 100 MB for them."""
_GAMES_IN_ONE_PROCESS: Final = 1 << 17
"""The same in the process of the command, which needs about 15 MB for them."""
_MANY_GAMES: Final = 1 << 22
"""Fewer games are searched in the process of the command."""
_STORED_PER_NEW: Final = 4
"""Stored games that take as long as a new one."""
_STORED_GAMES: Final = 1 << 22
"""Number of stored games whose hashes a task reads."""
_MAX_BUCKETS: Final = 1 << 12
_MAX_FILTER: Final = 1 << 25


class NewGames(NamedTuple):
    """The games of one source of this run."""

    spool: Spool
    """Its tables ``games`` and ``findings`` contain the games; ``duplicates`` is written."""
    convention: Convention
    first_game: int
    """``game_id`` of the first of them; the others follow."""
    games: int


class StoredGames(NamedTuple):
    """A file of the table games of the store, with rows in ascending ``game_id``."""

    path: AnyPath
    first_game: int
    games: int


class FlagCounts(NamedTuple):
    """The number of duplicate games of a source, and of games with each flag, by code."""

    duplicates: int = 0
    flags: Mapping[str, int] = {}


@dataclass(frozen=True)
class SearchLimits:
    """The division of a search, which does not change its results."""

    run_games: int
    """Maximum number of games of a run."""
    range_games: int
    """Maximum number of games of a range of hashes, unless it is a single bucket."""
    buckets: int
    """Number of equal ranges of hashes for which runs have an index; a power of two."""

    in_one_process: bool
    """Run the tasks in the process of the command, because to start others takes longer."""

    @classmethod
    def of(cls, new: int, stored: int) -> SearchLimits:
        """Return the limits for a number of new and of stored games."""
        few = new + stored // _STORED_PER_NEW < _MANY_GAMES
        run_games = _GAMES_IN_ONE_PROCESS if few else _GAMES_IN_A_WORKER
        buckets = 1 << ((new + stored) // (_GAMES_IN_ONE_PROCESS // 2)).bit_length()
        return cls(run_games, run_games, min(buckets, _MAX_BUCKETS), few)


def find_duplicates(
    new: Sequence[NewGames],
    stored: Sequence[StoredGames],
    board_size: int,
    folder: AnyPath,
    run_tasks: RunTasks,
    progress: Progress = SILENT,
    limits: SearchLimits | None = None,
) -> list[FlagCounts]:
    """Find the games with equal hashes, and write the table ``duplicates`` into the spool of each source.

    Args:
        new: The games of the sources of this run, in ascending ``first_game`` and without gaps.
        stored: The files of the store's table games, in ascending ``first_game``, which is below all of
            ``new``.
        board_size: N.
        folder: Folder for temporary files, which is removed at the end.
        run_tasks: Runs the tasks, if they are many.
        progress: Receives the progress. Default: ignores it.
        limits: Division of the search. Default None: according to the number of games.

    Returns:
        The counts of each source, in the order of ``new``.

    Raises:
        StoreError: A temporary file, or a file of the store, is missing or damaged.
    """
    total = sum(source.games for source in new)
    known = sum(file.games for file in stored)
    limits = limits or SearchLimits.of(total, known)
    if limits.in_one_process:
        run_tasks = _run_here
    progress.begin("find duplicates", total, "games")
    groups = _group(new, limits.run_games)
    common = (board_size, folder, limits)
    tasks: list[tuple[Any, ...]]
    tasks = [(group, number, *common) for number, group in enumerate(groups)]
    runs = _in_order(run_tasks(write_runs, tasks), len(tasks))
    found = sum(run.games for group in runs for run in group)
    if found != total:
        raise StoreError(
            "games are missing from the temporary files of some sources",
            path=new[0].spool.folder.parent,
            found=f"{found:,}",
            expected=f"{total:,}",
            hint="Remove the folder and run the command again.",
        )
    old: list[list[_Run]] = []
    if stored and total:
        path = folder / "filter.bin"
        checksum = _write_filter(path, [run for group in runs for run in group], total)
        tasks = [
            (files, number, path, checksum, *common)
            for number, files in enumerate(_group(stored, _STORED_GAMES))
        ]
        old = _in_order(run_tasks(write_stored_runs, tasks), len(tasks))
    old_runs, new_runs = ([run for group in groups for run in group] for groups in (old, runs))
    ranges = _ranges([*old_runs, *new_runs], limits)
    tasks = [
        ([run.piece(*buckets) for run in old_runs], [run.piece(*buckets) for run in new_runs], path)
        for buckets, path in ((buckets, _range_path(folder, buckets)) for buckets in ranges)
    ]
    checksums = _in_order(run_tasks(find_first_games, tasks), len(tasks))
    answers = _answers(new_runs, ranges, checksums, folder)
    tasks = [(group, [(run, next(answers)) for run in own]) for group, own in zip(groups, runs, strict=True)]
    counts: list[list[FlagCounts]] = [[] for _ in tasks]
    for index, own_counts in run_tasks(write_duplicates, tasks):
        counts[index] = own_counts
        progress.advance(sum(source.games for source in groups[index]))
    storage_of(folder).remove_tree()
    return [count for group in counts for count in group]


_Games = TypeVar("_Games", NewGames, StoredGames)


def _group(games: Sequence[_Games], most: int) -> list[list[_Games]]:
    """Divide sources or files into groups of at most ``most`` games, unless one alone has more."""
    groups: list[list[_Games]] = []
    count = 0
    for each in games:
        if not groups or count + each.games > most:
            groups.append([])
            count = 0
        groups[-1].append(each)
        count += each.games
    return groups


def _run_here(function: Callable[..., Any], tasks: list[tuple[Any, ...]]) -> Iterator[tuple[int, Any]]:
    for index, task in enumerate(tasks):
        yield index, function(*task)


def _in_order(results: Iterator[tuple[int, Result]], count: int) -> list[Result]:
    found = dict(results)
    return [found[index] for index in range(count)]


# Identities


@dataclass(frozen=True)
class GameIdentities:
    """The compared values of G games, 18 bytes per game."""

    hashes: npt.NDArray[np.uint8]
    """``game_hash``, (G, 16)."""
    frame: npt.NDArray[np.uint8]
    """Index of the symmetry image that each game is, (G,): 2 · first player + rotated. Games with equal hash
    and frame have the same moves. 255 where moves are missing."""
    winner: npt.NDArray[np.uint8]
    """Winner in the canonical image, (G,), so that mirror images of a game agree. 255 if unknown."""

    @classmethod
    def of(cls, games: pa.RecordBatch, winner: Array, board_size: int) -> GameIdentities:
        """Return the identities of games.

        Args:
            games: Batch with ``game_hash``, ``moves`` and ``first_player``.
            winner: Winner of each game, int64 (N,): 0 blue, 1 red, -1 unknown.
            board_size: N.
        """
        first = column(games, "first_player", 0)
        moves = games.column("moves")
        whole = moves.is_valid().to_numpy(zero_copy_only=False)
        frame = np.full(games.num_rows, _FRAGMENT, np.uint8)
        frame[whole] = 2 * first[whole] + _is_rotated(moves.drop_null(), first[whole], board_size)
        canonical = np.where(winner < 0, _UNKNOWN, winner ^ first)
        return cls(binary_matrix(games.column("game_hash")), frame, canonical.astype(np.uint8))

    @classmethod
    def concatenate(cls, parts: Sequence[GameIdentities]) -> GameIdentities:
        """Return the concatenation of ``parts``, at least one."""
        return cls(*(np.concatenate([getattr(p, name) for p in parts]) for name in _IDENTITY_FIELDS))

    def __len__(self) -> int:
        return len(self.hashes)


_IDENTITY_FIELDS: Final = ("hashes", "frame", "winner")


def _is_rotated(moves: pa.ListArray, first: Array, board_size: int) -> npt.NDArray[np.bool_]:
    """Return which games differ from their canonical image (``board.canonical_moves``) by a rotation.

    Args:
        moves: The moves of each game, (G,).
        first: The first player of each game, (G,).
        board_size: N.
    """
    table = symmetry_table(board_size).astype(np.int64)
    starts = moves.offsets.to_numpy()
    cells = moves.values.to_numpy()
    off_centre = np.flatnonzero(
        table[0, cells] != table[1, cells]
    )  # all except the centre, which maps to itself
    index = np.searchsorted(off_centre, starts[:-1])
    asymmetric = index < len(off_centre)
    asymmetric[asymmetric] = off_centre[index[asymmetric]] < starts[1:][asymmetric]
    cell = cells[off_centre[index[asymmetric]]]
    one, other = np.where(first[asymmetric] == 1, table[2:, cell], table[:2, cell])
    rotated = np.zeros(len(first), dtype=bool)
    rotated[asymmetric] = other < one
    return rotated


# Runs


@dataclass(frozen=True)
class _Run:
    """A temporary file: leaders sorted by hash, then the games of the run in ascending id."""

    path: AnyPath
    first_game: int
    games: int
    """Number of games in the file; 0 for a run of stored games, which has only leaders."""
    bounds: npt.NDArray[np.int64]
    """Index of the first leader of each bucket of hashes, and the number of leaders, (buckets + 1,)."""
    checksums: npt.NDArray[np.uint32]
    """Checksum of the leaders of each bucket, and of the games, (buckets + 1,)."""

    def piece(self, start: int, stop: int) -> _Piece:
        """Return the leaders of the buckets from ``start`` to ``stop``, exclusive."""
        bounds, checksums = self.bounds[start : stop + 1], self.checksums[start:stop]
        return _Piece(self.path, self.first_game, int(bounds[0]), np.diff(bounds), checksums)

    def copies(self) -> Array:
        """Read the games of the run, ``_COPY`` (G,)."""
        start = int(self.bounds[-1]) * _LEADER.itemsize
        return _read(self.path, start, _COPY, [self.games], self.checksums[-1:])


class _Piece(NamedTuple):
    """Some of the leaders of a run."""

    path: AnyPath
    first_game: int
    start: int
    sizes: npt.NDArray[np.int64]
    checksums: npt.NDArray[np.uint32]

    def leaders(self) -> Array:
        """Read the leaders, ``_LEADER`` (N,)."""
        return _read(self.path, self.start * _LEADER.itemsize, _LEADER, self.sizes, self.checksums)


class _Answer(NamedTuple):
    """The result of one range of hashes for one run, in the order of its leaders."""

    path: AnyPath
    start: int
    size: int
    checksum: int

    def firsts(self) -> Array:
        """Read the first game of each leader, ``_FIRST`` (N,)."""
        return _read(self.path, self.start * _FIRST.itemsize, _FIRST, [self.size], [self.checksum])


def _read(path: AnyPath, start: int, dtype: Any, sizes: Iterable[int], checksums: Iterable[int]) -> Array:
    """Read records of a temporary file.

    Args:
        path: The file.
        start: Offset of the first record, in bytes.
        dtype: Type of a record.
        sizes: Number of records in each part that has a checksum.
        checksums: CRC-32 of each part.

    Raises:
        StoreError: The file is missing or damaged.
    """
    sizes = [int(size) * dtype.itemsize for size in sizes]
    try:
        content = memoryview(storage_of(path).read_range(start, start + sum(sizes)))
    except FileNotFoundError:
        content = memoryview(b"")
    stops = list(accumulate(sizes, initial=0))
    found = [crc32(content[low:high]) for low, high in pairwise(stops)]
    if len(content) != stops[-1] or found != [int(checksum) for checksum in checksums]:
        raise StoreError(
            "a temporary file of an unfinished conversion is missing or damaged",
            path=path,
            hint="Run the command again; it writes the file again.",
        )
    return np.frombuffer(content, dtype)


def _sort(high: Array, low: Array) -> tuple[Array, npt.NDArray[np.bool_]]:
    """Sort hashes; equal ones keep their order.

    Args:
        high: One half of each hash, uint64 (N,).
        low: The other half, uint64 (N,).

    Returns:
        The indices in ascending hash, int64 (N,); and which of them have the hash of the one before, (N,).
    """
    order = np.lexsort((low, high))
    same = np.zeros(len(order), dtype=bool)
    for number, half in enumerate((high, low)):
        values = half[order]
        equal = values[1:] == values[:-1]
        same[1:] = equal if number == 0 else same[1:] & equal
    return order, same


def _write_run(
    path: AnyPath, first_game: int, games: GameIdentities, buckets: int, rows: Array | None = None
) -> _Run:
    """Write a run.

    Args:
        path: The file.
        first_game: ``game_id`` of row 0.
        games: The games, in ascending id.
        buckets: Number of ranges of hashes that get a checksum.
        rows: Row of each game, for games of the store. Default None: the games are consecutive.
    """
    halves = np.ascontiguousarray(games.hashes).view("<u8")
    order, same = _sort(halves[:, 0], halves[:, 1])
    firsts = order[~same]
    leaders = np.empty(len(firsts), _LEADER)
    leaders["high"], leaders["low"] = halves[firsts].T
    leaders["row"] = firsts if rows is None else rows[firsts]
    leaders["frame"], leaders["winner"] = games.frame[firsts], games.winner[firsts]
    bounds = np.searchsorted(leaders["high"], _bucket_starts(buckets))
    bounds = np.append(bounds, len(leaders))
    copies = np.empty(len(games) if rows is None else 0, _COPY)
    if rows is None:
        copies["leader"][order] = np.cumsum(~same) - 1
        copies["frame"], copies["winner"] = games.frame, games.winner
    content = leaders.tobytes() + copies.tobytes()
    stops = [*(bounds * _LEADER.itemsize).tolist(), len(content)]
    view = memoryview(content)
    checksums = [crc32(view[low:high]) for low, high in pairwise(stops)]
    write_bytes(path, content)
    return _Run(path, first_game, len(copies), bounds, np.array(checksums, np.uint32))


def _bucket_starts(buckets: int) -> npt.NDArray[np.uint64]:
    """Return the smallest value of ``high`` in each bucket, (buckets,)."""
    return np.array([(number << 64) // buckets for number in range(buckets)], np.uint64)


def write_runs(
    sources: Sequence[NewGames], number: int, board_size: int, folder: AnyPath, limits: SearchLimits
) -> list[_Run]:
    """Write the runs of some sources; return them in ascending id.

    Args:
        sources: The sources.
        number: Number of this task, for the names of the files.
        board_size: N.
        folder: Folder of the runs.
        limits: Division of the search.
    """
    runs: list[_Run] = []
    pending: list[GameIdentities] = []
    first_game = sources[0].first_game

    def flush() -> None:
        path = folder / f"run-{number:06d}-{len(runs):06d}.bin"
        start = first_game + sum(run.games for run in runs)
        runs.append(_write_run(path, start, GameIdentities.concatenate(pending), limits.buckets))
        pending.clear()

    for source in sources:
        for batch in source.spool.batches("games", [*_COLUMNS, "value"]):
            for start in range(0, batch.num_rows, limits.run_games):
                part = batch.slice(start, limits.run_games)
                if pending and sum(map(len, pending)) + part.num_rows > limits.run_games:
                    flush()
                pending.append(GameIdentities.of(part, winners_of(part, source.convention), board_size))
    if pending:
        flush()
    release_memory()
    return runs


# Games of the store


def _write_filter(path: AnyPath, runs: Sequence[_Run], games: int) -> int:
    """Write which beginnings of hashes occur in runs: one byte per beginning. Return the checksum."""
    size = min(1 << (16 * games).bit_length(), _MAX_FILTER)
    occurs = np.zeros(size, np.uint8)
    for run in runs:
        occurs[_beginnings(run.piece(0, len(run.bounds) - 1).leaders()["high"], size)] = 1
    content = occurs.tobytes()
    write_bytes(path, content)
    return crc32(content)


def _beginnings(high: Array, size: int) -> Array:
    """Return the first bits of hashes as indices below ``size``, a power of two."""
    return high >> np.uint64(65 - size.bit_length())


def write_stored_runs(
    files: Sequence[StoredGames],
    number: int,
    filter_path: AnyPath,
    checksum: int,
    board_size: int,
    folder: AnyPath,
    limits: SearchLimits,
) -> list[_Run]:
    """Write the runs of some files of the store, with the games that may be the first ones of new games.

    These are no duplicates, and their hashes may be those of new games. Of other games, at most the hash is
    read.

    Args:
        files: The files.
        number: Number of this task, for the names of the runs.
        filter_path: File of ``_write_filter``.
        checksum: Its checksum.
        board_size: N.
        folder: Folder of the runs.
        limits: Division of the search.
    """
    size = storage_of(filter_path).size() or 0
    occurs = _read(filter_path, 0, np.dtype(bool), [size], [checksum])
    runs: list[_Run] = []
    pending: list[GameIdentities] = []
    rows: list[Array] = []

    def flush() -> None:
        path = folder / f"stored-{number:06d}-{len(runs):06d}.bin"
        found = GameIdentities.concatenate(pending)
        runs.append(_write_run(path, files[0].first_game, found, limits.buckets, np.concatenate(rows)))
        pending.clear()
        rows.clear()

    for file in files:
        row = file.first_game - files[0].first_game
        for chosen, batch in _candidates(file.path, occurs):
            if pending and sum(map(len, pending)) + batch.num_rows > limits.run_games:
                flush()
            pending.append(GameIdentities.of(batch, _winners(batch), board_size))
            rows.append(row + chosen)
    if pending:
        flush()
    release_memory()
    return runs


def _candidates(
    path: AnyPath, occurs: npt.NDArray[np.bool_]
) -> Iterator[tuple[npt.NDArray[np.int64], pa.RecordBatch]]:
    """Yield the first games of their hash in a file, as far as their hashes may occur.

    Args:
        path: The file.
        occurs: Which beginnings of hashes occur.

    Yields:
        The rows of the games in the file, and a batch of them with ``_COLUMNS``.
    """
    with open_parquet(path) as file:
        first = 0
        for group in range(file.num_row_groups):
            copies = file.read_row_group(group, columns=["duplicate_of"]).column(0)
            if copies.null_count:  # else none is the first game of its hash
                hashes = file.read_row_group(group, columns=["game_hash"]).combine_chunks().column(0)
                high = binary_matrix(hashes.chunk(0)).view("<u8")[:, 0]
                is_first = copies.is_null().to_numpy()
                chosen = np.flatnonzero(is_first & occurs[_beginnings(high, len(occurs))])
                if len(chosen):
                    table = file.read_row_group(group, columns=list(_COLUMNS)).take(pa.array(chosen))
                    yield first + chosen, table.combine_chunks().to_batches()[0]
            first += len(copies)


def _winners(games: pa.RecordBatch) -> npt.NDArray[np.int64]:
    """Return the winners of games of the store, (N,): 0 blue, 1 red, -1 unknown."""
    named = games.column("winner").dictionary_encode()
    winners = np.array([*map(WINNERS.index, named.dictionary.to_pylist()), -1])
    found: npt.NDArray[np.int64] = winners[named.indices.fill_null(-1).to_numpy(zero_copy_only=False)]
    return found


# Ranges of hashes


def _ranges(runs: Sequence[_Run], limits: SearchLimits) -> list[tuple[int, int]]:
    """Return the first and the last bucket (exclusive) of each range of hashes."""
    sizes = sum((np.diff(run.bounds) for run in runs), np.zeros(limits.buckets, np.int64))
    ranges: list[tuple[int, int]] = []
    start = count = 0
    for bucket, size in enumerate(sizes.tolist()):
        if count and count + size > limits.range_games:
            ranges.append((start, bucket))
            start, count = bucket, 0
        count += size
    return [*ranges, (start, limits.buckets)] if count else ranges


def _range_path(folder: AnyPath, buckets: tuple[int, int]) -> AnyPath:
    return folder / f"range-{buckets[0]:06d}.bin"


def find_first_games(stored: Sequence[_Piece], new: Sequence[_Piece], path: AnyPath) -> list[int]:
    """Find the first game of each hash in one range, and write it for each leader of ``new``.

    Args:
        stored: The leaders of the range in the runs of stored games, in ascending id.
        new: Those in the runs of new games, in ascending id.
        path: The file to write.

    Returns:
        The checksum of each piece of ``new`` in the file.
    """
    pieces = [*stored, *new]
    found = [piece.leaders() for piece in pieces]
    sizes = [len(leaders) for leaders in found]
    leaders = np.concatenate(found)
    del found
    order, same = _sort(leaders["high"], leaders["low"])
    # The first of equal hashes has the lowest id, since the pieces and their rows are in ascending id.
    first = order[np.maximum.accumulate(np.where(same, 0, np.arange(len(order))))]
    source = np.empty(len(order), np.int64)
    source[order] = first
    source = source[sum(sizes[: len(stored)]) :]
    firsts = np.empty(len(source), _FIRST)
    firsts["game"] = np.repeat([piece.first_game for piece in pieces], sizes)[source] + leaders["row"][source]
    firsts["frame"], firsts["winner"] = leaders["frame"][source], leaders["winner"][source]
    content = firsts.tobytes()
    write_bytes(path, content)
    stops = accumulate((size * _FIRST.itemsize for size in sizes[len(stored) :]), initial=0)
    view = memoryview(content)
    return [crc32(view[low:high]) for low, high in pairwise(stops)]


def _answers(
    runs: Sequence[_Run],
    ranges: Sequence[tuple[int, int]],
    checksums: Sequence[Sequence[int]],
    folder: AnyPath,
) -> Iterator[list[_Answer]]:
    """Yield the results of all ranges for each run."""
    done = [0] * len(ranges)
    for index, run in enumerate(runs):
        answers = []
        for number, (start, stop) in enumerate(ranges):
            size = int(run.bounds[stop] - run.bounds[start])
            path = _range_path(folder, ranges[number])
            answers.append(_Answer(path, done[number], size, checksums[number][index]))
            done[number] += size
        yield answers


# Results


def write_duplicates(
    sources: Sequence[NewGames], runs: Sequence[tuple[_Run, Sequence[_Answer]]]
) -> list[FlagCounts]:
    """Write the table ``duplicates`` of some sources; return the counts of each.

    Args:
        sources: The sources.
        runs: Their runs, each with the results of all ranges.
    """
    resolved = (table for run, answers in runs for table in [_resolve(run, answers)])
    pending = DUPLICATES.empty_table()
    counts = []
    for source in sources:
        own = _own_flags(source)
        done = duplicates = 0
        flags: Counter[str] = Counter()
        with write_arrow(source.spool.folder / "duplicates.arrow", DUPLICATES) as writer:
            while done < source.games:
                pending = pending if pending.num_rows else next(resolved)
                table, pending = pending[: source.games - done], pending[source.games - done :]
                bits = table["flags"].to_numpy() | own[done : done + table.num_rows]
                table = table.set_column(1, DUPLICATES.field(1), pa.array(bits))
                writer.write_table(table)
                done += table.num_rows
                duplicates += table.num_rows - table["duplicate_of"].null_count
                flags.update(count_flags([bits]))
        counts.append(FlagCounts(duplicates, sorted_counts(flags)))
    release_memory()
    return counts


def sorted_counts(counts: Mapping[str, int]) -> dict[str, int]:
    """Return the numbers of games with each flag in the order of ``count_flags``, without zeros."""
    return {flag.code: counts[flag.code] for flag in Flag if counts.get(flag.code)}


def _own_flags(source: NewGames) -> npt.NDArray[np.uint32]:
    """Return the flags of the games of a source, except those of duplicates, (G,)."""
    found = [batch.column("findings").to_numpy() for batch in source.spool.batches("findings")]
    return flags_of(np.concatenate([np.zeros(0, np.uint32), *found]), source.convention)


def _resolve(run: _Run, answers: Sequence[_Answer]) -> pa.Table:
    """Return the duplicates among the games of a run, with the schema ``DUPLICATES``."""
    copies = run.copies()
    first = np.concatenate([np.zeros(0, _FIRST), *(answer.firsts() for answer in answers)])[copies["leader"]]
    is_copy = first["game"] != run.first_game + np.arange(run.games)
    frame, winner = copies["frame"], copies["winner"]
    exact = frame == first["frame"]
    kinds = np.where(exact, int(Flag.DUPLICATE_EXACT), int(Flag.DUPLICATE_SYMMETRIC)).astype(np.uint32)
    kinds[frame == _FRAGMENT] = int(Flag.DUPLICATE_FRAGMENT)
    known = (frame != _FRAGMENT) & (winner != _UNKNOWN) & (first["winner"] != _UNKNOWN)
    kinds[known & (winner != first["winner"])] |= np.uint32(Flag.CONTRADICTORY_DUPLICATES)
    kinds[~is_copy] = 0
    columns = [pa.array(first["game"], mask=~is_copy), pa.array(kinds)]
    return pa.Table.from_arrays(columns, schema=DUPLICATES)
