"""What the site's build does with pages that run code."""

import gc
from typing import Any
from weakref import WeakSet

import jax
from matplotlib.figure import Figure
from sphinx_gallery.scrapers import figure_rst


def forget_programs(*_: Any) -> None:
    """Forget what a page has compiled, which would otherwise take gigabytes by the last one."""
    jax.clear_caches()
    gc.collect()


def own_figures(_: Any, variables: dict[str, Any], config: dict[str, Any]) -> str:
    """Show a ``figure`` that is none of pyplot's, such as that of a fit, where it is made.

    This comes before pyplot's are shown and closed: they cannot be told afterwards.
    """
    figure = variables["example_globals"].get("figure")
    if not isinstance(figure, Figure) or figure in _seen:
        return ""
    _seen.add(figure)
    if figure.canvas.manager is not None:
        return ""
    path = next(variables["image_path_iterator"])
    figure.savefig(path)
    return figure_rst([path], config["src_dir"])


_seen: WeakSet[Figure] = WeakSet()
