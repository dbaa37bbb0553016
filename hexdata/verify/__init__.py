"""Verification of a store against its manifest, and of its sources against the original files. Read-only.

Most checks of tables are SQL for rows that must not exist, in ``rules.sql``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial

import pyarrow as pa

from hexdata.checks import check_options
from hexdata.errors import (
    BudgetError,
    EngineError,
    HexdataError,
    StoreError,
    StoreLockedError,
    VerifyError,
)
from hexdata.options import ShuffleOptions
from hexdata.progress import SILENT, Progress
from hexdata.quality import Quality, measure_input_order, measure_quality
from hexdata.retry import on_disk
from hexdata.storage import AnyPath, translate_errors
from hexdata.storage.errors import fault_behind
from hexdata.storage.lock import find_lock_holder
from hexdata.store import STAGES, Store
from hexdata.store.integrity import find_damage, rebuild_commands
from hexdata.store.manifest import Manifest
from hexdata.store.parquet import memory_returned
from hexdata.text import without_game
from hexdata.verify.roundtrip import RoundTrip, check_round_trip
from hexdata.verify.stages import (
    check_order,
    check_quality,
    check_rows,
    check_shards,
    check_stage,
    sort_memory,
)
from hexdata.verify.tables import (
    RULED,
    Check,
    VerifyOptions,
    check_files,
    check_game_hashes,
    check_position_values,
    check_tables,
    find_broken_rules,
    find_unreadable,
    require_none,
)

__all__ = ["Check", "RoundTrip", "VerifyOptions", "VerifyResult", "check_round_trip", "verify_store"]


@dataclass
class VerifyResult:
    """The result of ``verify_store``.

    Attributes:
        checks: Results of the checks, in the order in which they ran.
        skipped: Names of the stages that the store does not have.
        quality: Quality of the shuffle, or None if the store has no shuffle or it could not be measured.
        commands: Command lines that write damaged files again, in the order in which to run them.
    """

    checks: list[Check] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    quality: Quality | None = None
    commands: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True if every check passed."""
        return all(check.ok for check in self.checks)

    def require(self) -> None:
        """Check that every check passed.

        Raises:
            VerifyError: Checks failed; the error names all of them.
        """
        failed = [f"{check.name}: {check.detail}" for check in self.checks if not check.ok]
        if failed:
            raise VerifyError(f"{len(failed)} of {len(self.checks)} checks failed", found="; ".join(failed))


@memory_returned()
def verify_store(
    store: str | AnyPath,
    options: VerifyOptions | None = None,
    progress: Progress = SILENT,
) -> VerifyResult:
    """Check all stages of a store. Failed checks raise no error; see :attr:`VerifyResult.ok`.

    If a file is damaged or a table has other columns or rows than stated, the remaining checks do not run. If
    a file with the stated digest cannot be read, the check "pages" names all such files and is the last one.

    Args:
        store: Folder of the store, or its address in an object store.
        options: Limits of memory and threads. Default None: ``VerifyOptions()``.
        progress: Receives progress reports. Default: ignores them.

    Returns:
        The result of each check.

    Raises:
        ConfigError: An argument has the wrong type.
        StoreError: There is no store, its manifest cannot be read, or an object store fails.
        StoreLockedError: A stage is writing to the store, or has written to it during the checks.
        BudgetError: The memory is too small, or the disk of the temporary folder is full.
    """
    options, result = check_options(options, VerifyOptions), VerifyResult()
    target = Store.open(store)
    _require_no_writer(target)
    for name, check in _checks(target, options, result, progress):
        try:
            with translate_errors(target.path):
                outcome = Check(name, True, on_disk(check))
        except (BudgetError, EngineError):
            raise  # these errors do not concern the store
        except (HexdataError, OSError, pa.ArrowException) as error:
            # An object store that does not respond is no evidence of damage.
            if fault_behind(error):
                raise
            # A stage that has begun since may have replaced the file that was being read.
            _require_no_writer(target)
            outcome = Check(name, False, str(error))
            # A file with the recorded digest may have been written with a broken page.
            if isinstance(error, StoreError) and name not in ("files", "tables"):
                with translate_errors(target.path):
                    unreadable = on_disk(find_unreadable, target)
                if unreadable:
                    pages = Check("pages", False, "; ".join(map(str, unreadable.values())))
                    result.checks.append(pages)
                    result.commands = rebuild_commands(target, unreadable)
                    break  # the other checks would fail because of the same files
        result.checks.append(outcome)
    return result


