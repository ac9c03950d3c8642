"""Rollouts of several turns without a model: a policy that follows a script, an environment that does too, a log."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final

import pyarrow as pa

from rolltape.ingest.memory import MemoryLog
from rolltape.ingest.recorder import Recorder
from rolltape.numerics.char_tokenizer import CharTokenizer
from rolltape.rollout.agent_config import AgentConfig
from rolltape.rollout.agent_environment import AgentEnvironment, Episode, Reply, ToolCall
from rolltape.rollout.agent_harness import AgentHarness
from rolltape.rollout.agent_step import AgentRunner
from rolltape.rollout.attempts import AttemptBook, plan_step
from rolltape.rollout.engine import GenerationRequest, PolicyVersion, SamplingConfig
from rolltape.rollout.environment import Problem, Split
from rolltape.rollout.rewards import rule_component
from rolltape.rollout.scripted import ScriptedEngine, ScriptedToken
from rolltape.rollout.step import RunnerOptions, StepRows
from rolltape.schema.cursor import Cursor
from rolltape.schema.fold import Fold, fold
from rolltape.schema.reward import RewardComponent
from rolltape.schema.runline import RunLine

TOKENIZER: Final = CharTokenizer("letters", "0123456789abcdefghijklmnopqrstuvwxyz?!:;#[]<>= ")
END: Final = "|"
"""Stands for the end token in scripts."""
VERSIONS: Final = tuple(PolicyVersion("actor", 1, number, f"sha256:{number}") for number in range(4))

Line = Reply | Exception


def shown(token_ids: Iterable[int]) -> str:
    """Ids as a script writes them."""
    return "".join(END if i == TOKENIZER.eos_id else TOKENIZER.decode([i]) for i in token_ids)


def hidden(text: str) -> list[int]:
    """The inverse of :func:`shown`."""
    return [TOKENIZER.eos_id if c == END else TOKENIZER.encode(c)[0] for c in text]


class ScriptedEpisode(Episode):
    """Answers each action text with the next line written for it; the last line repeats."""

    def __init__(
        self, lines: Mapping[str, Sequence[Line]], components: tuple[RewardComponent, ...] | Exception
    ) -> None:
        self._lines = {text: list(of_text) for text, of_text in lines.items()}
        self._components = components
        self.closed = 0
        self.heard: list[tuple[str, bool]] = []

    def reply(self, text: str, *, ended: bool) -> Reply:
        self.heard.append((text, ended))
        of_text = self._lines[text]
        line = of_text.pop(0) if len(of_text) > 1 else of_text[0]
        if isinstance(line, Exception):
            raise line
        return line

    def judge(self) -> tuple[RewardComponent, ...]:
        if isinstance(self._components, Exception):
            raise self._components
        return self._components

    def close(self) -> None:
        self.closed += 1


class ScriptedEnvironment(AgentEnvironment):
    """Problems that are their prompts; every episode follows the same lines."""

    name: ClassVar[str] = "scripted"
    version: ClassVar[str] = "7"
    domain: ClassVar[str] = "tests"
    source: ClassVar[str] = "tests"
    verifier: ClassVar[str] = "none"
    summary_instruction: ClassVar[str] = "#"
    resume_before: ClassVar[str] = "<"
    resume_after: ClassVar[str] = ">"
    folded_observation: ClassVar[str] = "[]"

    def __init__(
        self,
        prompts: Sequence[str],
        lines: Mapping[str, Sequence[Line]],
        *,
        components: tuple[RewardComponent, ...] | Exception | None = None,
        system: str = "",
        unopened: Sequence[str] = (),
    ) -> None:
        self._problems = tuple(
            Problem(problem_id=f"scripted/{prompt}", split="train", prompt=prompt, answer="") for prompt in prompts
        )
        self._lines = lines
        self._components = (component(1.0),) if components is None else components
        self._system = system
        self._unopened = unopened
        self.episodes: list[ScriptedEpisode] = []

    def problems(self, split: Split) -> Sequence[Problem]:
        return self._problems if split == "train" else ()

    def open(self, problem: Problem, seed: int) -> Episode:
        if problem.prompt in self._unopened:
            raise OSError("no sandbox")
        self.episodes.append(ScriptedEpisode(self._lines, self._components))
        return self.episodes[-1]

    def is_correct(self, problem: Problem, components: Sequence[RewardComponent]) -> bool:
        return components[0].value == 1.0

    def system_text(self, problem: Problem) -> str:
        return self._system

    def tool_calls(self, text: str) -> tuple[ToolCall, ...]:
        return (ToolCall(name="get", arguments=text[1:]),) if text.startswith("?") else ()


def component(value: float, name: str = "right") -> RewardComponent:
    """A rule's component of weight 1."""
    return rule_component(name, value, 1.0, scorer="tests", version="1")


