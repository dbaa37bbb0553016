"""A short run of `tests/fuzz/fuzz_parsers.py`, which compares the parsers with other readers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "fuzz"))

import fuzz_parsers


def test_mutated_inputs_are_refused_or_read_as_others_read_them() -> None:
    counts = fuzz_parsers.run_plain(100, 3, list(fuzz_parsers.TARGETS))
    assert counts.inputs.total() == 100 * len(fuzz_parsers.TARGETS)
    assert all(counts.accepted[name] > 0 for name in ("pickle", "trmph", "manifest", "sql"))


def test_a_difference_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fuzz_parsers, "parse_moves", lambda moves, size: fuzz_parsers.np.arange(2))
    with pytest.raises(fuzz_parsers.DifferentError):
        fuzz_parsers.run_plain(300, 3, ["trmph"])
    assert list(tmp_path.glob("failing-trmph-*"))
