"""Options of a live pipeline: its stages by name and their arguments, from code or from a TOML file.

All options are checked before a thread starts.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final

from hexdata.batch import BatchOptions
from hexdata.checks import check_choice, check_fields, check_location, check_shares
from hexdata.config import check_arguments, check_keys, in_section, read_toml
from hexdata.errors import ConfigError, HexdataError
from hexdata.live.chunk_relabeller import ChunkRelabeller
from hexdata.live.chunk_source_loader import ChunkSourceLoader
from hexdata.live.chunk_unpacker import ChunkUnpacker
from hexdata.live.chunk_validator import ChunkValidator
from hexdata.live.file_path_provider import FilePathProvider
from hexdata.live.pipeline import Pipeline
from hexdata.live.shuffling_chunk_pool import ShufflingChunkPool
from hexdata.live.shuffling_frame_sampler import ShufflingFrameSampler
from hexdata.live.stage import Stage, find_object
from hexdata.live.tensor_generator import TensorGenerator
from hexdata.options import RankedOptions, describe_options
from hexdata.schema import SPLITS, is_target
from hexdata.storage import local_path
from hexdata.store.commands import describe, manifest_kind
from hexdata.text import shortened

STAGES: Final[dict[str, type[Stage]]] = {
    stage.__name__: stage
    for stage in (
        FilePathProvider,
        ChunkSourceLoader,
        ShufflingChunkPool,
        ChunkValidator,
        ChunkRelabeller,
        ChunkUnpacker,
        ShufflingFrameSampler,
        TensorGenerator,
    )
}
"""The stages of hexdata, in the usual order."""

# The relabeller needs a function of the user.
_DEFAULT_STAGES: Final = tuple(name for name in STAGES if name != "ChunkRelabeller")


@dataclass(frozen=True)
class StageOptions:
    """One stage of a pipeline, and the queue behind it.

    Attributes:
        kind: A name in ``STAGES``, or ``"package.module:Class"`` for a custom stage.
        arguments: Keyword arguments of the constructor.
        capacity: Capacity of the queue behind the stage in items: files, game batches, blocks or batches.

    Raises:
        ConfigError: The stage does not exist or has no such argument; or the capacity is invalid.
    """

    kind: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    capacity: int = 4

    def __post_init__(self) -> None:
        stage = self.find()
        with in_section(self.name):
            check_fields(self, {"capacity": 1})
            check_arguments(stage, self.arguments, _SUPPLIED_ARGUMENTS)

    @property
    def name(self) -> str:
        """Name of the class and of its section in a config."""
        return self.kind.rpartition(":")[2]

    def find(self) -> type[Stage]:
        """Return the class of the stage.

        Raises:
            ConfigError: The class cannot be imported, or is not a stage.
        """
        if ":" not in str(self.kind):
            check_choice("stage", self.kind, STAGES)
            return STAGES[self.kind]
        found = find_object(self.kind)
        if not (isinstance(found, type) and issubclass(found, Stage)):
            raise ConfigError(f"{self.kind!r} is not a stage: it does not inherit from hexdata.live.Stage")
        return found


@describe_options
@dataclass(frozen=True, kw_only=True)
class LiveOptions(RankedOptions):
    """Options of a whole pipeline: those that the stages share, and the stages.

    Attributes:
        seed: Seed of all random draws: games, positions, reservoir rows, symmetries and value weights.
        split: Split whose games are used, as ``hexdata convert`` assigns it: "train", "val" or "test". None
            for all games.
        val: Share of games in the validation split.
        test: Share of games in the test split.
        pool_size: Number of games in the pool: the newest.
        reuse: Maximum number of times that games are drawn, per game that has entered the pool; the loader
            then waits for new games. None for no maximum.
        reservoir: Number of positions in the reservoir. Each takes 71 bytes on a board of size 13, and 4 more
            per cell if any position has a dense policy.
        watch: False reads only the files that exist at the start.
        world_size: Number of processes that share the games. Each game belongs to one of them.
        batch: Fields and options of batches.
        stages: Stages in order, from files to batches.

    Raises:
        ConfigError: An option has an invalid value, or the order of the stages is invalid.
    """

    split: str | None = "train"
    val: float = 0.05
    test: float = 0.01
    pool_size: int = 100_000
    reuse: float | None = None
    reservoir: int = 1_000_000
    watch: bool = True
    batch: BatchOptions = field(default_factory=BatchOptions)
    stages: tuple[StageOptions, ...] = field(
        default_factory=lambda: tuple(map(StageOptions, _DEFAULT_STAGES))
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.split is not None:
            check_choice("split", self.split, SPLITS)
        check_shares(self.val, self.test)
        check_fields(self, {"pool_size": 1, "reservoir": 1})
        targets = [name for name in self.batch.fields if is_target(name) and name != "policy_weight"]
        if targets:
            raise ConfigError(f"batches of live games do not contain {', '.join(targets)}")
        object.__setattr__(self, "stages", tuple(self.stages))
        _check_flow(self.stages)

    def with_stage(self, name: str, **changes: Any) -> LiveOptions:
        """Return a copy with other arguments or ``capacity`` for the stage of that name.

        Raises:
            ConfigError: The pipeline has no such stage, or the stage has no such argument.
        """
        check_choice("stage", name, [stage.name for stage in self.stages])
        stages = {stage.name: stage for stage in self.stages}
        stage = stages[name]
        capacity = changes.pop("capacity", stage.capacity)
        stages[name] = replace(stage, arguments={**stage.arguments, **changes}, capacity=capacity)
        return replace(self, stages=tuple(stages.values()))


BATCH_OPTIONS: Final = tuple(option.name for option in fields(BatchOptions))
SHARED_OPTIONS: Final = tuple(
    option.name for option in fields(LiveOptions) if option.name not in ("batch", "stages")
)
"""Options of the whole pipeline. A stage receives those that its constructor has a parameter for."""
_SUPPLIED_ARGUMENTS: Final = (*SHARED_OPTIONS, "batch", "directory", "final_positions")
"""Arguments that the pipeline supplies to its stages. The section of a stage cannot set them."""


def load_live_config(path: str | Path, *, allow_code: bool = False) -> LiveOptions:
    """Read a config such as configs/live.toml.

    ``stages`` lists the stages in order. The section with the name of a stage contains its arguments. The
    section of a hexdata stage that is not listed is checked but not used, so a stage can be removed by
    removing its name from the list.

    Args:
        path: Path of the file.
        allow_code: True to import names of the form ``"package.module:name"``, which runs their code. Default
            False, since a config may be from a stranger.

    Raises:
        ConfigError: The file is missing, unreadable or not TOML, or contains an unknown key or an invalid
            value; the message suggests the nearest known key. Or it names code and ``allow_code`` is False.
    """
    content = read_toml(local_path(path, "a config"))
    try:
        return _parse(content, allow_code)
    except HexdataError as error:
        raise error.at(path) from None


def _parse(content: dict[str, Any], allow_code: bool) -> LiveOptions:
    kinds = content.get("stages", list(_DEFAULT_STAGES))
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise ConfigError(f"stages must be a list of names, not {kinds!r}")
    # A listed class of the user may have the name of a stage of hexdata, and takes its section.
    kind_of = {kind.rpartition(":")[2]: kind for kind in (*STAGES, *kinds)}
    check_keys(content, [*SHARED_OPTIONS, "stages", "batch", *kind_of])
    sections = {name: content.get(name, {}) for name in ("batch", *kind_of)}
    for name, section in sections.items():
        if not isinstance(section, dict):
            raise ConfigError(f"{name} must be a section [{name}], not {section!r}")
    # Before any stage is created, which imports the code that it names.
    code = [kind for kind in kinds if kind not in STAGES and ":" in kind]
    code += [section["relabel"] for section in sections.values() if "relabel" in section]
    if code and not allow_code:
        hint = "To allow it, use --allow-code, or load_live_config(path, allow_code=True) in Python."
        raise ConfigError("a config runs no code by default", found=shortened(repr(code[0])), hint=hint)
    made: dict[str, StageOptions] = {}
    for name, kind in kind_of.items():
        # Sections of stages that are not listed are checked, too, so that typing errors are found at once.
        if kind in kinds or name in content:
            capacity = sections[name].pop("capacity", StageOptions.capacity)
            made[name] = StageOptions(kind, sections[name], capacity)
    with in_section("batch"):
        check_arguments(BatchOptions, sections["batch"])
        batch = BatchOptions(**sections["batch"])
    shared = {key: content[key] for key in SHARED_OPTIONS if key in content}
    stages = tuple(made[kind.rpartition(":")[2]] for kind in kinds)
    return LiveOptions(**shared, batch=batch, stages=stages)


def make_pipeline(options: LiveOptions, directory: str | Path) -> Pipeline:
    """Create the stages of a pipeline and connect them, without starting them.

    Args:
        options: Options of the pipeline.
        directory: Directory with the games.

    Raises:
        ConfigError: An argument of a stage is invalid, or the directory is an address or a store.
    """
    check_location("directory", directory)
    hint = "Convert the games of the bucket into a store, or write them to a local directory."
    # The process may change its current folder while it trains.
    path = local_path(directory, "a watched directory", hint).absolute()
    if manifest_kind(path) in ("store", "shards"):
        raise ConfigError("a watched directory cannot be a store", path=path, found=describe(path)[0])
    supplied = {name: getattr(options, name) for name in (*SHARED_OPTIONS, "batch")} | {"directory": path}
    # Left out before the reservoir, where they would take rows that no batch uses.
    supplied["final_positions"] = options.batch.final_policy != "skip"
    stages = []
    for stage in options.stages:
        kind = stage.find()
        # By the names of parameters, so that a stage of the user can receive shared options as well.
        shared = {name: supplied[name] for name in inspect.signature(kind).parameters if name in supplied}
        with in_section(stage.name):
            stages.append(kind(**shared, **stage.arguments))
    return Pipeline(stages, [stage.capacity for stage in options.stages])


def _check_flow(stages: tuple[StageOptions, ...]) -> None:
    """Check the order of the stages, and that each consumes what the one before it produces."""
    names = [stage.name for stage in stages]
    if len(set(names)) < len(names):
        raise ConfigError(f"two stages have the same name: {', '.join(names)}")
    previous: type[Stage] | None = None
    for kind in (stage.find() for stage in stages):
        produced = previous and previous.produces
        if kind.first != (previous is None) or (produced and kind.consumes not in (None, produced)):
            where = f"follow {previous.__name__}" if previous else "be the first stage"
            raise ConfigError(f"{kind.__name__} cannot {where}", found=produced, expected=kind.consumes)
        previous = kind
    if previous is None or previous.produces not in (None, "batches"):
        raise ConfigError(f"a pipeline must end with batches, not with {', '.join(names[-1:]) or 'nothing'}")
