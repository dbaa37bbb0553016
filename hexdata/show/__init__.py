"""Positions and games of stores, shards and TRMPH text, and their drawings."""

from hexdata.show.comparison import Comparison
from hexdata.show.find import (
    ShowOptions,
    compare,
    draw_svg,
    find,
    read_game,
    read_position,
    read_shard_position,
    read_trmph,
    write_png,
    write_svg,
)
from hexdata.show.position import Game, Position

__all__ = [
    "Comparison",
    "Game",
    "Position",
    "ShowOptions",
    "compare",
    "draw_svg",
    "find",
    "read_game",
    "read_position",
    "read_shard_position",
    "read_trmph",
    "write_png",
    "write_svg",
]
