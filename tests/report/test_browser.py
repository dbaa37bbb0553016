"""The page in a browser: no console errors, no overflow, sufficient contrast in light, dark and print."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hexdata.convert import ConvertOptions, convert_sources
from hexdata.report import write_report
from tests.report import browser as chromium

if TYPE_CHECKING:
    from tests.report.browser import Browser

pytestmark = pytest.mark.skipif(bool(chromium.missing()), reason=chromium.missing() or "there is one")

PHONE = 390
NAME = "".join(["a-very-long-name-without-a-break" * 6, "<script>console.error('hostile')</script>"])

CONTRASTS = """
const lum = c => {
  const [r, g, b] = c.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255)
    .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const behind = e => {
  for (let at = e; at; at = at.parentElement) {
    const c = getComputedStyle(at).backgroundColor;
    if (!/, 0\\)$/.test(c)) return c;
  }
  return 'rgb(255, 255, 255)';
};
const kinds = 'h1, h2, p, b, a, th, td, dt, code, summary, figcaption, .chart text', found = [];
for (const e of document.querySelectorAll(kinds)) {
  if (!e.textContent.trim() || !e.checkVisibility()) continue;
  const style = getComputedStyle(e), svg = e.namespaceURI.endsWith('svg');
  const [x, y] = [lum(svg ? style.fill : style.color), lum(behind(e))];
  const ratio = (Math.max(x, y) + 0.05) / (Math.min(x, y) + 0.05);
  if (ratio < 4.5) found.push(e.tagName + ' ' + e.textContent.trim().slice(0, 30) + ' ' + ratio.toFixed(2));
}
return found;
"""
"""Texts with a contrast below 4.5, the minimum of WCAG 2.2 level AA."""

WIDER = """
return [...document.querySelectorAll('body *')]
  .filter(e => e.checkVisibility() && !e.closest('.scroll') && !e.closest('svg'))
  .filter(e => { const b = e.getBoundingClientRect(); return b.left < -1 || b.right > innerWidth + 1; })
  .map(e => e.tagName + '.' + e.className);
"""
SMALL = """
return [...document.querySelectorAll('.chart text')]
  .map(e => [e.textContent, e.getBoundingClientRect().height]).filter(([_, high]) => high < 9);
"""
OUTSIDE = """
return [...document.querySelectorAll('figure > svg')].flatMap(svg => {
  const whole = svg.getBoundingClientRect();
  return [...svg.querySelectorAll('text')].filter(e => {
    const b = e.getBoundingClientRect();
    const beside = b.left < whole.left - 4 || b.right > whole.right + 4;
    return beside || b.top < whole.top - 4 || b.bottom > whole.bottom + 4;
  }).map(e => e.textContent);
});
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium.browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture(scope="module", params=["demo", "hostile"])
def page(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of the demo, and of a store with long names and markup in names."""
    folder = tmp_path_factory.mktemp("page")
    if request.param == "demo":
        store = request.getfixturevalue("demo_store")
    else:
        source = folder / "in" / NAME[:200] / f"{NAME[200:]}.trmph"
        source.parent.mkdir(parents=True)
        source.write_text(f"#5,a1b2c3 b\n#5,{NAME} b\n")
        store = folder / "store"
        convert_sources([folder / "in"], store, ConvertOptions(workers=1, max_reject_rate=1))
    return Path(write_report(store, folder / "page.html").path)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1200, PHONE, 320])
def test_the_page_renders_without_errors(browser: Browser, page: Path, width: int, dark: bool) -> None:
    browser.open(page, width=width, dark=dark)
    browser.run("document.querySelectorAll('details').forEach(each => { each.open = true; })")
    assert browser.complaints() == []
    assert browser.run("return document.documentElement.scrollWidth") <= width
    assert browser.run(WIDER) == []
    assert browser.run(CONTRASTS) == []
    assert browser.run(OUTSIDE) == []
    assert browser.run("return performance.getEntriesByType('resource').map(it => it.name)") == []
    ground = re.findall(r"\d+", browser.run("return getComputedStyle(document.body).backgroundColor"))
    assert (int(ground[0]) < 64) == dark
    if width == PHONE:
        assert browser.run(SMALL) == []


def test_a_dark_page_is_printed_light(browser: Browser, page: Path) -> None:
    browser.open(page, width=794, dark=True, media="print")
    assert browser.run("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.run(CONTRASTS) == []
    cut = "return [...document.querySelectorAll('figure')].map(it => getComputedStyle(it).breakInside)"
    assert set(browser.run(cut)) <= {"avoid"}
    assert browser.run("return document.documentElement.scrollWidth") <= 794
    assert browser.pdf().startswith(b"%PDF-")


def test_a_click_selects_the_whole_digest(browser: Browser, demo_store: Path, tmp_path: Path) -> None:
    report = write_report(demo_store, tmp_path / "page.html")
    browser.open(tmp_path / "page.html")
    digest = report.facts.manifest_sha256
    place = browser.run(
        f"const it = [...document.querySelectorAll('#lineage code')].find(e => e.textContent === '{digest}');"
        "it.scrollIntoView({behavior: 'instant', block: 'center'});"
        "const b = it.getClientRects()[0]; return [b.left + 20, b.top + b.height / 2];"
    )
    browser.click(*place)
    assert browser.run("return getSelection().toString()") == digest
