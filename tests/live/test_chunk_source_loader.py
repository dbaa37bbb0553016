"""Tests of the games read from files: they match those of ``convert``, and bad files stop nothing."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexdata.board import replay
from hexdata.convert import ConvertOptions, convert_sources
from hexdata.demo.games import make_games
from hexdata.errors import ConfigError, FormatError
from hexdata.export import ExportOptions, export_shards
from hexdata.formats import open_source
from hexdata.formats.trmph import write_trmph
from hexdata.live.chunk import SCANNED, Chunk, FoundFile
from hexdata.live.chunk_source_loader import ChunkSourceLoader
from hexdata.live.coordinator import Stopped
from hexdata.live.pipeline import Pipeline
from hexdata.live.source_games import extract_games, extract_trmph_games
from hexdata.live.stage import Stage, Worker
from hexdata.schema import NO_MOVE
from hexdata.shards.format import ShardWriter
from hexdata.shuffle import ShuffleOptions, shuffle_store
from hexdata.store import Store
from tests.altered_shards import set_header
from tests.live.legacy_layouts import (
    LAYOUTS,
    Layouts,
    N,
    by_id,
    examples,
    flat,
    games,
    shuffled,
    write_pickle,
)
from tests.live.sample_games import block_chunk


def load(path: Path, **options: Any) -> list[Chunk]:
    return ChunkSourceLoader(**options).read(found(path)).chunks


def found(path: Path) -> FoundFile:
    return FoundFile(path, path.name, path.stat().st_size)


Row = tuple[Any, ...]


def rows_of(chunk: Chunk) -> list[Row]:
    """Return the positions of a chunk in order of ply, computed in a simple way."""
    if chunk.moves is None:
        assert chunk.block is not None
        names = ("position_in_game", "total_positions", "board", "move", "value", "player_to_move")
        columns = [chunk.block[name] for name in (*names, "value_sample_tier")]
        columns[2] = [board.tobytes() for board in columns[2]]
        return [
            tuple(int(x) if isinstance(x, np.integer) else x for x in row)
            for row in zip(*columns, strict=True)
        ]
    boards = replay(chunk.moves, chunk.board_size)
    moves = [*chunk.moves.tolist(), 65535]
    tiers = [255] * len(boards) if chunk.tiers is None else chunk.tiers.tolist()
    return [
        (ply, len(boards), np.packbits(board).tobytes(), moves[ply], chunk.value, ply % 2, tiers[ply])
        for ply, board in enumerate(boards)
    ]


def stored_games(store: Path) -> list[tuple[Any, ...]]:
    """Return (hash, split, flags, rows) of each game of a store, without flags of duplicates."""
    tables = {
        name: pa.concat_tables(map(pq.read_table, Store.open(store).files(name)))
        for name in ("positions", "games")
    }
    rows: dict[int, list[Row]] = {}
    for row in tables["positions"].to_pylist():
        nulls = {"position_in_game": 65535, "total_positions": 65535, "move": 65535, "value_sample_tier": 255}
        row = {name: nulls[name] if name in nulls and value is None else value for name, value in row.items()}
        names = (
            "position_in_game",
            "total_positions",
            "board",
            "move",
            "value",
            "player_to_move",
            "value_sample_tier",
        )
        rows.setdefault(row["game_id"], []).append(tuple(row[name] for name in names))
    return [
        (game["game_hash"], game["split"], flags_of(game["flags"]), sorted(rows[game["game_id"]]))
        for game in tables["games"].to_pylist()
    ]


def flags_of(codes: Iterable[str]) -> list[str]:
    return [code for code in codes if "duplicate" not in code]


def convert(path: Path, store: Path, **options: Any) -> Path:
    convert_sources([path], store, ConvertOptions(workers=1, max_reject_rate=1.0, **options))
    return store


@pytest.mark.parametrize("layout", LAYOUTS)
def test_chunks_are_the_games_that_convert_finds(layout: str, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    getattr(Layouts(), layout)(folder)
    (path,) = folder.iterdir()
    expected = stored_games(convert(folder, tmp_path / "store", val=0.2, test=0.2))
    loader = ChunkSourceLoader(val=0.2, test=0.2)
    chunks = loader.read(found(path)).chunks
    assert [(c.game_hash, flags_of(c.flags), sorted(rows_of(c))) for c in chunks] == [
        (identity, flags, rows) for identity, _, flags, rows in expected
    ]
    for split in ("train", "val", "test"):
        own = load(path, split=split, val=0.2, test=0.2)
        assert [c.game_hash for c in own] == [identity for identity, side, _, _ in expected if side == split]
    assert all(type(c.game_hash) is bytes and c.source == path.name for c in chunks)
    assert [c.index for c in chunks] == list(range(len(chunks)))


REAL_DATA = Path(__file__).parents[3] / "shared" / "data" / "legacy" / "variants"


@pytest.mark.skipif(not REAL_DATA.is_dir(), reason="no real data beside the repository")
def test_real_files_of_every_variant_match_convert(tmp_path: Path) -> None:
    paths = sorted(REAL_DATA.rglob("*.pkl.gz"))
    assert len(paths) > 5
    for number, path in enumerate(paths):
        expected = stored_games(convert(path, tmp_path / str(number)))
        described = [(c.game_hash, flags_of(c.flags), sorted(rows_of(c))) for c in load(path)]
        assert described == [(identity, flags, rows) for identity, _, flags, rows in expected], path


def test_links_with_swaps_and_passes_match_convert(tmp_path: Path) -> None:
    path = tmp_path / "a.hexworld"
    path.write_text("5c1,a1b2c3:rb\n5c1,b1:sc3d4:rw\n5c1,b1:Sc3:rw\n5c1,b1c3:p:pd4:rb\n")
    expected = stored_games(convert(path, tmp_path / "store"))
    described = [(c.game_hash, flags_of(c.flags), sorted(rows_of(c))) for c in load(path)]
    assert described == [(identity, flags, rows) for identity, _, flags, rows in expected]
    assert [flags for _, flags, _ in described] == 4 * [["no-chain"]]


@pytest.mark.parametrize("layout", ["plain", "tuples", "without_ids", "without_players", "text"])
def test_games_that_follow_the_rules_are_stored_as_moves(layout: str, tmp_path: Path) -> None:
    getattr(Layouts(), layout)(tmp_path)
    (path,) = tmp_path.iterdir()
    chunks = load(path)
    assert all(chunk.block is None for chunk in chunks)
    assert [c.moves.tolist() for c in chunks[:12] if c.moves is not None] == [
        g.moves.tolist() for g in games(12)
    ]
    assert [c.value for c in chunks[:12]] == [float(game.winner) for game in games(12)]


def test_other_games_are_stored_as_boards(tmp_path: Path) -> None:
    Layouts().odd_games(tmp_path)
    chunks = load(tmp_path / "a.pkl.gz")
    as_blocks = [index for index, chunk in enumerate(chunks) if chunk.block is not None]
    assert as_blocks == [1, 2, 3, 4, 6, 7, 11]  # the missing game is the one without an id
    dense = chunks[3].block
    assert dense is not None
    assert dense["policy_row"].tolist() == [2]
    assert dense["policy"] == pytest.approx(np.full((1, N * N), 1 / (N * N)))
    assert chunks[8].value == 0.5
    assert chunks[10].tiers is None


@st.composite
def odd_texts(draw: st.DrawFn) -> str:
    """Generate lines of a TRMPH file: games of any length and winner, and invalid lines."""
    lines = []
    for _ in range(draw(st.integers(1, 6))):
        cells = draw(st.lists(st.integers(0, 8), max_size=9, unique=draw(st.booleans())))
        moves = "".join(f"{'abc'[cell % 3]}{cell // 3 + 1}" for cell in cells)
        lines.append(f"#3,{moves}{draw(st.sampled_from(['', ' b', ' r', ' 1', ' 2', ' x']))}")
    return "\n".join(lines)


@settings(max_examples=60)
@given(odd_texts())
def test_the_fast_path_for_text_equals_the_general_path(tmp_path_factory: Any, text: str) -> None:
    path = tmp_path_factory.mktemp("text") / "a.trmph"
    path.write_text(text)
    with open_source(path) as reader:
        raw = [batch.positions for batch in reader.batches() if batch.positions.num_rows]
    if raw:
        short, long = extract_trmph_games("a", raw, 3), extract_games("a", raw, 3, convention="blue-is-0")
        assert short.ungrouped == long.ungrouped == 0
        assert [described(chunk) for chunk in short.chunks] == [described(chunk) for chunk in long.chunks]


def described(chunk: Chunk) -> tuple[Any, ...]:
    assert chunk.moves is not None
    return chunk.index, chunk.game_hash, chunk.moves.tolist(), chunk.value, chunk.tiers, chunk.flags


# --- shuffled files -----------------------------------------------------------------------------------


def test_an_incomplete_game_is_named_by_its_ids_as_in_convert(tmp_path: Path) -> None:
    everything = shuffled(flat(by_id(games(10))))
    hashes = []
    for part in range(2):
        folder = tmp_path / f"in{part}"
        path = write_pickle(folder / "a.pkl.gz", everything[part::2], shuffling_stats={"num_buckets": 2})
        chunks = load(path)
        expected = stored_games(convert(folder, tmp_path / f"store{part}"))
        assert [(c.game_hash, sorted(rows_of(c))) for c in chunks] == [(g[0], g[3]) for g in expected]
        assert all("missing-positions" in chunk.flags for chunk in chunks)
        hashes.append([chunk.game_hash for chunk in chunks])
    assert hashes[0] == hashes[1], "both parts of a game are of one split"


def test_ambiguous_ids_give_no_game(tmp_path: Path) -> None:
    made = by_id(games(4))
    made[1][0]["metadata"]["total_positions"] += 1
    made[2][0]["metadata"]["position_in_game"] = 1
    for example in made[3][:5]:
        example["metadata"]["game_id"] = None
    path = write_pickle(tmp_path / "a.pkl.gz", shuffled(flat(made)), shuffling_stats={"num_buckets": 1})
    loader = ChunkSourceLoader()
    chunks = loader.read(found(path)).chunks
    assert [len(rows_of(chunk)) for chunk in chunks] == [len(made[0]), len(made[3]) - 5]
    assert loader.counts["ungrouped"] == len(made[1]) + len(made[2]) + 5


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with one shard per split, so that each shard contains complete games."""
    folder = tmp_path_factory.mktemp("exported")
    (folder / "in").mkdir()
    Layouts().odd_games(folder / "in")
    write_trmph(folder / "in/b.trmph", games(30, seed=5), N)
    store = convert(folder / "in", folder / "store", val=0.2, test=0.1)
    shuffle_store(store, ShuffleOptions(seed=1))
    return store


