"""The progress of a stage on disk: which units are done, so that the same command goes on from there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from hexdata.errors import StoreError
from hexdata.remote import AnyPath
from hexdata.store.files import canonical_json, exists, read_bounded, write_bytes
from hexdata.strict_json import HexDigest, check_value, parse_json, shortened

__all__ = ["Ledger"]

_UNITS_A_SAVE: Final = 256
"""Up to so many units, each is saved when it is done; of more, as many at a time as this goes into them."""


@dataclass(frozen=True)
class _LedgerFile:
    stage: str
    plan: str
    sha256: HexDigest
    done: dict[str, Any]


class Ledger:
    """Units done under one plan: ``{"stage", "plan", "done": {unit: facts}, "sha256"}``, written atomically.

    The digest is that of the units as JSON, so that nothing is believed that no ledger has written.

    A ledger of another plan (other inputs, seed or sizes) is foreign: its units are not taken over, and
    it is emptied at once, since the files it speaks of will now be replaced.
    """

    def __init__(
        self,
        path: AnyPath,
        stage: str,
        plan: object,
        unit: Any = Any,
        *,
        unit_of: Callable[[str], object] | None = None,
        only_look: bool = False,
    ) -> None:
        """Open the ledger at ``path``, keeping its units if they were made under the same plan.

        Args:
            path: of the file.
            stage: that it is of.
            plan: under which units are done, as JSON.
            unit: the schema of a unit's facts.
            unit_of: returns the schema by the unit's name, where not all units have one.
            only_look: whether the file of a foreign one stays as it is.

        Raises:
            StoreError: the file is there, but is no ledger of this stage.
        """
        self.path = path
        self._stage = stage
        self._unit_of = unit_of or (lambda _: unit)
        self._plan = hashlib.sha256(canonical_json(plan)).hexdigest()
        self._done: dict[str, Any] = {}
        self._unsaved = 0
        if exists(path):
            content = self._load()
            if content["plan"] == self._plan:
                self._done = content["done"]
            elif not only_look:
                self._save()

    def _load(self) -> dict[str, Any]:
        hint = f"Remove {self.path.name}; the {self._stage} stage then starts from its beginning."
        data = read_bounded(self.path)
        content: dict[str, Any] = parse_json(data, self.path, what="the progress file", hint=hint)
        file = check_value(_LedgerFile, content, self.path, what="the progress file", hint=hint)
        if file.stage != self._stage:
            raise StoreError(
                "the progress file is of another stage",
                path=self.path,
                found=shortened(repr(file.stage)),
                expected=f"stage {self._stage!r}",
                hint=hint,
            )
        if file.sha256 != _digest(json.dumps(content["done"])):
            raise StoreError(
                "the progress file is corrupt", path=self.path, found="units of another digest", hint=hint
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
        """Record that ``unit`` is published; call it only once its files are under their final names."""
        self._done[unit] = facts
        self._save()

    def finish_all(self, facts: Mapping[str, object]) -> None:
        """Record several units at once, as :meth:`finish` does one."""
        self._done |= facts
        self._save()

    def finish_soon(self, unit: str, facts: object) -> None:
        """Do as :meth:`finish` does, but where there are very many units, save several at a time.

        What is rewritten each time would else grow with the square of their number. The last ones are lost
        with the process, and done again, unless :meth:`save` is called.
        """
        self._done[unit] = facts
        self._unsaved += 1
        if self._unsaved > len(self._done) // _UNITS_A_SAVE:
            self._save()

    def save(self) -> None:
        """Save what is not saved yet."""
        if self._unsaved:
            self._save()

    def _save(self) -> None:
        done = json.dumps(self._done)  # once, since a run may have thousands of units
        head = json.dumps({"stage": self._stage, "plan": self._plan, "sha256": _digest(done)})
        write_bytes(self.path, f'{head[:-1]}, "done": {done}}}'.encode())
        self._unsaved = 0


def _digest(done: str) -> str:
    return hashlib.sha256(done.encode()).hexdigest()
