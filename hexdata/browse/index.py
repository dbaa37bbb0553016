"""The index of a store, from which the page answers quickly: arrays in the cache folder, never in the store.

The folder of an index is named by the digest of the store's tables, so an index of other content is never
used. Each array is one ``.npy`` file that is mapped, not read.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hexdata.board import PASS, RED
from hexdata.browse.openings import DEPTH, END, UNKNOWN, Openings, write_openings
from hexdata.errors import StoreError
from hexdata.progress import Progress
from hexdata.retry import on_disk
from hexdata.schema import END_REASONS, SPLITS, SWAPS, table_schema
from hexdata.storage import cache_folder
from hexdata.store import Store
from hexdata.store.disk_space import translate_disk_full
from hexdata.store.files import digest_file
from hexdata.store.integrity import VERIFY_HINT, require_intact
from hexdata.store.originals import WINNERS
from hexdata.store.parquet import read_rows
from hexdata.system import release_pages
from hexdata.temporary import temporary_folder

__all__ = ["GAME", "NONE", "PROVENANCES", "StoreIndex", "index_folder", "open_index"]

Array = npt.NDArray[Any]

_VERSION: Final = 2
"""Version of the files of an index. An index of another version is not used."""
_META: Final = "index.json"
NONE: Final = -1
"""Value of a number that is unknown."""
PROVENANCES: Final = ("metadata", "recovered", "unknown")
_MOST_FLAGS: Final = 64
_OPENING: Final = 6
"""Number of first moves that a list of games shows."""
_SCATTERED_ROWS: Final = 16_000_000
"""Number of positions of scattered games that are listed together, in 18 bytes of memory each."""
_SORTED_GAMES: Final = 50_000
"""Number of games whose positions are sorted by ply together."""
GAME: Final = np.dtype(
    [
        ("source", "<i4"),
        ("moves", "<i4"),
        ("positions", "<i8"),
        ("first_row", "<i8"),
        ("duplicate_of", "<i8"),
        ("flags", "<u8"),
        ("winner", "i1"),
        ("split", "i1"),
        ("end_reason", "i1"),
        ("swap", "i1"),
        ("provenance", "i1"),
        ("first_player", "i1"),
        ("opening", "<u2", _OPENING),
    ]
)
"""One game. ``moves`` is their number. ``first_row`` is the first of its positions if their ids have no gap,
``NONE`` otherwise. Bit k of ``flags`` is the k-th flag of the store.
"""
_GAME_COLUMNS: Final = (
    *("game_id", "source_id", "winner", "end_reason", "swap", "positions", "first_player", "moves"),
    *("duplicate_of", "split", "provenance", "flags"),
)


@dataclass(frozen=True)
class StoreIndex:
    """The arrays of an index.

    Attributes:
        games: One row per game, of the type ``GAME``, ordered by id.
        flags: Names of the flags that occur in the store, in the order of their bits.
        flagged: For each flag, the ids of the games with it, ascending.
        duplicates: Ids of the games that duplicate an earlier game, ascending.
        scattered: Ids of the positions of games whose ids have gaps, sorted by game and ply; empty if there
            are none.
        scattered_games: The game of each of them.
        openings: The tree of openings.
        reasons: Number of rejected records by reason, most frequent first.
    """

    games: Array
    flags: tuple[str, ...]
    flagged: dict[str, Array]
    duplicates: Array
    scattered: Array
    scattered_games: Array
    openings: Openings
    reasons: dict[str, int] = field(default_factory=dict)

    def position_ids(self, game_id: int) -> Array:
        """Return the ids of the positions of a game."""
        game = self.games[game_id]
        if game["first_row"] != NONE:
            return np.arange(game["first_row"], game["first_row"] + game["positions"])
        start, stop = np.searchsorted(self.scattered_games, [game_id, game_id + 1])
        return np.asarray(self.scattered[start:stop])


def index_folder(store: Store) -> Path:
    """Return the folder of the index of a store with its present content."""
    content = f"{_VERSION} {store.manifest.digest('sources', 'games', 'positions', 'rejected')}"
    path = hashlib.sha256(os.fsencode(str(store.path.resolve()))).hexdigest()[:16]
    return cache_folder("browse") / path / hashlib.sha256(content.encode()).hexdigest()[:24]


def open_index(store: Store, progress: Progress) -> StoreIndex:
    """Open the index of a store; build it first if there is none for its present content, or it is damaged.

    Indexes of former contents of the store are removed.

    Raises:
        StoreError: A file of the store is missing or damaged.
        BudgetError: The disk of the cache folder is full.
    """
    folder = index_folder(store)
    if (meta := _read_meta(folder)) is None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with (
            translate_disk_full(folder, "Free disk space, or set HEXDATA_CACHE to another folder."),
            temporary_folder("index", cache_folder("temporary")) as made,
        ):
            require_intact(store, ("games", "positions", "rejected"), progress=progress)
            meta = _build(store, made / folder.name, progress)
            shutil.rmtree(folder, ignore_errors=True)
            try:
                (made / folder.name).rename(folder)
            except OSError:  # another process has built the same index
                if (meta := _read_meta(folder)) is None:
                    raise
        for other in folder.parent.iterdir():
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)
    return _open(folder, meta)


def _read_meta(folder: Path) -> dict[str, Any] | None:
    """Return the facts of an index, or None if it is incomplete or a byte of its files has changed.

    Its list of files is written last.
    """
    try:
        meta = json.loads(on_disk((folder / _META).read_bytes))
        content: dict[str, Any] = meta["content"]
        if meta["digest"] != _digest(content):
            return None
        whole = all(digest_file(folder / name)[1] == digest for name, digest in content["files"].items())
        return content if whole else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _open(folder: Path, meta: dict[str, Any]) -> StoreIndex:
    flags = tuple(meta["flags"])
    return StoreIndex(
        games=_map(folder / "games.npy"),
        flags=flags,
        flagged={flag: _map(folder / f"flag-{bit}.npy") for bit, flag in enumerate(flags)},
        duplicates=_map(folder / "duplicates.npy"),
        scattered=_map(folder / "scattered.npy"),
        scattered_games=_map(folder / "scattered-games.npy"),
        openings=Openings(_map(folder / "openings.npy"), meta["plies"], meta["board_size"]),
        reasons=meta["reasons"],
    )


def _map(path: Path) -> Array:
    """Return the array of a file, mapped unless it is empty."""
    try:
        array: Array = np.load(path, mmap_mode="r")
    except ValueError:
        array = np.load(path)
    return array


def _create(path: Path, dtype: npt.DTypeLike, rows: int) -> Array:
    """Create the file of an array and return the array, mapped for writing unless it is empty."""
    array: Array = np.empty(0, dtype)
    if rows:
        array = np.lib.format.open_memmap(path, "w+", dtype, (rows,))
    else:
        np.save(path, array)
    return array


# Building


def _build(store: Store, folder: Path, progress: Progress) -> dict[str, Any]:
    """Write the files of an index and return its facts."""
    folder.mkdir()
    games, flags, plies = _index_games(store, folder, progress)
    _index_positions(store, folder, games, progress)
    for bit in range(len(flags)):
        np.save(folder / f"flag-{bit}.npy", np.flatnonzero(games["flags"] & np.uint64(1 << bit)))
    np.save(folder / "duplicates.npy", np.flatnonzero(games["duplicate_of"] != NONE))
    size = store.manifest.board_size or 0
    starts = write_openings(folder / "openings.npy", games, plies, size, progress)
    del plies  # Windows removes no mapped file
    for file in folder.glob("ply-*.npy"):
        file.unlink()
    content: dict[str, Any] = {
        "flags": flags,
        "plies": starts,
        "board_size": size,
        "reasons": _count_reasons(store),
    }
    content["files"] = {file.name: digest_file(file)[1] for file in sorted(folder.iterdir())}
    meta = {"content": content, "digest": _digest(content)}
    (folder / _META).write_text(json.dumps(meta), encoding="utf-8")
    return content


def _digest(content: dict[str, Any]) -> str:
    """Return the digest of the list of files and the other facts in it."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _batches(store: Store, table: str, columns: tuple[str, ...]) -> Iterator[pa.RecordBatch]:
    schema = table_schema(table, store.manifest.board_size)
    files = store.rows(table)
    return read_rows(files.rows(0, len(files)), pa.schema([schema.field(name) for name in columns]))