def _checks(
    store: Store, options: VerifyOptions, result: VerifyResult, progress: Progress
) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield the name of each check and the function that returns its detail, or raises an error.

    Each check reads the store itself. Those that would fail because another one has failed are left out.
    """
    manifest, positions = store.manifest, store.manifest.counts["positions"]
    limits = options.session(store.reader_memory())  # raises a BudgetError before all files are hashed
    if manifest.removed_buckets:  # their rows are sorted again, which takes as much as the shuffle
        ShuffleOptions(memory=sort_memory(store, options))

    def files() -> str:
        progress.begin("rehash", sum(facts.bytes for facts in manifest.files.values()), "bytes")
        damage = find_damage(store, manifest.files, threads=options.threads, progress=progress)
        result.commands = rebuild_commands(store, damage)
        return check_files(store, damage)

    # Digests first: a changed byte is reported by its file, and not by the checks that it makes fail.
    yield "files", files
    if result.ok:
        yield "tables", partial(check_tables, store)
    if not result.ok:
        return  # the other checks would fail because of the same files

    def with_unknown(check: Callable[[], str]) -> str:
        """Add what a check of games does not cover to its details."""
        detail, count = check(), store.count_without_game()
        return f"{detail}; {without_game(count, positions)}" if count else detail

    def passed(*names: str) -> bool:
        return {*names} <= {check.name for check in result.checks if check.ok}

    broken = cache(partial(find_broken_rules, store, limits))  # by the first of these checks

    def rules(name: str) -> str:
        require_none(broken().get(name, []), "rules are broken", store.path)
        return "no row breaks a rule"

    for name in RULED:
        check = partial(rules, name)
        yield name, partial(with_unknown, check) if name == "games" else check
    if passed("game values"):  # with moves on the board
        yield "game hashes", partial(check_game_hashes, store)
    yield "position values", partial(check_position_values, store)
    # The measurement locates positions by their ids, so these must be valid.
    if result.ok and positions:
        yield "input order", lambda: "{0.text}. {0.meaning}".format(measure_input_order(store, **limits))

    for stage in STAGES:
        if stage in manifest.stages and stage != "convert":
            yield f"{stage} stage", partial(check_stage, store, stage)
    result.skipped = [stage for stage in ("shuffle", "export") if stage not in manifest.stages]

    if passed("shuffle stage"):
        progress.begin("compare rows", None, "positions")
        yield "shuffled rows", partial(check_rows, store, limits)
    # The order of wrong rows says nothing. If the buckets were removed, the shards are compared with it.
    if passed("shuffled rows") and not manifest.removed_buckets:
        yield "shuffled order", partial(check_order, store)

        def quality() -> str:
            result.quality = measure_quality(store.path, **limits)
            return check_quality(result.quality)

        progress.begin("measure", None, "positions")
        yield "shuffle quality", partial(with_unknown, quality)
    if passed("shuffled rows", "export stage"):
        yield "shards", partial(check_shards, store, options, progress)


def _require_no_writer(store: Store) -> None:
    """Check that no stage is writing, or has written since the manifest was read.

    Files that a running stage replaces must not be reported as damage.

    Raises:
        StoreLockedError: A stage is writing, or has written.
    """
    writer = find_lock_holder(store.path)
    if writer is None and Manifest.load(store.path) == store.manifest:
        return
    reason = f"the store is being written by {writer}" if writer else "the store was changed meanwhile"
    hint = "Wait until that stage has finished, and run verify again."
    raise StoreLockedError(reason, path=store.path, hint=hint)
