"""The web application: a page without data, and its data as JSON. Nothing can be changed through it.

The module needs Starlette, which the extra ``browse`` installs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from importlib import resources
from typing import Any, Final

import numpy as np

from hexdata.board import BLUE, parse_moves
from hexdata.browse.library import IndexingError, Library, OpenStore
from hexdata.browse.listing import KEYS, ListQuery
from hexdata.browse.openings import DEPTH
from hexdata.browse.reasons import FLAG_TEXTS
from hexdata.browse.rows import SHEET_ORDERS, hexworld_link
from hexdata.errors import ConfigError, HexdataError, StoreError
from hexdata.extras import installed_by
from hexdata.schema import SPLITS
from hexdata.show.position import Position
from hexdata.show.store import find_position
from hexdata.sql.check import query_error
from hexdata.storage import prefix_of
from hexdata.store.integrity import VERIFY_HINT, require_intact_once
from hexdata.store.session import QUERY_ERRORS

with installed_by("browse", "the page of a store"):
    import starlette  # noqa: F401 - the error names this module, not one within it
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["DUPLICATES", "make_app"]

DUPLICATES: Final = "duplicates"
"""Name of the list of all duplicate games, beside the flags."""
_MOST_ROWS: Final = 256
_WAIT: Final = 0.15
"""Seconds that a request waits for a list to be complete."""
_READING: Final = 2
"""Number of requests that read rows at the same time; each may hold a row group in memory."""
_HOSTS: Final = frozenset({"127.0.0.1", "localhost", "[::1]"})
"""Host names of requests. A name that a stranger has pointed at this machine is refused."""
_OWN_SITES: Final = ("none", "same-origin")
"""Values of the header Sec-Fetch-Site of requests by the page, or by the user in the address bar."""
_PAGE_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_IMAGE_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; sandbox"
_HEADERS: Final = {
    "Content-Security-Policy": _PAGE_POLICY,
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_FILES: Final = {
    "index.html": "text/html",
    "browse.css": "text/css",
    "browse.js": "text/javascript",
}

Answer = Callable[[OpenStore, Request], Any]


def make_app(library: Library, name: str) -> ASGIApp:
    """Return the application.

    Args:
        library: The store.
        name: Name of the store for the title of the page.
    """
    reading = threading.Semaphore(_READING)
    routes = [_file_route(file) for file in _FILES]
    routes.append(Route("/favicon.ico", lambda _: Response(status_code=204)))

    def add(path: str, answer: Answer) -> None:
        def endpoint(request: Request) -> Response:
            try:
                opened = library.current()
                with reading:
                    found = answer(opened, request)
                return found if isinstance(found, Response) else JSONResponse(found)
            except IndexingError:
                return JSONResponse({"building": library.steps.to_json()}, 503)
            except (HexdataError, OSError) as error:
                lines = error.report() if isinstance(error, HexdataError) else [str(error)]
                return JSONResponse({"error": lines}, 404 if isinstance(error, StoreError) else 400)
            except Exception as error:  # noqa: BLE001  # a store may contain anything, and the page must say so
                unusable = StoreError("the store cannot be shown here", found=repr(error), hint=VERIFY_HINT)
                return JSONResponse({"error": unusable.report()}, 500)

        routes.append(Route(path, endpoint))

    add("/api/store", lambda opened, _: _store(opened, name))
    add("/api/list", _list)
    add("/api/flagged", _flagged)
    add("/api/rejected", _rejected)
    add("/api/game", lambda opened, request: opened.rows.game(_game_id(opened, request)))
    add("/api/position", lambda opened, request: opened.rows.position(_number(request, "position")))
    add("/api/openings", _openings)
    add("/api/sheet", _sheet)
    add("/board.svg", _board)
    app = Starlette(routes=routes)
    app.router.redirect_slashes = False  # a redirection fails for queries that are not UTF-8
    return _Guard(app)


class _Guard:
    """Refuses requests that come from another site, and adds the headers that keep the page closed."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        port = scope["server"][1]
        hosts = {f"{host}:{port}" for host in _HOSTS} | (_HOSTS if port == 80 else frozenset())
        from_elsewhere = headers.get("sec-fetch-site", "none") not in _OWN_SITES and scope["path"] != "/"
        if headers.get("host", "").lower() not in hosts or from_elsewhere:
            await Response("This page can only be opened on the machine that serves it.\n", 403)(
                scope, receive, send
            )
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                present = {name for name, _ in message["headers"]}
                message["headers"] = [
                    *message["headers"],
                    *(
                        (name.lower().encode(), value.encode())
                        for name, value in _HEADERS.items()
                        if name.lower().encode() not in present
                    ),
                ]
            await send(message)

        await self._app(scope, receive, send_with_headers)


