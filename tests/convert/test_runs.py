"""Facts of runs in the table sources: from header lines of TRMPH files and from names."""

from __future__ import annotations

import json
from datetime import date

import pytest

from hexdata.board import format_moves
from hexdata.sql import run_query

HEADER = """\
# Self-play games - 2025-09-08T12:11:06.123456
# Model: {model}
# MCTS simulations: 500
# Temperature: 0.5
# Random seed: 4294967295
# Git commit: 941efd55+
"""
COLUMNS = ("model", "simulations", "temperature", "seed", "commit", "date")


@pytest.fixture
def lines(make):
    def lines(count, start=0):
        games = make.games(count, start=start)
        return "".join(f"#5,{format_moves(moves, 5)} {'br'[winner]}\n" for moves, winner in games)

    return lines


def runs_of(store):
    return {row["name"]: tuple(row[name] for name in COLUMNS) for row in store.rows("sources")}


def write(make, name, text):
    make.write_bytes(name, text.encode())


def test_header_lines_and_names_fill_the_columns_of_sources(make, convert, lines):
    write(make, "a.trmph", HEADER.format(model="m/a.pt.gz") + lines(2))
    write(make, "tournament_20250930_1530/b.trmph", "# Model: b\n" + lines(2, start=2))
    write(make, "c.trmph", lines(2, start=4))
    make.v2("d_20250102_processed.pkl.gz", make.games(1, start=6))
    store = convert(make.folder)
    assert runs_of(store) == {
        "legacy/a.trmph": ("m/a.pt.gz", 500, 0.5, 4294967295, "941efd55+", date(2025, 9, 8)),
        "legacy/tournament_20250930_1530/b.trmph": ("b", None, None, None, None, date(2025, 9, 30)),
        "legacy/c.trmph": (None,) * 6,
        "legacy/d_20250102_processed.pkl.gz": (None, None, None, None, None, date(2025, 1, 2)),
    }
    query = "SELECT model, count(*) FROM games JOIN sources USING (source_id) GROUP BY 1 ORDER BY 1"
    with run_query(store.path, query) as result:
        rows = [row for batch in result.batches for row in batch.to_pylist()]
    assert [tuple(row.values()) for row in rows] == [("b", 2), ("m/a.pt.gz", 2), (None, 3)]


def test_several_runs_in_a_file_leave_the_facts_that_differ_null(make, convert, lines):
    first, second = HEADER.format(model="a"), HEADER.format(model="b").replace("09-08", "09-09")
    write(make, "run_20250908.trmph", first + lines(1) + second + lines(1, start=1))
    store = convert(make.folder)
    (run,) = runs_of(store).values()
    assert run == (None, 500, 0.5, 4294967295, "941efd55+", None)
    (row,) = store.rows("sources")
    assert json.loads(row["notes"]) == [
        "several values of model, so the column is null: a, b",
        "several values of date, so the column is null: 2025-09-08, 2025-09-09",
    ]


def test_lines_that_are_appended_later_belong_to_their_own_run(make, convert, lines):
    path = make.folder / "a.trmph"
    write(make, "a.trmph", HEADER.format(model="a") + lines(2))
    convert(make.folder)
    for text in (lines(1, start=2), "# Model: b\n" + lines(1, start=3), lines(1, start=4)):
        with path.open("a") as file:
            file.write(text)
        store = convert(make.folder)
    rows = store.rows("sources")
    assert [(row["model"], row["seed"], row["games"]) for row in rows] == [
        ("a", 4294967295, 2),
        ("a", 4294967295, 1),
        ("b", 4294967295, 1),
        ("b", 4294967295, 1),
    ]


def test_a_note_quotes_the_lines_that_state_no_number(make, lines, convert):
    write(make, "a.trmph", "# Temperature: hot\n# Temperature: cold\n" + lines(2))
    store = convert(make.folder)
    (row,) = store.rows("sources")
    assert row["temperature"] is None
    quoted = "lines that state no temperature, so they are not used: 'Temperature: hot', 'Temperature: cold'"
    assert quoted in json.loads(row["notes"])
