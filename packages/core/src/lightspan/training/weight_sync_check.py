"""Whether an engine answers with the weights that the learner has."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from lightspan.errors import EngineError
from lightspan.lightning.rows import Response, Row
from lightspan.protocols.engine import Probe
from lightspan.protocols.learner import Learner


def check_probes(probes: Sequence[Probe], policy: str, version: int, learner: Learner) -> None:
    """Compare what an engine sampled after an update with what the learner says of the same tokens.

    Weights travel to another process, in another float type, into another program's layers: an
    error there shows in nothing but what is learned. So it ends the run.

    Raises:
        EngineError: the log-probabilities of something that answers are others, or it has another
            version, or answers with no tokens, which say nothing.
    """
    for probe in probes:
        if not probe.ids:
            raise EngineError(
                f"{probe.where} answered a prompt of {len(probe.prompt_ids)} tokens with none "
                f"after the update of policy {policy} to version {version}: so it cannot be told "
                "whether it has the learner's weights. Nothing more is trained. The last "
                "checkpoint is whole"
            )
    rows = [_row(probe, policy) for probe in probes]
    expected = learner.score(rows)
    gaps: dict[str, list[float]] = defaultdict(list)
    tolerances = {probe.where: probe.tolerance for probe in probes}
    for probe, scores in zip(probes, expected, strict=True):
        if probe.version != version:
            raise EngineError(
                f"{probe.where} answers with version {probe.version} after the update to {version}"
            )
        learned = scores[len(probe.prompt_ids) :]
        gaps[probe.where] += [abs(a - b) for a, b in zip(probe.logprobs, learned, strict=True)]
    for where, found in gaps.items():
        gap = sum(found) / max(1, len(found))
        if not gap <= tolerances[where]:
            raise EngineError(
                f"{where} does not answer with version {version} of policy {policy} as the learner "
                f"has it: the log-probabilities of {len(found)} sampled tokens differ by {gap:.3g} "
                f"on average, and at most {tolerances[where]:g} is rounding. Nothing more is "
                "trained: what it sampled would be trained as what it is not. The last checkpoint "
                "is whole"
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
    )
