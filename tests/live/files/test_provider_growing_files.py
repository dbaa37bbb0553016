"""Tests of files that are read before they are complete: each game is read once.

Most tests control the clock and run the first two stages step by step in one thread.
"""

from __future__ import annotations

import gzip
import os
import pickle
from collections.abc import Callable, Iterator
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexdata.demo.games import make_games
from hexdata.formats.trmph import write_trmph
from hexdata.live.chunk import Chunk, FoundFile
from hexdata.live.chunk_source_loader import ChunkSourceLoader
from hexdata.live.files.provider import FilePathProvider
from hexdata.live.pipeline import Pipeline
from hexdata.shards.format import ShardWriter
from tests.live.files.provider_steps import Clock, Steps, clock, start_pool, text_of, wait_until
from tests.live.legacy_layouts import Layouts
from tests.live.number_stages import TIMEOUT
from tests.live.sample_games import block_chunk

__all__ = ["clock"]

pytestmark = pytest.mark.usefixtures("no_thread_survives")


Facts = tuple[Any, ...]


def facts(chunks: list[Chunk]) -> list[Facts]:
    return [(chunk.source, chunk.index, chunk.game_hash, chunk.value) for chunk in chunks]


def shard(path: Path) -> bytes:
    with path.open("wb") as file:
        writer = ShardWriter(file)
        for number, positions in enumerate((9, 30)):
            block = block_chunk(number, positions).block
            assert block is not None
            block["game_id"][:] = number
            block["player_to_move"][:] = 0
            writer.write_block(number, block)
        writer.close()
    return path.read_bytes()


def content(kind: str, folder: Path) -> bytes:
    """Return the bytes of a file of some kind."""
    if kind == "a.trmph":
        return text_of(7)
    if kind == "b.trmph":
        return text_of(7, end="")
    if kind == "c.trmph.gz":
        return gzip.compress(text_of(7))
    if kind == "d.trmph.gz":
        return b"".join(gzip.compress(line + b"\n") for line in text_of(4).splitlines())
    if kind == "e.tar":
        return shard(folder / "shard")
    Layouts().plain(folder)
    (path,) = folder.iterdir()
    packed = path.read_bytes()
    return packed if kind.endswith(".gz") else gzip.decompress(packed)


KINDS = ("a.trmph", "b.trmph", "c.trmph.gz", "d.trmph.gz", "e.tar", "f.pkl.gz", "g.pkl")


