"""Sequential reading of shards: blocks equal those written, and damaged shards raise errors."""

from __future__ import annotations

import gzip
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import webdataset

from hexdata.errors import FormatError, StoreError
from hexdata.shards.blocks import Block, block_to_policy
from hexdata.shards.locate import make_source
from hexdata.shards.manifest import ShardManifest
from hexdata.shards.reader import BlockReader
from tests.altered_shards import rename_member

if TYPE_CHECKING:
    from tests.shard_folder import MakeShards, ShardFolder

FIELDS = ("board", "game_id", "move", "player_to_move", "position_id", "value", "value_sample_tier")
CELLS = 25


def reader_of(folder: ShardFolder, location: str | Path | None = None, **chosen: Any) -> BlockReader:
    manifest = ShardManifest.load(folder.path)
    members = chosen.pop("members", FIELDS)
    return BlockReader(make_source(location or folder.path), manifest, "train", members, **chosen)


def through_a_pipe(folder: ShardFolder) -> str:
    return f"pipe:cat {folder.path}/{{name}}"


@pytest.mark.parametrize("piped", [False, True])
def test_any_range_of_blocks_equals_what_was_written(make_shards: MakeShards, piped: bool) -> None:
    folder = make_shards(train=28, dense=True)  # shards of 16 and 12, in blocks of 8
    members = (*FIELDS, "policy", "policy_row")
    location = through_a_pipe(folder) if piped else None
    reader = reader_of(folder, location, members=members)
    source = folder.splits["train"]
    for shard, first, stop in ((0, 0, 2), (0, 1, 2), (0, 0, 1), (1, 0, None), (1, 1, 2)):
        blocks = list(reader.read(shard, first, stop))
        assert len(blocks) == (2 if stop is None else stop) - first
        for number, block in enumerate(blocks, start=first):
            start = 16 * shard + 8 * number
            rows = slice(start, min(start + 8, 28))
            check_block(block, {name: array[rows] for name, array in source.items()})


def check_block(block: Block, expected: Block) -> None:
    for name in FIELDS:
        np.testing.assert_array_equal(block[name], expected[name], strict=True, err_msg=name)
    np.testing.assert_array_equal(block_to_policy(block, CELLS), expected["policy"])


def test_only_the_requested_members_are_read(shards: ShardFolder) -> None:
    blocks = list(reader_of(shards, members=("value", "move")).read(0))
    assert [set(block) for block in blocks] == [{"move", "value"}] * 2


def test_a_missing_or_truncated_shard_is_found_without_reading_it(make_shards: MakeShards) -> None:
    folder = make_shards(train=64)
    reader = reader_of(folder)
    assert list(reader.find_faults()) == []
    path = folder.path / "train-000002.tar"
    path.write_bytes(path.read_bytes()[:-512])
    (folder.path / "train-000000.tar").unlink()
    (missing, no_file), (cut, shorter) = reader.find_faults()
    assert (missing.name, cut.name) == ("train-000000.tar", "train-000002.tar")
    assert "the shard is missing" in str(no_file)
    assert "found 19968 bytes; expected 20480" in str(shorter)
    assert list(reader_of(folder, through_a_pipe(folder)).find_faults()) == []  # found only by reading
    with pytest.raises(StoreError, match=r"train-000000\.tar: the shard is missing"):
        next(reader.read(0))
    with pytest.raises(StoreError, match=r"train-000002\.tar: the shard is truncated"):
        next(reader.read(2))


def truncate_before_a_member(data: bytes) -> bytes:
    cut = data.index(b"000003.board.npy")
    return data[:cut] + bytes(len(data) - cut)


def enlarge_member_size(data: bytes, member: bytes) -> bytes:
    """Set the size in the header of a member to 2^62 bytes."""
    offset = data.index(member)
    info = tarfile.TarInfo.frombuf(data[offset : offset + 512], "ascii", "strict")
    info.size = 1 << 62
    return data[:offset] + info.tobuf(tarfile.GNU_FORMAT) + data[offset + 512 :]


