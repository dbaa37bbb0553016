"""Tests of the options of a live pipeline: defaults, configs, custom stages and every error."""

from __future__ import annotations

import inspect
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from hexdata.batch import BatchOptions
from hexdata.errors import ConfigError
from hexdata.live import LiveLoader
from hexdata.live.options import (
    STAGES,
    LiveOptions,
    StageOptions,
    load_live_config,
    make_pipeline,
    parse_live_config,
)
from hexdata.live.stage import Transform

CONFIG = Path(__file__).parents[2] / "configs" / "live.toml"
SAMPLE_GAMES = "tests.live.sample_games:SampleGames"
TAIL = ["ChunkUnpacker", "ShufflingFrameSampler", "TensorGenerator"]


class Counting(Transform):
    """Custom stage that declares its item types."""

    consumes: ClassVar[str] = "blocks"
    produces: ClassVar[str] = "blocks"

    def __init__(self, *, seed: int, step: int, loud: bool = False) -> None:
        super().__init__()
        self.seed, self.step, self.loud = seed, step, loud

    def process(self, item: Any) -> tuple[Any]:
        self.count("blocks", self.step)
        return (item,)


class Anything(Counting):
    """Custom stage with any keyword argument and without declared item types."""

    consumes = None  # type: ignore[misc,assignment]
    produces = None  # type: ignore[misc,assignment]

    def __init__(self, **options: Any) -> None:
        super().__init__(seed=0, step=1)
        self.options = options


COUNTING = "tests.live.test_options:Counting"


def test_the_config_of_the_repository_has_the_default_values():
    options = load_live_config(CONFIG)
    default = LiveOptions()
    assert [stage.kind for stage in options.stages] == [stage.kind for stage in default.stages]
    assert replace(options, stages=default.stages) == default
    for stage, default_stage in zip(options.stages, default.stages, strict=True):
        assert (stage.capacity, stage.overflow) == (default_stage.capacity, default_stage.overflow)
        parameters = inspect.signature(stage.find()).parameters
        for name, value in stage.arguments.items():
            assert parameters[name].default == value, (stage.kind, name)


def test_shared_options_are_passed_to_stages_with_such_a_parameter():
    options = LiveOptions(
        seed=9,
        pool_size=7,
        reservoir=50,
        batch_size=3,
        batch=BatchOptions(final_policy="skip"),
        stages=(
            StageOptions(SAMPLE_GAMES, {"games": 3}),
            StageOptions("ChunkUnpacker", {"positions_per_game": 2}, capacity=9, overflow="keep-newest"),
            StageOptions(COUNTING, {"step": 4}),
            StageOptions("ShufflingFrameSampler"),
            StageOptions("TensorGenerator", {"threads": 2}),
        ),
    )
    pipeline = make_pipeline(options, "nowhere")
    _, unpacker, counting, sampler, generator = pipeline.stages
    assert (unpacker.per_game, unpacker.final_positions) == (2, False)
    assert (pipeline.queues[1].capacity, pipeline.queues[1].overflow) == (9, "keep-newest")
    assert (counting.seed, counting.step, counting.loud) == (9, 4, False)
    assert sampler.reservoir.size == 50
    assert (generator.batch_size, generator.batch, generator.seed) == (3, options.batch, 9)
    assert len(generator.workers) == 2


def content(*stages: str, **sections: Any) -> dict[str, Any]:
    return {"stages": [SAMPLE_GAMES, *stages], **sections}


def test_a_config_lists_the_stages_of_the_pipeline():
    options = parse_live_config(
        allow_code=True,
        content=content("ChunkUnpacker", COUNTING, "TensorGenerator", Counting={"step": 5, "capacity": 2}),
    )
    assert [stage.name for stage in options.stages] == [
        "SampleGames",
        "ChunkUnpacker",
        "Counting",
        "TensorGenerator",
    ]
    assert options.stages[2] == StageOptions(COUNTING, {"step": 5}, capacity=2)


def test_the_section_of_an_unlisted_stage_is_checked_but_not_used():
    options = parse_live_config(allow_code=True, content=content(*TAIL, ChunkValidator={"min_positions": 5}))
    assert [stage.name for stage in options.stages] == ["SampleGames", *TAIL]
    with pytest.raises(ConfigError, match="min_position'"):
        parse_live_config(allow_code=True, content=content(*TAIL, ChunkValidator={"min_position": 5}))