@pytest.mark.parametrize("kind", KINDS)
def test_each_game_of_a_paused_file_is_read_once_and_in_order(
    kind: str, clock: Clock, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The file grows to several sizes and is read at each of them."""
    whole = content(kind, tmp_path_factory.mktemp("made"))
    expected: list[Facts] = []

    def grow(cuts: list[int]) -> Steps:
        folder = tmp_path_factory.mktemp("watched")
        steps = Steps(folder, clock)
        with steps.pipeline:
            for start, stop in pairwise([0, *sorted(cuts), len(whole)]):
                with (folder / kind).open("ab") as file:
                    file.write(whole[start:stop])
                os.utime(folder / kind, ns=(stop, stop))  # so that no two scans give the same time
                steps.step()
        return steps

    at_once = grow([])
    expected = facts(at_once.games)
    assert len(expected) >= 2

    @settings(max_examples=15)
    @given(st.lists(st.integers(1, len(whole) - 1), unique=True, max_size=5))
    def hold(cuts: list[int]) -> None:
        steps = grow(cuts)
        assert facts(steps.games) == expected
        counts = steps.counts()
        assert counts["games"] == len(expected)
        assert counts.get("again", 0) <= len(cuts)
        assert (counts["files"], counts.get("rewritten", 0)) == (1, 0)
        assert not steps.loader.notes()

    hold()


@given(st.lists(st.integers(0, 4), min_size=1, max_size=6), st.sampled_from(["train", "val", "test"]))
@settings(max_examples=20)
def test_each_split_receives_its_games_of_a_growing_text(
    tmp_path_factory: pytest.TempPathFactory, amounts: list[int], split: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hexdata.live.files.provider.time", clock := Clock())
        folder = tmp_path_factory.mktemp("watched")
        lines = text_of(30).splitlines(keepends=True)[: sum(amounts)]
        steps = Steps(folder, clock, split=split, val=0.3, test=0.3)
        whole = ChunkSourceLoader(split=split, val=0.3, test=0.3)
        with steps.pipeline:
            for number, amount in enumerate(amounts):
                with (folder / "a.trmph").open("ab") as file:
                    file.writelines([lines.pop(0) for _ in range(min(amount, len(lines)))])
                os.utime(folder / "a.trmph", ns=(number, number))
                steps.step()
        path = folder / "a.trmph"
        expected = []
        if b"#5" in path.read_bytes().replace(b"#5,a1a1", b""):
            expected = whole.read(FoundFile(path, "a.trmph", path.stat().st_size)).chunks
        assert facts(steps.games) == facts(expected)
        assert steps.counts().get("other_split", 0) == whole.counts.get("other_split", 0)
        if expected:
            assert steps.counts().get("rejected", 0) <= whole.counts.get("rejected", 0) + 1


def write(path: Path, data: bytes, time: int) -> Path:
    path.write_bytes(data)
    os.utime(path, ns=(time, time))
    return path


def test_rejected_records_of_a_growing_text_are_counted_once(tmp_path: Path, clock: Clock) -> None:
    good, bad = text_of(1), b"#5,a1a1 b\n"
    steps = Steps(tmp_path, clock)
    with steps.pipeline:
        write(tmp_path / "a.trmph", good + bad + b"#5,a1", 1)
        assert len(steps.step()) == 1
        assert steps.counts()["rejected"] == 2
        write(tmp_path / "a.trmph", good + bad + b"#5,a1b1a2b2a3b3a4b4a5\n" + bad, 2)
        assert len(steps.step()) == 1
        assert steps.counts()["rejected"] == 3
        assert steps.counts()["files"] == 1


def test_a_text_with_other_first_games_is_not_read_again(tmp_path: Path, clock: Clock) -> None:
    steps = Steps(tmp_path, clock)
    with steps.pipeline:
        write(tmp_path / "a.trmph", text_of(3), 1)
        assert len(steps.step()) == 3
        write(tmp_path / "a.trmph", text_of(9, seed=2), 2)
        assert steps.step() == []
        assert steps.counts()["bad.rewritten"] == 1
        (name, reason), *_ = steps.loader.notes()["bad"]
        assert (name, reason[:10]) == ("a.trmph", "rewritten:")
        write(tmp_path / "a.trmph", text_of(9, seed=3), 3)
        assert steps.find() == []
        assert steps.counts()["rewritten"] == 1


def test_a_bad_file_is_read_after_it_is_rewritten(tmp_path: Path, clock: Clock) -> None:
    steps = Steps(tmp_path, clock)
    with steps.pipeline:
        write(tmp_path / "a.trmph", b"an unknown line\n", 1)
        assert steps.step() == []
        assert steps.loader.notes()["bad"][0][0] == "a.trmph"
        assert steps.find() == []  # it has not changed
        write(tmp_path / "a.trmph", text_of(3), 2)
        assert len(steps.step()) == 3
        assert steps.loader.notes() == {}


def test_a_complete_file_that_changes_is_counted_and_not_read(tmp_path: Path, clock: Clock) -> None:
    steps = Steps(tmp_path, clock)
    with steps.pipeline:
        Layouts().plain(tmp_path)
        (path,) = tmp_path.iterdir()
        assert steps.step()
        write(path, path.read_bytes(), 5)
        assert steps.find() == []
        assert (steps.counts()["rewritten"], steps.counts()["files"]) == (1, 1)


def test_a_renamed_text_is_complete(tmp_path: Path, clock: Clock) -> None:
    steps = Steps(tmp_path, clock)
    with steps.pipeline:
        write(tmp_path / "a.trmph", text_of(3), 1)
        steps.provider._deliver_renamed(steps.provider.workers[0], "a.trmph")
        assert len(steps.step()) == 3
        write(tmp_path / "a.trmph", text_of(5), 2)
        assert steps.find() == []
        assert steps.counts()["rewritten"] == 1


def test_a_constantly_growing_file_is_read_less_and_less_often(tmp_path: Path, clock: Clock) -> None:
    """One game every three seconds: the file is read after 1 second, 2 more seconds, 4 more seconds …"""
    steps = Steps(tmp_path, clock)
    lines = [line for line in text_of(150).splitlines(keepends=True) if line.endswith((b" b\n", b" r\n"))]
    lines = [line for line in lines if b"a1a1" not in line]
    read: list[int] = []
    with steps.pipeline:
        for number, line in enumerate(lines):
            append(tmp_path / "a.trmph", line)
            os.utime(tmp_path / "a.trmph", ns=(number, number))
            read += [len(steps.step(1.0)) for _ in range(3)]
        assert sum(read) <= 2
        read += [len(steps.step(1.0)) for _ in range(4)]
        assert sum(read) == len(lines) == 100
        assert (steps.counts()["files"], steps.counts()["again"]) == (1, 2)
    assert [chunk.index for chunk in steps.games] == list(range(100))


def test_a_file_that_changes_before_it_is_read_is_read_once(tmp_path: Path, clock: Clock) -> None:
    """The file grows while it is in a queue, and is read with its new content."""
    steps = Steps(tmp_path, clock)
    with steps.pipeline:
        write(tmp_path / "a.trmph", text_of(3), 1)
        files = steps.find()
        write(tmp_path / "a.trmph", text_of(5), 2)
        assert steps.find() == []
        assert len(steps.read(files)) == 5
        again = steps.find()
        assert [file.previous.games for file in again if file.previous] == [5]
        assert steps.read(again) == []
        assert steps.find() == []
        assert len(steps.games) == 5


def test_a_file_that_could_not_be_opened_is_delivered_again(tmp_path: Path, clock: Clock) -> None:
    """For example after a temporary failure of a network drive."""
    steps = Steps(tmp_path, clock)
    with steps.pipeline:
        path = write(tmp_path / "a.trmph", text_of(3), 1)
        files = steps.find()
        path.rename(tmp_path / ".away")
        assert steps.read(files) == []
        assert steps.counts()["bad.gone"] == 1
        assert steps.find() == []
        (tmp_path / ".away").rename(path)
        steps.provider._add_candidates(["a.trmph"])  # a scan finds it without a reported change
        assert len(steps.step()) == 3


def test_an_unreported_change_is_found_by_a_scan(tmp_path: Path, clock: Clock) -> None:
    """Polling does not report a change within the same second."""
    steps = Steps(tmp_path, clock)
    with steps.pipeline:
        write(tmp_path / "a.trmph", text_of(3), 1)
        assert len(steps.step()) == 3
        write(tmp_path / "a.trmph", text_of(5), 2)
        found = steps.provider._scan_directory()
        assert found is not None
        steps.provider._add_candidates(sorted(found.names))
        clock.now += 1e9
        steps.provider._deliver_complete(steps.provider.workers[0])
        file = steps.pipeline.queues[0].take(0)
        assert file is not None
        assert len(steps.read([file])) == 2


def test_the_state_contains_the_progress_of_growing_files(tmp_path: Path, clock: Clock) -> None:
    steps = Steps(tmp_path, clock)
    with steps.pipeline:
        write(tmp_path / "a.trmph", text_of(3), 1)
        write(tmp_path / "b.tar", b"cut", 1)
        assert len(steps.step()) == 3
        write(tmp_path / "c.trmph", text_of(2), 1)
        steps.find()  # delivered and not read
        state = pickle.loads(pickle.dumps(steps.provider.state()))
    write(tmp_path / "a.trmph", text_of(7), 2)
    write(tmp_path / "b.tar", shard(tmp_path / "b"), 2)
    write(tmp_path / "c.trmph", text_of(5), 2)
    resumed = Steps(tmp_path, clock)
    with resumed.pipeline:
        resumed.provider.load_state(state)
        assert [chunk.index for chunk in resumed.step() if chunk.source == "a.trmph"] == [3, 4, 5, 6]
        assert [chunk.source for chunk in resumed.games].count("b.tar") == 2
        assert [chunk.source for chunk in resumed.games].count("c.trmph") == 0


def test_without_watch_no_file_may_grow(tmp_path: Path) -> None:
    write(tmp_path / "a.trmph", text_of(3), 1)
    provider, loader = FilePathProvider(tmp_path, watch=False), ChunkSourceLoader()
    with Pipeline([provider, loader], [(9, "block"), (9, "block")]) as pipeline:
        pipeline.start()
        source = pipeline.take(TIMEOUT)
        assert len(source.chunks) == 3
        with pytest.raises(StopIteration):
            pipeline.take(TIMEOUT)
        assert not provider._reports
        assert provider._delivered.delivery_count("a.trmph") == 0


# --- threads, pool and states -------------------------------------------------------------------------


def entered(games: int) -> Callable[[dict[str, dict[str, float]]], bool]:
    return lambda metrics: metrics["ShufflingChunkPool"]["entered"] == games


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


@pytest.fixture
def grown(tmp_path: Path) -> Iterator[tuple[Pipeline, bytes]]:
    """A pipeline that has read three parts of a text, one cut within a line; and the next part."""
    text = text_of(20)
    cuts = [0, 200, 400, 500, len(text)]
    pieces = [text[start:stop] for start, stop in pairwise(cuts)]
    whole = [text[:stop].count(b" b\n") + text[:stop].count(b" r\n") for stop in cuts]
    with start_pool(tmp_path) as pipeline:
        pipeline.start()
        games = 0.0
        for piece, lines in zip(pieces[:3], whole[1:4], strict=True):
            append(tmp_path / "a.trmph", piece)
            wait_until(
                pipeline,
                lambda metrics, least=lines: games_of(metrics) >= least - 1 and games_of(metrics) > 0,
            )
            wait_until(pipeline, lambda metrics, before=games: games_of(metrics) > before)
            games = games_of(pipeline.metrics())
        yield pipeline, pieces[3]


def games_of(metrics: dict[str, dict[str, float]]) -> float:
    return metrics["ShufflingChunkPool"]["entered"]


def test_a_growing_file_and_new_files_are_read_together(
    tmp_path: Path, grown: tuple[Pipeline, bytes]
) -> None:
    pipeline, piece = grown
    (tmp_path / ".b.trmph.tmp").write_bytes(text_of(4, seed=9))
    (tmp_path / ".b.trmph.tmp").rename(tmp_path / "b.trmph")
    append(tmp_path / "a.trmph", piece)
    wait_until(pipeline, entered(24))
    for _ in range(4):
        pipeline.take(TIMEOUT)
    game_batches = [pipeline.take(TIMEOUT) for _ in range(30)]
    found = {(chunk.source, chunk.index) for game_batch in game_batches for chunk in game_batch}
    assert found == {("a.trmph", index) for index in range(20)} | {("b.trmph", index) for index in range(4)}


@pytest.mark.parametrize("longer", [False, True])
def test_a_resumed_pool_draws_the_same_games_of_a_growing_file(
    tmp_path: Path, grown: tuple[Pipeline, bytes], longer: bool
) -> None:
    pipeline, piece = grown
    state = pickle.loads(pickle.dumps(pipeline.state()))
    games = int(games_of(pipeline.metrics()))
    assert len(state["ShufflingChunkPool"]["stage"]["sources"]) >= 2
    expected = [facts(list(pipeline.take(TIMEOUT))) for _ in range(20)]
    pipeline.close()
    if longer:
        append(tmp_path / "a.trmph", piece)
    with start_pool(tmp_path) as resumed:
        resumed.load_state(state)
        assert "missing" not in resumed.metrics()["ShufflingChunkPool"]
        assert games_of(resumed.metrics()) == games
        if not longer:
            resumed.start()
            assert [facts(list(resumed.take(TIMEOUT))) for _ in range(20)] == expected
            return
        resumed.start()
        wait_until(resumed, entered(20))
        for _ in range(4):
            resumed.take(TIMEOUT)
        game_batches = [resumed.take(TIMEOUT) for _ in range(20)]
        assert {chunk.index for chunk in chain(*game_batches)} == set(range(20))


def test_a_changed_file_of_a_state_is_left_out(tmp_path: Path, grown: tuple[Pipeline, bytes]) -> None:
    pipeline, _ = grown
    state = pipeline.state()
    pipeline.close()
    (tmp_path / "a.trmph").write_bytes(text_of(40, seed=5))
    with start_pool(tmp_path) as resumed:
        resumed.load_state(state)
        sources = len(state["ShufflingChunkPool"]["stage"]["sources"])
        assert resumed.metrics()["ShufflingChunkPool"]["missing"] == sources


def test_games_on_large_boards_are_read_once(tmp_path: Path, clock: Clock) -> None:
    """A cell with a two-digit row may be truncated to one digit."""
    write_trmph(tmp_path / "whole", [(game.moves, game.winner) for game in make_games(3, 1, 13)], 13)
    whole = (tmp_path / "whole").read_bytes()
    for cut in range(1, len(whole), 19):
        folder = tmp_path / str(cut)
        folder.mkdir()
        steps = Steps(folder, clock)
        with steps.pipeline:
            write(folder / "a.trmph", whole[:cut], 1)
            steps.step()
            write(folder / "a.trmph", whole, 2)
            steps.step()
        assert [chunk.index for chunk in steps.games] == [0, 1, 2]
