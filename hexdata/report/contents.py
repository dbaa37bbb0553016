"""Sections about the data and its stages: game lengths, tiers, openings, sources, stages and lineage."""

from __future__ import annotations

from typing import Final, Literal

import numpy as np

from hexdata.draw import Diagram, Shades, board_svg
from hexdata.errors import StoreError
from hexdata.report.charts import lengths_chart, tiers_chart
from hexdata.report.facts import ReportFacts, Row, StageSummary
from hexdata.report.page import PageTable, Section
from hexdata.report.verdict import duplicate_games
from hexdata.store.commands import command_line, stage_command
from hexdata.text import count_of, printable
from hexdata.units import format_bytes

__all__ = ["contents_sections"]

_MOST_ROWS: Final = 40
"""Maximum number of rows in a table of sources, reasons or moves."""
_FEWEST_GAMES: Final = 10
"""Minimum number of games of a first move for which the share won by blue is shown."""
_LONGEST: Final = 300
"""Maximum number of characters shown of a text from a source."""
_NAMES: Final = {
    "convert": "convert",
    "shuffle": "shuffle",
    "export": "export",
    "pickles-original": "pickles, original order",
    "pickles-shuffled": "pickles, shuffled",
}
_NOT_RECORDED: Final = "not recorded"


def contents_sections(facts: ReportFacts) -> list[Section]:
    """Return the sections about the data in the store, the stages that wrote it and its lineage."""
    return [
        _lengths(facts),
        _tiers(facts),
        _openings(facts),
        _sources(facts),
        _stages(facts),
        _lineage(facts),
    ]


# --- games ------------------------------------------------------------------------------------------------


def _lengths(facts: ReportFacts) -> Section:
    lengths = [(row["positions"], row["games"]) for row in facts.tables["lengths"] if row["positions"]]
    title, reading = (
        "Game lengths",
        "The legacy tool records one position per move, and the final one.",
    )
    games = sum(count for _, count in lengths)
    if not games:
        return Section("lengths", title, "The store contains no games.", "")
    shortest, longest = lengths[0][0], lengths[-1][0]
    mean = sum(length * count for length, count in lengths) / games
    if games == 1:
        finding = f"The only game has {count_of(longest, 'position')}."
    elif shortest == longest:
        finding = f"{games:,} games of {count_of(longest, 'position')} each."
    else:
        finding = (
            f"{games:,} games of {shortest:,} to {longest:,} positions; the median is "
            f"{_median(lengths):,}, the mean {mean:.1f}."
        )
    picture = (lengths_chart(lengths), "Games by the number of their positions.")
    return Section(
        "lengths", title, finding, reading + " Very short games are incomplete or resigned.", [picture]
    )


def _median(lengths: list[tuple[int, int]]) -> int:
    half, counted = sum(count for _, count in lengths) / 2, 0
    for length, count in lengths:
        counted += count
        if counted >= half:
            return length
    raise AssertionError("there is at least one game")


def _tiers(facts: ReportFacts) -> Section:
    rows = facts.tables["tiers"]
    title = "Value sample tiers"
    known = [row for row in rows if row["tier"] is not None]
    if not known:
        return Section("tiers", title, "No position has a value sample tier.", "")
    total = sum(row["positions"] for row in rows)
    tiers = [("none" if row["tier"] is None else f"tier {row['tier']}", row["positions"]) for row in rows]
    least = known[0]
    share = _share(least["positions"], total)
    finding = f"{share} of the positions have tier {least['tier']}, the lowest in this store."
    if least["positions"] == total:
        finding = f"All positions have tier {least['tier']}."
    table = PageTable(
        "Tiers",
        ["tier", "positions", "share", "mean value"],
        [
            [name, f"{count:,}", f"{count / total:.2%}", _number(row["value_mean"])]
            for (name, count), row in zip(tiers, rows, strict=True)
        ],
        folded=True,
    )
    return Section(
        "tiers",
        title,
        finding,
        "The tier determines how often a position is used to train the value: tier 0 always, tier 3, which "
        "most positions have, rarely.",
        [(tiers_chart(tiers), "Number of positions by tier.")],
        [table],
        documents=("batches",),
    )


# --- openings ---------------------------------------------------------------------------------------------


