"""The documentation's site: ``make docs`` builds it, and a warning is an error."""

import importlib.metadata
import os
import sys
import warnings
from pathlib import Path

# Figures are drawn to files, and progress bars have nobody to show themselves to.
os.environ.setdefault("MPLBACKEND", "agg")
# Warnings are shown in pages, where nobody wants to know the file and line on this machine.
warnings.formatwarning = lambda message, category, *_, **__: f"{category.__name__}: {message}\n"

sys.path.insert(0, str(Path(__file__).parent))

project = "rvrs"
author = "The rvrs developers"
copyright = author  # noqa: A001 - Sphinx's name
release = version = importlib.metadata.version("rvrs")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
    # Formulas without a network: a copy of MathJax comes with the site.
    "sphinx-mathjax-offline",
]
# Sources of pages that run code; what is made of them is in guide/ and examples/.
exclude_patterns = ["_build", "method", "tutorials", "guide/index.rst"]
# A reference to what does not exist is an error, unless it belongs to another library.
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(?!rvrs).*")]

# Markdown.
myst_enable_extensions = ["amsmath", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

# Docstrings.
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_inherit_docstrings = False
napoleon_google_docstring = False
napoleon_use_rtype = False
napoleon_attr_annotations = False

# Pages that run code: what they print and draw is made when the site is built.
sphinx_gallery_conf = {
    "examples_dirs": ["method", "tutorials"],
    "gallery_dirs": ["guide", "examples"],
    "filename_pattern": r"\.py$",
    "ignore_pattern": r"(^|/)_",
    "within_subsection_order": "FileNameSortKey",
    "abort_on_example_error": True,
    "remove_config_comments": True,
    # Pages print what they want to show.
    "capture_repr": (),
    "download_all_examples": False,
    "show_memory": False,
    "show_signature": False,
    "write_computation_times": False,
    "reset_modules": ("building.forget_programs",),
    "image_scrapers": ("building.own_figures", "matplotlib"),
}

# The look.
html_theme = "furo"
html_title = "rvrs"
html_static_path = ["_static"]
html_css_files = ["rvrs.css"]
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True


def setup(app):
    """No page of sources for Python's own module, which has none to show."""
    app.connect(
        "viewcode-find-source", lambda _, module: ("", {}) if module == "builtins" else None
    )
