"""Rollout and label planes: what a policy did, and what it was judged to be worth."""

from __future__ import annotations

from rolltape.schema.columns import (
    BINARY,
    BOOL,
    FLOAT32,
    FLOAT64,
    INT32,
    INT64,
    STRING,
    column,
    list_of,
    struct_of,
)
from rolltape.schema.kinds._kind import Kind

_ATTEMPT = ("trajectory_id", "attempt", "event_index")

SAMPLING_TYPE = struct_of(
    temperature=FLOAT64,
    top_p=FLOAT64,
    top_k=INT32,
    min_p=FLOAT64,
    repetition_penalty=FLOAT64,
    presence_penalty=FLOAT64,
    frequency_penalty=FLOAT64,
    seed=INT64,
    stop=list_of(STRING),
    stop_token_ids=list_of(INT32),
    max_tokens=INT32,
    logprobs_mode=STRING,
)
ORIGIN_RUNS_TYPE = list_of(struct_of(start=INT32, length=INT32, origin=STRING))
VERSION_RUNS_TYPE = list_of(
    struct_of(start=INT32, length=INT32, policy_id=STRING, run_epoch=INT32, version=INT64, weights_digest=STRING)
)
ENGINE_TYPE = struct_of(
    id=STRING,
    name=STRING,
    version=STRING,
    dtype=STRING,
    weight_quantization=STRING,
    kv_quantization=STRING,
    dp_rank=INT32,
    prefill_engine=STRING,
    draft_method=STRING,
    draft_accepted_length=FLOAT32,
)

ROLLOUT_KINDS = (
    Kind(
        name="rollout_started",
        plane="rollout",
        doc="An attempt at a rollout begins.",
        requires=_ATTEMPT,
        columns=(
            column("stage", STRING, "training stage", choices=("sft", "reasoning", "agentic", "general", "opd")),
            column("harness", STRING, "agent harness"),
            column("environment", STRING, "environment"),
            column("environment_version", STRING, "its version"),
            column("prompt_token_ids", list_of(INT32), "context of segment 0; null when unknown (text imports)"),
            column("prompt_text", STRING, "prompt, for reading only"),
            column("teacher_route", STRING, "planned teacher"),
            column("forked_from_event_id", STRING, "for a branch: the event of the root it forked from"),
        ),
    ),
    Kind(
        name="rollout_resumed",
        plane="rollout",
        doc="A new attempt takes over events of an older one; later events of the older attempt are orphaned.",
        requires=_ATTEMPT,
        columns=(
            column("from_attempt", INT32, "attempt that it continues", required=True, minimum=0),
            column(
                "from_event_index", INT32, "last event of that attempt that it takes over", required=True, minimum=0
            ),
        ),
    ),
    Kind(
        name="action_sampled",
        plane="rollout",
        doc="Tokens that the policy sampled (or that were injected into its turn). May be partial.",
        requires=_ATTEMPT,
        tokens=("token_ids", "rollout_log_probs"),
        columns=(
            column("action_kind", STRING, "what the tokens are for; null: execution", choices=("execution", "summary")),
            column("origin_runs", ORIGIN_RUNS_TYPE, "runs of sampled or injected tokens; null: all sampled"),
            column("version_runs", VERSION_RUNS_TYPE, "policy version of each run of tokens; null: unknown"),
            column(
                "media",
                list_of(struct_of(start=INT32, length=INT32, sha256=STRING, processor_digest=STRING)),
                "media behind token ranges",
            ),
            column("sampling", SAMPLING_TYPE, "sampling configuration of this call; null fields are unknown"),
            column("thinking_mode", STRING, "thinking mode"),
            column("finish_reason", STRING, "as the engine reported it; null: unknown or partial"),
            column("truncated", BOOL, "derived: cut by length"),
            column("prefix_length", INT32, "tokens of context that the engine used", minimum=0),
            column("prefix_digest", STRING, "sha256:<hex> over the int32 little-endian ids of that context"),
            column("prefix_source", STRING, "who says so", choices=("engine", "submitted", "unknown")),
            column(
                "prefix_token_ids", list_of(INT32), "the engine's context ids, kept where they differ from the tape's"
            ),
            column("engine", ENGINE_TYPE, "the engine that sampled"),
            column("cached_tokens", INT32, "prefix tokens served from cache", minimum=0),
            column("kv_version", INT64, "version whose weights computed the cached keys, where they were kept"),
            column("queue_s", FLOAT64, "time in the queue", unit="s"),
            column("prefill_s", FLOAT64, "time of prefill", unit="s"),
            column("decode_s", FLOAT64, "time of decode", unit="s"),
            column("text", STRING, "decoded text, for reading only"),
            column(
                "tool_calls",
                list_of(struct_of(id=STRING, name=STRING, arguments=STRING)),
                "parsed tool calls, for reading only",
            ),
            column("continues_event_id", STRING, "partial action that this one continues"),
            column("support_token_ids", list_of(INT32), "kept support of top-p/top-k, flattened"),
            column("support_offsets", list_of(INT32), "offsets into it, one more than tokens"),
            column("routed_experts", BINARY, "routed experts, row-major"),
            column("routed_experts_shape", list_of(INT32), "tokens, layers, experts per token"),
            column(
                "index_digests",
                list_of(struct_of(layer=INT32, mode=STRING, tie_rule=STRING, digest=STRING)),
                "sparse-attention indices by layer (full, shared, cached)",
            ),
        ),
    ),
    Kind(
        name="observation_received",
        plane="rollout",
        doc="Tokens that the policy did not sample: tools, environment, template.",
        requires=_ATTEMPT,
        tokens=("token_ids",),
        columns=(
            column("source", STRING, "who wrote it", choices=("tool", "environment", "template")),
            column("tool_name", STRING, "tool"),
            column("tool_call_id", STRING, "call that it answers"),
            column("status", STRING, "how the call went", choices=("ok", "error")),
            column("error_class", STRING, "whose fault an error is", choices=("policy", "infrastructure")),
            column("latency_s", FLOAT64, "time until it came", unit="s"),
            column("text", STRING, "text, for reading"),
        ),
    ),
    Kind(
        name="context_rewritten",
        plane="rollout",
        doc="The context was replaced; the next segment starts.",
        requires=_ATTEMPT,
        columns=(
            column(
                "reason",
                STRING,
                "why the context changed",
                required=True,
                choices=("compaction", "keep_recent_k", "discard_all", "template", "rewind", "summary_call"),
            ),
            column("context_token_ids", list_of(INT32), "context of the new segment"),
            column(
                "provenance",
                list_of(struct_of(start=INT32, length=INT32, event_id=STRING, source_start=INT32)),
                "which event's tokens each span copies",
            ),
            column("context_budget", INT32, "context budget", unit="tokens"),
            column("context_used", INT32, "context used", unit="tokens"),
            column("context_threshold", INT32, "threshold that triggered", unit="tokens"),
            column("summary_event_id", STRING, "accepted summary"),
            column("rejected_event_ids", list_of(STRING), "rejected summary attempts"),
        ),
    ),
    Kind(
        name="rollout_ended",
        plane="rollout",
        doc="An attempt ended by itself.",
        requires=_ATTEMPT,
        columns=(
            column(
                "status",
                STRING,
                "how it ended",
                required=True,
                choices=("completed", "truncated", "model_failed", "env_failed", "aborted"),
            ),
            column("cause", STRING, "why"),
            column("num_action_tokens", INT32, "check sum over action_sampled", minimum=0),
            column("num_observation_tokens", INT32, "check sum over observation_received", minimum=0),
            column("last_event_index", INT32, "its own event_index", required=True, minimum=0),
        ),
    ),
)

