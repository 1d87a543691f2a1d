"""Evidence that adds: what the instances of a pooled plate contribute to a Normal factor, one by one.

Each instance n is a pseudo-observation of the latent: q_n v = w . x_n + w_0 with precision exp(c + l_n), where x_n is
what the factor's pooled source reads of the instance (`networks.PrecisionSums` sums over instances), and c, w and w_0
are rows of the factor's network. These rows read what is known besides the pooled plates (globals, covariates of the
factor itself, its earlier elements) but no pooled features, so what one instance says does not depend on how many
there are: the factor's precision grows with their number by construction, at sizes never trained on as well. In a
linear-Gaussian model this is the exact posterior: w holds the regression coefficients of the other latents.

Change this module to change how evidence enters a factor's parameters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_nami.factors.links import raw_scale, relative_scale
from pyro_nami.guide.conditioning import Flattened, Gathered, Pooled, Source

__all__ = ["EvidenceRead", "add_evidence", "expert", "initial_evidence", "initial_expert", "pooled_part"]

_RANGE = 30.0
_RAW_ONE = math.log(math.expm1(1.0))  # the raw scale that stands for one
_FIRST_SHARE = 1e-3  # of a factor's precision at the first step, that evidence brings


class EvidenceRead(NamedTuple):
    """One source's evidence for one factor.

    Attributes:
        source: the pooled source, as the factor reads it.
        first: the first of its heads that are the factor's.
        heads: how many these are, one an element; one an element of each member, if the factor is a block and the
            source holds one set for every member.
        num_inputs: inputs of an instance.
    """

    source: Source
    first: int
    heads: int
    num_inputs: int

    @property
    def num_params(self) -> int:
        """Raw parameters an element: c, w_0 and w."""
        return self.num_inputs + 2

    def of_elements(self, total: Tensor, num_elements: int) -> Tensor:
        """Returns the sums of every element, ``(*batch, E, inputs + 2)``, from those of the source."""
        members = total.unflatten(-1, (num_elements // self.heads, -1, self.num_params))
        return members[..., self.first : self.first + self.heads, :].flatten(-3, -2)


def pooled_part(source: Source) -> tuple[Pooled | None, tuple[str, ...]]:
    """Returns the pooled source that a factor reads, None if it reads none, and the plates that it has flattened."""
    members: tuple[str, ...] = ()
    while isinstance(source, (Flattened, Gathered)):
        members = source.plates if isinstance(source, Flattened) else members
        source = source.source
    return (source if isinstance(source, Pooled) else None), members


def add_evidence(
    raw: Tensor,
    num_params: int,
    reads: Sequence[EvidenceRead],
    sums: Sequence[Tensor | None],
    shift: Tensor,
    scale: Tensor,
) -> Tensor:
    """Returns a family's parameters followed by precision and precision-weighted mean of the evidence, if there is any.

    Args:
        raw: rows of the network, ``(*batch, E, num_params + evidence)``.
        num_params: of the family.
        reads: the sources.
        sums: for each source, sums over instances ``(*batch, E, inputs + 2)`` of exp(l) q^2, exp(l) q, exp(l) q x; None
            for what shall not count.
        shift, scale: that standardize the latent, ``(E,)``: w . x_n + w_0 is about shift + scale v.

    Returns:
        ``(*batch, E, num_params + 2)``, or without the 2.
    """
    if not reads:
        return raw
    own, *parts = raw.split([num_params, *(read.num_params for read in reads)], -1)
    if all(total is None for total in sums):
        return own
    evidence: Any = 0.0
    for part, total in zip(parts, sums):
        if total is None:
            continue
        weight = part[..., 0].clamp(-_RANGE, _RANGE).exp()
        precision = weight * total[..., 0]
        mean = weight * (part[..., 1:] * total[..., 1:]).sum(-1) - shift * precision
        evidence = evidence + torch.stack((scale * scale * precision, scale * mean), -1)
    if evidence.shape[:-1] != own.shape[:-1]:
        own = own.expand(evidence.shape[:-1] + own.shape[-1:])
    return torch.cat((own, evidence), -1)


def expert(params: Tensor, num_params: int) -> Tensor:
    """Returns parameters of a factor that is its prior times evidence, from location and scale of that evidence.

    The factor follows its prior where the evidence is weak or the prior narrow, and is free of it where it is not.

    Args:
        params: ``(*batch, E, n)``: location and raw scale of the evidence in unconstrained space, the family's other
            parameters, and further evidence if there is any.
        num_params: of the family.
    """
    location, raw = params[..., 0], params[..., 1]
    precision = relative_scale(raw.clamp(min=-_RANGE / 2)).square().reciprocal()
    own = torch.stack((torch.zeros_like(location), torch.full_like(location, _RAW_ONE)), -1)
    evidence = torch.stack((precision, precision * location), -1)
    rest, more = params[..., 2:num_params], params[..., num_params:]
    return torch.cat((own, rest, evidence + more if more.shape[-1] else evidence), -1)


def initial_expert(family: Any, value: Tensor, scale: float, anchor: Tensor) -> Tensor:
    """Returns raw parameters ``(*batch, E, k)`` at which the prior times evidence has this location and scale.

    As far as may be: a prior that is narrower than that leaves the factor narrower.
    """
    location, spread = anchor.detach().unbind(-1)
    raw = family.initial(value, scale)
    rest = (scale**-2 - spread**-2).clamp(min=0.01 * scale**-2)
    wanted = (raw[..., 0] * (rest + spread**-2) - location * spread**-2) / rest
    found = torch.stack((wanted, raw_scale(rest.rsqrt())), -1)
    return torch.cat((found, raw[..., 2:].expand(*found.shape[:-1], -1)), -1)


def initial_evidence(
    location: Tensor, scale: float, counts: Sequence[float], reads: Sequence[EvidenceRead], affine: Sequence[Tensor]
) -> Tensor:
    """Returns raw parameters ``(E, evidence)`` of pseudo-observations that agree with the factor's first location.

    Args:
        location: of the factor, in unconstrained space, ``(E,)``.
        scale: of the factor.
        counts: expected number of instances of each source.
        reads: its sources.
        affine: shift and scale that standardize the latent, ``(E,)`` each.
    """
    shift, spread = affine
    columns = []
    for count, read in zip(counts, reads):
        rows = location.new_zeros(len(location), read.num_params)
        rows[:, 0] = math.log(_FIRST_SHARE / (max(count, 1.0) * len(reads))) - 2 * math.log(scale) - 2 * spread.log()
        rows[:, 1] = shift + spread * location
        columns.append(rows)
    return torch.cat(columns, -1)
