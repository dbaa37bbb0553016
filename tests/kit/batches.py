"""Conversion of small sources as if they were large."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

__all__ = ["one_source_a_part"]


@contextmanager
def one_source_a_part() -> Iterator[None]:
    """Let each source be read by a task of its own, and have a part of the store, as large ones do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hexdata.convert.run._BATCH_WEIGHT", 1)
        yield
