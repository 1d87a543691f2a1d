"""The marginal posterior of latents that are sampled first, about its mode, with all other latents integrated out.

As for `marginal_quadrature`, the log density of the first latents v is log p(v, z, data) - log q(z | v, data), at any z
where q is exact. Where q is a Normal about a mode, z is that mode, which is Laplace's approximation.

In unconstrained space v is a bent Normal vector. Its center is the mode, its root that of the curvature there; or both
are those of weighted points, or of the nearest Normal.

References:
    Rue, Martino and Chopin 2009, Approximate Bayesian inference for latent Gaussian models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_nami.deriving.ascent import Ascent, ascend, measured, polish, root_of
from pyro_nami.deriving.bent_vector import BentVector, bent_along_lines, reweighted, unbent
from pyro_nami.deriving.derived_group import ConjugateGroup
from pyro_nami.deriving.expansion import trimmed
from pyro_nami.deriving.gaussian_levels import times
from pyro_nami.deriving.nearest_normal import nearest_normal, normal_points
from pyro_nami.deriving.vector_mixture import (
    LEAST_GAIN,
    adapted_mixture,
    modes_of,
    shares_of,
)
from pyro_nami.factors.joint_normal import JointNormal, MixedNormals
from pyro_nami.factors.knots import KnotTransform

__all__ = ["OPEN", "Collapsed", "LatentVector"]

MOST_MIXED = 12  # numbers of a mixture, whose parts are found by weights of nearby points
MOST_MODES = 32  # further ones of a mixture; where there are more, it is told that some are missing
MOST_WEIGHED = 30  # numbers for which weighted points tell moments; of more, few points have most of the weight
# Searches for a mode; fewer where few draws are given, as runs take long there. Four find four of sixteen modes.
STARTS, FEW_STARTS = 16, 4
AT_ONCE = 256  # points of a run, as a model may make a matrix of its data at each
MUCH = 0.5  # share of effective points below which a search for the nearest Normal pays
FEWEST_PAIRS = 128  # of points for that
# Weighted points of a round, of a guide whose draws are weighted. Of 4,000 draws of a capture model 3,077 are effective
# with 256 of them, 3,092 with 1,024.
FEW_POINTS = 256
NARROW = (
    0.1,
    3e-3,
)  # of the spread of priors, where it begins if there is no mode: Cauchy ones are wide
LEAST = 0.05  # share below which points about a mode are no picture of the density
TAIL = 1.0, 2.0, 4.0, 8.0  # deviations, between which a density falls if it has an end
FALL = 0.5  # nats by which it does at least: a Cauchy variable's falls by 1.4 between the last
FAR = 1e2, 1e3  # spreads of priors, at which it has fallen as well
OPEN = "does not fall"  # in the flaw of a density that has no end
FLAT = 1e-4  # curvature, in units of the estimate that a search leaves, below which a density does not fall


class LatentVector(NamedTuple):
    """The unconstrained coordinates of latents as one vector.

    Attributes:
        layouts: latent -> its map between values and unconstrained space.
        plates: latent -> the sizes of the model's plate dims at its site.
        like: a tensor of the latents' dtype and device.
    """

    layouts: Mapping[str, Any]
    plates: Mapping[str, torch.Size]
    like: Tensor

    @property
    def sizes(self) -> list[int]:
        """How many numbers each latent has."""
        return [
            self.plates[name].numel() * layout.num_elements for name, layout in self.layouts.items()
        ]

    def values(self, points: Tensor) -> dict[str, Tensor]:
        """Returns the latents' values ``(*lead, *plates, *event)`` at points ``(*lead, numbers)``."""
        parts = zip(self.layouts.items(), points.split(self.sizes, -1))
        return {
            name: layout.value(self._shown(name, part)).to(self.like)
            for (name, layout), part in parts
        }

    def points(self, values: Mapping[str, Tensor]) -> Tensor:
        """Returns the points ``(*lead, numbers)`` of values."""
        return torch.cat([self.numbers(name, values[name]) for name in self.layouts], -1)

    def numbers(self, name: str, value: Tensor) -> Tensor:
        """Returns a latent's numbers ``(*lead, numbers)``."""
        layout, plates = self.layouts[name], self.plates[name]
        value = value.expand(torch.broadcast_shapes(value.shape, plates + layout.event_shape))
        return layout.elements(value).flatten(-1 - len(plates)).double()

    def log_abs_det(self, points: Tensor, values: Mapping[str, Tensor]) -> Tensor:
        """Returns the log determinant of d value / d point, ``(*lead)``."""
        total = points.new_zeros(points.shape[:-1])
        for (name, layout), part in zip(self.layouts.items(), points.split(self.sizes, -1)):
            own = layout.log_abs_det(self._shown(name, part), values[name].double())
            if own is not None:
                own = own.expand(points.shape[:-1] + self.plates[name])
                total = total + own.reshape(*points.shape[:-1], -1).sum(-1)
        return total

    def _shown(self, name: str, part: Tensor) -> Tensor:
        return part.reshape(
            part.shape[:-1] + self.plates[name] + (self.layouts[name].num_elements,)
        )


