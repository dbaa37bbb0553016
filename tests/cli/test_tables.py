"""Tables on terminals of several widths and in pipes."""

from __future__ import annotations

import pytest

from hexdata.cli.render import Output
from hexdata.cli.tables import lay_out

STAGES = ["stage", "positions", "games", "on disk", "seconds", "positions/s", "location"]
RUN = [
    ["convert", "97,000,000", "1,400,000", "1.13 GB", "812.07", "119,448", "hexdata-demo/store/positions"],
    ["verify", "97,000,000", "", "", "61.20", "1,584,967", ""],
]
QUALITY = ["shuffle of the train split", "status", "before", "after", "expected", "s.d.", "deviation", "note"]
FIGURES = [
    ["neighbours of the same game, one row apart", "ok", "98.54%", "1.856%", "1.74%", "0.2%", "+0.6 s.d.",
     "rows of known games only"],
    ["correlation of the values of neighbours", "-", "0.93", "0.0012", "0", "0.0157", "-0.1 s.d.", ""],
]  # fmt: skip
COUNTS = ["sources", "records", "positions", "rejected", "games", "duplicates", "skipped"]
CASES = {
    "run": (STAGES, RUN, ["location", "positions/s"]),
    "quality": (QUALITY, FIGURES, ["note", "s.d.", "expected"]),
    "convert": (COUNTS, [["12", "97,000,123", "97,000,000", "123", "1,400,000", "17", "3"]], []),
}


@pytest.mark.parametrize("width", [50, 60, 80, 120])
@pytest.mark.parametrize("case", CASES)
def test_tables_fit_without_cut_headers_or_broken_words(case, width):
    names, rows, optional = CASES[case]
    table = lay_out(names, rows, width, optional=optional)
    lines = table.header + table.body
    assert max(map(len, lines)) <= width
    assert not any(line.endswith(" ") for line in lines)
    shown = set(" ".join(lines).split())
    required = [index for index, name in enumerate(names) if name not in optional]
    for index in required:
        assert set(names[index].split()) <= shown
        assert {word for row in rows for word in row[index].split()} <= shown
    for index, name in enumerate(names):
        if name in optional and not set(name.split()) <= shown:
            left_out = {word for row in rows for word in row[index].split()}
            kept = {word for row in rows for i in required for word in row[i].split()}
            assert not (left_out - kept) & shown, "a column is left out with its texts"


def test_a_wide_table_is_printed_in_columns_and_a_narrow_one_vertically():
    names, rows = ["file", "games"], [["a.trmph", "12"], ["b.trmph", "1,234"]]
    assert lay_out(names, rows, 40).header == ["file     games"]
    assert lay_out(names, rows, 40).body == ["a.trmph     12", "b.trmph  1,234"]
    vertical = lay_out(names, rows, 12)
    assert (vertical.header, vertical.rows) == ([], 2)
    assert vertical.body == ["file   a.trmph", "games  12", "", "file   b.trmph", "games  1,234"]
    assert lay_out(names, rows, 12, most_vertical=1).body == ["file   a.trmph", "games  12"]


def test_optional_columns_are_left_out_in_their_order():
    names, row = ["a", "bbbbbbbb", "cccccccc"], ["1", "22222222", "33333333"]
    assert lay_out(names, [row], 21, optional=["bbbbbbbb", "cccccccc"]).header == ["a  bbbbbbbb  cccccccc"]
    assert lay_out(names, [row], 20, optional=["bbbbbbbb", "cccccccc"]).header == ["a  cccccccc"]
    assert lay_out(names, [row], 5, optional=["bbbbbbbb", "cccccccc"]).header == ["a"]


def test_long_texts_are_cut_if_wanted_but_never_names_and_numbers():
    names, rows = ["name", "positions"], [["x" * 100, "1234567890123"]]
    (line,) = lay_out(names, rows, 40, shorten=True).body
    assert line == "x" * 24 + "…  1234567890123"
    wide = lay_out(["盤", "n"], [["将棋" * 30, "5"]], 20, shorten=True)
    assert wide.body == ["将棋将棋将棋将棋…  5"]
    assert lay_out(names, rows, 20, shorten=True).body == [
        "name       xxxxxxxxxxxxxxx…",
        "positions  1234567890123",
    ]


def test_a_pipe_gets_tab_separated_lines_without_padding(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    Output(False).table(STAGES, RUN, optional=["location"])
    first, *others = capsys.readouterr().out.splitlines()
    assert first.split("\t") == STAGES
    assert [line.split("\t") for line in others] == RUN
