"""The games read from files: they match those of ``convert``, and bad files stop nothing."""

from __future__ import annotations

import io
import re
import shutil
from collections import Counter
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest

from hexdata.board import replay
from hexdata.convert import ConvertOptions, convert_sources
from hexdata.demo.games import DemoGame
from hexdata.formats.trmph import write_trmph
from hexdata.live import Chunk
from hexdata.live.chunk import SCANNED
from hexdata.live.chunk_source_loader import ChunkSourceLoader
from tests.demo_games import demo_games
from tests.live.made import Given, N, Row, examples, piped, rest, write_pickle

NAMES = (
    "position_in_game",
    "total_positions",
    "board",
    "move",
    "value",
    "player_to_move",
    "value_sample_tier",
)
NULLS = {"position_in_game": 65535, "total_positions": 65535, "move": 65535, "value_sample_tier": 255}


def games(count: int, seed: int = 1) -> list[DemoGame]:
    return demo_games(count, seed, N)


def by_id(count: int, seed: int = 1) -> list[list[Row]]:
    return [examples(game, (0, line)) for line, game in enumerate(games(count, seed), start=1)]


def flat(lists: Iterable[list[Row]]) -> list[Row]:
    return list(chain.from_iterable(lists))


def shuffled(items: list[Row]) -> list[Row]:
    return [items[i] for i in np.random.default_rng(0).permutation(len(items))]


def without(name: str, made: list[Row]) -> list[Row]:
    for example in made:
        example.pop(name, None)
        example["metadata"].pop(name, None)
    return made


def odd_games() -> list[Row]:
    made = by_id(14)
    del made[1][3]
    made[2][4]["value"] = 0.25
    made[3][2]["policy"] = np.full(N * N, 1 / (N * N), np.float32)
    made[4][3]["player_to_move"] ^= 1
    made[5][-1]["metadata"]["value_sample_tier"] = 0
    del made[6][-1]
    made[7][2]["metadata"]["total_positions"] += 1
    for example in made[8]:
        example["value"] = 0.5
    without("player_to_move", made[9])
    without("value_sample_tier", made[10])
    without("game_id", made[11])
    made[12][1]["board"][0, 0, 0] = 1 - made[12][1]["board"][0, 0, 0]
    return flat(made)


def mixed() -> list[Row]:
    made = by_id(12)
    del made[4][2]
    for example in made[0]:
        example["metadata"]["game_id"] = (0, 0)
    return shuffled(flat(made))


def text() -> str:
    file = io.StringIO("# a comment\n\nno game\n")
    file.seek(0, io.SEEK_END)
    write_trmph(file, games(20), N)
    write_trmph(file, [(game.moves, 1 - game.winner) for game in games(4, seed=3)], N)
    write_trmph(file, [(game.moves[:4], game.winner) for game in games(3, seed=4)], N)
    return file.getvalue() + f"#{N},a1a1 b\n#{N}, r\n"


SHUFFLED = {"shuffling_stats": {"num_buckets": 1}}
LAYOUTS: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "tuples.pkl.gz": ([(e["board"], e["policy"], 1.0 - e["value"]) for e in flat(by_id(12))], {}),
    "odd.pkl.gz": (odd_games(), {}),
    "shuffled.pkl.gz": (mixed(), SHUFFLED),
    "part-0.pkl.gz": (shuffled(flat(by_id(10)))[::2], SHUFFLED),
    "part-1.pkl.gz": (shuffled(flat(by_id(10)))[1::2], SHUFFLED),
}
"""Examples and header of legacy files of all kinds."""


def load(path: Path, **options: Any) -> list[Chunk]:
    return ChunkSourceLoader(directory=path.parent, **options).read(path.name).chunks


def rows_of(chunk: Chunk) -> list[Any]:
    """Return the positions of a chunk in order of ply, computed in a simple way."""
    if chunk.block is not None:
        columns = [chunk.block[name] for name in NAMES]
        columns[2] = [board.tobytes() for board in columns[2]]  # type: ignore[call-overload]
        return sorted(zip(*columns, strict=True))
    assert chunk.moves is not None
    boards, moves = replay(chunk.moves, chunk.board_size), [*chunk.moves.tolist(), 65535]
    tiers = [255] * len(boards) if chunk.tiers is None else chunk.tiers.tolist()
    return [
        (ply, len(boards), np.packbits(board).tobytes(), moves[ply], chunk.value, ply % 2, tiers[ply])
        for ply, board in enumerate(boards)
    ]


