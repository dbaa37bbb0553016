"""A position with its attributes, and its drawing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from hexdata.board import (
    BLUE,
    RED,
    UInt8Array,
    UInt16Array,
    cell_name,
    check_board_size,
    player_to_move,
    replay,
    unpack_boards,
)
from hexdata.draw import Diagram, Shades, board_svg, board_text
from hexdata.draw.terminal import TEXT_WIDTH
from hexdata.errors import ConfigError
from hexdata.schema import (
    EXTRA_PREFIX,
    NO_GAME,
    NO_MOVE,
    NO_PLY,
    NO_TIER,
    NO_VISITS,
    board_bytes,
    board_size_of,
    is_target,
)

__all__ = ["COLOURS", "Policy", "Position", "played_moves", "value_fact"]

COLOURS: Final = ("blue", "red")
_TOP_MOVES: Final = 3
"""Number of moves of a dense policy listed in the facts."""

Policy = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False, repr=False)
class Position:
    """A position on a board of size n. Notebooks display it as SVG, ``print`` as text:

        position = hexdata.read_position("store", 123)
        print(position)
        svg = position.svg(numbers=True)

    Attributes that are unknown are None.

    Attributes:
        planes: Blue stones, then red stones, uint8 (2, n, n), read-only.
        player: Player to move, 0 for blue, 1 for red.
        move: Cell index of the move made in this position; None for final positions and dense policies.
        policy: Dense policy, float32 (n·n,); None if the policy is a single move.
        value: 0.0 if blue wins, 1.0 if red wins.
        winner: Winner of the game, 0 for blue, 1 for red.
        value_sample_tier: Tier from 0 to 3.
        position_id: Id of the position in its store.
        game_id: Id of the game in its store.
        ply: Number of moves made before this position, according to the source.
        total_positions: Number of positions of the whole game.
        last_move: Cell index of the last move.
        played: Cell indices of all moves that led to this position, uint16 (ply,).
        metadata: JSON text of other metadata of the source.
        root_value: Value of the root of the search, from 0.0 (blue wins) to 1.0 (red wins).
        visits: Number of visits of the root.
        weight: Weight of the position in training.
        extra: Other numbers of the source, by name.

    Raises:
        ConfigError: Planes or policy have the wrong shape, or the player is unknown.
        FormatError: "board-size" or "trmph-cell", if the board size or a cell is invalid.
    """

    planes: UInt8Array
    player: int
    move: int | None = None
    policy: Policy | None = None
    value: float | None = None
    winner: int | None = None
    value_sample_tier: int | None = None
    position_id: int | None = None
    game_id: int | None = None
    ply: int | None = None
    total_positions: int | None = None
    last_move: int | None = None
    played: UInt16Array | None = None
    metadata: str | None = None
    root_value: float | None = None
    visits: int | None = None
    weight: float | None = None
    extra: Mapping[str, float | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        planes = np.array(self.planes, dtype=bool).astype(np.uint8)
        if planes.ndim != 3 or planes.shape[0] != 2 or planes.shape[1] != planes.shape[2]:
            raise ConfigError("wrong shape of planes", found=planes.shape, expected="(2, n, n)")
        n = check_board_size(planes.shape[1])
        if self.player not in (BLUE, RED):
            raise ConfigError("unknown player", found=self.player, expected="0, blue, or 1, red")
        planes.flags.writeable = False
        object.__setattr__(self, "planes", planes)
        for cell in (self.move, self.last_move):
            if cell is not None:
                cell_name(cell, n)  # raises if there is no such cell
        if self.policy is not None and self.policy.shape != (n * n,):
            raise ConfigError("wrong shape of the policy", found=self.policy.shape, expected=(n * n,))
        if self.last_move is None and self.played is not None and len(self.played):
            object.__setattr__(self, "last_move", int(self.played[-1]))

    @classmethod
    def of_planes(
        cls,
        board: npt.ArrayLike,
        *,
        move: int | None = None,
        policy: npt.ArrayLike | None = None,
        player_to_move: int | None = None,
        **facts: Any,
    ) -> Self:
        """Return the position of one row of a batch.

        Args:
            board: Planes (2, n, n), or a packed board, uint8 (ceil(2·n·n / 8),).
            move: Cell index; None or 65535 for no move.
            policy: Policy (n·n,); a one-hot policy sets ``move``, zeros mean no policy.
            player_to_move: 0 or 1. Default None: determined from the number of stones.
            facts: Other attributes, named as in this class or as in a batch (``position_in_game`` for
                ``ply``, ``extra.NAME`` for a number of ``extra``). Values that represent null in batches
                become None.

        Raises:
            ConfigError: An array has the wrong shape, or an attribute is unknown.
            FormatError: "board-size" or "trmph-cell", if the board size or a cell is invalid.
        """
        planes = _planes_of(np.asarray(board))
        known = {_NAMES.get(name, name): _plain(name, value) for name, value in facts.items()}
        for name in [name for name in known if name.startswith(EXTRA_PREFIX)]:
            known["extra"] = {**known.get("extra", {}), name.removeprefix(EXTRA_PREFIX): known.pop(name)}
        if unknown := sorted(known.keys() - cls.__dataclass_fields__.keys()):
            raise ConfigError("unknown attribute of a position", found=unknown[0])
        dense = None
        if policy is not None:
            dense, only = _split_policy(np.asarray(policy, dtype=np.float32).ravel())
            move = only if move is None else move
        player = _count_player(planes) if player_to_move is None else int(player_to_move)
        return cls(planes, player, _plain("move", move), dense, **known)

    @classmethod
    def of_moves(cls, moves: npt.ArrayLike, size: int, **facts: Any) -> Self:
        """Return the position after these moves (ply,) on an empty board, blue first.

        Raises:
            FormatError: "repeated-move", with the ply.
        """
        played = np.asarray(moves, dtype=np.uint16)
        planes = replay(played, size)[-1]
        return cls(planes, len(played) % 2, ply=len(played), played=played, **facts)

    @property
    def size(self) -> int:
        """Board size n."""
        return int(self.planes.shape[1])

    def facts(self) -> list[str]:
        """Return the known facts as short texts, for a caption."""
        facts = [f"position {self.position_id}"] if self.position_id is not None else []
        facts += [f"game {self.game_id}"] if self.game_id is not None else []
        if self.ply is not None:
            total = "" if self.total_positions is None else f" of {self.total_positions - 1}"
            facts.append(f"ply {self.ply}{total}")
        if self.last_move is not None:
            facts.append(f"last move {cell_name(self.last_move, self.size)}")
        facts.append(f"{COLOURS[self.player]} to move")
        if self.move is not None:
            facts.append(f"next move {cell_name(self.move, self.size)}")
        elif self.policy is None:
            facts.append("no next move")
        if self.policy is not None:
            named = (f"{cell_name(cell, self.size)} {100 * share:.0f} %" for cell, share in self.strongest())
            facts.append(f"policy {', '.join(named)}")
        facts += [value_fact(self.value)] if self.value is not None else []
        facts += [f"winner {COLOURS[self.winner]}"] if self.winner is not None else []
        facts += [f"tier {self.value_sample_tier}"] if self.value_sample_tier is not None else []
        facts += [f"root value {self.root_value:.3g}"] if self.root_value is not None else []
        facts += [f"{self.visits} visits"] if self.visits is not None else []
        facts += [f"weight {self.weight:.3g}"] if self.weight is not None else []
        facts += [f"{name} {number:.6g}" for name, number in self.extra.items() if number is not None]
        return facts

    def strongest(self) -> list[tuple[int, float]]:
        """Return the cells of the highest probabilities of the policy, at most three, highest first."""
        if self.policy is None:
            return []
        cells = np.argsort(-self.policy, kind="stable")[:_TOP_MOVES].tolist()
        return [(cell, float(self.policy[cell])) for cell in cells]

    def targets_json(self) -> dict[str, Any]:
        """Return the results of the search as JSON values; None for unknown values and NaN."""
        extra = {name: number if number is None else _finite(number) for name, number in self.extra.items()}
        return {
            "root_value": None if self.root_value is None else _finite(self.root_value),
            "visits": self.visits,
            "weight": None if self.weight is None else _finite(self.weight),
            "extra": extra,
        }

    def diagram(self, *, numbers: bool = False) -> Diagram:
        """Return the drawing of the position.

        Args:
            numbers: Whether to number stones by the ply at which they were played, if known. Default False.
        """
        facts = self.facts()
        numbered = self.played.tolist() if numbers and self.played is not None else []
        return Diagram(
            self.size,
            self.planes,
            last_move=self.last_move,
            next_move=self.move,
            player=self.player,
            numbers={cell: ply for ply, cell in enumerate(numbered, start=1)},
            shades=None if self.policy is None else Shades(self.policy, label="policy", share=True),
            title=f"Hex position: {', '.join(facts)}",
            caption=facts,
        )

    def svg(self, *, numbers: bool = False) -> str:
        """Return the position as SVG; with ``numbers``, stones are numbered by ply."""
        return board_svg(self.diagram(numbers=numbers))

    def text(self, *, color: bool = False, unicode: bool = True, width: int = TEXT_WIDTH) -> str:
        """Return the position as text.

        Args:
            color: Whether to use ANSI escape sequences. Default False.
            unicode: Whether to use characters beyond ASCII. Default True.
            width: Maximum line length of the texts below the board. Default 78.
        """
        return board_text(self.diagram(), color=color, unicode=unicode, width=width)

    def to_json(self) -> dict[str, Any]:
        """Return the position as JSON values, with names of cells; None for unknown values and NaN."""
        n = self.size
        moves = {"move": self.move, "last_move": self.last_move}
        return {
            "board_size": n,
            **{
                colour: [cell_name(cell, n) for cell in np.flatnonzero(self.planes[player]).tolist()]
                for player, colour in enumerate(COLOURS)
            },
            "player_to_move": COLOURS[self.player],
            **{name: None if cell is None else cell_name(cell, n) for name, cell in moves.items()},
            "policy": None if self.policy is None else [_finite(share) for share in self.policy.tolist()],
            "value": None if self.value is None else _finite(self.value),
            "winner": None if self.winner is None else COLOURS[self.winner],
            "value_sample_tier": self.value_sample_tier,
            "position_id": self.position_id,
            "game_id": self.game_id,
            "ply": self.ply,
            "total_positions": self.total_positions,
            **self.targets_json(),
            "metadata": self.metadata,
        }

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return f"<Position on a board of size {self.size}: {', '.join(self.facts())}>"

    def _repr_svg_(self) -> str:
        return self.svg()


def _finite(number: float) -> float | None:
    """Return a number for JSON: None if it is not finite."""
    return number if isfinite(number) else None


def value_fact(value: float) -> str:
    """Return a value with its meaning."""
    ends = {0.0: "blue wins", 1.0: "red wins"}
    return f"value {value:.3g} ({ends.get(value, '0 blue wins, 1 red wins')})"


def played_moves(
    moves: npt.ArrayLike | None, ply: int | None, planes: UInt8Array, first_player: int | None
) -> UInt16Array | None:
    """Return the moves of a game up to ``ply``, if they are known and lead to these stones (2, n, n)."""
    if moves is None or ply is None:
        return None
    played = np.asarray(moves, dtype=np.uint16)[:ply]
    if len(played) < ply or len(set(played.tolist())) < ply:
        return None
    boards = replay(played, planes.shape[-1], first_player or BLUE)
    return played if np.array_equal(boards[-1], planes) else None


_NAMES: Final = {"position_in_game": "ply"}
_NULLS: Final = {
    "move": NO_MOVE,
    "game_id": NO_GAME,
    "position_in_game": NO_PLY,
    "ply": NO_PLY,
    "total_positions": NO_PLY,
    "value_sample_tier": NO_TIER,
    "visits": NO_VISITS,
}


def _plain(name: str, value: Any) -> Any:
    """Return an attribute as a Python value, with None for values that represent null."""
    if isinstance(value, np.generic):
        value = value.item()
    if is_target(name) and value != value:
        return None
    return None if name in _NULLS and value == _NULLS[name] else value


def _planes_of(board: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return planes unchanged, or unpack a packed board (ceil(2·n·n / 8),)."""
    if board.ndim != 1:
        return board
    n = board_size_of(len(board))
    if board.dtype != np.uint8 or board_bytes(check_board_size(n)) != len(board):
        raise ConfigError(
            "wrong shape or dtype of the board", found=f"{board.dtype} {board.shape}", expected="(2, n, n)"
        )
    planes: npt.NDArray[Any] = unpack_boards(board[None], n, np.uint8)[0]
    return planes


def _count_player(planes: npt.NDArray[Any]) -> int:
    """Return the player to move from the stones of planes (2, n, n); blue for other shapes."""
    if planes.shape[:1] != (2,):
        return BLUE
    blue, red = (np.count_nonzero(plane) for plane in planes)
    return int(player_to_move(blue, red))


def _split_policy(policy: Policy) -> tuple[Policy | None, int | None]:
    """Return (policy, None) for a dense policy, (None, move) for a one-hot one, (None, None) for zeros."""
    cells = np.flatnonzero(policy)
    if len(cells) == 0:
        return None, None
    if len(cells) == 1 and policy[cells[0]] == 1:
        return None, int(cells[0])
    return policy, None
