"""The page allocator of the KV cache, which keeps the contents of free pages for prompts that begin alike."""

import hashlib
from collections import OrderedDict

import numpy as np


class OutOfPagesError(RuntimeError):
    """More pages were requested than are free."""


def page_key(previous: bytes, tokens: list[int]) -> bytes:
    """The key of a full page: a hash of its tokens and, by the key of the page before it, of all tokens before them."""
    return hashlib.sha256(previous + np.asarray(tokens, np.int32).tobytes()).digest()


class PageAllocator:
    """Allocates page ids 0 .. num_pages - 1, the most recently released page first.

    A page that was registered under a key keeps its contents when it is released: `acquire` takes it again, until
    `allocate` needs it because no other page is free; the one that was released first goes first.

    Attributes
    ----------
        num_pages: size of the pool.
        total_allocated: number of allocations of a page so far.
        peak_in_use: the largest number of pages in use at one time.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages is {num_pages}, expected at least 1")
        self.num_pages = num_pages
        self.total_allocated = 0
        self.peak_in_use = 0
        self._free = list(reversed(range(num_pages)))
        self._users = [0] * num_pages
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._kept: OrderedDict[int, None] = OrderedDict()  # free pages with a key, first released first

    @property
    def num_free(self) -> int:
        """The number of pages without a user."""
        return len(self._free) + len(self._kept)

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` pages, or raise `OutOfPagesError` and allocate none."""
        if count > self.num_free:
            raise OutOfPagesError(f"{count} pages were requested, {self.num_free} of {self.num_pages} are free")
        pages = [self._free.pop() if self._free else self._forget_oldest() for _ in range(count)]
        for page in pages:
            self._users[page] = 1
        self.total_allocated += count
        self._note_use()
        return pages

    def release(self, pages: list[int]) -> None:
        """Give up one use of each of `pages`; `ValueError` for a page that is not allocated."""
        # The last page first: later pages of a prompt are of no use without the earlier ones.
        for page in reversed(pages):
            if not self._users[page]:
                raise ValueError(f"page {page} is released but not allocated")
            self._users[page] -= 1
            if self._users[page]:
                continue
            if page in self._key_of:
                self._kept[page] = None
            else:
                self._free.append(page)

    def register(self, page: int, key: bytes) -> None:
        """Let `acquire` find a page whose contents are final; the first page of a key stays."""
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def find(self, keys: list[bytes]) -> list[int]:
        """The pages of the longest run of leading `keys` that are registered."""
        pages = []
        for key in keys:
            if (page := self._page_of.get(key)) is None:
                break
            pages.append(page)
        return pages

    def num_unused(self, pages: list[int]) -> int:
        """How many of `pages` have no user, so that acquiring them takes them from the free ones."""
        return sum(not self._users[page] for page in pages)

    def acquire(self, pages: list[int]) -> None:
        """Use registered pages once more each."""
        for page in pages:
            self._kept.pop(page, None)
            self._users[page] += 1
        self._note_use()

    def _note_use(self) -> None:
        self.peak_in_use = max(self.peak_in_use, self.num_pages - self.num_free)

    def _forget_oldest(self) -> int:
        page, _ = self._kept.popitem(last=False)
        del self._page_of[self._key_of.pop(page)]
        return page
