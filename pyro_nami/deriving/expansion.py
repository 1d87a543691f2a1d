"""Slopes of the log density of a group's children, from which conditionals are derived.

Slopes come from one run of the model by automatic differentiation, and are differentiable in the
latents sampled earlier. An `Expansion` says at which points the members are set in that run
(`points`), and derives their conditionals from what the run shows (`solve`).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import pyro
import torch
from torch import Tensor
from torch.distributions import TransformedDistribution

from pyro_nami.deriving.derived_group import ConjugateGroup
from pyro_nami.factors.bounds import log_prob_or_bound
from pyro_nami.factors.wrappers import base_of
from pyro_nami.program.flat_priors import flat_prior
from pyro_nami.program.masks import log_density_of, unmasked, without_gaps
from pyro_nami.program.runner import RunModel

if TYPE_CHECKING:
    from typing_extensions import Self  # noqa: UP035  for Python 3.10

__all__ = [
    "MAX_ERROR",
    "MOST_RUNS",
    "ROUNDING",
    "TOLERANCE",
    "Changed",
    "Expansion",
    "agree",
    "broadcast",
    "derivatives",
    "irregular",
    "leading_shape",
    "narrowed",
    "operations_of",
    "parameters_of",
    "plate_dims",
    "plate_shape",
    "solved",
    "squeezed",
    "trimmed",
    "within_plates",
]

TOLERANCE = 1e-3  # relative, of what probing takes for the same
MAX_ERROR = 0.03  # nats, of a log density that is taken for exact: weights vary by 3% then
# Errors of a sum, in units of the rounding error of its terms. With ten times less, probing refuses long sums; with ten
# times more, it takes densities in single precision for any.
ROUNDING = 100.0
# Runs of the model in a search; with ten times more, data without a mode hold up all others for a minute.
MOST_RUNS = 100


class Changed(Exception):
    """Ends an expansion that a run has shown to be made for another model: sizes, or what is observed, are others."""


class Expansion:
    """The log density of a group's children about some point, as a function of the members.

    Args:
        group: the members and their children.
        leading: sizes of the batch dims to the left of the plates, and 1 for each plate dim.
        nesting: number of plate dims.
        differentiable: whether gradients are to flow to what was drawn before.
        away: if given, all there is is one point, this far out in prior deviations.
        given: values of the members at that point, if it is not to be told by deviations.

    Attributes:
        first: the first member.
        priors, values: of each member, once the run has met it; priors without masks.
        shapes: of their values, with all batch dims.
        slopes: of the children's log density by each member's values, none of discrete ones, once it is measured.
        total: that log density, summed, in nats.
        finite: where what was solved of each member is a number; elsewhere its data say nothing, which leaves its
            prior, given what is drawn before.
        count: number of points, along a dim of their own to the left of all others; None without such a dim.
        noise: by how many deviations rounding may move means; found where these are not those of a prior.
    """

    # where the form is compared with the model, in prior deviations; further out some overflow
    probed_at: tuple[float, ...] = (0.0, 1.0, -1.0, 4.0, -4.0)
    asked = "add to a {} prior"  # of the children's log density
    noise = 0.0

    def __init__(
        self,
        group: ConjugateGroup,
        leading: Sequence[int],
        nesting: int,
        differentiable: bool,
        away: float | None = None,
        given: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.group = group
        self.first = group.members[0]
        self.nesting = nesting
        self.away = away
        self.differentiable = differentiable
        self._given = given or {}
        self.priors: dict[str, Any] = {}
        self.values: dict[str, Tensor] = {}
        self.shapes: dict[str, torch.Size] = {}
        self.finite: dict[str, Tensor] = {}
        self.count: int | None = None
        self.leading = torch.Size(leading)
        # parameters of the bounds of children, 1 where none are given
        self.xi: dict[str, Tensor] = {}

    @property
    def until(self) -> tuple[str, ...]:
        """The sites that the run has to reach."""
        return *self.group.members, *self.group.children

    @property
    def points(self) -> dict[str, Any]:
        """Member -> a function of its prior that makes its value."""
        return {name: functools.partial(self.choose, name) for name in self.group.members}

    def sites(
        self, run: RunModel, known: Mapping[str, Any], points: Mapping[str, Any] | None = None
    ) -> Mapping[str, Any]:
        """Returns the sites of a run of the model at the points, without validation: the model's own run has it."""
        with torch.inference_mode(False), torch.enable_grad(), pyro.validation_enabled(False):
            return run({**known, **(points or self.points)}, until=self.until)

    def start(self, name: str, prior: Any, shape: torch.Size) -> Tensor:
        """Returns a member's values, ``(*batch, *plates, *event)``; points lie along the first dim if counted."""
        raise NotImplementedError

    def solve(self, sites: Mapping[str, Any]) -> Expansion | None:
        """Derives the conditionals from the sites of the run; or returns what is to be solved in place of this."""
        raise NotImplementedError

    def conditional(self, name: str, values: Mapping[str, Tensor], dims: int | None = None) -> Any:
        """Returns a member's exact conditional, of batch shape ``(*batch, *plates)``, at values of those before it.

        Where these are more than ``dims``, leading dims of size 1 are left out.
        """
        raise NotImplementedError

    def apart(self) -> Self:
        """Returns the same conditionals for another pass, without what they were derived from."""
        return copy.copy(self)

    def is_finite(self) -> bool:
        """Whether all that was solved is a number."""
        return all(bool(each.all()) for each in self.finite.values())

    # ---- probing: whether the log density has the form that the conditionals take

    def fit(self, sites: Mapping[str, Any]) -> None:
        """Finds the form's parameters from the sites of the run, of a form that is not known to hold yet."""
        self.solve(sites)

    def predict(self, values: Mapping[str, Tensor]) -> list[Tensor]:
        """Returns terms that add up to the children's log density at values of the members, up to a constant."""
        raise NotImplementedError

    def measure(self, sites: Mapping[str, Any]) -> None:
        """Takes slopes and the log density of the children."""
        self.slopes: dict[str, Tensor] = {}
        if all(leaf.requires_grad for leaf in self.values.values()):
            self.slopes = {name: each.detach() for name, each in self.take(sites).items()}
        self.total = torch.stack([self._total(sites, name) for name in self.group.children]).sum()

    def reaches(self, sites: Mapping[str, Any]) -> bool:
        """Whether each child says something of the members, and the conditional is a proper one."""
        for child in self.group.children:
            slopes = self.take(sites, parts=[child])
            if not any(bool((slope != 0).any()) for slope in slopes.values()):
                return False
        return True

    def explains(self, far: Any) -> bool:
        """Whether the fitted form has the slopes that were measured at another point, to a thousandth."""
        with derivatives():
            at = {name: each.detach().requires_grad_() for name, each in far.values.items()}
            terms = self.predict(at)
            slopes = [
                torch.autograd.grad(term.sum(), list(at.values()), materialize_grads=True)
                for term in terms
                if term.requires_grad
            ]
        for (name, value), *each in zip(at.items(), *slopes):
            terms = [value.detach() * slope for slope in each]
            # times the value, as slopes by its log
            found = value.detach() * far.slopes[name]
            if not agree(found, torch.zeros_like(found), terms):
                return False
        return True

    def gain(self, near: Any, far: Any) -> tuple[Tensor, Tensor]:
        """Returns what the log density gains between two points by the form, and the size of its terms."""
        terms = zip(self.predict(near.values), self.predict(far.values))
        gains = [(end - start).detach() for start, end in terms]
        total: Any = sum(each.sum() for each in gains)
        size: Any = sum(each.abs().sum() for each in gains)
        return total, size

    def take(
        self,
        sites: Mapping[str, Any],
        *,
        again: bool = False,
        parts: Sequence[str] = (),
        more: Sequence[Tensor] = (),
    ) -> dict[str, Tensor]:
        """Returns the slopes by the members' values.

        Args:
            sites: of the run.
            again: whether they are to be differentiated themselves.
            parts: the sites whose log density it is; by default all children.
            more: further terms that add to the log density, of one element each.
        """
        with derivatives():
            # Of sites that a call lacks there are no data.
            terms = [
                self.density(sites, name).sum()
                for name in parts or self.group.children
                if name in sites
            ]
            terms = [term for term in [*terms, *more] if term.requires_grad]
            leaves = list(self.values.values())
            if not terms:
                return {name: torch.zeros_like(leaf) for name, leaf in self.values.items()}
            slopes = torch.autograd.grad(
                terms, leaves, create_graph=again, retain_graph=True, materialize_grads=True
            )
        return dict(zip(self.values, slopes))

    def choose(self, name: str, prior: Any) -> Tensor:
        """Returns a member's values at the points, given its prior."""
        prior = self.priors[name] = unmasked(prior)
        leading = self.leading if self.count is None else torch.Size((self.count, *self.leading))
        shape = self.shapes[name] = broadcast(leading, prior.batch_shape) + prior.event_shape
        if len(shape) > len(leading) + len(prior.event_shape):
            raise RuntimeError(
                f"'{name}' has more batch dims than its plates and the dims of the points."
            )
        given = self._given.get(name)
        value = self.start(name, prior, shape) if given is None else given.expand(shape)
        # with one point a model sees the dims that it is used to
        if self.count is None and self.leading.numel() == 1:
            value = value.reshape(prior.batch_shape + prior.event_shape)
        self.values[name] = value.clone().requires_grad_(value.is_floating_point())
        return self.values[name]

    def density(self, sites: Mapping[str, Any], name: str) -> Tensor:
        """Returns a site's log density as far as its mask counts it, at its scale relative to that of the members."""
        if name in self.group.flat and (flat := flat_prior(sites[name]["fn"])) is not None:
            return flat.log_prob(sites[name]["value"], sites[name]["fn"].event_dim)
        bound = (
            functools.partial(log_prob_or_bound, xi=self.xi.get(name)) if self.group.bound else None
        )
        return self.weighted(log_density_of(sites[name], bound), sites, name)

    def _total(self, sites: Mapping[str, Any], name: str) -> Tensor:
        """Returns a site's log density, summed; minus infinity where its value is outside of its support."""
        fn, value = sites[name]["fn"], without_gaps(sites[name])
        with suppress(NotImplementedError):
            if not value.isnan().any() and not _is_supported(fn, value):
                return value.new_full((), -torch.inf, dtype=torch.get_default_dtype())
        return self.density(sites, name).detach().sum()

    def weighted(self, each: Tensor, sites: Mapping[str, Any], name: str) -> Tensor:
        """Returns numbers of a site, times the ratio of the site's scale to that of the members."""
        own, scale = sites[name]["scale"], sites[self.first]["scale"]
        both = {type(own), type(scale)}
        if own is scale or Tensor not in both and own == scale:
            return each
        return each * (self._narrowed(own) / self._narrowed(scale))

    def _narrowed(self, scale: Any) -> Any:
        """Returns a scale without the dims that it alone has, along which it counts a density several times."""
        extra = scale.dim() - len(self.leading) if isinstance(scale, Tensor) else 0
        return scale.sum(tuple(range(extra))) if extra > 0 else scale


