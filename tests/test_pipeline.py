"""Configs are checked before a stage runs, and a run executes the stages of its config in order."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hexdata import pipeline
from hexdata.engine import EngineOptions
from hexdata.errors import ConfigError
from hexdata.export import ExportOptions
from hexdata.formats.trmph import write_trmph
from hexdata.loader.trial import LoadOptions
from hexdata.pipeline import Config, load_config, run_config
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


WRONG = [
    (STORE + "[shufle]\n", "'shufle'", "'shuffle'"),
    ('stor = "a"\n', "'stor'", "'store'"),
    (STORE + "[shuffle]\nsede = 1\n", "[shuffle]", "'sede'", "'seed'"),
    (STORE + '[convert]\ninputs = ["a"]\nworker = 1\n', "[convert]", "'worker'", "'workers'"),
    (STORE + "[verify]\nroundtrip = []\n", "[verify]", "'roundtrip'", "'round_trip'"),
    (STORE + '[engine]\nname = "rey"\n', "[engine]", "'rey'", "'ray'"),
    (STORE + '[engine]\naddress = "auto"\n', "[engine]", "auto", "ray"),
    (STORE + '[demo]\nfolder = "a"\ngames = "x"\n', "[demo]", "games", "'x'"),
    (STORE + "[demo]\nfolder = 3\n", "[demo]", "folder", "3"),
    (STORE + '[demo]\nfolder = "a"\nseed = 1.5\n', "[demo]", "seed", "1.5"),
    ("[verify]\n", "store is missing"),
    (STORE + "[convert]\n", "[convert]", "inputs is missing"),
    *((STORE + f"[shuffle]\nseed = {each}\n", "[shuffle]", "seed", each) for each in ("'x'", "1.5")),
    *((STORE + f"[convert]\ninputs = {each}\n", "[convert]", "inputs", "'a'") for each in ("'a'", "{a = 1}")),
    *(
        (STORE + f"[{name}]\n{key} = [1]\n", f"[{name}]", key, "1")
        for name, key in (("convert", "inputs"), ("verify", "round_trip"), ("report", "output"))
    ),
    (STORE + "shuffle = 3\n", "[shuffle]", "found 3"),
    (STORE + "[load]\nmode = 'fast'\n", "[load]", "mode", "'stream'"),
    ("store = 1\n", "store", "found 1"),
    (STORE + '[shuffle]\nmemory = "2"\n', "[shuffle]", "'2'", "1GB"),
    (STORE + "[export]\nmemory = [1]\n", "[export]", "memory", "[1]"),
    (STORE + '[convert]\ninputs = ["a"]\nval = 2.0\n', "[convert]", "2.0"),
    ("store =\n", "line 1"),
    ("a = " + "[" * 100_000, "not valid TOML"),
    (f"a = {'9' * 5_000}", "not valid TOML"),
]
"""Texts of configs, and what the error must contain."""


@pytest.mark.parametrize("case", WRONG, ids=[text[:40] for text, *_ in WRONG])
def test_an_invalid_config_is_an_error_with_key_and_value(case, config):
    text, *parts = case
    path = config(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert caught.value.path == str(path)
    assert all(part in str(caught.value) for part in parts), caught.value


def test_a_missing_or_unreadable_config_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="the config does not exist"):
        load_config(tmp_path / "missing.toml")
    with pytest.raises(ConfigError, match="the config cannot be read; found Is a directory"):
        load_config(tmp_path)
    (tmp_path / "binary.toml").write_bytes(b'store = "\xff"')
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_config(tmp_path / "binary.toml")


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
    assert "cannot use the Ray cluster" in run.stderr
    assert address in run.stderr.replace("\n", "")


def test_an_absent_section_is_a_stage_that_is_not_run(tmp_path, legacy):
    whole = whole_config(tmp_path / "store", legacy)
    result = run_config(Config(store=whole.store, convert=whole.convert, verify=whole.verify))
    assert [stage.stage for stage in result.stages] == ["convert", "verify"]
    assert result.quality is None
    assert not (tmp_path / "store" / "shuffled").exists()
    result = run_config(Config(store=whole.store, shuffle=whole.shuffle))
    assert [stage.stage for stage in result.stages] == ["shuffle"]


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
