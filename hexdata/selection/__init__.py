"""SQL queries that select the positions of a shuffle and assign each position to a bucket.

The package only builds queries and small lookup tables. The shuffle executes the queries; ``verify`` repeats
them and compares the results.
"""

from hexdata.selection.balance import BalanceRow, Means
from hexdata.selection.dedup import Duplicates
from hexdata.selection.options import SelectionOptions
from hexdata.selection.select import Selection, select

__all__ = [
    "BalanceRow",
    "Duplicates",
    "Means",
    "Selection",
    "SelectionOptions",
    "select",
]