def described(chunks: Iterable[Chunk]) -> list[Any]:
    return [(chunk.game_hash, flags_of(chunk.flags), rows_of(chunk)) for chunk in chunks]


def flags_of(codes: Iterable[str]) -> list[str]:
    return [code for code in codes if "duplicate" not in code]


Games = dict[tuple[str, str], list[Any]]


def converted(source: Path, store: Path) -> Games:
    """Convert files; return (hash, flags, rows) of the games by source and split, without duplicates."""
    convert_sources([source], store, ConvertOptions(workers=1, max_reject_rate=1.0, val=0.2, test=0.2))

    def select(columns: str, tables: str) -> list[Any]:
        names = re.sub(r"\w+", lambda name: f"'{store}/{name[0]}/*.parquet' {name[0]}", tables)
        return duckdb.sql(f"SELECT {columns} FROM {names} ORDER BY 1").fetchall()

    rows: dict[int, list[Any]] = {}
    for game, *row in select(f"game_id, {', '.join(NAMES)}", "positions"):
        values = zip(NAMES, row, strict=True)
        rows.setdefault(game, []).append(tuple(NULLS.get(n) if v is None else v for n, v in values))
    names = dict(select("source_id, name", "sources"))
    found: Games = {}
    for game, of, split, name, flags in select("game_id, source_id, split, game_hash, flags", "games"):
        for each in ("", split):
            own = found.setdefault((Path(names[of]).name, each), [])
            own.append((name, flags_of(flags), sorted(rows[game])))
    return found


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Games]:
    """A folder with files of all kinds and the store made of them, and the games of that."""
    folder = tmp_path_factory.mktemp("made")
    for name, (content, header) in LAYOUTS.items():
        write_pickle(folder / "in" / name, content, **header)
    (folder / "in" / "text.trmph").write_text(text())
    return folder, converted(folder / "in", folder / "store")


@pytest.mark.parametrize("name", [*LAYOUTS, "text.trmph"])
def test_chunks_are_the_games_that_convert_finds(name: str, made: tuple[Path, Games]) -> None:
    folder, found = made
    chunks = load(folder / "in" / name)
    assert described(chunks) == found[name, ""]
    for split in ("train", "val", "test"):
        own = load(folder / "in" / name, split=split, val=0.2, test=0.2)
        assert described(own) == found.get((name, split), [])
    assert [(c.index, c.source) for c in chunks] == [(i, name) for i in range(len(chunks))]
    if name.startswith("part"):
        assert all("missing-positions" in chunk.flags for chunk in chunks)
        other = [game for game, _, _ in found["part-0.pkl.gz", ""]]
        assert [chunk.game_hash for chunk in chunks] == other, "both parts of a game are of one split"


REAL_DATA = Path(__file__).parents[3] / "shared" / "data" / "legacy" / "variants"


