"""The report: one HTML page that says in a minute whether a store is shuffled and complete, and shows why.

Numbers come from the named queries of ``hexdata.sql`` and from ``hexdata.quality``. Never changes a store's
dataset: the page is derived data, which no manifest names.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hexdata.checks import check_suffix
from hexdata.errors import ConfigError
from hexdata.progress import SILENT, Progress
from hexdata.remote import AnyPath, as_path
from hexdata.report.facts import Facts, gather_facts
from hexdata.report.verdict import Verdict, judge
from hexdata.sql import Limits
from hexdata.store.files import write_bytes
from hexdata.store.room import telling_full, telling_full_temporary

__all__ = ["REPORT_NAME", "Facts", "Report", "Verdict", "make_page", "write_report"]

REPORT_NAME: Final = "report.html"
"""The page, in the store's folder."""
_SUFFIXES: Final = (".html", ".htm")


@dataclass(frozen=True)
class Report:
    """What ``write_report`` did.

    Attributes:
        path: of the page.
        bytes: of it.
        verdict: the words at its top.
        facts: the numbers in it.
    """

    path: str
    bytes: int
    verdict: Verdict
    facts: Facts


def write_report(
    store: str | AnyPath,
    output: str | AnyPath | None = None,
    limits: Limits | None = None,
    progress: Progress = SILENT,
) -> Report:
    """Write the report of a store, at whatever stage it is, as one self-contained HTML page.

    The same store and release give the same bytes, but for what the journal says of times and memory.

    Args:
        store: the store's folder, or its address.
        output: the page's file, or its address; None for ``STORE/report.html``.
        limits: memory and threads; None for the defaults.
        progress: who watches.

    Raises:
        StoreError: there is no store, or a file of it cannot be read.
        ConfigError: ``output`` is a folder, or its name is not that of a page.
        BudgetError: the memory is too small, or a disk is full.
        OSError: the page cannot be written.
    """
    path = as_path(output) if output is not None else as_path(store) / REPORT_NAME
    if isinstance(path, Path) and path.is_dir():
        raise ConfigError("the page is a file, and this is a folder", path=path)
    check_suffix(path, "a page", _SUFFIXES)
    with telling_full_temporary():
        facts = gather_facts(store, limits or Limits(), progress)
    progress.begin("draw", None, "charts")
    verdict = judge(facts)
    page = make_page(facts, verdict).encode("utf-8")
    with telling_full(path, "Make room, or let --output name a file elsewhere, and run the command again."):
        write_bytes(path, page)
    return Report(str(path), len(page), verdict, facts)


def make_page(facts: Facts, verdict: Verdict) -> str:
    """Return the page as HTML text."""
    from hexdata.report.page import render_page
    from hexdata.report.sections import make_sections, tiles  # loads matplotlib, after DuckDB has ended

    return render_page(
        name=facts.name,
        version=facts.version,
        verdict=verdict,
        tiles=tiles(facts),
        sections=make_sections(facts),
    )
