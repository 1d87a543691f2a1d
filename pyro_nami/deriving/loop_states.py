"""The states of a loop given its data: a Normal vector with a banded precision.

The children's log density is expanded to second order, and the priors' locations to first order,
by derivatives of one run of the model along a few vectors. As states reach back over a few elements
alone, each of these vectors tells a column of the band for many of them at once (Curtis, Powell and
Reid 1974). The system is block-tridiagonal, and solved in log n steps.

References:
    Rue and Held 2005, Gaussian Markov Random Fields.
    Curtis, Powell and Reid 1974, On the estimation of sparse Jacobian matrices.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from pyro_nami.deriving.block_tridiagonal import inverse_of_blocks, root_of_blocks, solved_blocks
from pyro_nami.deriving.expansion import (
    ROUNDING,
    TOLERANCE,
    Expansion,
    Run,
    derivatives,
    irregular,
    parameters_of,
    solved,
    squeezed,
)
from pyro_nami.deriving.gaussian_levels import along_units, times
from pyro_nami.deriving.joint_gaussian import MOST_CLOSER
from pyro_nami.deriving.newton import rounding_of_rows
from pyro_nami.factors.markov_normal import MarkovNormal
from pyro_nami.factors.wrappers import base_of
from pyro_nami.program.masks import density_rounding
from pyro_nami.program.runner import Message, Sites, Values

if TYPE_CHECKING:
    from typing_extensions import Self  # noqa: UP035  for Python 3.10

__all__ = [
    "Banded",
    "LoopStates",
    "Quadratic",
    "banded_derivatives",
    "blocks",
    "quadratic_of",
    "vector",
]

_NOT_QUADRATIC = (
    "the log density of '{}' is not quadratic: it is off by {:.2g} nats {:g} deviations away"
)


class Banded(NamedTuple):
    """A matrix of blocks (t, t), ``(*batch, n, m, m)``, and (t + 1, t): block-bidiagonal, or symmetric tridiagonal."""

    diagonal: Tensor
    lower: Tensor

    def times(self, x: Tensor) -> Tensor:
        """Returns the product of the bidiagonal matrix with blocks ``(*batch, n, m)``."""
        below = times(self.lower, x[..., :-1, :])
        return times(self.diagonal, x) + pad(below, (0, 0, 1, 0))

    def transposed_times(self, x: Tensor) -> Tensor:
        """Returns the product of the transposed bidiagonal matrix with blocks."""
        above = times(self.lower.mT, x[..., 1:, :])
        return times(self.diagonal.mT, x) + pad(above, (0, 0, 0, 1))

    def symmetric_times(self, x: Tensor) -> Tensor:
        """Returns the product of the symmetric matrix with blocks."""
        return self.times(x) + self.transposed_times(x) - times(self.diagonal, x)

    def detached(self) -> Banded:
        """Returns the same matrix without gradients."""
        return Banded(self.diagonal.detach(), self.lower.detach())


class Quadratic(NamedTuple):
    """The log density of the states and their data, to second order about the states' values, in double precision.

    Attributes:
        slope: of the children's log density, ``(*batch, n, m)``.
        curvature: minus its second derivatives.
        whitened: of the prior, (I - J) / scale as blocks (t, t) and (t, t - 1), with J the slopes of locations.
        error: (value - location) / scale.
    """

    slope: Tensor
    curvature: Banded
    whitened: Banded
    error: Tensor

    def prior_precision(self) -> Banded:
        """Returns the prior's precision."""
        own, before = self.whitened
        diagonal = own.mT @ own + pad(before.mT @ before, (0, 0, 0, 0, 0, 1))
        return Banded(diagonal, own[..., 1:, :, :].mT @ before)

    def precision(self) -> Banded:
        """Returns the precision of the Normal with these second derivatives."""
        prior = self.prior_precision()
        return Banded(prior.diagonal + self.curvature.diagonal, prior.lower + self.curvature.lower)

    def detached(self) -> Quadratic:
        """Returns the same expansion without gradients."""
        curvature, whitened = self.curvature.detached(), self.whitened.detached()
        return Quadratic(self.slope.detach(), curvature, whitened, self.error.detach())

    def gains_of_prior(self, moved: Tensor) -> list[Tensor]:
        """Returns what each state's log density gains by a move of all, to first and to second order."""
        change = self.whitened.times(moved)
        return [-self.error * change, -change.square() / 2]

    def whole_slope(self) -> Tensor:
        """Returns the slope of the joint log density."""
        return self.slope - self.whitened.transposed_times(self.error)


