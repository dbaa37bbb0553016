"""Tests of the loader: batches, states, resuming and shutdown."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import hexdata
from hexdata.batch import FIELDS, Batch, BatchOptions
from hexdata.errors import ConfigError, HexdataError, StoreError
from hexdata.live import Chunk, LiveLoader, LiveOptions, StageOptions, Targets
from hexdata.live.chunk import SCANNED, ChunkSource, FoundFile, ReadProgress
from hexdata.live.state import decode_state, encode_state
from hexdata.order import ORDER_VERSION
from hexdata.shards.blocks import block_fields
from tests.live.sample_games import SampleGames, block_chunk, move_chunks

if TYPE_CHECKING:
    from tests.conftest import DemoTrmph

MADE = "tests.live.sample_games:"
TAIL = ("ChunkUnpacker", "ShufflingFrameSampler", "TensorGenerator")


pytestmark = pytest.mark.usefixtures("no_thread_survives")


def made(*between: str, passes: int | None = 3, **options: Any) -> LiveOptions:
    """Return a loader of generated games, with a reservoir of 200 positions and batches of 32 with all
    fields.
    """
    stages = [
        StageOptions(f"{MADE}SampleGames", {"passes": passes}),
        *map(StageOptions, between),
        *map(StageOptions, TAIL),
    ]
    batch = BatchOptions(fields=FIELDS, symmetry=True, tier_probability=(1.0, 0.5, 0.5, 0.0))
    usual = {"seed": 4, "pool_size": 40, "reservoir": 200, "batch_size": 32, "batch": batch, "stages": stages}
    return LiveOptions(**{**usual, **options}).with_stage("ChunkUnpacker", positions_per_game=6)


def as_bytes(batch: Batch) -> bytes:
    return b"".join(name.encode() + batch[name].tobytes() for name in sorted(batch))


def all_bytes(loader: LiveLoader) -> list[bytes]:
    with loader:
        return [as_bytes(batch) for batch in loader]


# --- batches ------------------------------------------------------------------------------------------


def test_hexdata_exports_the_loader():
    assert hexdata.LiveLoader is LiveLoader


def test_batches_follow_the_options_and_only_the_last_is_short():
    with LiveLoader("nowhere", config=made()) as loader:
        batches = list(loader)
        assert list(loader) == []  # an ended loader stays at its end
        assert loader.delivered == len(batches)
    assert {len(batch["value"]) for batch in batches[:-1]} == {32}
    assert [list(batch) for batch in batches] == [list(FIELDS)] * len(batches)
    games, counts = np.unique(np.concatenate([batch["game_id"] for batch in batches]), return_counts=True)
    chunks = move_chunks(40)
    assert games.tolist() == list(range(40))
    expected = [3 * min(6, chunk.positions) for chunk in chunks]
    assert counts.tolist() == [18 if chunk.number == 1 else expected[chunk.number] for chunk in chunks]


def test_every_position_is_delivered_once_per_pass():
    stages = (StageOptions(f"{MADE}SampleGames"), *map(StageOptions, TAIL))
    with LiveLoader(
        "nowhere", config=made(stages=stages).with_stage("ChunkUnpacker", positions_per_game=99)
    ) as loader:
        ids = np.concatenate([batch["position_id"] for batch in loader])
    assert len(np.unique(ids)) == len(ids) == sum(chunk.positions for chunk in _made_chunks())


def _made_chunks() -> list[Chunk]:
    return [chunk for games in SampleGames()._game_batches for chunk in games]


def test_batches_depend_on_the_seed():
    first = all_bytes(LiveLoader("nowhere", config=made()))
    assert all_bytes(LiveLoader("nowhere", config=made())) == first
    assert all_bytes(LiveLoader("nowhere", config=made(), seed=5)) != first
    assert len(first) > 15


def test_a_second_loop_continues_after_the_first():
    whole = all_bytes(LiveLoader("nowhere", config=made()))
    with LiveLoader("nowhere", config=made()) as loader:
        found = [as_bytes(batch) for batch in islice(loader, 3)]
        found += [as_bytes(next(iter(loader)))]
        found += [as_bytes(batch) for batch in loader]
    assert found == whole


def test_arguments_take_precedence_over_the_config(tmp_path):
    config = tmp_path / "live.toml"
    config.write_text("seed = 3\nbatch_size = 7\n[batch]\nplanes = 3\nsymmetry = true\n", encoding="utf-8")
    options = LiveLoader(tmp_path, config=config, batch_size=9, fields=["value"], watch=False).options
    assert (options.seed, options.batch_size, options.watch, options.pool_size) == (3, 9, False, 100_000)
    assert options.batch == BatchOptions(fields=("value",), planes=3, symmetry=True)
    options = LiveLoader(
        tmp_path,
        seed=1,
        split="val",
        pool_size=8,
        reservoir=9,
        planes=3,
        board="uint8",
        final_policy="skip",
        tier_probability=[1, 1, 0, 0],
        symmetry=False,
    ).options
    batch = BatchOptions(planes=3, board="uint8", final_policy="skip", tier_probability=(1, 1, 0, 0))
    assert options == LiveOptions(seed=1, split="val", pool_size=8, reservoir=9, batch=batch)


def test_final_positions_can_be_skipped():
    with LiveLoader("nowhere", config=made(), final_policy="skip", fields=("policy_mask",)) as loader:
        assert all(batch["policy_mask"].all() for batch in loader)


# --- states -------------------------------------------------------------------------------------------


def test_resuming_after_any_batch_gives_the_same_bytes():
    config = made("ChunkValidator")
    whole = all_bytes(LiveLoader("nowhere", config=config))
    for stop in [*range(8), len(whole) - 3, len(whole) - 1, len(whole)]:
        with LiveLoader("nowhere", config=config) as loader:
            found = [as_bytes(batch) for batch in islice(loader, stop)]
            state = loader.state_dict()
        other = LiveLoader("nowhere", config=config)
        other.load_state_dict(pickle.loads(pickle.dumps(state)))
        assert other.delivered == stop
        assert found + all_bytes(other) == whole, stop


def test_resuming_with_files_gives_the_same_bytes(tmp_path: Path, demo_trmph: DemoTrmph):
    demo_trmph(tmp_path, games=60, files=5)
    options = LiveOptions(seed=4, pool_size=50, reservoir=300, batch_size=64, watch=False)
    options = options.with_stage("ChunkUnpacker", positions_per_game=5).with_stage(
        "ShufflingChunkPool", passes=6, game_batch_size=7
    )

    def loader() -> LiveLoader:
        return LiveLoader(tmp_path, config=options, symmetry=True, fields=FIELDS)

    whole = all_bytes(loader())
    assert len(whole) > 10
    for stop in [0, 1, 2, 5, len(whole) - 2, len(whole)]:
        with loader() as first:
            found = [as_bytes(batch) for batch in islice(first, stop)]
            state = first.state_dict()
        other = loader()
        other.load_state_dict(pickle.loads(pickle.dumps(state)))
        assert found + all_bytes(other) == whole, stop


def test_a_state_does_not_change_later():
    with LiveLoader("nowhere", config=made()) as loader:
        list(islice(loader, 4))
        state = loader.state_dict()
        kept = copy.deepcopy(state)
        rest = [as_bytes(batch) for batch in loader]
        assert state == kept
        loader.load_state_dict(state)  # also in a loader that has run
        assert loader.delivered == 4
        assert [as_bytes(batch) for batch in loader] == rest


def test_a_state_consists_of_plain_values():
    def check(value: Any) -> None:
        assert type(value) in (type(None), bool, int, float, str, bytes, list, tuple, dict)
        for part in (
            value.items() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
        ):
            check(part)

    with LiveLoader("nowhere", config=made()) as loader:
        next(iter(loader))
        check(loader.state_dict())


class Weights(pickle.Unpickler):
    """Unpickler with the restrictions of ``torch.load(weights_only=True)`` for values other than tensors."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) != ("_codecs", "encode"):
            raise pickle.UnpicklingError(f"{module}.{name}")
        return super().find_class(module, name)


