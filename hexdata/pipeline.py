"""Pipelines: several stages run in order from one TOML config, with one section per stage."""

from __future__ import annotations

import re
import time
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from hexdata.cards import CARDS
from hexdata.config import read_toml
from hexdata.convert import ConvertOptions, convert_sources
from hexdata.demo import FOLDER, LEDGER_NAME, DemoOptions, make_legacy
from hexdata.engine import Engine, EngineOptions, open_engine
from hexdata.errors import ConfigError, HexdataError, VerifyError
from hexdata.export import ExportOptions, PicklesOptions, export_pickles, export_shards
from hexdata.live.options import STAGES, LiveOptions
from hexdata.loader.trial import LoadOptions, run_loader_trial
from hexdata.progress import SILENT, Progress
from hexdata.quality import Quality, measure_quality
from hexdata.report import Verdict, require_libraries, write_report
from hexdata.shuffle import ShuffleOptions, ShuffleResult, shuffle_store
from hexdata.sql import SqlLimits
from hexdata.storage import as_path, local_path, storage_of, translate_errors
from hexdata.store import Store
from hexdata.store.commands import command_line
from hexdata.store.disk_space import translate_disk_full
from hexdata.store.manifest import MANIFEST_NAME
from hexdata.strict_json import shortened
from hexdata.text import did_you_mean, shell_word
from hexdata.units import parse_bytes
from hexdata.verify import VerifyOptions, check_round_trip, verify_store

__all__ = ["Config", "RunResult", "StageResult", "demo_config", "load_config", "run_config"]


@dataclass(frozen=True, kw_only=True)
class DemoSection(DemoOptions):
    """``[demo]``: generates legal games and writes them as legacy files into the local folder ``folder``."""

    folder: str

    def __post_init__(self) -> None:
        super().__post_init__()
        local_path(self.folder, FOLDER)


@dataclass(frozen=True, kw_only=True)
class ConvertSection(ConvertOptions):
    """``[convert]``: options of the stage, and the files or folders to convert."""

    inputs: list[str]


@dataclass(frozen=True)
class VerifySection(VerifyOptions):
    """``[verify]``: options of the stage, and the files or folders with which to compare each source."""

    round_trip: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ReportSection(SqlLimits):
    """``[report]``: limits of its queries, and the file of the page (default: in the store)."""

    output: str | None = None


class Config(BaseModel):
    """A complete config. A stage whose section is absent is not run.

    Paths are relative to the current folder; addresses are allowed too. ``engine`` is not a stage: it selects
    where ``convert``, ``shuffle``, ``export``, ``pickles`` and ``verify`` run.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    store: str
    engine: EngineOptions | None = None
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
        """Convert sizes such as ``memory = "1GB"`` in any section."""
        return {
            name: {**section, "memory": parse_bytes(section["memory"])}
            if isinstance(section, dict) and isinstance(section.get("memory"), str)
            else section
            for name, section in content.items()
        }

    @model_validator(mode="before")
    @classmethod
    def _refuse_commands(cls, content: dict[str, Any]) -> dict[str, Any]:
        """Refuse shell commands and cluster addresses, because a config may be written by a stranger."""
        for key, text in _texts(content):
            template = "{name}" in text and not re.match("https?://", text, re.IGNORECASE)
            if template or text.strip().lower().startswith("pipe:"):
                raise ConfigError(
                    f"{key}: a config must not contain commands",
                    found=shortened(text),
                    expected="a path or an address",
                    hint="Pass the command to `hexdata load`, or to Loader in your own program.",
                )
        engine = content.get("engine")
        address = engine.get("address") if isinstance(engine, dict) else None
        if address not in (None, "auto"):  # data received from a cluster can run code here
            raise ConfigError(
                "engine.address: a config must not name a cluster",
                found=shortened(repr(address)),
                expected="auto, the cluster of this machine",
                hint="Set it in the environment: RAY_ADDRESS=HOST:PORT hexdata run CONFIG.",
            )
        return content

    @model_validator(mode="after")
    def _check_addresses(self) -> Self:
        """Check that every address is valid before any stage runs."""
        for location in self.locations:
            as_path(location)
        return self

    @model_validator(mode="after")
    def _check_free_buckets(self) -> Self:
        """Check that no later stage needs the buckets that the export removes."""
        if self.export and self.export.free_buckets and self.pickles and self.pickles.order == "shuffled":
            raise ConfigError(
                "export.free_buckets removes the buckets from which [pickles] makes shuffled pickles",
                expected='free_buckets = false, or order = "original" in [pickles]',
            )
        return self

    @property
    def locations(self) -> list[str]:
        """All paths and addresses, starting with the store's."""
        locations = [self.store, *(self.convert.inputs if self.convert else [])]
        locations += self.verify.round_trip if self.verify else []
        return locations + ([self.report.output] if self.report and self.report.output else [])


