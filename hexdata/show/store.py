"""Reading of single positions and games from a store, one row group at a time."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from hexdata.board import BLUE, PASS, RED, unpack_boards
from hexdata.checks import as_int
from hexdata.errors import ConfigError, StoreError
from hexdata.policy import SparsePolicies
from hexdata.schema import (
    EXTRA_PREFIX,
    POLICY_TYPE,
    TARGETS,
    positions_schema,
    sources_schema,
    table_schema,
)
from hexdata.show.game import Game
from hexdata.show.position import Policy, Position, played_moves
from hexdata.storage import AnyPath
from hexdata.store import Store
from hexdata.store.disk_space import translate_disk_full
from hexdata.store.integrity import VERIFY_HINT, require_intact_once, require_rows_intact_once
from hexdata.store.originals import WINNERS
from hexdata.store.parquet import collect, open_parquet, read_batches, read_parquet, read_rows

__all__ = ["find_position", "game_of_rows", "position_of_row", "read_game", "read_position", "read_row"]

Row = dict[str, Any]
_WINNERS: Final = {name: player for player, name in enumerate(WINNERS)}


def read_position(store: str | AnyPath, position_id: int) -> Position:
    """Read one position of a store. Reads one row group of positions and one of games.

    Args:
        store: Path or address of the store.
        position_id: Id of the position, from 0.

    Raises:
        ConfigError: The id is not an integer.
        StoreError: The position or the store does not exist, the store is damaged, or the disk fails.
    """
    opened = Store.open(store)
    with translate_disk_full(opened.path):
        return find_position(opened, _check_id("position_id", position_id))


def find_position(opened: Store, position_id: int) -> Position:
    """Return one position of an open store, as :func:`read_position` does."""
    row = read_row(opened, "positions", "position_id", position_id)
    assert opened.manifest.board_size is not None  # a store without one has no positions
    position = position_of_row(row, opened.manifest.board_size)
    if position.game_id is None:
        return position
    game = read_row(opened, "games", "game_id", position.game_id)
    return _with_moves(position, game)


def read_game(store: str | AnyPath, game_id: int) -> Game:
    """Read one game of a store with all of its positions in the store, sorted by ply.

    Only row groups whose statistics include the game are read.

    Args:
        store: Path or address of the store.
        game_id: Id of the game, from 0.

    Raises:
        ConfigError: The id is not an integer.
        StoreError: The game or the store does not exist, the store is damaged, or the disk fails.
    """
    game_id = _check_id("game_id", game_id)
    opened = Store.open(store)
    with translate_disk_full(opened.path):
        game = read_row(opened, "games", "game_id", game_id)
        size = opened.manifest.board_size
        assert size is not None
        rows = _rows_of_game(opened, game_id, positions_schema(size, opened.manifest.targets))
        if rows and len(rows) != game["positions"]:  # damaged statistics hide row groups
            raise StoreError(
                f"positions of game {game_id} are missing",
                path=opened.path,
                found=f"{len(rows)} positions",
                expected=game["positions"],
                hint=VERIFY_HINT,
            )
        return game_of_rows(opened, game, rows)


def game_of_rows(opened: Store, game: Row, rows: list[Row]) -> Game:
    """Return the game with these rows of its positions, in any order.

    Args:
        opened: The store.
        game: Row of the game.
        rows: Rows of its positions.

    Raises:
        StoreError: There are no rows.
    """
    game_id, size = game["game_id"], opened.manifest.board_size
    assert size is not None
    if not rows:
        raise StoreError(f"game {game_id} has no positions", path=opened.path, hint="Run `hexdata verify`.")
    rows.sort(key=lambda row: (row["position_in_game"] is None, row["position_in_game"], row["position_id"]))
    positions = [_with_moves(position_of_row(row, size), game) for row in rows]
    return Game(
        _with_last_moves(positions),
        game_id=game_id,
        moves=None if game["moves"] is None else np.array(game["moves"], dtype=np.uint16),
        winner=_WINNERS.get(game["winner"]),
        split=game["split"],
        source=_source_name(opened, game["source_id"]),
        provenance=game["provenance"],
        duplicate_of=game["duplicate_of"],
        flags=game["flags"] or (),
        end_reason=game["end_reason"],
        swap=game["swap"],
    )


def _check_id(name: str, value: Any) -> int:
    number = as_int(value)
    if number is None:
        raise ConfigError(f"{name} cannot be used", found=repr(value), expected="an integer")
    return number


def read_row(store: Store, table: str, key: str, number: int) -> Row:
    """Return row ``number`` of a table whose key counts rows from 0."""
    count = store.manifest.counts.get(table, 0)
    kind = table.removesuffix("s")
    if not 0 <= number < count:
        raise StoreError(
            f"the store has no such {kind}",
            path=store.path,
            found=f"{kind} {number}",
            expected=f"0 to {count - 1}" if count else f"none, as it has no {table}",
        )
    manifest = store.manifest
    schema = table_schema(table, manifest.board_size, manifest.targets)
    rows = store.rows(table).rows(number, number + 1)
    require_rows_intact_once(store, rows)
    for batch in read_rows(rows, schema):
        row: Row = batch.to_pylist()[0]
        if row[key] == number:
            if fault := _fault(row, manifest.board_size or 0):
                raise StoreError(f"{kind} {number} has {fault}", path=store.path, hint=VERIFY_HINT)
            return row
    raise StoreError(f"{kind} {number} is not at its row of the table", path=store.path, hint=VERIFY_HINT)


def _fault(row: Row, size: int) -> str | None:
    """Return what makes a row of the table of games or positions unusable; None if nothing does."""
    moves = row.get("moves") or ()
    if None in moves:
        return "a move that is null"
    if any(move >= size * size and move != PASS for move in moves):
        return "a move that is not on the board"
    if row.get("move") is not None and row["move"] >= size * size:
        return "a next move that is not on the board"
    for name in ("first_player", "player_to_move"):
        if row.get(name) not in (None, BLUE, RED):
            return f"an unknown player as {name}: {row[name]}"
    return None


def _rows_of_game(store: Store, game_id: int, schema: pa.Schema) -> list[Row]:
    rows: list[Row] = []
    names = store.manifest.files_in("positions")
    for name, path in zip(names, store.files("positions"), strict=True):
        with open_parquet(path, schema) as file:
            column = file.schema_arrow.get_field_index("game_id")
            for group in range(file.num_row_groups):
                if _may_contain(file.metadata.row_group(group).column(column).statistics, game_id):
                    require_intact_once(store, [name])
                    rows += _rows_in_group(file, group, game_id, schema)
    return rows


def _may_contain(statistics: pq.Statistics | None, number: int) -> bool:
    """Return whether a row group may contain a number, by the statistics of its column."""
    if statistics is None or not statistics.has_min_max:
        return statistics is None or statistics.num_values > 0
    return bool(statistics.min <= number <= statistics.max)


def _rows_in_group(file: pq.ParquetFile, group: int, game_id: int, schema: pa.Schema) -> list[Row]:
    batches = read_batches(file, schema, group=group)
    of_game = (batch.filter(pc.equal(batch.column("game_id"), game_id)) for batch in batches)
    rows: list[Row] = collect(of_game, schema).to_pylist()
    return rows


def position_of_row(row: Row, size: int) -> Position:
    """Return the position of a row of the table."""
    board = np.frombuffer(row["board"], dtype=np.uint8)
    return Position(
        unpack_boards(board[None], size, np.uint8)[0],
        row["player_to_move"],
        row["move"],
        _dense(row, size),
        value=row["value"],
        winner=_WINNERS.get(row["winner"]),
        value_sample_tier=row["value_sample_tier"],
        position_id=row["position_id"],
        game_id=row["game_id"],
        ply=row["position_in_game"],
        total_positions=row["total_positions"],
        metadata=row["metadata"],
        **{name: row.get(name) for name in TARGETS},
        extra={
            name.removeprefix(EXTRA_PREFIX): number
            for name, number in row.items()
            if name.startswith(EXTRA_PREFIX)
        },
    )


def _dense(row: Row, size: int) -> Policy | None:
    """Return the policy of a row of the table, (n·n,)."""
    if row["policy"] is None:
        return None
    column = pa.array([row["policy"]], POLICY_TYPE)
    _, policies = SparsePolicies.from_arrow(column, size * size)
    policy: Policy = policies.to_dense(size * size)[0]
    return policy


def _with_moves(position: Position, game: Row) -> Position:
    """Add the moves of the game to a position if they lead to it."""
    played = played_moves(game["moves"], position.ply, position.planes, game["first_player"])
    return position if played is None else replace(position, played=played)


def _with_last_moves(positions: list[Position]) -> list[Position]:
    """Add the last move of each position whose moves are unknown, from the previous position."""
    completed = positions[:1]
    for before, position in pairwise(positions):
        move = before.move
        if position.last_move is None and move is not None and _leads(before, move, position):
            position = replace(position, last_move=move)
        completed.append(position)
    return completed


def _leads(before: Position, move: int, after: Position) -> bool:
    """Return whether a move on one board gives the other board."""
    planes = before.planes.copy()
    planes[before.player].flat[move] = 1
    return not np.array_equal(planes, before.planes) and np.array_equal(planes, after.planes)


def _source_name(store: Store, source_id: int) -> str | None:
    """Return the name of a source file."""
    require_intact_once(store, store.manifest.files_in("sources"))
    for path in store.files("sources"):
        of_source = pc.field("source_id") == source_id
        found = read_parquet(path, ["name"], of_source, sources_schema())
        if found.num_rows:
            name: str = found.column("name")[0].as_py()
            return name
    return None
