"""Summary of the report: key numbers, a verdict in words, and the next steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from hexdata.quality import Figure, Quality
from hexdata.report.facts import SPLIT, ReportFacts, StageSummary
from hexdata.store.commands import command_line, stage_command
from hexdata.store.integrity import BUCKETS_REMOVED
from hexdata.text import count_of, without_game
from hexdata.units import format_bytes

__all__ = [
    "Answer",
    "Verdict",
    "batch_sentence",
    "duplicate_games",
    "game_sentences",
    "judge",
    "judged_figures",
    "number",
    "tiles",
    "unknown_games",
    "unmeasured_reason",
]

Level = Literal["good", "note", "bad"]
_BATCH: Final = 256
"""Size of the batches that the sentences are about."""
_ORDER: Final[tuple[Level, ...]] = ("good", "note", "bad")


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
    answers = [_shuffled(facts), _complete(facts), _odd(facts)]
    level = max((answer.level for answer in answers), key=_ORDER.index)
    return Verdict(level, _headline(facts, answers), answers, _todo(facts, answers))


def tiles(facts: ReportFacts) -> list[tuple[str, str]]:
    """Return the key numbers of the store as (number, unit) pairs."""
    shuffle = facts.stage("shuffle")
    buckets = shuffle.files if shuffle else 0
    size = facts.board_size
    counted = [
        (facts.counts["positions"], "positions"),
        (facts.counts["games"], "games"),
        (facts.counts["sources"], "sources"),
        (buckets, "buckets"),
    ]
    return [
        *((f"{count:,}", name if count != 1 else name[:-1]) for count, name in counted),
        (f"{size} \u00d7 {size}" if size else "-", "board size"),
        (format_bytes(sum(stage.bytes for stage in facts.stages)), "on disk"),
    ]


def _headline(facts: ReportFacts, answers: list[Answer]) -> str:
    shuffled, complete, odd = answers
    if not facts.counts["positions"]:
        return "This store contains no positions yet."
    if complete.level == "bad":
        return "This store is incomplete: do not train from it."
    shuffle = facts.stage("shuffle")
    if shuffle and not shuffle.fresh:
        return "The shuffle is out of date: shuffle again."
    if shuffled.level == "bad":
        return "This shuffle is faulty: do not train from it."
    if shuffle is None:
        return "Converted and complete. Not shuffled yet."
    ready = "ready for training" if _export(facts) else "not exported as shards yet"
    quality = "Indistinguishable from a random shuffle" if shuffled.level == "good" else "Shuffled"
    return f"{quality}, complete, {ready}." + (" Some of the data is unusual." if odd.level != "good" else "")


def _export(facts: ReportFacts) -> StageSummary | None:
    """Return the facts of the shards if they belong to the current shuffle."""
    export = facts.stage("export")
    return export if export and export.fresh else None


# --- is it shuffled ---------------------------------------------------------------------------------------


def _shuffled(facts: ReportFacts) -> Answer:
    question, shuffle, quality = "Is it shuffled?", facts.stage("shuffle"), facts.quality
    if not facts.counts["positions"]:
        return Answer(question, "note", "Not yet", "There are no positions to shuffle.")
    if shuffle is None:
        return Answer(question, "note", "Not yet", "The positions are in the order of their sources.")
    if not shuffle.fresh:
        return Answer(
            question,
            "bad",
            "Out of date",
            "Positions were added or replaced after the shuffle.",
        )
    if shuffle.lineage.get("removed"):
        again = stage_command("shuffle", shuffle.lineage, facts.location)
        text = f"{BUCKETS_REMOVED[0].upper()}{BUCKETS_REMOVED[1:]}. To measure them, run `{again}`."
        return Answer(question, "note", "Not measured", text)
    if quality is None:
        return Answer(
            question, "note", "Not measured", f"There is no {SPLIT} split. Only that split is measured."
        )
    judged = judged_figures(quality)
    failed = [figure.title for figure in judged if not figure.ok]
    if failed:
        more = f" and {len(failed) - 3} more" if len(failed) > 3 else ""
        text = f"{len(failed)} of {len(judged)} figures are outside the range expected of a random order: "
        return Answer(question, "bad", "No", text + "; ".join(failed[:3]) + more + ".")
    if not quality.conclusive:
        text = "There are too few positions to distinguish a good shuffle from a bad one."
        return Answer(question, "note", "Too small to measure", text)
    return Answer(question, "good", "Yes", _proof(facts, len(judged)))


def judged_figures(quality: Quality) -> list[Figure]:
    """Return every judged figure once."""
    lags = {figure.name for figure in quality.lags}
    of_lags = ("neighbours-worst", "value-worst")
    others = [f for f in quality.figures if f.name not in lags and f.name not in of_lags]
    return [figure for figure in (*others, *quality.lags) if figure.judged]


def _proof(facts: ReportFacts, judged: int) -> str:
    return f"{game_sentences(facts)} All {judged} figures are within the range expected of a random order."


# --- sentences --------------------------------------------------------------------------------------------


def unmeasured_reason(facts: ReportFacts) -> str:
    """Return the sentence that explains why the shuffle of the training split is not measured."""
    shuffle = facts.stage("shuffle")
    if shuffle is None:
        return "This store is not shuffled yet."
    if not shuffle.fresh:
        return "The shuffle is older than the positions, so it is not measured."
    if shuffle.lineage.get("removed"):
        return f"{BUCKETS_REMOVED[0].upper()}{BUCKETS_REMOVED[1:]}, so it is not measured."
    return f"The shuffle has no {SPLIT} split. Only that split is measured."


def game_sentences(facts: ReportFacts) -> str:
    """Return sentences about the positions of a game in a batch, if it is measured, and in an epoch.

    The last one names the positions without a game, which they do not cover.
    """
    met = "" if facts.quality is None else batch_sentence(facts.quality)
    sentences = (met, _in_an_epoch(facts, still="a game meets itself" in met), unknown_games(facts))
    return " ".join(filter(None, sentences))


def unknown_games(facts: ReportFacts) -> str:
    """Return the sentence about the positions that belong to no known game; empty if there are none."""
    return f"{without_game(facts.without_game, facts.counts['positions'])}." if facts.without_game else ""


def batch_sentence(quality: Quality) -> str:
    """Return the sentence that compares how often a game meets itself in a batch with a random shuffle."""
    pairs, neighbours = quality[f"batch-{_BATCH}"], quality["neighbours-1"]
    uniform = quality.reference == "the split in uniform order"
    if not pairs.after and not pairs.expected:
        return (
            f"No game has two positions in the {SPLIT} split, so no batch contains two positions of one game."
        )
    if uniform and neighbours.expected is not None and neighbours.expected > 1 - 1e-9:
        return f"All positions of the {SPLIT} split are of one game, so every batch is, in any order."
    if quality.positions <= _BATCH:
        contents = f"The {SPLIT} split has {quality.positions:,} positions"
        return f"{contents}, so a batch of {_BATCH} contains all of them, in any order."
    if pairs.after is None or pairs.expected is None or not pairs.judged:
        found = number(pairs.after or 0.0)
        return f"A batch of {_BATCH} contains {found} pairs of positions of one game, which cannot be judged."
    compared = "as often as"
    if not pairs.ok:
        compared = "more often than" if pairs.after > pairs.expected else "less often than"
    within = "" if uniform else " of its bucket"
    return f"In a batch of {_BATCH}, a game meets itself {compared} in a random shuffle{within}."


def _in_an_epoch(facts: ReportFacts, *, still: bool = False) -> str:
    """Return the sentence about the positions of a game in an epoch; empty if no games are known.

    Args:
        facts: Numbers of the report.
        still: Whether the sentence continues one about a game.
    """
    train = facts.split(SPLIT)
    games = positions = 0
    if facts.spread is not None:
        games, positions = facts.spread.games, facts.spread.positions
    elif train and facts.quality is None:
        games, positions = train["games"], train["positions"]
    if not games:
        return ""
    subject, epoch = ("It still gives", " an epoch") if still else ("In each epoch, a game gives", "")
    if positions == games:
        return f"{subject} one position{epoch}."
    mean = positions / games
    shown = f"{mean:,.0f}" if mean >= 10 or positions % games == 0 else f"{mean:.1f}"
    average = "" if games == 1 else " on average"
    return f"{subject} {shown} positions{epoch}{average}, which no order changes."


# --- is it complete ---------------------------------------------------------------------------------------


def _complete(facts: ReportFacts) -> Answer:
    question, wrong = "Is it complete?", _missing(facts)
    if wrong:
        return Answer(question, "bad", "No", " ".join(wrong))
    convert, rejected = facts.stage("convert"), facts.counts["rejected"]
    if convert is None:
        return Answer(question, "note", "Empty", "No source has been converted.")
    records = convert.lineage["records"]
    positions = count_of(facts.counts["positions"], "position")
    text = f"{count_of(records, 'record')} {'was' if records == 1 else 'were'} read and gave {positions}"
    text += (
        f" and {count_of(rejected, 'rejection')}, each with a reason." if rejected else "; none was rejected."
    )
    return Answer(question, "good", "Yes", text + _followed(facts))


def _missing(facts: ReportFacts) -> list[str]:
    """Return a sentence for each stage with missing files and for each pair of inconsistent counts."""
    wrong, counts = [], facts.counts
    wrong += [
        f"Of the {count_of(stage.files, 'file')} of {stage.stage}, {len(stage.missing):,} "
        f"{'is' if len(stage.missing) == 1 else 'are'} missing or truncated, for example {stage.missing[0]}."
        for stage in facts.stages
        if stage.missing
    ]
    convert, shuffle, export = (facts.stage(name) for name in ("convert", "shuffle", "export"))
    sources = facts.tables["sources"]
    if convert and convert.lineage["records"] != counts["positions"] + counts["rejected"]:
        wrong.append(
            f"{convert.lineage['records']:,} records were read, but they gave {counts['positions']:,} "
            f"positions and {counts['rejected']:,} rejections."
        )
    listed = sum(row["positions"] for row in sources)
    if listed != counts["positions"]:
        wrong.append(f"The sources have {listed:,} positions, the store has {counts['positions']:,}.")
    if shuffle and shuffle.fresh:
        left_out = sum(shuffle.lineage["left_out"].values())
        if shuffle.positions + left_out != counts["positions"]:
            wrong.append(
                f"The shuffle has {shuffle.positions:,} positions and excluded {left_out:,}, but the "
                f"store has {counts['positions']:,}."
            )
    if shuffle and export and export.fresh and export.positions != shuffle.positions:
        wrong.append(
            f"The shards have {export.positions:,} positions, the shuffle has {shuffle.positions:,}."
        )
    return wrong


def _followed(facts: ReportFacts) -> str:
    shuffle = facts.stage("shuffle")
    if shuffle is None or not shuffle.fresh:
        return ""
    left_out = {name: count for name, count in shuffle.lineage["left_out"].items() if count}
    where = "the shuffle and the shards contain" if _export(facts) else "the shuffle contains"
    if not left_out:
        return f" {where.capitalize()} all of these positions."
    listed = ", ".join(f"{count:,} by --{name.replace('_', '-')}" for name, count in left_out.items())
    return f" {where.capitalize()} {shuffle.positions:,} of them; options excluded {listed}."


# --- is anything odd --------------------------------------------------------------------------------------


def _odd(facts: ReportFacts) -> Answer:
    question = "Is anything unusual?"
    texts = (_rejected(facts), unknown_games(facts), _duplicates(facts), _flags(facts))
    found = [text for text in texts if text]
    if not found:
        return Answer(
            question, "good", "No", "There are no rejected records, no duplicate games and no flagged games."
        )
    return Answer(question, "note", "Yes", " ".join(found))


def _rejected(facts: ReportFacts) -> str:
    rejected = facts.counts["rejected"]
    if not rejected:
        return ""
    reasons = ", ".join(f"{row['records']:,} {row['reason']}" for row in facts.tables["rejects"][:3])
    return f"{count_of(rejected, 'record')} {'was' if rejected == 1 else 'were'} rejected ({reasons})."


def _duplicates(facts: ReportFacts) -> str:
    copies = duplicate_games(facts)
    if not copies:
        return ""
    one = copies == 1
    text = f"{copies:,} of {facts.counts['games']:,} games "
    text += (
        "is a duplicate or mirror image of another" if one else "are duplicates or mirror images of others"
    )
    shuffle = facts.stage("shuffle")
    if shuffle and shuffle.lineage["choices"].get("dedup", "none") != "none":
        return text + "; the shuffle excluded duplicates."
    where = (
        "it is in the same split as its original" if one else "they are in the same split as their originals"
    )
    return f"{text}; {where}."


def _flags(facts: ReportFacts) -> str:
    flags = [row for row in facts.tables["flags"] if row["flag"] and not row["flag"].startswith("duplicate-")]
    if not flags:
        return ""
    return "Flagged games: " + ", ".join(f"{row['games']:,} {row['flag']}" for row in flags[:4]) + "."


def duplicate_games(facts: ReportFacts) -> int:
    """Return the number of games that are duplicates or mirror images of an earlier one."""
    return sum(row["duplicates"] for row in facts.tables["splits"])


# --- what next --------------------------------------------------------------------------------------------


def _todo(facts: ReportFacts, answers: list[Answer]) -> list[tuple[str, str]]:
    shuffled, complete, _ = answers
    steps, store = [], facts.location
    shuffle = facts.stage("shuffle")
    if "bad" in (complete.level, shuffled.level) and (shuffle is None or shuffle.fresh):
        steps.append(("List the faults", command_line("verify", store)))
    if not facts.counts["positions"]:
        return [("Convert your files", facts.commands["convert"])]
    if shuffle is None:
        if complete.level != "bad":
            steps.append(("Train from its games, in Python", f"Loader({facts.location!r})"))
        steps.append(("Shuffle it, to write shards", facts.commands["shuffle"]))
    elif not shuffle.fresh:
        steps.append(("Shuffle the current positions", facts.commands["shuffle"]))
    copies = duplicate_games(facts)
    if copies and not (shuffle and shuffle.lineage["choices"].get("dedup", "none") != "none"):
        steps.append(
            ("Exclude duplicate games, if wanted", command_line("shuffle", store, dedup="symmetric"))
        )
    if shuffle and shuffle.fresh and not _export(facts):
        steps.append(("Write shards for training", facts.commands["export"]))
    if _export(facts) and "bad" not in (complete.level, shuffled.level):
        steps.append(("Check all files, if this store was copied", command_line("verify", store)))
        steps.append(("Train from it, in Python", f"Loader({facts.location!r})"))
    if complete.level != "bad":
        steps.append(("Look at its games and openings", command_line("browse", store)))
    return steps


def number(value: float) -> str:
    """Format a number for a sentence."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
