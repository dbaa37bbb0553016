"""SQL queries that select the positions of a shuffle and assign each position to a bucket.

``select`` returns one query, which reads the tables of the store and small lookup tables. The shuffle runs
it; ``verify`` runs it again and compares the results.
"""

from hexdata.options import SelectionOptions
from hexdata.selection.groups import BalanceRow, Means
from hexdata.selection.select import Duplicates, Selection, select

__all__ = [
    "BalanceRow",
    "Duplicates",
    "Means",
    "Selection",
    "SelectionOptions",
    "select",
]
