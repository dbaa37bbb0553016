"""The formats of source files, and those that other packages add with entry points."""

from __future__ import annotations

import sys
from importlib.metadata import Distribution, EntryPoint
from types import ModuleType

import pyarrow as pa
import pytest

from hexdata import formats
from hexdata.errors import ConfigError, FormatError, Reason
from hexdata.formats import RawBatch, Rejection, SourceFormat, known_patterns, open_source, registry
from hexdata.formats.checked import CheckedReader
from hexdata.formats.trmph import TrmphReader
from hexdata.schema import raw_schema


def open_xy(path, *, salvage, part):
    reader = TrmphReader(path, salvage=salvage, part=part)
    reader.format = "xy"
    return reader


XY = SourceFormat("xy", ("*.xy",), lambda head, name: head.startswith(b"XY"), open_xy, "XY games")


class Package(Distribution):
    """An installed distribution without files."""

    def read_text(self, filename):
        return "Name: xy-games\n" if filename == "METADATA" else None

    def locate_file(self, path):
        raise NotImplementedError


@pytest.fixture
def install(monkeypatch):
    """Return a function that adds entry points whose values are the given objects, by name."""
    module = ModuleType("xy_games")
    monkeypatch.setitem(sys.modules, "xy_games", module)
    found: list[EntryPoint] = []
    monkeypatch.setattr(registry, "entry_points", lambda group: found)
    registry.installed_formats.cache_clear()

    def add(**values):
        for name, value in values.items():
            setattr(module, name, value)
            entry = EntryPoint(name, f"xy_games:{name}", registry.ENTRY_POINT_GROUP)
            found.append(entry._for(Package()))

    yield add
    registry.installed_formats.cache_clear()


def test_a_format_of_another_package_opens_its_files(install, tmp_path):
    install(xy=XY)
    path = tmp_path / "a.XY"
    path.write_bytes(b"XY\n")
    with open_source(path) as reader:
        assert (type(reader), reader.format) == (CheckedReader, "xy")
        assert [each.reason for batch in reader.batches() for each in batch.rejected] == ["trmph-syntax"]
    assert formats.is_known_name("a.XY")
    assert known_patterns() == (*formats.PATTERNS, "*.xy")


def test_built_in_formats_are_found_first_and_load_no_entry_point(monkeypatch, tmp_path):
    def fail(group):
        raise AssertionError(group)

    registry.installed_formats.cache_clear()
    monkeypatch.setattr(registry, "entry_points", fail)
    path = tmp_path / "a.xy"
    path.write_text("#5,a1b2 b\n", encoding="utf-8")
    with open_source(path) as reader:
        assert reader.format == "trmph"
    assert formats.is_known_name("a.TRMPH.gz")


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (open_xy, "found: function"),
        (SourceFormat("X Y", ("*.xy",), XY.matches, open_xy), "'X Y'"),
        (SourceFormat("xy", (), XY.matches, open_xy), "the patterns ()"),
        (SourceFormat("xy", ("*.XY",), XY.matches, open_xy), r"the patterns ('*.XY',)"),
        (SourceFormat("trmph", ("*.xy",), XY.matches, open_xy), "'trmph'"),
    ],
)
def test_a_broken_entry_point_is_named(install, value, found):
    install(xy=value)
    with pytest.raises(ConfigError) as caught:
        formats.is_known_name("a.xy")
    message = str(caught.value)
    assert "xy_games:xy" in message
    assert "package xy-games" in message
    assert found.removeprefix("found: ") in message


def test_an_entry_point_that_cannot_be_imported_is_named(install, monkeypatch):
    entry = EntryPoint("xy", "no_such_module_xy:FORMAT", registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry])
    with pytest.raises(ConfigError, match="ModuleNotFoundError"):
        formats.is_known_name("a.xy")


def test_two_packages_cannot_add_the_same_name(install):
    install(one=XY, two=XY)
    with pytest.raises(ConfigError, match="no other format has"):
        known_patterns()


