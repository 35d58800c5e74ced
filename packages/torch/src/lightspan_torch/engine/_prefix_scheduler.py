"""Which requests wait while another one computes the prefix that they share. Private to `_batcher`.

transformers finds what a prompt shares with blocks of keys and values that are complete. The
rollouts of a group arrive together, when no block of their prompt is: each would compute it. Here
one of them begins, and the others wait for its blocks, which takes one forward pass.

A block is found by a hash of its tokens and all before them, so what is shared is a prefix of equal
tokens. Nobody may share across versions of the weights: `Batcher.interrupt` empties the cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.cache_allocators.cache_allocator import (
    compute_block_hash,
)
from transformers.generation.continuous_batching.requests import RequestState, RequestStatus
from transformers.generation.continuous_batching.scheduler import FIFOScheduler


class PrefixScheduler(FIFOScheduler):
    """First in, first out; but no block is computed twice at the same time."""

    def __init__(self, cache: PagedAttentionCache, *arguments: Any, **options: Any) -> None:
        super().__init__(cache, *arguments, **options)
        # it leaves out what a request completes with its last token: all, if the answer has but one
        cache.mark_complete_blocks = partial(_keep_complete_blocks, cache)  # type: ignore[method-assign]

    def reset(self) -> None:
        """Forget all requests."""
        super().reset()
        self._hashes: dict[str, list[int]] = {}
        """By the id of a request whose prompt is not yet computed."""

    def _get_waiting_candidates(self) -> list[RequestState]:
        """The waiting requests that may begin now, in order."""
        candidates = super()._get_waiting_candidates()
        if not self.cache.use_prefix_sharing:
            return candidates
        prefilling = (
            state
            for state in self.active_requests.values()
            if state.status == RequestStatus.PREFILLING
        )
        under_way = {block for state in prefilling for block in self._missing(state)}
        return list(self._unshared(candidates, under_way))

    def _unshared(
        self, candidates: Iterable[RequestState], under_way: set[int]
    ) -> Iterable[RequestState]:
        """Those whose next block nobody computes; theirs are added to `under_way`."""
        for state in candidates:
            # what was moved out of a full cache comes back with its own blocks
            missing = [] if state.is_cpu_offloaded else self._missing(state)
            if missing and missing[0] in under_way:
                continue
            under_way.update(missing)
            yield state

    def _missing(self, state: RequestState) -> list[int]:
        """Hashes of the blocks of a prompt that are not in the cache, in order."""
        (allocator,) = self.cache.cache_allocators.values()  # nothing is shared with several kinds
        hashes = self._hashes.get(state.request_id)
        if hashes is None:
            hashes = _block_hashes(state.initial_tokens, allocator.tokens_per_page)
            self._hashes[state.request_id] = hashes
        known = allocator.ledger.hash_to_block
        for place, block in enumerate(hashes):
            if block not in known:
                return hashes[place:]
        return []

    def _cleanup_waiting_queue(self, request_ids_to_remove_from_waiting: set[str]) -> None:
        super()._cleanup_waiting_queue(request_ids_to_remove_from_waiting)
        if self._hashes:
            active = self.active_requests
            self._hashes = {
                key: hashes
                for key, hashes in self._hashes.items()
                if key in self.waiting_requests
                or (key in active and active[key].status == RequestStatus.PREFILLING)
            }


def _keep_complete_blocks(
    cache: PagedAttentionCache, state: RequestState, complete_blocks: Mapping[str, int]
) -> None:
    """Let others share what the last forward pass has completed; the request may have ended."""
    if not cache.use_prefix_sharing:
        return
    tokens = state.initial_tokens + state.generated_tokens
    for name, count in complete_blocks.items():
        cache.cache_allocators[name].mark_complete_blocks(state.request_id, tokens, count)


def _block_hashes(prompt: list[int], block: int) -> list[int]:
    """Of each whole block but one that holds the last token, which is always computed."""
    hashes: list[int] = []
    parent: Any = None
    for start in range(0, (len(prompt) - 1) // block * block, block):
        parent = compute_block_hash(parent, prompt[start : start + block])
        hashes.append(parent)
    return hashes
