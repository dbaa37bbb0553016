"""A sample of the tests of object stores over rclone; HEXDATA_TESTS_S3=rclone runs all of them over it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.object_store import NO_RCLONE, SERVER, find_rclone

SAMPLE = (
    "storage/test_objects.py::test_a_bucket_without_unfinished_uploads",
    "storage/test_objects.py::test_a_part_of_an_object_is_read",
    "storage/test_objects.py::test_a_put_on_a_condition",
    "storage/test_objects.py::test_an_upload_that_replaces_nothing",
    "storage/test_objects.py::test_the_listed_tag_is_that_of_the_object",
    "store/test_objects.py::test_only_named_objects_are_kept",
    "test_object_stores.py::test_a_config_runs_from_address_to_address",
    "test_object_stores.py::test_a_missing_bucket_is_told_in_python_too",
)


def test_a_sample_of_the_tests_passes_over_another_server(tmp_path: Path) -> None:
    for library in ("moto.moto_server.werkzeug_app", "s3fs"):
        pytest.importorskip(library, exc_type=ImportError)
    if SERVER == "rclone":
        pytest.skip("all tests of object stores run over rclone")
    if find_rclone() is None:
        pytest.skip(NO_RCLONE)
    folder = Path(__file__).parent
    options = ["-q", "-p", "no:cacheprovider", "--basetemp", tmp_path / "inner"]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *(folder / test for test in SAMPLE)],
        cwd=folder.parent,
        env=os.environ | {"HEXDATA_TESTS_S3": "rclone"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout
    assert re.search(r"^\d+ passed in", ran.stdout, re.MULTILINE), ran.stdout
