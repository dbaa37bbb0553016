"""From what a person names, a store, a shard or a game's text, to the position or the game meant."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from hexdata.checks import check_suffix
from hexdata.errors import ConfigError
from hexdata.remote import AnyPath, as_path
from hexdata.show.game import Game
from hexdata.show.position import Position
from hexdata.show.shards import read_shard_position
from hexdata.show.store import read_game, read_position
from hexdata.show.trmph import looks_like_game, read_trmph
from hexdata.store import Store
from hexdata.store.files import write_bytes
from hexdata.store.room import telling_full

__all__ = ["ShowOptions", "draw_svg", "find", "write_svg"]

_SHARD: Final = re.compile(r"(?P<path>.*\.tar)(?::(?P<number>[0-9]+))?", re.DOTALL)


@dataclass(frozen=True)
class ShowOptions:
    """What to show of a place.

    Attributes:
        position: id of a position of a store.
        game: id of a game of a store.
        ply: of a game: the position after so many moves. None takes the whole game.
        every: of a filmstrip: every k-th position, and the last one; None takes about 48 in all.
        numbers: on a board drawn as SVG: the ply at which each stone was played.

    Raises:
        ConfigError: a number is out of range.
    """

    position: int | None = None
    game: int | None = None
    ply: int | None = None
    every: int | None = None
    numbers: bool = False

    def __post_init__(self) -> None:
        for name, least in (("position", 0), ("game", 0), ("ply", 0), ("every", 1)):
            number = getattr(self, name)
            if number is not None and number < least:
                raise ConfigError(f"{name} is a number from {least} up", found=number)
        if self.position is not None and (self.game is not None or self.ply is not None):
            raise ConfigError("a position is shown by its id, or by game and ply, not by both")
        if self.every is not None and self.ply is not None:
            raise ConfigError("a filmstrip is of a whole game, not of one ply")


def find(place: str, options: ShowOptions | None = None) -> Position | Game:
    """Return the position meant, or the game where no ply is given.

    Args:
        place: a store's folder, or its address; ``SHARD.tar:17``, the position 17 of a shard, counted from 0;
            or a game as TRMPH text or its URL.
        options: which position or game of it.

    Raises:
        ConfigError: the options do not say which, or say what such a place has not.
        StoreError: there is no such position, game or store.
        FormatError: the text or the shard is damaged.
    """
    options = options or ShowOptions()
    if looks_like_game(place):
        _refuse(place, "a game's text", position=options.position, game=options.game)
        return _at(read_trmph(place), options.ply)
    shard = _SHARD.fullmatch(place)
    if shard is not None and not as_path(place).is_dir():
        names = {
            "position": options.position,
            "game": options.game,
            "ply": options.ply,
            "every": options.every,
        }
        _refuse(place, "a shard", **names)
        if shard["number"] is None:
            raise ConfigError(
                "say which position of the shard, counted from 0", path=place, expected=f"{place}:17"
            )
        return read_shard_position(shard["path"], int(shard["number"]))
    return _of_store(place, options)


def _of_store(place: str, options: ShowOptions) -> Position | Game:
    if options.game is not None:
        return _at(read_game(place, options.game), options.ply)
    if options.position is None:
        positions = Store.open(place).manifest.counts.get("positions", 0)
        raise ConfigError(
            "say which position, or which --game",
            path=place,
            expected=f"a position from 0 to {positions - 1}" if positions else "a store with positions",
        )
    _refuse(place, "a single position", every=options.every)
    return read_position(place, options.position)


def _at(game: Game, ply: int | None) -> Position | Game:
    return game if ply is None else game.at(ply)


def _refuse(place: str, what: str, **options: int | None) -> None:
    """Raise a ConfigError if any of these options is given."""
    for name, value in options.items():
        if value is not None:
            raise ConfigError(f"there is no {name} to choose in {what}", path=place, found=value)


def draw_svg(found: Position | Game, options: ShowOptions) -> str:
    """Draw a position as a board, a game as a filmstrip."""
    if isinstance(found, Game):
        return found.svg(every=options.every, numbers=options.numbers)
    return found.svg(numbers=options.numbers)


def write_svg(path: str | AnyPath, svg: str) -> None:
    """Write a drawing to a file, or to an address, whole or not at all.

    Raises:
        ConfigError: its name is not that of a drawing.
        BudgetError: the disk is full.
        OSError: it cannot be written.
    """
    path = as_path(path)
    check_suffix(path, "a drawing", [".svg"])
    with telling_full(path, "Make room, or give a file elsewhere."):
        write_bytes(path, svg.encode("utf-8"))