def test_a_state_can_be_unpickled_without_classes(tmp_path: Path, demo_trmph: DemoTrmph):
    """With pickle protocol 2, which ``torch.save`` uses; includes empty arrays and bytes."""
    demo_trmph(tmp_path, games=40, files=2)
    options = LiveOptions(pool_size=30, reservoir=50, batch_size=16)
    for batches in (0, 1, 5):
        with LiveLoader(tmp_path, config=options) as loader:
            list(islice(loader, batches))
            state = loader.state_dict()
        assert Weights(io.BytesIO(pickle.dumps(state, protocol=2))).load() == state
        with LiveLoader(tmp_path, config=options) as other:
            other.load_state_dict(state)
            next(iter(other))


def test_torch_can_save_and_load_a_state():
    torch = pytest.importorskip("torch")
    with LiveLoader("nowhere", config=made()) as loader:
        list(islice(loader, 3))
        state = loader.state_dict()
    file = io.BytesIO()
    torch.save({"loader": state}, file)
    file.seek(0)
    assert torch.load(file, weights_only=True) == {"loader": state}


def test_the_content_of_a_state_is_pinned():
    """If the keys change, the version of the state must change too."""
    with LiveLoader(
        "nowhere", config=made("ChunkValidator").with_stage("ChunkValidator", threads=2)
    ) as loader:
        next(iter(loader))
        state = loader.state_dict()
    pipeline = state.pop("pipeline")
    assert list(pipeline) == ["SampleGames", "ChunkValidator", *TAIL]
    assert state == {
        "version": 3,
        "order_version": ORDER_VERSION,
        "seed": 4,
        "split": "train",
        "val": 0.05,
        "test": 0.01,
        "pool_size": 40,
        "reservoir": 200,
        "batch_size": 32,
        "rank": 0,
        "world_size": 1,
        "batch": {
            "fields": list(FIELDS),
            "planes": 2,
            "board": "float32",
            "final_policy": "zeros",
            "tier_probability": [1.0, 0.5, 0.5, 0.0],
            "symmetry": True,
        },
        "stages": [
            ["tests.live.sample_games:SampleGames", {"passes": 3}],
            ["ChunkValidator", {}],
            ["ChunkUnpacker", {"positions_per_game": 6}],
            ["ShufflingFrameSampler", {}],
            ["TensorGenerator", {}],
        ],
        "delivered": 1,
    }


