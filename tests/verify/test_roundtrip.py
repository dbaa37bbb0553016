"""Round trip of sources: passes for every variant, and finds every change."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

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
from hexdata.verify.roundtrip import check_round_trip
from tests.legacy_pickles import example, load_pickle, save_pickle
from tests.pairs import FULL

SHARED = Path(__file__).parents[3] / "shared" / "data"
N = 5


def save(path, examples, **header):
    save_pickle(path, {"examples": examples, **header})


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return (inputs, store): dicts of mixed spelling, one rejected; tuples, raw games, a broken file."""
    folder = tmp_path_factory.mktemp("made")
    examples = [example(i // 10 + 1, i % 10, 10, winner=("BLUE", "b")[i % 7 == 3], zoo=i) for i in range(200)]
    examples[55]["metadata"]["total_positions"] = None
    examples[60]["board"] = "not a board"
    examples[70]["policy"] = np.linspace(0, 1, N * N, dtype="f4")
    save(folder / "in" / "dicts.pkl.gz", examples, zulu=1, source_file="a.trmph", stats={"b": 1, "a": 2})
    tuples = [(e["board"], e["policy"], 1.0) for e in (example(0, i % 10, 10) for i in range(100))]
    save(folder / "in" / "tuples.pkl.gz", tuples)
    games = [(np.array([0, 1, 5, i % 18 + 7], np.uint16), i % 2) for i in range(25)]
    write_trmph(folder / "in" / "raw.trmph", games, N)
    with (folder / "in" / "raw.trmph").open("a") as file:
        file.write("#5,a1zz b\n")
    (folder / "in" / "broken.pkl.gz").write_bytes((folder / "in" / "tuples.pkl.gz").read_bytes()[:-50])
    options = ConvertOptions(workers=1, max_reject_rate=0.9)
    convert_sources([folder / "in"], folder / "store", options)
    return folder / "in", folder / "store"


def test_every_source_survives_the_round_trip(made, tmp_path):
    inputs, store = made
    found = {source.name: source for source in check_round_trip(store, [inputs])}
    assert [name for name, source in found.items() if not source.ok] == []
    assert {name for name, source in found.items() if not source.checked} == {"in/broken.pkl.gz"}
    assert found["in/dicts.pkl.gz"].detail == "199 examples equal the original; 1 record rejected"
    assert found["in/raw.trmph"].detail == "125 examples equal the original; 1 record rejected"


def test_files_are_found_by_digest(made, tmp_path):
    inputs, store = made
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "renamed").write_bytes((inputs / "dicts.pkl.gz").read_bytes())
    (tmp_path / "dicts.pkl.gz").write_bytes((inputs / "tuples.pkl.gz").read_bytes()[::-1])
    (tmp_path / "loop").symlink_to(tmp_path)
    checked = [source.name for source in check_round_trip(store, [tmp_path]) if source.checked]
    assert checked == ["in/dicts.pkl.gz"]


def test_inputs_without_sources_are_an_error(made, tmp_path):
    inputs, store = made
    with pytest.raises(InputError, match=r"none of the store's sources.*in/broken"):
        check_round_trip(store, [tmp_path])
    with pytest.raises(InputError, match="no such file"):
        check_round_trip(store, [inputs, tmp_path / "missing"])


def edit(store, place, change):
    """Rewrite a Parquet file of a store with its table changed by ``change``."""
    path = store / place
    table = pq.read_table(path)
    write_parquet(path, table.schema, [change(table).cast(table.schema)])


def with_cell(table, name, row, value):
    values = table[name].to_pylist()
    values[row] = value
    field = table.schema.field(name)
    kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
    column = pa.array(values, kind).cast(field.type)
    return table.set_column(table.schema.get_field_index(name), field, column)


def header_of(table, change):
    row = table["name"].to_pylist().index("in/dicts.pkl.gz")
    header = json.loads(table["header"][row].as_py())
    return with_cell(table, "header", row, json.dumps(change(header)))


MINUS_ZERO = {"cell": 0, "probability": -0.0}
DICTS = "positions/part-000001.parquet"
CHANGES = {
    "board": (DICTS, lambda t: with_cell(t, "board", 9, t["board"][8].as_py()), "record 9: board differs"),
    "move": (DICTS, lambda t: with_cell(t, "move", 3, 11), "record 3: move differs; found 11; expected 6"),
    "policy": (DICTS, lambda t: with_cell(t, "policy", 69, [MINUS_ZERO, *t["policy"][69].as_py()]),
               "record 70: policy differs"),
    "value": (DICTS, lambda t: with_cell(t, "value", 150, -0.0), "record 151: value differs; found -0.0"),
    "player": (DICTS, lambda t: with_cell(t, "player_to_move", 0, 1), "record 0: player_to_move differs"),
    "ply": (DICTS, lambda t: with_cell(t, "position_in_game", 7, 8), "record 7: position_in_game differs"),
    "winner": (DICTS, lambda t: with_cell(t, "winner", 5, "RED"), "record 5: winner differs"),
    "metadata": (DICTS, lambda t: with_cell(t, "metadata", 4, '{"zoo":5}'), "record 4: metadata differs"),
    "dialect": (DICTS, lambda t: with_cell(t, "metadata", 3, '{"zoo":3}'), "record 3: metadata differs"),
    "game": (DICTS, lambda t: with_cell(t, "game_id", 11, 0), "record 11: line_idx differs"),
    "no game": (DICTS, lambda t: with_cell(t, "game_id", 11, 1 << 61), "found game 2305843009213693952"),
    "swapped": (DICTS, lambda t: t.take([1, 0, *range(2, t.num_rows)]), "record 0: board differs"),
    "raw": ("positions/part-000002.parquet", lambda t: with_cell(t, "value", 6, 0.0),
            "record 6: value differs"),
    "sense": ("sources/part-000000.parquet",
              lambda t: t.set_column(5, t.schema.field(5), pc.replace_substring(t["value_sense"], "0", "1")),
              "record 0: value differs; found 1.0; expected 0.0"),
    "header": ("sources/part-000000.parquet", lambda t: header_of(t, lambda h: h | {"zulu": 2}),
               "the top-level value of 'zulu' differs"),
    "header order": ("sources/part-000000.parquet",
                     lambda t: header_of(t, lambda h: dict(sorted(h.items()))), "the top-level keys differ"),
    "nested order": ("sources/part-000000.parquet",
                     lambda t: header_of(t, lambda h: h | {"stats": {"a": 2, "b": 1}}),
                     "the top-level value of 'stats'"),
    "rejected": ("rejected/part-000000.parquet", lambda t: with_cell(t, "reason", 1, "board-cells"),
                 "record 60: the record was rejected when it was read again: board-type"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_found_and_named(made, copy_store, name):
    inputs, store = made
    place, change, message = CHANGES[name]
    changed = copy_store(store)
    edit(changed, place, change)
    failed = [source for source in check_round_trip(changed, [inputs]) if not source.ok]
    assert message in failed[0].detail


def test_exported_pickles_are_compared_too(made, copy_store):
    inputs, store = made
    exported = copy_store(store)
    export_pickles(exported, PicklesOptions(order="original", workers=1))
    found = {source.name: source for source in check_round_trip(exported, [inputs])}
    assert all(source.ok for source in found.values())
    compared = {name for name, source in found.items() if "also in the exported pickle" in source.detail}
    assert compared == {"in/dicts.pkl.gz", "in/tuples.pkl.gz", "in/raw.trmph"}


@pytest.mark.parametrize(
    ("source", "name"),
    [("in/tuples.pkl.gz", "in/tuples.pkl.gz"), ("in/raw.trmph", "in/raw_processed.pkl.gz")],
)
def test_a_changed_exported_pickle_is_found(made, copy_store, source, name):
    inputs, store = made
    exported = copy_store(store)
    export_pickles(exported, PicklesOptions(order="original", workers=1))
    path = exported / "pickles" / "original" / name
    content = load_pickle(path)
    content["examples"].pop()
    save_pickle(path, content)
    (failed,) = [found for found in check_round_trip(exported, [inputs]) if not found.ok]
    assert failed.name == source
    assert failed.detail.startswith(f"pickles/original/{name}: the file has more or fewer examples")
    path.write_bytes(path.read_bytes()[:-20])
    (failed,) = [found for found in check_round_trip(exported, [inputs]) if not found.ok]
    assert failed.detail.startswith(f"pickles/original/{name}: ")


def test_pickles_of_an_earlier_state_are_not_compared(made, copy_store, tmp_path):
    inputs, store = made
    exported = copy_store(store)
    export_pickles(exported, PicklesOptions(order="original", workers=1))
    write_trmph(tmp_path / "more.trmph", [(np.array([0, 1, 5], np.uint16), 0)], N)
    convert_sources(
        [inputs, tmp_path / "more.trmph"], exported, ConvertOptions(workers=1, max_reject_rate=0.9)
    )
    found = check_round_trip(exported, [inputs, tmp_path / "more.trmph"])
    assert all(source.ok for source in found)
    assert not any("exported" in source.detail for source in found)


def test_empty_files_of_different_kinds_are_equal(tmp_path):
    """Empty files have the same digest, whatever their format."""
    folder = tmp_path / "in"
    save(folder / "a.pkl.gz", [example(1, i, 10) for i in range(10)])
    (folder / "none.trmph").write_bytes(b"")
    convert_sources([folder], tmp_path / "store", ConvertOptions(workers=1))
    (folder / "empty.pkl").write_bytes(b"")
    found = {source.name: source for source in check_round_trip(tmp_path / "store", [folder])}
    assert {name: source.ok and source.checked for name, source in found.items()} == {
        "in/a.pkl.gz": True,
        "in/none.trmph": True,
    }
    assert found["in/none.trmph"].detail == "contains no games, like the original"


def test_a_source_that_cannot_be_written_back_fails_with_a_reason(tmp_path):
    save(tmp_path / "in" / "a.pkl.gz", [example(1, i, 10) for i in range(10)], odd=b"bytes")
    convert_sources([tmp_path / "in"], tmp_path / "store", ConvertOptions(workers=1))
    (found,) = check_round_trip(tmp_path / "store", [tmp_path / "in"])
    assert (found.ok, found.checked) == (False, True)
    assert "cannot be written back; found bytes" in found.detail


@pytest.mark.skipif(not SHARED.exists(), reason="no real legacy files beside the repository")
def test_real_files_survive_the_round_trip(tmp_path):
    big = [SHARED / "trmph/neurohex_04.trmph"] if FULL else []
    inputs = [SHARED / "legacy" / "variants", SHARED / "legacy" / "found", *big]
    options = ConvertOptions(workers=2 if FULL else 1, value_convention="blue-is-0")
    convert_sources(inputs, tmp_path / "store", options)
    found = check_round_trip(tmp_path / "store", [SHARED])
    assert len(found) == 10 + len(big)
    assert [source.detail for source in found if not (source.ok and source.checked)] == []


def test_the_command_line(made, run_cli):
    inputs, store = made

    def verify(*arguments):
        return run_cli("verify", store, *arguments)

    done = verify("--round-trip", inputs, "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["ok"]
    assert [source["checked"] for source in facts["round_trip"]] == [False, True, True, True]
    done = verify("--round-trip", inputs / "dicts.pkl.gz", "--round-trip", inputs / "raw.trmph", "--json")
    assert done.returncode == 1, "a source whose file is not at hand is not proved"
    facts = json.loads(done.stdout)
    assert not facts["ok"]
    assert [source["ok"] for source in facts["round_trip"]] == [False, True, True, False]
    assert verify("--round-trip", store).returncode == 1


def test_keys_with_the_prefix_of_hexdata_survive_the_round_trip(tmp_path):
    own = {"hexdata:dialect": "int", "hexdata:value": 0.25, "dialect": 3, "hexdata:key:zoo": 4}
    examples = [example(1, ply, 10, **own) for ply in range(10)]
    save(tmp_path / "in" / "a.pkl.gz", examples, dialect="theirs", **{"hexdata:key:more": [1]})
    convert_sources([tmp_path / "in"], tmp_path / "store", ConvertOptions(value_convention="blue-is-0"))
    (found,) = check_round_trip(tmp_path / "store", tmp_path / "in")
    assert found.ok, found.detail
    export_pickles(tmp_path / "store", PicklesOptions(order="original"))
    (written,) = (tmp_path / "store" / "pickles" / "original").rglob("*.pkl.gz")
    raw = gzip.decompress(written.read_bytes())
    assert b"theirs" in raw
    assert b"hexdata:key:hexdata" not in raw
    assert b"hexdata:key:dialect" not in raw
