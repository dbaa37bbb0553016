"""Positions and games of stores and shards, compared with the files as other libraries read them."""

from __future__ import annotations

import io
import re
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from hexdata.errors import ConfigError, FormatError, HexdataError, StoreError
from hexdata.export import ExportOptions, export_shards
from hexdata.show import (
    Game,
    Position,
    ShowOptions,
    draw_svg,
    find,
    read_game,
    read_position,
    read_shard_position,
    write_png,
    write_svg,
)
from hexdata.shuffle import ShuffleOptions, shuffle_store
from hexdata.store.manifest import Manifest
from hexdata.store.parquet import write_parquet

WINNERS = {None: None, "BLUE": 0, "RED": 1}
SAME = ("value", "value_sample_tier", "position_id", "game_id", "total_positions", "metadata")


def table(store: Path, name: str) -> list[dict[str, Any]]:
    parts = [pq.ParquetFile(path).read() for path in sorted((store / name).glob("*.parquet"))]
    return pa.concat_tables(parts).to_pylist()


# --- stores ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["trmph_store", "odd_store"])
def test_a_position_is_the_row_of_its_id(request, kind):
    """The odd store has dense policies, unknown games, nulls and two stones on one cell."""
    store = request.getfixturevalue(kind)
    rows, games = table(store, "positions"), table(store, "games")
    for number in [*range(0, len(rows), 19), len(rows) - 1]:
        row, position = rows[number], read_position(store, number)
        bits = np.unpackbits(np.frombuffer(row["board"], np.uint8), count=2 * position.size**2)
        assert np.array_equal(position.planes.ravel(), bits)
        assert {name: getattr(position, name) for name in SAME} == {name: row[name] for name in SAME}
        assert (position.move, position.ply) == (row["move"], row["position_in_game"])
        assert (position.player, position.winner) == (row["player_to_move"], WINNERS[row["winner"]])
        given = {item["cell"]: item["probability"] for item in row["policy"] or ()}
        dense = None if position.policy is None else position.policy.tolist()
        assert dense == (None if row["policy"] is None else [given.get(c, 0.0) for c in range(25)])
        moves = None if row["game_id"] is None else games[row["game_id"]]["moves"]
        assert (position.played is None) == (moves is None)
        if moves is not None:
            assert position.played.tolist() == moves[: position.ply]
            assert position.last_move == (moves[position.ply - 1] if position.ply else None)
        assert str(position)
        assert position._repr_svg_()


def test_a_game_has_all_its_positions_by_ply(trmph_store, odd_store, monkeypatch):
    rows, games = table(trmph_store, "positions"), table(trmph_store, "games")
    sources = table(trmph_store, "sources")
    for number in (0, 1, 40, len(games) - 1):
        game, row = read_game(trmph_store, number), games[number]
        mine = [each["position_id"] for each in rows if each["game_id"] == number]
        assert [position.position_id for position in game.positions] == mine
        assert [position.ply for position in game.positions] == [*range(len(mine))]
        assert [position.last_move for position in game.positions[1:]] == row["moves"] == game.moves.tolist()
        assert (game.winner, game.split) == (WINNERS[row["winner"]], row["split"])
        assert game.source == sources[row["source_id"]]["name"]
    # A game without moves has its available positions; those without a ply are last.
    rows = [row for row in table(odd_store, "positions") if row["game_id"] == 3]
    game = read_game(odd_store, 3)
    assert game.moves is None
    assert sorted(position.position_id for position in game.positions) == [row["position_id"] for row in rows]
    plies = [row["position_in_game"] for row in rows]
    known = sorted(ply for ply in plies if ply is not None)
    assert [position.ply for position in game.positions] == known + [None] * plies.count(None)
    assert game._repr_svg_()
    monkeypatch.chdir(trmph_store.parent)  # a relative path
    assert read_game(trmph_store.name, 1).at(3).position_id == read_game(trmph_store, 1).at(3).position_id


