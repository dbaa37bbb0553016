"""SelectionOptions: validation, and the JSON kept in the manifest."""

from __future__ import annotations

import json

import pytest

from hexdata.errors import ConfigError
from hexdata.selection import SelectionOptions


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"dedup": "yes"}, "unknown value of dedup; found 'yes'; expected none or exact or symmetric"),
        ({"assign": "ply"}, "unknown value of assign"),
        ({"per_game": 5, "per_game_by": "ply"}, "unknown value of per_game_by"),
        ({"per_game": 0}, "per_game cannot be used; found 0; expected an integer, at least 1"),
        ({"per_game_by": "tier"}, "per_game_by needs per_game"),
        ({"where": ""}, "where is empty"),
        ({"balance_by": " \t\n"}, "balance_by is empty"),
        ({"stratify_by": "value", "assign": "game"}, "cannot be combined with assign game"),
        ({"where": "source = 'a\0b'"}, "characters that are not allowed in SQL"),
        ({"where": "source = '\udcff'"}, "characters that are not allowed in SQL"),
    ],
)
def test_invalid_options_are_refused(asked, message):
    with pytest.raises(ConfigError, match=message):
        SelectionOptions(**asked)


def test_non_default_options_round_trip_through_json():
    assert SelectionOptions().non_default() == {}
    asked = {"where": "value = 1", "per_game": 3, "per_game_by": "tier", "assign": "game"}
    assert SelectionOptions(**asked, dedup="none").non_default() == asked
    assert SelectionOptions(**json.loads(json.dumps(asked))) == SelectionOptions(**asked)
