"""Statistics of the batches of a live pipeline: how evenly games and plies are drawn, and same-game pairs.

The files are fixed, so the results are the same in every run.
"""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest

from hexdata.batch import BatchOptions
from hexdata.live import LiveLoader, LiveOptions
from hexdata.live.chunk import GameBatch
from hexdata.live.chunk_source_loader import ChunkSourceLoader
from hexdata.live.files.provider import FilePathProvider
from hexdata.live.pipeline import Pipeline
from hexdata.live.shuffling_chunk_pool import ShufflingChunkPool
from hexdata.live.trial import same_game_pairs

if TYPE_CHECKING:
    from tests.conftest import DemoTrmph

GAMES = 150
PER_GAME = 6
FIELDS = ("game_id", "position_in_game", "total_positions", "value")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory, demo_trmph: DemoTrmph) -> Path:
    """150 games in 3 files, each game with at least 10 positions."""
    folder = tmp_path_factory.mktemp("games")
    demo_trmph(folder, GAMES, 3, board_size=5)
    return folder


def delivered(directory: Path, batches: int, **more: Any) -> dict[str, npt.NDArray[Any]]:
    """Return the fields of this number of batches of 64, each of shape (batches, 64)."""
    live = LiveOptions(val=0, test=0, watch=False, seed=5, batch_size=64, batch=BatchOptions(fields=FIELDS))
    with LiveLoader(
        directory, config=live.with_stage("ChunkUnpacker", positions_per_game=PER_GAME), **more
    ) as loader:
        taken = [batch for batch, _ in zip(loader, range(batches), strict=False)]
    return {name: np.stack([batch[name] for batch in taken]) for name in FIELDS}


def expected_pairs(batch_size: int, reservoir: int, pool_size: int, positions_per_game: float) -> float:
    """Return the expected number of same-game pairs in a batch, as docs/live.md derives it."""
    passes = reservoir / (pool_size * positions_per_game)
    same_draw = (positions_per_game - 1) / (2 * reservoir)
    other_pass = passes * -math.expm1(-1 / passes)
    return batch_size * (batch_size - 1) / 2 * (same_draw + other_pass / pool_size)


def chi_squared(found: npt.NDArray[Any], expected: npt.NDArray[Any]) -> float:
    return float(((found - expected) ** 2 / expected).sum())


def chi_squared_bound(freedom: int) -> float:
    """Return the value exceeded with probability 1e-6, by the approximation of Wilson and Hilferty."""
    part = 2 / (9 * freedom)
    return float(freedom * (1 - part + 4.7534 * math.sqrt(part)) ** 3)


