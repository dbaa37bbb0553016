"""Exceptions of hexdata.

A message contains the path, the record, what was found, what was expected and what to do.
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
    """Base class of all errors that hexdata raises.

    Args:
        reason: what went wrong, in one clause.
        path: path or address of the file or folder concerned.
        record: record of the file: an index, or text such as "line 12".
        found: what was found.
        expected: what was expected.
        hint: what the user can do.
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
        """Return the message without its path and hint: record, reason, found and expected."""
        record = f"record {self.record}" if isinstance(self.record, int) else self.record
        parts = [f"{record}: {self.reason}" if record else self.reason]
        if self.found is not None:
            parts.append(f"found {self.found}")
        if self.expected is not None:
            parts.append(f"expected {self.expected}")
        return "; ".join(parts)

    def __reduce__(self) -> tuple[object, ...]:
        """Support pickling: the default would lose the keyword arguments."""
        return (_rebuild, (type(self), self.reason, self.__dict__.copy()))

    def at(self, path: object) -> HexdataError:
        """Return this error with its path set to ``path`` if it had none."""
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
    """A file in an unknown layout, or a file that violates its layout."""

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
    """A pickle that uses a name or an operation that is not allowed."""


class SourceChangedError(InputError):
    """A source whose content changed after it was converted."""


class StoreError(HexdataError):
    """A store that is missing, incomplete, altered, of another version, or not a store."""


class StoreLockedError(StoreError):
    """Another process is writing to the store."""


class RejectRateError(HexdataError):
    """More records were rejected than ``--max-reject-rate`` allows; nothing was written to the store."""


class VerifyError(HexdataError):
    """The contents of the store differ from its manifest."""


class ConfigError(HexdataError):
    """An invalid configuration or option."""


class BudgetError(HexdataError):
    """The work does not fit into the available memory or disk space."""

    @classmethod
    def of_memory(cls, message: str, *, found: int, expected: int, hint: str) -> BudgetError:
        """Return the error for a budget of ``found`` bytes where ``expected`` are needed.

        What is found is rounded down and what is expected up, to MB, so that the two never read alike.
        """
        return cls(
            message,
            found=f"{found // 10**6:,} MB",
            expected=f"at least {-(-expected // 10**6):,} MB",
            hint=hint,
        )


class EngineError(HexdataError):
    """The engine cannot run tasks, for example because a cluster does not answer."""
