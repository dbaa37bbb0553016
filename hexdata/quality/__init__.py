"""Statistical quality of a shuffle, compared with a uniform random order.

The SQL files in ``queries/`` count, ``theory`` computes expected values and variances, and ``assess``
compares them. The package never writes to a store.
"""

from __future__ import annotations

from typing import Any, Final

from hexdata.pool import default_workers
from hexdata.quality.assess import MAX_GAME_SHARE, assess_split
from hexdata.quality.figures import BucketFigures, Figure, Quality
from hexdata.quality.measure import SPLIT, SplitMeasures, measure_split
from hexdata.quality.theory import DEVIATIONS
from hexdata.retry import repeats_on_disk
from hexdata.storage import AnyPath
from hexdata.store import Store
from hexdata.store.disk_space import translate_disk_full, translate_temporary_disk_full
from hexdata.store.integrity import require_buckets
from hexdata.store.session import duckdb_session

__all__ = ["DEVIATIONS", "MAX_GAME_SHARE", "BucketFigures", "Figure", "Quality", "measure_quality"]

DUCKDB_MEMORY: Final = 500 << 20


def measure_quality(
    store: str | AnyPath, *, memory: int = DUCKDB_MEMORY, threads: int | None = None
) -> Quality | None:
    """Measure how well the training split of a shuffled store is mixed, before and after the shuffle.

    Each figure is compared with its mean and standard deviation in a uniform random order of the same rows.
    If an option determines the contents of buckets (assign="game", stratify_by), the comparison is with a
    uniform random order within each bucket. For more than four million rows a seeded sample is measured. The
    store is only read; DuckDB spills to the system's temporary folder.

    Args:
        store: Path or address of the store.
        memory: Memory limit of DuckDB in bytes. Default 500 MiB.
        threads: Number of DuckDB threads. Default None: one per core.

    Returns:
        The figures, or None if the store has no training split.

    Raises:
        StoreError: The store does not exist or is not shuffled, its buckets were removed, or the disk
            fails.
        BudgetError: The memory is too small.
    """
    target = Store.open(store)
    target.require_stage("shuffle")
    require_buckets(target)
    lineage = target.manifest.stages["shuffle"]
    if not lineage["splits"].get(SPLIT):
        return None
    choices: dict[str, Any] = lineage["choices"]
    by_bucket = choices.get("assign") == "game" or "stratify_by" in choices

    @repeats_on_disk
    def measure() -> SplitMeasures:
        with duckdb_session(memory=memory, threads=threads or default_workers(), store=target.path) as con:
            return measure_split(target, con, by_bucket=by_bucket)

    with translate_disk_full(target.path), translate_temporary_disk_full():
        return assess_split(measure(), choices)
