"""The contract of every kind of loader: once, the same steps for any ranks and workers, resumable anywhere.

The tables of what a loader must deliver come from the single loader of one process and from its stored order.
"""

from __future__ import annotations

import itertools
import json
import pickle
import warnings
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest

from hexdata import HexdataError, Loader
from hexdata.loader import combine_digests
from tests.kit.loaders import BATCH, LOADERS, LoaderKind, make_store
from tests.pairs import FULL

WORLDS = ((1, 3), (2, 2), (3, 1), (4, 2))
"""Numbers of ranks and of workers."""

Steps = list[list[int]]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("contract"))


def ids_of(batch: Any) -> list[int]:
    """Return the ids of a batch without padding."""
    ids = batch["position_id"]
    found: list[int] = (ids[~batch["padding"]] if "padding" in batch else ids).tolist()
    return found


def rest(loader: Any, workers: int) -> Steps:
    """Return what the workers of one rank deliver, by step."""
    first = loader.state_dict()["batch"]
    own = [loader._deliveries(worker, workers) for worker in range(workers)]
    steps = [ids_of(next(own[step % workers]).batch) for step in range(first, len(loader))]
    assert all(next(worker, None) is None for worker in own)
    return steps


def of_world(
    kind: LoaderKind, store: Path, ranks: int, workers: int, *, batch: int, state: Any = None, **options: Any
) -> Steps:
    """Return the sorted ids of each step over all ranks, in an epoch or after a state."""
    epoch = options.pop("epoch", 0)
    parts = []
    for rank in range(ranks):
        loader = kind(store, rank=rank, world_size=ranks, batch_size=batch // ranks, **options)
        loader.set_epoch(epoch)
        if state is not None:
            loader.load_state_dict(json.loads(json.dumps(state)))
        parts.append(rest(pickle.loads(pickle.dumps(loader)), workers))
    return [sorted(itertools.chain(*step)) for step in zip(*parts, strict=True)]


@pytest.mark.parametrize("number", range(12 if FULL else 1))
@pytest.mark.parametrize("name", LOADERS)
def test_contract(store: Path, name: str, number: int) -> None:
    kind, number = LOADERS[name], list(LOADERS).index(name) + number
    ranks, workers = WORLDS[number % len(WORLDS)]
    random = Random(number)
    batch, epoch = random.choice([BATCH, 2 * BATCH, 3 * BATCH]), random.randrange(4)
    options: dict[str, Any] = {"batch": batch}
    if kind.make is None:
        options["remainder"] = ("short", "pad", "drop")[number % 3]
    alone = of_world(kind, store, 1, 1, epoch=epoch, **options)
    delivered = list(itertools.chain(*alone))
    if kind.once:
        assert len(set(delivered)) == len(delivered)
        kept = {**options, "batch_size": batch, "shuffle": False}
        del kept["batch"]
        stored = set(itertools.chain(*map(ids_of, kind(store, **kept | {"remainder": "short"}))))
        dropped = len(stored) % batch if options["remainder"] == "drop" else 0
        assert set(delivered) <= stored
        assert len(delivered) == len(stored) - dropped
    assert of_world(kind, store, ranks, workers, epoch=epoch, **options) == alone

    loader = kind(store, batch_size=batch, **{n: v for n, v in options.items() if n != "batch"})
    loader.set_epoch(epoch)
    stop = random.randint(0, len(alone))
    for _ in itertools.islice(loader, stop):
        pass
    state = loader.state_dict()
    copied = pickle.loads(pickle.dumps(loader))
    resumed = kind(store, batch_size=batch, **{n: v for n, v in options.items() if n != "batch"})
    resumed.load_state_dict(json.loads(json.dumps(state)))
    if stop < len(alone):
        assert of_world(kind, store, ranks, workers, state=state, **options) == alone[stop:]
        assert [sorted(ids_of(each)) for each in copied] == alone[stop:]
    following = of_world(kind, store, 1, 1, epoch=epoch + 1, **options)
    if stop < len(alone):
        assert [sorted(ids_of(each)) for each in resumed] == alone[stop:]
    assert (resumed.epoch, resumed.batch) == (epoch + 1, 0)
    assert [sorted(ids_of(each)) for each, _ in zip(resumed, range(len(resumed)), strict=False)] == following
    assert resumed.epoch == epoch + 2  # also if a loop takes exactly the batches of an epoch


@pytest.mark.parametrize("name", [name for name, kind in LOADERS.items() if kind.counts_ids])
def test_digests_of_ranks_add_up(store: Path, name: str) -> None:
    kind = LOADERS[name]
    whole, *ranks = (
        kind(store, batch_size=4 * BATCH // ranks, rank=rank, world_size=ranks)
        for rank, ranks in ((0, 1), (0, 4), (1, 4), (2, 4), (3, 4))
    )
    digests = []
    for _ in range(2):
        for loader in (whole, *ranks):
            for _ in loader:
                pass
        assert combine_digests([rank.epoch_digest for rank in ranks]) == whole.epoch_digest
        digests.append(whole.epoch_digest)
    assert digests[0] != digests[1]


@pytest.fixture(scope="module")
def orders(store: Path) -> dict[str, tuple[Any, list[list[int]]]]:
    """A loader of each kind, and the positions of each batch of its first two epochs."""
    made = {name: kind(store) for name, kind in LOADERS.items()}
    return {n: (loader, [ids_of(b) for _ in range(2) for b in loader]) for n, loader in made.items()}


@pytest.mark.parametrize("name", LOADERS)
def test_a_state_belongs_to_its_kind(
    store: Path, orders: dict[str, tuple[Any, list[list[int]]]], name: str
) -> None:
    """Every other kind that delivers another order refuses it, within an epoch and between epochs.

    One of four pairs of kinds is tried, unless ``HEXDATA_TESTS=full``.
    """
    kind = LOADERS[name]
    for stop in (0, 1):
        loader = kind(store)
        for _ in itertools.islice(loader, stop):
            pass
        state = json.loads(json.dumps(loader.state_dict()))
        kind(store).load_state_dict(state)
        for number, (other, order) in enumerate(orders.values(), start=list(LOADERS).index(name) + stop):
            if order != orders[name][1] and (FULL or number % 4 == 0):
                with pytest.raises(HexdataError):
                    other.load_state_dict(state)


def test_weights_are_exact_over_epochs(store: Path) -> None:
    """Over ten epochs, a position of weight w is delivered 10 w times, to within less than 4."""
    for name in ("weighted", "weighted shards"):
        loader = LOADERS[name](store)
        counts: Counter[int] = Counter()
        for _ in range(10):
            for batch in loader:
                counts.update(ids_of(batch))
        stored = itertools.chain(*(ids_of(b) for b in Loader(store, shuffle=False, fields=("position_id",))))
        for position in stored:
            weight = 0.5 + position % 3 if name == "weighted" else position % 3 / 2
            assert abs(counts[position] - 10 * weight) < 4


FIELDS = ("board", "policy", "value", "move", "player_to_move", "position_id", "game_id", "total_positions")


@pytest.mark.parametrize("mode", ["games", "exact", "stream"])
@pytest.mark.parametrize("split", ["train", "val"])
def test_every_mode_delivers_the_same_contents(store: Path, mode: Any, split: str) -> None:
    def contents(mode: Any) -> dict[int, tuple[bytes, ...]]:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            batches = list(Loader(store, split=split, mode=mode, fields=FIELDS, batch_size=48))
        return {
            int(position): tuple(batch[name][row].tobytes() for name in FIELDS)
            for batch in batches
            for row, position in enumerate(batch["position_id"])
        }

    assert contents(mode) == contents("games")