@pytest.mark.parametrize("layout", ["blocks", "samples"])
def test_the_games_of_a_shard_are_those_of_its_store(layout: str, exported: Path) -> None:
    export_shards(exported, ExportOptions(layout=layout, workers=1))
    stored = {tuple(rows): (split, identity) for identity, split, _, rows in stored_games(exported)}
    seen = []
    policies = []
    for path in sorted((exported / "shards").glob("*.tar")):
        split = path.name.partition("-")[0]
        assert load(path, split="train" if split != "train" else "val") == []
        for chunk in load(path, split=split):
            rows = tuple(sorted(rows_of(chunk)))
            side, identity = stored[rows]
            assert side == split
            assert chunk.moves is None or chunk.game_hash == identity
            seen.append(rows)
            if chunk.block is not None and "policy" in chunk.block:
                policies.append(chunk.block["policy"])
    assert sorted(seen) == sorted(stored)
    assert np.concatenate(policies) == pytest.approx(np.full((1, N * N), 1 / (N * N)))
    assert {split for split, _ in stored.values()} == {"train", "val", "test"}


def test_unusual_positions_of_a_shard_are_passed_on_or_counted(
    odd_store: Path, tmp_path: Path, copy_store: Any
) -> None:
    store = copy_store(odd_store)
    shuffle_store(store, ShuffleOptions(seed=1))
    export_shards(store, ExportOptions(workers=1))
    given_out = loose = 0
    for path in (store / "shards").glob("*.tar"):
        loader = ChunkSourceLoader()
        given_out += sum(chunk.positions for source in run(loader, [path]) for chunk in source.chunks)
        loose += loader.counts["ungrouped"]
    assert given_out + loose == pq.ParquetDataset(store / "positions").read(columns=["position_id"]).num_rows
    assert given_out > loose > 0


