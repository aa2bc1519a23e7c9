"""The pages of the key/value cache: which are free, which are lent."""


class OutOfPagesError(RuntimeError):
    """More pages were asked for than are free."""


class PageAllocator:
    """Lends page ids 0 .. num_pages - 1. The page given back last is lent first, so that reuse happens early.

    Attributes
    ----------
        num_pages: size of the pool.
        total_lent: how many times a page was lent since the start.
        peak_in_use: the most pages that were lent at one time.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages is {num_pages}, expected at least 1")
        self.num_pages = num_pages
        self.total_lent = 0
        self.peak_in_use = 0
        self._free = list(reversed(range(num_pages)))
        self._lent: set[int] = set()

    @property
    def num_free(self) -> int:
        """How many pages can be lent."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Lend `count` pages, or none at all and `OutOfPagesError`."""
        if count > len(self._free):
            raise OutOfPagesError(f"{count} pages were asked for, {len(self._free)} of {self.num_pages} are free")
        pages = [self._free.pop() for _ in range(count)]
        self._lent.update(pages)
        self.total_lent += count
        self.peak_in_use = max(self.peak_in_use, len(self._lent))
        return pages

    def release(self, pages: list[int]) -> None:
        """Take `pages` back. A page that is not lent is an error of the caller (`ValueError`)."""
        for page in pages:
            if page not in self._lent:
                raise ValueError(f"page {page} is given back but not lent")
            self._lent.remove(page)
            self._free.append(page)
