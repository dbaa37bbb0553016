"""The options ``--salvage`` and ``--truncate-repeats``."""

from __future__ import annotations

import gzip
import json
import pickle
import zlib

import numpy as np
import pytest

from hexdata.board import game_hash
from hexdata.errors import FormatError, RejectRateError
from hexdata.formats import open_source
from hexdata.verify import check_round_trip, verify_store

# Salvage.


@pytest.fixture
def damaged(make):
    """Return ``damaged(keep)``: a v2 file of 30 games, truncated to a share of its bytes."""

    def write(keep, name="a.pkl.gz", games=30):
        path = make.v2(name, make.games(games))
        content = path.read_bytes()
        return make.write_bytes(name, content[: int(keep * len(content))])

    return write


def read(path, **options):
    with open_source(path, **options) as reader:
        batches = list(reader.batches())
    return reader, sum(batch.records for batch in batches), [b.positions for b in batches]


def test_without_salvage_the_file_is_rejected(damaged, convert, make):
    damaged(0.7)
    make.v2("b.pkl.gz", make.games(9, start=50))
    store = convert(make.folder, max_reject_rate=1.0)
    assert store.result.failed_files.keys() == {"legacy/a.pkl.gz"}
    assert store.result.reasons == {"truncated": 1}
    assert store.source("a.pkl.gz")["salvaged"] is None


def test_complete_examples_before_the_damage_are_kept(damaged, convert, make):
    total = sum(len(game) for game in make.dicts(make.games(30)))
    damaged(0.7)
    store = convert(make.folder, salvage=True)
    source = store.source("a.pkl.gz")
    assert source["salvaged"] is True
    assert 0.3 * total < source["positions"] < total
    assert (source["records"], source["rejected"]) == (source["positions"] + 1, 1)
    (note,) = json.loads(source["notes"])
    assert note.startswith(f"salvaged: the {source['positions']} examples before the damage (byte ")
    (rejected,) = store.rows("rejected")
    assert (rejected["record"], rejected["reason"]) == (source["positions"], "truncated")
    assert verify_store(store.path).ok


def test_a_game_cut_by_the_end_of_a_file_has_missing_positions(damaged, convert, make):
    damaged(0.7)
    games = convert(make.folder, salvage=True).games()
    assert ["missing-positions" in game["flags"] for game in games] == [False] * (len(games) - 1) + [True]


@pytest.mark.parametrize("protocol", [0, 1, 2, 4, 5])
@pytest.mark.parametrize("layout", ["dicts", "tuples"])
def test_a_cut_at_any_byte_keeps_the_examples_before_it(make, protocol, layout):
    """Cuts at each byte of two examples: the count increases exactly where an example ends."""
    examples = [example for game in make.dicts(make.games(1)) for example in game]
    examples = make.tuples(examples) if layout == "tuples" else examples
    ends = [ends_of(examples, protocol, count) for count in (3, 4, 5)]
    content = pickle.dumps({"examples": examples}, protocol)
    counts = []
    stops = {*range(ends[0] + 2, ends[2] + 3, 29), *range(ends[1] - 7, ends[1] + 4)}
    for stop in sorted(stops):
        path = make.write_bytes("a.pkl", content[:stop])
        counts.append((stop, read(path, salvage=True)[1]))
    assert {count for _, count in counts} <= {3, 4, 5}
    assert [count for _, count in counts] == sorted(count for _, count in counts)
    assert all(count == 3 for stop, count in counts if stop < ends[1] - 5)
    assert all(count >= 4 for stop, count in counts if stop > ends[1] + 2)


def ends_of(examples, protocol, count):
    """Return the offset in the pickle where the first ``count`` examples end, within a memo opcode.

    Two pickles that differ only after these examples have the same bytes before that offset, except for the
    length of a frame.
    """
    one = pickle.dumps({"examples": examples}, protocol)
    other = pickle.dumps({"examples": [*examples[:count], 7, *examples[count:]]}, protocol)
    frame = 11
    return next(at for at in range(frame, len(one)) if one[at] != other[at])


def test_all_decompressed_examples_are_kept(damaged):
    """A truncated gzip yields as many examples as a plain file of the bytes that can be decompressed."""
    path = damaged(0.8, games=200)
    plain = path.with_suffix("")
    plain.write_bytes(zlib.decompressobj(31).decompress(path.read_bytes()))
    (reader, records, batches), (_, expected, same) = read(path, salvage=True), read(plain, salvage=True)
    assert reader.damage.code == "truncated"
    assert records == expected > 1000
    assert batches == same


def test_corruption_keeps_the_examples_before_it(make, convert):
    """The third stored block of an uncompressed gzip has an invalid length."""
    examples = [example for game in make.dicts(make.games(40)) for example in game]
    raw = pickle.dumps({"examples": examples, "noise": "x" * 100_000}, 4)
    content, at, sizes = bytearray(gzip.compress(raw, 0)), 10, []
    for _ in range(3):
        sizes.append(int.from_bytes(content[at + 1 : at + 3], "little"))
        at += 5 + sizes[-1]
    content[at - sizes[-1] - 1] ^= 0xFF
    path = make.write_bytes("a.pkl.gz", bytes(content))
    plain = make.write_bytes("plain", raw[: sum(sizes[:2])])
    reader, records, batches = read(path, salvage=True)
    assert reader.damage.code == "corrupt-gzip"
    _, expected, same = read(plain, salvage=True)
    assert records == expected > 100
    assert batches == same
    plain.unlink()
    assert convert(make.folder, salvage=True).result.reasons == {"corrupt-gzip": 1}


def test_a_wrong_checksum_loses_no_examples(make, convert):
    path = make.v2("a.pkl.gz", make.games(5))
    content = path.read_bytes()
    make.write_bytes("a.pkl.gz", content[:-8] + bytes(4) + content[-4:])
    store = convert(make.folder, salvage=True, max_reject_rate=0.1)
    assert len(store.games()) == 5
    assert store.result.reasons == {"corrupt-gzip": 1}


def test_a_truncated_shuffled_file_is_still_treated_as_shuffled(make, convert):
    examples = [example for game in make.dicts(make.games(30)) for example in game]
    order = np.random.default_rng(2).permutation(len(examples))
    path = make.write("a.pkl.gz", [examples[i] for i in order], shuffling_stats={"num_buckets": 1})
    make.write_bytes("a.pkl.gz", path.read_bytes()[:-2000])
    assert len(convert(make.folder, salvage=True).games()) == 30


def test_complete_lines_of_trmph_are_kept(make, convert):
    lines = "".join(f"#5,{'abcde'[i % 5]}1b2c3d4e5a2b3c4 b\n" for i in range(5000))
    make.write_bytes("a.trmph", gzip.compress(lines.encode())[:-40])
    source = convert(make.folder, salvage=True, max_reject_rate=0.5).source("a.trmph")
    assert source["salvaged"] is True
    assert source["positions"] > 9 * 3000


def test_a_file_without_complete_examples_is_rejected(damaged, make, convert):
    damaged(0.02)
    make.v2("b.pkl.gz", make.games(9, start=50))
    store = convert(make.folder, salvage=True, max_reject_rate=1.0)
    assert store.result.failed_files.keys() == {"legacy/a.pkl.gz"}
    assert store.source("a.pkl.gz")["salvaged"] is False


class Evil:
    def __reduce__(self):
        return (print, ("run",))


@pytest.mark.parametrize("content", [{"examples": [Evil()]}, {"examples": 3}, [1, 2]])
def test_unsafe_and_foreign_files_are_never_salvaged(make, content):
    path = make.write_bytes("a.pkl.gz", gzip.compress(pickle.dumps(content)))
    with pytest.raises(FormatError) as caught:
        read(path, salvage=True)
    assert caught.value.code in {"unsafe-global", "unsafe-name", "unsafe-pickle", "unknown-layout"}


def test_a_damaged_file_of_the_store_can_be_salvaged_later_and_once(damaged, make, convert):
    damaged(0.7)
    make.v2("b.pkl.gz", make.games(9, start=50))
    convert(make.folder, max_reject_rate=1.0)
    before = convert(make.folder).files()
    later = convert(make.folder, salvage=True)
    assert later.result.sources == 1
    assert later.result.positions > 100
    after = later.files()
    assert {file_name: after[file_name] for file_name in before if file_name != "manifest.json"} == {
        file_name: content for file_name, content in before.items() if file_name != "manifest.json"
    }
    assert convert(make.folder, salvage=True).result.sources == 0
    assert verify_store(later.path).ok


def test_another_setting_reads_damaged_files_again_and_the_same_one_does_not(damaged, make, convert, request):
    damaged(0.7)
    whole = make.v2("b.pkl.gz", make.games(9, start=50))
    with pytest.raises(RejectRateError):
        convert(make.folder)
    store = convert(make.folder, salvage=True)
    fresh = convert(make.folder, store="fresh", salvage=True)
    assert store.files() == fresh.files()
    assert whole.exists()


# Truncation before repeated moves.


def with_repeat(make, at=6, of=1, tail=3, number=0):
    """Return v2 examples and moves of a game whose move at ply ``at`` is on the cell of ply ``of``."""
    moves, winner = make.games(1, start=number)[0]
    repeated = [*moves[:at].tolist(), int(moves[of]), *moves[at : at + tail].tolist()]
    planes = np.zeros((2, make.n * make.n), np.float32)
    examples = []
    for ply in range(len(repeated) + 1):
        examples.append(
            {
                "board": planes.reshape(2, make.n, make.n).copy(),
                "policy": make.policy(repeated[ply]) if ply < len(repeated) else None,
                "value": float(winner),
                "metadata": {
                    "game_id": (0, 500 + number),
                    "position_in_game": ply,
                    "total_positions": len(repeated) + 1,
                    "value_sample_tier": None,
                    "winner": ("BLUE", "RED")[winner],
                },
            }
        )
        if ply < len(repeated):
            planes[:, repeated[ply]] = 0
            planes[ply % 2, repeated[ply]] = 1
    return examples, repeated


@pytest.fixture
def repeating(make):
    """Write a file with one repeating game among sound ones, in a layout; return its moves."""

    def write(layout):
        game, moves = with_repeat(make)
        others = [e for one in make.dicts(make.games(60, start=5)) for e in one]
        examples = [*others[:40], *game, *others[40:]] if layout == "shuffled" else [*game, *others]
        if layout == "tuples":
            make.write("a.pkl.gz", make.tuples(examples))
        elif layout == "shuffled":
            order = np.random.default_rng(1).permutation(len(examples))
            for number, part in enumerate(np.array_split(order, 2)):
                stats = {"num_buckets": 2, "source_files": ["x"]}
                make.write(f"{number}.pkl.gz", [examples[i] for i in part], shuffling_stats=stats)
        else:
            make.write("a.pkl.gz", examples)
        return moves, len(examples)

    return write


@pytest.mark.parametrize("layout", ["tuples", "dicts", "shuffled"])
def test_games_are_cut_before_the_repeated_move(repeating, make, convert, layout):
    moves, examples = repeating(layout)
    store = convert(make.folder, truncate_repeats=True)
    (game,) = [game for game in store.games() if "truncated" in game["flags"]]
    assert (game["total_positions"], game["positions"], game["moves"]) == (7, 7, moves[:6])
    assert game["game_hash"] == game_hash(moves[:6], make.n)
    assert not {"repeated-move", "policy-on-occupied", "impossible-stones", "tier-counts"} & set(
        game["flags"]
    )
    rows = [row for row in store.rows("positions") if row["game_id"] == game["game_id"]]
    rows.sort(key=lambda row: row["position_in_game"])
    assert [row["move"] for row in rows] == [*moves[:6], None]
    assert {row["total_positions"] for row in rows} == {7}
    assert len({row["value"] for row in rows}) == 1
    assert store.result.reasons == {"after-repeat": 4}
    assert store.result.records == examples == store.result.positions + 4
    assert verify_store(store.path).ok


@pytest.mark.parametrize("layout", ["tuples", "dicts", "shuffled"])
def test_nothing_is_cut_by_default(repeating, make, convert, layout):
    moves, examples = repeating(layout)
    store = convert(make.folder)
    assert store.result.positions == examples
    (game,) = [game for game in store.games() if "repeated-move" in game["flags"]]
    assert game["moves"] == moves
    assert "truncated" not in game["flags"]


def test_cutting_leaves_other_games_as_they_are(repeating, make, convert):
    repeating("dicts")
    plain, cut = convert(make.folder), convert(make.folder, store="cut", truncate_repeats=True)
    for one, other in zip(plain.games()[1:], cut.games()[1:], strict=True):
        assert one == other


def test_requested_cuts_do_not_count_as_rejected(make, convert):
    make.write("a.pkl.gz", make.tuples(with_repeat(make, at=2, tail=5)[0]))
    store = convert(make.folder, truncate_repeats=True, max_reject_rate=0.0, value_convention="blue-is-1")
    assert store.result.reasons == {"after-repeat": 6}


def test_the_setting_is_recorded_and_decides_what_is_reused(repeating, make, convert):
    repeating("tuples")
    make.write_bytes("broken.pkl.gz", b"\x1f\x8b" + bytes(5000))
    with pytest.raises(RejectRateError):
        convert(make.folder)  # leaves a spool with the uncut game
    store = convert(make.folder, truncate_repeats=True, max_reject_rate=1.0)
    assert store.result.reasons["after-repeat"] == 4
    fresh = convert(make.folder, store="fresh", truncate_repeats=True, max_reject_rate=1.0)
    assert store.files() == fresh.files()
    stage = json.loads((store.path / "manifest.json").read_text())["stages"]["convert"]
    assert (stage["truncate_repeats"], stage["salvage"]) == (True, False)
    make.v2("later.pkl.gz", make.games(3, start=900))
    assert convert(make.folder).result.sources == 1, "a later run may be asked otherwise"


@pytest.mark.parametrize("layout", ["tuples", "dicts", "shuffled"])
def test_a_cut_game_is_exported_with_its_original_values(repeating, make, convert, layout):
    """With its last move and its original length."""
    repeating(layout)
    store = convert(make.folder, truncate_repeats=True)
    checked = check_round_trip(store.path, [make.folder])
    assert [source.detail for source in checked if not (source.ok and source.checked)] == []
