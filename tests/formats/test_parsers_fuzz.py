"""A short run of `tests/fuzz/fuzz_parsers.py`: the committed inputs of each target, and changes of them."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "fuzz"))

import fuzz_parsers
import fuzz_target

NAMES = [name for name in fuzz_parsers.TARGETS if name != "source"]
"""`test_legacy_fuzz.py` repeats the inputs of whole files."""


@pytest.mark.parametrize("name", NAMES)
def test_inputs_are_refused_or_read_as_others_read_them(name: str) -> None:
    counts = fuzz_parsers.sample([name], 5, 3, most=40)[name]
    assert counts.results.total() > 40 + len(fuzz_parsers.committed(name))
    assert counts.results[fuzz_target.BOTH] > 0
    assert counts.results[fuzz_target.NEITHER] + counts.results[fuzz_target.STRICTER] > 0


def test_committed_inputs_are_small_and_belong_to_a_target() -> None:
    files = list(fuzz_parsers.CORPUS.iterdir())
    assert {path.stem for path in files} == set(fuzz_parsers.TARGETS)
    assert sum(path.stat().st_size for path in files) < 500_000


def test_a_difference_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import text_targets

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(text_targets, "check_no_repeats", lambda moves, size: None)
    with pytest.raises(fuzz_target.DifferentError):
        fuzz_parsers.sample(["trmph"], 5, 3, most=3000)
    (failing,) = tmp_path.glob("failing-trmph-*")
    monkeypatch.undo()
    fuzz_parsers.main(["trmph", str(failing)])


def test_changes_of_json_do_not_depend_on_earlier_ones() -> None:
    import json_targets

    before = repr(json_targets.VALUES)
    rng = random.Random(1)
    for _ in range(1000):
        json.dumps(json_targets.altered({"a": {"b": 1}}, rng))
    assert repr(json_targets.VALUES) == before