def _texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield every text value of a config with its key."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _texts(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item, key)


def load_config(path: str | Path) -> Config:
    """Read and check a config.

    Args:
        path: Path of the TOML file on this machine.

    Raises:
        ConfigError: The file is missing, unreadable or not valid TOML, or contains an unknown key or an
            invalid value. For an unknown key, the message suggests the closest known one. Also raised for an
            address.
    """
    content = read_toml(local_path(path, "a config"))
    live_keys = {option.name for option in fields(LiveOptions)} | STAGES.keys()
    if "store" not in content and live_keys & content.keys():
        raise ConfigError(
            "a config of hexdata live",
            path=path,
            expected="a config of hexdata run, with the key store",
            hint=f"Run `hexdata live DIRECTORY --config {shell_word(str(path))}`.",
        )
    try:
        return Config.model_validate(content)
    except ValidationError as error:
        raise _explain(error, path) from error
    except HexdataError as error:
        raise error.at(path) from None


_UNKNOWN: Final = ("extra_forbidden", "unexpected_keyword_argument")
"""Error types of pydantic for an unknown key, in a model and in a dataclass."""
_EXPECTED: Final = {
    "bool": "true or false",
    "dataclass": "a section",
    "float": "a number",
    "int": "a whole number",
    "list": "a list",
    "string": "text",
    "tuple": "a list",
}
"""Expected value by the first word of an error type of pydantic."""


def _explain(error: ValidationError, path: str | Path) -> ConfigError:
    """Return one error for pydantic's findings: the first unknown key, otherwise the first finding."""
    findings = error.errors()
    first = next((finding for finding in findings if finding["type"] in _UNKNOWN), findings[0])
    names = [str(part) for part in first["loc"]]
    key = ".".join(names)
    if first["type"] == "missing":
        return ConfigError(f"{key} is missing", path=path)
    if first["type"] not in _UNKNOWN:
        choices = first.get("ctx", {}).get("expected")
        expected = choices or _EXPECTED.get(first["type"].partition("_")[0], first["msg"])
        return ConfigError(f"{key} cannot be used", path=path, found=repr(first["input"]), expected=expected)
    known = _known_keys(names[:-1])
    return ConfigError(
        f"unknown key {names[-1]!r} {f'in [{names[0]}]' if len(names) > 1 else 'at the top level'}",
        path=path,
        expected=f"one of {', '.join(known)}" if known else "no keys",
        hint=did_you_mean(names[-1], known),
    )


def _known_keys(section: list[str]) -> list[str]:
    if not section:
        return list(Config.model_fields)
    kind = typing.get_args(Config.model_fields[section[0]].annotation)[0]
    return [f.name for f in fields(kind)]


@dataclass(frozen=True)
class StageResult:
    """Result of one stage of a run.

    Attributes:
        stage: Name of the stage.
        positions: Number of positions processed.
        games: Number of games; None if the stage does not count them.
        bytes: Size of the stage's files; None if it writes none.
        seconds: Duration of the stage.
        positions_per_second: Throughput, including start-up.
        path: Path of the stage's files; None if it writes none.
        kept: Whether the files of the stage were complete before and nothing was written.
    """

    stage: str
    positions: int
    games: int | None
    bytes: int | None
    seconds: float
    positions_per_second: float
    path: str | None
    kept: bool = False


