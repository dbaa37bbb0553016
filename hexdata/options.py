"""Options classes, and the options of ranks and of a shuffle, each declared once with its description.

From the fields of ``ShuffleOptions`` and its docstring follow the keys of a config, the options of ``hexdata
shuffle`` and their table in the documents. No slow library is imported here, so that ``--help`` is fast.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Final, Literal, TypeVar, cast, get_args, get_type_hints

from hexdata.checks import check_choice, check_count, check_fields, check_seed
from hexdata.errors import BudgetError, ConfigError
from hexdata.pool import LEADER_MEMORY, fitting

T = TypeVar("T")
_ATTRIBUTES: Final = re.compile(r"^Attributes:\n((?: {4}.*\n|\n(?= {4}))+)\n?", re.MULTILINE)
"""The section of a docstring that describes attributes."""
_ENTRY: Final = re.compile(r"^    (?P<name>\w+): .*\n(?: {8}.*\n|\n(?= {8}))*", re.MULTILINE)
"""The description of one attribute."""

Dedup = Literal["none", "exact", "symmetric"]
"""Which duplicate games are left out: none, those with equal moves, or those equal under a symmetry too."""

BASE_MEMORY: Final = 420_000_000
"""Measured bytes of a shuffle besides DuckDB's limit: interpreter, libraries, row groups read and written."""
MINIMUM_MEMORY: Final = BASE_MEMORY + 150_000_000
"""Bytes needed for DuckDB to sort with one thread."""
MAX_BUCKETS: Final = 100_000


def describe_options(cls: type[T]) -> type[T]:
    """Add the options that docstrings of base classes describe to that of a dataclass, for ``help``."""
    entries: dict[str, str] = {}
    docs = [inspect.cleandoc(each.__doc__ or "") + "\n" for each in reversed(cls.__mro__)]
    for section in filter(None, map(_ATTRIBUTES.search, docs)):
        # An option that a class describes again keeps that text.
        entries |= {match["name"]: match[0] for match in _ENTRY.finditer(section[0])}
    # In the order of the signature.
    described = "".join(entries[each.name] for each in fields(cast("Any", cls)) if each.name in entries)
    summary, _, rest = _ATTRIBUTES.sub("", docs[-1]).partition("\n\nRaises:")
    cls.__doc__ = f"{summary.rstrip()}\n\nAttributes:\n{described}" + (rest and f"\nRaises:{rest}")
    return cls


@dataclass(frozen=True, kw_only=True)
class RankedOptions:
    """Options of what shares batches between ranks, and a seed.

    Attributes:
        batch_size: Positions per batch of this rank.
        seed: Seed of all random draws: any integer.
        rank: Rank of this process.
        world_size: Number of ranks.

    Raises:
        ConfigError: An option has an invalid value.
    """

    batch_size: int = 1024
    seed: int = 0
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        check_fields(self, {"batch_size": 1, "world_size": 1, "rank": 0})
        if self.rank >= self.world_size:
            raise ConfigError(f"rank {self.rank} must be below world_size {self.world_size}")
        # Each may be in range while the product is not.
        check_count("batch_size * world_size", self.global_batch, 1)
        # The dataclass is frozen, but states and messages need the checked value as a Python int.
        object.__setattr__(self, "seed", check_seed(self.seed))

    @property
    def global_batch(self) -> int:
        """Number of positions per step, over all ranks."""
        return self.batch_size * self.world_size


@dataclass(frozen=True)
class WorkerOptions:
    """Options of a stage that runs in worker processes.

    Attributes:
        workers: Number of processes. Default None: 1 for little data, else one per core, as far as ``memory``
            allows.
        memory: Memory limit in bytes for all processes together. Default 1 GB.

    Raises:
        ConfigError: A value is out of range.
        BudgetError: The workers, or even one worker, do not fit into the memory.
    """

    WORKER_MEMORY: ClassVar[int]
    """Measured peak memory in bytes of a process of the stage: a worker, or the only process."""
    workers: int | None = None
    memory: int = 1_000_000_000

    def __post_init__(self) -> None:
        check_fields(self, {"workers": 1, "memory": 0})
        # With the options, not with the stage, so that a config fails before its first stage begins.
        self.processes(cores=1)

    def processes(self, cores: int, extra: int = 0) -> int:
        """Return the number of worker processes to run: the requested one, or as many as fit into the memory.

        Args:
            cores: Maximum number of processes if none was requested.
            extra: Bytes that each process needs in addition to ``WORKER_MEMORY``. Default 0.

        Raises:
            BudgetError: The requested workers, or even one worker, do not fit into the memory.
        """
        return fitting(self.memory, self.workers, cores, self.WORKER_MEMORY + extra, LEADER_MEMORY, "worker")


