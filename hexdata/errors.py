"""Every error that hexdata raises on purpose: one tree, one shape of message.

A message gives the path, the record, what was found, what was expected and what to do. Nothing here
logs or prints; whoever catches an error decides what becomes of it.
"""

from __future__ import annotations

__all__ = [
    "BudgetError",
    "ConfigError",
    "EngineError",
    "FormatError",
    "HexdataError",
    "InputError",
    "RejectRateError",
    "SourceChangedError",
    "StoreError",
    "StoreLockedError",
    "UnsafePickleError",
    "VerifyError",
]


class HexdataError(Exception):
    """Root of the tree: catch this to catch whatever hexdata itself found wrong.

    Args:
        reason: what went wrong, in one clause.
        path: the file or folder it is about, or its address.
        record: which record of the file: an index, a line ("line 12"), a byte position.
        found: what stood there.
        expected: what should have stood there.
        hint: what the user can do about it.
    """

    def __init__(
        self,
        reason: str,
        *,
        path: object = None,
        record: int | str | None = None,
        found: object = None,
        expected: object = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.path = None if path is None else str(path)
        self.record = record
        self.found = found
        self.expected = expected
        self.hint = hint

    def __str__(self) -> str:
        message = f"{self.path}: {self.detail()}" if self.path else self.detail()
        return f"{message}. {self.hint}" if self.hint else message

    def detail(self) -> str:
        """Return record, reason, found and expected: the message less its path and its hint."""
        record = f"record {self.record}" if isinstance(self.record, int) else self.record
        parts = [f"{record}: {self.reason}" if record else self.reason]
        if self.found is not None:
            parts.append(f"found {self.found}")
        if self.expected is not None:
            parts.append(f"expected {self.expected}")
        return "; ".join(parts)

    def __reduce__(self) -> tuple[object, ...]:
        """Travel between processes whole: the default would lose the keyword arguments."""
        return (_rebuild, (type(self), self.reason, self.__dict__.copy()))

    def at(self, path: object) -> HexdataError:
        """Return this error, now naming ``path`` if it named none."""
        self.path = self.path or str(path)
        return self


def _rebuild(kind: type[HexdataError], reason: str, state: dict[str, object]) -> HexdataError:
    error = kind(reason)
    error.__dict__.update(state)
    return error


class InputError(HexdataError):
    """A source file or an argument that cannot be used."""

    code = "input-error"
    """Stable reason code, as in the table of rejected records."""


class FormatError(InputError):
    """A file of a layout that no reader knows, or one that breaks its own layout."""

    def __init__(
        self,
        reason: str,
        *,
        code: str = "unknown-layout",
        path: object = None,
        record: int | str | None = None,
        found: object = None,
        expected: object = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(reason, path=path, record=record, found=found, expected=expected, hint=hint)
        self.code = code


class UnsafePickleError(FormatError):
    """A pickle that asks for a name or an operation which is not on the list of allowed ones."""


class SourceChangedError(InputError):
    """A source with a name that the store knows, but other bytes than it had when it was converted."""


class StoreError(HexdataError):
    """A store that is missing, foreign, of another version, incomplete or altered."""


class StoreLockedError(StoreError):
    """Another process is writing to the store."""


class RejectRateError(HexdataError):
    """More records were rejected than ``--max-reject-rate`` allows; nothing was published."""


class VerifyError(HexdataError):
    """The store does not hold what its manifests say."""


class ConfigError(HexdataError):
    """A configuration or an option that cannot be used."""


class BudgetError(HexdataError):
    """The work does not fit into the memory or the disk given."""


class EngineError(HexdataError):
    """The machines that were to do the work cannot, or no longer: see :mod:`hexdata.engine`."""
