"""Reading of a text, for the tests of all readers of texts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kit.sources import Source, read_source, save_source

ReadText = Callable[..., Source]


@pytest.fixture
def read_text(tmp_path: Path) -> ReadText:
    """Return a function that writes a text and reads it, by default as TRMPH."""

    def read_text(text: str | bytes, name: str = "a.trmph", **options: Any) -> Source:
        return read_source(save_source(tmp_path / name, text), **options)

    return read_text
