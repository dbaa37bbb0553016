"""The options and the result of ``convert_sources``."""

from __future__ import annotations

from dataclasses import dataclass, field
from numbers import Real
from typing import Any, ClassVar

from hexdata.board import MAX_SIZE, MIN_SIZE
from hexdata.checks import check_choice, check_count, check_fields, check_shares, unusable
from hexdata.formats import alphazero
from hexdata.formats.registry import source_formats
from hexdata.games.convention import CONVENTIONS
from hexdata.options import WorkerOptions, describe_options


@describe_options
@dataclass(frozen=True)
class ConvertOptions(WorkerOptions):
    """Options of ``convert_sources``.

    Attributes:
        max_reject_rate: Largest share of rejected records, and of the bytes of files rejected as a whole,
            from 0 to 1. Above it, nothing is published. Default 0.01.
        value_convention: Convention of sources whose games and layout do not show it, "blue-is-0" or
            "blue-is-1". With "auto", the default, such a source is an error.
        val: Share of games in the validation split, from 0 to 1. Default 0.05.
        test: Share of games in the test split, from 0 to 1. Default 0.01.
        salvage: Keep the complete examples before the damage of a truncated or corrupt file. Default False.
        truncate_repeats: Cut games before the first move on an occupied cell, as the legacy tool did.
            Default False.
        board_size: Convert only games and positions of this board size, from 3 to 32, and skip files without
            any. Those of other sizes in a file do not count towards ``max_reject_rate``. Default None: files
            of several sizes are an error, and a file has the size of its first game or board.
        variations: With "main", SGF games with variations are read as their first variation, and the number
            of the others is a note on the source. Default "reject": such games are rejected.
        format: Name of the format of all inputs, such as "sgf", for files that do not show it: SGF that does
            not say that it is of Hex, for example. Default None: the content of each file shows it.
        alphazero_convention: Whose stones are 1, which edges a player connects, and for whom a value of 1 is
            a win in AlphaZero's positions, such as "mover/top-bottom/mover"; docs/howto/formats.md lists the
            words. Default None: the games of a file must show it.

    Raises:
        ConfigError: A value is out of range.
        BudgetError: The workers, or even one worker, do not fit into the memory.
    """

    WORKER_MEMORY: ClassVar[int] = 400 << 20

    max_reject_rate: float = 0.01
    value_convention: str = "auto"
    val: float = 0.05
    test: float = 0.01
    salvage: bool = False
    truncate_repeats: bool = False
    board_size: int | None = None
    variations: str = "reject"
    format: str | None = None
    alphazero_convention: str | None = None

    def __post_init__(self) -> None:
        check_fields(self, {"workers": 1, "memory": 0, "board_size": MIN_SIZE})
        if self.board_size is not None:
            check_count("board_size", self.board_size, MIN_SIZE, MAX_SIZE)
        super().__post_init__()
        rate: Any = self.max_reject_rate
        is_number = isinstance(rate, Real) and not isinstance(rate, bool)
        if not (is_number and 0 <= rate <= 1):
            raise unusable("max_reject_rate", repr(rate), "a number between 0 and 1")
        check_choice("value_convention", self.value_convention, ("auto", *CONVENTIONS))
        check_choice("variations", self.variations, ("reject", "main"))
        if self.format is not None:
            check_choice("format", self.format, [each.name for each in source_formats()])
        if self.alphazero_convention not in (None, *alphazero.CONVENTIONS):
            expected = f"STONES/EDGES/VALUES, such as {alphazero.CONVENTIONS[0]}: {alphazero.WORDS}"
            raise unusable("alphazero_convention", repr(self.alphazero_convention), expected)
        check_shares(self.val, self.test)


@dataclass(frozen=True)
class ConvertResult:
    """The result of a run of ``convert_sources``; all counts refer to the sources of this run.

    Attributes:
        sources: Number of sources converted.
        skipped: Number of files that were not read: those of ``skipped_files``.
        records: Number of records read; ``positions`` + ``rejected``.
        positions: Number of positions accepted.
        rejected: Number of records rejected.
        without_game: Number of the positions that belong to no known game. They are in the split train.
        games: Number of games.
        duplicate_games: Number of games that duplicate an earlier game.
        reasons: Reason code to number of rejected records, most frequent first.
        failed_files: Name to reason of each file that was rejected as a whole.
        flags: Flag to number of games that have it.
        notes: Notes on the run, such as a given value convention that some files did not need.
        file_notes: Name to notes of each source of this run that has notes.
        skipped_files: Name to cause of each file that was not read: "known-bytes", if the store or an earlier
            source of this run has the same bytes; "unknown-name", if a folder contains it and its name
            is not one of a source; "board-size", if ``board_size`` was given and is another one; or
            "no-file", for a pipe, a socket or a device. Details may follow after a colon. Hidden files and
            the statistics files of the legacy tools are not included.
    """

    sources: int
    skipped: int
    records: int
    positions: int
    rejected: int
    games: int
    duplicate_games: int
    reasons: dict[str, int]
    failed_files: dict[str, str]
    without_game: int = 0
    flags: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    file_notes: dict[str, list[str]] = field(default_factory=dict)
    skipped_files: dict[str, str] = field(default_factory=dict)
