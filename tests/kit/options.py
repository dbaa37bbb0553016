"""The options of all commands, the functions that receive them, and a value of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import typer

from hexdata.cli import app

__all__ = ["COMMANDS", "CommandLine", "OptionCase", "option_cases"]


@dataclass(frozen=True)
class CommandLine:
    """A command with its arguments, and what receives them.

    Attributes:
        arguments: The positional arguments. The folder of the test has ``query.sql`` and ``live.toml``.
        receivers: Functions that the command calls, as ``module:name``. A test replaces them.
    """

    arguments: tuple[str, ...]
    receivers: tuple[str, ...]


COMMANDS: Final = {
    "demo": CommandLine(("new",), ("hexdata.pipeline:run_config",)),
    "run": CommandLine(("run.toml",), ("hexdata.pipeline:load_config", "hexdata.pipeline:run_config")),
    "convert": CommandLine(("in", "store"), ("hexdata.convert:convert_sources",)),
    "info": CommandLine(("store",), ("hexdata.info:store_info",)),
    "shuffle": CommandLine(("store",), ("hexdata.shuffle:shuffle_store", "hexdata.shuffle:plan_shuffle")),
    "export": CommandLine(("store",), ("hexdata.export:export_shards", "hexdata.export:export_pickles")),
    "verify": CommandLine(("store",), ("hexdata.verify:verify_store", "hexdata.verify:check_round_trip")),
    "sql": CommandLine(
        ("store", "SELECT 1"), ("hexdata.sql:run_query", "hexdata.sql:write_csv", "hexdata.sql:save_parquet")
    ),
    "show": CommandLine(
        ("store",),
        (
            *("hexdata.show:find", "hexdata.show:draw_svg"),
            *("hexdata.show:write_svg", "hexdata.show:write_png"),
        ),
    ),
    "browse": CommandLine(("store",), ("hexdata.browse:browse_store", "webbrowser:open")),
    "report": CommandLine(("store",), ("hexdata.report:write_report",)),
    "load": CommandLine(("store",), ("hexdata.loader.trial:run_loader_trial",)),
    "live": CommandLine((".",), ("hexdata.live.trial:run_live_trial", "hexdata.live:load_live_config")),
}
"""All commands."""

_VALUES: Final = {
    "--address": "auto",
    "--alphazero-convention": "mover/top-bottom/mover",
    "--balance-by": "winner",
    "--board-size": "9",
    "--cache": "copies",
    "--cache-size": "3GB",
    "--config": "live.toml",
    "--fields": "move",
    "--file": "query.sql",
    "--format": "sgf",
    "--max-reject-rate": "0.25",
    "--memory": "3GB",
    "--output": "page.html",
    "--parquet": "rows.parquet",
    "--png": "board.png",
    "--prometheus-host": "127.0.0.2",
    "--round-trip": "in",
    "--shards": "0-1",
    "--shard-size": "8192",
    "--stratify-by": "winner",
    "--svg": "board.svg",
    "--test": "0.25",
    "--val": "0.25",
    "--weights": "2",
    "--where": "move > 1",
}
"""A value of each option whose value is no whole number and none of its choices."""

_NEEDED: Final = {
    ("export", "--level"): ("--format", "pickle"),
    ("export", "--order"): ("--format", "pickle"),
    ("live", "--allow-code"): ("--config", "live.toml"),
    ("live", "--prometheus-host"): ("--prometheus", "9"),
    ("show", "--every"): ("--svg", "board.svg"),
    ("show", "--ply"): ("--game", "3"),
    ("shuffle", "--per-game-by"): ("--per-game", "2"),
    "--address": ("--engine", "ray"),
}
"""Options that a command needs with another one."""

_REPLACED: Final = {("sql", "--file"): "SELECT 1"}
"""Arguments that an option takes the place of."""


@dataclass(frozen=True)
class OptionCase:
    """An option of a command.

    Attributes:
        command: Name of the command.
        name: Name of the option, such as ``--seed``.
        without: The command line without the option.
        with_option: The command line with the option.
    """

    command: str
    name: str
    without: tuple[str, ...]
    with_option: tuple[str, ...]


def option_cases() -> Iterator[OptionCase]:
    """Yield every option of every command, each with a value that is not its default."""
    group: Any = typer.main.get_command(app)
    for command, click_command in group.commands.items():
        for option in click_command.params:
            name = next((name for name in option.opts if name.startswith("--")), "")
            if option.param_type_name != "option" or name == "--help":
                continue
            needed = _NEEDED.get((command, name), _NEEDED.get(name, ()))
            without = (command, *COMMANDS[command].arguments, *needed)
            left_out = _REPLACED.get((command, name))
            kept = tuple(word for word in without if word != left_out)
            yield OptionCase(command, name, without, (*kept, name, *_value(option, name)))


def _value(option: Any, name: str) -> tuple[str, ...]:
    if option.is_flag:
        return ()
    choices = getattr(option.type_descriptor, "choices", None) or ["2"]
    return (choices[-1] if len(choices) > 1 else _VALUES.get(name, choices[-1]),)
