"""`Loops`: the sites of a loop, held as one site each: `z_0`, `z_1`, ... as `z[time]`.

A model is run as it is. Outside of its runs the states of a loop are one vector, and the data of its
steps are one tensor, so that nothing there has a size that grows with the number of sites.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import compress
from typing import Any, NamedTuple

import pyro.distributions as dist
import torch
from pyro.distributions.torch_distribution import MaskedDistribution
from torch import Tensor
from torch.distributions import Independent

from pyro_nami.factors.completed import constraints_of_parameters
from pyro_nami.factors.wrappers import base_of, innermost
from pyro_nami.program.distribution_parts import arguments_of
from pyro_nami.program.masks import element_mask, is_masked
from pyro_nami.program.runner import Runner, Sites, changed_event_shape
from pyro_nami.program.series_sites import SeriesSites, StepAxis
from pyro_nami.program.site_values import first_value, num_values

__all__ = ["NO_LOOPS", "LoopSites", "Loops", "family_of", "step_of"]

_LAST_NUMBER = re.compile(r"\d+(?=\D*$)")


@lru_cache(maxsize=100_000)  # names of long loops are looked up in each call
def family_of(name: str) -> str:
    """Returns a name with its last number left out, the same for all steps of a loop; itself if it has none.

    Example:
        >>> family_of("z_12"), family_of("y_3_7b"), family_of("mu")
        ('z_#', 'y_3_#b', 'mu')
    """
    return _LAST_NUMBER.sub("#", name)


@lru_cache(maxsize=100_000)
def step_of(name: str) -> int:
    """Returns the last number in the name of a loop's site: its step."""
    found = _LAST_NUMBER.search(name)
    assert found is not None
    return int(found.group())


