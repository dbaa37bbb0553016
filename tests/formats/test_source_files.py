"""Files of every format: decompression within limits, damage, and the formats that other packages add."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import math
import random
import sys
import tracemalloc
import zlib
from functools import partial
from importlib.metadata import Distribution, EntryPoint
from types import ModuleType

import pyarrow as pa
import pytest

from hexdata import formats
from hexdata.errors import ConfigError, FormatError, Reason
from hexdata.formats import RawBatch, Rejection, SourceFormat, known_patterns, open_source, registry
from hexdata.formats.checked import CheckedReader
from hexdata.formats.gunzip import GunzipFile, GunzipLimits
from hexdata.formats.trmph import TrmphReader
from hexdata.schema import raw_schema
from tests.kit.sources import read_source, save_source

LIMITS = GunzipLimits(decompressed_bytes=1 << 25, ratio=100, ratio_floor=1 << 16)
LINES = b"".join(b"%d\n" % (n * n) for n in range(20_000))


@pytest.mark.parametrize("kind", ["plain", "packed", "salvaged"])
def test_all_ways_of_reading_return_the_same_bytes(tmp_path, kind):
    path = tmp_path / "file"
    path.write_bytes(LINES if kind == "plain" else gzip.compress(LINES, mtime=0))
    with GunzipFile(path.open("rb"), LIMITS, salvage=kind == "salvaged") as file:
        assert (file.read(0), file.read(1), file.offset) == (b"", LINES[:1], 1)
        assert (file.read(), file.offset) == (LINES[1:], len(LINES))
    with GunzipFile(path.open("rb"), LIMITS) as file, io.BufferedReader(file, 100) as lines:
        assert list(lines) == LINES.splitlines(keepends=True)


@pytest.mark.parametrize("salvage", [False, True])
@pytest.mark.parametrize("size", [-1, 1 << 16])
def test_a_gzip_bomb_is_stopped_early(tmp_path, salvage, size):
    path = tmp_path / "bomb"
    path.write_bytes(gzip.compress(bytes(32 << 20), mtime=0))
    tracemalloc.start()
    with GunzipFile(path.open("rb"), LIMITS, salvage=salvage) as file, pytest.raises(FormatError) as caught:
        list(iter(partial(file.read, size), b""))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert caught.value.code == "limit-ratio"
    assert peak < 8 << 20


def test_an_empty_gzip_stream_is_truncated(tmp_path):
    path = tmp_path / "a.trmph.gz"
    path.write_bytes(gzip.compress(b"#3,a1 b\n")[:6])
    with pytest.raises(FormatError) as caught:
        open_source(path)
    assert (caught.value.code, caught.value.path) == ("truncated", str(path))


@pytest.mark.parametrize("left", [0, 100])
def test_a_file_that_is_cut_while_it_is_salvaged_is_truncated(tmp_path, left):
    path, data = tmp_path / "a.gz", gzip.compress(random.Random(1).randbytes(300_000))
    path.write_bytes(data[:-100_000])
    with GunzipFile(path.open("rb"), LIMITS, salvage=True) as file:
        assert file.read(100_000)
        path.write_bytes(data[:left])
        with pytest.raises(FormatError, match="ends before"):
            list(iter(partial(file.read, 100_000), b""))


class Counted(io.BytesIO):
    """A file that counts the calls that read it."""

    calls = 0

    def readinto(self, buffer):
        self.calls += 1
        return super().readinto(buffer)


@pytest.mark.parametrize("seed", range(8))
def test_every_byte_before_the_damage_is_salvaged_without_a_call_for_each(seed):
    packed, rng = bytearray(gzip.compress(LINES[:9000], mtime=0)), random.Random(seed)
    at = rng.randrange(10, len(packed) - 8)
    packed[at] ^= 1 << rng.randrange(8)
    damaged = Counted(packed if seed % 2 else packed[:at])
    unpacker, rest, expected = zlib.decompressobj(-15), damaged.getvalue()[10:], b""
    with contextlib.suppress(zlib.error):
        while piece := unpacker.decompress(rest, 1):
            expected, rest = expected + piece, unpacker.unconsumed_tail
    with GunzipFile(io.BufferedReader(damaged), LIMITS, salvage=True) as file:
        assert file.read(1 << 18) == expected
        with pytest.raises(FormatError):
            file.read(1)
        assert damaged.calls < 2_000


GAMES = {
    "a.sgf.gz": b"(;GM[11]SZ[5]C[comment]RE[B+R];B[a1];W[b2])\n",
    "a.trmph.gz": b"#5,a1b2 b # a comment of the same length ..\n",
}


@pytest.mark.parametrize("name", GAMES)
@pytest.mark.parametrize("cut", range(1, 100, 11))
def test_damage_fails_the_file_and_not_only_the_game_in_which_it_is(tmp_path, name, cut):
    path = tmp_path / name
    path.write_bytes(gzip.compress(3 * GAMES[name], 0)[:-cut])
    with pytest.raises(FormatError) as caught:
        read_source(path)
    assert (caught.value.code, caught.value.path) == ("truncated", str(path))
    reader, rows, _ = read_source(path, salvage=True)
    assert reader.damage.code == "truncated"
    lost = max(0, cut - 8)  # length and checksum follow the games
    assert len(rows) == 3 * ((3 * len(GAMES[name]) - lost + (name == "a.sgf.gz")) // len(GAMES[name]))


PACKED = {
    "twice": lambda text: gzip.compress(gzip.compress(text)),
    "damaged mark": lambda text: b"\x1e" + gzip.compress(text)[1:],
    "bzip2": bz2.compress,
    "xz": lzma.compress,
    "deflate": zlib.compress,
}


@pytest.mark.parametrize("suffix", ["trmph", "trmph.gz", "hexworld", "sgf"])
@pytest.mark.parametrize("packed", PACKED)
def test_compressed_data_with_the_name_of_a_text_are_no_lines_of_it(tmp_path, packed, suffix):
    path = tmp_path / f"a.{suffix}"
    lines = (b"#13,a%db%d b\n" % (n % 13 + 1, n * n % 13 + 1) for n in range(300))
    path.write_bytes(PACKED[packed](b"".join(lines)))
    with pytest.raises(FormatError) as caught:
        open_source(path)
    assert caught.value.code == "unknown-layout"


OTHERS = {
    r"PAR1\\x15.*Parquet": b"PAR1\x15\x04",
    "tar": b"#5,a1b2 b\n".ljust(257, b"\0") + b"ustar\x0000",
    "UTF-16": "#5,a1b2 b\n".encode("utf-16-le"),
}


@pytest.mark.parametrize("named", OTHERS)
def test_a_file_without_a_known_format_is_named_with_its_first_bytes(tmp_path, named):
    path = tmp_path / "a.trmph"
    path.write_bytes(OTHERS[named])
    with pytest.raises(FormatError, match=rf"a\.trmph.*{named}"):
        open_source(path)


# Formats of other packages


def open_xy(path, *, salvage, part):
    reader = TrmphReader(path, salvage=salvage, part=part)
    reader.format = "xy"
    return reader


XY = SourceFormat("xy", ("*.xy",), lambda head, name: name.lower().endswith(".xy"), open_xy, "XY games")


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


@pytest.mark.parametrize(
    "text", ['["#5,a1",\n"#5,b2"\n]', 'game,won\n"#5,a1b2",b', '{"game": "#5c1,a1b2:rb"}']
)
def test_a_format_of_another_package_opens_its_files(install, tmp_path, text):
    install(xy=XY)
    reader, _, rejected = read_source(save_source(tmp_path / "a.XY", text))
    assert (type(reader), reader.format) == (CheckedReader, "xy")
    assert rejected[-1].reason == "trmph-syntax"
    assert formats.is_known_name("a.XY")
    assert known_patterns() == (*registry.PATTERNS, "*.xy")


def test_built_in_formats_are_found_first_and_load_no_entry_point(install, tmp_path):
    install(xy=1 // 1)  # no format, so loading it would raise
    path = tmp_path / "a.xy"
    path.write_text("#5,a1b2 b\n", encoding="utf-8")
    assert read_source(path).reader.format == "trmph"
    assert formats.is_known_name("a.TRMPH.gz")


@pytest.mark.parametrize(
    "values",
    [
        {"xy": open_xy},
        {"xy": SourceFormat("X Y", ("*.xy",), XY.matches, open_xy)},
        {"xy": SourceFormat("xy", ("*.XY",), XY.matches, open_xy)},
        {"xy": SourceFormat("trmph", ("*.xy",), XY.matches, open_xy)},
        {"xy": XY, "xy2": XY},
        {"xy": SourceFormat("xy", ("*.xz",), lambda head, name: 1 // 0, open_xy)},
    ],
)
def test_a_broken_format_of_another_package_is_named(install, tmp_path, values):
    install(**values)
    (tmp_path / "a.unknown").write_bytes(b"\x00\x01")
    with pytest.raises(ConfigError, match="xy"):
        open_source(tmp_path / "a.unknown")


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
        for number, batch in enumerate(self._batches, 1):
            yield batch
            self.header = {"batches": number}

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        pass


def batch_of(record=0, *, n=3, targets=(), **columns):
    row = {"record": record, "board": bytes(n), "value": 0.5} | columns
    return RawBatch(pa.RecordBatch.from_pylist([row], raw_schema(n, targets)))


def read(*batches, targets=()):
    with CheckedReader(Reader(*batches, targets=targets), "xy") as checked:
        found = list(checked.batches())
        assert (checked.board_size, checked.damage, checked.header) == (3, None, {"batches": len(found)})
    return found


def test_valid_batches_of_another_package_are_unchanged():
    targets = ("extra.t", "visits")
    first = batch_of(targets=targets, move=8, visits=3, policy=[{"cell": 8, "probability": 1}])
    second = batch_of(2, targets=targets, winner=1, end_reason="time", swap="sides")
    second.rejected.append(Rejection(1, Reason.NO_MOVES, "empty"))
    assert read(first, second, targets=targets) == [first, second]


@pytest.mark.parametrize(
    "batches",
    [
        [batch_of(1)],
        [batch_of(), batch_of()],
        [batch_of(n=4)],
        [batch_of(value=None)],
        [RawBatch(batch_of().positions, [Rejection(1, "odd", "")])],
    ],
)
def test_invalid_batches_of_another_package_are_refused(batches):
    with pytest.raises(FormatError) as caught:
        read(*batches)
    assert caught.value.code == "reader-error"


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"move": 9}, "trmph-cell"),
        ({"value": 1.5}, "value-range"),
        ({"visits": -1}, "target-range"),
        ({"extra.t": math.nan}, "target-range"),
        ({"end_reason": "bored"}, "reader-error"),
        ({"policy": [{"cell": 0, "probability": -1}]}, "policy-values"),
        ({"board": b"\x80\x40\x00"}, "board-overlap"),
        ({"board": b"\x00\x00\x01"}, "board-cells"),
        ({"board": b"\x80\x40\x00", "move": 9, "value": 2.0}, "value-range"),
    ],
)
def test_a_record_of_another_package_with_an_invalid_value_is_rejected(columns, reason):
    targets = ("extra.t", "visits")
    given = [batch_of(record, targets=targets, **columns if record == 1 else {}) for record in (0, 1, 3)]
    one = RawBatch(RawBatch.join(given), [Rejection(2, Reason.NO_MOVES, "empty")])
    (batch,) = read(one, targets=targets)
    assert batch.positions["record"].to_pylist() == [0, 3]
    assert [(each.record, each.reason) for each in batch.rejected] == [(1, reason), (2, "no-moves")]


@pytest.mark.parametrize(("name", "targets"), [("xy", ("extra.1",)), ("trmph", ())])
def test_names_of_another_package_are_checked(name, targets):
    reader = Reader(targets=targets)
    reader.format = name
    with pytest.raises(FormatError):
        CheckedReader(reader, "xy")
