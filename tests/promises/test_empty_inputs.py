"""A source without records, of whatever format, is a source without positions, and a note names it."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path

import pytest

from hexdata.convert import ConvertOptions, convert_sources
from hexdata.errors import InputError
from hexdata.verify import check_round_trip
from tests.kit.formats import EMPTY, SOURCES


def distinct_files() -> list[dict[str, bytes]]:
    """Divide the files so that all bytes of a run differ, as a source whose bytes are known is skipped."""
    names: dict[bytes, list[str]] = {}
    for name, content in EMPTY.items():
        names.setdefault(content, []).append(name)
    return [{name: EMPTY[name] for name in run if name} for run in zip_longest(*names.values())]


def test_a_file_without_records_is_a_source_without_positions(tmp_path: Path) -> None:
    for number, files in enumerate(distinct_files()):
        folder, store = tmp_path / f"{number}", tmp_path / f"store-{number}"
        for name, content in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        paths = [folder / name for name in files]  # by their own paths: "games.txt" is no name of a source
        result = convert_sources(paths, store, ConvertOptions(workers=1))
        assert (result.sources, result.records, result.positions, result.games) == (len(files), 0, 0, 0)
        assert result.file_notes == {name: ["contains no records"] for name in files}
        assert [(found.name, found.detail) for found in check_round_trip(store, folder) if not found.ok] == []


def test_files_without_records_change_nothing_for_those_beside_them(tmp_path: Path) -> None:
    files = EMPTY | {"full/a.trmph": SOURCES["trmph"].write([None] * 3, b"\n")}
    for name, content in files.items():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(content)
    result = convert_sources([tmp_path / "in"], tmp_path / "store", ConvertOptions(workers=1))
    assert (result.games, result.rejected, result.failed_files) == (3, 0, {})
    causes = {cause.partition(":")[0] for cause in result.skipped_files.values()}
    assert causes <= {"known-bytes", "unknown-name"}


def test_a_folder_without_files_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    with pytest.raises(InputError, match="no files to convert"):
        convert_sources([tmp_path / "in"], tmp_path / "store")
    assert not (tmp_path / "store").exists()
