"""Sentences of the report on small and unusual stores: none is false, ungrammatical or without content."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from math import log
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import pytest

from hexdata.convert import ConvertOptions, convert_sources
from hexdata.export import ExportOptions, export_shards
from hexdata.progress import SILENT
from hexdata.quality import Quality
from hexdata.report.contents import contents_sections
from hexdata.report.facts import ReportFacts, gather_facts
from hexdata.report.fingerprinting import fingerprinting_section
from hexdata.report.mixing import mixing_sections
from hexdata.report.page import Section, render_page
from hexdata.report.verdict import judge, tiles
from hexdata.shuffle import ShuffleOptions, shuffle_store
from hexdata.sql import SqlLimits

if TYPE_CHECKING:
    from tests.conftest import CopyStore, WriteOddStore

ROOT = Path(__file__).parents[2]
ONE, TWO, THREE = "#3,a1b1a2b2 r\n", "#3,a1b1a2b2c1a3 b\n", "#3,b2a1b1c1a3 b\n"
"""Games of 5, 7 and 6 positions."""


pytestmark = pytest.mark.usefixtures("no_charts")


def facts_of(store: Path) -> ReportFacts:
    return gather_facts(store, SqlLimits(threads=1), SILENT)


def make(folder: Path, games: str, *, val: float = 0.0, name: str = "store", **shuffled: Any) -> Path:
    """Return a store of TRMPH games, shuffled unless ``shuffled`` is ``buckets=0``."""
    (folder / "in").mkdir()
    (folder / "in" / "games.trmph").write_text(games)
    store = folder / name
    convert_sources([folder / "in"], store, ConvertOptions(workers=1, val=val, test=0))
    if shuffled.get("buckets") != 0:
        shuffle_store(store, ShuffleOptions(threads=1, **shuffled))
    return store


def sections_of(facts: ReportFacts) -> list[Section]:
    return [fingerprinting_section(facts), *mixing_sections(facts), *contents_sections(facts)]


def sentences_of(facts: ReportFacts) -> Iterator[str]:
    verdict = judge(facts)
    yield verdict.headline
    for answer in verdict.answers:
        yield answer.text
    for count, unit in tiles(facts):
        yield f"{count} {unit}"
    for section in sections_of(facts):
        yield section.finding
        yield section.reading
        for _, caption in section.pictures:
            yield caption
        for table in section.tables:
            yield table.more
            if section.anchor == "fingerprinting":
                for row in table.rows:
                    yield row[1]


def check(facts: ReportFacts) -> str:
    """Check the properties that all sentences must have; return the finding about fingerprinting."""
    for text in filter(None, sentences_of(facts)):
        assert not re.search(
            r"(?<![\d,.])1 (\w+ )?(positions|games|records|sources|buckets|files|pairs)\b", text
        ), text
        assert not re.search(r"\b(nan|inf|None|NULL)\b", text), text
        assert "  " not in text, text
        assert "100.0%" not in text, text
    section = fingerprinting_section(facts)
    assert section.finding.endswith(".")
    assert "Fingerprinting means that a network recognizes the game of a position" in section.reading
    return section.finding


@pytest.mark.parametrize(
    ("games", "finding", "others"),
    [
        (
            ONE,
            "All positions of the train split are of one game, so every batch is, in any order. In each "
            "epoch, a game gives 5 positions, which no order changes.",
            ["The only game has 5 positions.", "The only game begins with a1."],
        ),
        (
            ONE + TWO,
            "The train split has 12 positions, so a batch of 256 contains all of them, in any order. In each "
            "epoch, a game gives 6 positions on average, which no order changes.",
            ["2 games of 5 to 7 positions; the median is 5, the mean 6.0.", "All games begin with a1."],
        ),
        (
            TWO + THREE,
            "a game gives 6.5 positions on average",
            ["2 of 9 cells occur as first moves. The most frequent ones begin 1 game of 2 each."],
        ),
        (ONE + 2 * THREE, "", ["The most frequent one, b2, begins 66.7% of 3 games."]),
    ],
    ids=["one game", "two games", "a fraction", "three games"],
)
def test_few_games(games: str, finding: str, others: list[str], tmp_path: Path) -> None:
    facts = facts_of(make(tmp_path, games))
    assert finding in check(facts)
    texts = list(sentences_of(facts))
    for other in others:
        assert any(other in text for text in texts), (other, texts)
    assert "no games in val: convert into a new store" in texts
    assert "meets itself" not in " ".join(texts)


def test_one_position(tmp_path: Path, write_odd_store: WriteOddStore) -> None:
    store = write_odd_store(tmp_path / "store", 1, 1)
    shuffle_store(store, ShuffleOptions(threads=1))
    facts = facts_of(store)
    assert "No game has two positions in the train split" in check(facts)
    assert any("There are too few positions to judge a figure." in text for text in sentences_of(facts))


def test_a_store_that_is_not_shuffled(tmp_path: Path) -> None:
    facts = facts_of(make(tmp_path, ONE + TWO, buckets=0))
    assert check(facts) == (
        "This store is not shuffled yet. The loader delivers the games in a random order, a new one in every "
        "epoch. In each epoch, a game gives 6 positions on average, which no order changes."
    )


def test_a_store_without_positions(tmp_path: Path) -> None:
    facts = facts_of(make(tmp_path, "", buckets=0))
    assert check(facts) == "The store contains no positions."
    assert not fingerprinting_section(facts).tables


@pytest.mark.parametrize("shuffled", [True, False])
def test_no_training_split(shuffled: bool, trmph_store: Path, copy_store: CopyStore, tmp_path: Path) -> None:
    if shuffled:
        store = copy_store(trmph_store)
        shuffle_store(store, ShuffleOptions(threads=1, where="split <> 'train'"))
        assert "The shuffle has no train split." in check(facts_of(store))
    else:
        store = make(tmp_path, ONE + TWO, val=0.999, buckets=0)
        assert check(facts_of(store)) == "The store contains no games of the train split."


def test_one_position_of_each_game(trmph_store: Path, copy_store: CopyStore) -> None:
    store = copy_store(trmph_store)
    shuffle_store(store, ShuffleOptions(threads=1, per_game=1))
    assert check(facts_of(store)) == (
        "No game has two positions in the train split, so no batch contains two positions of one game. In "
        "each epoch, a game gives one position."
    )


def test_a_measured_store(demo_store: Path) -> None:
    """The sentence has the mean number of positions of the games in the shuffle."""
    facts = facts_of(demo_store)
    train = next(row for row in facts.tables["splits"] if row["split"] == "train")
    each = f"{train['positions'] / train['games']:.0f}"
    assert check(facts) == (
        "In a batch of 256, a game meets itself as often as in a random shuffle. It still gives "
        f"{each} positions an epoch on average, which no order changes."
    )
    assert check(facts) in judge(facts).answers[0].text
    batches = next(section for section in sections_of(facts) if section.anchor == "batches")
    assert re.fullmatch(
        r"In a batch of 256, a game meets itself as often as in a random shuffle\. Of the 32,640 pairs of "
        r"positions in a batch, [\d.,]+ are of the same game on average; [\d.,]+ are expected\. In the input "
        r"order, [\d,]+ are\.",
        batches.finding,
    )
    assert (
        "A game meets itself if two of its positions are in one batch."
        in fingerprinting_section(facts).reading
    )


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        (
            {"ok": False, "after": 1e6},
            "In a batch of 256, a game meets itself more often than in a random shuffle.",
        ),
        (
            {"ok": False, "after": 0.5},
            "In a batch of 256, a game meets itself less often than in a random shuffle.",
        ),
        (
            {"judged": False, "after": 1.5},
            "A batch of 256 contains 1.5 pairs of positions of one game, which cannot be judged.",
        ),
    ],
)
def test_other_batches(change: dict[str, Any], finding: str, demo_store: Path) -> None:
    facts = facts_of(demo_store)
    assert facts.quality is not None
    assert finding in check(replace(facts, quality=changed(facts.quality, **change)))


def test_whole_games_in_buckets(demo_store: Path) -> None:
    """Where buckets contain whole games, one game in each bucket does not mean one game in the store."""
    facts = facts_of(demo_store)
    assert facts.quality is not None
    quality = replace(facts.quality, reference="each bucket in uniform order")
    quality.lags[0] = replace(quality.lags[0], expected=1.0)
    assert "as often as in a random shuffle of its bucket." in check(replace(facts, quality=quality))


def changed(quality: Quality, **change: Any) -> Quality:
    return replace(
        quality,
        figures=[replace(each, **change) if each.name == "batch-256" else each for each in quality.figures],
    )


# --- commands ---------------------------------------------------------------------------------------------

ODD_NAMES = [
    "a store",
    "it's",
    '"quoted"',
    "$HOME `id` \\",
    "-v",
    "two\nlines",
    "<b>&amp;",
    "sub\u202egnp",
    "ü",
]


@pytest.fixture(scope="module")
def small_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = make(tmp_path_factory.mktemp("small"), 2 * ONE + TWO)
    export_shards(store, ExportOptions(workers=1))
    return store


@pytest.mark.parametrize("name", ODD_NAMES)
def test_commands_have_the_path_of_the_store(
    name: str, small_store: Path, copy_store: CopyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bash reads from each command the path of the store, which does not depend on the working folder."""
    store = copy_store(small_store, name)
    monkeypatch.chdir(store.parent)
    facts = facts_of(Path(name))
    commands = [command for _, command in judge(facts).todo if command.startswith("hexdata ")]
    commands += [
        row[1]
        for section in contents_sections(facts)
        if section.anchor == "lineage"
        for row in section.tables[0].rows
        if row[1]
    ]
    codes = [row[2] for row in fingerprinting_section(facts).tables[0].rows]
    commands += [code for code in codes if code.startswith("hexdata")]
    assert len(commands) == 3 + 3 + 3
    script = "\n".join(f"set -- {command}; printf '%s\\0' \"$@\" END" for command in commands)
    assert "\u202e" not in script
    words = (
        subprocess.run(["bash", "-c", script], check=True, capture_output=True).stdout.decode().split("\0")
    )
    paths = [word for word in words if word.startswith("/")]
    assert set(paths) == {str(store), f"{store}-with-val"}
    assert len(paths) == len(commands)
    loaders = [code for code in codes if code.startswith("Loader(")]
    loaders += [code for _, code in judge(facts).todo if code.startswith("Loader(")]
    assert len(loaders) == 1 + 1
    for code in loaders:
        assert eval(code, {"Loader": lambda path, **_: path}) == str(store)