# --- the shuffle --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SelectionOptions:
    """Options that select positions for a shuffle and assign them to buckets.

    The filters are applied in this order: ``where``, ``dedup``, ``per_game``, ``balance_by``.
    ``stratify_by`` and ``assign`` then determine the bucket of each remaining position. Texts are SQL
    expressions over the columns of positions and games and over ``source``, the name of the source file. They
    are checked against the store when the shuffle starts.

    Attributes:
        where: Keep only positions for which this SQL condition is true, such as ``value_sample_tier <= 1``.
            Default None: all positions.
        dedup: Keep one game of each set of duplicates: ``"exact"`` with equal moves and first player,
            ``"symmetric"`` also those that are equal under a symmetry of the board, fragments included.
            Default ``"none"``.
        per_game: Maximum number of positions per game. Default None: no maximum.
        per_game_by: Choose the positions of ``per_game`` at random by a seeded key (``"key"``), or low value
            sample tiers first (``"tier"``). Default ``"key"``.
        balance_by: Within each split, reduce all groups of positions with equal values of this SQL
            expression, such as ``source`` or ``winner``, to the size of the smallest group by a seeded random
            choice. Default None: no groups.
        stratify_by: Give every bucket the same share of each value of this SQL expression, such as ``value``;
            ``length`` is ``total_positions``. Default None: no strata.
        assign: Assign single positions (``"position"``) or whole games (``"game"``) to buckets. Default
            ``"position"``.

    Raises:
        ConfigError: A value is out of range, or two options exclude each other.
    """

    where: str | None = None
    dedup: Dedup = "none"
    per_game: int | None = None
    per_game_by: Literal["key", "tier"] = "key"
    balance_by: str | None = None
    stratify_by: str | None = None
    assign: Literal["position", "game"] = "position"

    def __post_init__(self) -> None:
        hints = get_type_hints(SelectionOptions)
        for name, value in vars(self).items():
            if (hint := hints.get(name)) == str | None:
                is_text = isinstance(value, str) and value.strip() and "\0" not in value
                if value is not None and (not is_text or any("\ud800" <= each <= "\udfff" for each in value)):
                    raise ConfigError(f"{name} must be an SQL expression", found=ascii(value))
            elif hint == int | None:
                check_fields(self, {name: 1})
            elif hint is not None:
                check_choice(name, value, get_args(hint))
        if self.per_game is None and self.per_game_by != "key":
            raise ConfigError(f"per_game_by {self.per_game_by} needs per_game, a number of positions")
        if self.stratify_by is not None and self.assign == "game":
            raise ConfigError(
                "stratify_by cannot be combined with assign game: strata are divided by position"
            )

    def non_default(self) -> dict[str, Any]:
        """Return the options of this class that differ from their defaults, as JSON values by name."""
        defaults = {field.name: field.default for field in fields(SelectionOptions)}
        return {name: getattr(self, name) for name in defaults if getattr(self, name) != defaults[name]}


@describe_options
@dataclass(frozen=True)
class ShuffleOptions(SelectionOptions):
    """How to shuffle, and which positions.

    Attributes:
        seed: Seed that determines the order. The same seed gives the same order. Default None: the seed of
            the present shuffle of the store, or 0.
        buckets: Number of buckets (files) of the largest split, 1 to 100,000. Default None: one per 1,048,576
            positions.
        memory: Total memory in bytes. It does not affect the result. Default 1 GB.
        threads: Maximum number of threads, limited by the memory. It does not affect the result. Default
            None: one per core.
        replace: Remove another shuffle of the store, and the shards and pickles made from it, before this one
            is written: for disks that cannot hold both, and for object stores. Default False: another shuffle
            is replaced when this one is complete, and what was made from it stays.

    Raises:
        ConfigError: A value is out of range.
        BudgetError: The memory is too small for any shuffle.
    """

    seed: int | None = None
    buckets: int | None = None
    memory: int = 1_000_000_000
    threads: int | None = None
    replace: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seed is not None:
            object.__setattr__(self, "seed", check_seed(self.seed))
        check_fields(self, {"buckets": 1, "threads": 1, "memory": 0})
        if self.buckets is not None and self.buckets > MAX_BUCKETS:
            raise ConfigError(f"buckets must be between 1 and {MAX_BUCKETS:,}", found=self.buckets)
        if self.memory < MINIMUM_MEMORY:
            raise BudgetError.of_memory(
                "too little memory for a shuffle",
                found=self.memory,
                expected=MINIMUM_MEMORY,
                hint="Raise --memory.",
            )
