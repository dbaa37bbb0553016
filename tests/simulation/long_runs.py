"""Long runs: an hour of ``live``, 200 epochs with worker processes, and 1,000 kills.

    python tests/simulation/long_runs.py live --minutes 60
    python tests/simulation/long_runs.py epochs --epochs 200
    python tests/simulation/long_runs.py kills --first 0 --count 1000
    python tests/simulation/long_runs.py kills --size medium --case 57

Each ends with status 1 if a promise is broken: memory or the number of file descriptors, threads or processes
grows; a game or a position is lost or repeated; or a command that was killed gives other bytes when it is run
again. ``kills.py`` contains the kills.
"""

from __future__ import annotations

import argparse
import gzip
import json
import pickle
import random
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import psutil

TESTS = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(TESTS.parent))

from hexdata.demo.games import make_games  # noqa: E402
from hexdata.formats.trmph import write_trmph  # noqa: E402

# --- what must not grow ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Usage:
    """What a process and its children use at one moment."""

    minutes: float
    memory: float
    """MB that belong to no file."""
    descriptors: int
    threads: int
    processes: int


def measure(process: psutil.Process, begin: float) -> Usage:
    """Return what a process and its children use now."""
    memory, descriptors, threads, processes = 0, 0, 0, 0
    for each in [process, *process.children(recursive=True)]:
        try:
            with each.oneshot():
                used = (_own_memory(each.pid), each.num_fds(), each.num_threads())
        except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            continue
        memory, descriptors, threads = memory + used[0], descriptors + used[1], threads + used[2]
        processes += 1
    return Usage((time.monotonic() - begin) / 60, memory / 1e6, descriptors, threads, processes)


def _own_memory(pid: int) -> int:
    """Return the bytes of a process that belong to no file, divided by the processes that share each page.

    Pages of files, such as libraries, are left out: other programs share them or not.
    """
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    sizes = {name: int(text.split()[0]) for name, _, text in (line.partition(":") for line in lines)}
    return 1024 * (sizes["Pss_Anon"] + sizes["Pss_Shmem"])


