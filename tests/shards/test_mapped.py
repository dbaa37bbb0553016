"""Random access to mapped shards: rows equal those that were written, and damaged shards raise errors."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexdata.errors import BudgetError, FormatError, StoreError
from hexdata.shards.blocks import SPARSE_FIELDS, Block, block_to_policy
from hexdata.shards.files import LocalShard
from hexdata.shards.format import read_blocks
from hexdata.shards.manifest import ShardManifest
from hexdata.shards.mapped import MappedShards
from hexdata.shards.sources import FolderSource
from tests.altered_shards import alter_blocks, rename_member, set_header
from tests.shard_folder import TARGETS

if TYPE_CHECKING:
    from tests.shard_folder import MakeShards, ShardFolder

SCALARS = (
    "game_id",
    "move",
    "player_to_move",
    "position_id",
    "position_in_game",
    "total_positions",
    "value",
    "value_sample_tier",
)
ALL = ("board", *SCALARS)
DENSE = (*ALL, "policy", "policy_row")
CELLS = 25
KINDS = ("exported", "dense", "uneven", "version 1", "targets")


def members_of(kind: str) -> tuple[str, ...]:
    """Return the fields to read of the shards of a kind."""
    return ALL if kind == "exported" else (*DENSE, *TARGETS) if kind == "targets" else DENSE


def mapped(folder: ShardFolder, split: str = "train", **options: Any) -> MappedShards:
    return MappedShards(FolderSource(folder.path), ShardManifest.load(folder.path), split, **options)


def check(folder: ShardFolder, block: dict[str, np.ndarray], rows: list[int]) -> None:
    """Compare a block with the rows of the arrays that were written."""
    source = folder.splits["train"]
    for name in (*ALL, *(name for name in TARGETS if name in block)):
        np.testing.assert_array_equal(block[name], source[name][rows], strict=True, err_msg=name)
        assert block[name].flags.writeable
    np.testing.assert_array_equal(block_to_policy(block, CELLS), source["policy"][rows])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ShardFolder]:
    """Shards as exported, with policies, with an end inside a block, of version 1, and with targets."""
    from tests.shard_folder import ShardFolder

    path = tmp_path_factory.mktemp("folders")
    return {
        "exported": ShardFolder(path / "exported", {"train": 134}),
        "dense": ShardFolder(path / "dense", {"train": 134}, dense=True),
        "uneven": ShardFolder(path / "uneven", {"train": 134}, dense=True, cuts=(3, 4, 37, 120)),
        "version 1": ShardFolder(path / "v1", {"train": 134}, dense=True, cuts=(3, 4, 37, 120), version=1),
        "targets": ShardFolder(path / "targets", {"train": 134}, dense=True, targets=True),
    }


@settings(max_examples=60)
@pytest.mark.parametrize("kind", KINDS)
@given(rows=st.lists(st.integers(0, 133), max_size=80))
def test_rows_equal_the_arrays_that_were_written(
    folders: dict[str, ShardFolder], kind: str, rows: list[int]
) -> None:
    folder = folders[kind]
    shards = mapped(folder)
    assert shards.positions == 134
    check(folder, shards.take(np.array(rows, np.int64), members_of(kind)), rows)


@pytest.mark.parametrize("kind", KINDS)
def test_gathered_rows_can_be_taken_in_any_slices(folders: dict[str, ShardFolder], kind: str) -> None:
    folder = folders[kind]
    rows = np.random.default_rng(3).permutation(134)
    gathered = mapped(folder).gather(rows, members_of(kind))
    for start, stop in ((0, 0), (0, 1), (1, 50), (50, 134), (134, 134), (0, 134)):
        check(folder, gathered.take(start, stop), rows[start:stop].tolist())


@pytest.mark.parametrize("kind", KINDS)
def test_scanning_reads_every_shard_in_order(folders: dict[str, ShardFolder], kind: str) -> None:
    folder = folders[kind]
    blocks = list(mapped(folder).scan(SCALARS))
    assert [len(block["move"]) for block in blocks] == [shard.positions for shard in folder.shards["train"]]
    for name in SCALARS:
        joined = np.concatenate([block[name] for block in blocks])
        np.testing.assert_array_equal(joined, folder.splits["train"][name], strict=True)
    starts = np.cumsum([0, *(len(block["move"]) for block in blocks)])
    dense = [block["policy_row"] + start for block, start in zip(blocks, starts[:-1], strict=True)]
    assert np.concatenate(dense).tolist() == ([] if kind == "exported" else list(range(0, 134, 3)))


def test_rows_outside_the_split_raise_an_index_error(folders: dict[str, ShardFolder]) -> None:
    shards = mapped(folders["exported"])
    for row in (-1, 134, 10**12):
        with pytest.raises(IndexError, match="outside the 134"):
            shards.take(np.array([0, row]), ("value",))


def test_sequential_reading_returns_the_same_rows(shards: ShardFolder) -> None:
    of_split = mapped(shards)
    start = 0
    for path in sorted(shards.path.glob("train-*.tar")):
        for _, stored in read_blocks(path):
            rows = np.arange(start, start + len(stored["move"]))
            block = of_split.take(rows, ALL)
            assert all(np.array_equal(block[name], stored[name]) for name in ALL)
            start += len(rows)
    assert start == of_split.positions


@pytest.mark.parametrize("used", [False, True])
def test_unpickled_shards_are_mapped_again(make_shards: MakeShards, used: bool) -> None:
    folder = make_shards(train=40, dense=True)
    shards = mapped(folder)
    if used:
        shards.take(np.arange(40), DENSE)
    data = pickle.dumps(shards)
    assert len(data) < 20_000
    assert b"NUMPY" not in data  # no bytes of shards travel
    copy = pickle.loads(data)
    rows = [39, 0, 17, 17]
    check(folder, copy.take(np.array(rows), DENSE), rows)
    for path in folder.path.glob("*.tar"):
        path.unlink()
    check(folder, copy.take(np.array(rows), DENSE), rows)  # what is mapped stays
    with pytest.raises(StoreError, match="the shard is missing"):
        pickle.loads(data).take(np.array(rows), DENSE)


def test_no_file_is_left_open(make_shards: MakeShards) -> None:
    folder = make_shards(train=60)

    def opened() -> list[str]:
        """Return the shards that this process has open. Other files may be closed meanwhile."""
        paths = [Path(file.path) for file in psutil.Process().open_files()]
        return [path.name for path in paths if path.parent == folder.path]

    shards = mapped(folder)
    shards.take(np.arange(60), ALL)
    assert set(opened()) == {entry.name for entry in folder.shards["train"]}
    del shards
    assert opened() == []


def limit_of(spare: int) -> int:
    """Return the limit under which ``spare`` more files can be opened: each gets the lowest free number."""
    taken = {int(path.name) for path in Path("/proc/self/fd").iterdir()}
    free = (number for number in itertools.count() if number not in taken)
    return next(itertools.islice(free, spare, None))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_too_many_shards_for_the_process_raise_a_budget_error(make_shards: MakeShards) -> None:
    import resource

    folder = make_shards(train=160)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit_of(5), limits[1]))
    try:
        with pytest.raises(BudgetError, match=r"too many shards to map at once.*ulimit -n"):
            mapped(folder)
        with pytest.raises(BudgetError, match="too many shards"):
            mapped(folder, on_error="skip")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


# --- shards that are not what they should be ----------------------------------------------------------


def test_a_missing_or_truncated_shard_raises_an_error_when_opened(make_shards: MakeShards) -> None:
    folder = make_shards(train=64)
    path = folder.path / "train-000002.tar"
    data = path.read_bytes()
    path.write_bytes(data[:-512])
    with pytest.raises(StoreError, match=r"train-000002\.tar: .* truncated or altered; found 19968 bytes"):
        mapped(folder)
    path.unlink()
    with pytest.raises(StoreError, match=r"train-000002\.tar: the shard is missing"):
        mapped(folder)


def test_an_unreadable_shard_raises_an_error(make_shards: MakeShards) -> None:
    folder = make_shards(train=64)
    path = folder.path / "train-000001.tar"
    path.unlink()
    path.symlink_to(path.name)  # even root cannot open a circle of links
    with pytest.raises(StoreError, match=r"train-000001\.tar: a file cannot be read; found Too many levels"):
        mapped(folder)
    assert [entry.name for entry, _ in mapped(folder, on_error="skip").faults] == [path.name]


ALTERED: list[tuple[Callable[[bytes], bytes], str]] = [
    (
        lambda data: rename_member(data, "000003.move.npy", "000003.moved.npy"),
        r"000003\.move\.npy: .*found 000003\.moved\.npy",
    ),
    (lambda data: data.replace(b"000003.", b"000002."), r"000003\.board\.npy: .*checksum"),
    (lambda data: data.replace(b"\x93NUMPY", b"\x93NUMPI"), r"000002\.board\.npy: .*NUMPI"),
    (lambda data: data.replace(b"'<u2'", b"'<i2'"), r"000002\.move\.npy: .*'<i2'"),
    (lambda data: data.replace(b"(8,)", b"(4,)"), r"\(4,\)"),
    (lambda data: data[:5120] + bytes(len(data) - 5120), "checksum"),
    (lambda data: bytes(len(data)), r"000002\.board\.npy: .*checksum"),
]


@pytest.mark.parametrize(("alter", "message"), ALTERED)
def test_an_altered_header_raises_an_error_when_its_block_is_read(
    make_shards: MakeShards, alter: Callable[[bytes], bytes], message: str
) -> None:
    folder = make_shards(train=64)
    path = folder.path / "train-000001.tar"
    data = path.read_bytes()
    altered = alter(data)
    assert len(altered) == len(data)
    assert altered != data
    path.write_bytes(altered)
    shards = mapped(folder)
    check(folder, shards.take(np.arange(16), ALL), list(range(16)))  # the shard before it
    for _ in range(2):  # a fault that was met once is met again
        with pytest.raises(FormatError, match=message) as caught:
            shards.take(np.arange(64), ALL)
        assert caught.value.path == str(path)
        assert caught.value.code == "broken-shard"


def test_dense_policies_of_another_length_raise_an_error(make_shards: MakeShards) -> None:
    folder = make_shards(train=64, dense=True)
    path = folder.path / "train-000001.tar"
    original = path.read_bytes()
    for size, message in ((b"00000000205", "found 5 bytes of numbers"), (b"0000000020x", "a size of")):
        data = bytearray(original)
        set_header(data, data.index(b"000002.policy_row.npy"), 124, size)
        path.write_bytes(data)
        with pytest.raises(FormatError, match=rf"000002\.policy_row\.npy: .*{message}"):
            mapped(folder).take(np.arange(64), DENSE)


def test_policies_and_policy_rows_must_have_the_same_length(make_shards: MakeShards) -> None:
    """Both members are valid, but one has fewer rows."""
    folder = make_shards(train=16, dense=True)
    path = folder.path / "train-000000.tar"
    data = path.read_bytes()
    offset = data.index(b"000001.policy_row.npy")
    size, shape = (b"%011o" % (128 + 3 * 4), b"(3,)"), (b"%011o" % (128 + 2 * 4), b"(2,)")
    member = data[offset : offset + 640]
    assert member.count(size[0]) == member.count(size[1]) == 1
    shorter = member.replace(size[0], shape[0]).replace(size[1], shape[1])
    altered = bytearray(data[:offset] + shorter + data[offset + 640 :])
    set_header(altered, offset, 0, b"")
    path.write_bytes(altered)
    with pytest.raises(
        FormatError, match=r"000001\.policy_count\.npy: .*found 3 policies; expected 2, the length of"
    ):
        mapped(folder).take(np.arange(16), DENSE)


@pytest.mark.parametrize(
    ("name", "item", "value", "message"),
    [
        ("policy_cell", 20, CELLS, r"policy_cell\.npy row 20: .*found 25; expected a number from 0 to 24"),
        ("policy_cell", 2, 0, r"policy_cell\.npy row 2: .*found cell 0 after .*ascending cells"),
        ("policy_probability", 7, -1, r"policy_probability\.npy row 7: .*found -1\.0"),
        ("policy_probability", 0, np.nan, r"policy_probability\.npy row 0: .*found nan"),
        ("policy_count", 1, 26, r"policy_count\.npy: .*cells in total"),
        ("policy_row", 1, 0, r"policy_row\.npy row 1: .*strictly ascending"),
        ("root_value", 3, 2, r"root_value\.npy row 3: .*found 2\.0; .*0 to 1, or NaN for none"),
        ("visits", 3, -2, r"visits\.npy row 3: .*found -2"),
        ("weight", 3, np.inf, r"weight\.npy row 3: .*found inf"),
    ],
)
@pytest.mark.parametrize(("together", "blocks_per_row"), [(3, 8), (134, 8), (3, 1), (10, 1)])
def test_invalid_members_of_searches_are_found_in_any_order_of_reading(
    make_shards: MakeShards,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    item: int,
    value: float,
    message: str,
    together: int,
    blocks_per_row: int,
) -> None:
    folder = make_shards(train=134, dense=True, targets=True)

    def change(blocks: dict[str, Block]) -> dict[str, Block]:
        blocks["000003"][name][item] = value
        return blocks

    alter_blocks(folder.path, "train-000001.tar", change)
    shards = mapped(folder)
    monkeypatch.setattr("hexdata.shards.mapped._CHECKED_PER_ROW", blocks_per_row)
    order = np.random.default_rng(9).permutation(134)
    parts = np.split(order, range(together, 134, together))
    with pytest.raises(FormatError, match="000003." + message):
        [shards.take(part, (*DENSE, *TARGETS)) for part in parts]


def test_offsets_outside_the_shard_raise_an_error(make_shards: MakeShards) -> None:
    folder = make_shards(train=16)
    manifest = ShardManifest.load(folder.path)
    for offset in (10**9, 0, -5, 641, manifest.splits["train"][0].bytes - 4):
        manifest.splits["train"][0].offsets["value"][1] = offset
        shards = MappedShards(FolderSource(folder.path), manifest, "train")
        with pytest.raises(FormatError, match=r"00000[01]\.value\.npy|block 000000"):
            shards.take(np.arange(16), ("value",))


def test_a_shard_under_the_name_of_another_raises_an_error(make_shards: MakeShards) -> None:
    folder = make_shards(train=64)
    (folder.path / "train-000001.tar").write_bytes((folder.path / "train-000002.tar").read_bytes())
    with pytest.raises(FormatError, match=r"train-000001\.tar: 000002\.board\.npy.*found 000004\.board\.npy"):
        mapped(folder).take(np.arange(64), ("value",))


def test_digests_are_checked_on_request(make_shards: MakeShards) -> None:
    folder = make_shards(train=64)
    path = folder.path / "train-000003.tar"
    data = bytearray(path.read_bytes())
    offset = data.index(b"000006.game_id.npy") + 640
    data[offset] ^= 1  # within the numbers of a block: only the digest changes
    path.write_bytes(data)
    mapped(folder).take(np.arange(64), ALL)
    with pytest.raises(StoreError, match=r"train-000003\.tar: .* truncated or altered; found SHA-256"):
        mapped(folder, check="digests")


def test_every_kind_of_damaged_shard_can_be_skipped(make_shards: MakeShards) -> None:
    folder = make_shards(train=134)
    paths = [folder.path / f"train-{number:06d}.tar" for number in range(9)]
    paths[0].unlink()
    paths[2].write_bytes(paths[2].read_bytes()[:-1])
    paths[4].write_bytes(paths[5].read_bytes())
    flipped = bytearray(paths[8].read_bytes())
    flipped[flipped.index(b"000016.game_id.npy") + 640] ^= 1
    paths[8].write_bytes(flipped)
    shards = mapped(folder, on_error="skip")
    assert [entry.name for entry, _ in shards.faults] == [paths[i].name for i in (0, 2, 4, 8)]
    kept = [row for row in range(134) if row // 16 not in (0, 2, 4, 8)]
    assert shards.positions == len(kept)
    ids = shards.take(np.arange(len(kept)), ("position_id",))["position_id"]
    np.testing.assert_array_equal(ids, folder.splits["train"]["position_id"][kept])
    for path in folder.path.glob("*.tar"):
        path.unlink()
    assert mapped(folder, on_error="skip").positions == 0


def test_values_are_checked_once_in_any_order_of_reading(
    folders: dict[str, ShardFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = mapped(folders["uneven"])
    whole: list[tuple[str, str, int]] = []
    rows_checked = 0

    def check_values(shard: LocalShard, name: str, blocks: Sequence[int]) -> None:
        whole.extend((name, shard.entry.name, block) for block in blocks)

    def find_row(name: str, found: np.ndarray, board_size: int) -> None:
        nonlocal rows_checked
        rows_checked += len(found)

    monkeypatch.setattr(LocalShard, "check_values", check_values)
    monkeypatch.setattr("hexdata.shards.mapped.find_bad_row", find_row)
    order = np.random.default_rng(3).permutation(134)
    for epoch in range(2):
        for start in range(0, 134, 2):
            shards.take(order[start : start + 2], DENSE)
        blocks = sum(shard.entry.blocks for shard in shards._shards)
        members = (*ALL, *SPARSE_FIELDS)
        assert len(whole) == len(set(whole)) == len(members) * blocks, epoch
        assert rows_checked < 134 * len(ALL) + 2 * 45 * CELLS


def test_shards_may_be_mapped_in_any_order_of_addresses(
    folders: dict[str, ShardFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One view covers the maps of all shards, wherever the system puts them."""
    opened = LocalShard.open

    def open_in_reverse(shard: LocalShard, *, digest: bool = False) -> Any:
        for each in reversed(all_shards):
            opened(each)
        return opened(shard, digest=digest)

    shards = mapped(folders["dense"])
    copy = pickle.loads(pickle.dumps(shards))
    all_shards = copy._shards
    monkeypatch.setattr(LocalShard, "open", open_in_reverse)
    rows = np.random.default_rng(4).integers(0, 134, 3_000)
    taken = copy.take(rows, DENSE)
    check(folders["dense"], taken, rows.tolist())
    for name, array in shards.take(rows, DENSE).items():
        np.testing.assert_array_equal(taken[name], array, strict=True)
