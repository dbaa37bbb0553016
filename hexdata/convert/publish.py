"""The second pass: writes the parts of the store from the spools, with final ids and values."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, groupby, islice, starmap
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from hexdata.convert.options import ConvertOptions
from hexdata.convert.shuffled import RESERVED_MEMORY
from hexdata.convert.spool import REJECTED, Source, Spool
from hexdata.convert.targets import target_columns
from hexdata.errors import StoreError
from hexdata.games.convention import Votes, convert_values
from hexdata.games.find import with_game_columns
from hexdata.games.findings import (
    Flag,
    column,
    end_reasons,
    flag_lists,
    flags_of,
    players_of,
    split_of,
    winners_of,
)
from hexdata.progress import Progress
from hexdata.retry import repeats_on_disk
from hexdata.schema import KEPT_PREFIX, WINNERS, games_schema, positions_schema, sources_schema
from hexdata.storage import AnyPath
from hexdata.store import Store
from hexdata.store.files import FileFacts
from hexdata.store.parquet import open_parquet, read_batches, read_parquet, write_parquet
from hexdata.store.session import duckdb_session, quote, read_parquet_sql

_SOURCES_AT_ONCE: Final = 256
"""Rows of the table sources that are made at a time, since headers may be long."""
_OF_SOURCES: Final = ("source_id", "name", "bytes", "sha256")
_OF_FACTS: Final = ("format", "records", "positions", "games", "rejected")
_OF_RUNS: Final = ("model", "simulations", "temperature", "seed", "commit")
"""Columns of the table sources, by the object that has their values."""


class Group(NamedTuple):
    """Consecutive sources of one spool whose rows are written alike: their ids continue."""

    first: Source
    """The first source. What is decided for it holds for all."""
    positions: int
    """Number of their positions."""
    stop_row: int
    """Row after their last position in the spool."""
    games: tuple[int, int]
    """The first of their games in the spool, and the one after the last."""
    source_ids: npt.NDArray[np.int32]
    """``source_id`` of each game."""


def groups_of(sources: Iterable[Source]) -> list[Group]:
    """Divide consecutive sources with positions into groups."""

    def key(source: Source) -> tuple[Any, ...]:
        facts = source.facts
        return (
            *(source.folder, facts.spool, source.owns_games, source.first_position - source.first_row),
            *(source.first_game - source.first_spooled_game, source.convention, source.origins),
            *(source.targets, facts.filled),
        )

    groups = []
    for _, members in groupby((source for source in sources if source.facts.positions), key=key):
        listed = [*members]
        first, last = listed[0], listed[-1]
        ids = np.repeat(
            np.array([source.source_id for source in listed], np.int32),
            [source.facts.games for source in listed],
        )
        positions = sum(source.facts.positions for source in listed)
        stop_row = last.first_row + last.facts.spooled
        groups.append(Group(first, positions, stop_row, (first.games[0], last.games[1]), ids))
    return groups


def part_files(groups: Sequence[Group]) -> dict[str, int]:
    """Return the files of a part of the store, relative to the store, with their numbers of rows.

    Args:
        groups: The groups of the part. The first source is in the names of the files.
    """
    name = f"part-{groups[0].first.source_id:06d}.parquet"
    files = {f"positions/{name}": sum(group.positions for group in groups)}
    if owners := [group for group in groups if group.first.owns_games]:
        files[f"games/{name}"] = sum(len(group.source_ids) for group in owners)
    return files


def publish_part(
    store: AnyPath,
    groups: Sequence[Group],
    board_size: int,
    targets: Sequence[str],
    options: ConvertOptions,
    duplicates: pa.Table,
) -> dict[str, FileFacts]:
    """Write the files of a part, in a worker; return their facts by path relative to the store.

    Args:
        store: The store.
        groups: The sources with positions of one batch.
        board_size: N.
        targets: Optional columns of positions in the store.
        options: Options of the run, for the splits.
        duplicates: The duplicates among the games of the part, as ``duplicates_among`` returns them.

    Raises:
        StoreError: Rows are missing from the temporary files.
    """
    positions, facts = positions_schema(board_size, targets), {}
    owners = [group for group in groups if group.first.owns_games]
    for name, count in part_files(groups).items():
        if name.startswith("positions/"):
            schema, tables = positions, (_positions(group, board_size, positions) for group in groups)
        else:
            schema, tables = games_schema(), (_games(group, options, duplicates) for group in owners)
        facts[name] = write_parquet(store / name, schema, chain.from_iterable(tables), replace=False)
        # The ids were assigned by the facts of the sources, so every part must have the rows that they state.
        if (rows := facts[name].rows) != count:
            reason = f"{name} has {rows:,} of {count:,} rows: temporary files lack the others"
            hint = "Remove the folder and run the command again."
            raise StoreError(reason, path=groups[0].first.folder, hint=hint)
    return facts


def widened_name(name: str) -> str:
    """Return the name of a part of positions when it gets more columns: part-000000-1 follows part-000000."""
    number, _, revision = name.removeprefix("positions/part-").removesuffix(".parquet").partition("-")
    return f"positions/part-{number}-{int(revision or 0) + 1}.parquet"


def widen_part(
    store: AnyPath, name: str, facts: FileFacts, widened: str, schemas: tuple[pa.Schema, pa.Schema]
) -> dict[str, FileFacts]:
    """Write a part of positions again with all optional columns of the store, in a worker; return its facts.

    Args:
        store: The store.
        name: Name of the part.
        facts: Its facts, which are compared with the bytes that are read.
        widened: Name of the new file.
        schemas: Schema of the part, and that of the new file.
    """
    with open_parquet(store / name, schemas[0], facts) as file:
        tables = (_with_nulls(pa.table(batch), schemas[1]) for batch in read_batches(file, schemas[0]))
        return {widened: write_parquet(store / widened, schemas[1], tables, replace=False)}


def _with_nulls(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return positions with the columns of ``schema``: null in the optional ones that they lack."""
    for field in schema:
        if field.name not in rows.column_names:
            rows = rows.append_column(field, pa.nulls(rows.num_rows, field.type))
    return rows.select(schema.names).cast(schema)


