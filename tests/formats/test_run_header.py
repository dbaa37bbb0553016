"""Facts of runs in comment lines of TRMPH files and in names of files."""

from __future__ import annotations

from pathlib import Path

import pytest

from hexdata.formats import FilePart, open_source
from hexdata.formats.run_header import RunHeader, date_of_name

HEADER = """\
# Self-play games - 2025-09-08T12:11:06.123456
# Model: checkpoints/epoch2_mini201.pt.gz
# MCTS simulations: 500
# C_PUCT: 1.5
# Gumbel root selection: True
# Temperature: 0.5
# Random seed: 4294967295
# Git commit: 941efd55+
# Format: trmph_string winner
"""
"""Header as the legacy tool writes it."""

RUN = {
    "date": "2025-09-08",
    "model": "checkpoints/epoch2_mini201.pt.gz",
    "simulations": 500,
    "temperature": 0.5,
    "seed": 4294967295,
    "commit": "941efd55+",
}
KEYS = ("run", "run_changes", "run_unread")
GAME = "#3,a1b1a2b2a3 b\n"


def header_of(path: Path, part: FilePart | None = None) -> dict[str, object]:
    """Return the facts of the run of a file."""
    with open_source(path, part=part) as reader:
        for _ in reader.batches():
            pass
        return {key: reader.header[key] for key in KEYS if key in reader.header}


@pytest.fixture
def read(tmp_path):
    def read(text: str) -> dict[str, object]:
        path = tmp_path / "games.trmph"
        path.write_text(text)
        return header_of(path)

    return read


def test_the_header_of_the_legacy_tool_states_the_run(read):
    assert read(HEADER + GAME) == {"run": RUN}
    assert read(HEADER) == {"run": RUN}  # a run that has just begun
    assert read(GAME) == {}


@pytest.mark.parametrize(
    ("line", "run"),
    [
        ("# model: x", {"model": "x"}),
        ("# MODEL = a b.pt", {"model": "a b.pt"}),
        ("# Models: ['a.pt.gz', 'b.pt.gz', 'a.pt.gz']", {"model": "a.pt.gz, b.pt.gz"}),
        ("# simulations=400", {"simulations": 400}),
        ("# mcts_sims: 200", {"simulations": 200}),
        ("# temperature 1.0", {"temperature": 1.0}),
        ("# seed: -7", {"seed": -7}),
        ("# Date: 2025-09-30 12:00", {"date": "2025-09-30"}),
        ("# Git commit: unknown", {}),
        ("# model collapse", {}),
        ("# Temperature: 0.5 -> 0.01", {}),
        ("# Temperature: 1e999", {}),
        ("# Random seed: None", {}),
        ("# seed: 99999999999999999999", {}),
        ("# simulations: -1", {}),
        ("# Models: [1, 2]", {}),
        ("# Models: " + "[" * 400, {}),
        ("# Date: 2025-13-30", {}),
        ("# Model: " + "x" * 600, {}),
    ],
)
def test_spellings_of_facts(read, line, run):
    assert read(line + "\n" + GAME).get("run", {}) == run


def test_facts_that_change_within_a_file_are_listed(read):
    second = HEADER.replace("2025-09-08", "2025-09-09").replace("mini201", "mini300")
    second = second.replace("# Random seed: 4294967295\n", "")
    same = {name: RUN[name] for name in ("simulations", "temperature", "commit")}
    assert read(HEADER + GAME + second + GAME + GAME) == {
        "run": same,
        "run_changes": {
            "model": [RUN["model"], "checkpoints/epoch2_mini300.pt.gz"],
            "seed": [4294967295, None],  # a title line begins a new header, which states no seed
            "date": ["2025-09-08", "2025-09-09"],
        },
    }
    assert read(HEADER + GAME + HEADER + GAME) == {"run": RUN}  # a run that was resumed
    assert read(HEADER + GAME + second) == {"run": RUN}  # no games of the second run yet
    assert read(GAME + "# model: x\n" + GAME) == {"run_changes": {"model": [None, "x"]}}


def test_lines_without_a_number_are_listed(read):
    lines = "# Temperature: hot\n# MCTS simulations = many\n# date: soon\n# seed games\n# Model: unknown\n"
    lines += "# Random seed: None\n"
    assert read(lines + GAME) == {
        "run_unread": {
            "temperature": ["Temperature: hot"],
            "simulations": ["MCTS simulations = many"],
            "date": ["date: soon"],
        }
    }


def test_the_values_that_are_listed_are_bounded():
    header = RunHeader()
    for seed in range(1000):
        header.read_comment(b"# seed: %d" % seed)
        header.begin_game()
    changes = header.as_json()["run_changes"]
    assert changes == {"seed": [*range(8)]}


def test_lines_appended_to_a_file_belong_to_the_last_header_before_them(tmp_path):
    path = tmp_path / "games.trmph"
    old = HEADER + GAME
    new = "# Temperature: 0.25\n" + GAME
    path.write_text(old + GAME + new)
    size = len(old)
    assert header_of(path, FilePart(0, size)) == {"run": RUN}
    assert header_of(path, FilePart(size, size + len(GAME))) == {"run": RUN}
    changed = {name: RUN[name] for name in RUN if name != "temperature"}
    assert header_of(path, FilePart(size, path.stat().st_size)) == {
        "run": changed,
        "run_changes": {"temperature": [0.5, 0.25]},
    }
    assert header_of(path, FilePart(size + len(GAME), path.stat().st_size)) == {
        "run": RUN | {"temperature": 0.25}
    }


@pytest.mark.parametrize(
    ("name", "date"),
    [
        ("data/2025-09-30/games.trmph", "2025-09-30"),
        ("data/20250930/games.trmph", "2025-09-30"),
        ("tournament_20250930_1530/a.trmph", "2025-09-30"),
        ("deterministic_tournament_20250908_1234/a_vs_b.trmph", "2025-09-08"),
        ("tournament_play_250908_12/tournament.trmph", "2025-09-08"),
        ("streaming_selfplay_20250908_123456.trmph", "2025-09-08"),
        ("20250101/selfplay_20250908_123456.trmph", "2025-09-08"),
        ("20250908_to_20250908/a.trmph", "2025-09-08"),
        ("20250908_to_20250909/a.trmph", None),
        ("play_250908_12/tournament.trmph", None),
        ("20251345/a.trmph", None),
        ("a_120250930.trmph", None),
        ("neurohex_00.trmph", None),
    ],
)
def test_the_date_in_a_name(name, date):
    assert date_of_name(name) == date
