"""Feeding a trainer with games as they are made: stages on threads, joined by bounded queues.

``hub``, ``queue``, ``stage`` and ``pipeline`` are the frame; each other file is a stage, or what one needs.
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
