"""A figure of marginals and pairs, with matplotlib (the extra ``viz``), made without pyplot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw_pairs"]

COLOR = "#2b6cb0"


def draw_pairs(numbers: Mapping[str, np.ndarray], title: str, *, side: float = 1.8) -> Figure:
    """Returns a figure of histograms on the diagonal, and of clouds below it.

    Args:
        numbers: name -> draws.
        title: of the figure.
        side: of a panel, in inches.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        message = "Expected matplotlib for figures; got none. Run `pip install pyro-nami[viz]`."
        raise ImportError(message) from error
    count, names = len(numbers), list(numbers)
    figure = Figure(figsize=(side * count + 1, side * count + 1), layout="constrained")
    axes = figure.subplots(count, count, squeeze=False)
    for i, j in np.ndindex(count, count):
        panel, across, up = axes[i, j], numbers[names[j]], numbers[names[i]]
        panel.tick_params(labelsize=7)
        panel.spines[["top", "right"]].set_visible(False)
        if i == j:
            panel.hist(across, bins="auto", color=COLOR, density=True)
            panel.set_yticks([])
        elif i > j:
            panel.scatter(across, up, s=3, alpha=0.1, color=COLOR, linewidths=0)
            panel.set_xlim(axes[j, j].get_xlim())
        else:
            panel.set_visible(False)
        if i == count - 1:
            panel.set_xlabel(names[j], fontsize=8)
        if j == 0 and i > 0:
            panel.set_ylabel(names[i], fontsize=8)
    figure.suptitle(title, fontsize=9, wrap=True)
    return figure
