"""A scripted endpoint and a scripted gateway with equal answers, for the tests of adapters.

Every prompt of an attempt contains a *tag* (`task-7`), and every prompt of the agent `writer`
contains `You are writer.`. So the prompt of a request shows its attempt and agent, independently of
the adapter under test. Needs `lightspan-gateway`, but neither torch nor transformers.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import threading
from collections import Counter
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, Self

import msgspec

from lightspan.capture.context import AttemptContext
from lightspan.errors import EngineError
from lightspan.lightning import Episode, build_episode
from lightspan.lightning.forks import fork_points
from lightspan.protocols.engine import EngineCapabilities, GenerationRequest, ToolParserName
from lightspan.schema import semconv as c
from lightspan.schema.records import AttemptStatus, Fork, Outcome, Rollout
from lightspan.schema.routing import Route, Routing, Rule, Target
from lightspan.schema.spans import new_trace_id
from lightspan.schema.system_prompts import Instructions
from lightspan.schema.token_records import TokenRecord
from lightspan.stores.memory import MemoryStore
from lightspan_gateway import Gateway
from lightspan_gateway.serving.public_access import ServingGateway
from lightspan_testing.attempts import ROOT_ID, Captured
from lightspan_testing.byte_tokenizer import ByteTokenizer as VisionTokenizer
from lightspan_testing.scripted import Reply, Request, ScriptedServer, ToolCall
from lightspan_testing.scripted_engine import Gate, Say, ScriptedEngine

POLICY: Final = Routing(default=Target(route=Route.POLICY, policy="policy"))
"""Routing that trains every agent."""

CAPABILITIES: Final = EngineCapabilities(exact_tokens=True, seed=True, grammars="the script")
"""Capabilities that frameworks require, such as strict tools; the script ignores them."""

_TAG: Final = re.compile(r"task-\d+")
_NAME: Final = re.compile(r"You are ([^\s.]+)\.")
_numbers = itertools.count(1)


# --- the script -----------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One scripted answer of the model.

    In `text` and in the arguments of `calls`, `{task}` is replaced by the attempt's tag (`task-7`).
    """

    text: str = ""
    calls: Sequence[tuple[str, str]] = ()
    """Name and arguments (JSON text) of each tool call."""
    status: int = 200
    """HTTP status of the answer. With any status but 200, the endpoint or the gateway's engine
    fails.
    """
    delay_s: float = 0.0


Says = Mapping[str, Sequence[Turn | str]]
"""Agent → its answers, one per model call; the last answer is repeated."""


class ModelCall(NamedTuple):
    """A request that reached the scripted model."""

    tag: str
    agent: str
    """Name of the agent, according to the prompt."""
    turn: Turn
    prompt_ids: list[int]
    """Token ids of the prompt of a request through the gateway; empty for other requests."""


@dataclass(slots=True)
class Part:
    """The script of an attempt: the answers of the model to each agent."""

    says: Says
    marks: Mapping[str, str] = field(default_factory=dict)
    """Text in a prompt → agent that sends it, for prompts without `You are …`."""

    def agent_of(self, prompt: str) -> str | None:
        """Return the name of the agent that the text `prompt` names; None if it names no agent."""
        for mark, name in self.marks.items():
            if mark in prompt:
                return name
        match = _NAME.search(prompt)
        return match[1] if match else None


class Brain:
    """Answer each prompt from the script of the attempt and agent that the prompt names.

    Thread-safe.
    """

    def __init__(self) -> None:
        self.calls: list[ModelCall] = []
        self.problems: list[str] = []
        """Prompts that mix attempts or have no agent."""
        self.parts: dict[str, Part] = {}
        self._turns: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()

    def answer(self, prompt: str, prompt_ids: Sequence[int] = ()) -> tuple[ModelCall, int]:
        """Record a prompt, and choose its answer from the script.

        A prompt is also added to `problems` unless it has exactly one attempt's tag and an agent
        that is in the script.

        Args:
            prompt: text of the prompt.
            prompt_ids: token ids of the prompt; empty for a request to the app's own endpoint.

        Returns:
            The model call, and the number of earlier model calls of its agent in the attempt.
        """
        with self._lock:
            tags = sorted(set(_TAG.findall(prompt)))
            part = self.parts.get(tags[0]) if len(tags) == 1 else None
            agent = part.agent_of(prompt) if part is not None else None
            if part is None or agent is None or agent not in part.says:
                self.problems.append(f"attempts {tags}, agent {agent!r} in the prompt {prompt}")
                return ModelCall(",".join(tags), str(agent), Turn(text="?"), [*prompt_ids]), 0
            number = self._turns[tags[0], agent]
            self._turns[tags[0], agent] += 1
            turns = part.says[agent]
            turn = _filled(turns[min(number, len(turns) - 1)], tags[0])
            self.calls.append(ModelCall(tags[0], agent, turn, [*prompt_ids]))
            return self.calls[-1], number

    def go_back(self, tag: str, calls: Sequence[ModelCall]) -> None:
        """Go on in the script of an attempt as if only `calls` of its calls had been made."""
        with self._lock:
            self.calls = [call for call in self.calls if call.tag != tag] + [*calls]
            made = Counter(call.agent for call in calls)
            self._turns.update(
                {key: made[key[1]] - n for key, n in self._turns.items() if key[0] == tag}
            )

    def calls_in(self, tag: str) -> list[ModelCall]:
        """Return the model calls of the attempt `tag`, in order."""
        with self._lock:
            return [call for call in self.calls if call.tag == tag]


