"""What merging equal positions does: rows saved by ply, and the loss on held-out games.

    python -m tests.benchmarks.merged_positions rows STORE...
    python -m tests.benchmarks.merged_positions loss STORE RESULT.json [STEPS SEEDS RATE SYMMETRY]

``rows`` prints the share of rows that ``shuffle --merge positions`` saves in each range of plies. ``loss``
trains the network of notebook 04 on the same games in five ways, with the same number of steps and several
seeds: not merged; merged, with each row drawn as often as its number of positions; merged, with this number
as weight of the loss, with its square root, and without weights. With SYMMETRY 1, each position is trained in
one of its four symmetric images, drawn for each step. The games of the split val are held out, never merged
and never transformed.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from hexdata.board import SYMMETRIES, swaps_colours, symmetry_table, transform_planes
from hexdata.policy import SparsePolicies
from hexdata.selection import SelectionOptions, select
from hexdata.store import Store
from hexdata.store.session import duckdb_session

sys.path.append(str(Path(__file__).parents[2] / "notebooks"))
from fingerprinting import Network, Settings

WAYS: Final = ("plain", "sampled", "count", "root", "unweighted")
"""Ways of training: not merged, or merged. ``sampled`` draws each row as often as it has positions; the
others weight the loss."""
PLIES: Final = (0, 1, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30, 1000)
BATCH: Final = 256
RED: Final = 1


def chosen_rows(store: Path, merge: str, columns: str) -> pa.Table:
    """Return columns of the positions that a shuffle would select, in the order of their ids."""
    with tempfile.TemporaryDirectory() as folder, duckdb_session(memory=1 << 30, threads=2) as con:
        options = SelectionOptions(merge="positions" if merge != "none" else "none")
        selection = select(Store.open(store), options, 0, con, Path(folder))
        query = f"SELECT {columns} FROM ({selection.chosen_sql}) ORDER BY position_id"
        return con.sql(query).to_arrow_table()


def print_rows(store: Path) -> None:
    """Print the share of rows saved by ply."""
    before, after = (
        chosen_rows(store, merge, "position_in_game AS ply").column("ply").fill_null(0).to_numpy()
        for merge in ("none", "positions")
    )
    print(
        f"{store}: {len(before):,} positions, {len(after):,} rows: {1 - len(after) / len(before):.1%} saved"
    )
    for low, high in pairwise(PLIES):
        own, kept = (np.count_nonzero((plies >= low) & (plies < high)) for plies in (before, after))
        if own:
            plies = f"{low}" if high == low + 1 else f"{low} to {high - 1}"
            print(f"  ply {plies:<10} {own:>10,} positions {kept:>10,} rows {1 - kept / own:>7.1%} saved")


def in_images(
    board: torch.Tensor, value: torch.Tensor, policy: torch.Tensor, drawn: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return positions and targets in the symmetric images ``drawn``, (B,)."""
    n = board.shape[-1]
    table = symmetry_table(n).astype(np.int64)
    board, value, policy = board.clone(), value.clone(), policy.clone()
    for symmetry in SYMMETRIES[1:]:
        rows = torch.from_numpy(np.flatnonzero(drawn == symmetry))
        planes = transform_planes(board[rows].numpy(), symmetry)
        board[rows] = torch.from_numpy(np.ascontiguousarray(planes))
        policy[rows] = policy[rows][:, torch.from_numpy(table[symmetry])]
        if swaps_colours(symmetry):
            value[rows] = 1 - value[rows]
    return board, value, policy


class Rows:
    """Positions as tensors: boards (N, 3, n, n) with the player to move, and their targets."""

    def __init__(self, table: pa.Table, n: int) -> None:
        packed = np.frombuffer(b"".join(table["board"].to_pylist()), np.uint8).reshape(len(table), -1)
        planes = np.unpackbits(packed, axis=1, count=2 * n * n).reshape(-1, 2, n, n)
        self.board = torch.from_numpy(planes)
        self.value = torch.from_numpy(table["value"].to_numpy().copy())
        move = table["move"].fill_null(65535).to_numpy().astype(np.int64)
        rows, policies = SparsePolicies.from_arrow(table["policy"], n * n)
        self.cells = n * n
        self.move, self.rows, self.policies = move, rows, policies
        self.slot = np.full(len(move), -1)
        self.slot[rows] = np.arange(len(rows))
        self.weight = torch.ones(len(move))
        if "weight" in table.column_names:
            self.weight = torch.from_numpy(table["weight"].to_numpy().astype(np.float32))

    def __len__(self) -> int:
        return len(self.move)

    def policy(self, index: np.ndarray) -> torch.Tensor:
        """Return the policies of some rows; zeros on final positions."""
        policy = np.zeros((len(index), self.cells), np.float32)
        played = np.flatnonzero(self.move[index] != 65535)
        policy[played, self.move[index][played]] = 1
        dense = np.flatnonzero(self.slot[index] >= 0)
        policy[dense] = self.policies.take(self.slot[index][dense]).to_dense(self.cells)
        return torch.from_numpy(policy)


