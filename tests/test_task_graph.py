"""The simulated task graph loses nothing, respects every limit, and agrees with figures computed by hand."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace
from math import ceil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexdata.shuffle.layout import BUCKET_ROWS, Grouping, ShuffleLayout

BENCHMARKS = Path(__file__).parent / "benchmarks"
RATES = {
    "digest": 1e-9,
    "read": 5e-6,
    "publish": 7e-7,
    "scatter": 8e-7,
    "sort": 1e-6,
    "export": 4e-7,
    "compare": 2e-6,
    "choose": 2e-7,
    "source_bytes": 130.0,
    "spool_bytes": 26.0,
    "position_bytes": 10.0,
    "run_bytes": 28.0,
    "bucket_bytes": 30.0,
    "shard_bytes": 73.0,
    "piece_write": 4e-4,
    "piece_read": 2e-4,
    "piece_bytes": 2_240.0,
    "open_run": 3e-4,
    "index": 2e-7,
    "recut": 8e-7,
    "dispatch": 1e-4,
    "ledger": 1e-6,
    "shard_ledger": 4e-5,
}
"""Rates as measured once."""
CLUSTER = {
    "machines": 4,
    "cores": 8,
    "memory": 32_000_000_000,
    "network": 3e9,
    "disk": 2e9,
    "store": 2e10,
    "gets": 2e5,
    "puts": 5e4,
    "latency": 1e-3,
}
FAST = CLUSTER | {"network": 1e18, "disk": 1e18, "store": 1e18, "gets": 1e18, "puts": 1e18, "latency": 0.0}
"""A cluster in which only cores take time."""


@pytest.fixture(scope="module", autouse=True)
def benchmarks() -> Iterator[None]:
    """Make the modules of the benchmarks importable; they import each other by their bare names."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield


@pytest.fixture(scope="module")
def graphs(benchmarks: None) -> ModuleType:
    return importlib.import_module("task_graph")


@pytest.fixture(scope="module")
def simulation(benchmarks: None) -> ModuleType:
    return importlib.import_module("simulation")


def run(simulation: Any, graphs: Any, tasks: list[Any], cluster: dict[str, Any], **phase: float) -> Any:
    """Simulate one phase."""
    (outcome,) = simulation.simulate([graphs.Phase("some", tasks, **phase)], graphs.Cluster(**cluster))
    return outcome


# What can be said by hand.


@pytest.mark.parametrize(("count", "waves"), [(1, 1), (31, 1), (32, 1), (33, 2), (320, 10)])
def test_equal_tasks_take_as_many_turns_as_there_are_cores_too_few(simulation, graphs, count, waves):
    outcome = run(simulation, graphs, [graphs.Task(10, 2.0)] * count, FAST)
    assert outcome.seconds == pytest.approx(2.0 * waves)
    assert outcome.work == pytest.approx(2.0 * count)
    assert outcome.bottleneck == "cores"


@pytest.mark.parametrize(
    ("limit", "task", "phase", "seconds"),
    [
        ({"store": 1e6}, {"read": 1e6}, {}, 100),
        ({"store": 1e6}, {"written": 5e5}, {}, 50),
        ({"network": 1e6}, {"read": 1e6}, {}, 25),
        ({"network": 1e6}, {"sent": 2e6}, {}, 50),
        ({"disk": 1e6}, {"loaded": 1e6}, {}, 25),
        ({"disk": 1e6}, {"kept": 1e6}, {}, 25),
        ({"gets": 10.0}, {"gets": 5}, {}, 50),
        ({"puts": 10.0}, {"puts": 20}, {}, 200),
        ({"latency": 0.5}, {"gets": 7, "puts": 0}, {}, 4 * 3.5),
        ({"latency": 0.5}, {"gets": 7, "puts": 0}, {"parallel": 4}, 4 * 1.0),
        ({"latency": 0.5}, {"gets": 0, "puts": 7}, {}, 4 * 2.0),
        ({}, {}, {"dispatch": 0.5}, 50),
        ({}, {}, {"before": 30.0}, 30),
    ],
)
def test_what_is_scarce_decides_the_time_and_is_named(simulation, graphs, limit, task, phase, seconds):
    """A hundred tasks on four machines with eight cores each."""
    work = {"positions": 1, "work": 1e-9}
    outcome = run(simulation, graphs, [graphs.Task(**work | task)] * 100, FAST | limit, **phase)
    assert outcome.seconds == pytest.approx(seconds, rel=0.1)
    names = dict.fromkeys(("dispatch", "before"), "driver") | {"parallel": "latency"}
    scarce = next(reversed((*phase, *limit))) if phase or limit else ""
    assert outcome.bottleneck == names.get(scarce, scarce)


