"""Estimates: token ids of an endpoint's answers, as the algorithm's own tokenizer has them.

For a dry run's report only: nothing that is made here is ever trained (design law 1). The prompt is
what the chat template renders. The answer is what the template renders of it, up to the end of the
turn, or its encoded text where the template renders the past otherwise. How a model would have cut
its own answer is not known, so retokenisation cannot be seen.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from lightspan.engines.protocol import ChatTokenizer
from lightspan.errors import LightspanError
from lightspan.gateway.api_errors import ApiError
from lightspan.gateway.dialects.chat import parse_chat
from lightspan.lightning.episode import Call, Episode
from lightspan.schema import conventions as c, messages
from lightspan.schema.records import Mode
from lightspan.schema.routing import Route, Routing
from lightspan.schema.tokens import CallOutcome, FinishReason, Sampling, TokenRecord


def with_estimates(
    episodes: Sequence[Episode], routing: Routing, tokenizers: Mapping[str, ChatTokenizer]
) -> list[Episode]:
    """The episodes with token records for the calls of agents that would be trained.

    Args:
        routing: the algorithm's.
        tokenizers: policy → its tokenizer, of those on this machine.
    """
    return [
        replace(
            episode,
            calls=tuple(_estimated(call, episode, routing, tokenizers) for call in episode.calls),
        )
        for episode in episodes
    ]


def _estimated(
    call: Call, episode: Episode, routing: Routing, tokenizers: Mapping[str, ChatTokenizer]
) -> Call:
    target = routing.target(call.agent_path)
    tokenizer = tokenizers.get(target.policy) if target.selected else None
    answered = call.outcome is CallOutcome.OK and call.route is Route.ENDPOINT
    if tokenizer is None or call.record is not None or not answered or call.span is None:
        return call
    try:
        prompt, response = _ids(call, tokenizer)
    except (LightspanError, ApiError):  # the template refuses these messages
        return call
    sampling = target.sampling or Sampling()
    record = TokenRecord.create(
        prompt_ids=prompt,
        response_ids=response,
        logprobs=[0.0] * len(response),
        versions=[(0, len(response))] if response else [],
        attempt_id=episode.attempt_id,
        call_id=call.call_id,
        choice=call.choice,
        policy=target.policy,
        sampling=sampling,
        finish_reason=FinishReason.LENGTH if call.finish == "length" else FinishReason.STOP,
        span_id=call.span_id,
        agent_path=call.agent_path,
        sequence_start=call.sequence_start or 0,
        sequence_end=call.sequence_end or 0,
    )
    return msgspec.structs.replace(call, record=record)


def _ids(call: Call, tokenizer: ChatTokenizer) -> tuple[list[int], list[int]]:
    """(ids of the prompt, of the response).

    Raises:
        ApiError, ModelError: these messages cannot be rendered.
    """
    assert call.span is not None
    attributes = call.span.attributes
    asked, answers = messages.asked_of(attributes), messages.answers_of(attributes)
    tools = json.loads(str(attributes.get(c.TOOL_DEFINITIONS) or "null"))
    answer = answers[call.choice] if call.choice < len(answers) else {"role": "assistant"}
    prompt = _rendered(tokenizer, asked, tools, open_turn=True)
    cut = call.finish == "length"
    whole = _rendered(tokenizer, [*asked, answer], tools, open_turn=False)
    text = str(answer.get("content") or "")
    if whole[: len(prompt)] != prompt or cut:
        # the template renders the past otherwise, or would close a turn that was cut off
        ends = [token for token in whole if token in tokenizer.eos_ids and not cut]
        return prompt, [*tokenizer.encode(text), *ends[-1:]]
    return prompt, _turn(whole[len(prompt) :], tokenizer)


def _turn(ids: Sequence[int], tokenizer: ChatTokenizer) -> list[int]:
    """The ids up to the end of the turn, included."""
    ends = (place for place, token in enumerate(ids) if token in tokenizer.eos_ids)
    return list(ids[: next(ends, len(ids) - 1) + 1])


def _rendered(
    tokenizer: ChatTokenizer,
    asked: Sequence[Mapping[str, Any]],
    tools: Any,
    *,
    open_turn: bool,
) -> list[int]:
    body = {"messages": list(asked), "tools": tools}
    chat = parse_chat(body, mode=Mode.VAL, forced=None)
    return tokenizer.render(chat.messages, chat.tools, add_generation_prompt=open_turn)
