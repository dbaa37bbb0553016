"""Tests of ``DeviceLoader`` on the CPU against the ``Loader`` it was made from."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hexdata.batch import FIELDS
from hexdata.board import pack_boards
from hexdata.errors import BudgetError, ConfigError
from hexdata.fill import games_to_fill
from hexdata.loader import Loader
from hexdata.loader import loader as loader_module
from hexdata.loader.checkpoint import combine_digests
from hexdata.loader.exact import SelectedRows
from hexdata.loader.game_table import PACKED_PREFIX, GameTable
from hexdata.loader.opening import all_members
from hexdata.loader.row_policies import RowPolicies, count_entries
from hexdata.policy import SparsePolicies
from hexdata.schema import NO_GAME, NO_MOVE, NO_PLY, NO_TIER
from hexdata.shards.blocks import POLICY_FIELDS, block_fields
from tests.pairs import every_pair

torch = pytest.importorskip("torch")

from hexdata.torch import DeviceLoader, as_tensors  # noqa: E402 - only where PyTorch is
from hexdata.torch import device_loader as device_loader_module  # noqa: E402
from hexdata.torch import device_table as device_table_module  # noqa: E402

MakeLoader = Callable[..., Loader]
TIERS = (0.0, 0.25, 0.7, 1.0)
LABELS = tuple(name for name in FIELDS if name not in ("board", "policy"))


TARGETS = ("root_value", "visits", "weight", "extra.temperature")


def make_table(n: int, games: int, packed: int = 0, *, own: bool = False, search: bool = False) -> GameTable:
    """Return a random table.

    Args:
        n: Board size.
        games: Number of games. Half of them were begun by red, and half contain their final position.
        packed: Number of positions that belong to no game; some of their moves are on occupied cells.
        own: Whether every third game has a position id and a value for each position.
        search: Whether most positions have policies, and all have ``TARGETS``.
    """
    random, cells = np.random.default_rng([n, games, packed]), n * n
    lengths = random.integers(1, min(cells, 60) + 1, games)
    moves = [random.permutation(cells)[:length] for length in lengths]
    first_player = random.integers(0, 2, games, np.uint8)
    positions = lengths + random.integers(0, 2, games)
    starts = np.concatenate([[0], np.cumsum(positions)])
    bases = 1000 + 3 * starts[:-1]
    arrays = {
        "fill": games_to_fill(np.concatenate([*moves, []]).astype(np.uint16), lengths, first_player, n),
        "first_player": first_player,
        "game_id": np.sort(random.choice(10 * games, games, replace=False)),
        "starts": starts,
        "position_id": bases,
        "value": random.integers(0, 2, games).astype(np.float32),
        "tier": random.choice([0, 1, 2, 3, NO_TIER], starts[-1]).astype(np.uint8),
    }
    if own:
        has_own = np.arange(games) % 3 == 0
        counts = np.where(has_own, positions, 0)
        own_starts = np.where(has_own, np.cumsum(counts) - counts, -1)
        offsets = [random.permutation(2 * count)[:count] for count in counts]
        arrays |= {"position_id_start": own_starts, "value_start": own_starts}
        arrays["position_ids"] = np.concatenate(offsets).astype(np.uint16 if n > 15 else np.uint8)
        arrays["values"] = random.random(counts.sum(), np.float32)
    stones = random.integers(0, 3, (packed, n, n))
    block: dict[str, Any] = {
        "board": pack_boards(np.stack([stones == 1, stones == 2], axis=1)),
        "game_id": np.full(packed, NO_GAME),
        "move": random.choice([*range(cells), *[NO_MOVE] * (cells // 4)], packed).astype(np.uint16),
        "player_to_move": random.integers(0, 2, packed, np.uint8),
        "position_id": np.arange(packed) * 2 + (1 << 35),
        "position_in_game": random.choice([5, 40_000, NO_PLY], packed).astype(np.uint16),
        "total_positions": random.choice([6, 50_000, NO_PLY], packed).astype(np.uint16),
        "value": random.random(packed, np.float32),
        "value_sample_tier": random.choice([0, 1, 2, 3, NO_TIER], packed).astype(np.uint8),
    }
    rows = int(starts[-1]) + packed
    if search:
        policies = random.random((rows, cells), np.float32) * (random.random((rows, cells)) < 0.2)
        with_policy = np.flatnonzero(np.arange(rows) % 4 > 0)
        sparse = SparsePolicies.from_dense(policies.astype(np.float32)[with_policy])
        counts = np.zeros(rows, np.uint16)
        counts[with_policy] = count_entries(sparse)
        arrays |= RowPolicies.allocate(counts, cells, contents=True)
        assert RowPolicies(arrays).put(with_policy, sparse)
        for name in TARGETS:
            numbers = random.integers(0, 1000, rows) if name == "visits" else random.random(rows)
            dtype = np.int32 if name == "visits" else np.float32
            arrays[name], block[name] = np.split(numbers.astype(dtype), [starts[-1]])
    arrays |= {PACKED_PREFIX + name: array for name, array in block.items()}
    return GameTable(n, arrays, lambda: make_table(n, games, packed, own=own, search=search))


@pytest.fixture
def over_table(trmph_store: Path, monkeypatch: pytest.MonkeyPatch) -> MakeLoader:
    """Return ``over_table(table, **options)``: a loader of the positions in a table."""

    def make(table: GameTable, **options: Any) -> Loader:
        def open_rows(store: Any, given: Any, progress: Any, weights: Any) -> tuple[SelectedRows, GameTable]:
            fields = {*block_fields(1, with_policy=False, targets=TARGETS), "fill", *POLICY_FIELDS}
            members = all_members(given, fields - {"board"}, "a table")
            return SelectedRows(table, members, given), table

        monkeypatch.setattr(loader_module, "open_game_rows", open_rows)
        return Loader(trmph_store, mode="games", **{"batch_size": 50, "seed": 5, **options})

    return make


def compare(ours: Any, plain: Any) -> int:
    """Compare the batches of two iterations, and return their number."""
    number = 0
    for batch, arrays in zip(ours, plain, strict=True):
        expected = as_tensors(arrays)
        assert [*batch] == [*expected]
        for name, tensor in expected.items():
            assert (batch[name].dtype, batch[name].shape) == (tensor.dtype, tensor.shape), name
            assert batch[name].is_contiguous()
            assert batch[name].numpy().tobytes() == tensor.numpy().tobytes(), name
        number += 1
    return number


def compare_epochs(make: Callable[[], Loader], epochs: int = 2) -> None:
    """Compare whole epochs of a ``DeviceLoader`` with those of a loader, with their digests and states."""
    ours, plain = DeviceLoader(make(), "cpu"), make()
    for epoch in range(epochs):
        assert (ours.epoch, ours.batch, len(ours)) == (epoch, 0, len(plain))
        assert compare(ours, plain) == len(plain) > 0
        assert ours.epoch_digest == plain.epoch_digest is not None
        assert ours.state_dict() == plain.state_dict()


TABLES: dict[str, dict[str, Any]] = {
    "games": {"n": 13, "games": 40},
    "games and positions": {"n": 13, "games": 40, "packed": 300, "own": True},
    "search": {"n": 13, "games": 20, "packed": 600, "search": True},
    "positions": {"n": 7, "games": 0, "packed": 400, "search": True},
    "large boards": {"n": 19, "games": 40, "packed": 300, "own": True, "search": True},
    "large boards, only games": {"n": 16, "games": 40},
}


@every_pair(table=TABLES, symmetry=[False, True], final=["zeros", "uniform", "skip"])
def test_every_field_equals_that_of_the_loader(over_table, table, symmetry, final):
    games = make_table(**TABLES[table])
    fields = (*FIELDS, *TARGETS) if "root_value" in games.arrays else FIELDS
    options = {"fields": fields, "symmetry": symmetry, "final_policy": final, "tier_probability": TIERS}
    compare_epochs(lambda: over_table(games, **options))


@every_pair(
    table=TABLES,
    symmetry=[False, True],
    board=["float32", "float16", "uint8", "packed", "fill"],
    planes=[2, 3],
)
def test_every_form_of_the_board_equals_that_of_the_loader(over_table, table, symmetry, board, planes):
    games = make_table(**TABLES[table])
    compare_epochs(lambda: over_table(games, symmetry=symmetry, board=board, planes=planes), epochs=1)


def compare_field(over_table: MakeLoader, table: str, field: str, **options: Any) -> None:
    games = make_table(**TABLES[table])
    compare_epochs(lambda: over_table(games, fields=(field,), **options), epochs=1)


@every_pair(
    table=["search", "large boards"],
    final_policy=["zeros", "uniform"],
    symmetry=[False, True],
    field=[*FIELDS, *TARGETS],
)
def test_each_field_alone_equals_that_of_the_loader(over_table, table, final_policy, symmetry, field):
    compare_field(over_table, table, field, final_policy=final_policy, symmetry=symmetry)


@every_pair(final_policy=["zeros", "uniform"], symmetry=[False, True], field=FIELDS)
def test_each_field_of_games_alone_equals_that_of_the_loader(over_table, final_policy, symmetry, field):
    compare_field(over_table, "games and positions", field, final_policy=final_policy, symmetry=symmetry)


@pytest.mark.parametrize(
    "tiers", [(0.0, 0.0, 0.0, 0.0), (1.0, 1.0, 1.0, 1.0), (5e-324, 0.1, 1 / 3, 1 - 2**-53)]
)
def test_value_weights_equal_those_of_the_loader(over_table, tiers):
    games = make_table(**TABLES["games and positions"])
    compare_epochs(lambda: over_table(games, fields=("value",), tier_probability=tiers))


@every_pair(batch_size=[1, 37, 5000], world=[1, 3], remainder=["short", "pad", "drop"])
def test_ranks_and_remainders_equal_those_of_the_loader(over_table, batch_size, world, remainder):
    games = make_table(5, 15, 50)
    if remainder == "drop" and batch_size == 5000:
        batch_size = 60
    digests = {}
    for rank in range(world):
        options = {"batch_size": batch_size, "remainder": remainder, "fields": ("position_id", "board")}
        given = {"rank": rank, "world_size": world}
        compare_epochs(lambda options=options, given=given: over_table(games, **options, **given))
        ours = DeviceLoader(over_table(games, **options), "cpu", **given)
        assert compare(ours, over_table(games, **options, **given)) == len(ours)
        digests[rank] = ours.epoch_digest
    if remainder != "drop":
        whole = over_table(games, **{**options, "batch_size": batch_size * world})
        for _ in whole:
            pass
        assert combine_digests(digests.values()) == whole.epoch_digest


def test_a_rank_without_positions_delivers_empty_batches(over_table):
    games = make_table(5, 1)
    for board in ("float32", "packed", "fill"):
        options = {"rank": 70, "world_size": 71, "fields": ("board", *FIELDS[1:]), "symmetry": True}
        plain = over_table(games, board=board, **options)
        assert not len(next(iter(plain))["value"])
        compare_epochs(lambda board=board, options=options: over_table(games, board=board, **options))


@pytest.mark.parametrize(
    "selection", [{"where": "value_sample_tier < 2"}, {"newest": 7}, {"final_policy": "skip"}]
)
@pytest.mark.parametrize("shuffle", [False, True])
def test_selections_equal_those_of_the_loader(over_table, shuffle, selection):
    games = make_table(13, 40, 300, search=True)
    compare_epochs(lambda: over_table(games, fields=FIELDS, shuffle=shuffle, **selection))


@pytest.mark.parametrize("selection", [{}, {"final_policy": "skip"}])
def test_a_table_that_is_not_sorted_equals_the_loader(over_table, selection):
    games = make_table(9, 2400, 100)
    assert games.positions > 1 << 16
    options = {"batch_size": 1000, "fields": ("position_id", "move", "board"), "symmetry": True, **selection}
    compare_epochs(lambda: over_table(games, **options), epochs=1)


def test_accelerators_work_on_larger_chunks(over_table, monkeypatch):
    """The batches do not depend on how many are made together."""
    games = make_table(9, 300, 100)
    for rows in ((1, 1), (500, 120), device_loader_module._ACCELERATOR_ROWS):
        monkeypatch.setattr(device_loader_module, "_CPU_ROWS", rows)
        compare_epochs(lambda: over_table(games, fields=("position_id", "value"), remainder="pad"))


@pytest.mark.parametrize("split", ["train", "val", "test"])
@pytest.mark.parametrize("store", ["trmph_store", "odd_store"])
def test_stores_equal_the_loader(store, split, request):
    path = request.getfixturevalue(store)
    options = {"fields": FIELDS, "symmetry": True, "tier_probability": TIERS, "batch_size": 32}
    compare_epochs(lambda: Loader(path, mode="games", split=split, **options))


# --- position -----------------------------------------------------------------------------------------


def test_states_are_interchangeable_after_every_batch(over_table):
    games = make_table(7, 10, 20)

    def make() -> Loader:
        return over_table(games, fields=("position_id", "board"), symmetry=True)

    whole = make()
    for _ in whole:
        pass
    for batches in range(len(whole) + 1):
        ours, plain = DeviceLoader(make(), "cpu"), make()
        assert compare(islice(ours, batches), islice(plain, batches)) == batches
        state = json.loads(json.dumps(ours.state_dict()))
        assert state == plain.state_dict()
        device, host = DeviceLoader(make(), "cpu"), make()
        device.load_state_dict(state)
        host.load_state_dict(state)
        compare(device, host)
        expected = whole.epoch_digest if batches < len(whole) else host.epoch_digest
        assert device.epoch_digest == host.epoch_digest == expected


def test_a_loop_that_is_left_continues(over_table):
    games = make_table(7, 20)
    ours, plain = DeviceLoader(over_table(games), "cpu"), over_table(games)
    for batches in (3, 0, 4):
        compare(islice(ours, batches), islice(plain, batches))
    assert ours.batch == plain.batch == 7
    compare(ours, plain)
    assert ours.epoch == 1
    assert ours.epoch_digest == plain.epoch_digest is not None
    ours.set_epoch(5)
    plain.set_epoch(5)
    compare(ours, plain)
    compare(islice(ours, len(ours)), islice(plain, len(plain)))  # takes exactly all batches
    assert ours.state_dict() == plain.state_dict()
    compare(ours, plain)
    assert ours.epoch == 8


def test_the_epoch_cannot_change_during_an_iteration(over_table):
    ours = DeviceLoader(over_table(make_table(7, 20)), "cpu")
    batches = iter(ours)
    next(batches)
    ours.set_epoch(3)
    with pytest.raises(ConfigError, match="epoch was changed"):
        next(batches)


def test_a_loader_within_an_epoch_is_continued(over_table):
    games = make_table(7, 20)
    started, plain = over_table(games), over_table(games)
    for loader in (started, plain):
        next(iter(loader))
    ours = DeviceLoader(started, "cpu")
    assert compare(ours, plain) == len(plain) - 1
    assert ours.epoch_digest == plain.epoch_digest is not None


def test_batches_are_made_without_waiting_for_the_device(over_table, monkeypatch):
    games = make_table(7, 20, 30, own=True, search=True)
    options = {"fields": (*FIELDS, *TARGETS), "symmetry": True, "tier_probability": TIERS, "newest": 12}
    ours = DeviceLoader(over_table(games, **options), "cpu")

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the host waits for the device")

    batches = iter(ours)
    with monkeypatch.context() as patch:
        for name in ("item", "tolist", "numpy", "nonzero", "__bool__", "__int__", "__float__", "cpu"):
            patch.setattr(torch.Tensor, name, refuse)
        for name in ("tensor", "from_numpy", "nonzero"):
            patch.setattr(torch, name, refuse)
        delivered = [*islice(batches, len(ours))]
    compare(delivered, over_table(games, **options))
    assert next(batches, None) is None
    assert ours.epoch == 1


# --- errors -------------------------------------------------------------------------------------------


def test_a_loader_of_shards_is_refused(over_table, tmp_path):
    loader = over_table(make_table(5, 2))
    loader.games = None
    with pytest.raises(ConfigError, match="requires a loader in games mode"):
        DeviceLoader(loader, "cpu")


@pytest.mark.parametrize("device", ["nonsense", None, 1.5, "cuda:99"])
def test_a_device_that_cannot_be_used_is_refused(over_table, device):
    with pytest.raises(ConfigError, match="device cannot be used"):
        DeviceLoader(over_table(make_table(5, 2)), device)


def test_games_that_do_not_fit_are_refused(over_table, monkeypatch):
    loader = over_table(make_table(5, 2))
    with pytest.raises(BudgetError, match="do not fit into the memory of cuda"):
        device_table_module._check_memory(torch.device("cuda"), 5_000_000, 4_000_000)
    device_table_module._check_memory(torch.device("cuda"), 4_000_000, 4_000_000)
    device, empty = torch.device("cpu"), torch.empty

    def full(shape: Any, **options: Any) -> Any:
        if shape == 1:
            return empty(shape, **options)
        raise RuntimeError("MPS backend out of memory (MPS allocated: 18 GB)\nUse …")

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(BudgetError, match="18 GB") as error:
        DeviceLoader(loader, device)
    assert "1 MB for the games" in str(error.value)
