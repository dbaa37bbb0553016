"""Verify finds every fault of the content of a store, however well it is covered up.

Each fault leaves digests, counts and manifests that agree, except those that are the fault.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest
from msgspec.structs import replace

from hexdata.errors import BudgetError
from hexdata.export import ExportOptions, export_shards, shards
from hexdata.options import MINIMUM_MEMORY
from hexdata.order import derive_key, sort_key
from hexdata.shards.blocks import Block, row_fields
from hexdata.shards.manifest import FieldSpec, ShardManifest
from hexdata.shuffle import ShuffleOptions, shuffle_store
from hexdata.store import Store
from hexdata.store.files import write_bytes
from hexdata.store.integrity import rebuild_commands
from hexdata.store.manifest import Manifest
from hexdata.verify import VerifyOptions, verify_store
from hexdata.verify.tables import RULED
from tests.kit.command_line import hexdata_run
from tests.verify.altered import (
    SEED,
    SHARD,
    Altered,
    Blocks,
    Change,
    by_key,
    failures,
    with_cell,
    with_column,
)

if TYPE_CHECKING:
    from tests.conftest import CopyStore, WriteOddStore

Fault = Callable[[Altered], object]
Faults = list[tuple[Fault, str]]
FIRST, PART = (f"positions/part-00000{number}.parquet" for number in (0, 1))
GAMES, SOURCES, REJECTED = (f"{name}/part-000000.parquet" for name in ("games", "sources", "rejected"))
BUCKET, NEXT_BUCKET = (f"shuffled/train/bucket-00000{number}.parquet" for number in (0, 1))


# --- kinds of faults ------------------------------------------------------------------------------------


def cell(name: str, column: str, row: int, value: Any) -> Fault:
    return lambda store: store.cell(name, column, row, value)


def table(name: str, change: Change) -> Fault:
    return lambda store: store.table(name, change)


def entry(names: str) -> Fault:
    """Change an entry of the manifest to another value of its type."""
    return lambda store: store.entry(*names.split())


def stage(name: str, **values: Any) -> Fault:
    return lambda store: store.manifest(lambda manifest: manifest.stages[name].update(values))


def extra(name: str) -> Fault:
    return lambda store: write_bytes(store.path / name, b"")


def without_last_column(name: str) -> Fault:
    return table(name, lambda rows: rows.drop_columns([rows.schema.names[-1]]))


def beside_statistics(name: str, column: str, amount: int) -> Fault:
    """Add to all values of a column, but not to the statistics of the file."""

    def alter(store: Altered) -> None:
        before = (store.path / name).read_bytes()
        store.table(name, lambda t: with_column(t, column, [n + amount for n in t[column].to_pylist()]))
        after = (store.path / name).read_bytes()
        assert len(after) == len(before)
        footer = 8 + int.from_bytes(before[-8:-4], "little")
        store.content(name, after[:-footer] + before[-footer:])

    return alter


def duplicates(*numbers: int | None) -> Fault:
    """Give the first games one hash and split, and these values of ``duplicate_of``."""

    def repeat(games: pa.Table) -> pa.Table:
        for row, number in enumerate(numbers):
            for name in ("game_hash", "split"):
                games = with_cell(games, name, row, games[name][0].as_py())
            games = with_cell(games, "duplicate_of", row, number)
        return games

    return table(GAMES, repeat)


def in_bucket(bucket: str, column: str, value: Any, *, was_null: bool = False) -> Fault:
    """Change a value of a bucket, in the first row in which it is null or is not null."""

    def alter(rows: pa.Table) -> pa.Table:
        found = rows[column].to_pylist()
        row = next(i for i, old in enumerate(found) if (old is None) == was_null and old != value)
        return with_cell(rows, column, row, value)

    return table(bucket, alter)


def blocks(change: Callable[[Blocks], Blocks], shard: str = SHARD, *, listed: bool = True) -> Fault:
    return lambda store: store.blocks(change, shard, listed=listed)


def add_one(made: Blocks) -> Blocks:
    """Add one to the last value of a block."""
    value = made[8]["value"].copy()
    value[-1] += 1
    return made | {8: made[8] | {"value": value}}


def with_double_values(made: Blocks) -> Blocks:
    return {key: block | {"value": block["value"].astype("<f8")} for key, block in made.items()}


def of_shards(change: Callable[[ShardManifest], ShardManifest]) -> Fault:
    return lambda store: store.shards(change)


def swap_between_buckets(store: Altered) -> None:
    """As many rows in each bucket as before, and each in the order of its keys."""
    one, other = store.read(BUCKET), store.read(NEXT_BUCKET)
    store.table(BUCKET, lambda rows: by_key(pa.concat_tables([rows[1:], other[:1]])))
    store.table(NEXT_BUCKET, lambda rows: by_key(pa.concat_tables([rows[1:], one[:1]])))


def move_between_splits(store: Altered) -> None:
    """The order of keys and all counts are made consistent; the shards are removed."""
    moved = store.read(BUCKET)[:1]
    store.table(BUCKET, lambda rows: rows[1:])
    store.table("shuffled/val/bucket-000000.parquet", lambda rows: by_key(pa.concat_tables([rows, moved])))
    shutil.rmtree(store.path / "shards")

    def count(manifest: Manifest) -> None:
        manifest.stages["shuffle"]["splits"]["train"] -= 1
        manifest.stages["shuffle"]["splits"]["val"] += 1
        del manifest.stages["export"]
        manifest.files = {n: f for n, f in manifest.files.items() if not n.startswith("shards/")}

    store.manifest(count)


def move_between_parts(store: Altered) -> None:
    """The ids are as consecutive as before, and all counts agree."""
    moved = store.read(PART)[:1]
    store.table(FIRST, lambda rows: pa.concat_tables([rows, moved]))
    store.table(PART, lambda rows: rows[1:])


def hash_of_another_split(games: pa.Table) -> pa.Table:
    assert games["split"][4] != games["split"][5]
    return with_cell(games, "game_hash", 4, games["game_hash"][5].as_py())


def wrong_block(manifest: ShardManifest, shard: int, moved: int, digest: str | None = None) -> ShardManifest:
    blocks = manifest.splits["train"][shard].blocks
    blocks[2] = (blocks[2][0] + moved, digest or blocks[2][1])
    return manifest


# --- the table ------------------------------------------------------------------------------------------

GAME_VALUES = {
    "split": "bogus",
    "moves": [1, 1, 1, 1],
    "winner": "GREEN",
    "first_player": 2,
    "end_reason": "draw",
    "swap": "seats",
    "duplicate_of": -7,
    "source_id": 99,
    "provenance": "guess",
    "flags": [None],
}
OTHERS = (NEXT_BUCKET, *(f"shuffled/{name}.parquet" for name in ("train/bucket-000002", "val/bucket-000000")))
FAULTS: dict[str, list[Faults]] = {
    "files": [
        [(entry(f"files {GAMES} bytes"), GAMES)],
        [(extra(name), name) for name in ("positions/part-000009.parquet", "shuffled/more/x")],
    ],
    "tables": [
        [(entry("counts positions"), "")],
        [(entry(f"files {PART} rows"), PART)],
        [(entry(f"files {BUCKET} rows"), BUCKET)],
        [(entry("board_size"), "")],
        *([(without_last_column(name), name)] for name in (PART, BUCKET)),  # test_damage.py has the others
    ],
    "in = out + rejected": [
        *([(entry(f"stages convert {name}"), "")] for name in ("records", "positions", "rejected")),
        [(table(PART, lambda t: t[:-1]), "")],
        [(move_between_parts, "part [01]"), (cell(SOURCES, "rejected", 1, 0), "source-1")],
        [(cell(SOURCES, "positions", 1, 301), "source-1")],
        [(cell(SOURCES, "records", 1, 302), "source-1")],
        [(table(SOURCES, lambda t: t[:-1]), "")],
        [(table(SOURCES, lambda t: t.take([1, 0, 2])), "")],
        [(table(REJECTED, lambda t: t[1:]), "source-0")],
        [(beside_statistics(REJECTED, "source_id", 1 << 27), "source-0")],
    ],
    "position ids": [[(table(PART, lambda t: t.take([1, 0, *range(2, len(t))])), "")]],
    "game ids": [[(table(GAMES, lambda t: pa.concat_tables([t[:5], t[4:]])), "")]],
    "source values": [
        [(cell(SOURCES, "header", 1, "{no JSON"), "header"), (cell(SOURCES, "sha256", 2, "b"), "sha256")]
    ],
    "games": [
        [
            (cell(GAMES, "positions", 4, 21), "game 4: "),
            (cell(PART, "game_id", 0, 10_000), "game 10000: "),
            (table(GAMES, hash_of_another_split), "game 4.*game 5|game 5.*game 4"),
        ]
    ],
    "game values": [
        [(entry("stages convert test"), "")],
        [(cell(GAMES, n, row, v), f"game {row}: .*{n}") for row, (n, v) in enumerate(GAME_VALUES.items())],
        [
            (duplicates(None, 0, None), "game 2: .*of null"),
            (cell(GAMES, "moves", 5, [25]), "game 5: .*moves"),
        ],
        [(duplicates(None, 0, 1), "game 2: .*of 1"), (cell(GAMES, "moves", 5, [None]), "game 5: .*moves")],
        [(duplicates(0, 0, 0), "game 0: .*duplicate_of 0")],
        [(duplicates(None, None, None), "game 1: .*duplicate_of null")],
    ],
    "position values": [  # tests/shards/test_block_check.py has more
        [(cell(FIRST, "board", 3, b"\xff" * 7), "row 3: .*ffffffffffffff")],
        [(cell(FIRST, "value", 3, float("nan")), "row 3: .*value nan")],
        [(cell(FIRST, "policy", 3, [{"cell": 25, "probability": 1.0}]), "row 3: .*cell 25")],
        [(cell(FIRST, "metadata", 3, "[" * 100_000), "row 3: .*metadata")],
    ],
    "shuffle stage": [
        *([(entry(f"stages shuffle {name}"), "")] for name in ("positions", "rejected", "of")),
        [(stage("shuffle", left_out={"where": 3}), "")],
    ],
    "shuffled rows": [
        *([(entry(f"stages shuffle {name}"), "")] for name in ("splits val", "seed", "policies train")),
        # All columns are compared by the same code: a few represent the others.
        [
            (in_bucket(BUCKET, "position_id", 10_000), BUCKET),
            (in_bucket(OTHERS[0], "board", bytes(7)), OTHERS[0]),
            (in_bucket(OTHERS[1], "value", 0.125), OTHERS[1]),
            (in_bucket(OTHERS[2], "policy", [{"cell": 3, "probability": 0.25}]), OTHERS[2]),
        ],
        [
            (in_bucket(BUCKET, "game_id", None), BUCKET),
            (in_bucket(OTHERS[0], "metadata", None), OTHERS[0]),
            (in_bucket(OTHERS[1], "total_positions", 99, was_null=True), OTHERS[1]),
            (in_bucket(OTHERS[2], "policy", [], was_null=True), OTHERS[2]),
        ],
        [(in_bucket(BUCKET, "policy", [{"cell": 3, "probability": 0.0}], was_null=True), BUCKET)],
        [(table(BUCKET, lambda t: t.take([0, 0, *range(2, len(t))])), BUCKET)],
        [(swap_between_buckets, "other buckets")],
        [(move_between_splits, "")],
        [(stage("shuffle", buckets={"train": 2, "val": 1, "test": 1}), "train")],
        [(stage("shuffle", buckets={"train": 3}), "val")],
        [(stage("shuffle", buckets={"train": 3}, splits={"train": 760}), "splits")],
        [(stage("shuffle", choices={"per_game": "1"}), "per_game")],
        [(stage("shuffle", choices={"per_gam": 1}), "per_gam")],
        [(stage("shuffle", choices={"per_game": 3}), "")],
    ],
    "shuffled order": [[(table(BUCKET, lambda t: t.take([1, 0, *range(2, len(t))])), BUCKET)]],
    "export stage": [[(entry(f"stages export {name}"), "")] for name in ("positions", "of")],
    "shards": [
        [(entry(f"files shards/{SHARD} rows"), "")],
        *([(entry(f"stages export {name}"), "")] for name in ("splits test", "shards train", "digest")),
        [
            (blocks(lambda b: b | {1: b[2], 2: b[1]}, "train-000000.tar"), "000001"),
            (blocks(add_one), "000008"),
            (blocks(with_double_values, "train-000002.tar"), "000012"),
            (blocks(lambda b: b | {max(b) + 1: b[max(b)]}, "train-000003.tar", listed=False), "000003.tar"),
        ],
        [(blocks(lambda b: {k: v for k, v in b.items() if k != 7}), "")],
        [
            (of_shards(lambda m: wrong_block(m, 1, 512)), "000008"),
            (of_shards(lambda m: wrong_block(m, 2, 0, "0" * 64)), "000014"),
        ],
        [(of_shards(lambda m: replace(m, fields={"more": FieldSpec("|u1", ()), **m.fields})), "field")],
        [(of_shards(lambda m: replace(m, splits={"train": m.splits["train"]})), "")],
        [(of_shards(lambda m: replace(m, board_size=6, order_version=99)), "board_size, order_version")],
    ],
}
"""Faults by the check that must fail, each with a pattern of what the check must name, by store."""


@pytest.mark.parametrize(
    ("check", "number"),
    [(check, number) for check, faults in FAULTS.items() for number in range(len(faults))],
)
def test_faults_are_found(
    odd_store: Path, exported: Path, copy_store: CopyStore, check: str, number: int
) -> None:
    of_tables = (*RULED, "position values")  # found without the later stages
    store = Altered(copy_store(odd_store if check in of_tables else exported))
    for fault, _ in FAULTS[check][number]:
        fault(store)
    found = failures(store.path)
    assert check in found, found
    for _, named in FAULTS[check][number]:
        assert re.search(named, found[check], re.DOTALL), found


def test_wrong_moves_or_another_winner_of_a_game_are_found(trmph_store: Path, copy_store: CopyStore) -> None:
    """Wrong moves would make wrong boards of the games mode, and of fill tables."""
    store = Altered(copy_store(trmph_store))
    games = store.read(GAMES)
    (first, second, *rest), winner = games["moves"][1].as_py(), games["winner"][1].as_py()
    for column, value, checks in (
        ("moves", [second, first, *rest], {"games", "game hashes"}),
        ("moves", [first, second, *rest[:-1]], {"games", "game hashes"}),
        ("moves", [], {"games", "game hashes"}),
        ("winner", "RED" if winner == "BLUE" else "BLUE", {"games"}),
    ):
        store.table(GAMES, lambda _, column=column, value=value: with_cell(games, column, 1, value))
        assert failures(store.path).keys() == checks


def test_a_store_passes_at_each_stage(
    trmph_store: Path, shuffled_store: Path, whole_store: Path, exported: Path
) -> None:
    for store, skipped in (
        (trmph_store, ["shuffle", "export"]),
        (shuffled_store, ["export"]),
        (whole_store, []),  # no position has a policy of several cells
        (exported, []),
    ):
        before = {path: path.stat().st_mtime_ns for path in [store, *store.rglob("*")]}
        result = verify_store(store)
        result.require()
        assert result.skipped == skipped
        assert "input order" in {check.name for check in result.checks}
        assert {path: path.stat().st_mtime_ns for path in [store, *store.rglob("*")]} == before


@pytest.mark.parametrize("name", [PART, BUCKET, GAMES])
def test_a_broken_page_is_named_once_where_the_digest_agrees(store: Altered, name: str) -> None:
    data = (store.path / name).read_bytes()
    footer = data[-8 - int.from_bytes(data[-8:-4], "little") :]
    store.content(name, data[:4] + bytes(len(data) - len(footer) - 4) + footer)
    run = hexdata_run("verify", store.path, "--json")
    checks = {check["name"]: check for check in run.facts["checks"]}
    (failed,) = [check for check in checks.values() if not check["ok"]]
    assert (run.status, failed["name"]) == (1, "pages")
    assert name in failed["detail"]
    assert {*rebuild_commands(Store.open(store.path), [name])} <= {*run.facts["commands"]}


def test_the_sign_of_a_zero_is_found(odd_store: Path, copy_store: CopyStore) -> None:
    altered = Altered(copy_store(odd_store))
    altered.cell(FIRST, "value", 0, 0.0)
    altered.cell(FIRST, "policy", 0, [{"cell": 3, "probability": 0.0}])
    shuffle_store(altered.path, ShuffleOptions(seed=SEED, buckets=1))
    rows = altered.read(BUCKET)
    row = rows["value"].to_pylist().index(0.0)
    for column, value in (("value", -0.0), ("policy", [{"cell": 3, "probability": -0.0}])):
        altered.cell(BUCKET, column, row, value)
        assert "shuffled rows" in failures(altered.path)
        altered.table(BUCKET, lambda _: rows)


@pytest.mark.parametrize(
    "choice",
    [
        {"assign": "game"},
        {"where": "value > 0.1", "dedup": "symmetric", "balance_by": "winner", "stratify_by": "length"},
    ],
    ids=["whole games", "all at once"],
)
def test_a_choice_passes_and_a_damaged_one_is_found(
    odd_store: Path, copy_store: CopyStore, choice: dict[str, Any]
) -> None:
    store = copy_store(odd_store)
    shuffle_store(store, ShuffleOptions(seed=SEED, buckets=3, **choice))
    assert failures(store) == {}
    facts = Manifest.load(store)
    stated = facts.stages["shuffle"]
    assert stated["positions"] + sum(stated["left_out"].values()) == facts.counts["positions"]
    swap_between_buckets(Altered(store))
    assert "shuffled rows" in failures(store)


# --- plies and quality ----------------------------------------------------------------------------------


def number_plies(rows: pa.Table) -> pa.Table:
    games = rows["game_id"].fill_null(-1).to_numpy()
    plies, totals = np.zeros(len(games), np.uint16), np.zeros(len(games), np.uint16)
    for game in np.unique(games):
        (own,) = np.nonzero(games == game)
        plies[own], totals[own] = np.arange(len(own)), len(own)
    return with_column(with_column(rows, "position_in_game", plies), "total_positions", totals)


def test_a_wrong_ply_or_game_is_found(odd_store: Path, copy_store: CopyStore) -> None:
    """All games are recovered; the positions have no plies except those of one file."""
    store = Altered(copy_store(odd_store))
    store.table(GAMES, lambda games: with_column(games, "provenance", ["recovered"] * len(games)))
    for path in sorted((store.path / "positions").iterdir()):
        name = f"positions/{path.name}"
        unnumbered = lambda rows: with_column(rows, "position_in_game", [None] * len(rows))  # noqa: E731
        store.table(name, number_plies if name == PART else unnumbered)
    numbered = store.read(PART)
    rows = numbered["game_id"].to_pylist()
    game = next(game for game in rows if game is not None)
    assert "games" not in failures(store.path)
    for column, value, named in (
        ("position_in_game", 2, game),
        ("position_in_game", 30, game),
        ("game_id", game + 1, game),
        ("game_id", -1, -1),
    ):
        store.table(PART, lambda _, c=column, v=value: with_cell(numbered, c, rows.index(game) + 3, v))
        assert f"game {named}: " in failures(store.path)["games"]


def test_a_shuffle_that_does_not_mix_is_found(tmp_path: Path, write_odd_store: WriteOddStore) -> None:
    """A store whose games are just those that its shuffle puts side by side: in order, and not mixed."""
    altered = Altered(write_odd_store(tmp_path / "store", 2_000, 1))
    rank = np.argsort(np.argsort(sort_key(np.arange(2_000), derive_key(SEED, "shuffle"))))

    def all_train(games: pa.Table) -> pa.Table:
        first = games.slice(0, 1).to_pylist()[0] | {"positions": 20, "split": "train"}
        made = [{**first, "game_id": game, "game_hash": bytes([0x40 + game] * 16)} for game in range(100)]
        return pa.Table.from_pylist(made, schema=games.schema)

    altered.table(FIRST, lambda rows: with_column(rows, "game_id", rank // 20))
    altered.table(GAMES, all_train)
    shuffle_store(altered.path, ShuffleOptions(seed=SEED, buckets=2))
    found = failures(altered.path)
    assert list(found) == ["shuffle quality"]
    assert "lag 1: 0.9505, expected 0.009505" in found["shuffle quality"]
    shuffle_store(altered.path, ShuffleOptions(seed=SEED + 1, buckets=2))
    assert failures(altered.path) == {}


# --- shards of a broken exporter, compared with the positions if the buckets were removed ----------------


def move_a_policy(block: Block) -> None:
    """Give the last policy to the last row that has none."""
    others = np.setdiff1d(np.arange(len(block["move"])), block["policy_row"])
    block["policy_row"][-1] = others[-1]
    block["policy_row"].sort()


def exchange_rows(block: Block) -> None:
    for name in row_fields(block):
        block[name][[3, 4]] = block[name][[4, 3]]


@pytest.fixture(scope="module")
def weighted(tmp_path_factory: pytest.TempPathFactory, write_odd_store: WriteOddStore) -> Path:
    """A shuffled store with targets. Read only: copy it."""
    store = write_odd_store(tmp_path_factory.mktemp("weighted") / "store", 900, 3, ("root_value", "weight"))
    shuffle_store(store, ShuffleOptions(seed=7, buckets=5, threads=1))
    return store


@pytest.mark.parametrize(
    "alter",
    [lambda block: block["weight"].__setitem__(3, 0.75), move_a_policy, exchange_rows],
    ids=["weight", "policy", "rows"],
)
def test_shards_of_other_rows_are_found_without_the_buckets(
    weighted: Path, copy_store: CopyStore, alter: Callable[[Block], None]
) -> None:
    convert, made = shards.columns_to_block, count()
    store = copy_store(weighted)

    def altering(*arguments: Any) -> Any:
        block = convert(*arguments)
        if next(made) == 4:
            block = {field: array.copy() for field, array in block.items()}
            alter(block)
        return block

    options = ExportOptions(shard_size=96, block_size=32, workers=1, free_buckets=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "columns_to_block", altering)
        export_shards(store, options)
    found = failures(store)
    assert list(found) == ["shards"]
    assert ".tar" in found["shards"]
    next((store / "shards").glob("*.tar")).unlink()
    # With the shard manifest, this is too little. At once: the digests are not compared.
    with pytest.raises(BudgetError, match="memory for a shuffle"):
        verify_store(store, VerifyOptions(memory=MINIMUM_MEMORY, threads=1))
