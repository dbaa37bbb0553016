"""Randomly altered JSON in tables, ledgers, the journal and saved states: one clear error each."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hexdata.convert import ConvertOptions, convert_sources
from hexdata.convert.spool import Spool, SpoolFacts
from hexdata.demo import DemoOptions, make_legacy
from hexdata.errors import HexdataError, StoreError
from hexdata.export import ExportOptions, PicklesOptions, export_pickles, export_shards
from hexdata.loader import Loader, Mixture
from hexdata.progress import Silent
from hexdata.shuffle import ShuffleOptions, plan_shuffle, shuffle_store
from hexdata.store import Store
from hexdata.store.journal import JOURNAL_NAME, read_journal
from tests.ledger_units import read_units, replace_units
from tests.pairs import FULL
from tests.store.test_hostile_json import altered, sign

MUTATIONS = int(os.environ.get("HEXDATA_HOSTILE_JSON", "12" if FULL else "4"))
"""Number of altered texts of each kind; raise it to search for longer."""


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small store of legacy pickles through every stage. Read only: copy it."""
    folder = tmp_path_factory.mktemp("texts")
    make_legacy(folder / "legacy", DemoOptions(games=12))
    convert_sources(folder / "legacy", folder / "store", ConvertOptions(workers=1))
    shuffle_store(folder / "store", ShuffleOptions(seed=7, threads=1))
    export_shards(folder / "store", ExportOptions(workers=1, shard_size=64, block_size=16))
    return folder / "store"


def works_or_is_refused(use: Callable[[], object]) -> bool:
    """Return whether the call worked; any failure other than one clear error fails the test."""
    try:
        use()
    except HexdataError as error:
        said = str(error)
    else:
        return True
    assert "\x1b" not in said
    assert len(said) < 2_000
    return False


def replace_text(store: Path, name: str, column: str, row: int, text: str) -> None:
    """Write a table again with another text, and update its digest in the manifest."""
    table = pq.read_table(store / name)
    texts = table[column].to_pylist()
    texts[row] = text
    index = table.schema.get_field_index(column)
    table = table.set_column(
        index, table.schema.field(index), pa.array(texts, table.schema.field(index).type)
    )
    pq.write_table(table, store / name)
    data = (store / name).read_bytes()
    manifest = json.loads((store / "manifest.json").read_bytes())
    manifest["files"][name] |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (store / "manifest.json").write_bytes(sign(manifest))


@pytest.mark.parametrize("number", range(MUTATIONS))
def test_a_header_that_was_altered(sound: Path, tmp_path: Path, number: int) -> None:
    store = shutil.copytree(sound, tmp_path / "store")
    name = "sources/part-000000.parquet"
    headers = pq.read_table(store / name)["header"].to_pylist()
    row = number % len(headers)
    data = altered(json.loads(headers[row]), np.random.default_rng(number))
    replace_text(store, name, "header", row, data.decode("utf-8", "replace"))
    works_or_is_refused(lambda: export_pickles(store, PicklesOptions(order="original", workers=1)))


@pytest.mark.parametrize(
    "metadata",
    [
        *("[]", "3", "{", "[" * 100_000, "\x1b", '{"hexdata:game_id": 3}', '{"hexdata:game_id": [1]}'),
        *(
            '{"hexdata:move": "x"}',
            '{"hexdata:move": 1e300}',
            '{"hexdata:value": []}',
            '{"hexdata:dialect": 3}',
        ),
        *(
            '{"hexdata:dialect": {"board": 7}}',
            '{"hexdata:dialect": {"first": 7}}',
            '{"hexdata:game_id": ["a", {}]}',
        ),
    ],
)
def test_metadata_that_was_altered(sound: Path, tmp_path: Path, metadata: str) -> None:
    store = shutil.copytree(sound, tmp_path / "store")
    if metadata[:1] != "{" or metadata == "{":
        metadata = '"hexdata:dialect":' + metadata  # readers parse only texts with a key of hexdata
    replace_text(store, "positions/part-000000.parquet", "metadata", 0, metadata)
    works_or_is_refused(lambda: export_pickles(store, PicklesOptions(order="original", workers=1)))