class Bench:
    """One step of one worker, over a scripted engine and a log in memory.

    ``script`` maps the whole context of a call (as :func:`shown` writes it) to what the policy then says; a context
    that is not in it fails the test.
    """

    def __init__(
        self,
        environment: ScriptedEnvironment,
        script: Mapping[str, str],
        *,
        max_tokens: int = 6,
        max_length: int = 64,
        before_step: Callable[[int], None] = lambda _place: None,
        before_turn: Callable[[], None] = lambda: None,
        interrupts: Callable[[GenerationRequest, int], bool] = lambda _request, _place: False,
        shuffle_rewards: bool = False,
        **config: Any,
    ) -> None:
        self.log = MemoryLog()
        self.recorder = Recorder(self.log, producer_id="worker-0", run_id="run")
        self.environment = environment
        self.script = script
        self.calls: list[list[str]] = []  # contexts of each call of the engine
        self.engine = ScriptedEngine(
            self._say,
            engine_id="worker-0",
            on_activated=lambda _version, _seconds: None,
            before_step=before_step,
            interrupts=interrupts,
        )
        for version in VERSIONS:
            self.engine._slots.hold(version, None)
        self.engine.activate(VERSIONS[0])
        self.harness = AgentHarness(
            self.engine, environment, TOKENIZER, max_length=max_length, config=AgentConfig(**config)
        )
        self.sampling = self.harness.sampling(SamplingConfig(max_tokens=max_tokens))
        self.harness.check(self.sampling)
        options = RunnerOptions(
            worker_id="worker-0", lease_s=60.0, rows_per_batch=1024, shuffle_rewards=shuffle_rewards
        )
        self.runner = AgentRunner(self.harness, self.recorder, options, before_turn=before_turn)
        self.book = AttemptBook("run", "worker-0")

    def _say(self, request: GenerationRequest, version: PolicyVersion, place: int) -> ScriptedToken:
        context = shown(request.prompt_token_ids.tolist())
        assert context in self.script, f"unexpected context {context!r}"
        return ScriptedToken(hidden(self.script[context])[place], -0.5 - place / 8 - version.version)

    def run(self) -> Fold:
        """One rollout of each problem, and the fold of all that was recorded."""
        rows = self.rows()
        plan = plan_step(self.book, rows.places, RunLine.from_pairs([(1, 0)]))
        self.runner.run(rows, plan, self.book, RunLine.from_pairs([(1, 0)]), self.sampling)
        return fold(self.tables())

    def rows(self) -> StepRows:
        problems = self.environment.problems("train")
        numbers = list(range(len(problems)))
        return StepRows(
            purpose="train",
            step=1,
            group_size=len(problems),
            problems=problems,
            group_ordinals=[0] * len(problems),
            members=numbers,
            seeds=[100 + number for number in numbers],
        )

    def tables(self) -> dict[str, pa.Table]:
        self.recorder.flush("logged")
        reader = self.log.reader(Cursor())
        tables: dict[str, list[pa.Table]] = {}
        while deliveries := reader.poll(0.0):
            for delivery in deliveries:
                tables.setdefault(delivery.kind, []).append(delivery.table)
        reader.close()
        return {kind: pa.concat_tables(of_kind) for kind, of_kind in tables.items()}

    def events(self, problem: str | None = None) -> list[dict[str, Any]]:
        """Rollout-plane events of one rollout in order, with the fields of their kind beside the envelope."""
        wanted = f"scripted/{problem or self.environment.problems('train')[0].prompt}"
        rows = [
            {**row, **row.pop(kind)}
            for kind, table in self.tables().items()
            for row in table.to_pylist()
            if row["event_index"] is not None and row["problem_id"] == wanted
        ]
        return sorted(rows, key=lambda row: row["event_index"])

    def rows_of(self, kind: str) -> list[dict[str, Any]]:
        """Events of one kind in the order of the log."""
        table = self.tables().get(kind)
        return [] if table is None else [{**row, **row.pop(kind)} for row in table.to_pylist()]

    def close(self) -> None:
        self.recorder.close()


def check_provenance(bench: Bench) -> None:
    """What a rewrite says it copied is what the event that it names has."""
    tokens = {row["event_id"]: row["token_ids"] for row in bench.rows_of("action_sampled")}
    tokens |= {row["event_id"]: row["token_ids"] for row in bench.rows_of("observation_received")}
    tokens |= {row["event_id"]: row["prompt_token_ids"] for row in bench.rows_of("rollout_started")}
    for row in bench.rows_of("context_rewritten"):
        for span in row["provenance"]:
            copied = row["context_token_ids"][span["start"] : span["start"] + span["length"]]
            assert copied == tokens[span["event_id"]][span["source_start"] :][: span["length"]]
