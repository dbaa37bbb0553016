"""Tests of ``Loader`` and ``PositionDataset`` over shards; tests/promises has the contract of all loaders."""

from __future__ import annotations

import itertools
import pickle
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hexdata.batch import FIELDS
from hexdata.errors import BudgetError, ConfigError, HexdataError, StoreError
from hexdata.loader import Loader, LoaderOptions, PositionDataset
from hexdata.order import shuffle_indices
from hexdata.shards.blocks import FieldSpec
from hexdata.shards.manifest import ShardManifest
from hexdata.shards.reader import load_manifest
from hexdata.shards.sources import make_source
from tests.kit.loaders import Steps, ids_of
from tests.shard_folder import SHARD_SIZE, TARGETS

if TYPE_CHECKING:
    from tests.shard_folder import MakeShards, ShardFolder

IDS = ("position_id",)
STREAM: dict[str, Any] = {"mode": "stream", "streams": (12, 6), "window": 8}
MODES: list[dict[str, Any]] = [{"mode": "exact"}, {"mode": "exact", "shuffle": False}, STREAM]


def flat(steps: Steps) -> list[int]:
    return list(itertools.chain(*steps))


def stored(shards: ShardFolder, start: int = 0, stop: int = 9) -> list[int]:
    """Return the ids of shards start to stop (exclusive) in stored order."""
    found: list[int] = shards.splits["train"]["position_id"][start * SHARD_SIZE : stop * SHARD_SIZE].tolist()
    return found


# --- content and order --------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["exact", "stream", "dataset"])
@pytest.mark.parametrize("dense", [False, True])
def test_batches_contain_the_stored_values(make_shards: MakeShards, mode: Any, dense: bool) -> None:
    folder = make_shards(train=70, dense=dense, targets=dense)
    source = folder.splits["train"]
    rows = np.argsort(source["position_id"])
    fields = [*(name for name in FIELDS if name in source), *(TARGETS if dense else ())]
    if mode == "dataset":
        dataset = PositionDataset(folder.path, fields=fields)
        assert len(dataset) == 70
        batches = [dataset.batch(range(50)), dataset.batch(range(-20, 0))]
        for name, value in dataset[-3].items():
            assert value.tobytes() == batches[1][name][17].tobytes()
    else:
        batches = list(Loader(folder.path, batch_size=52, mode=mode, fields=fields))
    assert sorted(flat(ids_of(batches))) == list(range(70))
    for batch in batches:
        chosen = rows[batch["position_id"]]
        bits = np.unpackbits(source["board"][chosen], axis=1, count=50)
        np.testing.assert_array_equal(batch.pop("board"), bits.reshape(-1, 2, 5, 5).astype("f4"), strict=True)
        assert [*batch] == fields[1:]
        for name, array in batch.items():
            expected = source[name][chosen]
            expected = expected.astype("f4") if expected.dtype == np.float64 else expected
            np.testing.assert_array_equal(array, expected, strict=True, err_msg=name)


@pytest.mark.parametrize("mode", ["exact", "stream"])
def test_validation_has_stored_order_by_default(shards: ShardFolder, mode: Any) -> None:
    val = shards.splits["val"]["position_id"].tolist()
    loader = Loader(shards.path, split="val", batch_size=6, mode=mode, fields=IDS)
    assert flat(ids_of(loader)) == flat(ids_of(loader)) == val
    shuffled = Loader(shards.path, split="val", batch_size=8, shuffle=True, mode=mode, fields=IDS)
    assert flat(ids_of(shuffled)) != val


def test_the_order_is_pinned(shards: ShardFolder) -> None:
    """If this literal changes, runs cannot be repeated or resumed, and ORDER_VERSION must be increased."""
    row = np.argsort(shards.splits["train"]["position_id"])
    loader = Loader(shards.path, mode="exact", batch_size=8, seed=1, fields=IDS)
    assert [row[ids].tolist() for ids in ids_of(loader)[:3]] == [
        [65, 1, 55, 43, 31, 124, 129, 93],
        [78, 130, 71, 64, 119, 105, 17, 4],
        [76, 97, 70, 29, 26, 16, 52, 99],
    ]
    assert row[ids_of(loader)[0]].tolist() == [119, 40, 92, 94, 71, 111, 31, 102]


