"""Fixtures of the tests of the live pipeline."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest


@pytest.fixture
def no_thread_survives() -> Iterator[None]:
    """Check that a test ends every thread it starts. Modules request this with ``usefixtures``."""
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before
