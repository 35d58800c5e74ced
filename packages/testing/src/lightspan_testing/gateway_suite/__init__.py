"""Conformance tests of the gateway as complete tables.

{unstreamed, streamed} × {text, one tool call, parallel tool calls, malformed tool call} × {n = 1, n
= 3} × {finished, stopped, length, cancelled, retried}, called by the official client over HTTP. The
same for text completions, with {a text, several texts, token ids} as the prompt. Subclass
`GatewaySuite` with a fixture for the store:

    class TestTable(GatewaySuite):
        @pytest.fixture
        async def store(self): ...

`cases` has the cells; `harness` has the gateway and its client, also for other tests of a gateway.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from lightspan.schema import semconv as c
from lightspan.schema.spans import SpanStatus
from lightspan.schema.token_records import CallOutcome, FinishReason
from lightspan.stores.protocol import Store
from lightspan_testing.gateway_suite.cases import (
    CELLS,
    HELD,
    HELD_ENDINGS,
    TEXT_CELLS,
    Cell,
    TextCell,
    gated,
)
from lightspan_testing.gateway_suite.harness import (
    MESSAGES,
    PARENT,
    POLICY,
    TOOLS,
    TRACE,
    Answered,
    Reading,
    Rig,
    make_rig,
    shared_tokenizer,
)
from lightspan_testing.scripted_engine import Gate, Say, logprob_of
from lightspan_testing.wait import until


async def _cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _reach(gates: Sequence[Gate]) -> None:
    for gate in gates:
        await gate.reached.wait()


def _open(gates: Sequence[Gate]) -> None:
    for gate in gates:
        gate.open()


class GatewaySuite:
    """See the module's docstring. Needs a fixture `store`: an open, empty store."""

    @pytest.mark.parametrize("cell", CELLS, ids=str)
    async def test_table(self, store: Store, cell: Cell) -> None:
        script, gates = gated(cell, cell.n)
        async with make_rig(store, script) as rig:
            match cell.ending:
                case "cancelled":
                    reading, outcome = await self._cancelled(rig, cell, gates)
                case "retried":
                    reading, outcome = await self._retried(rig, cell, gates)
                case _:
                    reading, outcome = await rig.ask(**cell.body()), CallOutcome.OK
                    assert len(rig.engine.requests) == cell.n
            self._check_answer(rig, cell, reading)
            await self._check_store(rig, cell, outcome)

    async def _cancelled(
        self, rig: Rig, cell: Cell, gates: Sequence[Gate]
    ) -> tuple[Reading, CallOutcome]:
        """Cancel the call in mid-generation and repeat it."""
        task = asyncio.create_task(rig.ask(**cell.body()))
        await _reach(gates)
        await _cancel(task)
        await until(lambda: len(rig.engine.cancelled) == cell.n)
        await rig.session().calls["call-a"].wait_done()
        [span] = await rig.spans()
        assert span.attributes[c.CALL_OUTCOME] == "cancelled"
        assert (span.sequence_start, span.sequence_end) == (1, 2)
        partial = [cell.ids(rig, index)[:HELD] for index in range(cell.n)]
        records = await rig.records()
        stored = partial if cell.stream else []
        assert [record.response_ids for record in records] == stored
        assert {record.outcome for record in records} <= {CallOutcome.CANCELLED}
        assert {record.finish_reason for record in records} <= {FinishReason.CANCELLED}
        _open(gates)
        reading = await rig.ask(**cell.body())
        prompt, again = rig.prompt(), rig.engine.requests[cell.n :]
        starts = [[*prompt, *ids] if cell.stream else prompt for ids in partial]
        assert [request.prompt_ids for request in again] == starts
        return reading, CallOutcome.OK if cell.stream else CallOutcome.RESAMPLED

    async def _retried(
        self, rig: Rig, cell: Cell, gates: Sequence[Gate]
    ) -> tuple[Reading, CallOutcome]:
        """Make the same call four times: twice at once, again after its end, and after a restart:
        the recorded answer may not have arrived."""
        first = asyncio.create_task(rig.ask(**cell.body()))
        await _reach(gates)
        second = asyncio.create_task(rig.ask(**cell.body()))
        [call] = rig.session().calls.values()
        await until(lambda: call._clients == 2)
        _open(gates)
        readings = [await first, await second, await rig.ask(**cell.body())]
        await rig.restart()
        readings.append(await rig.ask(**cell.body()))
        assert len(rig.engine.requests) == cell.n
        assert readings == readings[:1] * 4
        return readings[0], CallOutcome.OK

    def _check_answer(self, rig: Rig, cell: Cell, reading: Reading) -> None:
        assert reading.response_id == "chatcmpl-call-a"
        assert reading.prompt_ids == rig.prompt()
        sampled = sum(len(cell.ids(rig, index)) for index in range(cell.n))
        assert reading.usage == (len(rig.prompt()), sampled)
        call_ids = [name for content in reading.choices.values() for name in content.call_ids]
        assert len(set(call_ids)) == len(call_ids)
        for content in reading.choices.values():
            assert len(content.call_ids) == len(content.calls)
            content.call_ids = []
        expected = {index: cell.expected(rig, index) for index in range(cell.n)}
        assert reading.choices == expected

    async def _check_store(self, rig: Rig, cell: Cell, outcome: CallOutcome) -> None:
        [span] = await rig.spans()
        end = 3 if cell.ending == "cancelled" else 2
        assert (span.sequence_start, span.sequence_end) == (1, end)
        assert (span.trace_id, span.parent_id, span.name) == (TRACE, PARENT, "chat m")
        assert (span.status, span.status_message, span.late) == (SpanStatus.OK, "", False)
        finish = "length" if cell.ending == "length" else "stop"
        attributes = span.attributes
        assert (attributes[c.AGENT_PATH], attributes[c.AGENT_NAME]) == ("team/writer", "writer")
        assert (attributes[c.CALL_ID], attributes[c.CALL_OUTCOME]) == ("call-a", outcome)
        assert (attributes[c.SELECTED], attributes[c.POLICY]) == (True, "policy")
        assert attributes[c.FINISH_REASONS] == [finish] * cell.n
        records = await rig.records()
        assert [record.choice for record in records] == list(range(cell.n))
        for record in records:
            ids = cell.ids(rig, record.choice)
            assert record.prompt_ids == rig.prompt()
            assert record.response_ids == ids
            assert record.logprobs == [logprob_of(token) for token in ids]
            assert record.versions == [(1, len(ids))]
            assert (record.finish_reason, record.outcome) == (finish, outcome)
            assert (record.sequence_start, record.sequence_end) == (1, end)
            assert (record.call_id, record.agent_path) == ("call-a", "team/writer")
            assert (record.policy, record.span_id) == ("policy", span.span_id)
        attempt = await rig.store.attempt(rig.attempt.attempt_id)
        assert attempt.capture_errors == []

    @pytest.mark.parametrize("cell", TEXT_CELLS, ids=str)
    async def test_text_table(self, store: Store, cell: TextCell) -> None:
        count = len(cell.prompts)
        script, gates = gated(cell, count)
        async with make_rig(store, script) as rig:
            if cell.ending in HELD_ENDINGS:
                first = asyncio.create_task(rig.ask_text(**cell.body()))
                await _reach(gates)
                if cell.ending == "cancelled":
                    await _cancel(first)
                    await until(lambda: len(rig.engine.cancelled) == count)
                    await rig.session().calls["call-a"].wait_done()
                _open(gates)
            reading = await rig.ask_text(**cell.body())
            if cell.ending == "retried":
                assert await first == reading
                await rig.restart()
                assert await rig.ask_text(**cell.body()) == reading
                assert len(rig.engine.requests) == count
            expected = {index: cell.expected(rig, index) for index in range(count)}
            assert reading.choices == expected
            sampled = sum(len(content.token_ids) for content in expected.values())
            prompt_tokens = sum(map(len, cell.prompts[:: cell.n]))
            assert (reading.usage, reading.content_of) == (
                (prompt_tokens, sampled),
                "text_completion",
            )
            await self._check_texts(rig, cell, expected)

    async def _check_texts(
        self, rig: Rig, cell: TextCell, expected: Mapping[int, Answered]
    ) -> None:
        resampled = cell.ending == "cancelled" and not cell.stream
        outcome = CallOutcome.RESAMPLED if resampled else CallOutcome.OK
        [span] = await rig.spans()
        attributes = span.attributes
        assert (span.name, attributes[c.OPERATION_NAME]) == ("text_completion m", "text_completion")
        assert (attributes[c.AGENT_PATH], attributes[c.CALL_OUTCOME]) == ("team/writer", outcome)
        records = await rig.records()
        assert [record.choice for record in records] == list(range(len(cell.prompts)))
        for record in records:
            content = expected[record.choice]
            assert record.prompt_ids == content.prompt_ids
            assert (record.response_ids, record.logprobs) == (content.token_ids, content.logprobs)
            assert (record.finish_reason, record.outcome) == (content.reason, outcome)

    # --- restarts -------------------------------------------------------------------------
    @pytest.mark.parametrize("n", [1, 3])
    async def test_a_cancelled_call_goes_on_after_a_restart(self, store: Store, n: int) -> None:
        gates = [Gate() for _ in range(n)]

        def script(request: Any) -> Say:
            index = int(request.request_id.split("-")[-2])
            return Say(text=f"The answer is {index}.", gates={HELD: gates[index]})

        async with make_rig(store, script) as rig:
            task = asyncio.create_task(rig.ask(stream=True, n=n))
            await _reach(gates)
            await _cancel(task)
            await rig.restart()
            _open(gates)
            reading = await rig.ask(stream=True, n=n)
            texts = {index: content.content for index, content in reading.choices.items()}
            assert texts == {index: f"The answer is {index}." for index in range(n)}
            records = await rig.records()
            assert [record.response_ids for record in records] == [
                rig.engine.ids(f"The answer is {index}.") for index in range(n)
            ]
            assert {record.outcome for record in records} == {CallOutcome.OK}
            [span] = await rig.spans()
            assert (span.sequence_start, span.sequence_end) == (1, 3)

    async def test_a_call_whose_tokens_are_gone_is_resampled_after_a_restart(
        self, store: Store
    ) -> None:
        gate = Gate()
        async with make_rig(store, [Say(text="one", gates={2: gate}), "two"]) as rig:
            task = asyncio.create_task(rig.ask())
            await gate.reached.wait()
            await _cancel(task)
            await rig.restart()
            assert (await rig.ask()).choices[0].content == "two"
            [record] = await rig.records()
            assert record.outcome is CallOutcome.RESAMPLED


__all__ = [
    "MESSAGES",
    "POLICY",
    "TOOLS",
    "Answered",
    "GatewaySuite",
    "Reading",
    "Rig",
    "make_rig",
    "shared_tokenizer",
]
