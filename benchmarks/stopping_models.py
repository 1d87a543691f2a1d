"""Models of `stopping.py`: latents that are neither derived nor located, so that a guide learns all or most of them."""

from __future__ import annotations

from collections.abc import Callable

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

__all__ = ["cases"]


def effects(y: Tensor) -> None:
    """300 effects with heavy tails, one datum each."""
    mu, tau = pyro.sample("mu", dist.Normal(0.0, 5.0)), pyro.sample("tau", dist.HalfNormal(2.0))
    with pyro.plate("groups", len(y)):
        theta = pyro.sample("theta", dist.StudentT(4.0, mu, tau))
        pyro.sample("y", dist.Normal(theta, 1.0), obs=y)


def scales(y: Tensor) -> None:
    """120 groups with a mean and a scale each, four data with heavy tails in each."""
    mu, tau = pyro.sample("mu", dist.Normal(0.0, 2.0)), pyro.sample("tau", dist.HalfNormal(1.0))
    nu = pyro.sample("nu", dist.Gamma(2.0, 0.2))
    with pyro.plate("groups", len(y), dim=-2):
        mean = pyro.sample("mean", dist.Normal(mu, tau))
        scale = pyro.sample("scale", dist.LogNormal(0.0, 0.5))
        with pyro.plate("rows", y.shape[1], dim=-1):
            pyro.sample("y", dist.StudentT(nu, mean, scale), obs=y)


def network(x: Tensor, y: Tensor) -> None:
    """A neural network of 40 hidden units with 5 inputs, 40 rows; its last layer is exact given the others."""
    inputs, hidden = x.shape[1], 40
    first = pyro.sample("first", dist.Normal(torch.zeros(inputs, hidden), 1.0).to_event(2))
    bias = pyro.sample("bias", dist.Normal(torch.zeros(hidden), 1.0).to_event(1))
    last = pyro.sample("last", dist.Normal(torch.zeros(hidden, 1), hidden**-0.5).to_event(2))
    noise = pyro.sample("noise", dist.HalfNormal(1.0))
    units = (x @ first + bias.unsqueeze(-2)).tanh()
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal((units @ last).squeeze(-1), noise.unsqueeze(-1)), obs=y)


def population(y: Tensor) -> None:
    """Log sizes of a population that grows to a limit (Ricker's map), in a plain loop."""
    growth = pyro.sample("growth", dist.LogNormal(0.0, 1.0))
    limit = pyro.sample("limit", dist.LogNormal(2.0, 1.0))
    noise = pyro.sample("noise", dist.HalfNormal(0.5))
    error = pyro.sample("error", dist.HalfNormal(0.5))
    z = pyro.sample("z_0", dist.Normal(0.0, 1.0))
    for t in range(len(y)):
        if t:
            z = pyro.sample(f"z_{t}", dist.Normal(z + growth * (1 - z.exp() / limit), noise))
        pyro.sample(f"y_{t}", dist.Normal(z, error), obs=y[t])


def cases() -> dict[str, tuple[Callable, tuple[Tensor, ...]]]:
    """Returns name -> model and its arguments, with data of one seed."""
    pyro.set_rng_seed(0)
    tails = dist.StudentT(4.0)
    x = torch.randn(40, 5)
    wave = (2 * x[:, 0]).sin() + 0.5 * x[:, 1] + 0.1 * torch.randn(40)
    sizes = [torch.tensor(0.0)]
    for _ in range(14):
        step = 0.6 * (1 - sizes[-1].exp() / 8) + 0.1 * torch.randn(())
        sizes.append(sizes[-1] + step)
    return {
        "effects": (effects, (1 + tails.sample((300,)) + torch.randn(300),)),
        "scales": (scales, (torch.randn(120, 1) + tails.sample((120, 4)),)),
        "network": (network, (x, wave)),
        "population": (population, (torch.stack(sizes) + 0.2 * torch.randn(15),)),
    }
