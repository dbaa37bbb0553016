"""Tests of the loader on damaged shards, invalid folders and outdated stores."""

from __future__ import annotations

import re
import warnings
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hexdata.convert import ConvertOptions, convert_sources
from hexdata.errors import ConfigError, FormatError, HexdataError, StoreError
from hexdata.export import ExportOptions, export_shards
from hexdata.loader import Loader, PositionDataset
from hexdata.shards.manifest import ShardManifest
from hexdata.shuffle import ShuffleOptions, shuffle_store

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.shard_folder import MakeShards, ShardFolder

    DemoTrmph = Callable[..., list[Path]]

IDS = ("position_id",)


def delivered_ids(loader: Loader) -> list[int]:
    """Run the rest of the epoch and return all ids, sorted."""
    return sorted(i for batch in loader for i in batch["position_id"].tolist())


@pytest.mark.parametrize("mode", ["exact", "stream"])
def test_a_batch_with_an_error_does_not_count_as_delivered(make_shards: MakeShards, mode: Any) -> None:
    folder = make_shards(train=64)
    path = folder.path / "train-000001.tar"
    path.write_bytes(path.read_bytes().replace(b"000003.move", b"000003.more"))
    options: dict[str, Any] = {"mode": mode, "batch_size": 16, "shuffle": False, "window": 16}
    loader = Loader(folder.path, **options)
    with pytest.raises((FormatError, StoreError), match=r"train-000001\.tar: "):
        list(loader)
    delivered = loader.state_dict()["batch"]
    assert delivered <= 1
    path.write_bytes(path.read_bytes().replace(b"000003.more", b"000003.move"))
    assert len(list(loader)) == 4 - delivered


