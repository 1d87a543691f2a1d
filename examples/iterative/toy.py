"""Two numbers a datum: the surface of the ELBO, and the ways that learned steps and optimizers take on it.

As Marino, Yue and Mandt 2018, Figure 3: a latent z of two independent standard Normals, data by a fixed random network
with noise. The guide's first estimate is the same for all data, so that everything is left to the learned steps, which
read gradient and estimate alone; these are trained on simulated data. For 300 other data ELBOs are told against steps,
of these and of SGD and Adam at several rates, by the same noise, with gradients of 16 draws everywhere. For the first
one the ELBO is drawn as a function of the two means, the scales being those that the learned steps end at, with the
ways of the estimates. What is converged is the best mean of an optimizer's last tenth of estimates. Run with::

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
sys.path += [str(HERE.parent / "paper"), str(HERE.parent / "noisy_or")]

from experiment import Options, parse, print_table, write_results  # noqa: E402
from refinement import AutoIterativeGuide, IterativeELBO, optimize_directly  # noqa: E402
from refinement.updates import Refinement  # noqa: E402

from pyro_nami import AutoNaMIGuide  # noqa: E402

NAME = "toy"
OBSERVED, NOISE, STEPS, SAMPLES, DATA = 8, 0.3, 10, 16, 300
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
    base = AutoNaMIGuide(
        model, inverse="mean_field", within="independent", exact=False, mode="amortized"
    )
    guide = AutoIterativeGuide(base, steps=STEPS, inputs=("estimate",), samples=SAMPLES)
    decay = 0.1 ** (1 / steps)
    optimizer = pyro.optim.ClippedAdam(
        lambda name: {"lr": 3e-3 if "updaters" in name else 0.0, "lrd": decay}
    )
    svi = SVI(model, guide, optimizer, IterativeELBO(Trace_ELBO()))
    for _ in range(steps):
        svi.step(simulated(model, 64))
    return guide


@torch.no_grad()
def elbos(guide: AutoIterativeGuide, call: Any, estimates: list[Refinement], draws: int) -> Tensor:
    """Returns ELBOs in nats ``(estimates, data)``, all by the same noise."""
    found = []
    for estimate in estimates:
        torch.manual_seed(0)
        found.append(guide.log_weights(call, estimate, draws).mean(0))
    return torch.stack(found)


def measure(options: Options) -> dict[str, Any]:
    """Returns the surface and all ways on it."""
    pyro.set_rng_seed(0)
    model, draws = Model(), options.choose(5, 200, 200)
    guide = trained(model, options.choose(3, 4000, 4000))
    x, steps = simulated(model, options.choose(2, DATA, DATA)), options.choose(4, 300, 300)
    with torch.no_grad():
        call, estimates, *_ = guide.trajectory(x, steps=5 * STEPS)
    ways, converged = {"learned": estimates}, -float("inf")
    for name, rates in RATES.items():
        for rate in rates:
            path = optimize_directly(
                guide, x, steps=steps, lr=rate, optimizer=name, samples=SAMPLES
            )
            mean = {"z": torch.stack([each["z"] for each in path[-max(1, steps // 10) :]]).mean(0)}
            converged = max(converged, elbos(guide, call, [mean], draws).mean().item())
            ways[f"{name}, {rate}"] = path
    one, end, count = simulated_first(guide, x), estimates[-1]["z"][0], options.choose(4, 25, 25)
    places = torch.stack([each["z"][0, :, 0] for way in ways.values() for each in way])
    low, high = places.min(0).values - 0.5, places.max(0).values + 0.5
    axes = [torch.linspace(float(a), float(b), count) for a, b in zip(low, high)]
    means = torch.cartesian_prod(axes[1], axes[0]).flip(-1)
    points = [{"z": torch.stack([mean, end[:, 1]], -1)[None]} for mean in means]
    return {
        "axes": [axis.tolist() for axis in axes],
        "surface": elbos(guide, one, points, draws).view(count, count).tolist(),
        "converged": converged,
        "ways": {
            name: {
                "places": [each["z"][0, :, 0].tolist() for each in way],
                "ELBO": elbos(guide, call, way, draws).mean(-1).tolist(),
            }
            for name, way in ways.items()
        },
    }


def simulated_first(guide: AutoIterativeGuide, x: Tensor) -> Any:
    """Returns the call of the first datum alone."""
    with torch.no_grad():
        return guide.trajectory(x[:1], steps=0).call


def within(way: dict[str, Any], converged: float) -> int | None:
    """Returns the number of steps after which an ELBO is within 0.1 nats of the converged one, if it ever is."""
    return next((i for i, elbo in enumerate(way["ELBO"]) if elbo > converged - 0.1), None)


def claims(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns what is claimed, beside what was found."""
    taken = {name: within(way, found["converged"]) for name, way in found["ways"].items()}
    learned, late = taken.pop("learned"), found["ways"]["learned"]["ELBO"][STEPS:]
    fewest = min((steps for steps in taken.values() if steps is not None), default=None)
    drop = max(late) - min(late)
    rows = [
        (
            "learned steps are within 0.1 nats of converged direct optimization after 10 at most",
            learned is not None and learned <= 10,
            learned,
        ),
        (
            "optimizers at the best of three rates each take ten times as many",
            learned is not None and (fewest is None or fewest >= 10 * learned),
            fewest,
        ),
        ("five times the trained steps stay within 0.1 nats of the best", drop < 0.1, drop),
    ]
    return [
        {"claim": claim, "holds": holds, "ours": ours, "why": str(ours)}
        for claim, holds, ours in rows
    ]


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
        right.plot(
            way["ELBO"],
            ".-",
            markersize=4,
            linewidth=1,
            zorder=3 if name == "learned" else 2,
            label=name,
        )
    end = found["converged"]
    right.axhline(end, color="gray", linestyle="--")
    left.set(xlabel="offset of the first mean", ylabel="offset of the second mean")
    right.set(
        xlabel="steps",
        ylabel="ELBO, nats a datum",
        xscale="symlog",
        xlim=(0, None),
        ylim=(end - 10, end + 1),
    )
    left.legend(frameon=False, fontsize=8)
    figure.savefig(file, dpi=130)
    plt.close(figure)


def main() -> None:
    """Trains, draws, and prints how many steps each way takes."""
    options = parse(__doc__, (1, 1, 1), None, HERE)
    found = measure(options)
    rows = []
    for name, way in found["ways"].items():
        steps, elbo = within(way, found["converged"]), way["ELBO"]
        rows.append(
            [name, f"{elbo[0]:.2f}", f"{elbo[-1]:.2f}", "never" if steps is None else steps]
        )
    print_table(
        ["", "ELBO at first", "in the end", f"steps to {found['converged']:.2f} - 0.1"], rows
    )
    draw(write_results(NAME, {**found, "claims": claims(found)}, options), found)


if __name__ == "__main__":
    main()
