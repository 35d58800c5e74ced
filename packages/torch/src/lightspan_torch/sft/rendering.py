"""Convert chats to token ids: prompts, and answers to learn from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import msgspec

from lightspan.algorithms.jsonl import read_jsonl
from lightspan.algorithms.recorded_attempts import NO_ANSWER, has_answer
from lightspan.errors import ContextOverflowError, DataError, ModelError
from lightspan.progress import Reporter
from lightspan.schema.images import PromptImage
from lightspan.schema.records import Json
from lightspan_torch.engine.tokenizer import TransformersTokenizer
from lightspan_torch.sft.image_column import with_images
from lightspan_torch.vision.tokenizer import VisionTokenizer

NOT_FOR_THIS_MODEL: Final = "not for this model"
"""Reason to leave out an example that is too long, or that the chat template refuses."""
LOST_THOUGHTS: Final = "thoughts that the chat template has no place for"
"""What is left out of an answer whose text is imitated."""

Turns: TypeAlias = Literal["last", "all"]
"""Which assistant messages of a chat are imitated: the last, or all."""


class Demonstration(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt and the answer to imitate, as token ids."""

    prompt_ids: list[int]
    response_ids: list[int]
    earlier: list[tuple[int, int]] = []
    """Intervals [start, end) of `prompt_ids` that are earlier answers. They are imitated too,
    whatever `SFT.turns` is."""
    images: tuple[PromptImage, ...] = ()
    """The images of the prompt, with their bytes."""


def render_demonstration(
    demo: Json | Demonstration,
    tokenizer: TransformersTokenizer,
    label: str,
    turns: Turns,
    left_out: Counter[str],
) -> Demonstration | None:
    """Convert a demonstration to token ids, and check it; None if no answer is to be imitated.

    Args:
        demo: a chat, or token ids.
        tokenizer: the model's tokenizer.
        label: name of the demonstration for error messages, such as `demonstrations[3]`.
        turns: which assistant messages are imitated.
        left_out: reason → number of answers left out, to which this function adds. An answer that
            loses its thoughts only (`LOST_THOUGHTS`) is counted too.

    Raises:
        ContextOverflowError: the demonstration is too long for the model.
        DataError: prompt or answer are empty, an interval of `earlier` (earlier answers to imitate)
            is outside the prompt, or the weight of a message is invalid.
        ModelError: the chat template refuses the messages.
    """
    if isinstance(demo, Demonstration):
        placeholders = sum(image.length for image in demo.images)
        if (
            isinstance(tokenizer, VisionTokenizer)
            and demo.prompt_ids.count(tokenizer.images.image_id) != placeholders
        ):
            raise DataError(
                f"{label} has placeholders of images in its prompt_ids, and {placeholders} of them "
                "in images=: give its chat with the images (`lightspan export RUN messages "
                "--images`), or Demonstration(images=)"
            )
        return _checked(demo, tokenizer, label)
    messages, tools = (demo, None) if isinstance(demo, list) else read_chat(demo, label)
    if not messages or messages[-1].get("role") != "assistant":
        raise DataError(f"{label} must end with a message of the assistant")
    if len(messages) == 1:
        raise DataError(f"{label} answers nothing: a message has to come before")
    *others, last = _answers(messages, label, turns, left_out) or [-1]
    if last < 0:
        return None
    prompt, response, images = render_turn(messages[: last + 1], tools, tokenizer, label)
    rendered = [(last, response)]
    earlier = []
    for place in others:
        turn_prompt, answer, _ = render_turn(messages[: place + 1], tools, tokenizer, label)
        if prompt[: len(turn_prompt) + len(answer)] != turn_prompt + answer:
            raise DataError(
                f"{label}: the chat template renders messages[{place}] "
                'differently once more messages follow; give turns="last", and each turn as a '
                "chat of its own"
            )
        earlier.append((len(turn_prompt), len(turn_prompt) + len(answer)))
        rendered.append((place, answer))
    lost = sum(_loses_thoughts(messages[place], answer, tokenizer) for place, answer in rendered)
    left_out.update({LOST_THOUGHTS: lost} if lost else {})
    ids = Demonstration(prompt_ids=prompt, response_ids=response, earlier=earlier, images=images)
    return _checked(ids, tokenizer, label)


