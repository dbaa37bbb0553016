"""What every benchmark uses: games out of the demo as files and stores, a timed pair, a watched process.

Rates are compared with a rival's in the same run, turn about, so that a loaded machine slows both.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from hexdata.demo.games import make_games
from hexdata.formats import open_source
from hexdata.formats.legacy import write_legacy
from hexdata.formats.trmph import write_trmph
from tests.benchmarks.watched import Watched
from tests.benchmarks.watched import watch as watch_command

N = 13
POSITIONS = int(os.environ.get("HEXDATA_BENCH_POSITIONS", 2_000_000))
"""Of the store that is shuffled. A demo game has some 69."""
POSITIONS_PER_GAME = 68
GAMES_PER_FILE = 4_000
MEMORY = 1_000_000_000
ROUNDS = 3
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SHUFFLED = "shuffled-with-ids"
WITHIN_GAMES = "shuffled-within-games"
DIALECTS = {SHUFFLED: "dicts-player", WITHIN_GAMES: "dicts-player"}
"""Of the variants of legacy files that are not named after their dialect."""

Report = Callable[[str], None]
Versus = Callable[..., float]
Watch = Callable[..., "Watched"]
WriteGames = Callable[[Path, int], Path]
WriteVariant = Callable[[Path, str, Path], int]
RunScript = Callable[..., str]


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Report:
    """Return ``report(line)``: prints a figure, whatever pytest captures."""

    def show(line: str) -> None:
        with capsys.disabled():
            print(f"\n    {line}")

    return show


@pytest.fixture
def versus(benchmark: Any, report: Report) -> Versus:
    """Return ``versus(ours, rival, units, rounds=5)``: the median over the rounds of ours / rival, as rates.

    Before each timed call of ``ours`` the rival is called and timed, over ``rival_units`` where it does not
    do the same amount. Both rates, in units a second, and the ratio are printed and kept in the
    benchmark's ``extra_info``.
    """

    def compare(
        ours: Callable[[], object],
        rival: Callable[[], object],
        units: int,
        rounds: int = 5,
        rival_units: int | None = None,
    ) -> float:
        rival_units = rival_units or units
        rival_seconds: list[float] = []

        def run_rival() -> None:
            start = time.perf_counter()
            rival()
            rival_seconds.append(time.perf_counter() - start)

        benchmark.pedantic(ours, setup=run_rival, rounds=rounds)
        seconds = benchmark.stats.stats.data
        pairs = zip(rival_seconds, seconds, strict=True)
        ratio: float = median(theirs / rival_units / (own / units) for theirs, own in pairs)
        rates = {
            "ours": units / median(seconds),
            "rival": rival_units / median(rival_seconds),
            "ratio": ratio,
        }
        benchmark.extra_info.update(rates, units=units)
        report(
            f"{rates['ours']:,.0f} positions/s, the rival {rates['rival']:,.0f}: {ratio:.2f} x "
            f"(median of {rounds} pairs, {units:,} positions)"
        )
        return ratio

    return compare


@pytest.fixture(scope="session")
def watch() -> Watch:
    """Return ``watch(*arguments)``: runs Python with these, returns its time, memory and bytes written."""
    return _watch


def _watch(*arguments: str | Path) -> Watched:
    return watch_command([sys.executable, *map(str, arguments)], stdout=subprocess.DEVNULL, cwd=ROOT)


@pytest.fixture(scope="session")
def write_games() -> WriteGames:
    """Return ``write_games(folder, positions)``: writes TRMPH files of about so many, returns the folder."""
    return _write_games


def _write_games(folder: Path, positions: int) -> Path:
    folder.mkdir()
    games = -(-positions // POSITIONS_PER_GAME)
    for start in range(0, games, GAMES_PER_FILE):
        count = min(GAMES_PER_FILE, games - start)
        write_trmph(folder / f"games-{start:07d}.trmph", make_games(count, 1, N, start), N)
    return folder


@pytest.fixture(scope="session")
def memory() -> int:
    """The budget of every stage, all its processes together, in bytes."""
    return MEMORY


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of some ``POSITIONS`` positions, converted. Read only: copy it."""
    folder = tmp_path_factory.mktemp("store")
    games = _write_games(folder / "games", POSITIONS)
    _watch("-m", "hexdata", "convert", games, folder / "store", "--workers", "1")
    return folder / "store"


@pytest.fixture(scope="session")
def write_variant() -> WriteVariant:
    """Return ``write_variant(path, variant, games)``: writes the games of a folder as one legacy file.

    A variant is a dialect, whose positions are in game order, or ``SHUFFLED`` or ``WITHIN_GAMES``. The number
    of positions is returned.
    """
    return _write_variant


