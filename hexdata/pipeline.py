"""Stages in a row, from a TOML config or from the demo: one section a stage, run left to right."""

from __future__ import annotations

import time
import typing
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from hexdata.config import did_you_mean, read_toml
from hexdata.convert import ConvertOptions, convert_sources
from hexdata.demo import DemoOptions, make_legacy
from hexdata.errors import ConfigError, HexdataError, VerifyError
from hexdata.export import ExportOptions, PicklesOptions, export_pickles, export_shards
from hexdata.loader.drive import LoadOptions, drive_loader
from hexdata.progress import SILENT, Progress
from hexdata.quality import Quality, measure_quality
from hexdata.report import Verdict, write_report
from hexdata.shuffle import ShuffleOptions, ShuffleResult, shuffle_store
from hexdata.sql import Limits
from hexdata.store import Store
from hexdata.units import parse_bytes
from hexdata.verify import VerifyOptions, check_round_trip, verify_store

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
class VerifySection(VerifyOptions):
    """``[verify]``: the options of the stage, and the files or folders to compare each source with."""

    round_trip: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ReportSection(Limits):
    """``[report]``: what its queries may use, and the page's file, by default in the store."""

    output: str | None = None


class Config(BaseModel):
    """A whole config. A section that is absent is a stage that is not run; paths are as the shell's."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    store: str
    demo: DemoSection | None = None
    convert: ConvertSection | None = None
    shuffle: ShuffleOptions | None = None
    export: ExportOptions | None = None
    pickles: PicklesOptions | None = None
    verify: VerifySection | None = None
    load: LoadOptions | None = None
    report: ReportSection | None = None

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
        ConfigError: the file is missing, unreadable or no TOML, or holds an unknown key or a wrong value; the
            message names the nearest known key.
    """
    content = read_toml(path)
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
    return ConfigError(
        f"unknown key {names[-1]!r} {f'in [{names[0]}]' if len(names) > 1 else 'at the top'}",
        path=path,
        expected=f"one of {', '.join(known)}" if known else "no key",
        cure=did_you_mean(names[-1], known),
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
    """What a run did, stage by stage.

    Attributes:
        store: its path.
        stages: in the order in which they ran.
        shuffle: what the stage of that name did, its choices among it; None if it was not asked for.
        quality: of the shuffle, if the store has a shuffled training split.
        verdict: of the report; None if it was not asked for.
    """

    store: str
    stages: list[StageFacts]
    shuffle: ShuffleResult | None
    quality: Quality | None
    verdict: Verdict | None


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
        report=ReportSection(),
    )


def run_config(config: Config, progress: Progress = SILENT) -> RunResult:
    """Run the stages of a config, in order.

    A stage that is done already is skipped by the stage itself, so the same config run again goes on
    where it was.

    Raises:
        HexdataError: a stage failed; those before it are complete.
    """
    stages, shuffled, quality, verdict = [], None, None, None
    for name, runner in _RUNNERS.items():
        if getattr(config, name) is None:
            continue
        start = time.perf_counter()
        ran = runner(config, progress)
        seconds = time.perf_counter() - start
        size = None if ran.path is None else _bytes_at(Path(ran.path))
        rate = ran.positions / max(seconds, 1e-9)
        stages.append(StageFacts(name, ran.positions, ran.games, size, seconds, rate, ran.path))
        shuffled = ran.shuffle or shuffled
        quality = ran.quality or quality
        verdict = ran.verdict or verdict
    if quality is None and "shuffle" in Store.open(config.store).manifest.stages:
        quality = measure_quality(config.store)
    return RunResult(config.store, stages, shuffled, quality, verdict)


@dataclass(frozen=True)
class _Ran:
    """What a stage says of itself, where it has such: games, what it left on disk, and what it found."""

    positions: int
    games: int | None = None
    path: str | None = None
    shuffle: ShuffleResult | None = None
    quality: Quality | None = None
    verdict: Verdict | None = None


def _demo(config: Config, progress: Progress) -> _Ran:
    assert config.demo is not None
    made = make_legacy(config.demo.folder, config.demo, progress)
    return _Ran(made.positions, made.games, config.demo.folder)


def _convert(config: Config, progress: Progress) -> _Ran:
    assert config.convert is not None
    result = convert_sources(config.convert.inputs, config.store, config.convert, progress)
    return _Ran(result.positions, result.games, f"{config.store}/positions")


def _shuffle(config: Config, progress: Progress) -> _Ran:
    result = shuffle_store(config.store, config.shuffle, progress)
    return _Ran(result.positions, path=f"{config.store}/shuffled", shuffle=result)


def _export(config: Config, progress: Progress) -> _Ran:
    result = export_shards(config.store, config.export, progress)
    return _Ran(result.positions, path=f"{config.store}/shards")


def _pickles(config: Config, progress: Progress) -> _Ran:
    assert config.pickles is not None
    result = export_pickles(config.store, config.pickles, progress)
    return _Ran(result.positions, path=f"{config.store}/pickles/{result.order}")


def _verify(config: Config, progress: Progress) -> _Ran:
    assert config.verify is not None
    result = verify_store(config.store, config.verify, progress)
    result.require()
    if config.verify.round_trip:
        sources = check_round_trip(config.store, config.verify.round_trip, progress)
        failed = [f"{source.name}: {source.detail}" for source in sources if not source.ok]
        if failed:
            raise VerifyError(
                f"{len(failed)} of {len(sources)} sources do not come back",
                path=config.store,
                found="; ".join(failed),
            )
    return _Ran(Store.open(config.store).manifest.counts["positions"], quality=result.quality)


def _load(config: Config, progress: Progress) -> _Ran:
    result = drive_loader(config.store, config.load, progress)
    return _Ran(sum(epoch.positions for epoch in result.epochs))


def _report(config: Config, progress: Progress) -> _Ran:
    assert config.report is not None
    made = write_report(config.store, config.report.output, config.report, progress)
    facts = made.facts
    return _Ran(facts.counts["positions"], path=made.path, quality=facts.quality, verdict=made.verdict)


_RUNNERS: Final[dict[str, Callable[[Config, Progress], _Ran]]] = {
    "demo": _demo,
    "convert": _convert,
    "shuffle": _shuffle,
    "export": _export,
    "pickles": _pickles,
    "verify": _verify,
    "load": _load,
    "report": _report,
}


def _bytes_at(path: Path) -> int:
    """Return the size of a file, or of all files below a folder."""
    return sum(file.stat().st_size for file in (path, *path.rglob("*")) if file.is_file())