def test_a_failing_match_of_another_package_is_named(install, tmp_path):
    install(xy=SourceFormat("xy", ("*.xy",), lambda head, name: 1 // 0, open_xy))
    path = tmp_path / "a.xy"
    path.write_bytes(b"\x00\x01")
    with pytest.raises(ConfigError, match=r"'xy' of an installed package failed.*ZeroDivisionError"):
        open_source(path)


def test_an_unknown_file_lists_what_is_expected(install, tmp_path):
    install(xy=XY)
    path = tmp_path / "a.xy"
    path.write_bytes(b"\x00\x01")
    with pytest.raises(FormatError, match=r"TRMPH games.* or XY games, gzipped or not"):
        open_source(path)


# Checks of the batches of other packages


class Reader:
    """A reader whose batches are given."""

    format = "xy"
    board_size = 3
    damage = None

    def __init__(self, *batches, targets=()):
        self._batches = batches
        self.targets = targets
        self.header = {}

    def batches(self):
        yield from self._batches

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        pass


def batch_of(record=0, *, schema=None, **columns):
    row = {"record": record, "board": bytes(3), "value": 0.5} | columns
    return RawBatch(pa.RecordBatch.from_pylist([row], schema=schema or raw_schema(3)))


def read(reader):
    with CheckedReader(reader, "xy") as checked:
        batches = []
        for batch in checked.batches():
            batches.append(batch)
            reader.header = {"batches": len(batches)}
        assert checked.header == reader.header
        assert (checked.board_size, checked.damage) == (reader.board_size, reader.damage)
    return batches


def test_valid_batches_of_another_package_are_unchanged():
    targets = ("extra.t", "visits")
    first = batch_of(schema=raw_schema(3, targets), move=8, visits=3, policy=[{"cell": 8, "probability": 1}])
    second = batch_of(2, schema=raw_schema(3, targets), winner=1, end_reason="time", swap="sides")
    second.rejected.append(Rejection(1, Reason.NO_MOVES, "empty"))
    assert read(Reader(first, second, targets=targets)) == [first, second]


@pytest.mark.parametrize(
    ("batches", "found"),
    [
        ([batch_of(1)], r"its records; found \[1\]"),
        ([batch_of(), batch_of()], "1 as the next"),
        ([batch_of(schema=raw_schema(4), board=bytes(4))], "the schema of a batch"),
        ([batch_of(value=None)], "no nulls"),
        ([RawBatch(batch_of().positions, [Rejection(1, "odd", "")])], "a reason"),
    ],
)
def test_invalid_batches_of_another_package_are_refused(batches, found):
    with pytest.raises(FormatError, match=f"'xy', of another package.*{found}") as caught:
        read(Reader(*batches))
    assert caught.value.code == "reader-error"


@pytest.mark.parametrize(
    ("columns", "reason", "detail"),
    [
        ({"move": 9}, "trmph-cell", "move; found 9; expected 0 to 8"),
        ({"value": 1.5}, "value-range", "value; found 1.5"),
        ({"value": float("nan")}, "value-range", "value; found nan"),
        ({"player_to_move": 2}, "player-range", "player_to_move; found 2"),
        ({"winner": 2}, "winner-value", "winner; found 2"),
        ({"visits": -1}, "target-range", "visits; found -1"),
        ({"end_reason": "bored"}, "reader-error", "end_reason; found 'bored'; expected chain, resigned"),
        ({"policy": [{"cell": 9, "probability": 1}]}, "policy-values", "policy; "),
        ({"policy": [{"cell": 0, "probability": -1}]}, "policy-values", "policy; "),
        ({"board": b"\x80\x40\x00"}, "board-overlap", "both blue and red"),
        ({"board": b"\x00\x00\x01"}, "board-cells", "bits after its cells"),
        ({"board": b"\x80\x40\x00", "move": 9, "value": 2.0}, "value-range", "value; found 2.0"),
    ],
)
def test_a_record_of_another_package_with_an_invalid_value_is_rejected(columns, reason, detail):
    schema = raw_schema(3, ("visits",))
    given = [batch_of(0, schema=schema), batch_of(1, schema=schema, **columns), batch_of(3, schema=schema)]
    one = RawBatch(
        pa.Table.from_batches([each.positions for each in given]).combine_chunks().to_batches()[0],
        [Rejection(2, Reason.NO_MOVES, "empty")],
    )
    (batch,) = read(Reader(one, targets=("visits",)))
    assert batch.positions["record"].to_pylist() == [0, 3]
    assert [(each.record, each.reason) for each in batch.rejected] == [(1, reason), (2, "no-moves")]
    assert detail in batch.rejected[0].detail


def test_names_of_another_package_are_checked():
    with pytest.raises(FormatError, match="its targets"):
        read(Reader(targets=("extra.1",)))
    reader = Reader()
    reader.format = "trmph"
    with pytest.raises(FormatError, match="its format"):
        read(reader)
