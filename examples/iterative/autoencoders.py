"""The autoencoders that standard and iterative inference are compared on, and their data."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor, nn

HERE = Path(__file__).parent
sys.path += [str(HERE.parent / "paper"), str(HERE.parent / "noisy_or")]

from experiment import Options  # noqa: E402
from images import halved, read_images  # noqa: E402
from worlds import titles  # noqa: E402

__all__ = ["DEFAULT", "HERE", "MODELS", "Setting", "read", "setting"]


class Setting(NamedTuple):
    """How large and how long. ``beyond``: times the trained number of steps that are taken at most."""

    latents: int
    units: int
    steps: int
    batch: int
    rate: float
    test: int
    draws: int
    optimizer_steps: int
    beyond: int = 5


SMOKE = Setting(4, 8, 3, 8, 2e-4, 4, 5, 3)
DEFAULT = Setting(16, 128, 1500, 64, 1e-3, 200, 500, 300)
LARGE = Setting(64, 512, 200_000, 64, 2e-4, 10_000, 5000, 1000)


# ---- models


def layers(*widths: int) -> nn.Sequential:
    """Returns a network with ELU units between linear layers."""
    pairs = list(zip(widths, widths[1:]))
    parts = [[nn.Linear(*pair), nn.ELU()] for pair in pairs[:-1]]
    return nn.Sequential(*(layer for part in parts for layer in part), nn.Linear(*pairs[-1]))


class Single(nn.Module):
    """One level of latents; pixels."""

    def __init__(self, chosen: Setting, observed: int) -> None:
        super().__init__()
        self.latents, self.net = (
            chosen.latents,
            layers(chosen.latents, chosen.units, chosen.units, observed),
        )

    def observe(self, z: Tensor, x: Tensor) -> None:
        pyro.sample("x", dist.Bernoulli(logits=self.net(z)).to_event(1), obs=x)

    def forward(self, x: Tensor) -> None:
        pyro.module("decoder", self)
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(x.new_zeros(self.latents), 1.0).to_event(1))
            self.observe(z, x)


class Text(Single):
    """One level of latents; counts of words."""

    def observe(self, z: Tensor, x: Tensor) -> None:
        words = dist.Multinomial(total_count=1, logits=self.net(z), validate_args=False)
        pyro.sample("x", words, obs=x)  # whose density counts the words that there are


class Hierarchical(nn.Module):
    """Two levels of latents; pixels."""

    def __init__(self, chosen: Setting, observed: int) -> None:
        super().__init__()
        low, top = chosen.latents, max(1, chosen.latents // 2)
        self.top, self.prior = top, layers(top, low, 2 * low)
        self.net = layers(low, chosen.units, chosen.units, observed)

    def forward(self, x: Tensor) -> None:
        pyro.module("decoder", self)
        with pyro.plate("data", len(x)):
            top = pyro.sample("top", dist.Normal(x.new_zeros(self.top), 1.0).to_event(1))
            mean, raw = self.prior(top).chunk(2, -1)
            low = pyro.sample(
                "low", dist.Normal(mean, nn.functional.softplus(raw) + 1e-3).to_event(1)
            )
            pyro.sample("x", dist.Bernoulli(logits=self.net(low)).to_event(1), obs=x)


MODELS: dict[str, Any] = {"single": Single, "hierarchical": Hierarchical, "text": Text}


def setting(options: Options) -> Setting:
    found: Setting = options.choose(SMOKE, DEFAULT, LARGE)
    steps = options.extra["steps"]
    return found if steps is None else found._replace(steps=steps)


def read(options: Options, kind: str) -> tuple[Tensor, Tensor, str]:
    """Returns data for training and testing, and what they are called."""
    if kind == "text":
        x = titles(options.extra["titles"]).x
        x = x[x.sum(1) > 0]
        x = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(0))]
        return x[:-1000], x[-1000:], "titles of NeurIPS papers"
    images = read_images(options.extra["data"])
    if images.side == 28 and options.setting != "paper":
        images = halved(images)
    return images.train, images.test, images.name
