"""Targets and policies of a store in batches of its shards: each position has the values of the table."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from hexdata.errors import ConfigError
from hexdata.export import ExportOptions, export_shards
from hexdata.fill import boards_to_fill
from hexdata.loader import Loader, PositionDataset
from hexdata.loader.mixture import Mixture
from hexdata.loader.trial import LoadOptions, run_loader_trial
from hexdata.policy import SparsePolicies
from hexdata.schema import NO_MOVE
from hexdata.shards.manifest import ShardManifest
from hexdata.shuffle import ShuffleOptions, shuffle_store
from hexdata.verify import verify_store
from tests.conftest import CELLS, WriteOddStore, odd_positions

TARGETS = ("extra.odd", "root_value", "visits", "weight")
FIELDS = ("policy", "policy_mask", "move", "value", "position_id", *TARGETS)
SIZES: dict[str, Any] = {"shard_size": 96, "block_size": 32, "workers": 1}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, write_odd_store: WriteOddStore) -> Path:
    """A store of 240 positions with targets and policies, exported as shards. Read-only."""
    path = write_odd_store(tmp_path_factory.mktemp("targets") / "store", 240, 2, TARGETS)
    shuffle_store(path, ShuffleOptions(seed=3, buckets=2, threads=1))
    export_shards(path, ExportOptions(**SIZES))
    return path


def expected_of(positions: pa.Table, targets: tuple[str, ...] = TARGETS) -> dict[str, np.ndarray]:
    """Return the fields of batches of the rows of the table positions, in order of the ids."""
    move = positions["move"].fill_null(NO_MOVE).to_numpy()
    policy = np.zeros((len(move), CELLS), np.float32)
    policy[np.flatnonzero(move != NO_MOVE), move[move != NO_MOVE]] = 1
    rows, policies = SparsePolicies.from_arrow(positions["policy"], CELLS)
    policy[rows] = policies.to_dense(CELLS)
    mask = move != NO_MOVE
    mask[rows] = True
    found = {"policy": policy, "policy_mask": mask, "move": move, "value": positions["value"].to_numpy()}
    found["position_id"] = positions["position_id"].to_numpy()
    for name in targets:
        visits = name == "visits"
        numbers = positions[name].fill_null(-1 if visits else np.nan).to_numpy()
        with np.errstate(over="ignore"):
            found[name] = numbers.astype(np.int32 if visits else np.float32)
    return found


def with_lost_targets(positions: pa.Table) -> pa.Table:
    """Return the positions without targets in the second source, as the store has them."""
    half = len(positions) // 2
    schema = positions.schema
    lost = [pa.nulls(half, field.type) if field.name in TARGETS else None for field in schema]
    columns = [
        column
        if null is None
        else pa.chunked_array([*column.slice(0, half).chunks, null.cast(column.type)], column.type)
        for column, null in zip(positions.columns, lost, strict=True)
    ]
    return pa.table(columns, schema=schema)


def epoch_of(loader: Loader) -> dict[str, np.ndarray]:
    """Return the fields of all positions of an epoch, in order of the ids."""
    batches = list(loader)
    joined = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
    order = np.argsort(joined["position_id"])
    return {name: array[order] for name, array in joined.items()}


def check(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], ids: np.ndarray) -> None:
    for name, array in found.items():
        np.testing.assert_array_equal(array, expected[name][ids], strict=True, err_msg=name)


@pytest.mark.parametrize("mode", ["exact", "stream"])
def test_every_position_has_its_policy_and_targets(store: Path, mode: Any) -> None:
    expected = expected_of(with_lost_targets(odd_positions(240, TARGETS)))
    assert np.isnan(expected["root_value"]).sum() > 120
    ids = []
    for split in ("train", "val", "test"):
        found = epoch_of(Loader(store, split=split, mode=mode, batch_size=16, fields=FIELDS, seed=5))
        assert tuple(found) == FIELDS
        check(found, expected, found["position_id"])
        ids += found["position_id"].tolist()
    assert sorted(ids) == list(range(240))


def test_targets_under_symmetries(store: Path) -> None:
    fields = ("value", "root_value", "visits", "weight", "extra.odd", "position_id")
    plain = epoch_of(Loader(store, mode="exact", fields=fields))
    for mode in ("exact", "stream"):
        turned = epoch_of(Loader(store, mode=mode, fields=fields, symmetry=True, seed=8))
        swapped = turned["value"] != plain["value"]
        known = ~np.isnan(plain["root_value"])
        assert (swapped & known).any()
        assert (~swapped & known).any()
        root = np.where(swapped, 1 - plain["root_value"], plain["root_value"])
        np.testing.assert_array_equal(turned["root_value"], root, strict=True)
        for name in ("visits", "weight", "extra.odd"):
            np.testing.assert_array_equal(turned[name], plain[name], strict=True)


def test_exact_and_stream_mode_turn_policies_alike(store: Path) -> None:
    fields = ("board", "policy", "move", "position_id")
    loaders = [Loader(store, mode=mode, fields=fields, symmetry=True, seed=8) for mode in ("exact", "stream")]
    exact, stream = map(epoch_of, loaders)
    assert all(exact[name].tobytes() == stream[name].tobytes() for name in fields)
    plain = epoch_of(Loader(store, mode="exact", fields=fields))
    np.testing.assert_allclose(np.sort(exact["policy"]), np.sort(plain["policy"]))
    assert (exact["policy"] != plain["policy"]).any()


def test_final_positions_are_those_without_policy_and_move(store: Path) -> None:
    plain = epoch_of(Loader(store, mode="exact", fields=FIELDS))
    final = ~plain["policy_mask"]
    assert final.any()
    uniform = epoch_of(Loader(store, mode="exact", fields=FIELDS, final_policy="uniform"))
    np.testing.assert_array_equal(uniform["policy"][final], np.float32(1 / CELLS))
    np.testing.assert_array_equal(uniform["policy"][~final], plain["policy"][~final])
    kept = epoch_of(Loader(store, mode="exact", fields=FIELDS, final_policy="skip"))
    assert kept["position_id"].tolist() == plain["position_id"][~final].tolist()


def test_datasets_and_mixtures_have_targets(store: Path) -> None:
    expected = expected_of(with_lost_targets(odd_positions(240, TARGETS)))
    dataset = PositionDataset(store, fields=FIELDS)
    batch = dataset.batch([3, 0, -1])
    check(batch, expected, batch["position_id"])
    assert dataset[3]["visits"] == batch["visits"][0]
    loaders = [Loader(store, mode="exact", fields=FIELDS, seed=seed) for seed in (1, 2)]
    for mixed in Mixture(loaders, weights=(1, 1), batch_size=16):
        del mixed["source"]
        check(mixed, expected, mixed["position_id"])


def test_torch_batches_have_targets(store: Path) -> None:
    torch = pytest.importorskip("torch")
    from hexdata.torch import TorchLoader

    expected = expected_of(with_lost_targets(odd_positions(240, TARGETS)))
    for batch in TorchLoader(Loader(store, mode="exact", fields=FIELDS, batch_size=50)):
        assert (batch["root_value"].dtype, batch["visits"].dtype) == (torch.float32, torch.int32)
        check(
            {name: tensor.numpy() for name, tensor in batch.items()}, expected, batch["position_id"].numpy()
        )


def test_fill_rows_have_policies_of_their_positions(store: Path) -> None:
    fields = ("board", "policy", "move", "position_id")
    found = epoch_of(Loader(store, mode="exact", board="fill", fields=fields))
    positions = odd_positions(240)
    boards = np.stack([np.frombuffer(board, np.uint8) for board in positions["board"].to_pylist()])
    ids = found["position_id"]
    np.testing.assert_array_equal(found["board"], boards_to_fill(boards[ids], found["move"], 5))
    np.testing.assert_array_equal(found["policy"], expected_of(positions, ())["policy"][ids])


@pytest.mark.parametrize("mode", ["exact", "stream"])
def test_fields_that_a_store_lacks_are_named(store: Path, tmp_path: Path, odd_store: Path, mode: Any) -> None:
    message = (
        r"the store does not have these fields; found extra\.oddd, extra\.temperature; "
        r"expected some of board, .*, extra\.odd, root_value, visits, weight\."
    )
    with pytest.raises(ConfigError, match=message):
        Loader(store, mode=mode, fields=("board", "extra.oddd", "extra.temperature", "visits"))
    other = shutil.copytree(odd_store, tmp_path / "store")
    shuffle_store(other, ShuffleOptions(seed=3, buckets=2, threads=1))
    export_shards(other, ExportOptions(**SIZES))
    with pytest.raises(ConfigError, match=r"found root_value; .* total_positions\. Leave these fields out"):
        Loader(other, mode=mode, fields=("board", "root_value"))
    with pytest.raises(ConfigError, match=r"does not have these fields; found weight"):
        PositionDataset(other, mode="exact", fields=("weight",))


def test_a_trial_run_delivers_the_chosen_fields(store: Path) -> None:
    options = LoadOptions(batch_size=40, mode="exact", fields=("root_value", "visits"))
    result = run_loader_trial(store, options)
    assert result.fields == {
        "root_value": "float32 (40,)",
        "visits": "int32 (40,)",
        "value": "float32 (40,)",
        "position_id": "int64 (40,)",
    }
    with pytest.raises(
        ConfigError, match=r"unknown fields; found .'root'.; .*root_value, visits, weight, extra"
    ):
        LoadOptions(fields=("root",))


def test_samples_have_targets_and_whole_policies(store: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(store, tmp_path / "store")
    export_shards(copy, ExportOptions(**SIZES, layout="samples"))
    manifest = ShardManifest.load(copy / "shards")
    assert set(TARGETS) < manifest.fields.keys()
    verify_store(copy).require()
