"""The report: its numbers, its verdict at every stage, and a page that runs and loads nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hexdata.convert import ConvertOptions, convert_sources
from hexdata.errors import ConfigError
from hexdata.export import ExportOptions, export_shards
from hexdata.report import REPORT_NAME, Report, write_report
from hexdata.shuffle import ShuffleOptions, shuffle_store
from hexdata.store import Store
from hexdata.store.commands import stage_command
from hexdata.store.journal import JOURNAL_NAME
from hexdata.store.parquet import write_parquet
from hexdata.verify import verify_store
from tests.kit.command_line import hexdata_run
from tests.pages.conftest import HOSTILE

EMPTY = {"meta", "link", "path", "use", "br"}
"""Void elements, which have no end tag."""


class Page(HTMLParser):
    """A page parsed by the HTML parser of the standard library, and the properties that every page has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text, self.tags, self.open = text, list[tuple[str, dict[str, str | None]]](), list[str]()
        self.words, self.codes = list[str](), list[str]()
        self.feed(text)
        self.close()
        self.said = re.sub(r"\s+", " ", "".join(self.words))
        self.check()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "code":
            self.codes.append("")
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in EMPTY:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.words.append(data)
        if "code" in self.open:
            self.codes[-1] += data

    def of(self, *names: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.tags if tag in names]

    def check(self) -> None:
        assert self.open == []
        assert self.of("script", "iframe", "object", "embed", "img") == []
        assert not [name for _, attributes in self.tags for name in attributes if name.startswith("on")]
        ids = Counter(attributes["id"] for _, attributes in self.tags if "id" in attributes)
        assert set(ids.values()) <= {1}
        links = [attributes.get("href") or "" for _, attributes in self.tags if "href" in attributes]
        assert [link for link in links if link != "data:," and link.removeprefix("#") not in ids] == []
        urls = re.findall(r"url\(([^)]*)\)", self.text)
        assert [url for url in urls if url.removeprefix("#") not in ids] == []
        assert "@import" not in self.text
        assert all("scope" in attributes for attributes in self.of("th"))
        assert len(self.of("caption")) == len(self.of("table"))
        assert len(self.of("h1")) == 1
        for svg in self.of("svg"):
            named = "aria-label" in svg or svg.get("aria-labelledby") in ids
            assert svg["role"] == "img"
            assert named or "hexdata-svg" in str(svg.get("class"))
        assert not re.search(r"\bNone\b|\bnan\b|\binf\b|\{%", self.said)
        metas = [meta["content"] for meta in self.of("meta") if "http-equiv" in meta]
        policy = dict(part.split(" ", 1) for part in str(*metas).split("; "))
        assert (policy.pop("style-src"), policy.pop("img-src")) == ("'unsafe-inline'", "data:")
        assert policy == dict.fromkeys(("default-src", "base-uri", "form-action"), "'none'")


