"""Rules: how one latent gets its distribution in a pass, given what is known so far.

`Prior` is the model's own conditional, `Exact` one that is derived from the model in closed form, `Learned` one whose
parameters networks give. Code outside never asks which rule it has. To add a rule, write a subclass of `Rule` here and
say in `plan` which latents it serves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyro.distributions as dist
import torch
from pyro.distributions import TorchDistribution
from torch import Tensor
from torch.distributions import Distribution

from pyro_nami.factors.base import Family
from pyro_nami.factors.elements import relative_scale
from pyro_nami.factors.factor import SiteDistribution
from pyro_nami.factors.joint import unfold
from pyro_nami.factors.relocated import Relocated, Relocation
from pyro_nami.guide.groups import Factor
from pyro_nami.guide.network_state import NetworkState
from pyro_nami.guide.parameters import expert
from pyro_nami.reading.forms import ConjugateGroup, Elimination
from pyro_nami.reading.runner import changed_event_shape

__all__ = ["Exact", "Learned", "Pass", "Prior", "Rule", "fixed_size"]


class Pass:
    """What is known so far in one pass over the latents.

    Args:
        rules: latent -> its rule in this call, in program order.
        families: latent -> what gives its features, of latents that others read.
        state: the networks' state, with everything observed known.
        derive: derives the exact conditionals of a group at values of what is drawn before it.
        relocation: where batch dims lie outside; None where they lie as inside.
        validate: whether values are to be checked.

    Attributes:
        values: of latents, as the model sees them; returned: as handlers outside do.
        solved: group -> its exact conditionals.
        ready: latents whose site is known from the run that derived their conditional.
        anchors: latent -> location and scale of its prior, if its factor is relative to that.
        freedom: latent -> how much of its own location each draw of its factor takes.
    """

    def __init__(
        self,
        rules: Mapping[str, Rule],
        families: Mapping[str, Family],
        state: NetworkState,
        derive: Callable[[ConjugateGroup, Mapping[str, Tensor]], Elimination],
        relocation: Relocation | None,
        validate: bool,
    ) -> None:
        self.rules, self.state, self.validate = rules, state, validate
        self._families, self._derive, self._relocation = families, derive, relocation
        self._moved: dict[str, Family] = {}  # families whose support or count varies, as they are in this pass
        self.values: dict[str, Tensor] = {}
        self.returned: dict[str, Tensor] = {}
        self.solved: dict[ConjugateGroup, Elimination] = {}
        self.ready: dict[str, Mapping[str, Any]] = {}
        self.anchors: dict[str, Tensor | None] = {}
        self.freedom: dict[str, Tensor] = {}
        self.terms: dict[tuple, list[_Term]] = {}

    def left(self) -> list[str]:
        """Returns the latents without a value yet, in program order."""
        return [name for name in self.rules if name not in self.values]

    def family(self, name: str, prior: Distribution | None = None) -> Family:
        """Returns a latent's family, at its current prior from the moment that this is told."""
        family = self._moved.get(name, self._families[name])
        if prior is not None:
            family = self._families[name].at(prior)
            if family.varies:
                self._moved[name] = family
        return family

    def know(self, name: str, value: Tensor, elements: Tensor | None = None, *, drawn: bool = False) -> None:
        """Takes in the value of a latent, and its elements where they are known from the draw."""
        self.values[name] = value
        if name in self._families:
            family = self.family(name)
            elements = family.layout.elements(value) if elements is None else elements
            features = family.element_features(elements).flatten(-2)
            self.state.add(name, features, drawn=drawn, share=self.freedom.get(name))

    def outside(self, fn: TorchDistribution) -> TorchDistribution:
        """Returns a distribution as the handlers outside see it."""
        return fn if self._relocation is None else Relocated(fn, self._relocation)

    def take(self, name: str, value: Tensor, fn: TorchDistribution) -> Tensor:
        """Takes in the value that a latent got outside, by ``fn`` or by a replay; returns it as the model sees it."""
        self.returned[name] = value
        if self._relocation is not None:
            value = self._relocation.value_inside(value, len(fn.event_shape))
        elements = fn.recall(value) if isinstance(fn, SiteDistribution) else None
        if elements is not None:
            self.rules[name].note(self, elements)
        if value.is_inference():  # through which no conditional could be derived
            value = value.clone()
        self.know(name, value, elements, drawn=True)
        return value

    def derive(self, group: ConjugateGroup) -> Elimination:
        """Returns the exact conditionals of a group, derived now if they were not before."""
        if group not in self.solved:
            self.solved[group] = self._derive(group, self.values)
        return self.solved[group]

    def together(self) -> Iterator[Tensor]:
        """Yields the log densities ``(*batch, *plates)`` of all `terms`, those of one kind at once."""
        for terms in self.terms.values():
            params = _joined(-2, [term.params for term in terms])
            anchors = [term.anchor for term in terms if term.anchor is not None]
            anchor = _joined(-2, anchors) if anchors else None
            elements = _joined(-1, [term.elements for term in terms])
            yield terms[0].family.elements(params, anchor).log_prob(elements).sum(-1)

    def check(self) -> None:
        """Raises where a draw has NaN; looks at all of them at once, as a device has to be waited for each time."""
        sums = [value.detach().sum() for value in self.returned.values()] if self.validate else []
        if not sums or not math.isnan(torch.stack(sums).sum().item()):
            return
        for name, total in zip(self.returned, sums):
            if math.isnan(total.item()):
                bad = self.state.non_finite_parameter()
                raise ValueError(
                    f"Expected a draw of site '{name}' without NaN; its factor's parameters are not finite"
                    + (f", and neither is the guide's parameter '{bad}'" if bad else "")
                    + ". The last gradient was not finite, or its step too large: lower the learning rate, clip "
                    "gradients, or look for a log density of the model that is infinite."
                )