@dataclass(frozen=True)
class RunResult:
    """Result of a run.

    Attributes:
        store: Path or address of the store.
        stages: Results of the stages, in the order in which they ran.
        shuffle: Result of the shuffle, including its options; None if it was not run.
        quality: Quality of the shuffle; None if the store has no shuffled training split, or if its buckets
            were removed before they were measured.
        verdict: Verdict of the report; None if it was not written.
    """

    store: str
    stages: list[StageResult]
    shuffle: ShuffleResult | None
    quality: Quality | None
    verdict: Verdict | None


def demo_config(
    folder: str | Path, options: DemoOptions, *, seed: int = 7, with_report: bool = True
) -> Config:
    """Return the config of ``hexdata demo``: all stages, with buckets and shards small enough to look at.

    Args:
        folder: Local folder for the legacy files and the store.
        options: Number of games and seed of the generated games.
        seed: Seed of the shuffle (default: 7).
        with_report: Whether to write a report (default: True).

    Raises:
        ConfigError: The folder is a store, or an address.
    """
    root = local_path(folder, FOLDER)
    if storage_of(root / MANIFEST_NAME).exists():
        raise ConfigError(
            "the folder of a demo cannot be a store",
            path=root,
            expected="a new folder; the demo puts its store into the subfolder store",
            hint=f"Choose another folder. `{command_line('info', root)}` shows what is in this store.",
        )
    legacy = str(root / "legacy")
    return Config(
        store=str(root / "store"),
        demo=DemoSection(folder=legacy, games=options.games, seed=options.seed),
        convert=ConvertSection(inputs=[legacy]),
        shuffle=ShuffleOptions(seed=seed, buckets=8),
        export=ExportOptions(shard_size=16_384, block_size=1_024),
        verify=VerifySection(),
        load=LoadOptions(),
        report=ReportSection() if with_report else None,
    )


def run_config(config: Config, progress: Progress = SILENT) -> RunResult:
    """Run the stages of a config in order.

    Stages that are already done are skipped, so running the same config again resumes an interrupted run.

    Args:
        config: Config to run.
        progress: Receives the steps of each stage (default: none).

    Raises:
        ConfigError: A library that a stage needs is not installed.
        EngineError: The cluster of Ray does not respond or its machines cannot do the work.
        HexdataError: A stage has failed; the stages before it are complete.
    """
    if config.report is not None:
        require_libraries()
    stages, shuffled, quality, verdict = [], None, None, None
    engine_options = config.engine or EngineOptions()
    with (
        translate_errors(*config.locations),
        translate_disk_full(as_path(config.store)),
        open_engine(engine_options.name, engine_options.address, progress.note) as engine,
    ):
        context = _StageContext(config, progress, engine)
        for name, runner in _RUNNERS.items():
            if getattr(config, name) is None:
                continue
            before, start = _record_of(config, name), time.perf_counter()
            outcome = runner(context)
            seconds = time.perf_counter() - start
            size = None if outcome.path is None else _size_of(outcome.path)
            rate = outcome.positions / max(seconds, 1e-9)
            kept = before is not None and before == _record_of(config, name)
            stages.append(
                StageResult(name, outcome.positions, outcome.games, size, seconds, rate, outcome.path, kept)
            )
            shuffled = outcome.shuffle or shuffled
            quality = outcome.quality or quality
            verdict = outcome.verdict or verdict
        manifest = Store.open(config.store).manifest
        if quality is None and "shuffle" in manifest.stages and not manifest.removed_buckets:
            quality = measure_quality(config.store)
    return RunResult(config.store, stages, shuffled, quality, verdict)