def test_the_relabeller_can_be_added():
    options = parse_live_config(
        allow_code=True,
        content=content(
            "ChunkRelabeller", *TAIL, ChunkRelabeller={"relabel": "tests.live.sample_games:move_chunks"}
        ),
    )
    assert options.stages[1].arguments == {"relabel": "tests.live.sample_games:move_chunks"}
    with pytest.raises(ConfigError, match=r"\[ChunkRelabeller\]: the stage needs relabel"):
        parse_live_config(allow_code=True, content=content("ChunkRelabeller", *TAIL))


def test_a_stage_may_accept_any_keyword():
    kind = "tests.live.test_options:Anything"
    options = parse_live_config(
        allow_code=True, content=content("ChunkUnpacker", kind, "TensorGenerator", Anything={"what": [1]})
    )
    assert make_pipeline(options, "nowhere").stages[2].options == {"what": [1]}


def test_with_stage_changes_arguments_of_a_stage():
    options = LiveOptions().with_stage("ChunkUnpacker", positions_per_game=8)
    options = options.with_stage("ChunkUnpacker", threads=2, capacity=3)
    unpacker = StageOptions("ChunkUnpacker", {"positions_per_game": 8, "threads": 2}, capacity=3)
    assert options == replace(
        LiveOptions(), stages=(*LiveOptions().stages[:4], unpacker, *LiveOptions().stages[5:])
    )
    with pytest.raises(ConfigError, match="no stage 'ChunkRelabeller'"):
        options.with_stage("ChunkRelabeller", threads=2)


def test_every_stage_of_hexdata_can_be_imported():
    assert [StageOptions(name, _required_arguments(name)).find().__name__ for name in STAGES] == list(STAGES)


