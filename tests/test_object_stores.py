"""Commands on a store in an object store print the same results as on a disk."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from hexdata.cli import main
from hexdata.convert import ConvertOptions, convert_sources
from hexdata.engine.local import LocalEngine
from hexdata.engine.protocol import Machines
from hexdata.errors import StoreError
from hexdata.export import ExportOptions, PicklesOptions, export_pickles, export_shards
from hexdata.loader import Loader
from hexdata.pipeline import load_config, run_config
from hexdata.shuffle import ShuffleOptions, shuffle_store
from hexdata.storage import as_path
from hexdata.store import Store
from hexdata.verify import VerifyOptions, check_round_trip, verify_store
from tests.conftest import CopyStore, DemoTrmph, StoreBytes, needs_conditions
from tests.object_store import ACCESS_KEY, SECRET_KEY, Fault
from tests.pairs import FULL

if TYPE_CHECKING:
    from upath import UPath

    from tests.object_store import ObjectStore


class Ran(NamedTuple):
    """Exit status and output of a command."""

    status: object
    out: str
    err: str


class Both(NamedTuple):
    """A store on a disk, with its sources, and the same in a bucket."""

    disk: Path
    bucket: UPath


def command(*arguments: object) -> Ran:
    """Run the command line in this process."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["hexdata", *map(str, arguments)])
        patch.setattr(os, "sched_getaffinity", lambda pid: {0}, raising=False)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                main()
                status: object = 0
            except SystemExit as end:
                status = end.code or 0
    return Ran(status, out.getvalue(), err.getvalue())


def put(folder: Path, target: UPath) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            (target / path.relative_to(folder).as_posix()).write_bytes(path.read_bytes())


