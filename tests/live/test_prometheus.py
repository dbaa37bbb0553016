"""Tests of the Prometheus endpoint: content of a scrape, address, and shutdown."""

from __future__ import annotations

import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from typing import Any
from urllib.error import URLError

import pytest

pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
from prometheus_client.parser import text_string_to_metric_families

from hexdata.errors import ConfigError
from hexdata.live.pipeline import Pipeline
from hexdata.live.prometheus import serve_metrics
from hexdata.live.stage import Stage, Transform, Worker
from tests.live.number_stages import until

TIMEOUT = 60.0


class Numbers(Stage):
    """Emits the numbers below 10 and reports the last one."""

    first = True

    def work(self, worker: Worker) -> None:
        for number in range(10):
            self.put(worker, [number])

    def metrics(self) -> dict[str, float]:
        return {**super().metrics(), "last": 9.5}


class Small(Transform):
    """Passes on numbers below 6 and counts the others."""

    def process(self, item: Any) -> list[int]:
        if item < 6:
            return [item]
        self.count("large")
        return []


@pytest.fixture
def pipeline() -> Iterator[Pipeline]:
    """An idle pipeline in which 6 numbers passed, 2 of which are in the queue."""
    with Pipeline([Numbers(), Small()], [(4, "block"), (2, "keep-newest")]) as made:
        made.start()
        assert [stage.join() for stage in made.stages] == [[], []]
        yield made


def scrape(port: int, host: str = "127.0.0.1") -> dict[tuple[str, ...], float]:
    """Return the samples of one scrape by name and labels, in order of their names."""
    with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=TIMEOUT) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return {
        (sample.name, *(sample.labels[label] for label in sorted(sample.labels))): sample.value
        for family in families
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_a_scrape_returns_the_metrics_of_every_stage(pipeline: Pipeline) -> None:
    with serve_metrics(pipeline.metrics, 0) as port:
        found = scrape(port)
        busy = [found.pop(("hexdata_live_busy_seconds_total", name)) for name in ("Numbers", "Small")]
        assert min(busy) >= 0
        assert found == {
            ("hexdata_live_items_total", "Numbers"): 10,
            ("hexdata_live_items_total", "Small"): 6,
            ("hexdata_live_dropped_total", "Numbers"): 0,
            ("hexdata_live_dropped_total", "Small"): 4,
            ("hexdata_live_queued", "Numbers"): 0,
            ("hexdata_live_queued", "Small"): 2,
            ("hexdata_live_capacity", "Numbers"): 4,
            ("hexdata_live_capacity", "Small"): 2,
            ("hexdata_live_threads", "Numbers"): 1,
            ("hexdata_live_threads", "Small"): 1,
            ("hexdata_live_busy_threads", "Numbers"): 0,
            ("hexdata_live_busy_threads", "Small"): 0,
            ("hexdata_live_figure", "large", "Small"): 4,
            ("hexdata_live_figure", "last", "Numbers"): 9.5,
        }
        pipeline.take()
        assert scrape(port)["hexdata_live_queued", "Small"] == 1


def test_the_endpoint_ends_with_its_block(pipeline: Pipeline) -> None:
    before = set(threading.enumerate())
    with serve_metrics(pipeline.metrics, 0) as port:
        assert scrape(port)
    with pytest.raises(URLError):
        scrape(port)
    until(lambda: set(threading.enumerate()) <= before)  # the thread of a response ends when it is sent


def test_metrics_of_a_closed_pipeline_are_served(pipeline: Pipeline) -> None:
    with serve_metrics(pipeline.metrics, 0) as port:
        pipeline.close()
        assert scrape(port)["hexdata_live_items_total", "Numbers"] == 10


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", None), ("127.0.0.1", 70_000), ("192.0.2.1", 0)])
def test_an_unusable_address_is_named_in_the_error(pipeline: Pipeline, host: str, port: int | None) -> None:
    with serve_metrics(pipeline.metrics, 0) as taken:
        requested_port = taken if port is None else port
        message = f"the metrics cannot be served at this address; found {host}:{requested_port}: "
        with pytest.raises(ConfigError, match=message), serve_metrics(pipeline.metrics, requested_port, host):
            pass


def test_a_missing_library_is_named_in_the_error() -> None:
    code = """
import sys
from hexdata.errors import ConfigError
sys.modules["prometheus_client"] = None
try:
    import hexdata.live.prometheus
except ConfigError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "prometheus_client" in done.stdout
    assert "pip install 'hexdata[live]'" in done.stdout
