"""The page in Chromium: every view in light, dark and on a phone, keys, hostile names."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hexdata import read_position
from hexdata.board import cell_name
from tests.report import browser as chromium
from tests.report.test_browser import CONTRASTS, WIDER

if TYPE_CHECKING:
    from tests.browse.conftest import Page
    from tests.report.browser import Browser

pytestmark = pytest.mark.skipif(bool(chromium.missing()), reason=chromium.missing() or "there is one")

PHONE = 390
READY = "return !!document.querySelector('h1') && !document.getElementById('view').hasAttribute('aria-busy')"
VIEWS = {
    "": "Games",
    "games&filter=nope": "Games",
    "games&sort=len(moves)&descending=1": "Games",
    "positions": "Positions",
    "game=41&ply=6": "Game 41",
    "position=30": "Position 30",
    "openings": "Openings",
    "openings=a1": "Openings",
    "sheet": "Batches",
    "sheet=before": "Batches",
    "reasons": "Flags and rejections",
    "reasons=duplicates": "Duplicate games",
    "reasons=rejected:trmph-syntax": "Rejected: trmph-syntax",
    "game=999": "This cannot be shown",
}
"""Each view with its heading."""


class Tab:
    """A tab of Chromium with the page."""

    def __init__(self, browser: Browser, page: Page) -> None:
        self.browser, self._page = browser, page

    def open(self, view: str, **window: Any) -> None:
        """Open a view from scratch."""
        self.browser.open_address("about:blank", **window)
        self.browser.open_address(f"{self._page.address}#{view}", **window)
        self.wait_for(READY)

    def wait_for(self, condition: str) -> None:
        """Wait until a script returns true."""
        deadline = time.monotonic() + 60
        while not self.browser.run(condition):
            assert time.monotonic() < deadline, condition
            time.sleep(0.05)

    def press(self, key: str) -> None:
        """Press a key."""
        for kind in ("keyDown", "keyUp"):
            self.browser.cdp("Input.dispatchKeyEvent", type=kind, key=key)

    def go(self, address: str, heading: str) -> None:
        """Wait for an address and the heading of its view."""
        self.wait_for(f"return location.hash === {address!r}")
        self.wait_for(f"return document.querySelector('h1').textContent === {heading!r}")
        self.wait_for(READY)


@pytest.fixture(scope="module")
def tab(page: Page, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with chromium.browser(tmp_path_factory.mktemp("browser")) as opened:
        yield Tab(opened, page)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize(
    ("width", "dark"), [(1200, False), (1200, True), (PHONE, False)], ids=["light", "dark", "phone"]
)
def test_every_view_is_readable(tab: Tab, view: str, width: int, dark: bool) -> None:
    tab.open(view, width=width, dark=dark)
    if "filter" in view:
        tab.wait_for("return !!document.querySelector('.error')")
    browser = tab.browser
    assert browser.run("return document.querySelector('h1').textContent") == VIEWS[view]
    refused = [text for text in browser.complaints() if "status of 40" not in text]
    assert refused == []
    assert browser.run("return document.documentElement.scrollWidth") <= width
    assert browser.run(WIDER) == []
    assert browser.run(CONTRASTS) == []
    ground = re.findall(r"\d+", browser.run("return getComputedStyle(document.body).backgroundColor"))
    assert (int(ground[0]) < 64) == dark
    assert browser.run("return window.hurt === undefined && !document.querySelector('main img, main script')")


def test_hostile_names_are_shown_as_text(tab: Tab) -> None:
    tab.open("games&start=0")
    shown = tab.browser.run("return document.querySelector('tbody').textContent")
    assert "<script>window.hurt = 1<" in shown
    assert """<img src=x onerror="window.hurt = 2"> ключ.trmph""" in shown
    tab.open("reasons=rejected:trmph-syntax")
    assert "<script>" in tab.browser.run("return document.querySelector('table').textContent")
    hostile = "%3Cimg%20src%3Dx%20onerror%3D%22window.hurt%3D9%22%3E"
    for view in (f"games&filter={hostile}", f"reasons={hostile}", f"openings={hostile}", f"game={hostile}"):
        tab.open(view)
        assert tab.browser.run("return window.hurt === undefined && !document.querySelector('main img')")


def test_a_game_is_stepped_through_with_the_keyboard(tab: Tab) -> None:
    tab.open("game=7&ply=2")
    for key, ply in (("ArrowRight", 3), ("ArrowRight", 4), ("ArrowLeft", 3), ("Home", 0), ("ArrowLeft", 0)):
        tab.press(key)
        tab.wait_for(f"return location.hash === '#game=7&ply={ply}'")
        stones = "return document.querySelectorAll('.stone-blue, .stone-red').length"
        assert tab.browser.run(stones) == ply
    tab.press("End")
    last = tab.browser.run("return document.querySelector('output').textContent")
    ply, total = re.findall(r"\d+", last)
    assert ply == total
    tab.press("ArrowDown")
    tab.go("#game=8", "Game 8")


def test_the_back_button_returns(tab: Tab) -> None:
    tab.open("games")
    tab.browser.run("document.querySelector('tbody a').click()")
    tab.wait_for("return document.querySelector('h1').textContent === 'Game 0'")
    tab.press("ArrowRight")
    tab.wait_for("return location.hash === '#game=0&ply=1'")
    tab.browser.run("history.back()")
    tab.go("#games", "Games")


def test_openings_are_followed_by_a_click_on_the_board(tab: Tab) -> None:
    tab.open("openings")
    games = "return document.querySelector('.big b').textContent"
    assert tab.browser.run(games) == "45 games"
    cell = tab.browser.run(
        "const pick = document.querySelector('.pick'); pick.scrollIntoView({block: 'center'});"
        "const box = pick.getBoundingClientRect();"
        "return [box.left + box.width / 2, box.top + box.height / 2];"
    )
    tab.browser.click(*cell)
    tab.wait_for("return /^#openings=[a-e][1-5]$/.test(location.hash)")
    tab.wait_for(READY)
    assert int(tab.browser.run(games).split()[0]) >= 2
    tab.press("ArrowLeft")
    tab.wait_for("return location.hash === '#openings'")


def test_a_filter_is_typed_and_applied_with_the_keyboard(tab: Tab) -> None:
    tab.open("games")
    tab.browser.run("document.getElementById('filter').focus()")
    tab.browser.cdp("Input.insertText", text="game_id >= 43")
    tab.browser.cdp(
        "Input.dispatchKeyEvent",
        type="keyDown",
        key="Enter",
        code="Enter",
        windowsVirtualKeyCode=13,
        text="\r",
    )
    tab.wait_for("return document.querySelectorAll('tbody tr').length === 2")
    assert "filter=game_id" in tab.browser.run("return location.hash")


def test_a_policy_is_shown_on_the_board_and_as_bars(tab: Tab, odd_store: Path) -> None:
    from hexdata.browse import serving
    from tests.browse.conftest import Page

    position = read_position(odd_store, 1)
    strongest = [cell_name(cell, position.size) for cell, _ in position.strongest()]
    with serving(odd_store) as address:
        other = Tab(tab.browser, Page(address))
        for view in ("position=1", f"game={position.game_id}&ply=1"):
            Page(address).get("api/store")  # waits for the index
            other.open(view)
            other.wait_for("return !!document.querySelector('.share b')")
            named = "return [...document.querySelectorAll('.share b')].map(e => e.textContent)"
            assert tab.browser.run(named)[: len(strongest)] == strongest


def test_a_board_is_saved_as_png(tab: Tab) -> None:
    tab.open("game=7&ply=5")
    tab.browser.run(
        "window.saved = null; HTMLAnchorElement.prototype.click ="
        "  function () { window.saved = [this.download, this.href]; };"
    )
    tab.browser.run(
        "[...document.querySelectorAll('button')].find(e => e.textContent === 'Save PNG').click()"
    )
    tab.wait_for("return window.saved !== null")
    name, address = tab.browser.run("return window.saved")
    assert name == "game-7-ply-5.png"
    assert address.startswith("blob:")
    assert [text for text in tab.browser.complaints() if "Security" in text] == []


def test_a_filter_that_another_site_opens_runs_only_after_a_click(tab: Tab, tmp_path: Path) -> None:
    link = f"{tab._page.address}#games=&filter=game_id%20%3E%3D%2043"
    other = tmp_path / "other.html"
    other.write_text(f"<title>x</title><a id=link href='{link}'>games</a>", encoding="utf-8")
    tab.browser.open_address(other.as_uri())
    tab.browser.run("document.getElementById('link').click()")
    tab.wait_for("return location.protocol === 'http:'")
    tab.wait_for(READY)
    assert tab.browser.run("return document.querySelectorAll('tbody tr').length") == 0
    assert "Press Apply" in tab.browser.run("return document.querySelector('main').textContent")
    tab.browser.run("document.querySelector('button.main').click()")
    tab.wait_for("return document.querySelectorAll('tbody tr').length === 2")
