"""The log density of a joint Gaussian block to second order about a reference, compared with it at other points.

For offsets x from the reference the children's log density is c + g . x - x . H x / 2. The prior of
a member says x_k = B (x of earlier members) + d + S u with u ~ N(0, I). Slopes at the reference
give g. Their derivatives, taken in one run of the model, give H; those of the prior's locations
give B. For a flat prior u has infinite variance.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.nn.functional import pad

from pyro_nami.deriving.derived_group import ConjugateGroup
from pyro_nami.deriving.expansion import (
    ROUNDING,
    Changed,
    agree,
    broadcast,
    derivatives,
    irregular,
    plate_dims,
)
from pyro_nami.deriving.gaussian_levels import (
    Level,
    along_units,
    inverse_root,
    times,
    without_gaps,
)
from pyro_nami.deriving.probing import ProbedExpansion
from pyro_nami.factors.wrappers import innermost
from pyro_nami.program.flat_priors import Flat, flat_prior
from pyro_nami.program.runner import Sites, Values

__all__ = ["SecondOrder"]


class SecondOrder(ProbedExpansion):
    """A block's priors and its children's log density to second order, as rows of the levels of its elimination.

    Args:
        group, leading, nesting, differentiable, away: as for `Expansion`.
        sizes: member -> number of its elements, where they are not those of the group; is kept up to date.
        at: values of the members that offsets are from; by default the means of their priors.
    """

    # far, to see slow bends as well
    probed_at: tuple[float, ...] = (0.0, 1.0, -1.0, 3.0, -3.0, 300.0, -300.0)
    asked = "stay quadratic in latents with Gaussian priors"

    def __init__(
        self,
        group: ConjugateGroup,
        *args: Any,
        sizes: dict[str, int] | None = None,
        at: Values | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(group, *args, **kwargs)
        self._at = {name: value.detach() for name, value in (at or {}).items()}
        self.sizes = dict(zip(group.members, group.elements)) if sizes is None else sizes
        self._depth = dict(zip(group.members, group.depths))
        # in order of elimination, of each level the last drawn first
        backwards = reversed(group.members)
        order = sorted(backwards, key=self._depth.__getitem__)
        starts = itertools.accumulate((self.sizes[name] for name in order), initial=0)
        self._first = dict(zip(order, starts))
        self.references: dict[str, Tensor] = {}  # values that offsets are from
        # deviations of priors; of flat ones the length of an offset
        self.steps: dict[str, Tensor] = {}
        self.flat: dict[str, Flat] = {}  # of members with flat priors
        # of prior locations, in the slopes: all are zero
        self._weights: dict[str, Tensor] = {}
        self.levels: list[Level] = []  # in order of elimination

    def start(self, name: str, prior: Any, shape: torch.Size) -> Tensor:
        """Returns the reference, or a point some deviations away from it."""
        if (flat := flat_prior(prior)) is not None:
            self.flat[name] = flat
            loc, step = flat.center(torch.Size(prior.batch_shape) + prior.event_shape), flat.step()
        else:
            loc, step = prior.mean.detach(), prior.stddev.detach()
        self.steps[name] = step
        reference = self.references[name] = self.reference(name, loc, step)
        if self.away is not None:
            # a flat prior may not say on which device it is
            off = step.mean().to(reference) * irregular(shape, reference, len(self.values))
            return reference + self.away * off
        size = self._held(name).numel()
        if size != self.sizes[name]:
            self.sizes[name] = size
            raise Changed
        return reference.expand(shape)

    def reference(self, name: str, loc: Tensor, step: Tensor) -> Tensor:
        """Returns a member's reference value, from which offsets count, given its prior's location and deviations."""
        at = self._at.get(name)
        # where it is not known where to start
        at = loc if at is None else torch.where(at.isnan(), loc.to(at), at)
        return self.flat[name].within(at) if name in self.flat else at

    @property
    def num_offsets(self) -> int:
        """Number of directions that slopes are differentiated in: elements of members, of one instance each."""
        return sum(self.sizes[name] for name in self._first)

    def take(self, sites: Sites, *, again: bool = False, **options: Any) -> dict[str, Tensor]:
        """Returns the slopes, as `Expansion.take` does.

        If they are to be differentiated again, each has a term besides: weights of zero times the slopes of prior
        locations. The derivatives of slopes by these weights are the derivatives of the locations.
        """
        if again and len(self.priors) > 1:
            locs = {name: self._base(name).loc for name in self.priors}
            locs = {name: loc for name, loc in locs.items() if loc.requires_grad}
            with derivatives():
                self._weights = {
                    name: torch.zeros_like(loc, requires_grad=True) for name, loc in locs.items()
                }
                # as numbers, since a traced tensor's shape is none that autograd can compare
                options["more"] = [(loc * self._weights[name]).sum() for name, loc in locs.items()]
        return super().take(sites, again=again, **options)

    def _read(self, sites: Sites, slopes: Mapping[str, Tensor]) -> None:
        """Takes H, g and the rows of the priors from a run, given slopes that can be differentiated again."""
        units = {name: self._unit_offsets(name) for name in self.values}
        inputs = [*self.values.values(), *self._weights.values()]
        found = along_units(slopes, units, inputs, self.differentiable)
        bends = dict(zip(self.values, found))
        moves = dict(zip(self._weights, found[len(bends) :]))
        levels = []
        for _, each in itertools.groupby(self._first, self._depth.get):
            names = list(each)
            begin = self._first[names[0]]
            dims = plate_dims(sites[names[0]]) if self._is_lifted(names[0]) else frozenset()
            rows = [-self._columns(name, bends[name][begin:], slopes[name]) for name in names]
            priors = [self._prior_rows(name, moves.get(name), begin) for name in names]
            proper = [
                rows[0].new_full((self.sizes[name],), float(name not in self.flat))
                for name in names
            ]
            own, prior, told = torch.cat(rows, -2), torch.cat(priors, -2), torch.cat(proper)
            levels.append(Level(names, begin, len(told), dims, own, prior, told))
        self.levels, finite = without_gaps(levels)
        if not self.differentiable:
            self.levels = [level.detached() for level in self.levels]
        for level, is_finite in zip(levels, finite):
            self.finite.update(self._by_name(level, is_finite))

    def _by_name(self, level: Level, values: Tensor) -> dict[str, Tensor]:
        """Returns values of a level's elements, which lie along the last dim, by member."""
        return dict(zip(level.names, values.split([self.sizes[name] for name in level.names], -1)))

    def _unit_offsets(self, name: str) -> Tensor:
        """Returns unit offsets of all elements, as offsets of a member: ``(offsets, *value)``."""
        value, shape, first = self.values[name], self.shapes[name], self._first[name]
        unit = torch.eye(self.num_offsets, dtype=value.dtype, device=value.device)
        unit = unit[:, first : first + self.sizes[name]].flip(-1)
        held = self._held(name)
        unit = unit.reshape((-1,) + (1,) * (len(shape) - len(held)) + held)
        return unit.expand((-1, *shape)).reshape((-1, *value.shape))

    def _columns(self, name: str, changes: Tensor, start: Tensor) -> Tensor:
        """Returns derivatives by offsets and, behind them, a value at 0: ``(*batch, *plates, E, columns)``."""
        idle = (1,) * (len(self.shapes[name]) + 1 - changes.dim())
        changes = changes.reshape(changes.shape[:1] + idle + changes.shape[1:])
        columns = torch.cat([self._flat(name, changes), self._flat(name, start).unsqueeze(0)])
        return columns.double().movedim(0, -1)

    def _prior_rows(self, name: str, moves: Tensor | None, begin: int) -> Tensor:
        """Returns S^-1 (x_k - B x - d), which has the prior N(0, I): ``(*batch, *plates, E, columns)``."""
        loc = self._base(name).loc - self.references[name]
        own, after = self._first[name], self._first[name] + self.sizes[name]
        if moves is None:
            moves = loc.new_zeros((self.num_offsets, *loc.shape))
        mean = self._columns(name, moves[after:], loc)  # a prior depends on members behind it alone
        whitening = self._whitening(name)
        return pad(torch.cat([whitening, -(whitening @ mean)], -1), (own - begin, 0))

    def _whitening(self, name: str) -> Tensor:
        """Returns S^-1, ``(*batch, *plates, E, E)``."""
        base, shape = self._base(name), self.shapes[name]
        if isinstance(base, dist.Normal):
            scale = self._flat(name, base.scale.expand(shape)).double()
            return torch.diag_embed(scale.reciprocal())
        nesting = None if self._is_lifted(name) else self.nesting
        return inverse_root(base.scale_tril.double(), shape, nesting)

    def _base(self, name: str) -> Any:
        """Returns a member's Normal or multivariate Normal prior; of a flat one where offsets begin, and their unit."""
        if name not in self.flat:
            return innermost(self.priors[name])
        loc = self.references[name].detach()
        return dist.Normal(loc, torch.ones_like(loc), validate_args=False)

    def _moved(self, name: str, value: Tensor) -> Tensor:
        """Returns the offset of a member's value, ``(*batch, *plates, E)``."""
        return self._flat(name, value - self.references[name]).double()

    # ---- probing

    def fit(self, sites: Sites, parts: Sequence[str] = ()) -> None:
        """Finds the rows, as `ProbedExpansion.fit` does; of some children, by default of all."""
        with derivatives():
            self._read(sites, self.take(sites, again=True, parts=parts))

    def is_finite(self) -> bool:
        return super().is_finite() and all(
            bool(level.prior.isfinite().all()) for level in self.levels
        )

    def reaches(self, sites: Sites) -> bool:
        """Whether each child's log density depends on the members, and no element's precision is negative."""
        for level in self.levels:
            precision = level.precision
            # A member with a flat prior may be informed only through the members that depend on it.
            if not torch.where(level.proper > 0, precision > 0, precision >= 0).all():
                return False
        return all(self._curves(sites, child) for child in self.group.children)

    def _curves(self, sites: Sites, child: str) -> bool:
        """Whether a child's log density has a curvature along some direction."""
        slopes = self.take(sites, again=True, parts=[child]).values()
        moving = [slope for slope in slopes if slope.requires_grad]
        if not moving:
            return False
        along = [irregular(slope.shape, slope, i) for i, slope in enumerate(moving)]
        with derivatives():
            bends = torch.autograd.grad(
                moving, list(self.values.values()), along, retain_graph=True, materialize_grads=True
            )
        return any(bool((bend != 0).any()) for bend in bends)

    def predict(self, values: Values) -> list[Tensor]:
        steps, found = self._steps_to(values), []
        for i, level in enumerate(self.levels):
            own, *others = self._terms(i, steps)
            found.append(-steps[i] * (own / 2 + sum(others) + level.rows[..., -1]))
        return found

    def explains(self, far: SecondOrder) -> bool:
        steps = self._steps_to(far.values)
        for i, level in enumerate(self.levels):
            slopes = [self._flat(name, far.slopes[name]).double() for name in level.names]
            found, start = torch.cat(slopes, -1), -level.rows[..., -1]
            earlier = [other.summed(level, step) for other, step in zip(self.levels[:i], steps)]
            terms = [-term for term in self._terms(i, steps) + earlier]
            off = (found - start - sum(terms)).abs()
            # Where data are precise, an error that is small beside the slope may still move the mean by deviations.
            width = level.precision.clamp(min=0).sqrt()
            rounded = bool((off <= self.noise * width).all())
            if not rounded and not agree(found, start, terms, torch.float32):
                return False
            eps = torch.finfo(far.values[level.names[0]].dtype).eps
            least = (0.05 * max(1.0, abs(far.away or 0.0)) + self.noise) * width
            if not (off <= least + ROUNDING * eps * sum(term.abs() for term in terms)).all():
                return False
        return self.explains_priors(far)

    def explains_priors(self, far: SecondOrder) -> bool:
        """Whether the priors' noise at another point is the one that their rows predict."""
        steps = self._steps_to(far.values)
        for i, level in enumerate(self.levels):
            noise = torch.cat([self._noise(name, far) for name in level.names], -1)
            terms = self._terms(i, steps, prior=True)
            if not agree(noise, level.prior[..., -1], terms, torch.float32):
                return False
        return True

    def _terms(self, i: int, steps: Sequence[Tensor], prior: bool = False) -> list[Tensor]:
        """Returns the terms that steps of a level, and of the levels behind it, add to its rows."""
        columns = [self.levels[i].columns(other, prior) for other in self.levels[i:]]
        return [times(each, step) for each, step in zip(columns, steps[i:])]

    def _steps_to(self, values: Values) -> list[Tensor]:
        """Returns the offsets of values, by level."""
        return [
            torch.cat([self._moved(name, values[name].detach()) for name in level.names], -1)
            for level in self.levels
        ]

    def _noise(self, name: str, far: SecondOrder) -> Tensor:
        """Returns S^-1 (z - loc) of a member at another point, by its prior there; flat ones are all the same."""
        prior = self if name in self.flat else far
        error = far.values[name].detach() - prior._base(name).loc.detach()
        return times(prior._whitening(name).detach(), self._flat(name, error).double())

    # ---- shapes

    def _held(self, name: str) -> torch.Size:
        """Returns the sizes of the dims of a member's values that its elements lie along."""
        shape, plates = self.shapes[name], 0 if self._is_lifted(name) else self.nesting
        return shape[len(shape) - len(self.priors[name].event_shape) - plates :]

    def _is_lifted(self, name: str) -> bool:
        return self._depth[name] < self.group.num_lifted

    def _flat(self, name: str, value: Tensor) -> Tensor:
        """Returns values with elements along the last dim, ``(*batch, *plates, E)``, size 1 in plates that E counts.

        The last comes first, as it is eliminated first.
        """
        value = value.expand(broadcast(value.shape, self.shapes[name]))
        held = self._held(name)
        plates = len(held) - len(self.priors[name].event_shape)
        batch = value.shape[: value.dim() - len(held)]
        return value.reshape(*batch, *(1,) * plates, held.numel()).flip(-1)
