"""``hexdata show``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hexdata.cli.app import AnyPath, Json, command, parse_path

if TYPE_CHECKING:
    from hexdata.cli.render import Output
    from hexdata.show import Comparison, Game, Position

__all__ = ["show"]


def show(
    location: Annotated[
        str,
        typer.Argument(
            metavar="LOCATION",
            help="Path or address of a store; SHARD.tar:17 for the position with index 17 of a shard; or a "
            "game as TRMPH text, '#13,a1b2c3…'.",
            show_default=False,
        ),
    ],
    position: Annotated[
        int | None,
        typer.Argument(metavar="POSITION_ID", min=0, help="Id of a position in a store.", show_default=False),
    ] = None,
    game: Annotated[
        int | None,
        typer.Option(
            "--game", metavar="N", min=0, help="Game to show. Shows its final position unless --ply is given."
        ),
    ] = None,
    ply: Annotated[
        int | None,
        typer.Option("--ply", metavar="N", min=0, help="Number of moves made in the game at the position."),
    ] = None,
    compare_with: Annotated[
        str | None,
        typer.Option(
            "--compare",
            metavar="OTHER",
            help="Show how another position differs: its id or GAME:PLY in the same store, SHARD.tar:17, or "
            "TRMPH text.",
        ),
    ] = None,
    svg: Annotated[
        AnyPath | None,
        typer.Option(
            "--svg",
            metavar="FILE",
            help="Write the drawing to an SVG file, path or address. A game becomes a filmstrip.",
            parser=parse_path,
        ),
    ] = None,
    png: Annotated[
        AnyPath | None,
        typer.Option(
            "--png",
            metavar="FILE",
            help="Write the drawing to a PNG file, path or address, twice as large as the SVG.",
            parser=parse_path,
        ),
    ] = None,
    every: Annotated[
        int | None,
        typer.Option(
            "--every",
            metavar="K",
            min=1,
            help="Show every K-th position of the filmstrip, and the last one. Default: about 48 boards.",
        ),
    ] = None,
    numbers: Annotated[
        bool,
        typer.Option("--numbers", help="With --svg or --png: number the stones by ply."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Draw a position or a game of a store, a shard or a TRMPH text.

    Examples:
        hexdata show store 123
        hexdata show store --game 7 --svg game.svg --every 10
        hexdata show store 123 --compare 124
        hexdata show store/shards/train-000000.tar:17
        hexdata show '#13,a1b2c3'
    """
    from hexdata.show import Comparison, ShowOptions, compare, draw_svg, find, write_png, write_svg

    options = ShowOptions(position=position, game=game, ply=ply, every=every, numbers=numbers)
    with command(as_json, location, svg) as (output, _):
        found = find(location, options) if compare_with is None else compare(location, compare_with, options)
        files = {"svg": svg, "png": png}
        drawing = draw_svg(found, options) if any(files.values()) else ""
        if svg is not None:
            write_svg(svg, drawing)
        if png is not None:
            write_png(png, drawing)
    if output.print_json(found.to_json() | {name: file and str(file) for name, file in files.items()}):
        return
    if numbers and not any(files.values()):
        output.note("--numbers has no effect without --svg or --png")
    for file in filter(None, files.values()):
        output.line(f"{file}: {found.title if isinstance(found, Comparison) else ', '.join(found.facts())}")
    if not any(files.values()):
        _draw(output, found)
    elif isinstance(found, Comparison):
        for fact in found.facts():
            output.line(fact)


def _draw(output: Output, found: Position | Game | Comparison) -> None:
    """Print the drawing to the terminal, in colour and Unicode if the terminal supports them."""
    from rich.text import Text

    from hexdata.draw.terminal import TEXT_WIDTH
    from hexdata.show import Game

    position = found.last if isinstance(found, Game) else found
    color = output.out.color_system is not None and not output.out.no_color
    width = min(TEXT_WIDTH, output.out.width) if output.out.is_terminal else TEXT_WIDTH
    drawing = position.text(color=color, unicode=_fits(position.text(), output.out.encoding), width=width)
    output.out.print(Text.from_ansi(drawing.removesuffix("\n")))
    if isinstance(found, Game):
        output.line(", ".join(found.facts()))


def _fits(text: str, encoding: str) -> bool:
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True
