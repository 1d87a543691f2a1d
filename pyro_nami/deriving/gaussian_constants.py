"""The constant parts of a joint Gaussian block's derivation, kept while the data are the same.

In most models the slopes of the children's locations, and of the members' prior locations, depend
neither on latents sampled earlier nor on parameters of the model; only scales do. Each child's part
of H and g is then its precision times a constant. A call takes one run of the model at one point,
and no derivative.

That point is fixed and irregular. If the model has the same locations there, to the bit and without
a gradient, its slopes are the same. If it has not, the block is derived anew (`JointGaussian`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_nami.deriving.derived_group import ConjugateGroup
from pyro_nami.deriving.expansion import (
    ROUNDING,
    Changed,
    broadcast,
    irregular,
    narrowed,
    squeezed,
    trimmed,
)
from pyro_nami.deriving.gaussian_levels import Level
from pyro_nami.deriving.joint_gaussian import JointGaussian
from pyro_nami.deriving.second_order import SecondOrder
from pyro_nami.factors.wrappers import innermost
from pyro_nami.program.flat_priors import flat_prior
from pyro_nami.program.masks import without_gaps
from pyro_nami.program.runner import RunModel, Sites, Values

__all__ = ["Constants", "FromConstants", "constants_of"]


class ConstantLevel(NamedTuple):
    """The constant parts of a level of a block's elimination.

    Attributes:
        level: without rows, and with prior rows at scales of 1.
        units: child -> its rows, at a precision of 1 where that is a factor.
    """

    level: Level
    units: dict[str, Tensor]


class Constants(NamedTuple):
    """What `FromConstants` knows of a block: of members as `JointGaussian` has it, but at one point.

    Attributes:
        factors: Normal children with one precision for all rows.
        marks: what has to be the same for all this to hold, see `_marks`.
        levels: in order of elimination.
    """

    points: dict[str, Tensor]
    shapes: dict[str, torch.Size]
    references: dict[str, Tensor]
    sizes: dict[str, int]
    factors: frozenset[str]
    marks: list[Tensor]
    levels: list[ConstantLevel]


class FromConstants(JointGaussian):
    """A `JointGaussian` derived from its constants; where these have changed, it calls ``forget`` and raises `Changed`.

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
        self._constants = constants
        self._forget = forget
        self._is_rounded = is_rounded
        self.references, self.shapes = constants.references, constants.shapes

    def choose(self, name: str, prior: Any) -> Tensor:
        value = self._constants.points[name]
        self.priors[name] = prior
        if (flat := flat_prior(prior)) is not None:
            self.flat[name] = flat
        if self.leading.numel() == 1 and prior.batch_shape + prior.event_shape != value.shape:
            self._forget()
            raise Changed
        return value

    def solve(self, sites: Sites) -> None:
        constants = self._constants
        weights = {
            name: _precision(self, sites, name).double()[..., None, None]
            for name in constants.factors
        }
        finite = all(bool(each.isfinite().all()) for each in weights.values())
        marks = list(_marks(self, sites, constants.factors))
        is_same = len(marks) == len(constants.marks) and all(
            _same(then, *now, self._is_rounded) for then, now in zip(constants.marks, marks)
        )
        if not finite or not is_same:
            self._forget()
            raise Changed
        for level, units in constants.levels:
            rows = [weights.get(name, 1.0) * unit for name, unit in units.items()]
            scales = [self._flat(name, self._base(name).scale) for name in level.names]
            batch = functools.reduce(broadcast, [each.shape[:-1] for each in scales])
            scale = torch.cat([each.expand(*batch, -1) for each in scales], -1)
            prior = level.prior / scale.double().unsqueeze(-1)
            self.levels.append(level._replace(rows=sum(rows, level.rows), prior=prior))
        self._eliminate()


