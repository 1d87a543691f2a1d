"""Rules: how one latent gets its distribution in a pass, given the values known so far.

`Prior` is the model's own conditional. `Exact` is derived from the model, or from a bound.
`Learned` takes its parameters from networks; `LearnedStates` are the states of a loop of any
length. `Located` is a Normal about a mode, corrected by networks, and `Bounded` a conditional under
a bound, corrected by networks. No other code asks which rule a latent has. To add a rule, write a
subclass of `Rule` here, and say in `planner` which latents it serves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from pyro.distributions import TorchDistribution
from torch import Tensor
from torch.distributions import Distribution

from pyro_nami.deriving.derived_group import ConjugateGroup
from pyro_nami.deriving.expansion import broadcast, squeezed
from pyro_nami.deriving.in_turn import ConditionalsInTurn, InTurn, Order
from pyro_nami.factors.distribution import SiteDistribution
from pyro_nami.factors.family import Family
from pyro_nami.factors.joint import to_instances
from pyro_nami.factors.joint_normal import JointNormal, joint_normal
from pyro_nami.factors.links import relative_scale
from pyro_nami.factors.normals import Coupling
from pyro_nami.factors.potentials import NormalPotential, tilted
from pyro_nami.guide.innovations import Continued, Innovations
from pyro_nami.guide.one_pass import Pass, Term
from pyro_nami.guide.series import SeriesPlan, messages_of
from pyro_nami.parameters.additions import expert
from pyro_nami.parameters.factor_groups import Factor
from pyro_nami.program.masks import own_mask
from pyro_nami.program.runner import Message, Values, changed_event_shape

__all__ = [
    "Bounded",
    "Exact",
    "Learned",
    "LearnedStates",
    "Located",
    "Prior",
    "Rule",
    "RuleNote",
    "RuleNotes",
    "fixed_size",
    "order_of",
]


@dataclass(frozen=True)
class Rule:
    """How one latent gets its distribution."""

    kind: ClassVar[str]  # the name that users see
    name: str  # the latent's
    # the latents whose exact conditionals are derived before this one is drawn
    group: ConjugateGroup | None = None
    reads_prior: bool = False  # whether its density takes the model's distribution at the site
    # whether all of it was masked at the guide's first call, which shows not what reads it
    is_untold: bool = False
    # whether its prior is flat where the model masks it, as something reads its value there
    is_flat: bool = False

    def solved(self, current: Pass) -> Any:
        """Returns the conditionals that the members of its group are drawn from."""
        assert self.group is not None
        return current.derive(self.group.drawn)

    def distribution(
        self, current: Pass, batch_shape: torch.Size, prior: Distribution | None
    ) -> TorchDistribution:
        """Returns the latent's distribution given all that it reads, of a batch shape at least ``batch_shape``.

        Args:
            current: the pass.
            batch_shape: sizes of the plates around the site.
            prior: the model's distribution at the site given the values so far, if it is known.
        """
        raise NotImplementedError

    def derived(self, current: Pass) -> tuple[TorchDistribution, bool]:
        """Returns the conditional that is derived for its group, without corrections, and whether it is exact."""
        assert self.group is not None
        fn = current.derive(self.group).conditional(self.name, current.values, 0)
        return fn, self.group.is_exact

    def log_prob(self, current: Pass, value: Tensor, site: Message) -> Tensor | Term:
        """Returns the log density ``(*batch, *plates)`` in nats where all values are known, or what it is made of.

        Args:
            current: the pass.
            value: of the latent.
            site: of a run of the model at these values, ``fn`` and ``mask``; both None where none was needed.
        """
        raise NotImplementedError

    def mask(self, site: Message) -> Tensor | None:
        """Returns where the latent's density counts, at its site of a run of the model; None: everywhere."""
        return None if self.is_flat else own_mask(site)

    def masked(self, log_prob: Tensor, site: Message) -> Tensor:
        """Returns a log density with zeros where the site is masked; unchanged if the model was not run."""
        mask = None if site["fn"] is None else self.mask(site)
        return log_prob if mask is None else torch.where(mask, log_prob, torch.zeros_like(log_prob))

    def note(self, current: Pass, elements: Tensor) -> None:
        """Stores the elements of a draw."""


