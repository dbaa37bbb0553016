"""The stages that write to a store: a command line of each with options that are not the defaults.

Commands run in a folder with inputs, each in a process of its own, which may be killed. Run as a script, this
module starts these processes: it has no threads, so that it can fork.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.pairs import FULL

ROOT = Path(__file__).parents[2]
STORE = "my store"
"""Name of the store in the folder in which the commands run."""
KILLED = -9

CONVERT = (
    "convert 'old games' 'more games/b.trmph' 'my store' --board-size 13 --salvage --val 0.2 --test 0.1 "
    "--max-reject-rate 0.9 --workers 1"
)
MORE = (
    "convert 'more games' searched 'my store' --val 0.2 --test 0.1 --max-reject-rate 0.5 "
    "--board-size 13 --workers 1"
)
"""It adds a column, so that all parts of positions are replaced."""
SHUFFLE = (
    "shuffle 'my store' --seed 77 --buckets 3 --dedup exact --threads 1 "
    """--where "winner <> 'none' OR move >= -1" --stratify-by 'total_positions % 2'"""
)
SHUFFLE_AGAIN = "shuffle 'my store' --seed -5 --buckets 2 --assign game --per-game 9 --threads 1"
EXPORT = "export 'my store' --shard-size 128 --block-size 32 --workers 1"
EXPORT_AGAIN = "export 'my store' --shard-size 96 --block-size 16 --workers 1"
ORIGINAL = "export 'my store' --format pickle --order original --level 1 --workers 1"
SHUFFLED = "export 'my store' --format pickle --level 2 --workers 1"
RUN = "run 'my run.toml'"

CONFIG = """
store = "my store"
[convert]
inputs = ["old games", "more games/b.trmph"]
val = 0.2
board_size = 13
max_reject_rate = 0.9
salvage = true
workers = 1
[shuffle]
seed = 9
buckets = 2
per_game = 7
threads = 1
[export]
shard_size = 100
block_size = 20
workers = 1
[pickles]
order = "original"
level = 3
workers = 1
"""


@dataclass(frozen=True)
class StageCase:
    """A command that writes to a store.

    Attributes:
        name: Name of the case.
        before: Commands that prepare the store.
        command: The command.
        replaces: Stages of which the store has a finished result that the command replaces.
    """

    name: str
    before: tuple[str, ...]
    command: str
    replaces: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name


STAGES = (
    StageCase("convert", (), CONVERT),
    StageCase("convert more", (CONVERT, SHUFFLE, EXPORT), MORE, ("convert",)),
    StageCase("shuffle", (CONVERT,), SHUFFLE),
    StageCase("shuffle again", (CONVERT, SHUFFLE, EXPORT), SHUFFLE_AGAIN, ("shuffle",)),
    StageCase("export", (CONVERT, SHUFFLE), EXPORT),
    StageCase("export and free", (CONVERT, SHUFFLE), f"{EXPORT_AGAIN} --free-buckets"),
    StageCase("export again", (CONVERT, SHUFFLE, EXPORT), EXPORT_AGAIN, ("export",)),
    StageCase("export of another shuffle", (CONVERT, SHUFFLE, EXPORT, SHUFFLE_AGAIN), EXPORT, ("export",)),
    StageCase("original pickles", (CONVERT,), ORIGINAL),
    StageCase("shuffled pickles", (CONVERT, SHUFFLE), SHUFFLED),
    StageCase(
        "shuffled pickles again",
        (CONVERT, SHUFFLE, SHUFFLED, SHUFFLE_AGAIN),
        SHUFFLED.replace("2", "3"),
        ("pickles-shuffled",),
    ),
    StageCase("run", (), RUN),
)
FOLDERS = {
    "convert": "positions",
    "shuffle": "shuffled",
    "export": "shards",
    "pickles-shuffled": "pickles/shuffled",
}
"""Folder of the files of a stage, for the stages in ``StageCase.replaces``."""


def make_inputs(folder: Path) -> None:
    """Write games, some of them damaged, of another board size or with a further column, and a config."""
    from hexdata.demo import DemoOptions, make_legacy
    from hexdata.formats.trmph import write_trmph
    from tests.demo_games import demo_games
    from tests.legacy_pickles import example, save_pickle

    make_legacy(folder / "old games", DemoOptions(games=8))
    pickle = max((folder / "old games").rglob("*.pkl.gz"), key=lambda path: path.stat().st_size)
    pickle.write_bytes(pickle.read_bytes()[:-200])
    (folder / "more games").mkdir()
    write_trmph(folder / "more games" / "a.trmph", demo_games(6, seed=1, board_size=13), 13)
    write_trmph(folder / "more games" / "b.trmph", demo_games(5, seed=2, board_size=13), 13)
    with (folder / "more games" / "b.trmph").open("a") as file:
        file.write("#13,a1zz b\n")
    write_trmph(folder / "more games" / "small.trmph", demo_games(2, seed=3, board_size=5), 5)
    searched = [example(1, ply, n=13, visits=7) for ply in range(4)]
    save_pickle(folder / "searched" / "a.pkl.gz", {"examples": searched})
    (folder / "my run.toml").write_text(CONFIG)


def files_of(store: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of a store by name, without logs and hidden files."""
    found = {}
    for path in sorted(store.rglob("*")):
        name = path.relative_to(store)
        if (
            path.is_file()
            and name.parts[0] != "logs"
            and not any(part.startswith(".") for part in name.parts)
        ):
            found[name.as_posix()] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def damaged_files(store: Path, folder: str) -> list[str]:
    """Return the files below a folder that differ from the manifest of the store; it must list some."""
    listed = json.loads((store / "manifest.json").read_text())["files"]
    names = [name for name in listed if name.startswith(f"{folder}/")]
    assert names, f"the manifest lists no files in {folder}"
    found = files_of(store)
    return [name for name in names if found.get(name) != listed[name]["sha256"]]


