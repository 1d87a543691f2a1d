"""Two numbers a datum: the surface of the ELBO, and the ways that learned steps and optimizers take on it.

As Marino, Yue and Mandt 2018, Figure 3: a latent z of two independent standard Normals, data by a fixed random network
with noise. The guide's first estimate is the same for all data, so that everything is left to the learned steps, which
read gradient and estimate alone; these are trained on simulated data. For other data the ELBO is drawn as a function of
the two means, the scales being those that the learned steps end at, with the way of the estimates, and those of SGD and
Adam at the best of some rates. Beside it the ELBO against steps. Run with::

    python examples/iterative/toy.py [--smoke] [--out FOLDER]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI, Trace_ELBO
from torch import Tensor, nn

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "paper"))

from experiment import Options, parse, print_table, write_results  # noqa: E402

from pyro_nami import AutoIterativeGuide, AutoNaMIGuide, IterativeELBO  # noqa: E402
from pyro_nami.inference import optimize_directly  # noqa: E402
from pyro_nami.inference.refining import Refinement  # noqa: E402

NAME = "toy"
OBSERVED, NOISE, STEPS = 8, 0.3, 10
RATES = {"SGD": (0.001, 0.003, 0.01), "Adam": (0.03, 0.1, 0.3)}


class Model(nn.Module):
    """z ~ N(0, 1) twice, x ~ N(f(z), noise) with a network f of fixed random weights."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes = ((16, 2), (OBSERVED, 16))
        self.first, self.second = (torch.randn(shape, generator=generator) for shape in shapes)

    def mean(self, z: Tensor) -> Tensor:
        return torch.tanh(z @ self.first.T) @ self.second.T / 2

    def forward(self, x: Tensor) -> None:
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(x.new_zeros(2), 1.0).to_event(1))
            pyro.sample("x", dist.Normal(self.mean(z), NOISE).to_event(1), obs=x)


def simulated(model: Model, count: int) -> Tensor:
    mean = model.mean(torch.randn(count, 2))
    return mean + NOISE * torch.randn_like(mean)


def trained(model: Model, steps: int) -> AutoIterativeGuide:
    """Returns the guide, its steps trained on data that are simulated anew, its first estimate left as it is."""
    base = AutoNaMIGuide(model, inverse="mean_field", within="independent", exact=False, refine=None)
    guide = AutoIterativeGuide(base, steps=STEPS, inputs=("estimate",), samples=4)
    decay = 0.1 ** (1 / steps)
    optimizer = pyro.optim.ClippedAdam(lambda name: {"lr": 3e-3 if "updaters" in name else 0.0, "lrd": decay})
    svi = SVI(model, guide, optimizer, IterativeELBO(Trace_ELBO()))
    for _ in range(steps):
        svi.step(simulated(model, 64))
    return guide


@torch.no_grad()
def elbos(guide: AutoIterativeGuide, call: Any, estimates: list[Refinement], draws: int) -> list[float]:
    return [guide.log_weights(call, each, draws).mean().item() for each in estimates]


def measure(options: Options) -> dict[str, Any]:
    """Returns the surface and all ways on it."""
    pyro.set_rng_seed(0)
    model, draws = Model(), options.choose(5, 200, 200)
    guide = trained(model, options.choose(3, 1500, 1500))
    x = simulated(model, 1)
    with torch.no_grad():
        call, estimates, *_ = guide.trajectory(x, steps=3 * STEPS)
    ways = {"learned": estimates}
    steps = options.choose(4, 300, 300)
    for name, rates in RATES.items():
        tried = [
            (optimize_directly(guide, x, steps=steps, lr=rate, optimizer=name, samples=4), rate)
            for rate in rates
        ]
        scores = [elbos(guide, call, path[-5:], draws) for path, _ in tried]
        best = max(range(len(tried)), key=lambda i: sum(scores[i]))
        ways[f"{name}, {tried[best][1]}"] = tried[best][0]
    end, count = ways["learned"][-1]["z"], options.choose(4, 25, 25)
    places = torch.stack([each["z"][0, :, 0] for way in ways.values() for each in way])
    low, high = places.min(0).values - 0.5, places.max(0).values + 0.5
    axes = [torch.linspace(float(a), float(b), count) for a, b in zip(low, high)]
    surface = [
        [
            elbos(guide, call, [{"z": torch.stack([torch.stack([a, b]), end[0, :, 1]], -1)[None]}], draws)[0]
            for a in axes[0]
        ]
        for b in axes[1]
    ]
    return {
        "axes": [axis.tolist() for axis in axes],
        "surface": surface,
        "ways": {
            name: {
                "places": [each["z"][0, :, 0].tolist() for each in way],
                "ELBO": elbos(guide, call, way, draws),
            }
            for name, way in ways.items()
        },
    }


def draw(file: Path, found: dict[str, Any]) -> None:
    """Draws the surface with the ways on it, and the ELBO against steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    surface = torch.tensor(found["surface"])
    top = surface.max().item()
    levels = [top - gap for gap in (300, 100, 30, 10, 3, 1, 0.3)]
    left.contour(*found["axes"], surface.tolist(), levels=sorted(set(levels)), colors="lightgray")
    for name, way in found["ways"].items():
        left.plot(*zip(*way["places"]), ".-", markersize=4, linewidth=1, label=name)
        right.plot(way["ELBO"], ".-", markersize=4, linewidth=1, label=name)
    left.set(xlabel="offset of the first mean", ylabel="offset of the second mean")
    right.set(xlabel="steps", ylabel="ELBO, nats", xscale="symlog", ylim=(top - 60, top + 2))
    left.legend(frameon=False, fontsize=8)
    figure.savefig(file, dpi=130)
    plt.close(figure)


def main() -> None:
    """Trains, draws, and prints how many steps each way takes to within 0.1 nats of the best end."""
    options = parse(__doc__, (1, 1, 1), None, HERE)
    found = measure(options)
    best = max(max(way["ELBO"]) for way in found["ways"].values())
    rows = []
    for name, way in found["ways"].items():
        within = next((i for i, elbo in enumerate(way["ELBO"]) if elbo > best - 0.1), None)
        rows.append(
            [name, f"{way['ELBO'][0]:.2f}", f"{way['ELBO'][-1]:.2f}", "never" if within is None else within]
        )
    print_table(["", "ELBO at first", "in the end", "steps to within 0.1 of the best"], rows)
    draw(write_results(NAME, {**found, "claims": []}, options), found)


if __name__ == "__main__":
    main()