def _record_of(config: Config, stage: str) -> bytes | None:
    """Return the file in which a stage records its results; None for stages that keep none, or before it."""
    path = as_path(config.store) / MANIFEST_NAME
    if stage == "demo" and config.demo is not None:
        path = as_path(config.demo.folder) / LEDGER_NAME
    elif stage not in ("convert", "shuffle", "export", "pickles"):
        return None
    try:
        with storage_of(path).open() as file:
            return file.read()
    except FileNotFoundError:
        return None


@dataclass(frozen=True)
class _StageContext:
    """Arguments of a stage's runner."""

    config: Config
    progress: Progress
    engine: Engine


@dataclass(frozen=True)
class _StageOutcome:
    """Result of a stage's runner. Fields that do not apply to the stage are None."""

    positions: int
    games: int | None = None
    path: str | None = None
    shuffle: ShuffleResult | None = None
    quality: Quality | None = None
    verdict: Verdict | None = None


def _demo(context: _StageContext) -> _StageOutcome:
    section = context.config.demo
    assert section is not None
    result = make_legacy(section.folder, section, context.progress)
    return _StageOutcome(result.positions, result.games, section.folder)


def _convert(context: _StageContext) -> _StageOutcome:
    store, section = context.config.store, context.config.convert
    assert section is not None
    result = convert_sources(section.inputs, store, section, context.progress, engine=context.engine)
    return _StageOutcome(result.positions, result.games, _location_in(store, "positions"))


def _shuffle(context: _StageContext) -> _StageOutcome:
    store, export = context.config.store, context.config.export
    restore = not (export and export.free_buckets)  # a repeated run does not need them
    result = shuffle_store(
        store, context.config.shuffle, context.progress, engine=context.engine, restore=restore
    )
    return _StageOutcome(result.positions, path=_location_in(store, "shuffled"), shuffle=result)


def _export(context: _StageContext) -> _StageOutcome:
    store = context.config.store
    result = export_shards(store, context.config.export, context.progress, engine=context.engine)
    return _StageOutcome(result.positions, path=_location_in(store, "shards"))


def _pickles(context: _StageContext) -> _StageOutcome:
    store, section = context.config.store, context.config.pickles
    assert section is not None
    result = export_pickles(store, section, context.progress, engine=context.engine)
    return _StageOutcome(result.positions, path=_location_in(store, f"pickles/{result.order}"))


def _verify(context: _StageContext) -> _StageOutcome:
    store, section = context.config.store, context.config.verify
    assert section is not None
    result = verify_store(store, section, context.progress, engine=context.engine)
    result.require()
    if section.round_trip:
        sources = check_round_trip(store, section.round_trip, context.progress)
        failed = [f"{source.name}: {source.detail}" for source in sources if not source.ok]
        if failed:
            raise VerifyError(
                f"{len(failed)} of {len(sources)} sources are not restored exactly",
                path=store,
                found="; ".join(failed),
            )
    return _StageOutcome(Store.open(store).manifest.counts["positions"], quality=result.quality)


def _load(context: _StageContext) -> _StageOutcome:
    result = run_loader_trial(context.config.store, context.config.load, context.progress)
    return _StageOutcome(sum(epoch.positions for epoch in result.epochs))


def _report(context: _StageContext) -> _StageOutcome:
    section = context.config.report
    assert section is not None
    result = write_report(context.config.store, section.output, section, context.progress)
    facts = result.facts
    return _StageOutcome(
        facts.counts["positions"], path=result.path, quality=facts.quality, verdict=result.verdict
    )


_RUNNERS: Final[dict[str, Callable[[_StageContext], _StageOutcome]]] = {
    "demo": _demo,
    "convert": _convert,
    "shuffle": _shuffle,
    "export": _export,
    "pickles": _pickles,
    "verify": _verify,
    "load": _load,
    "report": _report,
}


def _location_in(store: str, name: str) -> str:
    return str(as_path(store) / name)


def _size_of(location: str) -> int:
    """Return the size in bytes of a file, or of all files of a stage below a folder."""
    sizes = storage_of(as_path(location)).files()
    return sum(size for name, size in sizes.items() if f"shards/{name}" not in CARDS)
