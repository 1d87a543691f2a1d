"""Beyond Figure 6 of the paper: what deeper trees cost, by the inverse that the guide is built on.

Binary trees of Gaussian sites as in ``trees.py``, of depth 6 to 9 (31 to 255 latents, 32 to 256 observed leaves). The
guides are as they come, one shared network of 64 hidden units with skip weights, and get the same number of steps of
Adam with 250 fresh simulations each, at a rate that goes to zero along half a cosine, and gradients of norm 100 at
most. What rate suits depends on structure and depth, so every guide is trained at each of three, and the one with the
least KL is shown; a rate at which the loss overflows is passed over. The paper's size and schedule are for depth 5.
Measured for reverse and forward NaMI and the fully connected inverse: KL(p(z | x) || q(z | x)) a latent, where 0 can be
reached by each of the three, since all are faithful; the seconds that training takes, simulations included; and the
seconds for 1,000 samples of the guide, which go level by level.

Run with::

    python examples/paper/tree_depths.py [--smoke | --paper] [--device cpu] [--seeds 1] [--jobs 2]
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyro
import torch
from experiment import Cell, Options, Run, parse, print_table, run_cells, write_results
from gaussian_tree import GaussianTree
from tree_training import divergence, network_of

from pyro_nami import AutoNaMIGuide, InferenceCompilation, fully_connected, nami

SYSTEMS = {
    "reverse": ("reverse NaMI", functools.partial(nami, direction="reverse"), "C1"),
    "forward": ("forward NaMI", functools.partial(nami, direction="forward"), "C3"),
    "fully_connected": ("fully connected", fully_connected, "C2"),
}
RATES = (0.03, 0.01, 0.003)
CLIP_NORM, BATCH, SAMPLES = 100.0, 250, 1000

Runs = Mapping[tuple[str, int], Sequence[Mapping[str, Any]]]


def run_cell(cell: Cell, run: Run) -> dict[str, Any]:
    """Compiles one inverse on one tree at one rate; the KL is None where training overflows."""
    tree = GaussianTree(cell["depth"], cell["seed"])
    start = time.process_time()
    inverse = SYSTEMS[cell["system"]][1](network_of(tree))
    found: dict[str, Any] = {
        "latents": len(tree.latents),
        "edges": inverse.num_edges,
        "levels": len(inverse.levels),
        "inversion_seconds": time.process_time() - start,
    }
    with torch.device(run.options.device):
        guide = AutoNaMIGuide(
            tree, inverse=inverse, anchor=False, init_scale=1.0, activation=torch.relu
        )
        compilation = InferenceCompilation(
            tree,
            guide,
            functools.partial(torch.optim.Adam, lr=cell["rate"], fused=True),
            batch_size=BATCH,
            clip_norm=CLIP_NORM,
            scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(
                optimizer, cell["steps"]
            ),
        )
        start, wall = time.process_time(), time.perf_counter()
        try:
            compilation.fit(
                cell["steps"],
                (tree.example(),),
                progress=False,
                tracker=run.tracker(cell["steps"]),
            )
        except ValueError as error:
            return {"kl": None, "why": str(error)}
        found["cpu_seconds"] = time.process_time() - start
        found["wall_seconds"] = time.perf_counter() - wall
        found["sample_seconds"] = sample_seconds(tree, guide)
        kl, error = divergence(tree, guide, cell["measured"])
    found["parameters"] = guide.num_parameters
    return {**found, "kl": kl, "kl_standard_error": error, "kl_a_latent": kl / len(tree.latents)}


@torch.no_grad()
def sample_seconds(tree: GaussianTree, guide: AutoNaMIGuide) -> float:
    """Returns the CPU seconds of one call that draws `SAMPLES` samples, the best of three."""
    times = []
    for _ in range(3):
        start = time.process_time()
        with pyro.poutine.block(), pyro.plate("draws", SAMPLES, dim=-1):
            guide(tree.example())
        times.append(time.process_time() - start)
    return min(times)


# ---- what was found


def claims(runs: Runs, depths: Sequence[int]) -> list[dict[str, Any]]:
    """Returns what structure saves, with what was found; the paper has no figure of it."""

    def mean(system: str, depth: int, key: str) -> float:
        return statistics.mean(run[key] for run in runs[system, depth])

    found = []
    for key, words in (("kl_a_latent", "lower KL a latent"), ("cpu_seconds", "less time to train")):
        numbers = {
            str(depth): {system: round(mean(system, depth, key), 5) for system in SYSTEMS}
            for depth in depths
        }
        for system in ("reverse", "forward"):
            worse = [
                depth
                for depth in depths
                if not mean(system, depth, key) < mean("fully_connected", depth, key)
            ]
            found.append(
                {
                    "claim": f"{SYSTEMS[system][0]}: {words} than fully connected at every depth",
                    "paper": "shown at depth 5: convergence is faster with fewer edges",
                    "ours": numbers,
                    "holds": not worse,
                    **({"why": f"not at depth {', '.join(map(str, worse))}"} if worse else {}),
                }
            )
    return found


def draw(runs: Runs, depths: Sequence[int], file: Path) -> None:
    """Draws KL a latent, training time and sampling time against depth."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 3, figsize=(12, 3.9))
    for axes, key, title in zip(
        panels,
        ("kl_a_latent", "cpu_seconds", "sample_seconds"),
        (
            "KL(p(z|x) || q(z|x)) a latent, nats",
            "training, CPU seconds",
            f"{SAMPLES:,} samples, CPU seconds",
        ),
    ):
        for name, (label, _, color) in SYSTEMS.items():
            means = [statistics.mean(run[key] for run in runs[name, depth]) for depth in depths]
            axes.plot(depths, means, "o-", color=color, label=label, lw=1.2)
            for depth in depths:
                values = [run[key] for run in runs[name, depth]]
                axes.plot([depth] * len(values), values, ".", color=color, alpha=0.4)
        axes.set_yscale("log")
        axes.set_xticks(depths, [f"{depth}\n({2 ** (depth - 1) - 1})" for depth in depths])
        axes.set_xlabel("depth (latents)")
        axes.set_title(title, fontsize=11)
    panels[0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(file, dpi=130)


def cells_of(options: Options) -> list[Cell]:
    """Returns the cells, the deepest first."""
    depths = options.choose((2, 3), (6, 7, 8, 9), (6, 7, 8, 9, 10))
    steps, measured = options.choose((2, 100), (1000, 10_000), (5000, 50_000))
    return [
        {
            "system": system,
            "depth": depth,
            "seed": seed,
            "rate": rate,
            "steps": steps,
            "measured": measured,
        }
        for depth in reversed(depths)
        for system in SYSTEMS
        for seed in range(options.seeds)
        for rate in RATES
    ]


def main() -> None:
    """Runs what is missing; prints, draws and writes what was found."""
    options = parse(__doc__, (1, 1, 5))
    cells = cells_of(options)
    settings = {"rates": RATES, "clip_norm": CLIP_NORM, "batch": BATCH, "device": options.device}
    results = run_cells("tree_depths", run_cell, cells, settings, options)
    runs: dict[tuple[str, int], list[Any]] = {}
    for first in range(0, len(cells), len(RATES)):  # the rates of one guide
        cell, tried = cells[first], results[first : first + len(RATES)]
        kls = {rate: result["kl"] for rate, result in zip(RATES, tried)}
        rate = min((rate for rate in RATES if kls[rate] is not None), key=kls.__getitem__)
        found = {"seed": cell["seed"], "rate": rate, "kl by rate": kls, **tried[RATES.index(rate)]}
        runs.setdefault((cell["system"], cell["depth"]), []).append(found)
    depths = sorted({depth for _, depth in runs})
    columns = {
        "latents": "latents",
        "edges": "edges",
        "levels": "levels",
        "parameters": "weights",
        "rate": "rate",
        "kl_a_latent": "KL a latent",
        "cpu_seconds": "CPU s",
        "wall_seconds": "wall s",
        "sample_seconds": "sampling s",
    }
    rows, summaries = [], {}
    for depth in depths:
        for name, (label, _, _) in SYSTEMS.items():
            means = {key: statistics.mean(run[key] for run in runs[name, depth]) for key in columns}
            summaries[f"{label}, depth {depth}"] = means
            counts = [f"{means[key]:,.0f}" for key in ("latents", "edges", "levels", "parameters")]
            rows.append(
                [f"{label}, {depth}", *counts, *(float(means[key]) for key in list(columns)[4:])]
            )
    print_table(["system, depth", *columns.values()], rows)
    made = claims(runs, depths)
    payload = {
        "settings": {**settings, "steps": cells[0]["steps"], "measured": cells[0]["measured"]},
        "summaries": summaries,
        "claims": made,
        "runs": {
            f"{SYSTEMS[name][0]}, depth {depth}": mine for (name, depth), mine in runs.items()
        },
    }
    draw(runs, depths, write_results("tree_depths", payload, options))


if __name__ == "__main__":
    main()
