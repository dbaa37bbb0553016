"""Small files that people reported: what is read from each, and why the rest is rejected."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, Final

import pyarrow.parquet as pq
import pytest

from hexdata.convert import ConvertOptions, convert_sources
from hexdata.verify import check_round_trip

FOLDER: Final = Path(__file__).resolve().parents[3] / "shared" / "data" / "reports"
MOVER: Final = {"alphazero_convention": "mover/top-bottom/mover"}
MAIN: Final = {"variations": "main"}
THIRTEEN: Final = {"board_size": 13}

REPORTS: Final[dict[str, tuple[dict[str, Any], int, int, dict[str, int]]]] = {
    "columns/a.trmph": (THIRTEEN, 15, 2195, {}),
    "columns/b.pkl.gz": (THIRTEEN, 15, 2240, {}),
    "foreign/azg.pkl": (MOVER, 0, 40, {}),
    "foreign/checkpoint_0.pth.tar.examples": (MOVER, 0, 40, {}),
    "foreign/list_tuples.pkl": (MOVER, 0, 5, {}),
    "foreign/playhex.json": ({}, 1, 4, {}),
    "foreign/raw.txt": ({}, 0, 0, {"no-winner": 1}),
    "foreign/selfplay.npz": (MOVER, 0, 4, {}),
    "foreign/zero.npz": ({}, 0, 0, {}),
    "foreign/zero.pkl.gz": ({}, 0, 0, {}),
    "foreign/zero.sgf": ({}, 0, 0, {}),
    "hexworld/links.hexworld": ({}, 12, 79, {"move-order": 2}),
    "pickles/sf26_processed.pkl.gz": (THIRTEEN, 30, 3594, {}),
    "sgf/big5.sgf": ({}, 1, 5, {}),
    "sgf/cp936ascii.sgf": ({}, 1, 5, {}),
    "sgf/empty_ca.sgf": ({}, 1, 5, {}),
    "sgf/gb18030.sgf": ({}, 1, 5, {}),
    "sgf/gbk.sgf": ({}, 1, 5, {}),
    "sgf/handicap.sgf": ({}, 1, 4, {}),
    "sgf/lg_evnull.sgf": (THIRTEEN, 1, 4, {}),
    "sgf/lg_unescaped.hsgf": ({}, 1, 5, {}),
    "sgf/mixed.sgf": (THIRTEEN, 2, 10, {"board-size": 1}),
    "sgf/nogm.sgf": ({}, 1, 5, {}),
    "sgf/oneline.hsgf": ({}, 3, 12, {}),
    "sgf/re_words.sgf": ({}, 4, 20, {}),
    "sgf/utf8mb4.sgf": ({}, 1, 5, {}),
    "sgf/variations.sgf": (MAIN, 1, 5, {}),
    "trmph/a.trmph": ({}, 13, 65, {"trmph-syntax": 3}),
}
"""Options, games, positions and reasons of the rejected records of each file."""


@pytest.mark.skipif(not FOLDER.exists(), reason="no reported files beside the repository")
def test_all_reported_files_are_listed() -> None:
    assert {path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.*")} == set(REPORTS)


@pytest.mark.skipif(not FOLDER.exists(), reason="no reported files beside the repository")
@pytest.mark.parametrize("options", [{}, MOVER, MAIN, THIRTEEN], ids=str)
def test_the_reported_files_are_read_and_returned(tmp_path: Path, options: dict[str, Any]) -> None:
    expected = {name: found for name, (own, *found) in REPORTS.items() if own == options}
    settings, store = ConvertOptions(workers=1, max_reject_rate=1, **options), tmp_path / "store"
    result = convert_sources([FOLDER / name for name in expected], store, settings)
    rejected = [row for part in store.glob("rejected/*") for row in pq.read_table(part).to_pylist()]
    for row in pq.read_table(store / "sources").to_pylist():
        reasons = Counter(r["reason"] for r in rejected if r["source_id"] == row["source_id"])
        assert [row["games"], row["positions"], reasons] == expected.pop(row["name"]), row["name"]
    # Two files have the same examples, and three are empty.
    assert expected.keys() == {name for name, cause in result.skipped_files.items() if "known-bytes" in cause}
    assert all(each.ok for each in check_round_trip(store, FOLDER))
