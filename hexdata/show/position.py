"""A position and a game with their attributes, and their drawings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, isfinite
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from hexdata import board as boards
from hexdata.board import BLUE, RED, UInt8Array, UInt16Array, cell_name, check_board_size
from hexdata.draw import Diagram, Shades, board_svg, board_text, film_svg
from hexdata.draw.terminal import TEXT_WIDTH
from hexdata.errors import ConfigError, StoreError
from hexdata.schema import EXTRA_PREFIX, NO_VISITS, board_bytes, board_size_of
from hexdata.shards.blocks import SENTINELS

COLOURS: Final = ("blue", "red")
_SAME: Final = (
    *("value", "value_sample_tier", "position_id", "game_id", "ply", "total_positions"),
    *("policy_weight", "root_value", "visits", "weight", "metadata"),
)
"""Attributes of a position that are JSON values under their own names."""
_LISTED: Final = ("position_id", "ply", "policy", "policy_weight", "root_value", "visits", "weight", "extra")
"""JSON values of each position of a game."""
_NULLS: Final = {**SENTINELS, "ply": SENTINELS["position_in_game"], "visits": NO_VISITS}
"""Values of batches and shards that represent null."""
_DEFAULT_FRAMES: Final = 48
"""Approximate number of boards in a filmstrip by default."""

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
        policy_weight: Weight of the policy in training: 0 if it is not to be trained.
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
    policy_weight: float | None = None
    root_value: float | None = None
    visits: int | None = None
    weight: float | None = None
    extra: Mapping[str, float | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # A copy, since the array becomes read-only.
        planes = np.array(self.planes, dtype=bool).astype(np.uint8)
        if planes.ndim != 3 or planes.shape[0] != 2 or planes.shape[1] != planes.shape[2]:
            raise ConfigError(f"planes must have the shape (2, n, n); found {planes.shape}")
        n = check_board_size(planes.shape[1])
        if self.player not in (BLUE, RED):
            raise ConfigError(f"player must be 0, blue, or 1, red; found {self.player}")
        planes.flags.writeable = False
        object.__setattr__(self, "planes", planes)
        for cell in (self.move, self.last_move):
            if cell is not None:
                cell_name(cell, n)  # raises if there is no such cell
        if self.policy is not None and self.policy.shape != (n * n,):
            raise ConfigError(f"policy must have the shape {(n * n,)}; found {self.policy.shape}")
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
        planes = np.asarray(board)
        if planes.ndim == 1:
            n = board_size_of(len(planes))
            # The size follows from the number of bytes, and not every number of bytes is that of a board.
            if planes.dtype != np.uint8 or board_bytes(check_board_size(n)) != len(planes):
                raise ConfigError(f"a packed board must be uint8; found {planes.dtype} {planes.shape}")
            planes = boards.unpack_boards(planes[None], n, np.uint8)[0]
        known, extra = dict[str, Any](), dict(facts.pop("extra", {}))
        for name, value in {"move": move, **facts}.items():
            plain = value.item() if isinstance(value, np.generic) else value
            # NaN is the only value that differs from itself; it means null, too.
            plain = None if plain != plain or plain == _NULLS.get(name) else plain
            if name.startswith(EXTRA_PREFIX):
                extra[name.removeprefix(EXTRA_PREFIX)] = plain
            elif name in _NAMES:
                known[_NAMES[name]] = plain
            else:
                raise ConfigError(f"a position has no attribute {name!r}")
        shares = np.zeros(0, np.float32) if policy is None else np.asarray(policy, np.float32).ravel()
        cells = np.flatnonzero(shares)
        if len(cells) == 1 and shares[cells[0]] == 1:
            known["move"] = int(cells[0]) if move is None else known["move"]
        elif len(cells):
            known["policy"] = shares
        if player_to_move is None and planes.shape[:1] == (2,):
            player_to_move = int(boards.player_to_move(*(np.count_nonzero(plane) for plane in planes)))
        return cls(planes, int(player_to_move or BLUE), extra=extra, **known)

    @classmethod
    def of_moves(cls, moves: npt.ArrayLike, size: int, **facts: Any) -> Self:
        """Return the position after these moves (ply,) on an empty board, blue first.

        Raises:
            FormatError: "repeated-move", with the ply.
        """
        played = np.asarray(moves, dtype=np.uint16)
        planes = boards.replay(played, size)[-1]
        return cls(planes, len(played) % 2, ply=len(played), played=played, **facts)

    @property
    def size(self) -> int:
        """Board size n."""
        return int(self.planes.shape[1])

    def facts(self) -> list[str]:
        """Return the known facts as short texts, for a caption."""
        # The first position is the empty board with ply 0, so the last ply is one less than their number.
        total = "" if self.total_positions is None else f" of {self.total_positions - 1}"
        ends = {0.0: "blue wins", 1.0: "red wins"}
        meaning = ends.get(self.value or 0.0, "0 blue wins, 1 red wins")
        policy = [f"{cell_name(cell, self.size)} {100 * share:.0f} %" for cell, share in self.strongest()]
        known = [
            ("position {}", self.position_id),
            ("game {}", self.game_id),
            (f"ply {{}}{total}", self.ply),
            ("last move {}", self._name(self.last_move)),
            ("{} to move", COLOURS[self.player]),
            ("next move {}", self._name(self.move)),
            ("no next move", True if self.move is None and self.policy is None else None),
            ("policy {}", ", ".join(policy) or None),
            (f"value {{:.3g}} ({meaning})", self.value),
            ("winner {}", _colour(self.winner)),
            ("tier {}", self.value_sample_tier),
            ("policy weight {:.3g}", None if self.policy_weight == 1 else self.policy_weight),
            ("root value {:.3g}", self.root_value),
            ("{} visits", self.visits),
            ("weight {:.3g}", self.weight),
            *((f"{name} {{:.6g}}", number) for name, number in self.extra.items()),
        ]
        return [text.format(value) for text, value in known if value is not None]

    def strongest(self, most: int = 3) -> list[tuple[int, float]]:
        """Return the cells of the highest probabilities of the policy, at most ``most``, highest first."""
        if self.policy is None:
            return []
        cells = np.argsort(-self.policy, kind="stable")[:most].tolist()
        return [(cell, float(self.policy[cell])) for cell in cells]

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
        blue, red = ([self._name(c) for c in np.flatnonzero(plane).tolist()] for plane in self.planes)
        return {
            "board_size": self.size,
            "blue": blue,
            "red": red,
            "player_to_move": COLOURS[self.player],
            "move": self._name(self.move),
            "last_move": self._name(self.last_move),
            "policy": None if self.policy is None else [_finite(share) for share in self.policy.tolist()],
            "winner": _colour(self.winner),
            **{name: _finite(getattr(self, name)) for name in _SAME},
            "extra": {name: _finite(number) for name, number in self.extra.items()},
        }

    def _name(self, cell: int | None) -> str | None:
        return None if cell is None else cell_name(cell, self.size)

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return f"<Position on a board of size {self.size}: {', '.join(self.facts())}>"

    def _repr_svg_(self) -> str:
        return self.svg()


def _finite(value: Any) -> Any:
    """Return a value for JSON: None for a number that is not finite."""
    return None if isinstance(value, float) and not isfinite(value) else value


def _colour(player: int | None) -> str | None:
    return None if player is None else COLOURS[player]


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
        facts: dict[str, Any] = {"winner": winner, "total_positions": len(moves) + 1}
        following = enumerate([*moves.tolist(), None])
        positions = [Position.of_moves(moves[:ply], size, move=move, **facts) for ply, move in following]
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
        # Plies may be missing, so an index is not a ply.
        for position in self.positions:
            if position.ply == ply:
                return position
        known = f"{self.positions[0].ply} to {self.last.ply}"
        name = "the game" if self.game_id is None else f"game {self.game_id}"
        raise StoreError(f"{name} has no position at that ply", found=f"ply {ply}", expected=known)

    def facts(self) -> list[str]:
        """Return the known facts as short texts, for a caption."""
        known = [
            ("game {}", self.game_id),
            ("from {}", self.source),
            ("{} moves", None if self.moves is None else len(self.moves)),
            ("{} positions", len(self.positions)),
            ("winner {}", _colour(self.winner)),
            ("end {}", None if self.end_reason == "chain" else self.end_reason),
            ("swap of {}", self.swap),
            ("split {}", self.split),
            ("duplicate of game {}", self.duplicate_of),
        ]
        return [*(text.format(value) for text, value in known if value is not None), *self.flags]

    def svg(self, *, every: int | None = None, numbers: bool = False) -> str:
        """Draw the game as a filmstrip: several small boards in one SVG.

        Args:
            every: Draw every k-th position and the last one. Default None: all positions of a game of up to
                48 positions, and about 48 of a longer one.
            numbers: Whether to number stones by the ply at which they were played, if known. Default False.

        Raises:
            ConfigError: ``every`` is less than 1.
        """
        every = ceil(len(self.positions) / _DEFAULT_FRAMES) if every is None else every
        if every < 1:
            raise ConfigError(f"every must be at least 1, not {every}")
        facts, frames = self.facts(), []
        # Every k-th position may leave out the last one, which shows the result.
        for position in dict.fromkeys((*self.positions[::every], self.last)):
            ply = "?" if position.ply is None else position.ply
            move = "" if position.last_move is None else f": {cell_name(position.last_move, self.size)}"
            diagram = position.diagram(numbers=numbers)
            # The next frame shows the next move; a policy would be too small to read.
            frames.append(replace(diagram, next_move=None, shades=None, caption=[f"ply {ply}{move}"]))
        return film_svg(frames, title=f"Hex game: {', '.join(facts)}", caption=facts)

    def to_json(self) -> dict[str, Any]:
        """Return the game as JSON values; positions are listed with their ids and the results of searches."""
        names = ("game_id", "split", "source", "provenance", "duplicate_of", "end_reason", "swap")
        positions = []
        for position in self.positions:
            strongest = {cell_name(cell, self.size): share for cell, share in position.strongest()}
            content = position.to_json() | {"policy": strongest}
            positions.append({name: content[name] for name in _LISTED})
        return {
            "board_size": self.size,
            **{name: getattr(self, name) for name in names},
            "moves": None if self.moves is None else boards.format_moves(self.moves, self.size),
            "winner": _colour(self.winner),
            "flags": list(self.flags),
            "positions": positions,
        }

    def __len__(self) -> int:
        return len(self.positions)

    def __str__(self) -> str:
        return self.last.text()

    def __repr__(self) -> str:
        return f"<Game on a board of size {self.size}: {', '.join(self.facts())}>"

    def _repr_svg_(self) -> str:
        return self.svg()


_NAMES: Final = {name: name for name in Position.__dataclass_fields__} | {"position_in_game": "ply"}
"""Attribute of a position by its name here or in a batch."""
