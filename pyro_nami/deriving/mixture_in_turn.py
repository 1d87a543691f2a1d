"""The conditionals of latents in turn, where all of them are a mixture of bent Normal vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_nami.deriving.bent_vector import BentVector
from pyro_nami.deriving.expansion import trimmed
from pyro_nami.deriving.gaussian_levels import times
from pyro_nami.deriving.latent_vector import LatentVector
from pyro_nami.factors.joint_normal import JointNormal, MixedNormals
from pyro_nami.factors.knots import KnotTransform
from pyro_nami.program.runner import Values

__all__ = ["MixtureInTurn"]


class _Conditional(NamedTuple):
    """A latent's conditional: lower (v - center - slope @ earlier latents) is a bent standard Normal vector."""

    center: Tensor  # (*batch, numbers)
    slope: Tensor  # (*batch, numbers, numbers before)
    lower: Tensor  # (*batch, numbers, numbers), lower triangular
    bend: KnotTransform
    before: tuple[str, ...]  # latents that are drawn earlier


class MixtureInTurn:
    """A mixture of bent Normal vectors, by the conditional of each latent given those before.

    Args:
        coordinates: of the latents, in sampling order.
        vectors: the parts.
        log_shares: of the parts, ``(vectors,)``.
    """

    def __init__(
        self, coordinates: LatentVector, vectors: Sequence[BentVector], log_shares: Tensor
    ) -> None:
        self.coordinates = coordinates
        self.log_shares = log_shares
        self.parts = [self._conditionals(vector) for vector in vectors]

    def conditional(
        self, name: str, values: Values, dims: int | None = None
    ) -> JointNormal | MixedNormals:
        """Returns a latent's conditional in unconstrained space, as `Expansion.conditional` does."""
        parts = [self._given(part[name], name, values, dims) for part in self.parts]
        if len(parts) == 1:
            return parts[0]
        each = []
        for log_share, part in zip(self.log_shares, self.parts):
            log_q = [self._log_q(part[other], other, values) for other in part[name].before]
            each.append(log_share + sum(log_q))
        log_shares = torch.stack(each, -1).log_softmax(-1)
        shape = self._lead(name, log_shares, dims)
        return MixedNormals(log_shares.reshape(*shape, -1).to(self.coordinates.like), parts)

    def _lead(self, name: str, vector: Tensor, dims: int | None) -> torch.Size:
        """Returns the leading sizes of a vector, with as many dims as leave room for a latent's plates."""
        plates = self.coordinates.plates[name]
        return trimmed(vector.shape[:-1], None if dims is None else max(0, dims - len(plates)))

    def _given(self, own: _Conditional, name: str, values: Values, dims: int | None) -> JointNormal:
        """Returns a part's conditional of a latent."""
        coordinates = self.coordinates
        center, plates = self._center(own, values), coordinates.plates[name]
        lead = self._lead(name, center, dims)
        if dims is not None and not lead:
            plates = plates[max(0, len(plates) - dims) :]
        held = plates + (coordinates.layouts[name].num_elements,)
        center = center.reshape(lead + center.shape[-1:]).to(coordinates.like)
        return JointNormal(center, own.lower, held, 0, bend=own.bend)

    def _center(self, own: _Conditional, values: Values) -> Tensor:
        """Returns the center of a conditional given the earlier latents, ``(*lead, numbers)``."""
        if not own.before:
            return own.center
        known = [self.coordinates.numbers(other, values[other]) for other in own.before]
        lead = torch.broadcast_shapes(*(each.shape[:-1] for each in known))
        off = torch.cat([each.expand(lead + each.shape[-1:]) for each in known], -1)
        return own.center + times(own.slope, off)

    def _log_q(self, own: _Conditional, name: str, values: Values) -> Tensor:
        """Returns the log density of a latent's value by a part's conditional, ``(*lead)``."""
        off = self.coordinates.numbers(name, values[name]) - self._center(own, values)
        normal, log_slope = own.bend.straighten(times(own.lower, off))
        log_det = own.lower.diagonal(dim1=-2, dim2=-1).log()
        return (-normal.square() / 2 - log_slope + log_det).sum(-1)

    def _conditionals(self, vector: BentVector) -> dict[str, _Conditional]:
        """Returns the conditional of each latent by one part."""
        lower, like = torch.linalg.inv(vector.root).tril(), self.coordinates.like
        found: dict[str, _Conditional] = {}
        first = 0
        for name, size in zip(self.coordinates.layouts, self.coordinates.sizes):
            rows, before = slice(first, first + size), slice(0, first)
            block, center = lower[..., rows, rows], vector.center[..., rows]
            slope = -torch.linalg.solve_triangular(block, lower[..., rows, before], upper=False)
            center = center - times(slope, vector.center[..., before])
            bend = KnotTransform(vector.knots[..., rows, :, :].to(like))
            found[name] = _Conditional(center, slope, block.to(like), bend, tuple(found))
            first += size
        return found
