"""Engines that run the tasks of a stage: on this machine or on a Ray cluster.

A task is a pure function that writes its files atomically. Running it twice is harmless, and the bytes
written do not depend on the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hexdata.engine.local import LOCAL
from hexdata.engine.protocol import ENGINES, Engine
from hexdata.errors import ConfigError
from hexdata.progress import SILENT
from hexdata.text import did_you_mean

__all__ = ["ENGINES", "LOCAL", "Engine", "EngineOptions", "open_engine"]


@dataclass(frozen=True)
class EngineOptions:
    """Choice of an engine, with the arguments of :func:`open_engine`.

    Attributes:
        name: ``"local"`` (default) or ``"ray"``.
        address: Address of a Ray cluster. Default None.

    Raises:
        ConfigError: The engine is unknown or accepts no address.
    """

    name: str = "local"
    address: str | None = None

    def __post_init__(self) -> None:
        if self.name not in ENGINES:
            raise ConfigError(
                "unknown engine",
                found=self.name,
                expected=" or ".join(ENGINES),
                hint=did_you_mean(self.name, ENGINES),
            )
        if self.name == "local" and self.address is not None:
            raise ConfigError(
                "the local engine accepts no address",
                found=self.address,
                hint="Add --engine ray.",
            )


@contextmanager
def open_engine(
    name: str = "local", address: str | None = None, note: Callable[[str], None] = SILENT.note
) -> Iterator[Engine]:
    """Open an engine and close it when the context ends.

    Args:
        name: ``"local"`` (default) or ``"ray"``.
        address: Address of a Ray cluster, such as ``"10.0.0.1:6379"``, or ``"auto"`` for the cluster that
            this machine belongs to. Default None: ``RAY_ADDRESS`` if set, otherwise a temporary cluster is
            started on this machine.
        note: Function called with messages for the user, such as the reason why a task is repeated.

    Raises:
        ConfigError: The engine is unknown or accepts no address.
        EngineError: The cluster does not answer.
    """
    options = EngineOptions(name, address)
    if options.name == "local":
        yield LOCAL
        return
    from hexdata.engine.ray import connect_engine

    with connect_engine(options.address, note) as engine:
        yield engine
