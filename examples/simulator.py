"""A simulator with and without its density: where is the emitter that two stations hear?

Two stations measure their distances from an emitter in the square, with noise. The stations lie on a line, so the
posterior has two modes, mirror images of each other. The same simulator is given twice: as a black box that returns
data (`from_simulator`), and as a Pyro model in two lines, whose draws come with weights and with the evidence.
`amortize` compiles a guide for each from as many simulations, with its defaults. The exact posterior comes from a grid.
Run with::

    python examples/simulator.py [--simulations 10000] [--smoke] [--seed 0] [--out out/simulator]
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from study import pyplot
from torch import Tensor

from pyro_nami import AmortizedPosterior, amortize, from_simulator
from pyro_nami.inference import Simulator

STATIONS = torch.tensor([[-0.7, 0.0], [0.5, 0.0]])
NOISE = 0.05
PRIOR = dist.Uniform(-torch.ones(2), 1.0).to_event(1)
HEARD = torch.tensor([0.75, 0.85])
CELLS = 400  # of the grid, on a side
DRAWS = 4000


def distances(place: Tensor) -> Tensor:
    return (place.unsqueeze(-2) - STATIONS).norm(dim=-1)


def black_box(place: Tensor) -> Tensor:
    """A simulator, as it may come from anywhere: places ``(rows, 2)`` to data ``(rows, 2)``."""
    return distances(place) + NOISE * torch.randn(len(place), 2)


def model() -> None:
    place = pyro.sample("theta", PRIOR)
    pyro.sample("x", dist.Normal(distances(place), NOISE).to_event(1))


def exact(x: Tensor) -> tuple[Tensor, Tensor]:
    """The log joint density on the grid, ``(CELLS, CELLS)``, and the log evidence of data ``(2,)``, in nats."""
    line = (torch.arange(CELLS) + 0.5) * 2 / CELLS - 1
    grid = torch.stack(torch.meshgrid(line, line, indexing="ij"), -1)
    joint = dist.Normal(distances(grid), NOISE).log_prob(x).sum(-1) - math.log(4)
    return joint, joint.logsumexp((0, 1)) + math.log(4 / CELLS**2)


def held_out(posterior: AmortizedPosterior, theta: Tensor, x: Tensor) -> float:
    """By how much a guide's log density of latents that were held out is off the exact one, in nats."""
    evidence = torch.stack([exact(each)[1] for each in x])
    truth = dist.Normal(distances(theta), NOISE).log_prob(x).sum(-1) - math.log(4) - evidence
    with torch.no_grad():
        return (
            (truth - posterior.guide.log_prob({"theta": theta}, observations={"x": x}))
            .mean()
            .item()
        )


def report(
    name: str, posterior: AmortizedPosterior, seconds: float, gap: float, draws: Any
) -> dict[str, Any]:
    """Prints a line, and returns its figures."""
    upper = draws.resample(DRAWS)["theta"][:, 1].gt(0).double().mean().item()
    weighted = posterior.model is model
    row: dict[str, Any] = {"gap": gap, "upper": upper, "seconds": seconds}
    told = "none"
    if weighted:
        row |= {
            "effective": draws.effective_sample_size.item() / DRAWS,
            "k-hat": draws.pareto_k.item(),
            "log evidence": draws.log_evidence.item(),
        }
        told = f"{row['effective']:.0%} effective, k-hat {row['k-hat']:.2f}, log evidence {row['log evidence']:.3f}"
    print(f"{name:<12}{gap:>14.3f}{upper:>14.2f}{seconds:>8.0f}   {told}")
    return row


def plot(found: dict[str, Tensor], path: Path) -> None:
    """The exact posterior, and draws."""
    plt = pyplot()
    figure, axes = plt.subplots(
        1, 3, figsize=(12, 4), layout="constrained", sharex=True, sharey=True
    )
    density = exact(HEARD)[0].exp()
    axes[0].imshow(density.T, extent=(-1, 1, -1, 1), origin="lower", cmap="Blues", aspect="auto")
    axes[0].set_title("exact, on a grid")
    for axis, (name, theta) in zip(axes[1:], found.items()):
        axis.scatter(*theta.T, s=2, alpha=0.3, color="tab:blue", rasterized=True)
        axis.set_title(name)
    for axis in axes:
        axis.scatter(*STATIONS.T, marker="^", color="tab:red", label="stations")
        axis.set(xlim=(-1, 1), ylim=(-1, 1), xlabel="east")
    axes[0].set_ylabel("north")
    axes[0].legend(frameon=False, loc="upper right")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--simulations", type=int, default=10_000)
    parser.add_argument("--smoke", action="store_true", help="a few steps on 200 simulations")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/simulator"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    count, steps = (200, 10) if arguments.smoke else (arguments.simulations, None)
    pyro.set_rng_seed(arguments.seed)
    test = Simulator(model, observed=["x"]).draw(20 if arguments.smoke else 500)
    print(f"log evidence on the grid: {exact(HEARD)[1]:.3f} nats; {count:,} simulations\n")
    print(f"{'':<12}{'nats off, new':>14}{'upper mode':>14}{'s':>8}   weights")
    rows, found = {}, {}
    for name, given in ("black box", from_simulator(PRIOR, black_box)), ("Pyro model", model):
        pyro.set_rng_seed(arguments.seed)
        start = time.perf_counter()
        posterior = amortize(given, observed=["x"], simulations=count, steps=steps)
        seconds = time.perf_counter() - start
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if arguments.smoke else "default")
            draws = posterior({"x": HEARD}, num_samples=DRAWS)
        gap = held_out(posterior, test.latents["theta"], test.observed["x"])
        rows[name] = report(name, posterior, seconds, gap, draws)
        found[name + (", resampled by weights" if given is model else "")] = draws.resample(DRAWS)[
            "theta"
        ]
    plot(found, arguments.out / "simulator.png")
    (arguments.out / "simulator.json").write_text(json.dumps(rows, indent=2) + "\n")
    print(f"\nWritten: {arguments.out / 'simulator.png'}, simulator.json")


if __name__ == "__main__":
    main()
