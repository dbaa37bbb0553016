"""An open store for the page, opened again when the store changes; and its filtered and sorted lists.

A list is found by SQL in the background. It holds the ids of its rows, so that every page of it is read
equally fast. The ids of a list that is not sorted can be read while the query runs.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np

from hexdata.browse.openings import Openings
from hexdata.checks import check_count
from hexdata.errors import ConfigError, HexdataError
from hexdata.loader import Loader
from hexdata.selection.expression import parse_expression
from hexdata.sql import named_query, open_catalog
from hexdata.sql.run import query_error, start_query
from hexdata.storage import AnyPath, prefix_of, storage_of
from hexdata.storage.local import Version
from hexdata.store import Store
from hexdata.store.integrity import require_intact_once
from hexdata.store.manifest import MANIFEST_NAME
from hexdata.store.session import (
    QUERY_ERRORS,
    DuckDBPyConnection,
    QueryLimits,
    check_length,
    read_parquet_sql,
)
from hexdata.text import printable

KEYS: Final = {"games": "game_id", "positions": "position_id"}
"""The tables that can be listed, with their keys."""
_KEPT: Final = 1_000_000
"""Maximum number of ids that a list holds: the first ones in its order."""
_LISTS: Final = 8
"""Number of lists that are kept."""
_RUNNING: Final = 2
"""Number of queries that run at the same time: each can use all memory of the session."""
_ABANDONED: Final = 15.0
"""Seconds after the last request for a list that is being made, after which it is stopped."""
_STARTING: Final = 10.0
"""Seconds until a query must have started: DuckDB computes constants before."""
_STUCK: Final = 2.0
"""Seconds after an interrupt, after which a query is left to itself. Some functions never end."""
_LONGEST: Final = 2_000
"""Maximum number of characters of a filter or a sort key, which other sites may propose."""
_CHECKED_EVERY: Final = 3.0
"""Minimum number of seconds between two checks whether the store has changed."""
_FIELDS: Final = (
    *("board", "policy", "move", "position_id", "game_id", "position_in_game", "total_positions"),
    *("player_to_move", "value", "value_sample_tier", "policy_weight"),
)
"""Fields of a batch that are facts of a position; the optional columns are others."""


@dataclass(frozen=True)
class BrowseOptions(QueryLimits):
    """Options of :func:`hexdata.browse.browse_store`.

    Attributes:
        memory: Total memory in bytes. Default 1 GB.
        threads: Number of DuckDB threads. Default None: one per core, as far as the memory allows.
        port: Port of the page, 0 for any free one. Default None: 8642, or any free one if it is in use.

    Raises:
        ConfigError: A value is out of range.
        BudgetError: The memory is too small.
    """

    BASE: ClassVar[int] = 450 << 20
    THREAD: ClassVar[int] = 60 << 20
    BUFFERS: ClassVar[int] = 100 << 20
    PAGES: ClassVar[int] = 250 << 20
    """Part of ``BASE`` for the server, the openings and the rows of pages, outside the SQL session."""

    port: int | None = None

    def __post_init__(self) -> None:
        if self.port is not None:
            check_count("port", self.port, 0, 65_535)
        super().__post_init__()


@dataclass(frozen=True)
class ListQuery:
    """The condition and the order of a list.

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
    def is_sorted(self) -> bool:
        """Whether the rows are in another order than in the table."""
        return bool(self.sort or self.descending)

    @property
    def rows_sql(self) -> str:
        """The query for the ids of all rows, in the order of the table."""
        # Line feeds, since a filter may end with a comment, which would hide the bracket.
        return f"SELECT {KEYS[self.table]} FROM {self.table} WHERE (\n{self.filter or 'true'}\n)"

    @property
    def ids_sql(self) -> str:
        """The query for the ids of the first rows in the order of the list. Unknown numbers are last."""
        if not self.is_sorted:
            return self.rows_sql
        key = KEYS[self.table]
        # DuckDB sorts NaN above all numbers; as null it is last in both orders.
        sort = f"nullif((\n{self.sort or key}\n)::DOUBLE, 'nan'::DOUBLE)"
        order = "DESC" if self.descending else "ASC"
        return f"{self.rows_sql} ORDER BY {sort} {order} NULLS LAST, {key} LIMIT {_KEPT}"


