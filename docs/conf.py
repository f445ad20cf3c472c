"""The documentation's site: ``make docs`` builds it, warnings are errors."""

import importlib.metadata
import inspect
import os
import sys
from pathlib import Path

# Figures are drawn to files, and progress bars have nobody to show themselves to.
os.environ.setdefault("MPLBACKEND", "agg")

HERE = Path(__file__).parent
SOURCES = "https://github.com/rvrs-dev/rvrs/blob/main"

project = "rvrs"
author = "The rvrs developers"
copyright = "The rvrs developers"
release = importlib.metadata.version("rvrs")
version = release

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "myst_parser",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
    # Formulas without a network: a copy of MathJax comes with the site.
    "sphinx-mathjax-offline",
]
exclude_patterns = ["_build", "**/GALLERY_HEADER.rst", "method/*.py", "tutorials/*.py"]
nitpicky = True
templates_path = ["_templates"]

# Markdown.
myst_enable_extensions = ["amsmath", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

# Docstrings.
autodoc_member_order = "bysource"
autodoc_typehints = "none"
napoleon_numpy_docstring = True
napoleon_google_docstring = False
napoleon_use_rtype = False

# Pages that run code. What they print and draw is made when the site is built.
sphinx_gallery_conf = {
    "examples_dirs": ["method", "tutorials"],
    "gallery_dirs": ["generated/method", "generated/tutorials"],
    "filename_pattern": r"\.py$",
    "within_subsection_order": "FileNameSortKey",
    "abort_on_example_error": True,
    "image_scrapers": ("matplotlib",),
    "remove_config_comments": True,
    "show_memory": False,
    "show_signature": False,
    "download_all_examples": False,
    "min_reported_time": 0,
    "matplotlib_animations": False,
}

# The look.
html_theme = "furo"
html_title = "rvrs"
html_static_path = ["_static"]
html_css_files = ["rvrs.css"]
html_theme_options = {
    "source_repository": "https://github.com/rvrs-dev/rvrs/",
    "source_branch": "main",
    "source_directory": "docs/",
}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
