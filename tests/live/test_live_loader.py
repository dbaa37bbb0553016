"""The loader: batches, options and configs, states, and shutdown."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import math
import operator
import pickle
import re
import threading
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from hexdata.batch import FIELDS, BatchOptions
from hexdata.demo.games import make_game
from hexdata.errors import ConfigError, HexdataError, StoreError
from hexdata.live import LiveLoader, LiveOptions, StageOptions, load_live_config
from hexdata.live.chunk import PLY_STRIDE
from hexdata.live.options import STAGES
from hexdata.live.state import decode_state, encode_state
from hexdata.live.trial import same_game_pairs
from tests.live.made import N, examples, move_chunks, text_of, until, write_pickle

if TYPE_CHECKING:
    from tests.conftest import DemoTrmph

pytestmark = pytest.mark.usefixtures("no_thread_survives")

CONFIG = Path(__file__).parents[2] / "configs" / "live.toml"
SAMPLE, PASS = "tests.live.made:SampleGames", "tests.live.made:Pass"
TAIL = ("ChunkUnpacker", "ShufflingFrameSampler", "TensorGenerator")


def made(*between: str, passes: int = 3, **options: Any) -> LiveOptions:
    """Return options of a pipeline of generated games, with all fields and draws."""
    stages = [StageOptions(SAMPLE, {"passes": passes}), *map(StageOptions, (*between, *TAIL))]
    batch = BatchOptions(fields=FIELDS, symmetry=True, tier_probability=(1.0, 0.5, 0.5, 0.0))
    usual = {"seed": 4, "pool_size": 40, "reservoir": 200, "batch_size": 32, "batch": batch, "stages": stages}
    return LiveOptions(**{**usual, **options}).with_stage("ChunkUnpacker", positions_per_game=6)


def all_bytes(batches: Any) -> list[bytes]:
    return [b"".join(name.encode() + batch[name].tobytes() for name in sorted(batch)) for batch in batches]


# --- batches ----------------------------------------------------------------------------------------------


def test_batches_follow_the_options_and_only_the_last_is_short() -> None:
    with LiveLoader("nowhere", config=made()) as loader:
        batches = list(loader)
        assert list(loader) == []  # an ended loader stays at its end
        assert loader.delivered == len(batches)
    assert {len(batch["value"]) for batch in batches[:-1]} == {32}
    assert [list(batch) for batch in batches] == [list(FIELDS)] * len(batches)
    games, counts = np.unique(np.concatenate([batch["game_id"] for batch in batches]), return_counts=True)
    assert games.tolist() == list(range(40))
    lengths = [9 if chunk.number == 1 else chunk.positions for chunk in move_chunks(40)]
    assert counts.tolist() == [3 * min(6, length) for length in lengths]


def test_positions_are_those_of_the_files_and_the_newest_games(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Boards, values and lengths, while files are added; games that have left the pool come no more."""
    directory = tmp_path / "games"
    directory.mkdir()
    monkeypatch.chdir(tmp_path)
    live = LiveOptions(val=0.0, test=0.0, pool_size=30, reservoir=50, batch_size=20, seed=3)
    names = ("position_id", "game_id", "position_in_game", "total_positions", "value", "board")
    live = live.with_stage("FilePathProvider", settle=0.01)
    with LiveLoader("games", config=live, fields=names) as loader:
        monkeypatch.chdir(directory)
        for file in range(3):
            (directory / f"{file}.trmph").write_text(text_of(*range(20 * file, 20 * file + 20)))
            for batch in loader:
                expected = batch["game_id"] * PLY_STRIDE + batch["position_in_game"]
                assert (batch["position_id"] == expected).all()
                if loader.metrics()["ShufflingChunkPool"]["entered"] == 20 * (file + 1):
                    break
        *_, batch = islice(loader, 500)  # what was in the queues and the reservoir has been delivered
    assert set(batch["game_id"].tolist()) <= set(range(30, 60))
    for row, (number, ply) in enumerate(zip(batch["game_id"], batch["position_in_game"], strict=True)):
        game = make_game(int(number), 1, N)
        stones = np.zeros((2, N * N), np.float32)
        stones[0, game.moves[:ply:2]] = stones[1, game.moves[1:ply:2]] = 1
        assert (batch["board"][row].reshape(2, -1) == stones).all()
        assert (batch["value"][row], batch["total_positions"][row]) == (game.winner, len(game.moves) + 1)


