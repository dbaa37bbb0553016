"""``hexdata show``."""

from __future__ import annotations

from hexdata.cli.app import AnyPath, command, options_of


def show(
    location: str,
    position: int | None = None,
    game: int | None = None,
    ply: int | None = None,
    svg: AnyPath | None = None,
    png: AnyPath | None = None,
    every: int | None = None,
    numbers: bool = False,
    json: bool = False,
) -> None:
    """Draw a position or a game of a store, a shard or a TRMPH text.

    Examples:
        hexdata show store 123
        hexdata show store --game 7 --svg game.svg --every 10
        hexdata show store/shards/train-000000.tar:17
        hexdata show '#13,a1b2c3'

    Arguments:
        location LOCATION: Path or address of a store; SHARD.tar:17 for the position with index 17 of a shard;
            or a game as TRMPH text, '#13,a1b2c3…'.
        position POSITION_ID: Id of a position in a store.

    Options:
        --game N: Game to show. Shows its final position unless --ply is given.
        --ply N: Number of moves made in the game at the position.
        --svg FILE: Write the drawing to an SVG file, path or address. A game becomes a filmstrip.
        --png FILE: Write the drawing to a PNG file, path or address, twice as large as the SVG.
        --every K: Show every K-th position of the filmstrip, and the last one. Default: about 48 boards.
        --numbers: With --svg or --png: number the stones by ply.
    """
    from rich.text import Text

    from hexdata import show as library
    from hexdata.draw.terminal import TEXT_WIDTH

    options = options_of(library.ShowOptions, locals())
    with command(json) as (output, _):
        found = library.find(location, options)
        files = {"svg": svg, "png": png}
        drawing = library.draw_svg(found, options) if any(files.values()) else ""
        if svg is not None:
            library.write_svg(svg, drawing)
        if png is not None:
            library.write_png(png, drawing)
    if output.print_json(found.to_json() | {name: file and str(file) for name, file in files.items()}):
        return
    if numbers and not any(files.values()):
        output.note("--numbers has no effect without --svg or --png")
    for file in filter(None, files.values()):
        output.line(f"{file}: {', '.join(found.facts())}")
    if any(files.values()):
        return
    # In colour and Unicode, if the terminal supports them.
    out = output.out
    shown = found.last if isinstance(found, library.Game) else found
    width = min(TEXT_WIDTH, out.width) if out.is_terminal else TEXT_WIDTH
    unicode = "utf" in out.encoding
    color = out.color_system is not None and not out.no_color
    out.print(Text.from_ansi(shown.text(color=color, unicode=unicode, width=width).removesuffix("\n")))
    if isinstance(found, library.Game):
        output.line(", ".join(found.facts()))
