"""A short fuzz test of the readers with mutated files of every variant; `tests/fuzz` runs it for longer.

The invariants: a reader raises only FormatError, within bounded time and memory; no code runs; every record
is a position or a rejection; the fast path equals the plain one; salvage keeps the records before the damage.
"""

from __future__ import annotations

import encodings.unicode_escape  # noqa: F401  # errors import it, when they first print a text with escapes
import gc
import gzip
import os
import pickle
import random
import signal
import subprocess
import sys
import tempfile
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hexdata.formats.katago  # noqa: F401  # open_source would import it while the audit hook is active
from hexdata.convert import ConvertOptions, convert_sources
from hexdata.demo.games import make_games
from hexdata.errors import FormatError, HexdataError
from hexdata.formats import SALVAGEABLE, RawBatch, Rejection, SourceReader, open_source
from hexdata.formats.legacy import DIALECTS, LegacyReader, write_legacy
from hexdata.formats.trmph import TrmphReader, write_trmph
from tests.pairs import FULL

sys.path.insert(0, str(Path(__file__).parents[1] / "fuzz"))

import fuzz_parsers

N = 3
SECONDS = 120
"""Time limit per file; a file normally takes milliseconds."""
MEMORY = 24 << 20
"""Maximum memory of Python objects for a file of a few kB, in bytes."""
MALICIOUS = [
    b"cos\nsystem\n(X\x04\x00\x00\x00truetR",
    b"\x8c\x08builtins\x8c\x04eval\x93\x8c\x011\x85R",
    b"cnumpy\ndtype\n(X\x02\x00\x00\x00O8I00\nI01\ntR",
    b"\x82\x01",
    b"\x8e" + b"\xff" * 8,
    b"B\xff\xff\xff\x7f",
    b"\x95" + b"\xff" * 8,
    b"(" * 50,
    b"\x94",
    b"h\x05",
    b"\n#13,a1b1 b\n",
    b"\n#3,a1a1 b\n",
    b"((Nt\x85Nu",
    b"\xff\xfe",
]
"""Byte strings that random mutations would hardly produce."""


# Seeds and mutations


def seed_files() -> dict[str, bytes]:
    """Return one small valid file per variant, by name: decompressed pickles, and two gzipped ones."""
    games = list(make_games(2, seed=3, board_size=N))
    seeds = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "games"
        write_trmph(path, games, N)
        seeds["trmph"] = path.read_bytes()
        with TrmphReader(path) as reader:
            batches = [_with_extra(batch.positions) for batch in reader.batches()]
        for dialect in DIALECTS:
            with path.open("wb") as file:
                write_legacy(file, batches, board_size=N, dialect=dialect, header={"source_file": "a.trmph"})
            seeds[dialect] = gzip.decompress(path.read_bytes())
    url = seeds["trmph"].replace(b"#", b"http://www.trmph.com/hex/board#").replace(b" b", b" 1")
    seeds["trmph-url"] = b"# a header\n\n" + url.replace(b" r", b" 2 # resigned") + b"#3,a1b1a2b2a3\n"
    examples = [_example(row) for batch in batches for row in batch.to_pylist()]
    for protocol in range(6):
        content = {"examples": examples, "processing_stats": {"examples_generated": len(examples)}}
        seeds[f"protocol-{protocol}"] = pickle.dumps(content, protocol)
    shuffled = random.Random(1).sample(examples, len(examples))
    seeds["shuffled"] = pickle.dumps({"examples": shuffled, "shuffling_stats": {"bucket_id": 4}}, 4)
    for name in ("dicts-enums", "trmph"):
        seeds[f"{name}.gz"] = gzip.compress(seeds[name], 6, mtime=0)
    return seeds