@pytest.mark.parametrize(("reservoir", "pool_size"), [(2000, 150), (1000, 50)])
def test_measured_same_game_pairs_match_the_formula(
    tmp_path: Path, demo_trmph: DemoTrmph, reservoir: int, pool_size: int
) -> None:
    """About 10,000 pairs each, so the statistical error is one or two percent."""
    demo_trmph(tmp_path, 150, 3, board_size=5)  # each game has at least 10 positions
    live = LiveOptions(val=0, test=0, watch=False, seed=5, batch_size=64, pool_size=pool_size)
    live = live.with_stage("ChunkUnpacker", positions_per_game=6)
    with LiveLoader(tmp_path, config=live, reservoir=reservoir, fields=("game_id",)) as loader:
        batches = list(islice(loader, 4 * reservoir // 64, 4 * reservoir // 64 + 900))
    found = np.mean([same_game_pairs(batch["game_id"]) for batch in batches])
    passes = reservoir / (pool_size * 6)
    other_pass = passes * -math.expm1(-1 / passes) / pool_size
    assert found == pytest.approx(64 * 63 / 2 * (5 / (2 * reservoir) + other_pass), rel=0.06)


# --- options ----------------------------------------------------------------------------------------------


def test_arguments_take_precedence_over_the_config(tmp_path: Path) -> None:
    config = tmp_path / "live.toml"
    config.write_text("seed = 3\nbatch_size = 7\n[batch]\nplanes = 3\nsymmetry = true\n", encoding="utf-8")
    options = LiveLoader(tmp_path, config=config, batch_size=9, fields=["value"], watch=False).options
    assert (options.seed, options.batch_size, options.watch, options.pool_size) == (3, 9, False, 100_000)
    assert options.batch == BatchOptions(fields=("value",), planes=3, symmetry=True)
    shared: dict[str, Any] = {"seed": 1, "split": "val", "pool_size": 8, "reservoir": 9, "reuse": 2}
    batch: dict[str, Any] = {"planes": 3, "board": "uint8", "final_policy": "skip", "symmetry": False}
    batch["tier_probability"] = (1, 1, 0, 0)
    options = LiveLoader(tmp_path, **shared, **batch).options
    assert options == LiveOptions(**shared, batch=BatchOptions(**batch))


def test_the_config_of_the_repository_has_all_options_with_their_defaults() -> None:
    options, default = load_live_config(CONFIG), LiveOptions()
    assert replace(options, stages=default.stages) == default
    for stage, usual in zip(options.stages, default.stages, strict=True):
        assert replace(stage, arguments={}) == usual
        parameters = inspect.signature(stage.find()).parameters
        assert stage.arguments == {name: parameters[name].default for name in stage.arguments}
    text = CONFIG.read_text(encoding="utf-8")
    named = {name for stage in STAGES.values() for name in inspect.signature(stage).parameters}
    named |= {option.name for kind in (LiveOptions, BatchOptions) for option in fields(kind)}
    absent = {name for name in named if not re.search(rf"^(# )?\[?{name}\b", text, re.MULTILINE)}
    assert absent == {"directory", "final_positions"}  # arguments that the pipeline supplies


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("sed = 1", ["'sed'", "'seed'"]),
        ("[ChunkUnpackr]", ["'ChunkUnpackr'", "'ChunkUnpacker'"]),
        ("[ChunkUnpacker]\npositions_per_gam = 4", ["[ChunkUnpacker]", "'positions_per_game'"]),
        ("[ChunkUnpacker]\ncapacity = 0", ["[ChunkUnpacker]", "capacity"]),
        ('[ChunkUnpacker]\ncapacity = "burst"', ["[ChunkUnpacker]", "'burst'"]),
        ("[ChunkRelabeller]\nrelabl = 'a:b'", ["[ChunkRelabeller]", "'relabl'"]),
        ("[batch]\nplane = 3", ["[batch]", "'planes'"]),
        *((f"{name} = 0.5", [name]) for name in ("seed", "pool_size", "reservoir", "batch_size", "watch")),
        ("val = 0.7\ntest = 0.3", ["val", "0.7"]),
        ("rank = 1", ["rank 1", "world_size 1"]),
        *((f"stages = {value}", ["stages must be a list"]) for value in ("'all'", "[3]")),
        ("stages = []", ["must end with batches"]),
        *((f"stages = ['{name}']", ["not a stage"]) for name in ("os:getcwd", "tests.live.made:NotAStage")),
        ("stages = ['nowhere.at.all:A']", ["cannot be imported"]),
        (f"stages = ['{SAMPLE}', 'TensorGenerator']", ["TensorGenerator cannot follow SampleGames"]),
        (f"stages = ['{SAMPLE}', 'ChunkUnpacker']", ["must end with batches"]),
        (f"stages = ['ChunkUnpacker', '{SAMPLE}']", ["ChunkUnpacker cannot be the first stage"]),
        (f"stages = ['{SAMPLE}', 'ChunkRelabeller']", ["[ChunkRelabeller]", "relabel is missing"]),
        (f"stages = ['{SAMPLE}', '{PASS}', '{PASS}']", ["two stages have the same name"]),
        (
            "stages = ['tests.live.made:ChunkUnpacker']\n[ChunkUnpacker]\nshare = 1",
            ["ChunkUnpacker cannot be the first stage"],
        ),
        ("= 3", ["not valid TOML"]),
        ("store = 'x'", ["unknown key 'store'"]),
    ],
)
def test_an_invalid_config_is_refused_with_file_and_section(
    text: str, parts: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "live.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_live_config(path, allow_code=True)
    assert str(caught.value).startswith(f"{path}: ")
    assert all(part in str(caught.value) for part in parts), caught.value


@pytest.mark.parametrize(
    "text",
    [
        "stages = ['FilePathProvider', 'evil.more:Stage']",
        "stages = ['ChunkRelabeller']\n[ChunkRelabeller]\nrelabel = 'evil:relabel'",
        "[ChunkRelabeller]\nrelabel = 'evil.relabel'",
    ],
)
def test_a_config_runs_no_code_by_default(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n", encoding="utf-8")
    (tmp_path / "live.toml").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="a config runs no code"):
        LiveLoader(tmp_path, config=tmp_path / "live.toml")
    assert not (tmp_path / "ran").exists()


# --- states -----------------------------------------------------------------------------------------------


class Weights(pickle.Unpickler):
    """Unpickler with the restrictions of ``torch.load(weights_only=True)`` for values other than tensors."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) != ("_codecs", "encode"):
            raise pickle.UnpicklingError(f"{module}.{name}")
        return super().find_class(module, name)


def test_resuming_with_files_gives_the_same_bytes(tmp_path: Path, demo_trmph: DemoTrmph) -> None:
    """The state is stored with pickle protocol 2, as ``torch.save`` does, and loaded without classes."""
    demo_trmph(tmp_path, games=60, files=5)
    options = LiveOptions(seed=4, pool_size=50, reservoir=300, batch_size=64, watch=False)
    options = options.with_stage("ChunkUnpacker", positions_per_game=5)
    options = options.with_stage("ShufflingChunkPool", passes=6, game_batch_size=7)

    def loader() -> LiveLoader:
        return LiveLoader(tmp_path, config=options, symmetry=True, fields=FIELDS)

    with loader() as first:
        whole = all_bytes(first)
    assert len(whole) > 10
    for stop in [0, 1, 2, 5, len(whole) - 2, len(whole)]:
        with loader() as first:
            found = all_bytes(islice(first, stop))
            state = first.state_dict()
        with loader() as other:
            other.load_state_dict(Weights(io.BytesIO(pickle.dumps(state, protocol=2))).load())
            assert found + all_bytes(other) == whole, stop


def test_a_state_names_no_file_outside_the_directory(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for folder in (tmp_path, tmp_path / "in"):
        (folder / "a.trmph").write_text(text_of(*range(5)))
    options: dict[str, Any] = {"watch": False, "split": None, "batch_size": 1, "reservoir": 1}
    with LiveLoader(tmp_path / "in", **options) as loader:
        next(iter(loader))
        state = loader.state_dict()
    saved = decode_state(state["pipeline"])
    games = saved["stages"]["ShufflingChunkPool"]["state"]["games"]
    for game, name in zip(
        games, ["a.trmph", "../a.trmph", str(tmp_path / "a.trmph"), "none.trmph"], strict=False
    ):
        game[0] = name
    loader = LiveLoader(tmp_path / "in", **options)
    loader.load_state_dict({**state, "pipeline": encode_state(saved)})
    assert loader.metrics()["ShufflingChunkPool"]["chunks"] == 2
    assert len(loader.notes()["ShufflingChunkPool"]["missing"]) == 3


@pytest.mark.parametrize(
    ("other", "message"),
    [
        *(({name: value}, f"another {name}") for name, value in {"seed": 5, "split": "val"}.items()),
        *(({name: 201}, f"another {name}") for name in ("pool_size", "reservoir", "batch_size")),
        ({"rank": 1, "world_size": 2}, "another rank, world_size"),
        ({"symmetry": False}, "another batch"),
        *(({"config": each}, "another stages") for each in (made("ChunkValidator"), made(passes=4))),
    ],
)
def test_a_state_with_other_options_is_refused(other: dict[str, Any], message: str) -> None:
    with LiveLoader("nowhere", config=made()) as loader:
        state = loader.state_dict()
    with pytest.raises(ConfigError, match=message):
        LiveLoader("nowhere", **{"config": made(), **other}).load_state_dict(state)


def test_invalid_states_are_refused() -> None:
    loader = LiveLoader("nowhere", config=made())
    state = loader.state_dict()
    whole, saved = state["pipeline"], decode_state(state["pipeline"])
    changed = [{**whole, "content": whole["content"][:-1] + b"\x00"}, {**whole, "checksum": 1}]
    changed.append({**whole, "arrays": [bytes(len(each)) for each in whole["arrays"][1:]]})
    stages, parts = saved["stages"], ({"items": []}, {"items": 3, "state": {}})
    forged = [{**saved, "stages": {**stages, name: part}} for name in stages for part in parts]
    forged += [3, {}, {**saved, "files": {"a": 3}}, {**saved, "stages": {}}]  # with checksums that are right
    forged += [msgspec.msgpack.Ext(0, msgspec.msgpack.encode(("<i8", (1 << 40, 1 << 40), 0)))]
    changed += map(encode_state, forged)
    nested = b"\x91" * 100_000 + b"\xc0"
    changed.append({"content": nested, "arrays": [], "checksum": zlib.crc32(nested)})
    versions: list[dict[str, Any]] = [{"version": 1}, {"order_version": 99}]
    for change in (*versions, *({"pipeline": each} for each in ({}, 3, *changed))):
        with pytest.raises(StoreError, match=r"another|damaged|not valid"):
            loader.load_state_dict({**state, **change})
    loader.load_state_dict(state)
    for none in (None, {}, [], {"version": 1}, {**state, "what": 1}, {**state, "delivered": "1"}):
        with pytest.raises(ConfigError, match=r"not the state of a live loader|delivered"):
            loader.load_state_dict(none)  # type: ignore[arg-type]


def parts_of(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each value in a decoded state, with the first item of each list."""
    inside = (
        value.items() if isinstance(value, dict) else enumerate(value[:1] if isinstance(value, list) else ())
    )
    for key, part in inside:
        yield (*at, key)
        yield from parts_of(part, (*at, key))


def forged(value: Any) -> list[Any]:
    """Return other values of the same and of another type."""
    if isinstance(value, np.ndarray):
        flat = value.reshape(-1)[: len(value)]
        other = ~value if value.dtype.kind in "bu" else value.astype(np.float64)
        return [value[:-1], value[None], flat, other]
    return [-1, "x\0"] if isinstance(value, int) else [3, value * 2 if isinstance(value, list) else None]


def test_a_forged_state_is_refused_when_it_is_read_or_continues(tmp_path: Path) -> None:
    """No stage fails while it runs, whatever a state contains whose checksum is right."""
    (tmp_path / "a.trmph").write_text(text_of(*range(9)))
    rows = examples(make_game(9, 1, N), (0, 1)) * 2
    rows[2]["policy"] = np.full(N * N, 1 / N**2, np.float32)
    write_pickle(tmp_path / "b.pkl.gz", rows[: len(rows) // 2])
    options = LiveOptions(pool_size=9, reservoir=150, batch_size=16, watch=False, split=None)
    options = options.with_stage("ShufflingChunkPool", game_batch_size=3)
    with LiveLoader(tmp_path, config=options) as loader:
        next(iter(loader))
        until(lambda: all(found["queued"] for found in list(loader.metrics().values())[2:]))
        state = loader.state_dict()
    saved, outcomes = decode_state(state["pipeline"]), Counter[str]()
    for *path, last in parts_of(saved):
        for value in forged(functools.reduce(operator.getitem, (*path, last), saved)):
            other = copy.deepcopy(saved)
            functools.reduce(operator.getitem, path, other)[last] = value
            with LiveLoader(tmp_path, config=options) as loader:
                try:
                    loader.load_state_dict({**state, "pipeline": encode_state(other)})
                except StoreError:
                    outcomes["refused"] += 1
                else:
                    outcomes["continued"] += len(list(islice(loader, 2))) > 0
    assert min(outcomes["refused"], outcomes["continued"]) > 9


# --- shutdown ---------------------------------------------------------------------------------------------


def test_ctrl_c_during_a_wait_ends_the_loop() -> None:
    config = made("tests.live.made:Interrupting", passes=10**5)
    with LiveLoader("nowhere", config=config) as loader, pytest.raises(KeyboardInterrupt):
        list(loader)


def test_an_endless_loader_can_be_closed_repeatedly() -> None:
    loader = LiveLoader("nowhere", config=made(passes=10**5))
    next(iter(loader))
    assert len([thread for thread in threading.enumerate() if thread.name.startswith("ShufflingFrame")]) == 1
    state = loader.state_dict()
    loader.close()
    loader.close()
    for use in (lambda: next(iter(loader)), loader.state_dict, lambda: loader.load_state_dict(state)):
        with pytest.raises(HexdataError, match="the loader is closed"):
            use()
    with pytest.raises(HexdataError, match="cannot be sent to another process"):
        pickle.dumps(loader)


def test_a_long_wait_gives_one_warning_with_its_reason(tmp_path: Path) -> None:
    with LiveLoader(tmp_path, warn_after=0.01, timeout=0.05) as loader:
        reason = r"no batch for .*waiting for files named"
        with pytest.warns(UserWarning, match=reason), pytest.raises(HexdataError, match=reason):
            next(iter(loader))
        with pytest.raises(HexdataError, match=reason):  # and no second warning, which would be an error
            next(iter(loader))
    for wrong in ({"warn_after": 0}, {"timeout": -1}, {"timeout": "1"}, {"batch_size": 0}):
        with pytest.raises(ConfigError, match="cannot be used"):
            LiveLoader(tmp_path, **wrong)  # type: ignore[arg-type]
