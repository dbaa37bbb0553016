"""The plan of a shuffle, and its log."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from hexdata.cli import app
from hexdata.errors import StoreError
from hexdata.progress import Silent
from hexdata.shuffle import ShuffleOptions, plan_shuffle, shuffle_store
from hexdata.shuffle.plan import count_passes
from hexdata.store import Store
from hexdata.verify import verify_store

if TYPE_CHECKING:
    from tests.conftest import CopyStore

OPTIONS = ShuffleOptions(seed=5, buckets=6, threads=2)


def everything(store: Path) -> dict[Path, tuple[int, int]]:
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in store.rglob("*")}


# --- the plan -----------------------------------------------------------------------------------------


def test_planning_writes_nothing_and_predicts_the_shuffle(trmph_store: Path, copy_store: CopyStore) -> None:
    store = copy_store(trmph_store)
    before = everything(store)
    plan = plan_shuffle(store, OPTIONS)
    assert everything(store) == before
    made = shuffle_store(store, OPTIONS)
    assert (plan.rows, plan.buckets, plan.left_out) == (made.splits, made.buckets, made.left_out)
    assert (plan.seed, plan.already_done, plan.buckets_done, plan.threads) == (5, False, 0, 2)
    assert made.bytes < plan.bucket_bytes < 3 * made.bytes
    assert (plan.passes, plan.spill_bytes, plan.memory) == (1, 0, 1_000_000_000)


def test_the_plan_counts_excluded_positions(odd_store: Path) -> None:
    plan = plan_shuffle(odd_store, ShuffleOptions(where="position_id < 100"))
    assert sum(plan.rows.values()) == 100
    assert plan.left_out == {"where": 800}
    assert plan.choices == {"where": "position_id < 100"}
    assert plan.positions == 900


def test_a_finished_shuffle_needs_nothing(trmph_store: Path, copy_store: CopyStore) -> None:
    store = copy_store(trmph_store)
    shuffle_store(store, OPTIONS)
    before = everything(store)
    plan = plan_shuffle(store, OPTIONS)
    assert everything(store) == before
    assert (plan.already_done, plan.disk_needed, plan.disk_freed) == (True, 0, 0)
    other = plan_shuffle(store, ShuffleOptions(seed=6))
    assert not other.already_done
    assert other.replaces is not None
    assert other.disk_freed == 0
    other = plan_shuffle(store, ShuffleOptions(seed=6, replace=True))
    assert other.disk_freed == sum(f.stat().st_size for f in (store / "shuffled").rglob("*.parquet"))


def test_planning_does_not_change_the_ledger_of_another_shuffle(
    trmph_store: Path, copy_store: CopyStore
) -> None:
    class Stop(Silent):
        def advance(self, amount: int) -> None:
            if amount:
                raise KeyboardInterrupt

    store = copy_store(trmph_store)
    with pytest.raises(KeyboardInterrupt):
        shuffle_store(store, OPTIONS, Stop())
    before = everything(store)
    assert plan_shuffle(store, ShuffleOptions(seed=6)).buckets_done == 0
    assert plan_shuffle(store, OPTIONS).buckets_done > 0
    assert everything(store) == before


def test_a_corrupt_ledger_is_named(trmph_store: Path, copy_store: CopyStore) -> None:
    store = copy_store(trmph_store)
    ledger = store / ".work" / "shuffle" / "progress.json"
    ledger.parent.mkdir(parents=True)
    ledger.write_text("[]")
    with pytest.raises(StoreError, match=r"the progress file is corrupt.*Remove progress\.json") as caught:
        plan_shuffle(store)
    assert caught.value.path == str(ledger)


@pytest.mark.parametrize("as_json", [False, True])
def test_a_dry_run(trmph_store: Path, copy_store: CopyStore, as_json: bool) -> None:
    store = copy_store(trmph_store)
    before = everything(store)
    command = ["shuffle", str(store), "--dry-run", "--buckets", "4", *(["--json"] if as_json else [])]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0
    assert everything(store) == before
    if as_json:
        assert json.loads(result.stdout)["buckets"]["train"] == 4
    else:
        for word in ("train", "6 buckets", "1, each sorts", "1 GB", "needed", "free"):
            assert word in result.stdout


@pytest.mark.parametrize(
    ("spill", "free", "memory", "buckets", "passes"),
    [
        (900, 0, 2_000, 9, 1),  # it fits into half of the memory
        (9_000, 12_000, 1_000, 9, 1),
        (9_000, 6_000, 1_000, 9, 2),
        (9_000, 100, 1_000, 9, 9),  # at most one pass for each bucket
    ],
)
def test_a_small_disk_needs_more_passes(
    spill: int, free: int, memory: int, buckets: int, passes: int
) -> None:
    """The temporary files of a pass take at most 80 % of the free disk."""
    assert count_passes(spill, free, memory, buckets) == passes


# --- the log ------------------------------------------------------------------------------------------

LINE = re.compile(
    r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (?P<name>shuffled/\S+): (?P<rows>[\d,]+) rows in "
    r"\d+\.\d\d s, [\d,]+ rows/s, (?P<memory>\d+(\.\d+)? [kMGT]?B) peak resident memory"
)


def test_the_log_has_one_line_per_bucket(trmph_store: Path, copy_store: CopyStore) -> None:
    store = copy_store(trmph_store)
    shuffle_store(store, OPTIONS)
    lines = (store / "logs" / "shuffle.log").read_text().splitlines()
    plan: dict[str, Any] = json.loads(lines[0].partition(" plan: ")[2])
    assert plan["seed"] == 5
    matches = [match for line in lines if (match := LINE.fullmatch(line))]
    found = {match["name"]: int(match["rows"].replace(",", "")) for match in matches}
    files = Store.open(store).manifest.files_in("shuffled")
    assert found == {name: facts.rows for name, facts in files.items()}
    assert lines[-1].endswith("done: 0 buckets were finished by an earlier run")
    shuffle_store(store, ShuffleOptions(seed=6))
    assert (store / "logs" / "shuffle.log").read_text().splitlines()[: len(lines)] == lines


def test_the_log_is_not_part_of_the_dataset(trmph_store: Path, copy_store: CopyStore) -> None:
    store = copy_store(trmph_store)
    shuffle_store(store, OPTIONS)
    verify_store(store).require()
    assert not Store.open(store).manifest.files_in("logs")