def _index_games(store: Store, folder: Path, progress: Progress) -> tuple[Array, list[str], list[Array]]:
    """Write the rows of all games but their locations; return them, the flags, and the moves by ply."""
    count = store.manifest.counts.get("games", 0)
    games = _create(folder / "games.npy", GAME, count)
    plies = [_create(folder / f"ply-{ply:02d}.npy", np.uint16, count) for ply in range(DEPTH)]
    flags: list[str] = []
    start = 0
    progress.begin("reading the games", count, "games")
    for batch in _batches(store, "games", _GAME_COLUMNS) if count else ():
        rows = slice(start, start + batch.num_rows)
        part = games[rows]
        part["source"] = batch["source_id"].to_numpy()
        part["positions"] = batch["positions"].to_numpy()
        part["duplicate_of"] = batch["duplicate_of"].fill_null(NONE).to_numpy()
        part["first_player"] = (
            pc.equal(batch["first_player"], RED).fill_null(False).to_numpy(zero_copy_only=False)
        )
        for name, options in (
            ("winner", WINNERS),
            ("split", SPLITS),
            ("end_reason", END_REASONS),
            ("swap", SWAPS),
            ("provenance", PROVENANCES),
        ):
            found = pc.index_in(batch[name], pa.array(options)).fill_null(NONE)
            part[name] = found.to_numpy(zero_copy_only=False)
        part["first_row"] = NONE
        part["flags"] = _flag_bits(batch["flags"], flags)
        _index_moves(batch["moves"], part, [ply[rows] for ply in plies], store.manifest.board_size or 0)
        start += batch.num_rows
        progress.advance(batch.num_rows)
    return games, flags, plies


