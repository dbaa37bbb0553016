"""Verification of the games of a store: their positions, and the duplicates among them. Read-only.

The memory does not depend on the number of games: arrays hold a range of games, and queries compare the games
of a range of hashes. Row groups of positions that contain no game of a range are not read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hexdata.errors import VerifyError
from hexdata.schema import games_schema, positions_schema
from hexdata.storage import AnyPath
from hexdata.store import Store
from hexdata.store.columns import select_sql
from hexdata.store.parquet import open_parquet, read_rows
from hexdata.store.session import DuckDBPyConnection, duckdb_session, read_parquet_sql
from hexdata.verify.options import VerifyOptions

__all__ = ["check_games", "find_wrong_duplicate"]

_BYTES_PER_GAME: Final = 52
"""Size of the arrays of a range of games."""
_HASHED_BYTES: Final = 256
"""Memory of DuckDB per compared game."""
_RECOVERED: Final = "recovered"
_NO_TOTAL: Final = 65_535
_HAS_GAME: Final = pc.field("game_id").is_valid()


class _RowGroup(NamedTuple):
    """A row group of a file of positions."""

    path: AnyPath
    number: int
    games: range
    """Range that contains the ids of its games."""


def check_games(store: Store, options: VerifyOptions, *, held_bytes: int | None = None) -> str:
    """Check that each game has its stated number of positions and that equal games are in the same split.

    Each ``game_id`` of a position must exist in the table games, too. A recovered game has each of its
    positions once, and all below their ``total_positions``. Other games are not checked for that: their
    ``position_in_game`` is stored as the metadata state it.

    Args:
        store: The store to check.
        options: Limits of memory and threads.
        held_bytes: Size of the arrays in bytes. Default None: half of the memory that ``options`` leaves.

    Returns:
        The detail of the check.

    Raises:
        VerifyError: A game violates one of these rules.
    """
    files, count = store.files("games"), store.manifest.counts.get("games", 0)
    if not files:
        return "none"
    held = held_bytes or max(options.memory - options.BASE, options.BUFFERS) // 2
    groups = _row_groups(store)
    for group in groups:
        if group.games and not (group.games.start >= 0 and group.games.stop <= count):
            known = f"a game_id from 0 to {count - 1:,}"
            found = f"game_id {group.games.start if group.games.start < 0 else group.games.stop - 1}"
            raise VerifyError("a position has an unknown game", path=group.path, found=found, expected=known)
    step = max(1, held // _BYTES_PER_GAME)
    for start in range(0, count, step):
        _check_range(store, groups, range(start, min(start + step, count)), held)
    with duckdb_session(**options.session(store.path)._asdict(), store=store.path) as con:
        for part in _hash_ranges(store, options):
            divided = con.sql(f"""
                SELECT min(game_id), max(game_id) FROM {read_parquet_sql(files)} WHERE {part}
                GROUP BY game_hash HAVING min(split) <> max(split) LIMIT 1""").fetchall()
            if divided:
                games = f"games {divided[0][0]} and {divided[0][1]}"
                raise VerifyError("duplicates of a game are in different splits", found=games)
    return f"{count:,} games have all their positions"


def find_wrong_duplicate(
    store: Store, con: DuckDBPyConnection, options: VerifyOptions
) -> tuple[int, int | None] | None:
    """Return a game with a wrong ``duplicate_of``, and that value.

    It must be null for the first game of a hash, and this first game for all others.

    Args:
        store: The store.
        con: Open DuckDB session.
        options: Limits of memory and threads.
    """
    table = select_sql("games", store.manifest, lambda _: read_parquet_sql(store.files("games")))
    for part in _hash_ranges(store, options):
        # All games of a hash are in one range. A row per hash needs far less memory than pairs of games.
        games = f"(SELECT game_id, game_hash, duplicate_of FROM ({table}) WHERE {part})"
        wrong = con.sql(f"""
            SELECT min(game_id), hex(game_hash) FROM {games} GROUP BY game_hash
            HAVING max(game_id) FILTER (duplicate_of IS NULL) <> min(game_id)
                OR min(game_id) FILTER (duplicate_of IS NOT NULL) = min(game_id)
                OR min(duplicate_of) <> min(game_id) OR max(duplicate_of) <> min(game_id)
            ORDER BY min(game_id) LIMIT 1""").fetchall()
        if wrong:
            first, game_hash = wrong[0]
            game, duplicate_of = con.sql(f"""
                SELECT game_id, duplicate_of FROM {games}
                WHERE game_hash = from_hex('{game_hash}')
                    AND duplicate_of IS DISTINCT FROM nullif({first}, game_id)
                ORDER BY game_id LIMIT 1""").fetchall()[0]
            return game, duplicate_of
    return None


def _hash_ranges(store: Store, options: VerifyOptions) -> Iterator[str]:
    """Yield conditions on ``game_hash`` that divide the games into parts that fit into the memory."""
    limit = options.session(store.path).memory
    parts = 1 + store.manifest.counts["games"] * _HASHED_BYTES // limit
    for part in range(parts):
        yield f"hash(game_hash) % {parts} = {part}"


def _row_groups(store: Store) -> list[_RowGroup]:
    """Return the row groups of positions, each with the range of its games as the file states it."""
    schema = _columns(positions_schema(store.manifest.board_size or 1), "game_id")
    groups = []
    for path in store.files("positions"):
        with open_parquet(path, schema) as file:
            column = file.schema_arrow.get_field_index("game_id")
            for number in range(file.metadata.num_row_groups):
                facts = file.metadata.row_group(number).column(column)
                stated = facts.statistics
                if stated is not None and stated.has_min_max:
                    games = range(stated.min, stated.max + 1)
                elif stated is not None and stated.null_count == file.metadata.row_group(number).num_rows:
                    games = range(0)
                else:
                    ids = file.read_row_group(number, columns=["game_id"])["game_id"].drop_null().to_numpy()
                    games = range(ids.min(), ids.max() + 1) if len(ids) else range(0)
                groups.append(_RowGroup(path, number, games))
    return groups


def _columns(schema: pa.Schema, *names: str) -> pa.Schema:
    return pa.schema([schema.field(name) for name in names])


class _Rows(NamedTuple):
    """Positions with a known game."""

    games: npt.NDArray[np.int64]
    """Index of the game of each position within the range."""
    plies: npt.NDArray[np.uint16]
    """``position_in_game``, 0 where it is null."""
    has_ply: npt.NDArray[np.bool_]
    totals: npt.NDArray[np.uint16]
    """``total_positions``, the largest number where it is null."""


def _read_rows(store: Store, groups: list[_RowGroup], games: range) -> Iterator[_Rows]:
    """Yield the positions of a range of games.

    Raises:
        VerifyError: A row group contains a game outside its stated range.
    """
    schema = _columns(
        positions_schema(store.manifest.board_size or 1), "game_id", "position_in_game", "total_positions"
    )
    selected: dict[AnyPath, list[_RowGroup]] = {}
    for group in groups:
        if group.games.start < games.stop and games.start < group.games.stop:
            selected.setdefault(group.path, []).append(group)
    for path, parts in selected.items():
        with open_parquet(path, schema) as file:
            for part in parts:
                table = file.read_row_group(part.number, columns=schema.names).filter(_HAS_GAME)
                ids = table["game_id"].to_numpy()
                if len(ids) and not (part.games.start <= ids.min() and ids.max() < part.games.stop):
                    raise VerifyError(
                        "a file states another range of game_ids than it has",
                        path=path,
                        record=f"row group {part.number}",
                        found=f"{ids.min()} to {ids.max()}",
                        expected=f"{part.games.start} to {part.games.stop - 1}",
                    )
                inside = (ids >= games.start) & (ids < games.stop)
                plies = table["position_in_game"]
                yield _Rows(
                    ids[inside] - games.start,
                    plies.fill_null(0).to_numpy()[inside],
                    plies.is_valid().to_numpy()[inside],
                    table["total_positions"].fill_null(_NO_TOTAL).to_numpy()[inside],
                )


def _read_games(store: Store, games: range) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Return the stated number of positions of each game of a range, and whether the game is recovered."""
    rows = store.rows("games").rows(games.start, games.stop)
    positions, recovered = np.zeros(len(games), np.int64), np.zeros(len(games), np.bool_)
    start = 0
    for batch in read_rows(rows, _columns(games_schema(), "game_id", "positions", "provenance")):
        stop = start + batch.num_rows
        if (batch["game_id"].to_numpy() != np.arange(games.start + start, games.start + stop)).any():
            raise VerifyError("game_ids are not consecutive", path=store.path / "games")
        positions[start:stop] = batch["positions"].to_numpy()
        recovered[start:stop] = pc.equal(batch["provenance"], _RECOVERED).to_numpy(zero_copy_only=False)
        start = stop
    return positions, recovered


