"""Where the tasks of a stage run: on this machine, or on a Ray cluster. Knows nothing of what they do.

A task is a pure function of its arguments that publishes its files atomically, so that one which is run
twice does no harm, and no engine decides a byte of what is written.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hexdata.engine.local import LOCAL
from hexdata.engine.protocol import ENGINES, Engine
from hexdata.errors import ConfigError

__all__ = ["ENGINES", "LOCAL", "Engine", "open_engine"]


@contextmanager
def open_engine(name: str = "local", address: str | None = None) -> Iterator[Engine]:
    """Give the engine of that name, connected for as long as the context lasts.

    Args:
        name: ``local`` or ``ray``.
        address: of a Ray cluster, such as ``10.0.0.1:6379``, or ``auto`` for the one of which this machine
            is a part; without one, ``RAY_ADDRESS`` is taken, or a cluster of this machine alone is started
            and ended.

    Raises:
        ConfigError: there is no such engine, or it takes no address.
        EngineError: Ray is not installed, or the cluster does not answer.
    """
    if name not in ENGINES:
        raise ConfigError("unknown engine", found=name, expected=" or ".join(ENGINES))
    if name == "local":
        if address is not None:
            raise ConfigError("--address has no meaning with the local engine", cure="Add --engine ray.")
        yield LOCAL
        return
    from hexdata.engine.ray import connected

    with connected(address) as engine:
        yield engine
