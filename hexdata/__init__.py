"""hexdata: legacy board-game training pickles to a queryable store, a provable shuffle, and batches.

The names below are loaded when they are first used, so that ``import hexdata`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hexdata.convert import ConvertOptions, convert_sources
    from hexdata.errors import HexdataError
    from hexdata.export import ExportOptions, export_shards
    from hexdata.loader import Loader, PositionDataset
    from hexdata.order import Permutation, balanced_take, derive_key, shuffle_indices
    from hexdata.shuffle import ShuffleOptions, shuffle_store
    from hexdata.verify import verify_store

__version__ = "0.1.0"

__all__ = [
    "ConvertOptions",
    "ExportOptions",
    "HexdataError",
    "Loader",
    "Permutation",
    "PositionDataset",
    "ShuffleOptions",
    "balanced_take",
    "convert_sources",
    "derive_key",
    "export_shards",
    "shuffle_indices",
    "shuffle_store",
    "verify_store",
]

_ROOMS = {
    "ConvertOptions": "convert",
    "ExportOptions": "export",
    "HexdataError": "errors",
    "Loader": "loader",
    "Permutation": "order",
    "PositionDataset": "loader",
    "ShuffleOptions": "shuffle",
    "balanced_take": "order",
    "convert_sources": "convert",
    "derive_key": "order",
    "export_shards": "export",
    "shuffle_indices": "order",
    "shuffle_store": "shuffle",
    "verify_store": "verify",
}


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_ROOMS[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