@dataclass(frozen=True)
class Prior(Rule):
    """q(v | latents sampled earlier) = p(v | parents of v): the model's own conditional."""

    kind = "prior"

    reads_prior: bool = True

    def distribution(self, current: Pass, batch_shape: torch.Size, prior: Any) -> TorchDistribution:
        return prior

    def log_prob(self, current: Pass, value: Tensor, site: Message) -> Tensor:
        return self.masked(site["fn"].log_prob(value), site)


@dataclass(frozen=True)
class Further(Prior):
    """Innovations of a series with more steps than in training, or fewer; see `Continued`."""

    trained: Innovations = None  # type: ignore[assignment]

    def distribution(self, current: Pass, batch_shape: torch.Size, prior: Any) -> TorchDistribution:
        return Continued(self.trained, prior)


@dataclass(frozen=True)
class Exact(Rule):
    """q(v | latents sampled earlier) = p(v | latents sampled earlier, data); see `pyro_nami.deriving.finder`."""

    kind = "exact"

    def distribution(
        self, current: Pass, batch_shape: torch.Size, prior: Distribution | None
    ) -> TorchDistribution:
        fn = self.solved(current).conditional(self.name, current.values, len(batch_shape))
        return _expanded(fn, batch_shape)

    def log_prob(self, current: Pass, value: Tensor, site: Message) -> Tensor:
        fn = self.solved(current).conditional(self.name, current.values)
        return self.masked(fn.log_prob(value), site)


@dataclass(frozen=True)
class LearnedStates(Rule):
    """q(z_t | z_(t-1), other latents, data from t on) ~ p(z_t | z_(t-1), other latents) times a message of networks.

    See `pyro_nami.guide.series`. The states are drawn one after another in a run of the model, and scored all at once.
    In that run the model's own parameters are constants: their gradient is that at a fixed q, as of an EM step. A
    gradient through all transitions in turn would soon have these explode.
    """

    kind = "learned"

    series: SeriesPlan = None  # type: ignore[assignment]
    reads_prior: bool = True

    def distribution(
        self, current: Pass, batch_shape: torch.Size, prior: Distribution | None
    ) -> TorchDistribution:
        assert prior is not None
        dims, event = len(batch_shape), prior.event_shape
        message = self._message(current)
        if not isinstance(message, NormalPotential):
            return tilted(prior, squeezed(message, dims, len(event) + 1))

        def of_event_shape(part: Tensor) -> Tensor:
            part = squeezed(part, dims, 1)
            return part.reshape(part.shape[:-1] + event)

        return tilted(prior, message.map(of_event_shape))

    def log_prob(self, current: Pass, value: Tensor, site: Message) -> Tensor:
        prior = site["fn"]
        fn = self.distribution(current, prior.batch_shape, prior)
        return self.masked(fn.log_prob(value), site)

    def mask(self, site: Message) -> Tensor | None:
        mask = site["mask"]  # masks of the distribution stay in place
        return None if mask is None or mask is True else torch.as_tensor(mask)

    def by_site(self, current: Pass) -> dict[str, LearnedStates]:
        """Returns site -> the rule for one state."""
        states = current.call.program.loops.states[self.name]
        return {site: replace(self, name=site) for site in states.sites}

    def _message(self, current: Pass) -> NormalPotential | Tensor:
        """Returns the message about all states, or about the one at this site; a pass computes all of them once."""
        if self.name not in current.messages:
            found = current.state.messages(self.series.sources)
            loops = current.call.program.loops
            current.messages.update(messages_of(self.series, loops, found))
        return current.messages[self.name]