LABEL_KINDS = (
    Kind(
        name="reward_assigned",
        plane="label",
        doc="A judgement. earned, missing and invalid are three different things.",
        requires=("trajectory_id", "attempt"),
        columns=(
            column(
                "components",
                list_of(
                    struct_of(
                        name=STRING,
                        source=STRING,
                        dimension=STRING,
                        value=FLOAT64,
                        weight=FLOAT64,
                        required=BOOL,
                        status=STRING,
                        scorer=STRING,
                        scorer_version=STRING,
                        latency_s=FLOAT64,
                        reason=STRING,
                        lower=FLOAT64,
                        upper=FLOAT64,
                    )
                ),
                "components; source rule, orm, grm or penalty; status ok, missing, parse_error or timeout; bounds",
            ),
            column("scalariser_version", STRING, "version of the rule that made the scalar"),
            column("scalar", FLOAT64, "scalar reward, null unless earned"),
            column("state", STRING, "three different things", required=True, choices=("earned", "missing", "invalid")),
            column("target_event_id", STRING, "action that it rewards; null: the whole attempt"),
            column("target_token", INT32, "token of that action; null: its last", minimum=0),
            column("supersedes", list_of(STRING), "reward events that this one replaces"),
            column("anchor_id", STRING, "human reference used as anchor"),
        ),
    ),
    Kind(
        name="mask_assigned",
        plane="label",
        doc="Token ranges that stay in the context but out of the loss.",
        requires=("trajectory_id", "attempt"),
        columns=(
            column(
                "ranges",
                list_of(struct_of(event_id=STRING, start=INT32, length=INT32)),
                "ranges of tokens by action event",
                required=True,
            ),
            column("assigned_by", STRING, "by whom"),
            column("reason", STRING, "why"),
        ),
    ),
)

TEACHER_KINDS = (
    Kind(
        name="teacher_routed",
        plane="teacher",
        doc="Which teacher a domain goes to. No match is an error, never a default.",
        columns=(
            column("domain", STRING, "domain", required=True),
            column("teacher_id", STRING, "teacher", required=True),
            column("rule", STRING, "rule that matched"),
            column("weights_digest", STRING, "teacher's weights"),
            column("tokenizer_digest", STRING, "teacher's tokenizer"),
            column("student_tokenizer_digest", STRING, "student's tokenizer"),
            column("origin_digest", STRING, "SFT parent, to tell same-origin teachers"),
        ),
    ),
    Kind(
        name="teacher_scored",
        plane="teacher",
        doc="A teacher's log-probs of recorded tokens.",
        requires=("trajectory_id", "attempt"),
        columns=(
            column("teacher_id", STRING, "teacher", required=True),
            column("weights_digest", STRING, "its weights", required=True),
            column("engine", ENGINE_TYPE, "engine that scored"),
            column("logprobs_mode", STRING, "declared distribution"),
            column("temperature", FLOAT64, "temperature"),
            column("template_digest", STRING, "chat template"),
            column("tokenizer_digest", STRING, "tokenizer"),
            column("prefix_digest", STRING, "context that was scored under"),
            column("index_digest", STRING, "sparse-attention indices"),
            column("start_position", INT32, "absolute position of the first scored token", minimum=0),
            column("scored_token_ids", list_of(INT32), "ids that were scored"),
            column("log_probs", list_of(FLOAT32), "log-prob of each scored token", unit="nat"),
            column("top_k", INT32, "k; null for a sampled-token score", minimum=1),
            column("top_k_token_ids", list_of(INT32), "k ids for each position, flattened"),
            column("top_k_log_probs", list_of(FLOAT32), "their log-probs, flattened", unit="nat"),
            column("tail_mass", list_of(FLOAT32), "1 - sum of the k probabilities, by position"),
        ),
    ),
)
