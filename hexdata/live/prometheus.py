"""HTTP endpoint that serves the metrics of a live pipeline to Prometheus, if requested.

Metrics are read at each request and are not stored. The module needs prometheus-client, which the extra
``live`` installs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from hexdata.checks import check_count
from hexdata.errors import ConfigError
from hexdata.extras import installed_by
from hexdata.live.pipeline import MetricsByStage

with installed_by("live", "the Prometheus endpoint"):
    from prometheus_client import CollectorRegistry, start_http_server
    from prometheus_client.core import Metric, UnknownMetricFamily
    from prometheus_client.registry import Collector


@contextmanager
def serve_metrics(metrics: Callable[[], MetricsByStage], port: int, host: str = "127.0.0.1") -> Iterator[int]:
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
    check_count("port", port, 0, 65_535)
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        reason = "the metrics cannot be served at this address"
        hint = "Choose another port (--prometheus) or address (--prometheus-host)."
        raise ConfigError(reason, path=f"{host}:{port}", found=error.strerror, hint=hint) from error
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Stages(Collector):
    """All metrics as one family, with labels for the stage and the name."""

    def __init__(self, metrics: Callable[[], MetricsByStage]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        # A metric may be a counter or a gauge: stages of users have their own.
        family = UnknownMetricFamily("hexdata_live_figure", "A metric of a stage", labels=["stage", "figure"])
        for stage, metrics in self._metrics().items():
            for figure, value in metrics.items():
                family.add_metric([stage, figure], value)
        yield family
