"""What the log promises (design §5.5, §5.6): no gaps, one event an id, every rollout accounted for."""

from __future__ import annotations

from typing import Any, Final

from rolltape.schema.cursor import Cursor
from rolltape.schema.kinds import KINDS
from rolltape.store.duck import literal
from rolltape.store.snapshot import KAFKA_TRANSACTION, LANE_TRANSACTION, LOG_TRANSACTION
from rolltape.store.verify_context import Check, Context, Outcome, at_trajectory, outcome
from rolltape.store.workspace import Workspace

_LANE: Final = "producer_id, producer_epoch, log_topic, log_partition"

_MAX_CURSORS: Final = 4

_UNBALANCED: Final = """
    SELECT trajectory_id, attempt, run_id, trainer_id, dispatched + undispatched AS begun, trained, dropped,
        evaluated, superseded, in_flight, drop_reason
    FROM attempt_fates
    WHERE balance <> 0
    ORDER BY ALL
"""

# The lane numbers that are accounted for: by rows, and by the log's dead letters for rows that could not become any
# (a recorder's own dead letter is a row of its lane itself).
_COVERED: Final = f"""
    SELECT {_LANE}, lane_seq AS first, lane_seq AS last FROM events
    UNION ALL
    SELECT source_producer_id, source_producer_epoch, source_topic, source_partition, first_lane_seq, last_lane_seq
    FROM dead_letter
    WHERE first_lane_seq IS NOT NULL AND source_topic IS NOT NULL
"""


def lanes(context: Context) -> Outcome:
    """Lane numbers up to each lane's mark: none twice, none beyond the mark.

    A number that no row and no dead letter has belongs to a repeat that the log recognised and left out: it is counted.
    Whether a record is missing altogether shows in the offsets.
    """
    rows = context.rows(
        f"""
        WITH covered AS ({_COVERED}),
        ordered AS (
            SELECT *, max(last) OVER (
                PARTITION BY {_LANE} ORDER BY first, last ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
            ) AS last_before
            FROM covered
        )
        SELECT {_LANE}, max(last) AS last,
            sum(greatest(first - coalesce(last_before, -1) - 1, 0))::BIGINT AS num_absent,
            count(*) FILTER (WHERE first <= last_before) AS num_twice,
            min(first) FILTER (WHERE first <= last_before) AS first_twice,
            sum(last - first + 1)::BIGINT AS num
        FROM ordered
        GROUP BY {_LANE}
        ORDER BY {_LANE}
        """
    )
    broken: list[dict[str, Any]] = []
    for row in rows:
        lane = f"{row['producer_id']}/{row['producer_epoch']}/{row['log_topic']}/{row['log_partition']}"
        if row["num_twice"]:
            broken.append(
                {
                    "message": f"lane {lane}: expected each number once, {row['num_twice']} come twice, the first is "
                    f"{row['first_twice']}"
                }
            )
        mark = None if context.transactions is None else context.transactions.get(f"{LANE_TRANSACTION}/{lane}", -1)
        if mark is not None and mark < row["last"]:
            broken.append({"message": f"lane {lane}: expected rows up to its mark {mark}, got {row['last']}"})
    counts = {"lanes": len(rows), "recognised_repeats": sum(row["num_absent"] for row in rows)}
    return outcome(sum(row["num"] for row in rows), broken, counts)


