"""Positions and games of stores, shards and TRMPH text, and their drawings."""

from hexdata.show.find import (
    ShowOptions,
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
    "Game",
    "Position",
    "ShowOptions",
    "draw_svg",
    "find",
    "read_game",
    "read_position",
    "read_shard_position",
    "read_trmph",
    "write_png",
    "write_svg",
]
