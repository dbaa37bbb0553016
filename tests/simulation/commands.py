"""The commands that run on a simulated disk, each with the files that exist before it.

All paths are relative to the folder in which the command runs. Every command uses one process.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hexdata.convert import ConvertOptions, convert_sources
from hexdata.demo import DemoOptions, make_legacy
from hexdata.demo.games import make_games
from hexdata.export import ExportOptions, PicklesOptions, export_pickles, export_shards
from hexdata.formats.trmph import write_trmph
from hexdata.pipeline import demo_config, run_config
from hexdata.retry import RetryPolicy
from hexdata.shuffle import ShuffleOptions, shuffle_store
from hexdata.verify import verify_store

SIZES: Final = {"small": (6, 2), "medium": (400, 8)}
"""Number of games and of source files."""
STORE: Final = Path("store")
_NOW: Final = RetryPolicy(first_wait=0)
_SPLITS: Final = ConvertOptions(workers=1, val=0.15, test=0.1)


def write_sources(folder: Path, size: str, seed: int) -> None:
    """Write files of generated games, and one record that is rejected."""
    games, files = SIZES[size]
    folder.mkdir()
    made = list(make_games(games, seed, 7))
    for number in range(files):
        write_trmph(folder / f"games-{seed}-{number:02d}.trmph", made[number::files], 7)


def _convert(_: str) -> None:
    convert_sources([Path("games")], STORE, _SPLITS)


def _append(_: str) -> None:
    convert_sources([Path("games"), Path("more")], STORE, _SPLITS)


def _legacy(_: str) -> None:
    convert_sources([Path("legacy")], STORE, _SPLITS)


def _shuffle(_: str) -> None:
    shuffle_store(STORE, ShuffleOptions(seed=1, threads=1, buckets=2), retry=_NOW)


def _reshuffle(_: str) -> None:
    shuffle_store(STORE, ShuffleOptions(seed=2, threads=1, buckets=3), retry=_NOW)


def _merge(_: str) -> None:
    shuffle_store(STORE, ShuffleOptions(seed=1, threads=1, buckets=2, merge="positions"), retry=_NOW)


def _export(size: str) -> None:
    block = {"small": 32, "medium": 1024}[size]
    export_shards(STORE, ExportOptions(workers=1, block_size=block, shard_size=2 * block))


def _reexport(size: str) -> None:
    block = {"small": 64, "medium": 2048}[size]
    export_shards(STORE, ExportOptions(workers=1, block_size=block, shard_size=2 * block))


def _free(size: str) -> None:
    block = {"small": 32, "medium": 1024}[size]
    export_shards(STORE, ExportOptions(workers=1, block_size=block, shard_size=2 * block, free_buckets=True))


def _pickles(_: str) -> None:
    export_pickles(STORE, PicklesOptions(order="original", workers=1))


def _pickles_shuffled(_: str) -> None:
    export_pickles(STORE, PicklesOptions(order="shuffled", workers=1))


def _verify(_: str) -> None:
    verify_store(STORE).require()


def _report(_: str) -> None:
    from hexdata.report import write_report

    write_report(STORE)


def _demo(size: str) -> None:
    make_legacy("demo", DemoOptions(games={"small": 8, "medium": 64}[size]))


def _run(size: str) -> None:
    games = {"small": 8, "medium": 64}[size]
    run_config(demo_config("run", DemoOptions(games=games), with_report=False))


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
    "merge": Command(_merge, ("convert",)),
    "export": Command(_export, ("convert", "shuffle")),
    "reexport": Command(_reexport, ("convert", "shuffle", "export")),
    "free": Command(_free, ("convert", "shuffle")),
    "pickles": Command(_pickles, ("convert",)),
    "pickles-shuffled": Command(_pickles_shuffled, ("convert", "shuffle")),
    "verify": Command(_verify, ("convert", "shuffle", "export")),
    "report": Command(_report, ("convert", "shuffle")),
    "demo": Command(_demo, (), ()),
    "run": Command(_run, (), ()),
}


def prepare(name: str, size: str, folder: Path) -> None:
    """Write the files that a command finds. The folder becomes the working directory."""
    folder.mkdir(parents=True)
    os.chdir(folder)
    command = COMMANDS[name]
    for source in command.inputs:
        if source == "legacy":
            make_legacy("legacy", DemoOptions(games={"small": 8, "medium": 64}[size]))
        else:
            write_sources(Path(source), size, {"games": 1, "more": 2}[source])
    for earlier in command.before:
        COMMANDS[earlier].run(size)
    Path("tmp").mkdir()
    shutil.rmtree(STORE / "logs", ignore_errors=True)
