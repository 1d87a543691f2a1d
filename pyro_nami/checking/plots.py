"""Figures of calibration and of a whole diagnosis. They need matplotlib, the extra ``viz``.

Figures are made without pyplot, so nothing global changes and no display is needed; ``figure.savefig(path)`` writes
one. Change this module to change how things look.
"""

from __future__ import annotations

__all__ = ["plot_calibration", "plot_diagnosis"]

from collections.abc import Callable, Iterator, Sequence
from textwrap import wrap
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pyro_nami.checking.calibration import JOINT_TARP, Calibration
from pyro_nami.checking.verdicts import CALIBRATED, binomial_interval, count_ranks, ecdf_test, fold
from pyro_nami.inference.weights import K_MAX

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from pyro_nami.checking.diagnose import Diagnosis

_GOOD, _BAD, _INK, _FAINT = "#2b6cb0", "#c53030", "#333333", "#94a3b8"
_BANDS = "#e8edf3", "#cbd5e1"  # of the verdict; of 95% of single curves
_PANELS, _BINS, _LINES = 12, 20, 50  # at most: panels, bars of a histogram, elements drawn in one panel
_POINTWISE = 0.01  # the share of bars outside of a histogram's band, as Talts et al. have it

_BAND_NOTE = "Dark band: 95% of calibrated curves stay inside. Light band: outside of it the verdict fails."
_KINDS = {  # title, label of x, label of y, note
    "ranks": (
        "Ranks of the truth",
        "rank / draws",
        "frequency / expected",
        "Band: 99% of the bars of a calibrated site. Thin lines: its elements; thick: the one with the smallest p.",
    ),
    "ecdf": ("Distribution of ranks", "rank / draws", "ECDF - uniform", _BAND_NOTE),
    "coverage": (
        "Expected coverage",
        "probability of the guide's region",
        "share of truths inside",
        _BAND_NOTE,
    ),
    "tarp": ("TARP, all latents", "probability of the ball", "share of truths inside", _BAND_NOTE),
}


def plot_calibration(
    calibration: Calibration, kind: str = "ranks", sites: Sequence[str] | None = None
) -> Figure:
    """Returns a figure of calibration; see `Calibration.plot`."""
    if kind not in _KINDS:
        raise ValueError(f"Expected kind to be one of {', '.join(_KINDS)}; got {kind!r}.")
    known = calibration.verdicts
    names = [JOINT_TARP] if kind == "tarp" else _least(calibration) if sites is None else list(sites)
    for name in names:
        if name not in known:
            raise ValueError(f"Expected sites with ranks, {', '.join(map(repr, known))}; got '{name}'.")
    title, x_label, y_label, note = _KINDS[kind]
    columns = 3 if len(names) in (5, 6, 9) else min(4, len(names))
    size = (10 / columns, 10 / columns) if columns > 2 else (4.2, 4.2)
    figure, panels = _figure(len(names), columns, size)
    title += f": {calibration.num_datasets:,} data sets, {calibration.num_draws:,} draws each"
    if len(names) < len(known) and kind != "tarp" and sites is None:
        title += f"; of {len(known)} sites those with the smallest p"
    figure.suptitle(title, fontsize=11, color=_INK)
    for axes, name in zip(panels, names):
        counts = _Counts.of(calibration, name)
        if kind == "ranks":
            _draw_histogram(axes, calibration, counts)
        else:
            curves = _ecdf(calibration, counts) if kind == "ecdf" else _coverage(calibration, counts)
            _draw_bands(axes, curves)
            _draw_curves(axes, curves, counts)
        _name_panel(axes, calibration, name)
    note = note if len(names) > 2 else note.replace(". ", ".\n")  # as narrow as the panels
    figure.supxlabel(f"{x_label}\n{note}", fontsize=8.5, color=_INK)
    figure.supylabel(y_label, fontsize=8.5, color=_INK)
    return figure


