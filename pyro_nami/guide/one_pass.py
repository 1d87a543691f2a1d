"""`Pass`: one pass over the latents, with the values known so far and the groups derived in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from pyro.distributions import TorchDistribution
from torch import Tensor
from torch.distributions import Distribution

from pyro_nami.deriving.derived_group import ConjugateGroup
from pyro_nami.deriving.expansion import Expansion
from pyro_nami.deriving.newton import Newton
from pyro_nami.factors.boxed_normal import BoxedNormal
from pyro_nami.factors.distribution import Relocated, Relocation, SiteDistribution
from pyro_nami.factors.family import Family
from pyro_nami.messages import warn
from pyro_nami.networks.stepped import concatenated
from pyro_nami.parameters.network_state import NetworkState
from pyro_nami.program.flat_priors import MOST_LOST
from pyro_nami.program.runner import Message, Sites, Values

__all__ = ["DerivedGroups", "Outside", "Pass", "Term", "sum_plates"]


class Term(NamedTuple):
    """What one latent's density is made of: its family, parameters, anchor, and elements in unconstrained space."""

    family: Family
    params: Tensor
    anchor: Tensor | None
    elements: Tensor
    log_abs_det: Tensor | None  # of the way from them to the value

    def key(self) -> tuple:
        """Returns a key that is equal for terms whose log densities can be computed at once."""
        anchor = None if self.anchor is None else self.anchor.shape[:-2]
        own = [getattr(self.family, name) for name in self.family.alike or ()]
        return (
            type(self.family),
            *own,
            self.params.shape[:-2],
            self.params.shape[-1],
            anchor,
            self.elements.shape[:-1],
        )


def log_density_of_terms(terms: Sequence[Term]) -> Tensor:
    """Returns the log density ``(*batch, *plates)`` of elements of terms of equal keys, computed at once."""
    params = concatenated([term.params for term in terms], -2)
    anchors = [term.anchor for term in terms if term.anchor is not None]
    anchor = concatenated(anchors, -2) if anchors else None
    elements = concatenated([term.elements for term in terms], -1)
    log_prob: Tensor = terms[0].family.elements(params, anchor).log_prob(elements)
    return log_prob.sum(-1)


class DerivedGroups:
    """What was derived in a pass, and what the runs of the model for it have shown.

    Attributes:
        solved: group -> its conditionals.
        near: group -> its latest Normal about a mode, from which others are found.
        sizes: group -> numbers of elements of its members, where these may be other than planned.
        observed: latents that this call turns out to observe.
        sites: latent -> its site of a run of the model that derived conditionals.
        valid: member of a group in a trace -> 1, an error at other data.
        boxed: latent with a flat prior -> what it is drawn from, within the prior's bounds.
    """

    def __init__(self) -> None:
        self.solved: dict[ConjugateGroup, Expansion] = {}
        self.near: dict[ConjugateGroup, Newton] = {}
        self.sizes: dict[ConjugateGroup, dict[str, int]] = {}
        self.observed: set[str] = set()
        self.sites: dict[str, Message] = {}
        self.valid: dict[str, Tensor] = {}
        self.boxed: dict[str, BoxedNormal] = {}

    def lost(self) -> dict[str, float]:
        """Returns what share of latents with flat priors is out of bounds, by these draws."""
        return {name: float(fn.lost.mean()) for name, fn in self.boxed.items()}


@dataclass
class Outside:
    """The draws of a pass as the handlers outside see them.

    Attributes:
        relocation: where batch dims lie outside; None where they lie as inside.
        sizes: sizes of the plates around the guide, to the left of the model's own.
        private: latents that handlers outside do not see.
        validate: whether values are to be checked.
        values: latent -> its draw, with batch dims as they lie outside.
    """

    relocation: Relocation | None = None
    sizes: torch.Size = torch.Size()
    private: frozenset[str] = frozenset()
    validate: bool = False
    values: dict[str, Tensor] = field(default_factory=dict)

    def see(self, fn: TorchDistribution) -> TorchDistribution:
        """Returns a distribution as the handlers outside see it."""
        return fn if self.relocation is None else Relocated(fn, self.relocation)

    def inside(self, value: Tensor, event_dim: int) -> Tensor:
        """Returns a value with its batch dims as they lie in the model."""
        return value if self.relocation is None else self.relocation.value_inside(value, event_dim)


