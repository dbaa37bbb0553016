"""The trainer's end: what comes, going on from a state, and that everything ends."""

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
from tests.live.sample_games import SampleGames, block_chunk, move_chunks

if TYPE_CHECKING:
    from tests.conftest import DemoTrmph

MADE = "tests.live.sample_games:"
TAIL = ("ChunkUnpacker", "ShufflingFrameSampler", "TensorGenerator")


pytestmark = pytest.mark.usefixtures("no_thread_survives")


def made(*between: str, passes: int | None = 3, **options: Any) -> LiveOptions:
    """A pipeline of made-up games: a reservoir of 200 positions, batches of 32 with every field."""
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


# --- what comes ---------------------------------------------------------------------------------------


def test_hexdata_names_it():
    assert hexdata.LiveLoader is LiveLoader


def test_batches_are_those_of_the_options_and_all_of_the_same_size_but_the_last():
    with LiveLoader("nowhere", config=made()) as loader:
        batches = list(loader)
        assert list(loader) == []  # it has ended, and stays so
        assert loader.delivered == len(batches)
    assert {len(batch["value"]) for batch in batches[:-1]} == {32}
    assert [list(batch) for batch in batches] == [list(FIELDS)] * len(batches)
    games, counts = np.unique(np.concatenate([batch["game_id"] for batch in batches]), return_counts=True)
    chunks = move_chunks(40)
    assert games.tolist() == list(range(40))
    expected = [3 * min(6, chunk.positions) for chunk in chunks]
    assert counts.tolist() == [18 if chunk.number == 1 else expected[chunk.number] for chunk in chunks]


def test_every_position_comes_once_in_a_pass():
    stages = (StageOptions(f"{MADE}SampleGames"), *map(StageOptions, TAIL))
    with LiveLoader(
        "nowhere", config=made(stages=stages).with_stage("ChunkUnpacker", positions_per_game=99)
    ) as loader:
        ids = np.concatenate([batch["position_id"] for batch in loader])
    assert len(np.unique(ids)) == len(ids) == sum(chunk.positions for chunk in _made_chunks())


def _made_chunks() -> list[Chunk]:
    return [chunk for games in SampleGames()._game_batches for chunk in games]


def test_the_same_seed_gives_the_same_batches_and_another_others():
    first = all_bytes(LiveLoader("nowhere", config=made()))
    assert all_bytes(LiveLoader("nowhere", config=made())) == first
    assert all_bytes(LiveLoader("nowhere", config=made(), seed=5)) != first
    assert len(first) > 15


def test_a_loop_that_was_left_goes_on_where_it_was():
    whole = all_bytes(LiveLoader("nowhere", config=made()))
    with LiveLoader("nowhere", config=made()) as loader:
        found = [as_bytes(batch) for batch in islice(loader, 3)]
        found += [as_bytes(next(iter(loader)))]
        found += [as_bytes(batch) for batch in loader]
    assert found == whole


def test_what_is_given_goes_before_the_config(tmp_path):
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


def test_final_positions_stay_out_if_that_is_asked_for():
    with LiveLoader("nowhere", config=made(), final_policy="skip", fields=("policy_mask",)) as loader:
        assert all(batch["policy_mask"].all() for batch in loader)


# --- where it stands ----------------------------------------------------------------------------------


def test_it_goes_on_from_any_batch_with_the_same_bytes():
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


def test_it_goes_on_from_a_state_of_files_with_the_same_bytes(tmp_path: Path, demo_trmph: DemoTrmph):
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


def test_a_state_is_of_the_moment_that_it_was_taken():
    with LiveLoader("nowhere", config=made()) as loader:
        list(islice(loader, 4))
        state = loader.state_dict()
        kept = copy.deepcopy(state)
        rest = [as_bytes(batch) for batch in loader]
        assert state == kept
        loader.load_state_dict(state)  # a loader that has run goes back
        assert loader.delivered == 4
        assert [as_bytes(batch) for batch in loader] == rest


