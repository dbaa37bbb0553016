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


@pytest.mark.parametrize(
    ("text", "columns", "kind"),
    [
        ("value_sample_tier <= 1", {"value_sample_tier"}, "BOOLEAN"),
        ('VALUE = 1 AND "Winner" IS NOT NULL', {"value", "winner"}, "BOOLEAN"),
        ("value = 1 -- a comment", {"value"}, "BOOLEAN"),
        ("value /* or not */ = 1", {"value"}, "BOOLEAN"),
        ("source LIKE 'häuser/%' OR winner IN ('RED', ';--')", {"source", "winner"}, "BOOLEAN"),
        ("list_contains(flags, 'no-chain')", {"flags"}, "BOOLEAN"),
        ("'no-chain' IN flags", {"flags"}, "BOOLEAN"),
        ("len(moves) BETWEEN 10 AND 20 AND moves[1] <> 84", {"moves"}, "BOOLEAN"),
        ("CASE WHEN value = 1 THEN 'a' ELSE winner END", {"value", "winner"}, "VARCHAR"),
        ("nullif(split_part(source, '/', 1), 'x')", {"source"}, "VARCHAR"),
        ("if(value > 0.5, game_id // 10, NULL)", {"value", "game_id"}, "BIGINT"),
        ("try_cast(source AS INTEGER)", {"source"}, "INTEGER"),
        ("value::DECIMAL(4, 1)", {"value"}, "DECIMAL(4,1)"),
        ("upper(winner) = $$RED$$", {"winner"}, "BOOLEAN"),
        ("source = repeat('x', 3)", {"source"}, "BOOLEAN"),
        ("true", set(), "BOOLEAN"),
    ],
)
def test_expressions_of_the_row_are_accepted(con, text, columns, kind):
    passed = check_expression(con, "where", text, COLUMNS)
    assert (passed.columns, passed.type) == (columns, kind)
    con.sql(f"SELECT {passed.sql} FROM (SELECT {', '.join(f'NULL::{k} AS {n}' for n, k in COLUMNS.items())})")


NOT_ONE_EXPRESSION = [
    "1=1) UNION SELECT (1",
    "1=1) OR (1=1",
    "value = 1; DROP TABLE games",
    "value = 1; SELECT 1",
    "value = 1 /*",
    "'value",
    'value = "1',
    "value, winner",
    "value = 1,",
    "value AS wanted",
    "SELECT 1",
    "*",
    "COLUMNS(*)",
    "#1",
    "?",
    "$1",
    "DEFAULT",
    "",
    "-- nothing",
]


@pytest.mark.parametrize("text", NOT_ONE_EXPRESSION)
def test_anything_but_one_expression_is_refused(con, text):
    with pytest.raises(ConfigError, match=r"^balance_by: ") as caught:
        check_expression(con, "balance_by", text, COLUMNS)
    assert caught.value.found == text
    assert caught.value.expected


@pytest.mark.parametrize(
    "text",
    [
        "value FROM range(3)",
        "value = 1 WHERE true",
        "value GROUP BY value",
        "value HAVING true",
        "value QUALIFY true",
        "value ORDER BY 1",
        "value LIMIT 1",
        "value = 1 USING SAMPLE 1",
        "DISTINCT value",
        "1 UNION SELECT 1",
    ],
)
def test_queries_are_refused(con, text):
    with pytest.raises(ConfigError, match="where: a whole query"):
        check_expression(con, "where", text, COLUMNS)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("random() < 0.5", "random: its value may differ between runs"),
        ("RaNdom() < 0.5", "random: its value"),
        ('"random"() < 0.5', "random: its value"),
        ("main.random() < 0.5", "main.random"),
        ("now() > now()", "now: its value"),
        ("current_date IS NULL", "no column 'current_date'"),
        ("nextval('s') = 1", "nextval: its value"),
        ("uuid() = source", "uuid: its value"),
        ("current_setting('threads') = '1'", "current_setting: its value"),
        ("getvariable('x') = 1", "getvariable: its value"),
        ("getenv('HOME') = 'x'", "no function getenv"),
        ("hash(game_id) % 2 = 0", "hash: its value"),
        ("assert_true(value = 1)", "error: its value"),
        ("sum(value) > 1", "sum is not a function of a single row"),
        ("count(*) > 1", "star|not a function of a single row"),
        ("first(value ORDER BY game_id) = 1", "not a function of a single row"),
        ("row_number() OVER () > 1", "a window function"),
        ("lag(value) OVER (ORDER BY game_id) = 1", "a window function"),
        ("unnest(moves) = 1", "unnest is not a function of a single row"),
        ("value = (SELECT 1)", "a subquery"),
        ("value IN (SELECT 1)", "a subquery"),
        ("EXISTS (FROM duckdb_settings())", "a subquery"),
        ("source = ANY (['a'])", "a subquery"),
        ("read_text('/etc/passwd') = ''", "read_text is not a function of a single row"),
        ("list_filter(flags, lambda f: f = 'x') = []", "a lambda"),
        ("len([f FOR f IN flags]) = 1", "a lambda"),
        ("source COLLATE nocase = 'A'", "a collation"),
        ("source::TIMESTAMPTZ IS NULL", "a cast to TIMESTAMPTZ"),
        ("date '2020-01-01' IS NULL", "a cast to date"),
        ("strftime('2020-01-01', '%H') = '0'", "strftime: dates and times are not allowed"),
        ("flags.list_contains('x')", "flags.list_contains"),
        ("games.value = 1", "games.value: a column name must not be qualified"),
        ("nosuch(value)", "no function nosuch"),
        ("flags > 3", "Cannot compare"),
        ("regexp_matches(source, '(')", "missing"),
        ("not " * 3000 + "true", "depth"),
        ("(" * 3000 + "true" + ")" * 3000, "depth"),
    ],
)
def test_expressions_beyond_the_row_are_refused(con, text, reason):
    with pytest.raises(ConfigError, match=reason):
        check_expression(con, "where", text, COLUMNS)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("value_sample_teir <= 1", "Did you mean value_sample_tier?"),
        ("tier <= 1", "Did you mean value_sample_tier?"),
        ("winner = Red", "Put text in single quotes."),
        ("value = 1, winner = 'RED'", "Join conditions with AND."),
    ],
)
def test_errors_contain_a_hint(con, text, hint):
    with pytest.raises(ConfigError) as caught:
        check_expression(con, "where", text, COLUMNS)
    assert caught.value.hint == hint


def test_an_error_that_is_not_utf8_is_explained(con):
    with pytest.raises(ConfigError, match="the SQL is not valid"):
        check_expression(con, "--where", "x'0\ufffd' || board", {"board": "BLOB"})


def test_messages_truncate_long_expressions(con):
    with pytest.raises(ConfigError) as caught:
        check_expression(con, "where", "value = 1 AND " * 1000 + "nosuch", COLUMNS)
    assert len(str(caught.value)) < 1000


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
        assert found.names == names
        assert found.columns == {name.partition(".")[0] for name in names}
    with pytest.raises(ConfigError, match=r"no column 'extra\.ode'.*one of extra\.Odd, extra\.even, flags"):
        check_expression(con, "where", "extra.ode > 1", columns)
    with pytest.raises(ConfigError, match=r"no column 'board'.*not here"):
        check_expression(con, "where", "board = 1", columns, {"board": "not here"})
    twice = {**COLUMNS, "extra": 'STRUCT("odd" DOUBLE, "Odd" DOUBLE)'}
    with pytest.raises(ConfigError, match="expected a column extra that DuckDB can read"):
        check_expression(con, "where", "value = 1", twice)