def test_a_thousand_slices_and_ten_thousand_units(simulation, graphs):
    """With one file per piece there are ten million objects; with runs, a thousand, and as many reads."""
    rows = 10_000 * BUCKET_ROWS
    layout = ShuffleLayout(rows, ceil(rows / 1_000), True, {"train": Grouping(10_000, 1, 1)})
    cluster, rates = graphs.Cluster(**CLUSTER), graphs.Rates(**RATES)
    found = {}
    for exchange in graphs.EXCHANGES:
        design = graphs.Design(exchange)
        phases = list(graphs.shuffle(layout, rates, cluster, design))
        *cut, sort = phases
        made = sum(task.objects for phase in cut for task in phase.tasks)
        found[exchange] = made, sum(task.gets for phase in phases[1:] for task in phase.tasks)
        assert sum(task.objects for task in sort.tasks) == 10_000
    assert found["objects"] == (10_000_000, 10_000_000)
    assert found["runs"] == (1_000, 10_000_000)
    assert found["push"] == (0, 0)
    assert found["groups"] == (1_000, 1_000 * 96)
    assert found["machine-groups"] == (1_000, 1_000 * 74)
    assert found["two-level"] == (2_000, 1_000 * 100 + 10_000 * 10)


def test_every_attempt_but_the_last_may_fail(simulation, graphs):
    outcome = run(simulation, graphs, [graphs.Task(3, 1.0)] * 64, FAST | {"failed": 1.0})
    assert outcome.attempts == 5 * 64
    assert outcome.positions == 3 * 64
    assert outcome.work == pytest.approx(64 * (1 + 4 * 0.5), rel=0.1)


def test_stragglers_take_their_time(simulation, graphs):
    tasks = [graphs.Task(1, 1.0)] * 1_000
    plain = run(simulation, graphs, tasks, FAST)
    slow = run(simulation, graphs, tasks, FAST | {"slow": 0.1, "slowness": 4.0})
    assert slow.work == pytest.approx(1_000 * 1.3, rel=0.15)
    assert slow.seconds > plain.seconds


def test_the_tasks_of_a_stopped_machine_run_again(simulation, graphs):
    """32 cores work for 100 s; machines stop every 100 s on average and are replaced after 10 s."""
    tasks = [graphs.Task(1, 1.0)] * 3_200
    outcome = run(simulation, graphs, tasks, FAST | {"deaths": 36.0, "replacement": 10.0})
    assert outcome.positions == 3_200
    assert outcome.deaths > 0
    assert 8 * outcome.deaths >= outcome.attempts - 3_200 >= outcome.deaths
    assert outcome.seconds > 100


def test_what_a_stopped_machine_received_is_sent_again(simulation, graphs):
    tasks = [graphs.Task(1, 1.0)] * 3_200
    again = [graphs.Task(0, 0.5)] * 100
    cluster = FAST | {"deaths": 36.0, "replacement": 10.0}
    outcome = run(simulation, graphs, tasks, cluster, again=again)
    assert outcome.positions == 3_200
    assert outcome.attempts >= 3_200 + 100 * outcome.deaths > 3_200


def test_the_machine_that_receives_most_decides_the_time(simulation, graphs):
    tasks = [graphs.Task(1, 1e-9, sent=1e6, puts=0)] * 400
    even = run(simulation, graphs, tasks, FAST | {"network": 1e6})
    uneven = run(simulation, graphs, tasks, FAST | {"network": 1e6, "skew": 0.5})
    assert even.seconds == pytest.approx(100, rel=0.1)
    assert uneven.seconds > 1.2 * even.seconds


def test_refused_requests_are_sent_again_later(simulation, graphs):
    tasks = [graphs.Task(1, 1e-9, gets=1_000, puts=0)] * 100
    limits = FAST | {"gets": 1_000.0, "latency": 0.01}
    patient = run(simulation, graphs, tasks, limits, parallel=64)
    refused = run(simulation, graphs, tasks, limits | {"queue": 1.0}, parallel=64)
    assert patient.refused == 0 < refused.refused
    assert refused.gets == patient.gets == 100_000
    assert 1.5 * patient.seconds > refused.seconds >= patient.seconds >= 99


# What must hold for any graph.

CLUSTERS = st.builds(
    lambda **changes: CLUSTER | changes,
    machines=st.integers(1, 12),
    cores=st.integers(1, 8),
    store=st.floats(1e7, 1e11),
    gets=st.floats(100, 1e6),
    latency=st.floats(0, 0.1),
    slow=st.floats(0, 0.2),
    failed=st.floats(0, 0.2),
)