class LoopSites(NamedTuple):
    """Sites of a loop that are held as one.

    Attributes:
        name: of the whole.
        sites: in program order.
        events: event shape of each.
        is_observed: whether they are data; else they are states, whose elements lie one behind the other in a vector.
        width: of states, the elements of a block, such that a block depends on the ones before and after it alone,
            and each site lies in one block.
        back: how many elements before it the prior of a state reads, at most.
        span: among how many elements in a row those lie that an observed site reads.
        values: the number of values of a discrete state; 0 for Normal ones.
        reads: of each observed site, the first element of the states that it reads.
        families: of a learned loop, family of names (`family_of`) -> event shape of its sites; the sites of such a
            loop may be others in each call, and its states may be masked.
        shift: of data of a learned loop, by how much the step of the states that they read last is above their own.
    """

    name: str
    sites: tuple[str, ...]
    events: tuple[torch.Size, ...]
    is_observed: bool
    width: int = 1
    back: int = 1
    span: int = 1
    values: int = 0
    reads: tuple[int, ...] = ()
    families: tuple[tuple[str, torch.Size], ...] = ()
    shift: int = 0

    @property
    def size(self) -> int:
        """Number of elements."""
        return sum(event.numel() for event in self.events)

    def within(self, names: Collection[str]) -> LoopSites:
        """Returns those of them that are among some sites."""
        kept = [name in names for name in self.sites]
        if all(kept):
            return self
        return self._replace(
            sites=tuple(compress(self.sites, kept)),
            events=tuple(compress(self.events, kept)),
            reads=tuple(compress(self.reads, kept)),
        )

    def at(self, names: Iterable[str]) -> LoopSites:
        """Returns the loop with those of some names, in their order, that are of its families; data in that of steps.

        Raises:
            ValueError: none of them is.
        """
        events = dict(self.families)
        sites = [name for name in names if family_of(name) in events]
        if not sites:
            raise ValueError(
                f"Expected a series of at least one step; this call has no site '{self.sites[0]}', and no other one of "
                f"'{self.name}'."
            )
        if self.is_observed:
            sites.sort(key=step_of)
        if tuple(sites) == self.sites:
            return self
        return self._replace(
            sites=tuple(sites), events=tuple(events[family_of(name)] for name in sites)
        )

    def zeros(self, fn: Any) -> Tensor:
        """Returns a value of zeros for the whole, given the distribution of its first site."""
        return first_value(fn).new_zeros((*fn.batch_shape, self.size))

    def split(self, value: Tensor) -> tuple[Tensor, ...]:
        """Returns the values of the sites, given the value of the whole."""
        if self.is_observed or not any(self.events):
            return value.unbind(-1 - len(self.events[0]))
        parts = value.split([event.numel() for event in self.events], -1)
        return tuple(
            part.reshape(part.shape[:-1] + event) for part, event in zip(parts, self.events)
        )

    def joined(self, values: Sequence[Tensor]) -> Tensor:
        """Returns the value of the whole, given those of the sites."""
        if self.is_observed:
            return _stacked(values, len(self.events[0]))
        return _vector(values, self.events)

    def message(self, sites: Sequence[Any]) -> dict[str, Any]:
        """Returns the message of the whole, given those of the sites in a run.

        Raises:
            ValueError: a site is not as it was when the loop was read: a Normal latent, say, without a mask.
        """
        first = sites[0]
        for site in sites:
            self._check(site, first)
        fn = self._by_step(sites) if self.is_observed or self.values else self._normal(sites)
        value = self.joined([site["value"] for site in sites])
        is_observed = all(site["is_observed"] for site in sites)
        found = {**first, "name": self.name, "fn": fn.to_event(1), "value": value, "mask": None}
        return {**found, "is_observed": is_observed, "part": self}

    def _by_step(self, sites: Sequence[Any]) -> Any:
        """Returns the distribution of data, or of discrete states, with a batch dim of steps."""
        fn = _stacked_distributions([site["fn"] for site in sites], 0)
        masks = [site["mask"] for site in sites]
        if all(mask is None for mask in masks):
            return fn
        return fn.mask(_stacked(list(map(_mask_tensor, masks)), 0))

    def _normal(self, sites: Sequence[Any]) -> Any:
        """Returns the distribution of Normal states, with a batch dim of elements."""
        bases: list[Any] = [innermost(site["fn"]) for site in sites]
        loc = _vector([base.loc for base in bases], self.events)
        scale = _vector([base.scale for base in bases], self.events)
        fn = dist.Normal(loc, scale, validate_args=False)
        mask = self._mask(sites)
        return fn if mask is None else fn.mask(mask)

    def counted(self, sites: Sequence[Any]) -> Tensor | None:
        """Returns what the model counts in a run, None for all: elements of states, or steps of data.

        A step counts if any of its elements does. The shape is ``(*plates, elements)`` or ``(*plates, steps)``.
        """
        mask = self._mask(sites)
        if mask is None or not self.is_observed:
            return mask
        return mask.unflatten(-1, (len(sites), -1)).any(-1)

    def _mask(self, sites: Sequence[Any]) -> Tensor | None:
        """Returns which elements the model counts in a run, ``(*plates, elements)``; None: all."""
        masks = [element_mask(site) for site in sites]
        if all(mask is None for mask in masks):
            return None
        shapes = [site["fn"].shape() for site in sites]
        whole = [_mask_tensor(mask).expand(shape) for mask, shape in zip(masks, shapes)]
        return _vector(whole, self.events)

    def _check(self, site: Any, first: Any) -> None:
        """Raises where a state is observed, masked, or of another kind, or where a site is scaled by itself."""
        name, fn, scale = site["name"], site["fn"], site["scale"]
        event = dict(self.families).get(family_of(name))
        if event is not None and event != fn.event_shape:
            raise ValueError(changed_event_shape(name, event, fn.event_shape))
        is_like = scale is first["scale"] or bool(torch.as_tensor(scale == first["scale"]).all())
        expected = f"'{name}'"
        if not self.is_observed:
            kind = f"{self.values} values" if self.values else "a Normal distribution"
            whole = "" if self.families else ", without a mask,"
            expected = f"latent '{name}' of {kind}{whole} and"
            is_cut = is_masked(site) and not self.families
            is_kind = type(innermost(fn)) is dist.Normal
            if self.values:
                is_kind = num_values(fn) == self.values
            is_like = is_like and is_kind and not (is_cut or site["is_observed"])
        if not is_like:
            raise ValueError(
                f"Expected {expected} scaled as '{first['name']}', as at the first call of the guide, which read it "
                "as one loop. Make a new guide for another loop."
            )


