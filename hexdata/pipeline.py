"""Pipelines: several stages run in order from one TOML config, with one section per stage."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, get_args, get_type_hints

from hexdata.cards import CARDS
from hexdata.checks import check_location, unusable
from hexdata.config import check_arguments, in_section, read_toml
from hexdata.convert import ConvertOptions, convert_sources
from hexdata.demo import FOLDER, DemoOptions, make_legacy
from hexdata.engine import EngineOptions, open_engine
from hexdata.errors import ConfigError, HexdataError, VerifyError
from hexdata.export import ExportOptions, PicklesOptions, export_pickles, export_shards
from hexdata.loader.trial import LoadOptions, run_loader_trial
from hexdata.options import describe_options
from hexdata.progress import SILENT, Progress
from hexdata.quality import Quality, measure_quality
from hexdata.report import Verdict, require_libraries, write_report
from hexdata.shuffle import ShuffleOptions, ShuffleResult, shuffle_store
from hexdata.sql import SqlLimits
from hexdata.storage import as_path, local_path, storage_of, translate_errors
from hexdata.store import Store
from hexdata.store.commands import command_line
from hexdata.store.manifest import MANIFEST_NAME
from hexdata.text import shortened
from hexdata.units import parse_bytes
from hexdata.verify import VerifyOptions, check_round_trip, verify_store

__all__ = ["Config", "RunResult", "StageResult", "demo_config", "load_config", "run_config"]


@describe_options
@dataclass(frozen=True, kw_only=True)
class DemoSection(DemoOptions):
    """``[demo]``: generates legal games and writes them as legacy files.

    Attributes:
        folder: Local folder for the files.
    """

    folder: str

    def __post_init__(self) -> None:
        super().__post_init__()
        local_path(self.folder, FOLDER)


@describe_options
@dataclass(frozen=True, kw_only=True)
class ConvertSection(ConvertOptions):
    """``[convert]``: options of the stage and its inputs.

    Attributes:
        inputs: Files or folders to convert.
    """

    inputs: list[str]


@describe_options
@dataclass(frozen=True)
class VerifySection(VerifyOptions):
    """``[verify]``: options of the stage.

    Attributes:
        round_trip: Files or folders with which to compare each source. Default: none.
    """

    round_trip: list[str] = field(default_factory=list)


@describe_options
@dataclass(frozen=True)
class ReportSection(SqlLimits):
    """``[report]``: limits of its queries, and the page.

    Attributes:
        output: File of the page. Default None: in the store.
    """

    output: str | None = None


@dataclass(frozen=True, kw_only=True)
class Config:
    """A complete config. A stage whose section is absent is not run.

    Paths are relative to the current folder; addresses are allowed too.

    Attributes:
        store: Path or address of the store.
        engine: Where ``convert``, ``shuffle``, ``export``, ``pickles`` and ``verify`` run. Default None: on
            this machine.
        demo: Options of the generated games. Default None, as for all stages: not run.
        convert: Options and inputs of the conversion.
        shuffle: Options of the shuffle.
        export: Options of the export of shards.
        pickles: Options of the export of legacy pickles.
        verify: Options of the checks.
        load: Options of the trial run of the loader.
        report: Options of the report.

    Raises:
        ConfigError: An address is not valid, or a stage needs what another removes.
    """

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

    def __post_init__(self) -> None:
        check_location("store", self.store)
        locations = [self.store, *(self.convert.inputs if self.convert else [])]
        locations += self.verify.round_trip if self.verify else []
        locations += [self.report.output] if self.report and self.report.output else []
        for location in locations:  # before any stage runs
            as_path(location)
        if self.export and self.export.free_buckets and self.pickles and self.pickles.order == "shuffled":
            raise ConfigError(
                "export.free_buckets removes the buckets from which [pickles] makes shuffled pickles: "
                'set free_buckets = false, or order = "original" in [pickles]'
            )


_SECTIONS: Final[dict[str, type[Any]]] = {
    name: get_args(hint)[0] for name, hint in get_type_hints(Config).items() if name != "store"
}
"""The classes of the sections, by the key of the config: of the engine, and of the stages in their order."""


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
    try:
        check_arguments(Config, content)
        _refuse_commands(content)
        sections = {name: _parse(name, content[name]) for name in _SECTIONS if name in content}
        return Config(store=content["store"], **sections)
    except HexdataError as error:
        raise error.at(path) from None


def _parse(name: str, section: Any) -> Any:
    """Return the options of a section."""
    if not isinstance(section, dict):
        raise ConfigError(f"{name} must be a section [{name}]", found=repr(section))
    if name == "engine" and section.get("address") not in (None, "auto"):
        # Data received from a cluster can run code here, and a config may be written by a stranger.
        hint = "Set it in the environment: RAY_ADDRESS=HOST:PORT hexdata run CONFIG."
        fault = "engine.address: a config must not name a cluster, except auto"
        raise ConfigError(fault, found=shortened(repr(section["address"])), hint=hint)
    with in_section(name):
        check_arguments(_SECTIONS[name], section)
        for key in {"folder", "inputs", "round_trip", "output"} & section.keys():
            places = [section[key]] if key in ("folder", "output") else section[key]
            if not isinstance(places, list):
                raise unusable(key, repr(places), "a list of paths or addresses")
            for place in places:
                check_location(key, place)
        if isinstance(section.get("memory"), str):
            section = {**section, "memory": parse_bytes(section["memory"])}
        return _SECTIONS[name](**section)


def _refuse_commands(value: Any) -> None:
    """Refuse shell commands in the texts of a config, because it may be written by a stranger."""
    if isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            _refuse_commands(item)
    elif isinstance(value, str):
        # A location of shards with {name} is a shell command, unless it is a URL.
        template = "{name}" in value and not re.match("https?://", value, re.IGNORECASE)
        if template or value.strip().lower().startswith("pipe:"):
            hint = "Pass the command to `hexdata load`, or to Loader in your own program."
            raise ConfigError("a config must not contain commands", found=shortened(value), hint=hint)


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
        hint = f"Choose another folder. `{command_line('info', root)}` shows what is in this store."
        raise ConfigError("the folder of a demo cannot be a store", path=root, hint=hint)
    legacy = str(root / "legacy")
    return Config(
        store=str(root / "store"),
        demo=DemoSection(folder=legacy, games=options.games, seed=options.seed),
        convert=ConvertSection(inputs=[legacy]),
        # By default, so few positions would have one bucket, which shows nothing about mixing.
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
    # The report is the last stage, so a missing library is an error before the others run for hours.
    if config.report is not None:
        require_libraries()
    store, root, stages = config.store, as_path(config.store), []
    shuffled: ShuffleResult | None = None
    quality: Quality | None = None
    verdict: Verdict | None = None
    engine_options = config.engine or EngineOptions()
    with translate_errors(root), open_engine(engine_options.name, engine_options.address) as engine:
        # In the order of the stages, not of the file: each reads what those before it have written.
        for name in _SECTIONS:
            start = time.perf_counter()
            path: object = None
            made: Any
            match section := getattr(config, name):
                case None | EngineOptions():
                    continue
                case DemoSection():
                    made, path = make_legacy(section.folder, section, progress), section.folder
                case ConvertSection():
                    made = convert_sources(section.inputs, store, section, progress, engine=engine)
                    path = root / "positions"
                case ShuffleOptions():
                    # A repeated run does not need the buckets that an export has removed.
                    restore = not (config.export and config.export.free_buckets)
                    made = shuffled = shuffle_store(store, section, progress, engine=engine, restore=restore)
                    path = root / "shuffled"
                case ExportOptions():
                    made, path = export_shards(store, section, progress, engine=engine), root / "shards"
                case PicklesOptions():
                    made = export_pickles(store, section, progress, engine=engine)
                    path = root / "pickles" / section.order
                case VerifySection():
                    made = verify_store(store, section, progress)
                    # If it fails, the store is not compared with its sources, of which most would differ for
                    # the same reason.
                    made.require()
                    inputs = section.round_trip
                    sources = check_round_trip(store, inputs, progress) if inputs else []
                    # A source that is not among the inputs fails, too: the config claims to check all.
                    if failed := [f"{source.name}: {source.detail}" for source in sources if not source.ok]:
                        fault = f"{len(failed)} of {len(sources)} sources are not restored exactly"
                        raise VerifyError(fault, path=store, found="; ".join(failed))
                    quality = made.quality
                case LoadOptions():
                    made = run_loader_trial(store, section, progress)
                case ReportSection():
                    made = write_report(store, section.output, section, progress)
                    path, verdict, quality = made.path, made.verdict, made.facts.quality
            seconds = time.perf_counter() - start
            if name == "load":
                positions = sum(epoch.positions for epoch in made.epochs)
            elif name in ("verify", "report"):
                positions = Store.open(store).manifest.counts["positions"]
            else:
                positions = made.positions
            games = made.games if name in ("demo", "convert") else None
            size = None if path is None else _size_of(str(path))
            rate = positions / max(seconds, 1e-9)
            where = None if path is None else str(path)
            # A conversion is complete if it has found no new sources.
            kept = not made.sources if name == "convert" else getattr(made, "already_done", False)
            stages.append(StageResult(name, positions, games, size, seconds, rate, where, kept))
        manifest = Store.open(store).manifest
        # Neither [verify] nor [report] has measured it.
        if quality is None and "shuffle" in manifest.stages and not manifest.removed_buckets:
            quality = measure_quality(store)
    return RunResult(store, stages, shuffled, quality, verdict)


def _size_of(location: str) -> int:
    """Return the size in bytes of a file, or of all files of a stage below a folder."""
    sizes = storage_of(as_path(location)).files()
    # The README file of the shards is not in the manifest either.
    return sum(size for name, size in sizes.items() if f"shards/{name}" not in CARDS)
