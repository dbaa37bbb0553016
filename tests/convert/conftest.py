"""Fixtures that write legacy files and convert them."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hexdata.board import BLUE, replay, unpack_boards
from hexdata.convert import ConvertOptions, ConvertResult, convert_sources
from hexdata.demo.games import DemoGame
from hexdata.progress import SILENT, Progress
from hexdata.store import Store
from tests.conftest import DERIVED
from tests.demo_games import demo_games
from tests.legacy_pickles import Player, Winner, save_pickle

REAL_DATA = Path(__file__).parents[3] / "shared" / "data"

Example = dict[str, Any]
Array = npt.NDArray[Any]


class Make:
    """Writes legacy files below a folder. Boards are ``n`` x ``n``, small so that tests are quick."""

    n = 5
    Player = Player
    Winner = Winner

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def games(self, count: int, seed: int = 1, start: int = 0) -> list[DemoGame]:
        """Return legal games, played until a player wins."""
        return demo_games(count, seed, self.n, start)

    def game(
        self,
        game: DemoGame,
        game_id: tuple[int, int] | None = (0, 1),
        first_player: int = BLUE,
        **more: Any,
    ) -> list[Example]:
        """Return the examples of one game as v2 dicts without ``player_to_move``, in ascending ply."""
        moves, winner = game
        return [
            {
                "board": board.astype(np.float32),
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
            for ply, board in enumerate(replay(moves, self.n, first_player))
        ]

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
        return self.write(name, self.tuples(e for game in self.dicts(games) for e in game))

    def v2(self, name: str, games: Iterable[DemoGame], file_idx: int = 0) -> Path:
        return self.write(name, [e for game in self.dicts(games, file_idx) for e in game])


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

    def boards(self) -> Array:
        """Return all boards: uint8 (N, 2, n, n)."""
        packed = self.table("positions")["board"].to_pylist()
        size = Store.open(self.path).manifest.board_size
        assert size is not None
        boards: Array = unpack_boards(
            np.frombuffer(b"".join(packed), np.uint8).reshape(len(packed), -1), size
        )
        return boards.astype(np.uint8)

    def content(self, of_source: str = "") -> dict[bytes, list[tuple[Any, ...]]]:
        """Return the positions of each game by ``game_hash``, in ascending ply, each with its labels.

        Only sources whose name contains ``of_source`` are used. Games with the same hash must have equal
        positions.
        """
        chosen = [row["source_id"] for row in self.rows("sources") if of_source in row["name"]]
        hashes = {g["game_id"]: g["game_hash"] for g in self.games() if g["source_id"] in chosen}
        plies: dict[int, list[tuple[Any, ...]]] = {game_id: [] for game_id in hashes}
        fields = ("position_in_game", "board", "move", "value", "player_to_move", "total_positions")
        parts = [self.path / f"positions/part-{source_id:06d}.parquet" for source_id in chosen]
        table = pa.concat_tables([pq.read_table(part, columns=["game_id", *fields]) for part in parts])
        for game_id, *labels in zip(*(table[name].to_pylist() for name in ("game_id", *fields)), strict=True):
            if game_id is not None:
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

    The database is not written, which takes a fifth of the time of a small store.
    """
    monkeypatch.setattr("hexdata.convert.write_database", lambda store: None)
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

    monkeypatch.setattr("hexdata.convert.spool.open_source", refuse)
