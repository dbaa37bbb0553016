"""Facts and contents of the files of a store and of its sources, and the ledger of finished files."""

from __future__ import annotations

import hashlib
import json
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Final

import msgspec

from hexdata.errors import HexdataError, StoreError
from hexdata.json_models import MAX_JSON_BYTES, Count, HexDigest, Kind, Model, as_model, read_json
from hexdata.storage import AnyPath, storage_of, translate_errors
from hexdata.storage.local import HashingFile
from hexdata.text import encodable, shortened

_CHUNK: Final = 1 << 18
"""Bytes that are read at a time."""
# 64 bits are enough to tell two digests apart, and both fit on a line.
_SHOWN_DIGITS: Final = 16
_SAVES: Final = 32
"""The file is written again after every 1/32 of the units, so that n units write about 32 n entries."""


class FileFacts(Model, frozen=True):
    """Row count, size in bytes and SHA-256 (hexadecimal) of one file, as recorded in a manifest."""

    rows: Count
    bytes: Count
    sha256: HexDigest

    @classmethod
    def of(cls, file: HashingFile, rows: int = 0) -> FileFacts:
        """Return the facts of a file that is being published, with the data written so far."""
        return cls(rows=rows, bytes=file.tell(), sha256=file.sha256)

    def difference(self, path: object, size: int, sha256: str, hint: str) -> StoreError | None:
        """Return the error for a file that has another size or digest; None if it has these."""
        if (size, sha256) == (self.bytes, self.sha256):
            return None
        found = f"{size:,} bytes, sha256 {sha256[:_SHOWN_DIGITS]}…"
        expected = f"{self.bytes:,} bytes, sha256 {self.sha256[:_SHOWN_DIGITS]}…"
        return StoreError("the file was altered", path=path, found=found, expected=expected, hint=hint)


def write_bytes(path: AnyPath, data: bytes, *, replace: bool = True) -> FileFacts:
    """Publish ``data`` as one file, as ``Storage.publish`` does; return its size and digest."""
    with storage_of(path).publish(replace=replace) as file:
        file.write(data)
        return FileFacts.of(file)


@contextmanager
def may_be_missing(name: str) -> Iterator[None]:
    """Warn if files that are not in the manifest, which every stage writes again, cannot be written."""
    try:
        yield
    except (OSError, HexdataError) as error:
        # The caller of the stage, behind this function, the context manager and the writer.
        warnings.warn(f"the stage is complete, but {name} was not written: {error}", stacklevel=4)


def digest_file(path: AnyPath, most: int = sys.maxsize) -> tuple[int, str]:
    """Return the size in bytes and the SHA-256 (hexadecimal) of a file, or of its first ``most`` bytes.

    ``hashlib.file_digest`` would clear 256 KiB of memory for each file, however small.
    """
    digest, size = hashlib.sha256(), 0
    with storage_of(path).open() as file:
        while chunk := file.read(min(most - size, _CHUNK)):
            digest.update(chunk)
            size += len(chunk)
    return size, digest.hexdigest()


def read_bounded(path: AnyPath) -> tuple[bytes, str | None]:
    """Return the content of a JSON file, cut at one byte more than ``MAX_JSON_BYTES``, and its version.

    Raises:
        FileNotFoundError: There is no such file.
        StoreError: The file cannot be read.
    """
    with translate_errors(path):
        # One byte more than allowed, so that ``read_json`` refuses a larger file without reading all of it.
        return storage_of(path).read_tagged(MAX_JSON_BYTES + 1)


def write_sealed(path: AnyPath, data: bytes) -> None:
    """Publish JSON after its SHA-256 and a space, by which :func:`read_sealed` finds any damage."""
    write_bytes(path, hashlib.sha256(data).hexdigest().encode() + b" " + data)


def read_sealed(path: AnyPath, kind: type[Kind], *, what: str, hint: str, metadata: bool = False) -> Kind:
    """Return the JSON value that :func:`write_sealed` wrote, as an instance of a type.

    Raises:
        FileNotFoundError: There is no such file.
        StoreError: It cannot be read, does not match its digest, or is refused by ``read_json`` or
            ``as_model``.
    """
    digest, _, data = read_bounded(path)[0].partition(b" ")
    # In a damaged file, the digest may be any bytes.
    if digest.decode("ascii", "replace") != hashlib.sha256(data).hexdigest():
        raise StoreError(f"{what} is damaged: it does not match its digest", path=path, hint=hint)
    content = read_json(data, path, what=what, hint=hint, metadata=metadata)
    return as_model(kind, content, path, what=what, hint=hint)


