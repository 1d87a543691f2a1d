"""Slopes of the log density of a group's children, from which conditionals are derived.

Slopes come from one run of the model by automatic differentiation, and are differentiable in the
latents sampled earlier. An `Expansion` says at which points the members are set in that run
(`points`), and derives their conditionals from the sites of the run (`solve`).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pyro
import torch
from torch import Tensor

from pyro_nami.deriving.derived_group import ConjugateGroup
from pyro_nami.factors.bounds import log_prob_or_bound
from pyro_nami.program.flat_priors import flat_prior
from pyro_nami.program.masks import log_density_of, unmasked
from pyro_nami.program.runner import Message, RunModel, Sites, Values

if TYPE_CHECKING:
    from typing_extensions import Self  # noqa: UP035  for Python 3.10

__all__ = [
    "MAX_ERROR",
    "MOST_RUNS",
    "NEGLIGIBLE",
    "ROUNDING",
    "TOLERANCE",
    "Changed",
    "Expansion",
    "Run",
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
# Nats below the highest mode, or its mass, at which another mode does not matter; at 8 one of two wells is overlooked.
NEGLIGIBLE = 10.0

Run = Callable[[Any], Sites]  # an expansion -> the sites of its run


class Changed(Exception):
    """Ends an expansion that a run has shown to be made for another model: sizes, or what is observed, are others."""


class Remade:
    """An object that keeps the arguments it was made with, so that it can be made again with some of them changed."""

    _make: Callable[..., Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        made = super().__new__(cls)
        made._make = functools.partial(cls, *args, **kwargs)
        return made


class Expansion(Remade):
    """The log density of a group's children about some point, as a function of the members.

    Args:
        group: the members and their children.
        leading: sizes of the batch dims to the left of the plates, and 1 for each plate dim.
        nesting: number of plate dims.
        differentiable: whether gradients are to flow to what was drawn before.
        away: if given, all there is is one point, this far out in prior deviations.
        given: values of the members at that point, if it is not to be told by deviations.

    Attributes:
        priors, values: of each member, once the run has met it; priors without masks.
        shapes: of their values, with all batch dims.
        finite: where what was solved of each member is a number; elsewhere its data say nothing, which leaves its
            prior, given what is drawn before.
        count: number of points, along a dim of their own to the left of all others; None without such a dim.
        runs: number of expansions that it took to come here, this one included.
    """

    runs = 1

    def __init__(
        self,
        group: ConjugateGroup,
        leading: Sequence[int],
        nesting: int,
        differentiable: bool,
        away: float | None = None,
        given: Values | None = None,
    ) -> None:
        self.group = group
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
    def first(self) -> str:
        """The first member."""
        return self.group.members[0]

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
    ) -> Sites:
        """Returns the sites of a run of the model at the points, without validation: the model's own run has it."""
        with torch.inference_mode(False), torch.enable_grad(), pyro.validation_enabled(False):
            return run({**known, **(points or self.points)}, until=self.until)

    def start(self, name: str, prior: Any, shape: torch.Size) -> Tensor:
        """Returns a member's values, ``(*batch, *plates, *event)``; points lie along the first dim if counted."""
        raise NotImplementedError

    def solve(self, sites: Sites) -> Expansion | None:
        """Derives the conditionals from the sites of the run; or returns what is to be solved in place of this."""
        raise NotImplementedError

    def conditional(self, name: str, values: Values, dims: int | None = None) -> Any:
        """Returns a member's exact conditional, of batch shape ``(*batch, *plates)``, at values of those before it.

        Where these are more than ``dims``, leading dims of size 1 are left out.
        """
        raise NotImplementedError

    def anew(self, **changes: Any) -> Self:
        """Returns the next expansion, made as this one was but for some arguments, as ``at`` or ``given``."""
        other: Self = self._make(**changes)
        other.runs, other.xi = self.runs + 1, self.xi
        return other

    def apart(self) -> Self:
        """Returns the same conditionals for another pass, without what they were derived from."""
        return copy.copy(self)

    def is_finite(self) -> bool:
        """Whether all that was solved is a number."""
        return all(bool(each.all()) for each in self.finite.values())

    def take(
        self,
        sites: Sites,
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

    def density(self, sites: Sites, name: str) -> Tensor:
        """Returns a site's log density as far as its mask counts it, at its scale relative to that of the members."""
        if name in self.group.flat and (flat := flat_prior(sites[name]["fn"])) is not None:
            return flat.log_prob(sites[name]["value"], sites[name]["fn"].event_dim)
        bound = (
            functools.partial(log_prob_or_bound, xi=self.xi.get(name)) if self.group.bound else None
        )
        return self.weighted(log_density_of(sites[name], bound), sites, name)

    def weighted(self, each: Tensor, sites: Sites, name: str) -> Tensor:
        """Returns numbers of a site, times the ratio of the site's scale to that of the members."""
        own, scale = sites[name]["scale"], sites[self.first]["scale"]
        both = {type(own), type(scale)}
        if own is scale or Tensor not in both and own == scale:
            return each
        return each * (self._narrowed(own) / self._narrowed(scale))

    def joint_terms(self, sites: Sites) -> list[Tensor]:
        """Returns the log densities in nats of the first member and of the children, without gradients."""
        found = [sites[self.first]["fn"].log_prob(self.values[self.first])]
        found += [self.density(sites, child) for child in self.group.children if child in sites]
        return [each.detach().double() for each in found]

    def summed(self, parts: Tensor, apart: Collection[int] = ()) -> Tensor:
        """Returns sums over plates of numbers ``(*batch, *plates)``, but for some dims."""
        plates = [dim for dim in range(-min(self.nesting, parts.dim()), 0) if dim not in apart]
        return parts.sum(plates, keepdim=True) if plates else parts

    def _narrowed(self, scale: Any) -> Any:
        """Returns a scale without the dims that it alone has, along which it counts a density several times."""
        extra = scale.dim() - len(self.leading) if isinstance(scale, Tensor) else 0
        return scale.sum(tuple(range(extra))) if extra > 0 else scale


def solved(expansion: Any, sites: Sites, run: Run) -> tuple[Any, Sites]:
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


def plate_dims(site: Message) -> frozenset[int]:
    """Returns the dims of the plates around a site, which are negative."""
    return frozenset(frame.dim for frame in site["cond_indep_stack"] if frame.vectorized)


def plate_shape(site: Message) -> torch.Size:
    """Returns the sizes of the plates around a site, 1 where there is none."""
    frames = {-frame.dim: frame.size for frame in site["cond_indep_stack"] if frame.vectorized}
    return torch.Size(frames.get(dim, 1) for dim in range(max(frames, default=0), 0, -1))


def within_plates(log_prob: Tensor, site: Message, other: Message) -> Tensor:
    """Returns a site's log density summed over the plates that are not around another site, which leaves size 1."""
    summed = sorted(plate_dims(site) - plate_dims(other))
    return log_prob.sum(summed, keepdim=True) if summed else log_prob


def narrowed(value: Tensor) -> Tensor:
    """Returns a tensor with size 1 along the dims that it was expanded to."""
    return value[tuple(slice(0, 1 if step == 0 else None) for step in value.stride())]


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


def leading_shape(values: Values, event_dims: Mapping[str, int], nesting: int) -> torch.Size:
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
