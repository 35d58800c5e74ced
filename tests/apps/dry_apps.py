"""Apps for dry runs: their tasks determine the calls, and the model's answers the rewards."""

from __future__ import annotations

import contextlib
import json
import urllib.request
from typing import Any

import openai

import lightspan
from lightspan.capture import context
from lightspan.capture.other_clients import record_call
from lightspan.schema.spans import now_ns

client = openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="unused")


def _ask(messages: Any, at: openai.OpenAI = client, **options: Any) -> str:
    reply = at.chat.completions.create(model="any", messages=messages, **options)
    return reply.choices[0].message.content or ""


@lightspan.rollout
def research(task: dict[str, Any]) -> float:
    """Call a planner twice in one conversation, with a helper and a tool in between, then a
    checker.

    The helper has its own endpoint. The reward is the number in the planner's last answer.
    """
    messages: Any = [{"role": "user", "content": f"plan {task['q']}"}]
    odd: Any = {"temperature": 0.2, "seed": 7, "presence_penalty": 0.5, "max_tokens": 40}
    with lightspan.agent("team"), lightspan.agent("planner"):
        plan = _ask(messages, **odd)
        elsewhere = openai.OpenAI(base_url=task["url"], api_key="own-key", max_retries=0)
        with lightspan.agent("helper"):
            help_text = _ask([{"role": "user", "content": "help"}], elsewhere)
        for _ in range(2):
            with lightspan.tool("search"):
                pass
        messages += [{"role": "assistant", "content": plan}, {"role": "user", "content": help_text}]
        answer = _ask(messages, **odd)
    with lightspan.agent("checker"):
        _ask([{"role": "user", "content": "fine?"}], max_tokens=3)
    return float(answer)


@lightspan.rollout
def says(task: dict[str, Any]) -> float | None:
    """Call the model once; the reward is its answer.

    The answer is a number or `none`; anything else raises.
    """
    with lightspan.agent("writer"):
        text = _ask([{"role": "user", "content": task["q"]}])
    return None if text == "none" else float(text)


@lightspan.rollout
def rewards_calls(task: dict[str, Any]) -> float:
    """Give a reward to the call, and one to an id that no call has."""
    with lightspan.agent("writer"):
        messages: Any = [{"role": "user", "content": task["q"]}]
        reply = client.chat.completions.create(model="any", messages=messages)
    lightspan.emit_reward(0.5, call=reply.id)
    lightspan.emit_reward(0.5, call="lc_run--1")
    return float(reply.choices[0].message.content or "")


@lightspan.rollout
def remembers(task: dict[str, Any]) -> float:
    """Call the model once, unless the task is in a cache of the app."""
    with lightspan.agent("writer"):
        return 1.0 if task.get("cached") else float(_ask([{"role": "user", "content": task["q"]}]))


@lightspan.rollout
def survives(task: dict[str, Any]) -> float:
    """Call the writer, and a helper whose endpoint is down."""
    with lightspan.agent("writer"):
        reward = float(_ask([{"role": "user", "content": task["q"]}]))
    with lightspan.agent("helper"), contextlib.suppress(openai.APIConnectionError):
        _ask([{"role": "user", "content": "help"}], client.with_options(max_retries=0))
    return reward


@lightspan.rollout
def samples(task: dict[str, Any]) -> float:
    """Call the model once with the request fields `task["fields"]`; the reward is its answer."""
    with lightspan.agent("writer"):
        messages = [{"role": "user", "content": task["q"]}]
        return float(_ask(messages, extra_body=task["fields"]))


@lightspan.rollout
def retries(task: dict[str, Any]) -> dict[str, float]:
    """Call the writer until its answer is a number, at most three times."""
    for number in range(3):
        try:
            with lightspan.agent("writer"):
                value = float(_ask([{"role": "user", "content": task["q"]}]))
        except ValueError:
            continue
        return {"tries": number + 1.0, "reward": value}
    raise LookupError("no number")


@lightspan.rollout
def forgets_a_name(task: dict[str, Any]) -> float:
    """Call the writer, then the model again without an agent's name."""
    with lightspan.agent("writer"):
        _ask([{"role": "user", "content": task["q"]}])
    return float(_ask([{"role": "user", "content": task["q"]}]))


