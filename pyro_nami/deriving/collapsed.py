"""The marginal posterior of latents that are sampled first, about its mode, with all other latents integrated out.

As for `marginal_quadrature`, the log density of the first latents v is log p(v, z, data) - log q(z | v, data), at any z
where q is exact. Where q is a Normal about a mode, z is that mode, which is Laplace's approximation.

In unconstrained space v is a bent Normal vector. Its center is the mode, its root that of the curvature there; or both
are those of weighted points, or of the nearest Normal.

References:
    Rue, Martino and Chopin 2009, Approximate Bayesian inference for latent Gaussian models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pyro_nami.deriving.ascent import Ascent, ascend, measured, polish, root_of
from pyro_nami.deriving.bent_vector import (
    RUN_POINTS,
    BentVector,
    Heights,
    bent_along_lines,
    reweighted,
    unbent,
)
from pyro_nami.deriving.derived_group import ConjugateGroup
from pyro_nami.deriving.expansion import TOLERANCE
from pyro_nami.deriving.latent_vector import LatentVector, UnconstrainedDensity
from pyro_nami.deriving.mixture_in_turn import MixtureInTurn
from pyro_nami.deriving.nearest_normal import LEAST_GAIN, nearest_normal, normal_points
from pyro_nami.deriving.vector_mixture import adapted_mixture, modes_of, shares_of
from pyro_nami.factors.joint_normal import JointNormal, MixedNormals
from pyro_nami.messages import quoted
from pyro_nami.program.runner import Values

__all__ = ["OPEN", "Collapsed"]

# Numbers of a vector, up to which parts of a mixture are found by weights of nearby points.
MOST_MIXED = 12
# Modes of a mixture beside the highest; of more, it is told that some are missing.
MOST_MODES = 32
# Numbers of a vector, up to which weighted points give its moments; of more, few points have most of the weight.
MOST_WEIGHED = 30
# Share of effective points below which a search for the nearest Normal pays.
MUCH = 0.5
# Share of effective points below which a vector about a mode is no picture of the density.
LEAST = 0.05
# Share of the spread of priors at which that search begins without a mode: one for each try, as Cauchy priors are wide.
NARROW = (0.1, 3e-3)
OPEN = "does not fall"  # in the flaw of a density that has no end


class Collapsed:
    """The conditionals of latents that are sampled first, of whatever plates.

    Args:
        group: the members.
        coordinates: of the members.
        starts: points, of which searches begin at those with the highest density, ``(starts, *batch, numbers)``.
        unit: the order of the prior's spread, ``(numbers,)``.
        log_density: function from values of the members, ``(points, *batch, *plates, *event)`` each, to the log density
            of values and data in nats, ``(points, *batch)``, differentiable in the values.
        is_proper: whether all priors are proper, so that there is a posterior.
        weighs: whether mean and covariance are estimated from weighted points; otherwise from lines through the mode.
        at_once: points of a run, at most.
        searches: the number of searches for a mode.

    Attributes:
        finite: empty, as all values are numbers; see `Expansion.finite`.
        effective: the share of weighted points that are effective; 1 where none were weighted.
        flaw: why the density about the mode is no picture of the posterior; empty if it is one.

    Raises:
        ValueError: if the log density is finite nowhere.
    """

    def __init__(
        self,
        group: ConjugateGroup,
        coordinates: LatentVector,
        starts: Tensor,
        unit: Tensor,
        log_density: Callable[[Values], Tensor],
        is_proper: bool = True,
        weighs: bool = True,
        at_once: int = RUN_POINTS,
        searches: int = 16,
    ) -> None:
        self.group = group
        self.finite: dict[str, Tensor] = {}
        self.effective = 1.0
        self.flaw = ""
        self._density = UnconstrainedDensity(coordinates, log_density, min(at_once, RUN_POINTS))
        self._heights = self._density.heights
        self._starts, self._unit = starts, unit
        self._further: list[BentVector] | None = None  # about other modes, once they are asked for
        near, mode = self._mode(searches, weighs)
        self._vector = bent_along_lines(self._heights, mode.place, root_of(mode.inverse))
        open_number = None if is_proper else _open_number(self._heights, self._vector, unit)
        if open_number is not None and not self.flaw:
            where = f"far out, along {self._member(open_number)}"
            self.flaw = f"the log density of {quoted(group.members)} {OPEN} {where}"
        if weighs and starts.shape[-1] > 1 and open_number is None:
            self._improve(mode, root_of(near.inverse))
        self._take([self._vector], torch.zeros(1).to(self._vector.center))

    # ---- the mode

    def _mode(self, searches: int, weighs: bool) -> tuple[Ascent, Ascent]:
        """Returns the end of the best search, and the mode that Newton steps lead to from there."""
        starts, names = self._starts, quoted(self.group.members)
        heights = self._heights(starts)
        most = int((heights > -torch.inf).sum(0).amin().clamp(min=1))
        best = heights.topk(min(searches, most), 0).indices
        chosen = starts.gather(0, best[..., None].expand(*best.shape, starts.shape[-1]))
        found = self._searched(chosen)
        if not bool(found.height.isfinite().any(0).all()):
            raise ValueError(
                f"the log density of {names} is not finite at any of {len(starts)} starts"
            )
        is_mode = (found.gain < LEAST_GAIN) & found.height.isfinite()
        best = found.height.where(is_mode | ~is_mode.any(0), -torch.inf).argmax(0)
        near = Ascent(*(_taken(each, best) for each in found))
        self._modes = modes_of(self._heights, self._density.slopes, found)
        if weighs:  # a point far out, where others have modes, takes many runs
            near = measured(self._heights, near)
        mode, curvatures = polish(self._density.slopes, near)
        if bool((curvatures <= TOLERANCE).any()):
            spread = mode.inverse.diagonal(dim1=-2, dim2=-1).sqrt() / self._unit
            way = self._member(int(spread.reshape(-1, spread.shape[-1]).amax(0).argmax()))
            self.flaw = f"the log density of {names} {OPEN} to all sides of where it is highest, along {way}"
        elif bool((mode.gain > LEAST_GAIN).any()):
            self.flaw = f"no mode of the log density of {names} was found"
        return near, mode

    @property
    def others(self) -> list[float]:
        """By how many nats there is less mass about each further mode that searches have found."""
        return self._modes.lower[1:]

    def _member(self, index: int) -> str:
        """Returns the member that a number belongs to."""
        sizes = torch.tensor(self._density.coordinates.sizes).cumsum(0)
        return repr(self.group.members[int((sizes <= index).sum())])

    # ---- beside the mode

    def _improve(self, mode: Ascent, root: Tensor) -> None:
        """Takes the vector with the highest ELBO: that of weighted points, or the nearest Normal, bent or not.

        The search for the nearest Normal begins at the mode, with a root of the covariance; without a mode at the
        likeliest draw of the priors.
        """
        starts, numbers = self._starts, len(self._unit)
        few = numbers <= MOST_WEIGHED
        if few and not self.flaw:
            is_rough = self.group.is_weighted
            self._vector, self.effective = self._reweighted(self._vector, is_rough)
            if self.effective > MUCH:
                return
        points = normal_points(max(RUN_POINTS // 2, numbers), numbers)
        place, roots = mode.place, [root]
        if self.flaw:  # as this is no mode
            place = _taken(starts, self._heights(starts).argmax(0))
            spread = (starts - starts.median(0).values).abs().median(0).values
            roots = [(narrow * spread).diag_embed() for narrow in NARROW]
        for root in roots:
            *normal, is_found = nearest_normal(self._density.slopes, place, root, points)
            if is_found:
                break
        if is_found:
            others = [unbent(*normal), bent_along_lines(self._heights, *normal)]
            if few:
                others.append(self._reweighted(others[-1])[0])
            candidates = others if self.flaw else [self._vector, *others]
            self._vector = max(candidates, key=lambda each: each.elbo(self._heights, points))
            self.flaw = ""
        elif not self.effective >= LEAST:
            names = quoted(self.group.members)
            share = f"{self.effective:.1%} of points about the mode of {names} are effective"
            self.flaw = self.flaw or share

    # ---- conditionals

    def mix(self, is_weighted: bool = True) -> float | None:
        """Takes a mixture about all modes that searches find; of few numbers with parts where weights are large.

        Args:
            is_weighted: whether draws will be; if not, parts are about modes alone, near the posterior as they are.

        Returns:
            The share of searches that would lead to modes unseen so far; None where no mode was found.
        """
        if self.flaw:
            return None
        is_small = self._vector.center.shape[-1] <= MOST_MIXED
        if self._further is None:
            self._further = self._vectors_of_others(is_small)
        vectors = [self._vector, *self._further[:MOST_MODES]]
        if is_weighted and is_small:
            self._take(*adapted_mixture(self._heights, vectors))
        else:
            self._take(vectors, shares_of(self._heights, vectors))
        return 1.0 if len(self._further) > MOST_MODES else self._modes.unseen

    def _vectors_of_others(self, is_small: bool) -> list[BentVector]:
        """Returns a vector about each mode but the vector's own; of few numbers with the moments of the density there.

        All draws of the prior are searched from, where some modes are unseen as yet.
        """
        if self._modes.unseen > 0:
            ends = self._searched(self._starts)
            self._modes = modes_of(self._heights, self._density.slopes, ends)
        modes = self._modes.vectors
        own = [float(self._vector.log_prob(each.center).sum()) for each in modes]
        others = [each for each, near in zip(modes, own) if near < max(own)]
        if not is_small:
            return others
        for i, each in enumerate(others[:MOST_MODES]):
            bent = bent_along_lines(self._heights, each.center, each.root)
            others[i], _ = self._reweighted(bent, is_rough=True)
        return others

    def _reweighted(self, vector: BentVector, is_rough: bool = False) -> tuple[BentVector, float]:
        """Returns a vector with the moments of weighted points; a rough one is enough for draws that get weights."""
        if is_rough:
            return reweighted(self._heights, vector, count=RUN_POINTS, enough=MUCH)
        return reweighted(self._heights, vector)

    def _searched(self, starts: Tensor) -> Ascent:
        eps = torch.finfo(self._density.coordinates.like.dtype).eps
        return ascend(self._density.slopes, starts, self._unit, eps)

    def _take(self, vectors: Sequence[BentVector], log_shares: Tensor) -> None:
        """Takes a mixture of vectors, by shares ``(vectors,)``."""
        if log_shares.isnan().any():  # the density is finite at no point of a part
            vectors, log_shares = [self._vector], torch.zeros_like(log_shares[:1])
        self._mixture = MixtureInTurn(self._density.coordinates, vectors, log_shares)

    def conditional(
        self, name: str, values: Values, dims: int | None = None
    ) -> JointNormal | MixedNormals:
        """Returns a member's conditional in unconstrained space, as `Expansion.conditional` does."""
        return self._mixture.conditional(name, values, dims)

    def draw(self, count: int, batch: torch.Size) -> tuple[dict[str, Tensor], Tensor]:
        """Returns draws of the members, ``(count, *batch, *event)``, and their log density, ``(count, *batch)``."""
        center, coordinates = self._vector.center, self._density.coordinates
        normal = torch.randn((count, *center.shape), dtype=torch.float64).to(center)
        points, log_q = self._vector.at(normal)
        values = coordinates.values(points)
        log_q = log_q - coordinates.log_abs_det(points, values)
        return values, log_q.reshape(count, *batch)


