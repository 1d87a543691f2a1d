"""The noisy-OR as a Pyro model, the guides that are compared, and how all of them are trained and judged.

=================  ======================================================================================
AVI                a network for each latent's logit, independent latents
ACP                the bound's form of q with psi from a network: Yan, Ailem and Sha 2019, equation 13
faithful, bounded  the same as the start of a masked autoregressive network, in which latents explain away
faithful, plain    the masked autoregressive network alone
CDI                the bound's form with the psi at which the bound is tightest; nothing is learned
=================  ======================================================================================

Each step is one of Adam on 128 points drawn with replacement, at any number of training points, so that the data differ
from step to step and networks read them from the first step on. Latents are relaxed by the Gumbel-softmax, 10 draws a
point, the temperature falling from 0.5 to 0.2. The loss that is reported has 100 true draws a point.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import torch
import torch.nn.functional as F
from noisy_or_distribution import NoisyOr
from pyro.infer import Trace_ELBO
from relaxation import ExponentialDecay, RelaxedELBO
from torch import Tensor, nn
from worlds import World

from pyro_nami import AutoNaMIGuide

__all__ = [
    "LEARNED",
    "SYSTEMS",
    "NoisyOrModel",
    "Setting",
    "draw_latents",
    "fit",
    "negative_elbo",
    "setting",
]

SYSTEMS: dict[str, dict[str, Any]] = {
    "AVI": {"rules": {"z": "learned"}, "inverse": "mean_field", "within": "independent"},
    "ACP": {"rules": {"z": "bounded"}, "inverse": "mean_field"},
    "faithful, bounded": {"rules": {"z": "bounded"}},
    "faithful, plain": {"rules": {"z": "learned"}},
    "CDI": {"rules": {"z": "bound"}, "inverse": "mean_field"},
}
LEARNED = tuple(system for system in SYSTEMS if system != "CDI")
BATCH, PARTICLES, DRAWS = 128, 10, 100


class Setting(NamedTuple):
    """What the random search chooses.

    Attributes:
        hidden: widths of the hidden layers.
        rate: of Adam at the first step; it falls to 0 by a cosine.
        cooled: share of the steps after which the temperature has fallen to 0.2.
    """

    hidden: tuple[int, ...]
    rate: float
    cooled: float


def setting(index: int) -> Setting:
    """Returns the random search's setting of that number: the same for all systems."""
    generator = torch.Generator().manual_seed(index)
    layers, width, rate, cooled = torch.rand(4, generator=generator).tolist()
    hidden = (2 ** (4 + int(5 * width)),) * (1 + int(2 * layers))
    return Setting(hidden, 10 ** (-2.5 + 1.5 * rate), 0.2 + 0.8 * cooled)


class NoisyOrModel(nn.Module):
    """The model; an instance is called with ``x`` ``(points, observed)``.

    Args:
        world: whose parameters it has, or, where it learns, whose sizes and prior it starts with.
        learns: ``()``, or which of ``"weights"`` (with the leak) and ``"prior"`` are parameters.
    """

    def __init__(self, world: World, learns: tuple[str, ...] = ()) -> None:
        super().__init__()
        weights, leak = world.weights, world.leak
        if "weights" in learns:
            weights = nn.Parameter(_inverse_softplus(0.1) + 0.5 * torch.randn_like(weights))
            leak = nn.Parameter(torch.full_like(leak, _inverse_softplus(0.05)))
        self.weights_learned = "weights" in learns
        for name, value in ("_weights", weights), ("_leak", leak), ("_logits", world.prior.logit()):
            if isinstance(value, nn.Parameter) or name == "_logits" and "prior" in learns:
                self.register_parameter(name, nn.Parameter(value))
            else:
                self.register_buffer(name, value)

    @torch.no_grad()
    def start_at(self, x: Tensor) -> None:
        """Starts learned weights and leak at the frequencies of points ``(points, observed)``, half of them by each.

        Where much is seldom seen, latents that bring all of it about would be off for all points, and stay so.
        """
        rates = -0.5 * torch.log1p(-x.mean(0).clamp(1e-5, 0.99))
        noise = torch.randn_like(self._weights).exp()
        self._leak.copy_(rates.expm1().log())
        self._weights.copy_((rates[:, None] * noise).expm1().log())

    @property
    def world(self) -> World:
        """The parameters as they are now."""
        positive: Callable[[Tensor], Tensor] = (
            F.softplus if self.weights_learned else lambda value: value
        )
        return World(positive(self._weights), positive(self._leak), self._logits.sigmoid())

    def forward(self, x: Tensor) -> None:
        world = self.world
        with pyro.plate("points", len(x)):
            z = pyro.sample("z", dist.Bernoulli(world.prior).to_event(1))
            pyro.sample("x", NoisyOr(world.weights, world.leak, z), obs=x)


def fit(
    model: NoisyOrModel,
    system: str,
    x: Tensor,
    chosen: Setting,
    steps: int,
    tell: Callable[[float], None] = lambda share: None,
    guide: AutoNaMIGuide | None = None,
) -> AutoNaMIGuide:
    """Returns the guide of a system, trained on ``x`` ``(points, observed)`` with what the model learns.

    Args:
        tell: is called with the share of the steps that are done.
        guide: one to train further, in place of a new one.
    """
    # where a guide that was trained before would lend a new one its weights
    pyro.clear_param_store()
    if guide is None:
        with torch.device(x.device):
            guide = AutoNaMIGuide(
                model, hidden_features=chosen.hidden, mode="amortized", **SYSTEMS[system]
            )
            guide(_batch(x))
    if system == "CDI":
        return guide
    parameters = [*guide.parameters(), *model.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=chosen.rate)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    temperature = ExponentialDecay.over(0.5, 0.2, max(1, round(chosen.cooled * steps)))
    bound = Trace_ELBO(num_particles=PARTICLES, vectorize_particles=True, max_plate_nesting=1)
    elbo = RelaxedELBO(bound, temperature=temperature)
    for step in range(steps):
        optimizer.zero_grad()
        elbo.loss_and_grads(model, guide, _batch(x))
        nn.utils.clip_grad_norm_(parameters, 10.0 * BATCH)
        optimizer.step()
        scheduler.step()
        if step % 50 == 49:
            tell((step + 1) / steps)
    return guide


@torch.no_grad()
def negative_elbo(model: NoisyOrModel, guide: Callable, x: Tensor, *, limit: float = 2e7) -> float:
    """Returns the mean over points of the negative ELBO in nats, from 100 true draws a point.

    Args:
        limit: largest number of elements of a tensor, which says how many points are treated at once.
    """
    elbo = Trace_ELBO(num_particles=DRAWS, vectorize_particles=True, max_plate_nesting=1)
    parts = x.split(max(1, int(limit / DRAWS / x.shape[1])))
    return math.fsum(elbo.loss(model, guide, part) for part in parts) / len(x)


@torch.no_grad()
def draw_latents(guide: Callable, x: Tensor) -> Tensor:
    """Returns one draw of z for every point, ``(points, latents)``."""
    return guide(x)["z"]


def _batch(x: Tensor) -> Tensor:
    return x[torch.randint(len(x), (BATCH,), device=x.device)]


def _inverse_softplus(value: float) -> float:
    return math.log(math.expm1(value))
