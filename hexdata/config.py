"""Reading of TOML config files, and suggestions for misspelled names."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from hexdata.errors import ConfigError

__all__ = ["read_toml", "with_current_names"]

_RENAMED_KEYS: Final = {"value_sense": "value_convention"}
"""Keys that are still read under their former names."""


def read_toml(path: str | Path) -> dict[str, Any]:
    """Return the content of a TOML file.

    Raises:
        ConfigError: The file is missing, unreadable or not valid TOML.
    """
    try:
        return tomllib.loads(Path(path).read_bytes().decode("utf-8-sig"))
    except FileNotFoundError as error:
        raise ConfigError("the config does not exist", path=path) from error
    except OSError as error:
        raise ConfigError("the config cannot be read", path=path, found=error.strerror) from error
    except ValueError as error:  # also wrong UTF-8, and numbers of too many digits
        raise ConfigError("not valid TOML", path=path, found=str(error)) from error
    except RecursionError as error:
        raise ConfigError("not valid TOML", path=path, found="brackets nested too deeply") from error


def with_current_names(
    section: Mapping[str, Any], former_keys: Mapping[str, str] = _RENAMED_KEYS
) -> dict[str, Any]:
    """Return a section with the current names of renamed keys.

    Args:
        section: Content of the section.
        former_keys: Current name of each renamed key by its former name. Default: those of ``[convert]``.

    Raises:
        ConfigError: It has a key under both names.
    """
    for former, current in former_keys.items():
        if former in section and current in section:
            raise ConfigError(
                f"{former!r} is the former name of {current!r}; both are set", hint=f"Remove {former!r}."
            )
    return {former_keys.get(key, key): value for key, value in section.items()}
