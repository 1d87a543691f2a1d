"""One pass over a guide's latents: each one's distribution, given what is known so far.

Where sampling order is program order, the guide draws inside a run of the model (`pyro_nami.guide.interleaved`).
Otherwise latents are drawn outside of it first (`draw_detached`), and a run of the model follows only where some of
them are drawn from the model's own conditional.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions import TorchDistribution
from pyro.poutine.indep_messenger import IndepMessenger
from pyro.poutine.messenger import Messenger
from pyro.poutine.runtime import _PYRO_STACK, get_plates
from pyro.poutine.util import is_validation_enabled
from torch import Tensor
from torch.distributions import Distribution

from pyro_nami.factors.distribution import SiteDistribution
from pyro_nami.factors.family import Family
from pyro_nami.factors.joint import to_instances
from pyro_nami.factors.links import relative_scale
from pyro_nami.factors.relocated import Relocated, Relocation
from pyro_nami.guide.evidence import expert
from pyro_nami.guide.groups import Factor
from pyro_nami.guide.network_state import NetworkState
from pyro_nami.guide.structure import Assembly
from pyro_nami.reading.forms import ConjugateGroup, Elimination, expanding, leading_shape
from pyro_nami.reading.runner import changed_event_shape

__all__ = ["Pass", "draw_at", "draw_detached", "fixed_size", "own_infer"]

_OF_THE_MODEL = frozenset({"enumerate", "_markov_scope", "_markov_depth"})


class Data(Protocol):
    """What a pass needs of a call; see `pyro_nami.guide.data.Call`."""

    values: dict[str, Tensor]
    given: dict[str, Tensor]
    unseen: frozenset[str]
    lacking: frozenset[str]
    new: tuple[str, ...]
    derived: frozenset[str]

    @property
    def context(self) -> Data | None: ...

    def run(self, values: Mapping[str, Any], **options: Any) -> dict[str, Any]: ...


class Pass:
    """One pass over the factors: what is known so far, and each latent's distribution given that.

    Args:
        assembly: the guide's structure.
        state: the networks' state, with everything observed known.
        call: the call's data. Latents of plate rows that it has none for are drawn from the model's own conditional.

    Attributes:
        from_model: latents that are drawn from the model's own conditional.
        values: of latents, as the model sees them; returned: as handlers outside do.
        ready: latents whose exact conditional is derived from the call's own data, with their sites in that run.
    """

    def __init__(self, assembly: Assembly, state: NetworkState, call: Data) -> None:
        self.assembly, self.state, self._call = assembly, state, call
        self.from_model = call.unseen.union(assembly.predictive, assembly.transparent, call.new)
        self.program = (*(name for name in assembly.program if name not in call.lacking), *call.new)
        self.values: dict[str, Tensor] = {}
        self.returned: dict[str, Tensor] = {}
        self.ready: dict[str, Mapping[str, Any]] = {}
        self._eliminations: dict[ConjugateGroup, Elimination] = {}
        self._freedom: dict[str, Tensor] = {}  # how much of its own location each draw of a factor takes
        self._anchors: dict[str, Tensor | None] = {}  # of the latents whose distribution was made
        self._families: dict[str, Family] = {}  # of those whose support or count varies, as they are in this pass
        self._relocation = _relocation(assembly)
        self._validate = is_validation_enabled() and not torch.jit.is_tracing()

    def outside(self, fn: TorchDistribution) -> TorchDistribution:
        """Returns a distribution as the handlers outside see it."""
        return fn if self._relocation is None else Relocated(fn, self._relocation)

    def take(self, name: str, value: Tensor, fn: TorchDistribution) -> Tensor:
        """Takes in the value that a latent got outside, by ``fn`` or by a replay; returns it as the model sees it."""
        self.returned[name] = value
        if self._relocation is not None:
            value = self._relocation.value_inside(value, len(fn.event_shape))
        elements = fn.recall(value) if isinstance(fn, SiteDistribution) else None
        if elements is not None and name in self._anchors:
            dims, _ = self._joint_plates(self.assembly.factors[name])
            self.state.note(name, elements, None if name in self._freedom else self._anchors[name], dims)
        self.know(name, value, elements, drawn=True)
        return value

    def check(self) -> None:
        """Raises where a draw has NaN; looks at all of them at once, as a device has to be waited for each time."""
        sums = [value.detach().sum() for value in self.returned.values()] if self._validate else []
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

    def know(self, name: str, value: Tensor, elements: Tensor | None = None, *, drawn: bool = False) -> None:
        """Takes in the value of a latent, and its elements where they are known from the draw."""
        self.values[name] = value
        if name not in self.assembly.families:
            return
        family = self._families.get(name, self.assembly.families[name])
        if elements is None:
            elements = family.layout.elements(value)
        features = family.element_features(elements).flatten(-2)
        self.state.add(name, features, drawn=drawn, share=self._freedom.get(name))

    def distribution(self, name: str, batch_shape: torch.Size, prior: Distribution | None) -> TorchDistribution:
        """Returns a latent's distribution given all that it reads, of a batch shape at least ``batch_shape``.

        Args:
            name: the latent.
            batch_shape: sizes of the plates around the site.
            prior: the model's distribution at the site given the values so far, if it is known.
        """
        assembly = self.assembly
        if name in assembly.conjugate:
            fn = self._eliminations[assembly.conjugate[name]].conditional(name, self.values)
            target, batch = _common(fn.batch_shape, batch_shape)
            return dist.Normal(fn.loc.reshape(batch), fn.scale.reshape(batch), validate_args=False).expand(target)
        factor, family = assembly.factors[name], assembly.families[name]
        event_shape = family.event_shape if prior is None else prior.event_shape
        if event_shape != family.event_shape:
            raise ValueError(changed_event_shape(name, family.event_shape, event_shape))
        for plate, dim, size in zip(factor.joint, *self._joint_plates(factor)):
            if batch_shape[dim] != size:
                raise ValueError(fixed_size(name, plate, size, batch_shape[dim]))
        anchor = None
        if prior is not None:
            family = self._at(name, prior)
            if name in assembly.anchored:
                anchor = family.anchor(prior)
        self._anchors[name] = anchor
        if factor.sequential:
            return self._sequential(name, factor, family, batch_shape, anchor)
        params = self._instances(factor, self.state.params(name))
        target, batch = _common(params.shape[:-2], batch_shape)
        if params.shape[:-2] != target:
            params = params.reshape(batch + params.shape[-2:]).expand(target + params.shape[-2:])
        return self._at_once(factor, family, params, anchor)

    def _at(self, name: str, prior: Distribution) -> Family:
        """Returns a latent's family at the current prior, in whose coordinates others read it from now on."""
        family = self.assembly.families[name].at(prior)
        if family.varies:
            self._families[name] = family
        return family

    def _at_once(
        self, factor: Factor, family: Family, params: Tensor, anchor: Tensor | None
    ) -> TorchDistribution:
        """Returns the distribution of a factor that is drawn in one go."""
        if anchor is not None and factor.name in self.assembly.experts:
            self._freedom[factor.name] = _freedom(params, anchor)
            params = expert(params, family.num_params)
        if not factor.coupled:
            return family.distribution(params, anchor)
        return family.coupled_distribution(
            params, anchor, self.state.couplings[factor.name], *self._joint_plates(factor)
        )

    def lacks(self, name: str) -> bool:
        """Whether a latent's exact conditional has to be derived (`derive`) before it can be drawn."""
        group = self.assembly.conjugate.get(name)
        return group is not None and name not in self.from_model and group not in self._eliminations

    def derive(self, name: str, values: Mapping[str, Tensor]) -> None:
        """Derives the exact conditional of a latent, and of the others of its group, at values of what is before it."""
        call, elimination = self._call, self.elimination(name, values)
        if name in call.derived:
            assert call.context is not None
            call = call.context
        with expanding():
            known = {key: value.clone() if value.is_inference() else value for key, value in values.items()}
            sites = call.run({**call.given, **known, **elimination.points}, until=elimination.until)
        self.solve(name, elimination, sites)

    def derives_here(self, name: str) -> bool:
        """Whether a latent's exact conditional can be derived in the run that draws what is before it.

        It cannot from other data than that run's, nor where a member's site is passed already, nor with values that no
        gradient can be taken through.
        """
        return (
            name not in self._call.derived
            and self.values.keys().isdisjoint(self.assembly.conjugate[name].members)
            and not any(value.is_inference() for value in self.values.values())
        )

    def elimination(self, name: str, values: Mapping[str, Tensor]) -> Elimination:
        """Returns the elimination of a latent's group at values of what is before it; it needs a run of the model."""
        leading = leading_shape({**self._call.values, **values}, self.assembly.event_dims, self.assembly.nesting)
        group = self.assembly.conjugate[name]
        if self._call.lacking:
            group = ConjugateGroup(*(tuple(n for n in names if n not in self._call.lacking) for names in group))
        return Elimination(group, leading, torch.is_grad_enabled())

    def solve(self, name: str, elimination: Elimination, sites: Mapping[str, Any]) -> None:
        """Takes in the sites of that run."""
        elimination.solve(sites)
        group = self.assembly.conjugate[name]
        self._eliminations[group] = elimination
        if name not in self._call.derived:
            self.ready.update({member: sites[member] for member in group.members})

    def _sequential(
        self, name: str, factor: Factor, family: Family, batch_shape: torch.Size, anchor: Tensor | None
    ) -> TorchDistribution:
        """Returns the distribution of a factor that is drawn element by element."""
        conditionals = self.state.conditionals(name, len(batch_shape))
        target = torch.broadcast_shapes(conditionals.first()[0].shape[:-1], batch_shape)
        return family.autoregressive_distribution(conditionals, anchor, target, *self._joint_plates(factor))

    def _instances(self, factor: Factor, params: Tensor) -> Tensor:
        """Returns parameters instance by instance, where they come for all instances of a joint block at once."""
        return to_instances(params, *self._joint_plates(factor), parts=1)

    def _joint_plates(self, factor: Factor) -> tuple[list[int], list[int]]:
        plates = self.assembly.dims, self.assembly.sizes
        dims, sizes = ([table[plate] for plate in factor.joint] for table in plates)
        return dims, sizes

    def log_probs(self, values: Mapping[str, Tensor], sites: Mapping[str, Any]) -> Iterator[Tensor]:
        """Yields log densities ``(*batch, *plates)`` in nats that add up to that of all latents, in one dense pass.

        Args:
            values: of the latents; those of the observed sites are known.
            sites: of a run of the model at these values, where one was needed.
        """
        assembly = self.assembly
        elements = {}
        for name in assembly.order:
            if name in values:
                family = assembly.families[name] if name not in sites else self._at(name, sites[name]["fn"])
                elements[name] = family.layout.elements(values[name])
                self.know(name, values[name], elements[name])
        together: dict[Hashable, list[_Part]] = {}
        for name, value in values.items():
            site: Any = sites.get(name) or {"fn": None, "mask": None}
            prior, mask = site["fn"], site["mask"]
            if name in self.from_model:
                yield _masked(prior.log_prob(value), mask)
                continue
            if name in assembly.conjugate:
                if self.lacks(name):
                    self.derive(name, values)
                fn = self._eliminations[assembly.conjugate[name]].conditional(name, values)
                yield _masked(fn.log_prob(value), mask)
                continue
            factor, family = assembly.factors[name], assembly.families[name]
            family = self._families.get(name, family)
            anchor = family.anchor(prior) if name in assembly.anchored else None
            params = self._instances(factor, self.state.params(name))
            if family.kind is None or mask is not None or family.varies or factor.coupled:
                yield _masked(self._at_once(factor, family, params, anchor).log_prob(value), mask)
                continue
            if self._validate and not family.layout.support.check(value).all():
                raise ValueError(f"Expected values of '{name}' in {family.layout.support}; some are outside of it.")
            if anchor is not None and name in assembly.experts:
                params = expert(params, family.num_params)
            part = _Part(family, params, anchor, elements[name])
            together.setdefault((family.kind, *part.shapes()), []).append(part)
            log_abs_det = family.layout.log_abs_det(elements[name], value)
            if log_abs_det is not None:
                yield -log_abs_det
        for parts in together.values():
            params = _joined(-2, [part.params for part in parts])
            anchors = [part.anchor for part in parts if part.anchor is not None]
            anchor = _joined(-2, anchors) if anchors else None
            free = _joined(-1, [part.elements for part in parts])
            yield parts[0].family.elements(params, anchor).log_prob(free).sum(-1)