ALTERATIONS = [
    (
        lambda data: enlarge_member_size(data, b"000003.value.npy"),
        r"000003\.value\.npy: .*found a member of type",
    ),
    (lambda data: enlarge_member_size(data, b"000003.total_positions.npy"), "found a member of type"),
    (truncate_before_a_member, "end of archive: .*expected zeros up to a whole record"),
    (
        lambda data: rename_member(data, "000003.move.npy", "000003.moved.npy"),
        r"000003\.move\.npy: .*found 000003\.moved\.npy",
    ),
    (lambda data: data.replace(b"000003.board", b"000003.boart"), r"000003\.board\.npy: .*checksum"),
    (lambda data: data.replace(b"000003.", b"000002."), r"000003\.board\.npy: .*checksum"),
    (lambda data: data.replace(b"\x93NUMPY", b"\x93NUMPI"), "NUMPI"),
    (lambda data: data.replace(b"'<u2'", b"'<i2'"), "the npy header.*<i2"),
    (lambda data: data.replace(b"(8,)", b"(4,)"), r"64 bytes of numbers; expected 32 for \(4,\)"),
    (lambda data: data.replace(b"'fortran_order': False", b"'fortran_order': (alse"), "an npy 1.0 header"),
    (lambda data: data.replace(b"'shape': (8, 7)", b"'shape': (-8,-7"), "an npy 1.0 header"),
    (lambda data: b"\x1f\x8b" + data[2:], "checksum"),
    (lambda data: bytes(len(data)), "end of archive: .*expected zeros up to a whole record"),
]


@pytest.mark.parametrize(("alter", "message"), ALTERATIONS)
@pytest.mark.parametrize("piped", [False, True])
def test_an_altered_shard_of_the_right_size_raises_an_error(
    make_shards: MakeShards, alter: Callable[[bytes], bytes], message: str, piped: bool
) -> None:
    folder = make_shards(train=64)
    path = folder.path / "train-000001.tar"
    data = path.read_bytes()
    altered = alter(data)
    assert len(altered) == len(data)
    assert altered != data
    path.write_bytes(altered)
    reader = reader_of(folder, through_a_pipe(folder) if piped else None)
    with pytest.raises(FormatError, match=message) as caught:
        list(reader.read(1))
    assert caught.value.path.endswith(path.name if piped else str(path))
    assert "object at" not in str(caught.value)


def test_policies_without_rows_raise_an_error(make_shards: MakeShards) -> None:
    folder = make_shards(train=16, dense=True)
    path = folder.path / "train-000000.tar"
    data = path.read_bytes()
    offset = data.index(b"000001.policy_row.npy")
    header = tarfile.TarInfo.frombuf(data[offset : offset + 512], "ascii", "strict")
    count = (header.size - 128) // 4
    header.size -= 4
    changed = data[offset + 512 : offset + 640].replace(f"({count},)".encode(), f"({count - 1},)".encode())
    path.write_bytes(data[:offset] + header.tobuf(tarfile.USTAR_FORMAT) + changed + data[offset + 640 :])
    with pytest.raises(FormatError, match=r"000001\.policy_row\.npy: .*other bytes after the numbers"):
        list(reader_of(folder, members=("move", "policy", "policy_row")).read(0))


def test_an_extra_block_raises_an_error(make_shards: MakeShards) -> None:
    folder = make_shards(train=16)
    path = folder.path / "train-000000.tar"
    data = path.read_bytes()
    offset = data.index(b"000001.value_sample_tier.npy")
    info = tarfile.TarInfo.frombuf(data[offset : offset + 512], "ascii", "strict")
    info.name = "000002.value.npy"
    path.write_bytes(data[:offset] + info.tobuf(tarfile.USTAR_FORMAT) + data[offset + 512 :])
    with pytest.raises(FormatError, match=r"000001\.value_sample_tier\.npy: .*found 000002\.value\.npy"):
        list(reader_of(folder, members=("board", "value")).read(0))


def test_a_shard_under_the_name_of_another_raises_an_error(make_shards: MakeShards) -> None:
    folder = make_shards(train=64)
    (folder.path / "train-000001.tar").write_bytes((folder.path / "train-000002.tar").read_bytes())
    with pytest.raises(FormatError, match=r"000001\.tar: 000002\.board\.npy: .*found 000004\.board\.npy"):
        list(reader_of(folder).read(1))


def change_a_number(data: bytes) -> bytes:
    offset = data.index(b"000001.game_id.npy") + 640
    return data[:offset] + bytes([data[offset] ^ 1]) + data[offset + 1 :]


@pytest.mark.parametrize("piped", [False, True])
def test_only_the_digest_detects_a_changed_number(make_shards: MakeShards, piped: bool) -> None:
    folder = make_shards(train=32)
    path = folder.path / "train-000000.tar"
    path.write_bytes(change_a_number(path.read_bytes()))
    location = through_a_pipe(folder) if piped else None
    reader = reader_of(folder, location)
    for first, stop in ((0, 2), (0, 1), (1, 2)):
        with pytest.raises(FormatError, match=r"train-000000\.tar: sha256: .*expected [0-9a-f]{64}"):
            list(reader.read(0, first, stop))
    assert len(list(reader.read(1))) == 2


