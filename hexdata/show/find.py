"""Positions and games of a store, a shard or TRMPH text: the arguments of ``hexdata show``.

Of a store, single row groups are read; of a shard, the blocks up to the position. A shard needs neither its
store nor its manifest.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hexdata import board as boards
from hexdata.board import BLUE, PASS, RED
from hexdata.checks import as_int, check_fields, check_suffix
from hexdata.errors import ConfigError, StoreError
from hexdata.extras import installed_by
from hexdata.policy import SparsePolicies
from hexdata.schema import EXTRA_PREFIX, POLICY_TYPE, TARGETS, WINNERS, positions_schema, table_schema
from hexdata.shards.block_check import check_block
from hexdata.shards.blocks import members_to_block, row_fields
from hexdata.shards.format import read_blocks
from hexdata.shards.reader import load_manifest
from hexdata.shards.sources import altered_shard_error, make_source
from hexdata.show.position import Game, Policy, Position
from hexdata.storage import AnyPath, as_path, is_address, translate_errors
from hexdata.storage.errors import VERIFY_HINT
from hexdata.store import Store
from hexdata.store.files import digest_file, write_bytes
from hexdata.store.integrity import intact_rows, require_intact_once
from hexdata.store.parquet import collect, open_parquet, read_batches, read_rows

Row = dict[str, Any]
_WINNERS: Final = {name: player for player, name in enumerate(WINNERS)}
_SHARD: Final = re.compile(r".*\.tar(:[0-9]+)?", re.DOTALL)
_STYLE: Final = re.compile("<style>.*?</style>", re.DOTALL)


@dataclass(frozen=True)
class ShowOptions:
    """Options of :func:`find` and :func:`draw_svg`.

    Attributes:
        position: Id of a position in a store. Default None.
        game: Id of a game in a store. Default None.
        ply: Number of moves made in the game at the position. Default None: the whole game.
        every: In a filmstrip, show every k-th position and the last one. Default None: about 48 positions.
        numbers: Whether to number stones by the ply at which they were played. Default False.

    Raises:
        ConfigError: A number is out of range.
    """

    position: int | None = None
    game: int | None = None
    ply: int | None = None
    every: int | None = None
    numbers: bool = False

    def __post_init__(self) -> None:
        check_fields(self, {"position": 0, "game": 0, "ply": 0, "every": 1})
        if self.position is not None and (self.game is not None or self.ply is not None):
            raise ConfigError("choose a position by its id, or by game and ply, not both")
        if self.every is not None and self.ply is not None:
            raise ConfigError("every and ply exclude each other: a filmstrip shows a whole game")


def find(location: str, options: ShowOptions | None = None) -> Position | Game:
    """Return a position, or a game if no ply is given.

    Args:
        location: Path or address of a store; ``SHARD.tar:17`` for the position with index 17 of a shard; or a
            game as TRMPH text or URL.
        options: The position or game to find. Default None: no option is set.

    Raises:
        ConfigError: An option is missing, or does not apply to this kind of location.
        StoreError: There is no such position, game or store.
        FormatError: The text or the shard is damaged.
    """
    options = options or ShowOptions()
    found: Position | Game
    if (kind := _kind(location)) == "a game's text":
        _refuse(location, kind, options, "position", "game")
        found = read_trmph(location)
    elif kind == "a shard":
        # A shard is read without its store, so games and ids of the store do not apply.
        _refuse(location, kind, options, "position", "game", "ply", "every")
        path, _, number = location.rpartition(":")
        if not number.isdecimal():
            raise ConfigError("no position of the shard is given", path=location, expected=f"{location}:17")
        found = read_shard_position(path, int(number))
    elif options.game is not None:
        found = read_game(location, options.game)
    elif options.position is not None:
        _refuse(location, "a single position", options, "every")
        found = read_position(location, options.position)
    else:
        positions = Store.open(location).manifest.counts.get("positions", 0)
        expected = f"a position from 0 to {positions - 1}" if positions else "a store with positions"
        raise ConfigError("no position or --game is given", path=location, expected=expected)
    return found.at(options.ply) if isinstance(found, Game) and options.ply is not None else found


def read_trmph(text: str) -> Game:
    """Parse a game such as ``#13,a1b2c3``, or a URL that ends with it, optionally with a winner:
    ``#13,a1b2c3 b``.

    Without a stated winner, the winner is the player with a winning chain in the final position, if any.

    Raises:
        FormatError: "trmph-syntax", "board-size", "trmph-cell" or "repeated-move".
    """
    line = boards.split_trmph(text)
    moves = boards.parse_moves(line.moves, line.board_size)
    boards.check_no_repeats(moves, line.board_size)
    winner = line.winner
    if winner is None:
        chain = int(boards.winner_of(boards.replay(moves, line.board_size)[-1:])[0])
        winner = chain if chain >= 0 else None
    return Game.of_moves(moves, line.board_size, winner)


def _kind(location: str) -> str:
    """Return what a location is: "a game's text", "a shard" or "a store"."""
    if re.match(r"\s*(?:#|https?://)", location):
        return "a game's text"
    # The folder of a store may be called data.tar.
    return "a shard" if _SHARD.fullmatch(location) and not Path(location).is_dir() else "a store"


def _refuse(location: str, what: str, options: ShowOptions, *names: str) -> None:
    """Raise a ConfigError if one of these options is set."""
    for name in names:
        if (value := getattr(options, name)) is not None and value is not False:
            raise ConfigError(f"{name} does not apply to {what}", path=location, found=value)


# --- stores -------------------------------------------------------------------------------------------


def read_position(store: str | AnyPath, position_id: int) -> Position:
    """Read one position of a store. Reads one row group of positions and one of games.

    Args:
        store: Path or address of the store.
        position_id: Id of the position, from 0.

    Raises:
        ConfigError: The id is not an integer.
        StoreError: The position or the store does not exist, the store is damaged, or the disk fails.
    """
    opened = Store.open(store)
    with translate_errors(opened.path):
        return find_position(opened, position_id)


def find_position(opened: Store, position_id: int) -> Position:
    """Return one position of an open store, as :func:`read_position` does."""
    row = read_row(opened, "positions", position_id)
    position = position_of_row(row, opened.manifest.board_size or 0)
    if position.game_id is None:
        return position
    return _with_moves(position, read_row(opened, "games", position.game_id))


def read_game(store: str | AnyPath, game_id: int) -> Game:
    """Read one game of a store with all of its positions in the store, sorted by ply.

    Only row groups whose statistics include the game are read.

    Args:
        store: Path or address of the store.
        game_id: Id of the game, from 0.

    Raises:
        ConfigError: The id is not an integer.
        StoreError: The game or the store does not exist, the store is damaged, or the disk fails.
    """
    opened = Store.open(store)
    with translate_errors(opened.path):
        game = read_row(opened, "games", game_id)
        schema = positions_schema(opened.manifest.board_size or 0, opened.manifest.targets)
        rows: list[Row] = []
        for name, path in zip(opened.manifest.files_in("positions"), opened.files("positions"), strict=True):
            with open_parquet(path, schema) as file:
                column, start = file.schema_arrow.get_field_index("game_id"), 0
                for group in map(file.metadata.row_group, range(file.num_row_groups)):
                    found, stop = group.column(column).statistics, start + group.num_rows
                    # A row group without statistics may have the game. One without minimum and maximum has
                    # nulls only.
                    if found is None or (found.has_min_max and found.min <= game_id <= found.max):
                        # Only files that are read are compared with their digests.
                        require_intact_once(opened, [name])
                        for batch in read_batches(file, schema, start=start, stop=stop):
                            rows += batch.filter(pc.equal(batch["game_id"], game_id)).to_pylist()
                    start = stop
        return game_of_rows(opened, game, rows)


def game_of_rows(opened: Store, game: Row, rows: list[Row]) -> Game:
    """Return the game with these rows of its positions, in any order.

    Args:
        opened: The store.
        game: Row of the game.
        rows: Rows of its positions.

    Raises:
        StoreError: There are no rows, or fewer or more than the row of the game says.
    """
    game_id, size = game["game_id"], opened.manifest.board_size or 0
    if not rows or len(rows) != game["positions"]:  # damaged statistics hide row groups
        fault, found = f"positions of game {game_id} are missing", f"{len(rows)} positions"
        raise StoreError(fault, path=opened.path, found=found, expected=game["positions"], hint=VERIFY_HINT)
    rows.sort(key=lambda row: (row["position_in_game"] is None, row["position_in_game"], row["position_id"]))
    positions = [_with_moves(position_of_row(row, size), game) for row in rows]
    for index, (before, position) in enumerate(pairwise(positions), start=1):
        if position.last_move is None and before.move is not None:  # a move that leads to the next board
            planes = before.planes.copy()
            planes[before.player].flat[before.move] = 1
            if not np.array_equal(planes, before.planes) and np.array_equal(planes, position.planes):
                positions[index] = replace(position, last_move=before.move)
    same = ("split", "provenance", "duplicate_of", "end_reason", "swap")
    return Game(
        positions,
        game_id=game_id,
        moves=None if game["moves"] is None else np.array(game["moves"], dtype=np.uint16),
        winner=_WINNERS.get(game["winner"]),
        source=read_row(opened, "sources", game["source_id"])["name"],
        flags=game["flags"] or (),
        **{name: game[name] for name in same},
    )


def read_row(store: Store, table: str, number: int) -> Row:
    """Return row ``number`` of a table whose id counts rows from 0.

    Raises:
        ConfigError: The number is not an integer.
        StoreError: There is no such row, or it is damaged.
    """
    manifest, kind = store.manifest, table.removesuffix("s")
    if as_int(number) is None:
        raise ConfigError(f"{kind}_id must be an integer, not {number!r}")
    count = manifest.counts.get(table, 0)
    if not 0 <= number < count:
        expected = f"0 to {count - 1}" if count else f"none, as it has no {table}"
        absent = f"the store has no such {kind}"
        raise StoreError(absent, path=store.path, found=f"{kind} {number}", expected=expected)
    rows = intact_rows(store, table, number, number + 1)
    schema = table_schema(table, manifest.board_size, manifest.targets)
    # An object may have fewer rows than the manifest says.
    row: Row = next(iter(collect(read_rows(rows, schema), schema).to_pylist()), {})
    fault = None if row.get(f"{kind}_id") == number else "another id than that of its row"
    cells = (manifest.board_size or 0) ** 2
    if any(move is None or (move >= cells and move != PASS) for move in row.get("moves") or ()):
        fault = "a move that is not on the board"
    if (row.get("move") or 0) >= cells > 0:
        fault = "a next move that is not on the board"
    for name in ("first_player", "player_to_move"):
        if row.get(name) not in (None, BLUE, RED):
            fault = f"an unknown player as {name}: {row[name]}"
    if fault:
        raise StoreError(f"{kind} {number} has {fault}", path=store.path, hint=VERIFY_HINT)
    return row


def position_of_row(row: Row, size: int) -> Position:
    """Return the position of a row of the table."""
    policy: Policy | None = None
    if row["policy"] is not None:
        _, policies = SparsePolicies.from_arrow(pa.array([row["policy"]], POLICY_TYPE), size * size)
        policy = policies.to_dense(size * size)[0]
    extra = {name.removeprefix(EXTRA_PREFIX): row[name] for name in row if name.startswith(EXTRA_PREFIX)}
    return Position(
        boards.unpack_boards(np.frombuffer(row["board"], np.uint8)[None], size, np.uint8)[0],
        row["player_to_move"],
        row["move"],
        policy,
        winner=_WINNERS.get(row["winner"]),
        ply=row["position_in_game"],
        extra=extra,
        **{name: row.get(name) for name in (*_SAME, *TARGETS)},
    )


_SAME: Final = ("value", "value_sample_tier", "position_id", "game_id", "total_positions", "metadata")
"""Columns of the table that are attributes of a position."""


def _with_moves(position: Position, game: Row) -> Position:
    """Add the moves of the game to a position if they are known and lead to its stones."""
    ply, moves = position.ply, game["moves"]
    if ply is None or moves is None or len(moves) < ply or len({*moves[:ply]}) < ply:
        return position
    played = np.array(moves[:ply], np.uint16)
    replayed = boards.replay(played, position.size, game["first_player"] or BLUE)[-1]
    return replace(position, played=played) if np.array_equal(replayed, position.planes) else position


# --- shards -------------------------------------------------------------------------------------------


def read_shard_position(path: str | AnyPath, number: int) -> Position:
    """Read one position of a shard, counted from 0 in the shard's order.

    The shard is read and checked from its beginning up to that position, and no further. If the
    ``manifest.json`` in the folder of a local shard lists it, the size and the digest of the whole file are
    compared first.

    Raises:
        StoreError: The shard differs from the manifest or has fewer positions, or the disk fails.
        FormatError: It is truncated or altered, or no shard of hexdata's.
    """
    first = 0
    with translate_errors(as_path(path)):
        if not is_address(path):
            _require_unchanged(as_path(path))
        for key, block in read_blocks(path):
            # The shard may be from a stranger, so blocks before the position are checked as well.
            size = check_block(block, path, key)
            row, first = number - first, first + len(block["move"])
            if number < first:
                block = members_to_block(block, size * size)
                policies = list(block["policy"][block["policy_row"] == row]) if "policy" in block else []
                facts: dict[str, Any] = {name: block[name][row] for name in row_fields(block)}
                return Position.of_planes(policy=policies[0] if policies else None, **facts)
    expected = f"0 to {first - 1}" if first else "none, as it is empty"
    fault, found = "the shard has no such position", f"position {number}"
    raise StoreError(fault, path=path, found=found, expected=expected)


def _require_unchanged(path: AnyPath) -> None:
    """Compare a shard with its entry in the manifest beside it, if there is one."""
    try:
        shards = itertools.chain(*load_manifest(make_source(path.parent)).splits.values())
        listed = {shard.name: shard for shard in shards}.get(path.name)
        size, digest = (0, "") if listed is None else digest_file(path)
    except (StoreError, OSError):  # no manifest of hexdata, or no shard, which the caller reports
        return
    if listed is not None and (listed.bytes, listed.sha256) != (size, digest):
        raise altered_shard_error(str(path), f"SHA-256 {digest}, {size} bytes", listed.sha256)


# --- drawings -----------------------------------------------------------------------------------------


def draw_svg(found: Position | Game, options: ShowOptions) -> str:
    """Return the SVG of a position as a board, or of a game as a filmstrip."""
    if isinstance(found, Game):
        return found.svg(every=options.every, numbers=options.numbers)
    return found.svg(numbers=options.numbers)


def write_svg(path: str | AnyPath, svg: str) -> None:
    """Write a drawing to a file or address, atomically.

    Raises:
        ConfigError: The name does not end in .svg.
        BudgetError: The disk is full.
        OSError: The file cannot be written.
    """
    path = as_path(path)
    check_suffix(path, "an SVG drawing (--svg)", [".svg"])
    with translate_errors(path):
        write_bytes(path, svg.encode("utf-8"))


def write_png(path: str | AnyPath, svg: str, *, scale: float = 2.0) -> None:
    """Write a drawing as an image with a white background to a file or address, atomically.

    Args:
        path: The file, whose name ends in .png.
        svg: The drawing, as ``draw_svg`` returns it.
        scale: Pixels of the image per pixel of the SVG. Default 2.

    Raises:
        ConfigError: The name does not end in .png, or the extra ``png`` is not installed.
        BudgetError: The disk is full.
        OSError: The file cannot be written.
    """
    path = as_path(path)
    check_suffix(path, "a PNG image (--png)", [".png"])
    with installed_by("png", "a drawing as PNG"):
        import resvg_py
    plain = _STYLE.sub("", svg)  # resvg has no CSS variables; the colours are also attributes
    with translate_errors(path):
        write_bytes(path, bytes(resvg_py.svg_to_bytes(svg_string=plain, zoom=scale, background="white")))
