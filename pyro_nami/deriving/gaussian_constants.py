"""The constant parts of a joint Gaussian block's derivation, kept while the data are the same.

In most models the slopes of the children's locations, and of the members' prior locations, depend
neither on latents sampled earlier nor on parameters of the model; only scales do. Each child's part
of H and g is then its precision times a constant. A call takes one run of the model at one point,
and no derivative.

That point is fixed and irregular. If the model has the same locations there, to the bit and without
a gradient, its slopes are the same. If it has not, the block is derived anew (`JointGaussian`).

H and g are expressed in the noise e of the priors: for a level x = M r + U e, with r the levels
behind it and M, U constant. With e ~ N(0, s^2) elimination takes I + s H s and s H_r alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_nami.deriving.derived_group import ConjugateGroup
from pyro_nami.deriving.expansion import (
    Changed,
    broadcast,
    derivatives,
    expanding,
    irregular,
    narrowed,
)
from pyro_nami.deriving.gaussian_levels import Level, in_noise
from pyro_nami.deriving.joint_gaussian import JointGaussian
from pyro_nami.deriving.second_order import SecondOrder
from pyro_nami.factors.wrappers import innermost
from pyro_nami.program.flat_priors import flat_prior
from pyro_nami.program.masks import without_gaps
from pyro_nami.program.runner import RunModel

__all__ = ["Constants", "FromConstants", "constants_of"]


# times the rounding error of the largest number: what sums in another order may differ by
_ROUNDED = 16.0


class BlockPart(NamedTuple):
    """What is constant of a level.

    Attributes:
        level: start, size and dims.
        names: member -> its number of elements.
        rows: by noise, the part that is constant as it is; None if there is none.
        units: child -> the part that its precision is a factor of.
        others: the priors' rows at scales of 1, less the identity: by what noise is more than offsets; None if nothing.
        scale: of the priors, as of `_scales`; None if it is no constant.
    """

    level: Level
    names: dict[str, int]
    rows: Tensor | None
    units: dict[str, Tensor]
    others: Tensor | None
    scale: Tensor | None


class Constants(NamedTuple):
    """What `FromConstants` knows of a block: of members as `JointGaussian` has it, but at one point.

    Attributes:
        factors: Normal children with one precision for all rows.
        scales: members whose prior scale is no constant.
        marks: what has to be the same for all this to hold, see `_marks`.
        parts: of levels, in order of elimination; of lifted ones each member is one by itself.
    """

    points: dict[str, Tensor]
    shapes: dict[str, torch.Size]
    references: dict[str, Tensor]
    sizes: dict[str, int]
    factors: frozenset[str]
    scales: frozenset[str]
    marks: list[Tensor]
    parts: list[BlockPart]


class FromConstants(JointGaussian):
    """A `JointGaussian` by its constants; `Changed`, behind a call of ``forget``, where they turn out to be others.

    Its results differ from those derived afresh by rounding.

    Args:
        group, leading, nesting: as for `Expansion`.
        constants: the block's.
        forget: called where they turn out to be others.
        is_rounded: whether they are of another number of draws than this, of which rounding may be another.
    """

    def __init__(
        self, *args: Any, constants: Constants, forget: Callable[[], None], is_rounded: bool = False
    ) -> None:
        super().__init__(*args, differentiable=True, sizes=constants.sizes)
        self.count = None
        self._constants = constants
        self._forget = forget
        self._is_rounded = is_rounded
        self.shapes, self.references = constants.shapes, constants.references
        self._bases: dict[str, Any] = {}

    def choose(self, name: str, prior: Any) -> Tensor:
        value = self._constants.points[name]
        self.priors[name] = prior
        if (flat := flat_prior(prior)) is not None:
            self.flat[name], like = flat, self.references[name]
            self._bases[name] = dist.Normal(like, torch.ones_like(like), validate_args=False)
        else:
            self._bases[name] = innermost(prior)
        if self.leading.numel() == 1 and prior.batch_shape + prior.event_shape != value.shape:
            self._forget()
            raise Changed
        return value

    def solve(self, sites: Mapping[str, Any]) -> None:
        constants, left = self._constants, []
        weights = {
            name: self.precision(sites, name).double()[..., None, None]
            for name in constants.factors
        }
        marks = [
            _told(mark, own)
            for mark, own in _marks(self, sites, constants.factors, constants.scales)
        ]
        finite = all(bool(each.isfinite().all()) for each in weights.values())
        if not finite or not _same(constants.marks, marks, self._is_rounded):
            self._forget()
            raise Changed
        for part in constants.parts:
            rows = [weights[name] * unit for name, unit in part.units.items()]
            rows = rows if part.rows is None else [part.rows, *rows]
            left.append(part.level._replace(rows=functools.reduce(torch.add, rows)))
        for i, part in enumerate(constants.parts):
            scale = _scales(self, part.names) if part.scale is None else part.scale
            own, gain = left[i].without_noise(scale, self._rounding())
            left[i + 1 :] = [later.reduced(gain, self.nesting) for later in left[i + 1 :]]
            after = gain.rows
            for later in constants.parts[i + 1 :]:
                after = (
                    after
                    if later.others is None
                    else after + gain.spread(later.level, later.others)
                )
            if part.others is not None:
                size = part.level.size
                more = own * part.others if size == 1 else own @ part.others
                own, after = own + more[..., :size], after + more[..., size:]
            posterior = torch.cat([own, after], -1)
            self._levels.append(
                part.level._replace(rows=left[i].rows, prior=posterior, open=gain.open)
            )

    def _base(self, name: str) -> Any:
        return self._bases[name]


class _OfOne(SecondOrder):
    """Derives what one child says, with a precision of 1 if that is a factor, and with priors of scale 1.

    At one point, by second derivatives: so the result does not depend on what was drawn, by rounding either.
    """

    part, factors = "", frozenset[str]()
    at: Mapping[str, Tensor] = {}

    def reference(self, name: str, loc: Tensor, step: Tensor) -> Tensor:
        return self.at.get(name, loc)

    def start(self, name: str, prior: Any, shape: torch.Size) -> Tensor:
        if flat_prior(prior) is not None:
            return super().start(name, prior, shape)
        like = dist.Normal(prior.mean, torch.ones_like(prior.mean), validate_args=False)
        return super().start(name, like.to_event(len(prior.event_shape)), shape)

    def take(self, sites: Mapping[str, Any], **options: Any) -> dict[str, Tensor]:
        return super().take(sites, **{**options, "parts": [self.part]})

    def precision(self, sites: Mapping[str, Any], name: str) -> Any:
        return 1.0 if name in self.factors else super().precision(sites, name)

    def _base(self, name: str) -> Any:
        loc = super()._base(name).loc
        return dist.Normal(loc, torch.ones_like(loc), validate_args=False)

    def levels(self, sites: Mapping[str, Any], part: str) -> list[Level]:
        """Returns the levels by one child, those that are lifted with one for each member."""
        self.part = part
        self._levels = []
        found = []
        self._read(sites, whole=False)
        for names, level in zip(self._by_level(), self._levels):
            rows, prior = (
                _first(each.detach(), self.nesting + 2) for each in (level.rows, level.prior)
            )
            for some in [[name] for name in names] if self._is_lifted(names[0]) else [names]:
                begin = self._first[some[0]] - level.start
                size = sum(self.sizes[name] for name in some)
                own = (..., slice(begin, begin + size), slice(begin, None))
                found.append(
                    Level(
                        level.start + begin,
                        size,
                        level.dims,
                        rows[own],
                        prior[own],
                        level.proper[:size],
                    )
                )
        return found


def constants_of(
    group: ConjugateGroup,
    leading: torch.Size,
    nesting: int,
    sizes: dict[str, int],
    run: RunModel,
    at: Mapping[str, Tensor] | None = None,
) -> Constants | None:
    """Returns the constants of a block's derivation, by two runs of the model; None where they depend on more.

    Offsets are from values ``at``, by default from the means of the priors.
    """
    group = group._replace(vectorized=False)
    probe = _OfOne(group, leading, nesting, True, sizes=sizes)
    probe.at = at or {}
    there = SecondOrder(group, leading, nesting, True, sizes=sizes)
    with expanding():
        sites = run(probe.points, probe.until)
    there.shapes = probe.shapes
    there.flat = probe.flat
    points = dict[str, Tensor]()
    there.references, there._steps = probe.references, {name: torch.ones(1) for name in probe.flat}
    dims = {name: nesting + len(prior.event_shape) for name, prior in probe.priors.items()}
    references = {name: _first(value, dims[name]) for name, value in probe.references.items()}

    def choose(name: str, prior: Any) -> Tensor:
        there.priors[name], shape, reference = prior, probe.shapes[name], references[name]
        noise = irregular(shape[len(shape) - dims[name] :], reference, len(points))
        step = there.flat[name].step() if name in there.flat else prior.stddev.detach().mean()
        value = (reference + step.to(reference) * noise).expand(shape)
        points[name] = (
            value.reshape(prior.batch_shape + prior.event_shape) if leading.numel() == 1 else value
        ).clone()
        return points[name]

    with expanding():
        once = run({name: functools.partial(choose, name) for name in group.members}, probe.until)
    bases = {
        name: innermost(prior) for name, prior in there.priors.items() if name not in there.flat
    }
    weights = {
        name: there.precision(once, name)
        for name in group.children
        if name in once and type(once[name]["fn"]) is dist.Normal
    }
    factors = frozenset(
        name
        for name, weight in weights.items()
        if weight.shape[max(0, weight.dim() - nesting) :].numel() == 1
    )
    scales = frozenset(
        name
        for name, base in bases.items()
        if type(base) is dist.Normal and base.scale.requires_grad
    )
    marks = list(_marks(there, once, factors, scales))
    varies = any(mark.requires_grad or not _is_one(mark, own) for mark, own in marks)
    if varies or not all(type(base) is dist.Normal for base in bases.values()):
        return None
    probe.factors = factors
    with derivatives():
        rows = {name: probe.levels(sites, name) for name in group.children if name in sites}
    parts = list(_parts(there, rows, factors, scales))
    kept = [_told(*mark).detach().clone() for mark in marks]
    return Constants(
        points, probe.shapes, references, dict(probe.sizes), factors, scales, kept, parts
    )


def _parts(
    there: SecondOrder,
    children: dict[str, list[Level]],
    factors: frozenset[str],
    scales: frozenset[str],
) -> Iterator[BlockPart]:
    """Yields what is constant of each level, given the levels by each child."""
    count = len(next(iter(children.values())))
    for i in range(count):
        children = {name: in_noise(levels, i, there.nesting) for name, levels in children.items()}
    for i in range(count):
        level = next(iter(children.values()))[i]
        rows = {name: levels[i].rows for name, levels in children.items() if levels[i].rows.any()}
        units = {name: rows.pop(name) for name in factors & rows.keys()}
        names = {
            name: there.sizes[name]
            for name in there._first
            if 0 <= there._first[name] - level.start < level.size
        }
        more = level.prior - torch.eye(
            *level.prior.shape[-2:], dtype=level.prior.dtype, device=level.prior.device
        )
        fixed = sum(rows.values(), torch.zeros_like(level.rows)) if rows or not units else None
        scale = _scales(there, names).detach() if scales.isdisjoint(names) else None
        others = _squeezed(more, there.nesting) if more.any() else None
        yield BlockPart(level, names, fixed, units, others, scale)


def _marks(
    expansion: SecondOrder,
    sites: Mapping[str, Any],
    factors: Collection[str],
    scales: Collection[str],
) -> Iterator[tuple[Tensor, int]]:
    """Yields what constants depend on, and how many of its dims are those of plates and events."""
    nesting = expansion.nesting
    for name, prior in expansion.priors.items():
        base = innermost(prior)
        if name not in expansion.flat and type(base) is dist.Normal:
            yield base.loc, nesting + len(prior.event_shape)
            if name not in scales:
                yield base.scale, nesting + len(prior.event_shape)
    for name in expansion.group.children:
        if name not in sites:
            continue
        site = sites[name]
        if type(site["fn"]) is dist.Normal:
            yield site["fn"].loc, nesting
            yield site["value"] if site["mask"] is None else without_gaps(site), nesting
            if site["mask"] is not None:
                yield torch.as_tensor(site["mask"]), nesting
            if name not in factors:
                yield site["fn"].scale, nesting
                yield (
                    torch.as_tensor(
                        1.0 if (weight := expansion.weight(sites, name)) is None else weight
                    ),
                    nesting,
                )
        else:
            yield expansion.density(sites, name), nesting


def _scales(expansion: SecondOrder, names: Mapping[str, int]) -> Tensor:
    """Returns the priors' scales of a level, ``(*batch, *plates, E, 1)``; of size 1 where they are one number."""
    found = []
    for name, size in names.items():
        whole = expansion._base(name).scale
        dims = expansion.nesting + len(expansion.priors[name].event_shape)
        scale = narrowed(whole)
        cut = max(0, scale.dim() - dims)
        if scale.shape[cut:].numel() == 1:
            scale = scale.reshape(scale.shape[:cut] + (1,) * (expansion.nesting + 1))
        else:
            scale = expansion._flat(name, whole)
        found.append(scale if len(names) == 1 else scale.expand(scale.shape[:-1] + (size,)))
    if len(found) > 1:
        batch = functools.reduce(broadcast, [each.shape[:-1] for each in found])
        found = [torch.cat([each.expand(*batch, -1) for each in found], -1)]
    return found[0].double().unsqueeze(-1)


