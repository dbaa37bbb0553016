"""The commands that run on a simulated disk, each with the files that exist before it.

All paths are relative to the folder in which the command runs. A small command uses one process and one
thread, a medium one two processes, or two threads where it has no processes.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from hexdata import pipeline
from hexdata.convert import ConvertOptions, convert_sources
from hexdata.demo import DemoOptions, make_legacy
from hexdata.demo.games import make_games
from hexdata.export import ExportOptions, PicklesOptions, export_pickles, export_shards
from hexdata.formats.trmph import write_trmph
from hexdata.info import store_info
from hexdata.loader.trial import LoadOptions, run_loader_trial
from hexdata.pipeline import Config, ConvertSection, VerifySection, run_config
from hexdata.quality import measure_quality
from hexdata.retry import RetryPolicy
from hexdata.shuffle import ShuffleOptions, shuffle_store
from hexdata.sql import database
from hexdata.sql.database import write_database
from hexdata.verify import check_round_trip, verify_store
from hexdata.verify.store import _Verification

SIZES: Final = {"small": (6, 1), "medium": (60, 4)}
"""Number of games and of source files."""
LEGACY: Final = {"small": 2, "medium": 16}
"""Number of games in legacy files."""
BUCKETS: Final = {"small": 2, "medium": 4}
PROCESSES: Final = {"small": 1, "medium": 2}
STORE: Final = Path("store")
_NOW: Final = RetryPolicy(first_wait=0)


def write_sources(folder: Path, size: str, seed: int) -> None:
    """Write files of generated games, and one record that is rejected."""
    games, files = SIZES[size]
    folder.mkdir()
    made = list(make_games(games, seed, 7))
    for number in range(files):
        write_trmph(folder / f"games-{seed}-{number:02d}.trmph", made[number::files], 7)


def _splits(size: str) -> ConvertOptions:
    return ConvertOptions(workers=PROCESSES[size], val=0.15, test=0.1)


def _convert(size: str) -> None:
    convert_sources([Path("games")], STORE, _splits(size))


def _append(size: str) -> None:
    convert_sources([Path("games"), Path("more")], STORE, _splits(size))


def _legacy(size: str) -> None:
    convert_sources([Path("legacy")], STORE, _splits(size))


def _shuffled(size: str, **options: Any) -> ShuffleOptions:
    return ShuffleOptions(**{"seed": 1, "threads": PROCESSES[size], "buckets": BUCKETS[size], **options})


def _shuffle(size: str) -> None:
    shuffle_store(STORE, _shuffled(size), retry=_NOW)


def _reshuffle(size: str) -> None:
    shuffle_store(STORE, _shuffled(size, seed=2, buckets=BUCKETS[size] + 1), retry=_NOW)


def _shards(size: str, factor: int = 1, **options: Any) -> ExportOptions:
    block = factor * {"small": 32, "medium": 256}[size]
    return ExportOptions(workers=PROCESSES[size], block_size=block, shard_size=2 * block, **options)


def _export(size: str) -> None:
    export_shards(STORE, _shards(size))


def _reexport(size: str) -> None:
    export_shards(STORE, _shards(size, 2))


def _free(size: str) -> None:
    export_shards(STORE, _shards(size, free_buckets=True))


def _pickles(size: str) -> None:
    export_pickles(STORE, PicklesOptions(order="original", workers=PROCESSES[size]))


def _pickles_shuffled(size: str) -> None:
    export_pickles(STORE, PicklesOptions(order="shuffled", workers=PROCESSES[size]))


def _verify(_: str) -> None:
    verify_store(STORE).require()


def _report(_: str) -> None:
    from hexdata.report import write_report

    write_report(STORE)


def _sql(_: str) -> None:
    from hexdata.sql import run_query

    with run_query(STORE, "SELECT count(*), sum(positions), min(winner) FROM games", threads=1) as result:
        assert sum(batch.num_rows for batch in result.batches) == 1


def _show(_: str) -> None:
    from hexdata.show import read_game, read_position

    read_position(STORE, 3)
    read_game(STORE, 1)


def _load(_: str) -> None:
    for mode in ("games", "exact", "stream"):
        run_loader_trial(STORE, LoadOptions(batch_size=16, mode=mode))


def _info(_: str) -> None:
    store_info(STORE)
    measure_quality(STORE)
    assert all(source.ok for source in check_round_trip(STORE, "games"))


def _demo(size: str) -> None:
    make_legacy("demo", DemoOptions(games=LEGACY[size]))


def _run(size: str) -> None:
    splits = _splits(size)
    config = Config(
        store=str(STORE),
        convert=ConvertSection(inputs=["games"], workers=splits.workers, val=splits.val, test=splits.test),
        shuffle=_shuffled(size),
        export=_shards(size),
        pickles=PicklesOptions(order="original", workers=PROCESSES[size]),
        verify=VerifySection(),
        load=LoadOptions(batch_size=16),
    )
    run_config(config)


@contextmanager
def points_announced(announce: Callable[[str], None]) -> Iterator[None]:
    """Call a function with the name of each point of a run, when it is reached.

    The points are the beginning of each stage of ``run`` except the first, that of each check of ``verify``,
    and the end of a stage, where only files that are derived from the complete stage are not yet written.
    """

    def announced(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            announce(name)
            return function(*args)

        return call

    check_store = _Verification._check

    def check(verification: _Verification, name: str, function: Callable[[], str]) -> bool:
        announce(f"check of {name}")
        return check_store(verification, name, function)

    runners = {name: announced(name, function) for name, function in pipeline._RUNNERS.items()}
    del runners["convert"]
    with ExitStack() as stack:
        stack.enter_context(patch.dict(pipeline._RUNNERS, runners))
        stack.enter_context(patch.object(_Verification, "_check", check))
        for package in ("hexdata.convert", "hexdata.export.shards", "hexdata.shuffle"):
            end = announced(f"end of {package}", write_database)
            stack.enter_context(patch(f"{package}.write_database", end))
        yield


def forget_databases() -> None:
    """Let a fork create each ``hexdata.duckdb`` from scratch, as a new process does."""
    database._contents.clear()


@dataclass(frozen=True)
class Command:
    """A command, and the commands that make the files which it finds."""

    run: Callable[[str], Any]
    before: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ("games",)


COMMANDS: Final = {
    "convert": Command(_convert),
    "legacy": Command(_legacy, (), ("legacy",)),
    "append": Command(_append, ("convert",), ("games", "more")),
    "shuffle": Command(_shuffle, ("convert",)),
    "reshuffle": Command(_reshuffle, ("convert", "shuffle", "export")),
    "export": Command(_export, ("convert", "shuffle")),
    "reexport": Command(_reexport, ("convert", "shuffle", "export")),
    "free": Command(_free, ("convert", "shuffle")),
    "pickles": Command(_pickles, ("convert",)),
    "pickles-shuffled": Command(_pickles_shuffled, ("convert", "shuffle")),
    "verify": Command(_verify, ("convert", "shuffle", "export")),
    "report": Command(_report, ("convert", "shuffle")),
    "sql": Command(_sql, ("convert",)),
    "show": Command(_show, ("convert",)),
    "load": Command(_load, ("convert", "shuffle", "export")),
    "info": Command(_info, ("convert", "shuffle", "export")),
    "demo": Command(_demo, (), ()),
    "run": Command(_run),
}


def prepare(name: str, size: str) -> None:
    """Write the files that a command finds into the working directory."""
    command = COMMANDS[name]
    for source in command.inputs:
        if source == "legacy":
            make_legacy("legacy", DemoOptions(games=LEGACY[size]))
        else:
            write_sources(Path(source), size, {"games": 1, "more": 2}[source])
    for earlier in command.before:
        COMMANDS[earlier].run(size)
    shutil.rmtree("tmp", ignore_errors=True)
    Path("tmp").mkdir()
    shutil.rmtree(STORE / "logs", ignore_errors=True)
