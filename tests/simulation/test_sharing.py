"""Tasks that two processes share."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.simulation.sharing import Group, share_tasks


class Numbers(Group):
    """Tasks that return their number, and fail as described by texts."""

    def __init__(self, folder: Path, number: int, *faults: str) -> None:
        super().__init__()
        self.folder, self.number, self.faults = folder, number, faults

    def prepare(self) -> tuple[dict[str, Any], int]:
        if "prepare" in self.faults:
            raise ValueError("prepare fails")
        self.folder.mkdir()
        return {"a fact": 1}, self.number

    def begin(self, job: int) -> Callable[[int], dict[str, Any]]:
        if "begin" in self.faults:
            raise ValueError("begin fails")
        return lambda task: self._do(job, task)

    def _do(self, job: int, task: int) -> dict[str, Any]:
        if "task 1" in self.faults and task == 1:
            raise ValueError("the task fails")
        if "death" in self.faults and task == 2:
            os._exit(3)
        if "slow" in self.faults:
            time.sleep(0.2)
        return {"job": job, "value": 10 * task}

    def end(self) -> None:
        if self.folder.exists():
            self.folder.rmdir()


def run(*groups: Group, deadline: float = float("inf")) -> list[list[tuple[int | None, Any]]]:
    """Return the number of each task with its value, or with what is broken, by group."""
    found: dict[Group, list[tuple[int | None, Any]]] = {group: [] for group in groups}
    for group, task, answer in share_tasks(groups, 2, deadline):
        found[group].append((task, answer["broken"].splitlines()[-1] if "broken" in answer else answer))
    return [sorted(answers, key=str) for answers in found.values()]


def test_each_task_is_done_once_by_any_process(tmp_path: Path) -> None:
    """The last group is shared by both processes."""
    first, second = run(Numbers(tmp_path / "a", 3), Numbers(tmp_path / "b", 8, "slow"))
    for answers, number in ((first, 3), (second, 8)):
        assert answers.pop() == (None, {})
        assert [(task, answer["value"]) for task, answer in answers] == [(k, 10 * k) for k in range(number)]
        assert all(answer["cpu"] >= 0 and answer["seconds"] >= 0 for _, answer in answers)
    assert {answer["job"] for _, answer in second} == {0, 1}
    assert not any(tmp_path.iterdir())


def test_tasks_that_are_not_due_are_left_out(tmp_path: Path) -> None:
    group = Numbers(tmp_path / "a", 6)
    group.is_due = lambda number: number % 2 == 1
    assert [task for task, _ in run(group)[0]] == [1, 3, 5, None]


@pytest.mark.parametrize("fault", ["prepare", "begin", "task 1", "death"])
def test_a_fault_does_not_end_the_others(tmp_path: Path, fault: str) -> None:
    broken, whole = run(Numbers(tmp_path / "a", 4, fault), Numbers(tmp_path / "b", 4))
    assert len(whole) == 5
    text = {
        "prepare": "ValueError: prepare fails",
        "begin": "ValueError: begin fails",
        "task 1": "ValueError: the task fails",
        "death": "the process died: exit code 3",
    }[fault]
    assert text in [answer for _, answer in broken if isinstance(answer, str)]
    done = [task for task, answer in broken if isinstance(answer, dict) and answer]
    assert done == {"task 1": [0, 2, 3], "death": [0, 1, 3]}.get(fault, [])
    assert not any(tmp_path.iterdir())


def test_no_task_is_begun_after_the_deadline(tmp_path: Path) -> None:
    group = Numbers(tmp_path / "a", 1000, "slow")
    [done] = run(group, deadline=time.time() + 1)
    assert 0 < len(done) - 1 < 20
    assert len(group.left) + len(done) - 1 == 1000
    assert not any(tmp_path.iterdir())
