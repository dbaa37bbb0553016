"""Options of a live pipeline: its stages by name and their arguments, from code or from a TOML file.

Everything is checked before a thread starts. The module reads only the config file.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final

from hexdata.batch import BatchOptions
from hexdata.checks import as_tuple, check_choice, check_count, check_seed, check_shares
from hexdata.config import did_you_mean, read_toml, with_current_names
from hexdata.errors import ConfigError, HexdataError
from hexdata.live.pipeline import Pipeline
from hexdata.live.queue import OVERFLOWS, Overflow
from hexdata.live.stage import Stage
from hexdata.schema import SPLITS
from hexdata.storage import local_path
from hexdata.strict_json import shortened

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
class _Known:
    """A stage of this package: its module, and the items it takes and gives."""

    place: str
    takes: str | None
    gives: str


STAGES: Final = {
    "FilePathProvider": _Known("hexdata.live.files.provider", None, "files"),
    "ChunkSourceLoader": _Known("hexdata.live.chunk_source_loader", "files", "sources"),
    "ShufflingChunkPool": _Known("hexdata.live.shuffling_chunk_pool", "sources", "hands"),
    "ChunkValidator": _Known("hexdata.live.chunk_validator", "hands", "hands"),
    "ChunkRelabeller": _Known("hexdata.live.chunk_relabeller", "hands", "hands"),
    "ChunkUnpacker": _Known("hexdata.live.chunk_unpacker", "hands", "blocks"),
    "ShufflingFrameSampler": _Known("hexdata.live.shuffling_frame_sampler", "blocks", "blocks"),
    "TensorGenerator": _Known("hexdata.live.tensor_generator", "blocks", "batches"),
}
"""The stages of hexdata, in the usual order.

The class of a custom stage may define ``takes`` and ``gives`` with the words of this table. They are checked
then."""

_USUAL: Final = tuple(name for name in STAGES if name != "ChunkRelabeller")
_QUEUE_KEYS: Final = ("capacity", "overflow")
_SHARED: Final = (
    "seed",
    "split",
    "val",
    "test",
    "pool_size",
    "reservoir",
    "batch_size",
    "watch",
)
"""Options of the whole pipeline. A stage receives those that its constructor has a parameter for."""
_GIVEN: Final = (*_SHARED, "batch", "directory", "final_positions")
"""Arguments that the pipeline gives to its stages. The section of a stage cannot set them."""


@dataclass(frozen=True)
class StageOptions:
    """One stage of a pipeline, and the queue behind it.

    Raises:
        ConfigError: The stage does not exist or has no such argument; or the capacity or overflow is invalid.
    """

    kind: str
    """A name in ``STAGES``, or ``"package.module:Class"`` for a custom stage."""
    knobs: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the constructor."""
    capacity: int = 4
    """Capacity of the queue behind the stage in items: files, hands of games, blocks or batches."""
    overflow: Overflow = "block"
    """Action when that queue is full; see ``live.queue.Overflow``."""

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str):
            raise ConfigError("a stage is named by text", found=repr(self.kind), expected=_KINDS)
        with_place = f"[{self.name}]"
        try:
            _keep(self, "capacity", check_count("capacity", self.capacity, 1))
            check_choice("overflow", self.overflow, OVERFLOWS)
        except HexdataError as error:
            raise error.at(with_place) from None
        _check_knobs(with_place, self.find(), self.knobs)

    @property
    def name(self) -> str:
        """Name of the class and of its section in a config."""
        return self.kind.rpartition(":")[2]

    def find(self) -> type[Stage]:
        """Return the class of the stage.

        Raises:
            ConfigError: The class cannot be imported, or is not a stage.
        """
        if ":" not in self.kind and self.kind not in STAGES:
            raise ConfigError(
                f"unknown stage {self.kind!r}", expected=_KINDS, hint=did_you_mean(self.kind, list(STAGES))
            )
        known = STAGES.get(self.kind)
        path = f"{known.place}:{self.kind}" if known else self.kind
        try:
            found = pkgutil.resolve_name(path)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError("a stage cannot be imported", found=f"{self.kind!r}: {error}") from error
        if not (isinstance(found, type) and issubclass(found, Stage)):
            raise ConfigError(
                "no stage of a pipeline",
                found=f"{self.kind!r}: {found!r}",
                expected="a class that inherits from hexdata.live.stage.Stage",
            )
        return found

    def flow(self) -> tuple[str | None, str | None]:
        """Return the items that the stage takes and gives, as words of ``STAGES``; None where it declares
        none.
        """
        if self.kind in STAGES:
            return STAGES[self.kind].takes, STAGES[self.kind].gives
        found = self.find()
        return getattr(found, "takes", None), getattr(found, "gives", None)