def solved(
    expansion: Any, sites: Mapping[str, Any], run: Callable[[Any], Mapping[str, Any]]
) -> tuple[Any, Mapping[str, Any]]:
    """Returns the solved expansion and the sites of its run, given the first expansion and its sites."""
    while (following := expansion.solve(sites)) is not None:
        expansion, sites = following, run(following)
    return expansion, sites


def parameters_of(*tensors: Tensor, but: Iterable[Tensor] = ()) -> list[Tensor]:
    """Returns the leaves with gradients that tensors were computed from, but for some."""
    own = set(map(id, but))
    leaves = [node.variable for node in operations_of(*tensors) if hasattr(node, "variable")]
    return [leaf for leaf in leaves if id(leaf) not in own]


def operations_of(*tensors: Tensor) -> Iterator[Any]:
    """Yields the nodes of the graph of gradients that tensors were computed by."""
    seen: set[Any] = {None}
    nodes: list[Any] = [tensor.grad_fn for tensor in tensors]
    while nodes:
        node = nodes.pop()
        if node not in seen:
            seen.add(node)
            yield node
            nodes += [parent for parent, _ in node.next_functions]


def plate_dims(site: Mapping[str, Any]) -> frozenset[int]:
    """Returns the dims of the plates around a site, which are negative."""
    return frozenset(frame.dim for frame in site["cond_indep_stack"] if frame.vectorized)