class _Part(NamedTuple):
    """What one latent's density is made of: its family, parameters, anchor, and elements in unconstrained space."""

    family: Family
    params: Tensor
    anchor: Tensor | None
    elements: Tensor

    def shapes(self) -> tuple:
        """Returns what has to be the same in sites whose elements are taken together."""
        anchor = None if self.anchor is None else self.anchor.shape[:-2]
        return self.params.shape[:-2], self.params.shape[-1], anchor, self.elements.shape[:-1]


def _freedom(params: Tensor, anchor: Tensor) -> Tensor:
    """Returns by how much the location of prior times evidence follows that of the evidence, ``(*batch, E)``."""
    precision = relative_scale(params[..., 1].detach()).square().reciprocal()
    return precision / (precision + anchor[..., 1].detach().square().reciprocal())


def _joined(dim: int, tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim)


def _masked(log_prob: Tensor, mask: Any) -> Tensor:
    return log_prob if mask is None else torch.where(torch.as_tensor(mask), log_prob, torch.zeros_like(log_prob))


def _relocation(assembly: Assembly) -> Relocation | None:
    """Returns what lies where if the guide is called inside a plate whose dim the model needs for itself."""
    if not any(isinstance(handler, IndepMessenger) for handler in _PYRO_STACK):
        return None
    outer: list[Any] = [frame.dim for frame in get_plates() if frame.vectorized and frame.name not in assembly.dims]
    kept = -1 - max(outer, default=-1 - assembly.nesting)
    return Relocation(kept, assembly.nesting - kept) if kept < assembly.nesting else None