def _file_route(file: str) -> Route:
    content = (resources.files("hexdata.browse") / "static" / file).read_bytes()

    def endpoint(request: Request) -> Response:
        # The page runs a condition in its address only after a click, unless the user opened it directly.
        is_own = request.headers.get("sec-fetch-site") in _OWN_SITES
        return Response(
            content.replace(b"<body>", b"<body data-own>") if is_own else content, media_type=_FILES[file]
        )

    return Route("/" if file == "index.html" else f"/{file}", endpoint)


# Arguments


def _number(request: Request, name: str, default: int | None = None) -> int:
    text = request.query_params.get(name)
    if text is None and default is not None:
        return default
    if text is None or not (text.isascii() and text.isdigit() and len(text) < 19):
        raise ConfigError(f"{name} cannot be used", found=repr(text), expected="a whole number from 0")
    return int(text)


def _choice(request: Request, name: str, choices: tuple[str, ...]) -> str:
    text = request.query_params.get(name, choices[0])
    if text not in choices:
        raise ConfigError(f"{name} cannot be used", found=repr(text), expected=", ".join(choices))
    return text


def _count(request: Request) -> int:
    return max(1, min(_number(request, "count", 50), _MOST_ROWS))


def _game_id(opened: OpenStore, request: Request) -> int:
    number, games = _number(request, "game"), len(opened.index.games)
    if number >= games:
        raise StoreError(
            "the store has no such game",
            found=f"game {number}",
            expected=f"0 to {games - 1}" if games else "nothing: there are no games",
        )
    return number


# Answers


def _store(opened: OpenStore, name: str) -> dict[str, Any]:
    manifest, index = opened.store.manifest, opened.index
    flags = {flag: len(ids) for flag, ids in index.flagged.items()}
    splits = {split: sum(f.rows for f in manifest.files_in(f"shuffled/{split}").values()) for split in SPLITS}
    shards = []
    for split in SPLITS:
        first = 0
        for path, facts in manifest.files_in("shards").items():
            if path.startswith(f"shards/{split}-"):
                shards.append([split, path.removeprefix("shards/"), first, facts.rows])
                first += facts.rows
    return {
        "name": name,
        "path": str(opened.store.path),
        "board_size": manifest.board_size or 0,
        "counts": manifest.counts,
        "targets": manifest.targets,
        "splits": {split: rows for split, rows in splits.items() if rows},
        "shards": shards,
        "duplicates": len(index.duplicates),
        "flags": [
            [flag, count, FLAG_TEXTS.get(flag, "")]
            for flag, count in sorted(flags.items(), key=lambda item: (-item[1], item[0]))
        ],
        "reasons": list(index.reasons.items()),
        "depth": DEPTH,
    }


def _list(opened: OpenStore, request: Request) -> dict[str, Any]:
    """Return a page of a list of games or positions."""
    parameters = request.query_params
    query = ListQuery(
        _choice(request, "table", tuple(KEYS)),
        parameters.get("filter", "").strip(),
        parameters.get("sort", "").strip(),
        parameters.get("descending", "") == "1",
    )
    start, count = _number(request, "start", 0), _count(request)
    total = opened.store.manifest.counts.get(query.table, 0)
    if query.is_whole_table:
        ids = list(range(start, min(start + count, total)))
        progress = {"found": total, "readable": total, "scanned": total, "complete": True}
    else:
        listing = opened.listings.get(query, _WAIT)
        complete = listing.complete
        ids = listing.page(start, count)
        progress = {
            "found": listing.found,
            "readable": listing.readable,
            "scanned": listing.scanned,
            "complete": complete,
        }
    rows = opened.rows.games(ids) if query.table == "games" else opened.rows.positions(ids)
    return {"rows": rows, "start": start, "total": total, **progress}


