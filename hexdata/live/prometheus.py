"""HTTP endpoint that serves the metrics of a live pipeline to Prometheus, if requested.

Metrics are read at each request and are not stored. The module needs prometheus-client, which the extra
``live`` installs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from hexdata.errors import ConfigError
from hexdata.extras import installed_by
from hexdata.live.metrics import COMMON_METRICS, MetricsByStage

with installed_by("live", "the Prometheus endpoint"):
    from prometheus_client import CollectorRegistry, start_http_server
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, UnknownMetricFamily
    from prometheus_client.registry import Collector

__all__ = ["LOOPBACK", "serve_metrics"]

LOOPBACK: Final = "127.0.0.1"

_COUNTERS: Final = {
    "out": ("items", "Items put into the queue behind the stage"),
    "dropped": ("dropped", "Items dropped because the queue behind the stage was full"),
    "busy_seconds": ("busy_seconds", "Seconds of work of the threads of the stage, added up"),
}
_GAUGES: Final = {
    "queued": ("queued", "Items in the queue behind the stage"),
    "capacity": ("capacity", "Capacity of the queue behind the stage, in items"),
    "threads": ("threads", "Worker threads of the stage"),
    "busy": ("busy_threads", "Worker threads of the stage that are busy"),
}
"""Metrics of every stage: the name after ``hexdata_live_``, and the help text."""


@contextmanager
def serve_metrics(metrics: Callable[[], MetricsByStage], port: int, host: str = LOOPBACK) -> Iterator[int]:
    """Serve the metrics of a pipeline at ``http://host:port/metrics`` during a ``with`` block.

    There is no password: anyone who can reach the port can read the metrics.

    Args:
        metrics: ``metrics`` of a ``Pipeline`` or a ``LiveLoader``. It is called at each request, in another
            thread.
        port: Port to listen on; 0 for any free port.
        host: Address to listen on. The default is a loopback address, which other machines cannot reach.

    Yields:
        The port.

    Raises:
        ConfigError: The address or the port cannot be used.
    """
    registry = CollectorRegistry()
    registry.register(_StagesCollector(metrics))
    try:
        server, thread = start_http_server(port, host, registry)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            "the metrics cannot be served at this address",
            found=f"{host}:{port}: {error}",
            hint="Choose another port (--prometheus) or address (--prometheus-host).",
        ) from error
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _StagesCollector(Collector):
    """Converts metrics into Prometheus families with a label for the stage; other metrics of a stage also
    have a label with their name.
    """

    def __init__(self, metrics: Callable[[], MetricsByStage]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        metrics = self._metrics()
        for metric, (name, text) in _COUNTERS.items():
            counter = CounterMetricFamily(f"hexdata_live_{name}", text, labels=["stage"])
            for stage, found in metrics.items():
                counter.add_metric([stage], found[metric])
            yield counter
        for metric, (name, text) in _GAUGES.items():
            gauge = GaugeMetricFamily(f"hexdata_live_{name}", text, labels=["stage"])
            for stage, found in metrics.items():
                gauge.add_metric([stage], found[metric])
            yield gauge
        # Other metrics of a stage may be counters or gauges.
        others = UnknownMetricFamily(
            "hexdata_live_figure", "Other metrics of a stage, by name", labels=["stage", "figure"]
        )
        for stage, found in metrics.items():
            for figure in found.keys() - COMMON_METRICS:
                others.add_metric([stage, figure], found[figure])
        yield others
