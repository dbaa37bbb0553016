"""Verification of the stages in the manifest against the files and tables of the store. Read-only."""

from __future__ import annotations

from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from hexdata.errors import Reason, VerifyError
from hexdata.games.labels import split_of
from hexdata.schema import SPLITS
from hexdata.store import Store
from hexdata.store.originals import PICKLE_SUFFIX, list_originals, pickle_names
from hexdata.store.parquet import read_parquet

__all__ = ["FOLDERS", "check_stage_facts"]

_STAGE_OF: Final = {
    "sources": "convert",
    "games": "convert",
    "positions": "convert",
    "rejected": "convert",
    "shuffled": "shuffle",
    "shards": "export",
    "pickles/original": "pickles-original",
    "pickles/shuffled": "pickles-shuffled",
}
"""The stage that writes each folder."""
FOLDERS: Final = tuple(dict.fromkeys(folder.split("/")[0] for folder in _STAGE_OF))
"""The top-level folders of a store that contain files of stages."""


def check_stage_facts(store: Store) -> str:
    """Check the files, rows and options that the manifest records of each stage, where they can be recounted.

    Returns:
        The names of the stages, as the detail of the check.

    Raises:
        VerifyError: Files have no stage, or an entry of a stage is wrong.
    """
    stages = store.manifest.stages
    for folder, stage in _STAGE_OF.items():
        if store.manifest.files_in(folder) and stage not in stages:
            raise VerifyError(
                f"the manifest lists files in {folder}, but not the stage {stage} that writes them",
                path=store.path,
                hint="Restore manifest.json from a copy, or convert the sources into a new store.",
            )
    if "convert" in stages:
        _check_convert(store, stages["convert"])
    if "export" in stages:
        listed = [name for name in store.manifest.files_in("shards") if name.endswith(".json")]
        _compare("export", "rows of the shard manifest", _rows(store, listed), dict.fromkeys(listed, 0))
    original = stages.get("pickles-original")
    if original and original["of"] == store.input_digest("pickles-original"):  # else it is reported as older
        _check_pickles(store, "pickles-original", _original_rows(store))
    if "pickles-shuffled" in stages:
        _check_pickles(store, "pickles-shuffled", _shuffled_rows(store))
    return f"{', '.join(stages) or 'none'}: files, rows and options agree with the manifest"


def _check_convert(store: Store, stated: dict[str, Any]) -> None:
    """Check the recorded options of the last run of convert against its rows in the tables.

    Two wrong entries cannot be detected: a share so close to the real one that every game keeps its split,
    and ``truncate_repeats`` where no game has a repeated move.

    Raises:
        VerifyError: An option differs.
    """
    parts = store.files("sources")
    if not parts:
        return
    last = read_parquet(parts[-1], ["source_id", "salvaged"])
    salvage = last["salvaged"].null_count < last.num_rows
    _compare("convert", "salvage", stated.get("salvage", False), salvage)
    if not stated.get("truncate_repeats", False):
        for path in store.files("rejected"):
            rejected = read_parquet(path, ["source_id", "reason"])
            cut = rejected.filter(pc.equal(rejected["reason"], Reason.AFTER_REPEAT))["source_id"]
            if pc.any(pc.is_in(cut, last["source_id"])).as_py():
                _compare("convert", "truncate_repeats", False, True)
    for path in store.files("games"):
        games = read_parquet(path, ["game_id", "game_hash", "split"])
        expected = [
            split_of(found, stated["val"], stated["test"]) for found in games["game_hash"].to_pylist()
        ]
        wrong = pc.not_equal(games["split"], pa.array(expected, pa.string()))
        if pc.any(wrong).as_py():
            row = pc.index(wrong, True).as_py()
            raise VerifyError(
                "a game is in a split other than the one given by its hash and by --val and --test",
                path=path,
                record=f"game {games['game_id'][row].as_py()}",
                found=f"{games['split'][row].as_py()}, with val {stated['val']} and test {stated['test']}",
                expected=expected[row],
            )


def _check_pickles(store: Store, stage: str, expected: dict[str, int]) -> None:
    stated = store.manifest.stages[stage]
    found = _rows(store, store.manifest.files_in(stage.replace("-", "/")))
    counted = {name: found.get(name, 0) for name in expected}
    extra = {name: rows for name, rows in found.items() if name not in expected}
    _compare(stage, "rows", counted, expected)
    _compare(stage, "rows of other files", extra, dict.fromkeys(extra, 0))
    _compare(stage, "files", stated["files"], len(expected))
    _compare(stage, "positions", stated["positions"], sum(found.values()))
    _compare(stage, "order", stated["order"], stage.removeprefix("pickles-"))


def _original_rows(store: Store) -> dict[str, int]:
    sources = [source for source in list_originals(store) if source.format != "unknown"]
    names = pickle_names(sources)
    return {f"pickles/original/{name}": source.positions for name, source in zip(names, sources, strict=True)}


def _shuffled_rows(store: Store) -> dict[str, int]:
    expected = {}
    for split in SPLITS:
        for number, facts in enumerate(store.manifest.buckets(split).values()):
            expected[f"pickles/shuffled/{split}/shuffled_{number:04d}{PICKLE_SUFFIX}"] = facts.rows
    return expected


def _rows(store: Store, names: Any) -> dict[str, int]:
    return {name: store.manifest.files[name].rows for name in names}


def _compare(stage: str, what: str, stated: object, found: object) -> None:
    if stated != found:
        differing: tuple[object, object] = (stated, found)
        if isinstance(stated, dict) and isinstance(found, dict):
            name = next(name for name in {**stated, **found} if stated.get(name) != found.get(name))
            differing = (f"{stated.get(name)} for {name}", found.get(name))
        raise VerifyError(
            f"the manifest records wrong {what} of the stage {stage}",
            found=differing[0],
            expected=differing[1],
        )
