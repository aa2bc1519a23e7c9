"""An import hook that registers the handlers with torch_xla when it is imported.

Importing torch_xla from here would cost every user of torch 2.6 s, and changes the whole process: ``XLA_FLAGS``,
``PJRT_DEVICE``, logging, and Dynamo's dynamic shapes.
"""

import importlib.abc
import importlib.machinery
import logging
import sys
import types
from collections.abc import Sequence

from ..torch_xla import register_with_cpu_client

_LOG = logging.getLogger("xla_attention.torch")
_NAME = "torch_xla"


def register_once_imported() -> None:
    """Register the handlers with torch_xla: now if it is imported already, otherwise right after its import."""
    if _NAME in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _Finder())


def _register() -> None:
    """Register, and log an error instead of raising it: the first call on an XLA tensor raises."""
    try:
        register_with_cpu_client()
    except (ImportError, RuntimeError) as error:
        _LOG.warning("no handlers are registered with torch_xla: %s", error)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds torch_xla through the other finders, and wraps its loader."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _NAME:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self)
        return spec


class _Loader(importlib.abc.Loader):
    """Loads the module with the wrapped loader, which becomes the module's loader, and then registers the handlers."""

    def __init__(self, loader: importlib.abc.Loader, finder: _Finder) -> None:
        self._loader, self._finder = loader, finder

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        _register()
