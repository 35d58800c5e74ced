"""Translation of `agent_match`, a regular expression, into globs of agent names."""

from __future__ import annotations

import re
import sys
from typing import Final

from lightspan.errors import UnsupportedError

_PARTS: Final = re.compile(r"(\.\*)|\\([^\w*])|([^\\.^$*+?{}\[\]()|])")
"""`.*`, an escaped character or a plain character."""


_ADAPTERS: Final = {
    "agents.models.interface": "lightspan_openai_agents",
    "autogen_core": "lightspan_autogen",
    "crewai": "lightspan_crewai",
}
"""Module of a framework → the package whose `instrument()` names its agents."""
_LANGGRAPH: Final = (
    "run the graph with {'callbacks': [self.tracer.get_langchain_handler()]}, with "
    "lightspan-langgraph installed, so that its nodes are the names"
)


def instrument_advice() -> str:
    """Return advice for error messages: how agents of a framework get their names.

    LangGraph needs a callback handler. Other frameworks need `instrument()` of lightspan's adapter.
    The advice is for all frameworks that are imported.
    """
    names = [adapter for framework, adapter in _ADAPTERS.items() if framework in sys.modules]
    advice = [_LANGGRAPH] if "langgraph" in sys.modules else []
    if names or not advice:
        calls = " and ".join(f"{name}.instrument()" for name in names)
        advice.append(
            f"call {calls or 'instrument() of its adapter'} at the top of the agent's "
            "module, which gives its agents their names"
        )
    return "; ".join(advice)


def globs_of(agent_match: str | None) -> list[str]:
    """Translate the regular expression `agent_match` into globs of agent names.

    The expression may match anywhere in a name, as with `re.search`. None selects every agent: the
    result is `["*"]`.

    Raises:
        UnsupportedError: `agent_match` is no text, or has other syntax than plain text, `^`, `$`,
            `.*` and `|`.
    """
    if agent_match is None:
        return ["*"]
    if not isinstance(agent_match, str):
        raise UnsupportedError(f"agent_match={agent_match!r} must be a regular expression or None")
    return list(dict.fromkeys(_glob(branch, agent_match) for branch in agent_match.split("|")))


def _glob(branch: str, agent_match: str) -> str:
    text = branch.removeprefix("^")
    start = "" if text != branch else "*"
    body = text.removesuffix("$")
    end = "" if text != body else "*"
    parts = list(_PARTS.finditer(body))
    if "".join(part[0] for part in parts) != body:
        raise UnsupportedError(
            f"agent_match={agent_match!r}: lightspan selects agents by name, so only plain text, "
            "^, $, .* and | are supported; write other expressions out, such as 'writer|rewriter' "
            "for '(re)?writer'"
        )
    # A pattern with a slash would match whole paths.
    names = ["*" if part[1] else (part[2] or part[3]).replace("/", "%2F") for part in parts]
    return re.sub(r"\*+", "*", f"{start}{''.join(names)}{end}")
