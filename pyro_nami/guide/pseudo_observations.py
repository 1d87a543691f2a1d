"""Pseudo-observations: what the instances of a pooled plate say of a Normal factor, one by one, so that it adds up.

Instance n of a set is taken for an observation of the latent v,

    q_n v = w . x_n + w_0   with precision   exp(c + l_n),

where x_n is what the factor's pooled source reads of the instance, l_n and q_n are linear in it (`networks.Evidence`
has their weights and sums over instances), and c, w_0 and w are rows of the factor's network. With v standardized, v =
shift + scale z, the factor's precision and precision-weighted mean in z grow by

    scale^2 e^c sum exp(l) q^2    and    scale (e^c (w_0 sum exp(l) q + w . sum exp(l) q x) - shift e^c sum exp(l) q^2).

These rows read what is known besides the pooled plates (globals, covariates of the factor itself, its earlier
elements) but no pooled features, so what one instance says does not depend on how many there are: precision grows with
their number by construction, at sizes never trained on as well. In a linear-Gaussian model this is the exact posterior:
w holds the regression coefficients of the other latents. Change this module to change how instances add up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_nami.factors.elements import raw_scale, relative_scale
from pyro_nami.guide.conditioning import Pooled, Source

__all__ = ["PseudoObservations", "add_totals", "expert", "initial_expert", "initial_rows"]

_RANGE = 30.0
_RAW_ONE = math.log(math.expm1(1.0))  # the raw scale that stands for one
_FIRST_SHARE = 1e-3  # of a factor's precision at the first step, that pseudo-observations bring


class PseudoObservations(NamedTuple):
    """Those of one factor that the instances of one source are.

    The sets are summed for several *heads*. Those of the factor are one an element; one an element of each member, if
    the factor is a block and the source holds one set for every member.
    """

    source: Source  # as the factor reads it
    pooled: Pooled  # the sets of instances in it
    first: int  # the first of the factor's heads
    heads: int  # how many these are
    num_inputs: int  # inputs of an instance

    @property
    def num_params(self) -> int:
        """Raw parameters an element: c, w_0 and w."""
        return self.num_inputs + 2

    def of_elements(self, total: Tensor, num_elements: int) -> Tensor:
        """Returns the sums of every element, ``(*batch, E, inputs + 2)``, from those of the source."""
        members = total.unflatten(-1, (num_elements // self.heads, -1, self.num_params))
        return members[..., self.first : self.first + self.heads, :].flatten(-3, -2)


def add_totals(
    rows: Tensor,
    num_params: int,
    pseudo: Sequence[PseudoObservations],
    totals: Sequence[Tensor | None],
    shift: Tensor,
    scale: Tensor,
) -> Tensor:
    """Returns a family's parameters followed by precision and precision-weighted mean, if any instances count.

    Args:
        rows: of the network, ``(*batch, num_params + those of the pseudo-observations)``; batch may end in elements.
        num_params: of the family.
        pseudo: the pseudo-observations, source by source.
        totals: for each source, sums over instances ``(*batch, inputs + 2)`` of exp(l) q^2, exp(l) q, exp(l) q x; None
            for what shall not count.
        shift, scale: that standardize the latent, broadcastable to ``(*batch,)``.

    Returns:
        ``(*batch, num_params + 2)``, or without the 2.
    """
    own, *parts = rows.split([num_params, *(each.num_params for each in pseudo)], -1)
    said: Any = 0.0
    for part, total in zip(parts, totals):
        if total is not None:
            weight = part[..., 0].clamp(-_RANGE, _RANGE).exp()
            precision = weight * total[..., 0]
            mean = weight * (part[..., 1:] * total[..., 1:]).sum(-1) - shift * precision
            said = said + torch.stack((scale * scale * precision, scale * mean), -1)
    if not isinstance(said, Tensor):
        return own
    return torch.cat((own.expand(said.shape[:-1] + own.shape[-1:]), said), -1)


def initial_rows(
    location: Tensor, scale: float, counts: Sequence[float], pseudo: Sequence[PseudoObservations], affine: Any
) -> Tensor:
    """Returns first rows ``(E, rows)`` of pseudo-observations, which agree with the factor's first location.

    Args:
        location: of the factor, in unconstrained space, ``(E,)``.
        scale: of the factor.
        counts: expected number of instances of each source.
        pseudo: the pseudo-observations, source by source.
        affine: shift and scale that standardize the latent, ``(E, 1)`` each.
    """
    shift, spread = (part[:, 0] for part in affine)
    columns = []
    for count, each in zip(counts, pseudo):
        rows = location.new_zeros(len(location), each.num_params)
        rows[:, 0] = math.log(_FIRST_SHARE / (max(count, 1.0) * len(pseudo))) - 2 * math.log(scale) - 2 * spread.log()
        rows[:, 1] = shift + spread * location
        columns.append(rows)
    return torch.cat(columns, -1)


def expert(params: Tensor, num_params: int) -> Tensor:
    """Returns parameters of a factor that is its prior times one more pseudo-observation, given its location and scale.

    The factor follows its prior where that observation is weak or the prior narrow, and is free of it where it is not.

    Args:
        params: ``(*batch, E, n)``: location and raw scale of the observation in unconstrained space, the family's
            other parameters, and precision and precision-weighted mean if there are any.
        num_params: of the family.
    """
    location, raw = params[..., 0], params[..., 1]
    precision = relative_scale(raw.clamp(min=-_RANGE / 2)).square().reciprocal()
    own = torch.stack((torch.zeros_like(location), torch.full_like(location, _RAW_ONE)), -1)
    said = torch.stack((precision, precision * location), -1)
    rest, more = params[..., 2:num_params], params[..., num_params:]
    return torch.cat((own, rest, said + more if more.shape[-1] else said), -1)


def initial_expert(family: Any, value: Tensor, scale: float, anchor: Tensor) -> Tensor:
    """Returns raw parameters ``(*batch, E, k)`` at which an `expert` has this location and scale.

    As far as may be: a prior that is narrower than that leaves the factor narrower.
    """
    location, spread = anchor.detach().unbind(-1)
    raw = family.initial(value, scale)
    rest = (scale**-2 - spread**-2).clamp(min=0.01 * scale**-2)
    wanted = (raw[..., 0] * (rest + spread**-2) - location * spread**-2) / rest
    found = torch.stack((wanted, raw_scale(rest.rsqrt())), -1)
    return torch.cat((found, raw[..., 2:].expand(*found.shape[:-1], -1)), -1)
