"""``hexdata browse``."""

from __future__ import annotations

import sys

from hexdata.cli.app import AnyPath, Size, options_of


def browse(
    store: AnyPath,
    port: int | None = None,
    no_open: bool = False,
    memory: Size = "1GB",
    json: bool = False,
) -> None:
    """Show the games and positions of a store on a local web page.

    Only this machine can open the page, until Ctrl-C.

    Examples:
        hexdata browse store
        hexdata browse store --port 9000 --no-open

    Options:
        --port N: Port of the page on this machine. Default: 8642, or a free one if it is in use.
        --no-open: Print the address and do not open the web browser.
    """
    from hexdata.browse import BrowseOptions, browse_store
    from hexdata.cli.render import Output
    from hexdata.system import memory_limit

    options = options_of(BrowseOptions, locals())
    output = Output(json)

    def ready(address: str) -> None:
        if not output.print_json({"address": address, "store": str(store)}):
            output.line(f"{address} shows {store}. Press Ctrl-C to end.")
        sys.stdout.flush()  # for a reader at the other end of a pipe
        if not no_open:
            import webbrowser

            webbrowser.open(address)

    with memory_limit(options.memory):
        browse_store(store, options, ready=ready, note=output.note)
