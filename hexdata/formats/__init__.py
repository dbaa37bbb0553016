"""Readers of source files: each turns the bytes of one file into Arrow record batches.

Each format has a reader and a line of the table in ``registry``. A reader returns every record of its file,
either as a position or as a rejection with a reason. It never walks directories and never skips a record:
``convert`` does that.
"""

from hexdata.formats.games import GameRecord
from hexdata.formats.lines import LineReader
from hexdata.formats.registry import (
    GAME_FORMATS,
    expected_contents,
    is_known_name,
    known_patterns,
    open_source,
)
from hexdata.formats.source import (
    BATCH_ROWS,
    SALVAGEABLE,
    FilePart,
    RawBatch,
    Rejection,
    SourceFormat,
    SourceReader,
)

__all__ = [
    "BATCH_ROWS",
    "GAME_FORMATS",
    "SALVAGEABLE",
    "FilePart",
    "GameRecord",
    "LineReader",
    "RawBatch",
    "Rejection",
    "SourceFormat",
    "SourceReader",
    "expected_contents",
    "is_known_name",
    "known_patterns",
    "open_source",
]
