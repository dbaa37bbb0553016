"""Fixtures that write legacy files and convert them."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hexdata.board import BLUE, format_moves
from hexdata.convert import ConvertOptions, ConvertResult, convert_sources
from hexdata.demo.games import DemoGame
from hexdata.progress import SILENT, Progress, Silent
from hexdata.store import Store
from tests.conftest import DERIVED
from tests.demo_games import demo_games
from tests.legacy_pickles import save_pickle

REAL_DATA = Path(__file__).parents[3] / "shared" / "data"

Example = dict[str, Any]
Array = npt.NDArray[Any]


def flat(games: Iterable[list[Example]]) -> list[Example]:
    """Return the examples of games in one list."""
    return [example for game in games for example in game]


class Changing(Silent):
    """Calls a function when a stage begins, or has made progress."""

    def __init__(self, stage: str, change: Callable[[], object], *, advanced: bool = False) -> None:
        self.stage, self.change, self.advanced, self.current = stage, change, advanced, ""

    def begin(self, stage: str, total: int | None, unit: str) -> None:
        self.current = stage
        if stage == self.stage and not self.advanced:
            self.change()

    def advance(self, amount: int) -> None:
        if amount and self.current == self.stage and self.advanced:
            self.change()


class Make:
    """Writes legacy files below a folder. Boards are ``n`` x ``n``, small so that tests are quick."""

    n = 5

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def games(self, count: int, seed: int = 1, start: int = 0) -> list[DemoGame]:
        """Return legal games, played until a player wins."""
        return demo_games(count, seed, self.n, start)

    def game(
        self, game: DemoGame, game_id: tuple[int, int] | None = (0, 1), first_player: int = BLUE, **more: Any
    ) -> list[Example]:
        """Return the examples of one game as v2 dicts without ``player_to_move``, in ascending ply.

        A stone on an occupied cell replaces the other stone.
        """
        moves, winner = game
        boards = np.zeros((len(moves) + 1, 2, self.n * self.n), np.float32)
        for ply, move in enumerate(moves):
            boards[ply + 1 :, :, move] = 0
            boards[ply + 1 :, (ply + first_player) % 2, move] = 1
        return [
            {
                "board": board.reshape(2, self.n, self.n),
                "policy": self.policy(moves[ply]) if ply < len(moves) else None,
                "value": float(winner),
                "metadata": {
                    "game_id": game_id,
                    "position_in_game": ply,
                    "total_positions": len(moves) + 1,
                    "value_sample_tier": min(ply // 5, 3),
                    "winner": ("BLUE", "RED")[winner],
                    **copy.deepcopy(more),
                },
            }
            for ply, board in enumerate(boards)
        ]

    def repeating(self, number: int = 0, at: int = 6, of: int = 1, tail: int = 3) -> DemoGame:
        """Return a game whose move at ply ``at`` is on the cell of ply ``of``."""
        moves, winner = self.games(1, start=number)[0]
        return DemoGame(np.concatenate([moves[:at], moves[of : of + 1], moves[at : at + tail]]), winner)

    def shuffled(
        self,
        examples: list[Example],
        folder: str = "set",
        files: int = 2,
        sources: Iterable[str] = ("x", "y"),
    ) -> Path:
        """Write examples in random order as the files of a shuffle, which list their sources in any order."""
        order = np.random.default_rng(1).permutation(len(examples))
        listed = [*sources]
        for number, part in enumerate(np.array_split(order, files)):
            stats = {"num_buckets": files, "bucket_id": number, "source_files": listed[:: (-1) ** number]}
            name = f"{folder}/shuffled_{number:04d}.pkl.gz"
            self.write(name, [examples[i] for i in part], shuffling_stats=stats)
        return self.folder / folder

    def dicts(self, games: Iterable[DemoGame], file_idx: int = 0, **more: Any) -> list[list[Example]]:
        """Return the examples of games, one list per game, with ids of one file."""
        return [self.game(game, (file_idx, line), **more) for line, game in enumerate(games, start=1)]

    def policy(self, move: int) -> Array:
        cells = np.zeros(self.n * self.n, dtype=np.float32)
        cells[move] = 1
        return cells

    def tuples(self, examples: Iterable[Example]) -> list[tuple[Any, ...]]:
        """Return examples as v1 tuples: (board, policy, value), with the value in the older convention."""
        return [(e["board"], e["policy"], 1.0 - e["value"]) for e in examples]

    def write(self, name: str, examples: list[Any], **header: Any) -> Path:
        """Write a processed pickle below the folder."""
        return save_pickle(self.folder / name, {"examples": examples, **header})

    def write_bytes(self, name: str, content: bytes) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return path

    def v1(self, name: str, games: Iterable[DemoGame]) -> Path:
        return self.write(name, self.tuples(flat(self.dicts(games))))

    def v2(self, name: str, games: Iterable[DemoGame], file_idx: int = 0) -> Path:
        return self.write(name, flat(self.dicts(games, file_idx)))

    def lines(self, count: int, start: int = 0, newline: str = "\n") -> str:
        """Return games as TRMPH, one line each."""
        games = self.games(count, start=start)
        return "".join(f"#{self.n},{format_moves(m, self.n)} {'br'[w]}{newline}" for m, w in games)


@pytest.fixture
def make(tmp_path: Path) -> Make:
    return Make(tmp_path / "legacy")


class Converted:
    """A store, with methods that return its content."""

    def __init__(self, path: Path, result: ConvertResult | None = None) -> None:
        self.path = path
        self._result = result

    @property
    def result(self) -> ConvertResult:
        assert self._result is not None
        return self._result

    def files(self) -> dict[str, bytes]:
        """Return the content of every file of the store by relative path, including unfinished work.

        The lock, the logs and the files that are written from the manifest are excluded.
        """
        paths = {path.relative_to(self.path).as_posix(): path for path in sorted(self.path.rglob("*"))}
        others = {".lock", *DERIVED}
        return {
            file_name: p.read_bytes()
            for file_name, p in paths.items()
            if p.is_file() and file_name not in others and not file_name.startswith("logs/")
        }

    def table(self, name: str) -> pa.Table:
        """Return all rows of one table."""
        return pa.concat_tables([pq.read_table(path) for path in Store.open(self.path).files(name)])

    def rows(self, name: str) -> list[dict[str, Any]]:
        files = Store.open(self.path).files(name)
        return self.table(name).to_pylist() if files else []

    def games(self) -> list[dict[str, Any]]:
        return self.rows("games")

    def source(self, name: str) -> dict[str, Any]:
        """Return the row of the source whose name ends with ``name``."""
        (row,) = [row for row in self.rows("sources") if row["name"].endswith(name)]
        row["evidence"] = json.loads(row["value_sense_evidence"])
        return row

    def notes(self, name: str = "a.pkl.gz") -> list[str]:
        """Return the notes on the source whose name ends with ``name``."""
        notes: list[str] = json.loads(self.source(name)["notes"] or "[]")
        return notes

    def content(self, of_source: str = "") -> dict[bytes, list[tuple[Any, ...]]]:
        """Return the positions of each game by ``game_hash``, in ascending ply, each with its labels.

        Only sources whose name contains ``of_source`` are used. Games with the same hash must have equal
        positions.
        """
        chosen = [row["source_id"] for row in self.rows("sources") if of_source in row["name"]]
        hashes = {g["game_id"]: g["game_hash"] for g in self.games() if g["source_id"] in chosen}
        plies: dict[int, list[tuple[Any, ...]]] = {game_id: [] for game_id in hashes}
        fields = ("position_in_game", "board", "move", "value", "player_to_move", "total_positions")
        table = self.table("positions")
        for game_id, *labels in zip(*(table[name].to_pylist() for name in ("game_id", *fields)), strict=True):
            if game_id in plies:
                plies[game_id].append(tuple(labels))
        content: dict[bytes, list[tuple[Any, ...]]] = {}
        for game_id, positions in plies.items():
            assert content.setdefault(hashes[game_id], sorted(positions)) == sorted(positions)
        return content


class Convert:
    """Converts files into a store below a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(
        self, *inputs: Path, store: str = "store", progress: Progress = SILENT, **options: Any
    ) -> Converted:
        path = self.folder / store
        result = convert_sources(inputs, path, ConvertOptions(**{"workers": 1, **options}), progress)
        return Converted(path, result)


@pytest.fixture
def convert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Convert:
    """Return ``convert(*inputs, store="store", progress=…, **options)``, which returns a ``Converted``.

    The database and the cards are not written, which take a third of the time of a small store.
    """
    for name in ("write_database", "write_cards"):
        monkeypatch.setattr(f"hexdata.convert.{name}", lambda store: None)
    return Convert(tmp_path)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Return the folder of real legacy data; skip the test if it does not exist."""
    if not REAL_DATA.is_dir():
        pytest.skip("no real data beside the repository")
    return REAL_DATA


@pytest.fixture(scope="session")
def real_store(real_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Converted:
    """All real legacy data, converted. Read only."""
    store = tmp_path_factory.mktemp("real") / "store"
    return Converted(store, convert_sources([real_data / "legacy"], store, ConvertOptions(workers=1)))


@pytest.fixture
def no_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every attempt to read a source file fail, so that a run can only use its spools."""

    def refuse(path: Path, **options: object) -> None:
        raise AssertionError(f"{path} was read again")

    monkeypatch.setattr("hexdata.convert.read.open_source", refuse)
