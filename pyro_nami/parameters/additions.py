"""From a network's rows to the parameters of a factor: offsets and pseudo-observations are added.

With rows r of the factor's family and offsets o (`free_parameters`), the parameters are r + o,
followed by a precision P and a precision-weighted mean M, which are added to those that r + o stand
for:

    P = scale^2 e^c sum_n exp(l_n) q_n^2
    M = scale e^c (w_0 sum_n exp(l_n) q_n + w . sum_n exp(l_n) q_n x_n) - scale shift e^c sum_n exp(l_n) q_n^2

The sums are over the instances of a pooled plate. Each is a *pseudo-observation* of the latent:
with u = shift + scale v the latent as networks read it, instance n says that

    q_n u = w . x_n + w_0   with precision   exp(c + l_n)

where x_n is what the factor's pooled source reads of it, l_n and q_n are linear in x_n
(`networks.PrecisionSums` holds their weights and the sums), and c, w_0 and w are further rows of
the factor's network.

These rows read globals, the factor's own covariates and its earlier elements, but no pooled
features. What one instance says is therefore independent of their number, and precision grows with
the number by construction, also at sizes never trained on. In a linear-Gaussian model this is the
exact posterior, with w the regression coefficients of the other latents.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_nami.factors.links import raw_scale, relative_scale
from pyro_nami.parameters.conditioning import Pooled, Source

__all__ = [
    "FIRST_SHARE",
    "Additions",
    "PseudoObservations",
    "expert",
    "initial_expert",
    "initial_rows",
]

# size of log precisions: beyond, products of three overflow in single precision
MAX_LOG = math.log(torch.finfo(torch.float32).max) / 3
# share of a factor's first precision that comes from observations; ten times as much would move its start, and with
# ten times less they would be learned later
FIRST_SHARE = 1e-3


class PseudoObservations(NamedTuple):
    """The pseudo-observations of one factor that the instances of one source stand for.

    The sets are summed for several *heads*. A factor has one head an element; or one an element of each member, if it
    is a block and the source holds one set for every member.
    """

    source: Source  # as the factor reads it
    pooled: Pooled  # the sets of instances in it
    first: int  # the first of the factor's heads
    heads: int  # the number of the factor's heads
    num_inputs: int  # inputs of an instance

    @property
    def num_params(self) -> int:
        """Rows an element: c, w_0 and w."""
        return self.num_inputs + 2

    def of_elements(self, total: Tensor, num_elements: int) -> Tensor:
        """Returns the sums of every element, ``(*batch, E, inputs + 2)``, from those of the source."""
        members = total.unflatten(-1, (num_elements // self.heads, -1, self.num_params))
        return members[..., self.first : self.first + self.heads, :].flatten(-3, -2)


class Additions(NamedTuple):
    """Offsets and sums of pseudo-observations, which are added to the rows of one factor in one call.

    Example:
        >>> rows = torch.tensor([[0.0, 0.0, 0.0, 0.0, 1.0]])  # location, raw scale; c, w_0, w
        >>> sums = torch.tensor([[3.0, 3.0, 8.0]])  # of three observations: 1, 2 and 5
        >>> Additions([2, 3], [sums], [torch.zeros(1, 1), torch.ones(1, 1)], None).params(rows)
        tensor([[0., 0., 3., 8.]])
    """

    # rows an element: of the family, then of the pseudo-observations of each source
    counts: list[int]
    # of each source, sums ``(*batch, E, inputs + 2)``; None for what shall not count
    totals: list[Tensor | None]
    # shift and scale that standardize the latent, ``(E, 1)``; needed with totals
    affine: Sequence[Tensor]
    offset: Tensor | None  # ``(*batch, E, params)``

    def params(self, rows: Tensor, at: Any = slice(None)) -> Tensor:
        """Returns the parameters ``(*batch, params)`` of elements ``at``, one or all of them, from their rows."""
        if self.totals:
            rows = self._with_totals(rows, at)
        if self.offset is None:
            return rows
        offset = self.offset[..., at, :]
        return rows + F.pad(offset, (0, rows.shape[-1] - offset.shape[-1]))

    def _with_totals(self, rows: Tensor, at: Any) -> Tensor:
        shift, scale = (part[at, 0] for part in self.affine)
        own, *parts = rows.split(self.counts, -1)
        added: Any = 0.0
        for part, total in zip(parts, self.totals):
            if total is not None:
                sums, weight = total[..., at, :], part[..., 0].clamp(-MAX_LOG, MAX_LOG).exp()
                precision = weight * sums[..., 0]
                mean = weight * (part[..., 1:] * sums[..., 1:]).sum(-1) - shift * precision
                added = added + torch.stack((scale * scale * precision, scale * mean), -1)
        if not isinstance(added, Tensor):
            return own
        return torch.cat((own.expand(added.shape[:-1] + own.shape[-1:]), added), -1)


def initial_rows(
    location: Tensor,
    scale: float,
    counts: Sequence[float],
    pseudo: Sequence[PseudoObservations],
    affine: Any,
) -> Tensor:
    """Returns first rows ``(E, rows)`` of pseudo-observations, which agree with the factor's first location ``(E,)``.

    ``counts`` are expected numbers of instances of each source; ``affine`` standardizes the latent, ``(E, 1)`` each.
    """
    shift, spread = (part[:, 0] for part in affine)
    columns = []
    for count, each in zip(counts, pseudo):
        rows = location.new_zeros(len(location), each.num_params)
        share = FIRST_SHARE / (max(count, 1.0) * len(pseudo))
        rows[:, 0] = math.log(share) - 2 * (scale * spread).log()
        rows[:, 1] = shift + spread * location
        columns.append(rows)
    return torch.cat(columns, -1)


def expert(params: Tensor, num_params: int) -> Tensor:
    """Returns parameters of a factor that is its prior times one more pseudo-observation, given its location and scale.

    The factor follows its prior where that observation is weak or the prior narrow, and is free of it where it is not.
    ``params``, ``(*batch, E, n)``, are location and raw scale of the observation in unconstrained space, the other
    ``num_params`` of the family, and precision and precision-weighted mean if there are any.

    Example:
        >>> expert(torch.tensor([[2.0, 0.5413]]), 2).round(decimals=2)  # an observation of 2, of scale 1
        tensor([[0.0000, 0.5400, 1.0000, 2.0000]])
    """
    location, raw = params[..., 0], params[..., 1]
    precision = relative_scale(raw.clamp(min=-MAX_LOG / 2)).square().reciprocal()
    own = torch.stack((torch.zeros_like(location), raw_scale(torch.ones_like(location))), -1)
    added = torch.stack((precision, precision * location), -1)
    rest, more = params[..., 2:num_params], params[..., num_params:]
    return torch.cat((own, rest, added + more if more.shape[-1] else added), -1)


def initial_expert(family: Any, value: Tensor, scale: float, anchor: Tensor) -> Tensor:
    """Returns parameters ``(*batch, E, k)`` at which an `expert` has this location and, as far as may be, this scale.

    A prior that is narrower than that leaves the factor narrower.
    """
    location, spread = anchor.detach().unbind(-1)
    raw = family.initial(value, scale)
    rest = (scale**-2 - spread**-2).clamp(min=0.01 * scale**-2)
    wanted = (raw[..., 0] * (rest + spread**-2) - location * spread**-2) / rest
    found = torch.stack((wanted, raw_scale(rest.rsqrt())), -1)
    return torch.cat((found, raw[..., 2:].expand(*found.shape[:-1], -1)), -1)
