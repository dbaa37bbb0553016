"""The web application: a page without data, and its data as JSON. Nothing can be changed through it.

The module needs Starlette, which the extra ``browse`` installs.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from importlib import resources
from typing import Any, Final

import numpy as np

from hexdata.board import BLUE, PASS, RED, Symmetry, cell_name, parse_moves, symmetry_table
from hexdata.browse.library import KEYS, Library, ListQuery, OpenStore
from hexdata.checks import check_choice
from hexdata.draw import Shades
from hexdata.draw.svg import STYLE, page_grid, page_svg
from hexdata.errors import ConfigError, HexdataError, StoreError
from hexdata.extras import installed_by
from hexdata.schema import SPLITS, table_schema
from hexdata.show.find import find_position, game_of_rows, position_of_row, read_row
from hexdata.show.position import COLOURS, Position
from hexdata.storage.errors import VERIFY_HINT
from hexdata.store.integrity import intact_rows
from hexdata.store.parquet import collect, read_rows

with installed_by("browse", "the page of a store"):
    import starlette  # noqa: F401 - the error names this module, not one within it
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.base import BaseHTTPMiddleware
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

# Largest page, as a batch of the view Batches. The drawings of its boards are made by one request.
_MOST_ROWS: Final = 256
_WAIT: Final = 0.15
"""Seconds that a request waits for a list to be complete."""
_READING: Final = 3
"""Number of requests that read rows at the same time; each may hold a row group in memory.

