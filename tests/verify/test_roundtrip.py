"""Round trip of sources: passes for every variant, and finds every change."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from hexdata.convert import ConvertOptions, convert_sources
from hexdata.errors import InputError
from hexdata.export import PicklesOptions, export_pickles
from hexdata.formats.trmph import write_trmph
from hexdata.store.parquet import write_parquet
from hexdata.verify import check_round_trip
from tests.kit.batches import one_source_a_part
from tests.kit.command_line import hexdata_run
from tests.legacy_pickles import example, save_pickle
from tests.pairs import FULL
from tests.verify.altered import Altered, with_cell

if TYPE_CHECKING:
    from tests.conftest import CopyStore

SHARED = Path(__file__).parents[3] / "shared" / "data"
N = 5
Made = tuple[Path, Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Inputs and their store: dicts of mixed spelling, one rejected; tuples, raw games, a broken file."""
    folder = tmp_path_factory.mktemp("made")
    examples = [example(i // 10 + 1, i % 10, 10, winner=("BLUE", "b")[i % 7 == 3], zoo=i) for i in range(200)]
    examples[55]["metadata"]["total_positions"] = None
    examples[60]["board"] = "not a board"
    examples[70]["policy"] = np.linspace(0, 1, N * N, dtype="f4")
    top = {"examples": examples, "zulu": 1, "source_file": "a.trmph", "stats": {"b": 1, "a": 2}}
    save_pickle(folder / "in" / "dicts.pkl.gz", top)
    tuples = [(e["board"], e["policy"], 1.0) for e in (example(0, i % 10, 10) for i in range(100))]
    save_pickle(folder / "in" / "tuples.pkl.gz", {"examples": tuples})
    games = [(np.array([0, 1, 5, i % 18 + 7], np.uint16), i % 2) for i in range(25)]
    write_trmph(folder / "in" / "raw.trmph", games, N)
    with (folder / "in" / "raw.trmph").open("a") as file:
        file.write("#5,a1zz b\n")
    (folder / "in" / "broken.pkl.gz").write_bytes((folder / "in" / "tuples.pkl.gz").read_bytes()[:-50])
    with one_source_a_part():
        convert_sources([folder / "in"], folder / "store", ConvertOptions(workers=1, max_reject_rate=0.9))
    return folder / "in", folder / "store"


def test_every_source_survives_the_round_trip(made: Made) -> None:
    inputs, store = made
    found = {source.name: source for source in check_round_trip(store, [inputs])}
    assert [name for name, source in found.items() if not source.ok] == []
    assert {name for name, source in found.items() if not source.checked} == {"in/broken.pkl.gz"}
    for name, count in (("in/dicts.pkl.gz", 199), ("in/raw.trmph", 125)):
        assert f"{count} examples" in found[name].detail
        assert "1 record rejected" in found[name].detail


def test_files_are_found_by_digest(made: Made, tmp_path: Path) -> None:
    inputs, store = made
    with pytest.raises(InputError, match=r"none of the store's sources.*in/broken"):
        check_round_trip(store, [tmp_path])
    with pytest.raises(InputError, match="no such file"):
        check_round_trip(store, [inputs, tmp_path / "missing"])
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "renamed").write_bytes((inputs / "dicts.pkl.gz").read_bytes())
    (tmp_path / "dicts.pkl.gz").write_bytes((inputs / "tuples.pkl.gz").read_bytes()[::-1])
    (tmp_path / "loop").symlink_to(tmp_path)
    found = check_round_trip(store, [tmp_path])
    assert [(each.name, each.ok) for each in found if each.checked] == [("in/dicts.pkl.gz", True)]


def test_the_command_fails_for_a_source_whose_file_is_not_at_hand(made: Made) -> None:
    inputs, store = made
    whole = hexdata_run("verify", store, "--round-trip", inputs, "--json")
    assert (whole.status, whole.facts["ok"]) == (0, True)
    assert [source["checked"] for source in whole.facts["round_trip"]] == [False, True, True, True]
    files = ("--round-trip", inputs / "dicts.pkl.gz", "--round-trip", inputs / "raw.trmph")
    part = hexdata_run("verify", store, *files, "--json")
    assert (part.status, part.facts["ok"]) == (1, False)
    assert [source["ok"] for source in part.facts["round_trip"]] == [False, True, True, False]


# --- changes --------------------------------------------------------------------------------------------

DICTS, RAW, TUPLES = (f"positions/part-00000{number}.parquet" for number in (1, 2, 3))
SOURCES, REJECTED = "sources/part-000000.parquet", "rejected/part-000000.parquet"
Change = Callable[[pa.Table], pa.Table]


def cell(name: str, row: int, value: Any) -> Change:
    return lambda table: with_cell(table, name, row, value)


def header(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Change:
    def alter(table: pa.Table) -> pa.Table:
        row = table["name"].to_pylist().index("in/dicts.pkl.gz")
        return with_cell(table, "header", row, json.dumps(change(json.loads(table["header"][row].as_py()))))

    return alter


def with_minus_zero(table: pa.Table) -> pa.Table:
    policy = [{"cell": 0, "probability": -0.0}, *table["policy"][69].as_py()]
    return with_cell(table, "policy", 69, policy)


def other_sense(table: pa.Table) -> pa.Table:
    return table.set_column(5, table.schema.field(5), pc.replace_substring(table["value_sense"], "0", "1"))


CHANGES: list[tuple[str, Change, str]] = [
    (DICTS, lambda t: with_cell(t, "board", 9, t["board"][8].as_py()), "record 9: board differs"),
    (DICTS, cell("move", 3, 11), "record 3: move differs; found 11; expected 6"),
    (DICTS, with_minus_zero, "record 70: policy differs"),
    (DICTS, cell("value", 150, -0.0), "record 151: value differs; found -0.0"),
    (DICTS, cell("player_to_move", 0, 1), "record 0: player_to_move differs"),
    (DICTS, cell("position_in_game", 7, 8), "record 7: position_in_game differs"),
    (DICTS, cell("winner", 5, "RED"), "record 5: winner differs"),
    (DICTS, cell("metadata", 4, '{"zoo":5}'), "record 4: metadata differs"),
    (DICTS, cell("metadata", 3, '{"zoo":3}'), "record 3: metadata differs"),  # another spelling of the winner
    (DICTS, cell("game_id", 11, 0), "record 11: line_idx differs"),
    (DICTS, cell("game_id", 11, 1 << 61), "found 2305843009213693952; expected a game_id"),
    (DICTS, lambda t: t.take([1, 0, *range(2, t.num_rows)]), "record 0: board differs"),
    (RAW, cell("value", 6, 0.0), "record 6: value differs"),
    (SOURCES, other_sense, "record 0: value differs; found 1.0; expected 0.0"),
    (SOURCES, header(lambda h: h | {"zulu": 2}), "value of 'zulu' differs"),
    (SOURCES, header(lambda h: dict(sorted(h.items()))), "keys differ"),
    (SOURCES, header(lambda h: h | {"stats": {"a": 2, "b": 1}}), "value of 'stats'"),
    (SOURCES, cell("positions", 0, 1 << 40), "more or fewer examples"),
    (REJECTED, cell("reason", 1, "board-cells"), "board-type"),
]


def test_a_change_is_found_and_named(made: Made, copy_store: CopyStore) -> None:
    inputs, store = made
    changed = copy_store(store)
    for name, change, message in CHANGES:
        content = (changed / name).read_bytes()
        table = pq.read_table(changed / name)
        write_parquet(changed / name, table.schema, [change(table).cast(table.schema)])
        failed = [source for source in check_round_trip(changed, [inputs]) if not source.ok]
        assert message in failed[0].detail
        (changed / name).write_bytes(content)


@pytest.mark.parametrize("reason", ["after-repeat", "target-range"])
def test_no_accepted_position_can_be_hidden(made: Made, copy_store: CopyStore, reason: str) -> None:
    """Except after a repeated move, if the source has games that were cut there."""
    inputs, store = made
    changed = Altered(copy_store(store))

    def hide(rejected: pa.Table) -> pa.Table:
        """Reject record 12 too, whose position is removed."""
        row = {**rejected.slice(0, 1).to_pylist()[0], "source_id": 3, "record": 12, "reason": reason}
        return pa.concat_tables([rejected, pa.Table.from_pylist([row], schema=rejected.schema)])

    changed.table(TUPLES, lambda rows: rows.take([*range(12), *range(13, len(rows))]))
    changed.cell(SOURCES, "positions", 3, 99)
    changed.cell(SOURCES, "flags", 1, '{"truncated":1}')  # games of another source
    changed.table(REJECTED, hide)
    found = {source.name: source for source in check_round_trip(changed.path, [inputs])}
    assert not found["in/tuples.pkl.gz"].ok


def test_keys_with_the_prefix_of_hexdata_survive_the_round_trip(tmp_path: Path) -> None:
    own = {"hexdata:dialect": "int", "hexdata:value": 0.25, "dialect": 3, "hexdata:key:zoo": 4}
    examples = [example(1, ply, 10, **own) for ply in range(10)]
    top = {"examples": examples, "dialect": "theirs", "hexdata:key:more": [1]}
    save_pickle(tmp_path / "in" / "a.pkl.gz", top)
    convert_sources([tmp_path / "in"], tmp_path / "store", ConvertOptions(value_convention="blue-is-0"))
    (found,) = check_round_trip(tmp_path / "store", tmp_path / "in")
    assert found.ok, found.detail
    export_pickles(tmp_path / "store", PicklesOptions(order="original"))
    (written,) = (tmp_path / "store" / "pickles" / "original").rglob("*.pkl.gz")
    raw = gzip.decompress(written.read_bytes())
    assert b"theirs" in raw
    assert b"hexdata:key:hexdata" not in raw
    assert b"hexdata:key:dialect" not in raw


@pytest.mark.skipif(not SHARED.exists(), reason="no real legacy files beside the repository")
def test_real_files_survive_the_round_trip(tmp_path: Path) -> None:
    big = [SHARED / "trmph/neurohex_04.trmph"] if FULL else []
    inputs = [SHARED / "legacy" / "variants", SHARED / "legacy" / "found", *big]
    options = ConvertOptions(workers=2 if FULL else 1, value_convention="blue-is-0")
    convert_sources(inputs, tmp_path / "store", options)
    found = check_round_trip(tmp_path / "store", [SHARED])
    assert len(found) == 10 + len(big)
    assert [source.detail for source in found if not (source.ok and source.checked)] == []
