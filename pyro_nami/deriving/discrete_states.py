"""The discrete states of a loop given its data, by backward messages (a hidden Markov model).

One run of the model, with all states at value k along a dim of its own, gives the probabilities of
the next states after k, and of the data at k.

References:
    Rabiner 1989, A tutorial on hidden Markov models.
"""

from __future__ import annotations

from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_nami.deriving.enumeration import without_score
from pyro_nami.deriving.expansion import (
    ROUNDING,
    TOLERANCE,
    Expansion,
    Run,
    derivatives,
    irregular,
    squeezed,
)
from pyro_nami.factors.markov_categorical import MarkovCategorical
from pyro_nami.factors.wrappers import base_of, innermost
from pyro_nami.program.runner import Sites, Values

__all__ = ["DiscreteStates"]

# The log of a probability of zero, in nats: sums of it in double precision stay finite, and below all others.
IMPOSSIBLE = torch.finfo(torch.float32).min


class DiscreteStates(Expansion):
    """The joint conditional of the states of a loop with K values each, of which a datum reads one.

    Args:
        group: of the states of one loop; its ``elements`` are the number of values.
        leading, nesting, differentiable, given: as for `Expansion`; given values are no points of all values.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.count = None if self._given else self.group.elements[0]

    def start(self, name: str, prior: Any, shape: torch.Size) -> Tensor:
        count = self.group.elements[0]
        values = torch.arange(count, device=prior.mean.device).to(prior.mean)
        return values.reshape(-1, *(1,) * (len(shape) - 1)).expand(shape)

    def choose(self, name: str, prior: Any) -> Tensor:
        return super().choose(name, prior).detach()

    def tables(self, sites: Sites) -> tuple[Tensor, Tensor]:
        """Returns log-probabilities of states after each value, ``(*batch, T, K, K)``, and of data, ``(*batch, T, K)``.

        Before the first state there is none: its rows are all the same.
        """
        base = base_of(sites[self.first]["fn"])
        logits = base.logits.double()
        if isinstance(base, dist.Bernoulli):
            logits = torch.stack((torch.zeros_like(logits), logits), -1)
        logits = logits.log_softmax(-1)
        value = self.values[self.first]
        after = logits.expand(value.shape + logits.shape[-1:]).movedim(0, -2)
        data = torch.zeros(value.shape, dtype=torch.float64, device=value.device)
        for name in filter(sites.__contains__, self.group.children):
            site = sites[name]
            each = self.weighted(base_of(site["fn"]).log_prob(site["value"]).double(), sites, name)
            places = torch.tensor(site["part"].reads, device=value.device)
            data = data.index_add(-1, places, each.expand(data.shape[:-1] + each.shape[-1:]))
        return after, data.movedim(0, -1)

    def solve(self, sites: Sites) -> None:
        self._fn = sites[self.first]["fn"]
        with derivatives():
            after, data = self.tables(sites)
            pairs = after + data.unsqueeze(-2)
            # finite, as a state without a way on would have no gradient
            steps = pairs.clamp(min=IMPOSSIBLE).unbind(-3)
            message, found = torch.zeros_like(steps[0][..., 0, :]), []
            for step in reversed(steps):
                whole = step + message.unsqueeze(-2)
                message = whole.logsumexp(-1)
                found.append(whole - message.unsqueeze(-1))
            logits = torch.stack(found[::-1], -3)
            logits = torch.where(pairs > IMPOSSIBLE, logits, -torch.inf)
            self._first, self._logits = logits[..., 0, 0, :], logits[..., 1:, :, :]
        if not self.differentiable:
            self._first, self._logits = self._first.detach(), self._logits.detach()

    def conditional(self, name: str, values: Values, dims: int | None = None) -> MarkovCategorical:
        first, logits = squeezed(self._first, dims, 1), squeezed(self._logits, dims, 3)
        own = self.values[name]
        like = torch.get_default_dtype()
        values_of = torch.arange(first.shape[-1], device=own.device).to(own)
        return MarkovCategorical(
            first.to(like), logits.to(like), values_of, without_score(innermost(self._fn))
        )

    def flaw(self, run: Run) -> str:
        """Returns why the states of a loop are not as this takes them; "" if they are.

        Args:
            run: makes a run of the model for an expansion.
        """
        sites = run(self)
        after, data = (table.detach() for table in self.tables(sites))
        self.solve(sites)
        if not bool(self._first.logsumexp(-1).isfinite().all()):
            return "the data have no probability at any state"
        *batch, size, count = data.shape
        after, data = after.reshape(-1, size, count, count), data.reshape(-1, size, count)
        steps = torch.arange(size, device=data.device)
        instance = torch.arange(len(data), device=data.device).unsqueeze(-1)
        for phase in (1, 2):
            # states in which nothing repeats, others in each instance of a plate
            which = (count * irregular(data.shape[:2], data, phase).abs()).long()
            value = which.reshape(*batch, size).to(self.values[self.first])
            other = self.anew(given={self.first: value})
            now = torch.stack([term.sum() for term in other.joint_terms(run(other))]).sum()
            before = torch.cat((which[:, :1], which[:, :-1]), 1)
            told = after[instance, steps, before, which].sum() + data[instance, steps, which].sum()
            rounding = ROUNDING * torch.finfo(torch.float32).eps * (1 + now.abs())
            off = (now - told).abs()
            if not bool(off <= TOLERANCE + rounding) and not bool(now == told):
                return f"the log density of the states does not add up: it is off by {float(off):.2g} nats"
        return ""
