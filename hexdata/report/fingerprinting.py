"""Section about fingerprinting: pairs of a game in batches, its positions in an epoch, and what helps."""

from __future__ import annotations

from typing import Final

from hexdata.report.facts import SPLIT, ReportFacts
from hexdata.report.page import PageTable, Section
from hexdata.report.verdict import game_sentences, unmeasured_reason
from hexdata.store.commands import command_line, stage_command
from hexdata.text import count_of

__all__ = ["fingerprinting_section"]

_DEFINITION: Final = (
    "Fingerprinting means that a network recognizes the game of a position and repeats the result of that "
    "game, instead of evaluating the position."
)
_EXPERIMENT: Final = (
    "Our experiment (notebook 04): the order alone does little. Stopped at its lowest value loss on unseen "
    "games, game order reached 0.659 and a global shuffle 0.662; guessing gives 0.693.",
    "Fewer passes help: the loss ended at 0.637 after one pass over five times as many games, and at 0.700 "
    "after five passes. Only the split by game showed this: the split by position gave 0.508.",
)
"""What the experiment found. A test compares the figures with the results of the notebook."""


def fingerprinting_section(facts: ReportFacts) -> Section:
    """Return the section about fingerprinting."""
    title = "Fingerprinting"
    if not facts.counts["positions"]:
        return Section("fingerprinting", title, "The store contains no positions.", _DEFINITION)
    finding = game_sentences(facts)
    if facts.quality is None and facts.split(SPLIT):
        loader = "The loader delivers the games in a random order, a new one in every epoch."
        finding = f"{unmeasured_reason(facts)} {loader} {finding}"
    elif facts.quality is None:
        finding = f"The store contains no games of the {SPLIT} split."
    definition = _DEFINITION
    if "meets itself" in finding:
        definition += " A game meets itself if two of its positions are in one batch."
    return Section(
        "fingerprinting",
        title,
        finding,
        "\n\n".join((definition, *_EXPERIMENT)),
        tables=[_measures(facts)],
        documents=("notebooks", "howto/splits", "batches"),
    )


def _measures(facts: ReportFacts) -> PageTable:
    """Return the table of measures against fingerprinting, with the state of the store and a command."""
    loader, convert = f"Loader({facts.location!r}", facts.stage("convert")
    train, val, options = facts.split(SPLIT), facts.split("val"), convert.lineage if convert else {}
    if val:
        unseen = f"{count_of(val['games'], 'game')} in val, none of them in {SPLIT}"
        validate = [unseen, f'{loader}, split="val")']
    else:
        command = stage_command("convert", options | {"val": 0.05}, f"{facts.location}-with-val")
        validate = ["no games in val: convert into a new store", command]
    games = f"{count_of(train['games'] if train else 0, 'game')} in {SPLIT}"
    rows = [
        ["Validate on unseen games", *validate],
        ["Make fewer passes over more games", games, stage_command("convert", options, facts.location)],
        ["Apply symmetries", "4 forms of each position", f"{loader}, symmetry=True)"],
    ]
    tiers = sum(row["positions"] for row in facts.tables["tiers"] if row["tier"] is not None)
    if tiers:
        known = f"{count_of(tiers, 'position')} with a value sample tier"
        code = f"{loader}, tier_probability=(1, 0.8, 0.4, 0.1))"
        rows.append(["Train the value on few positions of a game", known, code])
    else:
        code = command_line("shuffle", facts.location, per_game=10)
        rows.append(["Deliver few positions of a game", "no value sample tiers", code])
    return PageTable(
        "What helps against fingerprinting",
        ["measure", "this store", "Python or command"],
        rows,
        texts=frozenset({0, 1, 2}),
        codes=frozenset({2}),
        more="The last two are intended to reduce memorization; the experiment did not test them.",
        stacked=True,
    )
