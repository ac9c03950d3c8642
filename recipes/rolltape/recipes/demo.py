"""The demonstration: a run from start to end, what SQL says of it, and its replay. Every claim is checked."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rolltape.recipes.config import RunConfig
from rolltape.recipes.output import print_rows, say
from rolltape.recipes.runs import run as run_to_end
from rolltape.recipes.tamper import flip_one_log_prob_bit
from rolltape.recipes.twin import bits_of, first_difference, shortened
from rolltape.store.lake import Lake

MIN_EXACT = 0.9
MAX_DELTA = 1e-4
MIN_CONTROL_DELTA = 0.1
MAX_TWIN_STEPS = 20

_HARDEST = """
    select problem_id, count(*) as rollouts, round(avg(reward), 3) as mean_reward
    from trajectories where purpose = 'train' and reward is not null
    group by 1 order by mean_reward, 1 limit 5
"""
_GROWTH = """
    select min_version // 25 * 25 as from_version, count(*) as rollouts, round(avg(reward), 3) as mean_reward
    from trajectories where purpose = 'train' group by 1 order by 1
"""
QUESTIONS = (
    ("Which problems were hardest?", _HARDEST),
    ("How did reward grow with the version that sampled?", _GROWTH),
    ("Does every rollout have exactly one fate?", "select * from conservation"),
)


@dataclass(slots=True)
class Checks:
    """Claims and whether they held."""

    rows: list[dict[str, Any]] = field(default_factory=list)

    def check(self, claim: str, ok: bool, found: Any) -> None:
        """Note one claim."""
        self.rows.append({"claim": claim, "ok": bool(ok), "found": found})

    @property
    def ok(self) -> bool:
        """Whether all held."""
        return all(row["ok"] for row in self.rows)


def one(lake: Lake, query: str) -> Any:
    """The single value that a query answers with."""
    table = lake.sql(query).arrow()
    return table.column(0)[0].as_py() if table.num_rows else None


def ask(lake: Lake) -> None:
    """Three questions in SQL."""
    for title, query in QUESTIONS:
        print_rows(lake.sql(query).arrow().to_pylist(), title=f"SQL: {title}")


def check_sort_digits(lake: Lake, config: RunConfig, checks: Checks) -> None:
    """What the sorting demonstration must show."""
    overlap = one(
        lake,
        "select count(*) from (select distinct problem_id from rollout_dispatched where purpose = 'train') d "
        "join problem_registered p using (problem_id) where p.split = 'heldout'",
    )
    checks.check("withheld problems that training saw: 0", overlap == 0, overlap)
    heldout = one(lake, "select count(*) from problem_registered where split = 'heldout'")
    checks.check("200 problems were withheld", heldout == 200, heldout)
    exact = _evaluation(lake, config.run_id).get("exact_match")
    checks.check(
        f"exact match on withheld problems at least {MIN_EXACT}", exact is not None and exact >= MIN_EXACT, exact
    )


def check_versions(lake: Lake, checks: Checks) -> None:
    """List versions with their acknowledgements; each one that sampled must have been committed and activated."""
    rows = (
        lake.sql(
            "select version, step, state, required_engines, staged_engines, activated_engines, weights_digest "
            "from policy_versions order by policy_run_epoch, version"
        )
        .arrow()
        .to_pylist()
    )
    shown = rows if len(rows) <= 6 else [*rows[:2], *rows[-4:]]
    print_rows(shown, title=f"weight versions ({len(rows)} in all)")
    checks.check(
        "weight versions were published, staged, committed and activated",
        bool(rows) and _all_acknowledged(rows),
        len(rows),
    )


def _all_acknowledged(rows: list[dict[str, Any]]) -> bool:
    return all(row["state"] == "activated" for row in rows)


def check_proof(lake: Lake, checks: Checks) -> None:
    """Token in, token out holds for every trajectory; and the books balance."""
    broken = one(lake, "select count(*) from trajectories where tito_ok is distinct from true")
    checks.check("trajectories whose prefix proof fails: 0", broken == 0, broken)
    balance = one(lake, "select coalesce(sum(abs(balance)), 0) from conservation")
    checks.check("conservation balances", balance == 0, balance)


def check_probe(lake: Lake, checks: Checks) -> None:
    """The same-checkpoint probe, and its control."""
    row = (
        lake.sql("select max(max_abs_delta) as delta, min(control_max_abs_delta) as control from mismatch_probed")
        .arrow()
        .to_pylist()[0]
    )
    checks.check(
        f"largest |sampled - recomputed| log-prob below {MAX_DELTA:g}", (row["delta"] or 1) < MAX_DELTA, row["delta"]
    )
    checks.check(
        f"shifted by one token it is above {MIN_CONTROL_DELTA:g}",
        (row["control"] or 0) > MIN_CONTROL_DELTA,
        row["control"],
    )


def check_smollm2(lake: Lake, checks: Checks) -> None:
    """What the language model's step must show."""
    count = one(lake, "select count(*) from trajectories where purpose = 'train' and state = 'ended'")
    checks.check("8 problems x 4 rollouts", count == 32, count)
    varied = one(
        lake,
        "select count(*) from (select group_id from trajectories where purpose = 'train' group by group_id "
        "having max(reward) - min(reward) > 1e-6)",
    )
    checks.check("groups whose rewards vary: at least 1", varied >= 1, varied)
    step = lake.sql("select grad_norm, skipped from train_step_completed order by step").arrow().to_pylist()[0]
    checks.check(
        "one step trained, gradient norm above 0",
        (step["grad_norm"] or 0) > 0 and not step["skipped"],
        step["grad_norm"],
    )
    digests = one(lake, "select count(distinct weights_digest) from weights_published")
    checks.check("the weights digest changed", digests == 2, digests)


