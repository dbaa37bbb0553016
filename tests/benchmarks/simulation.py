"""Simulates a task graph on a cluster, event by event. Runs no task and reads no clock.

Links, disks, the store and the driver serve one request after the other, in the order of arrival; for their
throughput this equals serving all at the same time. Random draws come from a seed.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Final

import numpy as np
from task_graph import SAVES, Cluster, Phase

from hexdata.order import derive_key, uniform_draw

ATTEMPTS: Final = 5
"""Attempts of a task, as in the Ray engine; the last one does not fail here."""
UPLOADS: Final = 2
"""Requests that a writing task has in flight at a time."""
RESOURCES: Final = ("cores", "latency", "driver", "network", "disk", "store", "gets", "puts")


@dataclass
class Outcome:
    """The cost of a phase: seconds, bytes, requests, objects, and the utilization of each resource."""

    name: str
    seconds: float = 0.0
    tasks: int = 0
    attempts: int = 0
    positions: int = 0
    work: float = 0.0
    read: float = 0.0
    written: float = 0.0
    sent: float = 0.0
    gets: int = 0
    puts: int = 0
    objects: int = 0
    memory: float = 0.0
    used: dict[str, float] = field(default_factory=dict)

    @property
    def bottleneck(self) -> str:
        """The resource with the highest utilization."""
        return max(RESOURCES, key=lambda name: self.used.get(name, 0.0))


class _Pipe:
    """A resource that serves one request after the other: a link, a disk, the store's answers, the driver."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.free = 0.0
        self.busy = 0.0

    def take(self, now: float, amount: float) -> float:
        """Serve ``amount`` after all earlier requests; return the time when it is done."""
        seconds = amount / self.rate
        self.free = max(self.free, now) + seconds
        self.busy += seconds
        return self.free


@dataclass
class _Machine:
    network_in: _Pipe
    network_out: _Pipe
    disk: _Pipe


class _Run:
    """A simulation of one phase on a cluster. A task reads, works and writes, in this order."""

    def __init__(self, phase: Phase, cluster: Cluster, seed: int) -> None:
        self.phase = phase
        self.cluster = cluster
        self.outcome = Outcome(phase.name, tasks=len(phase.tasks), memory=phase.memory)
        self.machines = [
            _Machine(_Pipe(cluster.network), _Pipe(cluster.network), _Pipe(cluster.disk))
            for _ in range(cluster.machines)
        ]
        self.driver = _Pipe(1.0)
        self.store, self.gets, self.puts = _Pipe(cluster.store), _Pipe(cluster.gets), _Pipe(cluster.puts)
        self.waited = 0.0
        self.unsaved = 0
        count = len(phase.tasks)
        self.slow = uniform_draw(np.arange(count), derive_key(seed, phase.name, "slow")) < cluster.slow
        draws = uniform_draw(np.arange(count * ATTEMPTS), derive_key(seed, phase.name, "failed"))
        self.draws = draws.reshape(ATTEMPTS, count)

    def run(self) -> Outcome:
        """Assign tasks to free cores until all are done."""
        free = [machine for _ in range(self.cluster.cores) for machine in range(self.cluster.machines)][::-1]
        todo = [(index, 0) for index in reversed(range(len(self.phase.tasks)))]
        now = self.driver.take(0.0, self.phase.before)
        events: list[tuple[float, int, str, int, int, int]] = []
        count = done = 0
        while todo or events:
            while todo and free:
                index, attempt = todo.pop()
                begin = self.driver.take(now, self.phase.dispatch) + self.cluster.start
                count += 1
                heapq.heappush(events, (begin, count, "read", free.pop(), index, attempt))
            now, _, step, machine, index, attempt = heapq.heappop(events)
            if step == "read":
                then = "lost" if self._fails(index, attempt) else "write"
                events_at = self._read(now, machine, index, attempt)
            elif step == "write":
                then, events_at = "done", self._write(now, machine, index)
            else:
                free.append(machine)
                if step == "lost":
                    todo.append((index, attempt + 1))
                else:
                    done += 1
                    self._save(now, done)
                    self._book(index)
                continue
            count += 1
            heapq.heappush(events, (events_at, count, then, machine, index, attempt))
        self.outcome.seconds = max(now, self.driver.free)
        self.outcome.used = self._used()
        return self.outcome

    def _fails(self, index: int, attempt: int) -> bool:
        return attempt + 1 < ATTEMPTS and bool(self.draws[attempt, index] < self.cluster.failed)

    def _save(self, now: float, done: int) -> None:
        """Save the ledger if it has grown enough since it was last saved."""
        entries = self.phase.saved + done
        self.unsaved += 1
        if self.unsaved > entries // SAVES:
            self.driver.take(now, self.phase.ledger * entries)
            self.unsaved = 0

    def _wait(self, now: float, requests: int, parallel: int, ends: Sequence[float]) -> float:
        """Return the time when requests are answered, a few at a time; each waits its latency and turn."""
        waiting = ceil(requests / parallel) * self.cluster.latency
        self.waited += waiting
        return max(now + waiting, *ends)

    def _read(self, now: float, machine: int, index: int, attempt: int) -> float:
        """Simulate reading and working. A failing attempt does only a part of it."""
        task, own, cluster = self.phase.tasks[index], self.machines[machine], self.cluster
        self.outcome.attempts += 1
        self.outcome.read += task.read
        self.outcome.gets += task.gets
        ends = [
            own.network_in.take(now, task.read),
            own.disk.take(now, task.loaded),
            self.store.take(now, task.read),
            self.gets.take(now, task.gets),
        ]
        work = task.work * (cluster.slowness if self.slow[index] else 1.0)
        if self._fails(index, attempt):
            work *= float(self.draws[attempt, index]) / cluster.failed
        self.outcome.work += work
        return self._wait(now, task.gets, self.phase.parallel, ends) + work

    def _write(self, now: float, machine: int, index: int) -> float:
        """Simulate writing. A machine is assumed to receive as much from others as it sends."""
        task, own = self.phase.tasks[index], self.machines[machine]
        self.outcome.written += task.written
        self.outcome.sent += task.sent
        self.outcome.puts += task.puts
        ends = [
            own.network_out.take(now, task.written + task.sent),
            own.network_in.take(now, task.sent),
            own.disk.take(now, task.kept),
            self.store.take(now, task.written),
            self.puts.take(now, task.puts),
        ]
        return self._wait(now, task.puts, max(self.phase.parallel, UPLOADS), ends)

    def _book(self, index: int) -> None:
        task = self.phase.tasks[index]
        self.outcome.positions += task.positions
        self.outcome.objects += task.objects

    def _used(self) -> dict[str, float]:
        """Return the utilization of each kind of resource, as a mean."""
        seconds = self.outcome.seconds or 1.0
        cores = self.cluster.machines * self.cluster.cores
        links = [pipe.busy for own in self.machines for pipe in (own.network_in, own.network_out)]
        return {
            "cores": self.outcome.work / cores / seconds,
            "latency": self.waited / cores / seconds,
            "driver": self.driver.busy / seconds,
            "network": max(links) / seconds,
            "disk": max(own.disk.busy for own in self.machines) / seconds,
            "store": self.store.busy / seconds,
            "gets": self.gets.busy / seconds,
            "puts": self.puts.busy / seconds,
        }


def simulate(phases: Sequence[Phase], cluster: Cluster, seed: int = 0) -> list[Outcome]:
    """Simulate phases one after the other; each begins when the one before it is done."""
    return [_Run(phase, cluster, seed).run() for phase in phases]
