"""``hexdata show``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hexdata.cli.app import AnyPath, Json, command, parse_path

if TYPE_CHECKING:
    from hexdata.cli.render import Output
    from hexdata.show import Game, Position

__all__ = ["show"]


def show(
    place: Annotated[
        str,
        typer.Argument(
            metavar="PLACE",
            help="A store's folder; SHARD.tar:17, counted from 0; the address of either; or a game as TRMPH "
            "text, '#13,a1b2c3…'.",
            show_default=False,
        ),
    ],
    position: Annotated[
        int | None,
        typer.Argument(metavar="POSITION_ID", min=0, help="Which position of a store.", show_default=False),
    ] = None,
    game: Annotated[
        int | None,
        typer.Option("--game", min=0, help="Which game of a store; its last position, but for --ply."),
    ] = None,
    ply: Annotated[
        int | None, typer.Option("--ply", min=0, help="Of a game: the position after so many moves.")
    ] = None,
    svg: Annotated[
        AnyPath | None,
        typer.Option(
            "--svg",
            metavar="FILE",
            help="Draw into an SVG file, or its address; a whole game as a filmstrip.",
            parser=parse_path,
        ),
    ] = None,
    every: Annotated[
        int | None,
        typer.Option(
            "--every",
            min=1,
            help="Of a filmstrip: every K-th position, and the last one. Default: about 48 boards.",
        ),
    ] = None,
    numbers: Annotated[
        bool, typer.Option("--numbers", help="In SVG: write on each stone at which ply it was played.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Draw a position or a game: of a store, of a shard, or from a game's text."""
    from hexdata.show import ShowOptions, draw_svg, find, write_svg

    options = ShowOptions(position=position, game=game, ply=ply, every=every, numbers=numbers)
    with command(as_json, place, svg) as (output, _):
        found = find(place, options)
        if svg is not None:
            write_svg(svg, draw_svg(found, options))
    if output.print_json(found.to_json() | {"svg": None if svg is None else str(svg)}):
        return
    if numbers and svg is None:
        output.note("--numbers is for --svg: a cell in the terminal has one letter")
    if svg is not None:
        output.line(f"{svg}: {', '.join(found.facts())}")
    else:
        _draw(output, found)


def _draw(output: Output, found: Position | Game) -> None:
    """Draw in the terminal: with its colours, and in ASCII where it has no other letters."""
    from rich.text import Text

    from hexdata.show import Game

    position = found.last if isinstance(found, Game) else found
    color = output.out.color_system is not None and not output.out.no_color
    drawing = position.text(color=color, unicode=_fits(position.text(), output.out.encoding))
    output.out.print(Text.from_ansi(drawing.removesuffix("\n")))
    if isinstance(found, Game):
        output.line(", ".join(found.facts()))


def _fits(text: str, encoding: str) -> bool:
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True