def _positions(group: Group, board_size: int, schema: pa.Schema) -> Iterator[pa.Table]:
    """Yield the positions of sources that are written alike, in record order."""
    first, convention = group.first, group.first.convention or "blue-is-0"
    position_id, first_game = first.first_position, first.first_game - first.first_spooled_game
    for raw in starmap(with_game_columns, first.spool.positions(first.first_row, group.stop_row)):
        value = column(raw, "value", np.nan)
        stored = convert_values(value, convention).astype(np.float32)
        winner = raw.column("winner").cast(pa.int8())
        columns = {
            "position_id": pa.array(np.arange(position_id, position_id + raw.num_rows)),
            "game_id": pc.add(raw.column("game").cast(pa.int64()), first_game),
            "position_in_game": raw.column("ply"),
            "total_positions": raw.column("total"),
            "value": pa.array(stored),
            "player_to_move": players_of(raw, board_size),
            "winner": pa.DictionaryArray.from_arrays(winner, pa.array(WINNERS, pa.string())),
            **{name: raw.column(name) for name in ("board", "move", "policy", "value_sample_tier")},
            **target_columns(raw, first.targets, convention),
        }
        # Values of the source that its columns in the store do not state, by row and key.
        kept: dict[int, dict[str, Any]] = {}
        restored = convert_values(stored.astype(np.float64), convention)
        # Compared as bits: as numbers, -0.0 equals 0.
        for row in np.flatnonzero(value.view(np.uint64) != restored.view(np.uint64)).tolist():
            kept.setdefault(row, {})["value"] = float(value[row])
        file_idx, line_idx = column(raw, "file_idx", -1), column(raw, "line_idx", -1)
        # An id that identifies no game is in no row of games.
        for row in np.flatnonzero((line_idx >= 0) & (column(raw, "game", -1) < 0)).tolist():
            kept.setdefault(row, {})["game_id"] = [int(file_idx[row]), int(line_idx[row])]
        for name in first.facts.filled:
            stated = column(raw, name, -1)
            differs = stated != columns[name].cast(pa.int64()).fill_null(-1).to_numpy()
            for row in np.flatnonzero(differs).tolist():
                kept.setdefault(row, {})[name] = int(stated[row]) if stated[row] >= 0 else None
        columns["metadata"] = _with_kept(raw.column("metadata"), kept)
        position_id += raw.num_rows
        yield _with_nulls(pa.table(columns), schema)