@pytest.fixture(scope="module")
def whole_store(trmph_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sources of a store and the store, with every stage."""
    import shutil

    folder = tmp_path_factory.mktemp("whole") / "all"
    shutil.copytree(trmph_store.parent, folder)
    shuffle_store(folder / "store", ShuffleOptions(seed=1, buckets=2, threads=1))
    export_shards(folder / "store", ExportOptions(shard_size=1024, block_size=256, workers=1))
    for order in ("shuffled", "original"):
        export_pickles(folder / "store", PicklesOptions(order=order, workers=1))
    return folder


@pytest.fixture(scope="module")
def both(
    whole_store: Path, object_store: ObjectStore, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Both]:
    object_store.fail()
    bucket = as_path(f"s3://test-{os.urandom(6).hex()}")
    assert not isinstance(bucket, Path)
    bucket.fs.mkdir(bucket.path.strip("/"))
    put(whole_store, bucket)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEXDATA_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield Both(whole_store, bucket)


COMMANDS = {
    "verify": "verify {0}/store --round-trip {0}/games --json",
    "sql": "sql {0}/store|SELECT split, bucket, count(*), sum(value), max(rank) FROM shuffled GROUP BY ALL "
    "ORDER BY ALL|--json",
    "named query": "sql {0}/store @sources --json",
    "games": "sql {0}/store|SELECT trmph(game_id) FROM games ORDER BY game_id|--json",
    "position": "show {0}/store 17 --json",
    "game": "show {0}/store --game 3 --json",
    "shard": "show {0}/store/shards/train-000001.tar:17 --json",
    "pickles, done": "export {0}/store --format pickle --json",
}


@pytest.mark.parametrize("line", COMMANDS.values(), ids=COMMANDS)
def test_a_command_finds_the_same(both: Both, line: str) -> None:
    words = line.split("|") if "|" in line else [line]
    words = [word for part in words for word in (part.split() if "{0}" in part else [part])]
    found = [command(*(word.format(str(place).rstrip("/")) for word in words)) for place in both]
    assert found[0] == found[1]
    assert found[0].status == 0
    assert json.loads(found[0].out)


@pytest.mark.usefixtures("no_charts")
def test_the_report_is_the_same_page(both: Both, bucket: UPath) -> None:
    pages = []
    for place, output in ((both.disk, bucket / "a.html"), (both.bucket, None)):
        ran = command("report", place / "store", *(["--output", output] if output else []), "--json")
        facts = json.loads(ran.out)
        page = as_path(facts.pop("path"))
        assert page == (output or place / "store" / "report.html")
        facts.pop("bytes")  # the commands of the report contain the location of the store
        lines = facts["facts"]["commands"]
        if place is both.bucket:  # results there are replaced only with this option
            assert all(line.endswith(" --replace") for stage, line in lines.items() if stage != "convert")
            facts["facts"]["commands"] = {s: line.removesuffix(" --replace") for s, line in lines.items()}
        texts = json.dumps(facts), page.read_text(encoding="utf-8")
        pages.append([text.replace(str(place / "store"), "STORE") for text in texts])
    assert pages[0] == pages[1]


def test_pickles_are_written_with_the_same_bytes(
    bucket: UPath, trmph_store: Path, copy_store: CopyStore, store_bytes: StoreBytes
) -> None:
    local = copy_store(trmph_store)
    put(local, bucket / "store")
    for store in (local, bucket / "store"):
        assert (
            command("export", store, "--format", "pickle", "--order", "original", "--workers", "1").status
            == 0
        )
    expected = store_bytes(local)
    names = [name for name in expected if name.startswith("pickles/")]
    assert len(names) == 3
    for name in ("manifest.json", *names):
        assert (bucket / "store" / name).read_bytes() == (local / name).read_bytes(), name


def test_a_drawing_and_a_table_may_go_to_an_address(both: Both, bucket: UPath, tmp_path: Path) -> None:
    store = both.bucket / "store"
    for place in (tmp_path, bucket):
        assert command("show", store, "17", "--svg", place / "a.svg").status == 0
        query = "SELECT position_id, value FROM positions"
        assert command("sql", store, query, "--parquet", place / "a.parquet").status == 0
    for name in ("a.svg", "a.parquet"):
        assert (bucket / name).read_bytes() == (tmp_path / name).read_bytes()
    refused = command("sql", store, "SELECT 1 AS a", "--parquet", store / "a.parquet")
    assert refused.status == 1
    assert "the output file must not be in the store" in refused.err


def test_a_store_may_be_a_whole_bucket(bucket: UPath, trmph_store: Path, tmp_path: Path) -> None:
    """Only the path of a bucket ends with a slash."""
    put(trmph_store, bucket)
    query = "SELECT count(*), sum(value) FROM positions"
    found = [command("sql", store, query) for store in (trmph_store, bucket, str(bucket).rstrip("/"))]
    assert found[0] == found[1] == found[2]
    assert found[0].status == 0
    assert json.loads(command("verify", bucket, "--json").out)["ok"]
    wrong = [command("sql", store, "FROM read_csv('a')") for store in (trmph_store, bucket)]
    assert wrong[0] == wrong[1]
    refused = command("sql", bucket, query, "--parquet", bucket / "a.parquet")
    assert "the output file must not be in the store" in refused.err


# --- damage -------------------------------------------------------------------------------------------


def _remove(path: Any) -> None:
    path.unlink()


def _cut(path: Any) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _alter(path: Any) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def _add(path: Any) -> None:
    (path.parent / "foreign").write_bytes(b"1")


DAMAGES = (_remove, _cut, _alter, _add)
DAMAGED = ("positions/part-000001.parquet", "games/part-000000.parquet")


@pytest.mark.parametrize(
    ("damage", "name"), [*(product(DAMAGES, DAMAGED) if FULL else zip(DAMAGES, 2 * DAMAGED, strict=True))]
)
def test_verify_names_what_is_damaged(
    bucket: UPath, trmph_store: Path, copy_store: CopyStore, damage: Callable[[Any], None], name: str
) -> None:
    local = copy_store(trmph_store)
    put(local, bucket / "store")
    told = []
    for store in (local, bucket / "store"):
        damage(store / name)
        ran = command("verify", store, "--json")
        assert ran.status == 1
        told.append(json.loads(ran.out.replace(str(store), "STORE")))
    assert told[0] == told[1]
    (check,) = [check for check in told[0]["checks"] if not check["ok"]]
    assert ("foreign" if damage is _add else name) in check["detail"]


@pytest.mark.parametrize("damage", [_remove, _cut])
def test_a_query_names_what_is_damaged(
    bucket: UPath, trmph_store: Path, copy_store: CopyStore, damage: Callable[[Any], None]
) -> None:
    """On a disk, digests are compared before the query; an object store is only read by the query."""
    local, name = copy_store(trmph_store), "positions/part-000001.parquet"
    put(local, bucket / "store")
    for store in (local, bucket / "store"):
        damage(store / name)
        assert command("sql", store, "FROM games").status == 0
        ran = command("sql", store, "SELECT count(*) FROM positions")
        assert (ran.status, ran.out) == (1, "")
        assert name in ran.err


# --- errors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("verify ftp://host/store", "found ftp://"),
        ("verify s3://", "needs a bucket"),
        ("sql s3://me:{secret}@bucket/store @", "credentials do not belong"),
        ("show s3://me:{secret}@bucket/store/shards/train-000000.tar:1", "credentials do not belong"),
        ("convert in s3://me:{secret}@bucket/store", "credentials do not belong"),
        ("convert s3://me:{secret}@bucket/in store", "credentials do not belong"),
        ("demo s3://bucket/demo", "only be on this machine"),
        ("run s3://bucket/config.toml", "only be on this machine"),
        ("live s3://bucket/games", "only be on this machine"),
    ],
)
def test_what_is_no_address_for_a_command_is_wrong_usage(
    object_store: ObjectStore, line: str, message: str
) -> None:
    ran = command(*line.format(secret=SECRET_KEY).split())
    assert ran.status == 2
    assert message in ran.err
    assert len(ran.err.splitlines()) == 1
    assert SECRET_KEY not in ran.err


def test_a_config_with_such_an_address_is_refused_before_a_stage_runs(
    object_store: ObjectStore, tmp_path: Path
) -> None:
    config = tmp_path / "config.toml"
    for text in (
        'store = "ftp://host/store"',
        f'store = "{tmp_path}/store"\n[report]\noutput = "s3://me:{SECRET_KEY}@bucket/report.html"',
        f'store = "{tmp_path}/store"\n[demo]\nfolder = "s3://bucket/demo"',
    ):
        assert tomllib.loads(text)
        config.write_text(text)
        ran = command("run", config)
        assert ran.status == 2
        assert str(config) in ran.err
        assert SECRET_KEY not in ran.err


@pytest.mark.parametrize(
    "line", ["verify {}", "sql {} @sources", "show {} 17", "report {}", "shuffle {}", "load {}"]
)
def test_a_missing_bucket_is_one_clear_message(object_store: ObjectStore, line: str) -> None:
    ran = command(*line.format("s3://test-no-such-bucket/store").split())
    assert ran.status == 1
    assert ran.err.startswith("hexdata: s3://test-no-such-bucket/store")
    assert "there is no such bucket" in ran.err
    assert len(ran.err.splitlines()) == 1


@pytest.mark.parametrize("opening", [Store.open, Loader])
def test_a_missing_bucket_is_told_in_python_too(object_store: ObjectStore, opening: Any) -> None:
    with pytest.raises(StoreError, match=r"there is no such bucket\. Check the address"):
        opening("s3://test-no-such-bucket/store")


@pytest.mark.parametrize(
    "line",
    [
        "verify {}",
        "sql {}|SELECT sum(value) FROM positions",
        "show {}|17",
        "report {}",
        "show {}/shards/train-000000.tar:1",
    ],
)
def test_denied_access_is_one_clear_message(both: Both, object_store: ObjectStore, line: str) -> None:
    store = both.bucket / "store"
    object_store.fail(Fault("GET", r"positions/|shards/", status=403, count=999))
    ran = command(*line.format(store).replace("|", " ", 0).split("|")[0].split(), *line.split("|")[1:])
    object_store.fail()
    assert ran.status == 1
    assert "the object store denies access" in ran.err
    assert ran.err.startswith(f"hexdata: {store}")
    assert len(ran.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None},
            "no credentials|Unable to locate credentials",
        ),
        ({"AWS_PROFILE": "no-such-profile"}, "no-such-profile"),
    ],
    ids=["no credentials", "no such profile"],
)
def test_without_credentials(both: Both, changed: dict[str, str | None], message: str) -> None:
    environment = {name: value for name, value in os.environ.items() if changed.get(name, "") is not None}
    environment |= {name: value for name, value in changed.items() if value is not None}
    ran = subprocess.run(
        [sys.executable, "-m", "hexdata", "verify", str(both.bucket / "store")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 1
    assert any(text in ran.stderr for text in message.split("|"))
    assert "in the environment or in a profile" in ran.stderr
    assert len(ran.stderr.splitlines()) == 1
    assert SECRET_KEY not in ran.stderr
    assert ACCESS_KEY not in ran.stderr


def test_passing_faults_are_outlasted(both: Both, object_store: ObjectStore) -> None:
    store = both.bucket / "store"
    expected = command("sql", store, "SELECT count(*), sum(value) FROM positions", "--json")
    for fault in (Fault("GET", "positions/", status=500), Fault("GET", "positions/", cut=100)):
        object_store.fail(fault)
        assert command("sql", store, "SELECT count(*), sum(value) FROM positions", "--json") == expected


# --- a config -----------------------------------------------------------------------------------------


def test_a_config_runs_from_address_to_address(
    bucket: UPath, demo_trmph: DemoTrmph, tmp_path: Path, object_store: ObjectStore
) -> None:
    demo_trmph(tmp_path / "games", games=12, files=2)
    put(tmp_path / "games", bucket / "games")
    manifests = []
    for place in (tmp_path, bucket):
        root = str(place).rstrip("/")
        config = tmp_path / "config.toml"
        config.write_text(f"""
            store = "{root}/store/"
            [convert]
            inputs = ["{root}/games"]
            workers = 1
            [shuffle]
            buckets = 2
            threads = 1
            [export]
            workers = 1
            shard_size = 256
            block_size = 64
            [verify]
            threads = 1
            round_trip = ["{root}/games"]
        """)
        result = run_config(load_config(config))
        assert [stage.stage for stage in result.stages] == ["convert", "shuffle", "export", "verify"]
        assert {s.path for s in result.stages[:2]} == {f"{root}/store/positions", f"{root}/store/shuffled"}
        sizes = {s.stage: s.bytes for s in result.stages}
        manifests.append(((place / "store" / "manifest.json").read_bytes(), sizes))
    assert manifests[0] == manifests[1]
    secrets = (ACCESS_KEY.encode(), SECRET_KEY.encode())
    for key in bucket.fs.find(bucket.path.strip("/")):
        content = bucket.fs.cat_file(key)
        assert not any(secret in content for secret in secrets), key


# --- the number of requests ---------------------------------------------------------------------------

REQUESTS = {"convert": 54, "shuffle": 49, "export": 49, "verify": 164}
"""Requests of each stage, without those for its lock. `docs/object-stores.md` contains them."""
SHARED_REQUESTS = {"convert": 263, "shuffle": 76, "export": 70, "verify": 164}
"""The same if machines share the unfinished work."""


class SharedWork(LocalEngine):
    """The local engine as one that runs tasks on several machines."""

    @property
    def machines(self) -> Machines:
        return Machines(1, 1, separate=True)


@needs_conditions
@pytest.mark.parametrize(
    ("engine", "most"), [(LocalEngine(), REQUESTS), (SharedWork(), SHARED_REQUESTS)], ids=["local", "shared"]
)
def test_the_number_of_requests_of_each_stage(
    bucket: UPath,
    demo_trmph: DemoTrmph,
    tmp_path: Path,
    object_store: ObjectStore,
    engine: LocalEngine,
    most: dict[str, int],
) -> None:
    demo_trmph(tmp_path / "games", games=60, files=2)
    put(tmp_path / "games", bucket / "games")
    store, games = bucket / "store", bucket / "games"
    object_store.requests()
    found: dict[str, list[tuple[str, str]]] = {}
    for stage, run in {
        "convert": lambda: convert_sources(games, store, ConvertOptions(workers=1), engine=engine),
        "shuffle": lambda: shuffle_store(store, ShuffleOptions(seed=5, buckets=3, threads=1), engine=engine),
        "export": lambda: export_shards(
            store, ExportOptions(shard_size=512, block_size=128, workers=1), engine=engine
        ),
        "verify": lambda: (
            verify_store(store, VerifyOptions(threads=1), engine=engine),
            check_round_trip(store, games),
        ),
    }.items():
        run()
        requests = [one for one in object_store.requests() if not one[1].endswith("/.lock")]
        found[stage] = [one for one in requests if one[1].startswith(f"/{bucket.path.strip('/')}")]
    counts = {stage: len(requests) for stage, requests in found.items()}
    assert all(counts[stage] <= most[stage] for stage in counts), counts
    tables = Counter(path for method, path in found["shuffle"] if method == "HEAD" and "/selection/" in path)
    assert max(tables.values(), default=0) <= 3  # one upload and two sessions
