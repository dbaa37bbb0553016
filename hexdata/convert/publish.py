"""The second pass over a source: writes its parts of the store from its spool, with final ids and values."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hexdata.convert.companions import with_origins
from hexdata.convert.duplicates import DUPLICATES
from hexdata.convert.spool import Spool
from hexdata.convert.targets import target_columns
from hexdata.games.convention import Convention
from hexdata.games.evidence import findings_schema
from hexdata.games.find import ROWS, column
from hexdata.games.findings import end_reasons, flag_lists, with_played_moves
from hexdata.games.labels import players_of, split_of, winners_of
from hexdata.schema import games_schema, positions_schema
from hexdata.storage import AnyPath
from hexdata.store.files import FileFacts
from hexdata.store.originals import KEPT_PREFIX, WINNERS, convert_values
from hexdata.store.parquet import ROW_GROUP_ROWS, regroup, write_parquet

__all__ = ["Assignment", "publish_games", "publish_positions"]


@dataclass(frozen=True)
class Assignment:
    """The ids, the convention and the shares of the splits with which one source is written."""

    source_id: int
    board_size: int
    first_position: int
    first_game: int
    """``game_id`` of the game that has number 0 in the spool."""
    convention: Convention
    val: float
    test: float
    origins: tuple[tuple[int, str], ...] = ()
    """(file_idx, raw file) for games whose metadata names no raw file."""
    targets: tuple[str, ...] = ()
    """Optional columns of the positions of this source."""
    declared: tuple[str, ...] = ()
    """Those of them that its reader gives."""


def publish_positions(spool: Spool, path: AnyPath, assigned: Assignment) -> FileFacts:
    """Write the positions of one source to a Parquet file, in record order.

    Args:
        spool: Spool of the source.
        path: The file to write.
        assigned: Ids and convention of the source.

    Returns:
        Rows, size and digest of the file.
    """
    schema = positions_schema(assigned.board_size, assigned.targets)
    return write_parquet(path, schema, _positions(spool, assigned, schema), replace=False)


def _positions(spool: Spool, assigned: Assignment, schema: pa.Schema) -> Iterator[pa.Table]:
    done = 0
    source_keys = _keys_of(spool)
    for raw, row in _with_rows(spool, assigned):
        value = column(raw, "value", np.nan)
        stored = convert_values(value, assigned.convention).astype(np.float32)
        columns = {
            "position_id": pa.array(assigned.first_position + np.arange(done, done + raw.num_rows)),
            "game_id": pc.add(row.column("game").cast(pa.int64()), assigned.first_game),
            "position_in_game": row.column("ply"),
            "total_positions": row.column("total"),
            "board": raw.column("board"),
            "move": raw.column("move"),
            "policy": raw.column("policy"),
            "value": pa.array(stored),
            "player_to_move": players_of(raw, row, assigned.board_size),
            "value_sample_tier": raw.column("value_sample_tier"),
            "winner": pa.DictionaryArray.from_arrays(
                raw.column("winner").cast(pa.int8()), pa.array(WINNERS, pa.string())
            ),
        }
        columns |= target_columns(raw, assigned.targets, assigned.convention)
        kept = _kept_values(value, convert_values(stored.astype(np.float64), assigned.convention))
        kept += _kept_ids(raw, row)
        kept += [entry for name in _FILLED_COLUMNS & source_keys for entry in _kept_nulls(name, raw, columns)]
        columns["metadata"] = _with_kept(raw.column("metadata"), kept)
        done += raw.num_rows
        yield pa.table(columns, schema=schema)


def _with_rows(spool: Spool, assigned: Assignment) -> Iterator[tuple[pa.RecordBatch, pa.RecordBatch]]:
    """Yield the positions of a spool with their ``ROWS``, one row group of the store at a time."""
    schema = findings_schema(assigned.board_size, assigned.declared)
    raw = regroup(spool.batches("raw"), schema, ROW_GROUP_ROWS)
    rows = regroup(spool.batches("rows"), ROWS, ROW_GROUP_ROWS)
    for tables in zip(raw, rows, strict=True):
        batches = [table.to_batches()[0] for table in tables]
        yield with_played_moves(*batches), batches[1]


_FILLED_COLUMNS: Final = {"player_to_move", "position_in_game", "total_positions"}
"""Columns whose stored value may differ from the source's: nulls are filled in, wrong numbers dropped."""