@pytest.mark.parametrize("weights", [None, "position_id % 5 / 2"])
def test_shuffled_indices_of_a_dataset_give_the_batches_of_the_loader(
    shards: ShardFolder, weights: str | None
) -> None:
    """Including the random symmetries and value weights of the epoch, and in a pickled copy."""
    options: dict[str, Any] = {
        "seed": 9,
        "fields": ("board", "policy", "value", "position_id"),
        "symmetry": True,
        "tier_probability": (1.0, 0.7, 0.4, 0.1),
        "where": "value_sample_tier <> 2",
        "weights": weights,
    }
    loader = Loader(shards.path, batch_size=10, **options)
    dataset = pickle.loads(pickle.dumps(PositionDataset(shards.path, **options)))
    assert len(dataset) < 134
    for epoch in (0, 3):
        loader.set_epoch(epoch)
        dataset.set_epoch(epoch)
        indices = iter(shuffle_indices(dataset.epoch_indices(epoch), 9, epoch))
        for batch in loader:
            for name, array in dataset.batch([next(indices) for _ in batch["value"]]).items():
                np.testing.assert_array_equal(array, batch[name], strict=True)


# --- the last batch -----------------------------------------------------------------------------------


@pytest.mark.parametrize("options", MODES)
def test_the_last_batch_is_divided_padded_or_dropped(shards: ShardFolder, options: dict[str, Any]) -> None:
    common = {**options, "batch_size": 36, "world_size": 4, "fields": ("board", "policy", *IDS)}

    def sizes(remainder: Any) -> list[list[int]]:
        loaders = [Loader(shards.path, rank=rank, remainder=remainder, **common) for rank in range(4)]
        return [[len(ids) for ids in ids_of(loader)] for loader in loaders]

    assert sizes("short") == [[34], [34], [33], [33]]  # of 134
    for remainder in ("pad", "auto"):
        assert sizes(remainder) == [[36]] * 4
    with pytest.raises(ConfigError, match="drop' leaves no batch: 134 positions"):
        Loader(shards.path, remainder="drop", **common)
    alone = Loader(shards.path, remainder="drop", **{**common, "world_size": 1})
    assert [len(ids) for ids in ids_of(alone)] == [36] * 3
    with pytest.raises(ConfigError, match="drop' leaves no batch"):
        alone._for_rank(0, 4)
    empty = list(Loader(shards.path, rank=3, remainder="short", **{**common, "batch_size": 33}))[-1]
    assert [(array.dtype, array.shape) for array in empty.values()] == [
        (np.float32, (0, 2, 5, 5)),
        (np.float32, (0, 25)),
        (np.int64, (0,)),
    ]


@pytest.mark.parametrize("options", MODES)
def test_padding_repeats_positions_and_is_flagged(shards: ShardFolder, options: dict[str, Any]) -> None:
    ranks = [
        list(Loader(shards.path, batch_size=12, rank=rank, world_size=4, fields=IDS, **options))
        for rank in range(4)
    ]
    assert not any(batch["padding"].any() for batches in ranks for batch in batches[:-1])
    last = [batches[-1] for batches in ranks]
    assert [(len(batch["padding"]), int(batch["padding"].sum())) for batch in last] == [
        *[(12, 2)] * 2,
        *[(12, 3)] * 2,
    ]  # 134 = 2 * 48 + 38
    repeated = [i for batch in last for i in batch["position_id"][batch["padding"]].tolist()]
    assert len(set(repeated)) == 10
    if options["mode"] == "exact":  # the first of the epoch
        order = stored(shards)
        order = shuffle_indices(order, 0, 0) if options.get("shuffle", True) else order
        assert repeated == order[:10]
    assert "padding" not in next(iter(Loader(shards.path, batch_size=36, fields=IDS, **options)))


# --- position -----------------------------------------------------------------------------------------


def test_take_ignores_the_rank(shards: ShardFolder) -> None:
    loader = Loader(shards.path, batch_size=7, rank=1, world_size=2, remainder="pad", fields=IDS)
    before = loader.state_dict()
    for ranges, epoch in (([(3, 20), (20, 20), (60, 134), (0, 4)], 0), ([(20, 90), (90, 134)], 1), ([], 2)):
        order = shuffle_indices(stored(shards), 0, epoch)
        assert ids_of(loader.take(ranges, epoch)) == [order[a:b] for a, b in ranges]
    assert loader.state_dict() == before
    for start, stop in ((-1, 3), (4, 3), (0, 135)):
        with pytest.raises(ConfigError, match="is outside the"):
            loader.take([(0, 1), (start, stop)], 0)
    with pytest.raises(ConfigError, match="stream mode cannot"):
        Loader(shards.path, mode="stream").take([(0, 1)], 0)


