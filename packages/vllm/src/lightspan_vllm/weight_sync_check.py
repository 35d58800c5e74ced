"""Check that servers have the learner's weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import msgspec

from lightspan.errors import EngineError
from lightspan.lightning.rows import Response, Row
from lightspan.protocols.engine import Score
from lightspan.schema.images import PromptImage


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """A server's answer to a prompt, sampled at temperature 1.

    Its log-probabilities are compared with the learner's, to check the server's weights.
    """

    where: str
    """Name of the server, for messages."""
    version: int
    prompt_ids: list[int]
    images: tuple[PromptImage, ...] = ()
    """The images of the prompt."""
    ids: list[int]
    logprobs: list[float]
    tolerance: float
    """Maximum mean difference between the log-probabilities of server and learner; it depends on
    the float type.
    """


async def check_probes(probes: Sequence[Probe], policy: str, version: int, score: Score) -> None:
    """Check that the engine computes the same log-probabilities as the learner.

    It is called after new weights were published, which means that the engine has loaded them.

    Weights are copied to another process, converted to another float type and loaded into another
    program's layers. Without the check, a wrong copy would be noticed only by a worse result of the
    training.

    Args:
        probes: answers sampled by each server of the engine.
        policy: name of the policy.
        version: published version.
        score: returns the learner's log-probabilities, with the published weights.

    Raises:
        EngineError: log-probabilities or versions differ, or an answer has no tokens.
    """
    for probe in probes:
        if not probe.ids:
            raise EngineError(
                f"weight sync unchecked: {probe.where} answered a prompt of "
                f"{len(probe.prompt_ids)} tokens with no tokens after the update of policy "
                f"{policy} to version {version}, so its weights cannot be compared with the "
                "learner's. Training stopped; the last checkpoint is intact"
            )
    expected = await score([_row(probe, policy) for probe in probes])
    gaps: dict[str, list[float]] = defaultdict(list)
    tolerances = {probe.where: probe.tolerance for probe in probes}
    for probe, scores in zip(probes, expected, strict=True):
        if probe.version != version:
            raise EngineError(
                f"{probe.where} answers with version {probe.version} after the update to {version}"
            )
        learned = scores[len(probe.prompt_ids) :]
        gaps[probe.where] += [abs(a - b) for a, b in zip(probe.logprobs, learned, strict=True)]
    for where, differences in gaps.items():
        gap = sum(differences) / max(1, len(differences))
        if not gap <= tolerances[where]:
            raise EngineError(
                f"weight sync failed: {where} reports version {version} of policy {policy}, but "
                f"the log-probabilities of {len(differences)} sampled tokens differ from the "
                f"learner's by {gap:.3g} per token (tolerance {tolerances[where]:g}). Training "
                "stopped; the last checkpoint is intact"
            )


def _row(probe: Probe, policy: str) -> Row:
    prompt, answer = len(probe.prompt_ids), len(probe.ids)
    size = prompt + answer
    return Row(
        rollout_id="probe",
        policy=policy,
        ids=[*probe.prompt_ids, *probe.ids],
        mask=[False] * prompt + [True] * answer,
        advantages=[0.0] * size,
        weights=[0.0] * size,
        logprobs=[0.0] * prompt + list(probe.logprobs),
        versions=[0] * prompt + [probe.version] * answer,
        temperatures=[1.0] * size,
        responses=(Response(prompt, answer),),
        images=probe.images,
    )