def offsets(context: Context) -> Outcome:
    """Offsets of every partition run from 0 to the end that the table states, without a gap.

    Kafka's offsets have holes of their own: a repeat that was recognised takes one and leaves no row, and a row whose
    record waited for another stands at the offset of that one. There the lanes tell what is missing; the offsets that
    no row has are counted.
    """
    brokers_number = _brokers_number(context)
    rows = context.rows(
        """
        WITH positions AS (SELECT DISTINCT log_topic, log_partition, log_offset FROM events),
        ordered AS (
            SELECT *, lag(log_offset, 1, -1) OVER (PARTITION BY log_topic, log_partition ORDER BY log_offset) AS before
            FROM positions
        )
        SELECT log_topic, log_partition, count(*) AS num, max(log_offset) AS last,
            list({'first': before + 1, 'last': log_offset - 1} ORDER BY log_offset)
                FILTER (WHERE log_offset > before + 1) AS gaps,
            sum(log_offset - before - 1)::BIGINT AS num_absent
        FROM ordered
        GROUP BY log_topic, log_partition
        ORDER BY log_topic, log_partition
        """
    )
    num = sum(row["num"] for row in rows)
    if brokers_number:
        return outcome(num, [], {"partitions": len(rows), "without_rows": sum(row["num_absent"] for row in rows)})
    broken: list[dict[str, Any]] = []
    for row in rows:
        place = f"{row['log_topic']}/{row['log_partition']}"
        broken += [
            {
                "message": f"partition {place}: expected offsets without gaps, {gap['first']} to {gap['last']} "
                "are missing"
            }
            for gap in row["gaps"] or ()
        ]
        stated = None if context.transactions is None else context.transactions.get(f"{LOG_TRANSACTION}/{place}")
        if stated is not None and stated != row["last"]:
            broken.append(
                {
                    "message": f"partition {place}: expected records up to offset {stated}, as the table "
                    f"states, got {row['last']}"
                }
            )
    broken += _empty_partitions(context, {f"{row['log_topic']}/{row['log_partition']}" for row in rows})
    return outcome(num, broken, {"partitions": len(rows)})


def _brokers_number(context: Context) -> bool:
    """Whether a sink archived this lake out of Kafka, whose brokers number the offsets."""
    return any(app.startswith(f"{KAFKA_TRANSACTION}/") for app in context.transactions or ())


def _empty_partitions(context: Context, seen: set[str]) -> list[dict[str, Any]]:
    """Partitions that the table states to have records of, and has none."""
    return [
        {"message": f"partition {place}: expected records up to offset {version}, as the table states, got none"}
        for app, version in sorted((context.transactions or {}).items())
        if app.startswith(f"{LOG_TRANSACTION}/") and (place := app.split("/", 1)[1]) not in seen
    ]


def event_ids(context: Context) -> Outcome:
    """No event id stands twice: neither the same event again nor another one under its name."""
    rows = context.rows(
        """
        SELECT event_id, count(*) AS num, list_sort(list(DISTINCT kind)) AS kinds, min(trajectory_id) AS trajectory_id,
            min(attempt) AS attempt,
            list({'topic': log_topic, 'partition': log_partition, 'offset': log_offset} ORDER BY log_offset) AS places
        FROM events
        GROUP BY event_id
        HAVING count(*) > 1
        ORDER BY event_id
        """
    )
    broken = []
    for row in rows:
        same = len(row["kinds"]) == 1 and _same_content(context, row["kinds"][0], row["event_id"])
        what = "the same event again" if same else "other content under the same id"
        places = ", ".join(f"{place['topic']}/{place['partition']}:{place['offset']}" for place in row["places"])
        message = f"event {row['event_id']}: expected it once, got {what} at {places}"
        broken.append(at_trajectory(row, message, event_id=row["event_id"]))
    num = context.one("SELECT count(*) AS num FROM events")["num"]
    counts = context.one(
        "SELECT count(*) FILTER (WHERE reason = 'conflict') AS conflicts_kept_as_dead_letters, "
        "count(*) AS dead_letters, count(*) FILTER (WHERE is_redriven) AS redriven FROM dead_letters"
    )
    return outcome(num, broken, counts)


def _same_content(context: Context, kind: str, event_id: str) -> bool:
    """Whether all rows of an id agree in everything but what the log and the lane stamped."""
    stamps = ("log_topic", "log_partition", "log_offset", "producer_epoch", "lane_seq")
    rows = context.query(f"SELECT * FROM {kind} WHERE event_id = {literal(event_id)}").drop_columns(list(stamps))
    first = rows.slice(0, 1)
    return all(rows.slice(row, 1).equals(first) for row in range(1, rows.num_rows))