PICTURE = "data:image/png;base64," + "A" * 2**20
"""A picture of three quarters of a megabyte as a data URL."""


@lightspan.rollout
def looks(task: dict[str, Any]) -> float:
    """Send a picture as the writer; a task may ask for a text instead. Errors are ignored.

    With a text, the reward is the model's answer.
    """
    image = {"type": "image_url", "image_url": {"url": PICTURE}}
    text = {"type": "text", "text": task["q"]}
    with lightspan.agent("writer"):
        try:
            parts = [text] if "text" in task else [text, image]
            return float(_ask([{"role": "user", "content": parts}]))
        except openai.BadRequestError:
            return 0.0


@lightspan.rollout
def watches(task: dict[str, Any]) -> float:
    """Ask the writer about a picture, and then again with another picture in its place."""
    with lightspan.agent("writer"):
        said: Any = []
        for url in task["pictures"]:
            content = [{"type": "image_url", "image_url": {"url": url}}]
            answer = _ask([{"role": "user", "content": content}, *said], max_tokens=4)
            said = [{"role": "assistant", "content": answer}, {"role": "user", "content": "And?"}]
    return float(len(answer))


@lightspan.rollout
def sees(task: dict[str, Any]) -> float:
    """Send a picture by the Responses API as the writer; errors are raised."""
    image = {"type": "input_image", "image_url": PICTURE}
    said: Any = [{"role": "user", "content": [image]}]
    with lightspan.agent("writer"):
        client.responses.create(model="any", input=said)
    return 1.0


@lightspan.rollout
def bypasses(task: dict[str, Any]) -> float:
    """Record a call of a client that does not use the OpenAI SDK, as an adapter does."""
    with lightspan.agent("writer"):
        acting = context.current_agent()
        assert acting is not None
        answer = {"choices": [{"message": {"role": "assistant", "content": "1"}}]}
        request = {"model": "other", "messages": [{"role": "user", "content": task["q"]}]}
        native = "framework.ChatOpenAI"
        record_call(acting, request, answer, start_ns=now_ns(), client=Foreign(), native=native)
    return 1.0


class Foreign:
    """A model client that does not use the OpenAI SDK."""

    base_url = "https://me:secret@models.test:8443/v1?key=secret"
    api_key = "secret"


def _post(url: str, key: str, model: str, text: str) -> float:
    """Send a chat request by Python's own HTTP client; return the answer as a number."""
    body = {"model": model, "messages": [{"role": "user", "content": text}]}
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(
        f"{url}/chat/completions", json.dumps(body).encode(), headers=headers
    )
    with urllib.request.urlopen(request) as answer:
        return float(json.load(answer)["choices"][0]["message"]["content"])


@lightspan.rollout
def posts(task: dict[str, Any]) -> float:
    """Send an HTTP request to a model without any SDK, so that lightspan does not see it."""
    with lightspan.agent("writer"):
        return _post(task["url"], "own", "any", task["q"])


@lightspan.rollout
def posts_to(task: dict[str, Any], llm: Any) -> float:
    """Send an HTTP request without any SDK to the attempt's own endpoint."""
    with lightspan.agent("writer"):
        return _post(llm.base_url, llm.api_key, "writer", task["q"])


@lightspan.rollout
def delegates(task: dict[str, Any]) -> float:
    """Call the model as `resolver` inside `resolve`, then as a checker, unless the task says not.

    `resolve` makes no call itself.
    """
    with lightspan.agent("resolve"), lightspan.agent("resolver"):
        answer = float(_ask([{"role": "user", "content": task["q"]}]))
    with lightspan.agent("checker"):
        if task.get("checks", True):
            _ask([{"role": "user", "content": "fine?"}])
    return answer


@lightspan.rollout
def silent(task: dict[str, Any]) -> float:
    """Return a reward without calling a model."""
    return 1.0


@lightspan.rollout
def edits(task: dict[str, Any]) -> float:
    """Continue the conversation as the writer, but change the model's first answer."""
    messages: Any = [{"role": "user", "content": task["q"]}]
    with lightspan.agent("writer"):
        said = _ask(messages)
        messages += [{"role": "assistant", "content": said.upper()}]
        return float(_ask([*messages, {"role": "user", "content": "and?"}]))