@dataclass(frozen=True)
class Rule:
    """How one latent gets its distribution.

    Attributes:
        name: the latent.
        group: the latents whose exact conditionals have to be derived together before this one can be drawn.
        reads_prior: whether its density takes the model's distribution at the site.
        inside: whether it can be drawn inside a run of the model only.
    """

    name: str
    group: ConjugateGroup | None = None
    reads_prior: bool = False
    inside: bool = False

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

    def log_prob(self, current: Pass, value: Tensor, site: Mapping[str, Any]) -> Tensor | None:
        """Returns the log density ``(*batch, *plates)`` in nats where all values are known, or leaves it to ``terms``.

        Args:
            current: the pass.
            value: of the latent.
            site: of a run of the model at these values, ``fn`` and ``mask``; both None where none was needed.
        """
        raise NotImplementedError

    def target(self, current: Pass, value: Tensor, prior: Distribution) -> Tensor | None:
        """Returns the elements that a location is to predict, ``(*batch, *plates, E)``; None if networks give none."""
        return None

    def note(self, current: Pass, elements: Tensor) -> None:
        """Takes note of the elements of a draw."""


@dataclass(frozen=True)
class Prior(Rule):
    """q(v | what is before v) = p(v | parents of v): the model's own conditional."""

    reads_prior: bool = True
    inside: bool = True

    def distribution(self, current: Pass, batch_shape: torch.Size, prior: Any) -> TorchDistribution:
        return prior

    def log_prob(self, current: Pass, value: Tensor, site: Mapping[str, Any]) -> Tensor:
        return _masked(site["fn"].log_prob(value), site["mask"])


@dataclass(frozen=True)
class Exact(Rule):
    """q(v | rest) = N(m + g / h, 1 / h): g and h are slope and curvature of the log density at m; see `forms`."""

    def distribution(
        self, current: Pass, batch_shape: torch.Size, prior: Distribution | None
    ) -> TorchDistribution:
        assert self.group is not None
        fn = current.derive(self.group).conditional(self.name, current.values)
        target, batch = _common(fn.batch_shape, batch_shape)
        return dist.Normal(fn.loc.reshape(batch), fn.scale.reshape(batch), validate_args=False).expand(target)

    def log_prob(self, current: Pass, value: Tensor, site: Mapping[str, Any]) -> Tensor:
        assert self.group is not None
        fn = current.derive(self.group).conditional(self.name, current.values)
        return _masked(fn.log_prob(value), site["mask"])


