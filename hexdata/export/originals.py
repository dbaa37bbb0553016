"""The source files of a store, restored from its tables as raw batches.

This reverses the conversion: it restores each source's value convention and removes the values that were
filled in. It computes rows and file names but writes no files.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import PurePosixPath
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hexdata.errors import StoreError
from hexdata.formats.legacy import DIALECTS
from hexdata.formats.source import raw_batch
from hexdata.games.convention import convert_values
from hexdata.games.findings import with_columns
from hexdata.json_models import as_model, read_metadata
from hexdata.schema import (
    KEPT_PREFIX,
    WINNERS,
    binary_matrix,
    board_size_of,
    games_schema,
    is_legacy_format,
    positions_schema,
    sources_schema,
)
from hexdata.shards.block_check import check_positions
from hexdata.store import Store
from hexdata.store.files import Continued, Sidecar, identity_of, sidecar_of
from hexdata.store.parquet import ROW_GROUP_ROWS, ParquetRows, read_parquet, read_rows
from hexdata.text import shortened

PICKLE_SUFFIX: Final = ".pkl.gz"
_RAW_SUFFIX: Final = re.compile(r"\.(trmph|hexworld|h?sgf|npz|pkl|pickle)(\.gz)?$")

# Convert fills these in where a source has null or another convention, and keeps the original in `metadata`.
_NUMBERS: Final = (
    *("move", "value", "player_to_move", "position_in_game", "total_positions"),
    *("file_idx", "line_idx"),
)
"""Columns of ``raw_schema`` whose values ``metadata`` may override."""


_KEPT: Final = f'"{KEPT_PREFIX}(?:{"|".join((*_NUMBERS, "game_id"))})":'
"""Regular expression of the keys in a text of ``metadata`` under which these values are."""


@dataclass(frozen=True)
class Original:
    """One source file of a store."""

    source_id: int
    name: str
    bytes: int
    sha256: str
    format: str
    """Source format; "unknown" if the whole file was rejected."""
    value_sense: str | None
    records: int
    positions: int
    games: int
    header: dict[str, Any]
    board_size: int | None
    """Cells along an edge; None if the store has no positions."""
    has_weights: bool
    """Whether the positions of the store have the column ``policy_weight``."""
    rows: ParquetRows
    """The source's positions, in the file that has those of its neighbours, too. Empty if it has none."""
    all_games: ParquetRows
    """The games of the whole store."""
    content: str
    """Digest of the positions and games of the store."""

    @property
    def is_raw(self) -> bool:
        """True if the source file contains no legacy examples, so it is written back as dict examples."""
        return self.format != "unknown" and not is_legacy_format(self.format)

    @property
    def continues(self) -> Continued | None:
        """The source that this one continues; None if it is the beginning of its file."""
        # The header of a legacy pickle is content of the file, in which a key of this name means nothing.
        if not self.is_raw or "continues" not in self.header:
            return None
        return as_model(Continued, self.header["continues"], what=f"the header of source {self.source_id}")

    @property
    def sidecar(self) -> Sidecar | None:
        """The sidecar of the source; None if it has none."""
        return sidecar_of(self.header, self.source_id) if self.format in ("trmph", "unknown") else None

    @property
    def identity(self) -> str:
        """Digest of the file together with its sidecar."""
        return identity_of(self.sha256, self.sidecar)

    @property
    def dialect(self) -> Any:
        """The dialect of the legacy examples; for raw games, the dialect that the legacy tool wrote."""
        if self.is_raw:
            return DIALECTS["dicts"]
        if "dialect" not in self.header:
            hint = "Convert the sources into a new store."
            raise StoreError(f"the header of source {self.source_id} has no dialect", hint=hint)
        return self.header["dialect"]

    def batches(self, *, masked: bool = True) -> Iterator[pa.RecordBatch]:
        """Yield the positions of the source as ``raw_schema``, in record order with their original values.

        There are three differences: ``record`` is the position id in the store; ``origin``, ``end_reason``
        and ``swap`` are null; and rows with a ``line_idx`` but no ``file_idx`` (raw games) get the source's
        id as ``file_idx``, since a legacy id has both.

        Args:
            masked: Whether positions whose policy is not to be trained have their move and policy. Default
                True.

        Raises:
            StoreError: A file is missing or damaged, or the table or ``metadata`` holds an invalid value.
        """
        # A damaged table of sources may state positions that the store does not have.
        if self.positions <= 0 or not self.rows.files:
            return
        assert self.board_size is not None
        path, row = self.rows.files[0][0], self.rows.start
        # The weights are read only to remove the policies that they mask.
        has_masks = self.has_weights and not masked
        schema = positions_schema(self.board_size, ["policy_weight"] if has_masks else ())
        for batch in _read(self.rows, self.content, schema):
            check_positions(batch, path, row, len(self.all_games))
            row += batch.num_rows
            yield with_file_idx(self._raw(without_masked_policies(batch)), self.source_id)

    def _raw(self, stored: pa.RecordBatch) -> pa.RecordBatch:
        value = stored.column("value").to_numpy().astype(np.float64)
        # The legacy ids are in the table of games, of shuffled collections among the games of other sources.
        game = stored.column("game_id")
        bounds = pc.min_max(game).as_py()
        first, last = bounds["min"] or 0, -1 if bounds["max"] is None else bounds["max"]
        schema = pa.schema([games_schema().field(name) for name in ("file_idx", "line_idx")])
        ids = pa.Table.from_batches(_read(self.all_games.part(first, last + 1), self.content, schema), schema)
        legacy = ids.combine_chunks().take(pc.subtract(game, first))
        columns = {
            # Back to the convention of the source; without values there is none, and nothing to convert.
            "value": pa.array(convert_values(value, self.value_sense or "blue-is-0")),
            **{name: legacy[name].combine_chunks() for name in schema.names},
        }
        return _with_original_values(stored_to_raw(stored, columns))


