"""Shares groups of tasks between processes, so that all of them work until the last task.

A process takes the tasks of one group after another. When no group is left, it joins the group with most
tasks. An exception, or the death of a process, ends one task only; one in the preparation ends the group.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any, Final

_FORK: Final = get_context("fork")
Answer = dict[str, Any]


class Group:
    """Numbered tasks with a common preparation.

    Attributes:
        facts: The facts that ``prepare`` has returned; None before.
        left: Numbers of the tasks that no process has taken.
        is_due: Whether the task with a number is to be done. Default: each.
    """

    def __init__(self) -> None:
        self.facts: Answer | None = None
        self.left: list[int] = []
        self.is_due: Callable[[int], bool] = lambda _: True

    def prepare(self) -> tuple[Answer, int]:
        """Return facts about the group, and the number of its tasks. Called in a process of its own."""
        raise NotImplementedError

    def begin(self, job: int) -> Callable[[int], Answer]:
        """Return a function that does a task. Called in each process that takes tasks, with its number."""
        raise NotImplementedError

    def end(self) -> None:
        """Remove the files of the group."""


class _Job:
    """A process on one core that prepares a group or takes its tasks, and is replaced for the next group."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.group: Group | None = None
        self.connection: Connection | None = None
        self.busy = False
        self.task: int | None = None
        self.ready = False
        self._process: Any = None

    def start(self, group: Group, function: Callable[..., None], jobs: Sequence[_Job]) -> None:
        """Start a process with a function."""
        self.end()
        mine, other = _FORK.Pipe()
        inherited = [mine, *(job.connection for job in jobs if job.connection)]
        self._process = _FORK.Process(target=_run, args=(function, group, self.number, other, inherited))
        self._process.start()
        other.close()
        self.group, self.connection, self.ready = group, mine, False

    def send(self, task: int) -> None:
        assert self.connection is not None
        with suppress(BrokenPipeError):  # ``receive`` returns why the process has ended
            self.connection.send(task)
        self.busy, self.task = True, task

    def receive(self) -> Answer:
        """Return an answer of the process; one with "broken" if the process has ended."""
        assert self.connection is not None
        try:
            answer: Answer = self.connection.recv()
        except (EOFError, OSError):
            self._process.join()
            answer = {"broken": f"the process died: exit code {self._process.exitcode}"}
        return answer

    def end(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self._process.join()
        self.connection = self.group = self.task = None
        self.busy = False


def _run(
    function: Callable[..., None], group: Group, job: int, connection: Connection, inherited: list[Connection]
) -> None:
    for one in inherited:
        one.close()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[job % len(cores)]})
    try:
        function(group, job, connection)
    except BaseException:  # noqa: BLE001 - the parent reports it
        connection.send({"broken": traceback.format_exc()})
    finally:
        connection.close()


def _prepare(group: Group, _: int, connection: Connection) -> None:
    facts, tasks = group.prepare()
    connection.send((facts, [number for number in range(tasks) if group.is_due(number)]))


def _work(group: Group, job: int, connection: Connection) -> None:
    do = group.begin(job)
    connection.send({"ready": True})
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        begin, before = time.perf_counter(), cpu_seconds()
        answer = do(task)
        answer["seconds"] = round(time.perf_counter() - begin, 3)
        answer["cpu"] = round(cpu_seconds() - before, 3)
        connection.send(answer)


def cpu_seconds() -> float:
    """Return the CPU time of this process and of its children that have ended."""
    import resource

    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def share_tasks(
    groups: Sequence[Group], jobs: int, deadline: float
) -> Iterator[tuple[Group, int | None, Answer]]:
    """Do the tasks of all groups in several processes.

    Args:
        groups: The groups, in the order in which they are begun.
        jobs: Number of processes.
        deadline: Time after which no task is begun, in seconds since 1970.

    Yields:
        Group, number of a task, and what it returned with its "seconds" and "cpu"; or the text "broken",
        with None for the task if the preparation failed. At the end of a group, None and an empty answer.
    """
    new = list(groups)
    prepared: list[Group] = []
    processes = [_Job(number) for number in range(jobs)]

    def assign(job: _Job) -> None:
        left = [group for group in prepared if group.left]
        if time.time() >= deadline or not (new or left):
            job.end()
        elif job.group in left:
            assert job.group is not None
            job.send(job.group.left.pop(0))
        elif new:
            job.start(new.pop(0), _prepare, processes)
            job.busy = True
        else:
            join(job, max(left, key=lambda group: len(group.left)))

    def join(job: _Job, group: Group) -> None:
        job.start(group, _work, processes)
        job.send(group.left.pop(0))

    def is_ended(group: Group) -> bool:
        return (not group.left or time.time() >= deadline) and all(
            job.group is not group for job in processes
        )

    try:
        while True:
            for job in processes:
                if not job.busy:
                    assign(job)
            for group in [group for group in prepared if is_ended(group)]:
                prepared.remove(group)
                group.end()
                yield group, None, {}
            busy = [job for job in processes if job.busy]
            if not busy:
                break
            found = wait([job.connection for job in busy if job.connection])
            for job in [job for job in busy if job.connection in found]:
                group, task = job.group, job.task
                assert group is not None
                answer = job.receive()
                if isinstance(answer, tuple):
                    group.facts, group.left = answer
                    prepared.append(group)
                    job.end()
                    if group.left and time.time() < deadline:
                        join(job, group)
                elif "ready" in answer:
                    job.ready = True
                elif "broken" in answer:
                    if not job.ready:
                        group.left.clear()
                    if group.facts is None:
                        group.end()
                    job.end()
                    yield group, task, answer
                else:
                    job.busy, job.task = False, None
                    yield group, task, answer
    finally:
        for job in processes:
            job.end()
