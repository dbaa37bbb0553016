"""Fuzz targets for SQL and the page of a store, compared with a second evaluation by DuckDB."""

from __future__ import annotations

import functools
import json
import re
import threading
import urllib.parse
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, ClassVar

from binary_targets import small_store
from fuzz_target import BOTH, NEITHER, STRICTER, Target, require

from hexdata.browse.app import make_app
from hexdata.browse.library import BrowseLimits, Library
from hexdata.errors import ConfigError, HexdataError
from hexdata.selection.expression import check_expression
from hexdata.sql.catalog import open_catalog
from hexdata.sql.run import start_query
from hexdata.store import Store
from hexdata.store.session import QUERY_ERRORS, duckdb_session

__all__ = ["BrowseTarget", "ExpressionTarget", "QueryTarget"]

COLUMNS = {
    "board": "BLOB",
    "extra": "STRUCT(komi DOUBLE, visits INTEGER)",
    "flags": "VARCHAR[]",
    "move": "USMALLINT",
    "value": "FLOAT",
    "winner": "VARCHAR",
}
ROWS = (
    r"('\x00\xFF'::BLOB, {'komi': 0.5, 'visits': 7}, ['no-chain', 'x'], 3, 0.25, 'RED')",
    r"(''::BLOB, {'komi': 'nan'::DOUBLE, 'visits': NULL}, [], 65535, 'inf'::FLOAT, '12')",
    r"('a'::BLOB, NULL, [NULL], 0, -0.0, '')",
    r"(NULL, {'komi': -1e300, 'visits': -2147483648}, NULL, NULL, NULL, NULL)",
)
EXPRESSIONS = (
    *(
        "value > 0.5 AND winner = 'RED'",
        "CASE WHEN move IS NULL THEN 0 ELSE move % 13 END",
        "1; DROP TABLE x",
    ),
    *(
        "try_cast(winner AS integer) BETWEEN 1 AND 2",
        "extra.komi * 2 - abs(extra.visits)",
        "now()",
        "(SELECT 1)",
    ),
    *("lower(winner) IN ('red', 'blue') OR NOT (value < 0)", "octet_length(board) // 2", "random() < 0.5"),
    *("list_contains(flags, 'no-chain')", "read_text('/etc/passwd')", "sum(value) OVER ()", "value AS x"),
    *("'a' || chr(65) -- comment", "value::DECIMAL(4, 1) = $$1$$", "list_transform(flags, x -> x)"),
    *(
        "COLUMNS(*)",
        "1) FROM (SELECT 2",
        "coalesce(winner, 'x') LIKE '%E_'",
        "flags[1]",
        "extra.visits::VARCHAR",
    ),
    *("1, 2", "value, ", "round(value, 1)", "hash(move)", "list_sum([move, 2])", "greatest(move, value)"),
    *(
        "x'00' || board",
        "winner ~ '^R'",
        "date '2020-01-01' > '2019'",
        "epoch(1)",
        "setseed(0.1)",
        "nextval('x')",
    ),
    *(
        "getenv('HOME')",
        "current_setting('threads')",
        "list_extract(flags, 1)",
        "-move",
        "value IS DISTINCT FROM 1",
    ),
)
WORDS = tuple(sorted({word.encode() for text in EXPRESSIONS for word in re.findall(r"\w+|\W", text)}))


class FastSession:
    """A DuckDB session that reads the catalog of functions once per query, and parses in another session.

    Args:
        con: The session.
        parser: Session that parses, without an optimizer.
    """

    def __init__(self, con: Any, parser: Any) -> None:
        self._con = con
        self._parser = parser
        self._functions = functools.lru_cache(maxsize=4096)(lambda query: con.sql(query).fetchall())

    def sql(self, query: str, **options: Any) -> Any:
        """Run a query."""
        if "duckdb_functions()" in query:
            return _Rows(self._functions(query))
        if "json_serialize_sql" in query:
            return _Rows(self._parser.execute(query, options["params"]).fetchall())
        return self._con.sql(query, **options)


