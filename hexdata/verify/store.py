"""Verification of a store against its manifests, as a sequence of checks. Read-only.

Each check reads the store itself and does not rely on the result of another check.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pyarrow as pa

from hexdata.checks import check_options
from hexdata.engine import LOCAL, Engine
from hexdata.engine.protocol import DIGEST_MEMORY
from hexdata.errors import BudgetError, EngineError, HexdataError, StoreLockedError, VerifyError
from hexdata.progress import SILENT, Progress
from hexdata.quality import Quality, measure_quality
from hexdata.retry import on_disk
from hexdata.storage import AnyPath, client_memory, is_fault, storage_of
from hexdata.store import Store
from hexdata.store.disk_space import translate_disk_full, translate_temporary_disk_full
from hexdata.store.integrity import BUCKETS_REMOVED, find_damage, rebuild_commands
from hexdata.store.manifest import Manifest
from hexdata.text import without_game
from hexdata.verify.games import check_games
from hexdata.verify.options import VerifyOptions
from hexdata.verify.shards import check_shards
from hexdata.verify.shuffled import check_order, check_quality, check_rows
from hexdata.verify.stages import check_stage_facts
from hexdata.verify.tables import (
    check_counts,
    check_dense_ids,
    check_files,
    check_stage,
    check_tables,
)
from hexdata.verify.values import check_game_values, check_position_values

__all__ = ["Check", "VerifyResult", "verify_store"]


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Attributes:
        name: Name of the check, such as "position ids".
        ok: The check passed.
        detail: The figures found, or the message of the error.
    """

    name: str
    ok: bool
    detail: str


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


def verify_store(
    store: str | AnyPath,
    options: VerifyOptions | None = None,
    progress: Progress = SILENT,
    *,
    engine: Engine = LOCAL,
) -> VerifyResult:
    """Check all stages of a store. Failed checks raise no error; see :attr:`VerifyResult.ok`.

    If a file is damaged or a table has other columns or rows than stated, the remaining checks do not run.

    Args:
        store: Folder of the store, or its address in an object store.
        options: Limits of memory and threads. Default None: ``VerifyOptions()``.
        progress: Receives progress reports. Default: ignores them.
        engine: Hashes the files. All other checks run in this process. Default: this machine.

    Returns:
        The result of each check.

    Raises:
        ConfigError: An argument has the wrong type.
        StoreError: There is no store, its manifest cannot be read, or an object store fails.
        StoreLockedError: A stage is writing to the store, or has written to it during the checks.
        BudgetError: The memory is too small, or the disk of the temporary folder is full.
        EngineError: A machine of ``engine`` differs from this one or cannot access the store.
    """
    limits = check_options(options, VerifyOptions)
    target = Store.open(store)
    _require_no_writer(target)
    limits.session(target.path)  # raises a BudgetError before all files are hashed
    engine.require([target.path / name for name in sorted(target.manifest.files)[:1]])
    return _Verification(target, limits, progress, engine).run()


def _require_no_writer(store: Store) -> None:
    """Check that no stage is writing, or has written since the manifest was read.

    Files that a running stage replaces must not be reported as damage.

    Raises:
        StoreLockedError: A stage is writing, or has written.
    """
    writer = storage_of(store.path).find_writer()
    if writer is None and Manifest.load(store.path) == store.manifest:
        return
    raise StoreLockedError(
        f"the store is being written by {writer}" if writer else "the store was changed during the checks",
        path=store.path,
        hint="Wait until that stage has finished, and run verify again.",
    )


class _Verification:
    """The checks of one store, and their results so far."""

    def __init__(self, store: Store, options: VerifyOptions, progress: Progress, engine: Engine) -> None:
        self.store = store
        self.options = options
        self.progress = progress
        self.engine = engine
        self.result = VerifyResult()

    def run(self) -> VerifyResult:
        store = self.store
        most = self.options.memory // (DIGEST_MEMORY + client_memory(store.path))
        workers = max(1, min(self.options.threads or self.engine.machines.cores, most))
        files = self._check("files", partial(self._files, workers))
        if not (files and self._check("tables", partial(check_tables, store))):
            return self.result  # the other checks would fail because of the same files
        self._check("in = out + rejected", partial(check_counts, store))
        self._check("stages", partial(check_stage_facts, store))
        self._check("position ids", partial(check_dense_ids, store, "positions", "position_id"))
        self._check("game ids", partial(check_dense_ids, store, "games", "game_id"))
        self._check("games", lambda: check_games(store, self.options) + self._without_game())
        self._check("position values", partial(check_position_values, store))
        self._check("game values", partial(check_game_values, store, self.options))
        shuffled = self._stage("shuffle")
        if shuffled:
            self.progress.begin("compare rows", None, "positions")
            self._check("shuffled rows", partial(check_rows, store, self.options))
            if not store.manifest.removed_buckets:  # otherwise the shards are compared with the order
                self._check("shuffled order", partial(check_order, store))
            self.progress.begin("measure", None, "positions")
            self._check("shuffle quality", self._quality)
        if self._stage("export") and shuffled:  # shards are compared with the shuffled positions
            self._check("shards", partial(check_shards, store, self.options, self.progress))
        for stage in ("pickles-original", "pickles-shuffled"):
            if stage in store.manifest.stages:  # not listed as skipped, because these stages are optional
                self._stage(stage)
        return self.result

    def _files(self, workers: int) -> str:
        store, files = self.store, self.store.manifest.files
        self.progress.begin("rehash", sum(facts.bytes for facts in files.values()), "bytes")
        damage = find_damage(store, files, engine=self.engine, workers=workers, progress=self.progress)
        self.result.commands = rebuild_commands(store, damage)
        return check_files(store, damage)

    def _stage(self, stage: str) -> bool:
        """Check that a stage was run on the current content of the store; return whether it was."""
        if stage not in self.store.manifest.stages:
            self.result.skipped.append(stage)
            return False
        return self._check(f"{stage} stage", partial(check_stage, self.store, stage))

    def _quality(self) -> str:
        path = self.store.path
        if self.store.manifest.removed_buckets:
            return f"not measured: {BUCKETS_REMOVED}"
        self.result.quality = measure_quality(path, **self.options.session(path)._asdict())
        return check_quality(self.result.quality) + self._without_game()

    def _without_game(self) -> str:
        """Return what the checks of games do not cover, as the end of their details."""
        unknown = self.store.count_without_game()
        return f"; {without_game(unknown, self.store.manifest.counts['positions'])}" if unknown else ""

    def _check(self, name: str, check: Callable[[], str]) -> bool:
        try:
            with translate_disk_full(self.store.path), translate_temporary_disk_full():
                result = Check(name, True, on_disk(check))
        except (BudgetError, EngineError):
            raise  # these errors do not concern the store
        except (HexdataError, OSError, pa.ArrowException) as error:
            if is_fault(error):
                raise
            _require_no_writer(self.store)
            result = Check(name, False, str(error))
        self.result.checks.append(result)
        return result.ok