def _flagged(opened: OpenStore, request: Request) -> dict[str, Any]:
    """Return a page of the games with a flag, or of all duplicates."""
    index, start = opened.index, _number(request, "start", 0)
    flag = request.query_params.get("flag", DUPLICATES)
    ids = index.duplicates if flag == DUPLICATES else index.flagged.get(flag)
    if ids is None:
        raise StoreError("no game of the store has this flag", found=flag, expected=", ".join(index.flags))
    rows = opened.rows.games([int(number) for number in ids[start : start + _count(request)]])
    return {"rows": rows, "start": start, "found": len(ids), "readable": len(ids), "complete": True}


def _rejected(opened: OpenStore, request: Request) -> dict[str, Any]:
    """Return rejected records with a reason, after a key."""
    reason, count = request.query_params.get("reason", ""), _count(request)
    source, record = _number(request, "source", 0), _number(request, "record", 0)
    query = f"""
        SELECT source_id, record, detail FROM rejected
        WHERE reason = $reason AND (source_id > $source OR (source_id = $source AND
            coalesce(record + 1, 0) >= $record))
        ORDER BY source_id, record NULLS FIRST LIMIT {count + 1}"""
    values = {"reason": reason, "source": source, "record": record}
    require_intact_once(opened.store, opened.store.manifest.files_in("rejected"))
    with closing(opened.con.cursor()) as cursor:
        try:
            found = cursor.execute(query, values).fetchall()
        except QUERY_ERRORS as error:
            raise query_error(str(error), prefix_of(opened.store.path.resolve())) from error
    rows = [
        {"source": opened.rows.source(s), "record": r, "detail": detail} for s, r, detail in found[:count]
    ]
    after = found[count] if len(found) > count else None
    return {"rows": rows, "after": after and [after[0], 0 if after[1] is None else after[1] + 1]}


def _openings(opened: OpenStore, request: Request) -> dict[str, Any]:
    """Return a position of the tree, reached by moves from the empty board, and the moves played in it."""
    size = opened.store.manifest.board_size or 0
    moves = _moves(request, size)
    planes = Position.of_moves(moves, size).planes if size else ()
    boards = [np.flatnonzero(plane).tolist() for plane in planes] or [[], []]
    branches = opened.index.openings.branches(moves) if size else []
    return {
        "moves": moves,
        "blue": boards[0],
        "red": boards[1],
        "hexworld": hexworld_link(moves, size, BLUE) if size else None,
        "games": sum(branch.games for branch in branches),
        "won": [sum(branch.blue for branch in branches), sum(branch.red for branch in branches)],
        "branches": [vars(branch) for branch in branches],
    }


def _moves(request: Request, size: int) -> list[int]:
    text = request.query_params.get("moves", "")
    moves = [int(move) for move in parse_moves(text, size)] if text else []
    if len(moves) > DEPTH:
        raise ConfigError(
            "the tree of openings ends", found=f"{len(moves)} moves", expected=f"{DEPTH} at most"
        )
    return moves


def _sheet(opened: OpenStore, request: Request) -> dict[str, Any]:
    """Return consecutive positions before or after the shuffle."""
    order = _choice(request, "order", SHEET_ORDERS)
    split = _choice(request, "split", SPLITS)
    start, count = _number(request, "start", 0), _count(request)
    manifest = opened.store.manifest
    total = manifest.counts.get("positions", 0)
    if order == "after":
        total = sum(facts.rows for facts in manifest.files_in(f"shuffled/{split}").values())
        if not total:
            raise StoreError(
                f"the split {split} has no shuffled positions" if manifest.files_in("shuffled") else
                "the store is not shuffled, or its buckets were removed",
                hint="Run `hexdata shuffle` on the store, and reload this page.",
            )  # fmt: skip
    rows = opened.rows.sheet(order, split, start, count)
    return {"rows": rows, "start": start, "total": total}


def _board(opened: OpenStore, request: Request) -> Response:
    """Return the SVG of a position: of an id, of a game and ply, or after moves of an opening."""
    numbers = request.query_params.get("numbers") == "1"
    if "moves" in request.query_params:
        size = opened.store.manifest.board_size
        if not size:
            raise StoreError("the store has no positions, and therefore no board")
        position = Position.of_moves(_moves(request, size), size)
    else:
        position = find_position(opened.store, _number(request, "position"))
    return Response(
        position.svg(numbers=numbers),
        media_type="image/svg+xml",
        headers={"Content-Security-Policy": _IMAGE_POLICY},
    )
