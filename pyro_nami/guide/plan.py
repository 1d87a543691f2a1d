"""`Plan`: everything about a guide that is fixed at its first call, as frozen values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from pyro_nami.deriving.derived_group import ConjugateGroup
from pyro_nami.deriving.expansion import leading_shape
from pyro_nami.deriving.grids import points_of
from pyro_nami.deriving.loop_modes import NEAREST_POINTS
from pyro_nami.graph.inverse import Inverse
from pyro_nami.graph.network import BayesNet
from pyro_nami.guide.rules import Learned, LearnedStates, Rule, RuleNote
from pyro_nami.guide.series import SeriesPlan
from pyro_nami.parameters.conditioning import Plates, nodes_of
from pyro_nami.parameters.factor_groups import Factor
from pyro_nami.program.loops import Loops, family_of
from pyro_nami.program.runner import Values
from pyro_nami.program.vectorized import Vectorized
from pyro_nami.reading.covariates import MASK
from pyro_nami.reading.index_maps.decoding import MapPlan

__all__ = [
    "Covariates",
    "Plan",
    "ProgramPlan",
    "SamplingOrder",
    "SitePlan",
    "missing_site",
    "new_site",
    "observed_latent",
]


class SitePlan(NamedTuple):
    """The fixed properties of one site."""

    # that its tensor has dims for; the network has those that these determine as well
    plates: frozenset[str]
    event_dim: int
    # what gives its features, its family or another object; None if nothing reads it
    encoding: Any = None
    initial: Tensor | None = None  # of a latent, the first instance of its initial value
    allows_nan: bool = False  # whether its distribution or mask allows for NaN in its data
    is_masked: bool = False  # of a latent, whether the model masks it


class SamplingOrder(NamedTuple):
    """The order in which latents are sampled, and the conditionals that are derived in it.

    Attributes:
        inverse: what each latent reads.
        latents: in sampling order, without those that are drawn from the model.
        interleaved: whether runs of the model can draw them in that order.
        groups: latent -> the group that its conditional is derived with.
        refused: latent -> why it is not drawn from an exact conditional.
        lost: of these, latents that might have one if the model could be run for many draws at once.
        doubts: latents with improper priors that may have no posterior -> why.
    """

    inverse: Inverse
    latents: tuple[str, ...]
    interleaved: bool
    groups: Mapping[str, ConjugateGroup]
    refused: Mapping[str, str] = {}
    lost: Collection[str] = ()
    doubts: Mapping[str, str] = {}


class Covariates(NamedTuple):
    """The covariates that factors read."""

    columns: Mapping[str, tuple] = {}  # site -> its covariates
    # values of the latents at the draws that they were found at
    references: Sequence[Values] = ()

    def mask_column(self, name: str) -> int | None:
        """Returns which of a site's covariates is its mask, if one is."""
        columns = enumerate(self.columns.get(name, ()))
        return next(
            (i for i, column in columns if getattr(column, "parameter", None) == MASK), None
        )


class ProgramPlan(NamedTuple):
    """What the first call has shown of the model as a program.

    Attributes:
        names: all sample sites, deterministic ones included.
        parameters: the names that the model's own parameters have in the store.
        loops: each loop is one site in all of the plan.
        computed: see `Program.computed`.
        vectorized: whether the model is written for one draw, and mapped over draws.
    """

    names: frozenset[str]
    parameters: frozenset[str]
    loops: Loops
    computed: frozenset[str]
    vectorized: bool


