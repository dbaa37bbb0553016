"""The server: its answers, its errors, and what it refuses."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from hexdata.board import parse_moves
from hexdata.browse import library
from hexdata.browse.rows import StoreRows
from hexdata.errors import ConfigError
from hexdata.show import read_game, read_position
from hexdata.sql import run_query
from tests.browse.conftest import SIZE

if TYPE_CHECKING:
    from tests.browse.conftest import Page


def ask(store: Path, query: str) -> list[tuple[object, ...]]:
    with run_query(store, query) as result:
        return [tuple(row.values()) for batch in result.batches for row in batch.to_pylist()]


# Refusals


def port_of(page: Page) -> str:
    """Return the port of a page."""
    return page.address.rsplit(":", 1)[1].strip("/")


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:{port}", "127.0.0.1.evil.example:{port}", "", "[::2]:{port}"),
        *(
            "127.0.0.1",
            "127.0.0.1:1",
            "localhost:{port}.evil.example",
            "127.0.0.1:{port}:{port}",
            "localhost:",
        ),
    ],
)
@pytest.mark.parametrize("path", ["", "api/store", "board.svg"])
def test_a_request_to_another_host_name_is_refused(page: Page, host: str, path: str) -> None:
    assert page.request(path, headers={"Host": host.format(port=port_of(page))})[0] == 403


@pytest.mark.parametrize("host", ["localhost:{port}", "LOCALHOST:{port}", "127.0.0.1:{port}", "[::1]:{port}"])
def test_names_of_this_machine_are_accepted(page: Page, host: str) -> None:
    assert page.request("api/store", headers={"Host": host.format(port=port_of(page))})[0] == 200


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_another_site_can_open_the_page_but_not_read_data(page: Page, site: str) -> None:
    elsewhere = {"Sec-Fetch-Site": site}
    assert page.request("api/store", headers=elsewhere)[0] == 403
    assert page.request("", headers=elsewhere)[0] == 200


@pytest.mark.parametrize("path", ["", "browse.js", "browse.css", "api/store", "nothing"])
def test_every_answer_has_the_headers_that_close_the_page(page: Page, path: str) -> None:
    _, headers, _ = page.request(path)
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Access-Control-Allow-Origin"] is None


def test_the_page_loads_nothing_from_elsewhere(page: Page) -> None:
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
        ("api/game", {"game": 45}, "the store has no such game; found game 45; expected 0 to 44"),
        ("api/position", {"position": 10**9}, "the store has no such position"),
        ("api/list", {"table": "sqlite_master"}, "expected games, positions"),
        ("api/openings", {"moves": "a1a1"}, "already played"),
        ("api/openings", {"moves": "z9"}, "no such cell"),
        ("api/sheet", {"order": "after", "start": 10**6}, "there are no positions at this index"),
        ("api/sheet", {"order": "sideways"}, "expected before, after"),
        ("api/flagged", {"flag": "<b>"}, "no game of the store has this flag"),
    ],
)
def test_wrong_requests_are_named(page: Page, path: str, facts: dict[str, object], message: str) -> None:
    assert message in " ".join(page.errors(path, **facts))


def test_a_path_with_a_slash_too_many_is_not_found(page: Page) -> None:
    """A redirection would need the query as UTF-8."""
    assert page.request("api/list/", start="0")[0] == 404


# Lists


def test_a_list_without_a_filter_is_the_table(page: Page, browsed_store: Path) -> None:
    first = page.get("api/list", table="games", count=10)
    assert [row["game"] for row in first["rows"]] == list(range(10))
    assert (first["found"], first["complete"]) == (45, True)
    last = page.get("api/list", table="games", start=40, count=10)
    assert [row["game"] for row in last["rows"]] == [40, 41, 42, 43, 44]
    expected = ask(browsed_store, "SELECT len(moves), lower(winner), split, duplicate_of FROM games LIMIT 10")
    found = [(row["moves"], row["winner"], row["split"], row["duplicate_of"]) for row in first["rows"]]
    assert found == expected


@pytest.mark.parametrize(
    ("table", "condition"),
    [
        ("games", "winner = 'RED' AND len(moves) > 12"),
        ("games", "duplicate_of IS NOT NULL"),
        ("games", "game_id IN (SELECT game_id FROM positions WHERE value = 1) -- a comment"),
        ("positions", "position_in_game = 3"),
        ("positions", "stones(board) < 2 AND positions.value = 0"),
        ("positions", "false"),
    ],
)
def test_a_filter_is_a_condition_of_hexdata_sql(
    page: Page, browsed_store: Path, table: str, condition: str
) -> None:
    key = {"games": "game", "positions": "position"}[table]
    found = page.listed(table=table, filter=condition, count=256)
    expected = [row[0] for row in ask(browsed_store, f"SELECT {key}_id FROM {table} WHERE (\n{condition}\n)")]
    assert [row[key] for row in found["rows"]] == expected[:256]
    assert found["found"] == len(expected)


@pytest.mark.parametrize("descending", ["", "1"])
def test_a_list_is_sorted_with_unknown_numbers_last(page: Page, descending: str) -> None:
    sort = "CASE WHEN game_id % 3 > 0 THEN len(moves) END"
    found = page.listed(table="games", sort=sort, descending=descending, count=256)["rows"]
    known = [row for row in found if row["game"] % 3]
    assert found[: len(known)] == known
    sign = -1 if descending else 1
    assert known == sorted(known, key=lambda row: (sign * row["moves"], row["game"]))
    assert [row["game"] for row in found[len(known) :]] == list(range(0, 45, 3))


def test_pages_of_a_list_continue_each_other(page: Page) -> None:
    whole = page.listed(table="positions", filter="value = 1", sort="stones(board)", count=200)["rows"]
    parts = [
        row
        for start in range(0, 200, 40)
        for row in page.listed(
            table="positions", filter="value = 1", sort="stones(board)", start=start, count=40
        )["rows"]
    ]
    assert parts == whole


@pytest.mark.parametrize(
    "condition",
    ["nope = 3", "winner =", "1; DROP TABLE games", "game_id IN (SELECT a FROM read_csv('/etc/passwd'))"],
)
def test_a_wrong_filter_gives_the_message_of_hexdata_sql(
    page: Page, browsed_store: Path, condition: str
) -> None:
    lines = page.errors("api/list", table="games", filter=condition)
    assert not any("Traceback" in line for line in lines)
    query = f"SELECT game_id, game_id FROM games WHERE (\n{condition}\n) LIMIT 0"
    with pytest.raises(ConfigError) as caught, run_query(browsed_store, query) as result:
        list(result.batches)
    assert lines == caught.value.report()


@pytest.mark.parametrize("condition", ["true) UNION (SELECT 1, 2 WHERE (true", "true) OR (SELECT 1, 2) = (1"])
def test_a_filter_cannot_end_its_query(page: Page, condition: str) -> None:
    assert page.errors("api/list", table="games", filter=condition)


def test_a_fault_in_a_row_is_reported(page: Page) -> None:
    for _ in range(100):
        status, _, body = page.request("api/list", table="games", filter="error('bad ' || game_id::VARCHAR)")
        if status != 200:
            break
        time.sleep(0.02)
    assert "bad 0" in body.decode()


# Games, positions, boards


def test_the_steps_of_an_index_have_rate_time_left_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 100.0, 110.0])
    # Not the clock of the process, which the event loop of a server in this process reads, too.
    monkeypatch.setattr(library, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    steps = library.Steps(lambda _: None)
    steps.begin("reading the games", 4_000, "games")
    steps.advance(1_000)
    content = steps.to_json()
    assert (content["stage"], content["share"]) == ("reading the games", 0.25)
    *facts, memory = content["facts"]
    assert facts == ["100 games/s", "0:30 left"]
    assert memory.startswith("memory ")


def test_an_unexpected_error_is_shown_on_the_page(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise IndexError("out of bounds")

    monkeypatch.setattr(StoreRows, "position", fail)
    status, headers, body = page.request("api/position", position=0)
    assert (status, headers["Content-Type"]) == (500, "application/json")
    (line,) = json.loads(body)["error"]
    assert line.startswith("the store cannot be shown here; found IndexError('out of bounds')")
    assert "hexdata verify" in line


def test_a_game_has_its_boards_and_facts(page: Page, browsed_store: Path) -> None:
    game, expected = page.get("api/game", game=7), read_game(browsed_store, 7)
    assert game["facts"] is True
    assert game["cells"] == (expected.moves.tolist() if expected.moves is not None else None)
    assert len(game["boards"]) == len(expected)
    for board, position in zip(game["boards"], expected.positions, strict=True):
        assert board["position"] == position.position_id
        assert (board["ply"], board["value"], board["last"], board["next"]) == (
            position.ply, position.value, position.last_move, position.move,
        )  # fmt: skip
        assert [board["blue"], board["red"]] == [np.flatnonzero(plane).tolist() for plane in position.planes]
    address, _, moves = game["hexworld"].partition(f"#{SIZE},")
    assert address == "https://hexworld.org/board/"
    assert parse_moves(moves, SIZE).tolist() == game["cells"]


def test_a_source_keeps_its_name(page: Page, browsed_store: Path) -> None:
    rows = page.get("api/list", table="games")["rows"]
    query = "SELECT name FROM games JOIN sources USING (source_id) ORDER BY game_id"
    assert [row["source"] for row in rows] == [name for (name,) in ask(browsed_store, query)]
    assert any("<script>" in row["source"] for row in rows)


def test_a_board_is_the_drawing_of_hexdata_show(page: Page, browsed_store: Path) -> None:
    _, headers, body = page.request("board.svg", position=30, numbers=1)
    assert body.decode() == read_position(browsed_store, 30).svg(numbers=True)
    assert headers["Content-Type"].startswith("image/svg+xml")
    assert "sandbox" in headers["Content-Security-Policy"]
    assert "script-src" not in headers["Content-Security-Policy"]
    _, _, opening = page.request("board.svg", moves="a1b2")
    assert b"ply 2" in opening


def test_the_openings_of_the_first_move_add_up(page: Page) -> None:
    node = page.get("api/openings")
    assert node["games"] == 45 == sum(branch["games"] for branch in node["branches"])
    assert sum(node["won"]) == 45
    branch = node["branches"][0]
    after = page.get("api/openings", moves="abcde"[branch["move"] % SIZE] + str(branch["move"] // SIZE + 1))
    assert after["games"] == branch["games"] >= 2


# Reasons and sheets


def test_duplicates_and_rejections_have_their_reasons(page: Page, browsed_store: Path) -> None:
    facts = page.get("api/store")
    assert facts["duplicates"] == 5
    assert ["duplicate-symmetric", 5] in [[flag, count] for flag, count, _ in facts["flags"]]
    games = page.get("api/flagged", flag="duplicate-symmetric")["rows"]
    assert [row["duplicate_of"] for row in games] == [
        row[0] for row in ask(browsed_store, "SELECT duplicate_of FROM games WHERE duplicate_of IS NOT NULL")
    ]
    assert games == page.get("api/flagged")["rows"]
    expected = ask(browsed_store, "SELECT reason, detail, record FROM rejected ORDER BY record")
    found = [
        (reason, row["detail"], row["record"])
        for reason, _ in facts["reasons"]
        for row in page.get("api/rejected", reason=reason)["rows"]
    ]
    assert sorted(found) == sorted(expected)
    assert len(found) == 2


def test_rejections_are_paged_by_their_key(page: Page) -> None:
    (reason, count), *_ = page.get("api/store")["reasons"]
    after, rows = [0, 0], []
    while after is not None:
        part = page.get("api/rejected", reason=reason, source=after[0], record=after[1], count=1)
        rows += part["rows"]
        after = part["after"]
    assert len(rows) == count


def test_a_sheet_shows_the_order_of_the_store_and_of_the_shuffle(page: Page, browsed_store: Path) -> None:
    before = page.get("api/sheet", order="before", start=20, count=30)["rows"]
    assert [row["position"] for row in before] == list(range(20, 50))
    after = page.get("api/sheet", order="after", split="train", start=20, count=30)
    query = "SELECT position_id FROM shuffled WHERE split = 'train' AND rank >= 20 ORDER BY rank LIMIT 30"
    assert [row["position"] for row in after["rows"]] == [row[0] for row in ask(browsed_store, query)]


# Readers and changes


def test_two_readers_at_once_get_their_own_answers(page: Page) -> None:
    wrong: list[object] = []

    def read(first: int) -> None:
        for game in range(first, 40, 2):
            if page.get("api/game", game=game)["game"] != game:
                wrong.append(game)
            rows = page.listed(table="games", filter=f"game_id = {game}")["rows"]
            if [row["game"] for row in rows] != [game]:
                wrong.append(rows)

    threads = [threading.Thread(target=read, args=(first,)) for first in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_changed_store_is_opened_again(browsed_store: Path, copy_store, monkeypatch) -> None:
    from hexdata.browse import serving
    from hexdata.store import Store
    from tests.browse.conftest import Page

    monkeypatch.setattr(library, "_CHECKED_EVERY", 0.0)
    folder = copy_store(browsed_store)
    with serving(folder) as address:
        own = Page(address)
        assert own.get("api/store")["counts"]["games"] == 45
        manifest = Store.open(folder).manifest
        for name in list(manifest.files_in("shuffled")):
            del manifest.files[name]
        del manifest.stages["shuffle"]
        manifest.save(folder)
        assert "the store is not shuffled" in own.errors("api/sheet", order="after")[0]
        (folder / "manifest.json").unlink()
        assert "no manifest" in own.errors("api/store")[0]


def test_a_list_that_nobody_wants_is_stopped(browsed_store: Path, monkeypatch) -> None:
    from hexdata.browse import listing
    from hexdata.browse.listing import Listings, ListQuery
    from hexdata.sql import open_catalog
    from hexdata.store import Store

    monkeypatch.setattr(listing, "_ABANDONED", 0.2)
    store = Store.open(browsed_store)
    endless = "(SELECT count(*) FROM positions a, positions b, positions c, positions d) > game_id"
    with open_catalog(store, memory=700_000_000, threads=1) as con:
        lists = Listings(con, store)
        found = lists.get(ListQuery("games", endless))
        deadline = time.monotonic() + 30
        while not found.ended and time.monotonic() < deadline:
            time.sleep(0.02)
        assert found.error is not None
        lists.close()


def test_a_port_in_use_is_named(browsed_store: Path) -> None:
    pytest.importorskip("uvicorn")
    from hexdata.browse import BrowseOptions, serving

    with serving(browsed_store) as address:
        port = int(address.rsplit(":", 1)[1].strip("/"))
        with (
            pytest.raises(ConfigError, match="cannot be served at this port"),
            contextlib.ExitStack() as stack,
        ):
            stack.enter_context(serving(browsed_store, BrowseOptions(port=port)))


def test_the_facts_of_the_store_are_json(page: Page) -> None:
    _, headers, body = page.request("api/store")
    assert headers["Content-Type"] == "application/json"
    assert json.loads(body)["board_size"] == SIZE
