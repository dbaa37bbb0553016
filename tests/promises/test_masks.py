"""Policies that are not to be trained: every way to deliver positions gives what the sources state.

The policies and weights are those of the generator, for every kind of file that states masks.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest

from hexdata import (
    ConvertOptions,
    ExportOptions,
    Loader,
    PositionDataset,
    ShuffleOptions,
    convert_sources,
    export_shards,
    shuffle_store,
)
from hexdata.export.pickles import PicklesOptions, export_pickles
from hexdata.live import LiveLoader
from hexdata.loader import Mixture
from hexdata.verify import check_round_trip
from tests.kit.loaders import LOADERS, make_store
from tests.kit.searched import N, examples_of, some_games, to_sidecar, to_trmph
from tests.legacy_pickles import install_enums, load_pickle, save_pickle, top_level

GAMES = some_games(20)
FIELDS = ("board", "policy", "policy_mask", "policy_weight", "position_in_game")
BATCH = 12


def write_pickles(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        install_enums(patch)
        save_pickle(folder / "a_processed.pkl.gz", top_level(examples_of(GAMES)))


def write_sidecar(folder: Path) -> None:
    (folder / "a.trmph").write_text(to_trmph(GAMES))
    (folder / "a.provenance.jsonl").write_text(to_sidecar(GAMES))


SOURCES: dict[str, Callable[[Path], object]] = {"pickles": write_pickles, "sidecar": write_sidecar}
"""Functions that write the games, by kind of file."""


@pytest.fixture(scope="module", params=SOURCES)
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with shards; its sources are in the folder ``in`` beside it."""
    folder = tmp_path_factory.mktemp("masks")
    (folder / "in").mkdir()
    SOURCES[request.param](folder / "in")
    store = folder / "store"
    convert_sources([folder / "in"], store, ConvertOptions(workers=1, val=0, test=0))
    shuffle_store(store, ShuffleOptions(seed=1, threads=1))
    export_shards(store, ExportOptions(shard_size=64, block_size=16, workers=1))
    return store


def expected_of(final_policy: str = "zeros") -> dict[bytes, tuple[bytes, bool, float]]:
    """Return policy, mask and weight by board, for all positions but the first ones of games."""
    found = {}
    for game in GAMES:
        for ply in range(1, len(game.moves) + 1):
            policy, final, weight = game.policy(ply), ply == len(game.moves), game.weight(ply)
            if final and final_policy == "uniform":
                policy = np.full(N * N, 1 / (N * N), "f4")
            found[game.board(ply).tobytes()] = policy.tobytes(), not final and weight > 0, weight
    return found


def check(batches: Iterable[Any], *, whole: bool = True, final_policy: str = "zeros") -> None:
    """Check batches, and that they contain every position if they are a whole epoch."""
    expected, seen = expected_of(final_policy), set()
    for batch in batches:
        arrays = {name: np.asarray(batch[name]) for name in FIELDS}
        assert arrays["policy_weight"].dtype == np.float32
        for row in np.flatnonzero(arrays["position_in_game"] > 0).tolist():
            board = arrays["board"][row].tobytes()
            found = arrays["policy"][row].tobytes(), arrays["policy_mask"][row], arrays["policy_weight"][row]
            assert found == expected[board]
            seen.add(board)
    assert seen == expected.keys() if whole else seen


def _mixture(store: Path) -> Any:
    loaders = [Loader(store, mode=mode, fields=FIELDS, seed=1) for mode in ("games", "exact")]
    return Mixture(loaders, (1, 1), batch_size=BATCH, seed=2)


def _dataset(store: Path) -> Any:
    dataset = PositionDataset(store, fields=FIELDS)
    return [dataset.batch([*range(len(dataset))])]


def _workers(store: Path) -> Any:
    from hexdata.torch import TorchLoader

    loader = Loader(store, mode="exact", batch_size=BATCH, fields=FIELDS)
    return TorchLoader(loader, num_workers=1, multiprocessing_context="spawn")


def _device(store: Path) -> Any:
    from hexdata.torch import DeviceLoader

    return DeviceLoader(Loader(store, mode="games", batch_size=BATCH, fields=FIELDS), "cpu")


