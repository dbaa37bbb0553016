"""The task graph of a store, from sources to shards: the work and the transfers of every task.

Nothing is executed. The planner of the shuffle gives the numbers of slices, units, buckets and shards;
measured rates give the times.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf, isqrt
from typing import Final

from hexdata.convert import ConvertOptions
from hexdata.engine.protocol import Machines
from hexdata.export import ExportOptions
from hexdata.export.run import files_per_task
from hexdata.shuffle import ShuffleOptions
from hexdata.shuffle.layout import (
    ShuffleLayout,
    bucket_counts,
    jobs_per_group,
    make_layout,
    make_limits,
    row_bytes,
)
from hexdata.shuffle.runs import PARALLEL_READS, RANGE_BYTES

N = 13
SHARES: Final = {"val": ConvertOptions.val, "test": ConvertOptions.test}
"""Share of the positions in each held-out split, as ``convert`` splits them by default."""
GAME: Final = 69
"""Positions per game, of the demo and of the legacy files."""
GAME_BYTES: Final = 150
"""Bytes of the moves and the hash of a game in a spool."""
COMPARED_GAMES: Final = 1 << 20
"""Games of a task that finds duplicates."""
SOURCE: Final = 1_000_000
"""Positions per source file."""
INDEX_BYTES: Final = 24
"""Bytes per piece in the index of all runs, which the driver keeps in a file."""
STORED_BYTES: Final = 28
"""Bytes per piece in the index at the end of a run."""
TAIL_BYTES: Final = 1 << 16
"""Bytes at the end of a run that are read first; a larger index takes another request."""
PART_BYTES: Final = 8 << 20
"""Bytes per request of an object that is uploaded in parts."""
EXCHANGES: Final = ("runs", "groups", "machine-groups", "objects", "two-level", "push")


@dataclass(frozen=True)
class Rates:
    """Times and sizes measured by ``task_rates.py`` on one core, in seconds and bytes.

    Attributes:
        digest: Seconds per byte.
        read, publish, scatter, sort, export: Seconds per position.
        compare: Seconds per game, to find duplicates.
        choose: Seconds per position in the driver, before slices are cut.
        source_bytes, spool_bytes, position_bytes, run_bytes, bucket_bytes, shard_bytes: Bytes per position.
        piece_write, piece_read: Seconds per piece, besides those of its rows.
        piece_bytes: Bytes per piece, besides those of its rows.
        open_run: Seconds of the driver to read a run's index, without its pieces.
        index: Seconds of the driver for each piece in all runs, to sort it in and to give it to its task.
        recut: Seconds per position, to read it from a run and write it into another.
        dispatch: Seconds of the driver per task.
        ledger, shard_ledger: Seconds of the driver for each slice or source, and each shard, in a saved
            ledger.
    """

    digest: float
    read: float
    publish: float
    scatter: float
    sort: float
    export: float
    compare: float
    choose: float
    source_bytes: float
    spool_bytes: float
    position_bytes: float
    run_bytes: float
    bucket_bytes: float
    shard_bytes: float
    piece_write: float
    piece_read: float
    piece_bytes: float
    open_run: float
    index: float
    recut: float
    dispatch: float
    ledger: float
    shard_ledger: float


@dataclass(frozen=True)
class Cluster:
    """A cluster of equal machines and the store that they share.

    Attributes:
        machines, cores: Number of machines, and cores of each; one task per core.
        memory: Bytes for the shuffle on each machine.
        network: Bytes/s of a machine in each direction.
        disk: Bytes/s of a machine's own disk.
        store: Bytes/s of the shared store, for all machines together.
        gets, puts: Requests/s that the store answers, for all machines together.
        latency: Seconds per request.
        dispatch: Seconds of the driver that the engine takes per task.
        start: Seconds before a task begins to work.
        slow: Share of the tasks that are stragglers.
        slowness: Factor by which stragglers take longer.
        failed: Share of the attempts that fail, half way through on average.
        deaths: Expected number of times per hour that a machine stops. Its tasks begin again elsewhere, and
            what others sent to it is lost.
        replacement: Seconds until a stopped machine is replaced.
        skew: Standard deviation of the logarithm of the share that each machine receives of what is sent.
        queue: Seconds of requests that may wait for the store; it refuses further ones.
        separate: Whether each task is a process of its own.
        request, receive: Seconds of a core per read request, and per byte that it returns.
    """

    machines: int
    cores: int
    memory: int
    network: float
    disk: float
    store: float
    gets: float
    puts: float
    latency: float
    dispatch: float = 0.0
    start: float = 0.0
    slow: float = 0.0
    slowness: float = 3.0
    failed: float = 0.0
    deaths: float = 0.0
    replacement: float = 120.0
    skew: float = 0.0
    queue: float = inf
    separate: bool = True
    request: float = 0.0
    receive: float = 0.0


@dataclass(frozen=True)
class Design:
    """How the shuffle transfers rows from slices to units.

    Attributes:
        exchange: ``runs``: one file per slice, from which a unit reads its pieces; ``machine-groups``: the
            same, but a task first copies the pieces of a group of neighbouring units to the disk of its
            machine, with one read per run, and sorts them on all cores, as hexdata does with object stores;
            ``groups``: the same with a group for each core, as earlier versions did; ``objects``: one file
            per piece; ``two-level``: runs of groups of units, cut once more; ``push``: pieces are sent
            to the machine that sorts them, which keeps them on its disk.
        parallel: Number of pieces that a task requests at a time.
    """

    exchange: str = "runs"
    parallel: int = PARALLEL_READS

    def __post_init__(self) -> None:
        assert self.exchange in EXCHANGES


@dataclass(frozen=True)
class Task:
    """The work and the transfers of one task.

    Attributes:
        positions: Number of positions.
        work: Seconds of a core.
        read, written: Bytes from and to the store.
        loaded, kept: Bytes from and to the disks of the machines.
        sent: Bytes to other machines.
        gets, puts: Requests to the store.
        objects: Objects that it leaves in the store.
    """

    positions: int
    work: float
    read: float = 0.0
    written: float = 0.0
    loaded: float = 0.0
    kept: float = 0.0
    sent: float = 0.0
    gets: int = 1
    puts: int = 1
    objects: int = 1


@dataclass(frozen=True)
class Phase:
    """Tasks that may run at the same time. The next phase begins when all are done.

    Attributes:
        name: Name of the phase.
        tasks: Tasks, in the order in which they are dispatched.
        before: Seconds of the driver before the first task.
        dispatch: Seconds of the driver per task.
        parallel: Read requests that a task has in flight at a time.
        index: Bytes of the driver's index of all pieces.
        again: Tasks that are added when a machine stops, to send again what was sent to it.
        receiving: Whether the machines still receive in this phase. If so, only as many of these tasks are
            added as tasks of the phase are done.
        slots: Tasks that a machine runs at a time; 0 for one per core.
    """

    name: str
    tasks: Sequence[Task]
    before: float = 0.0
    dispatch: float = 0.0
    parallel: int = 1
    index: float = 0.0
    again: Sequence[Task] = ()
    receiving: bool = False
    slots: int = 0


def split_rows(positions: int) -> dict[str, int]:
    """Return the number of positions of each non-empty split, as ``convert`` assigns them."""
    held_out = {split: int(positions * share) for split, share in SHARES.items()}
    rows = {"train": positions - sum(held_out.values()), **held_out}
    return {split: count for split, count in rows.items() if count}


def plan_shuffle(positions: int, cluster: Cluster) -> ShuffleLayout:
    """Return the plan of a shuffle of ``positions`` positions on this cluster."""
    rows = split_rows(positions)
    options = ShuffleOptions(memory=cluster.memory)
    machines = Machines(cluster.machines, cluster.cores, separate=cluster.separate)
    row = row_bytes(N, 0)
    limits = make_limits(options, positions, row, row, machines)
    return make_layout(positions, rows, bucket_counts(options, rows), limits, machines=machines.count)


def even(total: int, parts: int) -> list[int]:
    """Divide a number into ``parts`` nearly equal parts."""
    return [total * (i + 1) // parts - total * i // parts for i in range(parts)]


def uploads(size: float) -> int:
    """Return the number of requests to write an object; a large one needs its parts, a start and an end."""
    return 1 if size <= PART_BYTES else ceil(size / PART_BYTES) + 2


def graph(positions: int, rates: Rates, cluster: Cluster, design: Design | None = None) -> list[Phase]:
    """Return the phases of converting, shuffling and exporting a store."""
    design = design or Design()
    layout = plan_shuffle(positions, cluster)
    return [
        *convert(positions, rates, cluster),
        *shuffle(layout, rates, cluster, design),
        export(positions, rates, cluster),
    ]


def convert(positions: int, rates: Rates, cluster: Cluster) -> Iterator[Phase]:
    """Yield the phases of ``convert``, each with one task per source, or per run of games."""
    sources = even(positions, -(-positions // SOURCE))
    digests, reads, publishes = [], [], []
    for own in sources:
        source, spool, part = (
            own * size for size in (rates.source_bytes, rates.spool_bytes, rates.position_bytes)
        )
        digests.append(Task(own, source * rates.digest, source, puts=0, objects=0))
        reads.append(Task(own, own * rates.read, source, spool, puts=5, objects=5))
        publishes.append(Task(own, own * rates.publish, spool, part, gets=4, puts=2, objects=2))
    dispatch = rates.dispatch + cluster.dispatch
    yield Phase("digest", digests, dispatch=dispatch)
    yield Phase("read", reads, dispatch=dispatch)
    yield from _compare(positions, rates, dispatch)
    yield Phase("publish", publishes, dispatch=dispatch + rates.ledger)


def _compare(positions: int, rates: Rates, dispatch: float) -> Iterator[Phase]:
    """Yield the phases that find duplicates: runs of games, ranges of hashes, and the results of each run."""
    runs = even(positions, -(-positions // (COMPARED_GAMES * GAME)))
    work = rates.compare / 3
    for name, read, written, gets in (
        ("runs of games", GAME_BYTES, 28, 2 * COMPARED_GAMES * GAME // SOURCE),
        ("ranges of hashes", 22, 10, len(runs)),
        ("duplicates", 16, 12, len(runs) + 1),
    ):
        tasks = [
            Task(own, own / GAME * work, own / GAME * read, own / GAME * written, gets=gets, objects=0)
            for own in runs
        ]
        yield Phase(name, tasks, dispatch=dispatch)


def shuffle(layout: ShuffleLayout, rates: Rates, cluster: Cluster, design: Design) -> Iterator[Phase]:
    """Yield the phases of ``shuffle``: slices become runs or their equivalent, and units become buckets.

    With two levels, the first cuts into g groups of units, where g is the square root of their number, and
    the second cuts each group into its units. The rows of a unit are then in one g-th of the runs.
    """
    groups = isqrt(layout.units) if design.exchange == "two-level" else 1
    cuts = groups if design.exchange == "two-level" else layout.units
    yield _scatter(layout, cuts, rates, cluster, design)
    if design.exchange == "two-level":
        yield _recut(layout, groups, rates, cluster, design)
    yield _sort(layout, groups, rates, cluster, design)


def _scatter(layout: ShuffleLayout, cuts: int, rates: Rates, cluster: Cluster, design: Design) -> Phase:
    """Return a task per slice, each cut into ``cuts`` pieces."""
    tasks: list[Task] = []
    for part in layout.slices:
        rows = part.stop - part.start
        work = rows * rates.scatter + cuts * rates.piece_write
        size = rows * rates.run_bytes + cuts * rates.piece_bytes
        gets = 2 * ceil(rows / SOURCE)
        task = Task(rows, work, rows * rates.position_bytes, size, gets=gets, puts=uploads(size))
        if design.exchange == "objects":
            task = replace(task, puts=cuts, objects=cuts)
        elif design.exchange == "push":
            away = size * (cluster.machines - 1) / cluster.machines
            task = replace(task, written=0.0, kept=size, sent=away, puts=0, objects=0)
        tasks.append(task)
    return Phase(
        "scatter",
        tasks,
        before=layout.positions * rates.choose / cluster.cores,
        dispatch=rates.dispatch + cluster.dispatch + rates.ledger,
        parallel=design.parallel,
        again=_sent_again(tasks, cluster) if design.exchange == "push" else (),
        receiving=True,
    )


def _sent_again(tasks: Sequence[Task], cluster: Cluster) -> list[Task]:
    """Return the tasks that scatter all slices again and send the pieces of one machine that stopped."""
    share = 1 / cluster.machines
    return [replace(task, positions=0, kept=task.kept * share, sent=task.sent * share) for task in tasks]


def _recut(layout: ShuffleLayout, groups: int, rates: Rates, cluster: Cluster, design: Design) -> Phase:
    """Return as many tasks as slices: each reads its group's pieces of as many runs as make a slice."""
    cuts = -(-layout.units // groups)
    tasks = []
    for part in layout.slices:
        rows = part.stop - part.start
        work = rows * rates.recut + groups * rates.piece_read + cuts * rates.piece_write
        read = rows * rates.run_bytes + groups * rates.piece_bytes
        work += _receiving(groups, read, cluster)
        size = rows * rates.run_bytes + cuts * rates.piece_bytes
        tasks.append(Task(rows, work, read, size, gets=groups, puts=uploads(size)))
    dispatch = rates.dispatch + cluster.dispatch + rates.ledger
    return Phase("recut", tasks, dispatch=dispatch, parallel=design.parallel)


def _sort(layout: ShuffleLayout, groups: int, rates: Rates, cluster: Cluster, design: Design) -> Phase:
    """Return a task per job: for each of its units, it reads the piece in every run that has rows of it."""
    runs = -(-len(layout.slices) // groups)
    splits = split_rows(layout.positions)
    rows_of = {split: even(splits[split], group.buckets) for split, group in layout.groups.items()}
    tasks = []
    for job in layout.jobs:
        rows = sum(rows_of[bucket.split][bucket.index] for bucket in job.buckets)
        count = len(job.buckets)
        pieces = runs * len(job.units)
        size = rows * rates.run_bytes + pieces * rates.piece_bytes
        work = rows * rates.sort + pieces * rates.piece_read
        result = rows * rates.bucket_bytes
        task = Task(
            rows, work, size, result, gets=pieces, puts=count * uploads(result / count), objects=count
        )
        if design.exchange == "push":
            task = replace(task, read=0.0, loaded=size, gets=0)
        elif design.exchange not in ("groups", "machine-groups"):
            task = replace(task, work=work + _receiving(pieces, size, cluster))
        tasks.append(task)
    dispatch = rates.dispatch + cluster.dispatch + rates.ledger
    phase = Phase("sort", tasks, dispatch=dispatch, parallel=design.parallel)
    if design.exchange in ("groups", "machine-groups"):
        phase = _in_groups(phase, layout, rates, cluster, design)
    if design.exchange == "push":
        phase = replace(
            phase, again=_sent_again(_scatter(layout, layout.units, rates, cluster, design).tasks, cluster)
        )
    if design.exchange in ("objects", "push"):
        return phase
    return _indexed(phase, layout, groups, rates, cluster)


def _in_groups(phase: Phase, layout: ShuffleLayout, rates: Rates, cluster: Cluster, design: Design) -> Phase:
    """Return the sorting phase with a task per group of jobs, on one core or on all cores of a machine.

    A task copies the pieces of its group to the disk of its machine, and then sorts its jobs from there.
    """
    threads = cluster.cores if design.exchange == "machine-groups" else 1
    slots = cluster.cores // threads
    runs, jobs = len(layout.slices), phase.tasks
    size = sum(job.read for job in jobs) / len(jobs)
    per_group = jobs_per_group(len(jobs), runs, size, cluster.machines * slots, threads)
    tasks = []
    for start in range(0, len(jobs), per_group):
        own = jobs[start : start + per_group]
        free = [0.0] * min(threads, len(own))
        for job in own:
            heapq.heapreplace(free, free[0] + job.work)
        read = sum(job.read for job in own)
        gets = runs * ceil(read / runs / RANGE_BYTES)
        task = Task(
            positions=sum(job.positions for job in own),
            work=max(free) + _receiving(gets, read, cluster),
            read=read,
            written=sum(job.written for job in own),
            loaded=2 * read,
            gets=gets,
            puts=sum(job.puts for job in own),
            objects=sum(job.objects for job in own),
        )
        tasks.append(task)
    return replace(phase, tasks=tasks, parallel=design.parallel * threads, slots=slots)


def _receiving(gets: int, size: float, cluster: Cluster) -> float:
    """Return the seconds of a core to send requests and to receive their answers."""
    return gets * cluster.request + size * cluster.receive


def _indexed(phase: Phase, layout: ShuffleLayout, groups: int, rates: Rates, cluster: Cluster) -> Phase:
    """Return the sorting phase with the driver's index of all pieces (of the second of two levels)."""
    runs, cuts = len(layout.slices), -(-layout.units // groups)
    requests = 1 if cuts * STORED_BYTES <= TAIL_BYTES else 2
    asking = requests * cluster.latency / PARALLEL_READS
    pieces = runs * cuts
    before = runs * (rates.open_run + asking) + pieces * rates.index
    return replace(phase, before=before, index=pieces * INDEX_BYTES)


def export(positions: int, rates: Rates, cluster: Cluster) -> Phase:
    """Return the phase of ``export``, with one task per shard, of which several may be dispatched at once."""
    size = ExportOptions().shard_size
    tasks = []
    for count in split_rows(positions).values():
        for start in range(0, count, size):
            rows = min(size, count - start)
            shard = rows * rates.shard_bytes
            work, read = rows * rates.export, rows * rates.bucket_bytes
            tasks.append(Task(rows, work, read, shard, gets=4, puts=uploads(shard)))
    count = files_per_task(len(tasks), cluster.machines * cluster.cores)
    dispatch = (rates.dispatch + cluster.dispatch) / count + rates.shard_ledger
    return Phase("export", tasks, dispatch=dispatch)
