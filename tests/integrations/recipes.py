"""The recipes of ``docs/jax_libraries.md``, which the tests run as they are written there."""

import pathlib
import re

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs/jax_libraries.md"


def recipe(project):
    """The definitions of the first example under the heading `project`."""
    section = PAGE.read_text().partition(f"\n## {project}\n")[2].partition("\n## ")[0]
    namespace = {}
    exec(re.search(r"```python\n(.*?)```", section, re.DOTALL)[1], namespace)
    return namespace
