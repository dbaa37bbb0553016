"""Games found from boards alone: exactly the played games that can be distinguished."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import chain, product

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hexdata.board import replay_packed
from hexdata.convert import chains
from hexdata.convert.chains import resolve_chains
from hexdata.convert.spool import Spool, write_arrow
from hexdata.demo.games import DemoGame
from hexdata.formats.legacy import LegacyReader
from hexdata.formats.legacy.writer import write_legacy
from hexdata.games.evidence import findings_schema
from hexdata.games.find import GAMES
from hexdata.order import derive_key, sort_key
from tests.demo_games import demo_games
from tests.pairs import FULL

MEMORY = 500_000_000


def game(*moves: int, winner: int = 0) -> DemoGame:
    return DemoGame(np.array(moves, dtype=np.uint16), winner)


def key(played: DemoGame) -> tuple[tuple[int, ...], int]:
    return tuple(played.moves.tolist()), played.winner


def positions(games: list[DemoGame], n: int = 3, first_player: int = 0, tuples: bool = False) -> pa.Table:
    """Return positions of games in the schema of a spool, one game after the other, numbered."""
    lengths = np.array([len(g.moves) for g in games])
    boards = replay_packed(np.concatenate([g.moves for g in games]), lengths, n, first_player)
    total = np.repeat(lengths + 1, lengths + 1)
    ply = np.concatenate([np.arange(length + 1) for length in lengths])
    winner = np.repeat([g.winner for g in games], lengths + 1)
    columns = {
        "record": np.arange(len(ply)),
        "board": [board.tobytes() for board in boards],
        "move": list(chain.from_iterable([*g.moves.tolist(), None] for g in games)),
        "value": winner.astype(float),
        "findings": np.zeros(len(ply), np.uint16),
    }
    if not tuples:
        columns |= {"position_in_game": ply, "total_positions": total, "winner": winner}
        columns |= {"player_to_move": (ply + first_player) % 2}
    schema = findings_schema(n)
    arrays = {
        f.name: pa.array(columns[f.name]).cast(f.type) if f.name in columns else pa.nulls(len(ply), f.type)
        for f in schema
    }
    return pa.table(arrays, schema=schema)


def without(table: pa.Table, *records: int) -> pa.Table:
    return table.filter(pc.invert(pc.is_in(table["record"], pa.array(records, pa.int64()))))


def changed(table: pa.Table, record: int, **values) -> pa.Table:
    """Return the positions with other values in one of them."""
    for name, value in values.items():
        field = table.schema.field(name)
        column = pc.if_else(pc.equal(table["record"], record), pa.scalar(value, field.type), table[name])
        table = table.set_column(table.schema.get_field_index(name), field, column)
    return table


class Collection:
    """Positions in spools, shuffled over several files, and the games found in them."""

    def __init__(self, folder, table: pa.Table, n: int = 3, files: int = 2, seed: int | None = 0) -> None:
        self.n = n
        order = np.arange(len(table))
        if seed is not None:
            order = np.argsort(sort_key(order, derive_key(seed, "test")))
        parts = [part for part in np.array_split(order, files) if len(part)]
        self.spools = [Spool(folder / f"{i}") for i in range(len(parts))]
        self.tables = [table.take(pa.array(part)) for part in parts]
        for spool, part in zip(self.spools, self.tables, strict=True):
            spool.folder.mkdir(parents=True, exist_ok=True)
            with write_arrow(spool.folder / "raw.arrow", table.schema) as writer:
                writer.write_table(part, max_chunksize=7000)

    def resolve(self, threads: int = 1) -> Counter:
        """Find the games, check the written tables, and count the games by moves and winner."""
        count = resolve_chains(self.spools, self.n, memory=MEMORY, threads=threads)
        self.games = pa.Table.from_batches(self.spools[0].batches("games"), GAMES).to_pylist()
        self.rows = pa.concat_tables(pa.Table.from_batches(s.batches("rows")) for s in self.spools)
        assert len(self.games) == count
        self.check_rows()
        assert not (self.spools[0].folder / "chains").exists()
        winners = [g["value"] if g["winner"] is None else g["winner"] for g in self.games]
        return Counter((tuple(g["moves"]), int(w)) for g, w in zip(self.games, winners, strict=True))

    def check_rows(self) -> None:
        """Check that every game has exactly its own positions."""
        raw = pa.concat_tables(self.tables)
        assert len(self.rows) == len(raw)
        number = self.rows["game"].fill_null(-1).to_numpy()
        for index, found in enumerate(self.games):
            own = self.rows.filter(pa.array(number == index))
            order = pc.sort_indices(own["ply"])
            own, boards = own.take(order), raw.filter(pa.array(number == index)).take(order)["board"]
            moves = np.array(found["moves"], dtype=np.uint16)
            replayed = replay_packed(moves, np.array([len(moves)]), self.n, found["first_player"])
            assert boards.to_pylist() == [board.tobytes() for board in replayed]
            assert own["ply"].to_pylist() == list(range(len(moves) + 1))
            assert set(own["total"].to_pylist()) == {len(moves) + 1} == {found["total_positions"]}
            assert own["player"].to_pylist() == [(p + found["first_player"]) % 2 for p in range(len(own))]
            assert (found["provenance"], found["positions"]) == ("recovered", len(own))
            assert found["file_idx"] is found["line_idx"] is None


def certain(games: list[DemoGame], lengths_known: bool = True) -> Counter:
    """Count the games that can be distinguished by their boards, with a plain algorithm.

    A game is lost if two pasts and two futures meet at one of its boards, within its class.
    """
    pasts, futures = defaultdict(set), defaultdict(set)

    def passed(played: DemoGame):
        moves, winner = key(played)
        for ply in range(len(moves) + 1):
            board = frozenset(moves[:ply:2]), frozenset(moves[1:ply:2])
            yield (board, winner, len(moves) if lengths_known else None), moves[:ply], moves[ply:]

    for played in games:
        for board, past, future in passed(played):
            pasts[board].add(past)
            futures[board].add(future)
    return Counter(
        key(played)
        for played in games
        if all(len(pasts[board]) == 1 or len(futures[board]) == 1 for board, _, _ in passed(played))
    )


# Games that are found


@st.composite
def crossing_games(draw) -> list[DemoGame]:
    """Return games on a few cells of a small board, which cross very often; some are copies."""
    cells = draw(st.permutations(range(9)))[: draw(st.integers(1, 6))]
    orders = st.tuples(
        st.permutations(cells), st.integers(1, len(cells)) | st.just(len(cells)), st.integers(0, 3)
    )
    drawn = draw(st.lists(orders, min_size=1, max_size=14))
    return [game(*order[:length], winner=int(winner == 0)) for order, length, winner in drawn]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(games=crossing_games(), tuples=st.booleans())
def test_exactly_the_distinguishable_games_are_found(tmp_path_factory, games, tuples):
    collection = Collection(tmp_path_factory.mktemp("crossing"), positions(games, tuples=tuples))
    assert collection.resolve() == certain(games, not tuples)


CROSS = [game(0, 1, 2, 3, 4), game(2, 1, 0, 5, 6)]
"""Two games that reach the same board at ply 3 and then diverge: positions 0 to 5 and 6 to 11."""


def test_only_games_that_cross_are_unknown(tmp_path):
    bystander = game(8, 7, 6, 5, 4)
    collection = Collection(tmp_path, positions([*CROSS, bystander]))
    assert collection.resolve() == Counter([key(bystander)])
    assert collection.rows["game"].null_count == 12
    assert (
        collection.rows["ply"].null_count == collection.rows["total"].null_count == 0
    )  # as the metadata says


def test_games_that_meet_and_stay_together_are_found(tmp_path):
    games = [game(0, 1, 2, 3, 4), game(2, 1, 0, 3, 4), game(2, 1, 0, 3, 4)]
    assert Collection(tmp_path, positions(games)).resolve() == Counter(map(key, games))


@pytest.mark.parametrize(
    ("column", "values"),
    [("origin", ["a", "b"]), ("winner", [0, 1]), ("total_positions", [6, 7])],
)
def test_values_that_differ_between_games_distinguish_them(tmp_path, column, values):
    games = [CROSS[0], game(2, 1, 0, 5, 6, 7) if column == "total_positions" else CROSS[1]]
    table = positions(games)
    field = table.schema.field(column)
    own = pa.array([values[0]] * 6 + [values[1]] * (len(table) - 6), field.type)
    table = table.set_column(table.schema.get_field_index(column), field, own)
    collection = Collection(tmp_path, table)
    collection.resolve()
    found = {tuple(g["moves"]): g[column] for g in collection.games}
    assert found == {key(g)[0]: value for g, value in zip(games, values, strict=True)}


def test_each_copy_of_a_game_is_found(tmp_path):
    games = [game(0, 1, 2, 3, 4)] * 3 + [game(0, 1, 5, 3, 4)] * 2
    collection = Collection(tmp_path, positions(games), files=4)
    assert collection.resolve() == Counter(map(key, games))


def test_the_number_of_copies_found_is_the_smallest_number_at_any_ply(tmp_path):
    table = positions([game(0, 1, 2, 3, 4)] * 3)
    assert Collection(tmp_path, without(table, 0, 9), seed=None).resolve().total() == 2


def test_a_game_that_red_began_is_found_where_the_player_is_named(tmp_path):
    table = positions([game(0, 1, 2, 3, 4)], first_player=1)
    collection = Collection(tmp_path, table)
    assert collection.resolve().total() == 1
    assert collection.games[0]["first_player"] == 1
    nameless = table.set_column(
        table.schema.get_field_index("player_to_move"), "player_to_move", pa.nulls(6, pa.uint8())
    )
    assert Collection(tmp_path / "nameless", nameless).resolve().total() == 0


# Missing and contradicting positions


@pytest.mark.parametrize("record", range(6))
def test_a_game_without_one_of_its_positions_is_unknown(tmp_path, record):
    games = [game(0, 1, 2, 3, 4), game(0, 1, 8, 3, 4), game(5, 6, 7, 8, 0)]
    found = Collection(tmp_path, without(positions(games), record)).resolve()
    # Without its empty board, the first game may have that of the second: they cannot be distinguished.
    lost = 1
    assert found.total() == len(games) - lost
    assert not found - Counter(map(key, games))
    assert found[key(games[2])] == 1


@pytest.mark.parametrize("missing", list(product([2, 3, 4], [8, 9, 10])))
def test_two_missing_positions_never_make_a_game_that_was_not_played(tmp_path, missing):
    assert Collection(tmp_path, without(positions(CROSS), *missing)).resolve() == Counter()


def test_two_missing_positions_among_many_incomplete_games(tmp_path):
    broken = [game(8, 7, 6, 5, 4), game(7, 8, 4, 5, 6), game(3, 0, 4, 1, 7)]
    table = without(positions([*CROSS, *broken]), 3, 8, 15, 21, 27)
    assert Collection(tmp_path, table).resolve() == Counter()


def test_a_position_shared_by_two_pasts_belongs_to_neither(tmp_path):
    games = [game(0, 1, 2, 3, 4), game(2, 1, 0, 3, 4)]
    assert Collection(tmp_path, without(positions(games), 3)).resolve() == Counter()


@pytest.mark.parametrize(
    "wrong",
    [
        {"winner": 1},
        {"total_positions": 7},
        {"position_in_game": 3},
        {"move": 8},
        {"move": 0},
        {"player_to_move": 1},
    ],
    ids=str,
)
def test_a_contradicting_position_affects_only_its_own_game(tmp_path, wrong):
    games = [game(0, 1, 2, 3, 4), game(5, 6, 7, 8, 0)]
    assert Collection(tmp_path, changed(positions(games), 2, **wrong)).resolve() == Counter([key(games[1])])


def test_positions_with_an_id_are_not_followed(tmp_path):
    games = [game(0, 1, 2, 3, 4), game(5, 6, 7, 8, 0)]
    table = changed(positions(games), 0, line_idx=3)
    assert Collection(tmp_path, table).resolve() == Counter([key(games[1])])


def test_no_games_are_found_without_positions_to_follow(tmp_path):
    table = without(positions(CROSS), 0, 6)
    assert Collection(tmp_path, table).resolve() == Counter()


@pytest.mark.parametrize("equal", [False, True])
def test_a_chain_joined_by_a_hash_collision_is_not_a_game(tmp_path, monkeypatch, equal):
    one, other = 9 + 1, 9 + 7  # red stones on b1 and on b3
    if equal:
        monkeypatch.setattr(
            "hexdata.convert.nodes.sort_key", lambda ids, key: sort_key(np.where(ids == other, one, ids), key)
        )
    games = [game(0, 1, 2, 3, 4), game(0, 7, 2, 3, 4)]
    crosswise = [0, 1, 6, 7, 8, 2, 3, 4, 5, 9, 10, 11]  # apparent copies, assigned in the order of their rows
    found = Collection(tmp_path, positions(games).take(crosswise), seed=None).resolve()
    assert found == (Counter() if equal else Counter(map(key, games)))


# Little memory and any order of positions


def test_the_result_depends_only_on_the_order_of_positions(tmp_path, monkeypatch):
    games = [*demo_games(30, seed=4, board_size=5), *demo_games(10, seed=4, board_size=5)]
    table = positions(games, 5)
    one = Collection(tmp_path / "one", table, 5)
    found = one.resolve()
    again = Collection(tmp_path / "again", table, 5)
    monkeypatch.setattr(chains, "MOVE_BYTES", MEMORY // 50)  # a few games are proved at a time
    monkeypatch.setattr(chains, "BATCH_ROWS", 64)
    monkeypatch.setattr(chains, "BATCH_GAMES", 3)
    assert again.resolve(threads=2) == found
    assert (again.games, again.rows) == (one.games, one.rows)
    other = Collection(tmp_path / "other", table, 5, files=5, seed=1)
    assert other.resolve() == found


# From pickles to the store


def write_shuffled(folder, table: pa.Table, n: int, files: int, dialect: str = "dicts-player"):
    """Write positions as the files of one shuffle; return their folder."""
    folder.mkdir(parents=True)
    order = np.argsort(sort_key(np.arange(len(table)), derive_key(0, "files")))
    for number, part in enumerate(np.array_split(order, files)):
        stats = {"num_buckets": files, "bucket_id": number, "source_files": ["a", "b"]}
        write_legacy(
            folder / f"shuffled_{number:04d}.pkl.gz",
            table.take(pa.array(part)).combine_chunks().to_batches(),
            board_size=n,
            dialect=dialect,
            header={"shuffling_stats": stats},
            level=1,
        )
    return folder


@pytest.mark.parametrize("dialect", ["dicts-player", "tuples"])
def test_the_games_of_the_demo_are_found_without_ids(tmp_path, convert, dialect):
    games = demo_games(80 if FULL else 30, seed=7)
    table = positions(games, 13)
    if dialect == "tuples":  # in tuples, 1.0 means that blue won
        values = pc.subtract(1.0, table["value"])
        table = table.set_column(table.schema.get_field_index("value"), "value", values)
    store = convert(write_shuffled(tmp_path / "shuffled", table, 13, 3, dialect))
    truth = certain(games, dialect != "tuples")
    winners = ["BLUE", "RED"]
    assert Counter((tuple(g["moves"]), winners.index(g["winner"])) for g in store.games()) == truth
    assert truth.total() > 0.95 * len(games)
    assert {(g["provenance"], g["source_id"]) for g in store.games()} == {("recovered", 0)}
    lengths = Counter(row["game_id"] for row in store.rows("positions") if row["game_id"] is not None)
    assert lengths == {g["game_id"]: len(g["moves"]) + 1 for g in store.games()}


def test_ids_are_used_first_and_boards_for_the_rest(tmp_path, convert):
    games = demo_games(40, seed=3, board_size=7)
    table = positions(games, 7)
    numbers = np.repeat(np.arange(len(games)), [len(g.moves) + 1 for g in games])
    for name in ("file_idx", "line_idx"):
        field = table.schema.field(name)
        ids = pa.array(numbers, field.type, mask=numbers % 2 == 0)
        table = table.set_column(table.schema.get_field_index(name), field, ids)
    store = convert(write_shuffled(tmp_path / "shuffled", table, 7, 2))
    assert [g["provenance"] for g in store.games()] == ["metadata"] * 20 + ["recovered"] * 20
    assert Counter(tuple(g["moves"]) for g in store.games()) == Counter(key(g)[0] for g in games)
    assert store.table("positions")["game_id"].null_count == 0


def test_shuffles_without_ids_are_searched_together(tmp_path, convert):
    table = positions(demo_games(20, seed=3, board_size=5), 5)
    half = len(table) // 2
    folders = [
        write_shuffled(tmp_path / "in" / name, part, 5, files=1)
        for name, part in (("a", table.slice(0, half)), ("b", table.slice(half)))
    ]
    assert convert(folders[0], store="one").result.games < 20
    assert convert(*folders, store="both").result.games == 20


def test_the_real_shuffle_has_the_same_games_without_ids(real_data, tmp_path, convert):
    with_ids = real_data / "legacy/variants/shuffled-2025-09-08"
    stripped = tmp_path / "stripped"
    stripped.mkdir()
    for path in sorted(with_ids.iterdir()):
        with LegacyReader(path) as reader:
            batches = [batch.positions for batch in reader.batches()]
            header = reader.header
        for name in ("file_idx", "line_idx"):
            batches = [
                b.set_column(
                    b.schema.get_field_index(name), b.schema.field(name), pa.nulls(len(b), pa.int32())
                )
                for b in batches
            ]
        write_legacy(stripped / path.name, batches, board_size=13, dialect="dicts-player", header=header)
    one, other = convert(with_ids, store="with ids"), convert(stripped, store="without")
    assert Counter(map(bytes, other.content())) == Counter(map(bytes, one.content()))
    assert other.content() == one.content()
    assert len(one.games()) == len(other.games()) == 26
