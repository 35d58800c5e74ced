"""What the app's records say of the state in which a query is rewritten: the signal of `--air`.

The app executes queries itself, not as a tool that a model calls; what came of a draft is known
from what the checker was asked about it.
"""

from __future__ import annotations

from lightspan.lightning.history import History
from lightspan.schema.genai_messages import input_messages_of

CHECKER = "check_query"


def draft_error(history: History) -> float:
    """-1.0 if the newest query that the checker was shown failed; else, or without one, 0.0."""
    asked = [call.span for call in history.calls if call.agent == CHECKER and call.span is not None]
    if not asked:
        return 0.0
    prompt = "\n".join(
        str(message["content"]) for message in input_messages_of(asked[-1].attributes)
    )
    return -1.0 if "\nError: " in prompt else 0.0