def _openings(facts: ReportFacts) -> Section:
    moves, cells = facts.tables["first_moves"], facts.tables["opening_cells"]
    title = "Openings"
    size = facts.board_size
    if not moves or size is None:
        return Section(
            "openings", title, "No game is complete from its first move, so no opening is known.", ""
        )
    games = sum(row["games"] for row in moves)
    most = max(row["games"] for row in moves)
    frequent = [row["cell"] for row in moves if row["games"] == most]
    if len(moves) == 1:
        finding = (
            f"The only game begins with {frequent[0]}."
            if games == 1
            else f"All games begin with {frequent[0]}."
        )
    else:
        finding = f"{len(moves):,} of {size * size:,} cells occur as first moves. "
        if len(frequent) == 1:
            finding += (
                f"The most frequent one, {frequent[0]}, begins {_share(most, games)} of {games:,} games."
            )
        else:
            finding += f"The most frequent ones begin {count_of(most, 'game')} of {games:,} each."
    return Section(
        "openings",
        title,
        finding,
        "Blue connects top and bottom, red left and right. Darker cells were played in more games; cells "
        "without colour were never played. A network trained on few openings learns few kinds of games.",
        _boards(size, moves, cells, games),
        [_first_moves(moves, games, facts)],
        shape="board",
    )


def _boards(size: int, moves: list[Row], cells: list[Row], games: int) -> list[tuple[str, str]]:
    """Return the boards of the openings, each with its caption."""
    first = {row["move"]: row["games"] / games for row in moves}
    played = {row["move"]: row["games"] / games for row in cells}
    decided = {row["move"]: row["blue_wins"] + row["red_wins"] for row in moves}
    won = {
        row["move"]: row["blue_wins"] / decided[row["move"]]
        for row in moves
        if decided[row["move"]] >= _FEWEST_GAMES
    }
    pictures = [
        (_board(size, first, "First moves"), "First move: percentage of games that start on the cell."),
        (
            _board(size, played, "The first ten moves"),
            "First ten moves: percentage of games that use the cell.",
        ),
    ]
    if won:
        caption = f"Percentage of games won by blue, for first moves with at least {_FEWEST_GAMES} games."
        title = "Games won by blue, by first move"
        pictures.append((_board(size, won, title, label="share won by blue", top=1.0), caption))
    return pictures


def _board(
    size: int,
    shares: dict[int, float],
    title: str,
    *,
    label: str = "share of the games",
    top: float | None = None,
) -> str:
    """Draw shares on a board: on a linear scale up to ``top``, or, without it, on a square root scale."""
    values = np.full(size * size, np.nan)
    texts = [""] * (size * size)
    for cell, share in shares.items():
        if cell is None or not 0 <= cell < size * size:
            raise StoreError(
                "the games contain an invalid move",
                found=cell,
                expected=f"0 to {size * size - 1}",
                hint="Run `hexdata verify` to find the game.",
            )
        values[cell] = share
        percent = round(100 * share)
        texts[cell] = str(percent) if percent or top else ""
    scale: Literal["linear", "sqrt"] = "linear" if top else "sqrt"
    shades = Shades(values, label, texts, share=True, scale=scale, top=top)
    return board_svg(Diagram(size, shades=shades, title=title))


def _first_moves(moves: list[Row], games: int, facts: ReportFacts) -> PageTable:
    ordered = sorted(moves, key=lambda row: (-row["games"], row["move"]))
    left = len(ordered) - _MOST_ROWS
    return PageTable(
        "First moves",
        ["move", "games", "share", "won by blue", "won by red"],
        [
            [
                row["cell"],
                f"{row['games']:,}",
                _share(row["games"], games),
                _share(row["blue_wins"], row["blue_wins"] + row["red_wins"]),
                _share(row["red_wins"], row["blue_wins"] + row["red_wins"]),
            ]
            for row in ordered[:_MOST_ROWS]
        ],
        folded=True,
        more=f"{left:,} more moves: {_query(facts, 'first_moves')}" if left > 0 else "",
    )


# --- sources ----------------------------------------------------------------------------------------------


def _sources(facts: ReportFacts) -> Section:
    rows = facts.tables["sources"]
    copies, rejected = duplicate_games(facts), facts.counts["rejected"]
    finding = (
        f"{count_of(len(rows), 'source')} with {count_of(facts.counts['positions'], 'position')} of "
        f"{count_of(facts.counts['games'], 'game')}. Duplicate games: {copies:,}. "
        f"Rejected records: {rejected:,}."
    )
    splits = facts.tables["splits"]
    tables = [
        *([_splits(splits)] if splits else []),
        *([_source_table(rows, facts)] if rows else []),
        *_reasons(facts),
    ]
    return Section(
        "sources",
        "Sources",
        finding if rows else "No source has been converted yet.",
        "Rejected records are excluded; each has a reason. Flagged games are kept. A duplicate "
        "has the moves of an earlier game, or their mirror image, and is in the same split as that game.",
        tables=tables,
        documents=("format", "howto/splits"),
    )


def _splits(rows: list[Row]) -> PageTable:
    def shown(count: int | None) -> str:
        return "-" if count is None else f"{count:,}"

    columns = ["games", "duplicates", "positions", "shuffled", "buckets", "exported", "shards"]
    return PageTable(
        "Splits", ["split", *columns], [[row["split"], *(shown(row[c]) for c in columns)] for row in rows]
    )


