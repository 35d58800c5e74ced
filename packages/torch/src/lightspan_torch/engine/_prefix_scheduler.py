"""Scheduler that delays a request while its prefix is computed for another. Private to `_batcher`.

transformers shares complete blocks of keys and values only. The rollouts of a group arrive
together, before any block of their prompt is complete, so each would compute the prompt. Here the
first request starts, and the others wait one forward pass for its blocks.

A block's key is a hash of its tokens and all tokens before them, so only equal prefixes are shared.
`Batcher.interrupt` empties the cache, so that no block is shared across versions of the weights.
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
    """A first-come, first-served scheduler that computes no block for two requests at once.

    A block is a fixed number of tokens whose keys and values requests with the same prefix share.
    """

    def __init__(self, cache: PagedAttentionCache, *arguments: Any, **options: Any) -> None:
        super().__init__(cache, *arguments, **options)
        # transformers skips blocks completed by a request's last token: all of them if the answer
        # has one token
        cache.mark_complete_blocks = partial(_keep_complete_blocks, cache)  # type: ignore[method-assign]

    def reset(self) -> None:
        """Remove all requests."""
        super().reset()
        self._hashes: dict[str, list[int]] = {}
        """Id of a request whose prompt is not computed yet → hashes of its prompt's blocks."""

    def _get_waiting_candidates(self) -> list[RequestState]:
        """Return the waiting requests that may start now, in their order of arrival."""
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
        """Yield the waiting requests that need not wait for a block that is being computed.

        A request waits if another request computes the first block of its prompt that the cache
        lacks.

        Args:
            candidates: waiting requests.
            under_way: hashes of the blocks that are being computed. The missing blocks of each
                yielded request are added.
        """
        for state in candidates:
            # an offloaded request returns with its own blocks
            missing = [] if state.is_cpu_offloaded else self._missing(state)
            if missing and missing[0] in under_way:
                continue
            under_way.update(missing)
            yield state

    def _missing(self, state: RequestState) -> list[int]:
        """Return the hashes of the prompt's blocks that are not in the cache.

        They begin with the first block that the cache lacks, and include all later ones.
        """
        (allocator,) = self.cache.cache_allocators.values()  # sharing requires a single one
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
    """Allow later requests to share the blocks that the last forward pass completed.

    This includes the blocks of a request that just ended.
    """
    if not cache.use_prefix_sharing:
        return
    tokens = state.initial_tokens + state.generated_tokens
    for name, count in complete_blocks.items():
        cache.cache_allocators[name].mark_complete_blocks(state.request_id, tokens, count)


def _block_hashes(prompt: list[int], block: int) -> list[int]:
    """Return the hashes of the complete blocks in a prompt.

    A block with the prompt's last token is left out, because that token is always computed.

    Args:
        prompt: token ids of the prompt.
        block: number of tokens in a block.
    """
    hashes: list[int] = []
    parent: Any = None
    for start in range(0, (len(prompt) - 1) // block * block, block):
        parent = compute_block_hash(parent, prompt[start : start + block])
        hashes.append(parent)
    return hashes
