"""Reasons why a live loader delivers no batch."""

import random

import pytest

from hexdata.errors import HexdataError
from hexdata.live import LiveLoader, LiveOptions


def write_games(path, number):
    """Write games of 9 moves on a 5 x 5 board, in which blue fills column a."""
    generator = random.Random(number)
    lines = []
    for _ in range(number):
        blue = [f"a{row}" for row in range(1, 6)]
        red = [f"{column}{row}" for column in "cde" for row in range(1, 6)]
        generator.shuffle(blue)
        generator.shuffle(red)
        moves = [move for pair in zip(blue, red, strict=False) for move in pair][:-1]
        lines.append(f"#5,{''.join(moves)} b\n")
    path.write_text("".join(lines))


def reason(directory, expected, *, config=None, **options):
    """Return the error of the first wait that contains a text, or of the last of 20 waits."""
    options = {"timeout": 0.3, "reservoir": 20, "batch_size": 16, **options}
    with LiveLoader(directory, config=config or LiveOptions(val=0, test=0), **options) as loader:
        for _ in range(20):
            with pytest.raises(HexdataError, match="no batch for") as caught:
                for _ in loader:
                    pass
            text = str(caught.value)
            if expected in text:
                break
    return text


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"reuse": 2}, "found every game has been drawn 2 times (reuse = 2); waiting for new games"),
        ({"reuse": 1}, "found every game has been drawn once (reuse = 1); waiting for new games"),
        (
            {"reuse": 2, "reservoir": 1000},
            "drawn 2 times (reuse = 2), and the reservoir contains 160 of 1,000 positions",
        ),
        (
            {"split": "test"},
            "no game of the split 'test' among those read; the files contain 10 games of other",
        ),
        (
            {"config": LiveOptions(val=0, test=0).with_stage("ShufflingChunkPool", min_chunks=500)},
            "the pool contains 10 games, and games are drawn when it contains min_chunks = 500",
        ),
        (
            {"config": LiveOptions(val=0, test=0).with_stage("ChunkValidator", max_positions=3)},
            "ChunkValidator leaves out every game that is drawn, because of long",
        ),
    ],
)
def test_the_reason_of_a_wait_names_options_and_games(tmp_path, options, expected):
    write_games(tmp_path / "games.trmph", 10)
    assert expected in reason(tmp_path, expected, **options)


def test_a_directory_without_a_usable_file_is_the_reason(tmp_path):
    with (
        LiveLoader(tmp_path, timeout=0.3) as loader,
        pytest.raises(HexdataError, match="no complete game file"),
    ):
        next(iter(loader))
    (tmp_path / "games.trmph").write_text("hello\n")
    expected = "no file could be used; 1 file counted as bad, such as games.trmph"
    assert expected in reason(tmp_path, expected)
