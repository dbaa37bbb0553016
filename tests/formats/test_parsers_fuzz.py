"""A short run of each target of `tests/fuzz/fuzz_parsers.py`: its committed inputs, and changes of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz import fuzz_parsers
from tests.pairs import FULL


@pytest.mark.parametrize("name", fuzz_parsers.TARGETS)
def test_inputs_are_refused_or_read_as_others_read_them(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    counts = fuzz_parsers.sample(name, 60, 3, most=400 if FULL else 30)
    assert counts.total() > 30 + len(fuzz_parsers.committed(name))
    assert min(counts[True], counts[False]) > 0