def _required_arguments(name: str) -> dict[str, Any]:
    return {"relabel": "tests.live.sample_games:move_chunks"} if name == "ChunkRelabeller" else {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sed = 1", "unknown key 'sed' at the top; .*Did you mean 'seed'"),
        ("[ChunkUnpackr]", "unknown section 'ChunkUnpackr' at the top; .*Did you mean 'ChunkUnpacker'"),
        ("ChunkUnpacker = 4", r"ChunkUnpacker is a section; found 4; expected \[ChunkUnpacker\]"),
        (
            "[ChunkUnpacker]\npositions_per_gam = 4",
            r"\[ChunkUnpacker\] unknown key 'positions_per_gam'; expected one of capacity, overflow, "
            r"positions_per_game, position_sampling_rate, threads. Did you mean 'positions_per_game'",
        ),
        (
            "[ChunkUnpacker]\npool_size = 4",
            r"\[ChunkUnpacker\] a shared option cannot be set for one stage.*at the top",
        ),
        ("[TensorGenerator]\nbatch = 4", r"a shared option cannot be set for one stage.*Set it in \[batch\]"),
        ("[ChunkUnpacker]\ncapacity = 0", r"\[ChunkUnpacker\] capacity cannot be used; found 0"),
        ('[ChunkUnpacker]\noverflow = "burst"', r"\[ChunkUnpacker\] unknown overflow; found 'burst'"),
        ("[batch]\nplane = 3", r"\[batch\] unknown key 'plane'; .*Did you mean 'planes'"),
        ("[batch]\nplanes = 4", r"\[batch\] unknown planes"),
        ("seed = 0.5", "seed cannot be used"),
        ("pool_size = 0", "pool_size cannot be used"),
        ("reservoir = true", "reservoir cannot be used"),
        ("batch_size = '3'", "batch_size cannot be used"),
        ("watch = 1", "watch cannot be used"),
        ("split = 'dev'", "unknown split; found 'dev'"),
        ("val = 0.7\ntest = 0.3", "leave games for train"),
        ("val = 'a'", "leave games for train"),
        ("val = nan", "leave games for train"),
        ("stages = 'all'", "stages cannot be used"),
        ("stages = [3]", "stages cannot be used"),
        ("stages = []", "a pipeline needs at least one stage"),
        ("stages = ['FilePathProvidr']", "unknown stage 'FilePathProvidr'.*Did you mean 'FilePathProvider'"),
        ("stages = ['os:getcwd']", "not a stage of a pipeline; .*inherits from"),
        ("stages = ['tests.live.sample_games:NotAStage']", "not a stage of a pipeline"),
        ("stages = ['nowhere.at.all:A']", "cannot be imported; .*No module named"),
        ("stages = ['tests.live.sample_games:A']", "cannot be imported; .*no attribute 'A'"),
        ("stages = [':A']", "cannot be imported"),
        (
            f"stages = ['{SAMPLE_GAMES}', 'TensorGenerator']",
            "cannot follow SampleGames; found games",
        ),
        (f"stages = ['{SAMPLE_GAMES}', 'ChunkUnpacker']", "must end with batches; found blocks"),
        (f"stages = ['ChunkUnpacker', '{SAMPLE_GAMES}']", "ChunkUnpacker is at the wrong position"),
        (f"stages = ['{SAMPLE_GAMES}', '{SAMPLE_GAMES}']", "SampleGames is at the wrong position"),
        (f"stages = ['{SAMPLE_GAMES}', '{COUNTING}']", "the stage needs step"),
        (
            f"stages = ['{SAMPLE_GAMES}', 'ChunkUnpacker', '{COUNTING}', '{COUNTING}', 'TensorGenerator']\n"
            "[Counting]\nstep = 1",
            "two stages have the same name",
        ),
        (
            f"stages = ['{SAMPLE_GAMES}', '{COUNTING}']\n[Counting]\nstep = 1",
            "cannot follow SampleGames",
        ),
        ("= 3", "not valid TOML"),
    ],
)
def test_an_invalid_config_is_refused_with_file_and_section(text, message, tmp_path):
    path = tmp_path / "live.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message) as caught:
        load_live_config(path, allow_code=True)
    assert str(caught.value).startswith(f"{path}: ")


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("stages = ['evil:Stage', 'TensorGenerator']", "stages"),
        ("stages = ['FilePathProvider', 'evil.more:Stage']", "stages"),
        (
            "stages = ['ChunkRelabeller']\n[ChunkRelabeller]\nrelabel = 'evil:relabel'",
            "ChunkRelabeller.relabel",
        ),
        ("[ChunkRelabeller]\nrelabel = 'evil.relabel'", "ChunkRelabeller.relabel"),
    ],
)
def test_a_config_runs_no_code_by_default(
    text: str, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n", encoding="utf-8")
    (tmp_path / "live.toml").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    directory = tmp_path / "games"
    directory.mkdir()
    for load in (
        lambda: load_live_config(tmp_path / "live.toml"),
        lambda: LiveLoader(directory, config=tmp_path / "live.toml"),
    ):
        with pytest.raises(ConfigError, match=f"{key}: a config runs no code.*--allow-code"):
            load()
    assert not (tmp_path / "ran").exists()


def test_a_missing_config_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="the config does not exist"):
        load_live_config(tmp_path / "live.toml")


def test_argument_values_are_checked_when_the_pipeline_is_created():
    options = LiveOptions(stages=tuple(map(StageOptions, [SAMPLE_GAMES, *TAIL])))
    with pytest.raises(ConfigError, match=r"^\[ChunkUnpacker\]: positions_per_game cannot be used; found 0"):
        make_pipeline(options.with_stage("ChunkUnpacker", positions_per_game=0), "nowhere")


def test_the_config_has_a_section_for_every_default_stage():
    sections = tomllib.loads(CONFIG.read_text(encoding="utf-8"))
    assert set(STAGES) - set(sections) == {"ChunkRelabeller"}


class ReservedNames(Counting):
    """Custom stage whose arguments have names of pydantic's methods."""

    def __init__(self, *, copy: int, model_dump: int) -> None:
        super().__init__(seed=0, step=1)


def test_an_argument_may_have_any_name() -> None:
    kind = "tests.live.test_options:ReservedNames"
    arguments = {"copy": 1, "model_dump": 2}
    assert StageOptions(kind, arguments).arguments == arguments
    with pytest.raises(ConfigError, match="the stage needs copy, model_dump"):
        StageOptions(kind)
