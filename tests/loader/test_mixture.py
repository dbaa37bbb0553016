"""Tests of ``Mixture``: exact proportions, epochs of each source, ranks, workers and resuming."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import pickle
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hexdata.batch import FIELDS
from hexdata.errors import ConfigError, StoreError
from hexdata.loader import Loader
from hexdata.loader.mixture import Mixture, MixtureOptions, SourceCounts
from hexdata.order import Permutation, derive_key
from hexdata.shards.blocks import block_fields
from hexdata.shards.format import ShardWriter
from hexdata.shards.manifest import ShardManifest
from hexdata.shards.mapped import GatheredRows, MappedShards

if TYPE_CHECKING:
    from tests.shard_folder import MakeShards, ShardFolder

Arrays = dict[str, np.ndarray]
IDS = ("position_id",)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, shards: ShardFolder) -> list[ShardFolder]:
    """Three stores: 134, 41 and 9 training positions; read only."""
    folder = tmp_path_factory.mktemp("stores")
    kind = type(shards)
    return [shards, kind(folder / "b", {"train": 41}, True, 8), kind(folder / "c", {"train": 9}, False, 9)]


def loaders_of(folders: list[ShardFolder], **options: Any) -> list[Loader]:
    return [
        Loader(folder.path, seed=10 + number, **{"fields": IDS, **options})
        for number, folder in enumerate(folders)
    ]


def run(mixture: Mixture, epochs: int = 1) -> list[Arrays]:
    return [batch for _ in range(epochs) for batch in mixture]


def joined(batches: list[Arrays]) -> Arrays:
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}


def assert_equal(one: Arrays, other: Arrays) -> None:
    assert list(one) == list(other)
    for name in one:
        np.testing.assert_array_equal(one[name], other[name], strict=True, err_msg=name)


# --- proportions --------------------------------------------------------------------------------------


@given(
    st.lists(
        st.one_of(st.integers(1, 20), st.floats(1e-3, 1e3, allow_nan=False)), min_size=1, max_size=6
    ).map(tuple),
    st.integers(1, 200),
    st.integers(-5, 2**70),
    st.one_of(st.integers(0, 50), st.integers(2**40, 2**41)),
)
def test_every_source_has_its_share_after_every_step(
    weights: tuple[float, ...], batch_size: int, seed: int, first: int
) -> None:
    shares = [Fraction(weight) / sum(map(Fraction, weights)) for weight in weights]
    assume(batch_size * min(shares) >= 1)
    counts = SourceCounts(MixtureOptions(weights, batch_size, seed, 0, 1, 0))
    assert counts.after(0) == [0] * len(weights)
    before = counts.after(first * batch_size)
    for step in range(first + 1, first + 30):
        counted = counts.after(step * batch_size)
        assert sum(counted) == step * batch_size
        for source, share in enumerate(shares):
            assert abs(counted[source] - step * batch_size * share) < 1
            assert counted[source] >= before[source]
        before = counted


def test_realised_describes_the_delivered_batches(folders: list[ShardFolder]) -> None:
    mixture = Mixture(loaders_of(folders), (5, 2, 1), batch_size=10, seed=3)
    assert [(source.positions, source.share) for source in mixture.realised] == [(0, 0.0)] * 3
    counts = np.zeros(3, int)
    for batch in itertools.islice(itertools.chain(mixture, mixture), 40):
        counts += np.bincount(batch["source"], minlength=3)
        realised = mixture.realised
        assert [source.positions for source in realised] == counts.tolist()
        assert [source.share for source in realised] == pytest.approx((counts / counts.sum()).tolist())
    assert [source.weight for source in realised] == [5 / 8, 2 / 8, 1 / 8]
    assert [source.epochs for source in realised] == pytest.approx((counts / [134, 41, 9]).tolist())


@pytest.mark.parametrize(
    ("weights", "batch_size", "pace", "steps"),
    [
        ((1, 1, 1), 10, None, 41),  # 134 positions, 10 / 3 per step
        ((1, 1, 2), 8, 1, 21),  # 41 positions, 2 per step
        ((1, 1, 8), 20, 2, 1),  # 9 positions, 16 per step
        ((67, 32, 1), 100, None, 2),  # 134 positions, 67 per step
        ((66, 33, 1), 100, None, 3),
    ],
)
def test_an_epoch_delivers_the_pacing_source_once(
    folders: list[ShardFolder], weights: Any, batch_size: int, pace: int | None, steps: int
) -> None:
    mixture = Mixture(loaders_of(folders), weights, batch_size=batch_size, pace=pace)
    paced = joined(run(mixture))
    number = pace or 0
    size = len(folders[number].splits["train"]["position_id"])
    delivered = paced["position_id"][paced["source"] == number]
    assert len(mixture) == steps
    assert len(np.unique(delivered)) == size
    assert mixture.epoch == 1


# --- order --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [True, False])
def test_each_source_delivers_its_epochs_in_turn(folders: list[ShardFolder], shuffle: bool) -> None:
    """With all fields and random draws."""
    options: dict[str, Any] = {
        "fields": FIELDS,
        "planes": 3,
        "symmetry": True,
        "tier_probability": (1, 0.6, 0.3, 0),
        "shuffle": shuffle,
    }
    mixture = Mixture(loaders_of(folders, **options), (3, 2, 1), batch_size=17, seed=3)
    delivered = joined(run(mixture, epochs=2))
    assert list(delivered) == [*FIELDS, "source"]
    sources = delivered.pop("source")
    assert sources.dtype == np.uint8
    sources = joined(run(Mixture(loaders_of(folders, **options), (3, 2, 1), batch_size=17, seed=3), 2))[
        "source"
    ]
    for number, loader in enumerate(loaders_of(folders, **options)):
        epochs = joined([batch for _ in range(25) for batch in loader])
        own = {name: array[sources == number] for name, array in delivered.items()}
        length = len(own["value"])
        assert length > loader.positions  # more than one epoch
        assert_equal(own, {name: array[:length] for name, array in epochs.items()})


def test_the_order_is_as_documented(folders: list[ShardFolder]) -> None:
    weights, size, seed = (5, 2, 1), 12, 9
    mixture = Mixture(loaders_of(folders), weights, batch_size=size, seed=seed)
    streams = [
        iter([int(x) for _ in range(20) for batch in loader for x in batch["position_id"]])
        for loader in loaders_of(folders)
    ]
    offset = Fraction(derive_key(seed, "mixture"), 2**64)

    def count_up_to(total: int, sources: int) -> int:
        return math.floor(Fraction(total * sum(weights[:sources]), sum(weights)) + offset)

    for step, batch in enumerate(run(mixture, epochs=2)):
        ends = [count_up_to((step + 1) * size, i) - count_up_to(step * size, i) for i in range(4)]
        unmixed = [source for source in range(3) for _ in range(ends[source + 1] - ends[source])]
        order = Permutation(size, derive_key(seed, "mixture", step))
        expected = [unmixed[order[index]] for index in range(size)]
        assert batch["source"].tolist() == expected
        assert batch["position_id"].tolist() == [next(streams[source]) for source in expected]


def test_the_order_is_pinned(folders: list[ShardFolder]) -> None:
    """If these literals change, mixtures cannot be repeated or resumed; increase ORDER_VERSION."""
    batches = run(Mixture(loaders_of(folders), (4.5, 2.2, 1.3), batch_size=8, seed=1))
    assert [batch["source"].tolist() for batch in batches[:3]] == [
        [0, 1, 0, 0, 0, 1, 2, 0],
        [0, 0, 0, 1, 0, 1, 2, 2],
        [0, 0, 0, 0, 1, 0, 2, 1],
    ]
    assert derive_key(1, "mixture") == 0x973CB64B7542E7A6
    assert derive_key(1, "mixture", 2) == 0x7AF3405CBED048B


@pytest.mark.parametrize("world_size", [2, 3, 4, 6, 12])
def test_ranks_divide_the_batches_of_a_single_rank(folders: list[ShardFolder], world_size: int) -> None:
    options: dict[str, Any] = {"fields": ("board", "value", "position_id"), "symmetry": True}
    alone = run(Mixture(loaders_of(folders, **options), (4, 2, 1), batch_size=12), 2)
    ranks = [
        run(
            Mixture(
                loaders_of(folders, **options),
                (4, 2, 1),
                batch_size=12 // world_size,
                rank=rank,
                world_size=world_size,
            ),
            2,
        )
        for rank in range(world_size)
    ]
    for batch, *parts in zip(alone, *ranks, strict=True):
        assert_equal(joined(parts), batch)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_rank_reads_only_its_positions_in_large_chunks(
    make_shards: MakeShards, monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    """Each position is read by one rank, together with those of other steps."""
    folder = make_shards(train=4000)
    requested: list[int] = []
    gather = MappedShards.gather

    def count(shards: MappedShards, rows: npt.NDArray[np.int64], members: Sequence[str]) -> GatheredRows:
        requested.append(len(rows))
        return gather(shards, rows, members)

    monkeypatch.setattr(MappedShards, "gather", count)
    delivered = 0
    for rank in range(world_size):
        loaders = [Loader(folder.path, seed=seed, fields=IDS) for seed in (1, 2)]
        options: dict[str, Any] = {"batch_size": 40 // world_size, "rank": rank, "world_size": world_size}
        mixture = Mixture(loaders, (3, 1), **options)
        delivered += sum(len(batch["source"]) for batch in mixture)
    assert delivered == sum(requested)
    assert len(requested) <= 3 * 3 * world_size  # chunks, sources, and one more where an epoch ends


def test_batches_and_positions_of_the_loaders_are_not_used(folders: list[ShardFolder]) -> None:
    whole = run(Mixture(loaders_of(folders), (4, 2, 1), batch_size=12))
    others = loaders_of(folders, batch_size=5, rank=1, world_size=2, remainder="pad")
    mixture = Mixture(others, (4, 2, 1), batch_size=12)
    mixture.load_state_dict(Mixture(loaders_of(folders), (4, 2, 1), batch_size=12).state_dict())
    for expected, batch in zip(whole, mixture, strict=True):
        assert_equal(batch, expected)
        for loader in others:
            next(iter(loader), None)
    state = mixture.state_dict()
    Mixture(loaders_of(folders), (4, 2, 1), batch_size=12).load_state_dict(state)


def test_the_pattern_depends_on_seed_and_step(folders: list[ShardFolder]) -> None:
    patterns = [
        tuple(batch["source"].tolist())
        for seed in (1, 2)
        for batch in run(Mixture(loaders_of(folders), (2, 1, 1), batch_size=40, seed=seed))
    ]
    assert len(set(patterns)) == len(patterns)
    assert {tuple(np.bincount(pattern).tolist()) for pattern in patterns} == {(20, 10, 10)}


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_workers_divide_the_rest_of_the_epoch(folders: list[ShardFolder], workers: int) -> None:
    mixture = Mixture(loaders_of(folders), (4, 2, 1), batch_size=12)
    whole = run(mixture, 2)
    for stop in (0, 1, 4, len(mixture) - 1, len(mixture) + 2):
        other = Mixture(loaders_of(folders), (4, 2, 1), batch_size=12)
        for _ in itertools.islice(itertools.chain(other, other), stop):
            pass
        by_worker = [list(other.batches(worker, workers)) for worker in range(workers)]
        end = len(mixture) * (stop // len(mixture) + 1)
        for step, expected in enumerate(whole[stop:end], start=stop % len(mixture)):
            assert_equal(by_worker[step % workers].pop(0), expected)
        assert by_worker == [[]] * workers
        assert other.state_dict()["batch"] == stop % len(mixture)
    with pytest.raises(ConfigError, match="worker must be below workers"):
        next(mixture.batches(workers, workers))


# --- resuming -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 3])
def test_resuming_after_each_batch_delivers_the_rest(folders: list[ShardFolder], world_size: int) -> None:
    options: dict[str, Any] = {"weights": (4, 2, 1), "seed": 2}
    alone = Mixture(loaders_of(folders), batch_size=12, **options)
    whole = run(alone, 2)
    mixture = Mixture(loaders_of(folders), batch_size=12, **options)
    passing = iter(whole)
    for step in range(len(whole) + 1):
        state = json.loads(json.dumps(mixture.state_dict()))
        assert len(json.dumps(state)) < 500
        assert (state["epoch"], state["batch"]) == divmod(step, len(alone))
        rest = []
        for rank in range(world_size):
            other = Mixture(
                loaders_of(folders), batch_size=12 // world_size, rank=rank, world_size=world_size, **options
            )
            other.load_state_dict(state)
            assert other.realised == mixture.realised
            rest.append(list(itertools.islice(other, 2)))
        left = [] if step == len(whole) else whole[step : step - step % len(alone) + len(alone)]
        for expected, *parts in zip(left[:2], *rest, strict=False):
            assert_equal(joined(parts), expected)
        if step < len(whole):
            assert_equal(next(iter(mixture)), next(passing))  # the next loop continues


def test_any_step_is_computed_directly(folders: list[ShardFolder]) -> None:
    mixture = Mixture(loaders_of(folders), (4, 2, 1), batch_size=12)
    mixture.set_epoch(10**12)
    batch = next(iter(mixture))
    assert mixture.epoch == 10**12
    assert len(batch["position_id"]) == 12
    assert abs(mixture.realised[0].share - 4 / 7) < 1e-9


def test_a_mixture_can_be_pickled(folders: list[ShardFolder]) -> None:
    mixture = Mixture(loaders_of(folders), (4, 2, 1), batch_size=12)
    next(iter(mixture))
    other = pickle.loads(pickle.dumps(mixture))
    assert_equal(next(iter(other)), next(iter(mixture)))


def test_changing_the_epoch_during_an_iteration_is_an_error(folders: list[ShardFolder]) -> None:
    mixture = Mixture(loaders_of(folders), (4, 2, 1), batch_size=12)
    batches = iter(mixture)
    next(batches)
    mixture.set_epoch(5)
    with pytest.raises(ConfigError, match="changed while iterating"):
        next(batches)
    with pytest.raises(ConfigError, match="epoch cannot be used; found -1"):
        mixture.set_epoch(-1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, r"another seed; found {'seed': 0}; expected {'seed': 1}"),
        ({"batch_size": 8}, "another global_batch"),
        ({"weights": (4, 2, 2)}, "another weights"),
        ({"pace": 1}, "another pace"),
    ],
)
def test_a_state_of_other_options_is_refused(
    folders: list[ShardFolder], change: dict[str, Any], message: str
) -> None:
    options: dict[str, Any] = {"weights": (4, 2, 1), "batch_size": 12}
    state = Mixture(loaders_of(folders), **options).state_dict()
    with pytest.raises(ConfigError, match=message):
        Mixture(loaders_of(folders), **{**options, **change}).load_state_dict(state)


@pytest.mark.parametrize(
    "change",
    [{"seed": 7}, {"shuffle": False}, {"where": "move >= 3"}, {"symmetry": True}, {"fields": ("move",)}],
)
def test_a_state_of_other_sources_is_refused(folders: list[ShardFolder], change: dict[str, Any]) -> None:
    state = Mixture([Loader(folders[0].path)], (1,), batch_size=12).state_dict()
    same = Loader(folders[0].path, batch_size=7, rank=1, world_size=2, remainder="drop")
    Mixture([same], (1,), batch_size=12).load_state_dict(state)
    with pytest.raises(ConfigError, match="another sources"):
        Mixture([Loader(folders[0].path, **change)], (1,), batch_size=12).load_state_dict(state)


def test_an_invalid_state_is_refused(folders: list[ShardFolder]) -> None:
    mixture = Mixture(loaders_of(folders), (4, 2, 1), batch_size=12)
    state = mixture.state_dict()
    for name in ("version", "order_version"):
        with pytest.raises(StoreError, match=f"another {name}; found 99; expected 1"):
            mixture.load_state_dict({**state, name: 99})
    for broken in (
        {},
        None,
        {**state, "batch": len(mixture) + 1},
        {**state, "epoch": -1},
        {**state, "batch": "2"},
    ):
        with pytest.raises(ConfigError, match="state"):
            mixture.load_state_dict(broken)  # type: ignore[arg-type]
    assert mixture.state_dict() == state


# --- options ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": (1, 1)}, "number of weights differs from the number of loaders; found 2; expected 3"),
        ({"weights": (1, 0, 1)}, "weights cannot be used"),
        ({"weights": (1, -1, 1)}, "weights cannot be used"),
        ({"weights": (1, float("inf"), 1)}, "weights cannot be used"),
        ({"weights": (1, float("nan"), 1)}, "weights cannot be used"),
        ({"weights": (1, "2", 1)}, "weights cannot be used"),
        (
            {"weights": (6, 5, 1), "batch_size": 11},
            "source 2 would have less than one position per step; .* 12 for",
        ),
        ({"batch_size": 0}, "batch_size cannot be used; found 0; expected an integer, at least 1"),
        ({"batch_size": 2.0}, "batch_size"),
        ({"world_size": 2, "rank": 2}, "rank must be below world_size; found 2"),
        ({"seed": "7"}, "seed"),
        ({"pace": 3}, "pace must be the index of a loader; found 3; expected below 3"),
        ({"pace": -1}, "pace"),
    ],
)
def test_invalid_options_are_refused(
    folders: list[ShardFolder], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Mixture(loaders_of(folders), **{"weights": (1, 1, 1), **options})


def test_numpy_numbers_are_accepted(folders: list[ShardFolder]) -> None:
    plain = Mixture(loaders_of(folders), (4, 2, 1.5), batch_size=12, seed=3, pace=1)
    numpys = Mixture(
        loaders_of(folders),
        (np.int64(4), np.int32(2), np.float32(1.5)),  # type: ignore[arg-type]
        batch_size=np.int64(12),  # type: ignore[arg-type]
        seed=np.uint64(3),  # type: ignore[arg-type]
        pace=np.int8(1),  # type: ignore[arg-type]
    )
    numpys.set_epoch(np.int64(0))  # type: ignore[arg-type]
    assert json.dumps(numpys.state_dict()) == json.dumps(plain.state_dict())
    for epoch in (-1, 1.5, "1", True):
        with pytest.raises(ConfigError, match="epoch cannot be used"):
            plain.set_epoch(epoch)  # type: ignore[arg-type]


def test_incompatible_loaders_are_refused(folders: list[ShardFolder], make_shards: MakeShards) -> None:
    first = Loader(folders[0].path)
    for other, message in [
        (
            Loader(folders[1].path, mode="stream"),
            "source 1: a mixture cannot contain a loader in stream mode",
        ),
        (Loader(folders[1].path, planes=3), "source 1: the batch options of the loaders differ"),
        (Loader(make_shards("empty", train=0).path), "source 1: the loader has no positions"),
    ]:
        with pytest.raises(ConfigError, match=message):
            Mixture([first, other], (1, 1))
    with pytest.raises(ConfigError, match="invalid number of loaders; found 0"):
        Mixture([], ())
    with pytest.raises(ConfigError, match="invalid number of loaders; found 257"):
        Mixture([first] * 257, (1,) * 257)


def test_different_board_sizes_are_refused(folders: list[ShardFolder], tmp_path: Path) -> None:
    block = {name: np.zeros((4, *spec.shape), spec.dtype) for name, spec in block_fields(3, False).items()}
    block["position_id"] = np.arange(4)
    path = tmp_path / "train-000000.tar"
    with path.open("wb") as file:
        writer = ShardWriter(file)
        writer.write_block(0, block)
        writer.close()
    entry = writer.entry(path.name, hashlib.sha256(path.read_bytes()).hexdigest())
    manifest = ShardManifest(
        board_size=3,
        layout="blocks",
        block_size=4,
        shard_size=4,
        seed=1,
        fields=block_fields(3, with_policy=False),
        splits={"train": (entry,)},
    )
    (tmp_path / "manifest.json").write_bytes(manifest.dumps())
    small = Loader(tmp_path)
    assert len(run(Mixture([small], (1,), batch_size=3))) == 2
    message = "source 1: the board sizes of the loaders differ; found 3; expected 5"
    with pytest.raises(ConfigError, match=message):
        Mixture([Loader(folders[0].path), small], (1, 1))