def test_changing_the_position_during_an_iteration_is_an_error(shards: ShardFolder) -> None:
    loader = Loader(shards.path, batch_size=20)
    start = loader.state_dict()
    for change in (
        lambda: loader.set_epoch(5),
        lambda: loader.load_state_dict(start),
        lambda: next(iter(loader)),
    ):
        loader.set_epoch(0)
        batches = iter(loader)
        next(batches)
        change()
        with pytest.raises(ConfigError, match="changed while iterating"):
            next(batches)


def test_an_epoch_can_start_at_any_batch(shards: ShardFolder) -> None:
    loader = Loader(shards.path, batch_size=20, fields=IDS)
    loader.set_epoch(3)
    whole, epoch_4 = ids_of(loader), ids_of(loader)
    for batch in range(len(whole) + 1):
        loader.set_epoch(3, batch)
        assert ids_of(loader) == (whole[batch:] or epoch_4)
        assert (loader.epoch_digest is None) == (0 < batch < len(whole))
    for epoch, batch in ((3, len(whole) + 1), (3, -1), (3, 2.0), (3, True), (-1, 0)):
        with pytest.raises(ConfigError):
            loader.set_epoch(epoch, batch)  # type: ignore[arg-type]


@pytest.mark.parametrize("remainder", ["short", "pad", "drop"])
@pytest.mark.parametrize("options", MODES)
def test_a_loop_that_is_left_is_continued(
    shards: ShardFolder, options: dict[str, Any], remainder: Any
) -> None:
    """Also one that is left after its last batch while its iterator is kept: then another epoch begins."""
    common = {"batch_size": 12, "remainder": remainder, "fields": IDS, **options}
    loader, plain = Loader(shards.path, **common), Loader(shards.path, **common)
    size = len(loader)
    for epoch, stop in enumerate((size, 1, size - 1, size, 0)):
        kept = iter(loader)
        got = ids_of(next(kept) for _ in range(stop))
        assert got + (ids_of(loader) if stop < size else []) == ids_of(plain), epoch
    left = iter(loader)
    next(left)
    loader.set_epoch(9)
    list(loader)
    left.close()  # type: ignore[attr-defined]
    assert (loader.epoch, loader.batch) == (10, 0)


# --- ranges of shards -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["exact", "stream"])
def test_only_the_given_shards_are_read(make_shards: MakeShards, mode: Any) -> None:
    folder = make_shards(train=134)
    (folder.path / "train-000000.tar").unlink()
    options: dict[str, Any] = {"mode": mode, "fields": IDS, "batch_size": 4, "streams": (2, 2), "window": 16}
    states: list[Any] = []
    for given, start, stop in (("1-2", 1, 3), ((2, 4), 2, 4), (" 3 ", 3, 4), ("1-8", 1, 9)):
        loader = Loader(folder.path, shards=given, **options)
        assert sorted(flat(ids_of(loader))) == sorted(stored(folder, start, stop))
        for other in states:
            with pytest.raises((ConfigError, StoreError)):
                loader.load_state_dict(other)
        states.append(loader.state_dict())
    if mode == "exact":
        expected = shuffle_indices(stored(folder, 1, 9), 0, 0)
        assert flat(ids_of(Loader(folder.path, shards="1-8", **options))) == expected
        dataset = PositionDataset(folder.path, shards=(1, 3), fields=IDS)
        assert dataset.batch(range(32))["position_id"].tolist() == stored(folder, 1, 3)


# --- faults -------------------------------------------------------------------------------------------

