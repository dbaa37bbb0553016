"""Reader and writer of legacy pickles of training examples. No code of a pickle is ever run.

``reader`` reads a file and ``writer`` writes one. ``stream`` has the bytes of the pickle, ``unpickler``
interprets the opcodes, and ``allowlist`` lists the names that a pickle may import. ``runs`` reads runs of
similar examples at once.
``validate`` checks the examples. ``games`` reads pickles of self-play games.
"""

from hexdata.formats.legacy.games import SelfPlayGamesReader, has_games
from hexdata.formats.legacy.limits import DEFAULT_LIMITS, LegacyLimits
from hexdata.formats.legacy.reader import LegacyReader
from hexdata.formats.legacy.stream import looks_like_pickle
from hexdata.formats.legacy.writer import DIALECTS, write_legacy

__all__ = [
    "DEFAULT_LIMITS",
    "DIALECTS",
    "LegacyLimits",
    "LegacyReader",
    "SelfPlayGamesReader",
    "has_games",
    "looks_like_pickle",
    "write_legacy",
]