def _open_number(
    heights: Heights, vector: BentVector, unit: Tensor, *, fall: float = 0.5
) -> int | None:
    """Returns the index of a number along which a density does not fall far out, as an improper posterior does not.

    Args:
        heights: the log density, as for `bent_along_lines`.
        vector: about the mode.
        unit: the order of the prior's spread, ``(numbers,)``.
        fall: nats by which the log density of a proper posterior falls at least between 1 and 2, 2 and 4, or 4 and 8
            deviations; that of a Cauchy variable falls by 1.4 between the last two.
    """

    def both_sides(ways: Tensor) -> Tensor:
        """Returns heights ``(sides, ways, *batch)`` at the ends of ways ``(ways, *batch, numbers)``."""
        points = torch.cat([vector.center + ways, vector.center - ways])
        return heights(points).unflatten(0, (2, -1))

    columns = vector.root.mT.movedim(-2, 0)
    tables = [both_sides(2.0**i * columns) for i in range(4)]
    end = torch.zeros_like(tables[0], dtype=torch.bool)
    # Where values overflow, the interval before decides.
    for near, far in zip(tables, tables[1:]):
        end = torch.where(far.isfinite(), near - far < fall, end)
    # Rounding may leave a bump, whose deviation is not that of the density.
    axes = unit.diag_embed().reshape(-1, *(1,) * (columns.dim() - 2), len(unit))
    top = heights(vector.center[None])
    for spreads in (1e2, 1e3):
        end = end | (both_sides(spreads * axes) > top - fall)
    is_open = end.any(0).reshape(len(unit), -1).any(-1)
    return int(is_open.nonzero()[0]) if bool(is_open.any()) else None


def _taken(each: Tensor, best: Tensor) -> Tensor:
    """Returns for each data set ``(*batch)`` the search of an index along the first dim, ``(*batch, ...)``."""
    index = best.reshape((1, *best.shape) + (1,) * (each.dim() - 1 - best.dim()))
    return each.gather(0, index.expand((1, *each.shape[1:]))).squeeze(0)