class Commands:
    """Runs command lines, each in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, folder: Path, line: str, moment: int | None = None) -> int:
        """Run a command line in a folder.

        Args:
            folder: The working directory.
            line: The command line as a user types it, with or without ``hexdata``.
            moment: Number of the change of the disk before which the process is killed; None for never.

        Returns:
            The exit status; ``KILLED`` if it was killed.
        """
        words = shlex.split(line)
        request = {
            "folder": str(folder),
            "words": words[1:] if words[0] == "hexdata" else words,
            "moment": moment,
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def steps(self, folder: Path) -> list[str]:
        """Return the command lines that ``hexdata info`` recommends for the store, in order."""
        assert self.run(folder, f"info {shlex.quote(STORE)} --json") == 0, (folder / "output").read_text()
        output = json.loads((folder / "output").read_text().splitlines()[-1])
        return [line for _, line in output["steps"]]


@contextmanager
def running_commands() -> Iterator[Commands]:
    """Start the process that forks a process for each command."""
    command = [sys.executable, "-m", "tests.kit.stages"]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield Commands(process)


def kill_before_change(moment: int) -> None:
    """Kill this process right before its ``moment``-th change, from 0."""
    moments = itertools.count()

    def killing(change: Callable[..., Any]) -> Callable[..., Any]:
        def killing_change(*args: Any, **kwargs: Any) -> Any:
            if next(moments) == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return change(*args, **kwargs)

        return killing_change

    Path.replace = killing(Path.replace)  # type: ignore[method-assign]
    Path.unlink = killing(Path.unlink)  # type: ignore[method-assign]
    shutil.rmtree = killing(shutil.rmtree)  # type: ignore[assignment]


def run_command(request: dict[str, Any]) -> None:
    """Run a command line in this process, which ends; its output is written to a file."""
    os.chdir(request["folder"])
    with Path("output").open("wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    if request["moment"] is not None:
        kill_before_change(request["moment"])
    from hexdata.cli import main

    sys.argv = ["hexdata", *request["words"]]
    status = 0
    try:
        main()
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:  # noqa: BLE001  # pytest must not see it in this process
        status = 99
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def main() -> None:
    """Answer each request on standard input with the exit status of its command."""
    # Imported once, not in each child.
    import hexdata.cli.load
    import hexdata.cli.render
    import hexdata.convert
    import hexdata.export
    import hexdata.info
    import hexdata.loader.trial
    import hexdata.pipeline
    import hexdata.progress_bar
    import hexdata.shuffle
    from tests.kit.command_line import hexdata_run

    hexdata.extras.hide_pandas()  # as ``hexdata`` does
    for command in ("convert", "shuffle", "export", "run", "info"):
        hexdata_run(command, "--help")  # creates the command
    warnings.simplefilter("ignore", DeprecationWarning)  # fork warns of threads of libraries
    if not FULL:  # as in ``tests/conftest.py``
        os.fsync = os.fstat
    for line in sys.stdin:
        child = os.fork()
        if not child:
            run_command(json.loads(line))
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
