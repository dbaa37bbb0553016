"""Reason why a live loader delivers no batch, in words of the options and the files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hexdata.live.options import LiveOptions

__all__ = ["find_wait_reason"]

Counts = Mapping[str, float]
_LEFT_OUT = {"other_split": "games of other splits", "other_rank": "games of other processes"}


def find_wait_reason(
    metrics: Mapping[str, Counts], notes: Mapping[str, Mapping[str, Any]], options: LiveOptions
) -> str | None:
    """Return why no batch is delivered and what changes it, as text; None if the metrics show no reason.

    Args:
        metrics: Metrics of the stages by stage name, as ``Pipeline.metrics`` returns them.
        notes: Text of the stages by stage name, as ``Pipeline.notes`` returns it.
        options: Options of the pipeline.
    """
    if "ChunkSourceLoader" not in metrics or "ShufflingChunkPool" not in metrics:
        return None
    pool, reservoir = metrics["ShufflingChunkPool"], metrics.get("ShufflingFrameSampler", {})
    if not pool.get("chunks"):
        return _explain_empty_pool(metrics, notes.get("ChunkSourceLoader", {}).get("bad", []), options)
    arguments = {stage.name: stage.arguments for stage in options.stages}
    least = arguments["ShufflingChunkPool"].get("min_chunks", 1)
    if pool["chunks"] < least and not pool["draws"]:
        return (
            f"the pool contains {_count(pool['chunks'], 'game')}, and games are drawn when it contains "
            f"min_chunks = {least:,}; waiting for new games"
        )
    checked = metrics.get("ChunkValidator", {})
    if checked.get("left_out") and not checked.get("passed"):
        reasons = [name.partition(".")[2] for name in checked if name.startswith("left_out.")]
        return (
            "ChunkValidator leaves out every game that is drawn, because of "
            f"{', '.join(sorted(reasons))}; its options or the games must change"
        )
    held = reservoir.get("held", 0)
    size = int(reservoir.get("size", 0) * arguments.get("ShufflingFrameSampler", {}).get("prefill", 1))
    is_filling = held < size and not metrics.get("TensorGenerator", {}).get("batches")
    if pool.get("allowed_draws") == 0:
        drawn = f"every game has been drawn {_times(pool['uses'])} (reuse = {options.reuse:g})"
        if not is_filling:
            return f"{drawn}; waiting for new games"
        return (
            f"{drawn}, and the reservoir contains {held:,.0f} of {size:,} positions, which it needs before "
            "the first batch; waiting for new games. A smaller reservoir or prefill, or a larger reuse, "
            "needs fewer games"
        )
    if is_filling and held:
        return (
            f"the reservoir contains {held:,.0f} of {size:,} positions, which it needs before the first "
            "batch; it is being filled. A smaller reservoir or prefill needs less time"
        )
    return None


def _explain_empty_pool(
    metrics: Mapping[str, Counts], bad: list[tuple[str, str]], options: LiveOptions
) -> str | None:
    files, loaded = metrics.get("FilePathProvider", {}), metrics["ChunkSourceLoader"]
    if files.get("unavailable"):
        return None
    if loaded["busy"]:
        return "no game has been read so far; a file is being read"
    if not files.get("files"):
        patterns = _patterns(options)
        return f"no complete game file has been found; waiting for files named {patterns}"
    left_out = [f"{loaded[name]:,.0f} {text}" for name, text in _LEFT_OUT.items() if loaded.get(name)]
    if left_out:
        wanted = f"of the split {options.split!r}" if options.split else ""
        if options.world_size > 1:
            wanted = f"{wanted} of rank {options.rank}".strip()
        return f"no game {wanted} among those read; the files contain {' and '.join(left_out)}"
    if bad:
        name, reason = bad[-1]
        found = _count(loaded.get("bad_files", len(bad)), "file")
        return f"no file could be used; {found} counted as bad, such as {name}: {reason}"
    return None


def _patterns(options: LiveOptions) -> str:
    """Return the name patterns of the files that are read, as text such as "*.trmph or *.sgf"."""
    from hexdata.live.files.provider import PATTERNS  # imports watchfiles, which an extra installs

    patterns = list(options.stages[0].arguments.get("patterns", PATTERNS))
    return " or ".join(filter(None, (", ".join(patterns[:-1]), patterns[-1])))


def _count(number: float, noun: str) -> str:
    return f"{number:,.0f} {noun}" if number == 1 else f"{number:,.0f} {noun}s"


def _times(uses: float) -> str:
    return "once" if round(uses, 2) == 1 else f"{round(uses, 2):g} times"
