"""The shard format: pinned bytes, readable without hexdata, and truncation is always an error."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from hexdata.board import pack_boards
from hexdata.errors import FormatError, StoreError
from hexdata.schema import NO_GAME, NO_MOVE, NO_PLY, NO_TIER, board_bytes, board_size_of, positions_schema
from hexdata.shards.block_check import check_block
from hexdata.shards.blocks import (
    Block,
    block_fields,
    block_to_members,
    block_to_policy,
    columns_to_block,
    members_to_block,
)
from hexdata.shards.format import ShardWriter, block_samples, read_blocks
from hexdata.shards.manifest import ShardEntry, ShardManifest
from hexdata.shards.tar_members import member_headers, npy_header, parse_headers, parse_npy_header

SIZE = 5
CELLS = SIZE * SIZE
WINNERS = pa.DictionaryArray.from_arrays(pa.array([0] * 64, pa.int8()), ["BLUE"])


TARGETS = ("extra.Noise_2", "extra.temperature", "root_value", "visits", "weight")


def positions(count: int, first: int = 0, targets: tuple[str, ...] = ()) -> pa.Table:
    """Rows with a null in every nullable column, and a dense policy in every fourth row."""
    rng = np.random.default_rng(first)
    cells = rng.integers(0, 3, (count, SIZE, SIZE))
    boards = pack_boards(np.stack([cells == 1, cells == 2], axis=1))
    ids = np.arange(first, first + count)
    nullable = {
        "game_id": 7,
        "position_in_game": 3,
        "total_positions": 20,
        "move": 11,
        "value_sample_tier": 2,
    }
    policies = [rng.random(CELLS).astype(np.float32) if i % 4 == 0 else None for i in ids]
    columns = {name: [None if i % 5 == 0 else value for i in ids] for name, value in nullable.items()}
    columns |= {
        "position_id": ids,
        "board": [row.tobytes() for row in boards],
        "policy": [
            None if policy is None else [{"cell": c, "probability": p} for c, p in enumerate(policy.tolist())]
            for policy in policies
        ],
        "value": (ids % 2).astype(np.float32),
        "player_to_move": (ids % 3 == 0).astype(np.uint8),
        "winner": WINNERS.slice(0, count),
        "metadata": pa.nulls(count, pa.string()),
    }
    for number, name in enumerate(targets):
        columns[name] = [
            None if i % 3 == number % 3 else (i % 5) / (1 if name == "visits" else 4) for i in ids
        ]
    schema = positions_schema(SIZE, targets)
    return pa.table(
        {field.name: pa.array(columns[field.name], field.type) for field in schema}, schema=schema
    )


def write(blocks: list[Block]) -> tuple[bytes, ShardWriter]:
    file = io.BytesIO()
    writer = ShardWriter(file)
    for key, block in enumerate(blocks):
        writer.write_block(key, block)
    writer.close()
    return file.getvalue(), writer


def blocks_of(*counts: int, with_policy: bool = True, targets: tuple[str, ...] = ()) -> list[Block]:
    firsts = np.cumsum([0, *counts]).tolist()
    tables = [positions(count, first, targets) for count, first in zip(counts, firsts, strict=False)]
    return [columns_to_block(table, with_policy, targets) for table in tables]


def write_members(blocks: list[Block]) -> tuple[bytes, ShardWriter]:
    """Write blocks with their policies as they are, dense, as shards of schema version 1 have them."""
    file = io.BytesIO()
    writer = ShardWriter(file)
    for key, block in enumerate(blocks):
        for name, offset in writer._write_members(f"{key:06d}", block):
            writer.offsets.setdefault(name, []).append(offset)
    writer.close()
    return file.getvalue(), writer


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    path = tmp_path / "train-000000.tar"
    path.write_bytes(write(blocks_of(16, 16, 9))[0])
    return path


# --- columns to blocks --------------------------------------------------------------------------------


def test_columns_become_arrays_with_sentinels_for_nulls() -> None:
    table = positions(10)
    block = columns_to_block(table, with_policy=True)
    assert {name: (array.dtype.str, array.shape[1:]) for name, array in block.items()} == {
        name: tuple(spec) for name, spec in block_fields(SIZE, with_policy=True, schema_version=1).items()
    }
    assert block["board"].tobytes() == b"".join(table["board"].to_pylist())
    assert block["move"].tolist() == [NO_MOVE, 11, 11, 11, 11] * 2
    assert block["game_id"].tolist() == [NO_GAME, 7, 7, 7, 7] * 2
    assert block["value_sample_tier"].tolist() == [NO_TIER, 2, 2, 2, 2] * 2
    assert block["position_in_game"].tolist() == [NO_PLY, 3, 3, 3, 3] * 2
    assert block["policy_row"].tolist() == [0, 4, 8]
    for policy, cells in zip(block["policy"], table["policy"].drop_null().to_pylist(), strict=True):
        assert [{"cell": c, "probability": p} for c, p in enumerate(policy.tolist()) if p] == cells


def test_sliced_and_chunked_tables_give_the_same_block() -> None:
    whole = positions(30)
    expected = columns_to_block(whole.slice(7, 15).combine_chunks(), with_policy=True)
    chunked = pa.concat_tables([whole.slice(7, 4), whole.slice(11, 0), whole.slice(11, 11)])
    batch = whole.combine_chunks().to_batches()[0].slice(7, 15)
    for table in (whole.slice(7, 15), chunked, batch):
        block = columns_to_block(table, with_policy=True)
        assert all(np.array_equal(block[name], expected[name]) for name in expected)
        assert block.keys() == expected.keys()


@pytest.mark.parametrize("rows", [0, 3])
def test_a_block_without_dense_policies_still_has_the_fields(rows: int) -> None:
    block = columns_to_block(positions(8).slice(1, rows), with_policy=True)
    assert block["policy"].shape == (0, CELLS)
    assert block["policy_row"].shape == (0,)
    assert block["board"].shape == (rows, 7)
    assert "policy" not in columns_to_block(positions(8).slice(1, rows), with_policy=False)


def test_a_null_value_raises_an_error() -> None:
    table = positions(4)
    broken = table.set_column(7, "value", pa.array([0.0, None, 1.0, 0.0], pa.float32()))
    with pytest.raises(StoreError, match="column value contains 1 nulls"):
        columns_to_block(broken, with_policy=False)


def test_board_size_is_derived_from_the_width() -> None:
    assert [board_size_of(board_bytes(n)) for n in range(2, 40)] == list(range(2, 40))


# --- writing and reading ------------------------------------------------------------------------------


def test_blocks_read_equal_blocks_written(shard: Path) -> None:
    written = blocks_of(16, 16, 9)
    read = list(read_blocks(shard))
    assert [key for key, _ in read] == ["000000", "000001", "000002"]
    for (_, block), expected in zip(read, written, strict=True):
        assert block.keys() == block_fields(SIZE, with_policy=True).keys()
        found = members_to_block(block, CELLS)
        for name in expected:
            np.testing.assert_array_equal(found[name], expected[name], strict=True)


def test_members_of_policies_are_sparse(shard: Path) -> None:
    _, block = next(read_blocks(shard))
    (expected,) = blocks_of(16)
    assert block["policy_row"].tolist() == [0, 4, 8, 12]
    assert block["policy_count"].tolist() == [np.count_nonzero(policy) for policy in expected["policy"]]
    cells = [np.flatnonzero(policy) for policy in expected["policy"]]
    assert block["policy_cell"].tolist() == np.concatenate(cells).tolist()
    probabilities = [policy[own] for policy, own in zip(expected["policy"], cells, strict=True)]
    np.testing.assert_array_equal(block["policy_probability"], np.concatenate(probabilities), strict=True)


def test_targets_become_members_with_nulls(tmp_path: Path) -> None:
    table = positions(10, targets=TARGETS)
    (block,) = blocks_of(10, targets=TARGETS)
    path = tmp_path / "train-000000.tar"
    path.write_bytes(write([block])[0])
    ((key, members),) = read_blocks(path)
    assert check_block(members, path, key) == SIZE
    assert members["visits"].tolist() == [-1 if v is None else v for v in table["visits"].to_pylist()]
    for name, dtype in (("root_value", "<f4"), ("weight", "<f4"), ("extra.temperature", "<f8")):
        expected = [np.nan if v is None else v for v in table[name].to_pylist()]
        np.testing.assert_array_equal(members[name], np.array(expected, dtype), strict=True)
    without = columns_to_block(positions(10), with_policy=True, targets=("visits", "weight"))
    assert without["visits"].tolist() == [-1] * 10
    assert np.isnan(without["weight"]).all()


def test_shards_of_schema_version_1_have_dense_policies(tmp_path: Path) -> None:
    (block,) = blocks_of(9)
    path = tmp_path / "train-000000.tar"
    path.write_bytes(write_members([block])[0])
    ((key, members),) = read_blocks(path)
    assert check_block(members, path, key) == SIZE
    assert members.keys() == block_fields(SIZE, with_policy=True, schema_version=1).keys()
    assert all(np.array_equal(members_to_block(members, CELLS)[name], block[name]) for name in block)


def test_bytes_are_pinned() -> None:
    """The same positions give the same bytes, on every machine and with every library version.

    If this fails, shards written before and after the change differ: find out whether NumPy's npy header
    or tarfile's USTAR header changed, and write that header here instead.
    """
    block = {"board": np.arange(14, dtype=np.uint8).reshape(2, 7), "value": np.array([0, 1], np.float32)}
    data, _ = write([block, block])
    assert len(data) == tarfile.RECORDSIZE
    assert hashlib.sha256(data).hexdigest() == (
        "0910aab3bc3f866061e410215a613944df8a7036c255953eab282cc00288a568"
    )
    swapped = {name: block[name].astype(block[name].dtype.newbyteorder(">")) for name in reversed(block)}
    assert write([swapped, swapped])[0] == data


def test_tar_headers_contain_no_time_and_no_owner(shard: Path) -> None:
    with tarfile.open(shard) as tar:
        members = tar.getmembers()
    assert [m.name for m in members] == sorted(m.name for m in members)
    assert {(m.mtime, m.uid, m.gid, m.uname, m.gname, m.mode) for m in members} == {(0, 0, 0, "", "", 0o644)}


def test_offsets_are_those_of_the_numbers() -> None:
    blocks = blocks_of(16, 9)
    data, writer = write(blocks)
    members = [block_to_members(block) for block in blocks]
    assert writer.offsets.keys() == members[0].keys()
    for name, offsets in writer.offsets.items():
        for block, offset in zip(members, offsets, strict=True):
            assert offset % 64 == 0  # so that a memory map of any dtype is aligned
            assert data[offset : offset + block[name].nbytes] == block[name].tobytes()
    assert (writer.positions, writer.blocks, writer.bytes) == (25, 2, len(data))


def test_the_writer_rejects_invalid_blocks() -> None:
    block, other = blocks_of(8, 8)
    writer = ShardWriter(io.BytesIO())
    writer.write_block(4, block)
    with pytest.raises(ValueError, match="4 cannot follow 4"):
        writer.write_block(4, other)
    with pytest.raises(ValueError, match="block 5 has the members"):
        writer.write_block(5, {"board": block["board"]})
    with pytest.raises(ValueError, match=r"different lengths: \[7, 8\]"):
        writer.write_block(5, {**block, "value": block["value"][1:]})


def test_a_shard_truncated_at_any_byte_raises_an_error(shard: Path) -> None:
    data = shard.read_bytes()
    with tarfile.open(shard) as tar:
        borders = [m.offset + shift for m in tar for shift in (0, 1, 300, 512, 520, 640, 641)]
    for length in {0, *borders, *range(len(data) - 12_000, len(data), 511), len(data) - 1}:
        shard.write_bytes(data[:length])
        with pytest.raises(FormatError, match="truncated or altered") as caught:
            list(read_blocks(shard))
        assert caught.value.path == str(shard)
        assert caught.value.record


def test_an_altered_shard_raises_an_error_with_the_member(shard: Path) -> None:
    data = shard.read_bytes()
    with tarfile.open(shard) as tar:
        member = tar.getmembers()[5]
    for offset, byte, record in [
        (member.offset + 140, 255, f"byte {member.offset}"),  # tar header
        (member.offset_data, 0, member.name),  # magic of the npy header
        (member.offset_data + 21, 255, member.name),  # dtype in it
        (member.offset_data + member.size, 1, member.name),  # padding
        (len(data) - 1, 1, "end of archive"),
    ]:
        shard.write_bytes(data[:offset] + bytes([byte]) + data[offset + 1 :])
        with pytest.raises(FormatError, match="truncated or altered") as caught:
            list(read_blocks(shard))
        assert caught.value.record == record


@pytest.mark.parametrize("offset", [100, 110, 116, 140, 157, 200, 265, 297, 329, 344])
def test_a_header_that_tarfile_cannot_read_is_refused(offset: int) -> None:
    """Other programs would stop at it, or at the member before, without an error."""
    header = bytearray(member_headers("000007", "board", "|u1", (3, 4)))
    header[offset] = 0x81
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header[: tarfile.BLOCKSIZE])
    with pytest.raises(FormatError, match="no tar header"):
        parse_headers(bytes(header), 0, 1 << 20, "shard")


def test_a_pickled_array_raises_an_error() -> None:
    buffer = io.BytesIO()
    np.save(buffer, np.array([{"a": 1}], dtype=object))
    with pytest.raises(ValueError, match="the npy header"):
        parse_npy_header(buffer.getvalue()[:128])


@pytest.mark.parametrize("dtype", ["<u1", "|u2", "|f4"])
def test_a_dtype_that_numpy_names_otherwise_raises_an_error(dtype: str) -> None:
    assert np.dtype(dtype).str != dtype
    with pytest.raises(ValueError, match="the npy header"):
        parse_npy_header(npy_header(dtype, (2, 3)))


@pytest.mark.parametrize("shape", ["(-2,-3", "(2, (3", "(2, {}", "(2, 3j"])
def test_an_invalid_shape_in_a_header_raises_an_error(shape: str) -> None:
    header = npy_header("|u1", (2, 3))
    assert parse_npy_header(header) == ("|u1", (2, 3))
    with pytest.raises(ValueError, match="the npy header"):
        parse_npy_header(header.replace(b"(2, 3", shape.encode("ascii")))


# --- other readers ------------------------------------------------------------------------------------


def test_webdataset_reads_shards_without_hexdata(shard: Path) -> None:
    """WebDataset takes the text after the first dot of a name as the field, in lower case."""
    fields = ("board", "policy_row", "policy_cell", "visits", "extra.noise_2")
    script = f"""
