"""The task graph of a store, from sources to shards: every task with what it takes and moves. Runs none.

How many slices, units, buckets and shards there are, the real planner says; what a task takes, rates that
were measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, isqrt
from typing import Final

from hexdata.engine.protocol import Machines
from hexdata.export import ExportOptions
from hexdata.shuffle import ShuffleOptions
from hexdata.shuffle.plan import Layout, bucket_counts, make_layout, make_limits, row_bytes

N = 13
HELD_OUT: Final = 0.05
"""Of the positions, in each of val and test, as ``convert`` splits them."""
GAME: Final = 69
"""Positions a game, of the demo's and of the legacy files."""
SOURCE: Final = 1_000_000
"""Positions a source file."""
INDEX_BYTES: Final = 40
"""Of the driver's index of the runs, a piece: five int64."""
OPENING: Final = 2
"""Requests that it takes to open a run, besides that for a piece: its size, and its index at the end."""
SAVES: Final = 256
"""Entries of the shuffle's ledger that are written, in the mean, for each that is new."""
PART_BYTES: Final = 64 << 20
"""Of an object that is uploaded in several requests."""
EXCHANGES: Final = ("runs", "objects", "two-level", "push")


@dataclass(frozen=True)
class Rates:
    """What one core does, and what files take; measured by ``task_rates.py``. Seconds and bytes.

    Attributes:
        digest: seconds a byte.
        read, publish, scatter, sort, export: seconds a position.
        decide, choose: seconds a position, in the command itself, before sources are written and slices cut.
        source_bytes, spool_bytes, position_bytes, run_bytes, bucket_bytes, shard_bytes: a position.
        piece_write, piece_read: seconds a piece, besides those of its rows.
        piece_bytes: that a piece takes besides its rows.
        footer_bytes: that every reader of a run reads for each piece in it, whichever it wants.
        open_run: seconds.
        held_out: seconds for each held-out game, in each slice.
        recut: seconds a position, to read it from a run and write it into another.
        dispatch: seconds of the driver, a task.
        ledger, shard_ledger: seconds of the driver for each slice or source, and each shard, that is saved
            again when one more is done.
        path: seconds of the driver for each file that a task is told of.
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
    footer_bytes: float
    open_run: float
    held_out: float
    recut: float
    dispatch: float
    ledger: float
    shard_ledger: float
    path: float


@dataclass(frozen=True)
class Cluster:
    """Machines that are alike, and the store that all of them see.

    Attributes:
        machines, cores: one task a core.
        memory: bytes, for the shuffle, on each machine.
        network: bytes/s of a machine, each way.
        disk: bytes/s of a machine's own disk.
        store: bytes/s of the shared store, for all.
        gets, puts: requests/s that the store answers, for all.
        latency: seconds a request waits.
        parallel: requests that a task has under way at a time.
        block: bytes that a task asks for at a time, whatever it wants.
        dispatch: seconds of the driver that the engine takes for a task.
        start: seconds before a task begins to work.
        slow: share of the tasks that are stragglers.
        slowness: times as long as these take.
        failed: share of the attempts that die half way, on average.
        separate: whether a task is a process of its own.
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
    parallel: int = 1
    block: int = 0
    dispatch: float = 0.0
    start: float = 0.0
    slow: float = 0.0
    slowness: float = 3.0
    failed: float = 0.0
    separate: bool = True


@dataclass(frozen=True)
class Design:
    """How the shuffle moves rows from slices to units, and what each task is told.

    Attributes:
        exchange: ``runs``: one file a slice, of which a unit reads its pieces; ``objects``: a file a piece;
            ``two-level``: runs of groups of units, cut once more; ``push``: pieces are sent to the machine
            that will sort them, which keeps them on its own disk.
        all_files: whether a slice takes in all held-out games, a job is told the name of every run, and a
            shard's task that of every bucket.
        footers: whether a unit reads the index of each run, or is told where its pieces lie; and whether the
            command reads them one by one.
        rewritten: whether the ledger is saved as a whole, with each source and each shard, and now and then
            with slices and buckets; or only what is new in it.
    """

    exchange: str = "runs"
    all_files: bool = True
    footers: bool = True
    rewritten: bool = True

    def __post_init__(self) -> None:
        assert self.exchange in EXCHANGES


@dataclass(frozen=True)
class Task:
    """What one task moves and takes.

    Attributes:
        positions: that it deals with.
        work: seconds of a core.
        read, written: bytes, from and to the store.
        loaded, kept: bytes, from and to the disks of the machines themselves.
        sent: bytes to other machines.
        gets, puts: requests to the store.
        objects: that it leaves there.
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
    """Tasks that may run at the same time; the next phase begins when all are done.

    Attributes:
        name: of the phase.
        tasks: in the order in which they are handed over.
        before: seconds of the driver, before the first.
        dispatch: seconds of the driver, a task.
        ledger: seconds of the driver, a task and for each that is done already.
        memory: bytes that the driver holds for it.
    """

    name: str
    tasks: Sequence[Task]
    before: float = 0.0
    dispatch: float = 0.0
    ledger: float = 0.0
    memory: float = 0.0


def split_rows(positions: int) -> dict[str, int]:
    """Return the positions of each split that has any, as ``convert`` shares them out."""
    held_out = int(positions * HELD_OUT)
    rows = {"train": positions - 2 * held_out, "val": held_out, "test": held_out}
    return {split: count for split, count in rows.items() if count}


def plan_shuffle(positions: int, cluster: Cluster) -> Layout:
    """Ask the planner how it would cut a store of so many positions on these machines."""
    rows = split_rows(positions)
    options = ShuffleOptions(memory=cluster.memory)
    machines = Machines(cluster.machines, cluster.cores, separate=cluster.separate)
    row = row_bytes(N, 0)
    limits = make_limits(options, positions, row, row, machines)
    return make_layout(positions, rows, bucket_counts(options, rows), limits, machines=machines.count)


def even(total: int, parts: int) -> list[int]:
    """Cut a number into so many parts, as equal as they can be."""
    return [total * (i + 1) // parts - total * i // parts for i in range(parts)]


def uploads(size: float) -> int:
    """Return the requests that it takes to write an object: parts of a large one, its begin and its end."""
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
    """Yield the phases of ``convert``: a task a source in each."""
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
    yield Phase(
        "publish",
        publishes,
        before=positions * rates.decide,
        dispatch=dispatch,
        ledger=rates.ledger if design.rewritten else 0.0,
    )


def _saving(rates: Rates, design: Design) -> float:
    """Return the driver's seconds for saving the ledger now and then, a task of a shuffle."""
    return rates.ledger * (SAVES if design.rewritten else 1)