def test_a_state_is_plain_values():
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
    """Refuses what ``torch.load(weights_only=True)`` refuses of what is no tensor."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) != ("_codecs", "encode"):
            raise pickle.UnpicklingError(f"{module}.{name}")
        return super().find_class(module, name)


def test_a_state_is_read_where_no_class_may_be_made(tmp_path: Path, demo_trmph: DemoTrmph):
    """Written by protocol 2, as ``torch.save`` does it: arrays and bytes without content, too."""
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


def test_torch_keeps_a_state():
    torch = pytest.importorskip("torch")
    with LiveLoader("nowhere", config=made()) as loader:
        list(islice(loader, 3))
        state = loader.state_dict()
    file = io.BytesIO()
    torch.save({"loader": state}, file)
    file.seek(0)
    assert torch.load(file, weights_only=True) == {"loader": state}


def test_what_a_state_says_is_pinned():
    """A literal state: if its keys change, so must its version."""
    with LiveLoader(
        "nowhere", config=made("ChunkValidator").with_stage("ChunkValidator", threads=2)
    ) as loader:
        next(iter(loader))
        state = loader.state_dict()
    pipeline = state.pop("pipeline")
    assert list(pipeline) == ["SampleGames", "ChunkValidator", *TAIL]
    assert state == {
        "version": 2,
        "order_version": ORDER_VERSION,
        "seed": 4,
        "split": "train",
        "val": 0.05,
        "test": 0.01,
        "pool_size": 40,
        "reservoir": 200,
        "batch_size": 32,
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


def test_a_function_in_the_options_is_named_in_the_state():
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
        ({"symmetry": False}, "another batch"),
        ({"config": made("ChunkValidator")}, "another stages"),
        ({"config": made(passes=4)}, "another stages"),
    ],
)
def test_a_state_of_other_options_is_refused(other, message):
    with LiveLoader("nowhere", config=made()) as loader:
        state = loader.state_dict()
    with pytest.raises(ConfigError, match=message):
        LiveLoader("nowhere", **{"config": made(), **other}).load_state_dict(state)


def test_threads_and_queues_may_change():
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
def test_states_that_are_none(change, error, message):
    loader = LiveLoader("nowhere", config=made())
    state = loader.state_dict()
    with pytest.raises(error, match=message):
        loader.load_state_dict({**state, **change})
    for none in (None, {}, [], {"version": 1}):
        with pytest.raises(ConfigError, match="not the state of a live loader"):
            loader.load_state_dict(none)


# --- the codec ----------------------------------------------------------------------------------------


def test_what_a_pipeline_holds_comes_back():
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


def test_chunks_come_back():
    chunks = [move_chunks(1, tiers=True)[0], block_chunk(3, 5, dense=(1,))]
    source = decode_state(encode_state(ChunkSource(FoundFile(Path("a"), "a", 1), chunks)))
    assert isinstance(source, ChunkSource)
    assert encode_state(source.chunks) == encode_state(chunks)
    assert source.chunks[0].moves is not None
    np.testing.assert_array_equal(source.chunks[0].moves, chunks[0].moves)


@pytest.mark.parametrize("value", [{1, 2}, object(), np.array([None]), {(1, 2): 3}, len])
def test_what_no_state_can_keep(value):
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
    assert (name, list(parts)[:3], parts["place"]) == ("Chunk", ["board_size", "source", "place"], 0)


def test_the_names_of_options_in_states_are_pinned(tmp_path):
    live = LiveOptions().with_stage("ShufflingChunkPool", game_batch_size=9)
    with LiveLoader(tmp_path, config=live) as loader:
        assert loader.state_dict()["stages"][1] == ["ShufflingChunkPool", {"hand": 9}]


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
def test_broken_states(value):
    with pytest.raises(StoreError, match="damaged"):
        decode_state({"a": [value]})


# --- the end ------------------------------------------------------------------------------------------


def test_an_error_in_a_stage_reaches_the_trainer_with_its_cause():
    config = made(f"{MADE}Faulty")
    with LiveLoader("nowhere", config=config) as loader:
        for _ in range(2):
            with pytest.raises(ArithmeticError, match="no more items"):
                list(loader)
        with pytest.raises(HexdataError, match="stopped pipeline"):
            loader.state_dict()


def test_ctrl_c_while_waiting_leaves_the_loop():
    with (
        LiveLoader("nowhere", config=made(f"{MADE}Interrupting", passes=None)) as loader,
        pytest.raises(KeyboardInterrupt),
    ):
        list(loader)


def test_closing_ends_an_endless_one_and_more_than_once():
    loader = LiveLoader("nowhere", config=made(passes=None))
    next(iter(loader))
    assert len([thread for thread in threading.enumerate() if thread.name.startswith("ShufflingFrame")]) == 1
    state = loader.state_dict()
    loader.close()
    loader.close()
    for use in (lambda: next(iter(loader)), loader.state_dict, lambda: loader.load_state_dict(state)):
        with pytest.raises(HexdataError, match="the loader is closed"):
            use()


def test_no_thread_runs_before_a_batch_is_asked_for():
    before = set(threading.enumerate())
    loader = LiveLoader("nowhere", config=made())
    loader.state_dict()
    loader.metrics()
    assert set(threading.enumerate()) <= before  # one of an earlier test may end meanwhile


def test_a_loader_that_nobody_holds_ends():
    loader = LiveLoader("nowhere", config=made(passes=None))
    next(iter(loader))
    threads = [thread for thread in threading.enumerate() if thread.name.startswith(("SampleGames", *TAIL))]
    assert len(threads) == 4
    del loader
    gc.collect()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_waiting_is_warned_of_once_and_says_for_what():
    silent = made(stages=(StageOptions(f"{MADE}Silence"), *map(StageOptions, TAIL)))
    with LiveLoader("here", config=silent, warn_after=0.01, timeout=0.05) as loader:
        with (
            pytest.warns(
                UserWarning, match=r"here: no batch for .* seconds: Silence has found nothing new"
            ) as said,
            pytest.raises(HexdataError, match=r"here: no batch for .* seconds; found Silence has found"),
        ):
            next(iter(loader))
        assert len(said) == 1
        assert "ShufflingFrameSampler holds 0 of 200 positions" in str(said[0].message)
        with pytest.raises(HexdataError, match="no batch for"):  # and no second warning
            next(iter(loader))


def test_a_stage_that_lets_nothing_through_is_named():
    config = made("ChunkValidator", passes=None).with_stage("ChunkValidator", max_positions=1)
    with LiveLoader("here", config=config, timeout=0.1) as loader:
        for _ in range(100):  # each is a wait of its own: in one of them the first stage gets its turn
            with pytest.raises(HexdataError, match="no batch for") as caught:
                next(iter(loader))
            if "found ChunkValidator" in str(caught.value):
                break
    assert "ChunkValidator has produced nothing; its counts are " in str(caught.value)
    assert "left_out.long" in str(caught.value)


def test_it_stays_in_its_process():
    with pytest.raises(HexdataError, match="cannot be sent to another process"):
        pickle.dumps(LiveLoader("nowhere", config=made()))


@pytest.mark.parametrize("options", [{"warn_after": 0}, {"timeout": -1}, {"timeout": "1"}, {"batch_size": 0}])
def test_options_without_a_meaning(options):
    with pytest.raises(ConfigError, match="cannot be used"):
        LiveLoader("nowhere", config=made(), **options)
