"""The HTML page: its charts and boards, and the template that has its texts and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib import metadata
from typing import Any, Final

import numpy as np

from hexdata.draw import Diagram, Shades, board_svg
from hexdata.errors import StoreError
from hexdata.extras import installed_by
from hexdata.info import StageInfo, loader_code
from hexdata.quality import Figure, Quality
from hexdata.report import charts
from hexdata.report.facts import SPLIT, ReportFacts, Row
from hexdata.report.verdict import Verdict, batch_sentence, game_sentences, number, why_unmeasured
from hexdata.store.commands import command_line, stage_command
from hexdata.text import count_of, is_number, printable, without_game
from hexdata.units import format_bytes, format_duration

with installed_by("report", "the report"):
    from jinja2 import Environment, PackageLoader, StrictUndefined, Template

_LONGEST: Final = 300
"""Maximum number of characters shown of a text from a source."""
_FEWEST_GAMES: Final = 10
"""Minimum number of games of a first move for which the share won by blue is shown."""


def render_page(facts: ReportFacts, verdict: Verdict) -> str:
    """Return the page as HTML. Texts are escaped by the template, charts and boards where they are drawn."""
    quality = facts.quality
    # The address of the documentation, if the metadata of the installed package have one.
    listed: list[str] = metadata.metadata("hexdata").get_all("Project-URL") or []
    address = dict(entry.split(", ", 1) for entry in listed).get("Documentation", "").rstrip("/")
    return _template().render(
        facts=facts,
        verdict=verdict,
        split=SPLIT,
        in_epoch=game_sentences(facts),
        unmeasured=why_unmeasured(facts),
        draw=charts,
        boards=_openings(facts),
        lengths=_lengths(facts.tables["lengths"]),
        values=_values(quality),
        figures=[each.row() for each in quality.figures + quality.lags] if quality else [],
        stages=[_stage_row(stage) for stage in facts.stages if stage.lineage],
        address=address,
    )


@cache
def _template() -> Template:
    """Return the template of the page. Once, as to compile it takes longer than to render it."""
    environment = Environment(
        loader=PackageLoader("hexdata.report"),
        autoescape=True,
        # A misspelled name in the template is an error, and not an empty text on the page.
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    filters = {"bytes": format_bytes, "cell": _cell, "count": count_of, "number": number, "part": _part}
    environment.filters |= filters
    functions = (command_line, stage_command, batch_sentence, without_game)
    environment.globals |= {function.__name__: function for function in functions}
    environment.globals |= {"loader": loader_code, "is_number": is_number, "measured": _measured}
    return environment.get_template("report.html")


# --- texts ---------------------------------------------------------------------------------------------


def _cell(value: Any, name: str = "") -> str:
    """Return a value of a column as text."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return printable(value[:_LONGEST])
    if name in ("bytes", "size"):
        return format_bytes(value)
    if "share" in name:
        return f"{100 * value:.3g}%"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _part(share: float | None) -> str:
    """Format a share for a sentence: as a percentage, or as "1 in N" if it is very small."""
    return f"1 in {1 / share:,.0f}" if share and share < 1e-5 else _cell(share, "share")


# --- rows and numbers that need more than a query --------------------------------------------------------


def _stage_row(stage: StageInfo) -> Row:
    row: Row = {
        "stage": stage.stage,
        "positions": stage.positions,
        "files": stage.files,
        "size": stage.bytes,
        "per position": f"{stage.bytes / stage.positions:.1f} B" if stage.positions else None,
        "time": "not recorded",
        **dict.fromkeys(("positions/s", "finished")),
    }
    if last := stage.last:
        took = f"{last.seconds:.1f} s" if last.seconds < 60 else format_duration(last.seconds)
        row["time"] = took + ", resumed" * last.resumed
        if last.seconds and not last.resumed:  # a resumed run did only part of the work
            row["positions/s"] = round(last.positions / last.seconds)
        row["finished"] = last.finished.replace("T", " ").replace("Z", " UTC")
    return row


def _lengths(rows: Sequence[Row]) -> dict[str, Any] | None:
    """Return the distribution of the lengths of games; None if there are no games."""
    known = [(row["positions"], row["games"]) for row in rows if row["positions"]]
    if not known:
        return None
    lengths, counts = np.array(known).T
    return {
        "rows": known,
        "games": int(counts.sum()),
        "first": known[0][0],
        "last": known[-1][0],
        "median": known[int(np.searchsorted(counts.cumsum(), counts.sum() / 2))][0],
        "mean": float(np.average(lengths, weights=counts)),
    }


def _values(quality: Quality | None) -> dict[str, Any] | None:
    """Return the values of the buckets, their mean and the largest deviation; None if they are unknown."""
    known = [row for row in quality.by_bucket if row["value_mean"] is not None] if quality else []
    if not known:
        return None
    mean = sum(row["rows"] * row["value_mean"] for row in known) / sum(row["rows"] for row in known)
    deviations = [abs(row["z"]) for row in known if row["z"] is not None]
    return {"buckets": known, "mean": mean, "worst": max(deviations, default=None)}


def _measured(figures: Sequence[Figure], prefix: str) -> list[Figure]:
    return [figure for figure in figures if figure.name.startswith(prefix) and figure.after is not None]


# --- pictures ------------------------------------------------------------------------------------------


def _openings(facts: ReportFacts) -> list[tuple[str, str]]:
    """Return (board, caption) of the first moves, of the first ten moves, and of the games won by blue."""
    moves, size = facts.tables["first_moves"], facts.board_size
    if not moves or size is None:
        return []
    games, by = sum(row["games"] for row in moves), "share of the games"
    started = {row["move"]: row["games"] / games for row in moves}
    used = {row["move"]: row["games"] / games for row in facts.tables["opening_cells"]}
    decided = ((row["move"], row["blue_wins"], row["blue_wins"] + row["red_wins"]) for row in moves)
    won = {move: blue / both for move, blue, both in decided if both >= _FEWEST_GAMES}
    least = f"for first moves of at least {_FEWEST_GAMES} games"
    shown = [
        (started, by, "First move: percentage of games that start on the cell."),
        (used, by, "First ten moves: percentage of games that use the cell."),
        (won, "share won by blue", f"Percentage won by blue, {least}."),
    ]
    return [(_board(size, shares, label, caption), caption) for shares, label, caption in shown if shares]


def _board(size: int, shares: Mapping[int, float], label: str, title: str) -> str:
    """Draw shares on a board. Those of games have a square root scale, as most of them are small."""
    values, texts = np.full(size * size, np.nan), [""] * (size * size)
    is_won = label == "share won by blue"
    for cell, share in shares.items():
        if cell is None or not 0 <= cell < size * size:
            hint = "Run `hexdata verify` to find the game."
            raise StoreError("the games contain a move that is not on the board", found=cell, hint=hint)
        values[cell] = share
        # Below half a percent, the text would be 0.
        texts[cell] = str(round(100 * share)) if is_won or share >= 0.005 else ""
    top = 1.0 if is_won else None
    shades = Shades(values, label, texts, share=True, scale="linear" if is_won else "sqrt", top=top)
    return board_svg(Diagram(size, shades=shades, title=title))