class _Rows:
    def __init__(self, rows: list[Any]) -> None:
        self._rows = rows

    def fetchall(self) -> list[Any]:
        """Return the rows."""
        return self._rows


class ExpressionTarget(Target):
    """`--where` and other expressions: each row has the value that another session computes.

    The other session has no optimizer, another time zone, the rows in another order, and NULL in all columns
    that hexdata does not list for the expression.
    """

    name = "expression"
    max_len: ClassVar[int] = 120
    words = WORDS

    def __init__(self, scratch: Path, stack: ExitStack) -> None:
        super().__init__(scratch, stack)
        self.con, self.other, parser = (
            stack.enter_context(duckdb_session(memory=128 << 20, threads=1)) for _ in range(3)
        )
        parser.execute("PRAGMA disable_optimizer")
        self.fast = FastSession(self.con, parser)
        names = ", ".join(f'"{name}"' for name in COLUMNS)
        rows = ", ".join(f"({number}, {row[1:]}" for number, row in enumerate(ROWS))
        for con in (self.con, self.other):
            casts = ", ".join(f'"{name}"::{kind} AS "{name}"' for name, kind in COLUMNS.items())
            con.execute(f"CREATE TABLE data AS SELECT id, {casts} FROM (VALUES {rows}) AS t(id, {names})")
        self.other.execute("SET TimeZone = 'Asia/Tokyo'")
        self.other.execute("PRAGMA disable_optimizer")
        for con in (self.con, self.other):
            con.execute("SET enable_external_access = false")
        self.refused = 0

    def seeds(self) -> list[bytes]:
        return [text.encode() for text in EXPRESSIONS]

    def check(self, raw: bytes) -> str:
        text = raw.decode("utf-8", "replace")
        try:
            expression = check_expression(self.fast, "--where", text, COLUMNS)  # type: ignore[arg-type]
        except ConfigError:
            self.refused += 1
            return NEITHER if self.refused % 8 else self._bound(text)
        require(expression.columns <= COLUMNS.keys(), f"columns {expression.columns}")
        query = f"SELECT id, [{expression.sql}] FROM data"
        require(len(self.con.extract_statements(query)) == 1, "several statements")
        kept = ", ".join(
            f'"{name}"' if name in expression.columns else f'NULL::{kind} AS "{name}"'
            for name, kind in COLUMNS.items()
        )
        rows = f"(SELECT id, {kept} FROM data ORDER BY id DESC) AS data"
        try:
            first = self.con.sql(query).fetchall()
            second = self.other.sql(f"SELECT id, [{expression.sql}] FROM {rows}").fetchall()
            if expression.type == "BOOLEAN":
                where = self.con.sql(f"SELECT id FROM data WHERE {expression.sql}").fetchall()
                require(
                    [row[0] for row in first if row[1] == [True]] == [row[0] for row in where],
                    "WHERE differs",
                )
        except QUERY_ERRORS:
            return BOTH
        require(len(first) == len(ROWS) and all(len(row) == 2 for row in first), "another number of rows")
        require(sorted(map(repr, first)) == sorted(map(repr, second)), f"{first} and {second}")
        return BOTH

    def _bound(self, text: str) -> str:
        """Return whether DuckDB accepts a refused expression."""
        try:
            statements = self.other.extract_statements(f"SELECT (\n{text}\n) FROM data")
            if len(statements) != 1 or statements[0].type.name != "SELECT":
                return NEITHER
            self.other.execute(f"EXPLAIN SELECT (\n{text}\n) FROM data")
        except (*QUERY_ERRORS, RuntimeError, UnicodeDecodeError):
            return NEITHER
        return STRICTER


