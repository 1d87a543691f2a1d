"""Latents that are jointly Gaussian given the rest: seen by probing, and drawn from their exact conditionals.

As a function of the members z of a `ConjugateGroup` the log density of the members and their children is

    log p(z, children | rest) = c + g . (z - z0) - (z - z0) . P (z - z0) / 2,

so its gradient g and curvature P at one point z0 are all there is to know of it. Both come from a run of the model by
automatic differentiation. `is_quadratic` tests the equation; by it `JointGaussian` eliminates the members one by one,
instance by instance of their plates. Change this module to tell, or to eliminate, more of what is Gaussian.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_nami.reading.runner import RunModel

__all__ = ["ConjugateGroup", "JointGaussian", "expanding", "is_quadratic", "leading_shape"]

_TOLERANCE = 1e-3
_PROBED_AT = 3.0, 300.0  # prior standard deviations from the mean, at most; far, to see slow bends as well


class ConjugateGroup(NamedTuple):
    """Latents that are drawn from their exact conditionals together.

    Attributes:
        members: the latents, in sampling order.
        children: observed sites that they are parents of.
    """

    members: tuple[str, ...]
    children: tuple[str, ...]


class JointGaussian:
    """The exact conditionals of a group's members, each given those before it and with those behind integrated out.

    Eliminating the last member k leaves P_ij - P_ik P_kj / P_kk and g_i - P_ik g_k / P_kk; its own conditional is
    Normal(z0_k + (g_k - sum_i<k P_ik (z_i - z0_i)) / P_kk, P_kk^-1/2).

    A run of the model goes between its two halves: with what was drawn before at its values, the members at `points`,
    and gradients (`expanding`); `until` names the sites that it has to reach. Then `solve` is told its sites.

    Args:
        group: the members and their children.
        leading: sizes of the batch dims to the left of the plates, and 1 for each plate dim.
        differentiable: whether gradients are to flow to what was drawn before.
    """

    def __init__(self, group: ConjugateGroup, leading: Sequence[int], differentiable: bool) -> None:
        self._expansion = _Expansion(group, leading)
        self.members, self._differentiable = group.members, differentiable
        self.points, self.until = self._expansion.values, self._expansion.until

    def solve(self, sites: Mapping[str, Any]) -> None:
        """Eliminates the members, last ones first."""
        whole = torch.jit.is_tracing()  # a traced tensor's shape is none that autograd can compare
        points, _, gradient, precision = self._expansion.at(sites, self._differentiable, whole=whole)
        # What elimination leaves below this is rounding.
        least = [torch.finfo(row[i].dtype).eps * row[i].detach() for i, row in enumerate(precision)]
        for k in range(len(points) - 1, 0, -1):
            for i in range(k):
                ratio = precision[i][k] / precision[k][k]
                gradient[i] = gradient[i] - ratio * gradient[k]
                for j in range(i, k):
                    precision[i][j] = precision[i][j] - ratio * precision[j][k]
                precision[i][i] = precision[i][i].maximum(least[i])
        self._points, self._gradient, self._precision = points, gradient, precision

    def conditional(self, name: str, values: Mapping[str, Tensor]) -> dist.Normal:
        """Returns a member's exact conditional, of batch shape ``(*batch, *plates)``, at values of those before it."""
        k = self.members.index(name)
        gradient = self._gradient[k]
        for i in range(k):
            gradient = gradient - self._precision[i][k] * (values[self.members[i]] - self._points[i])
        loc, scale = self._points[k] + gradient / self._precision[k][k], self._precision[k][k].rsqrt()
        if not self._differentiable:
            loc, scale = loc.detach(), scale.detach()
        return dist.Normal(loc, scale, validate_args=False)


def leading_shape(values: Mapping[str, Tensor], event_dims: Mapping[str, int], nesting: int) -> torch.Size:
    """Returns the sizes of all batch dims to the left of the plates that values have, and 1 for each plate dim."""
    plates, shape = (1,) * nesting, torch.Size((1,) * nesting)
    for name, value in values.items():
        batch = value.shape[: value.dim() - event_dims.get(name, 0)]
        if len(batch) > nesting:
            shape = torch.broadcast_shapes(shape, batch[: len(batch) - nesting] + plates)
    return shape


@contextmanager
def expanding() -> Iterator[None]:
    """Runs a model for an expansion: with gradients, and unvalidated, as its own run validates the same."""
    with torch.inference_mode(False), torch.enable_grad(), pyro.validation_enabled(False):
        yield


def is_quadratic(group: ConjugateGroup, run: RunModel, drawn: Mapping[str, Tensor]) -> bool:
    """Whether density and gradient some deviations away are what gradient and curvature at the means say.

    The density as well, since what the model detaches, or compares, has no gradient; and members and children apart, as
    the members' own density may be so large that nothing is seen of that of the children. ``drawn`` has values of what
    is drawn before the members, and of the children; ``run`` is told the sites that it has to reach, too.
    """

    def about(away: float) -> Callable[..., _Quadratic]:
        expansion = _Expansion(group, away=away)
        with expanding():
            sites = run({**drawn, **expansion.values}, expansion.until)
        return functools.partial(expansion.at, sites)

    try:
        near = about(0.0)
        if not all((row[i] > 0).all() for i, row in enumerate(near().precision)):
            return False
        far = [about(away) for away in _PROBED_AT]
        for parts in (group.members, group.children):
            here = near(parts=parts)
            if not all(_agree(here, there(parts=parts)) for there in far):
                return False
        return True
    except (NotImplementedError, RuntimeError, ValueError):
        return False  # no gradient, no mean, or a density that is not that of one instance each


