"""Only a single SELECT over the views passes, and what it reads is known before it runs."""

from __future__ import annotations

import pytest

from rolltape.schema.errors import SqlError, SqlRefusedError
from rolltape.store.projections import PROJECTIONS, VIEW_NAMES
from rolltape.store.statement import read_statement

REFUSED = [
    "",
    ";",
    "SELECT 1; SELECT 2",
    "SELECT 1; DROP VIEW trajectories",
    "COPY trajectories TO 'out.csv'",
    "COPY (SELECT 1) TO 'out.parquet'",
    "EXPORT DATABASE 'out'",
    "ATTACH 'other.db'",
    "PRAGMA database_list",
    "INSTALL httpfs",
    "LOAD httpfs",
    "SET threads = 1",
    "RESET threads",
    "USE other",
    "CALL pragma_version()",
    "EXPLAIN SELECT 1",
    "EXPLAIN ANALYZE SELECT * FROM events",
    "INSERT INTO events VALUES (1)",
    "UPDATE events SET kind = 'x'",
    "DELETE FROM events",
    "CREATE TABLE x AS SELECT 1",
    "CREATE MACRO f() AS TABLE SELECT 1",
    "BEGIN",
    "VACUUM",
    "CHECKPOINT",
    "PREPARE x AS SELECT 1",
    "DESCRIBE trajectories",
    "SUMMARIZE trajectories",
    "SHOW TABLES",
    "SELECT * FROM (DESCRIBE trajectories)",
    "SELECT * FROM (SHOW TABLES)",
    "PIVOT events ON kind USING count(*)",
    "WITH x AS (INSERT INTO events VALUES (1) RETURNING *) SELECT * FROM x",
    "WITH x AS (DELETE FROM events RETURNING *) SELECT * FROM x",
    "WITH x AS (UPDATE events SET kind = 'y' RETURNING *) SELECT * FROM x",
    "SELECT * FROM (WITH x AS (DELETE FROM events RETURNING *) SELECT * FROM x)",
    "SELECT * FROM read_csv('a.csv')",
    "SELECT * FROM read_csv_auto('a.csv')",
    "SELECT * FROM read_parquet('a.parquet')",
    "SELECT * FROM parquet_scan('a.parquet')",
    "SELECT * FROM parquet_metadata('a.parquet')",
    "SELECT * FROM read_json('a.json')",
    "SELECT * FROM read_text('/etc/hostname')",
    "SELECT * FROM read_blob('/etc/hostname')",
    "SELECT * FROM glob('/etc/*')",
    "SELECT * FROM sniff_csv('a.csv')",
    "SELECT * FROM 'a.parquet'",
    "SELECT * FROM '/etc/hostname'",
    "SELECT * FROM 's3://bucket/a.parquet'",
    "SELECT (SELECT max(content) FROM read_text('/etc/hostname'))",
    "SELECT * FROM trajectories WHERE trajectory_id IN (SELECT content FROM read_text('/etc/hostname'))",
    "SELECT * FROM trajectories JOIN LATERAL (SELECT * FROM read_text('/etc/hostname')) USING (x)",
    "SELECT * FROM query('SELECT 1')",
    "SELECT * FROM query_table('events')",
    "SELECT * FROM json_execute_serialized_sql('{}')",
    "SELECT * FROM duckdb_settings()",
    "SELECT * FROM duckdb_secrets()",
    "SELECT * FROM duckdb_logs",
    "SELECT * FROM pragma_database_size()",
    "SELECT * FROM arrow_scan(1, 2, 3)",
    "SELECT * FROM python_map_function(1, 2)",
    "SELECT current_setting('temp_directory')",
    "SELECT system.main.current_setting('temp_directory')",
    "SELECT write_log('x')",
    "SELECT * FROM information_schema.tables",
    "SELECT * FROM pg_catalog.pg_tables",
    "SELECT * FROM sqlite_master",
    "SELECT * FROM folded_trajectories",
    "SELECT * FROM raw_events",
    "SELECT * FROM memory.main.events",
    "SELECT 1 LIMIT (SELECT count(*) FROM glob('/*'))",
    "SELECT * FROM events ORDER BY (SELECT max(content) FROM read_text('/etc/hostname'))",
    "SELECT count(*) OVER (ORDER BY (SELECT 1 FROM read_csv('x'))) FROM events",
    "SELECT list_transform([1], lambda x: (SELECT count(*) FROM read_text('/etc/hostname')))",
    "SELECT [x FOR x IN (SELECT content FROM read_text('/etc/hostname'))]",
    "SELECT * FROM duckdb_logs_parsed('QueryLog')",
    "SELECT * FROM nothing_of_the_kind",
]