# --- bad files ----------------------------------------------------------------------------------------


class Files(Stage):
    """Emits the files of a folder in order of name, then the marker."""

    first = True

    def __init__(self, paths: list[Path]) -> None:
        super().__init__()
        self._paths = paths

    def work(self, worker: Worker) -> None:
        for path in self._paths:
            size = path.stat().st_size if path.exists() else 0
            self.put(worker, [FoundFile(path, path.name, size)])
        self.put(worker, [SCANNED])


def run(loader: ChunkSourceLoader, paths: list[Path]) -> list[Any]:
    with Pipeline([Files(paths), loader], [(2, "block")] * 2) as pipeline:
        pipeline.start()
        taken = []
        while True:
            try:
                taken.append(pipeline.take())
            except StopIteration:
                return taken


def bad_files(folder: Path) -> dict[str, Path]:
    """Return one bad file for each reason."""
    folder.mkdir()
    good = write_pickle(folder / "whole.pkl.gz", flat(by_id(games(3)))).read_bytes()
    made = {
        "truncated": good[: len(good) // 2],
        "empty-file": b"",
        "unknown-layout": b"\x00 nothing that is known",
        "no-positions": b"# only a comment\n",
        "broken-shard": bytes(257) + b"ustar" + bytes(250),
    }
    (folder / "whole.pkl.gz").unlink()
    paths = {}
    for code, content in made.items():
        paths[code] = folder / f"{code}.bad"
        paths[code].write_bytes(content)
    even = by_id(games(2))
    undecided = [dict(e, value=abs(i - e["value"]), metadata={}) for i, game in enumerate(even) for e in game]
    paths["value-sense"] = write_pickle(folder / "sense.pkl.gz", undecided)
    stripped = flat(by_id(games(2)))
    for example in stripped:
        del example["metadata"]["game_id"]
    paths["shuffled-without-ids"] = write_pickle(
        folder / "stripped.pkl.gz", stripped, shuffling_stats={"a": 1}
    )
    paths["board-size"] = folder / "larger.trmph"
    write_trmph(paths["board-size"], make_games(2, 1, N + 1), N + 1)
    paths["too-large"] = folder / "large.trmph"
    write_trmph(paths["too-large"], games(100), N)
    single = [dict(flat(by_id(games(1)))[2], metadata={"winner": "RED"}, value=1.0)]
    paths["no-games"] = write_pickle(folder / "single.pkl.gz", single)
    paths["gone"] = folder / "gone.trmph"
    return paths


def test_a_bad_file_is_counted_and_named_and_does_not_stop_the_stage(tmp_path: Path) -> None:
    paths = bad_files(tmp_path / "bad")
    first, last = tmp_path / "a.trmph", tmp_path / "z.trmph"
    write_trmph(first, games(3), N)
    write_trmph(last, games(4, seed=2), N)
    loader = ChunkSourceLoader(max_positions=1000)
    sources = run(loader, [first, *paths.values(), last])
    assert [(source.file.name, len(source.chunks)) for source in sources] == [
        ("a.trmph", 3),
        ("z.trmph", 4),
        ("", 0),
    ]
    assert sources[-1].file is SCANNED
    assert {code: loader.counts.get(f"bad.{code}") for code in paths} == dict.fromkeys(paths, 1)
    assert (loader.counts["bad_files"], loader.counts["files"], loader.counts["games"]) == (len(paths), 2, 7)
    named = dict(loader.notes()["bad"])
    assert {named[path.name].partition(":")[0] for path in paths.values()} == set(paths)


@pytest.mark.parametrize("size", [2**60, 2**63])
def test_a_shard_with_a_huge_size_field_is_bad(tmp_path: Path, size: int) -> None:
    """The size field of a tar header may be in base 256. Nothing of that size is read or allocated."""
    block = block_chunk(3, 9).block
    assert block is not None
    block["position_in_game"] = np.arange(9, dtype=np.uint16)
    block["total_positions"][:] = 9
    shard, last = tmp_path / "huge.tar", tmp_path / "z.trmph"
    with shard.open("wb") as file:
        writer = ShardWriter(file)
        writer.write_block(0, block)
        writer.close()
    assert load(shard)
    data = bytearray(shard.read_bytes())
    set_header(data, 0, 124, b"\x80" + size.to_bytes(11, "big"))
    shard.write_bytes(data)
    write_trmph(last, games(4, seed=2), N)
    loader = ChunkSourceLoader()
    sources = run(loader, [shard, last])
    assert [(source.file.name, len(source.chunks)) for source in sources] == [("z.trmph", 4), ("", 0)]
    assert (loader.counts["bad.broken-shard"], loader.counts["files"]) == (1, 1)


@pytest.mark.parametrize(
    ("field", "number"),
    [
        ("move", N * N),
        ("move", NO_MOVE - 1),
        ("player_to_move", 2),
        ("value", float("nan")),
        ("value", -0.5),
        ("value", 1.5),
        ("policy", float("inf")),
        ("policy", -0.1),
    ],
)
def test_a_shard_with_invalid_numbers_is_bad(tmp_path: Path, field: str, number: float) -> None:
    def shard(name: str) -> Path:
        with (tmp_path / name).open("wb") as file:
            writer = ShardWriter(file)
            writer.write_block(0, block)
            writer.close()
        return tmp_path / name

    block = block_chunk(3, 9, dense=(2, 5), final=(8,)).block
    assert block is not None
    block["position_in_game"] = np.arange(9, dtype=np.uint16)
    block["total_positions"][:] = 9
    assert load(shard("good.tar"))
    block[field].flat[1] = number
    with pytest.raises(FormatError, match=field) as caught:
        load(shard("bad.tar"))
    assert caught.value.code == "broken-shard"


def test_the_first_good_file_determines_the_board_size(tmp_path: Path) -> None:
    even = by_id(games(2))
    undecided = [dict(e, value=abs(i - e["value"]), metadata={}) for i, game in enumerate(even) for e in game]
    bad = write_pickle(tmp_path / "a.pkl.gz", undecided)
    good = tmp_path / "b.trmph"
    write_trmph(good, make_games(2, 1, 7), 7)
    loader = ChunkSourceLoader()
    assert len(run(loader, [bad, good])) == 2
    assert loader.board_size == 7
    with pytest.raises(FormatError, match="another size than those of earlier files"):
        ChunkSourceLoader(board_size=5).read(found(good))
    resumed = ChunkSourceLoader()
    resumed.load_state(loader.state())
    assert resumed.board_size == 7


def test_rejected_records_are_counted_by_reason(tmp_path: Path) -> None:
    path = tmp_path / "a.trmph"
    path.write_text(f"#{N},a1b2 b\n#{N},a1a1 b\nnonsense\n#{N},z9 b\n")
    loader = ChunkSourceLoader()
    assert len(loader.read(found(path)).chunks) == 1
    assert loader.counts["rejected"] == 3
    assert loader.counts["rejected.repeated-move"] == 1
    assert loader.counts["rejected.trmph-syntax"] + loader.counts["rejected.trmph-cell"] == 2


def test_a_file_above_the_limit_is_not_opened(tmp_path: Path) -> None:
    path = tmp_path / "a.trmph"
    with pytest.raises(FormatError, match="too large") as caught:
        ChunkSourceLoader(max_file_bytes=10).read(FoundFile(path, "a.trmph", 11))
    assert caught.value.code == "too-large"


@pytest.mark.parametrize("line", [f"#{N},a1b2 b\n", f"#{N},a1a1 b\n"])
def test_a_file_with_too_many_records_is_not_read_to_its_end(tmp_path: Path, line: str) -> None:
    """Rejected records count too, because they take as long to read."""
    path = tmp_path / "a.trmph"
    path.write_text(line * 20_000)
    loader = ChunkSourceLoader(max_positions=5000)
    with pytest.raises(FormatError, match="too large") as caught:
        loader.read(found(path))
    assert caught.value.code == "too-large"
    assert "rejected" not in loader.counts


def test_the_name_of_a_bad_file_is_made_printable(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"new\nline \x1b[31m \xff.trmph")
    loader = ChunkSourceLoader()
    run(loader, [path])
    ((name, reason),) = loader.notes()["bad"]
    assert name == r"new\nline \x1b[31m \udcff.trmph"
    assert reason.startswith("gone: ")


def test_the_given_convention_applies_without_evidence(tmp_path: Path) -> None:
    made = [examples(game, (0, line)) for line, game in enumerate(games(3), start=1)]
    cut = [e for game in made for e in game[:-1]]
    for example in cut:
        del example["metadata"]["winner"]
    path = write_pickle(tmp_path / "a.pkl.gz", cut)
    values = [[row[4] for row in rows_of(c)] for c in load(path)]
    assert values == [[float(game.winner)] * len(game.moves) for game in games(3)], "as dicts were written"
    values = [[row[4] for row in rows_of(c)] for c in load(path, value_convention="blue-is-1")]
    assert values == [[1.0 - game.winner] * len(game.moves) for game in games(3)]


def test_reading_ends_early_when_the_pipeline_stops(tmp_path: Path) -> None:
    path = tmp_path / "a.trmph"
    write_trmph(path, games(3), N)
    stopping = threading.Event()
    stopping.set()
    with pytest.raises(Stopped):
        ChunkSourceLoader().read(found(path), stopping)


@pytest.mark.parametrize(
    "wrong",
    [
        {"split": "dev"},
        {"val": -0.1},
        {"val": 0.9, "test": 0.1},
        {"board_size": 1},
        {"value_convention": "red"},
        {"max_file_bytes": 0},
        {"max_positions": 0},
        {"threads": 0},
    ],
)
def test_invalid_options_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ChunkSourceLoader(**wrong)


# --- several processes --------------------------------------------------------------------------------


def test_each_game_belongs_to_one_rank_in_every_file(tmp_path: Path):
    lines = games(40)
    paths = [tmp_path / "a.trmph", tmp_path / "b.trmph"]
    write_trmph(paths[0], lines, N)
    write_trmph(paths[1], lines[::-1], N)
    all_games = Counter(chunk.game_hash for path in paths for chunk in load(path))
    found = [
        Counter(chunk.game_hash for path in paths for chunk in load(path, rank=rank, world_size=3))
        for rank in range(3)
    ]
    assert sum(found, Counter()) == all_games
    assert not found[0].keys() & found[1].keys()
    assert not found[2].keys() & (found[0] | found[1]).keys()
    assert min(map(len, found)) > 3
