"""The sections of the page in order, and the key numbers above them."""

from __future__ import annotations

from hexdata.report.blocks import Section
from hexdata.report.contents import contents_sections
from hexdata.report.facts import Facts
from hexdata.report.history import history_sections
from hexdata.report.mixing import mixing_sections
from hexdata.units import format_bytes

__all__ = ["make_sections", "tiles"]


def make_sections(facts: Facts) -> list[Section]:
    """Return all sections of the page."""
    return [*mixing_sections(facts), *contents_sections(facts), *history_sections(facts)]


def tiles(facts: Facts) -> list[tuple[str, str]]:
    """Return the key numbers of the store as (number, unit) pairs."""
    shuffle = facts.stage("shuffle")
    buckets = sum(shuffle.lineage["buckets"].values()) if shuffle else 0
    size = facts.board_size
    counted = [
        (facts.counts["positions"], "positions"),
        (facts.counts["games"], "games"),
        (facts.counts["sources"], "sources"),
        (buckets, "buckets"),
    ]
    return [
        *((f"{count:,}", name) for count, name in counted),
        (f"{size} \u00d7 {size}" if size else "-", "board size"),
        (format_bytes(sum(stage.bytes for stage in facts.stages)), "on disk"),
    ]