@pytest.mark.parametrize("mode", ["exact", "stream"])
def test_skipped_shards_are_counted_with_a_warning(make_shards: MakeShards, mode: Any) -> None:
    folder = make_shards(train=70)
    (folder.path / "train-000001.tar").unlink()
    path = folder.path / "train-000004.tar"
    path.write_bytes(path.read_bytes()[:-512])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader = Loader(folder.path, mode=mode, batch_size=8, on_error="skip", fields=IDS)
        ids = delivered_ids(loader)
    assert loader.skipped == {"train-000001.tar": 16, "train-000004.tar": 6}
    assert sorted(re.split("[;.:] ", str(each.message))[2] for each in caught) == [
        "the shard is missing",
        "the shard is truncated or altered",
    ]
    kept = [row for row in range(70) if row // 16 not in (1, 4)]
    assert ids == sorted(folder.splits["train"]["position_id"][kept].tolist())
    assert mode == "stream" or loader.positions == 48
    with pytest.raises(StoreError, match="the shard is missing"):
        list(Loader(folder.path, mode=mode, batch_size=8, fields=IDS))


@pytest.mark.parametrize("mode", ["exact", "stream"])
@pytest.mark.parametrize("size", [None, 0, -512])
def test_a_missing_or_truncated_shard_is_detected_when_the_loader_is_made(
    make_shards: MakeShards, mode: Any, size: int | None
) -> None:
    folder = make_shards(train=70)
    path = folder.path / "train-000003.tar"
    if size is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(StoreError, match=r"train-000003\.tar: the shard is (missing|truncated)"):
        Loader(folder.path, mode=mode, batch_size=8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"streams": (3, 1), "batch_size": 8}, "must divide the global batch"),
        ({"world_size": 3, "batch_size": 4}, "the number of ranks must divide"),
        ({"where": "value = 1"}, "stream mode cannot select positions; found where"),
    ],
)
def test_invalid_streams_are_detected_when_the_loader_is_made(
    shards: ShardFolder, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Loader(shards.path, mode="stream", **options)
    if "world_size" in options:
        with pytest.raises(ConfigError, match=message):
            Loader(shards.path, mode="stream", batch_size=4).for_rank(0, options["world_size"])


def test_skipping_every_shard_is_an_error(make_shards: MakeShards) -> None:
    folder = make_shards(train=40)
    for path in folder.path.glob("train-*.tar"):
        path.write_bytes(b"")
    with pytest.raises(StoreError, match="no shard of train can be used; found the shard is truncated"):
        Loader(folder.path, on_error="skip")


def test_skipped_positions_are_counted_once_per_epoch(make_shards: MakeShards) -> None:
    folder, whole, name = make_shards(train=134), make_shards("whole", train=134), "train-000003.tar"
    (folder.path / name).unlink()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        loader = Loader(folder.path, mode="stream", on_error="skip", window=24, batch_size=8, fields=IDS)
        for stop in (5, 1, None, None):  # two partial loops, the rest of the epoch, and another epoch
            for _ in islice(loader, stop):
                pass
        assert loader.epoch == 2
        assert len(loader) == -(-134 // 8)
        assert loader.skipped == {name: 16}
        loader.set_epoch(0)
        assert len(delivered_ids(loader)) == 134 - 16
        assert loader.skipped == {name: 16}
    assert [name in str(warning.message) for warning in warned] == [True]
    (folder.path / name).write_bytes((whole.path / name).read_bytes())
    assert len(delivered_ids(loader)) == 134
    assert loader.skipped == {}


def test_invalid_splits_layouts_and_folders_are_refused(make_shards: MakeShards) -> None:
    folder = make_shards(train=20)
    with pytest.raises(ConfigError, match="no such split in the shards; found training; expected train"):
        Loader(folder.path, split="training")
    manifest = ShardManifest.load(folder.path)
    facts = {name: getattr(manifest, name) for name in manifest.__dataclass_fields__}
    facts |= {"layout": "samples", "splits": {}}
    (folder.path / "manifest.json").write_bytes(ShardManifest(**facts).dumps())
    with pytest.raises(ConfigError, match="layout samples"):
        Loader(folder.path)
    with pytest.raises(HexdataError, match="there is no such folder"):
        Loader(folder.path / "elsewhere")


def test_exact_mode_requires_a_folder(shards: ShardFolder) -> None:
    with pytest.raises(ConfigError, match=r"exact mode maps shards into memory; found .*pipe:"):
        Loader(f"pipe:cat {shards.path}/{{name}}", mode="exact")
    loader = Loader(f"pipe:cat {shards.path}/{{name}}", batch_size=12, fields=IDS)
    assert loader.options.mode == "stream"
    assert delivered_ids(loader) == list(range(134))


def test_positions_added_after_the_export_give_a_warning(tmp_path: Path, demo_trmph: DemoTrmph) -> None:
    """The store is loaded without them."""
    demo_trmph(tmp_path / "games", games=8, files=2)
    store = tmp_path / "store"
    first, second = sorted((tmp_path / "games").iterdir())
    convert_sources([first], store, ConvertOptions(workers=1))
    with pytest.raises(StoreError, match="no export stage yet"):
        Loader(store, mode="exact")
    assert Loader(store).options.mode == "games"
    shuffle_store(store, ShuffleOptions(threads=1))
    export_shards(store, ExportOptions(workers=1))
    positions = Loader(store).positions
    assert positions == sum(len(batch["value"]) for batch in Loader(store)) > 0
    convert_sources([second], store, ConvertOptions(workers=1))
    with pytest.warns(UserWarning, match="the shuffle stage is older than the positions") as caught:
        assert Loader(store).positions == positions
    assert {Path(warning.filename).name for warning in caught} == {Path(__file__).name}
    with pytest.warns(UserWarning, match="older than the positions") as caught:
        assert len(PositionDataset(store)) == positions
    assert {Path(warning.filename).name for warning in caught} == {Path(__file__).name}


def test_a_loader_needs_at_least_one_shard(make_shards: MakeShards) -> None:
    folder = make_shards(train=64)
    for path in folder.path.glob("train-*.tar"):
        path.unlink()
    for mode in ("exact", "stream"):
        with pytest.raises(StoreError, match=r"no shard of train can be used; found .*missing"):
            Loader(folder.path, mode=mode, on_error="skip", batch_size=8)


def test_stream_mode_needs_at_least_one_readable_shard(make_shards: MakeShards) -> None:
    folder = make_shards(train=64)
    for path in folder.path.glob("train-*.tar"):
        path.write_bytes(path.read_bytes().replace(b"NUMPY", b"NUMPI"))
    loader = Loader(folder.path, mode="stream", on_error="skip", batch_size=8, window=8)
    for worker in range(2):
        with pytest.raises(StoreError, match="no shard of train can be used"):
            next(loader.batches(worker, 2))


@pytest.mark.filterwarnings("ignore:skipped a shard:UserWarning")
def test_stream_mode_delivers_a_single_readable_shard(make_shards: MakeShards) -> None:
    folder = make_shards(train=64)
    *broken, good = sorted(folder.path.glob("train-*.tar"))
    for path in broken:
        path.write_bytes(path.read_bytes().replace(b"NUMPY", b"NUMPI"))
    loader = Loader(folder.path, mode="stream", on_error="skip", batch_size=8, window=8)
    assert sum(len(batch["value"]) for batch in loader) == 16
    assert good.name not in loader.skipped


def test_a_state_between_epochs_survives_new_games(tmp_path: Path, demo_trmph: DemoTrmph) -> None:
    """Within an epoch the order depends on all positions, so such a state is refused."""
    demo_trmph(tmp_path / "games", games=12, files=2)
    first, second = sorted((tmp_path / "games").iterdir())
    convert_sources([first], tmp_path / "store", ConvertOptions(workers=1, val=0, test=0))
    loader = Loader(tmp_path / "store", batch_size=16, seed=3)
    next(iter(loader))
    within = loader.state_dict()
    for _ in loader:
        pass
    between = loader.state_dict()
    assert (between["epoch"], between["batch"]) == (1, 0)
    convert_sources([second], tmp_path / "store", ConvertOptions(workers=1, val=0, test=0))
    grown = Loader(tmp_path / "store", batch_size=16, seed=3)
    with pytest.raises(
        StoreError, match=r"the state belongs to other games; .* Resume on the games of that run"
    ):
        grown.load_state_dict(within)
    with pytest.raises(ConfigError, match="seed"):
        Loader(tmp_path / "store", batch_size=16).load_state_dict(between)
    grown.load_state_dict(between)
    assert (grown.epoch, grown.batch) == (1, 0)
    assert sum(len(batch["value"]) for batch in grown) == grown.positions > loader.positions
