"""What a trainer may choose of a store, checked once. Reads nothing, and knows no SQL."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Final, Literal

from hexdata.errors import ConfigError

__all__ = ["Choices"]

_WORDS: Final = {
    "dedup": ("none", "exact", "symmetric"),
    "per_game_by": ("key", "tier"),
    "assign": ("position", "game"),
}
_EXPRESSIONS: Final = ("where", "balance_by", "stratify_by")


@dataclass(frozen=True)
class Choices:
    """Which positions of a store take part in a shuffle, and how they go to buckets.

    The choices are made in this order: ``where``, ``dedup``, ``per_game``, ``balance_by``; ``stratify_by``
    and ``assign`` place what is left. Expressions are SQL over the columns of positions and games and
    over ``source``, the source's name; they are read when a store is at hand.

    Attributes:
        where: a condition; positions of which it is not true, but false or NULL, are left out.
        dedup: ``exact`` keeps one of the games that have the same moves and first player, ``symmetric``
            one of those that are images of one another under a symmetry of the board, fragments too.
        per_game: at most so many positions of each game.
        per_game_by: ``key`` chooses them by seeded key alone, ``tier`` takes low value sample tiers first.
        balance_by: an expression; within each split, every group of one value is cut to the size of the
            smallest, by seeded uniform choice.
        stratify_by: an expression, or ``length`` for ``total_positions``; every bucket gets its fair share
            of each value.
        assign: whether single positions or whole games are scattered to buckets.

    Raises:
        ConfigError: on a value out of range, or on two choices that exclude each other.
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - read by pydantic, not a field

    where: str | None = None
    dedup: Literal["none", "exact", "symmetric"] = "none"
    per_game: int | None = None
    per_game_by: Literal["key", "tier"] = "key"
    balance_by: str | None = None
    stratify_by: str | None = None
    assign: Literal["position", "game"] = "position"

    def __post_init__(self) -> None:
        for name, words in _WORDS.items():
            if getattr(self, name) not in words:
                raise ConfigError(
                    f"{name} has no such value", found=repr(getattr(self, name)), expected=" or ".join(words)
                )
        for name in _EXPRESSIONS:
            _check_text(name, getattr(self, name))
        if self.per_game is not None and self.per_game < 1:
            raise ConfigError("per_game must be at least 1", found=self.per_game)
        if self.per_game is None and self.per_game_by != "key":
            raise ConfigError(
                "per_game_by says how per_game chooses, and per_game is not asked for",
                found=f"per_game_by {self.per_game_by}",
                hint="Give per_game too, or leave per_game_by out.",
            )
        if self.stratify_by is not None and self.assign == "game":
            raise ConfigError(
                "whole games cannot be stratified: each bucket's share is counted in positions",
                found=f"stratify_by {self.stratify_by} with assign game",
                hint="Leave one of the two out.",
            )

    def asked(self) -> dict[str, Any]:
        """Return the choices that differ from the default, as JSON: ``Choices(**asked)`` is the same."""
        own = {field.name: field.default for field in fields(Choices)}
        return {name: getattr(self, name) for name, default in own.items() if getattr(self, name) != default}


def _check_text(name: str, text: str | None) -> None:
    if text is None:
        return
    if not text.strip():
        raise ConfigError(f"{name} is empty", expected="an SQL expression", hint=f"Leave {name} out instead.")
    if "\0" in text or any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ConfigError(f"{name} holds characters that no SQL text has", found=ascii(text))
