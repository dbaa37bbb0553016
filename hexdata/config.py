"""Reading of TOML config files, and checks of their keys and sections."""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hexdata.errors import ConfigError, HexdataError
from hexdata.retry import on_disk
from hexdata.text import did_you_mean


def read_toml(path: str | Path) -> dict[str, Any]:
    """Return the content of a TOML file.

    Raises:
        ConfigError: The file is missing, unreadable or not valid TOML.
    """
    try:
        # Some editors begin a file with a byte order mark, which TOML does not allow.
        return tomllib.loads(on_disk(Path(path).read_bytes).decode("utf-8-sig"))
    except FileNotFoundError as error:
        raise ConfigError("the config does not exist", path=path) from error
    except OSError as error:
        raise ConfigError("the config cannot be read", path=path, found=error.strerror) from error
    except ValueError as error:  # also wrong UTF-8, and numbers of too many digits
        raise ConfigError("not valid TOML", path=path, found=str(error)) from error
    except RecursionError as error:
        raise ConfigError("not valid TOML", path=path, found="brackets nested too deeply") from error


def check_keys(found: Iterable[str], known: Sequence[str]) -> None:
    """Check that all keys are known.

    Raises:
        ConfigError: One is not; the message suggests the nearest known one.
    """
    for key in found:
        if key not in known:
            expected = f"one of {', '.join(known)}" if known else "no keys"
            raise ConfigError(f"unknown key {key!r}", expected=expected, hint=did_you_mean(key, known))


def check_arguments(
    kind: Callable[..., object], given: Mapping[str, Any], others: Sequence[str] = ()
) -> None:
    """Check that the content of a section fits the constructor of its options.

    Args:
        kind: Class of the options.
        given: Content of the section.
        others: Parameters that a section cannot set, because they are supplied otherwise. Default: none.

    Raises:
        ConfigError: A key is unknown, or one without a default is missing.
    """
    parameters = inspect.signature(kind).parameters.values()
    known = [each for each in parameters if each.name not in others]
    check_keys(given, [each.name for each in known])
    for each in known:
        if each.default is each.empty and each.name not in given:
            raise ConfigError(f"{each.name} is missing")


@contextmanager
def in_section(name: str) -> Iterator[None]:
    """Begin the errors of a ``with`` block with the name of a section."""
    try:
        yield
    except HexdataError as error:
        error.reason = f"[{name}] {error.reason}"
        raise
