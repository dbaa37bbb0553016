"""Writes games to a folder as self-play does: generated games in small TRMPH files.

Run as a program, it is a process that tests can kill. It executes the lines of its standard input and writes
one line to its standard output for each finished file, so tests need no clock:

- ``write K``: write K more files, and answer the name of each;
- ``half``: write the first half of the next file, and answer ``half NAME``;
- ``run``: write ``--rate`` games per second until the input is closed.

The i-th game written is game i of the seed. The name of a file contains the number of its first game.
"""

from __future__ import annotations

import argparse
import os
import select
import sys
import time
from pathlib import Path

from hexdata.board import format_moves
from hexdata.demo.games import make_games


class Folder:
    """Writes the next file of games, either renamed when complete or growing in place."""

    def __init__(
        self, path: Path, games: int, board_size: int, seed: int, in_place: bool, first: int
    ) -> None:
        self._path = path
        self._games = games
        self._board_size = board_size
        self._seed = seed
        self._in_place = in_place
        self._next = first

    def write(self) -> None:
        """Write the next file and answer its name."""
        path, text = self._make()
        target = path if self._in_place else path.with_name(f".{path.name}.tmp")
        target.write_text(text)
        target.rename(path)
        answer(path.name)

    def write_half(self) -> None:
        """Write half of the next file, ending within a game; answer ``half`` and its name."""
        path, text = self._make()
        target = path if self._in_place else path.with_name(f".{path.name}.tmp")
        lines = text.splitlines(keepends=True)
        middle = len(lines) // 2
        target.write_text("".join(lines[:middle]) + lines[middle][: len(lines[middle]) // 2])
        answer(f"half {target.name}")

    def _make(self) -> tuple[Path, str]:
        games = make_games(self._games, self._seed, self._board_size, self._next)
        lines = [
            f"#{self._board_size},{format_moves(game.moves, self._board_size)} {'br'[game.winner]}\n"
            for game in games
        ]
        path = self._path / f"games-{self._next:08d}.trmph"
        self._next += self._games
        return path, "".join(lines)


def answer(line: str) -> None:
    """Write a line with a single system call."""
    os.write(sys.stdout.fileno(), f"{line}\n".encode())


def run(folder: Folder, seconds: float) -> None:
    """Write a file at a fixed interval, if possible, until input arrives or ends."""
    due = time.monotonic()
    while not select.select([sys.stdin], [], [], max(0.0, due - time.monotonic()))[0]:
        folder.write()
        due += seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--games", type=int, default=10, help="a file")
    parser.add_argument("--board-size", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first game")
    parser.add_argument("--rate", type=float, default=300.0, help="games a second")
    parser.add_argument("--in-place", action="store_true")
    arguments = parser.parse_args()
    folder = Folder(
        arguments.folder,
        arguments.games,
        arguments.board_size,
        arguments.seed,
        arguments.in_place,
        arguments.first,
    )
    while line := sys.stdin.readline():
        verb, _, number = line.strip().partition(" ")
        if verb == "write":
            for _ in range(int(number)):
                folder.write()
        elif verb == "half":
            folder.write_half()
        elif verb == "run":
            run(folder, arguments.games / arguments.rate)
        else:
            raise SystemExit(f"unknown: {line!r}")


if __name__ == "__main__":
    main()
