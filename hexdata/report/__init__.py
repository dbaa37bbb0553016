"""HTML report of a store: whether it is shuffled and complete, with charts and tables.

The numbers are computed by the named queries of ``hexdata.sql`` and by ``hexdata.quality``. The report is not
listed in the manifest and does not change the dataset.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hexdata.checks import check_suffix
from hexdata.errors import ConfigError
from hexdata.progress import SILENT, Progress
from hexdata.report.facts import ReportFacts, gather_facts
from hexdata.report.verdict import Verdict, judge
from hexdata.sql import SqlLimits
from hexdata.storage import AnyPath, as_path, translate_errors
from hexdata.store.files import write_bytes

__all__ = [
    "REPORT_NAME",
    "Report",
    "ReportFacts",
    "Verdict",
    "require_libraries",
    "write_report",
]

REPORT_NAME: Final = "report.html"
"""Default file name, in the store's folder."""


@dataclass(frozen=True)
class Report:
    """Result of :func:`write_report`.

    Attributes:
        path: Path of the page.
        bytes: Size of the page.
        verdict: Summary at the top of the page.
        facts: Numbers shown on the page.
    """

    path: str
    bytes: int
    verdict: Verdict
    facts: ReportFacts


def require_libraries() -> None:
    """Check that the libraries of the report are installed, so that a missing one is named before any work.

    Raises:
        ConfigError: A library is not installed; the error names the extra of hexdata that installs it.
    """
    from hexdata.report import page  # noqa: F401


def write_report(
    store: str | AnyPath,
    output: str | AnyPath | None = None,
    limits: SqlLimits | None = None,
    progress: Progress = SILENT,
) -> Report:
    """Write the report of a store as one self-contained HTML page. The store may be at any stage.

    The same store and release give the same bytes, except for the store's path in the commands, and the times
    and memory recorded in the journal.

    Args:
        store: Path or address of the store.
        output: Path or address of the page. Default None: ``STORE/report.html``.
        limits: Memory and threads. Default None: the defaults of ``SqlLimits``.
        progress: Receives progress reports.

    Raises:
        StoreError: The store does not exist, or one of its files cannot be read.
        ConfigError: ``output`` is a folder or does not end in .html or .htm, or a library is not
            installed.
        BudgetError: The memory is too small, or a disk is full.
        OSError: The page cannot be written.
    """
    from hexdata.report.page import render_page  # first, since a missing library is named here

    path = as_path(output) if output is not None else as_path(store) / REPORT_NAME
    if isinstance(path, Path) and path.is_dir():
        raise ConfigError("the report cannot be written: the path is a folder", path=path)
    # Checked before the store is read, which may take minutes.
    check_suffix(path, "a page", [".html", ".htm"])
    if isinstance(path, Path) and path.parent.is_dir() and not os.access(path.parent, os.W_OK):
        fault = "the report cannot be written: the folder is read-only"
        raise ConfigError(fault, path=path.parent, hint="Choose another file with --output.")
    with translate_errors(as_path(store)):
        facts = gather_facts(store, limits or SqlLimits(), progress)
    progress.begin("draw", None, "charts")
    verdict = judge(facts)
    content = render_page(facts, verdict).encode("utf-8")
    with translate_errors(path):
        write_bytes(path, content)
    return Report(str(path), len(content), verdict, facts)
