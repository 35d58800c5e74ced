"""A candidate that is served: its routing, its state, and the lines about it."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightspan.errors import ConfigError
from lightspan.protocols.engine import TokenEngine
from lightspan.schema.routing import Routing
from lightspan.training.manifest import ServedRun
from lightspan_gateway.serving.candidate.access import (
    PREFIX,
    CandidateAccess,
    candidate_routing,
    counterparts,
)
from lightspan_gateway.serving.candidate.gateway import CandidateGateway
from lightspan_gateway.serving.candidate.sides import weights_digest
from lightspan_gateway.serving.candidate.state import (
    STATE_FILE,
    CandidateState,
    Comparison,
    Decision,
    Weights,
)
from lightspan_gateway.store_server.api_keys import Keys


@dataclass(frozen=True)
class Candidate:
    """A candidate and its comparison with the current weights."""

    current: ServedRun
    routing: Routing
    names: Mapping[str, str]
    """Policy that apps may name → the engine's name of the candidate's policy."""
    state: CandidateState
    comparison: Comparison
    admin: Keys | None
    """The administrator's key; None permits no decision over HTTP."""

    @classmethod
    def open(
        cls,
        current: tuple[ServedRun, Path],
        candidate: tuple[ServedRun, Path],
        base: str,
        *,
        share: float,
        state: Path | None,
        admin: Keys | None,
    ) -> Candidate:
        """Begin or continue the comparison of a candidate.

        Args:
            current: description and folder of the current run or model.
            candidate: description and folder of the candidate.
            base: the engine's name of the candidate's starting weights.
            share: share of attempts that the candidate answers.
            state: file of the state; None for the default in the current folder.
            admin: the administrator's key; None permits no decision over HTTP.

        Raises:
            ConfigError: the candidate cannot replace the current weights, or the state cannot be
                kept.
        """
        names = counterparts(current[0], candidate[0])
        older, newer = (
            Weights(str(path), weights_digest(served, path))
            for served, path in (current, candidate)
        )
        policies = {PREFIX + name for name in candidate[0].policies}
        opened = CandidateState(state or current[1] / STATE_FILE)
        try:
            comparison = opened.begin(older, newer, share)
        except sqlite3.Error as error:
            opened.close()
            raise ConfigError(f"{opened.path} cannot be written: {error}") from error
        except ConfigError:
            opened.close()
            raise
        return cls(
            current=current[0],
            routing=candidate_routing(candidate[0], policies, base),
            names={name: PREFIX + other for name, other in names.items()},
            state=opened,
            comparison=comparison,
            admin=admin,
        )

    def gateway(
        self,
        engine: TokenEngine,
        *,
        host: str,
        port: int,
        image_hosts: Sequence[str],
        **settings: Any,
    ) -> CandidateGateway:
        """Return the server of both sides.

        Args:
            engine: the engine with the policies of both sides.
            host: address of the interface to listen on.
            port: port; 0 for any free port.
            image_hosts: hosts from which images are fetched.
            settings: settings of `PublicAccess`.
        """
        access = CandidateAccess(self.current, self.routing, self.names, self.state, **settings)
        return CandidateGateway(
            engine, access, admin=self.admin, host=host, port=port, image_hosts=image_hosts
        )

    def lines(self, url: str) -> list[str]:
        """Return the lines to print at the start.

        Args:
            url: origin of the server.
        """
        comparison, path = self.comparison, self.state.path
        sides = {"candidate": comparison.candidate, "current": comparison.current}
        if comparison.decision is None:
            answers = f"answers {comparison.share:.3g} of attempts"
        elif comparison.decision is Decision.PROMOTED:
            answers = "was promoted: it answers all new attempts"
        else:
            answers = "was rolled back: it answers no new attempt"
        folder_or_file = path.parent if path.name == STATE_FILE else path
        target = url if self.admin is not None else folder_or_file
        return [
            f"the candidate {comparison.candidate.folder} {answers} "
            f"(comparison {comparison.comparison_id}, kept in {path})",
            *(
                f"  {side}: model NAME@{each.digest}, of {each.folder}"
                for side, each in sides.items()
            ),
            "  all calls of an attempt have one side. What makes them one attempt: lightspan in "
            "the app, or the header x-lightspan-attempt, or the trace id of traceparent",
            "  without these, a call that continues an answered conversation has the side of that, "
            "other calls have the side of their field user, and without that each call its own",
            f"  lightspan candidate status {target} --store URL   (then promote, or roll-back)",
        ]


def state_note(folder: Path) -> str:
    """Return a line about a comparison in `folder` that is not served; empty if there is none."""
    path = folder / STATE_FILE
    if not path.is_file():
        return ""
    try:
        with closing(CandidateState(path)) as state:
            comparison = state.latest()
    except (ConfigError, sqlite3.Error):
        return ""
    newer = comparison.candidate.folder
    if comparison.decision is None:
        return f"the comparison with {newer} pauses: it needs --candidate {newer}"
    if comparison.decision is Decision.PROMOTED:
        return (
            f"{newer} was promoted in place of {folder}, which answers here all the same: serve "
            f"{newer}, or add --candidate {newer}"
        )
    return ""
