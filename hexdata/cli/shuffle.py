"""``hexdata shuffle``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from hexdata.cli.app import Address, EngineName, Json, Memory, Seed, Store, command, using_engine
from hexdata.text import printable
from hexdata.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from hexdata.cli.render import Output
    from hexdata.selection import BalanceRow, Duplicates, Means
    from hexdata.shuffle import ShufflePlan, ShuffleResult

__all__ = ["show_choices", "shuffle"]

_SHOWN_GROUPS: Final = 12
"""Groups of a split that the table of a balance shows; ``--json`` has all."""
_SHOWN_LETTERS: Final = 60
"""Of the name of a group."""


def shuffle(
    store: Store,
    seed: Seed = 0,
    buckets: Annotated[
        int | None,
        typer.Option(
            "--buckets",
            min=1,
            help="Buckets of the largest split. Default: one for each 1,048,576 positions.",
        ),
    ] = None,
    memory: Memory = "1GB",
    threads: Annotated[
        int | None,
        typer.Option("--threads", min=1, help="Threads. Default: one a core, as far as --memory allows."),
    ] = None,
    where: Annotated[
        str | None,
        typer.Option(
            "--where",
            metavar="CONDITION",
            help="Only positions of which this SQL condition is true, such as 'value_sample_tier <= 1'.",
        ),
    ] = None,
    dedup: Annotated[
        Literal["none", "exact", "symmetric"],
        typer.Option("--dedup", help="Keep one game of those that are the same, or images of one another."),
    ] = "none",
    per_game: Annotated[
        int | None,
        typer.Option("--per-game", min=1, help="At most so many positions of a game, chosen by seeded key."),
    ] = None,
    per_game_by: Annotated[
        Literal["key", "tier"],
        typer.Option("--per-game-by", help="With 'tier', low value sample tiers are chosen first."),
    ] = "key",
    balance_by: Annotated[
        str | None,
        typer.Option(
            "--balance-by",
            metavar="EXPR",
            help="Cut every group of one value of an SQL expression, such as source or winner, to the size "
            "of the smallest, by seeded choice.",
        ),
    ] = None,
    stratify_by: Annotated[
        str | None,
        typer.Option(
            "--stratify-by",
            metavar="EXPR",
            help="Give every bucket its fair share of each value of an SQL expression, such as value, or of "
            "each 'length' of game.",
        ),
    ] = None,
    assign: Annotated[
        Literal["position", "game"],
        typer.Option("--assign", help="Scatter single positions or whole games to buckets."),
    ] = "position",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be done and needed; write nothing.")
    ] = False,
    engine: EngineName = "local",
    address: Address = None,
    as_json: Json = False,
) -> None:
    """Shuffle a store's positions globally, out of core."""
    from hexdata.shuffle import ShuffleOptions, plan_shuffle, shuffle_store

    options = ShuffleOptions(
        where=where,
        dedup=dedup,
        per_game=per_game,
        per_game_by=per_game_by,
        balance_by=balance_by,
        stratify_by=stratify_by,
        assign=assign,
        seed=seed,
        buckets=buckets,
        memory=parse_bytes(memory),
        threads=threads,
    )
    with command(as_json, store) as (output, bar):
        if dry_run:
            with using_engine(engine, address) as runner:
                plan = plan_shuffle(store, options, engine=runner)
            if not output.print_json(plan):
                _show_plan(output, plan)
                show_choices(output, plan)
            plan.require_disk()
            return
        with using_engine(engine, address) as runner:
            result = shuffle_store(store, options, bar, engine=runner)
    if output.print_json(result):
        return
    if result.already_done:
        output.note("this shuffle was done already")
    _show_splits(output, result.splits, result.buckets)
    output.line(f"seed {result.seed}, {result.positions:,} positions, {format_bytes(result.bytes)}")
    show_choices(output, result)


def _show_splits(output: Output, rows: dict[str, int], buckets: dict[str, int]) -> None:
    from hexdata.schema import SPLITS

    output.table(
        ["split", "positions", "buckets"],
        [[split, f"{rows[split]:,}", f"{buckets[split]:,}"] for split in SPLITS if split in rows],
    )


