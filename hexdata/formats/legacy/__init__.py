"""Reader and writer of legacy pickles of training examples. No code of a pickle is ever run.

``reader`` reads a file and ``writer`` writes one. ``stream`` has the bytes of the pickle, ``unpickler``
interprets the opcodes, and ``allowlist`` lists the names that a pickle may import. ``runs`` reads runs of
similar examples at once.
``validate`` checks the examples. ``games`` reads pickles of self-play games.
"""

from hexdata.formats.legacy.games import SelfPlayGamesReader, has_games
from hexdata.formats.legacy.reader import LegacyReader
from hexdata.formats.legacy.stream import looks_like_pickle
from hexdata.formats.legacy.writer import DIALECTS, write_legacy
from hexdata.formats.source import SourceFormat, SourceReader
from hexdata.storage import AnyPath


def _open(path: AnyPath, *, salvage: bool) -> SourceReader:
    return (SelfPlayGamesReader if has_games(path) else LegacyReader)(path, salvage=salvage)


FORMAT = SourceFormat(
    "legacy",
    ("*.pkl.gz", "*.pkl", "*.pickle.gz", "*.pickle"),
    lambda head, _name: looks_like_pickle(head),
    _open,
    "a pickle",
    options=("salvage",),
)

__all__ = ["DIALECTS", "FORMAT", "LegacyReader", "write_legacy"]