def shuffle(layout: Layout, rates: Rates, cluster: Cluster, design: Design) -> Iterator[Phase]:
    """Yield the phases of ``shuffle``: slices become runs, or what stands in their place, and units buckets.

    With two levels, the first cuts into g groups of units, g being the root of their number, and the second
    each group into its units: so a unit's rows are in a g-th of the runs.
    """
    groups = isqrt(layout.units) if design.exchange == "two-level" else 1
    cuts = groups if design.exchange == "two-level" else layout.units
    yield _scatter(layout, cuts, rates, cluster, design)
    if design.exchange == "two-level":
        yield _recut(layout, groups, rates, cluster)
    yield _sort(layout, groups, rates, cluster, design)


def _scatter(layout: Layout, cuts: int, rates: Rates, cluster: Cluster, design: Design) -> Phase:
    """A task a slice, each cut into ``cuts`` pieces."""
    held_out = int(2 * HELD_OUT * layout.positions / GAME) if design.all_files else 0
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
    return Phase(
        "scatter",
        tasks,
        before=layout.positions * rates.choose / cluster.cores,
        dispatch=rates.dispatch + cluster.dispatch + _saving(rates, design),
    )


def _recut(layout: Layout, groups: int, rates: Rates, cluster: Cluster) -> Phase:
    """As many tasks as slices: each takes its group's pieces of as many runs as make a slice."""
    cuts = -(-layout.units // groups)
    tasks = []
    for part in layout.slices:
        rows = part.stop - part.start
        work = rows * rates.recut + groups * rates.piece_read + cuts * rates.piece_write
        read = rows * rates.run_bytes + groups * rates.piece_bytes
        size = rows * rates.run_bytes + cuts * rates.piece_bytes
        tasks.append(Task(rows, work, read, size, gets=groups, puts=uploads(size)))
    dispatch = rates.dispatch + cluster.dispatch + rates.ledger
    return Phase("recut", tasks, dispatch=dispatch)


def _sort(layout: Layout, groups: int, rates: Rates, cluster: Cluster, design: Design) -> Phase:
    """A task a job: of each of its units it takes the piece in every run that has any of its rows."""
    runs = -(-len(layout.slices) // groups)
    cuts = -(-layout.units // groups)
    opens = design.footers and design.exchange in ("runs", "two-level")
    splits = split_rows(layout.positions)
    rows_of = {split: even(splits[split], group.buckets) for split, group in layout.groups.items()}
    tasks = []
    for job in layout.jobs:
        rows = sum(rows_of[bucket.split][bucket.index] for bucket in job.buckets)
        count = len(job.buckets)
        pieces = runs * len(job.units)
        piece = rows * rates.run_bytes / pieces + rates.piece_bytes
        size = pieces * (max(piece, cluster.block) if opens else piece)
        work = rows * rates.sort + pieces * rates.piece_read
        result = rows * rates.bucket_bytes
        task = Task(
            rows, work, size, result, gets=pieces, puts=count * uploads(result / count), objects=count
        )
        if opens:
            footers = pieces * max(cuts * rates.footer_bytes, cluster.block)
            gets = pieces * (1 + OPENING)
            task = replace(task, work=work + pieces * rates.open_run, read=size + footers, gets=gets)
        elif design.exchange == "push":
            task = replace(task, read=0.0, loaded=size, gets=0)
        tasks.append(task)
    dispatch = rates.dispatch + cluster.dispatch + _saving(rates, design)
    if design.exchange not in ("runs", "two-level"):
        return Phase("sort", tasks, dispatch=dispatch)
    at_a_time = 1 if opens else cluster.parallel
    asking = len(layout.slices) * (rates.open_run + OPENING * cluster.latency / at_a_time)
    known = len(layout.slices) * (cuts if groups == 1 else groups + cuts)
    told = dispatch + (runs * rates.path if design.all_files else 0.0)
    return Phase("sort", tasks, before=asking, dispatch=told, memory=known * INDEX_BYTES)


def export(positions: int, layout: Layout, rates: Rates, cluster: Cluster, design: Design) -> Phase:
    """Return the phase of ``export``: a task a shard."""
    size = ExportOptions().shard_size
    tasks = []
    for count in split_rows(positions).values():
        for start in range(0, count, size):
            rows = min(size, count - start)
            shard = rows * rates.shard_bytes
            work, read = rows * rates.export, rows * rates.bucket_bytes
            tasks.append(Task(rows, work, read, shard, gets=4, puts=uploads(shard)))
    buckets = max(group.buckets for group in layout.groups.values())
    return Phase(
        "export",
        tasks,
        dispatch=rates.dispatch + cluster.dispatch + (buckets * rates.path if design.all_files else 0.0),
        ledger=rates.shard_ledger if design.rewritten else 0.0,
    )
