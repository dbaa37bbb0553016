"""Options of a live pipeline: its stages by name and their arguments, from code or from a TOML file.

All options are checked before a thread starts.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import ConfigDict, Field, StrictStr, ValidationError, create_model

from hexdata.batch import BatchOptions
from hexdata.checks import as_tuple, check_choice, check_count, check_seed, check_shares
from hexdata.config import read_toml
from hexdata.errors import ConfigError, HexdataError
from hexdata.live.pipeline import Pipeline, check_stage_order
from hexdata.live.queue import OVERFLOWS, Overflow
from hexdata.live.stage import Stage
from hexdata.schema import SPLITS, is_target
from hexdata.storage import local_path
from hexdata.store.location import classify
from hexdata.strict_json import shortened
from hexdata.text import did_you_mean, shell_word

__all__ = [
    "STAGES",
    "LiveOptions",
    "StageOptions",
    "load_live_config",
    "make_pipeline",
    "parse_live_config",
    "watched_path",
]


@dataclass(frozen=True)
class _StageEntry:
    """Module of a stage, and the items it consumes and produces."""

    module: str
    consumes: str | None
    produces: str


STAGES: Final = {
    "FilePathProvider": _StageEntry("hexdata.live.files.provider", None, "files"),
    "ChunkSourceLoader": _StageEntry("hexdata.live.chunk_source_loader", "files", "sources"),
    "ShufflingChunkPool": _StageEntry("hexdata.live.shuffling_chunk_pool", "sources", "games"),
    "ChunkValidator": _StageEntry("hexdata.live.chunk_validator", "games", "games"),
    "ChunkRelabeller": _StageEntry("hexdata.live.chunk_relabeller", "games", "games"),
    "ChunkUnpacker": _StageEntry("hexdata.live.chunk_unpacker", "games", "blocks"),
    "ShufflingFrameSampler": _StageEntry("hexdata.live.shuffling_frame_sampler", "blocks", "blocks"),
    "TensorGenerator": _StageEntry("hexdata.live.tensor_generator", "blocks", "batches"),
}
"""The stages of hexdata, in the usual order.

The class of a custom stage may define ``consumes`` and ``produces`` with the item types of this table, which
are then checked."""

_DEFAULT_STAGES: Final = tuple(name for name in STAGES if name != "ChunkRelabeller")
_QUEUE_KEYS: Final = ("capacity", "overflow")
_SHARED_OPTIONS: Final = (
    *("seed", "split", "val", "test", "pool_size", "reuse", "reservoir", "batch_size", "watch"),
    *("rank", "world_size"),
)
"""Options of the whole pipeline. A stage receives those that its constructor has a parameter for."""
_SUPPLIED_ARGUMENTS: Final = (*_SHARED_OPTIONS, "batch", "directory", "final_positions")
"""Arguments that the pipeline supplies to its stages. The section of a stage cannot set them."""


@dataclass(frozen=True)
class StageOptions:
    """One stage of a pipeline, and the queue behind it.

    Raises:
        ConfigError: The stage does not exist or has no such argument; or the capacity or overflow is invalid.
    """

    kind: str
    """A name in ``STAGES``, or ``"package.module:Class"`` for a custom stage."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the constructor."""
    capacity: int = 4
    """Capacity of the queue behind the stage in items: files, game batches, blocks or batches."""
    overflow: Overflow = "block"
    """Action when that queue is full; see ``live.queue.Overflow``."""

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str):
            raise ConfigError("the name of a stage must be text", found=repr(self.kind), expected=_KINDS)
        section = f"[{self.name}]"
        try:
            _set_field(self, "capacity", check_count("capacity", self.capacity, 1))
            check_choice("overflow", self.overflow, OVERFLOWS)
        except HexdataError as error:
            raise error.at(section) from None
        _check_arguments(section, self.find(), self.arguments)

    @property
    def name(self) -> str:
        """Name of the class and of its section in a config."""
        return _class_name(self.kind)

    def find(self) -> type[Stage]:
        """Return the class of the stage.

        Raises:
            ConfigError: The class cannot be imported, or is not a stage.
        """
        if ":" not in self.kind and self.kind not in STAGES:
            raise ConfigError(
                f"unknown stage {self.kind!r}", expected=_KINDS, hint=did_you_mean(self.kind, list(STAGES))
            )
        entry = STAGES.get(self.kind)
        path = f"{entry.module}:{self.kind}" if entry else self.kind
        try:
            found = pkgutil.resolve_name(path)
        except (ImportError, AttributeError, ValueError) as error:
            if entry:  # a library of the extra is missing or faulty
                raise
            raise ConfigError("the stage cannot be imported", found=f"{self.kind!r}: {error}") from error
        if not (isinstance(found, type) and issubclass(found, Stage)):
            raise ConfigError(
                "not a stage of a pipeline",
                found=f"{self.kind!r}: {found!r}",
                expected="a class that inherits from hexdata.live.stage.Stage",
            )
        return found

    def item_types(self) -> tuple[str | None, str | None]:
        """Return the types of the items that the stage consumes and produces; None where undeclared."""
        if self.kind in STAGES:
            return STAGES[self.kind].consumes, STAGES[self.kind].produces
        found = self.find()
        return getattr(found, "consumes", None), getattr(found, "produces", None)


