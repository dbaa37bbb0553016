"""Lookup of positions and games by the arguments of ``hexdata show``."""

from __future__ import annotations

import re
import shutil

import pytest
from PIL import Image

from hexdata.errors import ConfigError, HexdataError, StoreError
from hexdata.show import Game, Position, ShowOptions, draw_svg, find, write_png, write_svg


def test_each_kind_of_location_is_found(store):
    position = find(str(store), ShowOptions(position=40))
    assert isinstance(position, Position)
    assert position.position_id == 40
    game = find(str(store), ShowOptions(game=3))
    assert isinstance(game, Game)
    assert game.game_id == 3
    ply = find(str(store), ShowOptions(game=3, ply=4))
    assert (ply.game_id, ply.ply) == (3, 4)
    assert find(f"{store}/shards/train-000000.tar:5").position_id is not None
    assert len(find("#5,a1b2c3")) == 4
    assert find("#5,a1b2c3", ShowOptions(ply=1)).last_move == 0
    assert draw_svg(game, ShowOptions(every=10)).count("data-frame") < draw_svg(game, ShowOptions()).count(
        "data-frame"
    )


def test_a_store_may_be_named_like_a_shard(store, tmp_path):
    location = shutil.copytree(store, tmp_path / "odd.tar:17")
    assert find(str(location), ShowOptions(position=3)).position_id == 3


@pytest.mark.parametrize(
    ("location", "options", "message"),
    [
        ("STORE", {}, "no position or --game is given; expected a position from 0 to"),
        ("STORE", {"position": 1, "every": 2}, "every does not apply to a single position"),
        ("STORE/shards/train-000000.tar", {}, "no position of the shard is given.*train-000000.tar:17"),
        ("STORE/shards/train-000000.tar:3", {"position": 3}, "position does not apply to a shard"),
        ("STORE/shards/train-000000.tar:3", {"game": 3}, "game does not apply to a shard"),
        ("STORE/shards/train-000000.tar:3", {"ply": 3}, "ply does not apply to a shard"),
        ("#5,a1", {"position": 3}, "position does not apply to a game's text"),
        ("#5,a1", {"game": 3}, "game does not apply to a game's text"),
    ],
)
def test_missing_or_unsuitable_options_are_refused(store, location, options, message):
    with pytest.raises(ConfigError, match=message):
        find(location.replace("STORE", str(store)), ShowOptions(**options))


@pytest.mark.parametrize(
    "options",
    [
        {"position": -1},
        {"every": 0},
        {"position": 1, "game": 2},
        {"position": 1, "ply": 2},
        {"ply": 1, "every": 2},
    ],
)
def test_options_that_contradict_each_other_are_refused(options):
    with pytest.raises(ConfigError):
        ShowOptions(**options)


def test_missing_positions_and_stores_are_named(store, tmp_path):
    with pytest.raises(StoreError, match="no such folder"):
        find(str(tmp_path / "nowhere"), ShowOptions(position=1))
    with pytest.raises(FileNotFoundError):
        find(f"{tmp_path}/nowhere.tar:1")
    with pytest.raises(
        HexdataError, match="game 3 has no position at that ply; found ply 999; expected 0 to"
    ):
        find(str(store), ShowOptions(game=3, ply=999))


def test_a_drawing_is_written_atomically(tmp_path):
    path = tmp_path / "new" / "board.svg"
    write_svg(path, "<svg>·</svg>")
    assert path.read_text(encoding="utf-8") == "<svg>·</svg>"
    assert [*path.parent.iterdir()] == [path]
    (folder := tmp_path / "folder.svg").mkdir()
    with pytest.raises(StoreError, match=r"found Is a directory\. .*choose another file"):
        write_svg(folder, "<svg/>")
    folder.rmdir()
    (shard := tmp_path / "train-000000.tar").write_bytes(b"a shard")
    with pytest.raises(ConfigError, match=r"unsupported suffix for an SVG drawing.*Use --png"):
        write_svg(shard, "<svg/>")
    assert shard.read_bytes() == b"a shard"
    shard.unlink()
    assert [*path.parent.iterdir()] == [path]
    assert [*tmp_path.iterdir()] == [path.parent]


def test_a_drawing_is_written_as_png(tmp_path):
    game = find("#13,g7h6f8")
    svg = draw_svg(game, ShowOptions(every=2, numbers=True))
    path = tmp_path / "new" / "game.png"
    write_png(path, svg)
    with Image.open(path) as image:
        width, height = image.size
        colours = {colour for count, colour in image.convert("RGB").getcolors(1 << 20) if count > 400}
    size = re.search(r'width="(.*?)" height="(.*?)"', svg)
    assert (width, height) == tuple(2 * float(text) for text in size.groups())
    assert {(255, 255, 255), (31, 98, 196), (197, 47, 51), (241, 236, 225)} <= colours
    assert [*path.parent.iterdir()] == [path]
    with pytest.raises(ConfigError, match=r"unsupported suffix for a PNG image; expected \.png. Use --svg"):
        write_png(tmp_path / "game.svg", svg)
