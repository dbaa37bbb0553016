"""Duplicate games and the columns of games: what a loader leaves out is what the shuffle leaves out.

The games are generated with a known number of copies and images, so the expected positions need no hexdata.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import cycle, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from hexdata import (
    ConvertOptions,
    ExportOptions,
    Loader,
    PositionDataset,
    ShuffleOptions,
    convert_sources,
    export_shards,
    shuffle_store,
)
from hexdata.cli import app
from hexdata.errors import ConfigError
from tests.pairs import FULL, every_pair

SIZE = 5
FIELDS = ("position_id", "value")
DEDUPS = ("exact", "symmetric")


@dataclass(frozen=True)
class Game:
    """A generated game, with the ids that ``convert`` gives to its positions."""

    source: str
    moves: tuple[int, ...]
    distinct: int
    """Number of the generated game of which this is a copy or an image."""
    first_id: int

    @property
    def ids(self) -> range:
        return range(self.first_id, self.first_id + len(self.moves) + 1)


def generate_games() -> list[Game]:
    """Return games of two sources: some are repeated, some are rotated by half a turn, some both."""
    rng = np.random.default_rng(5)
    distinct = [tuple(rng.permutation(SIZE * SIZE)[: int(rng.integers(6, 24))].tolist()) for _ in range(20)]
    games: list[Game] = []
    for source in ("in/a.trmph", "in/b.trmph"):
        for _ in range(25):
            number = int(rng.integers(len(distinct)))
            moves = distinct[number]
            if rng.random() < 0.4:
                moves = tuple(SIZE * SIZE - 1 - cell for cell in moves)
            start = games[-1].ids.stop if games else 0
            games.append(Game(source, moves, number, start))
    return games


GAMES = generate_games()


def duplicates(games: Iterable[Game], dedup: str) -> set[Game]:
    """Return the games of which an earlier one is a copy or, for "symmetric", an image."""
    seen: set[object] = set()
    found = set()
    for game in games:
        key = game.moves if dedup == "exact" else game.distinct
        found |= {game} if key in seen else set()
        seen.add(key)
    return found


REPEATED = duplicates(GAMES, "symmetric")

CONDITIONS: dict[str, Callable[[Game, int], bool]] = {
    "true": lambda game, ply: True,
    "duplicate_of IS NULL": lambda game, ply: game not in REPEATED,
    "NOT list_contains(flags, 'duplicate-symmetric')": lambda game, ply: (
        game.moves == next(first for first in GAMES if first.distinct == game.distinct).moves
    ),
    "source = 'in/b.trmph'": lambda game, ply: game.source == "in/b.trmph",
    "source_id = 1 AND position_in_game > 2": lambda game, ply: game.source == "in/b.trmph" and ply > 2,
    "game_positions >= 15 AND value >= 0": lambda game, ply: len(game.moves) >= 14,
    "len(moves) < 12 OR position_in_game = 0": lambda game, ply: len(game.moves) < 12 or not ply,
    "line_idx % 2 = 0": lambda game, ply: [g for g in GAMES if g.source == game.source].index(game) % 2 == 1,
    "provenance IS NOT NULL AND model IS NULL AND split = 'train'": lambda game, ply: True,
}
"""Conditions on columns of games and sources, and the same in Python."""


def expected_ids(where: str = "true", dedup: str = "none") -> list[int]:
    matches = CONDITIONS[where]
    kept = {game: [position for ply, position in enumerate(game.ids) if matches(game, ply)] for game in GAMES}
    present = [game for game in GAMES if kept[game]]
    left_out = duplicates(present, dedup) if dedup != "none" else set()
    return [position for game in present if game not in left_out for position in kept[game]]


def delivered(batches: Iterable[Any]) -> list[int]:
    return sorted(np.concatenate([np.asarray(batch["position_id"]) for batch in batches]).tolist())


def write_games(folder: Path, games: Iterable[Game]) -> Path:
    folder.mkdir(exist_ok=True)
    for game in games:
        cells = "".join(f"{'abcde'[cell % SIZE]}{cell // SIZE + 1}" for cell in game.moves)
        with (folder / Path(game.source).name).open("a", encoding="ascii") as file:
            file.write(f"#{SIZE},{cells} {'rb'[len(game.moves) % 2]}\n")
    return folder


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store without shards."""
    folder = tmp_path_factory.mktemp("duplicates")
    options = ConvertOptions(workers=1, val=0, test=0)
    convert_sources([write_games(folder / "in", GAMES)], folder / "store", options)
    return folder / "store"


def with_shards(store: Path, folder: Path, **choices: Any) -> Path:
    """Return a copy of a store, with shards of the selected positions."""
    copy = shutil.copytree(store, folder)
    shuffle_store(copy, ShuffleOptions(seed=1, threads=1, **choices))
    export_shards(copy, ExportOptions(shard_size=128, block_size=32, workers=1))
    return copy


