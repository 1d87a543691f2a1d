"""Pictures of networks and of their inverses, as in the paper's figures: rows of graphs at given places, with a key.

Change this module to draw sites and edges in another way.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pyro_nami import BayesNet, Inverse

Positions = Mapping[Hashable, tuple[float, float]]


class Edges(NamedTuple):
    """Edges that are drawn alike."""

    pairs: Iterable[Any]
    color: str = "black"
    line: str = "-"
    arrow: str = "-|>"


class Panel(NamedTuple):
    """A graph with its title; ``marked`` sites are drawn black."""

    title: str
    net: BayesNet
    at: Positions
    edges: Sequence[Edges]
    marked: Iterable[Hashable] = ()


RADIUS, MORAL_COLOR, FILL_COLOR, MISSING_COLOR = 0.24, "tab:blue", "tab:orange", "tab:red"
_SITE: dict[str, Any] = {"marker": "o", "ls": "", "mec": "black", "ms": 9}
KEY: dict[str, tuple[str, dict[str, Any]]] = {
    "o": ("observed", {**_SITE, "mfc": "0.75"}),
    "e": ("eliminated", {**_SITE, "mfc": "black"}),
    "m": ("moral edge", {"color": MORAL_COLOR}),
    "f": (
        "fill-in edge; in an inverse, between sites not adjacent in the model",
        {"color": FILL_COLOR, "ls": "--"},
    ),
    "x": ("missing: a dependence that the inverse denies", {"color": MISSING_COLOR, "ls": ":"}),
}


def network_panel(title: str, net: BayesNet, at: Positions) -> Panel:
    return Panel(title, net, at, [Edges(net.edges)])


def inverse_panel(
    title: str, inverse: Inverse, at: Positions, latents: Iterable[Hashable] | None = None
) -> Panel:
    """A panel of the factors of some latents, by default all."""
    adjacent = {frozenset(edge) for edge in inverse.net.edges}
    pairs = [
        (u, v) for v in (inverse.order if latents is None else latents) for u in inverse.parents[v]
    ]
    own, fill = (
        [pair for pair in pairs if (frozenset(pair) in adjacent) == known]
        for known in (True, False)
    )
    return Panel(title, inverse.net, at, [Edges(own), Edges(fill, FILL_COLOR, "--")])


def draw_panel(axes: Any, panel: Panel) -> None:
    """Draws one graph."""
    from matplotlib.patches import Circle, FancyArrowPatch

    for edges in panel.edges:
        for u, v in edges.pairs:
            (x0, y0), (x1, y1) = panel.at[u], panel.at[v]
            share = RADIUS / math.dist((x0, y0), (x1, y1))
            dx, dy = share * (x1 - x0), share * (y1 - y0)
            style = {
                "color": edges.color,
                "ls": edges.line,
                "arrowstyle": edges.arrow,
                "mutation_scale": 11,
            }
            ends = (x0 + dx, y0 + dy), (x1 - dx, y1 - dy)
            axes.add_patch(FancyArrowPatch(*ends, lw=1.3, shrinkA=0, shrinkB=0, **style))
    for name, position in panel.at.items():
        black = name in panel.marked
        face = "black" if black else "0.75" if panel.net.sites[name].observed else "white"
        axes.add_patch(Circle(position, RADIUS, facecolor=face, edgecolor="black", zorder=2))
        style = {
            "ha": "center",
            "va": "center",
            "fontsize": 9,
            "color": "white" if black else "black",
        }
        axes.text(*position, f"${name}$" if "_" in str(name) else name, zorder=3, **style)
    axes.set_title(panel.title, fontsize=9)
    axes.set_aspect("equal")
    axes.margins(0.06)
    axes.autoscale_view()


def draw_panels(
    path: Path, rows: Sequence[Sequence[Panel]], size: tuple[float, float], key: str
) -> None:
    """Draws rows of graphs, and at the foot what the kinds of edge and site mean, by the letters of ``KEY``."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D

    figure, grid = plt.subplots(
        len(rows), len(rows[0]), figsize=size, squeeze=False, layout="constrained"
    )
    for axes, panel in zip(grid.flat, itertools.chain(*rows)):
        axes.axis("off")
        draw_panel(axes, panel)
    lines = [Line2D([], [], label=KEY[letter][0], **KEY[letter][1]) for letter in key]
    figure.legend(
        handles=lines, loc="outside lower center", ncols=len(lines), fontsize=9, frameon=False
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)
