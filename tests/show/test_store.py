"""Positions and games of a store, compared with its tables as pyarrow reads them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import hexdata
from hexdata.errors import StoreError
from hexdata.show import read_game, read_position
from hexdata.store.manifest import Manifest
from hexdata.store.parquet import write_parquet


def table(store: Path, name: str) -> list[dict]:
    parts = [pq.ParquetFile(path).read() for path in sorted((store / name).glob("*.parquet"))]
    return pa.concat_tables(parts).to_pylist()


def planes(row: dict, n: int) -> np.ndarray:
    return np.unpackbits(np.frombuffer(row["board"], np.uint8), count=2 * n * n).reshape(2, n, n)


def test_a_position_is_the_row_of_its_id(trmph_store):
    rows, games = table(trmph_store, "positions"), table(trmph_store, "games")
    assert len(rows) > 1000
    for number in [*range(0, len(rows), 97), len(rows) - 1]:
        row = rows[number]
        position = hexdata.read_position(trmph_store, number)
        assert np.array_equal(position.planes, planes(row, 7))
        found = (position.position_id, position.game_id, position.move, position.value, position.player)
        assert found == (number, row["game_id"], row["move"], row["value"], row["player_to_move"])
        assert (position.ply, position.total_positions) == (row["position_in_game"], row["total_positions"])
        moves = games[row["game_id"]]["moves"][: position.ply]
        assert position.played.tolist() == moves
        assert position.last_move == (moves[-1] if moves else None)


def test_unusual_positions_can_be_shown(odd_store):
    """Dense policies, unknown games, nulls and two stones on one cell can all be drawn."""
    rows = table(odd_store, "positions")
    for number in range(0, 900, 11):
        row = rows[number]
        position = read_position(odd_store, number)
        assert (position.game_id, position.move, position.ply) == (
            row["game_id"],
            row["move"],
            row["position_in_game"],
        )
        assert position.value_sample_tier == row["value_sample_tier"]
        assert position.winner == {None: None, "BLUE": 0, "RED": 1}[row["winner"]]
        assert position.metadata == row["metadata"]
        assert (position.policy is None) == (row["policy"] is None)
        if position.policy is not None:
            given = {item["cell"]: item["probability"] for item in row["policy"]}
            assert position.policy.tolist() == [given.get(cell, 0.0) for cell in range(25)]
        assert position.played is position.last_move is None  # its games have no moves
        assert str(position)
        assert position._repr_svg_()
    assert any(row["game_id"] is None for row in rows[::11])


def test_a_game_has_all_its_positions_by_ply(trmph_store):
    rows, games = table(trmph_store, "positions"), table(trmph_store, "games")
    sources = table(trmph_store, "sources")
    for number in (0, 1, 40, len(games) - 1):
        game = hexdata.read_game(trmph_store, number)
        mine = [row["position_id"] for row in rows if row["game_id"] == number]
        assert [position.position_id for position in game.positions] == mine
        assert [position.ply for position in game.positions] == [*range(len(mine))]
        assert game.moves.tolist() == games[number]["moves"]
        assert game.winner == {"BLUE": 0, "RED": 1}[games[number]["winner"]]
        assert game.split == games[number]["split"]
        assert game.source == sources[games[number]["source_id"]]["name"]
        assert [position.last_move for position in game.positions[1:]] == games[number]["moves"]


def test_a_game_without_moves_has_its_available_positions(odd_store):
    rows = [row for row in table(odd_store, "positions") if row["game_id"] == 3]
    game = read_game(odd_store, 3)
    assert sorted(position.position_id for position in game.positions) == [row["position_id"] for row in rows]
    plies = [position.ply for position in game.positions]
    known = [ply for ply in plies if ply is not None]
    assert known == sorted(row["position_in_game"] for row in rows if row["position_in_game"] is not None)
    assert plies[: len(known)] == known
    assert game.moves is None
    assert game._repr_svg_()


def rewrite(store: Path, name: str, change) -> None:
    """Change the files of a table and update the manifest."""
    manifest = Manifest.load(store)
    for place in manifest.files_in(name):
        changed = change(pq.ParquetFile(store / place).read())
        manifest.files[place] = write_parquet(store / place, changed.schema, [changed])
    manifest.save(store)


def without_moves(games: pa.Table) -> pa.Table:
    index = games.schema.get_field_index("moves")
    field = games.schema.field(index)
    return games.set_column(index, field, pa.nulls(games.num_rows, field.type))


def test_a_missing_last_move_is_taken_from_the_previous_position(trmph_store, copy_store):
    expected = [position.last_move for position in read_game(trmph_store, 5).positions]
    store = copy_store(trmph_store)
    rewrite(store, "games", without_moves)
    game = read_game(store, 5)
    assert game.moves is None
    assert [position.last_move for position in game.positions] == expected
    assert {position.played for position in game.positions} == {None}


def reversed_moves(games: pa.Table) -> pa.Table:
    index = games.schema.get_field_index("moves")
    moves = [row[::-1] for row in games.column(index).to_pylist()]
    return games.set_column(index, games.schema.field(index), pa.array(moves, games.schema.field(index).type))


def test_moves_that_do_not_lead_to_the_position_are_ignored(trmph_store, copy_store):
    store = copy_store(trmph_store)
    rewrite(store, "games", reversed_moves)
    number = next(row["position_id"] for row in table(store, "positions") if row["position_in_game"] == 3)
    position = read_position(store, number)
    assert position.played is position.last_move is None


@pytest.mark.parametrize("number", [-1, 10**6])
def test_errors_state_the_number_of_positions_and_games(trmph_store, number):
    counts = Manifest.load(trmph_store).counts
    with pytest.raises(StoreError, match=f"position {number}; expected 0 to {counts['positions'] - 1}"):
        read_position(trmph_store, number)
    with pytest.raises(StoreError, match=f"game {number}; expected 0 to {counts['games'] - 1}"):
        read_game(trmph_store, number)


def test_a_store_without_positions_is_refused(tmp_path):
    Manifest(counts={"positions": 0}).save(tmp_path)
    with pytest.raises(StoreError, match="none, as it has no positions"):
        read_position(tmp_path, 0)
    with pytest.raises(StoreError, match="no such folder"):
        read_position(tmp_path / "elsewhere", 0)


def test_only_files_that_may_contain_the_position_are_opened(odd_store, copy_store):
    store = copy_store(odd_store)
    (store / "positions" / "part-000000.parquet").unlink()
    (store / "positions" / "part-000002.parquet").unlink()
    assert read_position(store, 450).position_id == 450
    with pytest.raises(StoreError, match=r"part-000000\.parquet"):
        read_position(store, 100)


def test_only_row_groups_that_may_contain_the_game_are_read(trmph_store, copy_store):
    """The ids of all other games are damaged, and no error is raised."""
    store = copy_store(trmph_store)
    manifest = Manifest.load(store)
    places = list(manifest.files_in("positions"))
    assert len(places) == 3
    file = pq.ParquetFile(store / places[1])
    ids = file.read(columns=["game_id"]).column(0).to_pylist()
    for place in (places[0], places[2]):
        column = pq.read_metadata(store / place).row_group(0).column(1)
        assert column.path_in_schema == "game_id"
        data = bytearray((store / place).read_bytes())
        start = column.data_page_offset
        data[start : start + column.total_compressed_size] = bytes(column.total_compressed_size)
        (store / place).write_bytes(data)
    assert len(read_game(store, ids[0])) == ids.count(ids[0])
    with pytest.raises((StoreError, OSError)):
        read_game(store, 0)


@pytest.mark.parametrize("table", ["games", "positions", "sources"])
def test_a_changed_byte_in_a_file_that_is_read_is_refused(trmph_store, copy_store, table):
    store = copy_store(trmph_store)
    path = min((store / table).iterdir())
    content = path.read_bytes()
    path.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
    with pytest.raises(StoreError, match=f"{path.name}: the file was altered"):
        read_game(store, 0)


def test_a_table_out_of_order_is_refused(odd_store, copy_store):
    store = copy_store(odd_store)
    manifest = Manifest.load(store)
    one, two, _ = manifest.files_in("positions")
    (store / one).rename(store / "kept")
    (store / two).rename(store / one)
    (store / "kept").rename(store / two)
    manifest.files[one], manifest.files[two] = manifest.files[two], manifest.files[one]
    manifest.save(store)
    with pytest.raises(StoreError, match="position 5 is not at its row"):
        read_position(store, 5)


@pytest.mark.parametrize(
    ("table_name", "column", "value", "message"),
    [
        ("games", "moves", [60_000], "game 0 has a move that is not on the board"),
        ("games", "first_player", 9, "game 0 has an unknown player as first_player: 9"),
        ("positions", "move", 999, "position 0 has a next move that is not on the board"),
        ("positions", "player_to_move", 7, "position 0 has an unknown player as player_to_move: 7"),
    ],
)
def test_rows_that_no_board_can_show_are_refused(trmph_store, copy_store, table_name, column, value, message):
    def change(rows: pa.Table) -> pa.Table:
        index = rows.schema.get_field_index(column)
        field = rows.schema.field(index)
        values = [value, *rows.column(index).to_pylist()[1:]]
        return rows.set_column(index, field, pa.array(values, field.type))

    store = copy_store(trmph_store)
    rewrite(store, table_name, change)
    with pytest.raises(StoreError, match=f"{message}.*hexdata verify"):
        read_position(store, 0)
