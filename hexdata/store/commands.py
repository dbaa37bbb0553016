"""Command lines that messages recommend, built from the options with which a stage was run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final

from hexdata.errors import StoreError
from hexdata.storage import AnyPath
from hexdata.store.files import read_bounded
from hexdata.strict_json import load_json
from hexdata.text import shell_word

__all__ = [
    "MAX_RECORD_BYTES",
    "RunRecord",
    "command_line",
    "read_record",
    "record_path",
    "run_command",
    "stage_command",
    "store_argument",
]

MAX_RECORD_BYTES: Final = 1 << 16
"""Maximum size of the record of a run."""


@dataclass(frozen=True)
class RunRecord:
    """The options of a run of a stage that has begun, as the store keeps them until it is finished.

    Attributes:
        options: Options that differ from their defaults, by name.
        inputs: Inputs of ``convert``, as absolute paths or addresses.
    """

    options: dict[str, bool | str | int | float]
    inputs: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, options: Any, inputs: Sequence[AnyPath] = ()) -> RunRecord:
        """Return the record of a run with these options, an instance of an options class."""
        given = {each.name: (getattr(options, each.name), each.default) for each in fields(options)}
        given.pop("inputs", None)  # of a config
        changed = {name: value for name, (value, default) in given.items() if value != default}
        if "memory" in changed:
            changed["memory"] = f"{changed['memory']}B"  # a size without a unit would be ambiguous
        return cls(changed, [str(path.absolute()) for path in inputs])


def store_argument(path: str | AnyPath) -> str:
    """Return a path quoted for a shell, in a form that is not mistaken for an option."""
    text = str(path)
    return shell_word(f"./{text}" if text.startswith("-") else text)


def command_line(verb: str, *paths: str | AnyPath, **options: Any) -> str:
    """Return a command line of hexdata, quoted for a shell.

    Args:
        verb: Name of the command.
        paths: Paths and addresses, in order.
        options: Value by name of the option. None and False leave it out; True is a flag without a value.
    """
    words = ["hexdata", verb, *map(store_argument, paths)]
    for name, value in options.items():
        if value is None or value is False:
            continue
        words.append(shell_word(f"--{name.replace('_', '-')}"))
        if value is not True:
            words.append(shell_word(value if isinstance(value, str) else json.dumps(value)))
    return " ".join(words)


def stage_command(stage: str, lineage: Mapping[str, Any], store: str | AnyPath) -> str:
    """Return the command line that runs a stage with the options that the manifest has recorded.

    Args:
        stage: Name of the stage in the manifest.
        lineage: Entry of the stage in the manifest; empty for the default options.
        store: Path or address of the store.
    """
    if stage == "shuffle":
        buckets = max(lineage.get("buckets", {}).values(), default=None)
        options = {"seed": lineage.get("seed"), "buckets": buckets, **lineage.get("choices", {})}
    else:
        names = {
            "convert": ("val", "test", "salvage", "truncate_repeats"),
            "export": ("shard_size", "block_size", "layout"),
        }.get(stage, ("level",))
        options = {name: lineage.get(name) for name in names}
    return _line(stage, store, ["INPUT..."], options)


def run_command(stage: str, store: str | AnyPath, run: RunRecord) -> str:
    """Return the command line of a run that has begun."""
    return _line(stage, store, run.inputs, run.options)


def record_path(work: AnyPath, stage: str) -> AnyPath:
    """Return the path of the records of the runs of a stage in the unfinished work of a store."""
    return work / f"{stage}.run"


def read_record(work: AnyPath, stage: str) -> RunRecord | None:
    """Return the options of the run of a stage that has begun and not finished; None if there is none."""
    path = record_path(work, stage)
    try:
        last = read_bounded(path).splitlines()[-1]
        return load_json(RunRecord, last, path, max_bytes=MAX_RECORD_BYTES)
    except (OSError, IndexError, StoreError):  # a record that is damaged is of no use
        return None


def _line(stage: str, store: str | AnyPath, inputs: Sequence[str], options: Mapping[str, Any]) -> str:
    if stage.startswith("pickles-"):
        order = stage.removeprefix("pickles-")
        return command_line("export", store, format="pickle", **{"order": order, **options})
    return command_line(stage, *(inputs if stage == "convert" else ()), store, **options)
