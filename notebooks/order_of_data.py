"""Does the order of the data matter for a Hex network? The experiment of ``04-order-of-data.ipynb``.

Stated before the run:

- hexdata splits the data by game: 70 % train, 10 % val, 20 % test.
- Arms differ only in the order of the training positions, see ``epochs_of``. All arms take the same number of
  steps; an arm whose pass ends earlier begins its next one.
- The rule for the learning rate of each arm and setting: of ``RATES``, the one with the lowest loss on val,
  policy plus value, at the end of training, as the mean of all seeds.
- The test losses of the networks with this rate are compared once, game by game and seed by seed. An interval
  is the range from the 2.5th to the 97.5th percentile of 10,000 bootstrap samples of both games and seeds.
- Less than ``NOTHING`` nats counts as no difference: "none" means that the whole interval is below it,
  "worse" and "better" that the mean is not and the interval excludes 0. Everything else is "unclear".

All runs of a seed are trained at once, since one network is small for a GPU: the first axis of each tensor is
the run. The results of a job, one setting and one seed, are appended to the file of results when it ends. The
same command continues.

    python order_of_data.py --size cpu --seconds 1350 results.jsonl FILE...
    python order_of_data.py --size gpu --seconds 320 results.jsonl FILE...
    python order_of_data.py --summary order_of_data.json results.jsonl
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, layer_norm, pad, relu
from webdataset import shuffle as shuffle_buffer

from hexdata import ConvertOptions, Loader, convert_sources, derive_key
from hexdata.board import SYMMETRIES, swaps_colours, transform_moves, transform_planes, unpack_boards
from hexdata.demo import DemoOptions, make_legacy
from hexdata.order import sort_key
from hexdata.schema import NO_MOVE
from hexdata.store import Store

BOARD_SIZE: Final = 13
RATES: Final = (3e-4, 1e-3, 3e-3, 1e-2)
NOTHING: Final = 0.005
HEADS: Final = ("policy", "value")

Indices = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Size:
    """Size of the experiment. ``games`` is the number of generated games where there are no files."""

    channels: int
    blocks: int
    batch: int
    seeds: int = 5
    buffer: int = 2_048
    shards: int = 20
    games: int = 5_000


SIZES: Final = {
    "gpu": Size(channels=32, blocks=3, batch=256),
    "cpu": Size(channels=16, blocks=1, batch=128, games=1_000),
    "tiny": Size(channels=4, blocks=1, batch=32, seeds=2, buffer=64, games=20),
}


@dataclass(frozen=True)
class Setting:
    """Arms that are trained at once, for a number of passes, with or without symmetries."""

    arms: tuple[str, ...]
    passes: int
    symmetry: bool


ARMS: Final = ("global", "pool", "pool of 500", "buffer", "games")
SETTINGS: Final = (
    Setting(ARMS, 1, False),
    Setting(("global", "pool"), 3, False),
    Setting(("global", "pool"), 3, True),
    Setting(("global", "pool"), 1, True),
    Setting(("short pool",), 1, False),
    Setting(("buffer", "games"), 3, False),
)
"""In order of importance, for runs whose time ends."""


# --- the data and their orders


@dataclass(frozen=True)
class Data:
    """Positions of a store. Row s·N + i of the tensors is position i under symmetry s."""

    store: Path
    boards: torch.Tensor
    """uint8 (4·N, n, n, 4): blue, red, the player to move, and ones, which show a convolution the edges."""
    moves: torch.Tensor
    """int64 (4·N,), -100 on final positions, which have no move."""
    values: torch.Tensor
    """float32 (4·N,), 1 where red wins."""
    game: Indices
    """Game of each position (N,)."""
    source: Indices
    """Source file of each position (N,)."""
    split: dict[str, Indices]
    """Positions of train, val and test in the order of the files."""


def make_store(files: Sequence[Path], folder: Path, size: Size) -> Path:
    """Convert files, or generated games if there are none, and return the path of the store."""
    if not files:
        make_legacy(folder / "games", DemoOptions(games=size.games))
        files = [folder / "games"]
    convert_sources([*files], folder / "store", ConvertOptions(val=0.1, test=0.2, workers=1))
    return folder / "store"


def read_data(path: Path, device: str) -> Data:
    """Read the positions of a store under all symmetries."""
    store, n = Store.open(path), BOARD_SIZE
    rows, games = pq.read_table(store.files("positions")), pq.read_table(store.files("games"))
    game = rows["game_id"].to_numpy()
    split = np.array(games["split"])[game]
    planes = unpack_boards(
        np.frombuffer(b"".join(rows["board"].to_pylist()), np.uint8).reshape(len(game), -1), n, np.uint8
    )
    move, player = rows["move"].fill_null(NO_MOVE).to_numpy(), rows["player_to_move"].to_numpy()
    value = rows["value"].to_numpy()
    boards, moves, values = [], [], []
    for symmetry in SYMMETRIES:
        swap = swaps_colours(symmetry)
        extra = np.empty_like(planes)
        extra[:, 0] = (player ^ swap)[:, None, None]
        extra[:, 1] = 1
        both = np.concatenate([transform_planes(planes, symmetry), extra], axis=1)
        boards.append(torch.from_numpy(np.ascontiguousarray(np.moveaxis(both, 1, 3))))
        moved = transform_moves(np.where(move == NO_MOVE, 0, move), n, symmetry).astype(np.int64)
        moves.append(torch.from_numpy(np.where(move == NO_MOVE, -100, moved)))
        values.append(torch.from_numpy(1 - value if swap else value.copy()))
    return Data(
        store=path,
        boards=torch.cat(boards).to(device),
        moves=torch.cat(moves).to(device),
        values=torch.cat(values).to(device),
        game=game,
        source=games["source_id"].to_numpy()[game],
        split={name: np.flatnonzero(split == name) for name in ("train", "val", "test")},
    )


def epochs_of(arm: str, data: Data, seed: int, size: Size) -> Iterator[Indices]:
    """Yield the training positions in the order of each epoch, without end.

    "global" is the order of ``hexdata.Loader``, "games" that of the files, game after game. "buffer" is the
    latter through WebDataset's shuffle buffer, which is full before it yields. "pool" and "short pool" are
    the legacy loader on files that the legacy tools shuffled, see ``pool_order``. "pool of 500" has as many
    files as real data. Its pool has 1 % of the positions, which here is so little that positions of a game
    meet in a batch. In a pool of a million positions they do not, and with 20 files they do not here.
    """
    train = data.split["train"]
    if arm == "global":
        loader = Loader(data.store, split="train", batch_size=4_096, seed=seed, fields=("position_id",))
        while True:
            yield np.concatenate([batch["position_id"] for batch in loader]).astype(np.int64)
    if arm == "games":
        while True:
            yield train
    key = derive_key(seed, arm)
    if arm == "buffer":
        draw = random.Random(key)  # noqa: S311 - an order, no secret
        while True:
            stage = shuffle_buffer(size.buffer, initial=size.buffer, rng=draw)
            yield np.fromiter(stage(iter(train)), np.int64, len(train))
    drawn = np.random.default_rng(key)
    shards = legacy_shards(train, data.source, 500 if arm == "pool of 500" else size.shards, drawn)
    while True:
        yield pool_order(shards, drawn)
        drawn.shuffle(shards)  # as the legacy loader does before each further epoch


def legacy_shards(train: Indices, source: Indices, files: int, drawn: np.random.Generator) -> list[Indices]:
    """Return the files of the legacy shuffle: position i of a source goes to file i mod ``files``."""
    counts = np.unique(source[train], return_counts=True)[1]
    file = np.concatenate([np.arange(count) for count in counts]) % files
    return [drawn.permutation(train[file == number]) for number in range(files)]


def pool_order(shards: Sequence[Indices], drawn: np.random.Generator) -> Indices:
    """Return what the legacy loader delivers of shuffled files.

    Its pool is refilled below three quarters. When it is full, the rest of the file that is read is dropped.
    Its size is that of 5.13 files, as 1,000,000 positions are of the real files of 194,976.
    """
    size = round(5.13 * float(np.mean([len(shard) for shard in shards])))
    waiting, pool, delivered = list(shards), np.empty(0, np.int64), []
    while len(pool) or waiting:
        while len(pool) < size and waiting:
            pool = np.concatenate([pool, waiting.pop(0)[: size - len(pool)]])
        pool = drawn.permutation(pool)
        taken = len(pool) - math.ceil(0.75 * size) + 1 if waiting else len(pool)
        delivered.append(pool[:taken])
        pool = pool[taken:]
    return np.concatenate(delivered)


def rows_of(
    arm: str, data: Data, seed: int, size: Size, passes: int, symmetry: bool
) -> npt.NDArray[np.int32]:
    """Return the rows of ``data`` that a run trains on, (steps, batch).

    They are passes over as many positions as there are, or for "short pool", as its first pass delivers.
    """
    rows: list[Indices] = []
    count = 0
    for epoch, order in enumerate(epochs_of(arm, data, seed, size)):
        count = count or passes * len(order if arm == "short pool" else data.split["train"])
        drawn = (sort_key(order, derive_key(seed, "augment", epoch)) >> np.uint64(62)).astype(np.int64)
        rows.append(order + symmetry * drawn * len(data.game))
        if sum(map(len, rows)) >= count:
            break
    whole = count // size.batch * size.batch
    return np.concatenate(rows)[:whole].reshape(-1, size.batch).astype(np.int32)


# --- many networks at once


def patches(x: torch.Tensor) -> torch.Tensor:
    """Return the surroundings of each cell, 3 by 3: (R, B, n, n, C) -> (R, B·n·n, 9·C)."""
    words = x.flatten(0, 1).contiguous().view(torch.int64)  # copies 8 bytes at a time, not 2
    around = pad(words, (0, 0, 1, 1, 1, 1)).unfold(1, 3, 1).unfold(2, 3, 1)
    return around.permute(0, 1, 2, 4, 5, 3).reshape(len(x), -1, 9 * words.shape[-1]).view(x.dtype)


class Convolution(torch.autograd.Function):
    """Convolution, 3 by 3, of each run with its own weights (R, 9·C, D), as one product of matrices."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:  # noqa: D102
        columns = patches(x)
        ctx.save_for_backward(columns, weights)
        return torch.bmm(columns, weights).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # noqa: D102
        columns, weights = ctx.saved_tensors
        runs, _, out = weights.shape
        of_weights = torch.bmm(columns.transpose(1, 2), gradient.reshape(runs, -1, out))
        if not ctx.needs_input_grad[0]:
            return None, of_weights
        # That of x is a convolution, too: with the kernel turned by 180 degrees, from outputs to inputs.
        turned = weights.view(runs, 9, -1, out).flip(1).transpose(2, 3).reshape(runs, 9 * out, -1)
        return torch.bmm(patches(gradient), turned).view(*gradient.shape[:-1], -1), of_weights


