"""Conditionals of binary latents that are drawn one after another, so that drawn latents explain away the data.

A bound on the likelihood gives every latent a probability q (`pyro_nami.deriving.bounded`). A latent is then drawn by
the model's own log odds, given earlier latents at their values and later latents at q. The predictors of the children
are linear in the latents, so one run of the model, at zero and at all unit vectors, gives them for all values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_nami.deriving.expansion import Expansion, trimmed, within_plates
from pyro_nami.factors.bounds import Bound, bound_for
from pyro_nami.factors.joint import to_instances, to_sequence
from pyro_nami.program.masks import log_density_of
from pyro_nami.program.runner import Message, Sites, Values

__all__ = ["ConditionalsInTurn", "InTurn", "Order", "bound_of", "predictor_of"]


class Order(NamedTuple):
    """The sequence in which the elements of a latent, of all instances of some plates, are drawn."""

    num_elements: int
    dims: Sequence[int]  # of these plates, negative batch dims
    sizes: Sequence[int]


class ChildTerm(NamedTuple):
    """The log odds that one child adds to each element of a latent.

    Attributes:
        density: from predictors ``(*, *batch, *event)`` to the child's log density ``(*, *batch)`` over the latent's
            plates.
        rest: the predictor without the element and those before it, ``(elements, *batch, *event)``.
        added: what each element adds to the predictor if it is 1, of that shape.
        event_dim: of the child.
    """

    density: Callable[[Tensor], Tensor]
    rest: Tensor
    added: Tensor
    event_dim: int

    def adds(self, element: Tensor, index: Any) -> Tensor:
        """Returns what elements ``index`` add to the predictor at their values ``(*, *batch)``."""
        return self.added[index] * element.reshape(element.shape + (1,) * self.event_dim)

    def gain(self, before: Tensor | float, index: Any) -> Tensor:
        """Returns what the child adds to the log odds of elements ``index``, in nats.

        Args:
            before: what the elements before them add to the predictor.
            index: of one element, or of all.
        """
        without = self.rest[index] + before
        return self.density(without + self.added[index]) - self.density(without)

    def gains(self, elements: Tensor) -> Tensor:
        """Returns what the child adds to the log odds ``(*batch, elements)`` at values of that shape."""
        elements = elements.movedim(-1, 0)
        # with the batch dims that values alone have
        extra = elements.dim() + self.event_dim - self.rest.dim()
        index = (slice(None), *[None] * extra)
        adds = self.adds(elements, index)
        before = torch.cat([torch.zeros_like(adds[:1]), adds[:-1].cumsum(0)])
        return self.gain(before, index).movedim(0, -1)


class InTurn(Expansion):
    """The conditionals of binary latents under bounds, each given those that are drawn before it.

    Args:
        bounded: the solved `LinearBernoulli`, whose conditionals are by the bounds alone.
        sites: the sites of the run that ``bounded`` was solved from.
        orders: member -> the order of its elements.
        observed: binary latents that the call observes; their values are expanded along the dim of the points.
    """

    def __init__(
        self,
        bounded: Any,
        sites: Sites,
        orders: Mapping[str, Order],
        observed: Collection[str] = (),
    ) -> None:
        super().__init__(bounded.group, bounded.leading, bounded.nesting, bounded.differentiable)
        self._bounded = bounded
        self._orders = orders
        self.finite = bounded.finite
        self._sites = sites
        self.count = 1  # at the first point all are zero
        self._places = dict[str, slice]()
        for name, order in orders.items():
            self._places[name] = slice(self.count, self.count + order.num_elements)
            self.count += order.num_elements
        self._observed = dict[str, Tensor]()
        for name in observed:
            value = sites[name]["value"]
            idle = len(self.leading) + len(sites[name]["fn"].event_shape) - value.dim()
            self._observed[name] = value.expand(self.count, *(1,) * idle, *value.shape)

    @property
    def points(self) -> dict[str, Any]:
        return super().points | self._observed

    def start(self, name: str, prior: Any, shape: torch.Size) -> Tensor:
        n, idle = self._orders[name].num_elements, len(shape) - 1 - len(prior.event_shape)
        unit = torch.eye(n, dtype=prior.mean.dtype, device=prior.mean.device)
        value = unit.new_zeros(shape)
        value[self._places[name]] = self._shown(name, unit.reshape(n, *(1,) * idle, n))
        return value

    def _shown(self, name: str, elements: Tensor) -> Tensor:
        """Returns numbers of a member's elements in sequence, ``(*batch, elements)``, in the shape of its values."""
        each = to_instances(elements, self._orders[name].dims, self._orders[name].sizes)
        return each.reshape(each.shape[:-1] + self.priors[name].event_shape)

    def solve(self, sites: Sites) -> None:
        self._zero: dict[str, Tensor] = {}
        self._added: dict[str, Tensor] = {}
        for name in (name for name in self.group.children if name in sites):
            s, event_dim = predictor_of(sites[name]), sites[name]["fn"].event_dim
            # a member that this call observes depends on no other
            if s.dim() <= len(self.leading) + event_dim:
                continue
            s = s if self.differentiable else s.detach()
            self._zero[name], self._added[name] = s[0], s - s[0]

    def conditional(self, name: str, values: Values, dims: int | None = None) -> Any:
        """Returns a member's distribution, without leading ones beyond ``dims``.

        Args:
            name: of the member.
            values: of members that are drawn before it; and its own, where it has several elements, each of which is
                given those before it.
        """
        elements = self._elements(name, values)
        gains: Any = sum(term.gains(elements) for term in self.terms(name, values))
        logits = self._bounded.prior_logits[name] + self._shown(name, gains)
        return self._bounded.bernoulli(name, logits, dims)

    def prior(self, name: str, dims: int | None = None) -> Any:
        """Returns a member's distribution by its prior alone, of batch shape ``(*batch, *plates)``."""
        return self._bounded.bernoulli(name, self._bounded.prior_logits[name], dims)

    def terms(self, name: str, before: Values) -> list[ChildTerm]:
        """Returns for each child the log odds that it adds, given values of members drawn earlier."""
        return [self._term_of(name, child, before) for child in self._zero]

    def error(self) -> float:
        """Returns how far off the predictors at the prior's means are, relative to the largest."""
        errors = []
        for child, zero in self._zero.items():
            found, values = predictor_of(self._sites[child]), self._bounded.values
            adds = sum(self._adds(name, child, values).sum(0) for name in self._orders)
            errors.append((zero + adds - found).abs().max() / found.abs().max())
        return float(torch.stack(errors).max())

    def _elements(self, name: str, values: Values) -> Tensor:
        """Returns a member's elements in sequence, ``(*batch, elements)``; their probabilities if there is no value."""
        value = values[name] if name in values else self._bounded.probabilities(name)
        start = value.dim() - len(self.priors[name].event_shape)
        elements = value.reshape(*value.shape[:start], -1)
        return to_sequence(elements, self._orders[name].dims)

    def _adds(self, name: str, child: str, values: Values) -> Tensor:
        """Returns what a member's elements add to a predictor, ``(elements, *batch, *event)``."""
        elements = self._elements(name, values).movedim(-1, 0)
        event = (1,) * self._sites[child]["fn"].event_dim
        return self._added[child][self._places[name]] * elements.reshape(elements.shape + event)

    def _term_of(self, name: str, child: str, before: Values) -> ChildTerm:
        others = [
            self._adds(other, child, before).sum(0) for other in self._orders if other != name
        ]
        adds = self._adds(name, child, {})
        to_come = torch.cat([adds[1:].flip(0).cumsum(0).flip(0), torch.zeros_like(adds[:1])])
        return ChildTerm(
            functools.partial(self._density, name, child),
            sum(others, start=self._zero[child]) + to_come,
            self._added[child][self._places[name]],
            self._sites[child]["fn"].event_dim,
        )

    def _density(self, name: str, child: str, s: Tensor) -> Tensor:
        """Returns a child's log density at predictors ``(*, *batch, *event)``, summed within a member's plates."""
        site = self._sites[child]
        log_prob = log_density_of(site, functools.partial(bound_of(site).log_prob_at, s=s))
        log_prob = self.weighted(log_prob, self._sites, child)
        return within_plates(log_prob, site, self._sites[name])


