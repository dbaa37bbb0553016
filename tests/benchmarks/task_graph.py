"""The task graph of a store, from sources to shards: the work and the transfers of every task.

Nothing is executed. The planner of the shuffle gives the numbers of slices, units, buckets and shards;
measured rates give the times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, isqrt
from typing import Final

from hexdata.engine.protocol import Machines
from hexdata.export import ExportOptions
from hexdata.shuffle import ShuffleOptions
from hexdata.shuffle.layout import ShuffleLayout, bucket_counts, make_layout, make_limits, row_bytes
from hexdata.shuffle.runs import PARALLEL_INDEX_READS

N = 13
HELD_OUT: Final = 0.05
"""Share of the positions in each of val and test, as ``convert`` splits them."""
GAME: Final = 69
"""Positions per game, of the demo and of the legacy files."""
SOURCE: Final = 1_000_000
"""Positions per source file."""
INDEX_BYTES: Final = 32
"""Bytes per piece in the index of all runs, which the driver keeps in memory."""
STORED_BYTES: Final = 28
"""Bytes per piece in the index at the end of a run."""
TAIL_BYTES: Final = 1 << 16
"""Bytes at the end of a run that are read first; a larger index takes another request."""
SAVES: Final = 256
"""A ledger is saved when it has grown by this fraction (1 / 256) of its size."""
PART_BYTES: Final = 8 << 20
"""Bytes per request of an object that is uploaded in parts."""
EXCHANGES: Final = ("runs", "objects", "two-level", "push")


@dataclass(frozen=True)
class Rates:
    """Times and sizes measured by ``task_rates.py`` on one core, in seconds and bytes.

    Attributes:
        digest: seconds per byte.
        read, publish, scatter, sort, export: seconds per position.
        decide, choose: seconds per position in the driver, before sources are written and slices cut.
        source_bytes, spool_bytes, position_bytes, run_bytes, bucket_bytes, shard_bytes: bytes per position.
        piece_write, piece_read: seconds per piece, besides those of its rows.
        piece_bytes: bytes per piece, besides those of its rows.
        open_run: seconds of the driver to read a run's index, without its pieces.
        index, look: seconds of the driver for each piece in all runs: once to sort it in, and once for each
            job that looks up its pieces.
        held_out: seconds per held-out game, in each slice.
        recut: seconds per position, to read it from a run and write it into another.
        dispatch: seconds of the driver per task.
        ledger, shard_ledger: seconds of the driver for each slice or source, and each shard, in a saved
            ledger.
        path: seconds of the driver for each file name in the arguments of a task.
        pick: seconds of the driver for each bucket, for each shard that looks up its buckets.
        policies: seconds per position in the driver, to find out before an export whether any has a policy.
    """

    digest: float
    read: float
    publish: float
    scatter: float
    sort: float
    export: float
    decide: float
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
    look: float
    held_out: float
    recut: float
    dispatch: float
    ledger: float
    shard_ledger: float
    path: float
    pick: float
    policies: float


@dataclass(frozen=True)
class Cluster:
    """A cluster of equal machines and the store that they share.

    Attributes:
        machines, cores: number of machines, and cores of each; one task per core.
        memory: bytes for the shuffle on each machine.
        network: bytes/s of a machine in each direction.
        disk: bytes/s of a machine's own disk.
        store: bytes/s of the shared store, for all machines together.
        gets, puts: requests/s that the store answers, for all machines together.
        latency: seconds per request.
        dispatch: seconds of the driver that the engine takes per task.
        start: seconds before a task begins to work.
        slow: share of the tasks that are stragglers.
        slowness: factor by which stragglers take longer.
        failed: share of the attempts that fail, half way through on average.
        separate: whether each task is a process of its own.
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
    separate: bool = True


@dataclass(frozen=True)
class Design:
    """How the shuffle transfers rows from slices to units, and the arguments of its tasks.

    Attributes:
        exchange: ``runs``: one file per slice, from which a unit reads its pieces; ``objects``: one file per
            piece; ``two-level``: runs of groups of units, cut once more; ``push``: pieces are sent to the
            machine that sorts them, which keeps them on its own disk.
        names: whether the arguments of slices and jobs contain the names of all files of positions, and those
            of jobs the names of all runs, or only of those that they read.
        searched: whether the driver goes through all pieces for each job, and all buckets for each shard.
        joined: whether a slice reads all held-out games.
        rewritten: whether a ledger is saved as a whole, or only its new entries.
        parallel: number of pieces that a task requests at a time.
    """

    exchange: str = "runs"
    names: bool = True
    searched: bool = True
    joined: bool = True
    rewritten: bool = True
    parallel: int = 1

    def __post_init__(self) -> None:
        assert self.exchange in EXCHANGES


@dataclass(frozen=True)
class Task:
    """The work and the transfers of one task.

    Attributes:
        positions: number of positions.
        work: seconds of a core.
        read, written: bytes from and to the store.
        loaded, kept: bytes from and to the disks of the machines.
        sent: bytes to other machines.
        gets, puts: requests to the store.
        objects: objects that it leaves in the store.
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
        name: name of the phase.
        tasks: tasks, in the order in which they are dispatched.
        before: seconds of the driver before the first task.
        dispatch: seconds of the driver per task.
        ledger: seconds of the driver for each finished task, when the ledger is saved.
        saved: entries of the ledger before the first task.
        parallel: read requests that a task has in flight at a time.
        memory: bytes that the driver needs for the phase.
    """

    name: str
    tasks: Sequence[Task]
    before: float = 0.0
    dispatch: float = 0.0
    ledger: float = 0.0
    saved: int = 0
    parallel: int = 1
    memory: float = 0.0


