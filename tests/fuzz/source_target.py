"""Fuzz target for source files of any format: the invariants of `tests/formats/test_legacy_fuzz.py`."""

from __future__ import annotations

import gzip
import random
import shutil
import zlib
from contextlib import ExitStack
from pathlib import Path
from typing import ClassVar

from fuzz_target import BOTH, NEITHER, Target, edited

from tests.formats.test_legacy_fuzz import (
    MALICIOUS,
    SEEDS,
    check_converting,
    check_reading,
    import_lazy_modules,
)

__all__ = ["SourceTarget"]

CONVERT_EVERY = 400
"""Every k-th file is also converted, which takes a hundred times as long as reading."""


class SourceTarget(Target):
    """A file of any format: no code runs, no file is written, and salvaging keeps the undamaged records.

    Audit hooks of Python report what the readers do. An input counts as accepted if it is read completely.
    """

    name = "source"
    max_len: ClassVar[int] = 6000
    words = (
        *MALICIOUS,
        b"examples",
        b"numpy.core.multiarray\n_reconstruct\n",
        b"(;GM[11]",
        b"PK\3\4",
        b"games",
    )

    def __init__(self, scratch: Path, stack: ExitStack) -> None:
        super().__init__(scratch, stack)
        lazy = scratch / "lazy"
        lazy.mkdir()
        import_lazy_modules(lazy)  # imports are refused later
        self.count = 0

    def seeds(self) -> list[bytes]:
        return [
            *SEEDS.values(),
            b"(;GM[11]SZ[3]RE[B];B[a1];W[b2])",
            b"https://hexworld.org/board/#3c1,a1b2:rb\n",
        ]

    def mutate(self, raw: bytes, rng: random.Random) -> bytes:
        """Change the bytes, or those that are compressed."""
        if raw.startswith(b"\x1f\x8b") and rng.random() < 0.7:
            try:
                return gzip.compress(edited(gzip.decompress(raw), rng, self.words), 1, mtime=0)
            except (EOFError, OSError, zlib.error):
                pass
        return edited(raw, rng, self.words)

    def check(self, raw: bytes) -> str:
        path = self.scratch / "file"
        path.write_bytes(raw)
        self.count += 1
        if self.count % CONVERT_EVERY == 0:
            check_converting(path)
            shutil.rmtree(self.scratch / "store", ignore_errors=True)
        return BOTH if check_reading(path) == "whole" else NEITHER
