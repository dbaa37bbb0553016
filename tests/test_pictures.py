"""The pictures of the documents: small, made by the script beside them, and shown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LARGEST = 150_000


def shown_in(document: Path) -> set[Path]:
    """Return the files of the pictures in a document."""
    links = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", document.read_text(encoding="utf-8"))
    return {(document.parent / link).resolve() for link in links}


@pytest.mark.parametrize("picture", sorted(IMAGES.glob("*.png")), ids=lambda path: path.name)
def test_a_picture_is_small_and_shown(picture: Path) -> None:
    assert picture.stat().st_size < LARGEST
    assert f'"{picture.name}"' in (IMAGES / "make.py").read_text(encoding="utf-8")
    assert [document for document in DOCUMENTS if picture in shown_in(document)]


def test_the_shown_pictures_exist() -> None:
    shown = {picture for document in DOCUMENTS for picture in shown_in(document)}
    assert IMAGES / "shuffle.png" in shown_in(ROOT / "README.md")
    assert [picture for picture in shown if not picture.is_file()] == []