class _Quadratic(NamedTuple):
    """Points ``(*batch, *plates)`` of all members, and the log density, its gradient and negative curvature there."""

    points: list[Tensor]
    total: Tensor | None
    gradient: list[Tensor]
    precision: list[list[Tensor]]


def _agree(here: _Quadratic, there: _Quadratic) -> bool:
    """Whether the density of some sites is quadratic, and no constant, as far as two points tell."""
    assert here.total is not None and there.total is not None
    steps = [b.detach() - a.detach() for a, b in zip(here.points, there.points)]
    if all((each == 0).all() for row in here.precision for each in row):
        return False  # weights that are zero as yet
    gain, slack = there.total - here.total, _TOLERANCE**2 * here.total.abs()
    fits = torch.ones_like(gain, dtype=torch.bool)
    for i, row in enumerate(here.precision):
        bends = [each.detach() * step for each, step in zip(row, steps)]
        before, after = here.gradient[i].detach(), there.gradient[i].detach()
        bend = torch.stack([each.abs() for each in bends]).sum(0)
        size = bend + before.abs()
        rounding = 100 * torch.finfo(size.dtype).eps * size.max()
        off = (after - before + sum(bends)).abs()
        fits = fits & (off <= _TOLERANCE * (bend + _TOLERANCE * bend.max()) + rounding).all()
        gain = gain - (steps[i] * (before - sum(bends) / 2)).sum()
        slack = slack + _TOLERANCE * (steps[i].abs() * size).sum()
    return bool(fits & (gain.abs() <= slack))  # one look, as a device has to be waited for


class _Expansion:
    """The expansion of a log density about the members' prior means, or points some deviations ``away``.

    Attributes:
        values: member -> a function of its prior that makes its point.
        until: the sites whose density it is.
    """

    def __init__(self, group: ConjugateGroup, leading: Sequence[int] = (), away: float = 0.0) -> None:
        self._group, self._leading, self._away = group, leading, away
        self._points: dict[str, Tensor] = {}
        self.values = {name: functools.partial(self._point, name) for name in group.members}
        self.until = (*group.members, *group.children)

    def _point(self, name: str, prior: Any) -> Tensor:
        value = prior.mean.detach()
        if self._away:
            order = torch.arange(value.numel(), dtype=value.dtype, device=value.device).view(value.shape)
            value = value + self._away * prior.stddev.detach() * (1 + 2.4 * order + len(self._points)).sin()
        shape = torch.broadcast_shapes(self._leading, prior.batch_shape)
        self._points[name] = value.expand(shape).clone().requires_grad_()
        return self._points[name]

    def at(
        self, sites: Mapping[str, Any], differentiable: bool = False, parts: Sequence[str] = (), whole: bool = True
    ) -> _Quadratic:
        """Returns it, given the sites of a run of the model with gradients.

        ``parts`` are the sites whose density it is, by default all. If it is known to be quadratic, ``whole=False``
        leaves out its value there, and takes less time.
        """
        group = self._group
        # On this thread, since a trace does not see what others do, as a GPU's would.
        with torch.inference_mode(False), torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
            scale = sites[group.members[0]]["scale"]
            values = [self._points[name] for name in group.members]
            names = parts or self.until
            terms = [_term(sites[name], scale, masked=name in group.children, whole=whole) for name in names]
            if parts:  # which need not depend on all values
                terms += [(0 * value.square().sum(), None) for value in values]
            outputs, cotangents = zip(*(term for term in terms if term[0].requires_grad))
            gradient = list(torch.autograd.grad(outputs, values, cotangents, create_graph=True))
            precision: list[list[Tensor]] = []
            for i, row in enumerate(gradient):  # symmetric: what is below the diagonal is known
                above = torch.autograd.grad(
                    row.sum(), values[i:], create_graph=differentiable, retain_graph=True, materialize_grads=True
                )
                precision.append([*(known[i] for known in precision), *(-part for part in above)])
        total = torch.stack([output.detach() for output, _ in terms]).sum() if whole else None
        return _Quadratic(values, total, gradient, precision)


def _term(site: Mapping[str, Any], scale: Any, masked: bool, whole: bool) -> tuple[Tensor, Tensor | None]:
    """Returns an output and its cotangent, of which the gradient of a site's log density is the product.

    That is the log density, summed, or if it need not be ``whole`` the error of a Normal, which takes half the time.
    Scales count relative to that of the latent. Latents count where they are masked too, so that they have a
    conditional there, which no density counts.
    """
    fn, value, mask, own = site["fn"], site["value"], site["mask"] if masked else None, site["scale"]
    same = own is scale or not isinstance(own, Tensor) and not isinstance(scale, Tensor) and own == scale
    normal = not whole and type(fn) is dist.Normal
    output = value - fn.loc if normal else fn.log_prob(value)
    if mask is not None:
        output = torch.where(torch.as_tensor(mask), output, torch.zeros_like(output))
    if not normal:
        return (output if same else output * (own / scale)).sum(), None
    # A scale that is the same for all is one number.
    spread = fn.scale[tuple(slice(0, 1 if step == 0 else None) for step in fn.scale.stride())]
    weight = -spread.square().reciprocal()
    cotangent = output * (weight if same else weight * (own / scale))
    return output.expand(cotangent.shape), cotangent