_KINDS: Final = f"one of {', '.join(STAGES)}, or package.module:Class"


@dataclass(frozen=True)
class LiveOptions:
    """Options of a whole pipeline: those that the stages share, and the stages.

    Raises:
        ConfigError: An option has an invalid value, or the order of the stages is invalid.
    """

    seed: int = 0
    """Seed of all random draws: games, positions, reservoir rows, symmetries and value weights."""
    split: str | None = "train"
    """Split whose games are used, as ``hexdata convert`` assigns it: "train", "val" or "test". None for all
    games."""
    val: float = 0.05
    """Share of games in the validation split."""
    test: float = 0.01
    """Share of games in the test split."""
    pool_size: int = 100_000
    """Number of games in the pool: the newest."""
    reuse: float | None = None
    """Maximum number of times that games are drawn, per game that has entered the pool; the loader then waits
    for new games. None for no maximum."""
    reservoir: int = 1_000_000
    """Number of positions in the reservoir. Each takes 75 bytes on a board of size 13, and 4 more per cell
    for a dense policy."""
    batch_size: int = 1024
    """Number of positions per batch."""
    watch: bool = True
    """False reads only the files that exist at the start."""
    rank: int = 0
    """Number of this process among those that share the games, from 0."""
    world_size: int = 1
    """Number of processes that share the games. Each game belongs to one of them."""
    batch: BatchOptions = field(default_factory=BatchOptions)
    """Fields and options of batches."""
    stages: tuple[StageOptions, ...] = field(
        default_factory=lambda: tuple(map(StageOptions, _DEFAULT_STAGES))
    )
    """Stages in order, from files to batches."""

    def __post_init__(self) -> None:
        _set_field(self, "seed", check_seed(self.seed))
        if self.split is not None:
            check_choice("split", self.split, SPLITS)
        check_shares(self.val, self.test)
        for name in ("pool_size", "reservoir", "batch_size"):
            _set_field(self, name, check_count(name, getattr(self, name), 1))
        _set_field(self, "world_size", check_count("world_size", self.world_size, 1))
        if check_count("rank", self.rank, 0) >= self.world_size:
            raise ConfigError(
                "rank must be below world_size", found=self.rank, expected=f"0 to {self.world_size - 1}"
            )
        if not isinstance(self.watch, bool):
            raise ConfigError("watch cannot be used", found=repr(self.watch), expected="True or False")
        targets = [name for name in self.batch.fields if is_target(name)]
        if targets:
            raise ConfigError(
                "batches of live games do not contain these fields",
                found=", ".join(targets),
                hint="Leave these fields out, or convert the games into a store.",
            )
        _set_field(self, "stages", tuple(self.stages))
        _check_flow(self.stages)

    def with_stage(self, name: str, **changes: Any) -> LiveOptions:
        """Return a copy with other arguments, ``capacity`` or ``overflow`` for the stage of that name.

        Raises:
            ConfigError: The pipeline has no such stage, or the stage has no such argument.
        """
        if name not in [stage.name for stage in self.stages]:
            known = ", ".join(stage.name for stage in self.stages)
            raise ConfigError(f"the pipeline has no stage {name!r}", expected=f"one of {known}")
        queue = {key: changes.pop(key) for key in _QUEUE_KEYS if key in changes}
        stages = [
            replace(stage, arguments={**stage.arguments, **changes}, **queue) if stage.name == name else stage
            for stage in self.stages
        ]
        return replace(self, stages=tuple(stages))


