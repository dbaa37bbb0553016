"""What messages recommend: the command line of a stage, and what to do about what is at a path.

Command lines are built from the options with which a stage was run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any, Final, Literal

from msgspec import field

from hexdata.errors import StoreError
from hexdata.json_models import Model, as_model, read_json
from hexdata.storage import AnyPath, storage_of
from hexdata.storage.errors import fault_behind
from hexdata.store.files import read_bounded
from hexdata.text import shell_word

MANIFEST_NAME: Final = "manifest.json"
STORE_KIND: Final = "hexdata store"
"""Value of the key ``kind`` in the manifest of a store."""
RECORDED_OPTIONS: Final = {
    "convert": ["val", "test", "salvage", "truncate_repeats", "variations", "format", "alphazero_convention"],
    "export": ["shard_size", "block_size"],
    "pickles-original": ["order", "level"],
    "pickles-shuffled": ["order", "level"],
}
"""Options of stages that the manifest records under their own names: those that determine an export."""
# A message about a wrong path must not wait for a walk over millions of files.
_MAX_LISTED: Final = 10_000
"""Maximum number of names that are looked at in a folder."""


class RunRecord(Model, frozen=True):
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
        changed = {
            each.name: value
            for each in fields(options)
            if (value := getattr(options, each.name)) != each.default and each.name != "inputs"  # of a config
        }
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
        if value is not None and value is not False:
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
        # The option is the number of buckets of the largest split. Those of the other splits follow from it.
        buckets = max(lineage.get("buckets", {}).values(), default=None)
        options = {"seed": lineage.get("seed"), "buckets": buckets, **lineage.get("choices", {})}
    else:
        options = {name: lineage.get(name) for name in RECORDED_OPTIONS[stage]}
    return run_command(stage, store, RunRecord(options, ["INPUT..."]))


def run_command(stage: str, store: str | AnyPath, run: RunRecord) -> str:
    """Return the command line of a run with these options and, for ``convert``, inputs."""
    if stage.startswith("pickles-"):
        options = {"format": "pickle", **run.options, "order": stage.removeprefix("pickles-")}
        return command_line("export", store, **options)
    return command_line(stage, *(run.inputs if stage == "convert" else ()), store, **run.options)


def record_path(work: AnyPath, stage: str) -> AnyPath:
    """Return the path of the records of the runs of a stage in the unfinished work of a store."""
    return work / f"{stage}.run"


def read_record(work: AnyPath, stage: str) -> RunRecord | None:
    """Return the options of the run of a stage that has begun and not finished; None if there is none."""
    path = record_path(work, stage)
    with suppress(OSError, StoreError, ValueError):  # a record that is damaged is of no use
        content = read_json(read_bounded(path)[0], path, metadata=True)
        # Of lone surrogates, only those that a path has in place of bytes that are not UTF-8.
        os.fsencode(json.dumps(content, ensure_ascii=False, allow_nan=False))
        return as_model(RunRecord, content, what="the record of a run")
    return None


# --- what is at a path ---------------------------------------------------------------------------------


def describe(path: Path) -> tuple[str, str]:
    """Return what is at a local path in words, and what to do if a store is expected there.

    Reads names, and the manifest if there is one. The advice has a command or a path that works.
    """
    manifest, run = manifest_kind(path), read_record(path / ".work", "convert")
    # Relative parents first, so that the advice has the form of the path that the user gave.
    above = [*path.parents, *path.absolute().parents]
    store = next((folder for folder in above if manifest_kind(folder) == "store"), None)
    names = [] if path.is_file() else [n for n in storage_of(path).names() if not n.startswith(".")]
    below = next((path / name for name in names if manifest_kind(path / name) == "store"), None)
    kind = "a file" if path.is_file() else "a folder of files"
    files = [path] if path.is_file() else islice(path.rglob("*"), _MAX_LISTED)
    create = f"Create one with `{command_line('convert', 'INPUT...', path)}`."
    if manifest == "store":
        return "a store", _run("info", path)
    if manifest == "shards":
        return "a folder of shards", _run("load", path) if store is None else _meant(store)
    # Before the tests for a damaged store: an interrupted first convert also has tables and no manifest.
    if run is not None:
        return "the first convert was interrupted", f"Run `{run_command('convert', path, run)}`."
    if store is not None:
        return "a part of a store" if path.exists() else "there is no such folder or file", _meant(store)
    if not path.exists():
        near = [path.parent / name for name in get_close_matches(path.name, storage_of(path.parent).names())]
        meant = next((_meant(each) for each in near if manifest_kind(each) == "store"), None)
        return "there is no such folder or file", meant or f"Check the path. {create}"
    if manifest_kind(path.parent) == "shards":
        return "a file beside shards", _meant(path.parent)
    # The folders of the tables without a manifest show that there was a store.
    if manifest is not None or {"positions", "games", "sources"} <= {*names}:
        again = command_line("convert", "INPUT...", f"{path}-again")
        hint = f"Restore manifest.json from a copy, or convert the sources into a new store: `{again}`."
        return "a damaged store, without a manifest of one", hint
    if below is not None:
        return "a folder that contains a store", _meant(below)
    from hexdata.formats import is_known_name  # not needed to open a store

    if any(is_known_name(each.name) for each in files):
        new = path.with_name(f"{path.name.partition('.')[0]}-store") if path.name else "STORE"
        return f"{kind} that can be converted", _run("convert", path, new)
    if path.suffix.lower() == ".toml":
        return "a file, perhaps a config", _run("run", path)
    if path.is_file():
        return kind, "Give the folder of a store."
    # The latter also of a first convert that was killed before it had recorded its options.
    return f"{'a' if names else 'an empty'} folder with no manifest", create


def no_store_error(path: AnyPath, expected: str = "a hexdata store") -> StoreError:
    """Return the error for a path at which there is no store, with what there is and what to do."""
    local, create = storage_of(path).local, command_line("convert", "INPUT...", "STORE")
    of_address = "there is no manifest of one", f"Create one with `{create}`."
    found, hint = of_address if local is None else describe(local)
    return StoreError(f"not {expected}: {found}", path=path, hint=hint)


def manifest_kind(folder: AnyPath) -> Literal["store", "shards", "other"] | None:
    """Return whose manifest a folder has; None if there is none.

    Raises:
        StoreError: An object store fails.
    """
    try:
        data, _ = read_bounded(folder / MANIFEST_NAME)
    except (OSError, StoreError) as error:
        if fault_behind(error):  # further requests would fail too, after their own retries
            raise
        return None
    # Of the bytes, since a damaged manifest is one, too. Stages of a store also have a block size.
    if f'"{STORE_KIND}"'.encode() in data:
        return "store"
    return "shards" if b'"block_size"' in data else "other"


def _run(verb: str, *paths: str | Path) -> str:
    return f"Run `{command_line(verb, *paths)}`."


def _meant(path: Path) -> str:
    return f"Did you mean {store_argument(path)}?"