_KINDS: Final = f"one of {', '.join(STAGES)}, or package.module:Class"


@dataclass(frozen=True)
class LiveOptions:
    """Options of a whole pipeline: those that the stages share, and the stages.

    Raises:
        ConfigError: An option has an invalid value, or the order of the stages is invalid.
    """

    seed: int = 0
    """Seed of all draws: games, positions, reservoir rows, symmetries and value weights."""
    split: str | None = "train"
    """Split whose games are used, as ``hexdata convert`` assigns it: "train", "val" or "test". None for all
    games."""
    val: float = 0.05
    """Share of games in the validation split."""
    test: float = 0.01
    """Share of games in the test split."""
    pool_size: int = 100_000
    """Number of games in the pool: the newest."""
    reservoir: int = 1_000_000
    """Number of positions in the reservoir. Each takes 75 bytes on a board of size 13, and 4 more per cell
    for a dense policy."""
    batch_size: int = 1024
    watch: bool = True
    """False reads only the files that exist at the start."""
    batch: BatchOptions = field(default_factory=BatchOptions)
    """Fields and options of batches."""
    stages: tuple[StageOptions, ...] = field(default_factory=lambda: tuple(map(StageOptions, _USUAL)))
    """Stages in order, from files to batches."""

    def __post_init__(self) -> None:
        _keep(self, "seed", check_seed(self.seed))
        if self.split is not None:
            check_choice("split", self.split, SPLITS)
        check_shares(self.val, self.test)
        for name in ("pool_size", "reservoir", "batch_size"):
            _keep(self, name, check_count(name, getattr(self, name), 1))
        if not isinstance(self.watch, bool):
            raise ConfigError("watch cannot be used", found=repr(self.watch), expected="True or False")
        _keep(self, "stages", tuple(self.stages))
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
            replace(stage, knobs={**stage.knobs, **changes}, **queue) if stage.name == name else stage
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
    section of a hexdata stage that is not listed is checked but not used, so that removing a name from the
    list is enough to leave the stage out.

    Args:
        content: Content of the file, as ``tomllib`` parses it.
        allow_code: True to import names of code in it. Default False.

    Raises:
        ConfigError: A key is unknown, a value is invalid, or it names code and ``allow_code`` is False.
    """
    kinds = content.get("stages", list(_USUAL))
    if not (isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)):
        raise ConfigError("stages cannot be used", found=repr(kinds), expected="a list of names")
    if not allow_code:
        _refuse_code(content, kinds)
    by_name = {kind.rpartition(":")[2]: kind for kind in [*STAGES, *kinds]}
    known = [*_SHARED, "stages", "batch", *by_name]
    sections = {key: value for key, value in content.items() if key in by_name or key == "batch"}
    for key in content:
        if key not in known:
            what = "section" if isinstance(content[key], dict) else "key"
            raise ConfigError(
                f"unknown {what} {key!r} at the top",
                expected=f"one of {', '.join(known)}",
                hint=did_you_mean(key, known),
            )
    for key, value in sections.items():
        if not isinstance(value, dict):
            raise ConfigError(f"{key} is a section", found=repr(value), expected=f"[{key}]")
    listed = [_parse_stage(kind, sections.get(kind.rpartition(":")[2], {})) for kind in kinds]
    for name in sorted(sections.keys() - {"batch"} - {stage.name for stage in listed}):
        _parse_stage(name, sections[name])
    return LiveOptions(
        **{key: content[key] for key in _SHARED if key in content},
        batch=_parse_batch(sections.get("batch", {})),
        stages=tuple(listed),
    )


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
            f"{key}: a config runs no code of its own accord",
            found=shortened(repr(found)),
            hint="If you trust that code, give --allow-code, or "
            "load_live_config(path, allow_code=True) in Python.",
        )


def _parse_stage(kind: str, section: Mapping[str, Any]) -> StageOptions:
    queue = {key: section[key] for key in _QUEUE_KEYS if key in section}
    knobs = {key: value for key, value in section.items() if key not in _QUEUE_KEYS}
    if kind == "ChunkSourceLoader":
        knobs = with_current_names(knobs)
    return StageOptions(kind, knobs, **queue)


def _parse_batch(section: Mapping[str, Any]) -> BatchOptions:
    _check_keys("[batch]", section, [option.name for option in fields(BatchOptions)])
    try:
        return BatchOptions(**{key: as_tuple(value) for key, value in section.items()})
    except ConfigError as error:
        raise error.at("[batch]") from None


def watched_path(directory: str | Path) -> Path:
    """Return the path of a directory to watch.

    Raises:
        ConfigError: It is the address of a bucket or server.
    """
    hint = "A bucket cannot be watched: convert its games into a store, or let them be written here."
    return local_path(directory, "a directory that is watched", hint)


def make_pipeline(options: LiveOptions, directory: str | Path) -> Pipeline:
    """Create the stages of a pipeline and connect them, without starting them.

    Args:
        options: Options of the pipeline.
        directory: Directory with the games.

    Raises:
        ConfigError: An argument of a stage is invalid, or the directory is an address.
    """
    given = {name: getattr(options, name) for name in _SHARED}
    given |= {
        "batch": options.batch,
        "directory": watched_path(directory),
        "final_positions": options.batch.final_policy != "skip",
    }
    stages = []
    for stage in options.stages:
        kind = stage.find()
        shared = {name: given[name] for name in inspect.signature(kind).parameters if name in given}
        try:
            stages.append(kind(**shared, **stage.knobs))
        except HexdataError as error:
            raise error.at(f"[{stage.name}]") from None
    return Pipeline(stages, [(stage.capacity, stage.overflow) for stage in options.stages])


def _keep(options: object, name: str, value: object) -> None:
    """Set a field of frozen options during their creation."""
    object.__setattr__(options, name, value)


def _check_knobs(place: str, kind: type[Stage], knobs: Mapping[str, Any]) -> None:
    """Check that the constructor of a stage accepts these arguments together with the shared ones."""
    parameters = inspect.signature(kind).parameters.values()
    own = [each for each in parameters if each.name not in _GIVEN and each.kind in _NAMED]
    shared = [name for name in knobs if name in _GIVEN]
    if shared:
        where = "Set it in [batch]." if "batch" in shared else "Set it at the top, for all stages."
        raise ConfigError("a stage cannot set what all share", path=place, found=shared, hint=where)
    if all(each.kind is not inspect.Parameter.VAR_KEYWORD for each in parameters):
        _check_keys(place, knobs, [*_QUEUE_KEYS, *(each.name for each in own)])
    missing = [each.name for each in own if each.default is each.empty and each.name not in knobs]
    if missing:
        raise ConfigError(f"the stage needs {', '.join(missing)}", path=place)


_NAMED: Final = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _check_keys(place: str, section: Collection[str], known: list[str]) -> None:
    for key in section:
        if key not in known:
            raise ConfigError(
                f"unknown key {key!r}",
                path=place,
                expected=f"one of {', '.join(known)}",
                hint=did_you_mean(key, known),
            )


def _check_flow(stages: tuple[StageOptions, ...]) -> None:
    """Check that each stage takes what the stage before it gives, where both declare it."""
    if not stages:
        raise ConfigError("a pipeline needs stages", expected=_KINDS)
    before, given = None, None
    for stage in stages:
        takes, gives = stage.flow()
        first = stage.find().first
        if first != (before is None):
            expected = "at the beginning" if first else "after one that finds files or games"
            raise ConfigError(f"{stage.name} stands in the wrong place", expected=expected)
        if before is not None and takes is not None and given is not None and takes != given:
            raise ConfigError(
                f"{stage.name} cannot follow {before}",
                found=f"{given}, which {before} gives",
                expected=f"{takes}, which {stage.name} takes",
            )
        before, given = stage.name, gives
    if given not in (None, "batches"):
        raise ConfigError(
            "a pipeline ends with batches", found=f"{given}, which {before} gives", expected="TensorGenerator"
        )
    names = [stage.name for stage in stages]
    if len(set(names)) < len(names):
        raise ConfigError("two stages have one name", found=names)
