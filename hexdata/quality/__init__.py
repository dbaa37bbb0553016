"""How well a shuffle mixed, held against what chance makes of a uniform one: the figures of ``verify``.

``queries/`` counts, in SQL; ``theory`` says what to expect; ``assess`` compares. Never writes to a store.
"""

from __future__ import annotations

from typing import Any, Final

from hexdata.pool import default_workers
from hexdata.quality.assess import WANTED_SHARE, assess_split
from hexdata.quality.figures import BucketFigures, Figure, Quality
from hexdata.quality.measure import SPLIT, measure_split
from hexdata.quality.theory import DEVIATIONS
from hexdata.remote import AnyPath
from hexdata.store import Store
from hexdata.store.session import duckdb_session

__all__ = ["DEVIATIONS", "WANTED_SHARE", "BucketFigures", "Figure", "Quality", "measure_quality"]

DUCKDB_MEMORY: Final = 500 << 20


def measure_quality(
    store: str | AnyPath, *, memory: int = DUCKDB_MEMORY, threads: int | None = None
) -> Quality | None:
    """Measure how well the training split of a shuffled store is mixed, before and after the shuffle.

    Each figure is held against its mean and standard deviation in a uniform shuffle of the same rows;
    where a choice decides what a bucket holds (``assign`` by game, ``stratify_by``), against uniform orders
    of what each bucket holds. Of more than four million rows, a seeded sample of stretches is looked at.
    Only reads: what DuckDB spills goes to the system's temporary folder.

    Args:
        store: the store's folder, or its address.
        memory: bytes for DuckDB.
        threads: of DuckDB; None for one a core.

    Returns:
        None if there is no training split.

    Raises:
        StoreError: there is no store, or it is not shuffled.
        BudgetError: the memory is too small.
    """
    target = Store.open(store)
    target.require_stage("shuffle")
    lineage = target.manifest.stages["shuffle"]
    if not lineage["splits"].get(SPLIT):
        return None
    choices: dict[str, Any] = lineage["choices"]
    by_bucket = choices.get("assign") == "game" or "stratify_by" in choices
    with duckdb_session(memory=memory, threads=threads or default_workers(), place=target.path) as con:
        measured = measure_split(target, con, by_bucket=by_bucket)
    return assess_split(measured, choices)