def _filled(turn: Turn | str, tag: str) -> Turn:
    if isinstance(turn, str):
        turn = Turn(text=turn)
    calls = tuple((name, text.replace("{task}", tag)) for name, text in turn.calls)
    return replace(turn, text=turn.text.replace("{task}", tag), calls=calls)


def sampled_text(turn: Turn) -> str:
    """Return the text that a model samples for `turn`, with tool calls in the Hermes format."""
    calls = [
        f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n</tool_call>'
        for name, arguments in turn.calls
    ]
    return "\n".join([*([turn.text] if turn.text else []), *calls])


# --- a tokenizer without a model ------------------------------------------------------------
class ByteTokenizer:
    """Tokenizer of UTF-8 bytes and an end-of-turn token; messages are rendered as JSON lines."""

    END: Final = 256
    eos_ids: Final = frozenset({END})
    context_length: Final = 1_000_000
    tool_parser: Final[ToolParserName] = "hermes"

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        template_options: Mapping[str, Any] | None = None,
        most: int | None = None,
    ) -> list[int]:
        head = [{"tools": tools}] if tools else []
        ids: list[int] = []
        for part in (*head, *messages):
            ids += [*self.encode(json.dumps(part, ensure_ascii=False)), self.END]
        return ids + (self.encode("assistant:") if add_generation_prompt else [])

    def encode(self, text: str, *, most: int | None = None) -> list[int]:
        return list(text.encode(errors="replace"))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        end = b"" if skip_special_tokens else b"<end>"
        data = b"".join(end if token == self.END else bytes([token]) for token in ids)
        return data.decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return b"<end>" if token_id == self.END else bytes([token_id])


# --- the stage ------------------------------------------------------------------------------
@dataclass(slots=True, eq=False, kw_only=True)
class Played(Captured):
    """An attempt that a `Stage` has opened."""

    tag: str
    through_gateway: bool = False
    records: list[TokenRecord] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Return the task's text for the app."""
        return f"Please do {self.tag}"