class Networks:
    """Residual networks, one a run, with a policy head and a value head. No batch statistics, no dropout.

    Attributes:
        weights: float32 (R, P): all weights of each run, a row. At first they are equal.
    """

    def __init__(self, runs: int, size: Size, seed: int, device: str) -> None:
        c = size.channels
        block = [(9 * c, c), (1, c), (9 * c, c)]
        heads = [(c, 1), (1, BOARD_SIZE**2), (c, c), (1, c), (c, 1), (1, 1)]
        self.shapes = [(36, c), *block * size.blocks, *heads]
        generator = torch.Generator().manual_seed(seed)
        first = [torch.randn(shape, generator=generator) * (2 / shape[0]) ** 0.5 for shape in self.shapes]
        for number, weights in enumerate(first):
            if len(weights) == 1 or number in range(3, 1 + 3 * size.blocks, 3):  # a bias, the end of a block
                weights.zero_()
        flat = torch.cat([weights.flatten() for weights in first])
        self.weights = flat.expand(runs, -1).clone().to(device).requires_grad_()
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32

    def __call__(self, boards: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits of policies (R, B, n·n) and values (R, B) of boards (R, B, n, n, 4)."""
        runs, batch = boards.shape[:2]
        parts = self.weights.split([math.prod(shape) for shape in self.shapes], dim=1)
        weights = [part.view(runs, *shape) for part, shape in zip(parts, self.shapes, strict=True)]
        trunk = [part.to(self.dtype) for part in weights[:-6]]

        def active(x: torch.Tensor) -> torch.Tensor:
            return relu(layer_norm(x, x.shape[2:]))  # within a position: no other one has an influence

        x = Convolution.apply(boards.to(self.dtype), trunk[0])
        for i in range(1, len(trunk), 3):
            inner = Convolution.apply(active(x), trunk[i]) + trunk[i + 1][:, :, None, None]
            x = x + Convolution.apply(relu(inner), trunk[i + 2])
        seen = active(x).flatten(2, 3).float()
        policy, cell_bias, hidden, hidden_bias, value, value_bias = weights[-6:]
        logits = torch.bmm(seen.flatten(1, 2), policy).view(runs, batch, -1) + cell_bias
        deep = relu(torch.bmm(seen.mean(2), hidden) + hidden_bias)
        return logits, (torch.bmm(deep, value) + value_bias)[:, :, 0]

    def losses(self, data: Data, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the losses of policy and value (R, B) of rows (R, B). Without a move, the first is 0."""
        policy, value = self(data.boards[rows])
        moves = cross_entropy(policy.flatten(0, 1), data.moves[rows].flatten(), reduction="none")
        values = binary_cross_entropy_with_logits(value, data.values[rows], reduction="none")
        return moves.view(rows.shape), values


def train(
    setting: Setting, seed: int, data: Data, size: Size, device: str, deadline: float
) -> list[dict[str, Any]]:
    """Train each arm with each rate. Return the results of all runs, or none if the deadline has passed."""
    runs = list(product(setting.arms, RATES))
    orders = [rows_of(arm, data, seed, size, setting.passes, setting.symmetry) for arm in setting.arms]
    rows = torch.from_numpy(np.stack(orders)).to(device).repeat_interleave(len(RATES), 0)
    networks = Networks(len(runs), size, seed, device)
    weights, steps = networks.weights, rows.shape[1]
    rates = torch.tensor([[rate] for _, rate in runs], device=device)
    mean, square = torch.zeros_like(weights), torch.zeros_like(weights)
    for step in range(steps):
        policy, value = networks.losses(data, rows[:, step].long())
        known = (data.moves[rows[:, step].long()] >= 0).sum(1)
        (policy.sum(1) / known + value.mean(1)).sum().backward()
        with torch.no_grad():  # Adam; up to its rate in a twentieth of the steps, down along a cosine
            mean.lerp_(weights.grad, 0.1)
            square.lerp_(weights.grad.square(), 0.001)
            weights.grad = None
            fraction = min((step + 1) / (0.05 * steps), 0.5 + 0.5 * math.cos(math.pi * step / steps))
            corrected = (square / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8
            weights -= fraction * rates * mean / (1 - 0.9 ** (step + 1)) / corrected
        if step % 10 == 0 and weights.sum().item() and time.monotonic() > deadline:  # the sum waits for a GPU
            return []
    sums = {name: measure(networks, data, data.split[name]) for name in ("val", "test")}
    val = sums["val"].sum(2).T / counts(data, "val").sum(1)
    found = []
    for number, (arm, rate) in enumerate(runs):
        facts = {"arm": arm, "passes": setting.passes, "symmetry": setting.symmetry, "steps": steps}
        facts |= {"rate": rate, "seed": seed, "val": val[number].tolist()}
        found.append(facts | {"test": sums["test"][:, number].round(4).tolist()})
    return found


def measure(networks: Networks, data: Data, positions: Indices) -> Floats:
    """Return the sums of the losses of policy and value for each run and game: (2, R, games)."""
    device, game = data.boards.device, np.unique(data.game[positions], return_inverse=True)[1]
    sums = torch.zeros(2, len(networks.weights), game.max() + 1, device=device)
    with torch.no_grad():
        for part in np.array_split(np.arange(len(positions)), math.ceil(len(positions) / 512)):
            rows = torch.from_numpy(positions[part]).to(device).expand(sums.shape[1], -1)
            losses = torch.stack(networks.losses(data, rows))
            sums.index_add_(2, torch.from_numpy(game[part]).to(device), losses)
    return sums.double().cpu().numpy()


def counts(data: Data, name: str) -> Indices:
    """Return the numbers of moves and of positions of each game of a split: (2, games)."""
    positions = data.split[name]
    game = np.unique(data.game[positions], return_inverse=True)[1]
    return np.stack([np.bincount(game[data.moves.cpu().numpy()[positions] >= 0]), np.bincount(game)])


# --- all runs, and what they say


def describe(data: Data, size: Size, device: str, files: Sequence[Path]) -> dict[str, Any]:
    """Return the first line of the results: the machine, the data, and the order of each arm."""
    arms = {}
    for arm in ARMS:
        order = next(epochs_of(arm, data, 0, size))
        batches = np.array_split(data.game[order], len(order) // size.batch)
        games = float(np.mean([len(np.unique(batch)) for batch in batches]))
        arms[arm] = {"delivered": len(order) / len(data.split["train"]), "games in a batch": games}
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else f"{os.cpu_count()} CPU cores",
        "torch": torch.__version__,
        "files": [path.name for path in files],
        "size": asdict(size),
        "splits": {
            name: {"games": len(np.unique(data.game[part])), "positions": len(part)}
            for name, part in data.split.items()
        },
        "arms": arms,
        "counts": counts(data, "test").tolist(),
    }


def run(
    output: Path,
    files: Sequence[Path],
    size: Size,
    settings: Sequence[Setting] = SETTINGS,
    device: str = "cpu",
    deadline: float = math.inf,
) -> list[dict[str, Any]]:
    """Run what is missing in the output, as far as the time allows. Return all its lines."""
    lines = read_lines(output)
    done = {(*key_of(line), line["seed"]) for line in lines[1:]}
    with tempfile.TemporaryDirectory() as folder, output.open("a", encoding="utf-8") as file:
        data = read_data(make_store(files, Path(folder), size), device)
        first = describe(data, size, device, files)
        if not lines:
            file.write(json.dumps(first) + "\n")
            file.flush()
            lines.append(first)
        if any(lines[0][name] != first[name] for name in ("size", "counts")):
            raise SystemExit(f"{output} is of another size or of other data")
        pace = 0.0
        for setting, seed in product(settings, range(size.seeds)):
            work, began = setting.passes * len(setting.arms), time.monotonic()
            is_late = began + 1.1 * pace * work > deadline
            if is_late or (setting.arms[0], setting.passes, setting.symmetry, seed) in done:
                continue
            found = train(setting, seed, data, size, device, deadline)
            file.write("".join(json.dumps(line) + "\n" for line in found))
            file.flush()
            lines += found
            pace = (time.monotonic() - began) / work
    return lines


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file of results; none if there is no file."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


Key = tuple[str, int, bool]


def key_of(line: dict[str, Any]) -> Key:
    """Return arm, passes and symmetry of a result."""
    return line["arm"], line["passes"], line["symmetry"]


def summarize(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the chosen rates, the losses, and the differences with their intervals, as the module says."""
    first = dict(lines[0])
    counts = np.array(first.pop("counts"), float)
    tests: dict[Key, Floats] = {}
    found: dict[str, Any] = first | {"runs": [], "differences": []}
    for key in dict.fromkeys(map(key_of, lines[1:])):
        own = sorted((line for line in lines[1:] if key_of(line) == key), key=lambda line: line["seed"])
        val = {rate: np.mean([line["val"] for line in own if line["rate"] == rate], axis=0) for rate in RATES}
        rate = min(RATES, key=lambda rate: float(np.nan_to_num(val[rate].sum(), nan=np.inf)))
        tests[key] = np.array([line["test"] for line in own if line["rate"] == rate])
        loss = tests[key].sum(2) / counts.sum(1)
        facts = {"of": key, "rate": rate, "seeds": len(loss), "steps": own[0]["steps"]}
        facts |= {"val": {str(rate): mean.round(4).tolist() for rate, mean in val.items()}}
        facts |= {"test": loss.mean(0).round(4).tolist(), "range": np.ptp(loss, axis=0).round(4).tolist()}
        found["runs"].append(facts)
    for arm, passes, symmetry in tests:
        one_pass, plain = (arm, 1, symmetry), (arm, passes, False)
        mixed = ("global", passes, symmetry)
        for other in dict.fromkeys((mixed, one_pass, plain)):
            if other in tests and other != (arm, passes, symmetry):
                difference = compare(tests[arm, passes, symmetry], tests[other], counts)
                found["differences"].append({"of": (arm, passes, symmetry), "from": other} | difference)
    return found


def compare(one: Floats, other: Floats, counts: Floats, samples: int = 10_000) -> dict[str, Any]:
    """Return the difference of two (seeds, heads, games) of summed losses with its interval, by head."""
    seeds = min(len(one), len(other))
    difference = one[:seeds] - other[:seeds]
    drawn = np.random.default_rng(36)
    games = drawn.multinomial(counts.shape[1], np.full(counts.shape[1], 1 / counts.shape[1]), samples)
    of_seeds = drawn.multinomial(seeds, np.full(seeds, 1 / seeds), samples) / seeds
    found = {}
    for number, head in enumerate(HEADS):
        sums = np.einsum("ns,sg,ng->n", of_seeds, difference[:, number], games, optimize=True)
        low, high = np.percentile(sums / (games @ counts[number]), [2.5, 97.5])
        mean = difference[:, number].sum() / counts[number].sum() / seeds
        word = "worse" if mean > 0 else "better"
        if abs(mean) < NOTHING or low <= 0 <= high:
            word = "none" if max(-low, high) < NOTHING else "unclear"
        found[head] = dict(zip(("mean", "low", "high"), np.round([mean, low, high], 4).tolist(), strict=True))
        found[head]["verdict"] = word
    return found


def main() -> None:
    """Run the experiment, or summarize its results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path)
    parser.add_argument("files", type=Path, nargs="*", help="legacy files; without any, generated games")
    parser.add_argument("--size", choices=SIZES, default="cpu")
    parser.add_argument("--device", default=None, help="default: cuda for gpu, else cpu")
    parser.add_argument("--seconds", type=float, default=math.inf, help="end after this time")
    parser.add_argument("--summary", type=Path, help="only write the summary of the results to this file")
    options = parser.parse_args()
    if options.summary:
        text = json.dumps(summarize(read_lines(options.results)))
        options.summary.write_text(text + "\n", encoding="utf-8")
        return
    device = options.device or ("cuda" if options.size == "gpu" else "cpu")
    deadline = time.monotonic() + options.seconds
    run(options.results, options.files, SIZES[options.size], SETTINGS, device, deadline)


if __name__ == "__main__":
    main()