def relabel(chunk: Chunk, block: Any) -> Targets | None:
    return None


def test_the_state_names_a_function_of_the_options():
    stages = (*made().stages[:1], StageOptions("ChunkRelabeller", {"relabel": relabel}), *made().stages[1:])
    with LiveLoader("nowhere", config=made(stages=stages)) as loader:
        state = loader.state_dict()
    assert state["stages"][1] == ["ChunkRelabeller", {"relabel": f"{__name__}:relabel"}]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"seed": 5}, "another seed"),
        ({"split": "val"}, "another split"),
        ({"pool_size": 41}, "another pool_size"),
        ({"reservoir": 201}, "another reservoir"),
        ({"batch_size": 33}, "another batch_size"),
        ({"rank": 1, "world_size": 2}, "another rank"),
        ({"world_size": 2}, "another world_size"),
        ({"symmetry": False}, "another batch"),
        ({"config": made("ChunkValidator")}, "another stages"),
        ({"config": made(passes=4)}, "another stages"),
    ],
)
def test_a_state_with_other_options_is_refused(other, message):
    with LiveLoader("nowhere", config=made()) as loader:
        state = loader.state_dict()
    with pytest.raises(ConfigError, match=message):
        LiveLoader("nowhere", **{"config": made(), **other}).load_state_dict(state)


