"""What the fold makes of events: one row per attempt, one row per segment (design §4, Fold).

Both are Arrow schemas made of column specs, so that views and documentation are rendered from them. Lists of a
segment that are said to have length T run over the same response tokens, in the order of the tape.
"""

from __future__ import annotations

from typing import Final

import pyarrow as pa

from rolltape.schema.columns import (
    BOOL,
    FLOAT32,
    FLOAT64,
    INT32,
    INT64,
    STRING,
    Column,
    column,
    list_of,
    struct_of,
)
from rolltape.schema.kinds.rollout import SAMPLING_TYPE

OPEN: Final = "open"
ENDED: Final = "ended"
DROPPED: Final = "dropped"
ABANDONED: Final = "abandoned"
STATES: Final = (OPEN, ENDED, DROPPED, ABANDONED)

EXECUTION: Final = "execution"
SUMMARY: Final = "summary"

EARNED: Final = "earned"
MISSING: Final = "missing"
INVALID: Final = "invalid"
CONFLICT: Final = "conflict"
REWARD_STATES: Final = (EARNED, MISSING, INVALID, CONFLICT)

UNKNOWN_VERSION: Final = -1

TOKEN_REWARD_TYPE: Final = list_of(struct_of(segment_index=INT32, position=INT32, scalar=FLOAT64, event_id=STRING))

TRAJECTORY_COLUMNS: Final[tuple[Column, ...]] = (
    column("run_id", STRING, "run", required=True),
    column("run_epoch", INT32, "run epoch that handed the attempt out (or of its first event)", required=True),
    column("trajectory_id", STRING, "trajectory", required=True),
    column("attempt", INT32, "try at the rollout, from 0", required=True),
    column("is_current", BOOL, "the newest attempt that is not abandoned", required=True),
    column("group_id", STRING, "group"),
    column("problem_id", STRING, "problem"),
    column("root_rollout_id", STRING, "root of a branch; the trajectory itself where it is a root", required=True),
    column("forked_from_event_id", STRING, "event of the root that a branch forked from"),
    column("purpose", STRING, "train, evaluate or import"),
    column("training_step", INT64, "step that it is meant for (lock step)"),
    column("group_ordinal", INT32, "place of its group in the step"),
    column("member", INT32, "place in its group"),
    column("group_size", INT32, "members that the group will have"),
    column("worker_id", STRING, "who got it"),
    column("stage", STRING, "sft, reasoning, agentic, general or opd"),
    column("environment", STRING, "environment"),
    column("state", STRING, "open, ended, dropped (by a dead letter) or abandoned", required=True),
    column("status", STRING, "as rollout_ended says: completed, truncated, model_failed, env_failed or aborted"),
    column("cause", STRING, "why it ended"),
    column("num_events", INT32, "rollout-plane events of the attempt that are on the tape", required=True),
    column("last_event_index", INT32, "largest event index that is known of, by an event or a dead letter"),
    column(
        "missing_event_indexes", list_of(INT32), "indexes below it that are neither on the tape nor in a dead letter"
    ),
    column("num_segments", INT32, "segments", required=True),
    column("num_prompt_tokens", INT32, "context tokens of segment 0", required=True),
    column("num_action_tokens", INT64, "tokens that the policy sampled", required=True),
    column("num_observation_tokens", INT64, "tool, environment and template tokens", required=True),
    column(
        "num_untrusted_tokens",
        INT64,
        "sampled tokens whose log-prob is null, non-finite, positive or a sentinel",
        required=True,
    ),
    column("policy_id", STRING, "policy, where it is one and known"),
    column("min_version", INT64, "oldest known policy version of a sampled token"),
    column("max_version", INT64, "newest"),
    column("logprobs_mode", STRING, "declared distribution, where it is one and known"),
    column("temperature", FLOAT64, "temperature, where it is one and known"),
    column("reward", FLOAT64, "scalar reward of the whole attempt, null unless earned"),
    column("reward_state", STRING, "earned, missing, invalid or conflict; null: nobody judged it"),
    column("reward_event_ids", list_of(STRING), "rewards that nothing supersedes, sorted by id", required=True),
    column("token_rewards", TOKEN_REWARD_TYPE, "earned rewards of single actions, at their token", required=True),
    column("mask_event_ids", list_of(STRING), "mask_assigned events that apply, sorted by id", required=True),
    column("tito_ok", BOOL, "every context was proved (true), one differs (false), or unknown (null)"),
    column("tito_first_difference", INT32, "first index of an engine's context that differs from the tape's"),
    column("prefix_source", STRING, "weakest source of the contexts: engine, submitted, unknown"),
    column(
        "untrainable_reasons",
        list_of(STRING),
        "sorted; empty: trainable as far as the tape alone can say",
        required=True,
    ),
    column("log_offset_first", INT64, "smallest offset of its events in topic rollout"),
    column("log_offset_last", INT64, "largest"),
)

SEGMENT_COLUMNS: Final[tuple[Column, ...]] = (
    column("run_id", STRING, "run", required=True),
    column("trajectory_id", STRING, "trajectory", required=True),
    column("attempt", INT32, "try at the rollout", required=True),
    column("is_current", BOOL, "as in trajectories", required=True),
    column("segment_index", INT32, "from 0, without gaps", required=True),
    column("segment_kind", STRING, "execution or summary", required=True),
    column("is_accepted", BOOL, "for a summary: a later context_rewritten accepted it; null for execution"),
    column("group_id", STRING, "group"),
    column("problem_id", STRING, "problem"),
    column("prompt_token_ids", list_of(INT32), "the context; null where the tape does not know it"),
    column("response_token_ids", list_of(INT32), "all tokens after the context, length T", required=True),
    column(
        "rollout_log_probs",
        list_of(FLOAT32),
        "log-prob of each sampled token, null elsewhere, length T; the value buffer holds 0.0 under every null",
        required=True,
        unit="nat",
    ),
    column(
        "response_mask",
        list_of(BOOL),
        "sampled and owned here, and not masked by mask_assigned; length T",
        required=True,
    ),
    column("observation_mask", list_of(BOOL), "tool, environment and template tokens; length T", required=True),
    column(
        "policy_versions",
        list_of(INT64),
        "policy version of each sampled token; -1 elsewhere and if unknown; length T",
        required=True,
    ),
    column("sampling_config", SAMPLING_TYPE, "sampling configuration of its first action"),
    column("tokenizer_revision", STRING, "tokenizer revision of the run"),
)

TRAJECTORY_SCHEMA: Final = pa.schema([spec.field for spec in TRAJECTORY_COLUMNS])
SEGMENT_SCHEMA: Final = pa.schema([spec.field for spec in SEGMENT_COLUMNS])