def check_identity(
    content: Any, path: object, digest: Callable[[Any], str], versions: dict[str, int], what: str, hint: str
) -> None:
    """Check the versions and the digest of a manifest, and remove the digest from it.

    Args:
        content: The manifest.
        path: Its path.
        digest: Returns the digest of a manifest without ``digest``.
        versions: The versions that this release reads, by key.
        what: Name of the manifest in errors.
        hint: Advice about a manifest that cannot be read.

    Raises:
        StoreError: A version or the digest differs.
    """
    for name, known in versions.items():
        if (version := content.get(name)) is not known:  # True would equal 1
            reason, found = f"{what} has another {name}", shortened(repr(version))
            other = f"{hint} The hexdata release that wrote it can read it."
            raise StoreError(reason, path=path, found=found, expected=known, hint=other)
    stated, expected = content.pop("digest", None), digest(content)
    if stated != expected:
        reason, found = f"{what} was altered or is damaged", f"digest {shortened(str(stated))}"
        raise StoreError(reason, path=path, found=found, expected=expected, hint=hint)


def canonical_json(value: object) -> bytes:
    """Return JSON with sorted keys and a final newline. Equal values give equal bytes."""
    return (json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n").encode()


# --- sources -------------------------------------------------------------------------------------------


class Continued(Model, frozen=True):
    """The source that a grown file continues."""

    source_id: Count
    bytes: Count
    """Offset in the file at which the lines of the new source begin."""


class Sidecar(Model, frozen=True):
    """The sidecar of a source, a part of its content."""

    name: str
    bytes: Count
    sha256: HexDigest

    @classmethod
    def of(cls, path: AnyPath | None) -> Sidecar | None:
        """Return the facts of the sidecar in a file; None if there is no file."""
        return None if path is None else cls(encodable(path.name), *digest_file(path))

    def begins(self, path: AnyPath | None) -> bool:
        """Return whether there is a file that begins with the bytes of this sidecar, or equals it."""
        return path is not None and digest_file(path, self.bytes)[1] == self.sha256


def sidecar_of(header: Mapping[str, Any], source_id: int) -> Sidecar | None:
    """Return the sidecar that the header of a source names; None if it names none."""
    if "sidecar" not in header:
        return None
    return as_model(Sidecar, header["sidecar"], what=f"the header of source {source_id}")


def identity_of(sha256: str, sidecar: Sidecar | None) -> str:
    """Return the digest of the whole content of a source: its file and, if it has one, its sidecar."""
    return sha256 if sidecar is None else hashlib.sha256(f"{sha256} {sidecar.sha256}".encode()).hexdigest()


# --- the ledger ----------------------------------------------------------------------------------------


class _LedgerFile(Model, frozen=True):
    plan: HexDigest
    units: dict[str, Any]


class Ledger:
    """Finished units of one plan, in a JSON file that is published as a whole, after its SHA-256.

    The units of another plan (other inputs, seed or sizes) are not used; they are replaced by the first save.

    Attributes:
        path: Path of the file.
        done: Facts of the finished units by name.
    """

    def __init__(self, path: AnyPath, stage: str, plan: object, kind: Any) -> None:
        """Open the ledger at ``path`` and keep its units if they belong to the same plan.

        Args:
            path: Path of the file.
            stage: Stage that writes the ledger.
            plan: Plan of the units, as a JSON value.
            kind: Type of a unit's facts, for ``as_model``.

        Raises:
            StoreError: The file exists but is not a valid ledger.
        """
        self.path = path
        self.done: dict[str, Any] = {}
        self._plan = hashlib.sha256(canonical_json([stage, plan])).hexdigest()
        self._unsaved = 0
        what, hint = "the progress file", f"Remove {path.name}. The {stage} stage then starts from scratch."
        with suppress(FileNotFoundError):
            file = read_sealed(path, _LedgerFile, what=what, hint=hint)
            # Files of another plan may have the same names and other bytes.
            if file.plan == self._plan:
                self.done = as_model(dict[str, kind], file.units, path, what=what, hint=hint)

    def finish(self, unit: str, facts: object) -> bool:
        """Record that ``unit`` is finished; return whether all units so far are in the file.

        Call this only when the files of the unit have their final names.

        Each save waits for the disk or the object store, so that of many units not each one is saved at once.
        Units that are not saved are done again after a crash. Call :meth:`save` at the end.
        """
        self.done[unit] = facts
        self._unsaved += 1
        # Up to 31 units are saved one by one. Later, each save adds more than 1/32 of the units.
        if self._unsaved > len(self.done) // _SAVES:
            self.save()
        return not self._unsaved

    def save(self) -> None:
        """Save the units that have not been saved yet."""
        if self._unsaved:
            write_sealed(self.path, msgspec.json.encode(_LedgerFile(self._plan, self.done)))
            self._unsaved = 0
