"""Key-value cache in pages: memory for keys and values, and which pages hold which tokens.

A page whose tokens are all computed is indexed by its tokens and the page before it. The index
compares tokens, not hashes, so two different prefixes never share a page.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_Key: TypeAlias = tuple[int, tuple[int, ...]]
"""Content number of the page before, and the tokens of the page."""


class PageTable:
    """The pages of one request, and the place of each of its tokens in the cache (slot)."""

    def __init__(self) -> None:
        self.slots: NDArray[np.int64] = np.empty(0, np.int64)
        """Cache slots of the tokens; longer than the pages hold, so that it rarely grows."""
        self.clear()

    def clear(self) -> None:
        """Forget all pages. The caller must have freed them in the cache."""
        self.pages: list[int] = []
        self.computed = 0
        """Number of tokens whose keys and values are in the cache."""
        self.indexed = 0
        """Number of leading pages that are in the index, under their own or an equal page."""
        self.content = 0
        """Content number of the last indexed page; 0 without one."""

    def append(self, pages: Sequence[int], page_size: int) -> None:
        start, count = len(self.pages) * page_size, len(pages) * page_size
        if start + count > len(self.slots):
            self.slots = np.resize(self.slots, 2 * (start + count))
        starts = np.array(pages, np.int64)[:, None] * page_size
        self.slots[start : start + count] = (starts + np.arange(page_size)).ravel()
        self.pages += pages


class Pages:
    """The key-value cache of one policy.

    Pages that no request uses stay in the index until their memory is needed; the least recently
    used page is evicted first.

    Args:
        tokens: size of the cache, in tokens.
        page_size: number of tokens of a page.
    """

    def __init__(self, tokens: int, page_size: int) -> None:
        self.page_size = page_size
        self.count = max(1, tokens // page_size)
        self._tensors: dict[int, tuple[Tensor, Tensor]] = {}
        self.clear()

    def clear(self) -> None:
        """Empty the cache and its index, without freeing the tensors."""
        self._users: list[int] = []  # of each page that was ever used, like the next two lists
        self._keys: list[_Key | None] = []
        self._contents: list[int] = []
        self._free: list[int] = []
        self._index: dict[_Key, int] = {}
        self._last_content = 0
        self._unused: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Number of pages that no request uses."""
        return self.count - len(self._users) + len(self._free) + len(self._unused)

    def is_shared(self, page: int) -> bool:
        """Return whether several requests use a page."""
        return self._users[page] > 1

    def store(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store the keys and values of new tokens; return all keys and values of the layer.

        Memory is allocated at the first call for a layer. On a CPU, memory is in use only once a
        page is written.

        Args:
            layer: index of the layer.
            slots: [T] places of the new tokens in the cache.
            key: [1, key heads, T, size].
            value: [1, key heads, T, value size].

        Returns:
            The keys, [slots, key heads, size], and the values, [slots, key heads, value size].
        """
        if layer not in self._tensors:
            rows = self.count * self.page_size
            self._tensors[layer] = (
                key.new_empty(rows, key.shape[1], key.shape[3]),
                value.new_empty(rows, value.shape[1], value.shape[3]),
            )
        keys, values = self._tensors[layer]
        keys.index_copy_(0, slots, key[0].transpose(0, 1))
        values.index_copy_(0, slots, value[0].transpose(0, 1))
        return keys, values

    def reserve(self, table: PageTable, tokens: int) -> None:
        """Append pages to `table` until it has room for `tokens` tokens.

        The caller must have checked that enough pages are available.
        """
        missing = self.pages_of(tokens) - len(table.pages)
        if missing > 0:
            table.append([self._allocate() for _ in range(missing)], self.page_size)

    def pages_of(self, tokens: int) -> int:
        """Return the number of pages that `tokens` tokens need."""
        return -(-tokens // self.page_size)

    def _allocate(self) -> int:
        if self._free:
            page = self._free.pop()
        elif len(self._users) < self.count:
            page = len(self._users)
            self._users.append(0)
            self._keys.append(None)
            self._contents.append(0)
        else:
            page, _ = self._unused.popitem(last=False)
            key = self._keys[page]
            assert key is not None
            del self._index[key]
            self._keys[page] = None
        self._users[page] = 1
        return page

    def free(self, table: PageTable) -> None:
        """Give back the pages of a request.

        Pages that no other request uses may then be evicted, beginning with the last page.
        """
        for page in reversed(table.pages):
            self._users[page] -= 1
            if self._users[page]:
                continue
            if self._keys[page] is None:
                self._free.append(page)
            else:
                self._unused[page] = None
        table.clear()

    def find(self, ids: Sequence[int]) -> list[int]:
        """Return the indexed pages that hold the first tokens of `ids`.

        The last token of `ids` is never included, because computing it gives the next token's
        logits.
        """
        pages: list[int] = []
        content, size = 0, self.page_size
        for start in range(0, (len(ids) - 1) // size * size, size):
            page = self._index.get((content, tuple(ids[start : start + size])))
            if page is None:
                break
            pages.append(page)
            content = self._contents[page]
        return pages

    def share(self, table: PageTable, pages: Sequence[int]) -> None:
        """Let a request without pages begin with `pages`, which are in the index."""
        for page in pages:
            self._unused.pop(page, None)
            self._users[page] += 1
        table.append(pages, self.page_size)
        table.computed, table.indexed = len(pages) * self.page_size, len(pages)
        table.content = self._contents[pages[-1]] if pages else 0

    def index(self, table: PageTable, ids: Sequence[int]) -> None:
        """Add a request's pages to the index, if all their tokens are computed.

        Args:
            table: the pages of the request.
            ids: the tokens of the request.
        """
        while (table.indexed + 1) * self.page_size <= table.computed:
            page, start = table.pages[table.indexed], table.indexed * self.page_size
            key = (table.content, tuple(ids[start : start + self.page_size]))
            equal = self._index.get(key)
            if equal is None:
                equal = self._index[key] = page
                self._keys[page] = key
                self._last_content += 1
                self._contents[page] = self._last_content
            table.content = self._contents[equal]
            table.indexed += 1


def to_device(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """Return an array as a tensor on `device`."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)
