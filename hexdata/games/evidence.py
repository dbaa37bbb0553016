"""Counts of the evidence on a source's games and on its value convention, made while the source is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from hexdata.games.convention import Votes
from hexdata.games.find import Grouping
from hexdata.games.findings import ballots_of, find_positions, votes_of
from hexdata.schema import raw_schema

__all__ = ["Tally", "found_schema", "is_mixed", "with_findings"]


def found_schema(board_size: int) -> pa.Schema:
    """Return ``raw_schema`` with plain text in place of dictionaries: Arrow files allow one each.

    It has a further column ``findings``: the bits of ``findings.Finding`` of each position.
    """
    schema = raw_schema(board_size)
    schema = schema.set(schema.get_field_index("origin"), pa.field("origin", pa.string()))
    return schema.append(pa.field("findings", pa.uint16(), nullable=False))


def with_findings(positions: pa.RecordBatch, board_size: int) -> pa.RecordBatch:
    """Return positions of ``raw_schema`` as ``found_schema``."""
    found = pa.array(find_positions(positions, board_size))
    columns = dict(zip(positions.schema.names, positions.columns, strict=True)) | {"findings": found}
    schema = found_schema(board_size)
    return pa.RecordBatch.from_arrays([columns[f.name].cast(f.type) for f in schema], schema=schema)


def is_mixed(kind: str, header: Mapping[str, object]) -> bool:
    """Return whether the positions of a source were shuffled, so that neighbours need not be of one game.

    Args:
        kind: the format of the source, as its reader names it.
        header: the header of the file.
    """
    return kind == "legacy-shuffled" or not {"chunk_info", "pass_info"}.isdisjoint(header)


@dataclass
class Tally:
    """The evidence of a source: votes on its value convention, and counts of named games."""

    votes: Votes = field(default_factory=Votes)
    ballots: Votes = field(default_factory=Votes)
    """The votes of unflagged positions, which count where games are not known yet."""
    with_id: int = 0
    with_ply: int = 0

    def add(self, batch: pa.RecordBatch) -> None:
        """Count positions of ``found_schema``."""
        found = batch.column("findings").to_numpy()
        self.votes += votes_of(found)
        self.ballots += ballots_of(np.zeros(0, np.uint32), found)
        self.with_id += batch.num_rows - batch.column("line_idx").null_count
        self.with_ply += batch.num_rows - batch.column("position_in_game").null_count

    def grouping(self) -> Grouping:
        """Return how the games of the source are found."""
        if self.with_id:
            return "ids"
        return "runs" if self.with_ply else "boards"