class _List:
    """A list, and the session in which its query runs.

    Attributes:
        ids: Ids of the first rows found so far.
        found: Number of rows found so far, or of all rows.
        started: Whether the rows of the query are being read.
        ended: Set when nothing more will be found.
        error: Error that ended the query; None if there is none.
        is_told: Whether a request has received the error, so that the next one tries again.
        is_stuck: Whether the query was left to itself.
        requested: Time of the last request.
    """

    def __init__(self, cursor: DuckDBPyConnection) -> None:
        self.cursor, self.ended = cursor, threading.Event()
        self.ids, self.found, self.started = np.empty(0, np.int64), 0, False
        self.error: HexdataError | None = None
        self.is_told = self.is_stuck = False
        self.requested = time.monotonic()

    def make(self, query: ListQuery, con: DuckDBPyConnection, store: Store) -> None:
        """Read the rows, until there are no more or the session is interrupted."""
        try:
            with closing(self.cursor) as cursor:
                if query.is_sorted:  # the number of rows, of which only the first are sorted
                    rows = start_query(cursor, store, f"SELECT count(*) FROM ({query.rows_sql})").batches
                    self.found = sum(batch[0][0].as_py() for batch in rows)
                    # start_query has left a transaction open, and begins the next one.
                    cursor.execute("ROLLBACK")
                result = start_query(cursor, store, query.ids_sql)
                # Invalid SQL has failed above, with the message of DuckDB. This finds texts that close the
                # brackets, such as "true) UNION SELECT (1".
                for text in filter(None, (query.filter, query.sort)):
                    with closing(con.cursor()) as parsing:
                        parse_expression(parsing, text)
                self.started = True
                for batch in result.batches:
                    self.found += 0 if query.is_sorted else batch.num_rows
                    # A new array each time, because requests read the old one meanwhile.
                    self.ids = np.concatenate([self.ids, batch[0].to_numpy()[: _KEPT - len(self.ids)]])
        except HexdataError as fault:
            self.error = fault
        except ValueError as fault:  # of parse_expression, which may add a hint as a second argument
            self.error = ConfigError(f"the filter or the sort key is not one expression: {fault.args[0]}")
        except BaseException as fault:  # noqa: BLE001  # the reader must see it, the thread has no caller
            self.error = ConfigError("the list cannot be made", found=str(fault).partition("\n")[0])
        self.ended.set()