def find_growth(name: str, usages: Sequence[Usage], unit: str = "minutes") -> list[str]:
    """Print the growth in the second half of a run, and return what grows.

    Memory may grow by 2 % of its level per half, or by 1 MB if that is more. The slope is the median of the
    slopes between all pairs of samples, so single high values do not count. The highest numbers of the others
    in the last quarter may not exceed those of the quarter before by more than 1.
    """
    half = usages[len(usages) // 2 :]
    minutes = np.array([each.minutes for each in half])
    memory = np.array([each.memory for each in half])
    first, second = np.triu_indices(len(half), 1)
    slope = float(np.median((memory[second] - memory[first]) / (minutes[second] - minutes[first])))
    grown = slope * float(minutes[-1] - minutes[0])
    print(
        f"{name}: second half, {minutes[-1] - minutes[0]:.0f} {unit}: memory {np.median(memory):.1f} MB, "
        f"{memory.min():.1f} to {memory.max():.1f}, growth {grown:+.2f} MB"
    )
    wrong = []
    if grown > max(1.0, 0.02 * float(memory.mean())):
        wrong.append(f"{name}: memory grows by {grown:.1f} MB")
    for what in ("descriptors", "threads", "processes"):
        counts = np.array([getattr(each, what) for each in half])
        earlier, later = np.array_split(counts, 2)
        print(f"{name}: second half: {what} {counts.min()} to {counts.max()}, {counts.mean():.1f} on average")
        if later.max() > earlier.max() + 1:
            wrong.append(f"{name}: the number of {what} grows from {earlier.max()} to {later.max()}")
    return wrong


def print_row(*values: object) -> None:
    """Print one row of a table."""
    print("".join(f"{value:>14.1f}" if isinstance(value, float) else f"{value:>14}" for value in values))
    sys.stdout.flush()


def finish(wrong: list[str]) -> int:
    """Print the verdict, and return the status."""
    for each in wrong:
        print(f"FAILED: {each}")
    print("FAILED" if wrong else "all promises kept")
    return int(bool(wrong))


# --- live --------------------------------------------------------------------------------------------------

BOARD_SIZE: Final = 5
GAMES: Final = 5
"""Games in a file."""
KEPT: Final = 400
"""Files that exist at the same time; the writer removes older ones that were read."""
MARGIN: Final = 500
"""Games that files may be read out of order."""
BATCH: Final = 128
CONFIG: Final = f"""
seed = 1
val = 0
test = 0
pool_size = 500
reservoir = 2000
reuse = 4
batch_size = {BATCH}
"""


@dataclass
class Writer:
    """Writes games as self-play does, in all the ways that the loader promises to understand.

    Args:
        folder: Existing folder.
        seed: Seed of the games and of the ways.
    """

    folder: Path
    seed: int
    games: int = 0
    """Games in complete files."""
    files: int = 0
    ways: dict[str, int] = field(default_factory=dict)
    read: int = 0
    """Games that the slowest reader has read."""
    _next_game: int = 0
    _games_before: deque[int] = field(default_factory=deque)
    _paths: deque[Path] = field(default_factory=deque)
    _growing: tuple[IO[str], int] | None = None

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def write(self) -> None:
        """Write one file, or move one, and remove the oldest if there are too many."""
        way = self._random.choices(
            ("renamed", "compressed", "in place", "growing", "truncated", "moved"), (8, 4, 2, 2, 1, 3)
        )[0]
        self.ways[way] = self.ways.get(way, 0) + 1
        getattr(self, f"_write_{way.replace(' ', '_')}")()
        while len(self._paths) > len(self._games_before):
            self._games_before.append(self.games)
        while len(self._paths) > KEPT and self._games_before[0] < self.read - MARGIN:
            self._games_before.popleft()
            self._paths.popleft().unlink()

    def close(self) -> None:
        """Complete the growing file."""
        if self._growing:
            self._growing[0].close()
            self._growing = None

    def _new(self, suffix: str, count: int = GAMES) -> tuple[Path, str]:
        lines = [self._line() for _ in range(count)]
        path = self.folder / f"games-{self.files:07d}{suffix}"
        self.files += 1
        return path, "".join(lines)

    def _line(self) -> str:
        text = tempfile.SpooledTemporaryFile(mode="w+")  # noqa: SIM115 - in memory
        write_trmph(text, make_games(1, self.seed, BOARD_SIZE, self._next_game), BOARD_SIZE)
        self._next_game += 1
        text.seek(0)
        return text.read()

    def _publish(self, path: Path, content: bytes) -> None:
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_bytes(content)
        temporary.rename(path)
        self._paths.append(path)

    def _write_renamed(self) -> None:
        path, text = self._new(".trmph")
        self._publish(path, text.encode())
        self.games += GAMES

    def _write_compressed(self) -> None:
        path, text = self._new(".trmph.gz")
        self._publish(path, gzip.compress(text.encode()))
        self.games += GAMES

    def _write_in_place(self) -> None:
        path, text = self._new(".trmph")
        path.write_text(text)
        self._paths.append(path)
        self.games += GAMES

    def _write_growing(self) -> None:
        """Append a game to a file that grows in place, up to ten games."""
        if self._growing is None:
            path, text = self._new(".trmph", 1)
            file = path.open("w")
            self._paths.append(path)
            self._growing = file, 0
        else:
            text = self._line()
        file, count = self._growing
        file.write(text)
        file.flush()
        self.games += 1
        self._growing = file, count + 1
        if count == 9:
            self.close()

    def _write_truncated(self) -> None:
        """Write half of a compressed file, as a crash leaves it. None of its games can be used."""
        path, _ = self._new(".trmph.gz")
        self._publish(path, gzip.compress(b"#5,")[:12])

    def _write_moved(self) -> None:
        """Move one of the files, also one that still grows, into a subfolder or back."""
        at = self._random.randrange(max(1, len(self._paths) - 20)) if self._paths else None
        if at is None:
            return
        path = self._paths[at]
        other = self.folder / ("moved" if path.parent == self.folder else "") / path.name
        other.parent.mkdir(exist_ok=True)
        path.rename(other)
        self._paths[at] = other


def train_live(folder: Path, cycle: float) -> None:
    """Take batches, and continue with another loader from the state of the first every ``cycle`` seconds.

    Prints a line of JSON after each cycle. Ends when the standard input is closed.
    """
    from hexdata.live import LiveLoader

    warnings.simplefilter("ignore")  # that no batch was delivered for a while
    state = None
    ending = False
    while not ending:
        with LiveLoader(folder, config=folder.with_suffix(".toml"), timeout=5.0) as loader:
            if state is not None:
                loader.load_state_dict(pickle.loads(state))
            due = time.monotonic() + cycle
            while time.monotonic() < due and not ending:
                _take(loader)
                ending = bool(select.select([sys.stdin], [], [], 0)[0])
            if ending:
                _take_all(loader)
            found = loader.metrics()
            state = pickle.dumps(loader.state_dict())
        counts = {"state": len(state), "batches": loader.delivered, **_counts(found)}
        print(json.dumps(counts), flush=True)


def _take(loader: Any) -> None:
    """Take one batch and check it, or wait for five seconds."""
    from hexdata.errors import HexdataError

    try:
        batch = next(iter(loader))
    except HexdataError as error:
        if "no batch for" not in str(error):
            raise
        return
    assert batch["board"].shape == (BATCH, 2, BOARD_SIZE, BOARD_SIZE)
    assert ((batch["value"] == 0) | (batch["value"] == 1)).all()
    assert (batch["board"].sum(axis=1) <= 1).all()


def _take_all(loader: Any) -> None:
    """Take batches until no new game has entered for a minute.

    A growing file is read again after a delay of up to its age, and each new loader begins the delay again.
    """
    entered, since = -1, time.monotonic()
    while time.monotonic() < since + 60:
        _take(loader)
        now = loader.metrics()["ShufflingChunkPool"]["entered"]
        if now != entered:
            entered, since = now, time.monotonic()


def _counts(metrics: Any) -> dict[str, float]:
    found = {**metrics["FilePathProvider"], **metrics["ShufflingChunkPool"]}
    names = ("files", "again", "moved", "rewritten", "vanished", "entered", "missing")
    return {name: found.get(name, 0) for name in names}


def run_live(options: argparse.Namespace) -> int:
    """Run the command and a trainer beside a writer, and print what both use over time."""
    begin = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="hexdata-live-", dir=options.folder))
    writer = Writer(folder, options.seed)
    writer.write()
    folder.with_suffix(".toml").write_text(CONFIG)
    command = [sys.executable, "-m", "hexdata", "live", str(folder), "--json"]
    command += ["--config", str(folder.with_suffix(".toml"))]
    last: dict[str, Any] = {}
    with (
        folder.with_suffix(".errors").open("w") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as live,
        subprocess.Popen(
            [sys.executable, __file__, "train", str(folder), "--cycle", str(options.cycle)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as trainer,
    ):
        threads = [
            threading.Thread(target=_read_lines, args=(process.stdout, name, last))
            for name, process in (("hexdata live", live), ("LiveLoader", trainer))
        ]
        for thread in threads:
            thread.start()
        usages = _watch(options, begin, writer, {"hexdata live": live, "LiveLoader": trainer}, last)
        writer.close()
        assert trainer.stdin is not None
        trainer.stdin.close()
        trainer.wait()
        live.terminate()  # a shell that starts this script in the background makes it ignore Ctrl-C
        live.wait()
        for thread in threads:
            thread.join()
    wrong = [each for name, found in usages.items() for each in find_growth(name, found)]
    print(f"written: {writer.files:,} files, {writer.games:,} games, {writer.ways}")
    live_metrics = {stage["name"]: stage["counts"] for stage in last["hexdata live"]["stages"]}
    counts = {
        "LiveLoader": last["LiveLoader"],
        "hexdata live": {"batches": last["hexdata live"]["batches"], **_counts(live_metrics)},
    }
    for name, found in counts.items():
        print(f"{name}: {found}")
        if found["entered"] != writer.games:
            wrong.append(f"{name}: {found['entered']:,.0f} games entered, {writer.games:,} were written")
    return finish(wrong)


def _entered(latest: dict[str, Any] | None) -> int:
    """Return the games that had entered the pool at the last line of a process; 0 before the first."""
    if latest is None:
        return 0
    if "entered" in latest:
        return int(latest["entered"])
    pool = next(stage for stage in latest["stages"] if stage["name"] == "ShufflingChunkPool")
    return int(pool["counts"]["entered"])


def _read_lines(stream: IO[str], name: str, last: dict[str, Any]) -> None:
    for line in stream:
        last[name] = json.loads(line)


def _watch(
    options: argparse.Namespace,
    begin: float,
    writer: Writer,
    processes: dict[str, subprocess.Popen[str]],
    last: dict[str, Any],
) -> dict[str, list[Usage]]:
    """Write files for the given minutes, and return what the processes used every few seconds."""
    watched = {name: psutil.Process(process.pid) for name, process in processes.items()}
    usages: dict[str, list[Usage]] = {name: [] for name in processes}
    print_row("", "", *(text for name in processes for text in (name, "", "", "")))
    print_row(
        "minute", "games", *(what for _ in processes for what in ("entered", "MB", "descriptors", "threads"))
    )
    due_sample, due_row = begin + 5.0, begin + 5.0
    while (now := time.monotonic()) < begin + 60 * options.minutes:
        writer.read = _entered(last.get("LiveLoader"))
        writer.write()
        if now >= due_sample:
            due_sample += options.minutes / 6  # 360 samples
            for name, process in watched.items():
                usages[name].append(measure(process, begin))
            if now >= due_row:
                due_row += 60 * options.minutes / 30
                row: list[object] = [usages["LiveLoader"][-1].minutes, writer.games]
                for name, found in usages.items():
                    row += [
                        _entered(last.get(name)),
                        found[-1].memory,
                        found[-1].descriptors,
                        found[-1].threads,
                    ]
                print_row(*row)
        for name, process in processes.items():
            if process.poll() is not None:
                for other in processes.values():
                    other.kill()
                raise SystemExit(f"{name} ended with status {process.returncode}")
        time.sleep(1 / options.rate)
    return usages


# --- epochs ------------------------------------------------------------------------------------------------

LOADERS: Final = {
    "exact, workers are kept": ({"mode": "exact"}, True),
    "exact, new workers for each epoch": ({"mode": "exact"}, False),
    "games, new workers for each epoch": ({"mode": "games"}, False),
    "stream, workers are kept": ({"mode": "stream", "streams": (2, 2), "window": 64}, True),
}
"""Options of each loader, and whether its workers are kept."""


def run_epochs(options: argparse.Namespace) -> int:
    """Run epochs with DataLoader workers, and compare each with a loader without workers."""
    from hexdata.demo import DemoOptions
    from hexdata.pipeline import demo_config, run_config

    warnings.simplefilter("ignore")  # of PyTorch, about processes that fork with threads
    folder = Path(tempfile.mkdtemp(prefix="hexdata-epochs-", dir=options.folder))
    try:
        config = demo_config(folder / "demo", DemoOptions(games=options.games), with_report=False)
        run_config(config)
        wrong: list[str] = []
        for name in LOADERS:
            wrong += _run_loader(name, folder / "demo" / "store", options)
    finally:
        shutil.rmtree(folder)
    return finish(wrong)


def _run_loader(name: str, store: Path, options: argparse.Namespace) -> list[str]:
    from hexdata.loader import Loader
    from hexdata.torch import TorchLoader

    chosen, persistent = LOADERS[name]
    given: dict[str, Any] = {
        "batch_size": 64,
        "seed": 5,
        "fields": ("board", "value", "position_id"),
        **chosen,
    }
    plain = Loader(store, **given)
    loader = TorchLoader(Loader(store, **given), num_workers=2, persistent_workers=persistent)
    draw = random.Random(name)
    usages, wrong, process, begin = [], [], psutil.Process(), time.monotonic()
    expected_ids = None
    for epoch in range(options.epochs):
        ids = []
        stop = draw.randrange(1, len(loader)) if epoch % 10 == 9 else None  # leave the loop, and continue
        for step, batch in enumerate(loader, 1):
            ids += batch["position_id"].tolist()
            if step == stop:
                break
        if stop is not None:
            ids += [number for batch in loader for number in batch["position_id"].tolist()]
        plain.set_epoch(epoch)
        if ids != [number for batch in plain for number in batch["position_id"].tolist()]:
            wrong.append(f"{name}: epoch {epoch} differs from that of a loader without workers")
        expected_ids = expected_ids or sorted(ids)
        if sorted(ids) != expected_ids or len(set(ids)) != len(ids) or loader.epoch != epoch + 1:
            wrong.append(f"{name}: epoch {epoch} does not deliver each position once")
        usages.append(replace(measure(process, begin), minutes=float(epoch)))
    step = max(1, options.epochs // 10)
    print(f"{name}: {options.epochs} epochs of {len(expected_ids or [])} positions")
    print_row("epoch", "MB", "descriptors", "threads", "processes")
    for each in usages[step - 1 :: step]:
        print_row(each.minutes, each.memory, each.descriptors, each.threads, each.processes)
    return wrong + find_growth(name, usages, "epochs")


# --- kills -------------------------------------------------------------------------------------------------


def run_kill_cases(options: argparse.Namespace) -> int:
    """Run the kills of a range of seeds, or one, and print what they struck."""
    from tests.simulation.kills import Kill, print_shares, run_kills

    wrong: list[str] = []

    def report(case: Kill, text: str) -> None:
        print(f"FAILED {case}\n    " + text.replace("\n", "\n    "), flush=True)
        wrong.append(f"kills --size {options.size} --case {case.seed}")

    begin = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="hexdata-kills-", dir=options.folder))
    seeds = range(options.first, options.first + options.count) if options.case is None else [options.case]
    try:
        kills = run_kills(folder, options.size, seeds, report)
    finally:
        shutil.rmtree(folder)
    print_shares(kills.struck)
    print(f"{dict(sorted(kills.counts.items()))}; {time.monotonic() - begin:.0f} s")
    return finish(wrong)


# --- command line ------------------------------------------------------------------------------------------


def main() -> int:
    """Run the part that the command line selects."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parts = parser.add_subparsers(required=True)
    live = parts.add_parser("live", help="an hour of live beside a writer")
    live.add_argument("--minutes", type=float, default=60)
    live.add_argument("--rate", type=float, default=4.0, help="files per second")
    live.add_argument("--cycle", type=float, default=60, help="seconds between saved states")
    live.add_argument("--seed", type=int, default=1)
    live.add_argument(
        "--folder", type=Path, help="where to make the directory; default: the temporary folder"
    )
    live.set_defaults(run=run_live)
    train = parts.add_parser("train", help="the trainer of live, used by live")
    train.add_argument("directory", type=Path)
    train.add_argument("--cycle", type=float, required=True)
    train.set_defaults(run=lambda options: train_live(options.directory, options.cycle))
    epochs = parts.add_parser("epochs", help="200 epochs with worker processes")
    epochs.add_argument("--epochs", type=int, default=200)
    epochs.add_argument("--games", type=int, default=8)
    epochs.add_argument("--folder", type=Path, help="where to make the store; default: the temporary folder")
    epochs.set_defaults(run=run_epochs)
    kills = parts.add_parser("kills", help="1,000 kills")
    kills.add_argument("--first", type=int, default=0, help="first seed")
    kills.add_argument("--count", type=int, default=1000)
    kills.add_argument("--case", type=int, help="one seed only")
    kills.add_argument("--size", choices=["small", "medium"], default="small", help="of the commands")
    kills.add_argument("--folder", type=Path, help="where to make the files; default: the temporary folder")
    kills.set_defaults(run=run_kill_cases)
    options = parser.parse_args()
    return int(options.run(options) or 0)


if __name__ == "__main__":
    sys.exit(main())
