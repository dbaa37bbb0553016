"""Legacy pickles of training examples, read without running any code of theirs, and written.

See ``reader`` for reading; ``machine`` is the pickle interpreter, ``standins`` the list of what a pickle
may ask for, ``skeleton`` the fast path.
"""

from hexdata.formats.legacy.limits import DEFAULT_LIMITS, Limits
from hexdata.formats.legacy.reader import LegacyReader
from hexdata.formats.legacy.source import looks_like_pickle
from hexdata.formats.legacy.writer import DIALECTS, write_legacy

__all__ = ["DEFAULT_LIMITS", "DIALECTS", "LegacyReader", "Limits", "looks_like_pickle", "write_legacy"]