SECRET = "the content of another file"
QUERIES = (
    *("SELECT count(*) FROM games", "FROM positions WHERE value > 0.5 LIMIT 3", "SELECT * FROM '@FILE'"),
    *("SELECT content FROM read_text('@FILE')", "COPY games TO '@FOLDER/x'", "ATTACH '@FOLDER/x.db' AS x"),
    *(
        "SELECT winner, count(*) FROM games GROUP BY ALL ORDER BY ALL",
        "PRAGMA database_list",
        "INSTALL httpfs",
    ),
    *(
        "WITH x AS (SELECT 1 AS a) SELECT a FROM x, range(3)",
        "EXPORT DATABASE '@FOLDER/x'",
        "SET threads = 1",
    ),
    *(
        "SELECT * FROM query('SELECT 1')",
        "SELECT * FROM glob('@FOLDER/*')",
        "FROM read_csv('@FILE')",
        "VALUES (1)",
    ),
    *(
        "SELECT getenv('HOME')",
        "SELECT * FROM duckdb_secrets()",
        "SUMMARIZE games",
        "DESCRIBE positions",
        "SHOW",
    ),
    *(
        "WITH RECURSIVE t(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM t WHERE n < 9) FROM t",
        "SELECT 1; SELECT 2",
    ),
    *(
        "SELECT current_setting('allowed_paths')",
        "CREATE VIEW v AS SELECT 1",
        "DROP VIEW games",
        "FROM query_table('games')",
    ),
    *(
        "SELECT list_transform([1], x -> x)",
        "SELECT * FROM sniff_csv('@FILE')",
        "FROM parquet_metadata('@FILE')",
    ),
    *(
        "SELECT (SELECT content FROM read_text('@FILE'))",
        "INSERT INTO games VALUES (1)",
        "LOAD json",
        "CALL pragma_version()",
    ),
)


class QueryTarget(Target):
    """Queries of `hexdata sql`: what is accepted changes nothing, and reads no other file.

    Other programs that read the same bytes do not exist here: an input counts as accepted if DuckDB runs it.
    """

    name = "query"
    max_len: ClassVar[int] = 160
    words = tuple(
        sorted({*WORDS, *(word.encode() for text in QUERIES for word in re.findall(r"@?\w+|\W", text))})
    )

    def __init__(self, scratch: Path, stack: ExitStack) -> None:
        super().__init__(scratch, stack)
        self.store = Store.open(small_store())
        self.folder = scratch / "outside"
        self.folder.mkdir()
        self.file = self.folder / "secret"
        self.file.write_text(SECRET)
        self.con = stack.enter_context(open_catalog(self.store, memory=400_000_000, threads=1))
        self.state = self._state()
        self.accepted = 0

    def _state(self) -> str:
        """Return settings, views, tables and attached databases of the session, without their numbers."""
        catalogs = [f"duckdb_{kind}() WHERE NOT internal" for kind in ("views", "tables", "databases")]
        parts = ("duckdb_settings()", *catalogs)
        columns = "COLUMNS(lambda name: NOT ends_with(name, '_oid'))"
        with closing(self.con.cursor()) as cursor:
            return repr(
                [cursor.sql(f"SELECT {columns} FROM {part} ORDER BY ALL").fetchall() for part in parts]
            )

    def seeds(self) -> list[bytes]:
        return [text.encode() for text in QUERIES]

    def check(self, raw: bytes) -> str:
        text = raw.decode("utf-8", "replace")
        text = text.replace("@FILE", str(self.file)).replace("@FOLDER", str(self.folder))
        with closing(self.con.cursor()) as cursor:
            timer = threading.Timer(0.1, cursor.interrupt)
            try:
                result = start_query(cursor, self.store, text)
            except HexdataError:
                return NEITHER
            timer.start()
            rows: list[Any] = []
            try:
                for batch in result.batches:
                    rows += batch.to_pylist()
                    if len(rows) > 50:
                        break
            except (HexdataError, *QUERY_ERRORS):
                pass
            except Exception as error:  # noqa: BLE001  # an interrupted query, as Arrow reports it
                require("INTERRUPT" in str(error), f"an error that is not hexdata's: {error!r}")
            finally:
                timer.cancel()
        require(SECRET not in repr(rows), "a query reads another file")
        require([path.name for path in self.folder.iterdir()] == ["secret"], "a query writes a file")
        self.accepted += 1
        if self.accepted % 10 == 0:
            require(self._state() == self.state, "a query changes the session")
        return BOTH


