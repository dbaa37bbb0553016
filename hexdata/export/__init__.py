"""From the store to files that others read: tar shards for training, pickles for what came before."""

from hexdata.export.pickles import PicklesOptions, PicklesResult, export_pickles
from hexdata.export.shards import ExportOptions, ExportResult, export_shards

__all__ = [
    "ExportOptions",
    "ExportResult",
    "PicklesOptions",
    "PicklesResult",
    "export_pickles",
    "export_shards",
]
