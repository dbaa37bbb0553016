"""Parts that the commands share: the application, common options, and the context in which a command runs."""

from __future__ import annotations

import inspect
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer
from typer.core import TyperCommand, TyperGroup

import hexdata
from hexdata.errors import without_secrets
from hexdata.text import did_you_mean, printable, wrap

if TYPE_CHECKING:
    from hexdata.cli.render import Output
    from hexdata.engine import Engine
    from hexdata.errors import HexdataError
    from hexdata.progress_bar import ProgressBar
    from hexdata.storage import AnyPath
else:
    AnyPath = str
    """The type that typer sees. ``parse_path`` converts the text."""

__all__ = [
    "INTERRUPTED",
    "RESOURCES",
    "Address",
    "AnyPath",
    "Command",
    "EngineName",
    "Json",
    "Memory",
    "Seed",
    "Store",
    "Threads",
    "Workers",
    "app",
    "command",
    "interrupted_by_termination",
    "parse_path",
    "print_error",
    "print_stderr",
    "prints_to_stderr",
    "using_engine",
]

INTERRUPTED = "interrupted; run the same command again to resume"

RESOURCES: Final = "Memory and processors"
"""Group of options in the help of a command."""
_EXAMPLES: Final = "\nExamples:\n"
_PLAIN_MESSAGES: Final = (
    ("Value error, ", ""),
    ("Input should be greater than or equal to ", "expected at least "),
    ("Input should be less than or equal to ", "expected at most "),
    ("Input should be a valid integer.*", "expected a whole number"),
    ("Input should be a valid number.*", "expected a number"),
    ("'.*' is not a valid integer.*", "expected a whole number"),
    ("'.*' is not a valid float.*", "expected a number"),
    (r"\S+ is not in the range x>=(\S+)\.", r"expected at least \1"),
    (r"\S+ is not in the range (\S+)<=x<=(\S+)\.", r"expected \1 to \2"),
)
"""Patterns of messages of Typer about values, and the texts instead. Releases differ in their messages."""
_NOT_A_CHOICE: Final = re.compile(r"'(?P<value>[^']*)' is not one of (?P<choices>'.*')\.$")
_RANGES: Final = (
    (re.compile(r"\b([0-9.]+)<=x<=([0-9.]+)\b"), r"\1 to \2"),
    (re.compile(r"\bx>=([0-9.]+)\b"), r"at least \1"),
)
"""Ranges as typer prints them, and in words."""


def print_stderr(message: str) -> None:
    """Print one line to standard error, with control characters escaped; a terminal wraps it at spaces."""
    text = printable(without_secrets(message))
    if sys.stderr.isatty() and not text.startswith(" "):
        text = "\n".join(wrap(text, shutil.get_terminal_size().columns))
    sys.stderr.write(f"{text}\n")


def print_error(error: HexdataError) -> None:
    """Print an error, its lines, hint and commands to standard error."""
    first, *others = error.report()
    print_stderr(f"hexdata: {first}")
    if others:
        from hexdata.cli.render import Output

        output = Output(as_json=False)
        for line in others:
            output.note_line(line, is_command=line in error.commands)


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


class Command(TyperCommand):
    """A command whose help has plain types, groups of options and, from its docstring, examples."""

    @property
    def examples(self) -> list[str]:
        """The command lines below "Examples:" in the docstring."""
        _, _, examples = inspect.cleandoc(self.help or "").partition(_EXAMPLES)
        return [line.strip() for line in examples.splitlines() if line.strip()]

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Parse arguments. If only STORE of ``INPUT... STORE`` is filled, report that STORE is missing."""
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            missing: Any = getattr(error, "param", None)
            if type(error).__name__ == "MissingParameter" and _is_argument(missing) and missing.nargs == -1:
                values, _, _ = self.make_parser(ctx).parse_args(given)
                filled = [
                    other for other in self.get_params(ctx) if _is_argument(other) and values[other.name]
                ]
                error.param = filled[-1] if filled else missing  # type: ignore[attr-defined]
            raise

    def invoke(self, ctx: Any) -> Any:
        """Run the command, after removing what killed commands have left."""
        from hexdata.errors import ConfigError
        from hexdata.storage import cache_folder
        from hexdata.temporary import remove_abandoned

        remove_abandoned()
        with suppress(ConfigError):  # of an invalid cache folder, which concerns the commands that use it
            remove_abandoned(cache_folder("temporary"))
        return super().invoke(ctx)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the parts of the usage line, such as ``INPUT... STORE``."""
        arguments = [parameter for parameter in self.get_params(ctx) if _is_argument(parameter)]
        names = [(_argument_name(argument), argument.required) for argument in arguments]
        return ["[OPTIONS]", *(name if required else f"[{name}]" for name, required in names)]

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """Write the docstring up to its examples."""
        whole, self.help = self.help, inspect.cleandoc(self.help or "").partition(_EXAMPLES)[0]
        try:
            super().format_help_text(ctx, formatter)
        finally:
            self.help = whole

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments and the groups of options."""
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            name, text = record
            group = getattr(parameter, "rich_help_panel", None) or "Options"
            if _is_argument(parameter):
                group, name = "Arguments", _argument_name(parameter)
            for pattern, words in _RANGES:
                text = pattern.sub(words, text)
            groups.setdefault(group, []).append((name, text))
        for group in sorted(groups, key=lambda name: name == RESOURCES):
            if groups[group]:
                with formatter.section(group):
                    formatter.write_dl(groups[group])

    def format_epilog(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        """Write the examples."""
        if self.examples:
            with formatter.section("Examples"):
                for line in self.examples:
                    formatter.write(f"{' ' * formatter.current_indent}{line}\n")


def _is_argument(parameter: Any) -> bool:
    return bool(parameter.param_type_name == "argument")


def _argument_name(argument: Any) -> str:
    return f"{argument.metavar}{'...' if argument.nargs != 1 else ''}"


def _plain(text: str) -> str:
    """Return a message about a value in plain words."""
    for pattern, plain in _PLAIN_MESSAGES:
        text = re.sub(f"(?<=: ){pattern}", plain, text, count=1)
    return text


def _with_suggestion(text: str) -> str:
    """Return a message, with the most similar choice if a value is not one of the choices of an option."""
    found = _NOT_A_CHOICE.search(text)
    choices = re.findall("'([^']*)'", found["choices"]) if found else []
    hint = did_you_mean(found["value"], choices) if found else None
    return f"{text} {hint}" if hint else text


@contextmanager
def _printable_usage() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        shows_help = type(error).__name__ == "NoArgsIsHelpError"  # its message is the help, on many lines
        if (
            hasattr(error, "format_message") and not shows_help
        ):  # a usage error of click, which typer may vendor
            text = error.format_message()
            for argument in sys.argv[1:]:  # one by one, since an argument may contain spaces
                text = text.replace(argument, without_secrets(argument))
            text = _with_suggestion(_plain(printable(text)))
            if "unexpected extra argument" in text:
                text += ". Quote a query, a condition or a path that contains spaces."
            usage = getattr(error, "cmd", None)
            if type(error).__name__ == "MissingParameter" and isinstance(usage, Command) and usage.examples:
                text += f"\nExample: {usage.examples[0]}"
            error.format_message = lambda: text
        raise


app = typer.Typer(
    cls=_Group,
    name="hexdata",
    help="Store, query, shuffle and export board-game positions for training.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def parse_path(text: str) -> AnyPath:
    """Return an argument as a local path or an address in an object store.

    Raises:
        ConfigError: The address is invalid.
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
    str,
    typer.Option(
        "--memory",
        metavar="SIZE",
        help="Memory limit of all processes together, such as 700MB or 2GB.",
        rich_help_panel=RESOURCES,
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers",
        metavar="N",
        min=1,
        help="Number of worker processes. Default: 1 for little data, else one per core, "
        "if they fit --memory.",
        rich_help_panel=RESOURCES,
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        metavar="N",
        min=1,
        help="Number of threads. Default: one per core, if they fit --memory.",
        rich_help_panel=RESOURCES,
    ),
]
EngineName = Annotated[
    Literal["local", "ray"],
    typer.Option(
        "--engine",
        metavar="local|ray",
        help="Run on this machine or on a Ray cluster.",
        rich_help_panel=RESOURCES,
    ),
]
Address = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="HOST:PORT",
        help="Address of the Ray cluster, or auto. Default: RAY_ADDRESS, or a new cluster on this machine.",
        rich_help_panel=RESOURCES,
    ),
]
Seed = Annotated[
    int,
    typer.Option("--seed", metavar="N", help="Random seed. The same seed gives the same order."),
]


@contextmanager
def interrupted_by_termination() -> Iterator[None]:
    """Let SIGTERM, and SIGHUP of a closed terminal, interrupt this process as Ctrl-C does.

    The process then ends with the status of the signal: 128 and its number. Signals that are ignored, as by
    ``nohup``, stay so.
    """
    received: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        for each in numbers:  # ``timeout`` sends SIGTERM twice: not into the cleaning up
            signal.signal(each, signal.SIG_IGN)
        received.append(number)
        of_ctrl_c = signal.getsignal(signal.SIGINT)
        if callable(of_ctrl_c):
            of_ctrl_c(signal.SIGINT, frame)  # also interrupts queries
        raise KeyboardInterrupt

    possible = [signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)]  # Windows has no SIGHUP
    numbers = [number for number in possible if signal.getsignal(number) is signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        if received:
            sys.exit(128 + received[0])


@contextmanager
def command(as_json: bool, *paths: object) -> Iterator[tuple[Output, ProgressBar]]:
    """Yield the output and the progress bar of a command; exit with status 130 on Ctrl-C.

    Args:
        as_json: Whether to print the result as JSON.
        paths: Paths that the command uses. An error of an object store names the first address among them.
    """
    from hexdata.cli.render import Output, console
    from hexdata.progress_bar import ProgressBar
    from hexdata.storage import translate_errors

    output = Output(as_json)
    try:
        with translate_errors(*paths), ProgressBar(console(stderr=True, soft_wrap=False)) as bar:
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