def _check_range(store: Store, groups: list[_RowGroup], games: range, cells: int) -> None:
    """Check the positions of a range of games.

    Args:
        store: The store.
        groups: All row groups of positions.
        games: The range of ``game_id``.
        cells: Largest number of plies to mark at a time, one byte each.

    Raises:
        VerifyError: A game has another number of positions, or a recovered game another or a repeated one.
    """
    stated, recovered = _read_games(store, games)
    found, last = np.zeros(len(games), np.int64), np.zeros(len(games), np.uint16)
    for rows in _read_rows(store, groups, games):
        np.add.at(found, rows.games, 1)
        checked = recovered[rows.games] & rows.has_ply
        np.maximum.at(last, rows.games[checked], rows.plies[checked])
        beyond = checked & (rows.plies >= rows.totals)
        if beyond.any():
            row = int(beyond.argmax())
            raise _wrong_ply(store, games.start + int(rows.games[row]), int(rows.plies[row]))
    if (found != stated).any():
        game = int((found != stated).argmax())
        raise VerifyError(
            f"game {games.start + game} has the wrong number of positions",
            found=int(found[game]),
            expected=int(stated[game]),
        )
    ends = np.cumsum(np.where(recovered, last.astype(np.int64) + 1, 0))
    start = 0
    while start < len(games):
        base = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, base + cells, "right")))
        if ends[stop - 1] > base:
            _check_plies(
                store, groups, range(games.start + start, games.start + stop), ends[start:stop] - base
            )
        start = stop


def _check_plies(store: Store, groups: list[_RowGroup], games: range, ends: npt.NDArray[np.int64]) -> None:
    """Check that recovered games have each position at most once.

    Args:
        store: The store.
        groups: All row groups of positions.
        games: The range of ``game_id``.
        ends: End of the plies of each game in an array of the plies of all recovered games.
    """
    starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
    seen = np.zeros(ends[-1], np.bool_)
    for rows in _read_rows(store, groups, games):
        checked = rows.has_ply & (ends > starts)[rows.games]
        at = np.sort(starts[rows.games[checked]] + rows.plies[checked])
        repeated = seen[at]
        repeated[1:] |= at[1:] == at[:-1]
        if repeated.any():
            first = int(at[repeated.argmax()])
            game = int(np.searchsorted(ends, first, "right"))
            raise _wrong_ply(store, games.start + game, first - int(starts[game]))
        seen[at] = True


def _wrong_ply(store: Store, game: int, ply: int) -> VerifyError:
    return VerifyError(
        "the table contains an invalid value",
        path=store.path / "positions",
        record=f"game {game}",
        found=f"position_in_game {ply}",
        expected="each position of a recovered game once, below its total_positions",
        hint="Convert the sources into a new store.",
    )
