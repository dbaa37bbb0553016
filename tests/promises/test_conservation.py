"""Every record of a source becomes a record of the store or a rejected one, whatever is damaged around it.

The number of records is that of the generator, never that of hexdata.
"""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from hexdata.convert import ConvertOptions, convert_sources
from hexdata.formats.registry import BUILT_IN_FORMATS
from hexdata.formats.trmph import TrmphReader
from hexdata.verify import check_round_trip
from tests.kit.formats import SOURCES, Damages, SourceKind, pickle_of, some_example, some_game
from tests.pairs import FULL

FILES = 300 if FULL else 60
"""Number of files of each kind, with 1 to 8 records each."""


def convert(folder: Path, files: dict[str, bytes], **options: object) -> dict[str, dict[str, object]]:
    """Convert files and return the rows of the table sources by the name of the file."""
    for name, content in files.items():
        (folder / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "in" / name).write_bytes(content)
    options = {"workers": 1, "max_reject_rate": 1.0, "val": 0, "test": 0, **options}
    convert_sources([folder / "in"], folder / "store", ConvertOptions(**options))  # type: ignore[arg-type]
    parts = sorted((folder / "store" / "sources").glob("*.parquet"))
    return {
        str(row["name"]).removeprefix("in/"): row for part in parts for row in pq.read_table(part).to_pylist()
    }


def some_damages(random: np.random.Generator, kind: SourceKind) -> list[int | None]:
    """Return damage of about a third of the records; neighbours are not both damaged.

    The end of a game in SGF and the beginning of the next one could otherwise both be missing.
    """
    damages: list[int | None] = [None] * kind.sound
    for _ in range(random.integers(8)):
        is_damaged = damages[-1] is None and random.random() < 0.5
        damages.append(int(random.integers(1 << 30)) if is_damaged else None)
    return damages


def check_count(row: dict[str, object], damages: Damages, kind: SourceKind, content: bytes) -> None:
    found = (row["games"] if kind.unit == "games" else row["positions"], row["rejected"])
    assert sum(map(int, found)) == len(damages), (row["name"], found, damages, content[:2000])  # type: ignore[call-overload]
    assert row["records"] == row["positions"] + row["rejected"]  # type: ignore[operator]


@pytest.mark.parametrize("name", SOURCES)
def test_every_record_is_in_the_store_or_rejected(tmp_path: Path, name: str) -> None:
    kind, random = SOURCES[name], np.random.default_rng(list(name.encode()))
    damages, files = {}, {}
    for number in range(FILES):
        file = f"{number:03}/{kind.name}"
        damages[file] = some_damages(random, kind)
        files[file] = kind.write(damages[file], kind.gaps[number % len(kind.gaps)])
    beside = {
        f"{file.partition('/')[0]}/{other}": content
        for file, own in damages.items()
        for other, content in kind.beside(len(own)).items()
    }
    rows = convert(tmp_path, files | beside)
    assert len(rows) >= len(set(files.values()))
    for file, row in rows.items():
        check_count(row, damages[file], kind, files[file])
    sound = [row for file, row in rows.items() if not any(one is not None for one in damages[file])]
    assert all(row["rejected"] == 0 for row in sound)
    assert sum(int(row["rejected"]) for row in rows.values()) > FILES // 2  # type: ignore[call-overload]


