"""The report and ``hexdata browse`` in Chromium: light, dark, print and phone; keys; hostile names."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hexdata import read_position
from hexdata.board import cell_name
from hexdata.report import write_report
from tests.kit.chromium import FAULTS, READY, Browser
from tests.pages.conftest import Page

VIEWS = {
    "": "Games",
    "games&filter=nope": "Games",
    "games&sort=len(moves)&descending=1": "Games",
    "positions": "Positions",
    "game=41&ply=6": "Game 41",
    "position=30": "Position 30",
    "openings": "Openings",
    "openings=a1": "Openings",
    "batches": "Batches",
    "batches=before": "Batches",
    "reasons": "Flags and rejections",
    "reasons=trmph-syntax": "Rejected: trmph-syntax",
    "game=999": "This cannot be shown",
}
"""Each view with its heading."""
UNHURT = "return window.hurt === undefined && !document.querySelector('main img, main script')"
ROWS = "document.querySelectorAll('tbody tr').length"


@pytest.mark.parametrize("kind", ["demo_store", "browsed_store"])
def test_the_report_is_readable(browser: Browser, request, tmp_path: Path, kind: str) -> None:
    report = write_report(request.getfixturevalue(kind), tmp_path / "page.html")
    browser.open(tmp_path / "page.html")
    browser.run("document.querySelectorAll('details').forEach(each => { each.open = true; })")
    for width, dark in ((1200, False), (390, True), (320, False)):
        assert browser.faults(width, dark=dark) == {}
    assert browser.complaints() == []
    assert browser.run("return performance.getEntriesByType('resource').map(it => it.name)") == []

    digest = report.facts.manifest_sha256
    place = browser.run(
        f"const it = [...document.querySelectorAll('#lineage code')].find(e => e.textContent === '{digest}');"
        "it.scrollIntoView({behavior: 'instant', block: 'center'});"
        "const b = it.getClientRects()[0]; return [b.left + 20, b.top + b.height / 2];"
    )
    browser.click(*place)
    assert browser.run("return getSelection().toString()") == digest

    browser.open(tmp_path / "page.html", width=794, dark=True, media="print")  # it is printed light
    assert browser.run("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.run(f"{FAULTS} return faults.contrast()") == []
    cut = "return [...document.querySelectorAll('figure')].map(it => getComputedStyle(it).breakInside)"
    assert set(browser.run(cut)) <= {"avoid"}
    assert browser.run("return document.documentElement.scrollWidth") <= 794


@pytest.fixture
def open_view(browser: Browser, page: Page) -> Callable[..., None]:
    return lambda view, **window: browser.open_view(page.address, view, **window)


def test_every_view_is_readable(browser: Browser, open_view) -> None:
    """On a light phone, and on a wide dark window."""
    title = "document.querySelector('h1').textContent"
    open_view("reasons")
    for view, heading in VIEWS.items():
        # Without the old title, the page is not taken for the next view before it is that view.
        browser.run(f"{title} = ''; location.hash = {view!r}")
        browser.wait_for(f"{READY} && {title} === {heading!r}")
        if "filter" in view:
            browser.wait_for("!!document.querySelector('.error')")
        for width, dark in ((390, False), (1200, True)):
            assert browser.faults(width, dark=dark) == {}, view
        assert browser.run(UNHURT)
    assert [text for text in browser.complaints() if "status of 40" not in text] == []


def test_hostile_names_are_shown_as_text(browser: Browser, open_view) -> None:
    open_view("games&start=0")
    shown = browser.run("return document.querySelector('tbody').textContent")
    assert "<script>window.hurt = 1<" in shown
    assert """<img src=x onerror="window.hurt = 2"> ключ""" in shown
    open_view("reasons=trmph-syntax")
    assert "<script>" in browser.run("return document.querySelector('table').textContent")
    hostile = "%3Cimg%20src%3Dx%20onerror%3D%22window.hurt%3D9%22%3E"
    for view in (f"games&filter={hostile}", f"reasons={hostile}", f"openings={hostile}", f"game={hostile}"):
        open_view(view)
        assert browser.run(UNHURT)


def test_a_game_is_stepped_through_with_the_keyboard_and_saved(browser: Browser, open_view) -> None:
    open_view("game=7&ply=2")
    for key, ply in (("ArrowRight", 3), ("ArrowRight", 4), ("ArrowLeft", 3), ("Home", 0), ("ArrowLeft", 0)):
        browser.press(key)
        browser.wait_for(f"location.hash === '#game=7&ply={ply}'")
        assert browser.run("return document.querySelectorAll('figure .board g circle').length") == ply
    browser.press("End")
    ply, total = re.findall(r"\d+", browser.run("return document.querySelector('output').textContent"))
    assert ply == total
    numbers = "document.querySelectorAll('figure .board text').length"
    assert browser.run(f"return {numbers}") == 0
    browser.run("document.querySelector('input[type=checkbox]').click()")
    browser.wait_for(f"{numbers} === {total}")
    browser.run(
        "window.saved = null; HTMLAnchorElement.prototype.click ="
        "  function () { window.saved = [this.download, this.href]; };"
        "[...document.querySelectorAll('button')].find(e => e.textContent === 'Save PNG').click()"
    )
    browser.wait_for("window.saved !== null")
    name, address = browser.run("return window.saved")
    assert (name, address[:5]) == (f"game-7-ply-{total}.png", "blob:")
    browser.press("ArrowDown")
    browser.wait_for("location.hash === '#game=8'")
    browser.wait_for(f"{READY} && document.querySelector('h1').textContent === 'Game 8'")


def test_openings_are_followed_by_a_click_and_by_the_keyboard(browser: Browser, open_view) -> None:
    shown = "document.querySelector('.big b')?.textContent"
    open_view("openings")
    assert browser.run(f"return {shown}") == "45 games"
    cell = browser.run(
        "const pick = document.querySelector('.board a path'); pick.scrollIntoView({block: 'center'});"
        "const box = pick.getBoundingClientRect();"
        "return [box.left + box.width / 2, box.top + box.height / 2];"
    )
    browser.click(*cell)
    # The address changes before the event that shows the next view, so the content is waited for.
    browser.wait_for(f"{READY} && {shown} !== '45 games'")
    assert browser.run("return /^#openings=[a-e][1-5]$/.test(location.hash)")
    assert int(browser.run(f"return {shown}").split()[0]) >= 2
    browser.press("ArrowLeft")
    browser.wait_for(f"{READY} && {shown} === '45 games'")
    assert browser.run("return location.hash") == "#openings"
    assert browser.run("const it = document.querySelector('svg a'); it.focus(); return it.matches(':focus')")
    browser.press("Enter")
    browser.wait_for(f"{READY} && {shown} !== '45 games'")


def test_a_filter_is_typed_or_confirmed(browser: Browser, page: Page, open_view, tmp_path: Path) -> None:
    """A filter that another site opens runs only after a click."""
    open_view("games")
    browser.run("document.getElementById('filter').focus()")
    browser.cdp("Input.insertText", text="game_id >= 43")
    browser.press("Enter")
    browser.wait_for(f"{ROWS} === 2")
    assert "filter=game_id" in browser.run("return location.hash")
    link = f"{page.address}#games=&filter=game_id%20%3E%3D%2043"
    other = tmp_path / "other.html"
    other.write_text(f"<title>x</title><a id=link href='{link}'>games</a>", encoding="utf-8")
    browser.open(other)
    browser.run("document.getElementById('link').click()")
    browser.wait_for("location.protocol === 'http:'")
    browser.wait_for(READY)
    assert browser.run(f"return {ROWS}") == 0
    assert "Press Apply" in browser.run("return document.querySelector('main').textContent")
    browser.run("document.querySelector('button.main').click()")
    browser.wait_for(f"{ROWS} === 2")


def test_a_policy_is_shown_on_the_board_and_as_bars(browser: Browser, odd_store: Path, page: Any) -> None:
    from hexdata.browse import serving

    position = read_position(odd_store, 1)
    strongest = [cell_name(cell, position.size) for cell, _ in position.strongest()]
    with serving(odd_store) as address:
        for view in ("position=1", f"game={position.game_id}&ply=1"):
            browser.open_view(address, view)
            browser.wait_for("!!document.querySelector('.share b')")
            named = "return [...document.querySelectorAll('.share b')].map(e => e.textContent)"
            assert browser.run(named)[: len(strongest)] == strongest