@dataclass(frozen=True)
class Learned(Rule):
    """q(v | what v reads) = family(parameters): networks give the parameters, relative to the prior where it is known.

    Attributes:
        factor: the latent's place in the networks.
        family: of its distribution.
        anchored: whether its parameters are relative to the model's own conditional.
        expert: whether its distribution is that conditional times evidence of its own.
        block: plates flattened into its elements -> (batch dim, size).
    """

    factor: Factor = None  # type: ignore[assignment]
    family: Family = None  # type: ignore[assignment]
    anchored: bool = False
    expert: bool = False
    block: Mapping[str, tuple[int, int]] = None  # type: ignore[assignment]

    @property
    def dims(self) -> list[int]:
        """Batch dims of the block's plates."""
        return [dim for dim, _ in self.block.values()]

    @property
    def sizes(self) -> list[int]:
        """Sizes of the block's plates."""
        return [size for _, size in self.block.values()]

    def distribution(
        self, current: Pass, batch_shape: torch.Size, prior: Distribution | None
    ) -> TorchDistribution:
        factor, event_shape = self.factor, self.family.event_shape
        if prior is not None and prior.event_shape != event_shape:
            raise ValueError(changed_event_shape(self.name, event_shape, prior.event_shape))
        for plate, (dim, size) in self.block.items():
            if batch_shape[dim] != size:
                raise ValueError(fixed_size(self.name, plate, size, batch_shape[dim]))
        family = current.family(self.name, prior)
        anchor = current.anchors[self.name] = self._anchor(family, prior)
        if factor.sequential:
            return self._sequential(current, family, batch_shape, anchor)
        params = self._params(current)
        target, batch = _common(params.shape[:-2], batch_shape)
        if params.shape[:-2] != target:
            params = params.reshape(batch + params.shape[-2:]).expand(target + params.shape[-2:])
        return self._at_once(current, family, params, anchor)

    def log_prob(self, current: Pass, value: Tensor, site: Mapping[str, Any]) -> Tensor | None:
        family, mask = current.family(self.name), site["mask"]
        anchor, params = self._anchor(family, site["fn"]), self._params(current)
        if family.kind is None or mask is not None or family.varies or self.factor.coupled:
            return _masked(self._at_once(current, family, params, anchor).log_prob(value), mask)
        if current.validate and not family.layout.support.check(value).all():
            raise ValueError(f"Expected values of '{self.name}' in {family.layout.support}; some are outside of it.")
        if anchor is not None and self.expert:
            params = expert(params, family.num_params)
        elements = family.layout.elements(value)
        term = _Term(family, params, anchor, elements)
        current.terms.setdefault((family.kind, *term.shapes()), []).append(term)
        log_abs_det = family.layout.log_abs_det(elements, value)
        return None if log_abs_det is None else -log_abs_det

    def target(self, current: Pass, value: Tensor, prior: Distribution) -> Tensor:
        family = current.family(self.name)
        anchor = self._anchor(family, prior) if family.locations else None
        location, scale = (0.0, 1.0) if anchor is None else anchor.unbind(-1)
        return (family.layout.elements(value) - location) / scale

    def note(self, current: Pass, elements: Tensor) -> None:
        if self.name in current.anchors:
            anchor = None if self.name in current.freedom else current.anchors[self.name]
            current.state.note(self.name, elements, anchor, self.dims)

    def _anchor(self, family: Family, prior: Distribution | None) -> Tensor | None:
        return family.anchor(prior) if self.anchored and prior is not None else None

    def _params(self, current: Pass) -> Tensor:
        """Returns the parameters, instance by instance where they come for all instances of a block at once."""
        params = current.state.params(self.name)
        return unfold(params, self.dims, self.sizes) if self.block else params

    def _at_once(
        self, current: Pass, family: Family, params: Tensor, anchor: Tensor | None
    ) -> TorchDistribution:
        """Returns the distribution of a factor that is drawn in one go."""
        if anchor is not None and self.expert:
            current.freedom[self.name] = _freedom(params, anchor)
            params = expert(params, family.num_params)
        if not self.factor.coupled:
            return family.distribution(params, anchor)
        coupling = current.state.couplings[self.name]
        return family.coupled_distribution(params, anchor, coupling, self.dims, self.sizes)

    def _sequential(
        self, current: Pass, family: Family, batch_shape: torch.Size, anchor: Tensor | None
    ) -> TorchDistribution:
        """Returns the distribution of a factor that is drawn element by element."""
        conditionals = current.state.conditionals(self.name, len(batch_shape))
        target = torch.broadcast_shapes(conditionals.first()[0].shape[:-1], batch_shape)
        if not self.block:
            return family.autoregressive_distribution(conditionals, anchor, target)
        return family.joint_distribution(conditionals, anchor, target, self.dims, self.sizes)


class _Term(NamedTuple):
    """What one latent's density is made of: its family, parameters, anchor, and elements in unconstrained space."""

    family: Family
    params: Tensor
    anchor: Tensor | None
    elements: Tensor

    def shapes(self) -> tuple:
        """Returns what has to be the same in sites whose elements are taken together."""
        anchor = None if self.anchor is None else self.anchor.shape[:-2]
        return self.params.shape[:-2], self.params.shape[-1], anchor, self.elements.shape[:-1]


def fixed_size(name: str, plate: str, size: int, now: int) -> str:
    """Returns the message for a plate whose instances form one block and that has changed its size."""
    return (
        f"Expected plate '{plate}' of size {size}, as at the guide's first call; got {now}. The instances of '{name}' "
        "depend on each other given the data, so the guide holds them in one block of fixed size: make a new guide."
    )


def _freedom(params: Tensor, anchor: Tensor) -> Tensor:
    """Returns by how much the location of prior times evidence follows that of the evidence, ``(*batch, E)``."""
    precision = relative_scale(params[..., 1].detach()).square().reciprocal()
    return precision / (precision + anchor[..., 1].detach().square().reciprocal())


def _joined(dim: int, tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim)


def _masked(log_prob: Tensor, mask: Any) -> Tensor:
    return log_prob if mask is None else torch.where(torch.as_tensor(mask), log_prob, torch.zeros_like(log_prob))


def _common(shape: torch.Size, target: torch.Size) -> tuple[torch.Size, torch.Size]:
    """Returns ``shape`` broadcast with ``target``, and ``shape`` without leading ones that ``target`` lacks."""
    extra = 0
    while len(shape) - extra > len(target) and shape[extra] == 1:
        extra += 1
    shape = shape[extra:]
    return (target if shape == target else torch.broadcast_shapes(shape, target)), shape
