"""Named reasons: why a record became a dead letter, why a trajectory may not be trained.

Names are stable: SQL uses them.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

# Dead letters: the bytes are kept, the rest goes on (design §5.7).
LENGTH_MISMATCH: Final = "length_mismatch"
NEGATIVE_ID: Final = "negative_id"
OUT_OF_VOCABULARY: Final = "out_of_vocabulary"
ID_OVERFLOW: Final = "id_overflow"
MISSING_FIELD: Final = "missing_field"
BAD_VALUE: Final = "bad_value"
TOO_LARGE: Final = "too_large"
UNKNOWN_KIND: Final = "unknown_kind"
SCHEMA_VERSION: Final = "schema_version"
TRUNCATED_PAYLOAD: Final = "truncated_payload"
BROKEN_UTF8: Final = "broken_utf8"
HEADER_MISMATCH: Final = "header_mismatch"
CONFLICT: Final = "conflict"
LANE_GAP_ACCEPTED: Final = "lane_gap_accepted"
FOREIGN_MESSAGE: Final = "foreign_message"
BLOB_MISSING: Final = "blob_missing"
BLOB_MISMATCH: Final = "blob_mismatch"

DEAD_LETTER_REASONS: Final = MappingProxyType(
    {
        LENGTH_MISMATCH: "lists that describe the same tokens have different lengths",
        NEGATIVE_ID: "a token id is negative",
        OUT_OF_VOCABULARY: "a token id is not below the run's vocabulary size",
        ID_OVERFLOW: "a token id lies outside int32",
        MISSING_FIELD: "a column that the kind requires is null",
        BAD_VALUE: "a value has the wrong type, lies outside its range, or is not one of its choices",
        TOO_LARGE: "more tokens or bytes than the limit allows",
        UNKNOWN_KIND: "no such event kind",
        SCHEMA_VERSION: "written with a newer major schema version, or with none",
        TRUNCATED_PAYLOAD: "the bytes are not a whole Arrow IPC stream",
        BROKEN_UTF8: "text that is not UTF-8",
        HEADER_MISMATCH: "the record's headers contradict its rows",
        CONFLICT: "an event id that is known already, with other bytes",
        LANE_GAP_ACCEPTED: "an operator accepted the loss of a range of a lane",
        FOREIGN_MESSAGE: "a message of the log without readable headers: somebody else wrote it",
        BLOB_MISSING: "the payload that a claim check names is not beside the lake",
        BLOB_MISMATCH: "the payload that a claim check names has another digest or length",
    }
)

# Stored and queryable, but no trainer may use it. The fold finds those that the tape alone can tell.
NO_TOKEN_IDS: Final = "no_token_ids"  # noqa: S105 - the name of a reason, no password
NO_LOG_PROBS: Final = "no_log_probs"
UNKNOWN_VERSION: Final = "unknown_version"
MIXED_POLICIES: Final = "mixed_policies"
UNKNOWN_LOGPROBS_MODE: Final = "unknown_logprobs_mode"
MIXED_LOGPROBS_MODE: Final = "mixed_logprobs_mode"
UNKNOWN_TEMPERATURE: Final = "unknown_temperature"
MIXED_TEMPERATURE: Final = "mixed_temperature"
UNKNOWN_SUPPORT: Final = "unknown_support"
PREFIX_MISMATCH: Final = "prefix_mismatch"
PREFIX_UNKNOWN: Final = "prefix_unknown"
CHECKSUM_MISMATCH: Final = "checksum_mismatch"
EVENT_CONFLICT: Final = "event_conflict"
MASK_UNRESOLVED: Final = "mask_unresolved"
REWARD_CONFLICT: Final = "reward_conflict"
REWARD_MISSING: Final = "reward_missing"
REWARD_INVALID: Final = "reward_invalid"
ENV_FAILED: Final = "env_failed"
ABORTED: Final = "aborted"
OPEN: Final = "open"
DROPPED: Final = "dropped"
ABANDONED: Final = "abandoned"
SUPERSEDED: Final = "superseded"
# Found by batch assembly, which knows the run's versions, its groups and the algorithm.
ABORTED_VERSION: Final = "aborted_version"
FUTURE_VERSION: Final = "future_version"
MIXED_VERSIONS: Final = "mixed_versions"
STALE: Final = "stale"
GROUP_INCOMPLETE: Final = "group_incomplete"
GROUP_OF_ONE: Final = "group_of_one"
LIMITED_SUPPORT: Final = "limited_support"
UNSCALED_LOG_PROBS: Final = "unscaled_log_probs"
ZERO_STD_GROUP: Final = "zero_std_group"
SEGMENT_MISSING: Final = "segment_missing"
BRANCH: Final = "branch"
UNKNOWN_DOMAIN: Final = "unknown_domain"
TEACHER_SCORE_MISSING: Final = "teacher_score_missing"
TEACHER_MISROUTED: Final = "teacher_misrouted"
TEACHER_IDS_DIFFER: Final = "teacher_ids_differ"
TEACHER_PREFIX_DIFFERS: Final = "teacher_prefix_differs"
TEACHER_TOKENIZER_DIFFERS: Final = "teacher_tokenizer_differs"
TEACHER_TEMPLATE_DIFFERS: Final = "teacher_template_differs"
TEACHER_TEMPERATURE_DIFFERS: Final = "teacher_temperature_differs"
TEACHER_MODE_DIFFERS: Final = "teacher_mode_differs"
TEACHER_TOP_K_MISSING: Final = "teacher_top_k_missing"
FOREIGN_RUN: Final = "foreign_run"
ALREADY_TRAINED: Final = "already_trained"
EVALUATION: Final = "evaluation"

UNTRAINABLE_REASONS: Final = MappingProxyType(
    {
        NO_TOKEN_IDS: "its token ids are unknown (a text import)",
        NO_LOG_PROBS: "its rollout log-probs are unknown",
        UNKNOWN_VERSION: "the policy version of a sampled token is unknown",
        MIXED_POLICIES: "more than one policy sampled its tokens",
        UNKNOWN_LOGPROBS_MODE: "the distribution that its log-probs belong to is not declared",
        MIXED_LOGPROBS_MODE: "its log-probs belong to more than one distribution",
        UNKNOWN_TEMPERATURE: "the sampling temperature is not declared",
        MIXED_TEMPERATURE: "its actions were sampled at different temperatures",
        UNKNOWN_SUPPORT: "top-p, top-k or min-p was active and the kept support is not stored",
        PREFIX_MISMATCH: "the engine's context is not what the tape says it was",
        PREFIX_UNKNOWN: "the engine's context is not recorded",
        CHECKSUM_MISMATCH: "token counts differ from the check sum of its end",
        EVENT_CONFLICT: "two events claim one place of the attempt, an event has none, or one id has two contents",
        MASK_UNRESOLVED: "a mask names an action that the attempt does not have",
        REWARD_CONFLICT: "two rewards for one target, neither superseded",
        REWARD_MISSING: "nobody rewarded it, or the reward is missing",
        REWARD_INVALID: "scoring failed: infrastructure, not the policy",
        ENV_FAILED: "the environment failed, not the policy",
        ABORTED: "the attempt was aborted",
        OPEN: "events are missing, or it has not ended",
        DROPPED: "one of its events is a dead letter",
        ABANDONED: "the attempt was abandoned by the orchestrator",
        SUPERSEDED: "a later attempt took over",
        ABORTED_VERSION: "sampled by a version that was aborted or never committed",
        FUTURE_VERSION: "sampled by a version newer than the trainer's, or by an engine that never synchronised",
        MIXED_VERSIONS: "sampled by several versions, which the algorithm refuses",
        STALE: "older than the staleness bound",
        GROUP_INCOMPLETE: "too few valid members in its group",
        GROUP_OF_ONE: "a group of one has no group statistics",
        LIMITED_SUPPORT: "its log-probs are over a kept support that the tape lacks, or its teacher's are over all",
        UNSCALED_LOG_PROBS: "its log-probs are raw, and it was sampled at another temperature than 1",
        ZERO_STD_GROUP: "all rewards of its group are equal, and the run drops such groups",
        SEGMENT_MISSING: "a segment of the rollout is missing; it is trained whole or not at all",
        BRANCH: "it forked from a rollout of its group, and group statistics are over those alone",
        UNKNOWN_DOMAIN: "no teacher is routed for its domain, or its domain is unknown",
        TEACHER_SCORE_MISSING: "its teacher has not scored one of its segments",
        TEACHER_MISROUTED: "scored by another teacher, or other weights, than its domain is routed to",
        TEACHER_IDS_DIFFER: "the teacher scored other token ids, or gave a log-prob too many or too few",
        TEACHER_PREFIX_DIFFERS: "the teacher scored under another context",
        TEACHER_TOKENIZER_DIFFERS: "the teacher's tokenizer is another one, or unknown",
        TEACHER_TEMPLATE_DIFFERS: "the teacher scored under another chat template",
        TEACHER_TEMPERATURE_DIFFERS: "the teacher scored at another temperature",
        TEACHER_MODE_DIFFERS: "the teacher's log-probs are of another declared distribution",
        TEACHER_TOP_K_MISSING: "the teacher's score has fewer likeliest tokens than the algorithm needs",
        FOREIGN_RUN: "belongs to another run that the recipe does not name as a source",
        ALREADY_TRAINED: "an earlier batch of this run line and trainer holds it",
        EVALUATION: "sampled for evaluation",
    }
)

REASONS: Final = MappingProxyType({**DEAD_LETTER_REASONS, **UNTRAINABLE_REASONS})

UNTRAINABLE: Final = frozenset(UNTRAINABLE_REASONS)
"""Every reason that keeps a trajectory out of training."""
