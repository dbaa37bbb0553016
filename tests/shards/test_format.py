"""The shard format: pinned bytes, readable without hexdata, and truncation is always an error."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from itertools import pairwise

import numpy as np
import pytest
from msgspec.structs import replace

from hexdata.errors import FormatError
from hexdata.shards.blocks import block_fields, block_to_members
from hexdata.shards.format import ShardWriter, read_blocks
from hexdata.shards.manifest import ShardManifest
from hexdata.shards.reader import load_manifest
from hexdata.shards.sources import make_source
from tests.shard_folder import BOARD_SIZE, cut_block, synthetic_policies, synthetic_positions


def blocks_of(*counts):
    rng, ends = np.random.default_rng(1), np.cumsum([0, *counts]).tolist()
    arrays, policies = synthetic_positions(ends[-1], rng), synthetic_policies(ends[-1], rng)
    return [block_to_members(cut_block(arrays, policies, *bounds)) for bounds in pairwise(ends)]


def write(blocks):
    file = io.BytesIO()
    writer = ShardWriter(file)
    for key, block in enumerate(blocks):
        writer.write_block(key, block)
    writer.close()
    return file.getvalue(), writer


# --- writing and reading ------------------------------------------------------------------------------


def test_bytes_are_pinned():
    """The same positions give the same bytes, on every machine and with every library version.

    If this fails, shards written before and after the change differ: find out whether NumPy's npy header
    or tarfile's USTAR header changed, and write that header here instead.
    """
    block = {"board": np.arange(14, dtype=np.uint8).reshape(2, 7), "value": np.array([0, 1], np.float32)}
    data, _ = write([block, block])
    assert len(data) == tarfile.RECORDSIZE
    digest = "0910aab3bc3f866061e410215a613944df8a7036c255953eab282cc00288a568"
    assert hashlib.sha256(data).hexdigest() == digest
    swapped = {name: block[name].astype(block[name].dtype.newbyteorder(">")) for name in reversed(block)}
    assert write([swapped, swapped])[0] == data


def test_a_block_begins_with_its_first_member_and_has_a_digest():
    data, writer = write(blocks_of(16, 9))
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        starts = [m.offset for m in tar if m.name.endswith(".board.npy")]
    entry = writer.entry("train-000000.tar", "")
    parts = [data[start:end] for start, end in pairwise([*starts, len(data)])]
    assert entry.blocks == [(s, hashlib.sha256(p).hexdigest()) for s, p in zip(starts, parts, strict=True)]
    assert (entry.positions, entry.bytes) == (25, len(data))


def test_a_truncated_or_altered_shard_raises_an_error(tmp_path):
    shard = tmp_path / "train-000000.tar"
    data = write(blocks_of(16, 16, 9))[0]
    shard.write_bytes(data)
    with tarfile.open(shard) as tar:
        members = tar.getmembers()
    borders = [m.offset + shift for m in members[::7] for shift in (0, 1, 300, 512, 520, 640, 641)]
    changes = {data[:n]: None for n in {*borders, *range(len(data) - 11_000, len(data), 1022), len(data) - 1}}
    member = members[5]
    for offset, byte, record in [
        (member.offset + 140, 255, f"byte {member.offset}"),  # tar header
        (member.offset_data, 0, f"byte {member.offset}"),  # magic of the npy header
        (member.offset_data + 21, 255, f"byte {member.offset}"),  # dtype in it
        (member.offset_data + member.size, 1, member.name),  # padding
        (len(data) - 1, 1, "end of archive"),
    ]:
        changes[data[:offset] + bytes([byte]) + data[offset + 1 :]] = record
    # An empty array of lengths whose product is no number of NumPy.
    empty, _ = write([{"value": np.zeros(0, np.float32)}])
    shape = b"(0, 999999999999, 999999999999), }"
    changes[empty.replace(b"(0,), }".ljust(len(shape)), shape)] = "byte 0"
    for changed, record in changes.items():
        shard.write_bytes(changed)
        with pytest.raises(FormatError, match="truncated or altered") as caught:
            list(read_blocks(shard))
        assert caught.value.path == str(shard)
        assert caught.value.record == record if record else caught.value.record


# --- the manifest -------------------------------------------------------------------------------------


def manifest_of(*counts, **changes):
    data, writer = write(blocks_of(*counts))
    entry = writer.entry("train-000000.tar", hashlib.sha256(data).hexdigest())
    sizes = {"board_size": BOARD_SIZE, "block_size": 16, "shard_size": 64, "seed": 7}
    lists = {"fields": block_fields(BOARD_SIZE, with_policy=True), "splits": {"train": (entry,), "val": ()}}
    return ShardManifest(**{**sizes, **lists, **changes})


def test_a_manifest_read_equals_the_one_written(tmp_path):
    manifest = manifest_of(16, 16, 9)
    (tmp_path / "manifest.json").write_bytes(manifest.dumps())
    loaded, facts = load_manifest(make_source(tmp_path)), json.loads(manifest.dumps())
    assert (loaded.dumps(), loaded.digest) == (manifest.dumps(), manifest.digest)
    assert loaded.positions("train") == 41
    assert facts["fields"]["board"] == {"dtype": "|u1", "shape": [7]}
    assert facts["splits"]["val"] == []
    assert next(iter(facts)) == "version"
    assert facts["digest"] == manifest.digest != manifest_of(16, 16, 9, seed=8).digest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blocks": [(0, ""), (5120, ""), (9216, "")]}, "25 positions in 3 blocks"),
        ({"positions": 0}, "0 positions"),
        ({"blocks": [(0, ""), (0, "")]}, "ascending offsets"),
        ({"blocks": [(512, ""), (5120, "")]}, "ascending offsets"),
        ({"blocks": [(0, ""), (1 << 40, "")]}, "ascending offsets"),
    ],
)
def test_a_contradictory_shard_entry_raises_an_error(change, message):
    entry = manifest_of(16, 9).splits["train"][0]
    with pytest.raises(ValueError, match=message):
        manifest_of(16, 9, splits={"train": (replace(entry, **change),)})
