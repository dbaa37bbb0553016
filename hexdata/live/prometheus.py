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
from hexdata.live.pipeline import MetricsByStage

with installed_by("live", "the Prometheus endpoint"):
    from prometheus_client import CollectorRegistry, start_http_server
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, UnknownMetricFamily
    from prometheus_client.registry import Collector

LOOPBACK: Final = "127.0.0.1"

_COMMON: Final = {
    "out": (CounterMetricFamily, "items", "Items put into the queue behind the stage"),
    "dropped": (CounterMetricFamily, "dropped", "Items dropped because the queue behind the stage was full"),
    "busy_seconds": (CounterMetricFamily, "busy_seconds", "Seconds of work of the threads of the stage"),
    "queued": (GaugeMetricFamily, "queued", "Items in the queue behind the stage"),
    "capacity": (GaugeMetricFamily, "capacity", "Capacity of the queue behind the stage, in items"),
    "threads": (GaugeMetricFamily, "threads", "Worker threads of the stage"),
    "busy": (GaugeMetricFamily, "busy_threads", "Worker threads of the stage that are busy"),
}
"""Metrics of every stage: kind, the name after ``hexdata_live_``, and the help text."""


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
    registry.register(_Stages(metrics))
    try:
        # An OverflowError is one of a port above 65,535.
        server, thread = start_http_server(port, host, registry)
    except (OSError, OverflowError) as error:
        hint = "Choose another port (--prometheus) or address (--prometheus-host)."
        raise ConfigError(f"the metrics cannot be served at {host}:{port}: {error}", hint=hint) from error
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Stages(Collector):
    """Metrics as families with a label for the stage; other metrics also have a label with their name."""

    def __init__(self, metrics: Callable[[], MetricsByStage]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        found = self._metrics()
        for metric, (kind, name, text) in _COMMON.items():
            family = kind(f"hexdata_live_{name}", text, labels=["stage"])
            for stage, metrics in found.items():
                family.add_metric([stage], metrics[metric])
            yield family
        # Other metrics of a stage may be counters or gauges.
        text, labels = "Other metrics of a stage, by name", ["stage", "figure"]
        others = UnknownMetricFamily("hexdata_live_figure", text, labels=labels)
        for stage, metrics in found.items():
            for metric in metrics.keys() - _COMMON.keys():
                others.add_metric([stage, metric], metrics[metric])
        yield others
