"""Evidence about the games and the value convention of a source, counted while the source is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import pyarrow as pa

from hexdata.games.convention import Votes
from hexdata.games.find import Grouping
from hexdata.games.findings import count_game_votes, count_position_votes, find_positions
from hexdata.schema import raw_schema

__all__ = ["SourceEvidence", "findings_schema", "is_mixed", "with_findings"]


_MIXED_FORMATS: Final = ("katahex", "legacy-shuffled")
"""Formats whose positions may be in any order."""


def findings_schema(board_size: int, targets: Sequence[str] = ()) -> pa.Schema:
    """Return ``raw_schema`` with the additional column ``findings``: bits of ``findings.Finding``.

    Texts are not encoded as dictionaries, since an Arrow file allows only one dictionary per column.
    """
    fields = [
        pa.field(field.name, pa.string()) if pa.types.is_dictionary(field.type) else field
        for field in raw_schema(board_size, targets)
    ]
    return pa.schema(fields).append(pa.field("findings", pa.uint16(), nullable=False))


def with_findings(positions: pa.RecordBatch, board_size: int) -> pa.RecordBatch:
    """Add the findings to positions of ``raw_schema``; return them as ``findings_schema``."""
    columns = [
        column.cast(pa.string()) if pa.types.is_dictionary(column.type) else column
        for column in positions.columns
    ]
    found = pa.array(find_positions(positions, board_size))
    targets = positions.schema.names[len(raw_schema(board_size)) :]
    return pa.RecordBatch.from_arrays([*columns, found], schema=findings_schema(board_size, targets))


def is_mixed(kind: str, header: Mapping[str, object]) -> bool:
    """Return whether the positions of a source are shuffled, so that neighbours may be from different games.

    Args:
        kind: Format of the source, as in ``SourceReader.format``.
        header: Header of the source.
    """
    return kind in _MIXED_FORMATS or not {"chunk_info", "pass_info"}.isdisjoint(header)


@dataclass
class SourceEvidence:
    """Evidence of a source: votes on its value convention, and numbers of positions with metadata."""

    votes: Votes = field(default_factory=Votes)
    unflagged_votes: Votes = field(default_factory=Votes)
    """Votes of positions without disqualifying findings, used while the games are unknown."""
    with_id: int = 0
    """Number of positions with a legacy game id."""
    with_ply: int = 0
    """Number of positions with ``position_in_game``."""

    def add(self, batch: pa.RecordBatch) -> None:
        """Count positions of ``findings_schema``."""
        found = batch.column("findings").to_numpy()
        self.votes += count_position_votes(found)
        self.unflagged_votes += count_game_votes(np.zeros(0, np.uint32), found)
        self.with_id += batch.num_rows - batch.column("line_idx").null_count
        self.with_ply += batch.num_rows - batch.column("position_in_game").null_count

    def grouping(self) -> Grouping:
        """Return the way to find the games of the source."""
        if self.with_id:
            return "ids"
        return "runs" if self.with_ply else "boards"
