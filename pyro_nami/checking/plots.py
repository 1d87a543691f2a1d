"""Figures of calibration, made from plain values with matplotlib (the extra ``viz``).

Figures are made without pyplot, so that no global state changes and no display is needed.
"""

from __future__ import annotations

__all__ = ["RANK_PLOTS", "RankPanel", "plot_all"]

from collections.abc import Sequence
from textwrap import fill
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pyro_nami.checking.rank_tests import JOINT_TARP, RankVerdict, count_ranks, ecdf_tests

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GOOD = "#2b6cb0"
BAD = "#c53030"
FAINT = "#94a3b8"
DARK_BAND = "#cbd5e1"
LIGHT_BAND = "#e8edf3"
STYLE: Any = {
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "figure.titlesize": 11,
    "font.size": 8,
}
RANK_PLOTS = {  # kind -> labels of x and y
    "ecdf": ("rank / draws", "ECDF - uniform"),
    "coverage": ("probability of the guide's region", "share of truths inside"),
}


class RankPanel(NamedTuple):
    """The ranks of a site, or of a joint test, and the verdict on them.

    Attributes:
        name: of the site, or of the test.
        ranks: ``(data sets, *plates, *event)``, among ``num_draws`` draws.
        verdict: on the ranks.
        level: at which one test of one element makes the verdict fail, whatever the others say.
    """

    name: str
    ranks: np.ndarray
    num_draws: int
    verdict: RankVerdict
    level: float

    def curve(self, kind: str, level: float | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Returns x, and ``(curves, x)`` the curve of the worst element, or the two bounds of a level's band."""
        num = len(self.ranks)
        tests = ecdf_tests(self.name, num, self.num_draws)
        test = tests[0 if kind == "ecdf" else -1]
        if level is None:
            index: Any = (slice(None), *self.verdict.worst)
            worst = self.ranks[index]
            sums = test.sums(count_ranks(worst.reshape(num, 1), self.num_draws))
        else:
            sums = np.stack(test.band(level))
        x = np.concatenate([[0.0], test.levels, [1.0]])
        shares = np.insert(sums, [0, sums.shape[1]], [0, num], axis=1) / num
        return x, shares - x if kind == "ecdf" else shares


def plot_all(title: str, panels: Sequence[RankPanel], kind: str) -> Figure:
    """Returns a figure of several panels, in rows of up to three, each under its own title."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        message = "Expected matplotlib for figures; got none. Run `pip install pyro-nami[viz]`."
        raise ImportError(message) from error
    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    width = 3.4 * max(columns, 2)  # inches
    with rc_context(STYLE):
        figure = Figure(figsize=(width, 3.2 * rows + 0.5), dpi=100, layout="constrained")
        figure.suptitle(fill(title, round(11 * width)))
        for i, panel in enumerate(panels):
            _draw(figure.add_subplot(rows, columns, i + 1), panel, kind)
    return figure


def _draw(axes: Axes, panel: RankPanel, kind: str) -> None:
    """Draws the worst element of a site in its bands.

    95% of calibrated curves stay inside the dark band; the verdict fails outside of the light one.
    """
    for level, color in ((panel.level, LIGHT_BAND), (0.05, DARK_BAND)):
        x, (low, high) = panel.curve(kind, level)
        axes.fill_between(x, low, high, color=color, lw=0)
    axes.plot([0, 1], [0, kind == "coverage"], color=FAINT, lw=0.8)
    x, (y,) = panel.curve(kind)
    color = GOOD if panel.verdict.passed else BAD
    axes.plot(x, y, color=color, lw=1.0)
    x_label, y_label = RANK_PLOTS[kind]
    axes.set(xlim=(0, 1), xlabel=x_label, ylabel=y_label)
    axes.set_title(f"{panel.name}: {panel.verdict.verdict}", color=color)
    if kind == "coverage":
        axes.set(ylim=(0, 1), aspect="equal")
        if panel.name != JOINT_TARP:
            axes.text(0.96, 0.04, "below: overconfident", color=FAINT, ha="right")