def _with_kept(metadata: pa.Array, kept: Mapping[int, Mapping[str, Any]]) -> pa.Array:
    """Return ``metadata`` with the entries of ``kept`` added under keys with ``KEPT_PREFIX``."""
    if not kept:
        return metadata
    texts = metadata.to_pylist()
    for row, entries in kept.items():
        content = json.loads(texts[row] or "{}") | {KEPT_PREFIX + key: each for key, each in entries.items()}
        texts[row] = json.dumps(dict(sorted(content.items())), separators=(",", ":"))
    return pa.array(texts, pa.string())


def _names_of(winners: npt.NDArray[np.int64]) -> pa.Array:
    """Return the texts of winners, (G,), for the table games; null for -1."""
    return pa.array(WINNERS, pa.string()).take(pa.array(winners, mask=winners < 0))


def _games(group: Group, options: ConvertOptions, duplicates: pa.Table) -> Iterator[pa.Table]:
    """Yield the games of sources that are written alike, in the order of their ids."""
    first, convention = group.first, group.first.convention or "blue-is-0"
    schema, origins, done = games_schema(), dict(first.origins), 0
    for games in first.spool.batches("games", None, *group.games):
        chosen = slice(done, done + games.num_rows)
        game_id = first.first_game + np.arange(chosen.start, chosen.stop)
        # Null for games that are no duplicates.
        own = duplicates.take(pc.index_in(pa.array(game_id), duplicates["game_id"]))
        found = games.column("findings").to_numpy()
        flags = flags_of(found, convention) | own["flags"].fill_null(0).to_numpy()
        named = [origins.get(file_idx) for file_idx in column(games, "file_idx", -1).tolist()]
        winner = winners_of(games, convention)
        hashes = games.column("game_hash").to_pylist()
        columns = {
            "game_id": pa.array(game_id),
            "source_id": pa.array(group.source_ids[chosen]),
            "origin": pc.coalesce(games.column("origin"), pa.array(named, pa.string())),
            "winner": _names_of(winner),
            "end_reason": end_reasons(found, winner, games.column("end_reason")),
            "duplicate_of": own["duplicate_of"],
            "split": pa.array([split_of(each, options.val, options.test) for each in hashes], pa.string()),
            "flags": flag_lists(flags),
        }
        columns |= {name: games.column(name) for name in schema.names if name not in columns}
        done += games.num_rows
        yield pa.table(columns, schema=schema)