def fixed_size(name: str, plate: str, size: int, now: int) -> str:
    """Returns the message for a plate whose instances form one block and that has changed its size."""
    return (
        f"Expected plate '{plate}' of size {size}, as at the guide's first call; got {now}. The instances of '{name}' "
        "depend on each other given the data, so the guide holds them in one block of fixed size: make a new guide."
    )


def _common(shape: torch.Size, target: torch.Size) -> tuple[torch.Size, torch.Size]:
    """Returns ``shape`` broadcast with ``target``, and ``shape`` without leading ones that ``target`` lacks."""
    extra = 0
    while len(shape) - extra > len(target) and shape[extra] == 1:
        extra += 1
    shape = shape[extra:]
    return (target if shape == target else torch.broadcast_shapes(shape, target)), shape


def draw_detached(
    current: Pass,
    sites: Mapping[str, Mapping[str, Any]],
    prior_at: Callable[[str, Mapping[str, Tensor]], Distribution],
) -> None:
    """Draws every latent with a factor in sampling order, outside of the model.

    Args:
        current: the pass; latents that are drawn from the model's own conditional, or known, are left out.
        sites: those of a run of the model on the same data, where plates, masks and scales are taken from.
        prior_at: a site's model distribution at given values of the latents, for supports that depend on them.
    """
    assembly = current.assembly
    for name in assembly.order:
        if name not in current.from_model and name not in current.values and name in current.program:
            prior = prior_at(name, current.values) if assembly.families[name].varies else None
            draw_at(current, name, sites[name], prior)


def draw_at(current: Pass, name: str, site: Mapping[str, Any], prior: Distribution | None = None) -> None:
    """Draws a latent at its site of a run of the model that is over: in the site's plates, at its mask and scale."""
    fn = current.distribution(name, site["fn"].batch_shape, prior)
    with _At(site):
        current.take(name, pyro.sample(name, current.outside(fn)), fn)


class _At(Messenger):
    """Gives a message what handlers inside the model gave a site's."""

    def __init__(self, site: Mapping[str, Any]) -> None:
        super().__init__()
        self._site = site

    def _pyro_sample(self, msg: Any) -> None:
        msg["cond_indep_stack"] = self._site["cond_indep_stack"]
        msg["scale"], msg["mask"] = self._site["scale"], self._site["mask"]
        msg["infer"] = own_infer(self._site)


def own_infer(site: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a site's ``infer`` says to the guide: not what enumeration makes of it in the model."""
    return {key: value for key, value in site["infer"].items() if key not in _OF_THE_MODEL}
