"""The server of ``hexdata browse``: its answers, its errors, and what it refuses."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pytest

from hexdata.board import PASS, Symmetry, cell_name, parse_moves, symmetry_table
from hexdata.browse import BrowseOptions, library, serving
from hexdata.browse.openings import Openings
from hexdata.errors import ConfigError
from hexdata.games.findings import Flag
from hexdata.loader import Loader
from hexdata.schema import table_schema
from hexdata.show import read_game, read_position
from hexdata.sql import run_query
from hexdata.store import Store
from hexdata.store.parquet import ParquetRows, write_parquet
from tests.pages.conftest import SIZE, Page
from tests.verify.altered import Altered

if TYPE_CHECKING:
    from tests.conftest import CopyStore

pytest.importorskip("uvicorn")


def ask(store: Path, query: str) -> list[tuple[object, ...]]:
    with run_query(store, query) as result:
        return [tuple(row.values()) for batch in result.batches for row in batch.to_pylist()]


# --- refusals -------------------------------------------------------------------------------------------


def test_only_this_machine_and_its_own_page_read_data(page: Page) -> None:
    port = page.address.rsplit(":", 1)[1].strip("/")
    names = ("evil.example", "127.0.0.1.evil.example:{}", "", "[::2]:{}", "127.0.0.1", "127.0.0.1:1")
    for host in (*names, "localhost:", "localhost:{}.evil.example", "127.0.0.1:{}:{}"):
        for path in ("", "api/store", "board.svg"):
            assert page.request(path, headers={"Host": host.format(port, port)})[0] == 403, host
    for host in ("localhost:{}", "LOCALHOST:{}", "127.0.0.1:{}", "[::1]:{}"):
        assert page.request("api/store", headers={"Host": host.format(port)})[0] == 200, host
    for site in ("cross-site", "same-site"):  # another site can open the page, which has no data
        elsewhere = {"Sec-Fetch-Site": site}
        assert page.request("api/store", headers=elsewhere)[0] == 403
        assert page.request("", headers=elsewhere)[0] == 200


def test_the_page_is_closed_and_loads_nothing_from_elsewhere(page: Page) -> None:
    for path in ("", "browse.js", "browse.css", "api/store", "nothing"):
        _, headers, _ = page.request(path)
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert not {"unsafe", "http"} & set(policy.replace("'unsafe-", "unsafe ").split())
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Access-Control-Allow-Origin"] is None
    _, _, html = page.request("")
    assert b"http" not in html.replace(b"http-equiv", b"")
    assert b"style=" not in html
    assert b"<script src=" in html


@pytest.mark.parametrize(
    ("path", "facts", "message"),
    [
        ("api/game", {"game": "-1"}, "a whole number from 0"),
        ("api/game", {"game": "1" * 30}, "a whole number from 0"),
        ("api/game", {}, "game cannot be used"),
        ("api/game", {"game": 45}, "the store has no such game"),
        ("api/position", {"position": 10**9}, "the store has no such position"),
        ("api/list", {"table": "sqlite_master"}, "expected 'games' or 'positions'"),
        ("api/list", {"filter": "true) UNION (SELECT 1, 2 WHERE (true"}, ""),
        ("api/list", {"filter": "true) OR (SELECT 1, 2) = (1"}, ""),
        ("api/list", {"filter": "true) UNION SELECT (1"}, ""),
        ("api/openings", {"moves": "a1a1"}, "already played"),
        ("api/openings", {"moves": "z9"}, "no such cell"),
        ("api/batch", {"order": "after", "start": 10**6}, "no positions at index 1,000,000"),
        ("api/batch", {"order": "sideways"}, "expected 'loader' or 'before' or 'after'"),
    ],
)
def test_wrong_requests_are_named(page: Page, path: str, facts: dict[str, object], message: str) -> None:
    assert message in " ".join(page.errors(path, **facts))


def test_an_unexpected_error_is_shown_on_the_page(page: Page, monkeypatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise IndexError("out of bounds")

    monkeypatch.setattr("hexdata.browse.app.page_svg", fail)
    status, headers, body = page.request("api/position", position=0)
    assert (status, headers["Content-Type"]) == (500, "application/json")
    (line,) = json.loads(body)["error"]
    assert "IndexError('out of bounds')" in line
    assert "hexdata verify" in line


# --- lists ----------------------------------------------------------------------------------------------


def test_a_list_without_a_filter_is_the_table(page: Page, browsed_store: Path) -> None:
    first = page.get("api/list", table="games", count=10)
    assert (first["found"], first["complete"]) == (45, True)
    columns = "game_id, len(moves), lower(winner), split, duplicate_of, [cell(m) FOR m IN moves[:6]]"
    names = ("game", "moves", "winner", "split", "duplicate_of", "opening")
    found = [tuple(row[name] for name in names) for row in first["rows"]]
    assert found == ask(browsed_store, f"SELECT {columns} FROM games LIMIT 10")
    last = page.get("api/list", table="games", start=40, count=10)
    assert [row["game"] for row in last["rows"]] == [40, 41, 42, 43, 44]


@pytest.mark.parametrize(
    ("table", "condition"),
    [
        ("games", "winner = 'RED' AND len(moves) > 12"),
        ("games", "game_id IN (SELECT game_id FROM positions WHERE value = 1) -- a comment"),
        ("positions", "stones(board) < 2 AND positions.value = 0"),
        ("positions", "false"),
        ("games", "nope = 3"),
        ("games", "1; DROP TABLE games"),
        ("games", "game_id IN (SELECT a FROM read_csv('/etc/passwd'))"),
    ],
)
def test_a_filter_is_a_condition_of_hexdata_sql(page, browsed_store, table, condition) -> None:
    """A wrong one has its message."""
    name, key = {"games": ("game", "game_id"), "positions": ("position_id", "position_id")}[table]
    query = f"SELECT {key} FROM {table} WHERE (\n{condition}\n)"
    with contextlib.suppress(ConfigError):
        expected = [row[0] for row in ask(browsed_store, query)]
        found = page.get("api/list", table=table, filter=condition, count=256)
        assert [row[name] for row in found["rows"]] == expected[:256]
        assert found["found"] == len(expected)
        return
    with pytest.raises(ConfigError) as caught:
        ask(browsed_store, query)
    assert page.errors("api/list", table=table, filter=condition) == caught.value.report()


def test_lists_are_sorted_and_their_pages_continue_each_other(page: Page) -> None:
    """Unknown numbers are last."""
    sort = "CASE WHEN game_id % 3 > 0 THEN len(moves) END"
    for descending, sign in (("", 1), ("1", -1)):
        found = page.get("api/list", table="games", sort=sort, descending=descending, count=256)["rows"]
        known = [row for row in found if row["game"] % 3]
        assert found[: len(known)] == known
        assert known == sorted(known, key=lambda row: (sign * row["moves"], row["game"]))
        assert [row["game"] for row in found[len(known) :]] == list(range(0, 45, 3))
    facts = {"table": "positions", "filter": "value = 1", "sort": "stones(board)"}
    pages = [page.get("api/list", **facts, start=start, count=40)["rows"] for start in range(0, 200, 40)]
    assert [row for rows in pages for row in rows] == page.get("api/list", **facts, count=200)["rows"]


# --- games, positions, batches --------------------------------------------------------------------------


def test_a_game_has_its_boards_and_facts(page: Page, browsed_store: Path) -> None:
    game, expected = page.get("api/game", game=7), read_game(browsed_store, 7)
    assert expected.moves is not None
    assert game["cells"] == [cell_name(move, SIZE) for move in expected.moves.tolist()]
    for board, position in zip(game["boards"], expected.positions, strict=True):
        assert board | {"policy": None, "svg": ""} == position.to_json() | {"svg": ""}
        marks = (position.last_move is not None) + (position.move is not None)
        assert board["svg"].count("<circle") == len(board["blue"] + board["red"]) + marks
    address, _, moves = game["hexworld"].partition(f"#{SIZE},")
    assert address == "https://hexworld.org/board/"
    assert parse_moves(moves, SIZE).tolist() == expected.moves.tolist()
    numbered = page.get("api/game", game=7, numbers=1)["boards"][-1]["svg"]
    assert numbered.count("</text>") == len(expected.moves)


def test_a_board_is_the_drawing_of_hexdata_show(page: Page, browsed_store: Path) -> None:
    _, headers, body = page.request("board.svg", position=30, numbers=1)
    assert body.decode() == read_position(browsed_store, 30).svg(numbers=True)
    assert headers["Content-Type"].startswith("image/svg+xml")
    assert "sandbox" in headers["Content-Security-Policy"]
    assert "script-src" not in headers["Content-Security-Policy"]
    assert b"ply 2" in page.request("board.svg", moves="a1b2")[2]


def test_flags_and_rejections_are_counted_and_listed(page: Page, browsed_store: Path) -> None:
    facts = page.get("api/store")
    assert ["duplicate-symmetric", 5] in [[flag, count] for flag, count, _ in facts["flags"]]
    games = page.get("api/list", table="games", filter="list_contains(flags, 'duplicate-symmetric')")["rows"]
    duplicates = ask(browsed_store, "SELECT duplicate_of FROM games WHERE duplicate_of IS NOT NULL")
    assert [(row["duplicate_of"],) for row in games] == duplicates
    found = []
    for reason, count in facts["reasons"]:
        pages = [page.get("api/rejected", reason=reason, start=start, count=1) for start in range(count)]
        assert [each["found"] for each in pages] == [count] * count
        found += [(reason, row["detail"], row["record"]) for each in pages for row in each["rows"]]
    assert sorted(found) == sorted(ask(browsed_store, "SELECT reason, detail, record FROM rejected"))
    assert len(found) == 2
    texts = json.loads((resources.files("hexdata.browse") / "static" / "flags.json").read_text())
    assert sorted(texts) == [str(flag.name).lower().replace("_", "-") for flag in Flag]


def test_a_batch_is_the_one_that_a_loader_delivers(page: Page, browsed_store: Path) -> None:
    for split in ("train", "val"):
        loader = Loader(browsed_store, split=split, mode="games", batch_size=16, fields=["position_id"])
        for number, batch in zip(range(3), loader, strict=False):
            found = page.get("api/batch", order="loader", split=split, start=16 * number, count=16)
            assert [row["position_id"] for row in found["rows"]] == batch["position_id"].tolist()
            assert found["found"] == loader.positions
    for row in page.get("api/batch", order="loader", count=16)["rows"]:
        position = page.get("api/position", position=row["position_id"])
        of_loader = {"last_move": None, "winner": None, "policy_weight": None, "svg": ""}
        assert row | of_loader == position | of_loader
    before = page.get("api/batch", order="before", start=20, count=30)["rows"]
    assert [row["position_id"] for row in before] == list(range(20, 50))
    after = page.get("api/batch", order="after", split="train", start=20, count=30)
    query = "SELECT position_id FROM shuffled WHERE split = 'train' AND rank >= 20 ORDER BY rank LIMIT 30"
    assert [(row["position_id"],) for row in after["rows"]] == ask(browsed_store, query)


# --- readers and changes --------------------------------------------------------------------------------


def test_a_changed_store_is_opened_again(browsed_store: Path, copy_store, monkeypatch) -> None:
    """A damaged table is named and not shown."""
    monkeypatch.setattr(library, "_CHECKED_EVERY", 0.0)
    folder = copy_store(browsed_store)
    for table in ("games", "positions", "rejected"):
        path = next(path for path in Store.open(folder).files(table))
        content = path.read_bytes()
        path.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
        with serving(folder) as address:
            own = Page(address)
            assert "the file was altered" in own.errors("api/store")[0]
            path.write_bytes(content)
            assert own.get("api/store")["counts"]["games"] == 45
    with serving(folder) as address:
        own = Page(address)
        assert own.get("api/batch", order="after", count=1)["rows"]
        manifest = Store.open(folder).manifest
        for name in list(manifest.files_in("shuffled")):
            del manifest.files[name]
        del manifest.stages["shuffle"]
        manifest.save(folder)
        assert "no shuffled positions" in own.errors("api/batch", order="after")[0]
        (folder / "manifest.json").unlink()
        assert "not a hexdata store" in own.errors("api/store")[0]


def test_a_port_in_use_is_named(page: Page, browsed_store: Path) -> None:
    assert BrowseOptions().port is None
    with pytest.raises(ConfigError, match="65536"):
        BrowseOptions(port=65_536)
    port = int(page.address.rsplit(":", 1)[1].strip("/"))
    with pytest.raises(ConfigError, match="served at this port"), contextlib.ExitStack() as stack:
        stack.enter_context(serving(browsed_store, BrowseOptions(port=port)))


# --- openings -------------------------------------------------------------------------------------------

N = 4


def normal(first: int, moves: list[int], symmetry: Symmetry) -> list[int]:
    """Return the moves in an image in which blue begins: the given one, or its reflection."""
    used = symmetry ^ (Symmetry.LONG_DIAGONAL if first else Symmetry.IDENTITY)
    return [move if move == PASS else int(symmetry_table(N)[used, move]) for move in moves]


def stones(moves: list[int]) -> tuple[int, frozenset[int], frozenset[int]]:
    played = list(enumerate(moves))
    blue, red = (frozenset(m for ply, m in played if ply % 2 == colour and m != PASS) for colour in (0, 1))
    return len(moves), blue, red


def test_the_tree_counts_positions_up_to_symmetry(tmp_path: Path, page: Page) -> None:
    """Games on few cells, so that positions repeat; some with a pass, some with unknown moves."""
    rng, games = np.random.default_rng(4), list[tuple[int, int, list[int] | None]]()
    for game in range(60):
        moves = rng.permutation(6)[: rng.integers(0, 6)].tolist()
        moves[-1:] = [PASS] if game % 7 == 3 and moves else moves[-1:]
        games.append((game % 2, int(rng.integers(-1, 2)), None if game % 11 == 5 else moves))
    names = [(None, "BLUE", "RED")[winner + 1] for _, winner, _ in games]
    columns = {"winner": names, "first_player": [g[0] for g in games], "moves": [g[2] for g in games]}
    every = table_schema("games", N)
    schema = pa.schema([every.field(name) for name in columns])
    table = pa.table({name: pa.array(columns[name], schema.field(name).type) for name in columns}, schema)
    facts = write_parquet(tmp_path / "games.parquet", schema, [table])
    rows = ParquetRows.of([(tmp_path / "games.parquet", facts.rows)])
    manifest = SimpleNamespace(board_size=N, counts={"games": len(games)})
    tree = Openings(SimpleNamespace(manifest=manifest, rows=lambda _: rows))
    for first, _, moves in games:
        for ply in range(0 if moves is None else len(moves) + 1):
            path = normal(first, moves[:ply], Symmetry.IDENTITY)
            is_symmetric = stones(normal(0, path, Symmetry.ROTATION)) == stones(path)
            here: Counter[int | None] = Counter()
            won: Counter[tuple[int | None, int]] = Counter()
            for beginner, winner, others in games:
                if others is None or len(others) < ply:
                    continue
                for symmetry in (Symmetry.IDENTITY, Symmetry.ROTATION):
                    image = normal(beginner, others, symmetry)
                    if stones(image[:ply]) != stones(path):
                        continue
                    following = image[ply] if len(image) > ply else None
                    if is_symmetric and following not in (None, PASS):
                        following = min(following, int(symmetry_table(N)[Symmetry.ROTATION, following]))
                    here[following] += 1
                    won[following, winner ^ beginner if winner >= 0 else -1] += 1
                    break
            found = tree.branches(path)
            assert {branch.move: branch.games for branch in found} == here
            assert all((b.blue, b.red) == (won[b.move, 0], won[b.move, 1]) for b in found)
    nothing = SimpleNamespace(manifest=SimpleNamespace(board_size=N, counts={}), rows=lambda _: rows)
    assert Openings(nothing).branches([]) == []
    node = page.get("api/openings")
    assert node["games"] == 45 == sum(branch["games"] for branch in node["branches"]) == sum(node["won"])
    branch = node["branches"][0]
    assert page.get("api/openings", moves=branch["move"])["games"] == branch["games"] >= 2


def test_no_name_changes_the_direction_of_writing(demo_store: Path, copy_store: CopyStore) -> None:
    store = Altered(copy_store(demo_store))
    store.cell("sources/part-000000.parquet", "name", 0, "a\u202eb.trmph")
    with serving(store.path) as address:
        first, *_ = Page(address).get("api/list")["rows"]
    assert first["source"] == "a\\u202eb.trmph"
