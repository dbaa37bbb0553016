"""Pickles in the original order: every example equals the example of its source, in all spellings."""

from __future__ import annotations

import copy
import gzip
import itertools
import pickle

import numpy as np
import pytest

from hexdata.convert import ConvertOptions, convert_sources
from hexdata.errors import InputError
from hexdata.export.pickles import PicklesOptions, export_pickles
from hexdata.formats.trmph import write_trmph
from hexdata.store import Store
from tests.legacy_pickles import (
    ENUM_MODULES,
    assert_same,
    example,
    legacy_enum,
    load_pickle,
    one_hot,
    save_pickle,
    top_level,
)

N = 5
pytestmark = pytest.mark.usefixtures("hex_ai")


def tuples(item):
    return item["board"], item["policy"], item["value"]


def games(count, total=4, **changes):
    """Return examples of some games. A change can be a function of the number of the example."""

    # The reader refuses examples that share payloads, so each gets a copy.
    numbered = enumerate(itertools.product(range(1, count + 1), range(total)))
    return [
        example(
            game, ply, total, **{k: v(i) if callable(v) else copy.deepcopy(v) for k, v in changes.items()}
        )
        for i, (game, ply) in numbered
    ]


def save(path, examples, protocol=4, **header):
    return save_pickle(path, top_level(examples, **header), protocol)


def round_trip(folder, **options):
    """Convert the files in ``folder`` and return the folder of the pickles in the original order."""
    asked = ConvertOptions(workers=1, max_reject_rate=0.99, value_convention="blue-is-0")
    convert_sources([folder], folder.parent / "store", asked)
    export_pickles(folder.parent / "store", PicklesOptions(order="original", workers=1, level=1, **options))
    return folder.parent / "store" / "pickles" / "original"


def every(step, one, other):
    """Return a change that is ``one`` for every ``step``-th example and ``other`` for the rest."""
    return lambda i: one if i % step == 0 else other


ODDITIES = {
    "empty": list,
    "no game ids": lambda: games(3, game_id=None),
    "no metadata": lambda: games(3, metadata=...),
    "no player": lambda: games(3, player_to_move=...),
    "player an enum": lambda: games(3, player_to_move=lambda i: legacy_enum("Player")(i % 2)),
    "player of either module": lambda: games(
        3, player_to_move=lambda i: legacy_enum("Player", ENUM_MODULES[i % 2])(i // 2 % 2)
    ),
    "winner an enum": lambda: games(3, winner=legacy_enum("Winner").BLUE),
    "winner number 1": lambda: games(3, winner=1),
    "winner in every way": lambda: games(3, winner=lambda i: ("BLUE", "b", "1", 1, None)[i % 5]),
    "winner absent": lambda: games(3, winner=...),
    "plies None": lambda: games(3, position_in_game=None),
    "totals without plies": lambda: games(3, position_in_game=None, game_id=None),
    "ids sometimes None": lambda: games(3, game_id=every(5, None, (0, 7))),
    "ids of NumPy": lambda: games(3, game_id=lambda i: (np.int64(1), np.int64(i // 4))),
    "numbers sometimes of NumPy": lambda: games(
        3, position_in_game=lambda i: np.int64(i % 4) if i % 3 else i % 4
    ),
    "value int": lambda: games(3, value=0),
    "value float64": lambda: games(3, value=lambda _: np.float64(0.1)),
    "value minus zero": lambda: games(3, value=every(3, -0.0, 0.0)),
    "value past float32": lambda: games(3, value=lambda i: 0.0 if i % 2 else 0.1 + i / 1000),
    "values of blue-is-1": lambda: games(30, value=lambda i: (1, 1.0, 1 - 1e-12)[(i > 3) + (i > 118)]),
    "board fortran": lambda: [e | {"board": np.asfortranarray(e["board"])} for e in games(3)],
    "board in every way": lambda: [
        e | {"board": np.asarray(e["board"], ("f4", "f8", "?", "i2")[i % 4], order="CF"[i % 3 == 1])}
        for i, e in enumerate(games(4))
    ],
    "policy float16 sometimes": lambda: games(3, policy=lambda i: one_hot(3, N, ("f2", "f4")[i % 2])),
    "policy with minus zeros": lambda: games(3, policy=np.array([0, -0.0, 0.5, 0.0] * 6 + [0.5], "f4")),
    "policy bool": lambda: games(3, policy=np.arange(N * N) % 3 == 1),
    "policy float64 with minus zeros": lambda: games(3, policy=np.array([0, -0.0, 0.25, 0, 3] * 5, "f8")),
    "keys in two orders": lambda: [dict(reversed(e.items())) if i % 3 else e for i, e in enumerate(games(3))],
    "metadata in two orders": lambda: [
        e | {"metadata": dict(reversed(e["metadata"].items()))} if i % 3 else e
        for i, e in enumerate(games(3))
    ],
    "more metadata": lambda: games(
        3,
        zoo=lambda i: [1, {"b": None, "a": [0.5, -0.0, True, 10**30]}],
        source_file="f\udce9",
        trmph_game="#5,",
    ),
    "sometimes more metadata": lambda: games(3, zoo=every(4, "x", ...), original_source=every(3, "raw", ...)),
    "numbers beside the board": lambda: [
        e | {"root_value": i / 12, "visits": 800, "temperature": None} for i, e in enumerate(games(3))
    ],
    "numbers in every type": lambda: [
        e | {"value_": (1, 1.0, None, np.float16(1), -0.0, 10**30, float("nan"), np.uint16(1))[i % 8]}
        for i, e in enumerate(games(4))
    ],
    "numbers with names of columns": lambda: [
        e | {"winner": 1, "hexdata:value": 2, "dialect": 3, "move": i} for i, e in enumerate(games(3))
    ],
    "numbers in the metadata": lambda: games(
        3,
        root_value=lambda i: np.float32(i / 12),
        visits=lambda i: (800, np.int32(800), None, ...)[i % 4],
        temperature=lambda i: (1, 0.5, float("inf"), float("-inf"), float("nan"), np.float16(2))[i % 6],
    ),
    "numbers in both": lambda: [
        e | {"visits": np.int16(i)} for i, e in enumerate(games(3, visits=lambda i: float(i)))
    ],
    "tuples of blue-is-1": lambda: [tuples(e | {"value": 1.0}) for e in games(3, total=10)],
    "dicts among tuples": lambda: [e if i % 5 == 2 else tuples(e) for i, e in enumerate(games(4))],
    "everything at once": lambda: [
        tuples(e) if i % 11 == 3 else e
        for i, e in enumerate(
            games(
                20,
                player_to_move=lambda i: (0, None, legacy_enum("Player").RED, ..., np.int16(1))[i % 5],
                winner=lambda i: ("BLUE", legacy_enum("Winner").BLUE, ..., "b")[i % 4],
                value=lambda i: (0, 0.0, np.float32(0), -0.0)[i % 4],
                zoo=lambda i: (..., i, "x")[i % 3],
                position_in_game=lambda i: (i % 4, None, np.uint16(3), ...)[i % 4],
            )
        )
    ],
}  # fmt: skip


def test_every_spelling_survives_the_round_trip(tmp_path):
    made = {name: make() for name, make in ODDITIES.items()}
    paths = {}
    for number, (name, examples) in enumerate(made.items()):
        paths[name] = save(tmp_path / "in" / f"{number:02d}.pkl.gz", examples, 2 + number % 4, number=number)
    back = round_trip(tmp_path / "in")
    for name, path in paths.items():
        assert_same(load_pickle(path), load_pickle(back / "in" / path.name), name)


HEADERS = [
    {"processing_stats": {"valid_games": 3, "all_games": 4, "file_error": None, "a": {"z": 1, "b": [2.5]}}},
    {"odd": (1, np.float32(0.5), float("inf"), -0.0, {2: (3,)}, float("nan"), [], (), {}, np.int64(4))},
    {"looks": {"__tuple__": [1]}, "like": {"__dict__": []}, "ours": {"__float__": "x", "b": 1}},
    {"zulu": 1, "alpha": "\udce9", "Mike": True, "big": 10**40, "minus": -(1 << 31)},
]


def test_the_header_keeps_its_order(tmp_path):
    (tmp_path / "in").mkdir()
    for number, (header, index) in enumerate(itertools.product(HEADERS, (0, 1, 9))):
        items = [("source_file", "x"), *header.items()]
        items.insert(index, ("examples", games(2, number=number)))
        (tmp_path / "in" / f"{number:02d}.pkl.gz").write_bytes(gzip.compress(pickle.dumps(dict(items))))
    back = round_trip(tmp_path / "in") / "in"
    for path in (tmp_path / "in").iterdir():
        assert_same(load_pickle(path), load_pickle(back / path.name))


def test_rejected_examples_are_left_out_and_the_header_is_kept(tmp_path):
    good = games(3, winner=every(4, "b", "BLUE"))
    bad = [{"board": 1}, *good[:5], example(0, 0, board=np.full((2, N, N), 2.0)), *good[5:], 7]
    path = save(tmp_path / "in" / "a.pkl.gz", bad, processing_stats={"examples_generated": len(bad)})
    back = load_pickle(round_trip(tmp_path / "in") / "in" / "a.pkl.gz")
    assert_same(load_pickle(path) | {"examples": good}, back)


def test_content_that_cannot_be_written_is_named(tmp_path):
    save(tmp_path / "in" / "a.pkl.gz", games(2), odd=b"bytes")
    with pytest.raises(InputError, match=r"a\.pkl\.gz.*bytes"):
        round_trip(tmp_path / "in")
    store = Store.open(tmp_path / "store")
    assert "pickles-original" not in store.manifest.stages
    assert not list((tmp_path / "store").rglob("*.pkl.gz"))


# Raw games


def test_raw_games_are_written_like_the_output_of_the_legacy_tool(tmp_path):
    lines = "# a comment\n#5,a1b1a2b2a3b3a4b4a5 b\n\n#5,a1zz b\n#5,c1a1 r\n"
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "raw.trmph").write_text(lines)
    (tmp_path / "in" / "empty.trmph").write_text("")
    back = round_trip(tmp_path / "in") / "in"
    assert sorted(path.name for path in back.iterdir()) == ["empty_processed.pkl.gz", "raw_processed.pkl.gz"]
    assert load_pickle(back / "empty_processed.pkl.gz")["examples"] == []
    content = load_pickle(back / "raw_processed.pkl.gz")
    assert list(content) == ["examples", "source_file", "processing_stats", "processed_at"]
    assert content["source_file"] == "in/raw.trmph"
    stats = content["processing_stats"]
    assert (stats["all_games"], stats["valid_games"], stats["skipped_games"]) == (3, 2, 1)
    assert stats["examples_generated"] == len(content["examples"]) == 13
    last = content["examples"][-1]
    assert list(last) == ["board", "policy", "value", "player_to_move", "metadata"]
    assert (last["policy"], last["value"], last["player_to_move"]) == (None, 1.0, 0)
    assert last["metadata"] == {
        "game_id": (1, 4),
        "position_in_game": 2,
        "total_positions": 3,
        "value_sample_tier": None,
        "winner": "RED",
    }
    assert last["board"][0, 0, 2] == last["board"][1, 0, 0] == 1


def test_equal_names_are_made_unique(tmp_path):
    for number, name in enumerate(["a.pkl", "a.pkl.gz", "deep/a.pkl.gz"]):
        save(tmp_path / "in" / name, games(1), number=number)
    write_trmph(tmp_path / "in" / "b.trmph", [(np.array([0, 1], np.uint16), 0)], N)
    save(tmp_path / "in" / "b_processed.pkl.gz", games(1), number=9)
    back = round_trip(tmp_path / "in") / "in"
    names = sorted(path.relative_to(back).as_posix() for path in back.rglob("*.gz"))
    assert names == [
        *(f"a.source-{i}.pkl.gz" for i in range(2)),
        *(f"b_processed.source-{i}.pkl.gz" for i in (2, 3)),
        "deep/a.pkl.gz",
    ]
