"""Filtered and sorted lists of games or positions, found by SQL in the background.

A list holds the ids of its rows, so every page of it is read equally fast. While the tables are scanned, the
rows found so far can already be read.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hexdata.errors import ConfigError, HexdataError
from hexdata.sql.check import query_error
from hexdata.sql.run import start_query
from hexdata.sql.views import select_files
from hexdata.storage import prefix_of
from hexdata.store import Store
from hexdata.store.session import QUERY_ERRORS, DuckDBPyConnection
from hexdata.store.sql_tree import check_length, parse_sql, quote_sql

__all__ = ["KEYS", "ListQuery", "Listing", "Listings"]

KEYS: Final = {"games": "game_id", "positions": "position_id"}
"""The tables that can be listed, with their keys."""
_KEPT: Final = 1_000_000
"""Maximum number of ids that a list holds: the first ones in its order."""
_LISTS: Final = 8
"""Number of lists that are kept."""
_RUNNING: Final = 2
"""Number of lists that are made at the same time."""
_ABANDONED: Final = 15.0
"""Seconds after the last request for a list that is being made, after which it is stopped."""
_CHECKING: Final = 10.0
"""Seconds that the check of the expressions may take: DuckDB computes constants in it."""
_STUCK: Final = 2.0
"""Seconds after an interrupt, after which a list that goes on is left to itself. Some functions never end."""
_LONGEST: Final = 2_000
"""Maximum number of characters of a filter or a sort key, which other sites may propose."""
_FIRST_CHUNK: Final = 131_072
_LAST_CHUNK: Final = 4_194_304
"""Rows that are scanned together, at first and later: the first rows are found early."""


@dataclass(frozen=True)
class ListQuery:
    """What a list contains.

    Attributes:
        table: "games" or "positions".
        filter: SQL condition on a row of the table; empty for all rows. Default "".
        sort: SQL expression of a number by which the rows are sorted; empty for the id. Default "".
        descending: Whether the largest come first. Default False.

    Raises:
        ConfigError: An expression is too long.
    """

    table: str
    filter: str = ""
    sort: str = ""
    descending: bool = False

    def __post_init__(self) -> None:
        for name, text in (("filter", self.filter), ("sort key", self.sort)):
            check_length(f"the {name}", text, _LONGEST)

    @property
    def is_whole_table(self) -> bool:
        """Whether the rows are those of the table in its order."""
        return not (self.filter or self.sort or self.descending)

    def sql(self, rows: str) -> str:
        """Return the query for the ids and the sort keys of the rows of a table."""
        key = KEYS[self.table]
        where = f" WHERE (\n{self.filter}\n)" if self.filter else ""
        sort = f"(\n{self.sort}\n)::DOUBLE" if self.sort else key
        return f"SELECT {key}, {sort} FROM {rows}{where}"


class Listing:
    """The ids of the rows of a list. Thread-safe.

    Attributes:
        total: Number of rows of the table.
        checked: Whether the expressions are known to be valid.
        scanned: Number of rows that have been examined.
        found: Number of rows of the list found so far. Only the first million of them can be read.
        complete: Whether the whole table has been examined.
        error: Error that ended the scan; None if there is none.
    """

    def __init__(self, query: ListQuery, total: int) -> None:
        self.query, self.total = query, total
        self.scanned = self.found = 0
        self.checked = self.complete = False
        self.error: HexdataError | None = None
        self.requested = time.monotonic()
        self._ids: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self._keys: npt.NDArray[np.float64] = np.empty(0, np.float64)
        self._lock = threading.Lock()

    @property
    def ended(self) -> bool:
        """Whether nothing more will be found."""
        return self.complete or self.error is not None

    @property
    def abandoned(self) -> bool:
        """Whether nobody has asked for a while for this list, which is not complete."""
        return not self.ended and time.monotonic() - self.requested > _ABANDONED

    def page(self, start: int, count: int) -> list[int]:
        """Return ids from index ``start`` on, at most ``count``."""
        self.requested = time.monotonic()
        with self._lock:
            return [int(number) for number in self._ids[start : start + count]]

    @property
    def readable(self) -> int:
        """Number of rows that can be read."""
        return len(self._ids)

    def add(self, ids: npt.NDArray[np.int64], keys: npt.NDArray[np.float64], scanned: int) -> None:
        """Add the rows found among the next ``scanned`` rows of the table."""
        self.found += len(ids)
        if self.query.sort or self.query.descending:
            keys = np.where(np.isnan(keys), np.inf, -keys if self.query.descending else keys)
            ids, keys = np.concatenate([self._ids, ids]), np.concatenate([self._keys, keys])
            order = np.lexsort((ids, keys))[:_KEPT]
            ids, keys = ids[order], keys[order]
        else:
            ids = np.concatenate([self._ids, ids[: _KEPT - len(self._ids)]])
        with self._lock:
            self._ids, self._keys, self.scanned = ids, keys, self.scanned + scanned


class Listings:
    """The lists that the readers of a page have asked for. Thread-safe.

    Args:
        con: Session of ``open_catalog``.
        store: The store of the session.
    """

    def __init__(self, con: DuckDBPyConnection, store: Store) -> None:
        self._con, self._store = con, store
        self._lists: OrderedDict[ListQuery, Listing] = OrderedDict()
        self._lock = threading.Lock()
        self._running = threading.Semaphore(_RUNNING)
        self._closed = threading.Event()
        self._cursors: set[DuckDBPyConnection] = set()

    def get(self, query: ListQuery, wait: float = 0.0) -> Listing:
        """Return a list, which is made in the background if it is new.

        Args:
            query: What the list contains.
            wait: Seconds to wait until the list is complete (default: 0).

        Raises:
            ConfigError: The filter or the sort key is not a valid expression.
            StoreError: A file of the store is damaged.
        """
        with self._lock:
            listing = self._lists.get(query)
            if listing is None or listing.abandoned:
                listing = Listing(query, self._store.manifest.counts.get(query.table, 0))
                self._lists[query] = listing
                threading.Thread(target=self._make, args=(listing,), daemon=True).start()
            self._lists.move_to_end(query)
            while len(self._lists) > _LISTS:
                self._lists.popitem(last=False)
        listing.requested = time.monotonic()
        deadline = listing.requested + wait
        while not listing.ended and time.monotonic() < deadline:
            time.sleep(0.01)
        if listing.error is not None:
            self._forget(listing)  # the next request tries again
            raise listing.error
        return listing

    def close(self) -> None:
        """Stop all scans."""
        self._closed.set()
        with self._lock:
            for cursor in self._cursors:
                cursor.interrupt()

    def _forget(self, listing: Listing) -> None:
        with self._lock:
            if self._lists.get(listing.query) is listing:
                del self._lists[listing.query]

    def _check(self, cursor: DuckDBPyConnection, query: ListQuery) -> None:
        """Check the expressions as ``hexdata sql`` checks a query, which gives the same messages."""
        start_query(cursor, self._store, f"{query.sql(query.table)} LIMIT 0")
        for name, text in (("filter", query.filter), ("sort", query.sort)):
            if text and not _is_expression(cursor, text):
                raise ConfigError(f"the {name} is not one expression", found=quote_sql(text))
        cursor.execute("ROLLBACK")

    def _make(self, listing: Listing) -> None:
        with closing(self._con.cursor()) as cursor:
            with self._lock:
                self._cursors.add(cursor)
            self._running.acquire()
            threading.Thread(target=self._watch, args=(listing, cursor), daemon=True).start()
            try:
                self._check(cursor, listing.query)
                listing.checked = True
                for rows, scanned in self._chunks(listing):
                    if self._closed.is_set() or listing.abandoned:
                        self._forget(listing)
                        raise ConfigError("the list is not needed any more")
                    ids, keys = self._read(cursor, listing.query.sql(rows))
                    listing.add(ids, keys, scanned)
                listing.complete = True
            except HexdataError as error:
                listing.error = listing.error or error
            except BaseException as error:  # noqa: BLE001  # the reader must see it, the thread has no caller
                listing.error = ConfigError("the list cannot be made", found=str(error).partition("\n")[0])
            finally:
                with self._lock:
                    self._cursors.discard(cursor)

    def _watch(self, listing: Listing, cursor: DuckDBPyConnection) -> None:
        """Interrupt a list that nobody asks for or whose check takes long; then let another one start."""
        begun, interrupted = time.monotonic(), None
        while not listing.ended:
            now = time.monotonic()
            is_slow = not listing.checked and now - begun > _CHECKING
            if listing.abandoned or self._closed.is_set() or is_slow:
                cursor.interrupt()
                interrupted = interrupted or now
            if interrupted is not None and now - interrupted > _STUCK:
                listing.error = ConfigError("computing the filter or the sort key takes too long")
                if not is_slow:
                    self._forget(listing)
            time.sleep(0.05)
        self._running.release()

    def _read(
        self, cursor: DuckDBPyConnection, sql: str
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        try:
            found: dict[str, npt.NDArray[Any]] = cursor.execute(sql).fetchnumpy()
        except QUERY_ERRORS as error:
            raise query_error(str(error), prefix_of(self._store.path.resolve())) from error
        ids, keys = found.values()
        return np.asarray(ids, np.int64), np.ma.filled(np.ma.asarray(keys, np.float64), np.nan)

    def _chunks(self, listing: Listing) -> Iterator[tuple[str, int]]:
        """Yield the SQL of consecutive ranges of rows of the table, and their number of rows."""
        table = listing.query.table
        key = KEYS[table]
        files = [(name, facts.rows) for name, facts in self._store.manifest.files_in(table).items()]
        start, size = 0, _FIRST_CHUNK
        while start < listing.total:
            stop = min(start + size, listing.total)
            names, first = [], 0
            for name, rows in files:
                if first < stop and first + rows > start:
                    names.append(name)
                first += rows
            selected = select_files(self._store, table, names)
            inside = f"SELECT * FROM ({selected}) WHERE {key} >= {start} AND {key} < {stop}"
            yield f"({inside}) AS {table}", stop - start
            start, size = stop, min(2 * size, _LAST_CHUNK)


def _is_expression(con: DuckDBPyConnection, text: str) -> bool:
    """Return whether a text is one expression, not the end of one query and the beginning of another."""
    try:
        (statement,) = parse_sql(con, f"SELECT (\n{text}\n)")
    except ValueError:
        return False
    node = statement["node"]
    source = node.get("from_table") or {}
    return node["type"] == "SELECT_NODE" and len(node["select_list"]) == 1 and source.get("type") == "EMPTY"
