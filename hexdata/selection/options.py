"""Options that select positions for a shuffle and assign them to buckets."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Final, Literal, get_args

from hexdata.checks import check_fields
from hexdata.errors import ConfigError

__all__ = ["Dedup", "SelectionOptions"]

Dedup = Literal["none", "exact", "symmetric"]
"""Which duplicate games are left out: none, those with equal moves, or those equal under a symmetry too."""

_CHOICES: Final = {
    "dedup": get_args(Dedup),
    "per_game_by": ("key", "tier"),
    "assign": ("position", "game"),
}
_EXPRESSIONS: Final = ("where", "balance_by", "stratify_by")


@dataclass(frozen=True)
class SelectionOptions:
    """Options that select positions for a shuffle and assign them to buckets.

    The filters are applied in this order: ``where``, ``dedup``, ``per_game``, ``balance_by``.
    ``stratify_by`` and ``assign`` then determine the bucket of each remaining position. Expressions are SQL
    over the columns of positions and games and over ``source``, the name of the source file. They are checked
    against the store when the shuffle starts.

    Attributes:
        where: Condition; only positions for which it is true are kept. Default None: all positions.
        dedup: ``"exact"`` keeps one game of those with equal moves and first player; ``"symmetric"`` keeps
            one of those that are equal under a symmetry of the board, fragments included. Default ``"none"``.
        per_game: Maximum number of positions per game. Default None: no maximum.
        per_game_by: ``"key"`` (default) chooses the positions of a game at random by a seeded key; ``"tier"``
            prefers low value sample tiers.
        balance_by: Expression; within each split, all groups of equal value are reduced to the size of the
            smallest group by a seeded random choice. Default None.
        stratify_by: Expression, or ``"length"`` for ``total_positions``; every bucket receives the same share
            of each value. Default None.
        assign: Whether single positions (``"position"``, default) or whole games (``"game"``) are assigned to
            buckets.

    Raises:
        ConfigError: A value is out of range, or two options exclude each other.
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - read by pydantic, not a field

    where: str | None = None
    dedup: Dedup = "none"
    per_game: int | None = None
    per_game_by: Literal["key", "tier"] = "key"
    balance_by: str | None = None
    stratify_by: str | None = None
    assign: Literal["position", "game"] = "position"

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(
                    f"unknown value of {name}", found=repr(getattr(self, name)), expected=" or ".join(choices)
                )
        for name in _EXPRESSIONS:
            _check_text(name, getattr(self, name))
        check_fields(self, {"per_game": 1})
        if self.per_game is None and self.per_game_by != "key":
            raise ConfigError(
                "per_game_by needs per_game",
                found=f"per_game_by {self.per_game_by} without per_game",
                hint="Set per_game too, or remove per_game_by.",
            )
        if self.stratify_by is not None and self.assign == "game":
            raise ConfigError(
                "stratify_by cannot be combined with assign game: strata are divided by position",
                found=f"stratify_by {self.stratify_by} with assign game",
                hint="Remove one of the two options.",
            )

    def non_default(self) -> dict[str, Any]:
        """Return the options of this class that differ from their defaults, as JSON values by name."""
        defaults = {field.name: field.default for field in fields(SelectionOptions)}
        return {name: getattr(self, name) for name in defaults if getattr(self, name) != defaults[name]}


def _check_text(name: str, text: Any) -> None:
    if text is None:
        return
    if not isinstance(text, str):
        raise ConfigError(f"{name} cannot be used", found=repr(text), expected="an SQL expression as text")
    if not text.strip():
        raise ConfigError(f"{name} is empty", expected="an SQL expression", hint=f"Remove {name} or set it.")
    if "\0" in text or any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ConfigError(f"{name} contains characters that are not allowed in SQL", found=ascii(text))
