"""A game with its positions, and its drawing as a filmstrip."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, Final

from hexdata.board import UInt16Array, cell_name, format_moves
from hexdata.draw import film_svg
from hexdata.errors import ConfigError, StoreError
from hexdata.show.position import COLOURS, Position

__all__ = ["Game"]

_DEFAULT_FRAMES: Final = 48
"""Approximate number of boards in a filmstrip by default."""


@dataclass(frozen=True, eq=False, repr=False)
class Game:
    """A game. Notebooks display it as a filmstrip, ``print`` as its last position:

        game = hexdata.read_game("store", 7)
        print(game.at(30))
        svg = game.svg(every=10)

    Attributes that are unknown are None.

    Attributes:
        positions: The available positions sorted by ply, at least one.
        game_id: Id of the game in its store.
        moves: Cell indices of all moves, uint16 (m,).
        winner: 0 for blue, 1 for red.
        split: "train", "val" or "test".
        source: Name of the source file.
        provenance: Origin of the game's identity: "metadata", "recovered" or "unknown".
        duplicate_of: Id of the game that this game duplicates.
        flags: Flags of the game, such as "no-chain".
        end_reason: How the game ended: "chain", "resigned", "time" or "unknown".
        swap: How the second player swapped: "pieces" or "sides"; None if it did not.

    Raises:
        ConfigError: There are no positions.
    """

    positions: Sequence[Position]
    game_id: int | None = None
    moves: UInt16Array | None = None
    winner: int | None = None
    split: str | None = None
    source: str | None = None
    provenance: str | None = None
    duplicate_of: int | None = None
    flags: Sequence[str] = ()
    end_reason: str | None = None
    swap: str | None = None

    def __post_init__(self) -> None:
        if not self.positions:
            raise ConfigError("a game needs at least one position")
        object.__setattr__(self, "positions", tuple(self.positions))

    @classmethod
    def of_moves(cls, moves: UInt16Array, size: int, winner: int | None = None) -> Game:
        """Return the game with these moves (m,), blue first. It has m + 1 positions.

        Raises:
            FormatError: "repeated-move", with the ply.
        """
        total = len(moves) + 1
        positions = [
            Position.of_moves(
                moves[:ply],
                size,
                move=int(moves[ply]) if ply < len(moves) else None,
                winner=winner,
                total_positions=total,
            )
            for ply in range(total)
        ]
        return cls(positions, moves=moves, winner=winner)

    @property
    def size(self) -> int:
        """Board size n."""
        return self.positions[0].size

    @property
    def last(self) -> Position:
        """The last available position."""
        return self.positions[-1]

    def at(self, ply: int) -> Position:
        """Return the position after ``ply`` moves.

        Raises:
            StoreError: The position is not available.
        """
        for position in self.positions:
            if position.ply == ply:
                return position
        plies = [str(position.ply) for position in self.positions]
        whole = plies == [str(number) for number in range(len(plies))]
        raise StoreError(
            "the game has no position at that ply" if self.game_id is None else
            f"game {self.game_id} has no position at that ply",
            found=f"ply {ply}",
            expected=f"0 to {len(plies) - 1}" if whole else f"one of {', '.join(plies[:20])}",
        )  # fmt: skip

    def facts(self) -> list[str]:
        """Return the known facts as short texts, for a caption."""
        facts = [f"game {self.game_id}"] if self.game_id is not None else []
        facts += [f"from {self.source}"] if self.source is not None else []
        facts += [f"{len(self.moves)} moves"] if self.moves is not None else []
        facts.append(f"{len(self.positions)} positions")
        facts += [f"winner {COLOURS[self.winner]}"] if self.winner is not None else []
        facts += [f"end {self.end_reason}"] if self.end_reason not in (None, "chain") else []
        facts += [f"swap of {self.swap}"] if self.swap is not None else []
        facts += [f"split {self.split}"] if self.split is not None else []
        facts += [f"duplicate of game {self.duplicate_of}"] if self.duplicate_of is not None else []
        return [*facts, *self.flags]

    def svg(self, *, every: int | None = None, numbers: bool = False) -> str:
        """Draw the game as a filmstrip: several small boards in one SVG.

        Args:
            every: Draw every k-th position and the last one. Default None: all positions of a game of up to
                48 positions, and about 48 of a longer one.
            numbers: Whether to number stones by the ply at which they were played, if known. Default False.

        Raises:
            ConfigError: ``every`` is less than 1.
        """
        if every is None:
            every = ceil(len(self.positions) / _DEFAULT_FRAMES)
        if every < 1:
            raise ConfigError("every must be at least 1", found=every)
        drawn = list(self.positions[::every])
        if (len(self.positions) - 1) % every:
            drawn.append(self.last)
        facts = self.facts()
        frames = [
            replace(
                position.diagram(numbers=numbers), next_move=None, shades=None, caption=[_frame(position)]
            )
            for position in drawn
        ]
        return film_svg(frames, title=f"Hex game: {', '.join(facts)}", caption=facts)

    def to_json(self) -> dict[str, Any]:
        """Return the game as JSON values; positions are listed by id and ply."""
        return {
            "board_size": self.size,
            "game_id": self.game_id,
            "moves": None if self.moves is None else format_moves(self.moves, self.size),
            "winner": None if self.winner is None else COLOURS[self.winner],
            "split": self.split,
            "source": self.source,
            "provenance": self.provenance,
            "duplicate_of": self.duplicate_of,
            "flags": list(self.flags),
            "end_reason": self.end_reason,
            "swap": self.swap,
            "positions": [
                {
                    "position_id": position.position_id,
                    "ply": position.ply,
                    "policy": {cell_name(cell, self.size): share for cell, share in position.strongest()},
                    **position.targets_json(),
                }
                for position in self.positions
            ],
        }

    def __len__(self) -> int:
        return len(self.positions)

    def __str__(self) -> str:
        return self.last.text()

    def __repr__(self) -> str:
        return f"<Game on a board of size {self.size}: {', '.join(self.facts())}>"

    def _repr_svg_(self) -> str:
        return self.svg()


def _frame(position: Position) -> str:
    """Return the caption of a board: its ply and the last move."""
    move = "" if position.last_move is None else f": {cell_name(position.last_move, position.size)}"
    return f"ply {'?' if position.ply is None else position.ply}{move}"
