"""Quality figures: agreement with NumPy, acceptance of uniform orders, rejection of others."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hexdata.errors import StoreError
from hexdata.order import ORDER_VERSION
from hexdata.quality import DEVIATIONS, Quality, measure, measure_quality
from hexdata.shuffle import ShuffleOptions, shuffle_store
from hexdata.store import Store
from hexdata.store.manifest import Manifest
from hexdata.store.parquet import write_parquet
from tests.pairs import FULL, every_pair

if TYPE_CHECKING:
    from tests.conftest import CopyStore

Array = npt.NDArray[Any]
Rng = np.random.Generator
BATCHES = (256, 1024, 4096)
LAGS = range(1, 101)
VALUE_LAGS = (1, 2, 5, 10, 20, 50, 100)
SCHEMA = pa.schema([("position_id", pa.int64()), ("game_id", pa.int64()), ("value", pa.float32())])
"""The columns that are measured."""


def measured(store: Path) -> Quality:
    found = measure_quality(store)
    assert found is not None
    return found


# --- figures of shuffled stores, by NumPy ---------------------------------------------------------------


def plain_figures(games: Array, values: Array, bounds: list[int]) -> dict[str, float]:
    """Return the figures of an order; a row without a game has a game of its own."""
    figures, pairs = {}, {n: math.comb(n, 2) for n in range(4097)}
    for size in BATCHES:
        pieces = [games[i : i + size].tolist() for i in range(0, len(games), size)]
        found = sum(math.comb(n, 2) for piece in pieces for n in Counter(piece).values())
        figures[f"batch-{size}"] = found / sum(pairs[len(p)] for p in pieces) * pairs[min(size, len(games))]
    for lag in LAGS:
        figures[f"neighbours-{lag}"] = float((games[lag:] == games[:-lag]).mean())
    centred = values - values.mean()
    for lag in VALUE_LAGS:
        figures[f"value-{lag}"] = float((centred[lag:] * centred[:-lag]).mean() / values.var())
    buckets = [games[a:b].tolist() for a, b in pairwise(bounds) if a < b]
    figures["largest-share"] = max(max(Counter(bucket).values()) / len(bucket) for bucket in buckets)
    return figures


@pytest.mark.parametrize(
    ("name", "buckets"), [("odd_store", 1), ("trmph_store", 3), ("odd_store", 200 if FULL else 60)]
)
def test_figures_are_those_of_numpy(
    request: pytest.FixtureRequest, copy_store: CopyStore, name: str, buckets: int
) -> None:
    store = copy_store(request.getfixturevalue(name))
    shuffle_store(store, ShuffleOptions(seed=5, buckets=buckets))
    files = Store.open(store).files("shuffled/train")
    table = pa.concat_tables([pq.read_table(path, columns=SCHEMA.names) for path in files])
    ids, values = table["position_id"].to_numpy(), table["value"].to_numpy().astype(float)
    games = table["game_id"].fill_null(-1).to_numpy()
    games = np.where(games < 0, -1 - ids, games)
    bounds = np.cumsum([0, *(pq.read_metadata(path).num_rows for path in files)]).tolist()
    order = np.argsort(ids)
    before, after = (
        plain_figures(games[rows], values[rows], bounds) for rows in (order, np.arange(len(ids)))
    )
    del before["largest-share"]  # buckets have no meaning in the input
    found = measured(store)
    json.dumps(asdict(found), allow_nan=False)
    assert found.ok
    for figure in (*found.figures, *found.lags):
        if figure.name in after:
            if figure.name in before:
                assert figure.before == pytest.approx(before[figure.name], rel=1e-9, abs=1e-12)
            assert figure.after == pytest.approx(after[figure.name], rel=1e-9, abs=1e-12)
    lags = [f"neighbours-{lag}" for lag in LAGS] + [f"value-{lag}" for lag in VALUE_LAGS]
    assert [figure.name for figure in found.lags] == lags
    for kind in ("neighbours", "value"):
        worst = found[f"{kind}-worst"]
        lag = int(worst.title.rpartition(" ")[2])
        assert worst.after == pytest.approx(after[f"{kind}-{lag}"], rel=1e-9, abs=1e-12)
        off = [abs(after[name] - worst.expected) for name in lags if name.startswith(kind)]
        assert abs(worst.after - worst.expected) >= 0.9 * max(off)  # the s.d. of far lags is a little greater
    rank = np.corrcoef(np.arange(len(ids)), np.argsort(order))[0, 1]
    assert (found["rank"].before, found["rank"].after) == (1.0, pytest.approx(rank, rel=1e-9, abs=1e-12))
    assert found["neighbours-1"].before > 0.5 > 10 * found["neighbours-1"].expected
    # The standard deviation of the mean of a bucket is that of draws without replacement.
    parts = [(games[a:b], values[a:b]) for a, b in pairwise(bounds) if a < b]
    means = [part.mean() for _, part in parts]
    assert min(abs(found["bucket-mean"].after - mean) for mean in means) < 1e-9
    assert found["bucket-mean"].expected == pytest.approx(values.mean())
    assert [bucket["rows"] for bucket in found.by_bucket] == [len(part) for part, _ in parts]
    for bucket, (part, _), mean in zip(found.by_bucket, parts, means, strict=True):
        counts = Counter(part.tolist())
        assert (bucket["games"], bucket["value_mean"]) == (len(counts), pytest.approx(mean))
        assert bucket["largest_share"] == pytest.approx(max(counts.values()) / len(part))
        if len(parts) > 1:
            band = math.sqrt(values.var(ddof=1) / len(part) * (1 - len(part) / len(values)))
            assert bucket["value_deviation"] == pytest.approx(band)
            assert bucket["z"] == pytest.approx((mean - values.mean()) / band, abs=1e-6)
        else:
            assert (bucket["value_deviation"], bucket["z"]) == (None, None)


# --- orders with known quality --------------------------------------------------------------------------


def self_play(count: int, seed: int = 1) -> tuple[Array, Array]:
    """Return the games and values of the input order: games of 20 to 40 rows with either winner."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(20, 41, count)
    return np.repeat(np.arange(count), sizes), np.repeat(rng.integers(0, 2, count), sizes).astype(float)