@dataclass(frozen=True)
class Learned(Rule):
    """q(v | what v reads) = family(parameters), given by networks, relative to the prior where it is known."""

    kind = "learned"

    factor: Factor = None  # type: ignore[assignment]
    family: Family = None  # type: ignore[assignment]
    anchored: bool = False  # whether its parameters are relative to the model's own conditional
    expert: bool = False  # whether its distribution is that conditional times evidence of its own

    def distribution(
        self, current: Pass, batch_shape: torch.Size, prior: Distribution | None
    ) -> TorchDistribution:
        factor, event_shape = self.factor, self.family.layout.event_shape
        if prior is not None and prior.event_shape != event_shape:
            raise ValueError(changed_event_shape(self.name, event_shape, prior.event_shape))
        for plate, (dim, size) in factor.joint.items():
            if batch_shape[dim] != size:
                raise ValueError(fixed_size(self.name, plate, size, batch_shape[dim]))
        family = current.family(self.name, prior)
        anchor = self._anchor(family, prior)
        current.anchors[self.name] = None if self.expert else anchor
        return self._with_fixed(
            current, lambda state: self._given(current, state, family, batch_shape, anchor)
        )

    def _with_fixed(self, current: Pass, at: Callable[[Any], Any]) -> Any:
        """Returns the distribution ``at(state)``, with one of fixed parameters for the path score."""
        fn, state = at(current.state), current.state
        fn.fixed = lambda: at(state.fixed), state.network.places[self.name].path_share
        return fn

    def _given(
        self,
        current: Pass,
        state: Any,
        family: Family,
        batch_shape: torch.Size,
        anchor: Tensor | None,
    ) -> SiteDistribution:
        """Returns the distribution with parameters of a state; a fixed state gives them without gradients."""
        factor = self.factor
        if factor.sequential:
            conditionals = self._conditionals(current, state, len(batch_shape))
            target = torch.broadcast_shapes(conditionals.first()[0].shape[:-1], batch_shape)
            return family.autoregressive_distribution(
                conditionals, anchor, target, factor.dims, factor.sizes
            )
        params = squeezed(self._params(state), len(batch_shape), 2)
        target = torch.broadcast_shapes(params.shape[:-2], batch_shape)
        params = params.expand(target + params.shape[-2:])
        return self._at_once(current, state, family, params, anchor)

    def log_prob(self, current: Pass, value: Tensor, site: Message) -> Tensor | Term:
        family = current.family(self.name)
        is_masked = site["fn"] is not None and self.mask(site) is not None
        anchor, params = self._anchor(family, site["fn"]), self._params(current.state)
        if family.alike is None or is_masked or family.varies or self.factor.coupled:
            fn = self._at_once(current, current.state, family, params, anchor)
            return self.masked(fn.log_prob(value), site)
        if current.outside.validate and not family.layout.support.check(value).all():
            raise ValueError(
                f"Expected values of '{self.name}' in {family.layout.support}; some are outside of it."
            )
        if anchor is not None and self.expert:
            params = expert(params, family.num_params)
        elements = family.layout.elements(value)
        return Term(family, params, anchor, elements, family.layout.log_abs_det(elements, value))

    def target(self, current: Pass, value: Tensor, prior: Distribution) -> Tensor:
        """Returns the elements ``(*batch, *plates, E)`` that a regression fits the location to."""
        family = current.family(self.name)
        anchor = self._anchor(family, prior) if family.locations else None
        location, scale = (0.0, 1.0) if anchor is None else anchor.unbind(-1)
        return (family.layout.elements(value) - location) / scale

    def note(self, current: Pass, elements: Tensor) -> None:
        if self.name in current.anchors:
            current.state.note(self.name, elements, current.anchors[self.name])

    def _anchor(self, family: Family, prior: Distribution | None) -> Tensor | None:
        return family.anchor(prior) if self.anchored and prior is not None else None

    def _params(self, state: Any) -> Tensor:
        """Returns the parameters; those of a block are given instance by instance."""
        params = state.params(self.name)
        return to_instances(params, self.factor.dims, self.factor.sizes, parts=1)

    def _at_once(
        self, current: Pass, state: Any, family: Family, params: Tensor, anchor: Tensor | None
    ) -> SiteDistribution:
        """Returns the distribution of a factor that is drawn in one go."""
        if anchor is not None and self.expert:
            current.freedom[self.name] = _freedom(params, anchor)
            params = expert(params, family.num_params)
        if not self.factor.coupled:
            return family.distribution(params, anchor)
        coupling = Coupling(state.coupling(self.name), self.factor.dims, self.factor.sizes)
        return family.coupled_distribution(params, anchor, coupling)

    def _conditionals(self, current: Pass, state: Any, dims: int) -> Any:
        """Returns what gives the parameters of a factor that is drawn element by element."""
        return state.conditionals(self.name, dims)


