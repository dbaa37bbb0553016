"""Classification of what is at a path, for errors where a store or a folder of shards is expected."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal, NamedTuple

from hexdata.errors import StoreError
from hexdata.storage import AnyPath, open_file, storage_of
from hexdata.store.commands import command_line, read_record, run_command, store_argument

__all__ = ["MANIFEST_NAME", "SOURCE_NAMES", "Location", "classify", "no_store_error"]

MANIFEST_NAME: Final = "manifest.json"
SOURCE_NAMES: Final = re.compile(r".+\.((hexworld|hsgf|pickle|pkl|sgf|trmph)(\.gz)?|npz)", re.IGNORECASE)
"""Names of the files that ``convert`` reads in a folder."""
_MANIFEST_BYTES: Final = 1 << 26
_MAX_LISTED: Final = 10_000
"""Maximum number of names that are looked at in a folder."""


class Location(NamedTuple):
    """What is at a local path.

    Attributes:
        kind: "store", "shards", "interrupted convert", "damaged", "above a store", "in a store", "in shards",
            "sources", "config", "nothing" or "other".
        text: The kind in words, for errors.
        hint: What to do if a store is expected there, with a command that works.
    """

    kind: str
    text: str
    hint: str


def classify(path: Path) -> Location:
    """Return what is at a local path. Reads names, and the manifest if there is one."""
    manifest, run = _manifest_kind(path), read_record(path / ".work", "convert")
    above = [*path.parents, *path.absolute().parents]
    store = next((folder for folder in above if _manifest_kind(folder) == "store"), None)
    if manifest == "store":
        return Location("store", "a store", _run("info", path))
    if manifest == "shards":
        hint = _run("load", path) if store is None else _meant(store)
        return Location("shards", "a folder of shards", hint)
    if run is not None:
        again = run_command("convert", path, run)
        return Location("interrupted convert", "the first convert was interrupted", f"Run `{again}`.")
    if not path.exists():
        hint = f"Check the path, or create a store with `{command_line('convert', 'INPUT...', path)}`."
        hint = hint if store is None else _meant(store)
        return Location("nothing", "there is no such folder or file", hint)
    if store is not None:
        return Location("in a store", "a part of a store", _meant(store))
    if _manifest_kind(path.parent) == "shards":
        return Location("in shards", "a file beside shards", _meant(path.parent))
    if path.is_file():
        return _classify_file(path)
    names = _names(path)
    if manifest is not None or {"positions", "games", "sources"} <= {*names}:
        fault = "it has no manifest" if manifest is None else "its manifest is of something else"
        hint = "Restore manifest.json from a copy, or convert the sources into a new store: " + _again(path)
        return Location("damaged", f"a damaged store, because {fault}", hint)
    below = next((path / name for name in names if _manifest_kind(path / name) == "store"), None)
    if below is not None:
        return Location("above a store", "a folder that contains a store", _meant(below))
    if any(SOURCE_NAMES.fullmatch(each.name) for each in _files(path)):
        return Location("sources", "a folder of files that can be converted", _convert(path))
    return Location(
        "other",
        "a folder with no manifest" if names else "an empty folder with no manifest",
        f"Create one with `{command_line('convert', 'INPUT...', 'STORE')}`.",
    )


def no_store_error(path: AnyPath, expected: str = "a hexdata store") -> StoreError:
    """Return the error for a path at which there is no store, with what there is and what to do."""
    local = storage_of(path).local
    if local is None:
        hint = f"Create one with `{command_line('convert', 'INPUT...', 'STORE')}`."
        return StoreError(f"not {expected}: it has no manifest", path=path, hint=hint)
    found = classify(local)
    return StoreError(f"not {expected}: {found.text}", path=path, hint=found.hint)


def _classify_file(path: Path) -> Location:
    if SOURCE_NAMES.fullmatch(path.name):
        return Location("sources", "a file that can be converted", _convert(path))
    if path.suffix.lower() == ".toml":
        return Location("config", "a file, perhaps a config", _run("run", path))
    return Location("other", "a file", "Give the folder of a store.")


def _manifest_kind(folder: Path) -> Literal["store", "shards", "other"] | None:
    """Return whose manifest a folder has; None if there is none."""
    try:
        with open_file(folder / MANIFEST_NAME) as file:
            data = file.read(_MANIFEST_BYTES)
    except OSError:
        return None
    with suppress(ValueError, RecursionError):
        content = json.loads(data)
        if isinstance(content, dict) and content.get("kind") != "hexdata store":
            return "shards" if "block_size" in content else "other"
    return "store" if b'"hexdata store"' in data else "other"


def _names(folder: Path) -> list[str]:
    with suppress(OSError):
        return sorted(each.name for each in folder.iterdir() if not each.name.startswith("."))
    return []


def _files(folder: Path) -> list[Path]:
    """Return files of a folder and its subfolders, not all of a very large one."""
    found: list[Path] = []
    for each in folder.rglob("*"):
        found.append(each)
        if len(found) >= _MAX_LISTED:
            break
    return found


def _run(verb: str, path: Path) -> str:
    return f"Run `{command_line(verb, path)}`."


def _meant(path: Path) -> str:
    return f"Did you mean {store_argument(path)}?"


def _convert(path: Path) -> str:
    store = path.with_name(f"{path.name.partition('.')[0]}-store") if path.name else "STORE"
    return f"Convert with `{command_line('convert', path, store)}`."


def _again(path: Path) -> str:
    return f"`{command_line('convert', 'INPUT...', f'{path}-again')}`."
