"""Conformance tests of the gateway, for every combination of request, answer and event.

{unstreamed, streamed} × {text, one tool call, parallel tool calls, malformed tool call} × {n = 1, n
= 3} × {finished, stopped, length, cancelled, restarted, retried}, called by the official client
over HTTP. The same for text completions, with {a text, several texts, token ids} as the prompt.
Each combination is called a cell. Subclass `GatewaySuite` with a fixture for the store:

    class TestTable(GatewaySuite):
        @pytest.fixture
        async def store(self): ...

`image_tests` has the tests with images, `cases` the cells. `harness` has the gateway and its
client, also for other tests of a gateway.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from lightspan.schema import semconv as c
from lightspan.schema.spans import SpanStatus
from lightspan.schema.token_records import CallOutcome, FinishReason
from lightspan.stores.protocol import Store
from lightspan_testing.gateway_suite.cases import CELLS, HELD, Cell, gated
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
from lightspan_testing.gateway_suite.image_tests import ImageTests
from lightspan_testing.scripted_engine import Gate, logprob_of
from lightspan_testing.wait import until


async def _reach(gates: Sequence[Gate]) -> None:
    for gate in gates:
        await gate.reached.wait()


def _open(gates: Sequence[Gate]) -> None:
    for gate in gates:
        gate.open()


class GatewaySuite(ImageTests):
    """Tests of the gateway. Needs a fixture `store`, which yields an open, empty store."""

    @pytest.mark.parametrize("cell", CELLS, ids=str)
    async def test_table(self, store: Store, cell: Cell) -> None:
        script, gates = gated(cell)
        async with make_rig(store, script) as rig:
            match cell.ending:
                case "cancelled" | "restarted":
                    reading, outcome = await self._cancelled(rig, cell, gates)
                case "retried":
                    reading, outcome = await self._retried(rig, cell, gates)
                case _:
                    reading, outcome = await cell.ask(rig), CallOutcome.OK
                    assert len(rig.engine.requests) == len(gates)
            self._check_answer(rig, cell, reading)
            await self._check_store(rig, cell, outcome)

    async def _cancelled(
        self, rig: Rig, cell: Cell, gates: Sequence[Gate]
    ) -> tuple[Reading, CallOutcome]:
        """Cancel a call while its answer is being generated, and make the same call again.

        If the cell's event is `restarted`, the gateway is restarted before the second call.
        """
        task = asyncio.create_task(cell.ask(rig))
        await _reach(gates)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: len(rig.engine.cancelled) == len(gates))
        await rig.session().calls["call-a"].wait_done()
        [span] = await rig.spans()
        assert span.attributes[c.CALL_OUTCOME] == "cancelled"
        assert (span.sequence_start, span.sequence_end) == (1, 2)
        partial = [cell.ids(rig, index)[:HELD] for index in range(len(gates))]
        records = await rig.records()
        stored = partial if cell.stream else []
        assert [record.response_ids for record in records] == stored
        assert {record.outcome for record in records} <= {CallOutcome.CANCELLED}
        assert {record.finish_reason for record in records} <= {FinishReason.CANCELLED}
        if cell.ending == "restarted":
            await rig.restart()
        _open(gates)
        reading = await cell.ask(rig)
        again = [request.prompt_ids for request in rig.engine.requests[len(gates) :]]
        pairs = zip(cell.prompts(rig), partial, strict=True)
        assert again == [[*prompt, *ids] if cell.stream else prompt for prompt, ids in pairs]
        return reading, CallOutcome.OK if cell.stream else CallOutcome.RESAMPLED

    async def _retried(
        self, rig: Rig, cell: Cell, gates: Sequence[Gate]
    ) -> tuple[Reading, CallOutcome]:
        """Make one call four times, like a client that got no response.

        The first two are concurrent. The third comes after the answer, the fourth after a restart
        of the gateway. The engine generates the answer only once.
        """
        first = asyncio.create_task(cell.ask(rig))
        await _reach(gates)
        second = asyncio.create_task(cell.ask(rig))
        [call] = rig.session().calls.values()
        await until(lambda: call._clients == 2)
        _open(gates)
        readings = [await first, await second, await cell.ask(rig)]
        await rig.restart()
        readings.append(await cell.ask(rig))
        assert len(rig.engine.requests) == len(gates)
        assert readings == readings[:1] * 4
        return readings[0], CallOutcome.OK

    def _check_answer(self, rig: Rig, cell: Cell, reading: Reading) -> None:
        prompts = cell.prompts(rig)
        expected = {index: cell.expected(rig, index) for index in range(len(prompts))}
        assert reading.response_id.endswith("cmpl-call-a")
        if cell.operation == "chat":
            assert reading.prompt_ids == rig.prompt()
        sampled = sum(len(content.token_ids) for content in expected.values())
        assert reading.usage == (sum(map(len, prompts[:: cell.n])), sampled)
        call_ids = [name for content in reading.choices.values() for name in content.call_ids]
        assert len(set(call_ids)) == len(call_ids)
        for content in reading.choices.values():
            assert len(content.call_ids) == len(content.calls)
            content.call_ids = []
        assert reading.choices == expected

    async def _check_store(self, rig: Rig, cell: Cell, outcome: CallOutcome) -> None:
        prompts = cell.prompts(rig)
        [span] = await rig.spans()
        end = 3 if cell.ending in ("cancelled", "restarted") else 2
        assert (span.sequence_start, span.sequence_end) == (1, end)
        assert (span.trace_id, span.parent_id) == (TRACE, PARENT)
        assert (span.status, span.status_message, span.late) == (SpanStatus.OK, "", False)
        finish = "length" if cell.ending == "length" else "stop"
        attributes = span.attributes
        assert (span.name, attributes[c.OPERATION_NAME]) == (f"{cell.operation} m", cell.operation)
        assert (attributes[c.AGENT_PATH], attributes[c.AGENT_NAME]) == ("team/writer", "writer")
        assert (attributes[c.CALL_ID], attributes[c.CALL_OUTCOME]) == ("call-a", outcome)
        assert (attributes[c.SELECTED], attributes[c.POLICY]) == (True, "policy")
        assert attributes[c.FINISH_REASONS] == [finish] * len(prompts)
        records = await rig.records()
        assert [record.choice for record in records] == list(range(len(prompts)))
        for record in records:
            ids = cell.ids(rig, record.choice)
            assert record.prompt_ids == prompts[record.choice]
            assert record.response_ids == ids
            assert record.logprobs == [logprob_of(token) for token in ids]
            assert record.versions == [(1, len(ids))]
            assert (record.finish_reason, record.outcome) == (finish, outcome)
            assert (record.sequence_start, record.sequence_end) == (1, end)
            assert (record.call_id, record.agent_path) == ("call-a", "team/writer")
            assert (record.policy, record.span_id) == ("policy", span.span_id)
        attempt = await rig.store.attempt(rig.attempt.attempt_id)
        assert attempt.capture_errors == []


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
