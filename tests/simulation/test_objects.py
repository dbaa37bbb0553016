"""A sample of `tests/simulation/objects.py`, and the seeds that found faults."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from hexdata.storage.objects import ObjectStorage
from tests.pairs import FULL
from tests.simulation import objects

SUSPENDED = 2
"""A seed whose second writer begins while the first one is suspended."""
WITH_RETRIES = 359
"""A seed with requests that are made again."""


@pytest.fixture
def suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Suspend the first writer before it lists the objects to remove, until its lease has expired."""
    request = objects.Simulation.request
    seen: set[objects.Simulation] = set()

    def suspending(simulation: objects.Simulation, method: str, key: str, action: Any) -> Any:
        machine = objects._local.machine
        lists = method == "list_objects_v2" and machine.name == "A" and machine.lease is not None
        if lists and simulation not in seen:
            seen.add(simulation)
            simulation.give_turn(400.0)
        return request(simulation, method, key, action)

    monkeypatch.setattr(objects.Simulation, "request", suspending)


def test_two_writers_give_one_whole_dataset() -> None:
    seeds = 150 if FULL else 50
    results = objects.run_seeds(0, seeds)
    assert results["succeeded"] > seeds / 2
    assert results["told of the other writer"] > seeds / 10


def test_a_run_is_repeatable(tmp_path: Path) -> None:
    logs = []
    for name in "ab":
        simulation = objects.Simulation(5, tmp_path / name)
        objects.random.seed(5)
        objects._run_seed(simulation)
        logs.append(simulation.log)
    assert logs[0] == logs[1]


@pytest.mark.usefixtures("suspended")
def test_a_writer_that_was_suspended_while_it_listed_removes_nothing(tmp_path: Path) -> None:
    """The lock is checked before each removal, also after the listing."""
    objects.run_seed(SUSPENDED, tmp_path)


@pytest.mark.usefixtures("suspended")
def test_the_simulation_finds_removals_without_a_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    remove_tree = ObjectStorage.remove_tree
    monkeypatch.setattr(ObjectStorage, "remove_tree", lambda storage, _=None, **_kept: remove_tree(storage))
    with pytest.raises(objects.SimulationError, match="which the manifest lists, is missing"):
        objects.run_seeds(SUSPENDED, 1)


def test_a_seed_names_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeated, it makes the same requests at the same times; the waits after failed requests are random."""
    logs: list[list[str]] = []
    run = objects._run_seed

    def record(simulation: objects.Simulation) -> Counter[str]:
        logs.append(simulation.log)
        return run(simulation)

    monkeypatch.setattr(objects, "_run_seed", record)
    for number in range(2):
        objects.run_seed(WITH_RETRIES, tmp_path / str(number))
    assert logs[0] == logs[1]
    assert any(line.endswith("lost answer") for line in logs[0])
