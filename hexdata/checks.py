"""What options and saved states are checked with: it gives back what can be used, or one clear error."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping
from numbers import Real
from os import PathLike
from pathlib import PurePath
from typing import Any, Final, TypeVar

from hexdata.errors import ConfigError, HexdataError, StoreError
from hexdata.text import printable

__all__ = [
    "as_int",
    "as_tuple",
    "check_choice",
    "check_count",
    "check_fields",
    "check_location",
    "check_options",
    "check_same_options",
    "check_seed",
    "check_shares",
    "check_suffix",
    "check_versions",
    "is_count",
]

T = TypeVar("T")

_LARGEST: Final = (1 << 63) - 1


def check_count(name: str, value: Any, least: int) -> int:
    """Return a number as Python's int: any integer of 64 bits will do, NumPy's too, but no bool.

    Raises:
        ConfigError: it is no integer, or below ``least``.
    """
    count = as_int(value)
    if count is None or not least <= count <= _LARGEST:
        expected = f"an integer, at least {least}" + (" and of 64 bits" if count and count > _LARGEST else "")
        raise ConfigError(f"{name} cannot be used", found=repr(value), expected=expected)
    return count


def check_fields(options: Any, least: Mapping[str, int] | None = None, flags: Collection[str] = ()) -> None:
    """Check fields of frozen options while they are made, and keep them as Python's own kinds.

    Args:
        options: a dataclass. None is accepted where it is the default.
        least: names of the fields that are integers, each with the smallest one. Default None: none.
        flags: names of the fields that are True or False.

    Raises:
        ConfigError: a field is no such value.
    """
    for name, smallest in (least or {}).items():
        value = getattr(options, name)
        if value is not None or getattr(type(options), name) is not None:
            object.__setattr__(options, name, check_count(name, value, smallest))
    for name in flags:
        value = getattr(options, name)
        if not isinstance(value, bool):
            raise ConfigError(f"{name} cannot be used", found=repr(value), expected="True or False")


def check_location(name: str, value: object) -> None:
    """Check that a value can be a path or an address.

    Raises:
        ConfigError: it is neither text nor a path, or is empty.
    """
    if not (isinstance(value, (str, PathLike)) or hasattr(value, "fs")) or value == "":
        expected = "a path, or an address as text"
        raise ConfigError(f"{name} cannot be used", found=repr(value), expected=expected)


def check_options(options: Any, kind: type[T]) -> T:
    """Return the options of a function: those given, or the defaults for None.

    Raises:
        ConfigError: they are of another kind.
    """
    if options is None:
        return kind()
    if not isinstance(options, kind):
        expected = f"hexdata.{kind.__name__}, or None"
        raise ConfigError("options cannot be used", found=repr(options), expected=expected)
    return options


def as_tuple(value: Any) -> Any:
    """Return a list or an array as a tuple, as options keep them, and anything else as it is."""
    return (
        value if value is None or isinstance(value, str) or not hasattr(value, "__iter__") else tuple(value)
    )


def as_int(value: Any) -> int | None:
    """Return an integer as Python's; None for bools and whatever is none."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def check_seed(value: Any) -> int:
    """Return a seed as Python's int.

    Raises:
        ConfigError: it is no integer.
    """
    seed = as_int(value)
    if seed is None:
        raise ConfigError("seed cannot be used", found=repr(value), expected="an integer")
    return seed


def check_choice(name: str, value: object, known: Collection[str]) -> None:
    """See that an option is one of the words that it may be.

    Raises:
        ConfigError: it is not.
    """
    if not isinstance(value, str) or value not in known:
        raise ConfigError(f"unknown {name}", found=repr(value), expected=" or ".join(map(repr, known)))


def check_shares(val: Any, test: Any) -> None:
    """See that the shares of the games that are held out are numbers of 0 or more, below 1 together.

    Raises:
        ConfigError: they are not.
    """
    numbers = [isinstance(share, Real) and not isinstance(share, bool) for share in (val, test)]
    if not (all(numbers) and val >= 0 and test >= 0 and val + test < 1):  # nan is neither
        raise ConfigError(
            "val and test are shares of the games and leave some for train",
            found=f"{val!r} and {test!r}",
            expected="numbers of 0 or more, below 1 together",
        )


def check_suffix(
    path: object, what: str, suffixes: Collection[str], error: type[HexdataError] = ConfigError
) -> None:
    """See that a file to be written is called ``what`` it is: a slip must not cost another file.

    Raises:
        HexdataError: of the type ``error``, if its name ends in none of ``suffixes``.
    """
    if PurePath(str(path)).suffix.lower() not in suffixes:
        raise error(f"this is no name of {what}", path=path, expected=" or ".join(suffixes))


def is_count(value: object) -> bool:
    """Say whether a number out of a state is an integer of 0 or more."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def check_versions(state: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """See that a state has the ``version`` and the ``order_version`` that are expected.

    Raises:
        StoreError: it has another.
    """
    for name in ("version", "order_version"):
        if state[name] != expected[name]:
            raise StoreError(
                f"the state has another {name}",
                found=printable(repr(state[name])[:80]),
                expected=expected[name],
                hint="Resume with the hexdata release that wrote it, or start a new epoch.",
            )


def check_same_options(
    state: Mapping[str, Any], expected: Mapping[str, Any], names: Iterable[str], whole: str
) -> None:
    """See that a state was taken with the options of what is to go on from it, called ``whole``.

    Raises:
        ConfigError: it was not; the message names those of ``names`` that differ.
    """
    other = [name for name in names if state[name] != expected[name]]
    if other:
        raise ConfigError(
            f"the state was taken with another {', '.join(other)}",
            found={name: state[name] for name in other},
            expected={name: expected[name] for name in other},
            hint=f"Make the {whole} with the options of that run.",
        )
