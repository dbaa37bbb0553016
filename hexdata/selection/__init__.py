"""Which positions take part in a shuffle, and where each goes: SQL over a store's tables.

Never sorts and never writes rows: the shuffle carries out what this says, and ``verify`` and ``quality``
hold its result against it.
"""

from hexdata.selection.balance import BalanceRow, Means
from hexdata.selection.choices import Choices
from hexdata.selection.games import Duplicates
from hexdata.selection.place import Placement
from hexdata.selection.select import Selection, select

__all__ = ["BalanceRow", "Choices", "Duplicates", "Means", "Placement", "Selection", "select"]
