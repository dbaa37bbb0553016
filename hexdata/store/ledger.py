"""The ledger of a stage: a file that lists the finished units, so that an interrupted run can resume."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from hexdata.errors import StoreError
from hexdata.storage import AnyPath, storage_of
from hexdata.store.files import canonical_json, read_bounded, write_bytes
from hexdata.strict_json import HexDigest, check_value, parse_json, shortened

__all__ = ["Ledger"]

_SAVES_PER_LEDGER: Final = 256
"""A ledger of fewer units is saved after each unit, a longer one after every 1/256 of its units."""


@dataclass(frozen=True)
class _LedgerFile:
    stage: str
    plan: str
    sha256: HexDigest
    done: dict[str, Any]


class Ledger:
    """Finished units of one plan, in a JSON file ``{"stage", "plan", "sha256", "done": {unit: facts}}``.

    The file is written atomically. ``sha256`` is the digest of the units, so that an altered file is refused.

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
        self._unsaved = 0
        if storage_of(path).exists():
            content = self._load()
            if content["plan"] == self._plan:
                self._done = content["done"]
            elif not read_only:
                self._save()

    def _load(self) -> dict[str, Any]:
        hint = f"Remove {self.path.name}. The {self._stage} stage then starts from scratch."
        data = read_bounded(self.path)
        content: dict[str, Any] = parse_json(data, self.path, what="the progress file", hint=hint)
        file = check_value(_LedgerFile, content, self.path, what="the progress file", hint=hint)
        if file.stage != self._stage:
            raise StoreError(
                "the progress file belongs to another stage",
                path=self.path,
                found=shortened(repr(file.stage)),
                expected=f"stage {self._stage!r}",
                hint=hint,
            )
        if file.sha256 != _digest(json.dumps(content["done"])):
            raise StoreError(
                "the progress file is corrupt",
                path=self.path,
                found="units that do not match their digest",
                hint=hint,
            )
        if file.plan == self._plan:
            for name, facts in file.done.items():
                kind: Any = self._unit_of(name)
                unit = f"the progress file's unit {shortened(name)}"
                check_value(kind, facts, self.path, what=unit, hint=hint)
        return content

    def __contains__(self, unit: str) -> bool:
        return unit in self._done

    def __getitem__(self, unit: str) -> Any:
        return self._done[unit]

    def __len__(self) -> int:
        return len(self._done)

    def finish(self, unit: str, facts: object) -> None:
        """Record that ``unit`` is finished. Call this only when its files have their final names."""
        self._done[unit] = facts
        self._save()

    def finish_all(self, facts: Mapping[str, object]) -> None:
        """Record several units at once, under the condition of :meth:`finish`."""
        self._done |= facts
        self._save()

    def finish_buffered(self, unit: str, facts: object) -> None:
        """Record that ``unit`` is finished, but save only now and then if there are very many units.

        The whole ledger is rewritten on each save, so saving every unit would take quadratic time. Units that
        are not yet saved are done again after a crash. Call :meth:`save` at the end.
        """
        self._done[unit] = facts
        self._unsaved += 1
        if self._unsaved > len(self._done) // _SAVES_PER_LEDGER:
            self._save()

    def save(self) -> None:
        """Save the units that have not been saved yet."""
        if self._unsaved:
            self._save()

    def _save(self) -> None:
        done = json.dumps(self._done)  # serialized only once, because there may be thousands of units
        head = json.dumps({"stage": self._stage, "plan": self._plan, "sha256": _digest(done)})
        write_bytes(self.path, f'{head[:-1]}, "done": {done}}}'.encode())
        self._unsaved = 0


def _digest(done: str) -> str:
    return hashlib.sha256(done.encode()).hexdigest()
