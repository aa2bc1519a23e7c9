"""Paged attention and variable-length flash attention for XLA programs on CUDA and CPU.

The operators live in one module per framework: ``xla_attention.jax``, ``xla_attention.torch``. Importing this package
alone loads neither a framework nor CUDA.
"""

from ._info import info
from ._library import VERSION as __version__
from ._library import include_dir, library_path

__all__ = ["__version__", "include_dir", "info", "library_path"]
