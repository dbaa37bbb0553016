"""Fuzz target for source files of any format.

The invariants: a reader raises only FormatError, within bounded time and memory; no code runs; every record
is a position or a rejection; salvage keeps the records before the damage.
"""

from __future__ import annotations

import encodings
import gc
import gzip
import os
import pickletools
import pkgutil
import random
import signal
import sys
import tempfile
import threading
import tracemalloc
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

import hexdata.formats
from hexdata.convert import ConvertOptions, convert_sources
from hexdata.errors import HexdataError
from hexdata.formats import SALVAGEABLE, open_source
from tests.fuzz.target import Target, edited, read_all, require
from tests.kit.formats import SOURCES

__all__ = ["InvariantError", "SourceTarget", "guarded"]

SECONDS = 120
"""Time limit per file; a file normally takes milliseconds."""
MEMORY = 24 << 20
"""Maximum memory of Python objects for a file of a few kB, in bytes."""
CONVERT_EVERY = 400
"""Every k-th file is also converted, which takes a hundred times as long as reading."""
MEASURE_EVERY = 8
"""The memory of every k-th file is measured, which makes reading three times as slow."""
RUNS_CODE = ("import", "exec", "marshal.", "pickle.", "ctypes.", "subprocess.", "socket.")
RUNS_CODE += ("os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn")
CHANGES_FILES = frozenset({"os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink"})


class InvariantError(BaseException):
    """A violated invariant. Not an Exception, so that no handler in hexdata catches it."""


_guarded: list[Path] = []
"""The folder in which a reader may write files; empty between files."""
_other_threads: set[int] = set()
"""Threads that earlier tests left running, which are not checked."""


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    """Raise for forbidden events while a file is read."""
    if not _guarded or threading.get_ident() in _other_threads:
        return
    writes = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    is_new = not (event == "os.mkdir" and Path(arguments[0]).is_dir())  # else it creates nothing
    if event.startswith(RUNS_CODE) or (
        (writes or event in CHANGES_FILES) and is_new and _is_outside(arguments[0], _guarded[0])
    ):
        raise InvariantError(f"{event} {arguments}")


def _is_outside(path: object, folder: Path) -> bool:
    """Return whether an absolute path is outside of a folder; relative paths are inside."""
    return isinstance(path, (str, Path)) and Path(path).is_absolute() and folder not in Path(path).parents


@cache
def _prepare() -> None:
    """Import what readers import when they need it, and add the hook, which cannot be removed."""
    for module in pkgutil.iter_modules(hexdata.formats.__path__):
        import_module(f"hexdata.formats.{module.name}")
    for module in pkgutil.iter_modules(encodings.__path__):
        with suppress(ImportError):  # of other systems
            import_module(f"encodings.{module.name}")
    with tempfile.TemporaryDirectory() as folder:
        for name in ("dicts", "trmph"):
            path = Path(folder, name)
            path.write_bytes(SOURCES[name].write([None] * 4, SOURCES[name].gaps[0]))
            convert_sources(path, Path(folder, f"{name}-store"), ConvertOptions(workers=1))
    sys.addaudithook(_audit)


