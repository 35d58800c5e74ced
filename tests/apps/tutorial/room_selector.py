"""An agent that books a meeting room with a tool; a model grades its choice."""

from __future__ import annotations

import json
from typing import Any, List, Tuple, TypedDict  # noqa: UP035 - as scripts of then have it

from openai import OpenAI

import lightspan_agl as agl

ROOMS = {
    "Attic": {"seats": 2, "whiteboard": False},
    "Library": {"seats": 6, "whiteboard": True},
    "Hall": {"seats": 30, "whiteboard": False},
}

ROOMS_TOOL: Any = {
    "type": "function",
    "function": {
        "name": "list_rooms",
        "description": "Every room with its seats and what is in it.",
        "parameters": {"type": "object", "properties": {}},
    },
}


class RoomTask(TypedDict):
    """A meeting, and the right room for it."""

    id: str
    task_input: dict[str, Any]
    expected_choice: str


def prompt_template_baseline() -> agl.PromptTemplate:
    return agl.PromptTemplate(
        template="Choose a room for {people} people who need: {needs}.", engine="f-string"
    )


def room_selection_grader(client: OpenAI, final_message: str, expected_choice: str) -> float:
    """Return the model's grade of the choice, from 0 to 1."""
    judged = client.chat.completions.create(
        model="gpt-4.1-mini",
        messages=[
            {
                "role": "user",
                "content": f"GRADE from 0 to 1. Expected: {expected_choice}. Said: {final_message}",
            }
        ],
        response_format={"type": "json_object"},
    )
    return float(json.loads(judged.choices[0].message.content or "{}")["score"])


@agl.rollout
def room_selector(task: RoomTask, prompt_template: agl.PromptTemplate) -> float:
    client = OpenAI()
    messages: Any = [{"role": "user", "content": prompt_template.format(**task["task_input"])}]
    asked = client.chat.completions.create(
        model="gpt-5-nano", messages=messages, tools=[ROOMS_TOOL], tool_choice="auto"
    )
    message = asked.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    for call in message.tool_calls or ():
        messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps(ROOMS)})
    final = client.chat.completions.create(model="gpt-5-nano", messages=messages)
    said = final.choices[0].message.content or ""
    return room_selection_grader(client, said, task["expected_choice"])


def load_train_val_dataset() -> Tuple[agl.Dataset[RoomTask], agl.Dataset[RoomTask]]:  # noqa: UP006
    meetings = [(2, "quiet", "Attic"), (5, "a whiteboard", "Library"), (20, "a screen", "Hall")]
    tasks: List[RoomTask] = [  # noqa: UP006
        {
            "id": f"meeting-{number}",
            "task_input": {"people": people, "needs": needs},
            "expected_choice": room,
        }
        for number, (people, needs, room) in enumerate(meetings * 4)
    ]
    return tasks[:6], tasks[6:]
