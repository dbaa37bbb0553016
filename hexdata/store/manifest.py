"""``STORE/manifest.json``: what the store holds, file by file, and which stage made it from what."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from hexdata.errors import StoreError
from hexdata.order import ORDER_VERSION
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
    """

    board_size: int | None = None
    counts: dict[str, int] = field(default_factory=dict)
    files: dict[str, FileFacts] = field(default_factory=dict)
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def load(cls, folder: Path) -> Manifest:
        """Read and check the manifest of the store at ``folder``.

        Raises:
            StoreError: there is none, it is corrupt or foreign, or of another version.
        """
        path = folder / MANIFEST_NAME
        try:
            content = json.loads(path.read_bytes())
        except FileNotFoundError as error:
            raise StoreError(
                "not a hexdata store: it has no manifest",
                path=folder,
                cure="Make one with `hexdata convert INPUT... STORE`.",
            ) from error
        except OSError as error:
            raise StoreError("the manifest cannot be read", path=path, found=error.strerror) from error
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
                    cure="Read it with the hexdata release that wrote it, or convert the sources again.",
                )
        try:
            return cls(
                board_size=content["board_size"],
                counts=content["counts"],
                files={name: FileFacts(**facts) for name, facts in content["files"].items()},
                stages=content["stages"],
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise StoreError("the manifest lacks an entry", path=path, found=repr(error)) from error

    def save(self, folder: Path) -> None:
        """Publish the manifest: the last step of every stage."""
        content = {
            "kind": _KIND,
            "schema_version": SCHEMA_VERSION,
            "order_version": ORDER_VERSION,
            "board_size": self.board_size,
            "counts": self.counts,
            "files": {name: facts.to_json() for name, facts in self.files.items()},
            "stages": self.stages,
        }
        write_bytes(folder / MANIFEST_NAME, canonical_json(content))

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
