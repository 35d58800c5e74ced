"""Make tasks of the inputs of attempts recorded in production."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from lightspan.algorithms.recorded_attempts import Query, Time, read_attempts, reward_bound
from lightspan.errors import DataError
from lightspan.schema import genai_messages
from lightspan.schema.images import Image
from lightspan.schema.media import digests_in, is_reference, with_image
from lightspan.schema.records import Json, fingerprint
from lightspan.stores import open_existing, public_url
from lightspan.stores.aio import run_sync
from lightspan.stores.protocol import Store

log = logging.getLogger(__name__)


def tasks_from_store(
    store: str | os.PathLike[str],
    *,
    service: str | None = None,
    min_reward: float | None = None,
    max_reward: float | None = None,
    since: Time | None = None,
    until: Time | None = None,
    distinct: bool = True,
) -> list[Json]:
    """Return the inputs of attempts recorded in production, as tasks, oldest first.

    A task is the input of the attempt's root span. If the app gave none, the task is the messages
    of the attempt's first call (`{"messages": […]}`), with the images that the store has as
    `data:` URLs. Attempts without a task are left out, and a warning counts them: their input was
    not JSON or too long, or their content is not recorded. Another warning names the attempts
    whose messages had images, sounds or files that the store does not have.

    Args:
        store: URL of the store.
        service: only attempts of this service; None for all services.
        min_reward: only attempts with at least this reward; None for no bound.
        max_reward: only attempts with at most this reward, such as failures; None for no bound.
        since: only attempts that began at this time or later; None for no bound.
        until: only attempts that began before this time; None for no bound.
        distinct: whether to return equal tasks only once.

    Raises:
        ConfigError: an argument has an invalid value.
        DataError: no attempt with a known input matches.
    """
    query = Query.of(service, since, until)
    low = reward_bound("min_reward", min_reward)
    high = reward_bound("max_reward", max_reward)

    incomplete: list[str] = []

    async def read() -> list[Json]:
        inputs: list[Json] = []
        async with open_existing(store) as opened:
            async for recorded in read_attempts(opened, query):
                if _is_within(recorded.score, low, high):
                    task = recorded.state.rollout.task
                    task, missing = put_images(task, await images_of_task(opened, task))
                    inputs.append(task)
                    incomplete.extend([recorded.attempt.attempt_id] if missing else [])
        return inputs

    inputs = run_sync(read())
    tasks = [task for task in inputs if task is not None]
    if not tasks:
        raise DataError(f"{public_url(store)}: none of {len(inputs)} attempts has a known input")
    if left_out := len(inputs) - len(tasks):
        text = "lightspan: %d of %d attempts are no tasks: `lightspan inspect %s ID` shows why"
        log.warning(text, left_out, len(inputs), public_url(store))
    if incomplete:
        text = (
            "lightspan: %d tasks have references in place of images, sounds or files, which the "
            "store does not have; attempts: %s"
        )
        log.warning(text, len(incomplete), ", ".join(incomplete))
    return list({fingerprint(task): task for task in tasks}.values()) if distinct else tasks


async def images_of_task(store: Store, task: Json) -> dict[str, Image]:
    """Return the stored images to which a task refers, by digest."""
    digests = digests_in({"task": genai_messages.dump_json(task)})
    return await store.images(sorted(digests)) if digests else {}


def put_images(task: Json, images: Mapping[str, Image]) -> tuple[Json, int]:
    """Put images into the messages of a task, in place of the references to them.

    Args:
        task: the task; one without `messages` is returned as it is.
        images: the images by digest (`images_of_task`).

    Returns:
        (the task, number of the references that are left in its messages)
    """
    messages = task.get("messages") if isinstance(task, dict) else None
    if not isinstance(task, dict) or not isinstance(messages, list):
        return task, 0
    left = 0
    restored: list[Any] = []
    for message in messages:
        if isinstance(message, dict) and isinstance(parts := message.get("content"), list):
            content = [with_image(part, images) for part in parts]
            left += sum(map(is_reference, content))
            message = {**message, "content": content}
        restored.append(message)
    return {**task, "messages": restored}, left


def _is_within(score: float | None, low: float | None, high: float | None) -> bool:
    """Return whether a score is from `low` to `high`; None for `low` or `high` means no bound.

    If the score is None, the attempt is unscored. It passes only if there is no bound.
    """
    if score is None:
        return low is None and high is None
    return (low is None or score >= low) and (high is None or score <= high)