def changed(store: Path, name: str, column: str, change: Callable[[list[Any]], list[Any]]) -> None:
    """Change a column of a table, and the manifest with it."""
    manifest = Manifest.load(store)
    for place in manifest.files_in(name):
        rows = pq.ParquetFile(store / place).read()
        index = rows.schema.get_field_index(column)
        field = rows.schema.field(index)
        values = pa.array(change(rows.column(index).to_pylist()), field.type)
        rows = rows.set_column(index, field, values)
        manifest.files[place] = write_parquet(store / place, rows.schema, [rows])
    manifest.save(store)


def test_a_missing_last_move_is_taken_from_the_previous_position(trmph_store, copy_store):
    expected = [position.last_move for position in read_game(trmph_store, 5).positions]
    store = copy_store(trmph_store)
    changed(store, "games", "moves", lambda values: [None] * len(values))
    game = read_game(store, 5)
    assert game.moves is None
    assert [position.last_move for position in game.positions] == expected
    assert {position.played for position in game.positions} == {None}


def test_a_table_out_of_order_or_with_fewer_rows_is_refused(odd_store, copy_store):
    store = copy_store(odd_store)
    changed(store, "positions", "position_id", lambda values: values[::-1])
    manifest = Manifest.load(store)
    manifest.counts["positions"] += 1
    manifest.save(store)
    for number in (5, manifest.counts["positions"] - 1):
        with pytest.raises(StoreError, match=f"position {number} has another id"):
            read_position(store, number)


def test_rows_that_no_board_can_show_are_refused(trmph_store, copy_store):
    for name, column, value, message in (
        ("games", "moves", [60_000], "game 0 has a move that is not on the board"),
        ("games", "first_player", 9, "game 0 has an unknown player as first_player: 9"),
        ("positions", "move", 999, "position 0 has a next move that is not on the board"),
        ("positions", "player_to_move", 7, "position 0 has an unknown player as player_to_move: 7"),
    ):
        store = copy_store(trmph_store, column)
        changed(store, name, column, lambda values, value=value: [value, *values[1:]])
        with pytest.raises(StoreError, match=f"{message}.*hexdata verify"):
            read_position(store, 0)


# --- shards ---------------------------------------------------------------------------------------------


def test_a_position_of_a_shard_is_that_of_the_store(odd_store, copy_store, tmp_path):
    """A shard that differs from its manifest or is truncated is refused."""
    store = copy_store(odd_store)
    shuffle_store(store, ShuffleOptions(threads=1))
    export_shards(store, ExportOptions(shard_size=192, block_size=32, workers=1))
    shard = store / "shards" / "train-000000.tar"
    with tarfile.open(shard) as archive:  # the positions in order, with tarfile and NumPy only
        members = [member for member in archive.getmembers() if member.name.endswith("position_id.npy")]
        arrays = [np.load(io.BytesIO(archive.extractfile(member).read())) for member in members]
    ids = np.concatenate(arrays).tolist()
    assert len(ids) == 192
    alone = shutil.copy(shard, tmp_path / "moved.tar")
    for number in (0, 1, 17, 31, 32, 100, 191):
        there, here = read_position(store, ids[number]), read_shard_position(alone, number)
        assert np.array_equal(there.planes, here.planes)
        names = ("player", "move", "ply", *SAME[:-1])
        assert [getattr(here, name) for name in names] == [getattr(there, name) for name in names]
        policies = [None if each.policy is None else each.policy.tolist() for each in (here, there)]
        assert policies[0] == policies[1]
        assert str(here)
    with pytest.raises(StoreError, match=r"train-000000\.tar: .*found position 192; expected 0 to 191"):
        read_shard_position(shard, 192)

    cut = tmp_path / "cut.tar"
    cut.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    assert read_shard_position(cut, 0).position_id == ids[0]
    with pytest.raises(FormatError, match=r"cut\.tar"):
        read_shard_position(cut, 191)

    original, content = read_shard_position(shard, 0), bytearray(shard.read_bytes())
    content[content.index(b"\n", content.index(b"game_id.npy")) + 1] ^= 1  # a valid other id
    shard.write_bytes(content)
    for read in (lambda: read_shard_position(shard, 0), lambda: find(f"{shard}:0")):
        with pytest.raises(StoreError, match=r"train-000000\.tar: the shard is truncated or altered"):
            read()
    (shard.parent / "manifest.json").write_text("{}")
    assert read_shard_position(shard, 0).game_id != original.game_id


