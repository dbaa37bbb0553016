"""Makes the pictures of the documents from the demo, with Chromium: ``python -m docs.images.make [NAME...]``.

``architecture.svg`` is drawn by hand.
"""

from __future__ import annotations

import base64
import io
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps

import hexdata
from hexdata.browse import serving
from hexdata.draw import film_svg
from hexdata.show import Position
from hexdata.sql import run_query
from tests.kit import chromium

IMAGES = Path(__file__).parent
SHOWN_AS = "/data"
"""Folder that the pictures show instead of the temporary folder of the demo."""
COLORS = 64
STYLE = """
body { margin: 0; padding: 18px 24px; background: #fff; color: #1c2126; font: 17px sans-serif; }
h1 { margin: 0 0 10px; font-size: 19px; } h1 + * { display: block; margin-bottom: 16px; }
h1 span { font-weight: normal; color: #58606a; } svg { display: block; }
"""


class Studio:
    """A browser and the demo that it pictures."""

    def __init__(self, browser: chromium.Browser, folder: Path) -> None:
        self.browser, self.folder, self.store = browser, folder, folder / "hexdata-demo" / "store"

    def open_html(self, html: str, *, width: int) -> None:
        """Open a page that is given as text, with the shown folder in place of the temporary one."""
        path = self.folder / "page.html"
        path.write_text(html.replace(str(self.folder), SHOWN_AS), encoding="utf-8")
        self.browser.open(path, width=width, height=400)

    def open_parts(self, *parts: str, width: int) -> None:
        """Open a white page of some parts, each an element as text."""
        self.open_html(f"<meta charset=utf-8><style>{STYLE}</style>{''.join(parts)}", width=width)

    @contextmanager
    def browsing(self, view: str) -> Iterator[None]:
        """Open a view of ``hexdata browse``."""
        with serving(self.store) as address:
            self.browser.open_view(address, view, width=1100, height=760)
            yield

    def save(self, name: str, first: str = "", last: str = "", *, trim: bool = False) -> None:
        """Save the page as PNG with few colours.

        Args:
            name: Name of the file.
            first: Selector of the first element that is saved. Default: the whole page.
            last: Selector of the last one. Default: the first.
            trim: Whether to remove white margins.
        """
        size = self.browser.cdp("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        whole = {"format": "png", "captureBeyondViewport": True, "clip": clip}
        data = base64.b64decode(self.browser.cdp("Page.captureScreenshot", **whole)["data"])
        picture = Image.open(io.BytesIO(data)).convert("RGB")
        if first:
            top, bottom = self._box(first)["top"], self._box(last or first)["bottom"]
            picture = picture.crop((0, max(int(top) - 16, 0), picture.width, int(bottom) + 16))
        if trim:
            picture = ImageOps.expand(picture.crop(ImageOps.invert(picture).getbbox()), 16, "white")
        picture.quantize(COLORS).save(IMAGES / name, optimize=True)

    def _box(self, selector: str) -> dict[str, Any]:
        found: dict[str, Any] = self.browser.run(
            f"return document.querySelector({selector!r}).getBoundingClientRect().toJSON()"
        )
        return found


def shuffle(studio: Studio) -> None:
    """Write four neighbours before the shuffle, and four after it."""
    query = "SELECT position_id FROM shuffled WHERE split = 'train' LIMIT 4"
    with run_query(studio.store, query) as result:
        after = [row["position_id"] for batch in result.batches for row in batch.to_pylist()]
    orders = {
        "Before the shuffle <span>four consecutive positions: one game</span>": list(range(440, 444)),
        "After the shuffle <span>four consecutive positions: four games</span>": after,
    }
    parts = []
    for heading, numbers in orders.items():
        positions = [hexdata.read_position(studio.store, number) for number in numbers]
        assert len({position.game_id for position in positions}) in (1, 4)
        parts += [f"<h1>{heading}</h1>", _film(positions, heading)]
    studio.open_parts(*parts, width=840)
    studio.save("shuffle.png", trim=True)


def _film(positions: list[Position], title: str) -> str:
    frames = [
        replace(position.diagram(), caption=[f"game {position.game_id}, move {position.ply}"])
        for position in positions
    ]
    return film_svg(frames, columns=4, title=title)


def show_board(studio: Studio) -> None:
    """Write one board, as ``hexdata show --svg`` draws it."""
    studio.open_parts(hexdata.read_game(studio.store, 7).at(30).svg(numbers=True), width=560)
    studio.save("show-board.png", trim=True)


def show_film(studio: Studio) -> None:
    """Write a filmstrip of a game."""
    studio.open_parts(hexdata.read_game(studio.store, 7).svg(every=14), width=860)
    studio.save("show-film.png", trim=True)


def report(studio: Studio) -> None:
    """Write the summary of the report."""
    studio.open_html((studio.store / "report.html").read_text(encoding="utf-8"), width=1000)
    studio.save("report-summary.png", "header", ".tiles")


def report_charts(studio: Studio) -> None:
    """Write two sections of the report with charts."""
    studio.open_html((studio.store / "report.html").read_text(encoding="utf-8"), width=1000)
    studio.save("report-charts.png", "#dispersion", "#batches")


def browse_game(studio: Studio) -> None:
    """Write the page of a game."""
    with studio.browsing("game=17&ply=30"):
        studio.save("browse-game.png")


def browse_openings(studio: Studio) -> None:
    """Write the tree of openings after one move."""
    with studio.browsing("openings=e4"):
        studio.save("browse-openings.png")


def browse_batch(studio: Studio) -> None:
    """Write the boards of a batch after the shuffle."""
    with studio.browsing("batches=loader&count=16"):
        studio.save("browse-batch.png")


PICTURES: dict[str, Callable[[Studio], None]] = {
    "shuffle": shuffle,
    "show-board": show_board,
    "show-film": show_film,
    "report-summary": report,
    "report-charts": report_charts,
    "browse-game": browse_game,
    "browse-openings": browse_openings,
    "browse-batch": browse_batch,
}
"""Name of each picture, without ``.png``, and the function that writes it."""


def main(names: list[str]) -> None:
    """Write some pictures, or all."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        subprocess.run([sys.executable, "-m", "hexdata", "demo"], cwd=folder, check=True)
        with chromium.browser(folder) as browser:
            studio = Studio(browser, folder)
            for name in names or PICTURES:
                PICTURES[name](studio)


if __name__ == "__main__":
    main(sys.argv[1:])