def _write_variant(path: Path, variant: str, games: Path) -> int:
    header: dict[str, object] = {"source_file": "games.trmph"}
    batches: Iterator[pa.RecordBatch] = _read_games(games)
    if variant == SHUFFLED:
        header = {"shuffling_stats": {"bucket_id": 0}}
    if variant in DIALECTS:
        table = pa.Table.from_batches(batches).combine_chunks()
        begins = table["position_in_game"].to_numpy() == 0
        groups = np.cumsum(begins) if variant == WITHIN_GAMES else np.zeros(len(table))
        order = np.lexsort((np.random.default_rng(1).random(len(table)), groups))
        batches = iter(table.take(order).to_batches())
    dialect = DIALECTS.get(variant, variant)
    with path.open("wb") as file:
        return write_legacy(file, batches, board_size=N, dialect=dialect, header=header, level=6)


def _read_games(games: Path) -> Iterator[pa.RecordBatch]:
    """Read raw games as the legacy tool saw them: an id each, a tier, and the file that they are from."""
    for file_idx, path in enumerate(sorted(games.iterdir())):
        with open_source(path) as reader:
            for batch in reader.batches():
                yield _as_processed(batch.positions, file_idx)


def _as_processed(batch: pa.RecordBatch, file_idx: int) -> pa.RecordBatch:
    tiers = pc.min_element_wise(pc.divide(batch["position_in_game"], pa.scalar(5, pa.uint16())), 3)
    columns = {
        "file_idx": pa.array(np.full(len(batch), file_idx, np.int32)),
        "value_sample_tier": tiers.cast(pa.uint8()),
        "metadata": pa.array(['{"source_file": "games.trmph"}'] * len(batch)),
    }
    for name, column in columns.items():
        batch = batch.set_column(batch.schema.get_field_index(name), name, column)
    return batch


@pytest.fixture(scope="session")
def run_script() -> RunScript:
    """Return ``run_script(path, *arguments)``: runs a Python script, returns what it prints."""
    return _run_script


def _run_script(*arguments: object) -> str:
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


class Contestant:
    """A loader in its own process, ready to run epochs."""

    def __init__(self, name: str, folder: Path) -> None:
        command = [sys.executable, str(HERE / "contestant.py"), name, str(folder)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.missing: str | None = None
        self.sums: dict[str, Any] = {}

    def make_ready(self) -> None:
        """Wait until the loader is ready, and store the checksums of its first epoch."""
        self.missing = self._answer().get("missing")
        if not self.missing:
            self.sums = self._do("check")

    @property
    def positions(self) -> int:
        """Return the number of positions of an epoch."""
        return int(self.sums["positions"])

    def run(self) -> None:
        """Deliver an epoch."""
        assert self._do("run") == {"positions": self.positions}

    def close(self) -> None:
        self._process.communicate()

    def _do(self, command: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the contestant died"
        answer: dict[str, Any] = json.loads(line)
        return answer


@pytest.fixture(scope="module")
def contest(folder: Path) -> Iterator[Any]:
    """Return ``contest(name)``: the loader of that name, started at the first call."""
    started: dict[str, Contestant] = {}

    def start(name: str) -> Contestant:
        if name not in started:
            started[name] = Contestant(name, folder)
            started[name].make_ready()
        if started[name].missing:
            pytest.skip(f"{started[name].missing} is not installed")
        return started[name]

    yield start
    for contestant in started.values():
        contestant.close()


@pytest.fixture
def race(contest, versus):
    """Return ``race(ours, rival)``: the ratio of the two rates, after checking what both deliver."""

    def run(ours: str, rival: str, rounds: int = ROUNDS) -> float:
        first, second = contest(ours), contest(rival)
        factor: float = versus(first.run, second.run, first.positions, rounds, second.positions)
        return factor

    return run


@pytest.fixture
def check_sums(folder: Path) -> Callable[..., None]:
    """Return ``check_sums(sums)``: compares the checksums of an epoch with those over ``records.npy``.

    ``shape`` and ``dtype`` are those of the boards, by default float32 (3, 13, 13).
    """

    def check(sums: dict[str, Any], shape: tuple[int, ...] = (3, N, N), dtype: str = "<f4") -> None:
        records = np.load(folder / "records.npy")[: sums["positions"]]
        assert sums["shapes"] == [[dtype, [*shape], "<f4", [N * N], "<f4"]]
        _check_records(sums, records)

    return check


def _check_records(sums: dict[str, Any], records: Any) -> None:
    """Check by checksums that an epoch contained exactly these positions.

    Args:
        sums: Checksums of an epoch.
        records: Packed positions, uint8 (n, 50): board 43, move 2, value 4, player to move 1.
    """
    bits = np.zeros(344)
    for start in range(0, len(records), 100_000):
        bits += np.unpackbits(records[start : start + 100_000, :43], axis=1).sum(axis=0, dtype=np.int64)
    moves = records[:, 43].astype(int) + 256 * records[:, 44].astype(int)
    values = np.ascontiguousarray(records[:, 45:49]).view("<f4")
    assert np.array_equal(np.ravel(sums["planes"][:2]), bits[:338])
    for plane in sums["planes"][2:]:
        assert np.array_equal(plane, np.full((N, N), records[:, 49].sum(dtype=int)))
    assert np.array_equal(sums["policy"], np.bincount(moves[moves < 65535], minlength=169))
    assert sums["value"] == pytest.approx(values.sum(dtype=np.float64), rel=1e-9)
