"""Simulates a task graph on a cluster, event by event. Runs no task and reads no clock.

Links, disks, the store and the driver serve one request after the other, in the order of arrival; for their
throughput this equals serving all at the same time. Machines stop and are replaced, receive uneven shares of
what others send, and a busy store refuses requests (503). Random draws come from a seed.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from math import ceil, inf
from typing import Final

import numpy as np
from task_graph import Cluster, Phase, Task

from hexdata.order import derive_key, uniform_draw

ATTEMPTS: Final = 5
"""Attempts of a task, as in the Ray engine; the last one does not fail here."""
UPLOADS: Final = 2
"""Requests that a writing task has in flight at a time."""
BURSTS: Final = 32
"""Maximum bursts of requests per task, if the store refuses requests."""
REFUSAL: Final = 0.1
"""Capacity of the store that a refused request takes, as a share of an answered one. Assumed."""
BACKOFF: Final = 0.5
"""Seconds before the second attempt of a refused burst. They double with each attempt."""
MAX_BACKOFF: Final = 20.0
"""Maximum of these seconds."""
RESOURCES: Final = ("cores", "latency", "driver", "network", "disk", "store", "gets", "puts")


@dataclass
class Outcome:
    """The cost of a phase: seconds, bytes, requests, objects, and the utilization of each resource.

    ``deaths`` counts the machines that stopped, and ``refused`` the requests that the store refused.
    """

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
    index: float = 0.0
    deaths: int = 0
    refused: int = 0
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


@dataclass(frozen=True)
class _Attempt:
    """One attempt to run a task on a machine.

    Attributes:
        task: The task.
        index: Its index in the phase; -1 for a task that repeats lost work.
        number: Number of its earlier attempts that failed.
        machine: Index of the machine.
        unsent: Requests of the present step that have not been answered; None before the step begins.
        refusals: Number of times in a row that the store has refused them.
        until: Time when the transfers of the step are done.
    """

    task: Task
    index: int
    number: int
    machine: int
    unsent: int | None = None
    refusals: int = 0
    until: float = 0.0


class _Run:
    """A simulation of one phase on a cluster. A task reads, works and writes, in this order."""

    def __init__(self, phase: Phase, cluster: Cluster, seed: int) -> None:
        self.phase = phase
        self.cluster = cluster
        self.outcome = Outcome(phase.name, tasks=len(phase.tasks), index=phase.index)
        self.machines = [
            _Machine(_Pipe(cluster.network), _Pipe(cluster.network), _Pipe(cluster.disk))
            for _ in range(cluster.machines)
        ]
        self.driver = _Pipe(1.0)
        self.store, self.gets, self.puts = _Pipe(cluster.store), _Pipe(cluster.gets), _Pipe(cluster.puts)
        self.waited = 0.0
        tasks = len(phase.tasks)
        self.slow = uniform_draw(np.arange(tasks), derive_key(seed, phase.name, "slow")) < cluster.slow
        draws = uniform_draw(np.arange(tasks * ATTEMPTS), derive_key(seed, phase.name, "failed"))
        self.draws = draws.reshape(ATTEMPTS, tasks)
        self.random = np.random.default_rng([seed, *phase.name.encode()])
        weights = self.random.lognormal(0.0, cluster.skew, cluster.machines)
        self.shares: list[float] = (weights / weights.sum()).tolist()
        """Share of all sent bytes that each machine receives."""
        self.death = [self._next_death(0.0) for _ in self.machines]
        """Time at which each machine stops next."""
        self.events: list[tuple[float, int, str, _Attempt]] = []
        self.numbers = count()

    def run(self) -> Outcome:
        """Assign tasks to free cores until all are done."""
        slots = self.phase.slots or self.cluster.cores
        free = [machine for _ in range(slots) for machine in range(self.cluster.machines)][::-1]
        todo = [(task, index, 0) for index, task in enumerate(self.phase.tasks)][::-1]
        now = end = self.driver.take(0.0, self.phase.before)
        done = 0
        while todo or self.events:
            while todo and free:
                task, index, number = todo.pop()
                begin = self.driver.take(now, self.phase.dispatch) + self.cluster.start
                self._add(now, begin, "read", _Attempt(task, index, number, free.pop()))
            now, _, step, attempt = heapq.heappop(self.events)
            if step in ("read", "write"):
                self._request(now, step, attempt)
            elif step == "died":
                if self.death[attempt.machine] <= now:
                    self.outcome.deaths += 1
                    self.death[attempt.machine] = self._next_death(now + self.cluster.replacement)
                    again = self.phase.again[:done] if self.phase.receiving else self.phase.again
                    todo += [(task, -1, 0) for task in again]
                todo.append((attempt.task, attempt.index, attempt.number))
                back = (now + self.cluster.replacement, next(self.numbers), "back", attempt)
                heapq.heappush(self.events, back)
            else:
                free.append(attempt.machine)
                if step == "lost":
                    todo.append((attempt.task, attempt.index, attempt.number + 1))
                elif step == "done":
                    end = now
                    if attempt.index >= 0:
                        done += 1
                        self._book(attempt.task)
        self.outcome.seconds = max(end, self.driver.free)
        self.outcome.used = self._used()
        return self.outcome

    def _next_death(self, now: float) -> float:
        if not self.cluster.deaths:
            return inf
        return now + float(self.random.exponential(3_600 / self.cluster.deaths))

    def _add(self, now: float, at: float, step: str, attempt: _Attempt) -> None:
        """Add the next step of an attempt, or its end if its machine stops before."""
        death = self.death[attempt.machine]
        if death <= at:
            attempt = replace(attempt, unsent=None, refusals=0)
            at, step = max(death, now), "died"
        heapq.heappush(self.events, (at, next(self.numbers), step, attempt))

    def _fails(self, attempt: _Attempt) -> bool:
        if attempt.index < 0 or attempt.number + 1 >= ATTEMPTS:
            return False
        return bool(self.draws[attempt.number, attempt.index] < self.cluster.failed)

    def _request(self, now: float, step: str, attempt: _Attempt) -> None:
        """Send a burst of requests of a step, or all of them if the store refuses none."""
        reads, task = step == "read", attempt.task
        requests, pipe = (task.gets, self.gets) if reads else (task.puts, self.puts)
        parallel = self.phase.parallel if reads else max(self.phase.parallel, UPLOADS)
        if attempt.unsent is None:
            until = self._transfer_in(now, attempt) if reads else self._transfer_out(now, attempt)
            attempt = replace(attempt, unsent=requests, until=until)
        burst = left = attempt.unsent or 0
        if self.cluster.queue < inf:
            burst = min(left, max(ceil(requests / BURSTS), parallel))
        if burst and pipe.free - now > self.cluster.queue:
            refused = min(burst, parallel)
            self.outcome.refused += refused
            pipe.take(now, REFUSAL * refused)
            pause = min(BACKOFF * 2**attempt.refusals, MAX_BACKOFF) * float(self.random.uniform(0.5, 1.5))
            self._add(now, now + pause, step, replace(attempt, refusals=attempt.refusals + 1))
            return
        waiting = ceil(burst / parallel) * self.cluster.latency
        self.waited += waiting
        at = max(now + waiting, pipe.take(now, burst))
        attempt = replace(attempt, unsent=left - burst, refusals=0)
        if attempt.unsent:
            self._add(now, at, step, attempt)
            return
        at, then = max(at, attempt.until), "done"
        if reads:
            at, then = at + self._work(attempt), "lost" if self._fails(attempt) else "write"
        self._add(now, at, then, replace(attempt, unsent=None))

    def _transfer_in(self, now: float, attempt: _Attempt) -> float:
        """Transfer what a task reads; return the time when it has arrived."""
        task, own = attempt.task, self.machines[attempt.machine]
        self.outcome.attempts += 1
        self.outcome.read += task.read
        self.outcome.gets += task.gets
        return max(
            own.network_in.take(now, task.read),
            own.disk.take(now, task.loaded),
            self.store.take(now, task.read),
        )

    def _work(self, attempt: _Attempt) -> float:
        """Return the seconds of a core. A failing attempt does only a part of the work."""
        work = attempt.task.work
        if attempt.index >= 0 and self.slow[attempt.index]:
            work *= self.cluster.slowness
        if self._fails(attempt):
            work *= float(self.draws[attempt.number, attempt.index]) / self.cluster.failed
        self.outcome.work += work
        return work

    def _transfer_out(self, now: float, attempt: _Attempt) -> float:
        """Transfer what a task writes, and what it sends to all machines; return the time when it is done."""
        task, own = attempt.task, self.machines[attempt.machine]
        self.outcome.written += task.written
        self.outcome.sent += task.sent
        self.outcome.puts += task.puts
        ends = [
            own.network_out.take(now, task.written + task.sent),
            self.store.take(now, task.written),
        ]
        if not task.sent:
            ends.append(own.disk.take(now, task.kept))
        else:
            for share, machine in zip(self.shares, self.machines, strict=True):
                ends.append(machine.network_in.take(now, task.sent * share))
                ends.append(machine.disk.take(now, task.kept * share))
        return max(ends)

    def _book(self, task: Task) -> None:
        self.outcome.positions += task.positions
        self.outcome.objects += task.objects

    def _used(self) -> dict[str, float]:
        """Return the utilization of each kind of resource, as a mean."""
        seconds = self.outcome.seconds or 1.0
        cores = self.cluster.machines * (self.phase.slots or self.cluster.cores)
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