@dataclass(eq=False)
class Pass:
    """What is known so far in one pass over the latents.

    Attributes:
        plan, call: the guide's plan, and the call whose latents these are.
        state: the networks' state, with everything observed known.
        derive_group: derives the conditionals of a group in a pass, at the values known so far.
        rules: latent -> its rule in this call (`pyro_nami.guide.rules`), in program order.
        families: latent that others may read -> its family; a prior may change its support and count in the pass.
        outside: the draws as handlers outside see them.
        values: latent -> its value, as the model sees it.
        derived: what was derived from the model.
        anchors: latent -> location and scale of its prior, if its factor's location is relative to it.
        freedom: latent -> how much of its factor's own location its draw takes.
        messages: states of a loop that networks learn, as a whole or at one site -> what data say of them.

    Example:
        >>> current = Pass(None, None, None, None, rules={"a": None, "b": None}, families={})
        >>> current.take("a", torch.tensor(1.0), torch.distributions.Normal(0.0, 1.0))
        tensor(1.)
        >>> current.left(), current.values
        (['b'], {'a': tensor(1.)})
    """

    plan: Any
    call: Any
    state: NetworkState
    derive_group: Callable[[Pass, ConjugateGroup], Expansion]
    rules: Mapping[str, Any]
    families: dict[str, Family]
    outside: Outside = field(default_factory=Outside)
    values: dict[str, Tensor] = field(default_factory=dict)
    derived: DerivedGroups = field(default_factory=DerivedGroups)
    anchors: dict[str, Tensor | None] = field(default_factory=dict)
    freedom: dict[str, Tensor] = field(default_factory=dict)
    messages: dict[str, Any] = field(default_factory=dict)

    def beside(self, values: Values) -> Pass:
        """Returns another pass, by the rules of the plan, in which values of some latents are known."""
        rules, families = self.plan.rules, dict(self.plan.families)
        other = Pass(self.plan, self.call, self.state, self.derive_group, rules, families)
        other.values.update(values)
        return other

    @property
    def leading(self) -> torch.Size:
        """Sizes of the batch dims of data and of what is drawn so far, and 1 for each plate dim."""
        leading: torch.Size = self.plan.leading({**self.call.values, **self.values})
        return leading

    def run(self, **options: Any) -> Sites:
        """Returns the sites of a run of the model at what is known so far; see `Runner`."""
        sites: Sites = self.call.run({**self.call.held, **self.values}, **options)
        return sites

    def left(self) -> list[str]:
        """Returns the latents without a value yet, in program order."""
        return [name for name in self.rules if name not in self.values]

    def family(self, name: str, prior: Distribution | None = None) -> Family:
        """Returns a latent's family. A given prior sets its support and count for the rest of the pass."""
        if prior is not None:
            self.families[name] = self.families[name].at(prior)
        return self.families[name]

    def know(
        self, name: str, value: Tensor, elements: Tensor | None = None, *, drawn: bool = False
    ) -> None:
        """Stores the value of a latent, and gives the networks its features."""
        self.values[name] = value
        if name in self.families and name in self.state.network.read:
            family = self.family(name)
            elements = family.layout.elements(value) if elements is None else elements
            features = family.element_features(elements).flatten(-2)
            self.state.add(name, features, drawn=drawn, share=self.freedom.get(name))

    def scale(self, site: Message) -> Any:
        """Returns the scale of a latent's density, by its site of a run of the model."""
        valid = self.derived.valid.get(site["name"])
        return site["scale"] if valid is None else site["scale"] * valid

    def one_for_each(self, fn: Any) -> Any:
        """Returns a distribution with the batch dims of the plates around the guide, and all plate dims."""
        sizes, ones = self.outside.sizes, self.plan.plates.nesting - len(fn.batch_shape)
        return fn.expand(sizes + (1,) * ones + fn.batch_shape) if sizes else fn

    def take(self, name: str, value: Tensor, fn: TorchDistribution, seen: bool = True) -> Tensor:
        """Stores the value that outside handlers gave a latent; returns the value as the model sees it.

        What handlers outside have not ``seen`` is known to other latents alone.
        """
        if seen:
            self.outside.values[name] = value
        self.note_bounds(name, fn)
        value = self.outside.inside(value, len(fn.event_shape))
        elements = fn.drawn(value) if isinstance(fn, SiteDistribution) else None
        if elements is not None:
            self.rules[name].note(self, elements)
        if value.is_inference():  # through which no conditional could be derived
            value = value.clone()
        self.know(name, value, elements, drawn=True)
        return value

    def note_bounds(self, name: str, fn: Any) -> None:
        """Stores the distribution of a latent that bounds of its prior may cut."""
        if isinstance(fn, BoxedNormal):
            self.derived.boxed[name] = fn

    def derive(self, group: ConjugateGroup) -> Expansion:
        """Returns the exact conditionals of a group, derived now if they were not before."""
        if group not in self.derived.solved:
            self.derived.solved[group] = self.derive_group(self, group)
        return self.derived.solved[group]

    def check(self) -> None:
        """Raises where a draw has NaN, and warns where a prior stood in for an exact conditional.

        It looks at all of them at once, as a device has to be waited for each time.
        """
        if self.derived.boxed and not (torch.is_grad_enabled() and self.state.network.learns()):
            self._warn_of_bounds()
        sums = {name: value.detach().sum() for name, value in self.outside.values.items()}
        if not sums or not self.outside.validate:
            return
        finite: dict[str, Tensor] = {}  # latent -> where its exact conditional is finite
        for solved in self.derived.solved.values():
            finite.update(solved.finite)
        whole = [torch.stack([each.all() for each in finite.values()]).all()] if finite else []
        total, *whole = torch.stack([torch.stack([*sums.values()]).sum(), *whole]).tolist()
        if not all(whole):
            self._warn(finite)
        for name, each in sums.items() if math.isnan(total) else ():
            if each.isnan():
                bad = self.state.network.non_finite_parameter()
                raise ValueError(
                    f"Expected a draw of site '{name}' without NaN; its factor's parameters are not finite"
                    + (f", and neither is the guide's parameter '{bad}'" if bad else "")
                    + ". The last gradient was not finite, or its step too large: lower the learning rate, clip "
                    "gradients, or look for a log density of the model that is infinite."
                )

    def _warn_of_bounds(self) -> None:
        """Warns once of each latent whose bounds data do touch, though its prior is taken for flat."""
        for name, share in self.derived.lost().items():
            if share > MOST_LOST and self.state.network.tells(f"{name}, bounds"):
                warn(
                    f"At these data a share of {share:.1g} of the conditional of '{name}' lies outside of the bounds "
                    f"of its prior, which was taken for flat. '{name}' is drawn within the bounds, but no longer from "
                    f"its exact conditional. Widen the prior, or make the guide with rules={{'{name}': 'learned'}}."
                )

    def _warn(self, finite: Values) -> None:
        """Warns once of each latent that is drawn from its prior where its exact conditional is not finite."""
        for name, each in finite.items():
            count = each.numel() - int(each.sum())
            if count and self.state.network.tells(name):
                warn(
                    f"The exact conditional of '{name}' is not finite at {count} of its {each.numel()} instances, so "
                    "its prior stands in for it there. Look for infinite data and for scales near zero, and mask rows "
                    f"that should not count. With rules={{'{name}': 'learned'}} no exact conditional is needed."
                )


def sum_plates(log_prob: Tensor, nesting: int) -> Tensor:
    """Returns log densities summed over the plate dims, the rightmost ``nesting``."""
    dims = tuple(range(-min(nesting, log_prob.dim()), 0))
    return log_prob.sum(dims) if dims else log_prob
