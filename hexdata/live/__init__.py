"""Live pipeline that loads training batches from a directory to which self-play still writes games.

The stages run on threads and are joined by bounded queues. Their names are those of the loader of lc0: a
chunk is a game, and a frame is a position. ``stage`` and ``pipeline`` are the framework; each
stage is one file.
"""

from __future__ import annotations

from hexdata.live.chunk import Chunk
from hexdata.live.chunk_relabeller import Targets
from hexdata.live.live_loader import LiveLoader
from hexdata.live.options import LiveOptions, StageOptions, load_live_config, make_pipeline
from hexdata.live.stage import Stage, Transform

__all__ = [
    "Chunk",
    "LiveLoader",
    "LiveOptions",
    "Stage",
    "StageOptions",
    "Targets",
    "Transform",
    "load_live_config",
    "make_pipeline",
]
