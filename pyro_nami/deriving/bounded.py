"""Conditionals of binary latents under bounds on their children's log density that are linear in the latents.

With log p(children | z) >= c + eta . z (`pyro_nami.factors.bounds`) the conditional of each z is a
Bernoulli whose logits are those of the prior plus eta, the slope of the bound. The bound's
parameters xi come from a network, or are those that make the bound tightest at this conditional (a
fixed point).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_nami.deriving.expansion import (
    MOST_RUNS,
    TOLERANCE,
    Expansion,
    broadcast,
    irregular,
    squeezed,
)
from pyro_nami.deriving.in_turn import InTurn, Order, bound_of, predictor_of
from pyro_nami.deriving.probing import ProbedExpansion
from pyro_nami.factors.wrappers import innermost
from pyro_nami.program.masks import without_gaps
from pyro_nami.program.runner import Message, Sites, Values

__all__ = ["LinearBernoulli"]


class LinearBernoulli(ProbedExpansion):
    """The conditionals of binary latents whose children's log density is bounded by a linear function of them.

    Args:
        group, leading, nesting, differentiable, away: as for `Expansion`.
        orders: member -> the order of its elements, if these are to be drawn in turn.
        observed: further latents that would be members, had the call no values of them.

    References:
        Jaakkola & Jordan 1999, Variational Probabilistic Inference and the QMR-DT Network; Yan, Ailem & Sha 2019,
        Amortized Inference of Variational Bounds for Learning Noisy-OR, equation 13.
    """

    def __init__(
        self,
        *args: Any,
        orders: Mapping[str, Order] | None = None,
        observed: Collection[str] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._orders = orders
        self._observed = observed
        self.prior_logits: dict[str, Tensor] = {}
        self._slopes: dict[str, Tensor] = {}
        self._rounds = 1
        self._at: dict[str, Tensor] = {}  # values to expand about; at first the means of priors
        # member -> what share of the last gap to the fixed point was gone, and that gap
        self._steps: dict[str, tuple[Tensor, Tensor]] = {}

    def start(self, name: str, prior: Any, shape: torch.Size) -> Tensor:
        if name in self._at:
            return self._at[name]
        mean = prior.mean.detach()
        if self.away is not None:
            mean = (
                mean.logit(1e-3) + self.away * irregular(shape, mean, len(self.values))
            ).sigmoid()
        return mean.expand(shape)

    def solve(self, sites: Sites) -> Expansion | None:
        if self.group.bound == "bound":
            self.xi = {
                name: self._tightest(sites[name]) for name in self.group.children if name in sites
            }
        self.fit(sites)
        if self._orders:
            return InTurn(self, sites, self._orders, self._observed)
        if self.group.bound != "bound" or self._rounds >= MOST_RUNS:
            return None
        self._rounds += 1
        gaps = {
            name: self.probabilities(name).detach() - self.values[name].detach()
            for name in self._slopes
        }
        if max(float(gap.abs().max()) for gap in gaps.values()) < TOLERANCE:
            return None
        # The more is explained the less a bound asks for: where whole steps swing to and fro, they are halved.
        for name, gap in gaps.items():
            step, before = self._steps.get(name, (torch.ones_like(gap), gap))
            step = torch.where(gap * before < 0, 0.5 * step, (1.2 * step).clamp(max=1.0))
            self._steps[name], self._at[name] = (step, gap), self.values[name].detach() + step * gap
        return self

    def fit(self, sites: Sites) -> None:
        slopes = self.take(sites, again=self.differentiable)
        for name, slope in slopes.items():
            shape = self.shapes[name]
            prior: Any = innermost(self.priors[name])
            logits = prior.logits.expand(broadcast(slope.shape, shape)).reshape(shape)
            self.finite[name] = slope.isfinite()
            slope = slope.where(self.finite[name], 0.0).reshape(shape)
            self.prior_logits[name] = logits
            self._slopes[name] = slope

    def _logits(self, name: str) -> Tensor:
        logits = self.prior_logits[name] + self._slopes[name]
        return logits if self.differentiable else logits.detach()

    def conditional(self, name: str, values: Values, dims: int | None = None) -> Any:
        return self.bernoulli(name, self._logits(name), dims)

    def probabilities(self, name: str) -> Tensor:
        """Returns the probabilities of a member, ``(*batch, *plates, *event)``."""
        return self._logits(name).sigmoid()

    def bernoulli(self, name: str, logits: Tensor, dims: int | None = None) -> Any:
        """Returns a member's distribution by logits ``(*batch, *plates, *event)``, without ones beyond ``dims``."""
        event_dim = len(self.priors[name].event_shape)
        logits = squeezed(logits, dims, event_dim)
        return dist.Bernoulli(logits=logits, validate_args=False).to_event(event_dim)

    def _tightest(self, site: Message) -> Tensor:
        """Returns where the bound of a child is tightest, given the means that the run was made at."""
        mean = predictor_of(site)
        mean = mean if self.differentiable else mean.detach()
        tightest = bound_of(site).tightest(without_gaps(site), mean, mean.square())
        return tightest.reshape(*tightest.shape[: mean.dim() - site["fn"].event_dim], -1)

    def predict(self, values: Values) -> list[Tensor]:
        slopes = self._slopes.items()
        return [values[name].reshape(slope.shape) * slope.detach() for name, slope in slopes]
