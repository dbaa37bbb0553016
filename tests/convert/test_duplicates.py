"""The search for duplicate games in ranges of hashes, compared with a plain search."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hexdata.board import game_hash, symmetry_table
from hexdata.convert.duplicates import DUPLICATES, NewGames, SearchLimits, StoredGames, find_duplicates
from hexdata.convert.spool import FINDINGS, Spool, write_arrow
from hexdata.errors import StoreError
from hexdata.games.find import GAMES
from hexdata.games.findings import Finding, Flag
from hexdata.store.originals import WINNERS

N = 4
Game = dict[str, Any]
FEW = SearchLimits(run_games=3, range_games=4, buckets=16, in_one_process=False)


def make_games(count: int, seed: int) -> list[Game]:
    """Return games with many duplicates: images of a few games, with random winners, some without moves."""
    draw = random.Random(seed)
    table = symmetry_table(N)
    originals = [draw.sample(range(N * N), draw.randint(1, 6)) for _ in range(count // 3)]
    games = []
    for moves in draw.choices(originals, k=count):
        image = draw.randrange(4)
        first_player = image // 2
        moves = [int(table[image][cell]) for cell in moves]
        game = {
            "moves": moves,
            "first_player": first_player,
            "game_hash": game_hash(moves, N, first_player),
            "winner": draw.choice([0, 1, None]),
        }
        games.append(game if draw.random() < 0.8 else game | {"moves": None})
    return games


def plain_search(games: list[Game]) -> list[tuple[int | None, Flag]]:
    """Return the first game with the same hash, and the kind of duplicate, of each game."""
    firsts: dict[bytes, int] = {}
    found: list[tuple[int | None, Flag]] = []
    for number, game in enumerate(games):
        first = firsts.setdefault(game["game_hash"], number)
        if first == number:
            found.append((None, Flag(0)))
            continue
        original = games[first]
        same = all(game[name] == original[name] for name in ("moves", "first_player"))
        kind = Flag.DUPLICATE_EXACT if same else Flag.DUPLICATE_SYMMETRIC
        if game["moves"] is None:
            kind = Flag.DUPLICATE_FRAGMENT
        elif None not in (game["winner"], original["winner"]):
            won = [each["winner"] ^ each["first_player"] for each in (game, original)]
            kind |= Flag.CONTRADICTORY_DUPLICATES if won[0] != won[1] else Flag(0)
        found.append((first, kind))
    return found


class Sources:
    """Writes games as files of a store and as spools."""

    def __init__(self, folder: Path, games: list[Game], stored: list[int], new: list[int]) -> None:
        self.folder, self.stored, self.new = folder, [], []
        start = 0
        names = {**dict(enumerate(WINNERS)), None: None}
        for size in stored:
            path = folder / f"{start:04d}.parquet"
            rows = [
                game | {"winner": names[game["winner"]], "duplicate_of": first}
                for game, (first, _) in zip(games, plain_search(games), strict=True)
            ][start : start + size]
            schema = pa.schema([GAMES.field(name) for name in ("game_hash", "moves", "first_player")])
            schema = schema.append(pa.field("winner", pa.string())).append(DUPLICATES.field("duplicate_of"))
            pq.write_table(pa.Table.from_pylist(rows, schema=schema), path, row_group_size=4)
            self.stored.append(StoredGames(path, start, size))
            start += size
        for size in new:
            spool = Spool(folder / f"spool-{start:04d}")
            with write_arrow(spool.folder / "games.arrow", GAMES) as writer:
                table = pa.Table.from_pylist(games[start : start + size], schema=GAMES)
                writer.write_table(table, max_chunksize=5)
            findings = np.full(size, int(Finding.REPEATED), np.uint32)
            with write_arrow(spool.folder / "findings.arrow", FINDINGS) as writer:
                writer.write_table(pa.table({"findings": findings}, schema=FINDINGS))
            self.new.append(NewGames(spool, "blue-is-0", start, size))
            start += size

    def search(self, run_tasks: Any, limits: SearchLimits | None) -> Any:
        return find_duplicates(self.new, self.stored, N, self.folder / "work", run_tasks, limits=limits)

    def rows(self) -> list[tuple[int | None, Flag]]:
        tables = [pa.Table.from_batches(source.spool.batches("duplicates")) for source in self.new]
        return [(row["duplicate_of"], Flag(row["flags"])) for t in tables for row in t.to_pylist()]


def last_first(function: Callable[..., Any], tasks: list[tuple[Any, ...]]) -> Iterator[tuple[int, Any]]:
    """Run tasks here, the last one first."""
    for index in reversed(range(len(tasks))):
        yield index, function(*tasks[index])


@pytest.mark.parametrize(
    "limits", [None, FEW, SearchLimits(7, 1, 64, False), SearchLimits(100, 11, 1, False)]
)
@pytest.mark.parametrize("stored", [[], [1, 9, 20]])
def test_the_division_of_the_search_does_not_change_its_results(tmp_path, stored, limits):
    games = make_games(100, seed=3)
    old = sum(stored)
    sources = Sources(tmp_path, games, stored, [1, 40, 10, 49 - old])
    counts = sources.search(last_first, limits)
    expected = plain_search(games)[old:]
    assert sources.rows() == [(first, kind | Flag.REPEATED_MOVE) for first, kind in expected]
    assert len({kind for _, kind in expected}) >= 5
    assert sum(count.duplicates for count in counts) == sum(first is not None for first, _ in expected)
    codes = Counter(flag.code for _, kind in expected for flag in kind | Flag.REPEATED_MOVE)
    assert sum((Counter(count.flags) for count in counts), Counter()) == codes
    assert not (tmp_path / "work").exists()


def search_stored(folder: Path, games: list[Game], stored: int) -> set[int]:
    """Search duplicates of the games after the first ``stored``; return the stored ones that are compared."""
    sources = Sources(folder, games, [stored], [len(games) - stored])
    rows: set[int] = set()

    def recording(function, tasks):
        for index, runs in last_first(function, tasks):
            if function.__name__ == "write_stored_runs":
                rows.update(int(leader["row"]) for run in runs for leader in run.piece(0, 1).leaders())
            yield index, runs

    sources.search(recording, SearchLimits(5, 100, 1, False))
    return rows


def test_only_stored_games_that_may_be_originals_are_compared(tmp_path):
    games = [*make_games(60, seed=1), *make_games(30, seed=2)]
    compared = search_stored(tmp_path, games, 60)
    hashes = {game["game_hash"] for game in games[:60]}
    assert len(hashes & {game["game_hash"] for game in games[60:]}) <= len(compared) < len(hashes) / 2


def test_stored_games_that_are_duplicates_are_not_compared(tmp_path):
    games = make_games(90, seed=4)
    compared = search_stored(tmp_path, games, 60)
    first_games = {number for number, (first, _) in enumerate(plain_search(games[:60])) if first is None}
    assert 10 < len(compared) < 60
    assert compared <= first_games


@pytest.mark.parametrize("name", ["run-*", "range-*", "filter*", "stored-*"])
def test_a_damaged_temporary_file_is_named(tmp_path, name):
    sources = Sources(tmp_path, make_games(60, seed=5), [20], [40])
    damaged = []

    def damaging(function, tasks):
        if not damaged:
            damaged.extend(sorted((tmp_path / "work").glob(name))[:1])
            for path in damaged:
                content = bytearray(path.read_bytes())
                content[len(content) // 2] ^= 1
                path.write_bytes(content)
        yield from last_first(function, tasks)

    with pytest.raises(StoreError, match="temporary file of an unfinished conversion") as caught:
        sources.search(damaging, FEW)
    assert caught.value.path == str(damaged[0])