def plate_shape(site: Mapping[str, Any]) -> torch.Size:
    """Returns the sizes of the plates around a site, 1 where there is none."""
    frames = {-frame.dim: frame.size for frame in site["cond_indep_stack"] if frame.vectorized}
    return torch.Size(frames.get(dim, 1) for dim in range(max(frames, default=0), 0, -1))


def within_plates(log_prob: Tensor, site: Mapping[str, Any], other: Mapping[str, Any]) -> Tensor:
    """Returns a site's log density summed over the plates that are not around another site, which leaves size 1."""
    summed = sorted(plate_dims(site) - plate_dims(other))
    return log_prob.sum(summed, keepdim=True) if summed else log_prob


def narrowed(value: Tensor) -> Tensor:
    """Returns a tensor with size 1 along the dims that it was expanded to."""
    return value[tuple(slice(0, 1 if step == 0 else None) for step in value.stride())]


def _is_supported(fn: Any, value: Tensor) -> bool:
    """Whether a value is in the support, for transformed distributions that of the base."""
    if not fn.support.check(value).all():
        return False
    if isinstance(fn, TransformedDistribution):
        for transform in reversed(fn.transforms):
            value = transform.inv(value)
    below = base_of(fn)
    return below is None or _is_supported(below, value)


def agree(
    found: Tensor, start: Tensor, terms: Sequence[Tensor], dtype: torch.dtype | None = None
) -> bool:
    """Whether something moved from ``start`` by the sum of some terms, as far as rounding and a thousandth allow."""
    size: Any = sum(term.abs() for term in terms)
    rounding = ROUNDING * torch.finfo(dtype or size.dtype).eps * (size + start.abs()).max()
    off = (found - start - sum(terms)).abs()
    return bool((off <= TOLERANCE * (size + TOLERANCE * size.max()) + rounding).all())


