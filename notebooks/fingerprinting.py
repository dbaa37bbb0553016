"""The experiment of ``04-fingerprinting.ipynb``: one network trained on the same positions in three orders.

It generates its games in a temporary folder and writes the results to the given JSON file. The notebook plots
and interprets them.

    python notebooks/fingerprinting.py notebooks/fingerprinting.json
"""

from __future__ import annotations

import json
import multiprocessing
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from webdataset import shuffle as shuffle_buffer

from hexdata import (
    ConvertOptions,
    ShuffleOptions,
    convert_sources,
    derive_key,
    shuffle_indices,
    shuffle_store,
)
from hexdata.demo.games import make_games
from hexdata.errors import ConfigError
from hexdata.formats.trmph import write_trmph
from hexdata.schema import NO_MOVE
from hexdata.store import Store

Indices = npt.NDArray[np.int64]

ORDERS: Final = ("ordered", "buffer", "global")
"""Orders of the training positions; see ``order_of``."""
SETS: Final = ("seen", "by file", "by game")
"""Sets of positions on which the value loss is measured; see ``Data``."""


@dataclass(frozen=True)
class Settings:
    """Settings of one part of the experiment, the same for all of its runs.

    Attributes:
        games: Number of distinct games, including held-out games.
        repeated: Share of the games that are written to the files twice.
        board_size: Cells along an edge.
        files: Number of files of games.
        buckets: Number of shuffled files; the split by file holds out the last one.
        held_out: Share of the games that the split by game holds out.
        batch: Positions per step.
        steps: Steps per run.
        passes: Epochs per run. The number of training positions is batch x steps / passes.
        rate: Maximum learning rate, reached after 5 % of the steps, then reduced to zero along a cosine.
        buffer: Positions in the shuffle buffer.
        channels: Channels of the two convolutions.
        hidden: Width of the layer that both heads share.
        measurements: Number of measurements per run, at equal distances.
        sample: Positions in each measured set.
        seeds: Runs of each order. A seed determines the initial weights and the order.

    Raises:
        ConfigError: An epoch is not a whole number of batches.
    """

    games: int
    passes: int
    steps: int
    repeated: float = 0.3
    board_size: int = 7
    files: int = 20
    buckets: int = 10
    held_out: float = 0.1
    batch: int = 256
    rate: float = 1e-3
    buffer: int = 2_048
    channels: int = 16
    hidden: int = 256
    measurements: int = 25
    sample: int = 5_000
    seeds: int = 5

    def __post_init__(self) -> None:
        if self.steps % self.passes:
            raise ConfigError(
                "an epoch must be a whole number of steps", found=f"{self.steps} / {self.passes}"
            )

    @property
    def positions(self) -> int:
        """Number of training positions."""
        return self.batch * self.steps // self.passes


OFTEN: Final = Settings(games=6_200, passes=5, steps=3_000)
"""Few games, each seen several times, so the network can memorize them."""
ONCE: Final = Settings(games=31_000, passes=1, steps=3_000)
"""Five times as many games, each seen once, in the same number of steps."""
PARTS: Final = {
    "often": OFTEN,
    "once": ONCE,
    "often, 0.003": replace(OFTEN, rate=3e-3, seeds=2),
    "once, 0.003": replace(ONCE, rate=3e-3, seeds=2),
    "once, 0.01": replace(ONCE, rate=1e-2, seeds=2),
}
"""The full experiment. The last three parts vary the learning rate."""
PROCESSES: Final = 2
SMALL: Final = replace(
    OFTEN, games=45, steps=50, batch=64, buffer=128, held_out=0.2, measurements=5, sample=50, seeds=2
)
"""A run of seconds that shows that the code works. Its figures have no meaning."""


@dataclass(frozen=True)
class Data:
    """All positions of a store in input order, and the indices of those used for training and measurement.

    Attributes:
        board: uint8 (N, 2, n, n).
        value: float32 (N,), 1 where red wins.
        move: int64 (N,), -100 on final positions, which have no policy target.
        game: int64 (N,), game number, equal for repeated games.
        train: Indices of the training positions, ascending.
        sets: Indices of the measured positions for each name in ``SETS``. "seen": a sample of ``train``.
            "by file": a sample of a held-out shuffled file, whose games are in the training data.
            "by game": a sample of games without any training position.
    """

    board: torch.Tensor
    value: torch.Tensor
    move: torch.Tensor
    game: Indices
    train: Indices
    sets: dict[str, Indices]