def losses(network: Network, rows: Rows, index: np.ndarray) -> tuple[float, float]:
    """Return the mean losses of value and policy; the policy loss over positions that have one."""
    value, policy, count = 0.0, 0.0, 0
    with torch.no_grad():
        for part in np.array_split(index, max(1, len(index) // 1000)):
            moves, values = network(rows.board[part])
            target = rows.policy(part)
            value += float(binary_cross_entropy_with_logits(values, rows.value[part], reduction="sum"))
            policy += float(cross_entropy(moves, target, reduction="sum"))
            count += int((target.sum(1) > 0).sum())
    return value / len(index), policy / count


def train(
    way: str, rows: Rows, held_out: Rows, steps: int, seed: int, rate: float, n: int, symmetry: bool
) -> dict[str, Any]:
    """Train one network and return its losses on held-out games."""
    torch.manual_seed(seed)
    network = Network(Settings(games=1, passes=1, steps=steps, board_size=n))
    optimizer = torch.optim.AdamW(network.parameters(), rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, rate, total_steps=steps + 1, pct_start=0.05, cycle_momentum=False
    )
    random = np.random.default_rng(seed)
    weigh: Callable[[torch.Tensor], torch.Tensor] = {
        "plain": torch.ones_like,
        "sampled": torch.ones_like,
        "count": torch.clone,
        "root": torch.sqrt,
        "unweighted": torch.ones_like,
    }[way]
    weights = weigh(rows.weight)
    weights = weights / weights.mean()
    sample = np.random.default_rng(0).permutation(len(held_out))[:10_000]
    items = np.arange(len(rows))
    if way == "sampled":
        items = np.repeat(items, rows.weight.numpy().astype(np.int64))
    order = np.empty(0, np.int64)
    curve = []
    for step in range(1, steps + 1):
        if len(order) < BATCH:
            order = np.concatenate([order, random.permutation(items)])
        index, order = order[:BATCH], order[BATCH:]
        drawn = random.integers(0, 4, BATCH) if symmetry else np.zeros(BATCH, np.int64)
        board, value, policy = in_images(rows.board[index], rows.value[index], rows.policy(index), drawn)
        moves, values = network(board)
        loss = binary_cross_entropy_with_logits(values, value, reduction="none")
        loss = loss + cross_entropy(moves, policy, reduction="none")
        optimizer.zero_grad()
        (loss * weights[index]).mean().backward()
        optimizer.step()
        schedule.step()
        if step % max(1, steps // 10) == 0:
            curve.append((step, *losses(network, held_out, sample)))
    return {"way": way, "seed": seed, "curve": curve}


def compare(store: Path, steps: int, seeds: int, rate: float, symmetry: bool) -> dict[str, Any]:
    """Train all ways with all seeds; print and return the results."""
    torch.set_num_threads(1)
    n = Store.open(store).manifest.board_size
    assert n is not None
    shown = "board, value, move, policy, split"
    tables = {
        "none": chosen_rows(store, "none", shown),
        "positions": chosen_rows(store, "positions", f"{shown}, weight"),
    }
    splits = {merge: table["split"].to_numpy() for merge, table in tables.items()}
    trained = {merge: Rows(table.filter(pa.array(splits[merge] == 0)), n) for merge, table in tables.items()}
    held_out = Rows(tables["none"].filter(pa.array(splits["none"] == 1)), n)
    sizes = {merge: len(rows) for merge, rows in trained.items()}
    print(
        f"{store}: rows to train on {sizes}, held out {len(held_out):,}, {steps} steps, "
        f"rate {rate}, symmetry {symmetry}"
    )
    runs, began = [], time.process_time()
    for seed in range(seeds):
        for way in WAYS:
            rows = trained["none" if way == "plain" else "positions"]
            runs.append(train(way, rows, held_out, steps, seed, rate, n, symmetry))
            print(f"  seed {seed}, {way}: {runs[-1]['curve'][-1]}", file=sys.stderr, flush=True)
    for way in WAYS:
        ends = np.array([run["curve"][-1][1:] for run in runs if run["way"] == way])
        lows = np.array([np.min([c[1:] for c in run["curve"]], axis=0) for run in runs if run["way"] == way])
        means = [f"{ends[:, i].mean():.4f} ± {ends[:, i].std(ddof=min(1, seeds - 1)):.4f}" for i in (0, 1)]
        best = lows.mean(axis=0)
        print(
            f"  {way:<11} value {means[0]} (lowest {best[0]:.4f})  policy {means[1]} (lowest {best[1]:.4f})",
            flush=True,
        )
    minutes = (time.process_time() - began) / 60
    return {
        "sizes": sizes,
        "steps": steps,
        "rate": rate,
        "symmetry": symmetry,
        "minutes": minutes,
        "runs": runs,
    }


if __name__ == "__main__":
    if sys.argv[1] == "rows":
        for name in sys.argv[2:]:
            print_rows(Path(name))
    else:
        given = [float(text) for text in sys.argv[4:]] + [1500, 3, 1e-3, 0][len(sys.argv) - 4 :]
        found = compare(Path(sys.argv[2]), int(given[0]), int(given[1]), given[2], bool(given[3]))
        Path(sys.argv[3]).write_text(json.dumps(found) + "\n", encoding="utf-8")
