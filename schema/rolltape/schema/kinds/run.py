"""Run and problem planes: what a run is made of, and what it is asked."""

from __future__ import annotations

from rolltape.schema.columns import FLOAT64, INT32, INT64, STRING, column, list_of, struct_of
from rolltape.schema.kinds._kind import Kind

_DIGESTS = struct_of(name=STRING, digest=STRING)

_RUN_COLUMNS = (
    column("purpose", STRING, "what the run is for", required=True, choices=("train", "evaluate", "import")),
    column("config_json", STRING, "the whole configuration, secrets redacted by type"),
    column("config_digest", STRING, "SHA-256 over config_json"),
    column("code_revision", STRING, "revision of the code"),
    column("libraries", list_of(struct_of(name=STRING, version=STRING)), "library versions"),
    column("device", STRING, "device type"),
    column("cpu_capability", STRING, "instruction set that torch selected, as AVX2 or AVX512"),
    column("num_threads", INT32, "intra-op threads"),
    column("world_size", INT32, "trainer ranks"),
    column("model_name", STRING, "model identity"),
    column("model_digest", STRING, "digest of the initial weights"),
    column("vocab_size", INT32, "ids are in [0, vocab_size)", minimum=1),
    column(
        "precision",
        struct_of(state=STRING, gemm=STRING, rollout_weights=STRING, kv=STRING, checkpoint=STRING),
        "precision labels",
    ),
    column(
        "tokenizer",
        struct_of(name=STRING, revision=STRING, file_digest=STRING, behaviour_digest=STRING),
        "tokenizer; behaviour_digest covers the ids of a probe text set",
    ),
    column("chat_template_digest", STRING, "SHA-256 of the chat template"),
    column("seed", INT64, "run seed"),
    column("input_files", list_of(_DIGESTS), "imported files and their SHA-256"),
)

RUN_KINDS = (
    Kind(name="run_started", plane="run", doc="A run begins.", columns=_RUN_COLUMNS),
    Kind(
        name="run_resumed",
        plane="run",
        doc="A run goes on under a new run epoch; later steps of older epochs are abandoned.",
        columns=(
            *_RUN_COLUMNS,
            column(
                "continues_from_step",
                INT64,
                "last step of older epochs that stays on the live line",
                required=True,
                minimum=0,
            ),
            column("reason", STRING, "restart, divergence or rewind"),
        ),
    ),
)

PROBLEM_KINDS = (
    Kind(
        name="problem_registered",
        plane="problem",
        doc="A problem that can be posed.",
        requires=("problem_id",),
        columns=(
            column("prompt", STRING, "prompt as text"),
            column("messages_json", STRING, "prompt as chat messages, JSON"),
            column("domain", STRING, "domain, for routing and reports"),
            column("source", STRING, "where it comes from"),
            column("split", STRING, "train or heldout"),
            column("verifier", STRING, "name of the verifier"),
            column("verifier_version", STRING, "its version"),
            column("answer", STRING, "reference answer"),
            column("human_reference", STRING, "human-written answer, as style anchor"),
            column(
                "pass_rates",
                list_of(struct_of(model=STRING, rate=FLOAT64, num_samples=INT32)),
                "pass rates by probe model",
            ),
            column("difficulty_verdict", STRING, "verdict of the difficulty filter"),
        ),
    ),
)

DISPATCH_KINDS = (
    Kind(
        name="rollout_dispatched",
        plane="dispatch",
        doc="A rollout is handed out; recorded before it is.",
        requires=("trajectory_id", "attempt", "problem_id"),
        columns=(
            column("purpose", STRING, "what it is for", required=True, choices=("train", "evaluate")),
            column("training_step", INT64, "step that it is meant for (lock step); null: for none", minimum=0),
            column("group_ordinal", INT32, "place of its group in the step (or the run), from 0", minimum=0),
            column("member", INT32, "place in its group, from 0", minimum=0),
            column("group_size", INT32, "members that the group will have", minimum=1),
            column("worker_id", STRING, "who got it"),
            column("lease_s", FLOAT64, "time until the lease ends", unit="s"),
            column("sampling_seed", INT64, "seed derived from (run seed, step, group ordinal, member, turn 0)"),
        ),
    ),
    Kind(
        name="attempt_abandoned",
        plane="dispatch",
        doc="An attempt ended without its own end. Wins over any end of the same attempt.",
        requires=("trajectory_id", "attempt"),
        columns=(
            column(
                "reason",
                STRING,
                "why it ended",
                required=True,
                choices=("worker_lost", "lease_expired", "cancelled", "superseded"),
            ),
            column("detail", STRING, "for people"),
        ),
    ),
    Kind(
        name="task_ratios_set",
        plane="dispatch",
        doc="The orchestrator's task ratios and rates change.",
        columns=(
            column(
                "ratios",
                list_of(struct_of(task=STRING, ratio=FLOAT64, max_rate_per_s=FLOAT64, max_concurrent=INT32)),
                "by task",
            ),
            column("reason", STRING, "why"),
        ),
    ),
)
