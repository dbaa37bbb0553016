"""Summary of the report: answers to three questions, and the next steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hexdata.quality import Quality
from hexdata.report.facts import SPLIT, ReportFacts
from hexdata.store.commands import command_line, stage_command
from hexdata.store.integrity import BUCKETS_REMOVED
from hexdata.text import count_of, listed, without_game

Level = Literal["good", "note", "bad"]


@dataclass(frozen=True)
class Answer:
    """The answer to one question.

    Attributes:
        question: The question.
        level: "good", "note" (no error, but something to check) or "bad".
        short: The answer in a few words.
        text: The reasons.
    """

    question: str
    level: Level
    short: str
    text: str


@dataclass(frozen=True)
class Verdict:
    """Summary at the top of the report.

    Attributes:
        level: The worst level of the answers.
        headline: The summary in one sentence.
        answers: Answers to three questions: shuffled, complete, anything unusual.
        todo: (purpose, command or line of Python) of each next step, the most urgent first.
    """

    level: Level
    headline: str
    answers: list[Answer]
    todo: list[tuple[str, str]]


def judge(facts: ReportFacts) -> Verdict:
    """Return the summary of a report."""
    shuffled, complete, unusual = answers = [
        Answer("Is it shuffled?", *_shuffled(facts)),
        Answer("Is it complete?", *_complete(facts)),
        Answer("Is anything unusual?", *_unusual(facts)),
    ]
    shuffle, export, todo = facts.stage("shuffle"), facts.stage("export"), list(facts.steps)
    some = "" if unusual.level == "good" else " Some of the data is unusual."
    # The first that applies: what is wrong hides what is good.
    if not facts.counts["positions"]:
        headline = "This store contains no positions yet."
    elif complete.level == "bad":
        headline = "This store is incomplete: do not train from it."
    elif shuffle is None:
        headline = f"Ready to train: converted and complete.{some}"
    elif shuffle.state == "outdated":
        headline = "The shuffle is out of date: shuffle again."
    elif shuffled.level == "bad":
        headline = "This shuffle is faulty: do not train from it."
        todo.insert(0, ("List the faults", command_line("verify", facts.store)))
    else:
        quality = "Indistinguishable from a random shuffle" if shuffled.level == "good" else "Shuffled"
        is_exported = export and export.state == "complete"
        ready = "ready for training" if is_exported else "not exported as shards yet"
        headline = f"{quality}, complete, {ready}.{some}"
    level: Level = max((answer.level for answer in answers), key=["good", "note", "bad"].index)
    return Verdict(level, headline, answers, todo)


def _shuffled(facts: ReportFacts) -> tuple[Level, str, str]:
    shuffle, quality, why = facts.stage("shuffle"), facts.quality, why_unmeasured(facts)
    if not facts.counts["positions"]:
        return "note", "Not yet", "There are no positions to shuffle."
    if shuffle is None:
        order = f" The order of the input is {facts.input_order.text}." if facts.input_order else ""
        return "good", "In training", f"{why}{order}"
    if shuffle.state == "outdated":
        return "bad", "Out of date", why
    if quality is None:
        return "note", "Not measured", why
    judged = [figure for figure in quality.figures if figure.judged]  # with the worst of the lags
    if failed := [figure.title for figure in judged if not figure.ok]:
        fault = f"{len(failed)} of {len(judged)} figures are outside the range expected of a random order"
        return "bad", "No", f"{fault}: {listed(failed)}."
    if not quality.conclusive:
        text = "There are too few positions to distinguish a good shuffle from a bad one."
        return "note", "Too small to measure", text
    proof = f"All {len(judged)} figures are within the range expected of a random order."
    return "good", "Yes", f"{game_sentences(facts)} {proof}"


def _complete(facts: ReportFacts) -> tuple[Level, str, str]:
    counts = facts.counts
    convert, shuffle, export = (facts.stage(name) for name in ("convert", "shuffle", "export"))
    positions, rejected, told = counts["positions"], counts["rejected"], list[str]()
    # Each number is compared with the one before it in the order of the stages: a loss is named where it is.
    compared = [("positions of the sources", sum(r["positions"] for r in facts.tables["sources"]), positions)]
    if convert:
        compared.append(("records that were read", convert.lineage["records"], positions + rejected))
        read = f"{count_of(convert.lineage['records'], 'record')} gave {count_of(positions, 'position')}"
        told.append(f"{read} and {count_of(rejected, 'rejection')}.")
    if shuffle and shuffle.state != "outdated":
        left_out = {name: count for name, count in shuffle.lineage["left_out"].items() if count}
        found = shuffle.positions + sum(left_out.values())
        compared.append(("positions that were shuffled or excluded", found, positions))
        told.append(f"The shuffle contains {shuffle.positions:,} of the positions.")
        told += [f"The option --{name.replace('_', '-')} excluded {n:,}." for name, n in left_out.items()]
        if export and export.state != "outdated":
            compared.append(("positions of the shards", export.positions, shuffle.positions))
    wrong = [
        f"Missing or damaged files of {stage.stage}: {listed(stage.missing, 1)}."
        for stage in facts.stages
        if stage.missing
    ]
    wrong += [f"Number of {name}: {n:,}; expected: {known:,}." for name, n, known in compared if n != known]
    if wrong:
        return "bad", "No", " ".join(wrong)
    if not told:
        return "note", "Empty", "No source has been converted."
    beyond = f"The contents of files are not compared: `{command_line('verify', facts.store)}` does that."
    return "good", "Yes", " ".join([*told, beyond])


def _unusual(facts: ReportFacts) -> tuple[Level, str, str]:
    found, counts = list[str](), facts.counts
    if counts["rejected"]:
        reasons = [f"{row['records']:,} {row['reason']}" for row in facts.tables["rejects"]]
        found.append(f"Rejected: {count_of(counts['rejected'], 'record')} ({listed(reasons)}).")
    if facts.without_game:
        found.append(f"{without_game(facts.without_game, counts['positions'])}.")
    if facts.duplicates:
        of = f"{facts.duplicates:,} of {count_of(counts['games'], 'game')}"
        found.append(f"Duplicates or mirror images of another game, in the same split: {of}.")
    named = [row for row in facts.tables["flags"] if not str(row["flag"]).startswith("duplicate-")]
    flags = [f"{row['games']:,} {row['flag']}" for row in named]
    if flags:
        found.append(f"Flagged games: {listed(flags)}.")
    if found:
        return "note", "Yes", " ".join(found)
    return "good", "No", "There are no rejected records, no duplicate games and no flagged games."


# --- sentences ------------------------------------------------------------------------------------------


def why_unmeasured(facts: ReportFacts) -> str:
    """Return the sentences that explain why the shuffle of the training split is not measured."""
    shuffle = facts.stage("shuffle")
    if shuffle is None:
        return "The loader delivers all positions in a random order, a new one in every epoch."
    if shuffle.state == "outdated":
        return "The shuffle is older than the positions, so it is not measured."
    if shuffle.lineage.get("removed"):
        again = stage_command("shuffle", shuffle.lineage, facts.store)
        why = f"{BUCKETS_REMOVED[0].upper()}{BUCKETS_REMOVED[1:]}, so it is not measured."
        return f"{why} To measure it, run `{again}`."
    return f"The shuffle has no {SPLIT} split. Only that split is measured."


def game_sentences(facts: ReportFacts) -> str:
    """Return sentences about the positions of a game in a batch, if it is measured, and in an epoch."""
    sentences = [] if facts.quality is None else [batch_sentence(facts.quality)]
    train, games, positions = facts.split(SPLIT), 0, 0
    if facts.spread is not None:  # the positions that the shuffle left
        games, positions = facts.spread.games, facts.spread.positions
    elif train and facts.quality is None:
        games, positions = train["games"], train["positions"]
    if games:
        each = f"{number(positions / games)} positions on average, which no order changes."
        sentences.append(f"In each epoch, a game gives {'one position.' if positions == games else each}")
    if facts.without_game:
        sentences.append(f"{without_game(facts.without_game, facts.counts['positions'])}.")
    return " ".join(sentences)


def batch_sentence(quality: Quality) -> str:
    """Return the sentence that compares the pairs of one game in a batch with those in a random shuffle."""
    pairs = quality["batch-256"]
    if not pairs.after and not pairs.expected:
        return f"No game has two positions in the {SPLIT} split, and so none in a batch."
    if pairs.after is None or pairs.expected is None or not pairs.judged:
        return f"The {SPLIT} split has too few positions to judge the number of pairs of one game in a batch."
    compared = "as many pairs of positions of one game as"
    if not pairs.ok:
        more_or_fewer = "more" if pairs.after > pairs.expected else "fewer"
        compared = f"{more_or_fewer} pairs of positions of one game than"
    within = "" if quality.reference == "the split in uniform order" else " of its bucket"
    return f"A batch of 256 contains {compared} in a random shuffle{within}."


def number(value: float) -> str:
    """Format a number for a sentence."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
