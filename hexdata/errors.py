"""Exceptions of hexdata.

A message contains the path and the record, the fault, the value found, the value expected, and a hint.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from typing import Final

__all__ = [
    "BudgetError",
    "ConfigError",
    "EngineError",
    "FormatError",
    "HexdataError",
    "InputError",
    "MissingExtraError",
    "Reason",
    "RejectRateError",
    "SourceChangedError",
    "StoreError",
    "StoreLockedError",
    "UnsafePickleError",
    "VerifyError",
]

_MAY_HAVE_SECRETS: Final = re.compile(r"[a-z0-9]:/|pipe:", re.IGNORECASE)
_ARGUMENTS: Final = re.compile(r"(?<!roken )(\bpipe:\s*+[\w./+-]*+)(?! …)[\s\S]+", re.IGNORECASE)
"""A command after its program: each word of it may be a secret. It ends with the text."""
_USER: Final = re.compile(
    r"""(?<=[a-z0-9+.-]{2}:/)(/?)
    (?:[^/?\s"']+
    |[^/?@:\s"']*:(?!\d{1,5}(?:[/?\#]|$))[^\s"']*
    |(?<!http:/)(?<!https:/)(?<!http://)(?<!https://)[^/?@:\s"']*:[^\s"']*
    )(?:@|%40)""",
    re.IGNORECASE | re.VERBOSE,
)
"""The user of an address. A password may contain a slash; in an HTTP URL, a colon may introduce a port."""
_QUERY: Final = re.compile(
    r"""([a-z0-9+.-]{2}:/[^\s"'?\#]*)(?:\?|\#[^\s"'=?]*[=?])[^\s"']*""", re.IGNORECASE | re.VERBOSE
)
"""The address before its query, or before its fragment if that has values."""
_QUERY_OF_ALL: Final = re.compile(r"\A([a-z][a-z0-9+.-]+:/[^\s?#]*)(?:\?|#[^=?]*[=?])[\s\S]*", re.IGNORECASE)
"""The same for a text that begins with an address, whose query may contain spaces."""


def without_secrets(text: str) -> str:
    """Return a text in which addresses have no user, query or arguments of a command."""
    # Most texts contain no address, and every message of an error is checked.
    if _MAY_HAVE_SECRETS.search(text) is None:
        return text
    # Commands first, because their arguments may contain addresses. _QUERY ends at the first space, so the
    # pattern for a whole text precedes it.
    for pattern, kept in ((_ARGUMENTS, r"\1 …"), (_USER, r"\1"), (_QUERY_OF_ALL, r"\1"), (_QUERY, r"\1")):
        text = pattern.sub(kept, text)
    return text


def _redacted(value: object) -> object:
    """Return a value of a message, whose text is without secrets."""
    if isinstance(value, int | None):
        return value
    text = str(value)
    redacted = without_secrets(text)
    # The value keeps its type, such as a dict, unless it has secrets.
    return value if text == redacted else redacted


class Reason(StrEnum):
    """Reason codes of rejected records and files, in ``FormatError.code`` and in the table ``rejected``.

    docs/format.md describes each. The values are stored on disk and never change.
    """

    AFTER_REPEAT = "after-repeat"
    BOARD_CELLS = "board-cells"
    BOARD_OVERLAP = "board-overlap"
    BOARD_SHAPE = "board-shape"
    BOARD_SIZE = "board-size"
    BOARD_TYPE = "board-type"
    CORRUPT_ARRAY = "corrupt-array"
    CORRUPT_GZIP = "corrupt-gzip"
    CORRUPT_PICKLE = "corrupt-pickle"
    CORRUPT_ZIP = "corrupt-zip"
    EXAMPLE_LAYOUT = "example-layout"
    GAME_ID = "game-id"
    GAME_LAYOUT = "game-layout"
    GAME_MISMATCH = "game-mismatch"
    HEXWORLD_SYNTAX = "hexworld-syntax"
    IRREGULAR_EXAMPLES = "irregular-examples"
    LIMIT_ARRAY = "limit-array"
    LIMIT_HEADER = "limit-header"
    LIMIT_HEADERS = "limit-headers"
    LIMIT_HELD = "limit-held"
    LIMIT_INTEGER = "limit-integer"
    LIMIT_ITEMS = "limit-items"
    LIMIT_LAYOUTS = "limit-layouts"
    LIMIT_MEMO = "limit-memo"
    LIMIT_NESTING = "limit-nesting"
    LIMIT_RATIO = "limit-ratio"
    LIMIT_REJECTED = "limit-rejected"
    LIMIT_SIZE = "limit-size"
    LIMIT_STACK = "limit-stack"
    LIMIT_TEXT = "limit-text"
    LINE_TOO_LONG = "line-too-long"
    METADATA_SIZE = "metadata-size"
    METADATA_TYPE = "metadata-type"
    METADATA_VALUE = "metadata-value"
    MOVE_ORDER = "move-order"
    NO_MOVES = "no-moves"
    NO_WINNER = "no-winner"
    PLAYER_RANGE = "player-range"
    PLAYER_TYPE = "player-type"
    POLICY_DTYPE = "policy-dtype"
    POLICY_MASK = "policy-mask"
    POLICY_SHAPE = "policy-shape"
    POLICY_TYPE = "policy-type"
    POLICY_VALUES = "policy-values"
    POSITION_RANGE = "position-range"
    POSITION_TYPE = "position-type"
    READER_ERROR = "reader-error"
    REPEATED_MOVE = "repeated-move"
    SETUP_STONES = "setup-stones"
    SGF_GAME = "sgf-game"
    SGF_SYNTAX = "sgf-syntax"
    SGF_VARIATIONS = "sgf-variations"
    SHARED_PAYLOAD = "shared-payload"
    SIDECAR_MISMATCH = "sidecar-mismatch"
    SIDECAR_MISSING = "sidecar-missing"
    SIDECAR_RECORD = "sidecar-record"
    SIDECAR_VERSION = "sidecar-version"
    TARGET_RANGE = "target-range"
    TIER_RANGE = "tier-range"
    TIER_TYPE = "tier-type"
    TORCH_TENSORS = "torch-tensors"
    TRAILING_DATA = "trailing-data"
    TRMPH_CELL = "trmph-cell"
    TRMPH_SYNTAX = "trmph-syntax"
    TRUNCATED = "truncated"
    UNKNOWN_LAYOUT = "unknown-layout"
    UNREADABLE = "unreadable"
    UNSAFE_ARRAY = "unsafe-array"
    UNSAFE_CALL = "unsafe-call"
    UNSAFE_DTYPE = "unsafe-dtype"
    UNSAFE_GLOBAL = "unsafe-global"
    UNSAFE_OPCODE = "unsafe-opcode"
    VALUE_RANGE = "value-range"
    VALUE_TYPE = "value-type"
    WINNER_VALUE = "winner-value"

    # Codes of files that live mode or a loader cannot use. They are never in the table ``rejected``.
    BROKEN_SHARD = "broken-shard"
    GONE = "gone"
    INPUT_ERROR = "input-error"
    NO_GAMES = "no-games"
    NO_POSITIONS = "no-positions"
    REWRITTEN = "rewritten"
    SHUFFLED_WITHOUT_IDS = "shuffled-without-ids"
    TOO_LARGE = "too-large"
    VALUE_SENSE = "value-sense"


class HexdataError(Exception):
    """Base class of all errors that hexdata raises.

    Args:
        reason: The fault, in one clause.
        path: Path or address of the file or folder.
        record: Record of the file: an index, or text such as "line 12".
        found: The value found.
        expected: The expected values.
        hint: An action that the user can take.
        lines: List of single findings, one line each, such as the files concerned. Default: none.
        commands: Shell commands that the hint refers to. Default: none.
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
        lines: Sequence[str] = (),
        commands: Sequence[str] = (),
    ) -> None:
        reason = without_secrets(reason)
        super().__init__(reason)
        self.reason = reason
        self.path = None if path is None else without_secrets(str(path))
        self.record = record
        self.found = _redacted(found)
        self.expected = _redacted(expected)
        self.hint = None if hint is None else without_secrets(hint)
        self.lines = tuple(map(without_secrets, lines))
        self.commands = tuple(map(without_secrets, commands))

    def __str__(self) -> str:
        return "\n  ".join(self.report())

    def report(self) -> list[str]:
        """Return the message as lines: the fault, ``lines``, the hint and ``commands``.

        Without ``lines``, the fault and the hint are on one line.
        """
        message = f"{self.path}: {self.detail()}" if self.path else self.detail()
        if not self.lines:
            return [f"{message}. {self.hint}" if self.hint else message, *self.commands]
        return [message, *self.lines, *([self.hint] if self.hint else []), *self.commands]

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
        return (_rebuild, (type(self), self.reason, {**self.__dict__, "path": self.path}))

    def at(self, path: object) -> HexdataError:
        """Return this error with its path set to ``path`` if it had none."""
        # The code that raised the error knows the file better than its callers.
        self.path = self.path or without_secrets(str(path))
        return self


def _rebuild(kind: type[HexdataError], reason: str, state: dict[str, object]) -> HexdataError:
    error = kind(reason)
    for name, value in state.items():  # an ImportError keeps its path elsewhere
        setattr(error, name, value)
    return error


class InputError(HexdataError):
    """A source file or an argument that cannot be used."""

    code = Reason.INPUT_ERROR


class FormatError(InputError):
    """A file in an unknown layout, or a file that violates its layout."""

    def __init__(
        self,
        reason: str,
        code: Reason = Reason.UNKNOWN_LAYOUT,
        found: object = None,
        expected: object = None,
        *,
        path: object = None,
        record: int | str | None = None,
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


class MissingExtraError(ConfigError, ModuleNotFoundError):
    """A library is not installed; the message names the extra of hexdata that installs it.

    ``name`` is the name of the module, as in every ``ModuleNotFoundError``.
    """


class BudgetError(HexdataError):
    """The work does not fit into the available memory or disk space."""

    @classmethod
    def of_memory(cls, message: str, *, found: int, expected: int, hint: str) -> BudgetError:
        """Return the error for a budget of ``found`` bytes if at least ``expected`` bytes are needed.

        ``found`` is rounded down and ``expected`` up to MB, so that the message never shows equal numbers.
        """
        return cls(
            message,
            found=f"{found // 10**6:,} MB",
            expected=f"at least {-(-expected // 10**6):,} MB",
            hint=hint,
        )


class EngineError(HexdataError):
    """The engine cannot run tasks, for example because a cluster does not answer."""