@dataclass(frozen=True, eq=False)
class ConditionalsInTurn:
    """The parameters that networks give for elements that are drawn in sequence, and what children add to the first.

    It is what `pyro_nami.factors.family.SequentialElements` asks for its ``conditionals``.
    """

    conditionals: Any
    terms: Sequence[ChildTerm]
    dims: int  # batch dims of the site

    def first(self) -> tuple[Tensor, Callable]:
        """Returns the parameters ``(*batch, params)`` of element 0, and the function that goes on from there."""
        return self._first

    @functools.cached_property
    def _first(self) -> tuple[Tensor, Callable]:
        params, advance = self.conditionals.first()
        return self._with_gains(params, advance, 0, [0.0] * len(self.terms))

    def all(self, features: Tensor) -> Tensor:
        """Returns the parameters ``(*batch, elements, params)`` at ``features`` ``(*batch, elements, features)``."""
        gains: Any = sum(term.gains(features[..., 0]) for term in self.terms)
        return self.conditionals.all(features) + gains.unsqueeze(-1)

    def _with_gains(
        self, params: Tensor, advance: Callable, index: int, before: Sequence[Any]
    ) -> tuple[Tensor, Callable]:
        gain: Any = sum(term.gain(each, index) for term, each in zip(self.terms, before))
        gain = gain.reshape(trimmed(gain.shape, self.dims)).unsqueeze(-1)
        return params + gain, functools.partial(self._advance, advance, index, before)

    def _advance(
        self, advance: Callable, index: int, before: Sequence[Any], features: Tensor
    ) -> tuple[Tensor, Callable]:
        value = features[..., 0]
        after = [each + term.adds(value, index) for term, each in zip(self.terms, before)]
        params, advance = advance(features)
        return self._with_gains(params, advance, index + 1, after)


def bound_of(site: Message) -> Bound:
    """Returns the bound on the likelihood of a child that has one."""
    bound = bound_for(site["fn"])
    assert bound is not None
    return bound


def predictor_of(site: Message) -> Tensor:
    """Returns the predictor by which a child's bound depends on the latents, ``(*batch, *event)``."""
    return bound_of(site).predictor(site["fn"])
