"""Order of the input, measured for stores of pickles in known orders, with and without ids."""

from __future__ import annotations

import gzip
import pickle
import random
from pathlib import Path
from typing import Any

import pytest

from hexdata.convert import ConvertOptions, convert_sources
from hexdata.demo import DemoOptions, make_legacy
from hexdata.info import store_info
from hexdata.quality import InputOrder
from tests.kit.command_line import hexdata_run

BUFFER = 1_024
SHARED = Path(__file__).parents[3] / "shared" / "data" / "legacy" / "variants" / "shuffled-2025-09-08"


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Some seven thousand examples, game after game, with ids."""
    folder = tmp_path_factory.mktemp("demo")
    make_legacy(folder, DemoOptions(games=400))
    found = []
    for path in sorted((folder / "v2-dicts").iterdir()):
        with gzip.open(path) as file:
            found += pickle.load(file)["examples"]
    return found


def in_windows(examples: list[dict[str, Any]], size: int, rng: random.Random) -> list[dict[str, Any]]:
    """Return examples as a shuffle buffer emits them."""
    buffer, emitted = [], []
    for example in examples:
        buffer.append(example)
        if len(buffer) > size:
            emitted.append(buffer.pop(rng.randrange(size)))
    return emitted + rng.sample(buffer, len(buffer))


def without_ids(examples: list[dict[str, Any]], lost: float, rng: random.Random) -> list[dict[str, Any]]:
    """Return examples without ids and with some missing, so that no game can be put together."""
    kept = [example for example in examples if rng.random() >= lost]
    return [{**each, "metadata": {**each["metadata"], "game_id": None}} for each in kept]


def write(folder: Path, examples: list[dict[str, Any]], *, shuffled: bool = True, files: int = 4) -> Path:
    """Write examples into files; those of a shuffle say so."""
    folder.mkdir(exist_ok=True)
    for number in range(files):
        part = examples[number * len(examples) // files : (number + 1) * len(examples) // files]
        stats = {"num_buckets": files, "bucket_id": number, "source_files": ["a"]}
        content = {"examples": part, **({"shuffling_stats": stats} if shuffled else {})}
        name = f"{'shuffled' if shuffled else 'games'}_{number:04d}.pkl.gz"
        (folder / name).write_bytes(gzip.compress(pickle.dumps(content), 1))
    return folder


def order_of(sources: Path) -> InputOrder:
    store = sources.with_name(f"store of {sources.name}")
    convert_sources([sources], store, ConvertOptions(workers=1))
    found = store_info(store).input_order
    assert found is not None
    return found


@pytest.mark.parametrize("ids", [True, False], ids=["ids", "no ids"])
@pytest.mark.parametrize("kind", ["games", "windows", "random"])
def test_the_order_of_the_input_is_recognized(
    examples: list[dict[str, Any]], tmp_path: Path, kind: str, ids: bool
) -> None:
    rng = random.Random(kind)
    ordered = {
        "games": lambda: examples,
        "windows": lambda: in_windows(examples, BUFFER, rng),
        "random": lambda: rng.sample(examples, len(examples)),
    }[kind]()
    ordered = ordered if ids else without_ids(ordered, 0.3, rng)
    found = order_of(write(tmp_path / "in", ordered, shuffled=kind != "games"))
    assert found.kind == kind
    assert found.by_boards is not ids
    assert found.ratio is not None
    if kind == "windows":
        # A buffer of B positions is as dense as windows of 2 B.
        assert found.width == pytest.approx(2 * BUFFER * len(ordered) / len(examples), rel=0.25)
    assert (found.ratio > 1.5) == (kind != "random")
    assert found.value_correlation is not None
    assert (found.value_correlation > 0.9) == (kind == "games")


def between_games(examples: list[dict[str, Any]], share: float) -> int:
    """Return the index of the first example of a game, after this share of all."""
    games = [each["metadata"]["game_id"] for each in examples]
    return next(i for i in range(int(len(games) * share), len(games)) if games[i] != games[i - 1])


@pytest.mark.parametrize("ids", [True, False], ids=["ids", "no ids"])
def test_folders_that_were_shuffled_separately(
    examples: list[dict[str, Any]], tmp_path: Path, ids: bool
) -> None:
    """A small folder with its own games is no window of the whole."""
    rng, at = random.Random(3), between_games(examples, 0.9)
    (tmp_path / "in").mkdir()
    for name, part in (("train", examples[:at]), ("val", examples[at:])):
        shuffled = rng.sample(part, len(part))
        write(tmp_path / "in" / name, shuffled if ids else without_ids(shuffled, 0.3, rng), files=2)
    assert order_of(tmp_path / "in").kind == "random"


def test_folders_of_different_orders_are_named(examples: list[dict[str, Any]], tmp_path: Path) -> None:
    rng, at, last = random.Random(5), between_games(examples, 0.5), between_games(examples, 0.8)
    (tmp_path / "in").mkdir()
    write(tmp_path / "in" / "good", rng.sample(examples[:at], at))
    write(tmp_path / "in" / "bad", in_windows(examples[at:last], 300, rng))
    write(tmp_path / "in" / "raw", examples[last:], shuffled=False)
    found = order_of(tmp_path / "in")
    assert found.kind == "mixed"
    assert "good: as good as random" in found.text
    assert "bad: a shuffle of windows" in found.text
    assert "raw: game after game" in found.text
    bad = write(tmp_path / "alone", in_windows(examples, 300, rng))
    assert order_of(bad).width == pytest.approx(600, rel=0.3), "narrow windows"
    # What it means and what to do is said too, as long as the store is not shuffled.
    for shuffled in (False, True):
        for command in ("info", "verify"):
            said = " ".join(hexdata_run(command, tmp_path / "store of alone").out.split())
            assert ("or shuffle the store" in said) is not shuffled
        assert hexdata_run("shuffle", tmp_path / "store of alone").status == 0


@pytest.mark.skipif(not SHARED.exists(), reason="needs files of the legacy tool")
def test_files_that_the_legacy_tool_shuffled(tmp_path: Path) -> None:
    (tmp_path / "in").symlink_to(SHARED)
    found = order_of(tmp_path / "in")
    assert found.kind == "random"
    assert found.files == pytest.approx(found.files_expected, rel=0.05)


def test_few_positions_cannot_be_judged(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "games.trmph").write_text("#5,a1b2c3d4e5 b\n")
    assert order_of(tmp_path / "in").kind == "unknown"
    facts = hexdata_run("info", tmp_path / "store of in", "--json").facts
    assert facts["input_order"]["kind"] == "unknown"