def plot_diagnosis(diagnosis: Diagnosis) -> Figure:
    """Returns one figure of all that a diagnosis holds."""
    calibration = diagnosis.calibration
    panels: list[tuple[str, Callable[[Axes], None]]] = [
        ("Distribution of ranks", lambda axes: _draw_all(axes, calibration, _ecdf)),
        ("Expected coverage", lambda axes: _draw_all(axes, calibration, _coverage)),
        ("Importance sampling: efficiency", lambda axes: _draw_efficiency(axes, diagnosis)),
        ("Importance sampling: Pareto k", lambda axes: _draw_pareto(axes, diagnosis)),
    ]
    if diagnosis.losses is not None:
        panels.insert(0, ("Loss", lambda axes: _draw_losses(axes, diagnosis)))
    if diagnosis.misspecification is not None:
        panels.append(("Data against simulations", lambda axes: _draw_distances(axes, diagnosis)))
    columns = 3 if len(panels) > 4 else 2
    figure, all_axes = _figure(len(panels), columns, size=(10 / columns, 2.9))
    figure.suptitle("\n".join(wrap(diagnosis.summary, 110)), fontsize=11, color=_INK)
    for axes, (title, draw) in zip(all_axes, panels):
        draw(axes)
        axes.set_title(title, fontsize=10, color=_INK, loc="left")
    return figure


# ---- calibration


class _Counts(NamedTuple):
    """Counts of the ranks of some elements of a site, or of a joint test.

    Attributes:
        counts: ``(elements, num_draws + 1)``.
        worst: the element with the smallest p-value.
        tests: over which the level is divided before this site fails, whatever the others do.
        central: whether coverage is that of central intervals.
        directed: whether coverage that is too large means a conservative guide.
        color: of the verdict.
    """

    counts: np.ndarray
    worst: int
    tests: int
    central: bool
    directed: bool
    color: str

    @classmethod
    def of(cls, calibration: Calibration, name: str) -> _Counts:
        verdict = calibration.verdicts[name]
        central = name in calibration.ranks
        ranks = calibration.ranks[name] if central else calibration.joint[name]
        values = ranks.reshape(calibration.num_datasets, -1).cpu().numpy()
        worst = int(np.ravel_multi_index(verdict.worst, tuple(ranks.shape[1:]))) if verdict.worst else 0
        shown = np.linspace(0, verdict.elements - 1, min(_LINES, verdict.elements)).astype(int)
        shown = np.unique([*shown, worst])
        return cls(
            counts=count_ranks(values[:, shown], calibration.num_draws),
            worst=int(np.searchsorted(shown, worst)),
            tests=len(calibration.verdicts) * verdict.elements * (2 if central else 1),
            central=central,
            directed=name != JOINT_TARP,
            color=_GOOD if verdict.verdict == CALIBRATED else _BAD,
        )


class _Curves(NamedTuple):
    """Lines ``y`` (elements, points) over ``x`` (points,), and the bands (low, high) for calibrated ones.

    ``square``: around the diagonal; ``directed``: lines above the diagonal mean a conservative guide.
    """

    x: np.ndarray
    y: np.ndarray
    bands: list[tuple[np.ndarray, np.ndarray]]
    square: bool = False
    directed: bool = False


def _ecdf(calibration: Calibration, counts: _Counts) -> _Curves:
    test = ecdf_test(calibration.num_datasets, calibration.num_draws)

    def difference(sums: np.ndarray) -> np.ndarray:
        return np.pad(sums / test.num - test.levels, [(0, 0)] * (sums.ndim - 1) + [(1, 1)])

    bands = [tuple(map(difference, test.band(level))) for level in (calibration.level / counts.tests, 0.05)]
    x = np.concatenate([[0.0], test.levels, [1.0]])
    return _Curves(x, difference(counts.counts.cumsum(1)[:, :-1]), bands)  # type: ignore[arg-type]


def _coverage(calibration: Calibration, counts: _Counts) -> _Curves:
    test = ecdf_test(calibration.num_datasets, calibration.num_draws, counts.central)

    def share(sums: np.ndarray) -> np.ndarray:
        ends = [(0, 0)] * (sums.ndim - 1) + [(1, 1)]
        return np.pad(sums / test.num, ends, constant_values=[(0, 0)] * (sums.ndim - 1) + [(0, 1)])

    bands = [tuple(map(share, test.band(level))) for level in (calibration.level / counts.tests, 0.05)]
    x = np.concatenate([[0.0], test.levels, [1.0]])
    cells = fold(counts.counts) if counts.central else counts.counts
    return _Curves(x, share(cells.cumsum(1)[:, :-1]), bands, True, counts.directed)  # type: ignore[arg-type]