def render_or_leave_out(
    demo: Json | Demonstration,
    tokenizer: TransformersTokenizer,
    label: str,
    turns: Turns,
    left_out: Counter[str],
    *,
    is_strict: bool,
) -> tuple[Demonstration | None, str]:
    """Convert a demonstration to token ids, or leave it out if it does not suit the model.

    Args:
        demo, tokenizer, label, turns, left_out: as in `render_demonstration`.
        is_strict: whether a malformed demonstration is an error; otherwise it is left out too.

    Returns:
        The token ids (None if there is nothing to imitate), and why the demonstration does not suit
        the model ("" if it does).

    Raises:
        DataError: the demonstration is malformed.
    """
    try:
        return render_demonstration(demo, tokenizer, label, turns, left_out), ""
    except (ModelError, ContextOverflowError) as error:
        reason = f"{label}: {error}"
    except DataError as error:
        if is_strict:
            raise
        reason = str(error)
    left_out[NOT_FOR_THIS_MODEL] += 1
    return None, reason


def _checked(ids: Demonstration, tokenizer: TransformersTokenizer, label: str) -> Demonstration:
    """Return `ids` if the model can learn from them.

    Raises:
        ContextOverflowError: they are too long for the model.
        DataError: prompt or answer are empty, or an interval of `earlier` is outside the prompt.
    """
    if not ids.prompt_ids or not ids.response_ids:
        raise DataError(f"{label} needs a prompt and an answer that are not empty")
    for start, end in ids.earlier:
        if not 0 < start <= end <= len(ids.prompt_ids):
            raise DataError(
                f"{label}.earlier: [{start}, {end}) is not within its prompt of "
                f"{len(ids.prompt_ids)} tokens, or begins with the first, which nothing predicts"
            )
    size = len(ids.prompt_ids) + len(ids.response_ids)
    if size > tokenizer.context_length:
        raise ContextOverflowError(
            f"it has {size} tokens, but the model's context holds {tokenizer.context_length}: "
            "shorten it"
        )
    return ids


def _answers(
    messages: Sequence[Mapping[str, Any]], label: str, turns: Turns, left_out: Counter[str]
) -> list[int]:
    """Return the places of the answers to imitate among the messages of a chat, in their order.

    Args:
        messages: the messages; the last is the assistant's.
        label: name of the demonstration for error messages, such as `demonstrations[3]`.
        turns: which assistant messages are imitated.
        left_out: reason → number of answers left out, to which this function adds.

    Raises:
        DataError: the weight of a message is invalid.
    """
    places = []
    for place, message in enumerate(messages):
        weight, is_answer = message.get("weight"), message.get("role") == "assistant"
        if weight not in (None, 0, 1) or (weight and not is_answer):
            raise DataError(
                f"{label}: messages[{place}] has the weight {weight!r}; an answer "
                "of the assistant may have 0 (left out) or 1 (imitated), other messages none"
            )
        # a first message has no prompt
        if not is_answer or not place or (turns == "last" and place < len(messages) - 1):
            continue
        if weight == 0:
            left_out["with weight 0"] += 1
        elif not has_answer(message):
            left_out[NO_ANSWER] += 1
        else:
            places.append(place)
    return places


def _loses_thoughts(
    message: Mapping[str, Any], answer: Sequence[int], tokenizer: TransformersTokenizer
) -> bool:
    """Return whether a message has thoughts that are not in its rendered answer."""
    thoughts = "".join(str(message.get("reasoning_content") or "").split())
    return thoughts not in "".join(tokenizer.decode(answer).split())  # templates may trim them


