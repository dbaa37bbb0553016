"""Shared memory through which running DataLoader workers receive a changed condition ``where``."""

from __future__ import annotations

from types import EllipsisType
from typing import Final

import torch

from hexdata.errors import ConfigError
from hexdata.loader import Loader

__all__ = ["SharedCondition", "check_length"]

_TEXT_BYTES: Final = 16 << 10
"""Maximum size of a condition."""
_NONE: Final = -1


class SharedCondition:
    """The condition ``where`` of a loader, for its copies in worker processes.

    The main process calls :meth:`share` before each iteration, and each worker calls :meth:`follow` when it
    begins the iteration. No iteration may be running when the condition is changed.

    Args:
        loader: The loader of the main process.
    """

    def __init__(self, loader: Loader) -> None:
        self._header = torch.tensor([0, _NONE]).share_memory_()  # version, and length in bytes
        self._text = torch.zeros(_TEXT_BYTES, dtype=torch.uint8).share_memory_()
        self._shared = loader.options.where
        self._version = 0

    def share(self, loader: Loader) -> None:
        """Share the condition of the loader if it has changed. Call it in the main process.

        Raises:
            ConfigError: The condition is too long.
        """
        where = loader.options.where
        if where == self._shared:
            return
        encoded = check_length(where)
        if encoded:
            self._text[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        self._shared, self._version = where, self._version + 1
        self._header.copy_(torch.tensor([self._version, _NONE if where is None else len(encoded)]))

    def follow(self, loader: Loader) -> None:
        """Set the condition of a worker's loader to the shared one, if that has changed."""
        version, length = self._header.tolist()
        if version == self._version:
            return
        where = None if length == _NONE else bytes(self._text[:length].tolist()).decode("utf-8")
        loader.set_epoch(loader.epoch, where=where)
        self._version = version


def check_length(where: str | EllipsisType | None) -> bytes:
    """Return a condition as bytes that fit into the shared memory.

    Raises:
        ConfigError: The condition is too long.
    """
    encoded = where.encode("utf-8") if isinstance(where, str) else b""
    if len(encoded) > _TEXT_BYTES:
        raise ConfigError(
            "where is too long for running workers",
            found=f"{len(encoded):,} bytes",
            expected=f"at most {_TEXT_BYTES:,}",
            hint="Make a new loader with this condition.",
        )
    return encoded
