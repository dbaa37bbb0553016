"""The ledger of a stage: a file that lists the finished units, so that an interrupted run can resume."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from hexdata.errors import StoreError
from hexdata.storage import AnyPath, storage_of
from hexdata.store.files import canonical_json, read_bounded, write_bytes
from hexdata.strict_json import MAX_JSON_BYTES, check_value, parse_json, shortened

if TYPE_CHECKING:
    from hashlib import _Hash

__all__ = ["Ledger"]

_SAVES_PER_LEDGER: Final = 256
"""A ledger of fewer units is saved after each unit, a longer one after every 1/256 of its units."""
_PARALLEL_READS: Final = 16
"""Parts of a ledger in an object store that are read at the same time."""


@dataclass(frozen=True)
class _Header:
    stage: str
    plan: str


@dataclass(frozen=True)
class _Entry:
    unit: str
    facts: Any


class Ledger:
    """Finished units of one plan, in a file to which each save appends only the new units.

    Each line is a SHA-256, a space and a JSON object: first ``{"stage", "plan"}``, then ``{"unit", "facts"}``
    for each unit. The digest is that of all preceding lines and of the JSON of this line, so an altered,
    removed or inserted line is refused. A last line without a newline, as a killed process leaves it, is
    ignored. So are a line with NUL bytes, as a power failure leaves it, and all lines after it. Objects
    cannot be appended to: in an object store each save writes a further object, named
    ``progress.json.000001`` and so on.

    A ledger of another plan (other inputs, seed or sizes) is not used. It is emptied when it is opened,
    because the files that it lists will be replaced.
    """

    def __init__(
        self,
        path: AnyPath,
        stage: str,
        plan: object,
        unit: Any = Any,
        *,
        unit_of: Callable[[str], object] | None = None,
        read_only: bool = False,
    ) -> None:
        """Open the ledger at ``path`` and keep its units if they belong to the same plan.

        Args:
            path: Path of the file.
            stage: Stage that writes the ledger.
            plan: Plan of the units, as a JSON value.
            unit: Schema of a unit's facts (default: any).
            unit_of: Function that returns the schema for a unit's name, if units differ (default: None).
            read_only: Whether to leave the file of another plan unchanged (default: False).

        Raises:
            StoreError: The file exists but is not a valid ledger of this stage.
        """
        self.path = path
        self._stage = stage
        self._unit_of = unit_of or (lambda _: unit)
        self._plan = hashlib.sha256(canonical_json(plan)).hexdigest()
        self._done: dict[str, Any] = {}
        self._unsaved: dict[str, Any] = {}
        self._written: _Hash | None = None
        """Hash of all valid lines of the file; None if the next save must write the whole file."""
        self._size = 0
        """Size of these lines on a disk."""
        self._parts = 0
        """Number of further objects in an object store."""
        if storage_of(path).exists() and not self._load() and not read_only:
            self._save()

    # --- reading --------------------------------------------------------------------------------------

    def _load(self) -> bool:
        """Read the units; return False, without units, if they belong to another plan."""
        lines = self._lines()
        first = next(lines, b"")
        written = hashlib.sha256()
        header = self._check(_Header, self._content(first, written), "the progress file")
        self._require_stage(header.stage)
        if header.plan != self._plan:
            return False
        size = len(first)
        for line in lines:
            if not line.endswith(b"\n") and len(line) <= MAX_JSON_BYTES:
                break  # the process that wrote it was killed
            if b"\0" in line:
                break  # a power failure has lost a part of the last lines
            entry = self._check(_Entry, self._content(line, written), "a line of the progress file")
            self._done[entry.unit] = self._check_unit(entry.unit, entry.facts)
            size += len(line)
        self._written, self._size = written, size
        return True

    def _lines(self) -> Iterator[bytes]:
        """Yield the lines of the file and of its further objects, with their newlines.

        A line that is too long is cut and has no newline.
        """
        with storage_of(self.path).open() as file:
            while line := file.readline(MAX_JSON_BYTES + 1):
                yield line
        names = self._part_names()
        self._parts = len(names)
        with ThreadPoolExecutor(_PARALLEL_READS) as executor:
            for part in executor.map(lambda name: read_bounded(self.path.with_name(name)), names):
                yield from part.splitlines(keepends=True)

    def _content(self, line: bytes, written: _Hash) -> Any:
        """Return the value of a line after checking its digest, and add the line to ``written``.

        Raises:
            StoreError: The line does not match its digest.
        """
        digest, _, text = line.removesuffix(b"\n").partition(b" ")
        if not line.endswith(b"\n") or _digest(written, text) != digest:
            raise self._corrupt()
        written.update(line)
        return parse_json(text, self.path, what="the progress file", hint=self._hint)

    @property
    def _hint(self) -> str:
        return f"Remove {self.path.name}. The {self._stage} stage then starts from scratch."

    def _check(self, schema: Any, value: Any, what: str) -> Any:
        return check_value(schema, value, self.path, what=what, hint=self._hint)

    def _check_unit(self, name: str, facts: Any) -> Any:
        """Return the facts of a unit after checking them against the schema of the stage."""
        self._check(self._unit_of(name), facts, f"the progress file's unit {shortened(name)}")
        return facts

    def _require_stage(self, stage: str) -> None:
        if stage != self._stage:
            raise StoreError(
                "the progress file belongs to another stage",
                path=self.path,
                found=shortened(repr(stage)),
                expected=f"stage {self._stage!r}",
                hint=self._hint,
            )

    def _corrupt(self) -> StoreError:
        return StoreError(
            "the progress file is corrupt",
            path=self.path,
            found="units that do not match their digest",
            hint=self._hint,
        )

    def __contains__(self, unit: str) -> bool:
        return unit in self._done

    def __getitem__(self, unit: str) -> Any:
        return self._done[unit]

    def __len__(self) -> int:
        return len(self._done)

    # --- writing --------------------------------------------------------------------------------------

    def finish(self, unit: str, facts: object) -> None:
        """Record that ``unit`` is finished. Call this only when its files have their final names."""
        self.finish_all({unit: facts})

    def finish_all(self, facts: Mapping[str, object]) -> None:
        """Record several units at once, under the condition of :meth:`finish`."""
        self._unsaved |= facts
        self._done |= facts
        self._save()

    def finish_buffered(self, unit: str, facts: object) -> bool:
        """Record that ``unit`` is finished, but save only now and then if there are very many units.

        Each save waits for the disk or the object store. Units that are not yet saved are done again after a
        crash. Call :meth:`save` at the end.

        Returns:
            Whether all units have been saved.
        """
        self._done[unit] = self._unsaved[unit] = facts
        if len(self._unsaved) > len(self._done) // _SAVES_PER_LEDGER:
            self._save()
        return not self._unsaved

    def save(self) -> None:
        """Save the units that have not been saved yet."""
        if self._unsaved:
            self._save()

    def _save(self) -> None:
        if not self._append():
            self._rewrite()
        self._unsaved.clear()

    def _append(self) -> bool:
        """Append the new units; return False if the whole file must be written."""
        if self._written is None:
            return False
        written = self._written.copy()
        data = b"".join(_lines(_entries(self._unsaved), written))
        if storage_of(self.path).local is None:
            write_bytes(self.path.with_name(f"{self.path.name}.{self._parts + 1:06d}"), data)
            self._parts += 1
        elif not storage_of(self.path).extend(data, self._size):
            return False
        self._written, self._size = written, self._size + len(data)
        return True

    def _rewrite(self) -> None:
        """Write the whole file. Further objects are removed first, from the last one."""
        for name in reversed(self._part_names()):
            storage_of(self.path.with_name(name)).remove()
        written = hashlib.sha256()
        header = {"stage": self._stage, "plan": self._plan}
        data = b"".join(_lines([header, *_entries(self._done)], written))
        write_bytes(self.path, data)
        self._written, self._size, self._parts = written, len(data), 0

    def _part_names(self) -> list[str]:
        """Return the names of the further objects, in order; none on a disk."""
        if storage_of(self.path).local is not None:
            return []
        part = re.compile(re.escape(self.path.name) + r"\.[0-9]{6,}")
        names = [name for name in storage_of(self.path.parent).names() if part.fullmatch(name)]
        return sorted(names, key=lambda name: int(name.rpartition(".")[2]))


def _entries(units: Mapping[str, object]) -> Iterator[dict[str, object]]:
    return ({"unit": unit, "facts": facts} for unit, facts in units.items())


def _lines(values: Iterable[object], written: _Hash) -> Iterator[bytes]:
    """Yield each value as a line, and add the lines to ``written``."""
    for value in values:
        text = json.dumps(value).encode()
        line = b"%s %s\n" % (_digest(written, text), text)
        written.update(line)
        yield line


def _digest(written: _Hash, text: bytes) -> bytes:
    digest = written.copy()
    digest.update(text)
    return digest.hexdigest().encode()
