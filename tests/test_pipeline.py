"""Configs are checked before a stage runs, and a run executes the stages of its config in order."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from hexdata import pipeline
from hexdata.convert import ConvertOptions
from hexdata.demo import DemoOptions
from hexdata.engine import EngineOptions
from hexdata.errors import BudgetError, ConfigError, StoreError, VerifyError
from hexdata.export import ExportOptions
from hexdata.formats.trmph import write_trmph
from hexdata.loader.trial import LoadOptions
from hexdata.pipeline import Config, demo_config, load_config, run_config
from hexdata.progress import Silent
from hexdata.shuffle import ShuffleOptions
from tests.demo_games import demo_games

CONFIGS = Path(__file__).parents[1] / "configs"


@pytest.fixture
def config(tmp_path):
    """Return ``config(text)``, which writes a config and returns its path."""

    def write(text):
        path = tmp_path / "config.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


STORE = 'store = "store"\n'
pytestmark = pytest.mark.usefixtures("no_charts")
EVERY_STAGE = ["convert", "shuffle", "export", "verify", "load", "report"]


@pytest.mark.parametrize("name", ["demo.toml", "full.toml"])
def test_the_supplied_configs_are_valid(name):
    loaded = load_config(CONFIGS / name)
    assert [stage for stage in EVERY_STAGE if getattr(loaded, stage) is not None] == EVERY_STAGE


def test_a_config_holds_the_options_of_its_stages(config):
    loaded = load_config(
        config(
            STORE
            + """
            [demo]
            folder = "legacy"
            games = 3
            [convert]
            inputs = ["a", "b"]
            memory = "2GB"
            val = 0.1
            [shuffle]
            seed = 5
            buckets = 4
            [export]
            memory = "700 MiB"
            [verify]
            memory = "2GB"
            threads = 3
            round_trip = ["a"]
            [load]
            epochs = 2
            fields = ["board", "value"]
            [engine]
            name = "ray"
            address = "auto"
            [report]
            output = "page.html"
            memory = "2GB"
            """
        )
    )
    assert (loaded.demo.folder, loaded.demo.games) == ("legacy", 3)
    assert (loaded.convert.inputs, loaded.convert.val) == (["a", "b"], 0.1)
    assert loaded.convert.memory == 2_000_000_000
    assert loaded.shuffle == ShuffleOptions(seed=5, buckets=4)
    assert loaded.export == ExportOptions(memory=700 << 20)
    assert (loaded.verify.memory, loaded.verify.threads) == (2_000_000_000, 3)
    assert loaded.verify.round_trip == ["a"]
    assert loaded.load == LoadOptions(epochs=2, fields=("board", "value"))
    assert loaded.engine == EngineOptions("ray", "auto")
    assert loaded.report == pipeline.ReportSection(output="page.html", memory=2_000_000_000)


def test_missing_keys_have_the_defaults_of_the_command(config):
    loaded = load_config(config(STORE + '[convert]\ninputs = ["a"]\n[shuffle]\n[export]\n[load]\n'))
    assert (loaded.shuffle, loaded.export, loaded.load) == (ShuffleOptions(), ExportOptions(), LoadOptions())
    for field in fields(ConvertOptions):
        assert getattr(loaded.convert, field.name) == getattr(ConvertOptions(), field.name)
    assert (loaded.demo, loaded.verify) == (None, None)


WRONG = {
    "an unknown section": (
        STORE + "[shufle]\n",
        "unknown key 'shufle' at the top level",
        "Did you mean 'shuffle'?",
    ),
    "a misspelt store": ('stor = "a"\n', "unknown key 'stor' at the top level", "Did you mean 'store'?"),
    "an unknown key": (STORE + "[shuffle]\nsede = 1\n", "unknown key 'sede' in [shuffle]", "'seed'?"),
    "of inherited options": (
        STORE + '[convert]\ninputs = ["a"]\nworker = 1\n',
        "unknown key 'worker' in [convert]",
        "'workers'?",
    ),
    "a key of no stage": (
        STORE + "[verify]\nroundtrip = []\n",
        "unknown key 'roundtrip' in [verify]",
        "'round_trip'?",
    ),
    "a misspelt page": (
        STORE + '[report]\noutptu = "a"\n',
        "unknown key 'outptu' in [report]",
        "'output'?",
    ),
    "a misspelt engine": (
        STORE + '[engine]\nname = "rey"\n',
        "unknown engine; found rey; expected local or ray",
        "Did you mean 'ray'?",
    ),
    "an address of no engine": (
        STORE + '[engine]\naddress = "auto"\n',
        "the local engine accepts no address; found auto",
        "Add --engine ray.",
    ),
    "an unknown key of the engine": (
        STORE + "[engine]\nadress = 'a'\n",
        "'adress' in [engine]",
        "'address'?",
    ),
    "no store": ("[verify]\n", "store is missing", ""),
    "no inputs": (STORE + "[convert]\n", "convert.inputs is missing", ""),
    "a text for a number": (
        STORE + '[shuffle]\nseed = "x"\n',
        "shuffle.seed",
        "found 'x'; expected a whole number",
    ),
    "a text for a list": (
        STORE + '[convert]\ninputs = "a"\n',
        "convert.inputs",
        "found 'a'; expected a list",
    ),
    "a number for a section": (STORE + "shuffle = 3\n", "shuffle", "found 3; expected a section"),
    "a fraction for a number": (STORE + "[shuffle]\nseed = 1.5\n", "shuffle.seed", "expected a whole number"),
    "no choice": (STORE + "[load]\nmode = 'fast'\n", "load.mode", "expected 'games', 'exact' or 'stream'"),
    "a number for a text": ("store = 1\n", "store", "found 1; expected text"),
    "a size without a unit": (STORE + '[shuffle]\nmemory = "2"\n', "not a size; found '2'", "such as 1GB"),
    "a config of live": ("watch = false\n", "a config of hexdata live", "`hexdata live DIRECTORY --config "),
    "no size": (STORE + '[export]\nmemory = "1 giga"\n', "not a size; found '1 giga'", "such as 1GB"),
    "a list for a size": (STORE + "[export]\nmemory = [1]\n", "export.memory", "found [1]"),
    "out of range": (STORE + '[convert]\ninputs = ["a"]\nval = 2.0\n', "must leave games for train", "2.0"),
    "an unknown word": (STORE + '[export]\nlayout = "block"\n', "layout", "block"),
    "no TOML": ("store =\n", "not valid TOML", "line 1"),
    "deep brackets": ("a = " + "[" * 100_000, "not valid TOML", "brackets nested too deeply"),
    "many digits": (f"a = {'9' * 5_000}", "not valid TOML", "4300 digits"),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_invalid_config_is_an_error_with_key_and_value(case, config):
    text, *parts = WRONG[case]
    path = config(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert caught.value.path == str(path)
    assert all(part in str(caught.value) for part in parts), caught.value


def test_an_option_that_fails_in_a_stage_names_the_config(config):
    path = config(STORE + '[shuffle]\nmemory = "1kB"\n')
    with pytest.raises(BudgetError) as caught:
        load_config(path)
    assert caught.value.path == str(path)


def test_a_missing_or_unreadable_config_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="the config does not exist"):
        load_config(tmp_path / "missing.toml")
    with pytest.raises(ConfigError, match="the config cannot be read; found Is a directory"):
        load_config(tmp_path)
    (tmp_path / "binary.toml").write_bytes(b'store = "\xff"')
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_config(tmp_path / "binary.toml")


def test_line_ends_are_those_of_toml(tmp_path):
    path = tmp_path / "a.toml"
    path.write_bytes(b'\xef\xbb\xbfstore = "s"\r\n[shuffle]\r\nseed = 3\n')
    assert load_config(path).shuffle.seed == 3
    path.write_bytes(b'store = "s"\n[shuffle]\rseed = 3\n')
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_config(path)


# Running.


@pytest.fixture
def legacy(tmp_path):
    folder = tmp_path / "legacy"
    folder.mkdir()
    write_trmph(folder / "a.trmph", demo_games(40, seed=1, board_size=5), 5)
    return folder


def whole_config(store, legacy):
    return Config(
        store=str(store),
        convert=pipeline.ConvertSection(inputs=[str(legacy)], workers=1),
        shuffle=ShuffleOptions(seed=7, buckets=2, threads=1),
        export=ExportOptions(shard_size=256, block_size=64, workers=1),
        verify=pipeline.VerifySection(),
        load=LoadOptions(epochs=2, batch_size=64),
        report=pipeline.ReportSection(threads=1),
    )


def test_a_run_executes_all_stages_in_order(tmp_path, legacy):
    begun = []

    class Watcher(Silent):
        def begin(self, stage, total, unit):
            begun.append(stage)

    result = run_config(whole_config(tmp_path / "store", legacy), Watcher())
    assert [stage.stage for stage in result.stages] == EVERY_STAGE
    convert, shuffle, export, verify, load, report = result.stages
    assert convert.games == 40
    assert convert.positions == shuffle.positions == export.positions == verify.positions > 400
    assert load.positions > convert.positions  # two epochs of the training split
    assert {stage.bytes is None for stage in (verify, load)} == {True}
    for stage in (convert, shuffle, export):
        files = [path for path in Path(stage.path).rglob("*.*") if path.suffix != ".md"]
        assert stage.bytes == sum(path.stat().st_size for path in files) > 0
    page = Path(report.path)
    assert page == tmp_path / "store" / "report.html"
    assert report.bytes == page.stat().st_size > 10_000
    assert result.verdict.headline in page.read_text(encoding="utf-8")
    assert result.quality is not None
    assert begun


@pytest.mark.parametrize("load", ["[load]", '[load]\nmode = "games"\ncheck = "digests"'])
def test_a_run_can_load_the_games_of_a_converted_store(tmp_path, config, legacy, load):
    path = config(f'store = "{tmp_path / "s"}"\n[convert]\ninputs = ["{legacy}"]\nworkers = 1\n{load}\n')
    result = run_config(load_config(path))
    convert, loaded = result.stages
    assert (convert.stage, loaded.stage) == ("convert", "load")
    assert 0 < loaded.positions < convert.positions  # the training split
    assert (result.quality, result.verdict) == (None, None)


def test_a_run_fails_if_its_engine_is_not_available(tmp_path, config):
    """In a new process, because this one may be connected to a cluster. Nothing listens at the address."""
    pytest.importorskip("ray", reason="the extra ray is not installed")
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        path = config(f'store = "{tmp_path}"\n[engine]\nname = "ray"\n[verify]\n')
        command = [sys.executable, "-m", "hexdata", "run", str(path)]
        environment = {**os.environ, "RAY_ADDRESS": address}
        run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert run.returncode == 1
    assert "the Ray cluster does not answer" in run.stderr
    assert address in run.stderr.replace("\n", "")


def test_a_report_is_written_to_the_path_in_its_section(tmp_path, legacy, config):
    page = tmp_path / "page.html"
    text = f'store = "{tmp_path / "store"}"\n[convert]\ninputs = ["{legacy}"]\n'
    result = run_config(
        load_config(config(text + f'[report]\noutput = "{page}"\nmemory = "500 MB"\nthreads = 1\n'))
    )
    assert [stage.stage for stage in result.stages] == ["convert", "report"]
    assert result.stages[1].path == str(page)
    assert result.verdict.headline == "Converted and complete. Not shuffled yet."
    assert page.exists()
    assert not (tmp_path / "store" / "report.html").exists()


def test_a_second_run_has_nothing_to_do(tmp_path, legacy):
    config = whole_config(tmp_path / "store", legacy)
    run_config(config)
    page = tmp_path / "store" / "report.html"
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "store").rglob("*") if path.suffix}
    del files[page]  # the report is written again in each run
    assert len(files) > 8
    again = run_config(config)
    assert {path: path.stat().st_mtime_ns for path in files} == files
    assert [stage.stage for stage in again.stages] == EVERY_STAGE


def test_an_absent_section_is_a_stage_that_is_not_run(tmp_path, legacy):
    whole = whole_config(tmp_path / "store", legacy)
    result = run_config(Config(store=whole.store, convert=whole.convert, verify=whole.verify))
    assert [stage.stage for stage in result.stages] == ["convert", "verify"]
    assert result.quality is None
    assert not (tmp_path / "store" / "shuffled").exists()
    assert [stage.stage for stage in run_config(Config(store=whole.store, shuffle=whole.shuffle)).stages] == [
        "shuffle"
    ]


def test_a_run_compares_the_sources_of_a_round_trip(tmp_path, legacy):
    whole = whole_config(tmp_path / "store", legacy)
    section = pipeline.VerifySection(round_trip=[str(legacy)])
    config = Config(store=whole.store, convert=whole.convert, verify=section)
    assert run_config(config).stages[-1].stage == "verify"
    other = tmp_path / "other.trmph"
    write_trmph(other, demo_games(3, seed=2, board_size=5), 5)
    convert = pipeline.ConvertSection(inputs=[str(legacy), str(other)], workers=1)
    with pytest.raises(
        VerifyError, match=r"1 of 2 sources are not restored exactly; found .*/other\.trmph: the file"
    ):
        run_config(Config(store=whole.store, convert=convert, verify=section))


def test_pickles_are_exported_before_verify(tmp_path, legacy, config):
    path = config(
        f'store = "{tmp_path / "store"}"\n[convert]\ninputs = ["{legacy}"]\n'
        f'[pickles]\norder = "original"\nlevel = 1\n[verify]\nround_trip = ["{legacy}"]\n'
    )
    result = run_config(load_config(path))
    assert [stage.stage for stage in result.stages] == ["convert", "pickles", "verify"]
    assert result.stages[1].positions == result.stages[0].positions
    assert [path.name for path in Path(result.stages[1].path).rglob("*.gz")] == ["a_processed.pkl.gz"]


def test_the_quality_is_measured_once_and_with_or_without_a_verification(tmp_path, legacy):
    whole = whole_config(tmp_path / "store", legacy)
    verified = run_config(
        Config(store=whole.store, convert=whole.convert, shuffle=whole.shuffle, verify=whole.verify)
    )
    alone = run_config(Config(store=whole.store, shuffle=whole.shuffle))
    assert verified.quality == alone.quality
    assert alone.quality["neighbours-1"].before > 0.8


def test_a_stage_that_fails_ends_the_run(tmp_path, legacy):
    whole = whole_config(tmp_path / "store", legacy)
    with pytest.raises(StoreError, match="no shuffle stage yet"):
        run_config(Config(store=whole.store, convert=whole.convert, export=whole.export, load=whole.load))


def test_the_demo_runs_as_a_config(tmp_path, monkeypatch):
    """Real board size, every layout and every stage, on one core so that no process has to start."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0}, raising=False)
    result = run_config(demo_config(tmp_path, DemoOptions(games=16), seed=3))
    stages = {stage.stage: stage for stage in result.stages}
    assert list(stages) == ["demo", *EVERY_STAGE]
    assert stages["demo"].games == stages["convert"].games == 16
    assert stages["demo"].positions == stages["convert"].positions


@pytest.mark.parametrize(
    "text",
    [
        'store = "pipe:touch ran; cat {name}"\n[load]\n',
        'store = " PIPE:touch ran"\n[load]\n',
        'store = "gs://bucket/{name}"\n[load]\n',
        'store = "s"\n[convert]\ninputs = ["a", "pipe:touch ran"]\n',
        'store = "s"\n[verify]\nround_trip = ["pipe:touch ran"]\n',
        'store = "s"\n[report]\noutput = "pipe:touch ran"\n',
        'store = "s"\n[load]\ncache = "pipe:touch ran"\n',
    ],
)
def test_a_config_must_not_contain_commands(
    config, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="a config must not contain commands"):
        run_config(load_config(config(text)))
    assert not (tmp_path / "ran").exists()


def test_a_config_must_not_name_a_cluster(config) -> None:
    with pytest.raises(ConfigError, match=r"engine\.address: a config must not name a cluster.*RAY_ADDRESS"):
        load_config(config('store = "s"\n[engine]\nname = "ray"\naddress = "10.0.0.1:6379"\n[verify]\n'))
