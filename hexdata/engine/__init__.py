"""Engines that run the tasks of a stage: on this machine or on a Ray cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from hexdata.checks import check_choice
from hexdata.engine.local import LOCAL, Engine
from hexdata.errors import ConfigError

__all__ = ["ENGINES", "LOCAL", "Engine", "EngineOptions", "open_engine"]

ENGINES: Final = ("local", "ray")


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
        check_choice("engine", self.name, ENGINES)
        if self.name == "local" and self.address is not None:
            raise ConfigError(f"address {self.address} needs the engine ray", hint="Add --engine ray.")


@contextmanager
def open_engine(name: str = "local", address: str | None = None) -> Iterator[Engine]:
    """Open an engine and close it when the context ends.

    Args:
        name: ``"local"`` (default) or ``"ray"``.
        address: Address of a Ray cluster, such as ``"10.0.0.1:6379"``, or ``"auto"`` for the cluster that
            this machine belongs to. Default None: ``RAY_ADDRESS`` if set, otherwise a temporary cluster is
            started on this machine.

    Raises:
        ConfigError: The engine is unknown or accepts no address, or Ray is not installed.
        EngineError: The cluster does not answer.
    """
    options = EngineOptions(name, address)
    if options.name == "local":
        yield LOCAL
        return
    # Ray is an extra, which only this engine needs.
    from hexdata.engine.ray import connect_engine

    with connect_engine(options.address) as engine:
        yield engine