def show_choices(output: Output, made: ShuffleResult | ShufflePlan) -> None:
    """Print what the choices leave out, what they might have, and what a balance does to each group."""
    for note in made.notes:
        output.note(note)
    for choice, count in made.left_out.items():
        output.line(f"left out by {choice}: {count:,} positions")
    if made.duplicates:
        _show_duplicates(output, made.duplicates)
    if made.balance:
        output.line()
        _show_balance(output, made.balance)


def _show_duplicates(output: Output, found: Duplicates) -> None:
    output.line(
        f"duplicates in the store: {found.exact_games:,} games ({found.exact_positions:,} positions) "
        f"exact, {found.symmetric_games:,} ({found.symmetric_positions:,}) with images and fragments"
    )


def _show_balance(output: Output, balance: tuple[BalanceRow, ...]) -> None:
    """Print each group whole, as a cut from the head would have left it, and as it is."""
    rows: list[list[str]] = []
    for split in dict.fromkeys(row.split for row in balance):
        own = sorted((r for r in balance if r.split == split), key=lambda r: (not r.total, -r.before))
        for row in own[: _SHOWN_GROUPS + 1]:
            name = "all groups" if row.total else "NULL" if row.group is None else _shown(row.group)
            whole = "all" if row.kept < row.before else "all kept"
            rows.append([split, name, whole, f"{row.before:,}", *_means(row.whole)])
            if row.kept < row.before:
                rows.append(["", "", "head cut", f"{row.kept:,}", *_means(row.head)])
                rows.append(["", "", "kept", f"{row.kept:,}", *_means(row.seeded)])
        if len(own) > _SHOWN_GROUPS + 1:
            rows.append([split, f"{len(own) - _SHOWN_GROUPS - 1:,} more, see --json", "", "", "", "", ""])
    output.table(["split", "group", "", "positions", "game length", "value", "place in file"], rows)


def _shown(text: str) -> str:
    """Return a value as it may stand in a table: what no screen shows is spelled out, and length is cut."""
    text = printable(text)
    return text if len(text) <= _SHOWN_LETTERS else f"{text[: _SHOWN_LETTERS - 1]}…"


def _means(means: Means) -> list[str]:
    values = ((means.total_positions, 1), (means.value, 4), (means.source_offset, 3))
    return ["-" if value is None else f"{value:.{digits}f}" for value, digits in values]


def _show_plan(output: Output, plan: ShufflePlan) -> None:
    """Print what a shuffle would do."""
    _show_splits(output, plan.rows, plan.buckets)
    work = f"{plan.slices:,} slices of the input and {plan.units:,} units of the result"
    if plan.units_done:
        work += f"; {plan.units_done:,} slices and buckets are done"
    limits = (
        f"{plan.threads} at a time, DuckDB at most {format_bytes(plan.duckdb_memory)} each, at most "
        f"{plan.chunk_rows:,} rows scattered and {plan.sort_rows:,} sorted by each"
    )
    disk = (
        f"{format_bytes(plan.disk_needed)} needed ({format_bytes(plan.run_bytes)} of runs, which go again, "
        f"{format_bytes(plan.bucket_bytes)} of buckets, {format_bytes(plan.spill_bytes)} to spare"
    )
    disk += f"; {format_bytes(plan.disk_done)} of it are written" if plan.disk_done else ""
    disk += f"), {format_bytes(plan.disk_free)} free"
    if plan.disk_freed:
        disk += f" and {format_bytes(plan.disk_freed)} of the shuffle that is replaced"
    facts = {
        "work": work,
        "threads": limits,
        "row groups": f"{plan.row_group_rows:,} rows",
        "memory": format_bytes(plan.memory),
        "disk": disk,
        "time": "none: this shuffle is done" if plan.already_done else _duration(plan.seconds),
    }
    output.table(["plan", ""], [[name, text] for name, text in facts.items()])


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    text = f"{minutes} min {rest} s" if minutes else f"{max(seconds, 0.1):.1f} s"
    return f"some {text}, an estimate from a few of the rows on this machine as it is now"