@dataclass(frozen=True)
class Located(Learned):
    """q(v | latents sampled earlier) = Normal about the mode, corrected by networks.

    See `pyro_nami.deriving.newton`; `pyro_nami.deriving.collapsed` gives Normals of elements in unconstrained space.
    """

    kind = "newton"

    def distribution(
        self, current: Pass, batch_shape: torch.Size, prior: Distribution | None
    ) -> TorchDistribution:
        dims = len(batch_shape)
        near = self._near(current, dims)
        fn = self._with_fixed(current, lambda state: self._bent(near, state, dims))
        return _expanded(fn, batch_shape)

    def log_prob(self, current: Pass, value: Tensor, site: Message) -> Tensor:
        return self.masked(self._bent(self._near(current), current.state).log_prob(value), site)

    def derived(self, current: Pass) -> tuple[TorchDistribution, bool]:
        return self._near(current), False

    def _near(self, current: Pass, dims: int | None = None) -> JointNormal:
        return joint_normal(self.solved(current).conditional(self.name, current.values, dims))

    def _bent(self, near: JointNormal, state: Any, dims: int | None = None) -> TorchDistribution:
        assert self.group is not None
        params = squeezed(state.params(self.name), dims, 2)
        if not self.group.comes_first:
            return near.with_elements(self.family.elements(near.vectors(params)))
        bent = near.with_elements(self.family.elements(near.vectors(params.unsqueeze(-2))))
        return SiteDistribution(bent, self.family.layout)


@dataclass(frozen=True)
class Bounded(Learned):
    """q(v | what v reads) = the conditional under a bound, corrected by networks; see `pyro_nami.deriving.bounded`.

    Where elements are drawn in turn, bounds give way to what is drawn before; see `pyro_nami.deriving.in_turn`.
    """

    kind = "bounded"

    before: tuple[str, ...] = ()  # latents of the group that are drawn before it, and that it reads

    def distribution(
        self, current: Pass, batch_shape: torch.Size, prior: Distribution | None
    ) -> TorchDistribution:
        solved, dims = self.solved(current), len(batch_shape)
        in_turn = isinstance(solved, InTurn) and self.factor.sequential
        near = (
            solved.prior(self.name, dims)
            if in_turn
            else solved.conditional(self.name, self._known(current), dims)
        )
        return super().distribution(current, batch_shape, near)

    def log_prob(self, current: Pass, value: Tensor, site: Message) -> Tensor | Term:
        near = self.solved(current).conditional(
            self.name, {**self._known(current), self.name: value}
        )
        return super().log_prob(
            current, value, {**site, "fn": near, "mask": self.mask(site) if site["fn"] else None}
        )

    def _conditionals(self, current: Pass, state: Any, dims: int) -> Any:
        conditionals, solved = super()._conditionals(current, state, dims), self.solved(current)
        if not isinstance(solved, InTurn):
            return conditionals
        return ConditionalsInTurn(conditionals, solved.terms(self.name, self._known(current)), dims)

    def _known(self, current: Pass) -> Values:
        return {name: current.values[name] for name in self.before}


def order_of(factor: Factor) -> Order:
    """Returns the order in which the elements of a factor are drawn."""
    return Order(factor.num_elements, factor.dims, factor.sizes)


def _expanded(fn: TorchDistribution, batch_shape: torch.Size) -> TorchDistribution:
    target = broadcast(fn.batch_shape, batch_shape)
    return fn if fn.batch_shape == target else fn.expand(target)


class RuleNote(NamedTuple):
    """How a latent is drawn, for a user to read.

    Attributes:
        rule: ``"exact"``, ``"quadrature"``, ``"collapsed"``, ``"newton"``, ``"bounded"``, ``"bound"``, ``"learned"`` or
            ``"prior"``.
        reads: the sites that its distribution depends on.
        reason: why it is not drawn from an exact conditional.
    """

    rule: str
    reads: tuple[str, ...]
    reason: str

    def __str__(self) -> str:
        reads = f", reads {', '.join(self.reads)}" if self.reads else ""
        return self.rule + reads + (f"; not exact: {self.reason}" if self.reason else "")


class RuleNotes(dict[str, RuleNote]):
    """Latent -> its `RuleNote`; printed a line each."""

    def __repr__(self) -> str:
        return "\n".join(f"{name}: {note}" for name, note in self.items())


def fixed_size(name: str, plate: str, size: int, now: int) -> str:
    """Returns the message for a plate whose instances form one block and that has changed its size."""
    return (
        f"Expected plate '{plate}' of size {size}, as at the guide's first call; got {now}. The instances of '{name}' "
        "depend on each other given the data, so the guide holds them in one block of fixed size: make a new guide."
    )


def _freedom(params: Tensor, anchor: Tensor) -> Tensor:
    """Returns the share of the evidence's location in the location of prior times evidence, ``(*batch, E)``."""
    precision = relative_scale(params[..., 1].detach()).square().reciprocal()
    return precision / (precision + anchor[..., 1].detach().square().reciprocal())
