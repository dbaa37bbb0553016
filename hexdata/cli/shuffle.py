"""``hexdata shuffle``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from hexdata.cli.app import Address, EngineName, Json, Memory, Store, Threads, command, using_engine
from hexdata.text import count_of, printable
from hexdata.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from hexdata.cli.render import Output
    from hexdata.selection import BalanceRow, Duplicates, Means
    from hexdata.shuffle import ShufflePlan, ShuffleResult

__all__ = ["show_choices", "shuffle"]

_SELECT: Final = "Select positions"
_ARRANGE: Final = "Arrange positions"
"""Groups of options in the help."""

_SHOWN_GROUPS: Final = 12
"""Maximum number of groups per split in the table; ``--json`` has all."""
_SHOWN_CHARACTERS: Final = 60
"""Maximum length of a group's name in the table."""


def shuffle(
    store: Store,
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed",
            metavar="N",
            help="Random seed. The same seed gives the same order. Default: the seed of the present shuffle, "
            "or 0.",
            show_default=False,
        ),
    ] = None,
    buckets: Annotated[
        int | None,
        typer.Option(
            "--buckets",
            metavar="N",
            min=1,
            help="Number of buckets (files) of the largest split. Default: one per 1,048,576 positions.",
            rich_help_panel=_ARRANGE,
        ),
    ] = None,
    memory: Memory = "1GB",
    threads: Threads = None,
    where: Annotated[
        str | None,
        typer.Option(
            "--where",
            metavar="CONDITION",
            help="Keep only positions that meet this SQL condition, such as 'value_sample_tier <= 1'.",
            rich_help_panel=_SELECT,
        ),
    ] = None,
    dedup: Annotated[
        Literal["none", "exact", "symmetric"],
        typer.Option(
            "--dedup",
            metavar="none|exact|symmetric",
            help="Keep one game of each set of duplicates: with equal moves, or equal under a symmetry too.",
            rich_help_panel=_SELECT,
        ),
    ] = "none",
    per_game: Annotated[
        int | None,
        typer.Option(
            "--per-game",
            metavar="N",
            min=1,
            help="Maximum number of positions per game, chosen at random by seed.",
            rich_help_panel=_SELECT,
        ),
    ] = None,
    per_game_by: Annotated[
        Literal["key", "tier"],
        typer.Option(
            "--per-game-by",
            metavar="key|tier",
            help="Choose the positions of --per-game at random, or low value sample tiers first.",
            rich_help_panel=_SELECT,
        ),
    ] = "key",
    balance_by: Annotated[
        str | None,
        typer.Option(
            "--balance-by",
            metavar="EXPR",
            help="Reduce all groups of positions with equal values of an SQL expression, such as source or "
            "winner, to the size of the smallest group, by random choice.",
            rich_help_panel=_SELECT,
        ),
    ] = None,
    stratify_by: Annotated[
        str | None,
        typer.Option(
            "--stratify-by",
            metavar="EXPR",
            help="Give every bucket the same share of each value of an SQL expression, such as value; "
            "'length' is the length of the game.",
            rich_help_panel=_ARRANGE,
        ),
    ] = None,
    assign: Annotated[
        Literal["position", "game"],
        typer.Option(
            "--assign",
            metavar="position|game",
            help="Assign single positions or whole games to buckets.",
            rich_help_panel=_ARRANGE,
        ),
    ] = "position",
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print the plan with its passes and disk space; write nothing."),
    ] = False,
    replace: Annotated[
        bool,
        typer.Option(
            "--replace",
            help="Remove another shuffle of the store, and the shards and pickles made from it, before this "
            "one is written, if the disk cannot hold both.",
        ),
    ] = False,
    engine: EngineName = "local",
    address: Address = None,
    as_json: Json = False,
) -> None:
    """Shuffle the positions of a store in a seeded order.

    The shuffle is global and works on disk, within the memory limit. It replaces another shuffle of the store
    when it is complete; shards and pickles stay until they are exported again.

    Examples:
        hexdata shuffle store --seed 1
        hexdata shuffle store --dry-run
        hexdata shuffle store --where 'value_sample_tier <= 1'
    """
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
        replace=replace,
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
        output.note("the store already contains this shuffle")
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
    """Print the effects of the selection options: excluded positions, duplicates and balanced groups."""
    for note in made.notes:
        output.note(note)
    for choice, count in made.left_out.items():
        output.line(f"excluded by {choice}: {count:,} positions")
    if made.duplicates:
        _show_duplicates(output, made.duplicates)
    if made.balance:
        output.line()
        _show_balance(output, made.balance)


def _show_duplicates(output: Output, found: Duplicates) -> None:
    output.line(
        f"duplicate games in the store: {found.exact_games:,} exact ({found.exact_positions:,} positions), "
        f"{found.symmetric_games:,} including symmetric ones and fragments ({found.symmetric_positions:,})"
    )


def _show_balance(output: Output, balance: tuple[BalanceRow, ...]) -> None:
    """Print for each group the means of all positions, of the first ones and of those kept."""
    rows: list[list[str]] = []
    for split in dict.fromkeys(row.split for row in balance):
        split_rows = sorted((r for r in balance if r.split == split), key=lambda r: (not r.total, -r.before))
        for row in split_rows[: _SHOWN_GROUPS + 1]:
            name = "all groups" if row.total else "NULL" if row.group is None else _shown(row.group)
            whole = "all" if row.kept < row.before else "all kept"
            rows.append([split, name, whole, f"{row.before:,}", *_means(row.whole)])
            if row.kept < row.before:
                rows.append(["", "", "first", f"{row.kept:,}", *_means(row.head)])
                rows.append(["", "", "kept", f"{row.kept:,}", *_means(row.seeded)])
        if len(split_rows) > _SHOWN_GROUPS + 1:
            rows.append(
                [split, f"{len(split_rows) - _SHOWN_GROUPS - 1:,} more, see --json", "", "", "", "", ""]
            )
    output.table(
        ["split", "group", "selection", "positions", "game length", "value", "position in file"],
        rows,
        optional=["position in file", "game length"],
    )


def _shown(text: str) -> str:
    """Return a value for a table: escaped for the terminal and shortened."""
    text = printable(text)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 1]}…"


def _means(means: Means) -> list[str]:
    values = ((means.total_positions, 1), (means.value, 4), (means.source_offset, 3))
    return ["-" if value is None else f"{value:.{digits}f}" for value, digits in values]


def _show_plan(output: Output, plan: ShufflePlan) -> None:
    """Print the plan of a shuffle."""
    _show_splits(output, plan.rows, plan.buckets)
    work = f"{sum(plan.buckets.values()):,} buckets"
    if plan.already_done:
        work = "none: the store already contains this shuffle"
    elif plan.buckets_done:
        work += f", of which {plan.buckets_done:,} are already written"
    disk = (
        f"{format_bytes(plan.disk_needed)} needed ({format_bytes(plan.bucket_bytes)} of buckets, "
        f"{format_bytes(plan.spill_bytes)} of temporary files), {format_bytes(plan.disk_free)} free"
    )
    if plan.disk_freed:
        disk += f" and {format_bytes(plan.disk_freed)} in the replaced shuffle"
    facts = {
        **({} if plan.replaces is None else {"replaces": plan.replaces}),
        "work": work,
        "passes": f"{plan.passes:,}, each sorts a range of buckets with {count_of(plan.threads, 'thread')}",
        "memory": format_bytes(plan.memory),
        "disk": disk,
    }
    output.table(["resource", "plan"], [[name, text] for name, text in facts.items()])