# --- the arguments of hexdata show ----------------------------------------------------------------------


def test_each_kind_of_location_is_found(whole_store, tmp_path):
    place = str(whole_store)
    shard = f"{place}/shards/train-000000.tar:5"
    position, game = find(place, ShowOptions(position=40)), find(place, ShowOptions(game=3))
    assert isinstance(position, Position)
    assert isinstance(game, Game)
    assert (position.position_id, game.game_id) == (40, 3)
    ply = find(place, ShowOptions(game=3, ply=4))
    assert (ply.game_id, ply.ply) == (3, 4)
    assert len(find("#5,a1b2c3")) == 4
    assert find("#5,a1b2c3", ShowOptions(ply=1)).last_move == 0
    whole, some = (draw_svg(game, ShowOptions(every=every)).count("data-frame") for every in (None, 10))
    assert some < whole
    named = str(shutil.copytree(whole_store, tmp_path / "odd.tar:17"))  # a store named like a shard
    assert find(named, ShowOptions(position=3)).position_id == 3
    in_shard = find(shard)
    in_store = find(place, ShowOptions(position=in_shard.position_id))
    assert (in_shard.planes == in_store.planes).all()


@pytest.mark.parametrize(
    ("location", "options", "message"),
    [
        ("STORE", {}, "no position or --game is given; expected a position from 0 to"),
        ("STORE", {"position": 1, "every": 2}, "every does not apply"),
        ("STORE", {"game": 3, "ply": 999}, "found ply 999; expected 0 to"),
        ("STORE/../nowhere", {"position": 1}, "no such folder"),
        ("SHARD", {}, "no position of the shard is given.*train-000000.tar:17"),
        ("SHARD:3", {"position": 3}, "position does not apply"),
        ("#5,a1", {"position": 3}, "position does not apply"),
        *(("STORE", {name: value}, "") for name, value in (("position", -1), ("every", 0))),
        ("STORE", {"position": 1, "game": 2}, ""),
        ("STORE", {"position": 1, "ply": 2}, ""),
        ("STORE", {"ply": 1, "every": 2}, ""),
    ],
)
def test_missing_or_unsuitable_arguments_are_refused(whole_store, location, options, message):
    place = str(whole_store)
    location = location.replace("STORE", place).replace("SHARD", f"{place}/shards/train-000000.tar")
    with pytest.raises(HexdataError, match=message or None):
        find(location, ShowOptions(**options))


def test_drawings_are_written_atomically(tmp_path):
    svg = draw_svg(find("#13,g7h6f8"), ShowOptions(every=2, numbers=True))
    folder = tmp_path / "new"
    write_svg(folder / "game.svg", svg)
    assert (folder / "game.svg").read_text(encoding="utf-8") == svg
    write_png(folder / "game.png", svg)
    with Image.open(folder / "game.png") as image:
        size = re.search(r'width="(.*?)" height="(.*?)"', svg)
        assert image.size == tuple(2 * float(text) for text in size.groups())
        colours = {colour for count, colour in image.convert("RGB").getcolors(1 << 20) if count > 400}
    assert {(255, 255, 255), (31, 98, 196), (197, 47, 51), (241, 236, 225)} <= colours
    (folder / "folder.svg").mkdir()
    with pytest.raises(StoreError, match="found Is a directory"):
        write_svg(folder / "folder.svg", svg)
    for write, name in ((write_svg, "game.png"), (write_png, "game.svg")):
        before = (folder / name).read_bytes()
        with pytest.raises(ConfigError, match="unsupported suffix"):
            write(folder / name, svg)
        assert (folder / name).read_bytes() == before
    assert {path.name for path in folder.iterdir()} == {"game.svg", "game.png", "folder.svg"}