def test_every_format_has_a_kind() -> None:
    assert {kind.format for kind in SOURCES.values()} == {each.name for each in BUILT_IN_FORMATS}


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("salvage", [False, True])
def test_a_changed_byte_of_a_file_loses_no_record_silently(tmp_path: Path, name: str, salvage: bool) -> None:
    """Either all records are counted, or the file is named as damaged, as far as it has checksums."""
    kind, random = SOURCES[name], np.random.default_rng(1)
    content = kind.write([None] * 6, kind.gaps[-1])
    if not kind.name.endswith((".gz", ".npz")):
        content = gzip.compress(content, mtime=0)
    files = {}
    for number, at in enumerate(random.integers(len(content), size=FILES // 4).tolist()):
        changed = bytearray(content)
        changed[at] ^= 1 << int(random.integers(8))
        files[f"{number:03}/{kind.name.removesuffix('.gz')}.gz"] = bytes(changed)
    files[f"whole/{kind.name}"] = content
    for file, row in convert(tmp_path, files, salvage=salvage).items():
        records = int(row["games"] if kind.unit == "games" else row["positions"])  # type: ignore[call-overload]
        named = row["format"] == "unknown" or row["salvaged"]
        assert named or records + int(row["rejected"]) == 6, (file, row)  # type: ignore[call-overload]
    if (tmp_path / "store").exists():
        checked = check_round_trip(tmp_path / "store", tmp_path / "in")
        assert not [each for each in checked if each.checked and not each.ok]


@pytest.mark.parametrize("line", [b"#13,a1b2c3 b", b"#13,a1b2", b"http://www.trmph.com/board#13,a1b2c3 1"])
def test_a_flipped_bit_never_makes_a_game_a_comment(tmp_path: Path, line: bytes) -> None:
    """The same for a byte that becomes a space, as one of the first is enough to begin a comment."""
    damaged = [
        line[:at] + bytes([other]) + line[at + 1 :]
        for at in range(line.index(b",") + 1)
        for other in [*(line[at] ^ (1 << bit) for bit in range(8)), ord(" ")]
    ]
    path = tmp_path / "a.trmph"
    path.write_bytes(b"\n".join([b"#13,a1 b", *damaged]) + b"\n")
    with TrmphReader(path) as reader:
        batches = list(reader.batches())
    games = sum(batch.positions["position_in_game"].to_pylist().count(0) for batch in batches)
    assert games + sum(len(batch.rejected) for batch in batches) == 1 + len(damaged)


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("a.trmph", ["#13;d4e5f6 b", "#l3,g7 r", "#13 a5b6", "#,a7b6", "##13,a1b2 b", "#13", "#x"]),
        ("a.hexworld", ["#l3c1,a1:rb", "##5c1,a1:rb", "#x", "5c1,a1:rb #5c1,a1:rb"]),
        ("b.trmph", ["#13,a1 b #13,a1 b", "# by Ann\r#13,a1 b", "#13,a1 b # by Ann\r#13,a1 b"]),
    ],
)
def test_what_is_no_comment_is_a_record(tmp_path: Path, name: str, lines: Sequence[str]) -> None:
    sound = b"#13,a1 b" if name.endswith("trmph") else b"https://hexworld.org/board/#13,a1:rb"
    text = b"\n".join([sound, *(line.encode() for line in lines), sound])
    (row,) = convert(tmp_path, {name: text}).values()
    assert (row["games"], row["rejected"]) == (2, len(lines))


@pytest.mark.parametrize("comment", ["#", "# ", "#\t", "# Model: x", "# 1,000 games", "#seed: 3", "# #13,a1"])
def test_a_comment_is_no_record(tmp_path: Path, comment: str) -> None:
    text = f"#13,a1 b\n{comment}\r\n#13,a2 b # {comment}\n"
    (row,) = convert(tmp_path, {"a.trmph": text.encode()}).values()
    assert (row["games"], row["rejected"]) == (2, 0)


GAME = "(;GM[11]SZ[5]RE[B+R];B[a1];W[b2])"


@pytest.mark.parametrize(
    ("text", "games", "rejected"),
    [
        (GAME + GAME.replace("]RE", "]PW[C;]]RE") + GAME, 3, 0),
        (GAME + GAME.replace("]RE", "]PW[C;]]E[") + GAME, 2, 1),  # the bracket may be that of RE
        (GAME + GAME[:-2] + ")" + GAME + GAME, 3, 1),  # the last value has no end
        (GAME + GAME[:-1] + GAME + GAME, 3, 1),  # the game has no end
        (GAME + GAME.replace(";B", "(;B") + GAME + GAME, 3, 1),
        (GAME + GAME.replace(";W", ");W") + GAME + GAME, 3, 1),
        (GAME + GAME[1:] + GAME, 2, 1),
        (GAME + "x" + GAME[1:] + GAME, 2, 1),
        (GAME + "(x" + GAME[2:] + GAME, 2, 1),
        (f"{GAME}\n(;GM[11]SZ[5]PB[A];B[a1](;W[b2])(;W[c3]){GAME}", 2, 1),
        (GAME + "(" * 9 + GAME, 2, 1),
        (f"From: Ann; (our game)\n{GAME}\nBest wishes [Ann] ;-)\n{GAME}", 2, 0),
        (GAME + GAME.replace("]RE", f"]C[it was {GAME.replace(']', chr(92) + ']')} as ever]RE"), 2, 0),
    ],
)
def test_a_bad_game_of_sgf_does_not_hide_the_games_after_it(
    tmp_path: Path, text: str, games: int, rejected: int
) -> None:
    (row,) = convert(tmp_path, {"a.sgf": text.encode()}).values()
    assert (row["games"], row["rejected"]) == (games, rejected)


def test_a_pickle_of_games_and_examples_loses_neither_silently(tmp_path: Path) -> None:
    for first, second in (("games", "examples"), ("examples", "games")):
        lists = {"games": [some_game()], "examples": [some_example(0)]}
        content = pickle_of({first: lists[first], second: lists[second]})
        (row,) = convert(tmp_path / first, {"a.pkl.gz": content}).values()
        assert (row["format"], row["rejected"]) == ("unknown", 1)