def test_threads_and_queues_may_differ_on_resume():
    with LiveLoader("nowhere", config=made()) as loader:
        list(islice(loader, 2))
        state = loader.state_dict()
    config = made().with_stage("TensorGenerator", threads=2, capacity=9)
    with LiveLoader("nowhere", config=config) as other:
        other.load_state_dict(state)
        assert sum(1 for _ in other) == len(all_bytes(LiveLoader("nowhere", config=made()))) - 2


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"version": 1}, StoreError, "another version"),
        ({"order_version": 99}, StoreError, "another order_version"),
        ({"what": 1}, ConfigError, "not the state of a live loader"),
        ({"pipeline": {}}, StoreError, "damaged"),
        ({"pipeline": 3}, StoreError, "damaged"),
    ],
)
def test_invalid_states_are_refused(change, error, message):
    loader = LiveLoader("nowhere", config=made())
    state = loader.state_dict()
    with pytest.raises(error, match=message):
        loader.load_state_dict({**state, **change})
    for none in (None, {}, [], {"version": 1}):
        with pytest.raises(ConfigError, match="not the state of a live loader"):
            loader.load_state_dict(none)


# --- encoding of states -------------------------------------------------------------------------------


def test_values_of_a_pipeline_survive_encoding():
    values = [
        None,
        True,
        3,
        -0.5,
        "text",
        b"\x00\xff",
        b"",
        [1, [2]],
        {"a": {1: "b"}},
        (1, ("tuple", "array")),
        Path("a/b"),
        SCANNED,
        FoundFile(Path("x"), "x", 3),
    ]
    assert decode_state(encode_state(values)) == values
    arrays = [np.arange(6, dtype=">i2").reshape(2, 3), np.zeros((0, 4), np.float32), np.array([True, False])]
    for array in [*arrays, np.arange(9).reshape(3, 3).T, np.float32(0.1)]:
        found = decode_state(encode_state(array))
        np.testing.assert_array_equal(found, array)
        if isinstance(array, np.ndarray):
            assert (found.dtype, found.flags.writeable) == (array.dtype, True)


def test_chunks_survive_encoding():
    chunks = [move_chunks(1, tiers=True)[0], block_chunk(3, 5, dense=(1,))]
    source = decode_state(encode_state(ChunkSource(FoundFile(Path("a"), "a", 1), chunks)))
    assert isinstance(source, ChunkSource)
    assert encode_state(source.chunks) == encode_state(chunks)
    assert source.chunks[0].moves is not None
    np.testing.assert_array_equal(source.chunks[0].moves, chunks[0].moves)


@pytest.mark.parametrize("value", [{1, 2}, object(), np.array([None]), {(1, 2): 3}, len])
def test_other_values_cannot_be_encoded(value):
    with pytest.raises(ConfigError, match="cannot store"):
        encode_state([value])


def test_the_names_of_items_in_states_are_pinned():
    progress = ReadProgress(1, 2, b"d")
    file = FoundFile(Path("/in/a"), "a", 3, progress)
    reading = ("Reading", {"games": 1, "records": 2, "digest": b"d"})
    path = ("path", "/in/a")
    stored_file = ("FoundFile", {"path": path, "name": "a", "size": 3, "after": reading, "is_moved": False})
    assert encode_state(file) == stored_file
    source = ("ChunkSource", {"file": stored_file, "chunks": [], "reading": reading})
    assert encode_state(ChunkSource(file, [], progress)) == source
    name, parts = encode_state(move_chunks(1)[0])
    names = ["board_size", "source", "place", "game_hash", "moves", "value", "tiers", "block", "flags"]
    assert (name, list(parts), parts["place"]) == ("Chunk", [*names, "number"], 0)
    assert parts["moves"][:2] == ("array", "<u2")


def test_the_rows_of_the_reservoir_in_states_are_pinned():
    with LiveLoader("nowhere", config=made()) as loader:
        next(iter(loader))
        sampler = decode_state(loader.state_dict()["pipeline"])["ShufflingFrameSampler"]
    assert {name: (array.dtype.str, array.shape[1:]) for name, array in sampler["stage"]["rows"].items()} == {
        name: (spec.dtype, spec.shape) for name, spec in block_fields(5, with_policy=False).items()
    }


def test_the_names_of_options_in_states_are_pinned(tmp_path):
    live = LiveOptions().with_stage("ShufflingChunkPool", game_batch_size=9)
    with LiveLoader(tmp_path, config=live) as loader:
        assert loader.state_dict()["stages"][1] == ["ShufflingChunkPool", {"game_batch_size": 9}]