def _with_extra(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Add the metadata key that dicts with enums have and that has no column."""
    extra = pa.array(['{"source_file": "a.trmph"}'] * batch.num_rows)
    return batch.set_column(batch.schema.get_field_index("metadata"), "metadata", extra)


def _example(row: dict[str, object]) -> dict[str, object]:
    """Return a dict example with the metadata of a row, and a simple board."""
    board = np.zeros((2, N, N), np.float32)
    board[0].flat[: row["position_in_game"] // 2] = 1
    policy = np.zeros(N * N, np.float32)
    policy[row["move"] or 0] = 1
    metadata = {"game_id": (0, row["line_idx"]), "winner": ("BLUE", "RED")[row["winner"]]}
    metadata |= {key: row[key] for key in ("position_in_game", "total_positions", "value_sample_tier")}
    return {
        "board": board,
        "policy": None if row["move"] is None else policy,
        "value": row["value"],
        "player_to_move": row["player_to_move"],
        "metadata": metadata,
    }


SEEDS = seed_files()


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """Return a seed after one or two edits. Most edits change one byte; others remove, repeat or insert
    bytes, copy them from another seed, or truncate the file. Half of the files are gzipped.
    """
    raw = bytearray(SEEDS[draw(NAMES)])
    for kind in draw(EDITS):
        start = draw(st.integers(0, len(raw) - 1)) if raw else 0
        stop = start + draw(LENGTHS)
        if kind == "byte":
            raw[start : start + 1] = bytes([draw(BYTES)])
        elif kind == "next":
            raw[start : start + 1] = bytes((byte + 1) % 256 for byte in raw[start : start + 1])
        elif kind == "repeat":
            raw[start:start] = raw[start:stop]
        elif kind == "evil":
            raw[start:stop] = draw(st.sampled_from(MALICIOUS))
        elif kind == "splice":
            raw[start:stop] = SEEDS[draw(NAMES)][start:stop]
        else:
            del raw[start : stop if kind == "cut" else len(raw)]
    return gzip.compress(raw, 1, mtime=0) if draw(st.booleans()) else bytes(raw)


NAMES = st.sampled_from([*SEEDS, *["trmph", "trmph-url"] * 3])
"""A third of the files are text, because the pickles resemble each other."""
KINDS = ["byte", "byte", "byte", "next", "next", "next", "repeat", "evil", "splice", "cut", "end"]
EDITS = st.lists(st.sampled_from(KINDS), min_size=1, max_size=2)
LENGTHS = st.sampled_from([0, 1, 2, 7, 100, 1_000])
BYTES = st.integers(0, 255)


# Invariants


class InvariantError(BaseException):
    """A violated invariant. Not an Exception, so that no handler in hexdata catches it."""


RUNS_CODE = ("import", "exec", "compile", "marshal.", "pickle.", "ctypes.", "subprocess.", "socket.")
RUNS_CODE += ("os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn")
CHANGES_FILES = frozenset({"os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink"})
_guarded: list[Path] = []
"""The folder in which a reader may write files; empty between files."""
_other_threads: set[int] = set()
"""Threads that earlier tests left running, which are not checked."""


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    """Raise for forbidden events while a file is read."""
    if not _guarded or threading.get_ident() in _other_threads:
        return
    if event.startswith(RUNS_CODE):
        raise InvariantError(f"{event} {arguments}")
    if event == "os.mkdir" and Path(arguments[0]).is_dir():
        return  # creates nothing
    writes = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    if (writes or event in CHANGES_FILES) and _is_outside(arguments[0], _guarded[0]):
        raise InvariantError(f"{event} {arguments}")


def _is_outside(path: object, folder: Path) -> bool:
    """Return whether an absolute path is outside of a folder; relative paths are inside."""
    return isinstance(path, (str, Path)) and Path(path).is_absolute() and folder not in Path(path).parents


@cache
def _add_audit_hook() -> None:
    """Add it once, before its first use: it cannot be removed, and slows down all later tests."""
    sys.addaudithook(_audit)


@contextmanager
def guarded(scratch: Path) -> Iterator[None]:
    """Forbid code execution, writing outside of ``scratch``, and hanging. ``scratch`` is the tempdir."""
    _add_audit_hook()

    def on_alarm(number: int, frame: object) -> None:
        raise InvariantError(f"took more than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, on_alarm)
    temporary, tempfile.tempdir = tempfile.tempdir, str(scratch)
    signal.alarm(SECONDS)
    _other_threads.update({thread.ident or 0 for thread in threading.enumerate()} - {threading.get_ident()})
    collects = gc.isenabled()
    gc.disable()  # otherwise, finalizers of objects of earlier tests would run here and be checked
    _guarded.append(scratch)
    try:
        yield
    finally:
        _guarded.clear()
        _other_threads.clear()
        if collects:
            gc.enable()
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        tempfile.tempdir = temporary


Outcome = tuple[list[dict[str, object]], list[Rejection], str | None]
"""Rows, rejections, and the code of the error that ended the file, None if it was read completely."""


def read(reader: Callable[[], SourceReader]) -> Outcome:
    """Read a file completely, and check that each record is either a row or a rejection, in order."""
    batches: list[RawBatch] = []
    code = None
    try:
        with reader() as opened:
            batches.extend(opened.batches())
            code = opened.damage and opened.damage.code
    except FormatError as error:
        code = error.code
    first = 0
    for batch in batches:
        batch.positions.validate(full=True)
        records = [*batch.positions["record"].to_pylist(), *(item.record for item in batch.rejected)]
        last = first + batch.records
        assert sorted(records) == list(range(first, last)), "a record is missing or duplicated"
        assert all(item.reason and item.detail for item in batch.rejected)
        first = last
    rows = [row for batch in batches for row in batch.positions.to_pylist()]
    return rows, [item for batch in batches for item in batch.rejected], code


def check_reading(path: Path) -> str:
    """Check the invariants of reading one file. Return "whole", or the reason code of its error."""
    with guarded(path.parent):
        rows, rejected, code = found = read(lambda: open_source(path))
        salvaged = read(lambda: open_source(path, salvage=True))
        plain = read(lambda: LegacyReader(path, fast=False))
    if code not in SALVAGEABLE:
        assert salvaged == found, "salvage changes the result of an undamaged file"
    assert salvaged[0][: len(rows)] == rows
    assert salvaged[1][: len(rejected)] == rejected
    if is_legacy(path) and code != "irregular-examples":
        assert plain == found, "the fast path differs from the plain one"
    return code or "whole"


def is_legacy(path: Path) -> bool:
    """Return whether the content is detected as a pickle."""
    try:
        with open_source(path) as reader:
            return isinstance(reader, LegacyReader)
    except FormatError:
        return False


def check_converting(path: Path) -> None:
    """Check the invariants of a conversion: every record is in the store or rejected."""
    store = path.parent / "store"
    options = ConvertOptions(workers=1, max_reject_rate=1.0, value_convention="blue-is-0", salvage=True)
    try:
        with guarded(path.parent):
            result = convert_sources([path], store, options)
    except HexdataError:
        assert not [*store.glob("*/part-*")], "tables were published before the error"
        return
    assert result.records == result.positions + result.rejected
    assert result.rejected or not result.failed_files
    kept = [pq.read_metadata(part).num_rows for part in (store / "positions").glob("*")]
    reasons = [pq.read_metadata(part).num_rows for part in (store / "rejected").glob("*")]
    assert (sum(kept), sum(reasons)) == (result.positions, result.rejected)


def import_lazy_modules(folder: Path) -> None:
    """Convert the seeds once, to import all lazy modules: imports are refused later."""
    for name, content in SEEDS.items():
        path = folder / name / "file"
        path.parent.mkdir()
        path.write_bytes(content)
        convert_sources(
            [path], path.parent / "store", ConvertOptions(workers=1, value_convention="blue-is-0")
        )


# Tests


@pytest.fixture(scope="module", autouse=True)
def lazy_modules(tmp_path_factory: pytest.TempPathFactory) -> None:
    import_lazy_modules(tmp_path_factory.mktemp("lazy_modules"))


@pytest.mark.parametrize("name", SEEDS)
def test_the_seeds_are_valid(tmp_path, name):
    path = tmp_path / "file"
    path.write_bytes(SEEDS[name])
    assert check_reading(path) == "whole"
    check_converting(path)


def test_reading_committed_inputs(tmp_path):
    path = tmp_path / "file"
    inputs = fuzz_parsers.committed("source")
    found = set()
    for content in inputs:
        path.write_bytes(content)
        found.add(check_reading(path))
    assert len(inputs) > 20
    assert len(found) > 5


@settings(max_examples=500 if FULL else 75, deadline=None)
@given(mutated())
def test_reading_mutated_files(content):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        path.write_bytes(content)
        tracemalloc.start()
        try:
            check_reading(path)
            assert tracemalloc.get_traced_memory()[1] < MEMORY
        finally:
            tracemalloc.stop()


@settings(max_examples=30, deadline=None)
@given(mutated())
def test_converting_mutated_files(content):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        path.write_bytes(content)
        check_converting(path)


@pytest.mark.parametrize(
    "breach",
    [
        lambda folder: __import__("antigravity"),
        lambda folder: subprocess.run(["true"], check=False),
        lambda folder: (folder.parent / "trap").write_bytes(b""),
        lambda folder: os.system("true"),
        lambda folder: eval("1"),
    ],
)
def test_the_guard_detects_violations(tmp_path, breach):
    with pytest.raises(InvariantError), guarded(tmp_path):
        breach(tmp_path)
    assert not (tmp_path.parent / "trap").exists()