@pytest.mark.parametrize("freedom", [20, 150, 1300])
def test_the_bound_is_exceeded_once_in_a_million(freedom: int) -> None:
    """For an even number of degrees of freedom, the tail is a sum of Poisson terms."""
    half = chi_squared_bound(freedom) / 2
    terms = [math.exp(k * math.log(half) - half - math.lgamma(k + 1)) for k in range(freedom // 2)]
    assert math.fsum(terms) == pytest.approx(1e-6, rel=0.3)


@pytest.fixture(scope="module")
def served(directory: Path) -> dict[str, npt.NDArray[Any]]:
    """1,500 batches (96,000 positions), taken after the reservoir of 2,000 has been replaced several
    times.
    """
    whole = delivered(directory, 1600, pool_size=GAMES, reservoir=2000)
    return {name: array[100:] for name, array in whole.items()}


def test_games_are_drawn_evenly(served: dict[str, npt.NDArray[Any]]) -> None:
    counts = np.bincount(served["game_id"].ravel(), minlength=GAMES)
    assert chi_squared(counts, np.full(GAMES, counts.sum() / GAMES)) < chi_squared_bound(GAMES - 1)


def test_plies_are_drawn_evenly(served: dict[str, npt.NDArray[Any]]) -> None:
    """No ply of a game is preferred."""
    game, ply = served["game_id"].ravel(), served["position_in_game"].ravel()
    lengths = np.zeros(GAMES, np.int64)
    lengths[game] = served["total_positions"].ravel()
    counts = np.zeros((GAMES, lengths.max()))
    np.add.at(counts, (game, ply), 1)
    exists = np.arange(lengths.max()) < lengths[:, np.newaxis]
    expected = np.broadcast_to((counts.sum(axis=1) / lengths)[:, np.newaxis], counts.shape)
    assert (counts[~exists] == 0).all()
    freedom = int(exists.sum()) - GAMES
    assert chi_squared(counts[exists], expected[exists]) < chi_squared_bound(freedom)


def test_a_position_is_repeated_only_after_all_others_of_its_game(directory: Path) -> None:
    """After any number of passes, the counts of two positions of a game differ by at most 1."""
    live = LiveOptions(val=0, test=0, watch=False, seed=5, batch_size=64, reservoir=500)
    live = live.with_stage("ChunkUnpacker", positions_per_game=PER_GAME)
    for passes in (1, 3, 7):
        with LiveLoader(
            directory, config=live.with_stage("ShufflingChunkPool", passes=passes), fields=FIELDS
        ) as loader:
            taken = list(loader)
        game, ply, length = (np.concatenate([batch[name] for batch in taken]) for name in FIELDS[:3])
        for number in range(GAMES):
            own = game == number
            counts = np.bincount(ply[own], minlength=length[own][0])
            assert counts.sum() == passes * PER_GAME
            assert counts.max() - counts.min() <= 1, (passes, number)


def test_games_are_spread_evenly_over_time(served: dict[str, npt.NDArray[Any]]) -> None:
    """Games against tenths of the run."""
    game = served["game_id"]
    tenths = np.repeat(np.arange(10), len(game) // 10)[:, np.newaxis] + np.zeros_like(game)
    counts = np.zeros((GAMES, 10))
    np.add.at(counts, (game.ravel(), tenths.ravel()), 1)
    expected = np.outer(counts.sum(axis=1), counts.sum(axis=0)) / counts.sum()
    assert chi_squared(counts, expected) < chi_squared_bound((GAMES - 1) * 9)


def test_games_are_spread_evenly_over_a_pass(directory: Path) -> None:
    """Games against tenths of a pass, over 200 passes. All row and column sums are given."""
    stages = [
        FilePathProvider(directory, watch=False),
        ChunkSourceLoader(),
        ShufflingChunkPool(seed=5, pool_size=GAMES, passes=200),
    ]
    game_batches: list[GameBatch] = []
    with Pipeline(stages, [(4, "block")] * 3) as pipeline:
        pipeline.start()
        with contextlib.suppress(StopIteration):
            while True:
                game_batches.append(pipeline.take())
    passes = np.array([chunk.number for game_batch in game_batches for chunk in game_batch]).reshape(
        200, GAMES
    )
    assert (np.sort(passes) == np.arange(GAMES)).all(), "each once a pass"
    counts = np.zeros((GAMES, 10))
    np.add.at(counts, (passes, np.arange(GAMES) * 10 // GAMES), 1)
    deviation = chi_squared(counts, np.full(counts.shape, 20.0)) * (GAMES - 1) / GAMES
    assert deviation < chi_squared_bound((GAMES - 1) * 9)


def test_neighbours_in_a_batch_are_independent(served: dict[str, npt.NDArray[Any]]) -> None:
    """The value of a row does not predict that of the next row, over 1,500 x 63 pairs."""
    value = served["value"].astype(np.float64)
    value -= value.mean()
    correlation = float((value[:, 1:] * value[:, :-1]).mean() / value.var())
    pairs = value[:, 1:].size
    assert abs(correlation) < 5 / math.sqrt(pairs) + (PER_GAME - 1) / 4000 + 1 / GAMES


@pytest.mark.parametrize(("reservoir", "pool_size"), [(2000, 150), (1000, 150), (4000, 150), (2000, 50)])
def test_measured_same_game_pairs_match_the_formula(directory: Path, reservoir: int, pool_size: int) -> None:
    """About 10,000 pairs each, so the statistical error is one or two percent."""
    skipped = 4 * reservoir // 64
    games = delivered(directory, skipped + 900, reservoir=reservoir, pool_size=pool_size)["game_id"]
    found = np.mean([same_game_pairs(batch) for batch in games[skipped:]])
    assert found == pytest.approx(expected_pairs(64, reservoir, pool_size, PER_GAME), rel=0.06)


def simulated_pairs(batch: int, reservoir: int, pool: int, visit: int, batches: int, seed: int) -> float:
    """Simulate a pool and a reservoir position by position, and count the pairs."""
    rng = np.random.default_rng(seed)
    steps = 3 * reservoir + batches * batch
    passes = -(-(reservoir + steps) // (pool * visit))
    games = np.concatenate([np.repeat(rng.permutation(pool), visit) for _ in range(passes)]).tolist()
    held, out = games[:reservoir], []
    for index, game in zip(rng.integers(0, reservoir, steps).tolist(), games[reservoir:], strict=False):
        out.append(held[index])
        held[index] = game
    rows = np.array(out[3 * reservoir :]).reshape(batches, batch)
    return float(np.mean([sum(math.comb(int(c), 2) for c in np.bincount(row)) for row in rows]))


@pytest.mark.parametrize(
    ("batch", "reservoir", "pool", "visit"),
    [(64, 4096, 500, 8), (64, 1024, 500, 16), (64, 8192, 200, 8), (32, 2000, 2000, 5), (64, 2000, 100, 1)],
)
def test_expected_pairs_match_a_simulation(batch: int, reservoir: int, pool: int, visit: int) -> None:
    """Each case counts thousands of pairs; a batch of 64 is not much smaller than a reservoir of 1024."""
    found = simulated_pairs(batch, reservoir, pool, visit, batches=1500, seed=3)
    assert found == pytest.approx(expected_pairs(batch, reservoir, pool, visit), rel=0.05)


def test_expected_pairs_at_the_limits() -> None:
    """With one position per draw and an infinite pool: none. With an infinite reservoir: those of random
    draws.
    """
    assert expected_pairs(1024, 10**6, 10**12, 1) == pytest.approx(0.0, abs=1e-3)
    assert expected_pairs(256, 10**12, 1000, 70) == pytest.approx(math.comb(256, 2) / 1000, rel=1e-3)
    assert expected_pairs(1, 1000, 10, 5) == 0