@pytest.mark.parametrize(
    "value",
    [
        ("array", "<f4", [2], b"12"),
        ("array", "O", [1], bytes(8)),
        ("array", "no", [1], b""),
        ("Chunks", {}),
        ("Chunk", {"number": 1}),
        ("Chunk", 5),
        (),
        (1, 2, 3),
    ],
)
def test_damaged_states_are_refused(value):
    with pytest.raises(StoreError, match="damaged"):
        decode_state({"a": [value]})


# --- shutdown -----------------------------------------------------------------------------------------


def test_an_error_in_a_stage_reaches_the_trainer_with_its_cause():
    config = made(f"{MADE}Faulty")
    with LiveLoader("nowhere", config=config) as loader:
        for _ in range(2):
            with pytest.raises(ArithmeticError, match="no more items"):
                list(loader)
        with pytest.raises(HexdataError, match="stopped pipeline"):
            loader.state_dict()


def test_ctrl_c_during_a_wait_ends_the_loop():
    with (
        LiveLoader("nowhere", config=made(f"{MADE}Interrupting", passes=None)) as loader,
        pytest.raises(KeyboardInterrupt),
    ):
        list(loader)


def test_an_endless_loader_can_be_closed_repeatedly():
    loader = LiveLoader("nowhere", config=made(passes=None))
    next(iter(loader))
    assert len([thread for thread in threading.enumerate() if thread.name.startswith("ShufflingFrame")]) == 1
    state = loader.state_dict()
    loader.close()
    loader.close()
    for use in (lambda: next(iter(loader)), loader.state_dict, lambda: loader.load_state_dict(state)):
        with pytest.raises(HexdataError, match="the loader is closed"):
            use()


def test_no_thread_runs_before_the_first_batch():
    before = set(threading.enumerate())
    loader = LiveLoader("nowhere", config=made())
    loader.state_dict()
    loader.metrics()
    assert set(threading.enumerate()) <= before  # a thread of an earlier test may have ended


def test_an_unreferenced_loader_ends():
    loader = LiveLoader("nowhere", config=made(passes=None))
    next(iter(loader))
    threads = [thread for thread in threading.enumerate() if thread.name.startswith(("SampleGames", *TAIL))]
    assert len(threads) == 4
    del loader
    gc.collect()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_a_long_wait_gives_one_warning_with_its_reason():
    silent = made(stages=(StageOptions(f"{MADE}Silence"), *map(StageOptions, TAIL)))
    with LiveLoader("here", config=silent, warn_after=0.01, timeout=0.05) as loader:
        with (
            pytest.warns(
                UserWarning, match=r"here: no batch for .* seconds: Silence has found nothing new"
            ) as caught_warnings,
            pytest.raises(HexdataError, match=r"here: no batch for .* seconds; found Silence has found"),
        ):
            next(iter(loader))
        assert len(caught_warnings) == 1
        assert "ShufflingFrameSampler holds 0 of 200 positions" in str(caught_warnings[0].message)
        with pytest.raises(HexdataError, match="no batch for"):  # and no second warning
            next(iter(loader))


def test_a_stage_without_output_is_named():
    config = made("ChunkValidator", passes=None).with_stage("ChunkValidator", max_positions=1)
    with LiveLoader("here", config=config, timeout=0.1) as loader:
        for _ in range(100):  # in one of the waits, the first stage runs
            with pytest.raises(HexdataError, match="no batch for") as caught:
                next(iter(loader))
            if "found ChunkValidator" in str(caught.value):
                break
    assert "ChunkValidator has produced nothing; its counts are " in str(caught.value)
    assert "left_out.long" in str(caught.value)


def test_a_loader_cannot_be_pickled():
    with pytest.raises(HexdataError, match="cannot be sent to another process"):
        pickle.dumps(LiveLoader("nowhere", config=made()))


@pytest.mark.parametrize("options", [{"warn_after": 0}, {"timeout": -1}, {"timeout": "1"}, {"batch_size": 0}])
def test_invalid_options_are_refused(options):
    with pytest.raises(ConfigError, match="cannot be used"):
        LiveLoader("nowhere", config=made(), **options)
