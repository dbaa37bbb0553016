"""Parts that the commands share: the application, common options, and the context in which a command runs."""

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
    from hexdata.cli.bar import ProgressBar
    from hexdata.cli.render import Output
    from hexdata.engine import Engine
    from hexdata.storage import AnyPath
else:
    AnyPath = str
    """The type that typer sees. ``parse_path`` converts the text."""

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
    "parse_path",
    "print_stderr",
    "prints_to_stderr",
    "using_engine",
]

INTERRUPTED = "interrupted; run the same command again to resume"


def print_stderr(message: str) -> None:
    """Print one line to standard error, with control characters escaped."""
    sys.stderr.write(f"{printable(message)}\n")


class _Group(TyperGroup):
    """A group of commands that escapes usage errors, because they repeat arguments such as file names."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Parse the options of ``hexdata`` itself."""
        with _printable_usage():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        """Parse the arguments of a command and run it."""
        with _printable_usage():
            return super().invoke(ctx)


@contextmanager
def _printable_usage() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if hasattr(error, "format_message"):  # a usage error of click, which typer may vendor
            text = printable(error.format_message())
            error.format_message = lambda: text
        raise


app = typer.Typer(
    cls=_Group,
    name="hexdata",
    help="Store, query, shuffle and export board-game positions for training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def parse_path(text: str) -> AnyPath:
    """Return an argument as a local path or an address in an object store.

    Raises:
        ConfigError: the address is invalid.
    """
    from hexdata.storage import as_path

    return as_path(text)


Store = Annotated[
    AnyPath,
    typer.Argument(
        metavar="STORE",
        help="Folder of the store, or its address, such as s3://BUCKET/STORE.",
        show_default=False,
        parser=parse_path,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one line of JSON.")]
Memory = Annotated[
    str, typer.Option("--memory", metavar="SIZE", help="Memory limit of all processes together.")
]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers", metavar="N", min=1, help="Worker processes. Default: one per core, if they fit --memory."
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads", metavar="N", min=1, help="Threads. Default: one per core, if they fit --memory."
    ),
]
EngineName = Annotated[
    Literal["local", "ray"], typer.Option("--engine", help="Run on this machine or on a Ray cluster.")
]
Address = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="HOST:PORT",
        help="Address of the Ray cluster, or auto. Default: RAY_ADDRESS, or a new cluster on this machine.",
    ),
]
Seed = Annotated[
    int,
    typer.Option("--seed", metavar="N", help="Random seed. The same seed gives the same order."),
]


@contextmanager
def command(as_json: bool, *paths: object) -> Iterator[tuple[Output, ProgressBar]]:
    """Yield the output and the progress bar of a command; exit with status 130 on Ctrl-C.

    Args:
        as_json: whether to print the result as JSON.
        paths: paths that the command uses. An error of an object store names the first address among them.
    """
    from hexdata.cli.bar import ProgressBar
    from hexdata.cli.render import Output
    from hexdata.storage import translate_errors

    output = Output(as_json)
    try:
        with translate_errors(*paths), ProgressBar(output) as bar:
            yield output, bar
    except KeyboardInterrupt:
        output.error(INTERRUPTED)
        raise typer.Exit(130) from None


@contextmanager
def using_engine(name: str, address: str | None) -> Iterator[Engine]:
    """Yield the engine of a command. Output that Ray prints is redirected to standard error."""
    from hexdata.engine import open_engine

    def note(message: str) -> None:
        print_stderr(f"note: {message}")  # while the bar is shown, it prints this above itself

    with prints_to_stderr(), open_engine(name, address, note) as engine:
        yield engine


@contextmanager
def prints_to_stderr() -> Iterator[None]:
    """Redirect output of libraries, such as Ray, to standard error: standard output is for results."""
    with redirect_stdout(sys.stderr):
        yield


def _version(requested: bool) -> None:
    if requested:
        typer.echo(f"hexdata {hexdata.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass
