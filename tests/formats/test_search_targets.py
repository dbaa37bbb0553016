"""Policies of a search and masks of the legacy project since March 2026, in pickles and in sidecars of TRMPH.

What must come out is generated. ``tests/promises/test_masks.py`` tests how they are delivered.
"""

from __future__ import annotations

import base64
import copy
import gzip
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from hexdata import ConvertOptions, convert_sources
from hexdata.errors import FormatError, InputError, RejectRateError, SourceChangedError
from hexdata.export.pickles import PicklesOptions, export_pickles
from hexdata.verify import check_round_trip
from tests.kit.searched import N, examples_of, some_games, to_sidecar, to_trmph
from tests.kit.sources import read_source
from tests.legacy_pickles import assert_same, load_pickle, one_hot, save_pickle, top_level

pytestmark = pytest.mark.usefixtures("hex_ai")

GAMES = some_games(12)
TEXT, SIDECAR = to_trmph(GAMES), to_sidecar(GAMES)
Example = dict[str, Any]


def convert(store: Path, *inputs: Path, **options: Any) -> Any:
    given = {"workers": 1, "val": 0, "test": 0, "max_reject_rate": 1.0, **options}
    return convert_sources(inputs, store, ConvertOptions(**given))


def rows_of(store: Path, table: str) -> list[dict[str, Any]]:
    return [
        row for part in sorted(store.glob(f"{table}/*.parquet")) for row in pq.read_table(part).to_pylist()
    ]


def rejected(store: Path) -> Counter[str]:
    return Counter(row["reason"] for row in rows_of(store, "rejected"))


# Files that are read


def changed_examples(change: Callable[[Example], Example], **options: bool) -> list[Example]:
    return [change(copy.deepcopy(example)) for example in examples_of(GAMES, **options)]


def without(*words: str) -> Callable[[Example], Example]:
    """Return a function that removes the keys of metadata that contain one of these words."""

    def change(example: Example) -> Example:
        kept = {k: v for k, v in example["metadata"].items() if not any(word in k for word in words)}
        return example | {"metadata": kept}

    return change


def with_dtype(dtype: str) -> Callable[[Example], Example]:
    def change(example: Example) -> Example:
        search = example["policy_search_target"]
        return example | {"policy_search_target": None if search is None else search.astype(dtype)}

    return change


def numpy_bools(example: Example) -> Example:
    metadata = example["metadata"]
    if "policy_target_trainable" in metadata:
        metadata["policy_target_trainable"] = np.bool_(metadata["policy_target_trainable"])
    return example


PICKLES: dict[str, list[Example]] = {
    "plain": examples_of(GAMES),
    "masked positions left out": examples_of(GAMES, masked=False),
    "not searched": examples_of(GAMES, searched=False),
    "other orders of keys": changed_examples(
        lambda e: dict([*e.items()][:: -1 if e["metadata"]["position_in_game"] % 2 else 1])
    ),
    **{dtype: changed_examples(with_dtype(dtype)) for dtype in ("<f2", "<f8", ">f4")},
    "bools of NumPy": changed_examples(numpy_bools),
    "no moves in some": changed_examples(
        lambda e: e | {"policy": None if e["metadata"]["position_in_game"] % 3 else e["policy"]}
    ),
    "letters without a mask": changed_examples(without("trainable")),
    "a mask without letters": changed_examples(without("code")),
}
SIDECARS: dict[str, bytes] = {
    "version 2": SIDECAR.encode(),
    "version 1, not searched": to_sidecar(GAMES, 1).encode(),
    "UTF-16": SIDECAR.encode("utf-16"),
    "letters of another encoding": to_sidecar(GAMES, note="N").encode().replace(b'"N"', b'"\xc0\xee"'),
    "blank lines": SIDECAR.replace("\n", "\n\n").encode(),
    "further keys": to_sidecar(GAMES, note={"a": [1]}, policy_note="x").encode(),
    "nulls, not searched": to_sidecar(GAMES, 1, policy_targets_blob=None).encode(),
    "gzipped": gzip.compress(SIDECAR.encode()),
    "gzipped games": SIDECAR.encode(),
}


def write(folder: Path, sidecar: str | bytes | None = SIDECAR, text: str = TEXT, name: str = "a") -> Path:
    """Write games and their sidecar; return the file of the games."""
    folder.mkdir(parents=True, exist_ok=True)
    data = sidecar.encode() if isinstance(sidecar, str) else sidecar
    path = folder / (f"{name}.trmph.gz" if name == "gzipped games" else f"{name}.trmph")
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    if data is not None:
        ending = ".gz" if data.startswith(b"\x1f") else ""
        (folder / f"{name}.provenance.jsonl{ending}").write_bytes(data)
    return path


def test_pickles_and_sidecars_give_the_policies_and_masks_and_are_written_back(tmp_path: Path) -> None:
    folder, store = tmp_path / "in", tmp_path / "store"
    for number, (name, examples) in enumerate(PICKLES.items()):
        stats = {"policy_positions_total": 7, "policy_positions_skipped_by_code": {"C": 3}}
        header = top_level(examples, processing_stats=stats, processed_at=f"2026-03-{name}")
        save_pickle(folder / f"{name}_processed.pkl.gz", header, (2, 4, 5)[number % 3])
    for name, sidecar in SIDECARS.items():
        write(folder, sidecar, f"# {name}\n{TEXT}", name)
    convert(store, folder)
    assert rejected(store) == Counter()
    sources = {row["source_id"]: row["name"].removeprefix("in/") for row in rows_of(store, "sources")}
    assert {
        name.partition("_")[0].partition(".")[0] for name in sources.values()
    } == PICKLES.keys() | SIDECARS
    games = {row["game_id"]: row for row in rows_of(store, "games")}
    first = {id_: min(g["line_idx"] for g in games.values() if g["source_id"] == id_) for id_ in sources}
    counts: Counter[str] = Counter()
    for row in rows_of(store, "positions"):
        found, ply = games[row["game_id"]], row["position_in_game"]
        name = sources[found["source_id"]]
        game = GAMES[found["line_idx"] - first[found["source_id"]]]
        counts[name] += 1
        assert row["board"] == np.packbits(game.board(ply).astype(bool).reshape(-1)).tobytes()
        final = ply == len(game.moves)
        expected = None if final else game.moves[ply], game.weight(ply), game.winner
        assert (row["move"], row["policy_weight"], row["value"]) == expected
        target = None if final or "not searched" in name else game.targets[ply].astype("f4")
        pairs = target if target is None else [(c, float(target[c])) for c in np.flatnonzero(target).tolist()]
        assert pairs == (row["policy"] and [(e["cell"], e["probability"]) for e in row["policy"]]) or (
            pairs == row["policy"] == []
        )
    total = sum(len(game.moves) + 1 for game in GAMES)
    kept = sum(game.weight(ply) > 0 for game in GAMES for ply in range(len(game.moves) + 1))
    assert counts == {name: kept if "left out" in name else total for name in sources.values()}
    assert all(result.ok for result in check_round_trip(store, [folder]))
    export_pickles(store, PicklesOptions(order="original", workers=1, level=1))
    exported = {path.name: path for path in (store / "pickles" / "original").rglob("*.pkl.gz")}
    for name in PICKLES:
        file = f"{name}_processed.pkl.gz"
        assert_same(load_pickle(exported[file]), load_pickle(folder / file))


# Invalid pickles


def trainable(mask: Any, letter: str | None, **fields: Any) -> Callable[[Example], Example]:
    codes = {"policy_move_code": letter, "policy_target_source_code": letter, "policy_target_trainable": mask}
    return lambda example: example | fields | {"metadata": example["metadata"] | codes}


def target(value: Any, **fields: Any) -> Callable[[Example], Example]:
    return lambda example: example | fields | {"policy_search_target": copy.deepcopy(value)}


BAD_EXAMPLES: list[tuple[str, Callable[[Example], Example]]] = [
    ("policy-type", target([0.0] * N * N)),
    ("policy-type", target(0.5)),
    ("policy-shape", target(np.zeros((N, N), "f4"))),
    ("policy-shape", target(np.zeros(169, "f4"))),
    ("policy-values", target(np.full(N * N, np.nan, "f4"))),
    ("policy-values", target(-one_hot(3, N))),
    ("policy-dtype", target(np.full(N * N, 0.1))),
    ("policy-values", trainable(True, "V", policy_search_target=np.zeros(N * N, "f4"))),
    ("policy-values", lambda example: example | {"policy": np.full(N * N, 0.04, "f4")}),
    # Written back, such a policy would be that of the search.
    ("policy-values", target(None, policy=np.full(N * N, 0.04, "f4"))),
    ("policy-values", target(None, policy=np.zeros(N * N, "f4"))),
    ("policy-mask", trainable("0", None)),
    ("policy-mask", trainable(2, None)),
    ("policy-mask", trainable(True, "C")),
    ("policy-mask", trainable(False, "V")),
]


def test_invalid_examples_are_rejected_by_name(tmp_path: Path) -> None:
    examples = examples_of(GAMES)
    chosen = [i for i, e in enumerate(examples) if e["metadata"].get("policy_move_code") == "V"]
    for index, (_, change) in zip(chosen[::3], BAD_EXAMPLES, strict=False):
        examples[index] = copy.deepcopy(change(examples[index]))
    _, _, found = read_source(save_pickle(tmp_path / "a_processed.pkl.gz", top_level(examples)))
    expected = zip(chosen[::3], (reason for reason, _ in BAD_EXAMPLES), strict=False)
    assert [(each.record, each.reason) for each in found] == [*expected]
    assert len(chosen) > 3 * len(BAD_EXAMPLES)


# Invalid sidecars


def changed(number: int, **changes: Any) -> str:
    """Return the sidecar with other values in a record; ``...`` leaves one out."""
    lines = SIDECAR.splitlines(keepends=True)
    record = json.loads(lines[number]) | changes
    lines[number] = json.dumps({k: v for k, v in record.items() if v is not ...}) + "\n"
    return "".join(lines)


def lines_of(*numbers: int) -> str:
    return "".join(SIDECAR.splitlines(keepends=True)[number] for number in numbers)


def blob(data: bytes) -> str:
    return changed(3, policy_targets_blob=base64.b64encode(zlib.compress(data)).decode())


M, CODES = len(GAMES[3].moves), GAMES[3].codes
FLIPPED = "".join("1" if code == "C" else "0" for code in CODES)
ZEROS = bytes(2 * M * N * N)
BAD_RECORDS: dict[str, list[str]] = {
    "sidecar-version": [
        *(changed(3, schema_version=version) for version in (3, ...)),
        changed(3, policy_target_encoding="dense_fp32"),
    ],
    "sidecar-mismatch": [
        changed(3, move_count=M + 1),
        changed(3, move_codes=CODES + "V"),
        changed(3, policy_target_size=169),
        blob(b"\x00\x1c" * (M * N * N)),  # on occupied cells
    ],
    "sidecar-record": [
        *(changed(3, policy_train_mask=mask) for mask in (FLIPPED, [1] * M, ...)),
        changed(3, policy_target_source_codes="G" * M),
        *(changed(3, **change) for change in ({"game_index": True}, {"schema_version": 1})),
        changed(3, policy_targets_blob="!!"),
        *map(blob, (ZEROS[:-2], bytes(1 << 25), ZEROS, b"\xff\x7f" * (M * N * N))),  # few, a bomb, zero, NaN
        *(
            SIDECAR.replace(lines_of(3), line)
            for line in ("{\n", "[" * 100_000 + "\n", "x" * (9 << 20) + "\n")
        ),
    ],
    "sidecar-missing": [lines_of(0, 1, 2, *range(4, 12))],
}
"""Sidecars whose record of game 3 is invalid, by the reason."""
WHOLE: dict[str, dict[str, int]] = {
    "": {"sidecar-missing": 12},
    SIDECAR[:-40]: {"sidecar-record": 1},
    SIDECAR + changed(0, game_index=12).splitlines()[0]: {"sidecar-mismatch": 1},
    to_sidecar(GAMES[1:] + GAMES[:1]): {"sidecar-mismatch": 12},
}
"""Sidecars that do not fit their file, and the reasons."""


@pytest.mark.parametrize("reason", BAD_RECORDS)
def test_an_invalid_record_rejects_its_game_only(tmp_path: Path, reason: str) -> None:
    for sidecar in BAD_RECORDS[reason]:
        _, rows, rejections = read_source(write(tmp_path / "in", sidecar))
        assert [each.reason for each in rejections] == [reason]
        assert {row["line_idx"] for row in rows} == {2, 3, 4, *range(6, 14)}  # after a comment


def test_a_sidecar_that_does_not_fit_is_named(tmp_path: Path) -> None:
    for sidecar, reasons in WHOLE.items():
        path = write(tmp_path / "in", sidecar)
        try:
            found = Counter(str(each.reason) for each in read_source(path).rejected)
        except FormatError as error:  # the file as a whole
            found = Counter([str(error.code)])
        assert found == reasons
    with pytest.raises(RejectRateError, match="sidecar-mismatch"):
        convert(tmp_path / "strict", path, max_reject_rate=0)


def test_a_file_of_another_board_size_is_left_out_also_with_a_sidecar_that_does_not_fit(
    tmp_path: Path,
) -> None:
    write(tmp_path / "in", [*WHOLE][2])
    (tmp_path / "b.trmph").write_text("#7,a1b2 b\n")
    result = convert(tmp_path / "store", tmp_path / "in", tmp_path / "b.trmph", board_size=7)
    assert result.skipped_files == {"in/a.trmph": "board-size: 5 x 5"}


def test_a_truncated_sidecar_is_salvaged(tmp_path: Path) -> None:
    path, whole = write(tmp_path / "in", None), gzip.compress(SIDECAR.encode())
    (tmp_path / "in" / "a.provenance.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(FormatError, match="ends before"):
        read_source(path)
    found = Counter(str(each.reason) for each in read_source(path, salvage=True).rejected)
    assert found.keys() <= {"sidecar-missing", "sidecar-record"}
    assert 0 < found.total() < 12


def test_damage_never_gives_other_masks_or_policies(tmp_path: Path) -> None:
    """A game of a damaged sidecar is rejected, or has what the sidecar stated before."""
    path, random, lost = write(tmp_path / "in"), np.random.default_rng(7), 0

    def facts() -> Iterator[tuple[Any, ...]]:
        keys = ("line_idx", "position_in_game", "policy", "policy_weight")
        yield from (tuple(map(str, map(row.get, keys))) for row in found.rows)

    found = read_source(path)
    known = {*facts()}
    for _ in range(40):
        data = bytearray(SIDECAR.encode())
        data[random.integers(len(data))] ^= 1 << random.integers(8)
        (tmp_path / "in" / "a.provenance.jsonl").write_bytes(data)
        try:
            found = read_source(path)
        except FormatError:
            continue  # as a whole
        lost += len(found.rejected)
        assert len({row["line_idx"] for row in found.rows}) + len(found.rejected) == len(GAMES)
        assert {*facts()} <= known
    assert lost > 20


# The sidecar belongs to the source


def test_a_file_without_a_sidecar_among_others_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "in")
    write(tmp_path / "in", None, text=to_trmph(some_games(9, seed=3)), name="b")
    for inputs in ([tmp_path / "in"], sorted((tmp_path / "in").glob("*.trmph"))):
        with pytest.raises(RejectRateError, match=r"sidecar-missing: b\.provenance\.jsonl is missing"):
            convert(tmp_path / "store", *inputs, max_reject_rate=0.01)
    (tmp_path / "in" / "a.provenance.jsonl").unlink()
    convert(tmp_path / "store", tmp_path / "in")
    assert rejected(tmp_path / "store") == Counter()


def test_two_sidecars_of_a_file_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "in")
    (tmp_path / "in" / "a.provenance.jsonl.gz").write_bytes(gzip.compress(SIDECAR.encode()))
    with pytest.raises(FormatError, match=r"a\.provenance\.jsonl and a\.provenance\.jsonl\.gz"):
        read_source(path)


def test_a_sidecar_alone_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "in")
    with pytest.raises(InputError, match="a sidecar of a TRMPH file"):
        convert(tmp_path / "store", path.with_suffix(".provenance.jsonl"))
    write(tmp_path / "in", name="b").unlink()
    result = convert(tmp_path / "store", tmp_path / "in")
    assert result.skipped_files == {"in/b.provenance.jsonl": "sidecar"}


def test_a_changed_sidecar_is_a_changed_source(tmp_path: Path) -> None:
    path, store = write(tmp_path / "in"), tmp_path / "store"
    convert(store, path)
    before = {p.name: p.read_bytes() for p in store.glob("*/*.parquet")}
    assert convert(store, path).sources == 0
    for content in (to_sidecar(GAMES, 1), SIDECAR + "\n", None):
        sidecar = path.with_suffix(".provenance.jsonl")
        sidecar.unlink() if content is None else sidecar.write_text(content)
        with pytest.raises(SourceChangedError, match="its sidecar has changed"):
            convert(store, path)
        assert {p.name: p.read_bytes() for p in store.glob("*/*.parquet")} == before
        (result,) = check_round_trip(store, [tmp_path / "in"])
        assert (result.ok, result.detail) == (False, "its sidecar is missing or has changed")


def test_lines_added_to_both_files_are_read(tmp_path: Path) -> None:
    path, store = write(tmp_path / "in", to_sidecar(GAMES[:5]), to_trmph(GAMES[:5])), tmp_path / "store"
    convert(store, path)
    write(tmp_path / "in")
    result = convert(store, path)
    assert (result.sources, result.rejected) == (1, 0)
    weights = [game.weight(ply) for game in GAMES for ply in range(len(game.moves) + 1)]
    assert [row["policy_weight"] for row in rows_of(store, "positions")] == weights
    assert [result.ok for result in check_round_trip(store, [path])] == [True, True]


def test_a_refused_source_is_known_with_its_sidecar(tmp_path: Path) -> None:
    path, store = write(tmp_path / "in", SIDECAR + lines_of(0)), tmp_path / "store"
    assert [convert(store, path).sources for _ in range(2)] == [1, 0]
    assert [result.checked for result in check_round_trip(store, [path])] == [False]
    path.with_suffix(".provenance.jsonl").write_text(SIDECAR)  # another source, which is read
    assert convert(store, path).positions > 0
    results = check_round_trip(store, [path])
    assert [(result.ok, result.checked) for result in results] == [(False, False), (True, True)]


@pytest.mark.parametrize("suffix", [".moves", ".sgf", ".txt"])
def test_any_text_may_have_a_sidecar_but_no_pickle(tmp_path: Path, suffix: str) -> None:
    folder, path = tmp_path / "in", write(tmp_path / "in")
    path.with_suffix(".pkl.gz").write_bytes(gzip.compress(b"\x80\x04}")[:-6])
    path.with_suffix(".npz").touch()
    text = path.rename(path.with_suffix(suffix))
    assert convert(tmp_path / "store", folder, text).skipped_files == {}
    assert None not in {row["policy_weight"] for row in rows_of(tmp_path / "store", "positions")}
    trips = check_round_trip(tmp_path / "store", [folder])
    assert [each.ok for each in trips] == [True] * 3
    assert [each.name for each in trips if not each.checked] == ["in/a.pkl.gz"]
    with pytest.raises(RejectRateError, match=r"rename it to a\.trmph"):
        convert(tmp_path / "other", text.rename(path.with_suffix(".pkl")), max_reject_rate=0.01)


def test_a_sidecar_means_nothing_beside_another_format(tmp_path: Path) -> None:
    path, store = write(tmp_path / "in", text="https://hexworld.org/board/#5c1,a2b3:rb\n"), tmp_path / "store"
    assert [convert(store, path).sources for _ in range(2)] == [1, 0]
    assert [result.ok for result in check_round_trip(store, [path])] == [True]