def constants_of(
    group: ConjugateGroup,
    leading: torch.Size,
    nesting: int,
    sizes: dict[str, int],
    run: RunModel,
    at: Values | None = None,
) -> Constants | None:
    """Returns the constants of a block's derivation, by two runs of the model; None where they depend on more.

    Offsets are from values ``at``, by default from the means of the priors.
    """
    block = JointGaussian(group, leading, nesting, False, sizes=sizes, at=at)
    sites = block.sites(run, {})
    bases: dict[str, Any] = {
        name: innermost(prior) for name, prior in block.priors.items() if name not in block.flat
    }
    if not all(type(base) is dist.Normal for base in bases.values()):
        return None
    children = [name for name in group.children if name in sites]
    normal = [name for name in children if type(sites[name]["fn"]) is dist.Normal]
    factors = frozenset(
        name for name in normal if _first(_precision(block, sites, name), nesting).numel() == 1
    )
    units = dict(sites)
    for name in factors:
        fn = dist.Normal(sites[name]["fn"].loc, 1.0, validate_args=False)
        units[name] = {**sites[name], "fn": fn, "scale": sites[block.first]["scale"]}
    for name, base in bases.items():
        unit = dist.Normal(base.loc, torch.ones_like(base.loc), validate_args=False)
        block.priors[name] = unit.to_event(len(block.priors[name].event_shape))
    rows: dict[str, list[Level]] = {}
    for name in children:
        block.fit(units, [name])
        rows[name] = block.levels
    points = {name: _point(block, name, i) for i, name in enumerate(block.priors)}
    once = block.sites(run, {}, {name: lambda _, at=at: at for name, at in points.items()})
    block.priors = {name: once[name]["fn"] for name in block.priors}
    kept = []
    for mark, dims in _marks(block, once, factors):
        one = squeezed(_first(mark, dims), 0).detach().clone()
        if not _same(one, mark, dims):
            return None
        kept.append(one)
    references = {
        name: _first(value, _dims(block, name)) for name, value in block.references.items()
    }
    levels = [_constant_level(dict(zip(children, each)), nesting) for each in zip(*rows.values())]
    return Constants(points, block.shapes, references, dict(block.sizes), factors, kept, levels)


def _precision(block: JointGaussian, sites: Sites, name: str) -> Tensor:
    """Returns a Normal site's precision, at its scale relative to that of the members; size 1 where it is one."""
    precision = narrowed(sites[name]["fn"].scale).square().reciprocal()
    return block.weighted(precision, sites, name)


def _point(block: JointGaussian, name: str, phase: int) -> Tensor:
    """Returns an irregular value of a member, the same for the whole batch."""
    prior, shape, dims = block.priors[name], block.shapes[name], _dims(block, name)
    reference = _first(block.references[name], dims)
    step = block.steps[name].mean().to(reference)
    value = reference + step * irregular(shape[len(shape) - dims :], reference, phase)
    value = value.expand(shape)
    if block.leading.numel() == 1:
        value = value.reshape(prior.batch_shape + prior.event_shape)
    return value.clone()


def _dims(block: JointGaussian, name: str) -> int:
    """Returns the number of plate and event dims of a member's values."""
    return block.nesting + len(block.priors[name].event_shape)


def _constant_level(children: Mapping[str, Level], nesting: int) -> ConstantLevel:
    """Returns the constant parts of a level, given the level of each child by itself."""
    level = next(iter(children.values()))
    rows = {name: _first(each.rows, nesting + 2) for name, each in children.items()}
    units = {name: each for name, each in rows.items() if each.any()}
    none = torch.zeros_like(_first(level.rows, nesting + 2))
    return ConstantLevel(level._replace(rows=none, prior=_first(level.prior, nesting + 2)), units)


def _marks(
    expansion: SecondOrder, sites: Sites, factors: Collection[str]
) -> Iterator[tuple[Tensor, int]]:
    """Yields the tensors that constants depend on, each with its number of plate and event dims."""
    nesting = expansion.nesting
    for name, prior in expansion.priors.items():
        base = innermost(prior)
        if name not in expansion.flat and type(base) is dist.Normal:
            yield base.loc, nesting + len(prior.event_shape)
    for name in expansion.group.children:
        if name not in sites:
            continue
        site = sites[name]
        if type(site["fn"]) is dist.Normal:
            yield site["fn"].loc, nesting
            yield without_gaps(site), nesting
            if site["mask"] is not None:
                yield torch.as_tensor(site["mask"]), nesting
            if name not in factors:
                yield site["fn"].scale, nesting
                yield expansion.weighted(torch.ones(()), sites, name), nesting
        else:
            yield expansion.density(sites, name), nesting


def _same(then: Tensor, now: Tensor, dims: int, is_rounded: bool = False) -> bool:
    """Whether all of a batch, to the left of some dims, is a tensor of before, without a gradient.

    It is to be so to the bit, or but for rounding.
    """
    shape = trimmed(now.shape[max(0, now.dim() - dims) :], 0)
    if now.requires_grad or (then.shape, then.dtype, then.device) != (shape, now.dtype, now.device):
        return False
    is_equal = bool((then == now).all())
    if is_equal or not (is_rounded and now.is_floating_point()):
        return is_equal
    size = torch.maximum(then.abs().amax(), now.abs().amax())
    return bool(((then - now).abs() <= ROUNDING * torch.finfo(now.dtype).eps * size).all())


def _first(value: Tensor, dims: int) -> Tensor:
    """Returns the first of a batch, which lies to the left of some dims."""
    return value[(slice(0, 1),) * max(0, value.dim() - dims)]
