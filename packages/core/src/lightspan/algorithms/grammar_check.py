"""Grammar check: reject calls that the learner cannot compute under their grammar."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from lightspan.algorithms.protocol import TrainerContext
from lightspan.lightning.selection import Coverage, Rejection
from lightspan.lightning.transitions import TransitionKey, reject_calls


async def reject_mismatches(trainer: TrainerContext, covered: Sequence[Coverage]) -> list[Coverage]:
    """Reject trained calls whose tokens violate their grammar.

    A grammar limits the tokens that may be sampled in a call. The engine and the learner each
    compile it. If the results differ, the learner may regard a sampled token as impossible, and
    cannot train the call. The reasons are recorded, and a note is printed.

    Args:
        trainer: the running trainer.
        covered: status of the calls (trained, frozen or rejected) of each episode.

    Returns:
        The elements of `covered` in the same order, with these calls rejected.
    """
    records = [
        call.record
        for coverage in covered
        for call in coverage.trained
        if call.record is not None and call.record.constrained
    ]
    mismatches: dict[TransitionKey, str] = {}
    if records:
        mismatches = await trainer.learn(partial(trainer.learner.grammar_mismatches, records))
    if not mismatches:
        return list(covered)
    trainer.record_mismatches(mismatches)
    (attempt_id, call_id, _), reason = next(iter(mismatches.items()))
    trainer.note(
        f"{len(mismatches)} of {len(records)} calls under a grammar are not trained: "
        f"{Rejection.GRAMMAR_MISMATCH.text} (call {call_id} of attempt {attempt_id}: {reason})"
    )
    return reject_calls(covered, mismatches.keys(), Rejection.GRAMMAR_MISMATCH)
