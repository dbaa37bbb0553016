"""Export of a store to files for other programs: tar shards for training, pickles for the legacy tools."""

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