def split_rows(positions: int) -> dict[str, int]:
    """Return the number of positions of each non-empty split, as ``convert`` assigns them."""
    held_out = int(positions * HELD_OUT)
    rows = {"train": positions - 2 * held_out, "val": held_out, "test": held_out}
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
        *convert(positions, rates, cluster, design),
        *shuffle(layout, rates, cluster, design),
        export(positions, layout, rates, cluster, design),
    ]


def convert(positions: int, rates: Rates, cluster: Cluster, design: Design) -> Iterator[Phase]:
    """Yield the phases of ``convert``, each with one task per source."""
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
    phase = Phase("publish", publishes, before=positions * rates.decide, dispatch=dispatch)
    yield _booked(phase, rates.ledger, design)


def _booked(phase: Phase, ledger: float, design: Design, saved: int = 0) -> Phase:
    """Return a phase with the cost of its ledger, of which an entry takes ``seconds`` to save."""
    if design.rewritten:
        return replace(phase, ledger=ledger, saved=saved)
    return replace(phase, dispatch=phase.dispatch + ledger)


def _naming(layout: ShuffleLayout, rates: Rates, design: Design) -> float:
    """Return the driver's seconds for the names of all files of positions in a task of a shuffle."""
    return -(-layout.positions // SOURCE) * rates.path if design.names else 0.0


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
    held_out = int(2 * HELD_OUT * layout.positions / GAME) if design.joined else 0
    asking = held_out * rates.held_out
    tasks = []
    for part in layout.slices:
        rows = part.stop - part.start
        work = rows * rates.scatter + cuts * rates.piece_write + asking
        size = rows * rates.run_bytes + cuts * rates.piece_bytes
        gets = 2 * ceil(rows / SOURCE)
        task = Task(rows, work, rows * rates.position_bytes, size, gets=gets, puts=uploads(size))
        if design.exchange == "objects":
            task = replace(task, puts=cuts, objects=cuts)
        elif design.exchange == "push":
            away = size * (cluster.machines - 1) / cluster.machines
            task = replace(task, written=0.0, kept=size, sent=away, puts=0, objects=0)
        tasks.append(task)
    phase = Phase(
        "scatter",
        tasks,
        before=layout.positions * rates.choose / cluster.cores,
        dispatch=rates.dispatch + cluster.dispatch + _naming(layout, rates, design),
        parallel=design.parallel,
    )
    return _booked(phase, rates.ledger, design)


def _recut(layout: ShuffleLayout, groups: int, rates: Rates, cluster: Cluster, design: Design) -> Phase:
    """Return as many tasks as slices: each reads its group's pieces of as many runs as make a slice."""
    cuts = -(-layout.units // groups)
    tasks = []
    for part in layout.slices:
        rows = part.stop - part.start
        work = rows * rates.recut + groups * rates.piece_read + cuts * rates.piece_write
        read = rows * rates.run_bytes + groups * rates.piece_bytes
        size = rows * rates.run_bytes + cuts * rates.piece_bytes
        tasks.append(Task(rows, work, read, size, gets=groups, puts=uploads(size)))
    phase = Phase("recut", tasks, dispatch=rates.dispatch + cluster.dispatch, parallel=design.parallel)
    return _booked(phase, rates.ledger, design, len(layout.slices))


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
        tasks.append(task)
    dispatch = rates.dispatch + cluster.dispatch + _naming(layout, rates, design)
    phase = Phase("sort", tasks, dispatch=dispatch, parallel=design.parallel)
    if design.exchange in ("runs", "two-level"):
        phase = _indexed(phase, layout, groups, rates, cluster, design)
    return _booked(phase, rates.ledger, design, len(layout.slices))


def _indexed(
    phase: Phase, layout: ShuffleLayout, groups: int, rates: Rates, cluster: Cluster, design: Design
) -> Phase:
    """Return the sorting phase with the driver's memory for the locations of all pieces.

    With two levels, these are the pieces of the second.
    """
    runs, cuts = len(layout.slices), -(-layout.units // groups)
    requests = 1 if cuts * STORED_BYTES <= TAIL_BYTES else 2
    asking = requests * cluster.latency / PARALLEL_INDEX_READS
    pieces = runs * cuts
    told = (runs // groups * rates.path if design.names else 0.0) + (
        pieces * rates.look if design.searched else 0.0
    )
    return replace(
        phase,
        before=runs * (rates.open_run + asking) + pieces * rates.index,
        dispatch=phase.dispatch + told,
        memory=pieces * INDEX_BYTES,
    )


def export(positions: int, layout: ShuffleLayout, rates: Rates, cluster: Cluster, design: Design) -> Phase:
    """Return the phase of ``export``, with one task per shard."""
    size = ExportOptions().shard_size
    tasks = []
    for count in split_rows(positions).values():
        for start in range(0, count, size):
            rows = min(size, count - start)
            shard = rows * rates.shard_bytes
            work, read = rows * rates.export, rows * rates.bucket_bytes
            tasks.append(Task(rows, work, read, shard, gets=4, puts=uploads(shard)))
    before = positions * rates.policies
    if design.searched:
        shards = {split: ceil(count / size) for split, count in split_rows(positions).items()}
        before += sum(shards[split] * group.buckets for split, group in layout.groups.items()) * rates.pick
    phase = Phase("export", tasks, before=before, dispatch=rates.dispatch + cluster.dispatch)
    return _booked(phase, rates.shard_ledger, design)