def broadcast(shape: torch.Size, other: torch.Size) -> torch.Size:
    """Returns the shape that both broadcast to, if they do; `torch.broadcast_shapes` takes a model's site as long."""
    if shape == other:
        return shape
    if len(shape) < len(other):
        shape, other = other, shape
    cut = len(shape) - len(other)
    return shape[:cut] + torch.Size(b if a == 1 else a for a, b in zip(shape[cut:], other))


def trimmed(shape: torch.Size, dims: int | None) -> torch.Size:
    """Returns a shape without leading ones beyond a number of dims."""
    while dims is not None and len(shape) > dims and shape[0] == 1:
        shape = shape[1:]
    return shape


def squeezed(value: Tensor, dims: int | None, event_dim: int = 0) -> Tensor:
    """Returns a tensor ``(*batch, *event)`` without leading batch dims of size 1 beyond a number of dims."""
    return value.reshape(trimmed(value.shape, None if dims is None else dims + event_dim))


def irregular(shape: torch.Size, like: Tensor, phase: int) -> Tensor:
    """Returns numbers between -1 and 1 in which nothing repeats."""
    order = torch.arange(shape.numel(), dtype=like.dtype, device=like.device).reshape(shape)
    return (1 + 2.4 * order + phase).sin()


def leading_shape(
    values: Mapping[str, Tensor], event_dims: Mapping[str, int], nesting: int
) -> torch.Size:
    """Returns the sizes of all batch dims to the left of the plates that values have, and 1 for each plate dim."""
    plates, shape = (1,) * nesting, torch.Size((1,) * nesting)
    for name, value in values.items():
        batch = value.shape[: value.dim() - event_dims.get(name, 0)]
        if len(batch) > nesting:
            shape = broadcast(shape, batch[: len(batch) - nesting] + plates)
    return shape


@contextmanager
def derivatives() -> Iterator[None]:
    """Takes derivatives on this thread, since a trace does not see what others do, as a GPU's would."""
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autograd.set_multithreading_enabled(False),
    ):
        yield