@pytest.mark.parametrize("piped", [False, True])
def test_later_reads_find_a_number_that_changed(make_shards: MakeShards, piped: bool) -> None:
    """The first read of a part reads the whole shard; later ones read only their blocks."""
    folder = make_shards(train=32)
    path = folder.path / "train-000000.tar"
    data = path.read_bytes()
    reader = reader_of(folder, through_a_pipe(folder) if piped else None)
    assert len(list(reader.read(0, 0, 1))) == 1
    path.write_bytes(change_a_number(data))
    assert len(list(reader.read(0, 0, 1))) == 1
    for first, stop in ((1, 2), (0, 2)):
        with pytest.raises(FormatError, match=r"train-000000\.tar: .*were read before"):
            list(reader.read(0, first, stop))
    path.write_bytes(data)
    assert len(list(reader.read(0, 1, 2))) == 1


@pytest.mark.parametrize("keep", [0, 1, 511, 512, 700, 5_000, 10_240, 15_000, -512, -1])
def test_a_pipe_that_ends_early_at_any_byte_raises_an_error(make_shards: MakeShards, keep: int) -> None:
    folder = make_shards(train=16)
    path = folder.path / "train-000000.tar"
    data = path.read_bytes()[:keep]
    path.write_bytes(data)
    with pytest.raises(FormatError, match=f"end of the shard: .*found {len(data)} bytes; expected 20480"):
        list(reader_of(folder, through_a_pipe(folder)).read(0))


def test_a_pipe_with_extra_bytes_raises_an_error(make_shards: MakeShards) -> None:
    folder = make_shards(train=16)
    path = folder.path / "train-000000.tar"
    path.write_bytes(path.read_bytes() + b"more")
    with pytest.raises(StoreError, match="found more bytes"):
        list(reader_of(folder, through_a_pipe(folder)).read(0))


def test_a_command_that_fails_after_all_its_bytes_raises_an_error(make_shards: MakeShards) -> None:
    folder = make_shards(train=16)
    failing = f"pipe:cat {folder.path}/{{name}}; exit 4"
    for stop in (1, 2):
        with pytest.raises(StoreError, match="exit status 4"):
            list(reader_of(folder, failing).read(0, 0, stop))


def test_a_command_may_decompress_a_shard(make_shards: MakeShards) -> None:
    folder = make_shards(train=16)
    path = folder.path / "train-000000.tar"
    expected = [block["position_id"].tolist() for block in reader_of(folder).read(0)]
    path.with_suffix(".tar.gz").write_bytes(gzip.compress(path.read_bytes()))
    reader = reader_of(folder, f"pipe:gzip -dc {folder.path}/{{name}}.gz")
    assert [block["position_id"].tolist() for block in reader.read(0)] == expected


# --- what webdataset alone would do -------------------------------------------------------------------


def stock_keys(urls: list[str], **chosen: Any) -> list[str]:
    """Return the keys of the blocks that webdataset's own pipeline delivers."""
    return [sample["__key__"] for sample in webdataset.WebDataset(urls, **chosen)]


# webdataset leaves the shards that it read to the garbage collector to close.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
def test_webdataset_ends_early_without_an_error(make_shards: MakeShards) -> None:
    """The reason for counting blocks. If this fails, webdataset detects truncated shards, and we need not."""
    folder = make_shards(train=32)
    paths = sorted(folder.path.glob("*.tar"))
    urls = [str(path) for path in paths]
    assert len(stock_keys(urls, shardshuffle=False)) == 4
    data = paths[0].read_bytes()
    paths[0].write_bytes(data[: data.index(b"000001.board.npy")])
    assert stock_keys(urls, shardshuffle=False) == ["000000", "000002", "000003"]
    with pytest.raises(StoreError, match="the shard is truncated"):
        list(reader_of(folder).read(0))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
def test_webdataset_repeats_its_order_every_epoch(make_shards: MakeShards) -> None:
    """The reason for a separate order. If this fails, the order of webdataset depends on the epoch."""
    folder = make_shards(train=16 * 12)
    urls = [str(path) for path in sorted(folder.path.glob("*.tar"))]
    dataset = webdataset.WebDataset(urls, shardshuffle=100, seed=1).shuffle(50, seed=1)
    first, second = ([sample["__key__"] for sample in dataset] for _ in range(2))
    assert first == second != sorted(first)