def stored_to_raw(stored: pa.RecordBatch, columns: Mapping[str, pa.Array]) -> pa.RecordBatch:
    """Return positions of a store as a batch of ``raw_schema``.

    Args:
        stored: The positions.
        columns: Columns of the result that differ from those of the store. Columns that are neither here nor
            in the store are null.
    """
    known = dict(zip(stored.schema.names, stored.columns, strict=True))
    known |= {"record": stored.column("position_id"), **columns}
    # As text, since a dictionary may have another order than that of WINNERS.
    known["winner"] = pc.index_in(known["winner"].cast(pa.string()), pa.array(WINNERS))
    boards = binary_matrix(stored.column("board"))
    return raw_batch(board_size_of(boards.shape[1]), (), boards, known)


_FEW_ROWS: Final = ROW_GROUP_ROWS // 4
"""Sources with at most this many rows share row groups with many others."""
_MAX_KEPT: Final = 32 << 20
"""Maximum bytes of a row group that is kept; with usual metadata, it has 12 MB."""


def _read(rows: ParquetRows, content: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield rows of a table; a row group that has the rows of many small sources is read once for all."""
    # Parquet can be read by row groups only.
    first = rows.start - rows.start % ROW_GROUP_ROWS
    if len(rows) <= _FEW_ROWS and len(rows.files) == 1:
        stop = min(first + ROW_GROUP_ROWS, rows.files[0][1])
        if rows.stop <= stop and (group := _row_group(ParquetRows(rows.files, first, stop), content, schema)):
            yield from group.slice(rows.start - first, len(rows)).to_batches()
            return
    yield from read_rows(rows, schema)


@lru_cache(maxsize=2)  # positions and games
def _row_group(
    rows: ParquetRows,
    content: str,  # noqa: ARG001 - another store at the same path is read again
    schema: pa.Schema,
) -> pa.Table | None:
    """Return the rows of a row group; None if they are large."""
    kept, size = [], 0
    for batch in read_rows(rows, schema):
        kept.append(batch)
        size += batch.nbytes
        if size > _MAX_KEPT:
            return None
    return pa.Table.from_batches(kept, schema).combine_chunks()


def without_masked_policies(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a batch without move and policy in the rows whose ``policy_weight`` is 0.

    A dict example has no place for the weight. The legacy trainer does not train a policy that is None.
    """
    if "policy_weight" not in batch.schema.names:
        return batch
    masked = pc.equal(batch.column("policy_weight"), 0).fill_null(False).to_numpy(zero_copy_only=False)
    rows = pa.array(np.arange(len(batch)), mask=masked)
    return with_columns(batch, **{name: batch.column(name).take(rows) for name in ("move", "policy")})


def with_file_idx(batch: pa.RecordBatch, source_id: int) -> pa.RecordBatch:
    """Return a raw batch with ``source_id`` as ``file_idx`` in the rows that have only a ``line_idx``."""
    file_idx, line_idx = batch.column("file_idx"), batch.column("line_idx")
    # A legacy id needs both numbers. Source ids are as unique as the file numbers of the legacy tool.
    filled = pc.if_else(line_idx.is_valid(), pc.fill_null(file_idx, source_id), file_idx)
    return with_columns(batch, file_idx=filled)


def _with_original_values(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a raw batch with the values that ``metadata`` overrides."""
    metadata = batch.column("metadata")
    # Most texts override nothing, so only those with such a key are parsed, equal ones once.
    named = pc.match_substring_regex(metadata, _KEPT).fill_null(False)
    rows = np.flatnonzero(named.to_numpy(zero_copy_only=False))
    texts = metadata.take(pa.array(rows)).to_pylist()
    parsed = {text: _original_values(text) for text in set(texts)}
    for name in _NUMBERS:
        values = {
            row: parsed[text][name] for row, text in zip(rows, texts, strict=True) if name in parsed[text]
        }
        if values:
            mask = np.zeros(len(metadata), bool)
            mask[[*values]] = True
            try:
                originals = pa.array([*values.values()], batch.schema.field(name).type)
            except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
                reason = f"metadata of a position has an invalid value for {KEPT_PREFIX}{name}"
                raise StoreError(reason, found=shortened(str(error))) from error
            replaced = pc.replace_with_mask(batch.column(name), pa.array(mask), originals)
            batch = with_columns(batch, **{name: replaced})
    return batch


def _original_values(text: str) -> dict[str, Any]:
    """Return the original values stored in a ``metadata`` text, by column of ``raw_schema``."""
    stated = read_metadata(text, None, "metadata of a position")
    kept = {key.removeprefix(KEPT_PREFIX): stated[key] for key in stated if key.startswith(KEPT_PREFIX)}
    if "game_id" in kept:
        game_id = as_model(tuple[Any, Any], kept["game_id"], what=f"{KEPT_PREFIX}game_id of a position")
        kept["file_idx"], kept["line_idx"] = game_id
    return kept


def list_originals(store: Store) -> list[Original]:
    """Return the sources of a store in the order of their ids."""
    names = ["source_id", "name", "bytes", "sha256", "format", "value_sense"]
    names += ["records", "positions", "games", "header"]
    schema = pa.schema([sources_schema().field(name) for name in names])
    rows = [
        row | {"header": read_metadata(row["header"], path, f"header of source {row['source_id']}")}
        for path in store.files("sources")
        for row in read_parquet(path, names).cast(schema).to_pylist()
    ]
    # Positions are stored in the order of their sources, so a source is a range of rows.
    stops = accumulate(row["positions"] for row in rows)
    positions, games = store.rows("positions"), store.rows("games")
    content = store.manifest.digest("positions", "games")
    return [
        Original(
            **row,
            board_size=store.manifest.board_size,
            has_weights="policy_weight" in store.manifest.targets,
            rows=positions.part(stop - row["positions"], stop),
            all_games=games,
            content=content,
        )
        for row, stop in zip(rows, stops, strict=True)
    ]


def pickle_names(originals: Sequence[Original]) -> list[str]:
    """Return the pickle file name of each source: its own name with the suffix that the legacy tool uses.

    If several sources would get the same name (``a.pkl`` and ``a.pkl.gz``, or ``a.trmph`` and
    ``a_processed.pkl.gz``), their source ids are added.

    Raises:
        StoreError: A source name is an absolute path or contains "..".
    """
    stems = []
    for source in originals:
        path = PurePosixPath(source.name)
        # Names come from the store, which may be a stranger's: a file must not be written outside the folder.
        if path.is_absolute() or ".." in path.parts:
            raise StoreError("the name of a source is an absolute path or contains '..'", found=source.name)
        name = source.name.replace("\\", "_")  # a backslash is a path separator on Windows
        if source.is_raw:
            stems.append(_RAW_SUFFIX.sub("", name) + "_processed")
        else:
            stems.append(name.removesuffix(".gz").removesuffix(".pkl"))
    # All sources of one name get their ids, so that no name depends on the order of the others.
    taken = Counter(stems)
    ids = (f".source-{source.source_id}" for source in originals)
    named = zip(stems, ids, strict=True)
    return [stem + (number if taken[stem] > 1 else "") + PICKLE_SUFFIX for stem, number in named]