def source_batches(
    sources: Sequence[Source], flags: Mapping[int, Mapping[str, int]], *, salvage: bool
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of sources in the table sources, with the schema ``sources_schema()``.

    Args:
        sources: The sources.
        flags: Number of games with each flag, by ``source_id``.
        salvage: Whether the sources were read for salvage.
    """
    rows = _headers(sources)
    while batch := [*islice(rows, _SOURCES_AT_ONCE)]:
        listed = [(source, source.facts) for source, _ in batch]
        dates = pa.array([facts.run.get("date") for _, facts in listed], pa.string())
        found = [flags.get(source.source_id, {}) for source, _ in listed]
        columns: dict[str, Any] = {
            **{name: [getattr(each, name) for each, _ in listed] for name in _OF_SOURCES},
            **{name: [getattr(facts, name) for _, facts in listed] for name in _OF_FACTS},
            **{name: [facts.run.get(name) for _, facts in listed] for name in _OF_RUNS},
            "date": dates.cast(pa.date32()),
            "value_sense": [source.convention for source, _ in listed],
            "value_sense_evidence": [
                _evidence(facts.votes, facts.ballots, source.decision and source.decision.by)
                for source, facts in listed
            ],
            "header": [_with_continuation(*each) for each in batch],
            "notes": [json.dumps(source.notes) if source.notes else None for source, _ in listed],
            "flags": [json.dumps(dict(sorted(own.items()))) if own else "{}" for own in found],
            "salvaged": [facts.damage is not None if salvage else None for _, facts in listed],
        }
        yield pa.RecordBatch.from_pydict(columns, sources_schema())


def _with_continuation(source: Source, header: str) -> str:
    """Return a header, JSON text, with the sidecar of the source and the source that it continues."""
    added: dict[str, Any] = {}
    # Also of a refused file, whose format is "unknown": a later run reads it again with another sidecar.
    if source.sidecar is not None and source.facts.format in ("trmph", "unknown"):
        added["sidecar"] = msgspec.structs.asdict(source.sidecar)
    if source.part is not None:
        added["continues"] = {"source_id": source.continues, "bytes": source.part.start}
    return json.dumps(json.loads(header) | added) if added else header


@lru_cache(maxsize=256)  # many small sources have the same
def _evidence(votes: Votes, ballots: Votes, decided_by: str | None) -> str:
    """Return the evidence for a value convention as JSON text: votes per position, and those that decided."""
    evidence = {
        "chains": votes.chains,
        "winners": votes.winners,
        "given": decided_by == "given",
        "by": decided_by,
        "counted": {"chains": ballots.chains, "winners": ballots.winners},
    }
    return json.dumps(evidence)


def _headers(sources: Iterable[Source]) -> Iterator[tuple[Source, str]]:
    """Yield sources with their headers as JSON texts."""
    for folder, members in groupby(sources, key=lambda source: source.folder):
        batches = (batch["header"].to_pylist() for batch in Spool(folder).batches("headers"))
        texts = enumerate(chain.from_iterable(batches))  # also of sources that are left out
        for source in members:
            # Sources are in the order of their numbers, so that one pass over the texts suffices.
            is_read = source.facts.failure is None
            yield source, next(text for i, text in texts if i == source.number) if is_read else "{}"


def rejected_batches(sources: Iterable[Source]) -> Iterator[pa.RecordBatch]:
    """Yield the rejected records of sources, in their order.

    The spool of several small sources is read once; that of a large source is never held in memory.
    """
    groups: list[list[Source]] = []
    for source in sources:
        # Files that were rejected as a whole may lie between the sources of a spool.
        if groups and (source.facts.failure or source.spool == groups[-1][0].spool):
            groups[-1].append(source)
        else:
            groups.append([source])
    for group in groups:
        failures = [(s.source_id, None, *s.facts.failure) for s in group if s.facts.failure]
        whole = [dict(zip(REJECTED.names, row, strict=True)) for row in failures]
        read = [source for source in group if source.facts.failure is None]
        batches = chain(_spooled_rejections(read), [pa.RecordBatch.from_pylist(whole, REJECTED)])
        if len(read) > 1:
            # The sort is stable: the positions of a source that were cut off stay after its other records.
            rows = pa.Table.from_batches(batches, REJECTED)
            batches = chain(rows.take(pc.sort_indices(rows["source_id"])).to_batches())
        yield from batches


def _spooled_rejections(sources: Sequence[Source]) -> Iterator[pa.RecordBatch]:
    """Yield the rejected records of some sources of one spool, then their positions that were cut off."""
    if not sources:
        return
    ids = np.full(sources[-1].index + 1, -1, np.int32)
    ids[[source.index for source in sources]] = [source.source_id for source in sources]
    spool = sources[0].spool
    for batch in chain(spool.batches("rejected"), spool.batches("cut")):
        # The others are of sources that are left out because of their board size.
        batch = batch.filter(pc.less(batch.column("source_id"), len(ids)))
        numbers = pa.array(ids[batch.column("source_id").to_numpy()])
        yield batch.set_column(0, REJECTED.field(0), numbers).filter(pc.greater_equal(numbers, 0))


# Duplicate games. DuckDB finds the first game of each hash, and compares the others with it. It spills to
# disk beyond its memory limit, so the number of games is not limited by memory.

_COMPARED: Final = pa.schema(
    [
        *[("game_id", pa.int64()), ("game_hash", pa.binary(16)), ("moves", pa.list_(pa.uint16()))],
        *[("first_player", pa.uint8()), ("winner", pa.string())],
    ]
)
"""The columns of games that are compared. Blue has begun where the first player is unknown."""

_SEARCH: Final = f"""
WITH first AS (
    SELECT game_hash, min(game_id) AS game_id FROM games GROUP BY game_hash HAVING count(*) > 1
)
SELECT game.game_id, original.game_id AS duplicate_of, (
    CASE WHEN game.moves IS NULL THEN {Flag.DUPLICATE_FRAGMENT:d}
        WHEN game.moves = original.moves AND game.first_player = original.first_player
            THEN {Flag.DUPLICATE_EXACT:d}
        ELSE {Flag.DUPLICATE_SYMMETRIC:d} END
    -- A symmetry that exchanges the players exchanges the winner, too.
    + CASE WHEN game.moves IS NOT NULL
            AND (game.winner = original.winner) <> (game.first_player = original.first_player)
        THEN {Flag.CONTRADICTORY_DUPLICATES:d} ELSE 0 END
    )::UINTEGER AS flags
FROM games AS game JOIN first USING (game_hash) JOIN games AS original ON original.game_id = first.game_id
WHERE game.game_id > original.game_id ORDER BY game.game_id
"""
"""Query for the duplicates. The first game of a hash is the one with the lowest id, so that games of later
runs never make an earlier one a duplicate. Games with equal hashes are images of each other."""


@repeats_on_disk
def find_duplicates(
    groups: Iterable[Group], store: Store, path: Path, progress: Progress, *, memory: int, threads: int
) -> None:
    """Find the games whose hash an earlier game has, and write them to a Parquet file in ascending id.

    Its columns are ``game_id``; ``duplicate_of``, the first game with the same hash; and ``flags``, bits of
    ``Flag``. Of the games of the store, only first games whose hash occurs among the new ones are compared.

    Args:
        groups: The sources of this run, with ids above all those of the store.
        store: The store.
        path: The file to write. DuckDB spills to its folder.
        progress: Receives the progress.
        memory: Memory limit in bytes, for DuckDB and this process together.
        threads: Number of threads of DuckDB.

    Raises:
        BudgetError: DuckDB needs more memory.
        StoreError: A file of the store is missing or damaged.
    """
    owners = [group for group in groups if group.first.owns_games]
    progress.begin("find duplicates", sum(len(group.source_ids) for group in owners), "games")
    stored = store.files("games")
    new = pa.RecordBatchReader.from_batches(_COMPARED, _new_games(owners, progress))
    with duckdb_session(
        memory=memory - RESERVED_MEMORY,
        threads=threads,
        spill=path.parent,
        store=stored[0] if stored else None,
    ) as con:
        con.register("new_games", new)
        con.execute("CREATE TABLE games AS FROM new_games")
        if stored:
            # Ids of the store are lower, so that the first game of a hash is one of the store, if it has any.
            con.execute(
                f"""
                INSERT INTO games BY NAME
                SELECT game_id, game_hash, moves, coalesce(first_player, 0) AS first_player, winner
                FROM {read_parquet_sql(stored)}
                WHERE duplicate_of IS NULL AND game_hash IN (SELECT game_hash FROM games)
                """
            )
        con.execute(f"COPY ({_SEARCH}) TO {quote(str(path))} (FORMAT parquet)")


def _new_games(groups: Iterable[Group], progress: Progress) -> Iterator[pa.RecordBatch]:
    """Yield the games of sources as ``_COMPARED``."""
    for group in groups:
        first, game_id = group.first, group.first.first_game
        columns = ["game_hash", "moves", "first_player", "winner", "value"]
        for games in first.spool.batches("games", columns, *group.games):
            found = {name: games.column(name) for name in columns[:3]}
            found["game_id"] = pa.array(np.arange(game_id, game_id + games.num_rows))
            found["first_player"] = games.column("first_player").fill_null(0)
            found["winner"] = _names_of(winners_of(games, first.convention or "blue-is-0"))
            game_id += games.num_rows
            progress.advance(games.num_rows)
            yield pa.record_batch([found[name] for name in _COMPARED.names], _COMPARED)


def duplicates_among(path: Path, groups: Iterable[Group]) -> pa.Table:
    """Return the rows of the file of :func:`find_duplicates` for the games of a part."""
    owners = [group for group in groups if group.first.owns_games]
    first = owners[0].first.first_game if owners else 0
    stop = first + sum(len(group.source_ids) for group in owners)
    own = (pc.field("game_id") >= first) & (pc.field("game_id") < stop)
    return pq.read_table(path, filters=own, use_threads=False)


def summarize_games(parts: Iterable[AnyPath]) -> tuple[dict[int, dict[str, int]], int]:
    """Return the number of games with each flag, by source, and that of positions, in files of games."""
    flags: dict[int, dict[str, int]] = {}
    positions = 0
    for path in parts:
        games = read_parquet(path, ["source_id", "flags", "positions"])
        positions += pc.sum(games["positions"]).as_py() or 0
        # The lists of flags become pairs of source and flag, which Arrow counts.
        codes = games["flags"].combine_chunks()
        sources = games["source_id"].take(pc.list_parent_indices(codes))
        pairs = pa.table({"source": sources, "flag": pc.list_flatten(codes)})
        for row in pairs.group_by(["source", "flag"]).aggregate([([], "count_all")]).to_pylist():
            flags.setdefault(row["source"], {})[row["flag"]] = row["count_all"]
    return flags, positions