INVALID: list[tuple[dict[str, Any], str]] = [
    *(
        ({"shards": each}, "shards")
        for each in ("", "all", "3-1", "-1", "1-", (2, 2), (-1, 2), (1,), (0.5, 2), 3)
    ),
    ({"shards": "0-9"}, "has 9 shards"),
    ({"split": "training"}, "training"),
    ({"fields": "value"}, "fields"),
    ({"fields": ("board", "root_value")}, "found root_value"),
    ({"fields": ("board", "board")}, "fields"),
    *(({"planes": each}, "planes") for each in (4, 2.0, True)),
    ({"board": "float64"}, "board"),
    ({"rank": 2, "world_size": 2}, "rank 2 must be below world_size 2"),
    ({"batch_size": 1 << 40, "world_size": 1 << 40}, "batch_size"),
    ({"mode": "stream", "streams": (3, 1), "batch_size": 8}, "must divide the global batch"),
    ({"mode": "stream", "world_size": 3, "batch_size": 4}, "the number of ranks, 3, must divide P"),
    ({"mode": "stream", "streams": (4,)}, "streams"),
    ({"mode": "stream", "where": "value = 1"}, "stream mode cannot"),
    ({"mode": "stream", "weights": "1"}, "stream mode cannot"),
    ({"mode": "games"}, "no such|not a|store"),
]


@pytest.mark.parametrize(("options", "message"), INVALID)
def test_invalid_options_are_refused(shards: ShardFolder, options: dict[str, Any], message: str) -> None:
    with pytest.raises(HexdataError, match=message):
        Loader(shards.path, **options)


def test_options_that_games_mode_lacks_are_refused() -> None:
    for options in ({"shards": "0-1"}, {"on_error": "skip"}):
        with pytest.raises(ConfigError, match="games mode"):
            LoaderOptions(mode="games", **options)


def test_other_fields_and_folders_are_refused(make_shards: MakeShards) -> None:
    folder = make_shards(train=20)
    manifest = load_manifest(make_source(folder.path))
    facts = {name: getattr(manifest, name) for name in manifest.__struct_fields__}
    for fields in ({"more": FieldSpec("<f4", ())}, {"value": FieldSpec("<f8", ())}):
        altered = ShardManifest(**facts | {"fields": manifest.fields | fields})
        (folder.path / "manifest.json").write_bytes(altered.dumps())
        with pytest.raises(StoreError, match="blocks with other fields"):
            Loader(folder.path)
    with pytest.raises(HexdataError):
        Loader(folder.path / "elsewhere")


def test_shards_larger_than_the_memory_are_refused(
    shards: ShardFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hexdata.loader.shared_arrays.available_memory", lambda: 100_000)
    with pytest.raises(BudgetError, match="mode='stream'"):
        Loader(shards.path)
    assert Loader(shards.path, shards="0-1").positions == 32
    assert len(flat(ids_of(Loader(shards.path, mode="stream", fields=IDS)))) == 134


@pytest.mark.parametrize("mode", ["exact", "stream"])
def test_damaged_shards_are_refused_or_skipped(make_shards: MakeShards, mode: Any) -> None:
    folder = make_shards(train=70)
    options: dict[str, Any] = {"mode": mode, "batch_size": 8, "fields": IDS}
    whole = Loader(folder.path, on_error="skip", **options)
    states, steps = [whole.state_dict()], ids_of(whole)
    cut, zeros = folder.path / "train-000004.tar", folder.path / "train-000002.tar"
    for size, change in (
        (16, (folder.path / "train-000001.tar").unlink),
        (22, lambda: cut.write_bytes(cut.read_bytes()[:-512])),
        (38, lambda: zeros.write_bytes(zeros.read_bytes()[:5000] + bytes(zeros.stat().st_size - 5000))),
    ):
        change()
        with pytest.raises(StoreError, match=r"train-00000[124]\.tar"):
            list(Loader(folder.path, **options))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loader = Loader(folder.path, on_error="skip", **options)
            found = ids_of(loader)
        ids = sorted(flat(found))
        assert len(ids) == len(set(ids)) == 70 - size
        if mode == "stream":  # the other positions do not change
            assert found == [[number for number in step if number in ids] for step in steps]
        assert sum(loader.skipped.values()) == size
        assert len(caught) == len(loader.skipped)  # one warning for each
        for state in states if mode == "exact" else []:
            with pytest.raises(StoreError):
                loader.load_state_dict(state)
        states.append(loader.state_dict())
    assert loader.skipped == {"train-000001.tar": 16, "train-000002.tar": 16, "train-000004.tar": 6}
    kept = [row for row in range(70) if row // 16 not in (1, 2, 4)]
    assert ids == sorted(folder.splits["train"]["position_id"][kept].tolist())
