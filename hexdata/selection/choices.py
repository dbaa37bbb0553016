"""What a trainer may choose of a store, checked once. Reads nothing."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Choices"]


@dataclass(frozen=True)
class Choices:
    """Which positions of a store take part in a shuffle, and how they go to buckets."""