def _told(mark: Tensor, dims: int) -> Tensor:
    """Returns what a mark says: of a batch to the left of some dims one, if all of it is the same; else all of it."""
    mark = narrowed(mark)
    mark = _first(mark, dims) if _is_one(mark, dims) else mark
    while mark.dim() and mark.shape[0] == 1:
        mark = mark[0]
    return mark


def _same(then: Sequence[Tensor], now: Sequence[Tensor], is_rounded: bool) -> bool:
    """Whether tensors are those of before, to the bit or but for rounding, and have no gradient."""
    return len(then) == len(now) and all(
        not b.requires_grad
        and (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
        and (torch.equal(a, b) or (is_rounded and _is_near(a, b)))
        for a, b in zip(then, now)
    )


def _is_near(a: Tensor, b: Tensor) -> bool:
    if not a.is_floating_point():
        return False
    size = torch.maximum(a.abs(), b.abs()).amax()
    return bool(((a - b).abs() <= _ROUNDED * torch.finfo(a.dtype).eps * size).all())


def _first(value: Tensor, dims: int) -> Tensor:
    """Returns the first of a batch, which lies to the left of some dims."""
    return value[(slice(0, 1),) * max(0, value.dim() - dims)]


def _is_one(value: Tensor, dims: int) -> bool:
    """Whether all of a batch, which lies to the left of some dims, is the same."""
    return value.dim() <= dims or bool((value == _first(value, dims)).all())


def _squeezed(rows: Tensor, nesting: int) -> Tensor:
    """Returns rows with size 1 along plates in which they are the same."""
    for dim in range(-2 - nesting, -2):
        first = rows.narrow(dim, 0, 1)
        rows = first if bool((rows == first).all()) else rows
    return rows.clone()