def _draw_histogram(axes: Axes, calibration: Calibration, counts: _Counts) -> None:
    ranks = calibration.num_draws + 1
    edges = np.round(np.linspace(0, ranks, min(_BINS, ranks) + 1)).astype(int)
    expected = np.diff(edges) / ranks
    scale = calibration.num_datasets * expected
    bars = np.add.reduceat(counts.counts, edges[:-1], axis=1) / scale
    low, high = (bound / scale for bound in binomial_interval(calibration.num_datasets, expected, _POINTWISE))
    axes.stairs(high, edges / ranks, baseline=low, fill=True, color=_BANDS[1], lw=0)
    axes.axhline(1, color=_FAINT, lw=0.8)
    for i, bar in enumerate(bars):
        axes.stairs(bar, edges / ranks, **_line(counts, i))
    axes.set(xlim=(0, 1), ylim=(0, 1.08 * max(bars.max(), high.max())))


def _draw_bands(axes: Axes, curves: _Curves) -> None:
    for (low, high), color in zip(curves.bands, _BANDS):
        axes.fill_between(curves.x, low, high, color=color, lw=0)
    axes.plot([0, 1], [0, 1 if curves.square else 0], color=_FAINT, lw=0.8)
    axes.set_xlim(0, 1)
    if curves.square:
        axes.set(ylim=(0, 1), aspect="equal", anchor="W")
    if curves.directed:
        axes.text(0.04, 0.96, "conservative", fontsize=7, color=_FAINT, va="top")
        axes.text(0.96, 0.04, "overconfident", fontsize=7, color=_FAINT, ha="right")


def _draw_curves(axes: Axes, curves: _Curves, counts: _Counts) -> None:
    for i, y in enumerate(curves.y):
        axes.plot(curves.x, y, **_line(counts, i))


def _draw_all(
    axes: Axes, calibration: Calibration, curves_of: Callable[[Calibration, _Counts], _Curves]
) -> None:
    """Draws the worst element of every site, those that failed on top, in the widest of their bands."""
    names = sorted(calibration.verdicts, key=lambda name: -calibration.verdicts[name].p_value)
    all_counts = {name: _Counts.of(calibration, name) for name in names}
    widest = max(all_counts.values(), key=lambda counts: counts.tests)
    _draw_bands(axes, curves_of(calibration, widest))
    labels: dict[str, str] = {}
    for counts in all_counts.values():
        worst = counts._replace(counts=counts.counts[counts.worst : counts.worst + 1], worst=0)
        curves = curves_of(calibration, worst)
        axes.plot(curves.x, curves.y[0], color=counts.color, lw=0.9, alpha=0.8)
        labels.setdefault(counts.color, "calibrated" if counts.color == _GOOD else "failed")
    for color, label in labels.items():
        sites = [name for name, counts in all_counts.items() if counts.color == color]
        few = ": " + ", ".join(map(_short, sites)) if label == "failed" and len(sites) <= 3 else ""
        axes.plot([], [], color=color, lw=1.4, label=f"{len(sites)} {label}{few}")
    if not curves.square:
        low, high = axes.get_ylim()
        axes.set_ylim(low, high + 0.2 * (high - low))  # room for the legend
    axes.legend(fontsize=7, frameon=False, loc=(0.03, 0.74) if curves.square else "upper left")


def _name_panel(axes: Axes, calibration: Calibration, name: str) -> None:
    verdict = calibration.verdicts[name]
    elements = f"  ({verdict.elements} elements)" if verdict.elements > 1 else ""
    color = _GOOD if verdict.verdict == CALIBRATED else _BAD
    axes.set_title(_short(name) + elements, fontsize=9.5, color=_INK, loc="left", pad=15)
    above = {"xycoords": "axes fraction", "xytext": (0, 3), "textcoords": "offset points"}
    axes.annotate(verdict.verdict, (0, 1), fontsize=8, color=color, va="bottom", **above)  # type: ignore[arg-type]


def _line(counts: _Counts, element: int) -> dict[str, Any]:
    if element == counts.worst:
        return {"color": counts.color, "lw": 1.4, "zorder": 3}
    return {"color": _GOOD, "lw": 0.5, "alpha": 0.4}


def _short(name: str) -> str:
    return name if len(name) <= 24 else f"{name[:22]}..."


