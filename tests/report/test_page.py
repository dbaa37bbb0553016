"""Report page: content at every stage, self-containment, escaping of file contents, and determinism."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hexdata.convert import ConvertOptions, convert_sources
from hexdata.errors import ConfigError, StoreError
from hexdata.export import ExportOptions, export_shards
from hexdata.report import REPORT_NAME, Report, make_page, write_report
from hexdata.shuffle import ShuffleOptions, shuffle_store
from hexdata.store import Store
from hexdata.store.journal import JOURNAL_NAME
from hexdata.store.parquet import write_parquet
from hexdata.verify import verify_store

if TYPE_CHECKING:
    from tests.conftest import CopyStore, DemoTrmph, StoreBytes, WriteOddStore

EMPTY = {"meta", "link", "path", "use", "br"}
"""Void elements, which have no end tag."""


@dataclass
class Page(HTMLParser):
    """A page parsed by the HTML parser of the standard library."""

    text: str
    tags: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    words: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.feed(self.text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in EMPTY:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.words.append(data)

    def of(self, *names: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.tags if tag in names]

    @property
    def said(self) -> str:
        return re.sub(r"\s+", " ", "".join(self.words))


def page_of(store: Path) -> tuple[Report, Page]:
    report = write_report(store)
    return report, Page((store / REPORT_NAME).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def good_store(demo_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shutil.copytree(demo_store, tmp_path_factory.mktemp("good") / "store")


@pytest.fixture(scope="module")
def good(good_store: Path) -> tuple[Report, Page]:
    """The report on the demo store, and its page."""
    return page_of(good_store)


def check(page: Page) -> None:
    """Check the properties that every page must have."""
    assert page.open == []
    assert page.of("script", "iframe", "object", "embed", "img") == []
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    ids = Counter(attributes["id"] for _, attributes in page.tags if "id" in attributes)
    assert [name for name, count in ids.items() if count > 1] == []
    links = [attributes.get("href") or "" for _, attributes in page.tags if "href" in attributes]
    assert [link for link in links if link != "data:," and link.removeprefix("#") not in ids] == []
    assert [link for link in links if not link.startswith(("#", "data:,"))] == []
    urls = re.findall(r"url\(([^)]*)\)", page.text)
    assert [url for url in urls if url.removeprefix("#") not in ids] == []
    assert "@import" not in page.text
    assert all("scope" in attributes for attributes in page.of("th"))
    assert len(page.of("caption")) == len(page.of("table"))
    assert all(attributes.get("role") == "img" for attributes in page.of("svg"))
    assert len(page.of("h1")) == 1
    for attributes in page.of("svg"):
        assert (
            "aria-label" in attributes
            or attributes.get("aria-labelledby") in ids
            or "hexdata-svg" in str(attributes.get("class"))
        )
    assert not re.search(r"\bNone\b|\bnan\b|\binf\b|\{%", page.said)


def levels(report: Report) -> list[str]:
    return [answer.level for answer in report.verdict.answers]


def test_page_at_every_stage(
    good: tuple[Report, Page], trmph_store: Path, odd_shuffled: Path, copy_store: CopyStore
) -> None:
    anchors = {"fingerprinting", "lengths", "tiers", "openings", "sources", "stages", "lineage", "dispersion"}
    mixed = {"batches", "neighbours", "values", "figures"}
    converted = page_of(copy_store(trmph_store, "converted"))
    shuffled = page_of(copy_store(odd_shuffled, "shuffled"))
    for (_, page), is_shuffled in ((converted, False), (shuffled, True), (good, True)):
        check(page)
        found = {attributes.get("id") for attributes in page.of("section")}
        assert found - {None} == anchors | (mixed if is_shuffled else set())
        assert [a["href"] for a in page.of("a")] == [f"#{a['id']}" for a in page.of("section") if "id" in a]


def test_the_page_lets_nothing_run_or_load(good: tuple[Report, Page]) -> None:
    _, page = good
    (policy,) = [
        meta["content"] for meta in page.of("meta") if meta.get("http-equiv") == "Content-Security-Policy"
    ]
    allowed = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert allowed.pop("style-src") == "'unsafe-inline'"
    assert allowed.pop("img-src") == "data:"
    assert allowed == dict.fromkeys(("default-src", "base-uri", "form-action"), "'none'")


def test_verdict_of_a_good_store(demo_store: Path, good: tuple[Report, Page]) -> None:
    report, page = good
    assert report.verdict.level == "good"
    assert levels(report) == ["good", "good", "good"]
    assert report.verdict.headline == "Indistinguishable from a random shuffle, complete, ready for training."
    assert report.verdict.headline in page.said
    positions = Store.open(demo_store).manifest.counts["positions"]
    assert (
        f"{positions:,} records were read and gave {positions:,} positions; none was rejected." in page.said
    )
    for stage in report.facts.stages:
        assert stage.digest in page.said
    assert "not recorded" not in page.said


@pytest.mark.usefixtures("no_charts")
def test_singular_and_plural(tmp_path: Path) -> None:
    """Two games of 5 and 7 positions, the second one twice: 5, 7, 7 have median 7 and mean 19/3."""
    source = tmp_path / "in" / "games.trmph"
    source.parent.mkdir()
    source.write_text("#3,a1b1a2b2 r\n" + 2 * "#3,a1b1a2b2c1a3 b\n")
    convert_sources([source.parent], tmp_path / "store", ConvertOptions(workers=1, val=0, test=0))
    shuffle_store(tmp_path / "store", ShuffleOptions(threads=1))
    export_shards(tmp_path / "store", ExportOptions(workers=1))
    report, page = page_of(tmp_path / "store")
    assert "1 source with 19 positions of 3 games. Duplicate games: 1. Rejected records: 0." in page.said
    assert "3 games of 5 to 7 positions; the median is 7, the mean 6.3." in page.said
    assert "All games begin with a1." in page.said
    assert "1 of 3 games is a duplicate or mirror image of another; it is in the same split" in page.said
    assert "3 \u00d7 3" in page.said
    assert [command for _, command in report.verdict.todo] == [
        f"hexdata shuffle {tmp_path}/store --dedup symmetric",
        f"hexdata verify {tmp_path}/store",
        f"Loader('{tmp_path}/store')",
        f"hexdata browse {tmp_path}/store",
    ]


def test_boards_have_a_legend(tmp_path: Path) -> None:
    """Ten games with one first move, so that the share won by blue is shown too."""
    source = tmp_path / "in" / "games.trmph"
    source.parent.mkdir()
    lines = [f"#3,a1{move} {'b' if move < 'b2' else 'r'}" for move in ("a2", "a3", "b1", "b2", "b3")]
    source.write_text("\n".join([*lines, *(f"{line[:7]}c3{line[7:]}" for line in lines), ""]))
    convert_sources([source.parent], tmp_path / "store", ConvertOptions(workers=1))
    _, page = page_of(tmp_path / "store")
    assert page.text.count("share of the games") == 2
    assert page.text.count("share won by blue") == 1


def test_the_page_mentions_sampling(good: tuple[Report, Page]) -> None:
    report, whole = good
    assert "were measured on" not in whole.said
    assert report.facts.quality is not None
    sampled = replace(report.facts.quality, sampled_before=100)
    page = Page(make_page(replace(report.facts, quality=sampled), report.verdict))
    assert f"were measured on 100 of {sampled.positions:,} positions" in page.said
    assert page.said.count("were measured on") == 1


@pytest.mark.usefixtures("no_charts")
def test_a_converted_store_can_be_trained_from_or_shuffled(trmph_store: Path, copy_store: CopyStore) -> None:
    store = copy_store(trmph_store)
    report, page = page_of(store)
    assert levels(report) == ["note", "good", "note"]
    assert report.verdict.headline == "Converted and complete. Not shuffled yet."
    assert report.verdict.todo[:2] == [
        ("Train from its games, in Python", f"Loader({str(store)!r})"),
        ("Shuffle it, to write shards", f"hexdata shuffle {store}"),
    ]
    assert "1 record was rejected" in page.said


@pytest.mark.usefixtures("no_charts")
def test_an_unshuffled_order_is_bad(demo_store: Path, copy_store: CopyStore) -> None:
    """The buckets contain the input order."""
    store = Store.open(copy_store(demo_store))
    paths = store.files("shuffled/train")
    rows = pa.concat_tables([pq.read_table(path) for path in paths]).sort_by("position_id")
    start = 0
    for name, facts in store.manifest.files_in("shuffled/train").items():
        part = rows.slice(start, facts.rows)
        store.manifest.files[name] = write_parquet(store.path / name, rows.schema, [part])
        start += facts.rows
    store.manifest.save(store.path)
    report, page = page_of(store.path)
    check(page)
    assert report.verdict.level == levels(report)[0] == "bad"
    assert report.verdict.headline == "This shuffle is faulty: do not train from it."
    assert report.verdict.todo[0] == ("List the faults", f"hexdata verify {store.path}")
    assert "FAILED" in page.said


@pytest.mark.usefixtures("no_charts")
def test_a_shuffle_older_than_the_positions_is_out_of_date(
    trmph_store: Path, copy_store: CopyStore, demo_trmph: DemoTrmph, tmp_path: Path
) -> None:
    store = copy_store(trmph_store)
    shuffle_store(store, ShuffleOptions(threads=1, seed=8))
    more = demo_trmph(tmp_path / "more", games=3, files=1, seed=2)[0].rename(tmp_path / "more" / "new.trmph")
    convert_sources([more], store, ConvertOptions(workers=1, val=0.15, test=0.1))
    report, page = page_of(store)
    check(page)
    assert levels(report)[0] == "bad"
    assert report.verdict.headline == "The shuffle is out of date: shuffle again."
    again = dict(report.verdict.todo)["Shuffle the current positions"]
    assert again.startswith(f"hexdata shuffle {store} --seed 8 ")
    assert report.facts.quality is None


@pytest.mark.usefixtures("no_charts")
def test_missing_positions_are_bad(demo_store: Path, copy_store: CopyStore) -> None:
    """A count in the manifest is inconsistent."""
    store = Store.open(copy_store(demo_store))
    store.manifest.stages["shuffle"]["positions"] -= 1
    store.manifest.save(store.path)
    report, page = page_of(store.path)
    assert report.verdict.headline == "This store is incomplete: do not train from it."
    assert levels(report)[1] == "bad"
    assert "The shuffle has" in page.said


@pytest.mark.usefixtures("no_charts")
def test_missing_files_are_bad(demo_store: Path, copy_store: CopyStore) -> None:
    """The report does not read shards but checks that they exist."""
    store = copy_store(demo_store)
    shard = store / "shards" / "train-000000.tar"
    shard.write_bytes(shard.read_bytes()[:-512])
    report, page = page_of(store)
    assert report.verdict.headline == "This store is incomplete: do not train from it."
    assert "of export, 1 is missing or truncated, for example shards/train-000000.tar." in page.said
    shutil.rmtree(store / "shards")
    assert "are missing or truncated, for example shards/" in page_of(store)[1].said


@pytest.mark.usefixtures("no_charts")
@pytest.mark.parametrize("count", [0, 1, 2])
def test_very_few_positions(
    count: int, tmp_path: Path, write_odd_store: WriteOddStore, copy_store: CopyStore
) -> None:
    if count:
        store = write_odd_store(tmp_path / "store", count, 1)
        shuffle_store(store, ShuffleOptions(threads=1))
    else:
        store = tmp_path / "store"
        (tmp_path / "empty.trmph").touch()
        convert_sources([tmp_path / "empty.trmph"], store, ConvertOptions(workers=1))
    report, page = page_of(store)
    check(page)
    assert report.facts.counts["positions"] == count
    assert report.verdict.level == "note"
    if not count:
        assert report.verdict.headline == "This store contains no positions yet."
    if count == 1:
        assert report.verdict.answers[0].short == "Too small to measure"


@pytest.mark.usefixtures("no_charts")
def test_a_store_without_games_tiers_or_moves(tmp_path: Path, write_odd_store: WriteOddStore) -> None:
    store = Store.open(write_odd_store(tmp_path / "store", 300, 1))
    name, *_ = store.manifest.files_in("positions")
    table = pq.read_table(store.path / name)
    for column in ("game_id", "value_sample_tier", "move"):
        index = table.schema.get_field_index(column)
        table = table.set_column(index, table.schema.field(column), pa.nulls(300, table.schema.types[index]))
    store.manifest.files[name] = write_parquet(store.path / name, table.schema, [table])
    store.manifest.files.pop("games/part-000000.parquet")
    store.manifest.counts["games"] = 0
    store.manifest.save(store.path)
    shuffle_store(store.path, ShuffleOptions(threads=1, buckets=2))
    report, page = page_of(store.path)
    check(page)
    assert report.facts.spread is None
    for text in ("The store contains no games", "No position has a value sample tier", "no opening is known"):
        assert text in page.said


@pytest.mark.usefixtures("no_charts")
def test_splits_without_a_training_split(trmph_store: Path, copy_store: CopyStore) -> None:
    store = copy_store(trmph_store)
    shuffle_store(store, ShuffleOptions(threads=1, where="split <> 'train'"))
    report, page = page_of(store)
    check(page)
    assert levels(report)[0] == "note"
    assert "There is no train split" in page.said
    assert "by --where" in page.said


# --- escaping ----------------------------------------------------------------------------------

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&amp;{{7*7}}</style>"


@pytest.mark.usefixtures("no_charts")
def test_texts_from_files_are_escaped(tmp_path: Path, demo_trmph: DemoTrmph) -> None:
    path = demo_trmph(tmp_path / "games", games=4, files=1)[0]
    source = tmp_path / "in" / f"{HOSTILE}.trmph"  # nested folders, because the name contains slashes
    source.parent.mkdir(parents=True)
    source.write_text(f"{path.read_text()}#7,{HOSTILE} b\n")
    convert_sources([tmp_path / "in"], tmp_path / "store", ConvertOptions(workers=1, max_reject_rate=1))
    folder = (tmp_path / "store").rename(tmp_path / "<b>store&lt;")
    report, page = page_of(folder)
    check(page)
    assert f"{HOSTILE}.trmph" in page.said
    assert report.facts.counts["rejected"] == 1
    (reject,) = report.facts.tables["rejects"]
    assert "<script>" in reject["example"]
    assert reject["example"] in page.said
    assert "<b>store&lt;" in page.said


# --- derived data -----------------------------------------------------------------------------------------


def test_the_same_store_gives_the_same_page(demo_store: Path, copy_store: CopyStore, tmp_path: Path) -> None:
    """The page does not depend on hash seeds; only the path in commands and the journal may change it."""
    stores = [copy_store(demo_store, f"{name}/store") for name in ("here", "elsewhere")]
    write_report(stores[0])
    code = f"from hexdata.report import write_report; write_report({str(stores[1])!r})"
    environment = os.environ | {"PYTHONHASHSEED": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, cwd=tmp_path)
    pages = [
        (store / REPORT_NAME).read_text(encoding="utf-8").replace(str(store), "STORE") for store in stores
    ]
    store = stores[0]
    assert len(set(pages)) == 1
    (store / JOURNAL_NAME).unlink()
    write_report(store)
    assert b"not recorded" in (store / REPORT_NAME).read_bytes()


@pytest.mark.usefixtures("no_charts")
def test_the_page_is_not_part_of_the_store(
    demo_store: Path, copy_store: CopyStore, store_bytes: StoreBytes
) -> None:
    store = copy_store(demo_store)
    before = store_bytes(store)
    report = write_report(store)
    assert report.path == str(store / REPORT_NAME)
    assert report.bytes == (store / REPORT_NAME).stat().st_size
    after = store_bytes(store)
    assert after.pop(REPORT_NAME)
    assert after == before
    assert verify_store(store).ok
    assert shuffle_store(store, ShuffleOptions(threads=1, buckets=40, seed=3)).already_done


@pytest.mark.usefixtures("no_charts")
def test_output_outside_does_not_change_the_store(
    demo_store: Path, store_bytes: StoreBytes, tmp_path: Path
) -> None:
    before = store_bytes(demo_store)
    report = write_report(demo_store, tmp_path / "new" / "page.html")
    assert Path(report.path).read_text().startswith("<!doctype html>")
    assert store_bytes(demo_store) == before


def test_store_files_are_not_overwritten(
    trmph_store: Path, copy_store: CopyStore, store_bytes: StoreBytes
) -> None:
    store = copy_store(trmph_store)
    before = store_bytes(store)
    for name in ("manifest.json", "positions/part-000000.parquet", "page"):
        with pytest.raises(ConfigError, match="unsupported suffix for a page"):
            write_report(store, store / name)
    assert store_bytes(store) == before


def test_a_folder_without_a_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="an empty folder"):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []
