"""Live pipeline that feeds a trainer with the games of a running self-play.

Its stages run on threads and are joined by bounded queues. A chunk is one game, a frame is one position, and
a hand is a tuple of chunks that pass through the pipeline together. ``coordinator``, ``queue``, ``stage`` and
``pipeline`` are the framework. Each other module is a stage, or a part of one.
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