import sys, json, webdataset as wds
samples = list(wds.WebDataset([sys.argv[1]], shardshuffle=False).decode())
assert "hexdata" not in sys.modules
print(json.dumps([[s["__key__"], *(s[f + ".npy"].tolist() for f in {fields})] for s in samples]))
"""
    blocks = [block_to_members(block) for block in blocks_of(16, 16, 9, targets=TARGETS)]
    shard.write_bytes(write(blocks)[0])
    command = [sys.executable, "-c", script, str(shard)]
    out = subprocess.run(command, check=True, capture_output=True, cwd=shard.parent)
    names = (*fields[:-1], "extra.Noise_2")
    assert str(json.loads(out.stdout)) == str(
        [[f"{key:06d}", *(block[name].tolist() for name in names)] for key, block in enumerate(blocks)]
    )


SCRIPT_DATASETS = """
import sys, json, datasets
datasets.disable_progress_bars()
files = {"train": sys.argv[1:2]}
data = datasets.load_dataset("webdataset", data_files=files, split="train", cache_dir=sys.argv[2])
assert "hexdata" not in sys.modules
print(json.dumps([{name: row[name] for name in row if name != "__url__"} for row in data]))
"""


def read_with_datasets(path: Path) -> list[dict[str, object]]:
    """Read a shard as Hugging Face datasets does: .npy members come as nested lists of numbers."""
    pytest.importorskip("datasets")
    command = [sys.executable, "-c", SCRIPT_DATASETS, str(path), str(path.parent / "cache")]
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(path.parent), "PATH": ""}
    out = subprocess.run(command, check=True, capture_output=True, cwd=path.parent, env=environment)
    return json.loads(out.stdout)


def test_hugging_face_datasets_reads_shards(shard: Path) -> None:
    rows = read_with_datasets(shard)
    for row, block in zip(rows, map(block_to_members, blocks_of(16, 16, 9)), strict=True):
        assert row.keys() == {"__key__", *(f"{name}.npy" for name in block)}
        assert all(row[f"{name}.npy"] == array.tolist() for name, array in block.items())


@pytest.mark.parametrize("with_policy", [True, False])
def test_samples_are_single_positions(tmp_path: Path, with_policy: bool) -> None:
    (block,) = blocks_of(10, with_policy=with_policy)
    path = tmp_path / "train-000000.tar"
    with path.open("wb") as file:
        writer = ShardWriter(file)
        for position_id, sample in block_samples(block):
            writer.write_sample(position_id, sample)
        writer.close()
    assert (writer.positions, writer.blocks, writer.offsets) == (10, 10, {})
    read = list(read_blocks(path))
    assert [key for key, _ in read] == [f"{i:09d}" for i in range(10)]
    boards = np.stack([sample["board"] for _, sample in read])
    assert boards.shape == (10, 2, SIZE, SIZE)
    assert np.array_equal(pack_boards(boards), block["board"])
    assert read[3][1]["move"].shape == ()
    policy = block_to_policy(block, CELLS)
    for row, (_, sample) in enumerate(read):
        assert sample["move"] == block["move"][row]
        assert ("policy" in sample) == with_policy
        assert not with_policy or np.array_equal(sample["policy"], policy[row])


def test_policies_are_dense_or_one_hot_or_zeros() -> None:
    (block,) = blocks_of(6)
    policy = block_to_policy(block, CELLS)
    assert np.array_equal(policy[[0, 4]], block["policy"])
    assert policy[1].sum() == 1.0
    assert policy[1, 11] == 1.0
    assert policy[5].sum() == 0.0  # no move: a final position
    assert policy.dtype == np.float32


# --- the manifest -------------------------------------------------------------------------------------


def manifest_of(*counts: int, **changes: object) -> ShardManifest:
    data, writer = write(blocks_of(*counts))
    entry = writer.entry("train-000000.tar", hashlib.sha256(data).hexdigest())
    facts: dict[str, object] = {
        "board_size": SIZE,
        "layout": "blocks",
        "block_size": 16,
        "shard_size": 64,
        "seed": 7,
        "fields": block_fields(SIZE, with_policy=True),
        "splits": {"train": (entry,), "val": ()},
    }
    return ShardManifest(**{**facts, **changes})  # type: ignore[arg-type]


def test_a_manifest_read_equals_the_one_written(tmp_path: Path) -> None:
    manifest = manifest_of(16, 16, 9)
    (tmp_path / "manifest.json").write_bytes(manifest.dumps())
    loaded = ShardManifest.load(tmp_path)
    assert loaded == manifest
    assert loaded.digest == manifest.digest
    assert loaded.positions("train") == 41
    facts = json.loads(manifest.dumps())
    assert facts["fields"]["board"] == {"dtype": "|u1", "shape": [7]}
    assert facts["splits"]["val"] == {"positions": 0, "shards": []}
    assert next(iter(facts)) == "version"
    assert facts["digest"] == manifest.digest != manifest_of(16, 16, 9, seed=8).digest


def test_an_unusable_manifest_raises_an_error_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    good = manifest_of(16, 9).to_json()

    def refused(facts: object) -> str:
        path.write_text(facts if isinstance(facts, str) else json.dumps(facts))
        with pytest.raises(StoreError) as caught:
            ShardManifest.load(tmp_path)
        assert str(path) in str(caught.value)
        return str(caught.value)

    def signed(facts: dict[str, object]) -> dict[str, object]:
        rest = {name: value for name, value in facts.items() if name != "digest"}
        text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
        return {**rest, "digest": hashlib.sha256(text.encode()).hexdigest()}

    with pytest.raises(StoreError, match="there is no such folder"):
        ShardManifest.load(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(StoreError, match="an empty folder with no manifest"):
        ShardManifest.load(tmp_path / "empty")
    assert "not valid JSON" in refused("{")
    assert "nested too deeply" in refused("[" * 200_000)
    assert "not a shard manifest" in refused({"kind": "hexdata store", "version": 1})
    assert "not a shard manifest" in refused([])
    assert "another version; found 2; expected 1" in refused({**good, "version": 2})
    assert "another schema_version; found 9" in refused({**good, "schema_version": 9})
    assert "the shard manifest was altered" in refused({**good, "seed": 8})
    assert "lacks the key splits" in refused(signed({k: v for k, v in good.items() if k != "splits"}))
    assert "unknown key; found more" in refused(signed({**good, "more": 1}))
    assert "wrong value of board_size; found '5'" in refused(signed({**good, "board_size": "5"}))
    assert "wrong value of board_size; found 10000000" in refused(signed({**good, "board_size": 10**7}))
    assert "multiple of the block size; found 65 and 16" in refused(signed({**good, "shard_size": 65}))
    assert "unknown shard layout" in refused(signed({**good, "layout": "rows"}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blocks": 3, "offsets": {}}, "25 positions in 3 blocks"),
        ({"positions": 0, "blocks": 0, "offsets": {}}, "0 positions"),
        ({"offsets": {"board": [640]}}, "one offset per block"),
        ({"name": "../train-000000.tar"}, "plain file name"),
    ],
)
def test_a_contradictory_shard_entry_raises_an_error(change: dict[str, object], message: str) -> None:
    entry = manifest_of(16, 9).splits["train"][0]
    with pytest.raises(StoreError, match=message):
        manifest_of(16, 9, splits={"train": (ShardEntry(**{**vars(entry), **change}),)})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda f: f["fields"]["move"].update(dtype="|O"),
            "fields.move.dtype; found '|O'; expected the NumPy",
        ),
        (lambda f: f["fields"]["move"].update(dtype="<U9"), "fields.move.dtype"),
        (lambda f: f["fields"]["board"].update(shape=[10**12]), "fields.board.shape.0; found 1000000000000"),
        (lambda f: f["fields"]["board"].update(shape=[1] * 9), "fields.board.shape"),
        (lambda f: f["fields"].pop("move"), "a field that the manifest does not describe; found move"),
        (lambda f: f["fields"].update({"../x": {"dtype": "|u1", "shape": []}}), "unknown key in fields"),
        (lambda f: f["splits"].update({"../x": f["splits"]["val"]}), "unknown key in splits"),
        (lambda f: f["splits"]["train"].update(positions=3), "do not add up to those of the split"),
        (lambda f: first(f).update(name="../x.tar"), "splits.train.shards.0.name; found '../x.tar'"),
        (lambda f: first(f).update(name=".."), "splits.train.shards.0.name"),
        (lambda f: first(f).update(name="a\\b"), "splits.train.shards.0.name"),
        (lambda f: first(f).update(name="a" * 256), "expected the plain name of a file"),
        (lambda f: first(f).update(sha256="x"), "splits.train.shards.0.sha256"),
        (lambda f: first(f).update(bytes=640.5), "splits.train.shards.0.bytes"),
        (lambda f: first(f)["offsets"].update(move=["640"]), "offsets.move.0; found '640'"),
        (lambda f: first(f)["offsets"].update(move=[640.5]), "offsets.move.0; found 640.5"),
        (lambda f: first(f)["offsets"].update(move=[-1]), "offsets.move.0; found -1"),
    ],
)
def test_a_signed_manifest_is_checked_key_by_key(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], said: str
) -> None:
    facts = manifest_of(16).to_json()
    del facts["digest"]
    facts = json.loads(json.dumps(facts))
    change(facts)
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    facts["digest"] = hashlib.sha256(text.encode()).hexdigest()
    (tmp_path / "manifest.json").write_text(json.dumps(facts))
    with pytest.raises(StoreError) as caught:
        ShardManifest.load(tmp_path)
    assert said in str(caught.value)
    assert str(tmp_path / "manifest.json") in str(caught.value)


def first(facts: dict[str, Any]) -> dict[str, Any]:
    entry: dict[str, Any] = facts["splits"]["train"]["shards"][0]
    return entry


@pytest.mark.parametrize("key", ["000000", "000019", "999999", "1000000", "123456789"])
@pytest.mark.parametrize(
    ("dtype", "shape"), [("|u1", (1024, 43)), ("<f4", (3, 169)), ("<i8", (5,)), ("<u2", ())]
)
def test_member_headers_equal_those_of_tarfile_and_numpy(
    key: str, dtype: str, shape: tuple[int, ...]
) -> None:
    npy = io.BytesIO()
    np.save(npy, np.zeros(shape, dtype))
    info = tarfile.TarInfo(f"{key}.position_in_game.npy")
    info.size = len(npy.getvalue())
    expected = info.tobuf(tarfile.USTAR_FORMAT) + npy.getvalue()[:128]
    assert member_headers(key, "position_in_game", dtype, shape) == expected