GAMES, VALUES = self_play(400)
N = len(GAMES)
BOUNDS = np.linspace(0, N, 5).astype(int).tolist()
Arrange = Callable[..., Path]


@pytest.fixture
def arrange(tmp_path: Path) -> Arrange:
    """Return ``arrange(order, bounds=BOUNDS, games=GAMES, values=VALUES, choices={}, val=[])``: a store.

    Row i of the input has position_id i, ``games[i]`` (-1 for none) and ``values[i]``; ``order`` lists the
    rows as they stand, cut into buckets at ``bounds``, and ``val`` those of each bucket of that split.
    """

    def write(
        order: Array,
        bounds: list[int] = BOUNDS,
        *,
        games: Array = GAMES,
        values: Array = VALUES,
        choices: dict[str, Any] | None = None,
        val: tuple[Array, ...] = (),
    ) -> Path:
        store = tmp_path / f"store-{sum(1 for _ in tmp_path.iterdir())}"
        manifest = Manifest(board_size=5, counts={"positions": len(games)})
        splits = {"train": [order[start:stop] for start, stop in pairwise(bounds)], "val": list(val)}
        splits = {split: buckets for split, buckets in splits.items() if buckets}
        for split, buckets in splits.items():
            for number, rows in enumerate(buckets):
                ids = pa.array(games[rows], mask=games[rows] < 0)
                table = pa.table([rows, ids, values[rows].astype(np.float32)], schema=SCHEMA)
                name = f"shuffled/{split}/bucket-{number:06d}.parquet"
                manifest.files[name] = write_parquet(store / name, SCHEMA, [table])
        manifest.stages["shuffle"] = {
            "seed": 5,
            "order_version": ORDER_VERSION,
            "positions": len(order),
            "rejected": 0,
            "splits": {split: sum(map(len, buckets)) for split, buckets in splits.items()},
            "buckets": {split: len(buckets) for split, buckets in splits.items()},
            "choices": choices or {},
            "left_out": {},
            "policies": dict.fromkeys(splits, 0),
            "of": manifest.digest("games", "positions"),
        }
        manifest.save(store)
        return store

    return write


def in_blocks(rng: Rng, block: int) -> Array:
    starts = rng.permutation(range(0, N, block))
    return np.concatenate([np.arange(start, min(start + block, N)) for start in starts])


