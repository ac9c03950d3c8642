"""Index, quantization and object-lifecycle contracts, as far as events and files tell."""

from __future__ import annotations

import hashlib
from typing import Any, Final

from rolltape.store.location import Location
from rolltape.store.verify_context import Check, Context, Outcome, outcome

_BLOCK_BYTES: Final = 8 << 20


def index_agreement(context: Context) -> Outcome:
    """The same context under the same weights selects the same sparse-attention indices, by layer and tie rule."""
    digests = f"""
        SELECT a.event_id, a.prefix_digest, a.version_runs[1].weights_digest AS weights_digest,
            d.layer AS layer, d.mode AS mode, d.tie_rule AS tie_rule, d.digest AS digest
        FROM (SELECT *, unnest(index_digests) AS d FROM action_sampled WHERE {context.new()}) a
    """
    rows = context.rows(
        f"""
        SELECT prefix_digest, layer, list_sort(list(DISTINCT digest)) AS digests, min(event_id) AS event_id
        FROM ({digests})
        WHERE prefix_digest IS NOT NULL AND weights_digest IS NOT NULL
        GROUP BY prefix_digest, weights_digest, layer, mode, tie_rule
        HAVING count(DISTINCT digest) > 1
        ORDER BY ALL
        """
    )
    broken = [
        {
            "event_id": row["event_id"],
            "message": f"layer {row['layer']} at context {row['prefix_digest']}: expected one set of indices, got "
            f"{row['digests']}",
        }
        for row in rows
    ]
    return outcome(context.one(f"SELECT count(*) AS num FROM ({digests})")["num"], broken)


def quantization(context: Context) -> Outcome:
    """An engine quantises weights by a scheme that the version declares, or declares none for a version without one."""
    rows = context.rows(
        f"""
        WITH schemes AS (
            SELECT run_id, policy_id, policy_run_epoch, version,
                list_distinct(flatten(list(list_transform(quantization, lambda q: q.scheme)))) AS schemes
            FROM weights_published
            WHERE len(quantization) > 0
            GROUP BY ALL
        ),
        used AS (
            SELECT DISTINCT a.run_id, a.engine.id AS engine_id, a.engine.weight_quantization AS scheme,
                r.policy_id AS policy_id, r.run_epoch AS policy_run_epoch, r.version AS version
            FROM (SELECT *, unnest(version_runs) AS r FROM action_sampled WHERE {context.new()}) a
            WHERE a.engine.weight_quantization IS NOT NULL
        )
        SELECT u.*, s.schemes
        FROM used u
        JOIN schemes s
            ON s.run_id = u.run_id AND s.policy_id = u.policy_id AND s.policy_run_epoch = u.policy_run_epoch
            AND s.version = u.version
        ORDER BY ALL
        """
    )
    broken = [
        {
            "message": f"engine {row['engine_id']} with version {row['version']}: expected a scheme of "
            f"{row['schemes']}, got "
            f"{row['scheme']}"
        }
        for row in rows
        if row["scheme"] not in row["schemes"]
    ]
    return outcome(len(rows), broken)


def ledger(context: Context) -> Outcome:
    """No object is used after it was freed, and none is created twice without being freed."""
    entries = f"""
        SELECT event_id, run_id, producer_id, producer_epoch, lane_seq, e.process AS process, e.name AS name,
            e.state AS state, e.num_bytes AS num_bytes, place
        FROM (
            SELECT *, unnest(entries) AS e, generate_subscripts(entries, 1) AS place
            FROM memory_sampled WHERE {context.new()}
        )
    """
    rows = context.rows(
        f"""
        SELECT * FROM (
            SELECT *, lag(state) OVER (
                PARTITION BY run_id, producer_id, producer_epoch, process, name ORDER BY lane_seq, place
            ) AS state_before
            FROM ({entries})
        )
        WHERE (state_before = 'freed' AND state <> 'created') OR (state_before <> 'freed' AND state = 'created')
        ORDER BY run_id, producer_id, lane_seq, place
        """
    )
    broken = [
        {
            "event_id": row["event_id"],
            "message": f"object {row['name']} of process {row['process']}: expected it to be "
            f"{'created anew' if row['state_before'] == 'freed' else 'freed'} first, got {row['state']} after "
            f"{row['state_before']}",
        }
        for row in rows
    ]
    counts = context.one(f"SELECT max(peak_bytes) AS peak_bytes FROM memory_sampled WHERE {context.new()}")
    return outcome(context.one(f"SELECT count(*) AS num FROM ({entries})")["num"], broken, counts)


def artifacts(context: Context) -> Outcome:
    """Published shards are there with the bytes that their events name; checkpoints are there, unless released."""
    if context.location is None:
        return outcome(0)
    released = {path for row in context.rows("SELECT paths FROM artifacts_released") for path in row["paths"] or ()}
    shards = context.rows(
        f"""
        SELECT event_id, version, path, s.file AS file, s.num_bytes AS num_bytes, s.sha256 AS sha256
        FROM (SELECT *, unnest(shards) AS s FROM weights_published WHERE {context.new()})
        WHERE payload <> 'unchanged'
        ORDER BY ALL
        """
    )
    checkpoints = context.rows(
        f"SELECT event_id, step, path, num_bytes FROM checkpoint_saved WHERE {context.new()} ORDER BY ALL"
    )
    broken: list[dict[str, Any]] = []
    num_bytes = 0
    for row in shards:
        if row["path"] in released or f"{row['path']}/{row['file']}" in released:
            continue
        num_bytes += row["num_bytes"] or 0
        problem = _shard_problem(context.location.child(row["path"], row["file"]), row)
        if problem:
            message = f"shard {row['file']} of version {row['version']}: {problem}"
            broken.append({"event_id": row["event_id"], "tensor": row["file"], "message": message})
    kept = [row for row in checkpoints if row["path"] not in released]
    broken += [
        {
            "event_id": row["event_id"],
            "message": f"checkpoint of step {row['step']}: expected it at {row['path']} below the lake, there "
            "is nothing",
        }
        for row in kept
        if not context.location.child(row["path"]).exists()
    ]
    counts = {"shards": len(shards), "checkpoints": len(kept), "hashed_bytes": num_bytes}
    return outcome(len(shards) + len(kept), broken, counts)


def _shard_problem(shard: Location, row: dict[str, Any]) -> str | None:
    size = shard.size_bytes()
    if size is None:
        return f"expected it at {row['path']} below the lake, there is nothing"
    if row["num_bytes"] is not None and size != row["num_bytes"]:
        return f"expected {row['num_bytes']} bytes, got {size}"
    if row["sha256"] is not None and _sha256(shard) != row["sha256"].removeprefix("sha256:"):
        return "expected the published bytes, its SHA-256 differs"
    return None


def _sha256(location: Location) -> str:
    hasher = hashlib.sha256()
    with location.open_input() as stream:
        while block := stream.read(_BLOCK_BYTES):
            hasher.update(block)
    return hasher.hexdigest()


OBJECT_CHECKS: Final = (
    Check(
        contract="index",
        name="index_agreement",
        doc="equal contexts select equal indices",
        unit="layer digests",
        run=index_agreement,
    ),
    Check(
        contract="quantization",
        name="declared_schemes",
        doc="engines quantise as their version declares",
        unit="engine versions",
        run=quantization,
    ),
    Check(contract="lifecycle", name="ledger", doc="no object is used after it was freed", unit="entries", run=ledger),
    Check(
        contract="lifecycle",
        name="artifacts",
        doc="shards and checkpoints are there, with their bytes",
        unit="files",
        run=artifacts,
    ),
)
