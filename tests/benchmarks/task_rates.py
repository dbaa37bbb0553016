"""Measures the time of one core for every kind of task, and the size of every kind of file. Asserts nothing.

An engine runs each task in this process, one after the other, so the measured tasks are those of the stages.
All times are processor time, because the simulation adds waiting for disks, and because processor time
changes less on a busy machine. Two sizes separate costs that grow with the store from those that do not.
"""

from __future__ import annotations

import pickle
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import pyarrow as pa
from task_graph import Rates

from hexdata.convert import ConvertOptions, convert_sources, duplicates
from hexdata.demo import DemoOptions, make_legacy
from hexdata.engine.protocol import Machines, function_name
from hexdata.export import ExportOptions, export_shards
from hexdata.order import sort_key
from hexdata.progress import Progress
from hexdata.shuffle import ShuffleOptions, shuffle_store
from hexdata.shuffle.prepare import prepare
from hexdata.shuffle.runs import MergedRunIndex, RunIndex, as_run, read_pieces, write_run
from hexdata.store import Store
from hexdata.store.ledger import Ledger
from hexdata.store.session import duckdb_session, read_parquet_sql

MEMORY: Final = 2_000_000_000
GAMES: Final = 3_000
"""Games that are converted; a third of them are converted before."""
FIRST_GAMES: Final = 100
"""Games that are converted first, without being measured, since the first conversion imports modules."""
FEW: Final = 64
MANY: Final = 2_048
"""Pieces into which rows are cut, to separate the cost of a piece from that of its rows."""
PIECED: Final = 1 << 18
"""Rows of these pieces."""
RUNS: Final = 2_000
"""Runs whose indexes are read and joined."""
SLICES: Final = 20_000
"""Entries of a ledger that is saved."""
SHARDS: Final = 1_000
"""Entries of a ledger of shards, which have more fields."""
ROUNDS: Final = 3


@dataclass(frozen=True)
class Timed:
    """A finished task: its arguments, its result and its duration."""

    name: str
    task: tuple[Any, ...]
    result: Any
    seconds: float
    packing: float
    """Return the seconds to pack and unpack its arguments, as an engine with processes does."""


class Inline:
    """An engine that runs every task in this process and records its duration."""

    machines = Machines(1, 1, separate=True)

    def __init__(self) -> None:
        self.timed: list[Timed] = []

    def monitored(self, progress: Progress) -> Progress:
        return progress

    def require(self, paths: Sequence[Path], folder: Path | None = None) -> None:
        """Check nothing."""

    def run(
        self,
        function: Callable[..., Any],
        tasks: Iterable[tuple[Any, ...]],
        *,
        workers: int,
        memory: int,
        copies: bool = False,
        cores: int = 1,
    ) -> Iterator[tuple[int, Any]]:
        for index, task in enumerate(tasks):
            begin = time.process_time()
            task = pickle.loads(pickle.dumps(task))
            packed = time.process_time()
            result = function(*task)
            done = time.process_time()
            self.timed.append(Timed(function_name(function), task, result, done - packed, packed - begin))
            yield index, result

    def run_light(
        self, function: Callable[..., Any], tasks: Iterable[tuple[Any, ...]], *, workers: int
    ) -> Iterator[tuple[int, Any]]:
        return self.run(function, tasks, workers=workers, memory=0)

    def seconds(self, name: str) -> float:
        """Return the tasks of a function."""
        return sum(timed.seconds for timed in self.timed if timed.name == name)

    @property
    def busy(self) -> float:
        """Return the seconds of all tasks, including packing."""
        return sum(timed.seconds + timed.packing for timed in self.timed)


def measure(source: Path, folder: Path) -> Rates:
    """Measure everything on a copy of a store and on generated legacy files, in about 60 s.

    Args:
        source: A converted store.
        folder: An empty folder for the copies.
    """
    figures = _convert(folder)
    store = Path(shutil.copytree(source, folder / "store"))
    figures |= _piece(store, folder)
    figures |= _shuffle(store)
    exported, entry = _export(store)
    figures |= exported
    figures["ledger"] = _ledger(folder / "slices.json", {"bytes": [25_000_000]}, SLICES)
    figures["shard_ledger"] = _ledger(folder / "shards.json", entry, SHARDS)
    return Rates(**figures)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


class _Weighing(Inline):
    """Records the size of each spool while it exists."""

    def __init__(self) -> None:
        super().__init__()
        self.spools = 0

    def run(
        self,
        function: Any,
        tasks: Any,
        *,
        workers: int,
        memory: int,
        copies: bool = False,
        cores: int = 1,
    ) -> Iterator[tuple[int, Any]]:
        for index, result in super().run(function, tasks, workers=workers, memory=memory):
            if function_name(function) == "read_source":
                self.spools += _size(self.timed[-1].task[1])
            yield index, result