def _flag_bits(column: pa.ListArray, flags: list[str]) -> npt.NDArray[np.uint64]:
    """Return the bits of the flags of each game, and add new names to ``flags``."""
    bits = np.zeros(len(column), np.uint64)
    games = pc.list_parent_indices(column).to_numpy()
    encoded = pc.list_flatten(column).dictionary_encode()
    for code, name in enumerate(encoded.dictionary.to_pylist()):
        if name not in flags:
            if len(flags) == _MOST_FLAGS:
                raise StoreError(
                    "the games of the store have too many different flags",
                    expected=f"{_MOST_FLAGS} at most",
                )
            flags.append(name)
        having = games[encoded.indices.to_numpy(zero_copy_only=False) == code]
        bits[having] |= np.uint64(1 << flags.index(name))
    return bits


def _index_moves(column: pa.ListArray, part: Array, plies: list[Array], size: int) -> None:
    known = column.is_valid().to_numpy(zero_copy_only=False)
    offsets = column.offsets.to_numpy()
    cells = column.values.fill_null(END).to_numpy(zero_copy_only=False)
    cells = np.where((cells < size * size) | (cells == PASS), cells, np.uint16(END))
    lengths = np.diff(offsets)
    part["moves"] = np.where(known, lengths, NONE)
    for ply, moves in enumerate(plies):
        played = known & (lengths > ply)
        moves[:] = np.where(known, np.uint16(END), np.uint16(UNKNOWN))
        moves[played] = cells[offsets[:-1][played] + ply]
        if ply < _OPENING:
            part["opening"][:, ply] = moves


def _index_positions(store: Store, folder: Path, games: Array, progress: Progress) -> None:
    """Find the positions of each game: its first row, or a list if their ids have gaps."""
    count = store.manifest.counts.get("positions", 0)
    runs, counted = np.zeros(len(games), np.uint32), np.zeros(len(games), np.int64)
    last, row = NONE, 0
    progress.begin("finding the positions of games", count, "positions")
    for batch in _batches(store, "positions", ("game_id",)) if count else ():
        ids = batch["game_id"].fill_null(NONE).to_numpy(zero_copy_only=False)
        if not (ids.min() >= NONE and ids.max() < len(games)):
            raise StoreError(
                "a position belongs to a game that the store does not have", path=store.path, hint=VERIFY_HINT
            )
        starts = np.append(0, np.flatnonzero(np.diff(ids)) + 1)
        lengths = np.diff(starts, append=len(ids))
        of_games = ids[starts] != NONE
        np.add.at(counted, ids[starts[of_games]], lengths[of_games])
        begins = starts[of_games]
        if ids[0] == last:  # the game of the last position of the previous batch continues
            begins = begins[1:] if of_games[0] else begins
        found = ids[begins]
        np.add.at(runs, found, 1)
        games["first_row"][found] = begins + row
        last, row = int(ids[-1]), row + len(ids)
        progress.advance(len(ids))
    different = np.flatnonzero(counted != games["positions"])
    if len(different):
        game = int(different[0])
        raise StoreError(
            f"game {game} has another number of positions than its row says",
            path=store.path,
            found=int(counted[game]),
            expected=int(games["positions"][game]),
            hint=VERIFY_HINT,
        )
    scattered = runs > 1
    games["first_row"][scattered] = NONE
    _index_scattered(store, folder, games, scattered, progress)


