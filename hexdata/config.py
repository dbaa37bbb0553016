"""Reading of TOML config files, and suggestions for misspelled names."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from hexdata.errors import ConfigError
from hexdata.retry import on_disk

__all__ = ["read_toml"]


def read_toml(path: str | Path) -> dict[str, Any]:
    """Return the content of a TOML file.

    Raises:
        ConfigError: The file is missing, unreadable or not valid TOML.
    """
    try:
        return tomllib.loads(on_disk(Path(path).read_bytes).decode("utf-8-sig"))
    except FileNotFoundError as error:
        raise ConfigError("the config does not exist", path=path) from error
    except OSError as error:
        raise ConfigError("the config cannot be read", path=path, found=error.strerror) from error
    except ValueError as error:  # also wrong UTF-8, and numbers of too many digits
        raise ConfigError("not valid TOML", path=path, found=str(error)) from error
    except RecursionError as error:
        raise ConfigError("not valid TOML", path=path, found="brackets nested too deeply") from error
