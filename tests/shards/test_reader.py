"""Sequential reading of shards: blocks equal those written, and damaged shards raise errors."""

from __future__ import annotations

import tarfile

import numpy as np
import pytest
from msgspec.structs import replace

from hexdata.errors import FormatError, StoreError
from hexdata.loader import Loader
from hexdata.shards.blocks import block_to_policy
from hexdata.shards.reader import BlockReader, load_manifest
from hexdata.shards.sources import make_source

FIELDS = ("board", "game_id", "move", "player_to_move", "position_id", "value", "value_sample_tier")


def reader_of(folder, piped=False, members=FIELDS, location=None):
    location = location or (f"pipe:cat {folder.path}/{{name}}" if piped else folder.path)
    return BlockReader(make_source(location), load_manifest(make_source(folder.path)), "train", members)


@pytest.mark.parametrize("piped", [False, True])
def test_any_range_of_blocks_equals_what_was_written(make_shards, piped):
    folder = make_shards(train=28, dense=True)  # shards of 16 and 12, in blocks of 8
    reader = reader_of(folder, piped, (*FIELDS, "policy", "policy_row"))
    for shard, first, stop in ((0, 0, 2), (0, 1, 2), (0, 0, 1), (1, 0, None), (1, 1, 2)):
        blocks = list(reader.read(shard, first, stop))
        assert len(blocks) == (2 if stop is None else stop) - first
        for number, block in enumerate(blocks, start=first):
            start = 16 * shard + 8 * number
            expected = {name: a[start : min(start + 8, 28)] for name, a in folder.splits["train"].items()}
            for name in FIELDS:
                np.testing.assert_array_equal(block[name], expected[name], strict=True, err_msg=name)
            np.testing.assert_array_equal(block_to_policy(block, 25), expected["policy"])


def test_a_missing_or_truncated_shard_is_named(make_shards):
    folder = make_shards(train=64)
    reader = reader_of(folder)
    path = folder.path / "train-000002.tar"
    path.write_bytes(path.read_bytes()[:-512])
    (folder.path / "train-000000.tar").unlink()
    for shard, fault in ((0, "missing"), (2, "truncated")):
        with pytest.raises(StoreError, match=rf"train-00000{shard}\.tar: the shard is {fault}"):
            next(reader.read(shard))
    with pytest.raises(StoreError, match=r"train-000000\.tar: the shard is missing"):
        Loader(folder.path, mode="stream", streams=(1, 1))  # before training begins


def test_a_block_that_claims_more_bytes_than_any_has_is_refused_before_it_is_read(make_shards):
    """The manifest of a stranger, whose source may send bytes without end."""
    reader = reader_of(make_shards(train=16), piped=True)
    reader.shards = [replace(reader.shards[0], bytes=1 << 42)]
    blocks = reader.read(0)
    next(blocks)
    with pytest.raises(FormatError, match=r"000000\.tar: block 1: .* found 4,398,0"):
        next(blocks)


def rename_member(data, name, new_name):
    """Return the bytes of a shard with one member renamed, under a valid tar header."""
    begin = data.index(name.encode("ascii"))
    info = tarfile.TarInfo.frombuf(data[begin : begin + 512], "ascii", "strict")
    info.name = new_name
    return data[:begin] + info.tobuf(tarfile.USTAR_FORMAT) + data[begin + 512 :]


def truncate_before_a_member(data):
    cut = data.index(b"000003.board.npy")
    return data[:cut] + bytes(len(data) - cut)


def enlarge_member_size(data):
    """Set the size in the header of a member to 2^62 bytes."""
    offset = data.index(b"000003.value.npy")
    info = tarfile.TarInfo.frombuf(data[offset : offset + 512], "ascii", "strict")
    info.size = 1 << 62
    return data[:offset] + info.tobuf(tarfile.GNU_FORMAT) + data[offset + 512 :]


ALTERATIONS = [
    (enlarge_member_size, b"000003.value"),
    (truncate_before_a_member, b""),
    (lambda data: rename_member(data, "000003.move.npy", "000003.moved.npy"), b""),
    (lambda data: data.replace(b"000003.board", b"000003.boart"), b"000003.board"),
    (lambda data: data.replace(b"\x93NUMPY", b"\x93NUMPI"), b"000002.board"),
    (lambda data: data.replace(b"'<u2'", b"'<i2'"), b"000002.move"),
    (lambda data: data.replace(b"(8,)", b"(4,)"), b"000002.game_id"),
    (lambda data: data.replace(b"'fortran_order': False", b"'fortran_order': (alse"), b"000002.board"),
    (lambda data: data.replace(b"'shape': (8, 7)", b"'shape': (-8,-7"), b"000002.board"),
    (lambda data: b"\x1f\x8b" + data[2:], b"000002.board"),
    (lambda data: bytes(len(data)), b""),
]
"""Changes of a shard, each with the member whose headers are refused, or nothing if a whole block is."""


@pytest.mark.parametrize("piped", [False, True])
def test_an_altered_shard_of_the_right_size_raises_an_error(make_shards, piped):
    folder = make_shards(train=64)
    path = folder.path / "train-000001.tar"
    data = path.read_bytes()
    for alter, member in ALTERATIONS:
        altered = alter(data)
        assert (len(altered), altered == data) == (len(data), False)
        path.write_bytes(altered)
        with pytest.raises(FormatError) as caught:
            list(reader_of(folder, piped).read(1))
        assert caught.value.code == "broken-shard"
        assert not member or caught.value.record == f"byte {data.index(member)}"
        assert caught.value.path.endswith(path.name if piped else str(path))
        assert "object at" not in str(caught.value)
