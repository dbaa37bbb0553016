"""Estimates the needs of stores of many sizes from measured rates and the simulated task graph.

Run as a script: ``scaling.py STORE FOLDER`` measures on a copy of the store, compares the simulation with a
real run of it and prints the tables of docs/scaling.md. ``scaling.py RATES.json`` only prints the tables.
"""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Final

from simulation import Outcome, simulate
from task_graph import Cluster, Design, Rates, graph, plan_shuffle, shuffle
from task_rates import GAMES, measure

from hexdata.store import Store

DESK: Final = Cluster(
    machines=1,
    cores=2,
    memory=2_000_000_000,
    network=1e12,
    disk=1e9,
    store=1e9,
    gets=1e5,
    puts=1e4,
    latency=1e-4,
    separate=False,
)
"""The machine of the benchmarks, which reads and writes its own disk."""
SERVERS: Final = Cluster(
    machines=1,
    cores=16,
    memory=64_000_000_000,
    network=3e9,
    disk=2e9,
    store=2e10,
    gets=2e5,
    puts=5e4,
    latency=1e-3,
    dispatch=6e-4,
    start=0.01,
    slow=0.01,
    failed=0.001,
)
"""Machines with 16 cores and 25 Gbit/s and a parallel file system. A task costs the driver 0.6 ms, as
measured with Ray.
"""
BUCKET: Final = replace(SERVERS, store=1e12, latency=0.1, gets=5_500, puts=3_500, request=3e-3, receive=2e-9)
"""The same machines with an object store: the requests/s that S3 promises per prefix, and the latency in its
guide. The client takes 3 ms of a core per request and 2 s per GB, measured on a busy machine.
"""
FAULTY: Final = replace(BUCKET, deaths=0.05, skew=0.2, queue=1.0)
"""The same, but a machine stops once in 20 hours, machines receive uneven shares, and S3 refuses requests
when a second of them is waiting.
"""
PREFIXES: Final = 32
SIZES: Final = ((97_000_000, 1), (1_000_000_000, 8), (100_000_000_000, 100))
"""Numbers of positions and of machines."""
EXCHANGES: Final = ("runs", "groups", "machine-groups", "two-level", "push")
BIG: Final = 10**11


def hours(seconds: float) -> str:
    """Return a duration as text."""
    if seconds < 600:
        return f"{seconds:,.0f} s"
    return f"{seconds / 60:,.0f} min" if seconds < 7_200 else f"{seconds / 3_600:,.1f} h"


def amount(size: float) -> str:
    """Return a size or a count as text."""
    for unit, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if size >= scale:
            return f"{size / scale:,.3g} {unit}"
    return f"{size:,.3g}"


def table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield "| " + " | ".join(row) + " |"


def told(outcome: Outcome) -> tuple[str, ...]:
    """Return the row of a phase: its slowest resource and its transfers."""
    return (
        hours(outcome.seconds),
        f"{outcome.bottleneck} {outcome.used[outcome.bottleneck]:.0%}",
        f"{outcome.used['cores']:.0%}",
        amount(outcome.read),
        amount(outcome.written + outcome.sent),
        amount(outcome.gets),
        amount(outcome.puts),
        amount(outcome.objects),
        amount(outcome.index),
    )


HEAD: Final = ("time", "bottleneck", "cores", "read", "written, sent", "GET", "PUT", "files", "index")


def stages(rates: Rates) -> Iterator[str]:
    """Yield the tables of all phases."""
    for positions, machines in SIZES:
        cluster = replace(SERVERS, machines=machines)
        layout = plan_shuffle(positions, cluster)
        slices, units = len(layout.slices), layout.units
        yield f"\n{positions:,} positions, {machines} x {cluster.cores} cores:"
        yield f"{slices:,} slices, {units:,} units, {slices * units:,} pieces\n"
        done = simulate(graph(positions, rates, cluster), cluster)
        yield from table(("phase", *HEAD), ((outcome.name, *told(outcome)) for outcome in done))
        yield f"sum {hours(sum(outcome.seconds for outcome in done))}\n"