@contextmanager
def guarded(scratch: Path) -> Iterator[None]:
    """Forbid code execution, writing outside of ``scratch``, and hanging. ``scratch`` is the tempdir."""
    _prepare()

    def on_alarm(number: int, frame: object) -> None:
        raise InvariantError(f"took more than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, on_alarm)
    temporary, tempfile.tempdir = tempfile.tempdir, str(scratch)
    signal.alarm(SECONDS)
    _other_threads.update({thread.ident or 0 for thread in threading.enumerate()} - {threading.get_ident()})
    gc.disable()  # otherwise, finalizers of objects of earlier tests would run here and be checked
    _guarded.append(scratch)
    try:
        yield
    finally:
        _guarded.clear()
        _other_threads.clear()
        gc.enable()
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        tempfile.tempdir = temporary


def check_reading(path: Path) -> bool:
    """Check the invariants of reading one file. Return whether it is read completely."""
    with guarded(path.parent):
        rows, rejected, code = found = read_all(lambda: open_source(path))
        salvaged = read_all(lambda: open_source(path, salvage=True))
    require(code in SALVAGEABLE or salvaged == found, "salvage changes the result of an undamaged file")
    kept = salvaged[0][: len(rows)], salvaged[1][: len(rejected)]
    require(kept == (rows, rejected), "salvage loses records before the damage")
    return not code


def check_converting(path: Path) -> None:
    """Check the invariants of a conversion: every record is in the store or rejected."""
    with tempfile.TemporaryDirectory(dir=path.parent) as store:
        options = ConvertOptions(
            workers=1, max_reject_rate=1.0, value_convention="blue-is-0", salvage=True, val=0, test=0
        )
        try:
            with guarded(path.parent):
                result = convert_sources([path], store, options)
        except HexdataError:
            require(not [*Path(store).glob("*/part-*")], "tables were published before the error")
            return
        require(result.records == result.positions + result.rejected, "records are lost")
        require(result.rejected or not result.failed_files, "a failed file without a rejection")
        for table, count in (("positions", result.positions), ("rejected", result.rejected)):
            parts = [pq.read_metadata(part).num_rows for part in Path(store, table).glob("*")]
            require(sum(parts) == count, f"{table} has other rows")


class SourceTarget(Target):
    """A file of any format: no code runs, no file is written, and salvaging keeps the undamaged records."""

    max_len = 6000
    words = (
        *(b"cos\nsystem\n(X\x04\x00\x00\x00truetR", b"\x8c\x08builtins\x8c\x04eval\x93\x8c\x011\x85R"),
        *(b"cnumpy\ndtype\n(X\x02\x00\x00\x00O8I00\nI01\ntR", b"\x82\x01", b"\x8e" + b"\xff" * 8, b"\x94"),
        *(b"B\xff\xff\xff\x7f", b"\x95" + b"\xff" * 8, b"(" * 50, b"h\x05", b"((Nt\x85Nu", b"\xff\xfe"),
        *(b"\n#13,a1b1 b\n", b"\n#3,a1a1 b\n", b"examples", b"games", b"(;GM[11]", b"PK\3\4"),
        b"numpy.core.multiarray\n_reconstruct\n",
    )

    def __init__(self, scratch: Path) -> None:
        super().__init__(scratch)
        self.count = 0

    def seeds(self) -> list[bytes]:
        """Return a file of each format, plain, and the pickles in other protocols."""
        found = []
        for kind in SOURCES.values():
            raw = kind.write([None] * 6, kind.gaps[0])
            raw = gzip.decompress(raw) if raw.startswith(b"\x1f\x8b") else raw
            found.append(raw)
            if raw.startswith(b"\x80"):
                found.append(pickletools.optimize(raw))
        return [raw for raw in found if len(raw) < 4 * self.max_len]

    def mutate(self, raw: bytes, rng: random.Random) -> bytes:
        """Change the bytes, and compress some."""
        if raw.startswith(b"\x1f\x8b"):
            try:
                raw = gzip.decompress(raw)
            except (EOFError, OSError, zlib.error):
                return edited(raw, rng, self.words)
        found = edited(raw, rng, self.words)
        if rng.random() < 0.1:
            found = found[: rng.randrange(len(found) + 1)]
        return gzip.compress(found, 1, mtime=0) if rng.random() < 0.3 else found

    def check(self, raw: bytes) -> bool:
        self.path.write_bytes(raw)
        self.count += 1
        if self.count % CONVERT_EVERY == 1:
            check_converting(self.path)
        if self.count % MEASURE_EVERY:
            return check_reading(self.path)
        tracemalloc.start()
        try:
            is_whole = check_reading(self.path)
            require(tracemalloc.get_traced_memory()[1] < MEMORY, "too much memory")
        finally:
            tracemalloc.stop()
        return is_whole
