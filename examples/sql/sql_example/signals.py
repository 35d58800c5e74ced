"""The intermediate reward of `--air`, read from the app's recorded calls.

The app executes queries itself and not by a tool call. So the result of a draft is read from the
prompt of the checker.
"""

from __future__ import annotations

from lightspan.lightning.history import History
from lightspan.schema.genai_messages import input_messages_of

CHECKER = "check_query"


def draft_error(history: History) -> float:
    """Return -1.0 if the checker's latest prompt shows a failed query, else 0.0."""
    asked = [call.span for call in history.calls if call.agent == CHECKER and call.span is not None]
    if not asked:
        return 0.0
    prompt = "\n".join(
        str(message["content"]) for message in input_messages_of(asked[-1].attributes)
    )
    return -1.0 if "\nError: " in prompt else 0.0
