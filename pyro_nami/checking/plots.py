"""Figures of calibration and diagnosis, made from plain values with matplotlib (the extra ``viz``).

Figures are made without pyplot, so that no global state changes and no display is needed.
"""

from __future__ import annotations

__all__ = ["RankPanel", "draw_histogram", "draw_losses", "draw_worst", "plot_all", "plot_ranks"]

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from textwrap import fill
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pyro_nami.checking.rank_tests import (
    JOINT_TARP,
    Verdict,
    count_ranks,
    ecdf_tests,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GOOD = "#2b6cb0"
BAD = "#c53030"
INK = "#333333"
FAINT = "#94a3b8"
DARK_BAND = "#cbd5e1"
LIGHT_BAND = "#e8edf3"
STYLE: Any = {
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.labelsize": 8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "figure.labelsize": 8.5,
    "figure.titlesize": 11,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "text.color": INK,
    "xtick.color": FAINT,
    "xtick.labelcolor": INK,
    "xtick.labelsize": 7.5,
    "ytick.color": FAINT,
    "ytick.labelcolor": INK,
    "ytick.labelsize": 7.5,
}
NOTE = (
    "Thin lines: elements of a site; thick: the one with the smallest p. Dark band: 95% of calibrated curves stay "
    "inside. Light band: outside of it the verdict fails."
)
MAX_PANELS = 12  # sites in a figure, unless the caller names them; more are too small to read

KINDS = {  # title, label of x, label of y
    "ecdf": ("Distribution of ranks", "rank / draws", "ECDF - uniform"),
    "coverage": (
        "Expected coverage",
        "probability of the guide's region",
        "share of truths inside",
    ),
}


class RankPanel(NamedTuple):
    """What figures show of a site, or of a joint test.

    Attributes:
        name: of the site, or of the test.
        ranks: ``(data sets, *plates, *event)``, among ``num_draws`` draws.
        verdict: on the ranks.
        level: at which one test of one element makes the verdict fail, whatever the others say.
    """

    name: str
    ranks: np.ndarray
    num_draws: int
    verdict: Verdict
    level: float

    @property
    def color(self) -> str:
        return GOOD if self.verdict.passed else BAD

    def counts(self, elements: int) -> np.ndarray:
        """Returns counts ``(elements, ranks)`` of some elements, evenly spaced, and last of the worst one."""
        worst = np.arange(self.verdict.elements).reshape(self.ranks.shape[1:])[self.verdict.worst]
        shown = np.linspace(0, self.verdict.elements - 1, min(elements, self.verdict.elements))
        shown = np.append(np.setdiff1d(shown.astype(int), worst), worst)
        return count_ranks(self.ranks.reshape(len(self.ranks), -1)[:, shown], self.num_draws)


def plot_ranks(panels: Mapping[str, RankPanel], kind: str, sites: Sequence[str] | None) -> Figure:
    """Returns a figure of the ranks of sites and joint tests; see `Calibration.plot`."""
    if kind not in KINDS:
        raise ValueError(f"Expected kind to be one of {', '.join(KINDS)}; got {kind!r}.")
    for name in sites or ():
        if name not in panels:
            raise ValueError(
                f"Expected sites with ranks, {', '.join(map(repr, panels))}; got '{name}'."
            )
    title, x_label, y_label = KINDS[kind]
    if sites is None:
        least = sorted(panels, key=lambda name: panels[name].verdict.p_value)[:MAX_PANELS]
        sites = [name for name in panels if name in least]
        if len(sites) < len(panels):
            title += f", {len(sites)} of {len(panels)} sites, those with the smallest p"
    shown = [panels[name] for name in sites]
    title += f": {len(shown[0].ranks):,} data sets, {shown[0].num_draws:,} draws each"
    with _figure(len(shown), title, f"{x_label}\n{NOTE}") as (figure, all_axes):
        figure.supylabel(y_label)
        for axes, panel in zip(all_axes, shown):
            _draw_panel(axes, panel, kind)
    return figure


def plot_all(title: str, parts: Mapping[str, Callable[[Axes], None]]) -> Figure:
    """Returns a figure of several drawings, each under its own title."""
    with _figure(len(parts), title) as (figure, all_axes):
        for axes, (name, draw) in zip(all_axes, parts.items()):
            draw(axes)
            axes.set_title(name)
    return figure


@contextmanager
def _figure(count: int, title: str, note: str = "") -> Iterator[tuple[Figure, list[Axes]]]:
    """Has a figure of ``count`` panels, in rows of up to three, drawn on in this module's style."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        message = "Expected matplotlib for figures; got none. Run `pip install pyro-nami[viz]`."
        raise ImportError(message) from error
    columns = min(count, 3)
    rows = -(-count // columns)
    width = 3.4 * max(columns, 2)  # inches
    line = round(11 * width)  # characters that are as wide
    with rc_context(STYLE):
        figure = Figure(figsize=(width, 3.2 * rows + 0.8), dpi=100, layout="constrained")
        figure.suptitle(fill(title, line))
        if note:
            figure.supxlabel("\n".join(fill(part, line) for part in note.split("\n")))
        yield figure, [figure.add_subplot(rows, columns, i + 1) for i in range(count)]


# ---- ranks


def draw_worst(axes: Axes, panels: Sequence[RankPanel], kind: str) -> None:
    """Draws the worst element of every site, those that failed on top, in the widest of their bands."""
    panels = sorted(panels, key=lambda panel: -panel.verdict.p_value)
    _draw_bands(axes, min(panels, key=lambda panel: panel.level), kind)
    for panel in panels:
        x, (y,) = _curves(panel, kind, panel.counts(0))
        axes.plot(x, y, color=panel.color, lw=0.9, alpha=0.8)
    for color, word in ((GOOD, "calibrated"), (BAD, "failed")):
        names = [panel.name for panel in panels if panel.color == color]
        if names:
            few = f": {', '.join(names)}" if color == BAD and len(names) <= 3 else ""
            axes.plot([], [], color=color, label=f"{len(names)} {word}{few}")
    axes.legend(loc=(0.03, 0.78) if kind == "coverage" else "best")


def _draw_panel(axes: Axes, panel: RankPanel, kind: str) -> None:
    """Draws some elements of a site with thin lines, and the worst one with a thick line."""
    _draw_bands(axes, panel, kind)
    x, lines = _curves(panel, kind, panel.counts(50))
    for y in lines[:-1]:
        axes.plot(x, y, color=GOOD, lw=0.5, alpha=0.4)
    axes.plot(x, lines[-1], color=panel.color, lw=1.4)
    elements = f"  ({panel.verdict.elements} elements)" if panel.verdict.elements > 1 else ""
    axes.set_title(panel.name + elements, pad=15)
    axes.text(
        0, 1.01, panel.verdict.verdict, fontsize=8, color=panel.color, transform=axes.transAxes
    )


def _draw_bands(axes: Axes, panel: RankPanel, kind: str) -> None:
    """Draws where calibrated curves stay, and which side of the diagonal means what."""
    for level, color in ((panel.level, LIGHT_BAND), (0.05, DARK_BAND)):
        x, (low, high) = _curves(panel, kind, level)
        axes.fill_between(x, low, high, color=color, lw=0)
    axes.plot([0, 1], [0, kind == "coverage"], color=FAINT, lw=0.8)
    axes.set_xlim(0, 1)
    if kind == "coverage":
        axes.set(ylim=(0, 1), aspect="equal")
        if panel.name != JOINT_TARP:
            axes.text(0.04, 0.96, "conservative", fontsize=7, color=FAINT, va="top")
            axes.text(0.96, 0.04, "overconfident", fontsize=7, color=FAINT, ha="right")


def _curves(panel: RankPanel, kind: str, of: np.ndarray | float) -> tuple[np.ndarray, np.ndarray]:
    """Returns x, and over it the curves of counts of ranks, or the two bounds of a level's band, ``(curves, x)``."""
    num = len(panel.ranks)
    tests = ecdf_tests(panel.name, num, panel.num_draws)
    test = tests[0 if kind == "ecdf" else -1]
    sums = test.sums(of) if isinstance(of, np.ndarray) else np.stack(test.band(of))
    x = np.concatenate([[0.0], test.levels, [1.0]])
    shares = np.insert(sums, [0, sums.shape[1]], [0, num], axis=1) / num
    return x, shares - x if kind == "ecdf" else shares


# ---- the other parts of a diagnosis


def draw_losses(
    axes: Axes, losses: Sequence[float], validation: Sequence[tuple[int, float]]
) -> None:
    """Draws the loss of every step, and pairs of steps and held-out losses, in nats."""
    values = np.asarray(losses, dtype=float)
    steps = 1 + np.flatnonzero(np.isfinite(values))
    values = values[steps - 1]
    axes.plot(steps, values, color=FAINT, lw=0.5, alpha=0.6)
    width = max(1, len(values) // 50)
    smooth = np.convolve(values, np.ones(width) / width, mode="valid")
    axes.plot(steps[width - 1 :], smooth, color=GOOD, lw=1.4, label="training, smoothed")
    if validation:
        axes.plot(*zip(*validation), color=BAD, lw=1.2, marker="o", ms=2.5, label="held out")
    low, high = np.quantile(values[len(values) // 5 :], [0, 0.99])
    span = (high - low) or 1.0
    axes.set(xlabel="step", ylabel="nats", ylim=(low - 0.05 * span, high + 0.1 * span))
    axes.legend()


def draw_histogram(
    axes: Axes,
    values: np.ndarray,
    x_label: str,
    place: float,
    label: str,
    color: str = INK,
    limits: tuple[float, float] | None = None,
) -> None:
    """Draws a histogram over data sets, between limits if given, and a vertical line at a place."""
    axes.hist(values, bins=30, range=limits, color=GOOD, alpha=0.75)
    axes.axvline(place, color=color, lw=1.4, label=label)
    axes.set(xlabel=x_label, ylabel="data sets")
    axes.legend()
