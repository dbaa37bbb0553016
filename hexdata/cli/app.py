"""What the commands share: the application they belong to, options of one meaning, output and bar."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperGroup

import hexdata
from hexdata.text import printable

if TYPE_CHECKING:
    from hexdata.cli.bar import Bar
    from hexdata.cli.render import Output
    from hexdata.engine import Engine
    from hexdata.storage import AnyPath
else:
    AnyPath = str
    """What typer takes a path for: what the text means is for the parser to say."""

__all__ = [
    "INTERRUPTED",
    "Address",
    "AnyPath",
    "EngineName",
    "Json",
    "Memory",
    "Seed",
    "Store",
    "Threads",
    "Workers",
    "app",
    "command",
    "facts_alone",
    "read_path",
    "running_on",
    "tell",
]

INTERRUPTED = "interrupted; run the same command again and it goes on from there"


def tell(message: str) -> None:
    """Write one line to standard error, without what a name in it could do to a terminal."""
    sys.stderr.write(f"{printable(message)}\n")


class _Group(TyperGroup):
    """Commands whose errors of usage are printable: they repeat arguments, often names of files."""

    def make_context(self, *args: Any, **more: Any) -> Any:
        """Parse the arguments of ``hexdata`` itself."""
        with _printable_usage():
            return super().make_context(*args, **more)

    def invoke(self, ctx: Any) -> Any:
        """Parse the arguments of a command, and run it."""
        with _printable_usage():
            return super().invoke(ctx)


@contextmanager
def _printable_usage() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if hasattr(error, "format_message"):  # an error of click, which typer may bring along
            text = printable(error.format_message())
            error.format_message = lambda: text
        raise


app = typer.Typer(
    cls=_Group,
    name="hexdata",
    help="Board-game training data: legacy pickles to a queryable store, a provable global shuffle, "
    "training shards and batches.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def read_path(text: str) -> AnyPath:
    """Return the path that an argument means: one of this machine, or an address.

    Raises:
        ConfigError: the address cannot be used.
    """
    from hexdata.storage import as_path

    return as_path(text)


Store = Annotated[
    AnyPath,
    typer.Argument(
        metavar="STORE",
        help="The store's folder, or its address, such as s3://BUCKET/STORE.",
        show_default=False,
        parser=read_path,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the facts as one line of JSON.")]
Memory = Annotated[
    str, typer.Option("--memory", metavar="SIZE", help="Budget for all processes together, such as 1GB.")
]
Workers = Annotated[
    int | None,
    typer.Option("--workers", min=1, help="Processes. Default: one a core, as far as --memory allows."),
]
Threads = Annotated[
    int | None, typer.Option("--threads", min=1, help="Default: one a core, as far as --memory allows.")
]
EngineName = Annotated[
    Literal["local", "ray"],
    typer.Option("--engine", help="Where the work is done: on this machine, or by a Ray cluster."),
]
Address = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="HOST:PORT",
        help="Of the Ray cluster, or auto. Default: RAY_ADDRESS, or a cluster of this machine alone.",
    ),
]
Seed = Annotated[int, typer.Option("--seed", help="Names the order: the same seed, the same bytes.")]


@contextmanager
def command(as_json: bool, *places: object) -> Iterator[tuple[Output, Bar]]:
    """Give a command its output and, while it works, a progress bar.

    Args:
        as_json: whether facts are printed as JSON.
        places: paths that it works on; if an object store fails, its error names the first address.
    """
    from hexdata.cli.bar import Bar
    from hexdata.cli.render import Output
    from hexdata.storage import telling

    output = Output(as_json)
    try:
        with telling(*places), Bar(output) as bar:
            yield output, bar
    except KeyboardInterrupt:
        output.error(INTERRUPTED)
        raise typer.Exit(130) from None


@contextmanager
def running_on(name: str, address: str | None) -> Iterator[Engine]:
    """Give a command its engine. What Ray prints meanwhile goes to standard error: the other is for facts."""
    from hexdata.engine import open_engine

    def note(message: str) -> None:
        tell(f"note: {message}")  # above the bar, which has taken its place meanwhile

    with facts_alone(), open_engine(name, address, note) as engine:
        yield engine


@contextmanager
def facts_alone() -> Iterator[None]:
    """Keep standard output for facts: what libraries print meanwhile, Ray above all, goes to the other."""
    with redirect_stdout(sys.stderr):
        yield


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"hexdata {hexdata.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass
