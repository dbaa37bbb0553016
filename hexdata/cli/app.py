"""Parts that the commands share: how a command is declared, and the context in which it runs.

A command is a function. Its parameters have the names, types and defaults of the options, and its docstring
declares their metavars and helps, in the groups in which ``--help`` shows them. ``**given`` are the fields of
the dataclass in its annotation, whose docstring describes them.
"""

from __future__ import annotations

import inspect
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import fields
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, get_args, get_origin

import typer
from typer.core import TyperCommand, TyperGroup

import hexdata
from hexdata.checks import unusable
from hexdata.cli.messages import print_stderr
from hexdata.errors import ConfigError, without_secrets
from hexdata.text import did_you_mean, printable, shortened
from hexdata.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from hexdata.cli.render import Output
    from hexdata.engine import Engine
    from hexdata.progress_bar import ProgressBar
    from hexdata.storage import AnyPath as AnyPath

    Size = int | str
else:
    # Typer evaluates the annotations of commands. Importing the real types would make --help slow.
    class AnyPath:
        """A path or an address, which ``as_path`` makes of the text."""

    class Size:
        """A number of bytes, which ``parse_bytes`` makes of the text."""


INTERRUPTED = "interrupted; run the same command again to resume or repeat it"

_RESOURCES: Final = "Memory and processors"
_SHARED: Final = f"""
Arguments:
    store STORE: Folder of the store, or its address, such as s3://BUCKET/STORE.

Options:
    --json: Print the result as one line of JSON.

{_RESOURCES}:
    --workers N: Number of worker processes. Default: 1 for little data, else one per core, if they fit
        --memory.
    --memory SIZE: Memory limit of all processes together, such as 700MB or 2GB.
    --threads N: Number of threads. Default: one per core, if they fit --memory.
    --engine: Run on this machine or on a Ray cluster.
    --address HOST:PORT: Address of the Ray cluster, or auto. Default: RAY_ADDRESS, or a new cluster on this
        machine.
"""
"""Parameters of several commands, which a docstring can declare in another way."""
_NOT_A_CHOICE: Final = re.compile(r"'(?P<value>[^']*)' is not one of (?P<choices>'.*')\.$")


class Command(TyperCommand):
    """A command whose help has plain types, groups of options and examples."""

    examples: list[str] = []  # noqa: RUF012 - set for each command

    def invoke(self, ctx: Any) -> Any:
        """Run the command, after removing what killed commands have left."""
        from hexdata.storage import cache_folder, translate_errors
        from hexdata.temporary import remove_abandoned

        remove_abandoned()
        with suppress(ConfigError):  # of an invalid cache folder, which concerns the commands that use it
            remove_abandoned(cache_folder("temporary"))
        try:
            with translate_errors():
                return super().invoke(ctx)
        except KeyboardInterrupt:  # which releases of Typer report in different ways
            print_stderr(f"hexdata: {INTERRUPTED}")
            raise typer.Exit(130) from None

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the parts of the usage line, such as ``INPUT... STORE``."""
        arguments = [each for each in self.get_params(ctx) if each.param_type_name == "argument"]
        names = [_argument_name(each) if each.required else f"[{_argument_name(each)}]" for each in arguments]
        return ["[OPTIONS]", *names]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments and the groups of options."""
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is not None:
                group = getattr(parameter, "rich_help_panel", None) or "Options"
                if parameter.param_type_name == "argument":
                    group, record = "Arguments", (_argument_name(parameter), record[1])
                groups.setdefault(group, []).append(record)
        # Resources last; sorting is stable, so the other groups keep the order of the docstring.
        for group in sorted(groups, key=lambda name: name == _RESOURCES):
            if groups[group]:
                with formatter.section(group):
                    formatter.write_dl(groups[group])

    def format_epilog(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        """Write the examples."""
        if self.examples:
            with formatter.section("Examples"):
                for line in self.examples:
                    formatter.write(f"{' ' * formatter.current_indent}{line}\n")


class Group(TyperGroup):
    """The commands, whose summaries are wrapped in the help and not cut."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        """Write the name and the summary of each command."""
        rows = [(name, each.get_short_help_str(200)) for name, each in self.commands.items()]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def _argument_name(argument: Any) -> str:
    return f"{argument.metavar}{'...' if argument.nargs != 1 else ''}"


def print_usage(error: Any) -> None:
    """Print a usage error of click, which Typer may contain. It repeats arguments, such as names of files."""
    text = error.format_message()
    # The message of a command line without a command is its help, on many lines.
    if type(error).__name__ != "NoArgsIsHelpError":
        for argument in sys.argv[1:]:  # one by one, since an argument may contain spaces
            text = text.replace(argument, without_secrets(argument))
        text = printable(text).replace(": Value error, ", ": ", 1)  # some releases of Typer begin so
        if found := _NOT_A_CHOICE.search(text):
            hint = did_you_mean(found["value"], re.findall("'([^']*)'", found["choices"]))
            text = f"{text} {hint}" if hint else text
        if "unexpected extra argument" in text:
            text += ". Quote a query, a condition or a path that contains spaces."
        usage = getattr(error, "cmd", None)
        if type(error).__name__ == "MissingParameter" and isinstance(usage, Command):
            # All of them, since click names INPUT if only STORE of ``INPUT... STORE`` is missing.
            names = " ".join(usage.collect_usage_pieces(error.ctx)[1:])
            text = f"Missing argument; expected {names}.\nExample: {usage.examples[0]}"
        error.format_message = lambda: text
    error.show()


app = typer.Typer(
    name="hexdata",
    cls=Group,
    help="Store, query, shuffle and export positions of Hex games for training.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


# --- declarations of commands ---------------------------------------------------------------------------

_SECTION: Final = re.compile(r"^(?=\S.*:$)", re.MULTILINE)
_ENTRY: Final = re.compile(
    r"^    (?P<name>(?:--)?[a-z_-]+)(?:, (?P<short>-\w))?(?: (?P<metavar>\S+))?: (?P<help>.*(?:\n {8}.*)*)",
    re.MULTILINE,
)
"""A parameter or a field in a docstring, such as ``    --board-size N: Convert only boards of this size.``"""


def _declared(docstring: str) -> dict[str, dict[str, Any]]:
    """Return the parameters that a docstring declares, by name: the parts of ``_ENTRY`` and the heading."""
    found = {}
    for section in _SECTION.split(docstring)[1:]:
        for entry in _ENTRY.finditer(section):
            name, text = entry["name"].removeprefix("--"), re.sub(r"\s+", " ", entry["help"])
            parts = {**entry.groupdict(), "help": text, "group": section.partition(":\n")[0]}
            found[name.replace("-", "_")] = parts
    return found


def _declared_fields(kind: Any) -> dict[str, dict[str, Any]]:
    """Return the same for the fields of a dataclass. Those of a base class have its name as their heading."""
    found = _declared(inspect.cleandoc(kind.__doc__))
    for field in fields(kind):
        entry = found[field.name]
        owner = next(each for each in kind.__mro__ if field.name in vars(each)["__annotations__"])
        entry["name"] = f"--{field.name.replace('_', '-')}"
        entry["group"] = "Options" if owner is kind else owner.__name__.removesuffix("Options")
        # The default is shown apart, except what None means.
        text = re.sub(" Default (?!None).*", "", re.sub('[`"]', "", entry["help"]))
        entry["help"] = text.replace("Default None:", "Default:")
    return found


def add_command(function: Callable[..., None]) -> None:
    """Add a function as a command of its name to the application."""
    text, *sections = _SECTION.split(inspect.cleandoc(function.__doc__ or ""))
    examples = next(section for section in sections if section.startswith("Examples:"))
    declared = _declared(_SHARED) | _declared("\n".join(sections))
    signature = {**inspect.signature(function, eval_str=True).parameters}
    if (given := signature.pop("given", None)) is not None:
        kind = get_args(given.annotation)[1]
        declared = _declared_fields(kind) | declared
        signature = {**inspect.signature(kind, eval_str=True).parameters, **signature}
    for name, parameter in signature.items():
        entry, hint, default = declared[name], parameter.annotation, parameter.default
        if entry["metavar"] == "SIZE" and isinstance(default, int):  # of a dataclass; commands have text
            hint, default = Size, format_bytes(default).replace(" ", "")
        # The type without list and None.
        type_ = hint
        while get_origin(type_) not in (None, Literal):
            type_ = get_args(type_)[0]
        choices = get_args(type_) if get_origin(type_) is Literal else ()
        is_option = entry["name"].startswith("--")
        shown = entry["name"] if is_option else entry["metavar"]
        facts: dict[str, Any] = {
            "metavar": "|".join(choices) or entry["metavar"] or {int: "N", str: "TEXT"}.get(type_),
            "help": entry["help"],
            "parser": None if type_ is bool or choices else _parser(type_, shown),
            # What None means is in the text of the help.
            "show_default": default is not None,
        }
        if is_option:
            names = filter(None, (entry["name"], entry["short"]))
            info: Any = typer.Option(*names, rich_help_panel=entry["group"], **facts)
        else:
            info = typer.Argument(**facts)
        # By name, since a field that has a default would be before an argument that has none.
        known = {"default": default, "annotation": Annotated[hint, info]}
        signature[name] = parameter.replace(kind=parameter.KEYWORD_ONLY, **known)
    function.__signature__ = inspect.Signature([*signature.values()])  # type: ignore[attr-defined]
    lines = [line.strip() for line in examples.splitlines()[1:] if line.strip()]
    # Typer creates the command from a class, so its examples are an attribute of a class of its own.
    kind_of_command = type(function.__name__, (Command,), {"examples": lines})
    app.command(function.__name__, cls=kind_of_command, help=text)(function)


def _parser(kind: Any, name: str) -> Callable[[Any], Any]:
    """Return the function from the text of a parameter, or its default, to a value of its type."""

    def parse(text: Any) -> Any:
        from hexdata.storage import as_path

        if text == "":  # as of an unset variable of a shell; an empty path would be the current folder
            raise ConfigError(f"{name} must not be empty")
        if kind in (int, float):
            with suppress(ValueError):
                return kind(text)
            raise unusable(name, shortened(repr(text)), "a whole number" if kind is int else "a number")
        return {AnyPath: as_path, Size: parse_bytes}.get(kind, kind)(text)

    return parse


def options_of(kind: Any, values: Mapping[str, Any]) -> Any:
    """Return options of a stage, from those parameters of a command that have the names of its fields.

    Args:
        kind: Dataclass of the options.
        values: Parameters by name. Those that are None, which were not given, keep the default of the stage.
    """
    names = {option.name for option in fields(kind)}
    return kind(**{name: value for name, value in values.items() if name in names and value is not None})


# --- running --------------------------------------------------------------------------------------------


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
        # If Ctrl-C is ignored, as in the background of a shell, its handler has not raised.
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
def command(as_json: bool) -> Iterator[tuple[Output, ProgressBar]]:
    """Yield the output and the progress bar of a command.

    Args:
        as_json: Whether to print the result as JSON.
    """
    from hexdata.cli.render import Output, console
    from hexdata.progress_bar import ProgressBar

    with ProgressBar(console(stderr=True, soft_wrap=False)) as bar:
        yield Output(as_json), bar


@contextmanager
def using_engine(name: str, address: str | None) -> Iterator[Engine]:
    """Yield the engine of a command. Output that Ray prints is redirected to standard error."""
    from hexdata.engine import open_engine

    with redirect_stdout(sys.stderr), open_engine(name, address) as engine:
        yield engine


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