def _source_table(rows: list[Row], facts: ReportFacts) -> PageTable:
    ordered = sorted(rows, key=lambda row: (-row["rejected"], -row["flagged"], row["source_id"]))
    ordered = sorted(ordered[:_MOST_ROWS], key=lambda row: row["source_id"])
    left = len(rows) - len(ordered)
    return PageTable(
        "Sources",
        ["source", "format", "bytes", "positions", "games", "duplicates", "rejected", "flagged"],
        [
            [
                _shown(row["name"]),
                row["format"],
                format_bytes(row["bytes"]),
                *(f"{row[name]:,}" for name in ("positions", "games", "duplicates", "rejected", "flagged")),
            ]
            for row in ordered
        ],
        texts=frozenset({0, 1}),
        folded=len(rows) > 12,
        more=f"{left:,} more sources with fewer rejections: {_query(facts, 'sources')}" if left > 0 else "",
    )


def _reasons(facts: ReportFacts) -> list[PageTable]:
    tables = []
    rejects, flags = facts.tables["rejects"], facts.tables["flags"]
    if rejects:
        listed = [
            [row["reason"], f"{row['records']:,}", f"{row['sources']:,}", _shown(row["example"])]
            for row in rejects[:_MOST_ROWS]
        ]
        columns = ["reason", "records", "sources", "example"]
        tables.append(PageTable("Rejected records", columns, listed, texts=frozenset({0, 3})))
    if flags:
        listed = [
            [
                row["flag"],
                f"{row['games']:,}",
                f"{row['positions']:,}",
                f"{row['sources']:,}",
                f"{row['example_game']}",
            ]
            for row in flags[:_MOST_ROWS]
        ]
        columns = ["flag", "games", "positions", "sources", "example game"]
        tables.append(PageTable("Flagged games", columns, listed))
    return tables


def _query(facts: ReportFacts, name: str) -> str:
    """Return the command that runs a named query."""
    return command_line("sql", facts.location, f"@{name}")


def _shown(text: str) -> str:
    """Return a text of a source in printable characters, truncated."""
    return printable(text[:_LONGEST])


def _share(count: int, total: int) -> str:
    return f"{count / total:.1%}" if total else "-"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


# --- stages and lineage --------------------------------------------------------------------------------


def _stages(facts: ReportFacts) -> Section:
    size = sum(stage.bytes for stage in facts.stages)
    rows = [_stage_row(stage) for stage in facts.stages]
    columns = [
        "stage",
        "positions",
        "files",
        "size",
        "per position",
        "time",
        "positions/s",
        "peak memory",
        "finished",
    ]
    finding = f"The files of all stages take {format_bytes(size)} on disk."
    if not rows:
        finding = "No stage has run."
    resumed = any(stage.last and stage.last.resumed for stage in facts.stages)
    more = "A resumed run did only part of the work, so its rate is not shown." if resumed else ""
    return Section(
        "stages",
        "Stages",
        finding,
        "Sizes are those of the current files. Time, rate and peak memory of all processes are those of the "
        "last run, from the journal of this folder. They depend on the machine, not on the data.",
        tables=[PageTable("Stages", columns, rows, more=more)],
        documents=("report",),
    )


def _stage_row(stage: StageSummary) -> list[str]:
    each = f"{stage.bytes / stage.positions:.1f} B" if stage.positions else "-"
    row = [_NAMES[stage.stage], f"{stage.positions:,}", f"{stage.files:,}", format_bytes(stage.bytes), each]
    last = stage.last
    if last is None:
        return [*row, _NOT_RECORDED, "-", "-", "-"]
    rate = f"{last.positions / last.seconds:,.0f}" if last.seconds and not last.resumed else "-"
    memory = format_bytes(last.peak_bytes) if last.peak_bytes else "-"
    took = _duration(last.seconds) + (", resumed" if last.resumed else "")
    return [*row, took, rate, memory, last.finished.replace("T", " ").replace("Z", " UTC")]


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def _lineage(facts: ReportFacts) -> Section:
    rows = [
        [_NAMES[stage.stage], stage_command(stage.stage, stage.lineage, facts.location), stage.digest]
        for stage in facts.stages
    ]
    export = facts.stage("export")
    if export:
        rows.append(["shards, as the loader checks them", "", export.lineage["digest"]])
    rows.append(["manifest.json", "", facts.manifest_sha256])
    return Section(
        "lineage",
        "Lineage",
        "The same sources, commands and release give the same digests on any machine.",
        "The digest of a stage is a SHA-256 over the names and digests of its files. Two stores with equal "
        "manifests contain the same bytes. Click on a command or a digest to select it.",
        tables=[
            PageTable(
                f"Lineage, by hexdata {facts.version}",
                ["stage", "command", "SHA-256"],
                rows,
                texts=frozenset({0, 1, 2}),
                codes=frozenset({1, 2}),
                stacked=True,
            )
        ],
    )
