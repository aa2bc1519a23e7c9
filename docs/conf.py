"""Sphinx configuration of the documentation (`make docs`)."""

import datetime
import importlib.metadata
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

project = "xla-attention"
author = "the xla-attention developers"
version = release = importlib.metadata.version("xla-attention")
copyright = f"{datetime.date.today():%Y}, {author}"

extensions = ["myst_parser", "numpydoc", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
exclude_patterns = ["README.md"]

html_theme = "furo"
html_title = f"xla-attention {version}"
html_static_path = []

# Every name in backquotes in a docstring that names nothing is a warning, and `make docs` treats warnings as errors.
nitpicky = False
autodoc_typehints = "none"  # the docstrings have the types with their shapes
autodoc_default_options = {"members": True, "imported-members": True}
numpydoc_class_members_toctree = False
numpydoc_show_class_members = False