@pytest.mark.parametrize("number", range(MUTATIONS))
def test_facts_of_a_spool_that_were_altered(tmp_path: Path, number: int) -> None:
    spool = Spool(tmp_path)
    spool.save_facts(SpoolFacts(header={"a": [1, {"b": 1.5}]}, loose=[1, 2], failure=("a", "b")))
    path = tmp_path / "facts.json"
    text = altered(json.loads(path.read_bytes().partition(b" ")[2]), np.random.default_rng(number))
    path.write_bytes(hashlib.sha256(text).hexdigest().encode() + b" " + text)
    works_or_is_refused(spool.facts)


def test_each_changed_byte_of_the_facts_of_a_spool_is_found(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.save_facts(SpoolFacts(header={"a": 1}, positions=7))
    path = tmp_path / "facts.json"
    content = path.read_bytes()
    for at in range(len(content)):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(StoreError, match="does not match its digest"):
            spool.facts()


def test_facts_of_a_spool_without_a_digest_are_not_used(tmp_path: Path) -> None:
    Spool(tmp_path).save_facts(SpoolFacts(positions=7))
    path = tmp_path / "facts.json"
    path.write_bytes(path.read_bytes().partition(b" ")[2])
    assert Spool(tmp_path).facts() is None


def test_facts_of_a_spool_are_read_back(tmp_path: Path) -> None:
    facts = SpoolFacts(board_size=13, header={"a": [1, {"b": "\ud800"}]}, failure=("a", "b"), loose=[3])
    Spool(tmp_path).save_facts(facts)
    assert Spool(tmp_path).facts() == facts


@pytest.mark.parametrize("number", range(MUTATIONS))
def test_a_line_of_the_journal_that_was_altered(sound: Path, tmp_path: Path, number: int) -> None:
    (tmp_path / "logs").mkdir()
    lines = (sound / JOURNAL_NAME).read_bytes().splitlines()
    whole = len(read_journal(sound))
    lines[0] = altered(json.loads(lines[0]), np.random.default_rng(number))
    (tmp_path / JOURNAL_NAME).write_bytes(b"\n".join(lines) + b"\n")
    assert len(read_journal(tmp_path)) in (whole - 1, whole)


@pytest.mark.parametrize("number", range(MUTATIONS))
def test_states_that_were_altered(sound: Path, number: int) -> None:
    rng = np.random.default_rng(number)
    one, two = (Loader(sound, split="train", batch_size=16, seed=seed) for seed in (1, 2))
    for loader in (one, Mixture([one, two], [1.0, 1.0], batch_size=16)):
        try:
            state: Any = json.loads(altered(loader.state_dict(), rng))
        except (ValueError, RecursionError):
            continue
        works_or_is_refused(lambda loader=loader, state=state: loader.load_state_dict(state))


@pytest.mark.parametrize("number", range(MUTATIONS))
def test_a_ledger_of_the_shuffle_that_was_altered(sound: Path, tmp_path: Path, number: int) -> None:
    """A hostile ledger with valid digests is refused, or its buckets are written again."""
    store = shutil.copytree(sound, tmp_path / "store")
    options = ShuffleOptions(seed=8, threads=1)
    ledger = interrupted(store, options)
    units = json.loads(altered_units(read_units(ledger), np.random.default_rng(number)))
    replace_units(ledger, units if isinstance(units, dict) else {"unit": units})
    works_or_is_refused(lambda: plan_shuffle(store, options))
    works_or_is_refused(lambda: shuffle_store(store, options))


def altered_units(done: dict[str, Any], rng: np.random.Generator) -> bytes:
    """Return units with one random error that are still valid JSON."""
    while True:
        data = altered(done, rng)
        try:
            json.loads(data)
        except (ValueError, RecursionError):
            continue
        return data


class Stop(Silent):
    """Stops a stage when its first file is finished, like Ctrl-C."""

    def advance(self, amount: int) -> None:
        if amount:
            raise KeyboardInterrupt


def interrupted(store: Path, options: ShuffleOptions) -> Path:
    """Start a shuffle, stop it at its first bucket and return its ledger."""
    with pytest.raises(KeyboardInterrupt):
        shuffle_store(store, options, Stop())
    (ledger,) = Store.open(store).work.rglob("progress.json")
    assert isinstance(ledger, Path)
    assert len(read_units(ledger)) == 1
    return ledger