PATHS = (
    *(
        "/api/store",
        "/api/list?table=games&start=0&count=3",
        "/api/flagged?flag=duplicates",
        "/",
        "/board.svg?moves=a1",
    ),
    *(
        "/api/list?table=positions&sort=position_id&descending=1",
        "/api/rejected?reason=no-winner&source=0&record=0",
    ),
    *(
        "/api/game?game=0",
        "/api/position?position=0",
        "/api/openings?moves=a1b2",
        "/board.svg?position=1&numbers=1",
    ),
    *(
        "/api/sheet?order=before&split=train&start=0&count=2",
        "/api/list?filter=winner+%3D+'RED'",
        "/favicon.ico",
    ),
    *("/api/list?table=games&sort=(SELECT+1)", "/api/list?filter=1)%20FROM%20games;--", "/../etc/passwd"),
)


class BrowseTarget(Target):
    """Query strings of the page of a store: an answer or an error of hexdata, and never another file."""

    name = "browse"
    max_len: ClassVar[int] = 140
    words = (
        *(word.encode() for path in PATHS for word in re.findall(r"\w+=?|\W", path)),
        *(
            b"%00",
            b"%ff",
            b"read_text('@FILE')",
            b"9" * 19,
            b"-1",
            b"%C2%B2",
            b"after",
            b"val",
            b"&count=999999",
        ),
    )

    def __init__(self, scratch: Path, stack: ExitStack) -> None:
        super().__init__(scratch, stack)
        self.file = scratch / "secret"
        self.file.write_text(SECRET)
        library = Library(small_store(), BrowseLimits(900_000_000, 1), lambda text: None)
        stack.callback(library.close)
        library.start()
        library.wait()
        self.app = make_app(library, "name")

    def seeds(self) -> list[bytes]:
        return [*(path.encode() for path in PATHS), b"/api/list/?start=\xff"]

    def check(self, raw: bytes) -> str:
        text = raw.decode("latin-1").replace("@FILE", urllib.parse.quote(str(self.file)))
        path, _, query = text.partition("?")
        status, headers, body = self._answer(
            "/" + urllib.parse.unquote(path).removeprefix("/"), query.encode("latin-1")
        )
        require(status in (200, 204, 400, 404, 405, 503), f"status {status}")
        require(SECRET.encode() not in body, "the page shows another file")
        require(b"content-security-policy" in headers, "no policy")
        if headers.get(b"content-type", b"").startswith(b"application/json"):
            json.loads(body, parse_constant=lambda name: require(False, name))
        return BOTH if status in (200, 204) else NEITHER

    def _answer(self, path: str, query: bytes) -> tuple[int, dict[bytes, bytes], bytes]:
        """Run the application for one request, in this thread."""
        messages: list[dict[str, Any]] = []
        scope = {
            "type": "http",
            "method": "GET",
            "path": path,
            "raw_path": path.encode("utf-8", "replace"),
            "root_path": "",
            "query_string": query,
            "headers": [(b"host", b"127.0.0.1:80")],
            "server": ("127.0.0.1", 80),
            "scheme": "http",
        }

        async def send(message: dict[str, Any]) -> None:
            messages.append(message)

        async def receive() -> dict[str, Any]:
            return {"type": "http.disconnect"}

        _run(self.app(scope, receive, send))  # type: ignore[arg-type]
        body = b"".join(message.get("body", b"") for message in messages)
        return messages[0]["status"], dict(messages[0]["headers"]), body


def _run(awaitable: Any) -> None:
    import anyio

    async def main() -> None:
        await awaitable

    anyio.run(main)