def load_live_config(path: str | Path, *, allow_code: bool = False) -> LiveOptions:
    """Read a config such as configs/live.toml.

    Args:
        path: Path of the file.
        allow_code: True to import names of the form ``"package.module:name"``, which runs their code. Default
            False, since a config may be from a stranger.

    Raises:
        ConfigError: The file is missing, unreadable or not TOML, or contains an unknown key or an invalid
            value; the message suggests the nearest known key. Or it names code and ``allow_code`` is False.
    """
    content = read_toml(local_path(path, "a config"))
    if "store" in content:
        raise ConfigError(
            "a config of hexdata run",
            path=path,
            expected="a config of hexdata live, without the key store",
            hint=f"Run `hexdata run {shell_word(str(path))}`.",
        )
    try:
        return parse_live_config(content, allow_code=allow_code)
    except ConfigError as error:
        if error.path is None:
            raise error.at(path) from None
        error.path, error.reason = str(path), f"{error.path} {error.reason}"
        raise error from None


def parse_live_config(content: Mapping[str, Any], *, allow_code: bool = False) -> LiveOptions:
    """Return the options in the content of a config file.

    ``stages`` lists the stages in order. The section with the name of a stage contains its arguments. The
    section of a hexdata stage that is not listed is checked but not used, so a stage can be removed by
    removing its name from the list.

    Args:
        content: Content of the file, as ``tomllib`` parses it.
        allow_code: True to import names of code in it. Default False.

    Raises:
        ConfigError: A key is unknown, a value is invalid, or it names code and ``allow_code`` is False.
    """
    kinds = content.get("stages", list(_DEFAULT_STAGES))
    listed = [kind for kind in kinds if isinstance(kind, str)] if isinstance(kinds, list) else []
    sections = {name: dict[str, Any] for kind in [*STAGES, *listed] if (name := _class_name(kind))}
    keys = (
        dict.fromkeys(_SHARED_OPTIONS, Any) | {"stages": list[StrictStr], "batch": dict[str, Any]} | sections
    )
    _validate(content, keys)
    if not allow_code:
        _refuse_code(content, listed)
    stages = tuple(_parse_stage(kind, content.get(_class_name(kind), {})) for kind in listed)
    for name in sorted(content.keys() & sections.keys() - {stage.name for stage in stages}):
        _parse_stage(name, content[name])
    return LiveOptions(
        **{key: content[key] for key in _SHARED_OPTIONS if key in content},
        batch=_parse_batch(content.get("batch", {})),
        stages=stages,
    )


def _class_name(kind: str) -> str:
    return kind.rpartition(":")[2]


def _validate(
    content: Mapping[str, Any],
    keys: Mapping[str, Any],
    section: str | None = None,
    *,
    required: Collection[str] = (),
    extra: Literal["allow", "forbid"] = "forbid",
) -> None:
    """Check the keys of a config or section, and the types of their values.

    Args:
        content: Content of the config or section.
        keys: Known keys, each with the type of its value.
        section: Name of the section for messages, such as "[batch]". None (default) for the whole config.
        required: Keys that must be present. Default none.
        extra: "allow" to accept any other key. Default "forbid".

    Raises:
        ConfigError: A key is unknown or missing, or a value has another type.
    """
    config = ConfigDict(extra=extra)
    # Keys are aliases, since a model reserves some attribute names, such as "copy".
    model: dict[str, Any] = {
        f"key_{number}": (keys[name], Field(... if name in required else None, alias=name))
        for number, name in enumerate(keys)
    }
    try:
        create_model("Config", __config__=config, **model).model_validate(content)
    except ValidationError as error:
        raise _explain(error, list(keys), section) from None


def _explain(error: ValidationError, known: list[str], section: str | None) -> ConfigError:
    """Return one error for pydantic's findings: the first unknown key, otherwise the first finding."""
    findings = error.errors(include_url=False)
    unknown = [finding for finding in findings if finding["type"] == "extra_forbidden"]
    finding = (unknown or findings)[0]
    key, value = str(finding["loc"][0]), finding["input"]
    if unknown:
        what = "section" if isinstance(value, dict) else "key"
        return ConfigError(
            f"unknown {what} {key!r}" + ("" if section else " at the top"),
            path=section,
            expected=f"one of {', '.join(known)}",
            hint=did_you_mean(key, known),
        )
    missing = [str(each["loc"][0]) for each in findings if each["type"] == "missing"]
    if missing:
        return ConfigError(f"the stage needs {', '.join(missing)}", path=section)
    if key == "stages":
        return ConfigError("stages cannot be used", found=repr(value), expected="a list of names")
    return ConfigError(f"{key} is a section", found=repr(value), expected=f"[{key}]")