def check_replay(lake: Lake, config: RunConfig, checks: Checks, *, late: bool) -> int:
    """Replay a step in a fresh process, bit for bit; returns the step."""
    steps = {row["step"] for row in lake.sql("select step from train_step_completed").arrow().to_pylist()}
    saved = {row["step"] for row in lake.sql("select step from checkpoint_saved").arrow().to_pylist()}
    candidates = sorted(steps - saved)
    if late:
        candidates = [step for step in candidates if step > max(steps) * 0.6] or candidates
    step = random.SystemRandom().choice(candidates)
    done = _rolltape("replay", "--lake", lake.location.url, "--run", config.run_id, "--step", str(step))
    print(done.stdout, end="")
    checks.check(
        f"step {step} (no checkpoint of its own) replays to the bit in a fresh process",
        done.returncode == 0,
        done.stderr.strip()[-300:] or "equal",
    )
    return int(step)


def check_tampering(lake: Lake, config: RunConfig, step: int, checks: Checks) -> None:
    """A copy of the tape beside it, with one log-prob bit flipped, must be refused, by name."""
    target = lake.location.parent().child(f"{lake.location.name}-tampered")
    copy, trajectory = flip_one_log_prob_bit(lake, config.run_id, step, target)
    done = _rolltape("replay", "--lake", copy.location.url, "--run", config.run_id, "--step", str(step))
    named = trajectory in done.stderr and "rollout_log_probs" in done.stderr
    say(f"tampered copy: {done.stderr.strip()}", tampered=done.stderr.strip())
    checks.check(
        "a copy with one log-prob bit flipped is refused, trajectory and tensor named",
        done.returncode != 0 and named,
        trajectory,
    )


def check_same_as_embedded(lake: Lake, config: RunConfig, checks: Checks) -> None:
    """The first steps again without a broker, in a lake beside this one: equal to the bit."""
    num_steps = min(config.trainer.max_steps, MAX_TWIN_STEPS)
    place = lake.location.parent().child(f"{lake.location.name}-embedded")
    say(f"the first {num_steps} steps again over the embedded log, in {place.url}", lake=place.url)
    run_to_end(place.url, shortened(config, num_steps))
    ours, theirs = bits_of(lake, config.run_id), bits_of(Lake.open(place, read_only=True), config.run_id)
    both = sorted(ours.keys() & theirs.keys())
    difference = first_difference(ours, theirs)
    shown = {step: ours[step] for step in both}
    print_rows(
        [
            {
                "step": step,
                "batch_digest": bits["batch_digest"],
                "weights_digest": bits["weights_digest"],
                "loss_bits": bits["loss_bits"],
                "equal": bits == theirs[step],
            }
            for step, bits in shown.items()
        ],
        title="steps through the broker, and whether the embedded log gives the same",
    )
    checks.check(
        f"steps 1 to {num_steps} are equal to the bit over both logs: batches, losses, gradients, weights, metrics",
        len(both) == num_steps and difference is None,
        difference or f"{len(both)} steps, {sum(len(ours[step]) for step in both)} values",
    )


def report(checks: Checks) -> int:
    """Print the claims; 0 if all held."""
    print_rows(checks.rows, title="what was claimed, and what was found")
    say("everything held" if checks.ok else "NOT everything held", ok=checks.ok)
    return 0 if checks.ok else 1


def _evaluation(lake: Lake, run_id: str) -> dict[str, float]:
    rows = lake.read("evaluation_completed", run_id=run_id)["evaluation_completed"].to_pylist()
    if not rows:
        return {}
    newest = max(rows, key=lambda row: (row["policy_run_epoch"], row["version"]))
    return {entry["name"]: entry["value"] for entry in newest["metrics"]}


def _rolltape(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rolltape.recipes.cli", *arguments]
    return subprocess.run(  # noqa: S603 - our own program with our own arguments
        command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )


CheckFunction = Callable[[Lake, RunConfig, Checks], None]