def _webdataset(store: Path) -> Any:
    from hexdata.webdataset import LoaderPipeline

    return LoaderPipeline(Loader(store, mode="exact", batch_size=BATCH, fields=FIELDS))


def _live(store: Path) -> Any:
    options: dict[str, Any] = {"batch_size": BATCH, "fields": FIELDS, "watch": False, "reservoir": 50}
    with LiveLoader(store.parent / "in", **options) as loader:
        yield from itertools.islice(loader, 100)


WAYS: dict[str, Callable[[Path], Any]] = {
    **{
        mode: lambda store, mode=mode: Loader(store, mode=mode, batch_size=BATCH, fields=FIELDS)
        for mode in ("games", "exact", "stream")
    },
    "mixture": _mixture,
    "dataset": _dataset,
    "workers": _workers,
    "device": _device,
    "webdataset": _webdataset,
    "live": _live,
}
SAMPLED = ("mixture", "live")
"""The ways that need not deliver every position."""


@pytest.mark.parametrize("way", WAYS)
def test_every_way_delivers_policies_masks_and_weights(store: Path, way: str) -> None:
    if way in ("workers", "device", "webdataset"):
        pytest.importorskip("torch")
    check(WAYS[way](store), whole=way not in SAMPLED)


@pytest.mark.parametrize("mode", ["games", "exact", "stream"])
def test_a_uniform_final_policy_leaves_masked_policies_zero(store: Path, mode: Any) -> None:
    check(Loader(store, mode=mode, fields=FIELDS, final_policy="uniform"), final_policy="uniform")


def test_a_policy_without_its_weight_is_zero_where_it_is_masked(store: Path) -> None:
    for mode in ("games", "exact", "stream"):
        (alone,) = Loader(store, mode=mode, batch_size=1000, shuffle=False, fields=("policy",))  # type: ignore[arg-type]
        (batch,) = Loader(store, mode=mode, batch_size=1000, shuffle=False, fields=FIELDS)  # type: ignore[arg-type]
        assert alone["policy"].tobytes() == batch["policy"].tobytes()
        assert not alone["policy"][batch["policy_weight"] == 0].any()


TRAINED = sum(game.weight(ply) > 0 for game in GAMES for ply in range(len(game.moves) + 1))


def test_conditions_can_ask_for_the_weight(store: Path, tmp_path: Path) -> None:
    for mode in ("games", "exact"):
        loader = Loader(store, mode=mode, where="policy_weight > 0", fields=FIELDS)  # type: ignore[arg-type]
        assert loader.positions == TRAINED
        assert all((batch["policy_weight"] > 0).all() for batch in loader)
    with duckdb.connect(str(store / "hexdata.duckdb"), read_only=True) as con:
        assert con.sql("SELECT count(*) FROM positions WHERE policy_weight > 0").fetchall() == [(TRAINED,)]


@pytest.mark.parametrize("order", ["original", "shuffled"])
def test_pickles_do_not_train_masked_policies(store: Path, tmp_path: Path, order: str) -> None:
    """The legacy trainer trains a policy unless it is None, zero, or the reader finds a mask."""
    copy = shutil.copytree(store, tmp_path / "store")
    export_pickles(copy, PicklesOptions(order=order, workers=1, level=1))
    weights = {game.board(ply).tobytes(): game.weight(ply) for game in GAMES for ply in range(4)}
    found = []
    with pytest.MonkeyPatch.context() as patch:
        install_enums(patch)
        for path in (copy / "pickles" / order).rglob("*.pkl.gz"):
            found += load_pickle(path)["examples"]
        results = check_round_trip(copy, [store.parent / "in"])
    assert [result.ok for result in results] == [True]
    masked = 0
    for example in found:
        trained = example["policy"] is not None and example["metadata"].get("policy_target_trainable", True)
        weight = weights.get(example["board"].tobytes())
        if weight is not None and example["board"].any():
            assert trained == (weight > 0)
            masked += not trained
    assert masked > 5


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize("name", [name for name, kind in LOADERS.items() if kind.make is None])
def test_a_store_without_masks_delivers_the_weight_one(plain: Path, name: str) -> None:
    for batch in LOADERS[name](plain, fields=("position_id", "policy_weight")):
        assert batch["policy_weight"].dtype == np.float32
        assert (batch["policy_weight"] == 1).all()