@pytest.mark.parametrize("sql", REFUSED)
def test_refused(sql: str) -> None:
    with pytest.raises(SqlRefusedError):
        read_statement(sql, VIEW_NAMES)


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT 'open",
        "SELEC 1",
        "SELECT FROM WHERE",
        "SELECT 1 \0; COPY events TO 'x'",
        "SELECT '\ud800'",
        "SELECT " + "+".join(["1"] * 900),
        "SELECT " + "(" * 5000 + "1" + ")" * 5000,
    ],
    ids=range(7),
)
def test_text_that_does_not_parse(sql: str) -> None:
    with pytest.raises(SqlError):
        read_statement(sql, VIEW_NAMES)


@pytest.mark.parametrize(
    ("sql", "tables"),
    [
        ("SELECT 1", set()),
        ("SELECT 1; -- done", set()),
        ("FROM trajectories", {"trajectories"}),
        ("TABLE steps", {"steps"}),
        ("VALUES (1)", set()),
        ('SELECT * FROM Trajectories t JOIN "STEPS" s ON TRUE', {"trajectories", "steps"}),
        ("WITH x AS (SELECT * FROM tokens) SELECT * FROM x UNION ALL SELECT * FROM x", {"tokens"}),
        ("SELECT * FROM range(3), unnest([1])", set()),
        ("SELECT * FROM groups WHERE EXISTS (FROM rewards)", {"groups", "rewards"}),
        ("WITH RECURSIVE r AS (SELECT 1 AS n UNION ALL SELECT n + 1 FROM r WHERE n < 3) SELECT * FROM r", set()),
        ("SELECT * FROM (PIVOT events ON kind IN ('a') USING count(*))", {"events"}),
    ],
)
def test_allowed(sql: str, tables: set[str]) -> None:
    assert read_statement(sql, VIEW_NAMES).tables == tables


def test_near_names_are_offered() -> None:
    with pytest.raises(SqlRefusedError, match="did you mean trajectories"):
        read_statement("SELECT * FROM trajectory", VIEW_NAMES)


@pytest.mark.parametrize(
    ("condition", "run_ids", "trajectory_ids"),
    [
        ("trajectory_id = 'a'", None, {"a"}),
        ("t.trajectory_id IN ('a', 'b') AND run_id = 'r'", {"r"}, {"a", "b"}),
        ("trajectory_id = 'a' AND trajectory_id IN ('a', 'b') AND attempt > 0", None, {"a"}),
        ("trajectory_id = 'a' OR attempt > 0", None, None),
        ("NOT trajectory_id = 'a'", None, None),
        ("trajectory_id = lower('A')", None, None),
        ("trajectory_id IN (SELECT 'a')", None, None),
        ("trajectory_id IN ('a', upper('b'))", None, None),
        ("trajectory_id <> 'a'", None, None),
    ],
)
def test_restrictions(condition: str, run_ids: set[str] | None, trajectory_ids: set[str] | None) -> None:
    statement = read_statement(f"SELECT * FROM tokens t WHERE {condition}", VIEW_NAMES)
    assert (statement.run_ids, statement.trajectory_ids) == (run_ids, trajectory_ids)


def test_a_join_restricts_nothing() -> None:
    statement = read_statement("SELECT * FROM tokens t, steps s WHERE t.trajectory_id = 'a'", VIEW_NAMES)
    assert statement.trajectory_ids is None


@pytest.mark.parametrize("name", sorted(PROJECTIONS))
def test_views_declare_what_they_read(name: str) -> None:
    view = PROJECTIONS[name]
    read = read_statement(view.select, VIEW_NAMES | {"folded_trajectories", "folded_segments"}).tables
    assert set(view.needs) == read
