"""Lookup of a position or game in a store, a shard or TRMPH text, by the arguments of ``hexdata show``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from hexdata.checks import check_fields, check_suffix
from hexdata.errors import ConfigError
from hexdata.extras import installed_by
from hexdata.show.comparison import Comparison
from hexdata.show.game import Game
from hexdata.show.position import Position
from hexdata.show.shards import read_shard_position
from hexdata.show.store import read_game, read_position
from hexdata.show.trmph import looks_like_game, read_trmph
from hexdata.storage import AnyPath, as_path, storage_of
from hexdata.store import Store
from hexdata.store.disk_space import translate_disk_full
from hexdata.store.files import write_bytes

__all__ = ["ShowOptions", "compare", "draw_svg", "find", "write_png", "write_svg"]

_SHARD: Final = re.compile(r"(?P<path>.*\.tar)(?::(?P<number>[0-9]+))?", re.DOTALL)
_OF_STORE: Final = re.compile(r"(?:(?P<game>[0-9]+):)?(?P<number>[0-9]+)")
"""A position of the same store: its id, or its game and ply."""
_STYLE: Final = re.compile("<style>.*?</style>", re.DOTALL)


@dataclass(frozen=True)
class ShowOptions:
    """Options of :func:`find` and :func:`draw_svg`.

    Attributes:
        position: Id of a position in a store. Default None.
        game: Id of a game in a store. Default None.
        ply: Number of moves made in the game at the position. Default None: the whole game.
        every: In a filmstrip, show every k-th position and the last one. Default None: about 48 positions.
        numbers: Whether to number stones by the ply at which they were played. Default False.

    Raises:
        ConfigError: A number is out of range.
    """

    position: int | None = None
    game: int | None = None
    ply: int | None = None
    every: int | None = None
    numbers: bool = False

    def __post_init__(self) -> None:
        check_fields(self, {"position": 0, "game": 0, "ply": 0, "every": 1}, flags=("numbers",))
        if self.position is not None and (self.game is not None or self.ply is not None):
            raise ConfigError("choose a position by its id, or by game and ply, not both")
        if self.every is not None and self.ply is not None:
            raise ConfigError("every and ply exclude each other: a filmstrip shows a whole game")


def find(location: str, options: ShowOptions | None = None) -> Position | Game:
    """Return a position, or a game if no ply is given.

    Args:
        location: Path or address of a store; ``SHARD.tar:17`` for the position with index 17 of a shard; or a
            game as TRMPH text or URL.
        options: The position or game to find. Default None: no option is set.

    Raises:
        ConfigError: An option is missing, or does not apply to this kind of location.
        StoreError: There is no such position, game or store.
        FormatError: The text or the shard is damaged.
    """
    options = options or ShowOptions()
    if looks_like_game(location):
        _refuse(location, "a game's text", position=options.position, game=options.game)
        return _at(read_trmph(location), options.ply)
    if shard := _match_shard(location):
        names = {
            "position": options.position,
            "game": options.game,
            "ply": options.ply,
            "every": options.every,
        }
        _refuse(location, "a shard", **names)
        if shard["number"] is None:
            raise ConfigError("no position of the shard is given", path=location, expected=f"{location}:17")
        return read_shard_position(shard["path"], int(shard["number"]))
    return _of_store(location, options)


def compare(location: str, other: str, options: ShowOptions | None = None) -> Comparison:
    """Return the differences between two positions. Of a whole game, the last position is compared.

    Args:
        location: As in :func:`find`.
        other: Id of the second position in the same store, its game and ply as ``7:30``; or a location as in
            :func:`find`.
        options: Options of the first position. Default None: no option is set.

    Raises:
        ConfigError: As in :func:`find`; or the board sizes differ.
        StoreError, FormatError: As in :func:`find`.
    """
    options = options or ShowOptions()
    _refuse(location, "a comparison", every=options.every, numbers=options.numbers or None)
    first = find(location, options)
    same = _OF_STORE.fullmatch(other)
    if same is None:
        if not (looks_like_game(other) or _match_shard(other)):
            raise ConfigError(
                "the second position of the comparison cannot be used",
                found=repr(other),
                expected="its id or GAME:PLY in the same store, SHARD.tar:17, or a game as '#13,a1b2c3'",
            )
        second = find(other)
    elif looks_like_game(location) or _match_shard(location):
        raise ConfigError(
            "a position of another kind is needed for the comparison",
            found=other,
            expected="SHARD.tar:17 or '#13,a1b2c3', because the first position is not of a store",
        )
    elif same["game"] is None:
        second = find(location, ShowOptions(position=int(same["number"])))
    else:
        second = find(location, ShowOptions(game=int(same["game"]), ply=int(same["number"])))
    return Comparison(*(found.last if isinstance(found, Game) else found for found in (first, second)))


def _match_shard(location: str) -> re.Match[str] | None:
    """Return the parts of the location of a shard; None for other locations."""
    shard = _SHARD.fullmatch(location)
    return None if shard is None or storage_of(as_path(location)).is_folder() else shard


def _of_store(location: str, options: ShowOptions) -> Position | Game:
    if options.game is not None:
        return _at(read_game(location, options.game), options.ply)
    if options.position is None:
        positions = Store.open(location).manifest.counts.get("positions", 0)
        raise ConfigError(
            "no position or --game is given",
            path=location,
            expected=f"a position from 0 to {positions - 1}" if positions else "a store with positions",
        )
    _refuse(location, "a single position", every=options.every)
    return read_position(location, options.position)


def _at(game: Game, ply: int | None) -> Position | Game:
    return game if ply is None else game.at(ply)


def _refuse(location: str, what: str, **options: int | None) -> None:
    """Raise a ConfigError if one of these options is set."""
    for name, value in options.items():
        if value is not None:
            raise ConfigError(f"{name} does not apply to {what}", path=location, found=value)


def draw_svg(found: Position | Game | Comparison, options: ShowOptions) -> str:
    """Return the SVG of a position as a board, of a game as a filmstrip, or of a comparison as two boards."""
    if isinstance(found, Comparison):
        return found.svg()
    if isinstance(found, Game):
        return found.svg(every=options.every, numbers=options.numbers)
    return found.svg(numbers=options.numbers)


def write_svg(path: str | AnyPath, svg: str) -> None:
    """Write a drawing to a file or address, atomically.

    Raises:
        ConfigError: The name does not end in .svg.
        BudgetError: The disk is full.
        OSError: The file cannot be written.
    """
    path = as_path(path)
    check_suffix(path, "an SVG drawing", [".svg"], hint="Use --png for a PNG image.")
    _write(path, svg.encode("utf-8"))


def write_png(path: str | AnyPath, svg: str, *, scale: float = 2.0) -> None:
    """Write a drawing as an image with a white background to a file or address, atomically.

    Args:
        path: The file, whose name ends in .png.
        svg: The drawing, as ``draw_svg`` returns it.
        scale: Pixels of the image per pixel of the SVG. Default 2.

    Raises:
        ConfigError: The name does not end in .png, or the extra ``png`` is not installed.
        BudgetError: The disk is full.
        OSError: The file cannot be written.
    """
    path = as_path(path)
    check_suffix(path, "a PNG image", [".png"], hint="Use --svg for an SVG drawing.")
    with installed_by("png", "a drawing as PNG"):
        import resvg_py
    plain = _STYLE.sub("", svg)  # resvg has no CSS variables; the colours are also attributes
    _write(path, bytes(resvg_py.svg_to_bytes(svg_string=plain, zoom=scale, background="white")))


def _write(path: AnyPath, content: bytes) -> None:
    with translate_disk_full(path, "Free disk space, or choose another file."):
        write_bytes(path, content)