def _index_scattered(
    store: Store, folder: Path, games: Array, scattered: npt.NDArray[np.bool_], progress: Progress
) -> None:
    """Write the ids of the positions of these games, sorted by game and ply.

    The positions are read once for each group of games whose ids fit into memory.
    """
    counts = np.where(scattered, games["positions"], 0)
    stops = np.cumsum(counts)
    total = int(counts.sum())
    ids = _create(folder / "scattered.npy", np.int64, total)
    of_game = _create(folder / "scattered-games.npy", np.int64, total)
    groups = _groups(stops)
    if groups:
        read = len(groups) * store.manifest.counts["positions"]
        progress.begin("listing the positions of scattered games", read, "positions")
    for first, stop in groups:
        own = slice(first, stop)
        rows = slice(int(stops[first] - counts[first]), int(stops[stop - 1]))
        ids[rows] = _read_scattered(store, first, counts[own], progress)
        _release(ids)
        of_game[rows] = np.repeat(np.arange(first, stop), counts[own])
        _release(of_game)


def _groups(stops: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """Return groups of consecutive games, each its first game and the one after its last.

    Args:
        stops: For each game, the number of scattered positions of all games up to it.
    """
    groups, first, before = [], 0, 0
    while first < len(stops) and before < stops[-1]:
        stop = max(int(np.searchsorted(stops, before + _SCATTERED_ROWS, side="right")), first + 1)
        if stops[stop - 1] > before:
            groups.append((first, stop))
        first, before = stop, int(stops[stop - 1])
    return groups


def _read_scattered(
    store: Store, first_game: int, counts: npt.NDArray[np.int64], progress: Progress
) -> npt.NDArray[np.int64]:
    """Return the ids of the positions of consecutive games, sorted by game and ply.

    Args:
        store: The store.
        first_game: The first of the games.
        counts: Number of positions of each game to return: all of them, or 0.
        progress: Receives the number of rows read.
    """
    slots = np.cumsum(counts) - counts
    total = int(counts.sum())
    ids, plies = np.empty(total, np.int64), np.empty(total, np.uint16)
    filled = np.zeros(len(counts), np.int64)
    row = 0
    for batch in _batches(store, "positions", ("game_id", "position_in_game")):
        found = batch["game_id"].fill_null(NONE).to_numpy(zero_copy_only=False) - first_game
        rows = np.flatnonzero((found >= 0) & (found < len(counts)))
        rows = rows[counts[found[rows]] > 0]
        rows = rows[np.argsort(found[rows], kind="stable")]
        game = found[rows]
        begins = np.flatnonzero(np.diff(game, prepend=NONE))
        lengths = np.diff([*begins, len(game)])
        targets = slots[game] + filled[game] + np.arange(len(game)) - np.repeat(begins, lengths)
        filled[game[begins]] += lengths
        ids[targets] = rows + row
        plies[targets] = batch["position_in_game"].fill_null(0).to_numpy(zero_copy_only=False)[rows]
        row += len(found)
        progress.advance(len(found))
    for start in range(0, len(counts), _SORTED_GAMES):
        own = slice(start, start + _SORTED_GAMES)
        part = slice(int(slots[start]), int(slots[own][-1] + counts[own][-1]))
        order = np.lexsort((plies[part], np.repeat(np.arange(len(counts[own])), counts[own])))
        ids[part] = ids[part][order]
    return ids


def _release(*arrays: Array) -> None:
    """Remove mapped arrays from the memory of this process; their files contain what was written."""
    for array in arrays:
        mapped: Any = array.base
        if isinstance(mapped, mmap.mmap):
            release_pages(mapped)


def _count_reasons(store: Store) -> dict[str, int]:
    counts: dict[str, int] = {}
    if store.manifest.counts.get("rejected"):
        for batch in _batches(store, "rejected", ("reason",)):
            for entry in batch["reason"].value_counts().to_pylist():
                counts[entry["values"]] = counts.get(entry["values"], 0) + entry["counts"]
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