def _least(calibration: Calibration) -> list[str]:
    """The sites with the smallest p-values, as many as there are panels, in model order."""
    least = sorted(calibration.verdicts, key=lambda name: calibration.verdicts[name].p_value)[:_PANELS]
    return [name for name in calibration.verdicts if name in least]


# ---- diagnosis


def _draw_losses(axes: Axes, diagnosis: Diagnosis) -> None:
    losses = np.asarray(diagnosis.losses, dtype=float)
    steps = 1 + np.flatnonzero(np.isfinite(losses))
    losses = losses[steps - 1]
    axes.plot(steps, losses, color=_FAINT, lw=0.5, alpha=0.6)
    width = max(1, len(losses) // 50)
    smooth = np.convolve(losses, np.ones(width) / width, mode="valid")
    axes.plot(steps[width - 1 :], smooth, color=_GOOD, lw=1.4, label="training, smoothed")
    if diagnosis.validation:
        x, y = zip(*diagnosis.validation)
        axes.plot(x, y, color=_BAD, lw=1.2, marker="o", ms=2.5, label="held out")
    settled = losses[len(losses) // 5 :]
    low, high = settled.min(), np.quantile(settled, 0.99)
    span = (high - low) or 1.0
    axes.set(xlabel="step", ylabel="nats", ylim=(low - 0.05 * span, high + 0.1 * span))
    axes.legend(fontsize=7, frameon=False)


def _draw_efficiency(axes: Axes, diagnosis: Diagnosis) -> None:
    shares = (diagnosis.effective_sample_size / diagnosis.num_samples).cpu().numpy()
    axes.hist(shares, bins=np.linspace(0, 1, 21).tolist(), color=_GOOD, alpha=0.75)
    axes.axvline(float(np.median(shares)), color=_INK, lw=1, label=f"median {np.median(shares):.0%}")
    axes.set(xlabel="effective sample size / draws", ylabel="data sets", xlim=(0, 1))
    axes.legend(fontsize=7, frameon=False)


def _draw_pareto(axes: Axes, diagnosis: Diagnosis) -> None:
    k = np.clip(diagnosis.pareto_k.cpu().numpy(), -0.5, 1.5)
    for part, color in ((k[k <= K_MAX], _GOOD), (k[k > K_MAX], _BAD)):
        axes.hist(part, bins=np.linspace(-0.5, 1.5, 41).tolist(), color=color, alpha=0.75)
    axes.axvline(K_MAX, color=_BAD, lw=1, ls="--", label=f"above {K_MAX}: {diagnosis.unreliable:.0%}")
    axes.set(xlabel="Pareto k (ends of the axis: and beyond)", ylabel="data sets", xlim=(-0.5, 1.5))
    axes.legend(fontsize=7, frameon=False)


def _draw_distances(axes: Axes, diagnosis: Diagnosis) -> None:
    found = diagnosis.misspecification
    assert found is not None
    distances = found.simulated.cpu().numpy()
    axes.hist(distances, bins=30, color=_GOOD, alpha=0.75, label="simulations")
    color = _BAD if found.p_value < found.level else _INK
    axes.axvline(found.distance, color=color, lw=1.4, label=f"the data, p = {found.p_value:.2g}")
    axes.set(xlabel="distance from the simulations' center", ylabel="data sets")
    axes.legend(fontsize=7, frameon=False)


# ---- figures


def _figure(count: int, columns: int, size: tuple[float, float]) -> tuple[Figure, list[Axes]]:
    """Returns a figure of ``count`` panels, each of a size in inches."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError as error:
        raise ImportError(
            "Expected matplotlib for figures; got none. Run `pip install pyro-nami[viz]`."
        ) from error
    rows = -(-count // columns)
    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06)
    figure = Figure(figsize=(columns * size[0], rows * size[1] + 0.8), dpi=100, layout=layout)
    panels = list(_panels(figure, rows, columns, count))
    return figure, panels


def _panels(figure: Figure, rows: int, columns: int, count: int) -> Iterator[Axes]:
    for i in range(count):
        axes = figure.add_subplot(rows, columns, i + 1)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(_FAINT)
        axes.tick_params(labelsize=7.5, color=_FAINT, labelcolor=_INK)
        axes.xaxis.label.set(size=8, color=_INK)
        axes.yaxis.label.set(size=8, color=_INK)
        yield axes