class LoopStates(Expansion):
    """The joint conditional of the states of a loop given all else, where it is Normal.

    Args:
        group: of the states of one loop.
        leading, nesting, differentiable, away, given: as for `Expansion`.
        at: the states' values that an expansion begins at, by name; zeros by default.

    Attributes:
        unfound: whether no mode was found.
        unsolved: what is said of states for which this has no solution.
    """

    # the deviations of the states at which densities are compared; far ones show slow bends
    probed_at = (1.0, -3.0, 300.0)
    unfound = False
    unsolved = "the log density of the data is not quadratic in the states: it is curved upwards"

    def __init__(self, *args: Any, at: Values | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._at = dict(at or {})
        self._width, self._back, self._span = self.group.band

    def start(self, name: str, prior: Any, shape: torch.Size) -> Tensor:
        at = self._at.get(name, prior.mean)
        # of other rows of a plate there may be more, or fewer
        fits = all(a in (1, b) for a, b in zip(reversed(at.shape), reversed(shape)))
        return (at if fits and at.dim() <= len(shape) else prior.mean).to(prior.mean).expand(shape)

    def moved(self, value: Tensor) -> Self:
        """Returns the expansion about other values of the states."""
        return self.anew(at={self.first: value})

    def quadratic(self, sites: Sites, graph: bool) -> Quadratic:
        """Returns the expansion about the values of a run; graph: of which gradients may be taken."""
        value, normal = self.values[self.first], base_of(sites[self.first]["fn"])
        if normal.loc.shape[-1] != value.shape[-1]:
            raise ValueError(
                f"Expected '{self.first}' of {value.shape[-1]} elements, as at the guide's first call; got "
                f"{normal.loc.shape[-1]}. The length of a loop is fixed by training; for data of another length make a "
                "new guide."
            )
        slope, curvature = self.of_data(sites, graph=graph)
        width = self._width
        with derivatives():
            along = banded_derivatives(normal.loc, value, (1, self._back), width, graph)
            scale = normal.scale.expand(value.shape).double()
            error = (value - normal.loc).expand(value.shape).double() / scale
            found = quadratic_of(slope.double(), curvature, along, error, scale, width)
        return found if graph else found.detached()

    def of_data(
        self, sites: Sites, names: Sequence[str] = (), *, graph: bool = False
    ) -> tuple[Tensor, Banded]:
        """Returns the slope of the log density of children, by default of all, and minus its second derivatives."""
        slope = self.take(sites, again=True, parts=names)[self.first]
        reach = self._span - 1
        with derivatives():
            ends, value = (-reach, reach), self.values[self.first]
            second = banded_derivatives(slope, value, ends, self._width, graph)
            return slope, Banded(-0.5 * (second.diagonal + second.diagonal.mT), -second.lower)

    def solve(self, sites: Sites) -> Expansion | None:
        value = self.values[self.first]
        way = self.step(self.quadratic(sites, self.moves(sites)))
        farthest = TOLERANCE / (ROUNDING * torch.finfo(value.dtype).eps)
        deviations = (way.detach() / self.deviations().detach()).abs()
        is_far = bool(((deviations > farthest) & (deviations < torch.inf)).any())
        # Slopes by sums over steps lose digits where the slopes of data have one sign, as far from the mode.
        is_far |= "stack" in sites[self.first] and not self._at
        if is_far and self.runs <= MOST_CLOSER:
            return self.moved((value + way).detach().to(value))
        return None

    def moves(self, sites: Sites) -> bool:
        """Whether there are gradients to anything but the states: to what was drawn before, or the model's weights."""
        if not self.differentiable:
            return False
        found = [self.density(sites, child) for child in self.group.children if child in sites]
        normal = base_of(sites[self.first]["fn"])
        return bool(parameters_of(*found, normal.loc, normal.scale, but=self.values.values()))

    def step(self, parts: Quadratic, at: Tensor | None = None) -> Tensor:
        """Takes the Normal that an expansion is; returns the way to its mean from the values that it is about."""
        at = self.values[self.first] if at is None else at
        with derivatives():
            found = solved_blocks(*parts.precision(), parts.whole_slope())
        self.mean_blocks, self.inverse = blocks(at.double(), self._width) + found.x, found
        return vector(found.x, at)

    # ---- probing

    def flaw(self, run: Run) -> str:
        """Returns why the states of a loop are not as this takes them; "" if they are.

        Args:
            run: makes a run of the model for an expansion.
        """
        here, sites = solved(self, run(self), run)
        ends = here.mean() + here.deviations()
        if here.unfound or not bool(ends.isfinite().all()):
            return self.unsolved
        flaw: str = here.refuted(sites, run)
        return flaw

    def refuted(self, sites: Sites, run: Run) -> str:
        """Returns why an expansion that is solved does not hold elsewhere; "" if it does."""
        return self.differs(sites, run, self.probed_at)

    def differs(
        self,
        sites: Sites,
        run: Run,
        places: Sequence[float],
        names: Collection[str] | None = None,
        share: float = TOLERANCE,
    ) -> str:
        """Returns where a log density is not as its expansion says; "" if it is.

        Each datum, and each state given those before it, is compared by itself, as others may hide what it does; data
        that read several states are compared together.

        Args:
            sites: of the run that the expansion is of.
            run: makes a run of the model for an expansion.
            places: how far out, in deviations of the states.
            names: of the data, or the states; by default all.
            share: of the gain that may be another.
        """
        before = self.rows(sites)
        names = before if names is None else names
        parts = {name: self.of_data(sites, [name]) for name in names if name != self.first}
        whole = self.quadratic(sites, False)
        mean, deviations = self.mean().detach(), self.deviations().detach()
        at = self.values[self.first].detach()
        for place in places:
            offset = place * deviations * irregular(deviations.shape, deviations, 1)
            other = self.given((mean + offset).to(at))
            after = other.rows(run(other))
            moved = (other.values[self.first].detach() - at).double()
            for name in names:
                reads = self.reads(sites[name])
                if name == self.first:
                    gains = whole.gains_of_prior(blocks(moved, self._width))
                    gains = [vector(each, moved) for each in gains]
                else:
                    gains = self._gains(*parts[name], moved, reads)
                (then, _), (now, rounding) = before[name], after[name]
                if reads is None:
                    then, now, rounding = then.sum(), now.sum(), rounding.sum()
                off = (now - then - sum(gains)).abs()
                size: Any = sum(gain.abs() for gain in gains)
                rounding = rounding + ROUNDING * torch.finfo(at.dtype).eps * size
                if not bool((off <= share * size + rounding + TOLERANCE**2 * then.abs()).all()):
                    return _NOT_QUADRATIC.format(name, float(off.max()), place)
        return ""

    def given(self, value: Tensor, count: int | None = None) -> Self:
        """Returns an expansion about other values of the states, of which nothing is known yet.

        Args:
            value: of the states.
            count: number of points, along the first dim; None without such a dim.
        """
        other = self.anew(given={self.first: value})
        other.count = count
        return other

    def rows(self, sites: Sites) -> dict[str, tuple[Tensor, Tensor]]:
        """Returns the log densities in nats of each row of data, and of each state given those before it.

        Behind each is how far rounding may take it.
        """
        found = {}
        for name, (site, density) in self.row_densities(sites).items():
            each = density.detach()
            rounding = rounding_of_rows(each, site)
            of_values = density_rounding(site)
            if of_values is not None:
                rounding = rounding + of_values
            found[name] = self.by_step(site, each.double()), self.by_step(site, rounding)
        return found

    def row_densities(self, sites: Sites) -> dict[str, tuple[Any, Tensor]]:
        """Returns the site, and the log density in nats, of each row of data, and of each state given those before."""
        found = {}
        for name in (*filter(sites.__contains__, self.group.children), self.first):
            site = sites[name]
            # one of a loop as a whole, whose rows are those of its steps
            if "part" in site or "steps" in site and not site["steps"].dim:
                site = {**site, "fn": base_of(site["fn"])}
            each = site["fn"].log_prob(site["value"])
            if "steps" in site and site["mask"] is not None:
                each = torch.where(torch.as_tensor(site["mask"]), each, 0.0)
            found[name] = site, self.weighted(each, sites, name)
        return found

    def by_step(self, site: Message, rows: Tensor) -> Tensor:
        """Returns numbers for the rows of a site with the steps of the states last."""
        return site["steps"].last(rows) if "steps" in site else rows

    def reads(self, site: Message) -> Sequence[int] | slice | None:
        """Returns which elements of the states rows read, one each; None where they read several, or share one."""
        if site["name"] == self.first:
            return slice(None)
        if "steps" in site:
            return range(self.values[self.first].shape[-1]) if self._span == 1 else None
        reads = site["part"].reads if "part" in site and self._span == 1 else ()
        is_one = bool(reads) and min(reads) >= 0 and len(set(reads)) == len(reads)
        return list(reads) if is_one else None

    def _gains(
        self, slope: Tensor, curvature: Banded, moved: Tensor, reads: Sequence[int] | slice | None
    ) -> list[Tensor]:
        """Returns what data gain by a move of the states, to first and to second order: by row, or all together."""
        slope = slope.detach().double()
        fall = curvature.detached().symmetric_times(blocks(moved, self._width))
        gains = [slope * moved, -moved * vector(fall, moved) / 2]
        return [gain.sum() if reads is None else gain[..., reads] for gain in gains]

    # ---- what was found

    def conditional(self, name: str, values: Values, dims: int | None = None) -> MarkovNormal:
        diagonal, lower = self.inverse.diagonal, self.inverse.lower
        size, like = self.values[name].shape[-1], self.values[name].dtype
        with derivatives():
            along = pad(lower @ inverse_of_blocks(diagonal[..., :-1, :, :]), (0, 0, 0, 0, 1, 0))
            explained = along[..., 1:, :, :] @ lower.mT
            root = root_of_blocks(diagonal - pad(explained, (0, 0, 0, 0, 1, 0)))
        return MarkovNormal(
            squeezed(self.mean_blocks.to(like), dims, 2),
            squeezed(along.to(like), dims, 3),
            squeezed(root.to(like), dims, 3),
            size,
        )

    def mean(self) -> Tensor:
        """Returns the means, or modes, of the states."""
        return vector(self.mean_blocks, self.values[self.first])

    def deviations(self) -> Tensor:
        """Returns the standard deviations of the states."""
        variances = self.inverse.diagonal.diagonal(dim1=-2, dim2=-1)
        return vector(variances, self.values[self.first]).sqrt()

    def begin_next(self) -> dict[str, Tensor]:
        """Returns where another search begins: at the first of a batch that was found, in all plates."""
        value = self.mean().detach().to(self.values[self.first])
        batch = max(0, value.dim() - 1 - self.nesting)
        rows = value.reshape(-1, *value.shape[batch:])
        found = rows.flatten(1).isfinite().all(1).nonzero()
        return {self.first: rows[found[0, 0]]} if len(found) else {}


def quadratic_of(
    slope: Tensor,
    curvature: Tensor | Banded,
    along: Banded,
    error: Tensor,
    scale: Tensor,
    width: int,
) -> Quadratic:
    """Returns the parts of an expansion, in blocks, given those of vectors; of ``curvature`` a vector is a diagonal."""
    if isinstance(curvature, Tensor):
        diagonal = blocks(curvature, width).diag_embed()
        curvature = Banded(diagonal, torch.zeros_like(diagonal[..., 1:, :, :]))
    rows = blocks(scale, width, 1.0)
    eye = torch.eye(width, dtype=torch.float64, device=slope.device)
    own = (eye - along.diagonal) / rows.unsqueeze(-1)
    before = -along.lower / rows[..., 1:, :].unsqueeze(-1)
    return Quadratic(blocks(slope, width), curvature, Banded(own, before), blocks(error, width))


def _derivatives(of: Tensor, by: Tensor, units: Tensor, graph: bool) -> Tensor:
    """Returns the derivatives of weighted sums of a vector's elements by another one, ``(*by, sums)``.

    Args:
        of, by: vectors ``(*batch, size)``.
        units: weights of each sum, ``(sums, size)``.
        graph: whether gradients of the result may be taken.
    """
    total = of.reshape(-1, of.shape[-1]).sum(0)
    (found,) = along_units({"total": total}, {"total": units}, [by], graph)
    return found.movedim(0, -1)


def blocks(value: Tensor, width: int, filled: float = 0.0) -> Tensor:
    """Returns vectors ``(*batch, size)`` in blocks ``(*batch, n, width)``, filled up at the end."""
    missing = -value.shape[-1] % width
    return pad(value, (0, missing), value=filled).unflatten(-1, (-1, width))


def vector(blocks: Tensor, like: Tensor) -> Tensor:
    """Returns blocks as one vector, of as many elements as another one has."""
    return blocks.flatten(-2)[..., : like.shape[-1]]


def banded_derivatives(
    of: Tensor, by: Tensor, ends: tuple[int, int], width: int, graph: bool
) -> Banded:
    """Returns derivatives of elements t of a vector by elements s of another one as blocks.

    Args:
        of, by: vectors ``(*batch, size)``.
        ends: the least and the largest t - s where one is not zero. Elements that are further apart from each other
            have a derivative in common, and are told from it by s.
        width: of the blocks.
        graph: whether gradients of them may be taken.
    """
    low, high = ends
    colours, size = high - low + 1, by.shape[-1]
    each = torch.arange(size, device=by.device)
    units = each % colours == torch.arange(colours, device=by.device).unsqueeze(-1)
    columns = _derivatives(of, by, units.to(by), graph)
    flat, count = columns.double().flatten(-2), -(-size // width)
    place = torch.arange(count * width, device=by.device).reshape(count, width)

    def entries(rows: Tensor, cols: Tensor) -> Tensor:
        t, s = rows.unsqueeze(-1), cols.unsqueeze(-2)
        known = (t < size) & (s < size) & (t - s >= low) & (t - s <= high)
        index = (s.clamp(max=size - 1) * colours + t % colours).expand(known.shape)
        return torch.where(known, flat[..., index], 0.0)

    return Banded(entries(place, place), entries(place[1:], place[:-1]))
