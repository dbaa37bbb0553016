"""Positions read from shards, compared with the store."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest

from hexdata.errors import FormatError, StoreError
from hexdata.export import ExportOptions, export_shards
from hexdata.show import Position, find, read_position, read_shard_position
from hexdata.shuffle import ShuffleOptions, shuffle_store


@pytest.fixture(scope="module", params=["blocks", "samples"])
def exported(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, odd_store: Path
) -> Path:
    """Return the odd store with shards of 192 positions, in blocks of 32 or as samples."""
    store = shutil.copytree(odd_store, tmp_path_factory.mktemp("shown") / "store")
    shuffle_store(store, ShuffleOptions(threads=1))
    export_shards(store, ExportOptions(shard_size=192, block_size=32, workers=1, layout=request.param))
    return store


def ids_of(shard: Path) -> list[int]:
    """Return the positions of a shard in order, read with tarfile and NumPy only."""
    with tarfile.open(shard) as archive:
        members = [m for m in archive.getmembers() if m.name.endswith("position_id.npy")]
        arrays = [np.load(io.BytesIO(archive.extractfile(member).read())) for member in members]
    return np.concatenate([np.atleast_1d(array) for array in arrays]).tolist()


def test_a_shard_position_equals_that_of_the_store(exported, tmp_path):
    first, second = sorted((exported / "shards").glob("train-*.tar"))[:2]
    for shard in (first, second):
        alone = shutil.copy(shard, tmp_path / "moved.tar")
        ids = ids_of(shard)
        assert len(ids) == 192
        for number in (0, 1, 17, 31, 32, 100, 191):
            there, here = read_position(exported, ids[number]), read_shard_position(alone, number)
            assert np.array_equal(there.planes, here.planes)
            names = (
                "player",
                "value",
                "value_sample_tier",
                "position_id",
                "game_id",
                "ply",
                "total_positions",
            )
            assert [getattr(here, name) for name in names] == [getattr(there, name) for name in names]
            assert here.move == there.move
            assert (here.policy is None) == (there.policy is None)
            if here.policy is not None:
                assert here.policy.tolist() == there.policy.tolist()
            assert str(here)


def test_errors_state_the_number_of_positions(exported):
    shard = exported / "shards" / "train-000000.tar"
    with pytest.raises(StoreError, match=r"train-000000\.tar: .*found position 192; expected 0 to 191"):
        read_shard_position(shard, 192)


def test_a_changed_shard_is_refused_if_its_manifest_lists_it(exported, tmp_path):
    """The changed byte of a game id is a valid other id."""
    shards = shutil.copytree(exported / "shards", tmp_path / "shards")
    shard = shards / "train-000000.tar"
    content = bytearray(shard.read_bytes())
    first = content.index(b"game_id.npy")
    content[content.index(b"\n", first) + 1] ^= 1
    shard.write_bytes(content)
    message = r"train-000000\.tar: the shard is truncated or altered; found SHA-256"
    with pytest.raises(StoreError, match=message):
        read_shard_position(shard, 0)
    with pytest.raises(StoreError, match=message):
        find(f"{shard}:0")
    (shards / "manifest.json").write_text("{}")
    original = read_shard_position(exported / "shards" / shard.name, 0)
    assert read_shard_position(shard, 0).game_id != original.game_id


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "other.tar"
    (tmp_path / "text.txt").write_text("no positions")
    with tarfile.open(path, "w") as archive:
        archive.add(tmp_path / "text.txt", "text.txt")
    with pytest.raises(FormatError, match=r"other\.tar"):
        read_shard_position(path, 0)


def test_a_truncated_shard_is_refused(exported, tmp_path):
    shard = exported / "shards" / "train-000000.tar"
    cut = tmp_path / "cut.tar"
    cut.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    assert read_shard_position(cut, 0).position_id == ids_of(shard)[0]
    with pytest.raises(FormatError, match=r"cut\.tar"):
        read_shard_position(cut, 191)


def odd_shard(path: Path, **odd: np.ndarray) -> Path:
    """Write a shard with one block of four empty 5 x 5 boards, and with some arrays replaced."""
    rows = {name: np.zeros(4, np.uint8) for name in ("player_to_move", "value_sample_tier")}
    rows |= {name: np.arange(4) for name in ("position_id", "game_id")}
    rows |= {name: np.zeros(4, np.uint16) for name in ("move", "position_in_game", "total_positions")}
    rows |= {"board": np.zeros((4, 7), np.uint8), "value": np.zeros(4, np.float32)}
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:
        for name, array in (rows | odd).items():
            np.save(file := io.BytesIO(), array)
            member = tarfile.TarInfo(f"000000.{name}.npy")
            member.size = file.tell()
            file.seek(0)
            archive.addfile(member, file)
    return path


@pytest.mark.parametrize(
    "odd",
    [
        {"board": np.zeros((), np.uint8)},
        {"board": np.zeros(7, np.uint8)},
        {"board": np.zeros((4, 6), np.uint8)},
        {"board": np.zeros((2, 5, 5), np.float32)},
        {"value": np.zeros(1, np.float32)},
        {"player_to_move": np.full(4, 7, np.uint8)},
        {"move": np.full(4, 25, np.uint16)},
        {"policy": np.zeros((1, 25), np.float32)},
        {"policy": np.zeros((1, 25), np.float32), "policy_row": np.array([0, 2])},
        {"policy": np.ones((1, 24), np.float32), "policy_row": np.array([2])},
    ],
)
def test_invalid_arrays_are_refused(tmp_path, odd):
    assert read_shard_position(odd_shard(tmp_path / "good.tar"), 2).position_id == 2
    with pytest.raises(FormatError, match=r"odd\.tar: 000000\..*: the shard contains invalid data"):
        read_shard_position(odd_shard(tmp_path / "odd.tar", **odd), 2)


def test_nonfinite_numbers_are_null_in_json():
    shown = Position.of_planes(np.zeros((2, 5, 5)), value=float("nan")).to_json()
    assert json.loads(json.dumps(shown, allow_nan=False))["value"] is None