def _keys_of(spool: Spool) -> set[str]:
    """Return the keys of the examples of a legacy source and of their metadata.

    A null under one of these keys was written in the source; under any other key the value was absent.
    """
    facts = spool.facts()
    dialect = facts.header.get("dialect", {}) if facts else {}
    keys = set()
    for field in ("keys", "metadata_keys"):
        spelling = dialect.get(field, [])
        for listed, _ in spelling["mixed"] if isinstance(spelling, dict) else [(spelling, 0)]:
            keys |= set(listed)
    return keys


_Kept = tuple[int, str, Any]
"""A row, a key without ``KEPT_PREFIX``, and the value to store under it in ``metadata``."""


def _kept_values(value: npt.NDArray[np.float64], restored: npt.NDArray[np.float64]) -> list[_Kept]:
    """Return the values that cannot be restored bit for bit from the column."""
    rows = np.flatnonzero(value.view(np.uint64) != restored.view(np.uint64))
    return [(i, "value", float(value[i])) for i in rows.tolist()]


def _kept_ids(raw: pa.RecordBatch, row: pa.RecordBatch) -> list[_Kept]:
    """Return the legacy ids that do not identify a game, so that the position has no game."""
    file_idx, line_idx = column(raw, "file_idx", -1), column(raw, "line_idx", -1)
    rows = np.flatnonzero((line_idx >= 0) & (column(row, "game", -1) < 0))
    return [(i, "game_id", [int(file_idx[i]), int(line_idx[i])]) for i in rows.tolist()]


def _kept_nulls(name: str, raw: pa.RecordBatch, columns: dict[str, pa.Array]) -> list[_Kept]:
    """Return the values of a source, mostly nulls, that differ from those stored in the column ``name``."""
    stated = column(raw, name, -1)
    stored = columns[name].cast(pa.int64()).fill_null(-1).to_numpy()
    rows = np.flatnonzero(stated != stored)
    return [(i, name, int(stated[i]) if stated[i] >= 0 else None) for i in rows.tolist()]


def _with_kept(metadata: pa.Array, kept: list[_Kept]) -> pa.Array:
    """Return ``metadata`` with the entries of ``kept`` added under keys with ``KEPT_PREFIX``."""
    if not kept:
        return metadata
    texts = metadata.to_pylist()
    added: dict[int, dict[str, Any]] = {}
    for i, key, value in kept:
        added.setdefault(i, {})[KEPT_PREFIX + key] = value
    for i, more in added.items():
        entries = json.loads(texts[i] or "{}") | more
        texts[i] = json.dumps(dict(sorted(entries.items())), separators=(",", ":"))
    return pa.array(texts, pa.string())


def publish_games(spool: Spool, path: AnyPath, assigned: Assignment) -> FileFacts:
    """Write the games of one source to a Parquet file.

    Args:
        spool: Spool of the source, with the table ``duplicates``.
        path: The file to write.
        assigned: Ids and convention of the source.

    Returns:
        Rows, size and digest of the file.
    """
    schema = games_schema()
    return write_parquet(path, schema, _games(spool, assigned, schema), replace=False)


def _games(spool: Spool, assigned: Assignment, schema: pa.Schema) -> Iterator[pa.Table]:
    done = 0
    decided = pa.Table.from_batches(spool.batches("duplicates"), DUPLICATES).combine_chunks()
    flags = decided["flags"].to_numpy()
    found = [batch.column("findings").to_numpy() for batch in spool.batches("findings")]
    findings = np.concatenate([np.zeros(0, np.uint32), *found])
    for games in spool.batches("games"):
        count = games.num_rows
        hashes = games.column("game_hash").to_pylist()
        winner = winners_of(games, assigned.convention)
        columns = {
            "game_id": pa.array(assigned.first_game + np.arange(done, done + count)),
            "source_id": pa.array(np.full(count, assigned.source_id, np.int32)),
            "origin": with_origins(games, dict(assigned.origins)),
            "winner": _winner_names(winner),
            "end_reason": end_reasons(findings[done : done + count], winner, games.column("end_reason")),
            "duplicate_of": decided["duplicate_of"][done : done + count],
            "split": pa.array([split_of(h, assigned.val, assigned.test) for h in hashes], pa.string()),
            "flags": flag_lists(flags[done : done + count]),
        }
        columns |= {name: games.column(name) for name in schema.names if name not in columns}
        done += count
        yield pa.table(columns, schema=schema)


def _winner_names(winner: npt.NDArray[np.int64]) -> pa.Array:
    return pa.array([WINNERS[w] if w >= 0 else None for w in winner], pa.string())