def _refuse_code(content: Mapping[str, Any], kinds: list[str]) -> None:
    """Refuse names of code, because importing a module runs it.

    Raises:
        ConfigError: ``stages`` or ``relabel`` names code.
    """
    named = [("stages", kind) for kind in kinds if kind not in STAGES and ":" in kind]
    section = content.get("ChunkRelabeller")
    if isinstance(section, dict) and "relabel" in section:
        named.append(("ChunkRelabeller.relabel", section["relabel"]))
    if named:
        key, found = named[0]
        raise ConfigError(
            f"{key}: a config runs no code by default",
            found=shortened(repr(found)),
            hint="To allow it, use --allow-code, or load_live_config(path, allow_code=True) in Python.",
        )


def _parse_stage(kind: str, section: Mapping[str, Any]) -> StageOptions:
    queue = {key: section[key] for key in _QUEUE_KEYS if key in section}
    arguments = {key: value for key, value in section.items() if key not in _QUEUE_KEYS}
    return StageOptions(kind, arguments, **queue)


def _parse_batch(section: Mapping[str, Any]) -> BatchOptions:
    _validate(section, {option.name: Any for option in fields(BatchOptions)}, "[batch]")
    try:
        return BatchOptions(**{key: as_tuple(value) for key, value in section.items()})
    except ConfigError as error:
        raise error.at("[batch]") from None


def watched_path(directory: str | Path) -> Path:
    """Return the path of a directory to watch.

    Raises:
        ConfigError: It is the address of a bucket or server, or a store.
    """
    hint = "Convert the games of the bucket into a store, or write them to a local directory."
    path = local_path(directory, "a watched directory", hint)
    found = classify(path)
    if found.kind in ("store", "shards"):
        raise ConfigError(
            "a watched directory cannot be a store",
            path=path,
            found=found.text,
            expected="the directory to which self-play writes its games",
        )
    return path


def make_pipeline(options: LiveOptions, directory: str | Path) -> Pipeline:
    """Create the stages of a pipeline and connect them, without starting them.

    Args:
        options: Options of the pipeline.
        directory: Directory with the games.

    Raises:
        ConfigError: An argument of a stage is invalid, or the directory is an address.
    """
    supplied = {name: getattr(options, name) for name in _SHARED_OPTIONS}
    supplied |= {
        "batch": options.batch,
        "directory": watched_path(directory),
        "final_positions": options.batch.final_policy != "skip",
    }
    stages = []
    for stage in options.stages:
        kind = stage.find()
        shared = {name: supplied[name] for name in inspect.signature(kind).parameters if name in supplied}
        try:
            stages.append(kind(**shared, **stage.arguments))
        except HexdataError as error:
            raise error.at(f"[{stage.name}]") from None
    return Pipeline(stages, [(stage.capacity, stage.overflow) for stage in options.stages])


def _set_field(options: object, name: str, value: object) -> None:
    """Set a field of frozen options during their creation."""
    object.__setattr__(options, name, value)


def _check_arguments(section: str, kind: type[Stage], arguments: Mapping[str, Any]) -> None:
    """Check that the constructor of a stage accepts these arguments together with the shared ones."""
    supplied = [name for name in arguments if name in _SUPPLIED_ARGUMENTS]
    if supplied:
        hint = "Set it in [batch]." if "batch" in supplied else "Set it at the top, for all stages."
        raise ConfigError(
            "a shared option cannot be set for one stage", path=section, found=supplied, hint=hint
        )
    parameters = inspect.signature(kind).parameters.values()
    has_keywords = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
    own = [each for each in parameters if each.name not in _SUPPLIED_ARGUMENTS and each.kind in _NAMED]
    _validate(
        arguments,
        dict.fromkeys([*_QUEUE_KEYS, *(each.name for each in own)], Any),
        section,
        required=[each.name for each in own if each.default is each.empty],
        extra="allow" if has_keywords else "forbid",
    )


_NAMED: Final = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _check_flow(stages: tuple[StageOptions, ...]) -> None:
    """Check the order of the stages, and that each consumes what the one before it produces."""
    check_stage_order([(stage.name, stage.find().first) for stage in stages])
    for previous, stage in pairwise(stages):
        found, expected = previous.item_types()[1], stage.item_types()[0]
        if None not in (found, expected) and found != expected:
            raise ConfigError(
                f"{stage.name} cannot follow {previous.name}",
                found=f"{found}, which {previous.name} produces",
                expected=f"{expected}, which {stage.name} consumes",
            )
    last = stages[-1].item_types()[1]
    if last not in (None, "batches"):
        found = f"{last}, which {stages[-1].name} produces"
        raise ConfigError("a pipeline must end with batches", found=found, expected="TensorGenerator")
