"""Provenance: the requests that no SDK made."""

from __future__ import annotations

from collections.abc import Sequence

from lightspan.lightning.detours import asked, fix_of, host_of
from lightspan.reports.dry_run.findings import Findings
from lightspan.reports.dry_run.sections import AgentReport, DetourReport
from lightspan.schema.origins import Request, requests_of


def read_detours(findings: Findings, agents: Sequence[AgentReport]) -> list[DetourReport]:
    """Requests past the SDKs, by agent; but those of which an adapter tells already, with what to
    change in its framework."""
    spans = [span for episode in findings.episodes for span in episode.spans]
    told = {agent.path: {client.host for client in agent.unseen} for agent in agents}

    def is_told(request: Request) -> bool:
        return not told.get(request.agent, set()).isdisjoint(("", host_of(request)))

    return [
        DetourReport(
            **request._asdict(),
            requests=count,
            asked=asked(request),
            selected=findings.routing.target(request.agent).selected,
            fix=fix_of(request),
        )
        for request, count in sorted(requests_of(spans).items())
        if not is_told(request)
    ]