def placement(context: Context) -> Outcome:
    """Every event lies in the topic of its kind (a dead letter also in that of the record that it stands for)."""
    topics = ", ".join(f"({literal(kind.name)}, {literal(kind.topic)})" for kind in KINDS.values())
    rows = context.rows(
        f"""
        WITH topics AS (SELECT * FROM (VALUES {topics}) t(kind, topic))
        SELECT e.kind, e.log_topic, t.topic, count(*) AS num, min(e.event_id) AS event_id
        FROM events e
        LEFT JOIN topics t ON t.kind = e.kind
        WHERE e.kind <> 'dead_letter' AND e.log_topic IS DISTINCT FROM t.topic AND {context.new("e")}
        GROUP BY ALL
        ORDER BY ALL
        """
    )
    broken = [
        {
            "event_id": row["event_id"],
            "message": f"{row['num']} events of kind {row['kind']}: expected topic {row['topic']}, got "
            f"{row['log_topic']}",
        }
        for row in rows
    ]
    return outcome(context.one(f"SELECT count(*) AS num FROM events WHERE {context.new()}")["num"], broken)


def conservation(context: Context) -> Outcome:
    """Each attempt of the live line has exactly one fate under each trainer: at the end, and at recorded cursors.

    Of the cursors that trainers recorded, a few are looked at, evenly spread; :func:`rolltape.store.sql.run_sql` with
    ``as_of`` answers for any other.
    """
    broken = _unbalanced(context.rows(_UNBALANCED), "the end")
    cursors = _recorded_cursors(context)
    for cursor in cursors:
        rows = Workspace(context.source, as_of=cursor).table(_UNBALANCED, ["attempt_fates"]).to_pylist()
        broken += _unbalanced(rows, str(cursor))
    counts = context.one(
        "SELECT sum(dispatched)::BIGINT AS dispatched, sum(undispatched)::BIGINT AS undispatched, "
        "sum(trained)::BIGINT AS trained, sum(dropped)::BIGINT AS dropped, sum(evaluated)::BIGINT AS evaluated, "
        "sum(superseded)::BIGINT AS superseded, sum(in_flight)::BIGINT AS in_flight FROM conservation"
    )
    num = int(counts["dispatched"] + counts["undispatched"])
    return outcome(num, broken, counts | {"recorded_cursors": len(cursors)})


def _recorded_cursors(context: Context) -> list[Cursor]:
    rows = context.rows(
        f"SELECT cursor_after FROM batch_formed WHERE len(cursor_after) > 0 AND {context.new()} ORDER BY log_offset"
    )
    places = {round(place * (len(rows) - 1) / max(_MAX_CURSORS - 1, 1)) for place in range(_MAX_CURSORS)}
    return [Cursor.from_rows(row["cursor_after"]) for place, row in enumerate(rows) if place in places]


def _unbalanced(rows: list[dict[str, Any]], when: str) -> list[dict[str, Any]]:
    names = ("trained", "dropped", "evaluated", "superseded", "in_flight")
    return [
        at_trajectory(
            row,
            f"trajectory {row['trajectory_id']} attempt {row['attempt']} under trainer {row['trainer_id']}, at {when}: "
            f"expected one fate of {row['begun']} begun, got "
            + (", ".join(f"{row[name]} × {name}" for name in names if row[name]) or "none"),
        )
        for row in rows
    ]


LOG_CHECKS: Final = (
    Check(contract="log", name="lanes", doc="each lane number once, up to the mark", unit="events", run=lanes),
    Check(contract="log", name="offsets", doc="no record is missing", unit="records", run=offsets),
    Check(contract="log", name="event_ids", doc="no event twice, no two under one id", unit="events", run=event_ids),
    Check(contract="log", name="placement", doc="events lie in the topic of their kind", unit="events", run=placement),
    Check(
        contract="log",
        name="conservation",
        doc="begun = trained + dropped + evaluated + superseded + in flight",
        unit="attempts",
        run=conservation,
    ),
)
