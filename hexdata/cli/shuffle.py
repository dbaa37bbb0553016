"""``hexdata shuffle``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from hexdata.cli.app import AnyPath, command, options_of, using_engine
from hexdata.options import ShuffleOptions
from hexdata.text import count_of, shortened
from hexdata.units import format_bytes

if TYPE_CHECKING:
    from hexdata.cli.render import Output
    from hexdata.selection import Means
    from hexdata.shuffle import ShufflePlan, ShuffleResult

_SHOWN_GROUPS: Final = 12
"""Maximum number of groups per split in the table; ``--json`` has all."""


def shuffle(
    store: AnyPath,
    dry_run: bool = False,
    engine: Literal["local", "ray"] = "local",
    address: str | None = None,
    json: bool = False,
    **given: Annotated[Any, ShuffleOptions],
) -> None:
    """Shuffle the positions of a store in a seeded order.

    The shuffle is global and works on disk, within the memory limit. It replaces another shuffle of the store
    when it is complete; shards and pickles stay until they are exported again.

    Examples:
        hexdata shuffle store --seed 1
        hexdata shuffle store --dry-run
        hexdata shuffle store --where 'value_sample_tier <= 1'

    Options:
        --dry-run: Print the plan with its passes and disk space; write nothing.
    """
    from hexdata.shuffle import plan_shuffle, shuffle_store

    options = options_of(ShuffleOptions, given)
    with command(json) as (output, bar), using_engine(engine, address) as runner:
        if dry_run:
            plan = plan_shuffle(store, options, engine=runner)
        else:
            result = shuffle_store(store, options, bar, engine=runner)
    if dry_run:
        if not output.print_json(plan):
            output.splits(plan.rows, "buckets", plan.buckets)
            output.table(["resource", "plan"], _plan_rows(plan))
            show_choices(output, plan)
        # Last, so that the plan shows the required disk space even if it is not available.
        plan.require_disk()
    elif not output.print_json(result):
        if result.already_done:
            output.note("the store already contains this shuffle")
        output.splits(result.splits, "buckets", result.buckets)
        output.line(f"seed {result.seed}, {result.positions:,} positions, {format_bytes(result.bytes)}")
        show_choices(output, result)


def show_choices(output: Output, made: ShuffleResult | ShufflePlan) -> None:
    """Print the effects of the selection options: excluded positions, duplicates and balanced groups."""
    for note in made.notes:
        output.note(note)
    for choice, count in made.left_out.items():
        output.line(f"excluded by {choice}: {count:,} positions")
    if found := made.duplicates:
        counts = "none"
        if found.symmetric_games:
            counts = (
                f"{found.exact_games:,} exact ({found.exact_positions:,} positions), "
                f"{found.symmetric_games:,} including symmetric ones and fragments "
                f"({found.symmetric_positions:,} positions)"
            )
        output.line(f"duplicate games in the store: {counts}")
    if not made.balance:
        return
    # For each group the means of all positions, of the first ones and of those kept.
    rows: list[list[str]] = []
    for split in dict.fromkeys(row.split for row in made.balance):
        of_split = [row for row in made.balance if row.split == split]
        # The row of all groups first, then the largest groups.
        of_split.sort(key=lambda row: (not row.total, -row.before))
        # One more than groups, for the row of all groups.
        for row in of_split[: _SHOWN_GROUPS + 1]:
            name = "all groups" if row.total else shortened("NULL" if row.group is None else row.group)
            is_cut = row.kept < row.before
            rows.append([split, name, "all" if is_cut else "all kept", f"{row.before:,}", *_means(row.whole)])
            if is_cut:
                rows.append(["", "", "first", f"{row.kept:,}", *_means(row.head)])
                rows.append(["", "", "kept", f"{row.kept:,}", *_means(row.seeded)])
        if len(of_split) > _SHOWN_GROUPS + 1:
            more = f"{len(of_split) - _SHOWN_GROUPS - 1:,} more, see --json"
            rows.append([split, more, "", "", "", "", ""])
    output.line()
    output.table(
        ["split", "group", "selection", "positions", "game length", "value", "position in file"],
        rows,
        optional=["position in file", "game length"],
    )


def _means(means: Means) -> list[str]:
    values = ((means.total_positions, 1), (means.value, 4), (means.source_offset, 3))
    return ["-" if value is None else f"{value:.{digits}f}" for value, digits in values]


def _plan_rows(plan: ShufflePlan) -> list[tuple[str, str]]:
    work = count_of(sum(plan.buckets.values()), "bucket")
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
    passes = f"{plan.passes:,}, each sorts a range of buckets with {count_of(plan.threads, 'thread')}"
    rows = [("work", work), ("passes", passes), ("memory", format_bytes(plan.memory)), ("disk", disk)]
    return rows if plan.replaces is None else [("replaces", plan.replaces), *rows]