# --- documentation ----------------------------------------------------------------------------------------


def test_named_documents_exist(demo_store: Path) -> None:
    named = {page for section in sections_of(facts_of(demo_store)) for page in section.documents}
    assert {"notebooks", "quality", "howto/splits"} <= named
    assert [page for page in named if not (ROOT / "docs" / f"{page}.md").exists()] == []


@pytest.mark.parametrize("entries", [None, ["Documentation, https://docs.example/hexdata/"]])
def test_links_to_the_documentation(
    entries: list[str] | None, demo_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page links to the documentation if the metadata of the package have its address."""

    class Metadata:
        def get_all(self, name: str) -> list[str] | None:
            return entries if name == "Project-URL" else None

    monkeypatch.setattr("hexdata.report.page.metadata.metadata", lambda _: Metadata())
    facts = facts_of(demo_store)
    page = render_page(
        name="store", version="1", verdict=judge(facts), tiles=[], sections=[fingerprinting_section(facts)]
    )
    linked = re.findall(r'href="(https?:[^"]*)"', page)
    assert ("docs/howto/splits.md" in page) == (entries is None)
    pages = ("notebooks", "howto/splits", "batches", "report", "quality")
    assert linked == (
        [] if entries is None else [f"https://docs.example/hexdata/{page}.html" for page in pages]
    )


def test_figures_of_the_experiment(demo_store: Path) -> None:
    """The page and the documents have the figures of the notebook."""
    parts = json.loads((ROOT / "notebooks" / "fingerprinting.json").read_text(encoding="utf-8"))["parts"]

    def losses(part: str, order: str, split: str) -> list[list[float]]:
        return [run["loss"][split] for run in parts[part]["runs"] if run["order"] == order]

    def stopped(order: str) -> str:
        return f"{fmean(min(loss) for loss in losses('often', order, 'by game')):.3f}"

    def last(part: str, split: str) -> str:
        return f"{fmean(loss[-1] for loss in losses(part, 'global', split)):.3f}"

    reading = fingerprinting_section(facts_of(demo_store)).reading
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    guide = " ".join((ROOT / "docs" / "guide.md").read_text(encoding="utf-8").split())
    assert (
        f"game order reached {stopped('ordered')} and a global shuffle {stopped('global')}; guessing gives "
        f"{log(2):.3f}."
    ) in reading
    assert (
        f"ended at {last('once', 'by game')} after one pass over five times as many games, and at "
        f"{last('often', 'by game')} after five passes. Only the split by game showed this: the split by "
        f"position gave {last('often', 'by file')}."
    ) in reading
    assert (
        f"{stopped('ordered')} in game order, {stopped('buffer')} with a shuffle buffer, "
        f"{stopped('global')} with a global shuffle. Guessing gives {log(2):.3f}."
    ) in readme
    assert f"was {last('often', 'by game')} on unseen games, but {last('often', 'by file')} on held" in readme
    assert f"ended at {last('once', 'by game')} on unseen games" in readme
    assert f"{stopped('ordered')} in game order and {stopped('global')} with a global shuffle" in guide
    assert (
        f"ended at {last('once', 'by game')} instead of {last('often', 'by game')} on unseen games" in guide
    )
    assert parts["often"]["settings"]["passes"] == 5
    assert parts["once"]["settings"]["passes"] == 1
    assert parts["often"]["runs"][0]["steps"] == parts["once"]["runs"][0]["steps"]
    assert round(parts["once"]["data"]["games"] / parts["often"]["data"]["games"]) == 5
