"""Stages in a row, from a TOML config or from the demo: one section a stage, run left to right."""

from __future__ import annotations

import difflib
import time
import tomllib
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from hexdata.convert import ConvertOptions, convert_sources
from hexdata.demo import DemoOptions, make_legacy
from hexdata.errors import ConfigError, HexdataError
from hexdata.export import ExportOptions, export_shards
from hexdata.loader.drive import LoadOptions, drive_loader
from hexdata.progress import SILENT, Progress
from hexdata.quality import Dispersion, dispersion
from hexdata.shuffle import ShuffleOptions, shuffle_store
from hexdata.store import Store
from hexdata.units import parse_bytes
from hexdata.verify import verify_store

__all__ = ["Config", "RunResult", "StageFacts", "demo_config", "load_config", "run_config"]


@dataclass(frozen=True, kw_only=True)
class DemoSection(DemoOptions):
    """``[demo]``: legal games, written as legacy files into ``folder``."""

    folder: str


@dataclass(frozen=True, kw_only=True)
class ConvertSection(ConvertOptions):
    """``[convert]``: the options of the stage, and the files or folders to convert."""

    inputs: list[str]


@dataclass(frozen=True)
class VerifySection:
    """``[verify]``: it has no key."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - read by pydantic, not a field


class Config(BaseModel):
    """A whole config. A section that is absent is a stage that is not run; paths are as the shell's."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    store: str
    demo: DemoSection | None = None
    convert: ConvertSection | None = None
    shuffle: ShuffleOptions | None = None
    export: ExportOptions | None = None
    verify: VerifySection | None = None
    load: LoadOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _parse_sizes(cls, content: dict[str, Any]) -> dict[str, Any]:
        """Read ``memory = "1GB"`` in any section."""
        return {
            name: {**section, "memory": parse_bytes(section["memory"])}
            if isinstance(section, dict) and isinstance(section.get("memory"), str)
            else section
            for name, section in content.items()
        }


def load_config(path: str | Path) -> Config:
    """Read a config.

    Raises:
        ConfigError: the file is missing, is no TOML, or holds an unknown key or a wrong value; the
            message names the nearest known key.
    """
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
    except FileNotFoundError as error:
        raise ConfigError("no such config", path=path) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError("not TOML", path=path, found=str(error)) from error
    try:
        return Config.model_validate(content)
    except ValidationError as error:
        raise _explain(error, path) from error
    except HexdataError as error:
        raise error.at(path) from None


_UNKNOWN: Final = ("extra_forbidden", "unexpected_keyword_argument")
"""What pydantic calls an unknown key, in a model and in a dataclass."""


def _explain(error: ValidationError, path: str | Path) -> ConfigError:
    """Turn pydantic's findings into one message: on an unknown key if there is one, or else the first."""
    findings = error.errors()
    first = next((finding for finding in findings if finding["type"] in _UNKNOWN), findings[0])
    names = [str(part) for part in first["loc"]]
    if first["type"] not in _UNKNOWN:
        found = None if first["type"] == "missing" else repr(first["input"])
        return ConfigError(f"{'.'.join(names)}: {first['msg']}", path=path, found=found)
    known = _known_keys(names[:-1])
    near = difflib.get_close_matches(names[-1], known, n=1, cutoff=0.5)
    return ConfigError(
        f"unknown key {names[-1]!r} {f'in [{names[0]}]' if len(names) > 1 else 'at the top'}",
        path=path,
        expected=f"one of {', '.join(known)}" if known else "no key",
        cure=f"Did you mean {near[0]!r}?" if near else None,
    )


def _known_keys(section: list[str]) -> list[str]:
    if not section:
        return list(Config.model_fields)
    kind = typing.get_args(Config.model_fields[section[0]].annotation)[0]
    return [f.name for f in fields(kind)]


@dataclass(frozen=True)
class StageFacts:
    """What one stage of a run did. ``bytes`` is what it left on disk; None where it writes nothing."""

    stage: str
    positions: int
    games: int | None
    bytes: int | None
    seconds: float
    positions_per_second: float
    """The stage's rate, start-up included."""
    path: str | None


@dataclass(frozen=True)
class RunResult:
    """What a run did, stage by stage; ``dispersion`` if the store is shuffled."""

    store: str
    stages: list[StageFacts]
    dispersion: Dispersion | None


def demo_config(folder: str | Path, options: DemoOptions, *, seed: int = 7) -> Config:
    """Return the config of ``hexdata demo``: every stage, with buckets and shards small enough to see."""
    legacy = str(Path(folder) / "legacy")
    return Config(
        store=str(Path(folder) / "store"),
        demo=DemoSection(folder=legacy, games=options.games, seed=options.seed),
        convert=ConvertSection(inputs=[legacy]),
        shuffle=ShuffleOptions(seed=seed, buckets=8),
        export=ExportOptions(shard_size=16_384, block_size=1_024),
        verify=VerifySection(),
        load=LoadOptions(),
    )


def run_config(config: Config, progress: Progress = SILENT) -> RunResult:
    """Run the stages of a config, in order.

    A stage that is done already is skipped by the stage itself, so the same config run again goes on
    where it was.

    Raises:
        HexdataError: a stage failed; those before it are complete.
    """
    stages = list(_stages(config, progress))
    shuffled = "shuffle" in Store.open(config.store).manifest.stages
    return RunResult(config.store, stages, dispersion(config.store) if shuffled else None)


def _stages(config: Config, progress: Progress) -> Iterator[StageFacts]:
    for name, runner in _RUNNERS.items():
        if getattr(config, name) is None:
            continue
        start = time.perf_counter()
        positions, games, folder = runner(config, progress)
        seconds = time.perf_counter() - start
        size = None if folder is None else _bytes_below(Path(folder))
        yield StageFacts(name, positions, games, size, seconds, positions / max(seconds, 1e-9), folder)


_Ran = tuple[int, int | None, str | None]
"""Positions, games and the folder that a stage left, where it has such."""


def _demo(config: Config, progress: Progress) -> _Ran:
    assert config.demo is not None
    made = make_legacy(config.demo.folder, config.demo, progress)
    return made.positions, made.games, config.demo.folder


def _convert(config: Config, progress: Progress) -> _Ran:
    assert config.convert is not None
    result = convert_sources(config.convert.inputs, config.store, config.convert, progress)
    return result.positions, result.games, f"{config.store}/positions"


def _shuffle(config: Config, progress: Progress) -> _Ran:
    return shuffle_store(config.store, config.shuffle, progress).positions, None, f"{config.store}/shuffled"


def _export(config: Config, progress: Progress) -> _Ran:
    return export_shards(config.store, config.export, progress).positions, None, f"{config.store}/shards"


def _verify(config: Config, progress: Progress) -> _Ran:
    verify_store(config.store, progress).require()
    return Store.open(config.store).manifest.counts["positions"], None, None


def _load(config: Config, progress: Progress) -> _Ran:
    result = drive_loader(config.store, config.load, progress)
    return sum(epoch.positions for epoch in result.epochs), None, None


_RUNNERS: Final[dict[str, Callable[[Config, Progress], _Ran]]] = {
    "demo": _demo,
    "convert": _convert,
    "shuffle": _shuffle,
    "export": _export,
    "verify": _verify,
    "load": _load,
}


def _bytes_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