Two of them may wait for the loaders of two splits to be opened.
"""
_HOSTS: Final = frozenset({"127.0.0.1", "localhost", "[::1]"})
"""Host names of requests. A name that a stranger has pointed at this machine is refused."""
_OWN_SITES: Final = ("none", "same-origin")
"""Values of the header Sec-Fetch-Site of requests by the page, or by the user in the address bar."""
# A drawing can be opened as a document of its own. Its style is inside of it, and nothing in it may run.
_IMAGE_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; sandbox"
_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_FILES: Final = {"index.html": "text/html", "browse.css": "text/css", "browse.js": "text/javascript"}

_OPENING: Final = 6
"""Number of first moves that a list of games shows."""
Json = dict[str, Any]
Answer = Callable[[OpenStore, Request], Any]


def make_app(library: Library, name: str) -> Starlette:
    """Return the application.

    Args:
        library: The store.
        name: Name of the store for the title of the page.
    """
    reading = threading.Semaphore(_READING)

    def route(path: str, answer: Answer) -> Route:
        def endpoint(request: Request) -> Response:
            try:
                opened = library.current()
                with reading:
                    found = answer(opened, request)
                return found if isinstance(found, Response) else JSONResponse(found)
            except (HexdataError, OSError) as error:
                lines = error.report() if isinstance(error, HexdataError) else [str(error)]
                return JSONResponse({"error": lines}, 404 if isinstance(error, StoreError) else 400)
            except Exception as error:  # noqa: BLE001  # a store may contain anything, and the page must say so
                unusable = StoreError("the store cannot be shown here", found=repr(error), hint=VERIFY_HINT)
                return JSONResponse({"error": unusable.report()}, 500)

        return Route(path, endpoint)

    app = Starlette(
        routes=[
            *map(_file_route, _FILES),
            Route("/favicon.ico", lambda _: Response(status_code=204)),
            route("/api/store", lambda opened, _: _store(opened, name)),
            route("/api/list", _list),
            route("/api/rejected", _rejected),
            route("/api/game", _game),
            route("/api/position", lambda opened, request: _board_json(_position(opened, request))),
            route("/api/openings", _openings),
            route("/api/batch", _batch),
            route("/board.svg", _board),
        ],
        middleware=[Middleware(BaseHTTPMiddleware, dispatch=_guard)],
    )
    app.router.redirect_slashes = False  # a redirection fails for queries that are not UTF-8
    return app


async def _guard(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
    """Refuse requests that come from another site, and add the headers that keep the page closed."""
    port = request.scope["server"][1]
    # Browsers leave out the port in the header Host if it is 80.
    hosts = {f"{host}:{port}" for host in _HOSTS} | (_HOSTS if port == 80 else frozenset())
    is_from_elsewhere = request.headers.get("sec-fetch-site", "none") not in _OWN_SITES
    # A link on another site may open the page itself, which has no data, but not request data.
    if request.headers.get("host", "").lower() not in hosts or (
        is_from_elsewhere and request.scope["path"] != "/"
    ):
        response = Response("This page can only be opened on the machine that serves it.\n", 403)
    else:
        response = await answer(request)
    for name, value in _HEADERS.items():
        response.headers.setdefault(name, value)
    return response


def _static(name: str) -> bytes:
    return (resources.files("hexdata.browse") / "static" / name).read_bytes()


def _file_route(file: str) -> Route:
    content = _static(file) + (STYLE.encode() if file == "browse.css" else b"")

    def endpoint(request: Request) -> Response:
        # The page runs a condition in its address only after a click, unless the user opened it directly.
        # Browsers set this header, and pages cannot forge it.
        is_own = request.headers.get("sec-fetch-site") in _OWN_SITES
        shown = content.replace(b"<body>", b"<body data-own>") if is_own else content
        return Response(shown, media_type=_FILES[file])

    return Route("/" if file == "index.html" else f"/{file}", endpoint)


# Arguments


def _number(request: Request, name: str, default: int | None = None) -> int:
    text = request.query_params.get(name)
    if text is None and default is not None:
        return default
    # Eighteen digits fit into 64 bits. isdigit alone also accepts digits of other scripts.
    if text is None or not (text.isascii() and text.isdigit() and len(text) < 19):
        raise ConfigError(f"{name} cannot be used", found=repr(text), expected="a whole number from 0")
    return int(text)


def _choice(request: Request, name: str, choices: tuple[str, ...]) -> str:
    text = request.query_params.get(name, choices[0])
    check_choice(name, text, choices)
    return text


def _page(request: Request) -> tuple[int, int]:
    """Return the index of the first row of a page, and the number of its rows."""
    return _number(request, "start", 0), max(1, min(_number(request, "count", 50), _MOST_ROWS))


def _numbers(request: Request) -> bool:
    return request.query_params.get("numbers") == "1"


def _position(opened: OpenStore, request: Request) -> Position:
    return find_position(opened.store, _number(request, "position"))


# Rows as JSON values


def _board_json(position: Position, *, numbers: bool = False) -> Json:
    """Return a position as JSON values with its drawing; its policy is (cell, share), the largest first."""
    # The page has the facts beside the board.
    drawing = page_svg(replace(position.diagram(numbers=numbers), title=", ".join(position.facts()[:4])))
    strongest = position.strongest(position.size**2)
    policy = [(cell_name(cell, position.size), share) for cell, share in strongest if share > 0]
    return position.to_json() | {"svg": drawing, "policy": policy}


def _move_names(moves: Sequence[int | None], size: int) -> list[str]:
    """Return the names of moves; those that are on no board are left out."""
    known = [move for move in moves if move is not None and (move < size * size or move == PASS)]
    return ["pass" if move == PASS else cell_name(move, size) for move in known]


def _hexworld_link(moves: Sequence[int], size: int, first_player: int = BLUE) -> str:
    """Return the address of a game at hexworld.org, whose first player connects top to bottom as blue does.

    A game that red began is reflected in the long diagonal.
    """
    image = symmetry_table(size)[Symmetry.LONG_DIAGONAL if first_player == RED else Symmetry.IDENTITY]
    names = [":p" if move == PASS else cell_name(int(image[move]), size) for move in moves]
    return f"https://hexworld.org/board/#{size},{''.join(names)}"


def _game_json(opened: OpenStore, row: Json) -> Json:
    moves = row["moves"]
    return {
        "game": row["game_id"],
        "moves": None if moves is None else len(moves),
        "positions": row["positions"],
        "winner": row["winner"] and row["winner"].lower(),
        "first": COLOURS[row["first_player"] == RED],
        "opening": _move_names((moves or ())[:_OPENING], opened.size),
        "split": row["split"],
        "end": row["end_reason"],
        "swap": row["swap"],
        "source": opened.sources.get(row["source_id"]),
        "duplicate_of": row["duplicate_of"],
        "flags": row["flags"] or [],
    }


def _part(rows: list[Json], start: int, total: int, **more: Any) -> Json:
    """Return a page of rows, all of which can be read if nothing else is said."""
    return {"rows": rows, "start": start, "found": total, "readable": total, **more}


# Answers


def _store(opened: OpenStore, name: str) -> Json:
    meanings = json.loads(_static("flags.json"))
    return {
        "name": name,
        "counts": opened.store.manifest.counts,
        "columns": {table: opened.con.cursor().sql(f"FROM {table}").columns for table in KEYS},
        "splits": [split for split in SPLITS if split in opened.splits],
        "shuffled": [split for split in SPLITS if len(opened.store.rows(f"shuffled/{split}"))],
        "flags": [[flag, count, meanings.get(flag, "")] for flag, count in opened.flags.items()],
        "reasons": list(opened.reasons.items()),
        "depth": opened.openings.depth,
        "grid": page_grid(opened.size) if opened.size else None,
    }


def _list(opened: OpenStore, request: Request) -> Json:
    """Return a page of a list of games or positions."""
    table, parameters = _choice(request, "table", tuple(KEYS)), request.query_params
    where, sort = (parameters.get(name, "").strip() for name in ("filter", "sort"))
    query = ListQuery(table, where, sort, parameters.get("descending") == "1")
    start, count = _page(request)
    total = opened.store.manifest.counts.get(table, 0)
    # Without a filter, an id is the index of its row, so that no query is needed.
    ids, facts = list(range(total)[start : start + count]), Json(complete=True)
    if query.filter or query.is_sorted:
        made = opened.listed(query, _WAIT)
        facts = {"complete": made.ended.is_set(), "found": made.found, "readable": len(made.ids)}
        ids = made.ids[start : start + count].tolist()
    found = opened.read(table, ids)
    rows = [_game_json(opened, row) for row in found] if table == "games" else _boards(opened, found)
    return _part(rows, start, total) | facts


def _boards(opened: OpenStore, rows: list[Json]) -> list[Json]:
    return [_board_json(position_of_row(row, opened.size)) for row in rows]


def _rejected(opened: OpenStore, request: Request) -> Json:
    """Return a page of the rejected records with a reason."""
    reason, (start, count) = request.query_params.get("reason", ""), _page(request)
    rows = opened.query(
        f"""SELECT name AS source, record, detail FROM rejected LEFT JOIN sources USING (source_id)
        WHERE reason = $reason ORDER BY source_id, record NULLS FIRST LIMIT {count} OFFSET {start}""",
        reason=reason,
    )
    return _part(rows, start, opened.reasons.get(reason, 0))


def _game(opened: OpenStore, request: Request) -> Json:
    """Return a game with its positions, sorted by ply."""
    number, numbers = _number(request, "game"), _numbers(request)
    row = read_row(opened.store, "games", number)
    # This query reads two columns; whole rows are read from their row groups only.
    found = opened.query("SELECT position_id FROM positions WHERE game_id = $game", game=number)
    rows = opened.read("positions", [position["position_id"] for position in found])
    game, moves = game_of_rows(opened.store, row, rows), row["moves"]
    return _game_json(opened, row) | {
        "cells": moves and _move_names(moves, opened.size),
        "hexworld": moves and _hexworld_link(moves, opened.size, row["first_player"] or BLUE),
        "boards": [_board_json(position, numbers=numbers) for position in game.positions],
    }


def _openings(opened: OpenStore, request: Request) -> Json:
    """Return a position of the tree, reached by moves from the empty board, and the moves played in it."""
    size, moves = opened.size, _moves(opened, request)
    branches = [branch._asdict() for branch in opened.openings.branches(moves)]
    games = sum(branch["games"] for branch in branches)
    shares = np.full(size * size, np.nan)
    for branch in branches:
        if branch["move"] not in (None, PASS):
            shares[branch["move"]] = branch["games"] / games
        branch["move"] = next(iter(_move_names([branch["move"]], size)), None)
    found = Json(svg=None, hexworld=None)
    if size:
        texts = [f"{100 * share:.0f}" if share >= 0.02 else "" for share in shares]
        shades = Shades(shares, "share of the games", texts, share=True, scale="sqrt")
        drawn = replace(Position.of_moves(moves, size).diagram(numbers=True), shades=shades)
        found = {"svg": page_svg(drawn), "hexworld": _hexworld_link(moves, size)}
    won = [sum(branch[player] for branch in branches) for player in COLOURS]
    return {"moves": _move_names(moves, size), "games": games, "won": won, "branches": branches, **found}


def _moves(opened: OpenStore, request: Request) -> list[int]:
    text = request.query_params.get("moves", "")
    return parse_moves(text, opened.size).tolist() if text else []


def _batch(opened: OpenStore, request: Request) -> Json:
    """Return consecutive positions of an order.

    The orders are: "loader", as ``Loader(store, split=split, mode="games")`` delivers them in epoch 0;
    "before", as they are in the store; "after", as they are in the shuffled files of the split.
    """
    store = opened.store
    order = _choice(request, "order", ("loader", "before", "after"))
    split, (start, count) = _choice(request, "split", SPLITS), _page(request)
    loader = opened.loader(split) if order == "loader" and split in opened.splits else None
    folder = f"shuffled/{split}" if order == "after" else "positions"
    rows = store.rows(folder)
    total = len(rows) if order != "loader" else loader.positions if loader else 0
    stop = min(start + count, total)
    # Named first, because the advice differs: these files do not exist.
    if order == "after" and not total:
        hint = "Run `hexdata shuffle` on the store, and reload this page."
        raise StoreError(f"the split {split} has no shuffled positions", hint=hint)
    if start >= stop:
        raise StoreError(f"there are no positions at index {start:,}; the order has {total:,}")
    if loader is None:
        part, table = intact_rows(store, folder, start, stop), folder.partition("/")[0]
        schema = table_schema(table, opened.size, store.manifest.targets_of(table))
        return _part(_boards(opened, collect(read_rows(part, schema), schema).to_pylist()), start, total)
    (batch,) = loader.take([(start, stop)], 0)
    rows_of_batch = (dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True))
    return _part([_board_json(Position.of_planes(**row)) for row in rows_of_batch], start, total)


def _board(opened: OpenStore, request: Request) -> Response:
    """Return the SVG of a position: of an id, or after moves of an opening."""
    if "moves" not in request.query_params:
        position = _position(opened, request)
    elif opened.size:
        position = Position.of_moves(_moves(opened, request), opened.size)
    else:
        raise StoreError("the store has no positions, and therefore no board")
    headers = {"Content-Security-Policy": _IMAGE_POLICY}
    return Response(position.svg(numbers=_numbers(request)), media_type="image/svg+xml", headers=headers)