class _Conditional(NamedTuple):
    """A member's conditional: lower (v - center - slope @ those before) is bent standard Normal variables."""

    center: Tensor  # (*batch, numbers)
    slope: Tensor  # (*batch, numbers, numbers before)
    lower: Tensor  # (*batch, numbers, numbers), lower triangular
    bend: KnotTransform
    before: tuple[str, ...]  # members that are drawn earlier


class Collapsed:
    """The conditionals of latents that are sampled first, of whatever plates.

    Args:
        group: the members.
        coordinates: of the members.
        starts: points, of which searches begin at those with the highest density, ``(starts, *batch, numbers)``.
        unit: the order of the prior's spread, ``(numbers,)``.
        log_density: function from values of the members, ``(points, *batch, *plates, *event)`` each, to the log density
            of values and data in nats, ``(points, *batch)``, differentiable in the values.
        is_proper: whether all priors are, so that there is a posterior.
        weighs: whether weighted points are to tell mean and covariance; lines through the mode do otherwise.
        at_once: points of a run, at most.

    Attributes:
        finite: nothing, as `Expansion.finite` of what is always a number.
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
        log_density: Callable[[Mapping[str, Tensor]], Tensor],
        is_proper: bool = True,
        weighs: bool = True,
        at_once: int = AT_ONCE,
    ) -> None:
        self.group = group
        self.finite: dict[str, Tensor] = {}
        self.effective = 1.0
        self.flaw = ""
        self._coordinates = coordinates
        self._log_density = log_density
        self._at_once = min(at_once, AT_ONCE)
        self._starts, self._unit = starts, unit
        self._further: list[BentVector] | None = None  # about other modes, once they are asked for
        mode = self._mode(starts, unit, weighs)
        self._vector = bent_along_lines(self._heights, mode.place, root_of(mode.inverse))
        is_open = not is_proper and self._has_open_tails()
        if weighs and starts.shape[-1] > 1 and not is_open:
            self._improve(mode, starts)
        self._take([self._vector], torch.zeros(1).to(self._vector.center))

    # ---- the density

    def _log_prob(self, points: Tensor) -> Tensor:
        """Returns the log density at points in unconstrained space, ``(*lead)``."""
        values = self._coordinates.values(points)
        total = self._log_density(values).reshape(points.shape[:-1])
        total = total + self._coordinates.log_abs_det(points, values)
        return total.nan_to_num(-torch.inf, -torch.inf, -torch.inf)

    def _heights(self, points: Tensor) -> Tensor:
        """Returns the log density at points ``(points, *batch, numbers)``."""

        def run(points: Tensor) -> tuple[Tensor, ...]:
            with torch.no_grad():
                return (self._log_prob(points),)

        return torch.cat([_where_possible(run, part)[0] for part in points.split(self._at_once)])

    def _slopes(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the log density at points, and its derivatives; both for `ascend`."""
        parts = [_where_possible(self._risen, part) for part in points.split(self._at_once)]
        height, slope = map(torch.cat, zip(*parts))
        return height, slope

    def _risen(self, points: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            points = points.detach().requires_grad_()
            height = self._log_prob(points)
            (slope,) = torch.autograd.grad(height.sum(), points)
        finite = slope.isfinite().all(-1)
        height = height.detach().where(finite, -torch.inf)
        return height, slope.where(finite[..., None], 0.0)

    # ---- the mode

    def _mode(self, starts: Tensor, unit: Tensor, weighs: bool) -> Ascent:
        """Returns the highest mode, and the inverse curvature there."""
        count = STARTS if len(starts) > STARTS else FEW_STARTS
        heights = self._heights(starts)
        most = int((heights > -torch.inf).sum(0).amin().clamp(min=1))
        best = heights.topk(min(count, most), 0).indices
        chosen = starts.gather(0, best[..., None].expand(*best.shape, starts.shape[-1]))
        found = self._searched(chosen)
        names = ", ".join(map(repr, self.group.members))
        if not bool(found.height.isfinite().any(0).all()):
            raise ValueError(
                f"the log density of {names} is not finite at any of {len(starts)} starts"
            )
        is_mode = (found.gain < LEAST_GAIN) & found.height.isfinite()
        best = found.height.where(is_mode | ~is_mode.any(0), -torch.inf).argmax(0)
        near = Ascent(*(_taken(each, best) for each in found))
        self._modes = modes_of(self._heights, self._slopes, found)
        if weighs:  # a point far out, where others have modes, takes many runs
            near = measured(self._heights, near)
        self._near = root_of(near.inverse)
        mode, values = polish(self._slopes, near)
        if bool((values <= FLAT).any()):
            way = self._name_of(mode.inverse.diagonal(dim1=-2, dim2=-1).sqrt() / unit)
            self.flaw = f"the log density of {names} {OPEN} to all sides of where it is highest, along {way}"
        elif bool((mode.gain > LEAST_GAIN).any()):
            self.flaw = f"no mode of the log density of {names} was found"
        return mode

    @property
    def others(self) -> list[float]:
        """By how many nats there is less mass about each further mode that searches have found."""
        return self._modes.lower[1:]

    def _name_of(self, share: Tensor) -> str:
        """Returns the member with the largest of some numbers."""
        return self._member(int(share.reshape(-1, share.shape[-1]).amax(0).argmax()))

    def _member(self, index: int) -> str:
        """Returns the member that a number is of."""
        sizes = torch.tensor(self._coordinates.sizes).cumsum(0)
        return repr(self.group.members[int((sizes <= index).sum())])

    # ---- beside the mode

    def _improve(self, mode: Ascent, starts: Tensor) -> None:
        """Takes the vector with the highest ELBO: that of weighted points, or the nearest Normal, bent or not.

        The search for the nearest Normal begins at the mode; without one at the likeliest draw of the priors.
        """
        few = starts.shape[-1] <= MOST_WEIGHED
        if few and not self.flaw:
            rough = (FEW_POINTS, MUCH) if self.group.is_weighted else ()
            self._vector, self.effective = reweighted(self._heights, self._vector, *rough)
            if self.effective > MUCH:
                return
        points = normal_points(max(FEWEST_PAIRS, starts.shape[-1]), starts.shape[-1])
        place, roots = mode.place, [self._near]
        if self.flaw:  # that is no mode
            place = _taken(starts, self._heights(starts).argmax(0))
            spread = (starts - starts.median(0).values).abs().median(0).values
            roots = [(narrow * spread).diag_embed() for narrow in NARROW]
        for root in roots:
            *normal, is_found = nearest_normal(self._slopes, place, root, points)
            if is_found:
                break
        if is_found:
            others = [unbent(*normal), bent_along_lines(self._heights, *normal)]
            if few:
                others.append(reweighted(self._heights, others[-1])[0])
            candidates = others if self.flaw else [self._vector, *others]
            self._vector = max(candidates, key=lambda each: each.elbo(self._heights, points))
            self.flaw = ""
        elif not self.effective >= LEAST:
            names = ", ".join(map(repr, self.group.members))
            share = f"{self.effective:.1%} of points about the mode of {names} are effective"
            self.flaw = self.flaw or share

    def _has_open_tails(self) -> bool:
        """Notes a member along which the density does not fall far out, as that of an improper posterior."""
        # (sides, ways, *batch, numbers)
        ways = torch.stack([self._vector.root.mT, -self._vector.root.mT]).movedim(-2, 1)
        tables = [
            self._heights((self._vector.center + far * ways).flatten(0, 1)).unflatten(0, (2, -1))
            for far in TAIL
        ]
        # Where values overflow, what is known ends before.
        end = torch.zeros_like(tables[0], dtype=torch.bool)
        for near, far in zip(tables, tables[1:]):
            end = torch.where(far.isfinite(), near - far < FALL, end)
        # A bump on the way out, as rounding leaves, has a deviation of its own.
        axes = torch.diag_embed(self._unit).reshape(-1, *(1,) * (ways.dim() - 3), len(self._unit))
        for far in FAR:
            points = self._vector.center + far * torch.stack([axes, -axes])
            heights = self._heights(points.flatten(0, 1)).unflatten(0, (2, -1))
            end = end | (heights > self._heights(self._vector.center[None]) - FALL)
        ways_of_it = end.any(0).flatten(1).any(-1) if end.dim() > 2 else end.any(0)
        is_open = bool(ways_of_it.any())
        if is_open and not self.flaw:
            names = ", ".join(map(repr, self.group.members))
            member = self._member(int(ways_of_it.nonzero()[0]))
            self.flaw = f"the log density of {names} {OPEN} far out, along {member}"
        return is_open

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
            self._modes = modes_of(self._heights, self._slopes, self._searched(self._starts))
        modes = self._modes.vectors
        own = [float(self._vector.log_prob(each.center).sum()) for each in modes]
        others = [each for each, near in zip(modes, own) if near < max(own)]
        if not is_small:
            return others
        for i, each in enumerate(others[:MOST_MODES]):
            bent = bent_along_lines(self._heights, each.center, each.root)
            others[i], _ = reweighted(self._heights, bent, FEW_POINTS, MUCH)
        return others

    def _searched(self, starts: Tensor) -> Ascent:
        eps = torch.finfo(self._coordinates.like.dtype).eps
        return ascend(self._slopes, starts, self._unit, eps)

    def _take(self, vectors: Sequence[BentVector], log_shares: Tensor) -> None:
        """Takes a mixture of vectors, by shares ``(vectors,)``."""
        if log_shares.isnan().any():  # the density is finite at no point of a part
            vectors, log_shares = [self._vector], torch.zeros_like(log_shares[:1])
        self._parts = [self._conditionals(vector) for vector in vectors]
        self._log_shares = log_shares

    def conditional(
        self, name: str, values: Mapping[str, Tensor], dims: int | None = None
    ) -> JointNormal | MixedNormals:
        """Returns a member's conditional in unconstrained space, as `Expansion.conditional` does."""
        parts = [self._given(part[name], name, values, dims) for part in self._parts]
        if len(parts) == 1:
            return parts[0]
        before = self._parts[0][name].before
        likely = [
            sum(self._log_q(part[other], other, values) for other in before) for part in self._parts
        ]
        log_shares = self._log_shares + torch.stack(list(map(torch.as_tensor, likely)), -1)
        log_shares = log_shares.log_softmax(-1)
        lead = None if dims is None else max(0, dims - len(self._coordinates.plates[name]))
        shape = trimmed(log_shares.shape[:-1], lead)
        return MixedNormals(log_shares.reshape(*shape, -1).to(self._coordinates.like), parts)

    def _given(
        self, own: _Conditional, name: str, values: Mapping[str, Tensor], dims: int | None
    ) -> JointNormal:
        """Returns a part's conditional of a member."""
        coordinates = self._coordinates
        center, plates = self._center(own, values), coordinates.plates[name]
        lead = trimmed(center.shape[:-1], None if dims is None else max(0, dims - len(plates)))
        if dims is not None and not lead:
            plates = plates[max(0, len(plates) - dims) :]
        held = plates + (coordinates.layouts[name].num_elements,)
        center = center.reshape(lead + center.shape[-1:]).to(coordinates.like)
        return JointNormal(center, own.lower, held, 0, bend=own.bend)

    def _center(self, own: _Conditional, values: Mapping[str, Tensor]) -> Tensor:
        """Returns where a conditional is, given members before, ``(*lead, numbers)``."""
        if not own.before:
            return own.center
        known = [self._coordinates.numbers(other, values[other]) for other in own.before]
        lead = torch.broadcast_shapes(*(each.shape[:-1] for each in known))
        off = torch.cat([each.expand(lead + each.shape[-1:]) for each in known], -1)
        return own.center + times(own.slope, off)

    def _log_q(self, own: _Conditional, name: str, values: Mapping[str, Tensor]) -> Tensor:
        """Returns the log density of a member's value by a part's conditional, ``(*lead)``."""
        off = self._coordinates.numbers(name, values[name]) - self._center(own, values)
        normal, log_slope = own.bend.straighten(times(own.lower, off))
        log_det = own.lower.diagonal(dim1=-2, dim2=-1).log()
        return (-normal.square() / 2 - log_slope + log_det).sum(-1)

    def _conditionals(self, vector: BentVector) -> dict[str, _Conditional]:
        """Returns what the conditionals of all members are made of."""
        lower, like = torch.linalg.inv(vector.root).tril(), self._coordinates.like
        found, first = {}, 0
        for i, (name, size) in enumerate(zip(self.group.members, self._coordinates.sizes)):
            rows, before = slice(first, first + size), slice(0, first)
            block, center = lower[..., rows, rows], vector.center[..., rows]
            slope = -torch.linalg.solve_triangular(block, lower[..., rows, before], upper=False)
            center = center - times(slope, vector.center[..., before])
            bend = KnotTransform(vector.knots[..., rows, :, :].to(like))
            others = self.group.members[:i]
            found[name] = _Conditional(center, slope, block.to(like), bend, others)
            first += size
        return found

    def draw(self, count: int, batch: torch.Size) -> tuple[dict[str, Tensor], Tensor]:
        """Returns draws of the members, ``(count, *batch, *event)``, and their log density, ``(count, *batch)``."""
        normal = torch.randn((count, *self._vector.center.shape), dtype=torch.float64).to(
            self._vector.center
        )
        points, log_q = self._vector.at(normal)
        values = self._coordinates.values(points)
        log_q = log_q - self._coordinates.log_abs_det(points, values)
        return values, log_q.reshape(count, *batch)


def _where_possible(run: Callable[[Tensor], Any], points: Tensor) -> Any:
    """Returns the results of a run at points; where the model raises, log densities of -inf and slopes of zero.

    Models do at values far out, as where a matrix cannot be factorized, for all points at once.
    """
    try:
        return run(points)
    except (RuntimeError, ValueError, ArithmeticError):
        if len(points) > 1:
            halves = [_where_possible(run, half) for half in points.tensor_split(2)]
            return tuple(map(torch.cat, zip(*halves)))
        return torch.full_like(points[..., 0], -torch.inf), torch.zeros_like(points)


def _taken(each: Tensor, best: Tensor) -> Tensor:
    """Returns for each data set ``(*batch)`` the search of an index along the first dim, ``(*batch, ...)``."""
    index = best.reshape((1, *best.shape) + (1,) * (each.dim() - 1 - best.dim()))
    return each.gather(0, index.expand((1, *each.shape[1:]))).squeeze(0)