@pytest.fixture(scope="module")
def exported(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store with shards of all positions."""
    return with_shards(store, tmp_path_factory.mktemp("exported") / "store")


def of_loader(path: Path, mode: Any, batch_size: int = 32, **options: Any) -> list[int]:
    return delivered(Loader(path, mode=mode, batch_size=batch_size, fields=FIELDS, **options))


def of_dataset(path: Path, mode: Any, **options: Any) -> list[int]:
    dataset = PositionDataset(path, mode=mode, fields=FIELDS, **options)
    return delivered([dataset.batch(dataset.epoch_indices(0))])


def of_torch(path: Path, mode: Any, **options: Any) -> list[int]:
    torch = pytest.importorskip("hexdata.torch")
    loader = Loader(path, mode=mode, batch_size=32, fields=FIELDS, **options)
    return delivered(torch.TorchLoader(loader, num_workers=2, multiprocessing_context="fork"))


READERS = {"Loader": of_loader, "PositionDataset": of_dataset, "TorchLoader": of_torch}


def test_the_generated_games_have_every_kind_of_duplicate() -> None:
    exact, symmetric = (duplicates(GAMES, dedup) for dedup in DEDUPS)
    assert 0 < len(exact) < len(symmetric) < len(GAMES)
    assert {game.source for game in symmetric} == {"in/a.trmph", "in/b.trmph"}


@every_pair(reader=READERS, mode=["games", "exact"], dedup=DEDUPS)
def test_dedup_delivers_one_game_of_each_set(exported: Path, reader: str, mode: str, dedup: str) -> None:
    assert READERS[reader](exported, mode, dedup=dedup) == expected_ids(dedup=dedup)


@pytest.mark.parametrize(
    ("where", "dedup"),
    [*product(CONDITIONS, ["none", *DEDUPS])]
    if FULL
    else [*zip(CONDITIONS, cycle(["none", *DEDUPS]), strict=False)],
)
def test_a_condition_may_name_the_columns_of_games(exported: Path, where: str, dedup: str) -> None:
    """Of equal games, the first one with a selected position stays, as in a shuffle."""
    expected = expected_ids(where, dedup)
    assert expected
    for mode in ("games", "exact"):
        assert of_loader(exported, mode, where=where, dedup=dedup) == expected


@pytest.mark.parametrize(
    ("where", "dedup"),
    [(None, "exact"), ("source = 'in/b.trmph'", "symmetric"), ("position_in_game > 8", "exact")],
)
def test_a_loader_selects_what_a_shuffle_selects(
    store: Path, tmp_path: Path, where: str | None, dedup: str
) -> None:
    shuffled = with_shards(store, tmp_path / "store", where=where, dedup=dedup)
    expected = of_loader(shuffled, "exact")
    assert 0 < len(expected) < len(expected_ids())
    assert of_loader(store, "games", where=where, dedup=dedup) == expected
    assert of_loader(shuffled, "games", where=where, dedup=dedup) == expected  # the loader warns of nothing


def test_shards_without_some_games_are_compared_with_each_other(store: Path, tmp_path: Path) -> None:
    """A duplicate stays if its first game is not in the shards."""
    shuffled = with_shards(store, tmp_path / "store", where="source = 'in/b.trmph'")
    assert of_loader(shuffled, "exact", dedup="exact") == expected_ids("source = 'in/b.trmph'", "exact")


@pytest.mark.parametrize("mode", ["games", "exact"])
def test_weights_may_name_the_columns_of_games(exported: Path, mode: str) -> None:
    weights = "CASE WHEN duplicate_of IS NULL THEN 1 WHEN source = 'in/b.trmph' THEN 2 ELSE 0 END"
    times = {game: 1 if game not in REPEATED else 2 * (game.source == "in/b.trmph") for game in GAMES}
    expected = sorted(position for game in GAMES for position in [*game.ids] * times[game])
    assert of_loader(exported, mode, weights=weights) == expected


@pytest.mark.parametrize("mode", ["games", "exact"])
def test_newest_counts_no_duplicates(exported: Path, mode: str) -> None:
    kept = [game for game in GAMES if game not in REPEATED]
    expected = [position for game in kept[-3:] for position in game.ids]
    assert of_loader(exported, mode, dedup="symmetric", newest=3) == expected


SELECTING = (
    ({"dedup": "exact"}, "dedup"),
    ({"where": "len(flags) = 0"}, "flags"),
    ({"weights": "CASE WHEN source = 'x' THEN 1 ELSE 2 END"}, "source"),
)


@pytest.mark.parametrize(("options", "name"), SELECTING)
def test_shards_alone_have_no_games(exported: Path, tmp_path: Path, options: Any, name: str) -> None:
    shards = shutil.copytree(exported / "shards", tmp_path / "shards")
    with pytest.raises(ConfigError, match=rf"do not contain the games.*{name}"):
        Loader(shards, **options)
    assert of_loader(shards, "exact", where="position_in_game < 3")


@pytest.mark.parametrize("repeats", [True, False])
def test_convert_names_the_option_if_games_are_repeated(tmp_path: Path, repeats: bool) -> None:
    games = [game for game in GAMES if repeats or game not in REPEATED]
    result = CliRunner().invoke(
        app, ["convert", str(write_games(tmp_path / "in", games)), str(tmp_path / "s")]
    )
    lines = [line for line in result.output.splitlines() if "--dedup" in line]
    assert len(lines) == repeats
    for line in lines:
        share = len(REPEATED) / len(GAMES)
        assert {str(len(REPEATED)), str(len(GAMES)), f"{share:.1%}"} <= set(re.findall(r"[\d.]+%?", line))
