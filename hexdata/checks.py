"""Checks of options and saved states, with errors that give the found and the expected value."""

from __future__ import annotations

import operator
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from numbers import Real
from os import PathLike
from pathlib import PurePath
from typing import Any, Final, TypeVar

from hexdata.errors import ConfigError, HexdataError, StoreError
from hexdata.text import did_you_mean, shortened

T = TypeVar("T")

_MAX_COUNT: Final = 1 << 62
"""Largest number that a state and a manifest may contain."""
# 1,234 digits. Manifests and messages have seeds as decimal text, and Python converts at most 4,300 digits.
_MAX_SEED_BITS: Final = 4096


def check_count(name: str, value: Any, least: int, most: int = _MAX_COUNT) -> int:
    """Return ``value`` as a Python int. Other integer types, such as NumPy's, are accepted; bools are not.

    Args:
        name: Name of the option, for the message.
        value: Value to check.
        least: Smallest allowed value.
        most: Largest allowed value (default 2^62).

    Raises:
        ConfigError: The value is not an integer, is below ``least`` or above ``most``.
    """
    count = as_int(value)
    if count is None or not least <= count <= most:
        limit = f" and at most {most}" if count is not None and count > most else ""
        raise unusable(name, _shown(value), f"an integer, at least {least}{limit}")
    return count


def unusable(name: str, found: str, expected: str) -> ConfigError:
    """Return the error for an option with an invalid value."""
    return ConfigError(f"{name} cannot be used", found=found, expected=expected)


def _shown(value: Any) -> str:
    """Return a value as text; Python converts no integer of more than 4,300 digits."""
    bits = (as_int(value) or 0).bit_length()
    return f"an integer of {bits:,} bits" if bits > _MAX_SEED_BITS else repr(value)


def check_fields(options: Any, least: Mapping[str, int] | None = None) -> None:
    """Check the flags of an options class, and integers, which are converted to Python ints.

    Args:
        options: The options, of which all fields with the type bool are checked. None is accepted for a field
            whose default is None.
        least: Names of integer fields, each with its smallest allowed value (default: none).

    Raises:
        ConfigError: A field has an invalid value.
    """
    for name, smallest in (least or {}).items():
        value = getattr(options, name)
        if value is not None or getattr(type(options), name) is not None:
            # The dataclass is frozen. NumPy's integers are replaced, since JSON cannot contain them.
            object.__setattr__(options, name, check_count(name, value, smallest))
    for field in fields(options):
        value = getattr(options, field.name)
        is_unset = value is None and field.default is None
        if field.type in ("bool", "bool | None") and not (isinstance(value, bool) or is_unset):
            raise unusable(field.name, repr(value), "True or False")


def check_positive(name: str, value: Any) -> float:
    """Return an option as a float.

    Raises:
        ConfigError: The value is not a finite number above 0.
    """
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not (is_number and 0 < value <= sys.float_info.max):
        raise unusable(name, _shown(value), "a number above 0")
    return float(value)


def check_location(name: str, value: object) -> None:
    """Check that a value is a path or an address.

    Raises:
        ConfigError: The value is neither text nor a path, or it is empty.
    """
    # An address is an object with a file system. Its class is not imported: most runs need no object store.
    if not (isinstance(value, (str, PathLike)) or hasattr(value, "fs")) or value == "":
        raise unusable(name, repr(value), "a path, or an address as text")


def check_options(options: Any, kind: type[T]) -> T:
    """Return ``options``, or the defaults of ``kind`` if ``options`` is None.

    Raises:
        ConfigError: The options are of another type.
    """
    if options is not None and not isinstance(options, kind):
        raise unusable("options", repr(options), f"hexdata.{kind.__name__}, or None")
    return options or kind()


def as_tuple(value: Any) -> Any:
    """Return a list or an array as a tuple, and any other value unchanged."""
    is_list = hasattr(value, "__iter__") and not isinstance(value, str)
    return tuple(value) if is_list else value


def as_int(value: Any) -> int | None:
    """Return an integer of any type as a Python int; None for bools and all other values."""
    # In Python, True is the integer 1.
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def check_seed(value: Any) -> int:
    """Return a seed as a Python int.

    Raises:
        ConfigError: The seed is not an integer.
    """
    seed = as_int(value)
    if seed is None or seed.bit_length() > _MAX_SEED_BITS:
        raise unusable("seed", _shown(value), f"an integer of at most {_MAX_SEED_BITS:,} bits")
    return seed


def check_choice(name: str, value: object, known: Collection[str]) -> None:
    """Check that an option is one of the known words.

    Raises:
        ConfigError: It is not.
    """
    if not isinstance(value, str) or value not in known:
        hint, names = did_you_mean(str(value), known), " or ".join(map(repr, known))
        raise ConfigError(f"unknown {name}", found=repr(value), expected=names, hint=hint)


def check_shares(val: Any, test: Any) -> None:
    """Check the shares of games held out for validation and test.

    Raises:
        ConfigError: They are not both numbers of at least 0, or their sum is not below 1.
    """
    numbers = all(isinstance(share, Real) and not isinstance(share, bool) for share in (val, test))
    if not (numbers and val >= 0 and test >= 0 and val + test < 1):  # nan is neither
        raise unusable("val and test", f"{val!r} and {test!r}", "numbers of at least 0 whose sum is below 1")


def check_suffix(
    path: object, what: str, suffixes: Collection[str], error: type[HexdataError] = ConfigError
) -> None:
    """Check the suffix of a file to be written, so that a typing error does not overwrite another file.

    Args:
        path: Path or address of the file.
        what: Kind of file for the message, such as "a Parquet file".
        suffixes: Allowed suffixes in lower case, each with its dot.
        error: Type of the exception (default: ``ConfigError``).

    Raises:
        HexdataError: Of the type ``error``, if the suffix is not allowed.
    """
    if PurePath(str(path)).suffix.lower() not in suffixes:
        raise error(f"unsupported suffix for {what}", path=path, expected=" or ".join(suffixes))


def check_versions(state: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Check that a state has the expected ``version`` and ``order_version``.

    Raises:
        StoreError: One of them differs.
    """
    for name in ("version", "order_version"):
        if state[name] != expected[name]:
            found = shortened(repr(state[name]))
            hint = "Resume with the hexdata release that wrote it, or start a new epoch."
            raise StoreError(f"the state has another {name}", found=found, expected=expected[name], hint=hint)


def check_same_options(
    state: Mapping[str, Any], expected: Mapping[str, Any], names: Iterable[str], what: str
) -> None:
    """Check that a state was saved with the same options as the object that resumes from it.

    Args:
        state: The saved state.
        expected: Options of the object that resumes.
        names: Names of the options to compare.
        what: What the object is called in the message, such as "loader".

    Raises:
        ConfigError: At least one option differs; the message lists all that do.
    """
    if other := [name for name in names if state[name] != expected[name]]:
        found, wanted = ({name: options[name] for name in other} for options in (state, expected))
        reason = f"the state was saved with another {', '.join(other)}"
        hint = f"Create the {what} with the options of that run."
        raise ConfigError(reason, found=found, expected=wanted, hint=hint)
