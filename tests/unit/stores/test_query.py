"""Named SQL: the loader, and that both dialects define the same queries, all of them used."""

import re
from pathlib import Path

import pytest

import kici.stores
from kici.stores.query import Query, Sql, load, numbered, parse, split_statements

STORES = Path(kici.stores.__path__[0])
SQLITE, POSTGRES = STORES / "sqlite" / "queries", STORES / "postgres" / "queries"

TWO = """-- A file starts with what its queries share.

-- name: first
-- Says what it is for.
SELECT a FROM t; -- really
UPDATE t SET a = :a WHERE b = :b AND c = :a::TEXT;

-- name: second
-- Another one.
DELETE FROM t
WHERE a = 'one;two';
"""


def test_parses_named_queries() -> None:
    found = parse(TWO)
    assert found == {
        "first": Sql(
            purpose="Says what it is for.",
            statements=("SELECT a FROM t", "UPDATE t SET a = :a WHERE b = :b AND c = :a::TEXT"),
        ),
        "second": Sql(purpose="Another one.", statements=("DELETE FROM t\nWHERE a = 'one;two'",)),
    }
    assert found["first"].parameters == ("a", "b")


def test_refuses_a_name_that_comes_twice() -> None:
    with pytest.raises(ValueError, match="first is defined twice"):
        parse(TWO + TWO)


def test_splits_scripts() -> None:
    assert split_statements("-- nothing;\n") == ()
    assert split_statements("A;\n\nB -- ;\n;\nC") == ("A", "B", "C")


@pytest.mark.parametrize(
    ("text", "expected", "names"),
    [
        ("SELECT :a", "SELECT $1", ("a",)),
        ("SELECT :b, :a, :b", "SELECT $1, $2, $1", ("b", "a")),
        ("SELECT :a::TEXT, x::BIGINT", "SELECT $1::TEXT, x::BIGINT", ("a",)),
        ("SELECT (:a)::JSON, :a_b", "SELECT ($1)::JSON, $2", ("a", "a_b")),
        ("SELECT 1", "SELECT 1", ()),
    ],
)
def test_numbers_parameters_and_leaves_casts_alone(text: str, expected: str, names: tuple[str, ...]) -> None:
    statement = numbered(Sql(purpose="", statements=(text,)))
    assert (statement.text, statement.parameters) == (expected, names)


def test_loads_a_folder_only_if_it_has_all_queries(tmp_path: Path) -> None:
    (tmp_path / "a.sql").write_text(TWO)
    with pytest.raises(ValueError, match=r"lacks queries .*'claim_job'.*unknown ones \['first', 'second'\]"):
        load(tmp_path)
    (tmp_path / "b.sql").write_text(TWO)
    with pytest.raises(ValueError, match=r"b\.sql is defined twice"):
        load(tmp_path)


def test_dialects_define_the_same_queries_with_the_same_parameters() -> None:
    sqlite, postgres = load(SQLITE), load(POSTGRES)
    assert set(sqlite) == set(postgres) == set(Query)
    for query in Query:
        assert set(sqlite[query].parameters) == set(postgres[query].parameters), query
        assert sqlite[query].purpose.endswith((".", "?")), query


def test_every_postgres_query_is_one_statement() -> None:
    for query, sql in load(POSTGRES).items():
        assert len(sql.statements) == 1, query


def test_both_dialects_sort_queries_into_the_same_files() -> None:
    assert {path.name for path in SQLITE.glob("*.sql")} == {path.name for path in POSTGRES.glob("*.sql")}
    for path in SQLITE.glob("*.sql"):
        assert list(parse(path.read_text())) == list(parse((POSTGRES / path.name).read_text())), path.name


def test_names_are_sorted_and_used() -> None:
    assert list(Query) == sorted(Query)
    code = "\n".join(path.read_text() for path in STORES.rglob("*.py"))
    used = set(re.findall(r"\bQuery\.([A-Z_]+)", code))
    assert {query.name for query in Query} == used
