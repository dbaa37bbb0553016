"""A text in a source never ends a conversion: its record is converted or rejected, and comments cost none."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from hexdata.convert import ConvertOptions, convert_sources
from hexdata.verify import verify_store
from tests.kit.command_line import hexdata_run
from tests.kit.formats import HOSTILE_TEXTS, pickle_of, some_example, some_game

NOT_TEXTS: dict[str, Any] = {
    "number": 5,
    "large number": 10**40,
    "NaN": float("nan"),
    "bytes": b"\xff",
    "None": None,
    "list": [1, ["\ud800"]],
    "dict": {"\ud800": "\udfff"},
    "tuple": ("\ud800", []),
}
COMMENTS = (
    "Models: ['\\ud800abc']",
    "Models: ['\\x00', '\\ud800']",
    "Models: [{[]}]",
    "Models: [{[]: 1}]",
    "Models: [[]]",
    "Models: [b'a']",
    "Models: [-'a']",
    "Models: [*a]",
    "Models: [f'{1}']",
    "Models: ['\\d']",
    "Models: " + "[" * 400,
    "Models: " + "[(" * 200,
    "Models: [" + "-" * 400 + "1]",
    "Models: [" + "9" * 400 + "]",
    "seed: " + "9" * 400,
    "seed: \u0665",
    "temperature: 1e999",
    "date: 0000-00-00",
    "Self-play games - \u0662\u0660\u0662\u0665-99-01T10:10:10",
    "Model: \x00\x1b[31m",
    "Model: \ud800",
)

Files = dict[str, tuple[bytes, int]]
"""Content and number of positions or games of each file."""


def positions(*metadata: dict[Any, Any], **top: Any) -> tuple[bytes, int]:
    """Return a file of one sound example, and one with each metadata."""
    examples = [some_example(0)]
    examples += [some_example(1) | {"metadata": copy.deepcopy(each)} for each in metadata]
    return pickle_of({"examples": examples, **top}), len(examples)


def fields(**more: Any) -> tuple[bytes, int]:
    """Return a file of two examples, the first one with more keys."""
    return pickle_of({"examples": [some_example(0) | more, some_example(1)]}), 2


def pickles() -> Iterator[tuple[str, tuple[bytes, int]]]:
    """Yield files with each text, and with values that are no texts, in each place that takes a text."""
    for name, value in (HOSTILE_TEXTS | NOT_TEXTS).items():
        run = {"model_path": value, "temperature": 1, "generation_time": value}
        yield f"run of {name}", (pickle_of({"games": [some_game()], "metadata": run}), 1)
        yield f"game of {name}", (pickle_of({"games": [some_game() | {"note": value}, some_game()]}), 2)
        for key in ("winner", "final_trmph", "moves"):
            yield f"{key} of {name}", (pickle_of({"games": [some_game() | {key: value}, some_game()]}), 2)
        yield f"field of {name}", fields(visits=value)
        keys = ("source_file", "original_source", "trmph_game", "winner", "note", "visits", "game_id")
        yield f"metadata of {name}", positions(*({key: value} for key in keys))
        yield f"top level of {name}", positions(source_file=value, processed_at=value)


def keys() -> Iterator[tuple[str, tuple[bytes, int]]]:
    """Yield files with each text as a key of each dict."""
    for name, text in HOSTILE_TEXTS.items():
        yield f"key of metadata {name}", positions({text: 1}, {text: "text"}, {"more": {text: 1}})
        yield f"key of examples {name}", fields(**{text: 0.5})
        yield f"key of the top level {name}", positions({}, **{text: 1})
        yield f"key of a game {name}", (pickle_of({"games": [some_game() | {text: 1}]}), 1)


def texts() -> Iterator[tuple[str, tuple[bytes, int]]]:
    """Yield TRMPH with each comment alone, before its games and between them; and SGF with each property."""
    for number, comment in enumerate(COMMENTS):
        lines = [f"# {comment}", "#5,a1b2 r", f"# {comment}", f"#5,a1b{number % 4 + 1} b # {comment}"]
        yield f"{number}.trmph", ("\n".join(lines).encode("utf-8", "replace"), 2)
        lines += ["# Model: b", "#5,a1b2 r"]
        yield f"{number} changes.trmph", ("\n".join(lines).encode("utf-8", "replace"), 3)
    for name, text in HOSTILE_TEXTS.items():
        for key in ("PB", "DT", "EV", "CA", "RE", "SZ"):
            games = f"(;GM[11]SZ[5]RE[B+R];B[a1])(;{key}[{text.replace(']', '')}]GM[11]SZ[5]RE[B+R];B[a1])"
            yield f"{key} {name}.sgf", (games.encode("utf-8", "surrogatepass"), 2)


@pytest.mark.parametrize("make", [pickles, keys, texts])
def test_no_text_ends_a_conversion_or_loses_a_record(tmp_path: Path, make: Any) -> None:
    files: Files = dict(make())
    (tmp_path / "in").mkdir()
    for name, (content, _) in files.items():
        (tmp_path / "in" / (name if "." in name else f"{name}.pkl.gz")).write_bytes(content)
    options = ConvertOptions(workers=1, max_reject_rate=1.0, val=0, test=0)
    result = convert_sources([tmp_path / "in"], tmp_path / "store", options)
    (part,) = (tmp_path / "store" / "sources").glob("*.parquet")
    lost = {}
    for row in pq.read_table(part).to_pylist():
        name = row["name"].removeprefix("in/").removesuffix(".pkl.gz")
        unit = "positions" if row["format"].startswith("legacy") else "games"
        if row[unit] + row["rejected"] != files[name][1]:
            lost[name] = row[unit], row["rejected"], files[name][1], result.failed_files.get(row["name"])
    assert not lost
    verify_store(tmp_path / "store").require()
    for arguments in (["info"], ["sql", "SELECT name, model, notes FROM sources"], ["report"]):
        done = hexdata_run(arguments[0], tmp_path / "store", *arguments[1:])
        assert done.status == 0, done.err


def test_a_comment_is_no_part_of_its_game(tmp_path: Path) -> None:
    """The facts of a run that cannot be read are null, and the others are kept."""
    for number, comment in enumerate(COMMENTS):
        path = tmp_path / f"{number}.trmph"
        path.write_text(
            f"# Model: a\n# {comment}\n# seed: 7\n#5,a1b2 r\n", encoding="utf-8", errors="replace"
        )
    convert_sources([tmp_path], tmp_path / "store", ConvertOptions(workers=1, val=0, test=0))
    (part,) = (tmp_path / "store" / "sources").glob("*.parquet")
    rows = pq.read_table(part).to_pylist()
    assert len(rows) + 2 >= len(COMMENTS)  # some have the same bytes
    assert {(row["games"], row["rejected"], row["seed"]) for row in rows} == {(1, 0, 7)}