def page_of(store: Path, output: Path | None = None) -> tuple[Report, Page]:
    report = write_report(store, output)
    return report, Page(Path(report.path).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def reports(demo_store, odd_shuffled, trmph_store, browsed_store, tmp_path_factory) -> dict[str, Any]:
    """The report of each store, and its page."""
    folder = tmp_path_factory.mktemp("reports")
    stores = {"good": demo_store, "odd": odd_shuffled, "converted": trmph_store, "hostile": browsed_store}
    return {name: page_of(store, folder / f"{name}.html") for name, store in stores.items()}


def levels(report: Report) -> list[str]:
    assert report.verdict.level == max((a.level for a in report.verdict.answers), key="good note bad".index)
    return [answer.level for answer in report.verdict.answers]


# --- numbers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["good", "odd"])
def test_spread_counts_the_buckets_of_each_game(reports, kind: str) -> None:
    """Forty buckets are counted directly; three buckets are replaced by 64 equal pieces."""
    facts = reports[kind][0].facts
    store, spread = Path(facts.store), facts.spread
    assert spread is not None
    buckets = sorted((store / "shuffled" / "train").glob("*.parquet"))
    positions = Store.open(store).manifest.counts["positions"]
    split = [(number, row) for number, path in enumerate(buckets) for row in pq.read_table(path).to_pylist()]
    pieces, by_bucket = (40, True) if len(buckets) == 40 else (64, False)
    assert (spread.pieces, spread.by_bucket) == (pieces, by_bucket)
    before, after = defaultdict(set), defaultdict(set)
    for rank, (bucket, row) in enumerate(split):
        if row["game_id"] is not None:
            before[row["game_id"]].add(row["position_id"] * pieces // positions)
            after[row["game_id"]].add(bucket if by_bucket else rank * pieces // len(split))
    for reached, counted in ((before, spread.before), (after, spread.after)):
        assert Counter(dict(enumerate(counted))) == Counter(map(len, reached.values()))
    assert spread.games == len(before) == pytest.approx(sum(spread.chance))


def test_the_commands_of_the_lineage_reproduce_the_digests(reports, demo_store, tmp_path) -> None:
    facts, again = reports["good"][0].facts, tmp_path / "again"
    for stage in facts.stages:
        if stage.lineage:
            words = stage_command(stage.stage, stage.lineage, "STORE").split()
            arguments = {"STORE": str(again), "INPUT...": str(demo_store.parent / "legacy")}
            alone = "--threads" if stage.stage == "shuffle" else "--workers"  # does not change the bytes
            done = hexdata_run(*(arguments.get(word, word) for word in words[1:]), alone, 1)
            assert done.status == 0, done.err
    repeated = write_report(again).facts
    assert [stage.digest for stage in repeated.stages] == [stage.digest for stage in facts.stages]
    assert repeated.manifest_sha256 == facts.manifest_sha256


# --- verdicts -------------------------------------------------------------------------------------------


def test_page_at_every_stage(reports, trmph_store: Path) -> None:
    contents = {"fingerprinting", "input", "lengths", "tiers", "openings", "sources", "stages", "lineage"}
    mixed = {"dispersion", "batches", "neighbours", "values", "figures"}
    for name, (_, page) in reports.items():
        wanted = contents if name == "converted" else contents | mixed
        assert {attributes.get("id") for attributes in page.of("section")} - {None} == wanted
        assert [a["href"] for a in page.of("a")] == [f"#{a['id']}" for a in page.of("section") if "id" in a]
    report, page = reports["converted"]
    assert levels(report) == ["good", "good", "note"]
    assert report.verdict.headline.startswith("Ready to train")
    commands = [f'Loader("{trmph_store}")', f"hexdata browse {trmph_store}", f"hexdata shuffle {trmph_store}"]
    assert [step for _, step in report.verdict.todo] == commands
    assert "Rejected: 1 record (" in page.said
    assert "game after game" in page.said


def without_a_part_of_a_shard(store: Store) -> None:
    shard = store.path / "shards" / "train-000000.tar"
    shard.write_bytes(shard.read_bytes()[:-512])


def in_input_order(store: Store) -> None:
    """Let the buckets contain the input order."""
    paths = store.files("shuffled/train")
    rows = pa.concat_tables([pq.read_table(path) for path in paths]).sort_by("position_id")
    for name, facts in store.manifest.files_in("shuffled/train").items():
        store.manifest.files[name] = write_parquet(
            store.path / name, rows.schema, [rows.slice(0, facts.rows)]
        )
        rows = rows.slice(facts.rows)
    store.manifest.save(store.path)


def with_more_positions(store: Store) -> None:
    more = store.path.parent / "more.trmph"
    more.write_text("#13,a1b2c3 b\n")
    convert_sources([more], store.path, ConvertOptions(workers=1, val=0.1, test=0.05))


@pytest.mark.parametrize(
    ("change", "headline", "step"),
    [
        (without_a_part_of_a_shard, "This store is incomplete", "hexdata verify {}"),
        (in_input_order, "This shuffle is faulty", "hexdata verify {}"),
        (with_more_positions, "The shuffle is out of date", "hexdata shuffle {} --seed 3 --buckets 40"),
    ],
)
def test_verdict_of_a_bad_store(
    demo_store: Path, copy_store, change: Callable[[Store], None], headline: str, step: str
) -> None:
    store = copy_store(demo_store)
    change(Store.open(store))
    report, page = page_of(store)
    assert report.verdict.headline.startswith(headline)
    assert "bad" in levels(report)
    assert report.verdict.todo[0][1].startswith(step.format(store))
    if change is without_a_part_of_a_shard:
        assert "shards/train-000000.tar" in page.said
    elif change is in_input_order:
        assert "FAILED" in page.said
    else:
        assert report.facts.quality is None


def test_a_shuffle_without_its_buckets_is_not_measured(demo_store: Path, copy_store) -> None:
    store = copy_store(demo_store)
    options = ExportOptions(workers=1, shard_size=2048, block_size=512, free_buckets=True)
    export_shards(store, options)
    report, page = page_of(store)
    assert (levels(report)[:2], report.facts.quality) == (["note", "good"], None)
    assert f"hexdata shuffle {store} --seed 3 --buckets 40" in page.said
    counted = {row["split"]: row["shuffled"] for row in report.facts.tables["splits"]}
    assert counted == Store.open(store).manifest.stages["shuffle"]["splits"]


SMALL: dict[str, tuple[str, dict[str, Any], str]] = {
    "empty": ("", {}, "This store contains no positions yet."),
    "three games": ("#3,a1b1a2b2 r\n" + 2 * "#3,a1b1a2b2c1a3 b\n", {}, "the median is 7, the mean 6.3."),
    "one position each": ("#3,a1b1a2b2 r\n#3,b2a1b1 r\n", {"per_game": 1}, "a game gives one position."),
    "no train": ("#3,a1b1a2b2 r\n#3,b2a1b1 r\n", {"where": "split <> 'train'"}, "has no train split"),
}


@pytest.mark.parametrize("name", SMALL)
def test_small_stores(tmp_path: Path, name: str) -> None:
    games, options, told = SMALL[name]
    (tmp_path / "in.trmph").write_text(games)
    val = 0.999 if name == "no train" else 0
    convert_sources([tmp_path / "in.trmph"], tmp_path / "store", ConvertOptions(workers=1, val=val, test=0))
    if games:
        shuffle_store(tmp_path / "store", ShuffleOptions(threads=1, **options))
    report, page = page_of(tmp_path / "store")
    assert told in page.said
    if name == "three games":
        assert report.facts.duplicates == 1
        assert 'Loader("' in dict(report.verdict.todo)["Train without duplicate games"]


# --- texts and commands ---------------------------------------------------------------------------------


def test_a_read_only_folder_is_named_before_the_store_is_read(odd_shuffled, monkeypatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ConfigError, match=r"read-only.*--output"):
        write_report(odd_shuffled)


@pytest.mark.parametrize("name", ['-it\'s "quoted" $HOME `id` \\', "two\nlines ü\u202egnp"])
def test_commands_have_the_path_of_the_store(name, odd_shuffled, copy_store, monkeypatch, tmp_path) -> None:
    """Bash and Python read the path of the store, which does not depend on the working folder."""
    store = copy_store(odd_shuffled, name)
    monkeypatch.chdir(store.parent)
    _, page = page_of(Path(name), tmp_path / "page.html")
    assert "\u202e" not in "".join(page.codes)
    commands = [code for code in page.codes if code.startswith("hexdata ")]
    script = "\n".join(f"set -- {command}; printf '%s\\0' \"$@\" END" for command in commands)
    done = subprocess.run(["bash", "-c", script], check=True, capture_output=True)
    paths = [word for word in done.stdout.decode().split("\0") if word.startswith("/")]
    assert len(paths) == len(commands) > 3
    assert set(paths) <= {str(store), f"{store}-with-val"}
    loaders = [code for code in page.codes if code.startswith("Loader(")]
    assert {eval(code, {"Loader": lambda path, **_: path}) for code in loaders} == {str(store)}


def test_texts_from_files_are_escaped(reports, browsed_store: Path) -> None:
    report, page = reports["hostile"]
    assert HOSTILE.replace("/", "\\") in page.said
    assert browsed_store.name in page.said
    examples = [row["example"] for row in report.facts.tables["rejects"]]
    assert any("<script>" in example for example in examples)
    assert all(example in page.said for example in examples)


def test_the_same_store_gives_the_same_page_beside_it(
    reports, demo_store: Path, copy_store, store_bytes, tmp_path: Path
) -> None:
    """It does not depend on hash seeds; only paths and the journal may change it. No table lists it."""
    store = copy_store(demo_store)
    before = store_bytes(store)
    code = f"from hexdata.report import write_report; write_report({str(store)!r})"
    environment = os.environ | {"PYTHONHASHSEED": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, cwd=tmp_path)
    text = (store / REPORT_NAME).read_text("utf-8").replace(str(store), str(demo_store))
    assert text == reports["good"][1].text
    for name in ("manifest.json", "positions/part-000000.parquet", "page"):
        with pytest.raises(ConfigError, match="unsupported suffix for a page"):
            write_report(store, store / name)
    after = store_bytes(store)
    assert after.pop(REPORT_NAME)
    assert after == before
    assert verify_store(store).ok
    (store / JOURNAL_NAME).unlink()
    report, page = page_of(store)
    assert "not recorded" in page.said
    assert (report.path, report.bytes) == (str(store / REPORT_NAME), len(page.text.encode()))
