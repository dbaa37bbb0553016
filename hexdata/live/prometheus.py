"""HTTP endpoint that serves the metrics of a live pipeline to Prometheus, if requested.

Metrics are read at each request and are not stored. The module needs prometheus-client, which the extra
``live`` installs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from hexdata.errors import ConfigError
from hexdata.live.metrics import Metrics

try:
    from prometheus_client import CollectorRegistry, start_http_server
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, UnknownMetricFamily
    from prometheus_client.registry import Collector
except ModuleNotFoundError as missing:
    raise ConfigError(
        "the Prometheus endpoint needs prometheus-client", hint="Install it: pip install 'hexdata[live]'."
    ) from missing

__all__ = ["LOOPBACK", "serve_metrics"]

LOOPBACK: Final = "127.0.0.1"

_COUNTERS: Final = {
    "out": ("items", "Items that entered the queue behind the stage"),
    "dropped": ("dropped", "Items lost for want of room in the queue behind the stage"),
    "busy_seconds": ("busy_seconds", "Seconds that the stage's threads were at work, all together"),
}
_GAUGES: Final = {
    "queued": ("queued", "Items in the queue behind the stage"),
    "capacity": ("capacity", "Items for which that queue has room"),
    "threads": ("threads", "Threads of the stage"),
    "busy": ("busy_threads", "Those that are at work"),
}
"""Metrics of every stage: the name after ``hexdata_live_``, and the help text."""


@contextmanager
def serve_metrics(metrics: Callable[[], Metrics], port: int, host: str = LOOPBACK) -> Iterator[int]:
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
            "cannot listen there",
            found=f"{host}:{port}: {error}",
            hint="Give another --prometheus port, or --prometheus-host.",
        ) from error
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _StagesCollector(Collector):
    """Converts metrics into Prometheus families with a label for the stage; figures of one stage alone also
    have a label with their name.
    """

    def __init__(self, metrics: Callable[[], Metrics]) -> None:
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
        # A stage's own figures may be counters or gauges.
        figures = UnknownMetricFamily(
            "hexdata_live_figure", "What a stage counts or measures besides", labels=["stage", "figure"]
        )
        for stage, found in metrics.items():
            for figure in found.keys() - _COUNTERS.keys() - _GAUGES.keys():
                figures.add_metric([stage, figure], found[figure])
        yield figures