def render_turn(
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    tokenizer: TransformersTokenizer,
    label: str,
) -> tuple[list[int], list[int], tuple[PromptImage, ...]]:
    """Return the last message (the answer) and the messages before it (the prompt) as token ids.

    Returns:
        (ids of the prompt, ids of the answer, images of the prompt)
    """
    try:
        prompt, images = _render(tokenizer, messages[:-1], tools, add_generation_prompt=True)
        whole, all_images = _render(tokenizer, messages, tools, add_generation_prompt=False)
    except DataError as error:  # an image, which has no label
        raise DataError(f"{label}: {error}") from error
    if all_images != images:
        raise DataError(f"{label}: the answer has an image, and models of this kind write texts")
    if whole[: len(prompt)] != prompt:
        raise DataError(
            f"{label}: the chat template renders the prompt differently once the "
            "answer is there; give token ids (Demonstration) instead"
        )
    response = whole[len(prompt) :]
    ends = [place for place, token in enumerate(response) if token in tokenizer.eos_ids]
    if ends:  # sampling ends there: the template, not the model, writes what follows
        response = response[: ends[0] + 1]
    elif response and tokenizer.end_id is not None:  # else the model would learn never to end
        response.append(tokenizer.end_id)
    return prompt, response, images


def _render(
    tokenizer: TransformersTokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    *,
    add_generation_prompt: bool,
) -> tuple[list[int], tuple[PromptImage, ...]]:
    """Return the ids and the images of a chat; see `ImageTokenizer.render_images`."""
    options: Any = {"add_generation_prompt": add_generation_prompt}
    if isinstance(tokenizer, VisionTokenizer):
        return tokenizer.render_images(messages, tools, **options)
    return tokenizer.render(messages, tools, **options), ()


def read_chat(demo: Any, label: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Return the messages and the tools of a chat; no tools are None.

    Args:
        demo: the chat, `{"messages": […], "tools": […]}`.
        label: name of the chat for error messages.

    Raises:
        DataError: the chat is malformed.
    """
    if not isinstance(demo, Mapping) or not isinstance(demo.get("messages"), list):
        raise DataError(f'{label} must be {{"messages": […]}}, not {demo!r:.200}')
    tools = demo.get("tools")
    if not isinstance(tools, list | None):
        raise DataError(f"{label}: tools={tools!r:.100} must be a list, or None for no tools")
    for tool in tools or []:
        part = tool
        for key in ("function", "parameters", "properties"):
            part = part.get(key, part) if isinstance(part, Mapping) else None
        for name, schema in part.items() if isinstance(part, Mapping) else ():
            if schema is None:
                raise DataError(
                    f"{label}: the tools' parameter {name!r} is null; Arrow adds "
                    "such nulls to rows of a Dataset: give the Dataset itself, or leave them out"
                )
    return with_images(demo["messages"], demo, label), tools


def read_examples(
    examples: Sequence[Any] | str | Path, name: str, item: str, reporter: Reporter
) -> Sequence[Any]:
    """Return examples as a sequence: those of a file, a list or a `Dataset` of Hugging Face.

    Args:
        examples: path of a `.jsonl` file, or the examples.
        name: name of the argument, for messages.
        item: what each example is, for messages.
        reporter: reports keys that are left out.

    Raises:
        DataError: the file cannot be read, or `examples` is a table of pandas.
    """
    if isinstance(examples, str | Path):
        return read_jsonl(Path(examples), name, item)
    if hasattr(examples, "iloc"):  # pandas, where iteration would yield columns
        raise DataError(f"{name} is a table: give its rows, data.to_dict('records')")
    if type(examples).__module__.partition(".")[0] == "datasets":
        return _without_nulls(examples, name, reporter)
    return examples


def _without_nulls(dataset: Any, name: str, reporter: Reporter) -> list[Json]:
    """Return the rows of a `Dataset` of Hugging Face, without nulls in tool calls and tools.

    A column of structs has the keys of all its rows. Arrow fills those that a row lacks with null,
    which a chat template would render as arguments and parameters.
    """
    rows = list(dataset)
    clean = [_drop_nulls(row) for row in rows]
    if clean != rows:
        reporter.line(
            f"{name}: keys of the Dataset's rows whose value is null are left out, because "
            "Arrow adds them; for a tool argument that is null, give arguments as JSON text"
        )
    return clean


def _drop_nulls(value: Any) -> Any:
    """Return a part of a row without the keys whose value is None, except `content`."""
    if isinstance(value, dict):
        return {
            key: _drop_nulls(item)
            for key, item in value.items()
            if item is not None or key == "content"
        }
    return [_drop_nulls(item) for item in value] if isinstance(value, list) else value
