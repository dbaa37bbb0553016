"""Makes the pictures of docs/browse.md from a demo store: ``python -m tests.browse.pictures STORE``."""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path

from PIL import Image

from hexdata.browse import serving
from tests.browse.conftest import Page
from tests.browse.test_browser import Tab
from tests.report import browser as chromium

IMAGES = Path(__file__).parents[2] / "docs" / "images"
PICTURES = {"browse-game.png": ("game=17&ply=30", 880), "browse-batch.png": ("sheet=after&count=16", 760)}
"""Address and height of each picture."""


def main(store: str) -> None:
    """Write the pictures."""
    with serving(store) as address, tempfile.TemporaryDirectory() as folder:
        Page(address).get("api/store")  # waits for the index
        with chromium.browser(Path(folder)) as browser:
            for name, (view, height) in PICTURES.items():
                Tab(browser, Page(address)).open(view, width=1100, height=height)
                picture = Image.open(io.BytesIO(browser.screenshot()))
                picture.convert("RGB").quantize(64).save(IMAGES / name, optimize=True)


if __name__ == "__main__":
    main(sys.argv[1])
