"""``hexdata browse``."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from hexdata.cli.app import Json, Memory, Store
from hexdata.units import parse_bytes

__all__ = ["browse"]


def browse(
    store: Store,
    port: Annotated[
        int | None,
        typer.Option(
            "--port",
            metavar="N",
            min=0,
            max=65535,
            help="Port of the page on this machine. Default: 8642, or a free one if it is in use.",
        ),
    ] = None,
    no_open: Annotated[
        bool, typer.Option("--no-open", help="Print the address and do not open the web browser.")
    ] = False,
    memory: Memory = "1GB",
    as_json: Json = False,
) -> None:
    """Show the games and positions of a store on a local web page.

    Only this machine can open the page, until Ctrl-C. The first time, an index is built in the cache folder.

    Examples:
        hexdata browse store
        hexdata browse store --port 9000 --no-open
    """
    from hexdata.browse import BrowseOptions, browse_store
    from hexdata.cli.render import Output
    from hexdata.pool import memory_limit
    from hexdata.storage import translate_errors

    output = Output(as_json)

    def ready(address: str) -> None:
        if not output.print_json({"address": address, "store": str(store)}):
            output.line(f"{address} shows {store}. Press Ctrl-C to end.")
        sys.stdout.flush()  # for a reader at the other end of a pipe
        if not no_open:
            import webbrowser

            webbrowser.open(address)

    options = BrowseOptions(port=port, memory=parse_bytes(memory))
    with translate_errors(store), memory_limit(options.memory):
        browse_store(store, options, ready=ready, note=output.note)