@pytest.mark.skipif(not REAL_DATA.is_dir(), reason="no real data beside the repository")
def test_real_files_of_every_variant_match_convert(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for folder in REAL_DATA.iterdir():
        path = min(folder.rglob("*.pkl.gz"), key=lambda path: path.stat().st_size)
        shutil.copy(path, tmp_path / "in" / f"{folder.name}.pkl.gz")
    found = converted(tmp_path / "in", tmp_path / "store")
    for path in (tmp_path / "in").iterdir():
        assert described(load(path)) == found[path.name, ""], path.name


def test_ambiguous_ids_give_no_game(tmp_path: Path) -> None:
    made = by_id(4)
    made[1][0]["metadata"]["total_positions"] += 1
    made[2][0]["metadata"]["position_in_game"] = 1
    without("game_id", made[3][:5])
    without("position_in_game", made[0][1:2])  # which contradicts no other position
    write_pickle(tmp_path / "a.pkl.gz", shuffled(flat(made)), shuffling_stats={"num_buckets": 1})
    loader = ChunkSourceLoader(directory=tmp_path)
    chunks = loader.read("a.pkl.gz").chunks
    assert [chunk.positions for chunk in chunks] == [len(made[0]), len(made[3]) - 5]
    assert loader.counts["ungrouped"] == len(made[1]) + len(made[2]) + 5


def bad_files(folder: Path) -> dict[str, Path]:
    """Return one bad file for each reason."""
    good = write_pickle(folder / "whole.pkl.gz", flat(by_id(3)))
    contents = {
        "truncated": good.read_bytes()[: good.stat().st_size // 2],
        "unknown-layout": b"\x00 nothing that is known",
        "no-positions": b"# only a comment\n",
    }
    good.unlink()
    paths = {code: folder / f"{code}.bad" for code in [*contents, "gone", "board-size", "too-large"]}
    for code, content in contents.items():
        paths[code].write_bytes(content)
    write_trmph(paths["board-size"], demo_games(2, 1, N + 1), N + 1)
    write_trmph(paths["too-large"], games(100), N)
    even = [dict(e, value=abs(i - e["value"]), metadata={}) for i, game in enumerate(by_id(2)) for e in game]
    paths["value-sense"] = write_pickle(folder / "sense.pkl.gz", even)
    stripped = without("game_id", flat(by_id(2)))
    paths["shuffled-without-ids"] = write_pickle(folder / "ids.pkl.gz", stripped, shuffling_stats={"a": 1})
    single = [dict(flat(by_id(1))[2], metadata={"winner": "RED"}, value=1.0)]
    paths["no-games"] = write_pickle(folder / "single.pkl.gz", single)
    return paths


def test_a_bad_file_is_counted_and_named_and_does_not_stop_the_stage(tmp_path: Path) -> None:
    paths = bad_files(tmp_path)
    write_trmph(tmp_path / "a.trmph", games(3), N)
    write_trmph(tmp_path / "z.trmph", games(4, seed=2), N)
    loader = ChunkSourceLoader(directory=tmp_path, max_positions=1000)
    names = ["a.trmph", *(path.name for path in paths.values()), "z.trmph"]
    sources: list[Any] = [source for name in names for source in loader.process(name)]
    assert [(source.name, len(source.chunks)) for source in sources] == [("a.trmph", 3), ("z.trmph", 4)]
    assert {code: loader.counts.get(f"bad.{code}") for code in paths} == dict.fromkeys(paths, 1)
    assert [loader.counts[name] for name in ("bad_files", "files", "games")] == [len(paths), 2, 7]
    named = dict(loader.notes()["bad"])
    assert {named[path.name].partition(":")[0] for path in paths.values()} == set(paths)


def test_each_game_belongs_to_one_rank_in_every_file(tmp_path: Path) -> None:
    paths = [tmp_path / "a.trmph", tmp_path / "b.trmph"]
    write_trmph(paths[0], games(40), N)
    write_trmph(paths[1], games(40)[::-1], N)

    def of(**options: Any) -> Counter[bytes]:
        return Counter(chunk.game_hash for path in paths for chunk in load(path, **options))

    ranks = [of(rank=rank, world_size=3) for rank in range(3)]
    assert sum(ranks, Counter()) == of()
    assert sum(map(len, ranks)) == len(of())
    assert min(map(len, ranks)) > 3


def test_the_reason_to_wait_names_the_last_bad_file(tmp_path: Path) -> None:
    """Also if the existing files were all found, which the stage passes on."""
    (tmp_path / "bad.trmph").write_text("no game\n")
    loader = ChunkSourceLoader(directory=tmp_path, split="val", val=0.0)
    with piped(Given(["bad.trmph", SCANNED]), loader) as pipeline:
        pipeline.start()
        assert list(rest(pipeline)) == [SCANNED]
        assert re.search(r"bad_files 1.* bad\.trmph: no-positions", str(pipeline.wait_reason()))
        write_trmph(tmp_path / "a.trmph", games(3), N)
        assert list(loader.process("a.trmph")) == []
        assert "no game of split val" in str(loader.wait_reason())
        assert "other_split 3" in str(loader.wait_reason())
    resumed = ChunkSourceLoader(directory=tmp_path, split="val", val=0.0)
    resumed.read("a.trmph")  # as the pool of a state does
    assert resumed.wait_reason() is None
