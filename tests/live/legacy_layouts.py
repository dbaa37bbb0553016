"""Legacy files of every layout with generated games, pickled as the legacy tool did; and text files."""

from __future__ import annotations

import gzip
import pickle
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from hexdata.board import BLUE, RED, replay
from hexdata.demo.games import DemoGame
from hexdata.formats.trmph import write_trmph
from tests.demo_games import demo_games

N = 5
Example = dict[str, Any]


def examples(game: DemoGame, game_id: tuple[int, int] | None, first_player: int = BLUE) -> list[Example]:
    """Return the examples of a game as the newer legacy tool stored them."""
    boards = replay(game.moves, N, first_player)
    made = []
    for ply, board in enumerate(boards):
        policy = np.zeros(N * N, np.float32)
        policy[game.moves[ply : ply + 1]] = 1
        made.append(
            {
                "board": board.astype(np.float32),
                "policy": policy if ply < len(game.moves) else None,
                "value": float(game.winner),
                "player_to_move": (ply + first_player) % 2,
                "metadata": {
                    "game_id": game_id,
                    "position_in_game": ply,
                    "total_positions": len(boards),
                    "value_sample_tier": min(ply // 5, 3),
                    "winner": ("BLUE", "RED")[game.winner],
                },
            }
        )
    return made


def write_pickle(path: Path, content: Iterable[Any], **header: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(pickle.dumps({"examples": list(content), **header}, 4), 1))
    return path


def games(count: int, seed: int = 1) -> list[DemoGame]:
    return demo_games(count, seed, N)


def by_id(played: Iterable[DemoGame]) -> list[list[Example]]:
    return [examples(game, (0, line)) for line, game in enumerate(played, start=1)]


def flat(lists: Iterable[list[Example]]) -> list[Example]:
    return list(chain.from_iterable(lists))


def shuffled(items: list[Example]) -> list[Example]:
    return [items[i] for i in np.random.default_rng(0).permutation(len(items))]


class Layouts:
    """Writes one file of each kind below a folder; each method is a kind."""

    def plain(self, path: Path) -> None:
        write_pickle(path / "a.pkl.gz", flat(by_id(games(12))))

    def tuples(self, path: Path) -> None:
        old = [(e["board"], e["policy"], 1.0 - e["value"]) for e in flat(by_id(games(12)))]
        write_pickle(path / "a.pkl.gz", old)

    def without_ids(self, path: Path) -> None:
        made = [examples(game, None) for game in games(12)]
        write_pickle(path / "a.pkl.gz", flat(shuffled(game) for game in made))

    def without_players(self, path: Path) -> None:
        made = flat(by_id(games(12)))
        for example in made:
            del example["player_to_move"]
        write_pickle(path / "a.pkl.gz", made)

    def red_began(self, path: Path) -> None:
        made = [examples(game, (0, line), RED) for line, game in enumerate(games(6), start=1)]
        for game in made:  # winners as the chains on the boards show
            for example in game:
                example["value"] = 1.0 - example["value"]
                example["metadata"]["winner"] = "BLUE" if example["value"] == 0 else "RED"
        write_pickle(path / "a.pkl.gz", flat([*made, *by_id(games(9, seed=2))[6:]]))

    def odd_games(self, path: Path) -> None:
        made = by_id(games(14))
        del made[1][3]
        made[2][4]["value"] = 0.25
        made[3][2]["policy"] = np.full(N * N, 1 / (N * N), np.float32)
        made[4][3]["player_to_move"] ^= 1
        made[5][-1]["metadata"]["value_sample_tier"] = 0
        made[6] = made[6][:-1]
        made[7][2]["metadata"]["total_positions"] += 1
        for example in made[8]:
            example["value"] = 0.5
        for example in made[10]:
            del example["metadata"]["value_sample_tier"]
        for example in made[11]:
            example["metadata"]["game_id"] = None
        made[12][1]["board"][0, 0, 0] = 1 - made[12][1]["board"][0, 0, 0]
        write_pickle(path / "a.pkl.gz", flat(made))

    def shuffled_with_ids(self, path: Path) -> None:
        made = by_id(games(12))
        del made[4][2]
        write_pickle(path / "a.pkl.gz", shuffled(flat(made)), shuffling_stats={"num_buckets": 1})

    def text(self, path: Path) -> None:
        with (path / "a.trmph").open("w") as file:
            file.write("# a comment\n\nno game\n")
            write_trmph(file, games(20), N)
            write_trmph(file, [(game.moves, 1 - game.winner) for game in games(4, seed=3)], N)
            write_trmph(file, [(game.moves[:4], game.winner) for game in games(3, seed=4)], N)
            file.write(f"#{N},a1a1 b\n#{N}, r\n")


LAYOUTS = [name for name in vars(Layouts) if not name.startswith("_")]
