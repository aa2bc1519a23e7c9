"""The page allocator of the KV cache."""


class OutOfPagesError(RuntimeError):
    """More pages were requested than are free."""


class PageAllocator:
    """Allocates page ids 0 .. num_pages - 1, the most recently released page first.

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
        self._allocated: set[int] = set()

    @property
    def num_free(self) -> int:
        """The number of free pages."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` pages, or raise `OutOfPagesError` and allocate none."""
        if count > len(self._free):
            raise OutOfPagesError(f"{count} pages were requested, {len(self._free)} of {self.num_pages} are free")
        pages = [self._free.pop() for _ in range(count)]
        self._allocated.update(pages)
        self.total_allocated += count
        self.peak_in_use = max(self.peak_in_use, len(self._allocated))
        return pages

    def release(self, pages: list[int]) -> None:
        """Free `pages`; `ValueError` for a page that is not allocated."""
        for page in pages:
            if page not in self._allocated:
                raise ValueError(f"page {page} is released but not allocated")
            self._allocated.remove(page)
            self._free.append(page)
