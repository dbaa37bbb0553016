"""Altered JSON in the columns of tables: one clear error each."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hexdata.convert import ConvertOptions, convert_sources
from hexdata.demo import DemoOptions, make_legacy
from hexdata.errors import HexdataError
from hexdata.store import Store
from hexdata.store.parquet import write_parquet
from tests.kit.whole import STAGES

TEXTS = {
    "header": ["[]", "[" * 100_000, "{}", '{"dialect": {"board": 7}}'],
    "metadata": [
        *("[" * 100_000, '"hexdata:move":3', '{"hexdata:game_id": [1]}', '{"hexdata:game_id": ["a", {}]}'),
        *('{"hexdata:move": 1e300}', '{"hexdata:value": []}', '{"hexdata:move": "\x1b"}'),
    ],
}


def test_an_altered_text_is_one_error(tmp_path):
    make_legacy(tmp_path / "legacy", DemoOptions(games=12))
    convert_sources(tmp_path / "legacy", tmp_path / "store", ConvertOptions(workers=1))
    store = Store.open(tmp_path / "store")
    for column, table in (("header", "sources"), ("metadata", "positions")):
        path = store.path / table / "part-000000.parquet"
        rows = pq.read_table(path)
        index = rows.schema.get_field_index(column)
        for text in TEXTS[column]:
            # Of metadata, only texts with a key of hexdata are parsed.
            altered = text if column == "header" or "hexdata:" in text else f'"hexdata:move":{text}'
            texts = pa.array([altered] * len(rows), pa.string())
            changed = rows.set_column(index, rows.schema.field(index), texts)
            store.manifest.files[f"{table}/{path.name}"] = write_parquet(path, rows.schema, [changed])
            store.manifest.save(store.path)
            with pytest.raises(HexdataError) as caught:
                STAGES["original"](store.path)
            assert "\x1b" not in str(caught.value)
            assert len(str(caught.value)) < 2_000
        store.manifest.files[f"{table}/{path.name}"] = write_parquet(path, rows.schema, [rows])