class Stage:
    """Run a scripted endpoint (`url`) and a gateway in a thread.

    Both give the answers of the same `Brain`, which reads them from scripts.

    Args:
        takes_images: whether the gateway's policy takes images.
    """

    def __init__(self, *, takes_images: bool = False) -> None:
        self.brain = Brain()
        self.tokenizer = VisionTokenizer(1_000_000) if takes_images else ByteTokenizer()
        self.store = MemoryStore()
        self.engine = ScriptedEngine(
            self.tokenizer,
            self._say,
            chunk=16,
            capabilities=msgspec.structs.replace(CAPABILITIES, images=("policy",) * takes_images),
        )
        self.answered: list[tuple[str, str]] = []
        """(agent named by the prompt, requested policy) of each generation of the gateway's
        engine.
        """
        self._gateway = Gateway(self.store, self.engine)
        self._server = ScriptedServer(self._reply)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="gateway")

    def __enter__(self) -> Self:
        self._thread.start()
        self._server.__enter__()
        self.wait(self.store.open())
        self.wait(self._gateway.start())
        return self

    def __exit__(self, *_: object) -> None:
        self.wait(self._gateway.close())
        self.wait(self.store.close())
        self._server.__exit__()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def url(self) -> str:
        """Return the base URL of the endpoint that the app calls without a gateway."""
        return self._server.url

    def wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine in the gateway's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    @contextmanager
    def serving(self, paths: Iterable[str]) -> Iterator[ServingGateway]:
        """Serve scripted policies like `lightspan serve`, for an app outside of attempts.

        Args:
            paths: agent paths. Each agent has a policy with its path as the name.
        """
        policies = dict.fromkeys(paths, 1)
        rules = [Rule(path, Target(route=Route.POLICY, policy=path)) for path in policies]
        engine = ScriptedEngine(
            self.tokenizer, self._say, chunk=16, policies=policies, capabilities=CAPABILITIES
        )
        served = ServingGateway(engine, Routing(rules=rules))
        self.wait(served.start())
        try:
            yield served
        finally:
            self.wait(served.close())

    def requests_of(self, tag: str) -> list[Request]:
        """Return the requests of the attempt `tag` to the app's own endpoint, in order."""
        return [request for request in self._server.requests if tag in json.dumps(request.body)]

    def repeat(self, played: Played, fork: Fork) -> Played:
        """Open an attempt that repeats an ended one up to a call, or as a whole.

        The scripted model goes on where it was before the calls that are not repeated.

        Args:
            played: the attempt to repeat, of which `fork` names the call.
            fork: the call at which to fork.
        """
        point = next(p for p in fork_points(self.episode(played)) if p.fork == fork)
        calls = self.brain.calls_in(played.tag)
        self.brain.go_back(played.tag, calls[: len(point.prefix)])
        return self.wait(self._claim(played.tag, fork))  # type: ignore[no-any-return]

    def episode(self, played: Played) -> Episode:
        """Report the success of an attempt through the gateway; return its episode."""
        scope = played.scope
        return self.wait(self._episode(scope.rollout_id, scope.attempt_id, played))  # type: ignore[no-any-return]

    async def _episode(self, rollout_id: str, attempt_id: str, played: Played) -> Episode:
        [state] = await self.store.rollouts([rollout_id])
        attempt = await self.store.attempt(attempt_id)
        if not attempt.sealed:
            await self.store.report([attempt.report(AttemptStatus.SUCCEEDED, Outcome.OK)])
            attempt = await self.store.attempt(attempt_id)
        return build_episode(attempt, state.rollout, played.spans, played.records)

    def open(
        self, part: Part, *, through_gateway: bool, instructions: Instructions | None = None
    ) -> Played:
        """Open an attempt of an app.

        Args:
            part: script of the attempt's agents.
            through_gateway: whether model calls go to the gateway; otherwise they go to the app's
                own endpoint.
            instructions: replacements for the agents' instructions; None for none. They are used
                only without the gateway.
        """
        tag = f"task-{next(_numbers)}"
        self.brain.parts[tag] = part
        if not through_gateway:
            scope = AttemptContext(
                rollout_id=f"ro-{tag}",
                attempt_id=f"at-{tag}",
                root_span_id=ROOT_ID,
                instructions=instructions,
            )
            return Played(tag=tag, scope=scope)
        return self.wait(self._claim(tag))  # type: ignore[no-any-return]

    async def _claim(self, tag: str, fork: Fork | None = None) -> Played:
        resources = await self.store.put_resources({"routing": POLICY})
        name = f"ro-{tag}" if fork is None else f"ro-{tag}-{next(_numbers)}"
        rollout = Rollout(rollout_id=name, task={}, task_id=tag, resources_id=resources, fork=fork)
        await self.store.enqueue([rollout])
        [claim] = await self.store.claim("runner", 1, 600)
        scope = AttemptContext(
            rollout_id=claim.rollout.rollout_id,
            attempt_id=claim.attempt.attempt_id,
            gateway_url=self._gateway.url,
            call_token=claim.attempt.call_token,
            routing=POLICY,
            trace_id=new_trace_id(),
            root_span_id=ROOT_ID,
        )
        return Played(tag=tag, scope=scope, through_gateway=True)

    def close(self, played: Played) -> None:
        """Collect the spans and token records of an attempt; fail the test on capture errors.

        A capture error means that something in the attempt could not be recorded.
        """
        played.close()
        if played.through_gateway:
            name = played.scope.attempt_id
            written = self.wait(self.store.spans([name]))[name]
            written_ids = {span.attributes[c.CALL_ID] for span in written}
            # for a call whose answer did not arrive, the SDK patch records a span in addition to
            # the gateway's
            own = [
                span for span in played.spans if span.attributes.get(c.CALL_ID) not in written_ids
            ]
            played.spans = [*own, *written]
            played.records = self.wait(self.store.token_records([name]))[name]

    def _reply(self, request: Request) -> Reply:
        call, number = self.brain.answer(json.dumps(request.body, ensure_ascii=False))
        calls = [
            ToolCall(name=name, arguments=text, call_id=f"call_{call.agent}_{number}_{index}")
            for index, (name, text) in enumerate(call.turn.calls)
        ]
        return Reply(
            text=call.turn.text or None,
            tool_calls=calls,
            status=call.turn.status,
            delay_s=call.turn.delay_s,
        )

    def _say(self, request: GenerationRequest) -> Say:
        prompt = self.tokenizer.decode(request.prompt_ids)
        call, _ = self.brain.answer(prompt, request.prompt_ids)
        self.answered.append((call.agent, request.policy))
        turn = call.turn
        gates: dict[int, Gate] = {}
        if turn.delay_s:
            gates[0] = Gate()
            asyncio.get_running_loop().call_later(turn.delay_s, gates[0].open)
        errors = {0: EngineError(turn.text or "scripted error")} if turn.status != 200 else {}
        return Say(text=sampled_text(turn), gates=gates, errors=errors)
