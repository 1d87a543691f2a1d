"""The exact conditional of a discrete latent with few values, by enumeration.

q(z = k | earlier sites) is the softmax over k of log p(z = k) plus the log density of the children
at z = k. One run of the model gives all k, along a batch dim of its own to the left of all others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions.kl import register_kl

from pyro_nami.deriving.expansion import irregular, squeezed, within_plates
from pyro_nami.deriving.probing import ProbedExpansion
from pyro_nami.factors.wrappers import innermost
from pyro_nami.program.runner import Sites, Values

__all__ = ["Enumeration", "without_score"]


class _WithoutScore:
    """A discrete conditional whose draws ELBOs take for reparametrized, which leaves out the score function.

    log p(z, children) - log q(z) does not depend on z, so nothing has to tell better values of z from worse ones.
    """

    has_rsample = True

    def rsample(self, sample_shape: Any = torch.Size()) -> Tensor:
        return self.sample(sample_shape)  # type: ignore[attr-defined]


_KINDS: dict[type, Any] = {
    kind: type(f"_{kind.__name__}", (_WithoutScore, kind), {})
    for kind in (dist.Categorical, dist.OneHotCategorical, dist.Bernoulli)
}


for _kind in _KINDS.values():

    @register_kl(_kind, torch.distributions.Distribution)
    def _no_kl(p: Any, q: Any) -> Tensor:
        """An analytic KL would leave the score of the rest of the bound out, which its draws then need."""
        raise NotImplementedError


def without_score(base: Any) -> Callable[[Tensor], Any]:
    """Returns what makes distributions of a type, without their score, from log-probabilities ``(*batch, K)``."""
    kind = _KINDS[type(base)]

    def make(logits: Tensor) -> Any:
        if issubclass(kind, dist.Bernoulli):
            return kind(logits=logits[..., 1] - logits[..., 0], validate_args=False)
        return kind(logits=logits, validate_args=False)

    return make


class Enumeration(ProbedExpansion):
    """The exact conditional of one discrete latent.

    Args:
        group, leading, nesting, differentiable, away: as for `Expansion`; other points are other assignments.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.count = self.group.elements[0] if self.away is None else None

    def start(self, name: str, prior: Any, shape: torch.Size) -> Tensor:
        """Returns all values; or for each instance one."""
        event, batch = prior.event_shape, shape[: len(shape) - len(prior.event_shape)]
        values = innermost(prior).enumerate_support(expand=False).reshape((-1, *event))
        if self.away is None:
            return values.reshape((-1,) + (1,) * (len(batch) - 1) + event).expand(shape)
        like = torch.empty(0, dtype=torch.get_default_dtype(), device=values.device)
        which = irregular(batch, like, int(self.away)).abs() * len(values)
        return values[which.long().clamp(max=len(values) - 1)]

    def solve(self, sites: Sites) -> None:
        prior_logits = self.priors[self.first].log_prob(self.values[self.first])
        likelihood = torch.zeros_like(prior_logits)
        for name in filter(sites.__contains__, self.group.children):
            density = self.density(sites, name)
            likelihood = likelihood + within_plates(density, sites[name], sites[self.first])
        self._likelihood = likelihood.detach()
        logits = (prior_logits + likelihood).log_softmax(0)
        finite = self.finite[self.first] = ~logits.isnan().any(0)
        logits = torch.where(finite, logits, prior_logits).movedim(0, -1)
        self._logits = logits if self.differentiable else logits.detach()

    def conditional(self, name: str, values: Values, dims: int | None = None) -> Any:
        return without_score(innermost(self.priors[name]))(squeezed(self._logits, dims, 1))

    # ---- probing

    def reaches(self, sites: Sites) -> bool:
        return bool(self._logits.isfinite().any(-1).all())

    def predict(self, values: Values) -> list[Tensor]:
        value = values[self.first]
        which = value.argmax(-1) if self.priors[self.first].event_shape else value.long()
        which = which.reshape(1, *self._likelihood.shape[1:])
        return [self._likelihood.gather(0, which)]

    def explains(self, far: Enumeration) -> bool:
        return True  # of a discrete latent densities alone are compared, as it has no slopes
