"""``STORE/manifest.json``: what the store holds, file by file, and which stage made it from what."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from hexdata.errors import StoreError
from hexdata.order import ORDER_VERSION
from hexdata.remote import AnyPath, Changed, put_if, read_tagged
from hexdata.schema import SCHEMA_VERSION
from hexdata.store.files import FileFacts, canonical_json, write_bytes

__all__ = ["MANIFEST_NAME", "Manifest"]

MANIFEST_NAME: Final = "manifest.json"
_KIND: Final = "hexdata store"


@dataclass
class Manifest:
    """The content of a store's manifest. It holds no time, host or path outside the store.

    Attributes:
        board_size: cells along an edge; None while no position has been converted.
        counts: rows by table: sources, games, positions, rejected.
        files: facts by path relative to the store, with forward slashes.
        stages: lineage: what each stage was asked, what went in and what came out.
        tag: in an object store, which version of the manifest this was read from; None if there is none.
        before_saving: is called before the manifest is published; raises where it must not be.
    """

    board_size: int | None = None
    counts: dict[str, int] = field(default_factory=dict)
    files: dict[str, FileFacts] = field(default_factory=dict)
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)
    tag: str | None = field(default=None, compare=False)
    before_saving: Callable[[], None] = field(default=lambda: None, compare=False, repr=False)

    @classmethod
    def load(cls, folder: AnyPath) -> Manifest:
        """Read and check the manifest of the store at ``folder``.

        Raises:
            StoreError: there is none, it is corrupt or foreign, or of another version.
        """
        path = folder / MANIFEST_NAME
        try:
            data, tag = (path.read_bytes(), None) if isinstance(path, Path) else read_tagged(path)
            content = json.loads(data)
        except FileNotFoundError as error:
            raise StoreError(
                "not a hexdata store: it has no manifest",
                path=folder,
                hint="Make one with `hexdata convert INPUT... STORE`.",
            ) from error
        except OSError as error:
            raise StoreError(
                "the manifest cannot be read", path=path, found=error.strerror or error
            ) from error
        except ValueError as error:
            raise StoreError("the manifest is not JSON", path=path, found=str(error)) from error
        if not isinstance(content, dict) or content.get("kind") != _KIND:
            raise StoreError("the manifest is not of a hexdata store", path=path)
        for name, known in (("schema_version", SCHEMA_VERSION), ("order_version", ORDER_VERSION)):
            if content.get(name) != known:
                raise StoreError(
                    f"the store has another {name}",
                    path=path,
                    found=content.get(name),
                    expected=known,
                    hint="Read it with the hexdata release that wrote it, or convert the sources again.",
                )
        try:
            return cls(
                board_size=content["board_size"],
                counts=content["counts"],
                files={name: FileFacts(**facts) for name, facts in content["files"].items()},
                stages=content["stages"],
                tag=tag,
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise StoreError("the manifest lacks an entry", path=path, found=repr(error)) from error

    def save(self, folder: AnyPath) -> None:
        """Publish the manifest: the last step of every stage.

        Raises:
            StoreError: in an object store, another process has published one since this was read.
        """
        content = {
            "kind": _KIND,
            "schema_version": SCHEMA_VERSION,
            "order_version": ORDER_VERSION,
            "board_size": self.board_size,
            "counts": self.counts,
            "files": {name: facts.to_json() for name, facts in self.files.items()},
            "stages": self.stages,
        }
        self.before_saving()
        path, data = folder / MANIFEST_NAME, canonical_json(content)
        if isinstance(path, Path):
            write_bytes(path, data)
            return
        try:
            self.tag = put_if(path, data, self.tag)
        except Changed as error:
            raise StoreError(
                "another process has changed this store meanwhile; nothing was published over it",
                path=path,
                hint="See that only one process writes to a store, and run the command again.",
            ) from error

    def files_in(self, folder: str) -> dict[str, FileFacts]:
        """Return the files below ``folder`` (relative, such as ``"positions"``), sorted by path."""
        return {name: self.files[name] for name in sorted(self.files) if name.startswith(f"{folder}/")}

    @property
    def total_bytes(self) -> int:
        """Bytes of all files together."""
        return sum(facts.bytes for facts in self.files.values())

    def digest(self, *folders: str) -> str:
        """Return the SHA-256 that names the content of these folders: their paths and digests."""
        content = {name: facts.sha256 for folder in folders for name, facts in self.files_in(folder).items()}
        return hashlib.sha256(canonical_json(content)).hexdigest()