def make_store(folder: Path, settings: Settings) -> Path:
    """Write games to TRMPH files, convert and shuffle them, and return the path of the store."""
    games = list(make_games(settings.games, seed=4, board_size=settings.board_size))
    games += games[: round(settings.repeated * len(games))]
    order = shuffle_indices(range(len(games)), seed=4)
    raw, store = folder / "games", folder / "store"
    raw.mkdir()
    for number, part in enumerate(np.array_split(order, settings.files)):
        write_trmph(raw / f"games_{number:03d}.trmph", [games[i] for i in part], settings.board_size)
    convert_sources([raw], store, ConvertOptions(val=settings.held_out, test=0.0))
    shuffle_store(store, ShuffleOptions(seed=4, buckets=settings.buckets))
    return store


def read_data(path: Path, settings: Settings) -> Data:
    """Read a store of ``make_store`` into memory and split it by file and by game.

    Raises:
        ConfigError: The store has too few positions.
    """
    store, n = Store.open(path), settings.board_size
    positions = pq.read_table(store.files("positions"))
    games = pq.read_table(store.files("games"), columns=["game_id", "duplicate_of", "split"])
    packed = np.frombuffer(b"".join(positions["board"].to_pylist()), np.uint8).reshape(len(positions), -1)
    move = positions["move"].fill_null(NO_MOVE).to_numpy().astype(np.int64)
    game_id = positions["game_id"].to_numpy()
    game = np.array(games["duplicate_of"].fill_null(-1))
    game = np.where(game < 0, games["game_id"].to_numpy(), game)[game_id]
    by_game = np.flatnonzero((np.array(games["split"]) == "val")[game_id])
    by_file = pq.read_table(store.files("shuffled/train")[-1], columns=["position_id"])[
        "position_id"
    ].to_numpy()
    train = np.setdiff1d(np.arange(len(game)), np.concatenate([by_game, by_file]))[: settings.positions]
    if len(train) < settings.positions:
        raise ConfigError("too few games", found=f"{len(train)} positions", expected=settings.positions)
    by_file = by_file[np.isin(game_id[by_file], game_id[train])]
    return Data(
        board=torch.from_numpy(np.unpackbits(packed, axis=1, count=2 * n * n).reshape(-1, 2, n, n)),
        value=torch.from_numpy(positions["value"].to_numpy().copy()),
        move=torch.from_numpy(np.where(move == NO_MOVE, -100, move)),
        game=game,
        train=train,
        sets={
            name: _sample(indices, settings.sample)
            for name, indices in zip(SETS, (train, by_file, by_game), strict=True)
        },
    )


def _sample(indices: Indices, count: int) -> Indices:
    """Return a sample of ``count`` indices, drawn with a fixed seed, ascending.

    Raises:
        ConfigError: There are fewer indices.
    """
    if len(indices) < count:
        raise ConfigError("too few positions to measure on", found=len(indices), expected=count)
    return np.sort(np.asarray(shuffle_indices(indices, seed=4))[:count])


def order_of(name: str, train: Indices, epoch: int, seed: int, buffer: int) -> Indices:
    """Return the training positions in the order of an epoch.

    "ordered" is the input order, the same in every epoch. "buffer" is the same stream through WebDataset's
    shuffle buffer, which is full before it yields. "global" is the order of ``hexdata.Loader``.
    """
    if name == "ordered":
        return train
    if name == "buffer":
        drawn = random.Random(derive_key(seed, "buffer", epoch))  # noqa: S311 - an order, no secret
        stage = shuffle_buffer(buffer, initial=buffer, rng=drawn)
        return np.fromiter(stage(iter(train)), np.int64, len(train))
    return np.asarray(shuffle_indices(train, seed, epoch))


def batches(name: str, train: Indices, seed: int, settings: Settings) -> Iterator[Indices]:
    """Yield the indices of each step of all epochs."""
    for epoch in range(settings.passes):
        yield from order_of(name, train, epoch, seed, settings.buffer).reshape(-1, settings.batch)


class Network(nn.Module):
    """Two convolutions, one shared layer, a policy head and a value head. No normalisation, no dropout."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        n, channels, hidden = settings.board_size, settings.channels, settings.hidden
        self.trunk = nn.Sequential(
            nn.Conv2d(2, channels, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(channels * n * n, hidden),
            nn.ReLU(),
        )
        self.policy = nn.Linear(hidden, n * n)
        self.value = nn.Linear(hidden, 1)

    def forward(self, board: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits of the policy (B, n·n) and of the value (B,)."""
        shared = self.trunk(board.float())
        return self.policy(shared), self.value(shared)[:, 0]