def exchanges(rates: Rates) -> Iterator[str]:
    """Yield the largest shuffle with every exchange, on files and on objects."""
    many = replace(BUCKET, gets=BUCKET.gets * PREFIXES, puts=BUCKET.puts * PREFIXES)
    places = {"a file system": SERVERS, "one prefix": BUCKET, f"{PREFIXES} prefixes": many}
    for name, cluster in places.items():
        yield f"\n{BIG:,} positions, 100 machines, {name}\n"
        yield from table(("exchange", *HEAD), _exchanges(rates, cluster))


def _exchanges(rates: Rates, cluster: Cluster) -> Iterator[tuple[str, ...]]:
    cluster = replace(cluster, machines=100)
    layout = plan_shuffle(BIG, cluster)
    for exchange in (*EXCHANGES, "objects"):
        for outcome in simulate(list(shuffle(layout, rates, cluster, Design(exchange))), cluster):
            yield (f"{exchange}: {outcome.name}", *told(outcome))


def crossing(rates: Rates) -> Iterator[str]:
    """Yield the time of each exchange by size on an object store, without faults and with them."""
    for name, cluster in (("one prefix", BUCKET), ("one prefix, with faults", FAULTY)):
        yield f"\n{name}\n"
        rows = (_crossing_row(rates, cluster, positions) for positions in (10**9, 10**10, BIG))
        yield from table(("positions", "machines", "pieces", *EXCHANGES), rows)


def _crossing_row(rates: Rates, cluster: Cluster, positions: int) -> tuple[str, ...]:
    machines = max(8, positions // 10**9)
    cluster = replace(cluster, machines=machines)
    layout = plan_shuffle(positions, cluster)
    times = []
    for exchange in EXCHANGES:
        done = simulate(list(shuffle(layout, rates, cluster, Design(exchange))), cluster)
        times.append(hours(sum(outcome.seconds for outcome in done)))
    return f"{positions:,}", str(machines), amount(len(layout.slices) * layout.units), *times


def validate(rates: Rates, small: Path, large: Path, folder: Path) -> Iterator[str]:
    """Shuffle and export two stores with two workers, and simulate the same.

    The differences are compared, because both runs start the same interpreters, workers and samples, which
    the simulation does not contain.
    """
    stages = {"shuffle": ("scatter", "sort"), "export": ("export",)}
    real, simulated = [], []
    for number, source in enumerate((small, large)):
        store = shutil.copytree(source, folder / f"validated-{number}")
        for results in ("shuffled", "shards"):
            shutil.rmtree(store / results, ignore_errors=True)
        positions = Store.open(store).manifest.counts["positions"]
        outcomes = {o.name: o for o in simulate(graph(positions, rates, DESK), DESK)}
        for stage, phases in stages.items():
            option = "--threads" if stage == "shuffle" else "--workers"
            command = [sys.executable, "-m", "hexdata", stage, str(store), option, str(DESK.cores)]
            real.append(_spent([*command, "--memory", f"{DESK.memory}B"]))
            done = [outcomes[phase] for phase in phases]
            simulated.append((sum(o.seconds for o in done), sum(o.work for o in done)))
    for number, stage in enumerate(stages):
        seconds, work = (real[number + 2][i] - real[number][i] for i in (0, 1))
        expected, cores = (simulated[number + 2][i] - simulated[number][i] for i in (0, 1))
        yield f"{stage}: {seconds:.1f} s, simulated {expected:.1f} s: {expected / seconds:.2f} x"
        yield f"    of cores {work:.1f} s, simulated {cores:.1f} s: {cores / work:.2f} x"


def _spent(command: list[str]) -> tuple[float, float]:
    """Run a command; return its duration and the processor time of its cores, in seconds."""
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    seconds, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main(arguments: list[str]) -> None:
    if len(arguments) == 1:
        rates = Rates(**json.loads(Path(arguments[0]).read_text()))
    else:
        source, folder = map(Path, arguments)
        rates = measure(source, folder)
        (folder / "rates.json").write_text(json.dumps(asdict(rates), indent=2))
        for name, rate in asdict(rates).items():
            print(f"{name}: {rate:.3g}")
        print(*validate(rates, folder / f"converted-{GAMES // 3}", source, folder), sep="\n")
    print(*stages(rates), sep="\n")
    print(*exchanges(rates), sep="\n")
    print(*crossing(rates), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
