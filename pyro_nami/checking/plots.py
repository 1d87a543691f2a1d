"""Figures of calibration and diagnosis, made from plain values with matplotlib (the extra ``viz``).

Figures are made without pyplot, so no global state changes and no display is needed.
"""

from __future__ import annotations

__all__ = [
    *("RankPanel", "plot_all", "plot_ranks"),
    *("draw_data", "draw_efficiency", "draw_losses", "draw_pareto", "draw_worst"),
]

from collections.abc import Callable, Iterable, Mapping, Sequence
from textwrap import wrap
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pyro_nami.checking.rank_tests import (
    JOINT_TARP,
    Verdict,
    binomial_interval,
    count_ranks,
    ecdf_tests,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_GOOD, _BAD, _INK, _FAINT = "#2b6cb0", "#c53030", "#333333", "#94a3b8"
_BANDS = "#e8edf3", "#cbd5e1"  # of the verdict; of 95% of single curves
# at most: panels, bars of a histogram, elements drawn in one panel
_PANELS, _BINS, _LINES = 12, 20, 50
_POINTWISE = 0.01  # the share of bars outside of a histogram's band, as Talts et al. have it

_BAND_NOTE = (
    "Dark band: 95% of calibrated curves stay inside. Light band: outside of it the verdict fails."
)
_INSIDE = "share of truths inside"
_KINDS = {  # title, label of x, label of y, note
    "ranks": (
        "Ranks of the truth",
        "rank / draws",
        "frequency / expected",
        "Band: 99% of the bars of a calibrated site. Thin lines: its elements; thick: the one with the smallest p.",
    ),
    "ecdf": ("Distribution of ranks", "rank / draws", "ECDF - uniform", _BAND_NOTE),
    "coverage": ("Expected coverage", "probability of the guide's region", _INSIDE, _BAND_NOTE),
    "tarp": ("TARP, all latents", "probability of the ball", _INSIDE, _BAND_NOTE),
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
        return _GOOD if self.verdict.passed else _BAD

    @property
    def title(self) -> str:
        return self.name if len(self.name) <= 24 else f"{self.name[:22]}..."

    def counts(self, lines: int) -> np.ndarray:
        """Counts of the ranks of some elements, at most ``lines`` and the worst, which is the last of them."""
        elements = self.verdict.elements
        worst = np.arange(elements).reshape(self.ranks.shape[1:])[self.verdict.worst]
        shown = np.linspace(0, elements - 1, min(lines, elements)).astype(int)
        shown = np.append(np.setdiff1d(shown, worst), worst)
        return count_ranks(self.ranks.reshape(len(self.ranks), -1)[:, shown], self.num_draws)


def plot_ranks(panels: Mapping[str, RankPanel], kind: str, sites: Sequence[str] | None) -> Figure:
    """Returns a figure of the ranks of sites and joint tests; see `Calibration.plot`."""
    if kind not in _KINDS:
        raise ValueError(f"Expected kind to be one of {', '.join(_KINDS)}; got {kind!r}.")
    least = sorted(panels, key=lambda name: panels[name].verdict.p_value)[:_PANELS]
    names = [name for name in panels if name in least] if sites is None else sites
    names = [JOINT_TARP] if kind == "tarp" else names
    for name in names:
        if name not in panels:
            raise ValueError(
                f"Expected sites with ranks, {', '.join(map(repr, panels))}; got '{name}'."
            )
    shown = [panels[name] for name in names]
    columns = 3 if len(shown) in (5, 6, 9) else min(4, len(shown))
    size = (10 / columns, 10 / columns) if columns > 2 else (4.2, 4.2)
    title, x_label, y_label, note = _KINDS[kind]
    title += f": {len(shown[0].ranks):,} data sets, {shown[0].num_draws:,} draws each"
    if len(shown) < len(panels) and kind != "tarp" and sites is None:
        title += f"; of {len(panels)} sites those with the smallest p"
    figure, all_axes = _figure(len(shown), columns, size, title)
    for axes, panel in zip(all_axes, shown):
        _draw_elements(axes, panel, kind)
    note = note if len(shown) > 2 else note.replace(". ", ".\n")  # as narrow as the panels
    figure.supxlabel(f"{x_label}\n{note}", fontsize=8.5, color=_INK)
    figure.supylabel(y_label, fontsize=8.5, color=_INK)
    return figure


def plot_all(title: str, parts: Mapping[str, Callable[[Axes], None]]) -> Figure:
    """Returns a figure of several drawings, each under its own title."""
    columns = 3 if len(parts) > 4 else 2
    figure, all_axes = _figure(
        len(parts), columns, (10 / columns, 2.9), "\n".join(wrap(title, 110))
    )
    for axes, (name, draw) in zip(all_axes, parts.items()):
        draw(axes)
        axes.set_title(name, fontsize=10, color=_INK, loc="left")
    return figure


def _figure(
    count: int, columns: int, size: tuple[float, float], title: str
) -> tuple[Figure, list[Axes]]:
    """Returns a figure of ``count`` panels, each of a size in inches."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError as error:
        message = "Expected matplotlib for figures; got none. Run `pip install pyro-nami[viz]`."
        raise ImportError(message) from error
    rows = -(-count // columns)
    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06)
    figure = Figure(figsize=(columns * size[0], rows * size[1] + 0.8), dpi=100, layout=layout)
    figure.suptitle(title, fontsize=11, color=_INK)
    panels = [figure.add_subplot(rows, columns, i + 1) for i in range(count)]
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(_FAINT)
        axes.tick_params(labelsize=7.5, color=_FAINT, labelcolor=_INK)
        axes.xaxis.label.set(size=8, color=_INK)
        axes.yaxis.label.set(size=8, color=_INK)
    return figure, panels


# ---- ranks


def draw_worst(axes: Axes, panels: Iterable[RankPanel], kind: str) -> None:
    """Draws the worst element of every site, those that failed on top, in the widest of their bands."""
    panels = sorted(panels, key=lambda panel: -panel.verdict.p_value)
    _draw_bands(axes, min(panels, key=lambda panel: panel.level), kind)
    for panel in panels:
        x, (y,) = _curves(panel, kind, panel.counts(0))
        axes.plot(x, y, color=panel.color, lw=0.9, alpha=0.8)
    good, bad = (
        [panel.title for panel in panels if panel.color == color] for color in (_GOOD, _BAD)
    )
    if good:
        axes.plot([], [], color=_GOOD, lw=1.4, label=f"{len(good)} calibrated")
    if bad:
        few = ": " + ", ".join(bad) if len(bad) <= 3 else ""
        axes.plot([], [], color=_BAD, lw=1.4, label=f"{len(bad)} failed{few}")
    if kind == "ecdf":
        low, high = axes.get_ylim()
        axes.set_ylim(low, high + 0.2 * (high - low))  # room for the legend
    axes.legend(fontsize=7, frameon=False, loc="upper left" if kind == "ecdf" else (0.03, 0.74))


def _draw_elements(axes: Axes, panel: RankPanel, kind: str) -> None:
    counts = panel.counts(_LINES)
    thin: dict[str, Any] = {"color": _GOOD, "lw": 0.5, "alpha": 0.4}
    styles = [thin] * (len(counts) - 1) + [{"color": panel.color, "lw": 1.4, "zorder": 3}]
    if kind == "ranks":
        _draw_bars(axes, counts, styles)
    else:
        _draw_bands(axes, panel, kind)
        x, lines = _curves(panel, kind, counts)
        for y, style in zip(lines, styles):
            axes.plot(x, y, **style)
    elements = f"  ({panel.verdict.elements} elements)" if panel.verdict.elements > 1 else ""
    axes.set_title(panel.title + elements, fontsize=9.5, color=_INK, loc="left", pad=15)
    above: Any = {"xycoords": "axes fraction", "xytext": (0, 3), "textcoords": "offset points"}
    axes.annotate(
        panel.verdict.verdict, (0, 1), fontsize=8, color=panel.color, va="bottom", **above
    )


def _draw_bars(axes: Axes, counts: np.ndarray, styles: Sequence[dict[str, Any]]) -> None:
    num, ranks = int(counts[0].sum()), counts.shape[1]
    edges = np.round(np.linspace(0, ranks, min(_BINS, ranks) + 1)).astype(int)
    expected = np.diff(edges) / ranks
    scale = num * expected
    bars = np.add.reduceat(counts, edges[:-1], axis=1) / scale
    low, high = (bound / scale for bound in binomial_interval(num, expected, _POINTWISE))
    axes.stairs(high, edges / ranks, baseline=low, fill=True, color=_BANDS[1], lw=0)
    axes.axhline(1, color=_FAINT, lw=0.8)
    for bar, style in zip(bars, styles):
        axes.stairs(bar, edges / ranks, **style)
    axes.set(xlim=(0, 1), ylim=(0, 1.08 * max(bars.max(), high.max())))


def _draw_bands(axes: Axes, panel: RankPanel, kind: str) -> None:
    """Draws where calibrated curves stay, by the verdict and with 95%, and which side of the diagonal means what."""
    for level, color in zip((panel.level, 0.05), _BANDS):
        x, (low, high) = _curves(panel, kind, level)
        axes.fill_between(x, low, high, color=color, lw=0)
    axes.plot([0, 1], [0, 0 if kind == "ecdf" else 1], color=_FAINT, lw=0.8)
    axes.set_xlim(0, 1)
    if kind != "ecdf":
        axes.set(ylim=(0, 1), aspect="equal", anchor="W")
        if panel.name != JOINT_TARP:
            axes.text(0.04, 0.96, "conservative", fontsize=7, color=_FAINT, va="top")
            axes.text(0.96, 0.04, "overconfident", fontsize=7, color=_FAINT, ha="right")


def _curves(panel: RankPanel, kind: str, of: np.ndarray | float) -> tuple[np.ndarray, np.ndarray]:
    """Returns x, and over it the curves of counts of ranks, or the two bounds of a level's band, ``(curves, x)``."""
    tests = ecdf_tests(panel.name, len(panel.ranks), panel.num_draws)
    test = tests[0 if kind == "ecdf" else -1]
    sums = test.sums(of) if isinstance(of, np.ndarray) else np.stack(test.band(of))
    x = np.concatenate([[0.0], test.levels, [1.0]])
    shares = np.insert(sums, [0, sums.shape[1]], [0, test.num], axis=1) / test.num
    return x, shares - x if kind == "ecdf" else shares


# ---- the other parts of a diagnosis


def draw_losses(
    axes: Axes, losses: Sequence[float], validation: Sequence[tuple[int, float]]
) -> None:
    """Draws the loss of every step, and pairs of steps and held-out losses, in nats."""
    values = np.asarray(losses, dtype=float)
    steps = 1 + np.flatnonzero(np.isfinite(values))
    values = values[steps - 1]
    axes.plot(steps, values, color=_FAINT, lw=0.5, alpha=0.6)
    width = max(1, len(values) // 50)
    smooth = np.convolve(values, np.ones(width) / width, mode="valid")
    axes.plot(steps[width - 1 :], smooth, color=_GOOD, lw=1.4, label="training, smoothed")
    if validation:
        axes.plot(*zip(*validation), color=_BAD, lw=1.2, marker="o", ms=2.5, label="held out")
    settled = values[len(values) // 5 :]
    low, high = settled.min(), np.quantile(settled, 0.99)
    span = (high - low) or 1.0
    axes.set(xlabel="step", ylabel="nats", ylim=(low - 0.05 * span, high + 0.1 * span))
    axes.legend(fontsize=7, frameon=False)


def draw_efficiency(axes: Axes, shares: np.ndarray) -> None:
    """Draws effective sample sizes, as shares of the draws."""
    median = float(np.median(shares))
    axes.hist(shares, bins=np.linspace(0, 1, 21).tolist(), color=_GOOD, alpha=0.75)
    axes.axvline(median, color=_INK, lw=1, label=f"median {median:.0%}")
    axes.set(xlabel="effective sample size / draws", ylabel="data sets", xlim=(0, 1))
    axes.legend(fontsize=7, frameon=False)


def draw_pareto(axes: Axes, k: np.ndarray, limit: float) -> None:
    """Draws k-hats, those above a limit in another color."""
    bad = k > limit
    for part, color in ((k[~bad], _GOOD), (k[bad], _BAD)):
        axes.hist(
            np.clip(part, -0.5, 1.5),
            bins=np.linspace(-0.5, 1.5, 41).tolist(),
            color=color,
            alpha=0.75,
        )
    axes.axvline(limit, color=_BAD, lw=1, ls="--", label=f"above {limit}: {bad.mean():.0%}")
    axes.set(xlabel="Pareto k (ends of the axis: and beyond)", ylabel="data sets", xlim=(-0.5, 1.5))
    axes.legend(fontsize=7, frameon=False)


def draw_data(
    axes: Axes, simulated: np.ndarray, distance: float, p_value: float, passed: bool
) -> None:
    """Draws the distance of data from the simulations' center among those of simulations."""
    axes.hist(simulated, bins=30, color=_GOOD, alpha=0.75, label="simulations")
    color = _INK if passed else _BAD
    axes.axvline(distance, color=color, lw=1.4, label=f"the data, p = {p_value:.2g}")
    axes.set(xlabel="distance from the simulations' center", ylabel="data sets")
    axes.legend(fontsize=7, frameon=False)