class Loops(NamedTuple):
    """The loops of a model: their states, and each family of their data; none by default.

    Example:
        >>> import pyro
        >>> def model(y):
        ...     z = torch.zeros(())
        ...     for t in range(len(y)):
        ...         z = pyro.sample(f"z_{t}", dist.Normal(z, 1.0))
        >>> names = tuple(f"z_{t}" for t in range(3))
        >>> loops = Loops((LoopSites("z[time]", names, (torch.Size(),) * 3, False, 1),))
        >>> loops.prepare(runner := Runner({"z[time]": torch.arange(3.0)}))
        >>> sites = loops.messages(runner.run(model, (range(3),), {}))
        >>> list(sites), innermost(sites["z[time]"]["fn"]).loc
        (['z[time]'], tensor([0., 0., 1.]))
    """

    parts: tuple[Any, ...] = ()  # of `LoopSites`, or one of `SeriesSites`

    def __bool__(self) -> bool:
        return bool(self.parts)

    @property
    def states(self) -> dict[str, Any]:
        """Name -> states of a loop, as one latent."""
        return {held.name: held for held in self.parts if not held.is_observed}

    @property
    def rows(self) -> dict[str, StepAxis]:
        """Observed site whose rows read the states of a series one by one -> where they have the steps."""
        return {name: axis for held in self.series.values() for name, axis in held.rows.items()}

    @property
    def series(self) -> dict[str, SeriesSites]:
        """Name -> innovations of a series, as its states."""
        return {held.name: held for held in self.parts if isinstance(held, SeriesSites)}

    @property
    def is_learned(self) -> bool:
        """Whether networks say what the states are given the data, of loops of any length."""
        return any(held.families for held in self.parts)

    def at(self, names: Collection[str]) -> Loops:
        """Returns the loops with those sites that a run has; loops that are not learned as they are.

        Raises:
            ValueError: a run has none of the sites of a learned loop.
        """
        return Loops(tuple(held.at(names) for held in self.parts)) if self.is_learned else self

    def among(self, names: Collection[str]) -> Loops:
        """Returns the loops with those sites that are among some names; learned ones without any are left out."""
        if not self.is_learned:
            return self
        found = {family_of(name) for name in names}
        present = [h for h in self.parts if any(family in found for family, _ in h.families)]
        return Loops(tuple(held.at(names) for held in present))

    def names_of(self, names: Iterable[str]) -> list[str]:
        """Returns the sites that some names stand for."""
        whole = {held.name: held.sites for held in self.parts}
        return [site for name in names for site in whole.get(name, (name,))]

    @property
    def wholes(self) -> dict[str, str]:
        """Site of a loop -> the name of the whole that holds it."""
        return {site: held.name for held in self.parts for site in held.sites}

    def wholes_of(self, names: Iterable[str]) -> set[str]:
        """Returns names with each site of a loop as the whole."""
        of = self.wholes
        return {of.get(name, name) for name in names}

    def split(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns values by site, given those of loops as a whole; functions of a prior become those of the sites'."""
        found = dict(values)
        for held in self.parts:
            if held.name in found:
                value = found.pop(held.name)
                split: Callable = partial(_made_once, held) if callable(value) else held.split
                found.update(zip(held.sites, split(value)))
        return found

    def joined(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns values with loops as a whole, where all of their sites have one."""
        found = dict(values)
        for held in self.parts:
            if found.keys() >= set(held.sites):
                found[held.name] = held.joined([found.pop(site) for site in held.sites])
        return found

    def messages(self, sites: Sites, is_whole: bool = True) -> dict[str, Any]:
        """Returns the sites of a run with loops as one site each, in the places of their first sites.

        Args:
            sites: of the run.
            is_whole: whether the run came to its end, so that a loop may be shorter; else one that is cut is left out.
        """
        of = {site: held for held in self.parts for site in held.sites}
        found: dict[str, Any] = {}
        for name, site in sites.items():
            held = of.get(name)
            if held is None:
                found[name] = site
            elif held.name not in found and (is_whole or sites.keys() >= set(held.sites)):
                part = held.within(sites.keys())
                found[held.name] = part.message([sites[each] for each in part.sites])
        for name, axis in self.rows.items():
            if name in found:
                found[name] = {**found[name], "steps": axis}
        return found

    def prepare(self, runner: Runner) -> None:
        """Gives a runner the values, and the ends, of the sites in place of those of loops as a whole."""
        if not self:
            return
        runner.values = self.split(runner.values)
        if runner.until is not None:
            runner.until = self.names_of(runner.until)
            runner.restart()


NO_LOOPS = Loops()


def _made_once(
    held: LoopSites | SeriesSites, make: Callable[[Any], Tensor]
) -> list[Callable[[Any], Tensor]]:
    """Returns functions from a prior to the value of each site; the first call makes the value of the whole."""
    values: list[Tensor] = []

    def value_of(i: int, fn: Any) -> Tensor:
        if not values:
            # of the prior only the shape is known yet
            values.extend(held.split(make(dist.Delta(held.zeros(fn)).to_event(1))))
        return values[i]

    return [partial(value_of, i) for i in range(len(held.sites))]


def _mask_tensor(mask: Any) -> Tensor:
    return torch.as_tensor(True if mask is None else mask)


def _vector(parts: Sequence[Tensor], events: Sequence[torch.Size]) -> Tensor:
    """Returns tensors as one vector, each with its event flattened, and repeated along the batch dims of the others."""
    if not any(events):
        return _stacked(parts, 0)  # the same in half the time
    flat = [_flat(part, event) for part, event in zip(parts, events)]
    batch = torch.broadcast_shapes(*(part.shape[:-1] for part in flat))
    return torch.cat([part.expand(batch + part.shape[-1:]) for part in flat], -1)


def _flat(part: Tensor, event: torch.Size) -> Tensor:
    """Returns a tensor, or what broadcasts to it, with its event as a vector."""
    batch = part.shape[: max(0, part.dim() - len(event))]
    return part.expand(batch + event).reshape((*batch, event.numel()))


def _stacked(parts: Sequence[Tensor], right: int) -> Tensor:
    """Returns tensors as one, with a dim to the left of some dims on the right."""
    return torch.stack(torch.broadcast_tensors(*parts), -1 - right)


def _stacked_distributions(fns: Sequence[Any], right: int) -> Any:
    """Returns distributions of one type as one, with a batch dim to the left of some on the right.

    Raises:
        NotImplementedError: one of them is of another type, or does not keep what it was made with.
    """
    first = fns[0]
    if any(type(fn) is not type(first) for fn in fns):
        raise NotImplementedError
    bases = [base_of(fn) for fn in fns]
    if isinstance(first, Independent):
        dims = first.reinterpreted_batch_ndims
        return _stacked_distributions(bases, right + dims).to_event(dims)
    if isinstance(first, MaskedDistribution):
        masks = _stacked([torch.as_tensor(fn._mask) for fn in fns], right)
        return _stacked_distributions(bases, right).mask(masks)
    if bases[0] is not None:
        raise NotImplementedError
    options: dict[str, Any] = {}
    constraints = constraints_of_parameters(first)
    for name, value in arguments_of(first).items():
        each = [getattr(fn, name, value) for fn in fns]
        if isinstance(value, Tensor):
            own = right + (constraints[name].event_dim if name in constraints else 0)
            whole = [part.reshape((1,) * (own - part.dim()) + part.shape) for part in each]
            options[name] = _stacked(whole, own)
        elif any(other != value for other in each):
            raise NotImplementedError
        else:
            options[name] = value
    return type(first)(**options, validate_args=False)
