"""Validation of expressions: accepted ones, refused ones with their reasons, and attempts at injection."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexdata.errors import ConfigError
from hexdata.selection.expression import check_expression

COLUMNS = {
    "flags": "VARCHAR[]",
    "game_id": "BIGINT",
    "moves": "USMALLINT[]",
    "source": "VARCHAR",
    "value": "FLOAT",
    "value_sample_tier": "UTINYINT",
    "winner": "VARCHAR",
}
ACCEPTED = {
    "value_sample_tier <= 1": ("value_sample_tier", "BOOLEAN"),
    'VALUE = 1 AND "Winner" IS NOT NULL': ("value winner", "BOOLEAN"),
    "value /* or not */ = 1 -- a comment": ("value", "BOOLEAN"),
    "source LIKE 'häuser/%' OR winner IN ('RED', ';--')": ("source winner", "BOOLEAN"),
    "'no-chain' IN flags": ("flags", "BOOLEAN"),
    "len(moves) BETWEEN 10 AND 20 AND moves[1] <> 84": ("moves", "BOOLEAN"),
    "CASE WHEN value = 1 THEN 'a' ELSE winner END": ("value winner", "VARCHAR"),
    "nullif(split_part(source, '/', 1), 'x')": ("source", "VARCHAR"),
    "try_cast(source AS INTEGER)": ("source", "INTEGER"),
    "value::DECIMAL(4, 1)": ("value", "DECIMAL(4,1)"),
    "upper(winner) = $$RED$$": ("winner", "BOOLEAN"),
    "true": ("", "BOOLEAN"),
}
NOT_ONE_EXPRESSION = [
    *("1=1) UNION SELECT (1", "1=1) OR (1=1", "value = 1; DROP TABLE games", "value = 1; SELECT 1"),
    *("value = 1 /*", "'value", 'value = "1', "value, winner", "value = 1,", "value AS wanted", "SELECT 1"),
    *("*", "COLUMNS(*)", "#1", "?", "$1", "DEFAULT", "", "-- nothing"),
]
QUERIES = [
    *("value FROM range(3)", "value = 1 WHERE true", "value GROUP BY value", "value HAVING true"),
    *("value QUALIFY true", "value ORDER BY 1", "value LIMIT 1", "value = 1 USING SAMPLE 1"),
    *("DISTINCT value", "1 UNION SELECT 1"),
]
BEYOND_THE_ROW = {
    "random() < 0.5": "random: its value may differ between runs",
    '"RaNdom"() < 0.5': "random: its value",
    "main.random() < 0.5": "main.random",
    "current_date IS NULL": "no column 'current_date'",
    "getenv('HOME') = 'x'": "no function getenv",
    "hash(game_id) % 2 = 0": "hash: its value",
    "assert_true(value = 1)": "error: its value",
    "sum(value) > 1": "sum is not a function of a single row",
    "first(value ORDER BY game_id) = 1": "not a function of a single row",
    **dict.fromkeys(("row_number() OVER () > 1", "lag(value) OVER (ORDER BY game_id) = 1"), "a window"),
    "unnest(moves) = 1": "unnest is not a function of a single row",
    **dict.fromkeys(("value IN (SELECT 1)", "source = ANY (['a'])"), "a subquery"),
    "EXISTS (FROM duckdb_settings())": "a subquery",
    "read_text('/etc/passwd') = ''": "read_text is not a function of a single row",
    "list_filter(flags, lambda f: f = 'x') = []": "a lambda",
    "len([f FOR f IN flags]) = 1": "a lambda",
    "source COLLATE nocase = 'A'": "a collate",
    "source::TIMESTAMPTZ IS NULL": "a cast to TIMESTAMPTZ",
    "date '2020-01-01' IS NULL": "a cast to date",
    "strftime('2020-01-01', '%H') = '0'": "strftime: dates and times are not allowed",
    "flags.list_contains('x')": "flags.list_contains",
    "games.value = 1": "games.value: a column name must not be qualified",
    "nosuch(value)": "no function nosuch",
    "flags > 3": "Cannot compare",
    "regexp_matches(source, '(')": "missing",
    "not " * 3000 + "true": "depth",
    "(" * 3000 + "true" + ")" * 3000: "depth",
}


@pytest.mark.parametrize("text", ACCEPTED)
def test_expressions_of_the_row_are_accepted(con, text):
    passed = check_expression(con, "where", text, COLUMNS)
    assert (passed.columns, passed.type) == (set(ACCEPTED[text][0].split()), ACCEPTED[text][1])
    con.sql(f"SELECT {passed.sql} FROM (SELECT {', '.join(f'NULL::{k} AS {n}' for n, k in COLUMNS.items())})")


@pytest.mark.parametrize("text", [*NOT_ONE_EXPRESSION, *QUERIES])
def test_anything_but_one_expression_is_refused(con, text):
    reason = "a whole query" if text in QUERIES else ""
    with pytest.raises(ConfigError, match=rf"^balance_by: {reason}") as caught:
        check_expression(con, "balance_by", text, COLUMNS)
    assert text in QUERIES or caught.value.found == text


@pytest.mark.parametrize("text", BEYOND_THE_ROW)
def test_expressions_beyond_the_row_are_refused(con, text):
    with pytest.raises(ConfigError, match=BEYOND_THE_ROW[text]):
        check_expression(con, "where", text, COLUMNS)


@given(st.text("()'\"-/*;, \nvalue=1ANDORselct$[]{}:.\\%", max_size=12))
def test_accepted_expressions_cannot_leave_their_parentheses(con, text):
    """An accepted text adds one column to a query and does not affect the other columns."""
    try:
        passed = check_expression(con, "where", text, COLUMNS)
    except ConfigError:
        return
    found = con.sql(f"SELECT 7 AS before, {passed.sql} AS found, 8 AS after FROM (SELECT 0.0 AS value)")
    assert found.columns == ["before", "found", "after"]
    assert [row[::2] for row in found.fetchall()] == [(7, 8)]


def test_names_of_fields(con):
    columns = {**COLUMNS, "extra": 'STRUCT("Odd" DOUBLE, "even" DOUBLE)'}
    for text, names in [
        ("extra.odd > 1 AND value = 1", {"extra.Odd", "value"}),
        ("EXTRA.Even + extra.ODD > 1", {"extra.Odd", "extra.even"}),
        ("struct_extract(extra, 'even') > 1", {"extra"}),
    ]:
        found = check_expression(con, "where", text, columns)
        assert (found.names, found.columns) == (names, {name.partition(".")[0] for name in names})
    twice = {**COLUMNS, "extra": 'STRUCT("odd" DOUBLE, "Odd" DOUBLE)'}
    for text, known, message in [
        ("extra.ode > 1", columns, r"no column 'extra\.ode', only extra\.Odd, extra\.even, flags"),
        ("board = 1", columns, "no column 'board'"),
        ("value = 1", twice, "STRUCT"),
    ]:
        with pytest.raises(ConfigError, match=message):
            check_expression(con, "where", text, known)
