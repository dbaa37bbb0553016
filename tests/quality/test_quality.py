"""Quality figures: agreement with NumPy, acceptance of uniform orders, rejection of others."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hexdata.errors import StoreError
from hexdata.quality import DEVIATIONS, Quality, measure_quality
from hexdata.quality.assess import assess_split
from hexdata.quality.measure import Sampling, measure_split
from hexdata.shuffle import ShuffleOptions, shuffle_store
from hexdata.store import Store
from hexdata.store.session import duckdb_session
from tests.pairs import FULL, every_pair

if TYPE_CHECKING:
    from tests.conftest import CopyStore, WriteOddStore
    from tests.quality.conftest import Arrange

BATCHES = (256, 1024, 4096)
LAGS = range(1, 101)
VALUE_LAGS = (1, 2, 5, 10, 20, 50, 100)


class Plain:
    """Reference implementation of the figures over arrays in order."""

    def __init__(self, games, values, ids, bounds):
        unknown = games < 0
        self.games = np.where(unknown, -1 - ids, games)
        self.values = values.astype(float)
        self.ids = ids
        self.buckets = [self.games[a:b] for a, b in pairwise(bounds) if a < b]
        self.means = [self.values[a:b].mean() for a, b in pairwise(bounds) if a < b]

    def batch(self, size):
        """Return the mean number of same-game pairs per batch; partial batches count by their pairs."""
        pieces = [self.games[i : i + size].tolist() for i in range(0, len(self.games), size)]
        found = sum(math.comb(n, 2) for piece in pieces for n in Counter(piece).values())
        return found / sum(math.comb(len(p), 2) for p in pieces) * math.comb(min(size, len(self.games)), 2)

    def neighbours(self, lag):
        return float((self.games[lag:] == self.games[:-lag]).mean())

    def products(self, lag):
        v = self.values - self.values.mean()
        return float((v[lag:] * v[:-lag]).mean() / v.var())

    def rank(self):
        return float(np.corrcoef(np.arange(len(self.ids)), np.argsort(np.argsort(self.ids)))[0, 1])

    def largest_share(self):
        return max(max(Counter(b.tolist()).values()) / len(b) for b in self.buckets)

    def games_in_bucket(self):
        return float(np.mean([len(set(b.tolist())) for b in self.buckets]))


def read(paths: list[Path]) -> pa.Table:
    return pa.concat_tables([pq.read_table(p, columns=["position_id", "game_id", "value"]) for p in paths])


def plain_of(store: Path) -> tuple[Plain, Plain]:
    """Return the reference figures of the training split in the input order and in the shuffled order."""
    opened = Store.open(store)
    files = opened.files("shuffled/train")
    table = read(files)
    columns = [
        table["game_id"].fill_null(-1).to_numpy(),
        table["value"].to_numpy(),
        table["position_id"].to_numpy(),
    ]
    bounds = np.cumsum([0, *(pq.read_metadata(path).num_rows for path in files)]).tolist()
    order = np.argsort(columns[2])
    positions, count = opened.manifest.counts["positions"], len(files)
    piece = columns[2][order] * count // positions
    before = [column[order] for column in columns]
    return Plain(*before, np.searchsorted(piece, range(count + 1)).tolist()), Plain(*columns, bounds)


def check_figures(found: Quality, before: Plain, after: Plain) -> None:
    """Compare every figure with the reference implementation."""
    close = {"rel": 1e-9, "abs": 1e-12}
    for size in BATCHES:
        figure = found[f"batch-{size}"]
        assert figure.before == pytest.approx(before.batch(size), **close)
        assert figure.after == pytest.approx(after.batch(size), **close)
    assert found["neighbours-1"].before == pytest.approx(before.neighbours(1), **close)
    assert found["neighbours-1"].after == pytest.approx(after.neighbours(1), **close)
    assert found["value-1"].before == pytest.approx(before.products(1), **close)
    assert found["value-1"].after == pytest.approx(after.products(1), **close)
    for name, lags, plain in (
        ("neighbours-worst", LAGS, after.neighbours),
        ("value-worst", VALUE_LAGS, after.products),
    ):
        worst = found[name]
        lag = int(worst.title.rpartition(" ")[2])
        assert lag in lags
        assert worst.after == pytest.approx(plain(lag), **close)
        off = {lag: abs(plain(lag) - worst.expected) for lag in lags}
        assert off[lag] >= 0.9 * max(off.values())  # the s.d. of far lags is a little greater
    assert (found["rank"].before, found["rank"].after) == (1.0, pytest.approx(after.rank(), **close))
    assert found["largest-share"].before == pytest.approx(before.largest_share())
    assert found["largest-share"].after == pytest.approx(after.largest_share())
    assert found["games-in-bucket"].before == pytest.approx(before.games_in_bucket())
    assert found["games-in-bucket"].after == pytest.approx(after.games_in_bucket())
    assert min(abs(found["bucket-mean"].after - mean) for mean in after.means) < 1e-9
    assert found["bucket-mean"].expected == pytest.approx(after.values.mean())
    check_lags(found, before, after, close)
    check_buckets(found, after)


def check_lags(found: Quality, before: Plain, after: Plain, close: dict[str, float]) -> None:
    """All lags are reported, not only the first and the worst."""
    names = [f"neighbours-{lag}" for lag in LAGS] + [f"value-{lag}" for lag in VALUE_LAGS]
    assert [figure.name for figure in found.lags] == names
    for lag in (2, 50, 99):
        figure = found[f"neighbours-{lag}"]
        assert (figure.before, figure.after) == (
            pytest.approx(before.neighbours(lag), **close),
            pytest.approx(after.neighbours(lag), **close),
        )
    assert found["value-20"].after == pytest.approx(after.products(20), **close)


def check_buckets(found: Quality, after: Plain) -> None:
    """Each bucket is reported with the standard deviation of its mean, for draws without replacement."""
    n, variance = len(after.values), after.values.var(ddof=1)
    assert [bucket.rows for bucket in found.by_bucket] == [len(b) for b in after.buckets]
    for bucket, games, mean in zip(found.by_bucket, after.buckets, after.means, strict=True):
        counts = Counter(games.tolist())
        assert bucket.games == len(counts)
        assert bucket.largest_share == pytest.approx(max(counts.values()) / len(games))
        assert bucket.value_mean == pytest.approx(mean)
        if len(after.buckets) > 1:
            band = math.sqrt(variance / len(games) * (1 - len(games) / n))
            assert bucket.value_deviation == pytest.approx(band)
            assert bucket.z == pytest.approx((mean - after.values.mean()) / band, abs=1e-6)
        else:
            assert (bucket.value_deviation, bucket.z) == (None, None)


@pytest.mark.parametrize("buckets", [1, 3, 200 if FULL else 60])
@pytest.mark.parametrize("name", ["odd_store", "trmph_store"])
def test_figures_are_those_of_numpy(
    request: pytest.FixtureRequest, copy_store: CopyStore, name: str, buckets: int
) -> None:
    store = copy_store(request.getfixturevalue(name))
    shuffle_store(store, ShuffleOptions(seed=5, buckets=buckets))
    found = measure_quality(store)
    assert found is not None
    check_figures(found, *plain_of(store))
    assert found.ok
    assert found["neighbours-1"].before > 0.5 > 10 * found["neighbours-1"].expected
    json.dumps(asdict(found), allow_nan=False)


# --- orders with known quality ------------------------------------------------------------------------------


def self_play(count: int, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Return the games and values of the input order: games of 20 to 40 rows with either winner."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(20, 41, count)
    return np.repeat(np.arange(count), sizes), np.repeat(rng.integers(0, 2, count), sizes).astype(float)


GAMES, VALUES = self_play(400)
N = len(GAMES)
BOUNDS = np.linspace(0, N, 5).astype(int).tolist()


def whole_games(rng: np.random.Generator) -> np.ndarray:
    games = rng.permutation(GAMES.max() + 1)
    return np.concatenate([np.flatnonzero(game == GAMES) for game in games])


def in_window(rng: np.random.Generator, window: int) -> np.ndarray:
    """Shuffle through a buffer: each row moves by at most about ``window`` rows."""
    return np.argsort(np.arange(N) + rng.uniform(0, window, N))


def in_blocks(rng: np.random.Generator, block: int) -> np.ndarray:
    starts = rng.permutation(range(0, N, block))
    return np.concatenate([np.arange(start, min(start + block, N)) for start in starts])


def interleaved(rng: np.random.Generator) -> np.ndarray:
    """Interleave the rows, like a reader of many files in turn."""
    return np.argsort(np.arange(N) % 97, kind="stable")


NO_SHUFFLES: dict[str, Callable[[np.random.Generator], np.ndarray]] = {
    "the input order": lambda rng: np.arange(N),
    "the input order backwards": lambda rng: np.arange(N)[::-1],
    "whole games shuffled": whole_games,
    "a window": lambda rng: in_window(rng, 1_000),
    "a wide window": lambda rng: in_window(rng, N // 2),
    "blocks": lambda rng: in_blocks(rng, 64),
    "pairs": lambda rng: in_blocks(rng, 2),
    "dealt out": interleaved,
}


@pytest.mark.parametrize("name", NO_SHUFFLES)
def test_bad_orders_fail(arrange: Arrange, name: str) -> None:
    order = NO_SHUFFLES[name](np.random.default_rng(3))
    found = measure_quality(arrange(GAMES, VALUES, order, BOUNDS))
    assert found is not None
    assert not found.ok


def test_buckets_with_different_mean_values_fail(arrange: Arrange) -> None:
    """A uniform order within each bucket, but buckets contain too many rows of one value."""
    rng = np.random.default_rng(4)
    drawn = np.argsort(rng.random(N) + 0.15 * VALUES)
    order = np.concatenate([rng.permutation(part) for part in np.split(drawn, BOUNDS[1:-1])])
    found = measure_quality(arrange(GAMES, VALUES, order, BOUNDS))
    assert found is not None
    assert not found["bucket-mean"].ok
    assert found["neighbours-1"].ok


def test_a_game_too_large_for_its_bucket_fails(arrange: Arrange) -> None:
    """Fifty rows of one game in one of ten buckets of a long order."""
    rng = np.random.default_rng(5)
    order = rng.permutation(N)
    game = np.flatnonzero(np.isin(GAMES[order], [7, 8]))
    order = np.concatenate([order[game], np.delete(order, game)])
    bounds = np.linspace(0, N, 41).astype(int).tolist()
    order[: bounds[1]] = rng.permutation(order[: bounds[1]])
    found = measure_quality(arrange(GAMES, VALUES, order, bounds))
    assert found is not None
    assert found["largest-share"].after > 0.05
    assert not found["largest-share"].ok


@pytest.mark.parametrize("swapped", [0, 40])
def test_the_largest_share_is_judged_in_every_split(arrange: Arrange, swapped: int) -> None:
    """Forty of the fifty rows of one game in one of two buckets of val, and none."""
    rng = np.random.default_rng(6)
    order = rng.permutation(N)
    game = np.flatnonzero(np.isin(GAMES[order], [7, 8]))[:swapped]
    val = np.concatenate([order[game], np.delete(order, game)])
    parts = [val[:1_000], val[1_000:]]
    found = measure_quality(arrange(GAMES, VALUES, rng.permutation(N), BOUNDS, val=parts))
    assert found is not None
    largest = max(max(Counter(GAMES[rows].tolist()).values()) / len(rows) for rows in parts)
    assert found["largest-share-val"].after == pytest.approx(largest)
    assert found["largest-share-val"].ok is not bool(swapped)
    assert found["largest-share"].ok


def test_uniform_shuffles_pass_with_the_expected_deviation(arrange: Arrange) -> None:
    """Over 16 shuffles, z of each figure has a standard deviation near 1; test_theory is stricter."""
    found: dict[str, list[float]] = {}
    for seed in range(16):
        quality = measure_quality(arrange(GAMES, VALUES, np.random.default_rng(seed).permutation(N), BOUNDS))
        assert quality is not None
        assert [figure for figure in quality.figures if not figure.ok] == []
        assert [figure.name for figure in quality.figures if not figure.judged] == ["games-in-bucket"]
        for figure in quality.figures:
            if figure.z is not None and not figure.name.endswith(("-worst", "-mean")):
                found.setdefault(figure.name, []).append(figure.z)
    assert set(found) == {"batch-256", "batch-1024", "batch-4096", "neighbours-1", "value-1", "rank"}
    for zs in found.values():
        assert len(zs) == 16
        assert max(map(abs, zs)) < DEVIATIONS
        assert abs(np.mean(zs)) < 4 / math.sqrt(16)
        assert 0.5 < np.std(zs) < 1.6


# --- samples of large stores --------------------------------------------------------------------------

SMALL = Sampling(stretch=4096, after=8192, before=4096)


def sampled(store: Path, by_bucket: bool = False) -> Quality:
    with duckdb_session(memory=200 << 20, threads=2) as con:
        measured = measure_split(Store.open(store), con, by_bucket=by_bucket, sampling=SMALL)
    return assess_split(measured, {})


def test_a_sample_is_whole_stretches_of_the_order(arrange: Arrange) -> None:
    games, values = self_play(1_200, seed=2)
    order = np.random.default_rng(6).permutation(len(games))
    found = sampled(arrange(games, values, order, [0, 9_000, len(games)]))
    assert (found.positions, found.sampled, found.sampled_before) == (len(games), 8192, 4096)
    stretches = [games[order[i : i + 4096]] for i in range(0, len(games) - 4095, 4096)]
    pairs = {
        sum(math.comb(n, 2) for s in (one, other) for n in Counter(s.tolist()).values())
        for i, one in enumerate(stretches)
        for other in stretches[:i]
    }
    assert round(found["batch-4096"].after * 2) in pairs
    assert found.ok
    whole = measure_quality(arrange(games, values, order, [0, 9_000, len(games)]))
    assert whole is not None
    assert found["batch-1024"].expected == pytest.approx(whole["batch-1024"].expected)
    assert found["batch-1024"].deviation > 1.5 * whole["batch-1024"].deviation
    assert found["bucket-mean"] == whole["bucket-mean"]


@pytest.mark.parametrize("name", ["the input order", "whole games shuffled", "blocks", "a window"])
def test_a_sample_detects_bad_orders(arrange: Arrange, name: str) -> None:
    order = NO_SHUFFLES[name](np.random.default_rng(3))
    assert not sampled(arrange(GAMES, VALUES, order, BOUNDS)).ok


def test_samples_of_uniform_shuffles_pass_with_the_expected_deviation(arrange: Arrange) -> None:
    found = []
    for seed in range(10):
        quality = sampled(
            arrange(GAMES, VALUES, np.random.default_rng(seed).permutation(N), BOUNDS), seed % 2 > 0
        )
        assert quality.ok
        found.append([quality[name].z for name in ("batch-256", "batch-4096", "value-1", "rank")])
    assert np.all((np.std(found, axis=0) > 0.4) & (np.std(found, axis=0) < 1.8))


# --- selection options --------------------------------------------------------------------------------


def by_game(rng: np.random.Generator, shuffled: bool) -> tuple[np.ndarray, list[int]]:
    """Assign whole games to four buckets; shuffle each bucket or keep it in input order."""
    bucket = rng.integers(0, 4, GAMES.max() + 1)[GAMES]
    order = np.lexsort((rng.random(N) if shuffled else np.arange(N), bucket))
    return order, [0, *np.cumsum(np.bincount(bucket)).tolist()]


def test_assign_game_exempts_figures_about_buckets(arrange: Arrange) -> None:
    zs = []
    for seed in range(6):
        order, bounds = by_game(np.random.default_rng(seed), shuffled=True)
        found = measure_quality(arrange(GAMES, VALUES, order, bounds, {"assign": "game"}))
        assert found is not None
        assert found.ok
        assert found.reference == "each bucket in uniform order"
        shown = {figure.name for figure in found.figures if not figure.judged}
        assert shown == {"largest-share", "games-in-bucket", "bucket-mean"}, "exempt, and not judged"
        plain = measure_quality(arrange(GAMES, VALUES, order, bounds))
        assert plain is not None
        assert not plain.ok, "without the option it is a bad shuffle"
        ratio = found["batch-256"].after / plain["batch-256"].expected
        assert ratio == pytest.approx(4, rel=0.2)
        note = found["batch-256"].note
        assert note.startswith("whole games per bucket: ")
        assert float(note.split()[4]) == pytest.approx(ratio, rel=0.05)
        zs.append(found["batch-256"].z)
    assert 0.2 < np.std(zs) < 2.2


def test_whole_games_left_in_order_fail(arrange: Arrange) -> None:
    order, bounds = by_game(np.random.default_rng(1), shuffled=False)
    found = measure_quality(arrange(GAMES, VALUES, order, bounds, {"assign": "game"}))
    assert found is not None
    assert not found.ok


def stratified(rng: np.random.Generator) -> tuple[np.ndarray, list[int]]:
    """Give each of 40 buckets the same share of both values, to within one row, in uniform order."""
    bucket = np.empty(N, int)
    for value in (0, 1):
        rows = rng.permutation(np.flatnonzero(value == VALUES))
        bucket[rows] = np.arange(len(rows)) * 40 // len(rows)
    order = np.lexsort((rng.random(N), bucket))
    return order, [0, *np.cumsum(np.bincount(bucket)).tolist()]


def test_equal_shares_of_strata_pass(arrange: Arrange) -> None:
    for seed in range(3):
        order, bounds = stratified(np.random.default_rng(seed))
        found = measure_quality(arrange(GAMES, VALUES, order, bounds, {"stratify_by": "value"}))
        assert found is not None
        assert [figure for figure in found.figures if not figure.ok] == []
        assert abs(found["bucket-mean"].z) < 0.2


def test_strata_divided_by_the_sort_key_fail(arrange: Arrange) -> None:
    """The boundaries of strata differ, so each bucket starts and ends with rows of a single value."""
    rng = np.random.default_rng(1)
    key, bucket = rng.random(N), np.empty(N, int)
    for value in (0, 1):
        rows = np.flatnonzero(value == VALUES)
        bucket[rows] = np.argsort(np.argsort(key[rows])) * 40 // len(rows)
    bounds = [0, *np.cumsum(np.bincount(bucket)).tolist()]
    for within, mixed in ((key, False), (rng.random(N), True)):
        order = np.lexsort((within, bucket))
        found = measure_quality(arrange(GAMES, VALUES, order, bounds, {"stratify_by": "value"}))
        assert found is not None
        assert found["value-1"].ok == mixed


# --- few rows --------------------------------------------------------------------------------


def test_rows_without_a_game_count_as_single_games(arrange: Arrange) -> None:
    games = np.full(900, -1)
    values = np.arange(900) / 900
    found = measure_quality(arrange(games, values, np.random.default_rng(1).permutation(900), [0, 400, 900]))
    assert found is not None
    assert found.ok
    assert (found["batch-256"].before, found["batch-256"].after, found["batch-256"].expected) == (0, 0, 0)
    assert found["batch-256"].z is None
    assert found["batch-256"].note == "no game has two positions"
    assert found["largest-share"].after == 1 / 400
    assert found["games-in-bucket"].after == 450
    assert abs(found["rank"].z) < DEVIATIONS


@every_pair(rows=[1, 2, 3, 4, 5, 9, 40], games=["one", "many", "none"], choices=[{}, {"assign": "game"}])
def test_a_handful_of_rows_passes(arrange: Arrange, rows: int, games: str, choices: dict[str, str]) -> None:
    ids = {"one": np.zeros(rows, int), "many": np.arange(rows) // 3, "none": np.full(rows, -1)}[games]
    values = np.random.default_rng(rows).integers(0, 2, rows).astype(float)
    order = np.random.default_rng(rows + 1).permutation(rows)
    bounds = [0, rows // 2, rows // 2, rows]  # the second bucket is empty
    found = measure_quality(arrange(ids, values, order, bounds, choices))
    assert found is not None
    assert found.ok
    json.dumps(asdict(found), allow_nan=False)


@pytest.mark.parametrize("value", [0.0, 1.0, 0.3, math.nan, math.inf])
def test_constant_or_non_finite_values_have_no_figures(arrange: Arrange, value: float) -> None:
    values = np.full(N, value)
    found = measure_quality(arrange(GAMES, values, np.random.default_rng(1).permutation(N), BOUNDS))
    assert found is not None
    assert found.ok
    names = {figure.name for figure in found.figures}
    assert names & {"value-1", "value-worst", "bucket-mean"} == set()
    assert {(b.value_mean, b.value_deviation, b.z) for b in found.by_bucket} == {(None, None, None)}
    assert names >= {"rank", "neighbours-1"}


def test_one_position(tmp_path: Path, write_odd_store: WriteOddStore) -> None:
    store = write_odd_store(tmp_path / "store", 1, 1)
    shuffle_store(store)
    found = measure_quality(store)
    assert found is not None
    assert found.ok
    assert found["largest-share"].after == 1.0
    assert found["neighbours-1"].after is None


def test_without_a_training_split_the_result_is_none(arrange: Arrange) -> None:
    store = arrange(GAMES, VALUES, np.arange(N), BOUNDS)
    manifest = Store.open(store).manifest
    manifest.stages["shuffle"]["splits"] = {"val": N}
    manifest.save(store)
    assert measure_quality(store) is None


def test_a_store_that_is_not_shuffled_is_refused(odd_store: Path) -> None:
    with pytest.raises(StoreError, match="no shuffle stage"):
        measure_quality(odd_store)


def test_a_store_that_cannot_be_written_is_measured(arrange: Arrange) -> None:
    store = arrange(GAMES, VALUES, np.random.default_rng(1).permutation(N), BOUNDS)
    before = sorted(store.rglob("*"))
    measure_quality(store)
    assert sorted(store.rglob("*")) == before
