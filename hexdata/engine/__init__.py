"""Where the tasks of a stage run: on this machine, or on a Ray cluster. Knows nothing of what they do.

A task is a pure function of its arguments that publishes its files atomically, so that one which is run
twice does no harm, and no engine decides a byte of what is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hexdata.config import did_you_mean
from hexdata.engine.local import LOCAL
from hexdata.engine.protocol import ENGINES, Engine
from hexdata.errors import ConfigError
from hexdata.progress import SILENT

__all__ = ["ENGINES", "LOCAL", "Engine", "EngineOptions", "open_engine"]


@dataclass(frozen=True)
class EngineOptions:
    """Which engine, as :func:`open_engine` has it.

    Attributes:
        name: ``local`` or ``ray``.
        address: of a Ray cluster.

    Raises:
        ConfigError: there is no such engine, or it takes no address.
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
                "an address has no meaning with the local engine",
                found=self.address,
                hint="Ask for the engine ray too.",
            )


@contextmanager
def open_engine(
    name: str = "local", address: str | None = None, note: Callable[[str], None] = SILENT.note
) -> Iterator[Engine]:
    """Give the engine of that name, connected for as long as the context lasts.

    Args:
        name: ``local`` or ``ray``.
        address: of a Ray cluster, such as ``10.0.0.1:6379``, or ``auto`` for the one of which this machine
            is a part; without one, ``RAY_ADDRESS`` is taken, or a cluster of this machine alone is started
            and ended.
        note: is told what a person should see: which task is done again, and why.

    Raises:
        ConfigError: there is no such engine, or it takes no address.
        EngineError: Ray is not installed, or the cluster does not answer.
    """
    options = EngineOptions(name, address)
    if options.name == "local":
        yield LOCAL
        return
    from hexdata.engine.ray import connected

    with connected(options.address, note) as engine:
        yield engine
