"""The formats of source files, and those that other packages add with entry points."""

from __future__ import annotations

import sys
from importlib.metadata import Distribution, EntryPoint
from types import ModuleType

import pytest

from hexdata import formats
from hexdata.errors import ConfigError, FormatError
from hexdata.formats import SourceFormat, known_patterns, open_source, registry
from hexdata.formats.trmph import TrmphReader


def open_xy(path, *, salvage, part):
    return TrmphReader(path, salvage=salvage, part=part)


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
        assert isinstance(reader, TrmphReader)
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
