"""The reference page of SQL and verification, rendered: ``python -m rolltape.store.docs > docs/sql.md``.

A test compares the page with what is rendered and runs every query on it, so it cannot go stale.
"""

from __future__ import annotations

import sys
from itertools import groupby
from typing import Any, Final

import pyarrow.compute as pc

from rolltape.store.projections import PROJECTIONS
from rolltape.store.verify import CHECKS
from rolltape.store.workspace import view_columns

_INTRODUCTION: Final = """\
# SQL

This page is rendered (`python -m rolltape.store.docs > docs/sql.md`); a test keeps it true and runs every query on it.

`rolltape sql --lake LAKE "SELECT …"`, or in Python:

```python
from rolltape.schema.cursor import Cursor
from rolltape.store import Lake

lake = Lake.create("lake")  # opens it where it exists
result = lake.sql("SELECT status, count(*) FROM trajectories GROUP BY status")
result.arrow(), result.polars(), result.pandas(), result.relation(), result.rows()
lake.sql("SELECT * FROM rewards", as_of=Cursor.parse("rollout/0:1234,training/0:55"))  # what was known then
```

One SELECT at a time, in DuckDB's dialect, over the views below and one view for each event kind ([events](events.md)),
whose struct fields are columns beside the envelope; `events` has the envelope and token columns of all kinds. Writes,
several statements, functions that read files or settings, and any other table are refused. `view_columns` lists every
view and column.

A view appears when a statement names it, and only the data files of the kinds behind it are looked at. Conditions on
`trajectory_id`, `run_id`, `log_topic`, `log_partition` and `log_offset` skip whole files by their bounds.
`trajectories`, `segments`, `tokens` and `groups` come from the fold: a plain `WHERE trajectory_id = '…'` over one of
the first three folds that trajectory alone; otherwise the whole tape is folded, once for each state of it, and kept
for the next statement.

`is_live` follows the run's live line: what a later run epoch left behind is false.
"""

_VERIFICATION: Final = """\
It prints what each check looked at and counted, and what broke: the trajectory, the tensor, the first differing index,
as far as they can be told; it exits 1 if anything broke. Untrusted log-probs, unknown prefixes and undeclared sampling
are counted, not broken: such data are stored as they are and refused where they would be trained. With
`--since CURSOR` (the one that an earlier verification ended with) trajectories, batches, versions and files are checked
only where something came since; lanes, offsets, event ids and conservation are always checked whole.
"""

QUERIES: Final = (
    (
        "Share of trusted log-probs by the version that sampled",
        (
            "SELECT policy_version, count(*) AS num_tokens, avg(trusted::INT) AS trusted_share\n"
            "FROM tokens WHERE is_action GROUP BY policy_version ORDER BY policy_version"
        ),
    ),
    (
        "Groups without variance",
        "SELECT count(*) AS num_groups, count(*) FILTER (WHERE zero_variance) AS without_variance FROM groups",
    ),
    (
        "Why rollouts may not be trained",
        (
            "SELECT reason, count(*) AS num\n"
            "FROM (SELECT unnest(untrainable_reasons) AS reason FROM trajectories WHERE is_current)\n"
            "GROUP BY reason ORDER BY num DESC, reason"
        ),
    ),
    (
        "Is everything accounted for?",
        (
            "SELECT trainer_id, dispatched, undispatched, trained, dropped, evaluated, superseded, in_flight, balance\n"
            "FROM conservation"
        ),
    ),
    (
        "The same for each root rollout",
        (
            "SELECT trainer_id, root_rollout_id, sum(trained) AS trained, sum(balance) AS balance\n"
            "FROM attempt_fates GROUP BY ALL HAVING sum(balance) <> 0"
        ),
    ),
    (
        "Which engines acknowledged which version",
        (
            "SELECT version, state, required_engines, staged_engines, activated_engines\n"
            "FROM policy_versions ORDER BY policy_run_epoch, version"
        ),
    ),
    (
        "Problems that training saw although they were held out",
        (
            "SELECT count(DISTINCT t.problem_id) AS overlap\n"
            "FROM trajectories t JOIN problems p ON p.run_id = t.run_id AND p.problem_id = t.problem_id\n"
            "WHERE t.purpose = 'train' AND p.split = 'heldout'"
        ),
    ),
)


def render_sql() -> str:
    """The whole page, as Markdown."""
    parts = [_INTRODUCTION, "## Questions\n"]
    parts += [f"{title}:\n\n```sql\n{query}\n```\n" for title, query in QUERIES]
    parts.append("## Views\n")
    columns = view_columns()
    for view in PROJECTIONS.values():
        rows = columns.filter(pc.equal(columns["view"], view.name)).to_pylist()
        parts.append(f"### {view.name}\n\n{view.doc}\n\n{_table(rows)}")
    parts.append(f"## What `rolltape verify` checks\n\n{_VERIFICATION}\n{_checks()}")
    return "\n".join(parts)


def _table(rows: list[dict[str, Any]]) -> str:
    lines = ["| column | type | meaning |", "| --- | --- | --- |"]
    lines += [f"| `{row['column']}` | {_type(row['type'])} | {row['doc']} |" for row in rows]
    return "\n".join(lines) + "\n"


def _type(text: str) -> str:
    """A type as DuckDB writes it, or that it is nested where spelling it out would fill the page."""
    return text if len(text) <= 60 else "STRUCT(…)[]" if text.endswith("[]") else "STRUCT(…)"


def _checks() -> str:
    lines = ["| contract | check | meaning | counted in |", "| --- | --- | --- | --- |"]
    for contract, checks in groupby(CHECKS, key=lambda check: check.contract):
        lines += [f"| {contract} | `{check.name}` | {check.doc} | {check.unit} |" for check in checks]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(render_sql())