def value_loss(network: Network, data: Data, indices: Indices) -> float:
    """Return the mean cross-entropy of the value over some positions, in nats. Guessing gives ln 2."""
    with torch.no_grad():
        parts = [network(data.board[part])[1] for part in torch.from_numpy(indices).split(1_000)]
        return float(binary_cross_entropy_with_logits(torch.cat(parts), data.value[indices]))


def train_once(order: str, seed: int, data: Data, settings: Settings) -> dict[str, Any]:
    """Train one network. Return the steps of the measurements and the value losses at these steps.

    "running" is the training loss: the mean loss of the batches since the last measurement, each before its
    own step.
    """
    torch.manual_seed(seed)
    network = Network(settings)
    optimizer = torch.optim.AdamW(network.parameters(), settings.rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, settings.rate, total_steps=settings.steps + 1, pct_start=0.05, cycle_momentum=False
    )
    due = set(np.linspace(0, settings.steps, settings.measurements + 1, dtype=int)[1:].tolist())
    curves: dict[str, list[float]] = {name: [] for name in ("running", *SETS)}
    measured, running = [], []
    for step, indices in enumerate(batches(order, data.train, seed, settings), start=1):
        policy, value = network(data.board[indices])
        loss = binary_cross_entropy_with_logits(value, data.value[indices])
        running.append(float(loss.detach()))
        loss = loss + cross_entropy(policy, data.move[indices])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step in due:
            measured.append(step)
            curves["running"].append(float(np.mean(running)))
            for name, chosen in data.sets.items():
                curves[name].append(value_loss(network, data, chosen))
            running = []
    return {"order": order, "seed": seed, "steps": measured, "loss": curves}


def facts_of(data: Data, settings: Settings) -> dict[str, Any]:
    """Return the sizes of the data, and the share of each validation set that is in the training data."""
    trained = np.unique(data.game[data.train])
    boards = np.packbits(data.board.numpy().reshape(len(data.board), -1), axis=1)
    known = {row.tobytes() for row in boards[data.train]}
    facts: dict[str, Any] = {
        "positions": len(data.train),
        "games": len(trained),
        "red_wins": float(data.value[data.train].mean()),
        "games_in_a_batch": {order: _games_in_a_batch(order, data, settings) for order in ORDERS},
    }
    for name in SETS[1:]:
        indices = data.sets[name]
        facts[name] = {
            "games": len(np.unique(data.game[indices])),
            "of_trained_games": float(np.isin(data.game[indices], trained).mean()),
            "trained_boards": float(np.mean([row.tobytes() in known for row in boards[indices]])),
        }
    return facts


def _games_in_a_batch(order: str, data: Data, settings: Settings) -> float:
    """Return the mean number of distinct games in a batch for seed 0."""
    return float(np.mean([len(np.unique(data.game[b])) for b in batches(order, data.train, 0, settings)]))


def run(settings: Settings, *, verbose: bool = False) -> dict[str, Any]:
    """Run one part of the experiment on one thread. Return its settings, data and the curves of every run.

    Args:
        settings: Settings of the part.
        verbose: Print the final losses of each run to standard error.
    """
    torch.set_num_threads(1)
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        data = read_data(make_store(Path(folder), settings), settings)
    runs = []
    for seed in range(settings.seeds):
        for order in ORDERS:
            runs.append(train_once(order, seed, data, settings))
            if verbose:
                last = {name: round(curve[-1], 3) for name, curve in runs[-1]["loss"].items()}
                print(f"{order}, seed {seed}, {settings}: {last}", file=sys.stderr, flush=True)
    minutes = (time.process_time() - began) / 60
    return {"settings": asdict(settings), "data": facts_of(data, settings), "minutes": minutes, "runs": runs}


def run_all() -> dict[str, Any]:
    """Run the full experiment with one process per part, two at a time."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(PROCESSES, mp_context=spawn) as pool:
        parts = dict(zip(PARTS, pool.map(partial(run, verbose=True), PARTS.values()), strict=True))
    return {"torch": torch.__version__.partition("+")[0], "parts": parts}


def _rounded(value: Any) -> Any:
    """Round all floats to four decimals."""
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_rounded(inner) for inner in value]
    return round(value, 4) if isinstance(value, float) else value


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(_rounded(run_all())) + "\n", encoding="utf-8")