NO_SHUFFLES: dict[str, Callable[[Rng], Array]] = {
    "the input order": lambda _: np.arange(N),
    "the input order backwards": lambda _: np.arange(N)[::-1],
    "whole games shuffled": lambda rng: np.argsort(rng.permutation(GAMES.max() + 1)[GAMES], kind="stable"),
    "a window": lambda rng: np.argsort(np.arange(N) + rng.uniform(0, 1_000, N)),
    "a wide window": lambda rng: np.argsort(np.arange(N) + rng.uniform(0, N // 2, N)),
    "blocks": lambda rng: in_blocks(rng, 64),
    "pairs": lambda rng: in_blocks(rng, 2),
    "dealt out": lambda _: np.argsort(np.arange(N) % 97, kind="stable"),
}


def sampled(store: Path) -> Quality:
    """Measure samples of two stretches, and one of the input."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("_STRETCH", 4096), ("_SAMPLED", 8192), ("_SAMPLED_INPUT", 4096)):
            patch.setattr(measure, name, value)
        return measured(store)


@pytest.mark.parametrize("name", NO_SHUFFLES)
def test_bad_orders_fail(arrange: Arrange, name: str) -> None:
    store = arrange(NO_SHUFFLES[name](np.random.default_rng(3)))
    assert not measured(store).ok
    if name in ("the input order", "whole games shuffled", "blocks", "a window"):
        assert not sampled(store).ok


@pytest.mark.parametrize("swapped", [0, 40])
def test_the_largest_share_is_judged_in_every_split(arrange: Arrange, swapped: int) -> None:
    """Forty of the fifty rows of two games in one of two buckets of val, and none."""
    rng = np.random.default_rng(6)
    order = rng.permutation(N)
    game = np.flatnonzero(np.isin(GAMES[order], [7, 8]))[:swapped]
    val = np.concatenate([order[game], np.delete(order, game)])
    parts = (val[:1_000], val[1_000:])
    found = measured(arrange(rng.permutation(N), val=parts))
    largest = max(max(Counter(GAMES[rows].tolist()).values()) / len(rows) for rows in parts)
    assert found["largest-share-val"].after == pytest.approx(largest)
    assert found["largest-share-val"].ok is not bool(swapped)
    assert found["largest-share"].ok


def test_uniform_shuffles_pass_with_the_expected_deviation(arrange: Arrange) -> None:
    """Over 12 shuffles, z of each figure has a standard deviation near 1; test_theory is stricter."""
    found: dict[str, list[float]] = {}
    for seed in range(12):
        quality = measured(arrange(np.random.default_rng(seed).permutation(N)))
        assert [figure for figure in quality.figures if not figure.ok] == []
        assert all(figure.judged for figure in quality.figures)
        for figure in quality.figures:
            if figure.z is not None and not figure.name.endswith(("-worst", "-mean")):
                found.setdefault(figure.name, []).append(figure.z)
    assert set(found) == {"batch-256", "batch-1024", "batch-4096", "neighbours-1", "value-1", "rank"}
    for zs in found.values():
        assert max(map(abs, zs)) < DEVIATIONS
        assert abs(np.mean(zs)) < 4 / math.sqrt(12)
        assert 0.4 < np.std(zs) < 1.7


def test_a_sample_is_whole_stretches_of_the_order(arrange: Arrange) -> None:
    games, values = self_play(1_200, seed=2)
    order = np.random.default_rng(6).permutation(len(games))
    store = arrange(order, [0, 9_000, len(games)], games=games, values=values)
    found, whole = sampled(store), measured(store)
    assert (found.positions, found.sampled, found.sampled_before) == (len(games), 8192, 4096)
    stretches = [games[order[i : i + 4096]] for i in range(0, len(games) - 4095, 4096)]
    pairs = {
        sum(math.comb(n, 2) for s in (one, other) for n in Counter(s.tolist()).values())
        for i, one in enumerate(stretches)
        for other in stretches[:i]
    }
    assert round(found["batch-4096"].after * 2) in pairs
    assert found.ok
    assert found["batch-1024"].expected == pytest.approx(whole["batch-1024"].expected)
    assert found["batch-1024"].deviation > 1.5 * whole["batch-1024"].deviation
    assert found["bucket-mean"] == whole["bucket-mean"]


# --- selection options, few rows, and values without a variance ------------------------------------------


def in_buckets(rng: Rng, bucket: Array, *, shuffled: bool = True) -> tuple[Array, list[int]]:
    """Return the order and the bounds of rows in buckets; each is shuffled, or in the input order."""
    order = np.lexsort((rng.random(N) if shuffled else np.arange(N), bucket))
    return order, [0, *np.cumsum(np.bincount(bucket)).tolist()]


def test_assign_game_exempts_figures_about_buckets(arrange: Arrange) -> None:
    choices, zs = {"assign": "game"}, []
    for seed in range(4):
        rng = np.random.default_rng(seed)
        bucket = rng.integers(0, 4, GAMES.max() + 1)[GAMES]
        made = in_buckets(rng, bucket)
        found, plain = measured(arrange(*made, choices=choices)), measured(arrange(*made))
        assert found.ok
        assert found.reference == "each bucket in uniform order"
        shown = {figure.name for figure in found.figures if not figure.judged}
        # A batch of 4,096 is a whole bucket.
        assert shown == {"largest-share", "batch-4096", "bucket-mean"}, "exempt, and not judged"
        assert not plain.ok, "without the option it is a bad shuffle"
        ratio = found["batch-256"].after / plain["batch-256"].expected
        assert ratio == pytest.approx(4, rel=0.2)
        assert float(found["batch-256"].note.split()[4]) == pytest.approx(ratio, rel=0.05)
        assert float(found["bucket-mean"].note.split()[4]) == pytest.approx(
            abs(found["bucket-mean"].z), rel=0.01
        )
        zs.append(found["batch-256"].z)
        assert not measured(arrange(*in_buckets(rng, bucket, shuffled=False), choices=choices)).ok
    assert 0.2 < np.std(zs) < 2.2


def test_equal_shares_of_strata_pass(arrange: Arrange) -> None:
    """Each of 40 buckets has the same share of both values, to within one row, in uniform order."""
    rng, bucket = np.random.default_rng(0), np.empty(N, int)
    for value in (0, 1):
        rows = rng.permutation(np.flatnonzero(value == VALUES))
        bucket[rows] = np.arange(len(rows)) * 40 // len(rows)
    found = measured(arrange(*in_buckets(rng, bucket), choices={"stratify_by": "value"}))
    assert [figure for figure in found.figures if not figure.ok] == []
    assert abs(found["bucket-mean"].z or 0) < 0.2


@every_pair(rows=[1, 2, 3, 4, 9, 40], games=["one", "many", "none"], choices=[{}, {"assign": "game"}])
def test_a_handful_of_rows_passes(arrange: Arrange, rows: int, games: str, choices: dict[str, str]) -> None:
    ids = {"one": np.zeros(rows, int), "many": np.arange(rows) // 3, "none": np.full(rows, -1)}[games]
    values = np.random.default_rng(rows).integers(0, 2, rows).astype(float)
    order = np.random.default_rng(rows + 1).permutation(rows)
    bounds = [0, rows // 2, rows // 2, rows]  # the second bucket is empty
    found = measured(arrange(order, bounds, games=ids, values=values, choices=choices))
    assert found.ok
    json.dumps(asdict(found), allow_nan=False)


@pytest.mark.parametrize("value", [1.0, 0.3, math.nan, math.inf])
def test_constant_or_non_finite_values_have_no_figures(arrange: Arrange, value: float) -> None:
    found = measured(arrange(np.random.default_rng(1).permutation(N), values=np.full(N, value)))
    assert found.ok
    names = {figure.name for figure in found.figures}
    assert names & {"value-1", "value-worst", "bucket-mean"} == set()
    assert {(b["value_mean"], b["value_deviation"], b["z"]) for b in found.by_bucket} == {(None, None, None)}
    assert names >= {"rank", "neighbours-1"}


def test_what_cannot_be_measured(arrange: Arrange, odd_store: Path) -> None:
    store = arrange(np.arange(N))
    manifest = Store.open(store).manifest
    manifest.stages["shuffle"]["splits"] = {"val": N}
    manifest.save(store)
    assert measure_quality(store) is None
    with pytest.raises(StoreError, match="no shuffle stage"):
        measure_quality(odd_store)