@dataclasses.dataclass(frozen=True)
class Plan:
    """A guide's fixed structure."""

    bayesnet: BayesNet
    program: ProgramPlan
    sampling: SamplingOrder
    plates: Plates
    sites: Mapping[str, SitePlan]
    # latent -> how it is drawn, for all that the guide emits, in model order
    rules: Mapping[str, Rule]
    bounds: Mapping[str, Factor]  # observed site -> what networks give for its bound
    read: tuple[str, ...]  # observed sites that some rule reads
    semi_observed: frozenset[str]  # latents that a call may observe
    covariates: Covariates
    map_plans: tuple[MapPlan, ...]  # how a call's index maps are found
    factory: Mapping[str, Any]  # dtype and device of the networks

    def for_many(self, model: Callable) -> Callable:
        """Returns the model as the plan's rules run it."""
        is_one = self.program.vectorized and not isinstance(model, Vectorized)
        return Vectorized(model, self.plates.nesting) if is_one else model

    @property
    def names(self) -> frozenset[str]:
        """All sample sites of the model, deterministic ones included."""
        return self.program.names

    @property
    def loops(self) -> Loops:
        """The loops of the model, each of which is one site in all of the plan."""
        return self.program.loops

    @property
    def learns(self) -> bool:
        """Whether the model has parameters of its own."""
        return bool(self.program.parameters)

    @cached_property
    def series(self) -> SeriesPlan | None:
        """The states of a loop that networks learn, at any number of steps; None if there are none."""
        rules = self.rules.values()
        return next((rule.series for rule in rules if isinstance(rule, LearnedStates)), None)

    @property
    def inverse(self) -> Inverse:
        """The inverse that the guide is built on."""
        return self.sampling.inverse

    @property
    def order(self) -> tuple[str, ...]:
        """The latents that are not drawn from the model, in sampling order."""
        return self.sampling.latents

    @property
    def groups(self) -> Mapping[str, ConjugateGroup]:
        """Latent -> the group that its conditional is derived with."""
        return self.sampling.groups

    @cached_property
    def grid_points(self) -> int:
        """The points of the largest grid that is made anew for each draw; 1 if there is none."""
        groups = set(self.groups.values())
        nearest = [NEAREST_POINTS for group in groups if group.drawn is not group]
        grids = [points_of(group) for group in groups if group.form == "quadrature"]
        return max([1, *grids, *nearest])

    @property
    def num_underived(self) -> tuple[int, int]:
        """How many latents are learned, and how many are located and then corrected by a network."""
        bent = sum(rule.group is not None for rule in self.learned.values())
        return len(self.learned) - bent, bent

    @cached_property
    def learned(self) -> dict[str, Learned]:
        """The latents that networks serve, in sampling order."""
        rules = {name: self.rules[name] for name in self.order}
        return {name: rule for name, rule in rules.items() if isinstance(rule, Learned)}

    @cached_property
    def weighted(self) -> frozenset[str]:
        """The latents whose distributions depend on weights: the learned ones, and those with a learned bound."""
        bounded = {name for name, group in self.groups.items() if group.bound}
        return frozenset(self.learned) | bounded | set(self.loops_learned)

    @cached_property
    def blocks(self) -> dict[str, str]:
        """Plate of fixed size -> a latent whose instances are drawn as one block over the plate."""
        return {plate: name for name, rule in self.learned.items() for plate in rule.factor.joint}

    @cached_property
    def initial(self) -> Values:
        """First instances of the initial values of all latents."""
        return {name: site.initial for name, site in self.sites.items() if site.initial is not None}

    @property
    def columns(self) -> Mapping[str, tuple]:
        """Site -> its covariates."""
        return self.covariates.columns

    @cached_property
    def families(self) -> dict[str, Any]:
        """What gives the features of the latents in `order`."""
        return {
            name: self.sites[name].encoding for name in self.order if name not in self.loops_learned
        }

    @property
    def loops_learned(self) -> Collection[str]:
        """The states that networks learn as a whole."""
        return () if self.series is None else (self.series.name,)

    @cached_property
    def event_dims(self) -> dict[str, int]:
        """Event dims of every site."""
        return {name: site.event_dim for name, site in self.sites.items()}

    def leading(self, values: Values) -> torch.Size:
        """Returns the sizes of the batch dims of sites' values, and 1 for each plate dim."""
        return leading_shape(values, self.event_dims, self.plates.nesting)

    def first_of(self, name: str, value: Tensor) -> Tensor:
        """Returns the first of several values of a site, of the site's own shape; of an unknown site all."""
        if name not in self.sites:
            return value
        site = self.sites[name]
        own = max((-self.plates.dims[plate] for plate in site.plates), default=0) + site.event_dim
        return value[(0,) * max(0, value.dim() - own)]

    def data_of(self, name: str) -> set[str]:
        """Returns the observed sites that a latent's distribution depends on."""
        group = self.groups.get(name)
        found: set[Any] = set() if group is None else set(group.children)
        if self.series is not None and name == self.series.name:
            found.update(self.series.data)
        if name in self.learned:
            found.update(*(nodes_of(source) for source in self.learned[name].factor.sources))
        return found & set(self.read)

    def note(self, name: str) -> RuleNote:
        """Returns how a latent is drawn."""
        kind, group = self.rules[name].kind, self.rules[name].group
        if group is not None:
            if group.bound:
                kind = group.bound
            elif group.form == "collapsed":
                kind = "collapsed"
            elif group.is_tabulated:
                kind = "quadrature"
            elif group.is_located:
                kind = "newton"
        reads = () if kind == "prior" else self.inverse.parents.get(name, ())
        reason = "" if kind == "exact" else self.sampling.refused.get(name, "")
        return RuleNote(kind, tuple(sorted(map(str, reads))), reason)

    def features(self, name: str, value: Tensor) -> Tensor:
        """Returns the raw features of a site's value, ``(*batch, features)``."""
        return self.sites[name].encoding.features(value).flatten(-2)

    def to(self, fn: Callable[[Tensor], Tensor]) -> Plan:
        """Returns the plan with ``fn`` applied to all tensors held, to move them to another device."""
        like = fn(torch.empty(0, **self.factory))
        held = {
            "sites": dict(self.sites),
            "map_plans": self.map_plans,
            "covariates": self.covariates,
        }
        moved = tree_map_only(Tensor, fn, held)
        return dataclasses.replace(
            self, factory={"dtype": like.dtype, "device": like.device}, **moved
        )


def new_site(name: str) -> str:
    """Returns the message for a site that the guide's first call did not have."""
    remedy = "and call it first with all sites that may occur"
    return _other_sites(name, f"got a new site '{name}'", remedy)


def _other_sites(name: str, got: str, remedy: str) -> str:
    message = (
        f"Expected the sites of the guide's first call; {got}. A guide's structure is fixed at its first call: make a "
        f"new guide, {remedy}."
    )
    if family_of(name) == name:
        return message
    remedy = "make a guide with mode='amortized' and exact=False, which learns their states"
    return f"{message} For loops of any length {remedy}."


def missing_site(name: str) -> str:
    """Returns the message for a site of the guide's first call that a call lacks."""
    return _other_sites(name, f"this call lacks '{name}'", "or sample the site in every call")


def observed_latent(name: str) -> str:
    """Returns the message for a latent of the guide's first call that a call observes."""
    return (
        f"Expected latent '{name}' of the guide's first call, which had no data for it; this call observes it, and the "
        f"guide does not read it. Make a new guide and make its first call with data, or name it: observed=['{name}']."
    )
