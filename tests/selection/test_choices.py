"""What is refused before a store is looked at, and what a manifest keeps of the choices."""

from __future__ import annotations

import json

import pytest

from hexdata.errors import ConfigError
from hexdata.selection import Choices


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"dedup": "yes"}, "dedup has no such value; found 'yes'; expected none or exact or symmetric"),
        ({"assign": "ply"}, "assign has no such value"),
        ({"per_game": 5, "per_game_by": "ply"}, "per_game_by has no such value"),
        ({"per_game": 0}, "per_game must be at least 1; found 0"),
        ({"per_game_by": "tier"}, "per_game is not asked for"),
        ({"where": ""}, "where is empty"),
        ({"balance_by": " \t\n"}, "balance_by is empty"),
        ({"stratify_by": "value", "assign": "game"}, "whole games cannot be stratified"),
        ({"where": "source = 'a\0b'"}, "characters that no SQL text has"),
        ({"where": "source = '\udcff'"}, "characters that no SQL text has"),
    ],
)
def test_a_choice_that_cannot_be_is_refused(asked, message):
    with pytest.raises(ConfigError, match=message):
        Choices(**asked)


def test_only_what_was_asked_for_is_kept():
    assert Choices().asked() == {}
    asked = {"where": "value = 1", "per_game": 3, "per_game_by": "tier", "assign": "game"}
    assert Choices(**asked, dedup="none").asked() == asked
    assert Choices(**json.loads(json.dumps(asked))) == Choices(**asked)
