"""The exact conditional of discrete latents with few states, by enumeration.

q(z = k | earlier sites) is the softmax over k of log p(z = k) plus the log density of the children
at z = k. One run of the model gives all k, along a batch dim of its own to the left of all others.
Several latents that data or priors join have their states together along that dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pyro.distributions as dist
import torch
from pyro.distributions.score_parts import ScoreParts
from torch import Tensor
from torch.distributions.kl import register_kl

from pyro_nami.deriving.expansion import broadcast, irregular, squeezed, within_plates
from pyro_nami.deriving.probing import ProbedExpansion
from pyro_nami.factors.wrappers import innermost
from pyro_nami.program.runner import Sites, Values

__all__ = ["Enumeration", "without_score"]


class _WithoutScore:
    """A discrete conditional whose draws ELBOs take for reparametrized, which leaves out the score function.

    log p(z, children) - log q(z) does not depend on z, so nothing has to tell better values of z from worse ones.
    Values that are not drawn, as where Pyro enumerates them, have the score, as their weights are taken from it.
    """

    has_rsample = True
    _drawn: Tensor | None = None

    def rsample(self, sample_shape: Any = torch.Size()) -> Tensor:
        self._drawn = self.sample(sample_shape)  # type: ignore[attr-defined]
        return self._drawn

    def score_parts(self, x: Tensor, *args: Any, **kwargs: Any) -> ScoreParts:
        """Returns the parts of the log density, the score among them for values that are not drawn from this."""
        log_prob = self.log_prob(x, *args, **kwargs)  # type: ignore[attr-defined]
        return ScoreParts(log_prob, *((0, log_prob) if x is self._drawn else (log_prob, 0)))


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
    """The exact conditional of one discrete latent, or of several that data or priors join, over all their states.

    Of several in the same plates, each has its conditional given those before it, with those behind it summed out.

    Args:
        group, leading, nesting, differentiable, away: as for `Expansion`; other points are other assignments.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.count = math.prod(self.group.elements) if self.away is None else None

    def start(self, name: str, prior: Any, shape: torch.Size) -> Tensor:
        """Returns a member's value in all states; or for each instance one."""
        event, batch = prior.event_shape, shape[: len(shape) - len(prior.event_shape)]
        values = innermost(prior).enumerate_support(expand=False).reshape((-1, *event))
        place = self.group.members.index(name)
        if self.away is None:
            states = torch.arange(math.prod(self.group.elements), device=values.device)
            behind = math.prod(self.group.elements[place + 1 :])
            which = states // behind % len(values)
            return values[which].reshape((-1,) + (1,) * (len(batch) - 1) + event).expand(shape)
        like = torch.empty(0, dtype=torch.get_default_dtype(), device=values.device)
        which = irregular(batch, like, int(self.away) + place).abs() * len(values)
        return values[which.long().clamp(max=len(values) - 1)]

    def solve(self, sites: Sites) -> None:
        log_priors = [self.priors[name].log_prob(self.values[name]) for name in self.group.members]
        prior_logits: Any = sum(log_priors)
        likelihood = torch.zeros_like(prior_logits)
        for name in filter(sites.__contains__, self.group.children):
            density = self.density(sites, name)
            likelihood = likelihood + within_plates(density, sites[name], sites[self.first])
        self._likelihood = likelihood.detach()
        logits = (prior_logits + likelihood).log_softmax(0)
        finite = ~logits.isnan().any(0)
        self.finite.update(dict.fromkeys(self.group.members, finite))
        logits = torch.where(finite, logits, prior_logits)
        self._logits = logits if self.differentiable else logits.detach()

    def conditional(self, name: str, values: Values, dims: int | None = None) -> Any:
        place = self.group.members.index(name)
        logits = self._logits.unflatten(0, self.group.elements)
        for number, before in enumerate(self.group.members[:place]):
            counts = self.group.elements[number:]
            logits = _at(logits, self._which(before, values[before]), len(counts))
        behind = tuple(range(1, len(self.group.members) - place))
        logits = logits.logsumexp(behind) if behind else logits
        if place:  # it does not matter what follows values that members before it cannot have
            logits = torch.where((logits == -torch.inf).all(0), torch.zeros_like(logits), logits)
        logits = logits.log_softmax(0).movedim(0, -1)
        return without_score(innermost(self.priors[name]))(squeezed(logits, dims, 1))

    # ---- probing

    def reaches(self, sites: Sites) -> bool:
        return bool(self._logits.isfinite().any(0).all())

    def predict(self, values: Values) -> list[Tensor]:
        state: Any = 0
        for name, count in zip(self.group.members, self.group.elements):
            state = state * count + self._which(name, values[name])
        return [self._likelihood.gather(0, state.expand(1, *self._likelihood.shape[1:]))]

    def explains(self, far: Enumeration) -> bool:
        return True  # of a discrete latent densities alone are compared, as it has no slopes

    def _which(self, name: str, value: Tensor) -> Tensor:
        """Returns which of its values a member has, ``(*batch)``."""
        return value.argmax(-1) if self.priors[name].event_shape else value.long()


def _at(table: Tensor, which: Tensor, dims: int) -> Tensor:
    """Returns a table ``(K, *others, *batch)`` at indices of its first dim, ``(*batch)``, which it loses.

    ``dims`` are the dims before the batch.
    """
    head, own = table.shape[:dims], table.shape[dims:]
    batch = broadcast(which.shape, own)
    idle = (1,) * (len(batch) - len(own))
    table = table.reshape(head + idle + own).expand(head + batch)
    index = which.expand(batch).expand(1, *head[1:], *batch)
    return table.gather(0, index).squeeze(0)