@settings(deadline=None, max_examples=40)
@given(
    changes=CLUSTERS,
    positions=st.integers(1, 30_000_000),
    exchange=st.sampled_from(["runs", "groups", "machine-groups", "objects", "two-level", "push"]),
    parallel=st.integers(1, 64),
    seed=st.integers(0, 9),
)
def test_nothing_is_lost_and_no_limit_is_broken(
    simulation, graphs, changes, positions, exchange, parallel, seed
):
    cluster, rates = graphs.Cluster(**changes), graphs.Rates(**RATES)
    phases = graphs.graph(positions, rates, cluster, graphs.Design(exchange, parallel))
    for phase, outcome in zip(phases, simulation.simulate(phases, cluster, seed), strict=True):
        assert outcome.positions == positions
        assert outcome.attempts >= outcome.tasks == len(phase.tasks)
        assert outcome.objects == sum(task.objects for task in phase.tasks)
        assert outcome.work >= 0.999 * sum(task.work for task in phase.tasks)
        least = [
            outcome.work / (cluster.machines * cluster.cores),
            max(task.work for task in phase.tasks),
            (outcome.read + outcome.written) / cluster.store,
            outcome.written / cluster.machines / cluster.network,
            outcome.gets / cluster.gets,
            outcome.puts / cluster.puts,
            phase.before + phase.dispatch * outcome.tasks,
        ]
        assert outcome.seconds >= 0.999 * max(least)
        assert all(0 <= share <= 1.001 for share in outcome.used.values()), outcome.used
        one_by_one = outcome.work + outcome.tasks * (phase.dispatch)
        one_by_one += (outcome.gets + outcome.puts) * (cluster.latency + 1 / cluster.gets + 1 / cluster.puts)
        moved = outcome.read + outcome.written + outcome.sent + sum(t.loaded + t.kept for t in phase.tasks)
        one_by_one += moved * (1 / cluster.store + 2 / cluster.network + 1 / cluster.disk)
        assert outcome.seconds <= 1.001 * (phase.before + one_by_one) + phase.dispatch * outcome.attempts


def test_the_same_seed_is_the_same_run(simulation, graphs):
    cluster = graphs.Cluster(**CLUSTER | {"slow": 0.1, "failed": 0.1})
    phases = graphs.graph(20_000_000, graphs.Rates(**RATES), cluster)
    first, again, other = (simulation.simulate(phases, cluster, seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other


@pytest.mark.parametrize("name", ["store", "network", "gets", "machines"])
def test_more_of_anything_is_not_slower(simulation, graphs, name):
    """The last round is excluded, because its tasks may be distributed differently over the machines."""
    rates, slow = graphs.Rates(**RATES), graphs.Cluster(**CLUSTER)
    phases = graphs.graph(100_000_000, rates, slow)
    fast = replace(slow, **{name: getattr(slow, name) * 4})
    for less, more in zip(simulation.simulate(phases, slow), simulation.simulate(phases, fast), strict=True):
        assert more.seconds <= 1.1 * less.seconds


def test_more_positions_take_longer(simulation, graphs):
    cluster, rates = graphs.Cluster(**CLUSTER), graphs.Rates(**RATES)
    seconds = [
        sum(outcome.seconds for outcome in simulation.simulate(graphs.graph(n, rates, cluster), cluster))
        for n in (1_000_000, 10_000_000, 100_000_000, 1_000_000_000)
    ]
    assert seconds == sorted(seconds)
    assert seconds[-1] > 5 * seconds[-2]


def test_the_graph_has_a_task_for_all_that_is_planned(graphs):
    cluster, rates = graphs.Cluster(**CLUSTER), graphs.Rates(**RATES)
    positions = 97_000_000
    layout = graphs.plan_shuffle(positions, cluster)
    counts = {phase.name: len(phase.tasks) for phase in graphs.graph(positions, rates, cluster)}
    buckets = sum(len(job.buckets) for job in layout.jobs)
    assert counts == {
        "digest": 97,
        "read": 97,
        "runs of games": 2,
        "ranges of hashes": 2,
        "duplicates": 2,
        "publish": 97,
        "scatter": len(layout.slices),
        "sort": len(layout.jobs),
        "export": ceil(91_180_000 / 262_144) + ceil(4_850_000 / 262_144) + ceil(970_000 / 262_144),
    }
    sort = next(phase for phase in graphs.graph(positions, rates, cluster) if phase.name == "sort")
    assert sum(task.objects for task in sort.tasks) == buckets == 93