def _convert(folder: Path) -> dict[str, float]:
    """Convert legacy pickles, with fewer games and with more. Tasks find duplicates, as among many games."""
    duplicates._MANY_GAMES = 0
    totals = []
    for games in (FIRST_GAMES, GAMES // 3, GAMES):
        source, store, engine = folder / f"legacy-{games}", folder / f"converted-{games}", _Weighing()
        make_legacy(source, DemoOptions(games=games))
        shutil.rmtree(source / "trmph")
        result = convert_sources(source, store, ConvertOptions(memory=MEMORY), engine=engine)
        spent = {
            "read": engine.seconds("read_source"),
            "publish": engine.seconds("publish_source"),
            "compare": sum(map(engine.seconds, ("write_runs", "find_first_games", "write_duplicates"))),
            "source_bytes": _size(source),
            "spool_bytes": engine.spools,
            "position_bytes": _size(store / "positions") + _size(store / "games"),
        }
        totals.append((result.positions, spent))
    _, (few, less), (many, more) = totals
    figures = {name: max(more[name] - less[name], 0.0) / (many - few) for name in more}
    figures["compare"] *= many / result.games
    return figures | {
        "digest": engine.seconds("digest_source") / more["source_bytes"],
        "dispatch": median(timed.packing for timed in engine.timed),
    }


def _shuffle(store: Path) -> dict[str, float]:
    engine = Inline()
    result = shuffle_store(store, ShuffleOptions(memory=MEMORY), engine=engine)
    return {
        "scatter": engine.seconds("scatter_slice") / result.positions,
        "sort": engine.seconds("sort_jobs") / result.positions,
        "bucket_bytes": result.bytes / result.positions,
    }


def _export(store: Path) -> tuple[dict[str, float], dict[str, Any]]:
    """Export shards; return the figures, including the ledger's entry of a shard."""
    engine = Inline()
    result = export_shards(store, ExportOptions(memory=MEMORY), engine=engine)
    entries = next(timed.result for timed in engine.timed if timed.name == "write_files")
    return {
        "export": engine.busy / result.positions,
        "shard_bytes": result.bytes / result.positions,
    }, asdict(entries[0])


def _timed(call: Callable[[], Any]) -> float:
    """Return the median duration of a call in seconds."""
    seconds = []
    for _ in range(ROUNDS):
        begin = time.process_time()
        call()
        seconds.append(time.process_time() - begin)
    return median(seconds)


def _piece(store: Path, folder: Path) -> dict[str, float]:
    """Cut the same rows into few pieces and into many, and return the figures."""
    opened = Store.open(store)
    prepared = prepare(opened, ShuffleOptions(memory=MEMORY), folder / "selection", None)
    n = opened.manifest.board_size
    assert n is not None
    with duckdb_session(memory=MEMORY // 2, threads=1) as con:
        rows = con.sql(prepared.placement.slice_sql(0, PIECED)).to_arrow_reader(1 << 14).read_all()
        games = read_parquet_sql(opened.files("games"))
        counted = f"SELECT split, sum(positions), count(duplicate_of) FROM {games} GROUP BY split"
        choose = _timed(lambda: con.sql(counted).fetchall())
    table, key = as_run(rows, n), sort_key(rows.column("position_id").to_numpy(), prepared.selection.key)
    few, many = (_cut(folder / f"run-{pieces}.arrow", table, key, pieces) for pieces in (FEW, MANY))
    more = many["pieces"] - few["pieces"]
    piece = (many["bytes"] - few["bytes"]) / more
    return {
        "piece_write": max(many["write"] - few["write"], 0.0) / more,
        "piece_read": max(many["read"] - few["read"], 0.0) / more,
        "piece_bytes": piece,
        "run_bytes": (few["bytes"] - few["pieces"] * piece) / PIECED,
        "open_run": few["open"] / RUNS,
        "index": max(many["open"] - few["open"], 0.0) / (RUNS * more),
        "recut": (few["write"] + few["read"]) / PIECED,
        "choose": choose / prepared.layout.positions,
    }


def _cut(path: Path, rows: pa.Table, key: Any, pieces: int) -> dict[str, float]:
    """Write rows as a run of ``units`` units and read it back unit by unit."""
    unit = (key >> np.uint64(64 - pieces.bit_length() + 1)).astype(np.uint16)
    write = _timed(lambda: write_run(path, rows, unit))
    listed = [piece for number in range(pieces) for piece in RunIndex.read([path]).pieces(number)]
    return {
        "pieces": len(listed),
        "write": write,
        "read": _timed(lambda: sum(len(batch) for batch in read_pieces(listed, rows.schema))),
        "bytes": path.stat().st_size,
        "open": _timed(lambda: _index(path, pieces)),
    }


def _index(path: Path, units: int) -> None:
    """Merge the indexes of many runs, and take the pieces of each unit."""
    with closing(MergedRunIndex([path] * RUNS)) as runs:
        for unit in range(units):
            runs.only(range(unit, unit + 1))


def _ledger(path: Path, facts: dict[str, Any], most: int) -> float:
    """Return the seconds per entry to fill a ledger with many entries and save it now and then."""

    def fill() -> None:
        path.unlink(missing_ok=True)
        ledger = Ledger(path, "stage", most)
        for entry in range(most):
            ledger.finish_buffered(f"entry {entry:06d}", facts)
        ledger.save()

    return _timed(fill) / most