class OpenStore:
    """A store as it was when it was opened. Its tables are compared with their digests. Thread-safe.

    Args:
        path: Folder or address of the store.
        limits: Memory and threads.
        stack: Closes the SQL session.

    Attributes:
        store: The store.
        size: Board size; 0 for a store without positions.
        con: SQL session. Use a cursor of it per request.
        is_closed: Set when nobody reads the store any more.
        openings: The first moves of its games.
        sources: Name of each source, by its id.
        flags: Number of games with each flag, the most frequent first.
        reasons: Number of rejected records by reason, the most frequent first.
        splits: Number of positions of the games of each split.
    """

    def __init__(self, path: AnyPath, limits: BrowseOptions, stack: ExitStack) -> None:
        self.store = Store.open(path)
        self.size = self.store.manifest.board_size or 0
        for table in ("games", "positions", "rejected", "sources"):
            # Once for each opened store, so that no request waits for digests.
            require_intact_once(self.store, self.store.manifest.files_in(table))
        memory = limits.memory - limits.PAGES
        self.con = stack.enter_context(open_catalog(self.store, memory=memory, threads=limits.threads))
        self.openings, self.is_closed = Openings(self.store), False
        positions = "SELECT split, sum(positions) AS n FROM games WHERE positions > 0 GROUP BY split"
        self.sources, self.flags, self.reasons, self.splits = (
            {row[key]: row[value] for row in self.query(query)}
            for key, value, query in (
                ("source_id", "name", "SELECT source_id, name FROM sources"),
                ("flag", "games", named_query("flags")),
                ("reason", "records", named_query("rejects")),
                ("split", "n", positions),
            )
        )
        self._loaders: dict[str, Loader] = {}
        self._opening = threading.Lock()
        self._lists: OrderedDict[ListQuery, _List] = OrderedDict()
        self._lock, self._slots = threading.Lock(), threading.Semaphore(_RUNNING)

    def query(self, text: str, **values: object) -> list[dict[str, Any]]:
        """Return the rows of a query of hexdata's over the views of the store, with printable texts."""
        with closing(self.con.cursor()) as cursor:
            try:
                found = cursor.execute(text, values)
                names = [column[0] for column in found.description]
                # A name from a stranger could change the direction of the text around it.
                rows = ([printable(v) if isinstance(v, str) else v for v in row] for row in found.fetchall())
                return [dict(zip(names, row, strict=True)) for row in rows]
            except QUERY_ERRORS as error:
                raise query_error(str(error), prefix_of(self.store.path.resolve())) from error

    def read(self, table: str, ids: Sequence[int]) -> list[dict[str, Any]]:
        """Return the rows of a table with these ids, in their order. An id is the index of its row."""
        if not ids:
            return []
        rows, key = self.store.rows(table), KEYS[table]
        # Only files with these rows: DuckDB reads the footer of each file. Statistics skip other row groups.
        parts = [rows.part(number, number + 1).files for number in ids]
        files = read_parquet_sql(sorted({path.resolve() for part in parts for path, _ in part}))
        found = self.query(f"FROM {files} WHERE {key} IN ({', '.join(map(str, ids))})")
        return sorted(found, key=lambda row: ids.index(row[key]))

    def loader(self, split: str) -> Loader:
        """Return ``Loader(store, split=split, mode="games")``, with the fields that a board shows.

        The first call opens it, which takes about a minute for 100 million positions.
        """
        with self._opening:
            if split not in self._loaders:
                fields = [*dict.fromkeys((*_FIELDS, *self.store.manifest.targets))]
                options: dict[str, Any] = {"mode": "games", "board": "packed", "fields": fields}
                self._loaders[split] = Loader(self.store.path, split=split, **options)
            return self._loaders[split]

    def listed(self, query: ListQuery, wait: float) -> _List:
        """Return a list, which is made in the background if it is new.

        Args:
            query: What the list contains.
            wait: Seconds to wait until the list is complete.

        Raises:
            ConfigError: The filter or the sort key is not a valid expression.
            StoreError: A file of the store is damaged.
        """
        with self._lock:
            found = self._lists.get(query)
            # After an error, try again. A query that was left to itself still runs; another one would take a
            # further core.
            if found is None or (found.is_told and not found.is_stuck):
                found = self._lists[query] = _List(self.con.cursor())
                threading.Thread(target=self._watch, args=(query, found), daemon=True).start()
            self._lists.move_to_end(query)
            # The query of a list that is removed here stops when nobody has asked for it for some seconds.
            while len(self._lists) > _LISTS:
                self._lists.popitem(last=False)
        found.requested = time.monotonic()
        # Outside of the lock, so that requests for other lists do not wait.
        found.ended.wait(wait)
        if found.error is not None:
            found.is_told = True
            raise found.error
        return found

    def _watch(self, query: ListQuery, found: _List) -> None:
        """Make a list in a thread; stop it if it does not start or nobody asks for it any more."""
        with self._slots:
            # The time spent waiting for a slot does not count.
            begun = time.monotonic()
            # A daemon, because a function of DuckDB that never ends must not keep the process alive.
            worker = threading.Thread(target=found.make, args=(query, self.con, self.store), daemon=True)
            worker.start()
            while not found.ended.wait(0.1):
                now = time.monotonic()
                is_slow = now - begun > _STARTING and not found.started
                is_abandoned = now - found.requested > _ABANDONED or self.is_closed
                if is_slow or is_abandoned:
                    found.is_told = is_abandoned  # nobody waits for the error
                    found.cursor.interrupt()
                    worker.join(_STUCK)
                    break
            if not found.ended.is_set():
                found.is_stuck = True
                found.error = ConfigError("computing the filter or the sort key takes too long")
                found.ended.set()


class Library:
    """The store that the page shows, opened by the first request. Thread-safe.

    Args:
        path: Folder or address of the store.
        limits: Memory and threads.
        note: Called when the store is opened.
    """

    def __init__(self, path: AnyPath, limits: BrowseOptions, note: Callable[[str], None]) -> None:
        self._path, self._limits, self._note = path, limits, note
        self._lock = threading.Lock()
        self._stack = ExitStack()
        self._open: OpenStore | None = None
        self._version: Version | None = None
        self._checked = 0.0

    def current(self) -> OpenStore:
        """Return the open store. It is opened again if it has changed; other requests then wait.

        Raises:
            HexdataError: It cannot be opened. The next call tries again.
        """
        with self._lock:
            manifest = storage_of(self._path / MANIFEST_NAME)
            if time.monotonic() - self._checked > _CHECKED_EVERY and manifest.version() != self._version:
                self._close()
            if self._open is None:
                self._note(f"opening {self._path}")
                # Before the store is opened: a change while it is opened is noticed by a later request.
                self._version = manifest.version()
                with ExitStack() as stack:  # closed on an error, which the session translates
                    self._open = OpenStore(self._path, self._limits, stack)
                    self._stack = stack.pop_all()
            self._checked = time.monotonic()
            return self._open

    def close(self) -> None:
        """End the SQL session."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._open is not None:
            self._open.is_closed = True
        self._open = None
        with suppress(Exception):  # a function that cannot be interrupted keeps its session until the end
            self._stack.close()
