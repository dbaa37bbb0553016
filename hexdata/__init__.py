"""hexdata: a data engine for board-game training positions.

It converts legacy files into a store that can be queried, shuffles the store and loads batches for training.
The names in ``__all__`` are imported on first use, so that ``import hexdata`` is fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hexdata.convert import ConvertOptions, convert_sources
    from hexdata.errors import HexdataError
    from hexdata.export import ExportOptions, export_shards
    from hexdata.live import LiveLoader
    from hexdata.loader import Loader, PositionDataset
    from hexdata.order import Permutation, balanced_take, derive_key, shuffle_indices
    from hexdata.progress_bar import ProgressBar
    from hexdata.show import Game, Position, read_game, read_position
    from hexdata.shuffle import ShuffleOptions, shuffle_store
    from hexdata.verify import verify_store

__version__ = "0.1.0"

__all__ = [
    "ConvertOptions",
    "ExportOptions",
    "Game",
    "HexdataError",
    "LiveLoader",
    "Loader",
    "Permutation",
    "Position",
    "PositionDataset",
    "ProgressBar",
    "ShuffleOptions",
    "balanced_take",
    "convert_sources",
    "derive_key",
    "export_shards",
    "read_game",
    "read_position",
    "shuffle_indices",
    "shuffle_store",
    "verify_store",
]

_LAZY_EXPORTS = {
    "ConvertOptions": "convert",
    "ExportOptions": "export",
    "Game": "show",
    "HexdataError": "errors",
    "LiveLoader": "live",
    "Loader": "loader",
    "Permutation": "order",
    "Position": "show",
    "PositionDataset": "loader",
    "ProgressBar": "progress_bar",
    "ShuffleOptions": "shuffle",
    "balanced_take": "order",
    "convert_sources": "convert",
    "derive_key": "order",
    "export_shards": "export",
    "read_game": "show",
    "read_position": "show",
    "shuffle_indices": "order",
    "shuffle_store": "shuffle",
    "verify_store": "verify",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY_EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY_EXPORTS[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
