"""Tests that delivered batches stay the same, for generated games, unusual legacy files and real games.

The digests were made when boards were replayed move by move. Other digests would change every live run.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from hexdata.batch import FIELDS, BatchOptions
from hexdata.demo.games import make_games
from hexdata.formats.trmph import write_trmph
from hexdata.live import LiveLoader, LiveOptions
from tests.live.legacy_layouts import LAYOUTS, Layouts

REAL_DATA = Path(__file__).parents[3] / "shared" / "data"
BATCH = BatchOptions(fields=FIELDS, planes=3, symmetry=True, tier_probability=(1.0, 0.5, 0.5, 0.0))

pytestmark = pytest.mark.usefixtures("no_thread_survives")


def delivered(directory: Path, positions_per_game: int | str) -> str:
    """Return a digest of all batches of two passes over the games of a directory."""
    options = LiveOptions(
        seed=4, val=0.0, test=0.0, pool_size=4000, reservoir=700, batch_size=128, watch=False, batch=BATCH
    )
    options = options.with_stage("ShufflingChunkPool", passes=2, game_batch_size=40)
    options = options.with_stage("ChunkUnpacker", positions_per_game=positions_per_game)
    digest, positions = hashlib.sha256(), 0
    with LiveLoader(directory, config=options) as loader:
        for batch in loader:
            positions += len(batch["value"])
            for name in sorted(batch):
                digest.update(name.encode() + str(batch[name].dtype).encode() + batch[name].tobytes())
    return f"{positions} {digest.hexdigest()[:16]}"


GENERATED = {
    (5, 6): "720 d970ecee0ab96a31",
    (13, 6): "720 0da35a32fd15f090",
    (13, "all"): "8526 7b4da499251b987e",
    (19, 6): "720 82eb2ac3acc2212d",
    (19, "all"): "14698 20203668afd2119e",
}


@pytest.mark.parametrize(("board_size", "positions_per_game"), GENERATED)
def test_batches_of_generated_games_are_pinned(tmp_path, board_size, positions_per_game):
    write_trmph(tmp_path / "games.trmph", make_games(60, 1, board_size), board_size)
    assert delivered(tmp_path, positions_per_game) == GENERATED[board_size, positions_per_game]


UNUSUAL = {
    "plain": "440 f4e885d19926e70f",
    "tuples": "440 a100d8b929e72534",
    "without_ids": "440 f4e885d19926e70f",
    "without_players": "440 f4e885d19926e70f",
    "red_began": "298 745a695d91f83954",
    "odd_games": "362 26b4522347ba3739",
    "shuffled_with_ids": "438 1b8611fb159761ca",
    "text": "728 2b1fb983e6c0b929",
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_batches_of_unusual_files_are_pinned(tmp_path, layout):
    """The layouts contain incomplete games, games that red began, dense policies and wrong labels."""
    getattr(Layouts(), layout)(tmp_path)
    assert delivered(tmp_path, "all") == UNUSUAL[layout]


REAL = {
    "legacy/v2/neurohex_00_processed.pkl.gz": "11928 323d79f1809c58e0",
    "legacy/variants": "2448 c8c27b71819ce410",
    "trmph/fusekipedia_19x19.trmph": "23172 3c66fe676e83da84",
}


@pytest.mark.skipif(not REAL_DATA.is_dir(), reason="no real data beside the repository")
@pytest.mark.parametrize("path", REAL)
def test_batches_of_real_games_are_pinned(tmp_path, path):
    (tmp_path / "games").mkdir()
    source = REAL_DATA / path
    for file in [source] if source.is_file() else sorted(source.rglob("*.pkl.gz")):
        (tmp_path / "games" / f"{file.parent.name}-{file.name}").symlink_to(file)
    assert delivered(tmp_path / "games", 6) == REAL[path]
