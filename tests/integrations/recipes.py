"""The recipes of ``docs/jax_libraries.md``, which the tests run as they are written there, and who computes them."""

import pathlib
import re

from xla_attention.jax import _dot_product_attention

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs/jax_libraries.md"


def recipe(project):
    """The definitions of the first example under the heading `project`."""
    section = PAGE.read_text().partition(f"\n## {project}\n")[2].partition("\n## ")[0]
    namespace = {}
    exec(re.search(r"```python\n(.*?)```", section, re.DOTALL)[1], namespace)
    return namespace


def counted_calls(monkeypatch):
    """A list to which each call of dot_product_attention adds who computed it: "by_kernels" or "by_jax"."""
    calls = []

    def counted(name):
        compute = getattr(_dot_product_attention, name)

        def call(*arguments):
            results = compute(*arguments)
            calls.append(name)
            return results

        return call

    for name in ("by_kernels", "by_jax"):
        monkeypatch.setattr(_dot_product_attention, name, counted(name))
    return calls
