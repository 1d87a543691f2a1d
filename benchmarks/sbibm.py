"""Tasks of the simulation-based inference benchmark, as Pyro models, by `amortize` with its defaults.

Lueckmann et al. 2021, Benchmarking Simulation-Based Inference: eight of its tasks, written here as models with a vector
of latents and one of data. Told are the negative log density of held-out latents in nats, beside the exact one where
that is known, and seconds; whether the guide passes `calibrate` at 1,000 data sets, and what the posterior gives by
default (at 19 draws each); then, on data sets of the prior,
the median share of draws that are effective, of the guide's (20 data sets, 1,000 draws each) and of what the posterior
gives by default (5, 4,000 draws each); and how well a classifier tells draws from those of the posterior (C2ST: 0.5 if
not at all; mean of the 5), of 1,000 of the guide's and of 1,000 resampled from the default's. References are as many
from 4,000 chains by 200 temperatures from the prior (40 where the model solves differential equations), which see no
guide. Guides are given as many simulations as the others; moves between epochs, and weights, take the likelihood, which
methods for black boxes lack. For comparison: sbi's maf and nsf at 10,000 simulations, by their defaults, as given to us
(one seed, two cores; sbi cannot be had on the machine that these are run on). Run with::

    python benchmarks/sbibm.py [--smoke] [--simulations 10000] [--seeds 1] [--only NAME ...]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor, nn

from pyro_nami import amortize, calibrate
from pyro_nami.inference import Simulator, annealed_importance_sampling

RESULTS = Path(__file__).parent / "results" / "sbibm.json"
TEST, DATA_SETS, DRAWS, REFERENCES, CHAINS = 2000, 20, 1000, 5, 4
SPREAD = 0.1**0.5  # of the linear tasks
PAIRS = {"effective": ".0%", "c2st": ".2f"}  # of the guide's draws, and of what the posterior gives by default


class Crescent(dist.TorchDistribution):
    """A noisy half circle of radius 0.1 to the right of a place ``(*batch, 2)``."""

    arg_constraints: dict = {}
    support = dist.constraints.real_vector
    has_rsample = True

    def __init__(self, place: Tensor) -> None:
        self.place = place
        super().__init__(place.shape[:-1], place.shape[-1:], validate_args=False)

    def expand(self, batch_shape: torch.Size, _instance: Any = None) -> Crescent:
        return Crescent(self.place.expand(torch.Size(batch_shape) + self.event_shape))

    def rsample(self, sample_shape: torch.Size = torch.Size()) -> Tensor:
        shape = self._extended_shape(torch.Size(sample_shape))[:-1]
        angle = math.pi * (torch.rand(shape).to(self.place) - 0.5)
        radius = 0.1 + 0.01 * torch.randn(shape).to(self.place)
        return self.place + torch.stack([radius * angle.cos(), radius * angle.sin()], -1)

    def log_prob(self, value: Tensor) -> Tensor:
        away = value - self.place
        radius = away.norm(dim=-1)
        found = dist.Normal(0.1, 0.01).log_prob(radius) - math.log(math.pi) - radius.log()
        return torch.where(away[..., 0] > 0, found, torch.full_like(found, -math.inf))


def two_moons() -> None:
    theta = pyro.sample("theta", dist.Uniform(-torch.ones(2), 1.0).to_event(1))
    a, b = theta.unbind(-1)
    pyro.sample("x", Crescent(torch.stack([0.25 - (a + b).abs() / 2**0.5, (b - a) / 2**0.5], -1)))


def gaussian_mixture() -> None:
    theta = pyro.sample("theta", dist.Uniform(-10 * torch.ones(2), 10.0).to_event(1))
    both = dist.Normal(theta.unsqueeze(-2), torch.tensor([[1.0], [0.1]])).to_event(1)
    pyro.sample("x", dist.MixtureSameFamily(dist.Categorical(torch.ones(2)), both))


def slcp() -> None:
    """Four points of a plane, their mean, scales and correlation by five numbers."""
    theta = pyro.sample("theta", dist.Uniform(-3 * torch.ones(5), 3.0).to_event(1))
    first, second, correlation = theta[..., 2].square(), theta[..., 3].square(), theta[..., 4].tanh()
    rest = (1 - correlation.square()).clamp(min=1e-12).sqrt()
    rows = [first + 1e-6, torch.zeros_like(first)], [correlation * second, second * rest + 1e-6]
    scale = torch.stack([torch.stack(row, -1) for row in rows], -2)
    points = dist.MultivariateNormal(theta[..., None, :2], scale_tril=scale[..., None, :, :])
    pyro.sample("x", points.expand(theta.shape[:-1] + (4,)).to_event(1))


def gaussian_linear() -> None:
    theta = pyro.sample("theta", dist.Normal(torch.zeros(10), SPREAD).to_event(1))
    pyro.sample("x", dist.Normal(theta, SPREAD).to_event(1))


def gaussian_linear_uniform() -> None:
    theta = pyro.sample("theta", dist.Uniform(-torch.ones(10), 1.0).to_event(1))
    pyro.sample("x", dist.Normal(theta, SPREAD).to_event(1))


def bernoulli_glm() -> None:
    """Spikes of a neuron in 100 bins by an offset and a smooth filter over the last nine of a white stimulus."""
    generator = torch.Generator().manual_seed(42)
    stimulus = torch.randn(108, generator=generator)
    design = torch.stack([torch.ones(100), *(stimulus[8 - i : 108 - i] for i in range(9))], -1)
    difference = torch.eye(9) - torch.ones(8).diag(-1)
    rough = difference @ difference + (torch.arange(9) / 9).sqrt().diag()
    precision = torch.block_diag(torch.tensor([[0.5]]), rough.T @ rough)
    theta = pyro.sample("theta", dist.MultivariateNormal(torch.zeros(10), precision_matrix=precision))
    pyro.sample("x", dist.Bernoulli(logits=theta @ design.T).to_event(1))


def solved(slope: Callable[[Tensor], Tensor], start: Tensor, step: float, every: int) -> Tensor:
    """States ``(*batch, 10, size)`` after each of ten times ``every`` Runge-Kutta steps from ``start``.

    States are logs, and held to e-9 to e9 parts, so that all draws of a prior end somewhere.
    """
    state, states = start, []
    for count in range(10 * every):
        a = slope(state)
        b = slope(state + step / 2 * a)
        c = slope(state + step / 2 * b)
        d = slope(state + step * c)
        state = (state + step / 6 * (a + 2 * b + 2 * c + d)).clamp(-20.0, 20.0)
        if count % every == every - 1:
            states.append(state)
    return torch.stack(states, -2)


def sir() -> None:
    """An epidemic of a million: contacts and recoveries a day, by 1,000 tests on each of ten days."""
    theta = pyro.sample("theta", dist.LogNormal(torch.tensor([0.4, 0.125]).log(), torch.tensor([0.5, 0.2])).to_event(1))
    contact, recovery = theta.unbind(-1)

    def slope(state: Tensor) -> Tensor:  # of the logs of the shares that are susceptible and infected
        susceptible, infected = state.exp().unbind(-1)
        return torch.stack([-contact * infected, contact * susceptible - recovery], -1)

    start = torch.tensor([0.0, -math.log(1e6)]).expand(theta.shape)
    share = solved(slope, start, 2.0, 8)[..., 1].exp().clamp(1e-7, 1 - 1e-6)
    pyro.sample("x", dist.Binomial(1000, share).to_event(1))


def lotka_volterra() -> None:
    """Prey and predators: growth, losses, and gains of both, by counts with errors of a tenth at ten times."""
    loc = torch.tensor([-0.125, -3.0, -0.125, -3.0])
    theta = pyro.sample("theta", dist.LogNormal(loc, 0.5).to_event(1))
    growth, eaten, loss, gain = theta.unbind(-1)

    def slope(state: Tensor) -> Tensor:
        prey, predators = state.exp().unbind(-1)
        return torch.stack([growth - eaten * predators, gain * prey - loss], -1)

    start = torch.tensor([30.0, 1.0]).log().expand(theta.shape[:-1] + (2,))
    pyro.sample("x", dist.LogNormal(solved(slope, start, 0.1, 20), 0.1).to_event(2))


# ---- exact log densities of latents given data


def exact_moons(theta: Tensor, x: Tensor) -> Tensor:
    """Both signs of the sum are as likely; how much of the half circles is in the square 4,000 draws say."""
    a, b = theta.unbind(-1)
    place = torch.stack([0.25 - (a + b).abs() / 2**0.5, (b - a) / 2**0.5], -1)
    total, difference = ((x - Crescent(torch.zeros(2)).sample((4000, 1))) * 2**0.5).unbind(-1)
    total = 0.25 * 2**0.5 - total
    inside = (total > 0) & ((total - difference).abs() < 2) & ((total + difference).abs() < 2)
    return Crescent(place).log_prob(x) - math.log(2) - inside.float().mean(0).log()


def exact_mixture(theta: Tensor, x: Tensor) -> Tensor:
    parts = [dist.Normal(x.double(), scale) for scale in (1.0, 0.1)]
    inside = [(part.cdf(torch.tensor(10.0)) - part.cdf(torch.tensor(-10.0))).log().sum(-1) for part in parts]
    at = [part.log_prob(theta.double()).sum(-1) for part in parts]
    return torch.stack(at).logsumexp(0) - torch.stack(inside).logsumexp(0)


def exact_linear(theta: Tensor, x: Tensor) -> Tensor:
    return dist.Normal(x / 2, SPREAD / 2**0.5).log_prob(theta).sum(-1)


def exact_uniform(theta: Tensor, x: Tensor) -> Tensor:
    parts = dist.Normal(x.double(), SPREAD)
    inside = parts.cdf(torch.tensor(1.0)) - parts.cdf(torch.tensor(-1.0))
    return (parts.log_prob(theta.double()) - inside.log()).sum(-1)


class Task(NamedTuple):
    model: Callable
    exact: Callable[[Tensor, Tensor], Tensor] | None
    sbi: tuple[float, float] | None  # maf and nsf at 10,000 simulations, where they were given to us
    temperatures: int = 200  # of the references


TASKS = {
    "two_moons": Task(two_moons, exact_moons, (-2.81, -3.54)),
    "gaussian_mixture": Task(gaussian_mixture, exact_mixture, (1.81, 1.04)),
    "slcp": Task(slcp, None, (6.21, 4.76)),
    "gaussian_linear": Task(gaussian_linear, exact_linear, (-0.71, -0.43)),
    "gaussian_linear_uniform": Task(gaussian_linear_uniform, exact_uniform, (0.29, 0.19)),
    "bernoulli_glm": Task(bernoulli_glm, None, (2.28, 2.64)),
    "sir": Task(sir, None, None, 40),
    "lotka_volterra": Task(lotka_volterra, None, None, 40),
}


# ---- draws against draws


def reference(model: Callable, x: Tensor, draws: int, temperatures: int) -> Tensor:
    """Draws of the posterior ``(draws, data sets, latents)`` that no guide has seen."""
    options: dict[str, Any] = {"num_chains": CHAINS * draws, "num_leapfrog_steps": 10, "resample": True}
    found = annealed_importance_sampling(model, num_temperatures=temperatures, observations={"x": x}, **options)
    return found.weighted().resample(draws)["theta"]


def two_sample(first: Tensor, second: Tensor, steps: int) -> float:
    """Accuracy of a classifier of draws ``(draws, latents)``, by five-fold cross-validation, as in the benchmark.

    It has two layers of ten units a latent; draws are standardized by the first.
    """
    z = (torch.cat((first, second)) - first.mean(0)) / first.std(0)
    label = torch.arange(len(z)).ge(len(first)).float()
    order, width, right = torch.randperm(len(z)), 10 * z.shape[1], 0.0
    for fold in order.chunk(5):
        train = order[~torch.isin(order, fold)]
        parts = [nn.Linear(z.shape[1], width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)]
        network = nn.Sequential(*parts)
        optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
        for _ in range(steps):
            rows = train[torch.randint(len(train), (200,))]
            optimizer.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(network(z[rows]).squeeze(-1), label[rows]).backward()
            optimizer.step()
        right += (network(z[fold]).squeeze(-1).gt(0) == label[fold].bool()).float().sum().item()
    return right / len(z)


def run(name: str, simulations: int, seed: int, steps: int | None) -> dict[str, Any]:
    """One row: a compiled posterior on held-out draws."""
    task = TASKS[name]
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    simulator = Simulator(task.model, observed=["x"])
    given, test = simulator.draw(simulations), simulator.draw(TEST)
    start = time.perf_counter()
    posterior = amortize(task.model, observed=["x"], simulations=given, steps=steps, progress=False)
    seconds = time.perf_counter() - start
    theta, x = test.latents["theta"], test.observed["x"]
    with torch.no_grad():
        loss = -posterior.guide.log_prob({"theta": theta}, observations={"x": x}).mean().item()
    draws, temperatures, fit = (DRAWS, task.temperatures, 1000) if steps is None else (100, 2, 2)
    plain = posterior({"x": x[:DATA_SETS]}, draws, num_temperatures=2, defensive=0)
    sets = {"observed": ["x"], "num_datasets": 1000 if steps is None else 20}
    cheap = {"num_draws": 19} if steps is None else {"num_draws": 3}
    checked = [calibrate(task.model, posterior.guide, **sets), calibrate(task.model, posterior, **sets, **cheap)]
    few = x[:REFERENCES]
    found = posterior({"x": few}, CHAINS * draws, num_temperatures=None if steps is None else 3)
    exact = reference(task.model, few, draws, temperatures)
    drawn = plain.samples["theta"], found.resample(draws)["theta"]
    told = [statistics.fmean(two_sample(exact[:, i], z[:, i], fit) for i in range(len(few))) for z in drawn]
    return {
        "task": name,
        "simulations": simulations,
        "seed": seed,
        "loss": loss,
        "exact": None if task.exact is None else -task.exact(theta, x).mean().item(),
        "effective": [(each.effective_sample_size / each.num_samples).median().item() for each in (plain, found)],
        "c2st": told,
        "calibrated": [each.passed for each in checked],
        "seconds": seconds,
        "rule": posterior.guide.rules["theta"].rule,
    }


def main() -> None:
    """Runs all tasks, prints the table and writes it, unless it is a smoke run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a few steps on 100 simulations; writes nothing")
    parser.add_argument("--simulations", type=int, default=10_000)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=TASKS, default=list(TASKS), metavar="NAME")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = []
    print(f"{'':24}{'loss':>8}{'exact':>8}{'maf':>8}{'nsf':>8}{'effective':>16}{'C2ST':>14}{'calibrated':>12}{'s':>6}")
    for name in arguments.only:
        for seed in range(arguments.seeds):
            row = run(name, 100 if arguments.smoke else arguments.simulations, seed, 5 if arguments.smoke else None)
            exact = "" if row["exact"] is None else f"{row['exact']:.2f}"
            sbi = TASKS[name].sbi if row["simulations"] == 10_000 else None
            maf, nsf = sbi or ("", "")
            effective, told = (" to ".join(format(each, form) for each in row[key]) for key, form in PAIRS.items())
            passed = " to ".join("yes" if each else "no" for each in row["calibrated"])
            print(
                f"{name:24}{row['loss']:8.2f}{exact:>8}{maf:>8}{nsf:>8}{effective:>16}{told:>14}"
                f"{passed:>12}{row['seconds']:6.0f}",
                flush=True,
            )
            rows.append({**row, "sbi": sbi})
    print(f"mean {statistics.fmean(row['loss'] for row in rows):.3f}")
    if not arguments.smoke:
        others = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
        own = {(row["task"], row["simulations"]) for row in rows}
        rows += [row for row in others if (row["task"], row["simulations"]) not in own]
        RESULTS.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
