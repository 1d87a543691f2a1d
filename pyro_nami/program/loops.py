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
from pyro.distributions.torch_distribution import ExpandedDistribution, MaskedDistribution
from torch import Tensor
from torch.distributions import Independent

from pyro_nami.factors.completed import constraints_of_parameters
from pyro_nami.factors.wrappers import base_of, innermost, layers
from pyro_nami.program.distribution_parts import arguments_of
from pyro_nami.program.masks import is_masked
from pyro_nami.program.runner import Runner, changed_event_shape
from pyro_nami.program.series_sites import SeriesSites
from pyro_nami.program.site_values import num_values

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
        base: Any = innermost(fn)
        like = base.enumerate_support(expand=False) if self.values else base.loc
        return like.new_zeros((*fn.batch_shape, self.size))

    def split(self, value: Tensor) -> tuple[Tensor, ...]:
        """Returns the values of the sites, given the value of the whole."""
        if self.is_observed:
            return value.unbind(-1 - len(self.events[0]))
        if not any(self.events):
            return value.unbind(-1)
        parts = value.split([event.numel() for event in self.events], -1)
        return tuple(
            part.reshape(part.shape[:-1] + event) for part, event in zip(parts, self.events)
        )

    def joined(self, values: Sequence[Tensor]) -> Tensor:
        """Returns the value of the whole, given those of the sites."""
        if self.is_observed:
            return _stacked(values, len(self.events[0]))
        if not any(self.events):
            return _stacked(values, 0)
        parts = [
            value.reshape(value.shape[: value.dim() - len(event)] + (-1,))
            for value, event in zip(values, self.events)
        ]
        return _concatenated(parts)

    def message(self, sites: Sequence[Any]) -> dict[str, Any]:
        """Returns the message of the whole, given those of the sites in a run.

        Raises:
            ValueError: a site is not as it was when the loop was read: a Normal latent, say, without a mask.
        """
        first, events = sites[0], self.events
        for site in sites:
            self._check(site, first)
        fns = [site["fn"] for site in sites]
        if self.is_observed or self.values:
            fn = _stacked_distributions(fns, 0)
            if any(site["mask"] is not None for site in sites):
                masks = [torch.as_tensor(True if s["mask"] is None else s["mask"]) for s in sites]
                fn = fn.mask(_stacked(masks, 0))
            fn = fn.to_event(1)
        else:
            bases: list[Any] = list(map(innermost, fns))
            mask = self.mask(sites)
            if any(events):
                loc, scale = (
                    _concatenated([_flat(getattr(f, key), e) for f, e in zip(bases, events)])
                    for key in ("loc", "scale")
                )
            else:
                loc = _stacked([base.loc for base in bases], 0)
                scale = _stacked([base.scale for base in bases], 0)
            fn = dist.Normal(loc, scale, validate_args=False)
            fn = (fn if mask is None else fn.mask(mask)).to_event(1)
        values = [site["value"] for site in sites]
        value = self.joined(values)
        found = {**first, "name": self.name, "fn": fn, "value": value, "mask": None, "part": self}
        found["is_observed"] = all(site["is_observed"] for site in sites)
        return found

    def counted(self, sites: Sequence[Any]) -> Tensor | None:
        """Returns what the model counts in a run: of states `mask`, of data which steps, ``(*plates, steps)``.

        A step counts if any of its elements does.
        """
        if not self.is_observed:
            return self.mask(sites)
        masks = [element_mask(site) for site in sites]
        if all(mask is None for mask in masks):
            return None
        event_dim = len(self.events[0])
        there = [torch.as_tensor(True if mask is None else mask) for mask in masks]
        steps = [
            mask.flatten(-event_dim).any(-1) if event_dim and mask.dim() else mask for mask in there
        ]
        return _stacked(steps, 0)

    def mask(self, sites: Sequence[Any]) -> Tensor | None:
        """Returns which elements of states the model counts in a run, ``(*plates, elements)``; None: all."""
        masks = [element_mask(site) for site in sites]
        if all(mask is None for mask in masks):
            return None
        parts = []
        for mask, site, event in zip(masks, sites, self.events):
            shape = site["fn"].batch_shape + event
            whole = torch.as_tensor(True if mask is None else mask).expand(shape)
            parts.append(_flat(whole, event))
        return _concatenated(parts)

    def _check(self, site: Any, first: Any) -> None:
        """Raises where a state is observed, masked, or of another kind, or where a site is scaled by itself."""
        is_like = site["scale"] is first["scale"] or bool(
            torch.as_tensor(site["scale"] == first["scale"]).all()
        )
        event = dict(self.families).get(family_of(site["name"]))
        if event is not None and event != site["fn"].event_shape:
            raise ValueError(changed_event_shape(site["name"], event, site["fn"].event_shape))
        if self.is_observed and not is_like:
            raise ValueError(
                f"Expected '{site['name']}' scaled as '{first['name']}', as at the first call of the guide, which read "
                "it as one loop. Make a new guide for another loop."
            )
        if self.is_observed:
            return
        base = innermost(site["fn"])
        kind = num_values(site["fn"]) == self.values if self.values else type(base) is dist.Normal
        is_cut = is_masked(site) and not self.families
        if not kind or is_cut or not is_like or site["is_observed"]:
            of = f"{self.values} values" if self.values else "a Normal distribution"
            whole = "" if self.families else ", without a mask,"
            raise ValueError(
                f"Expected latent '{site['name']}' of {of}{whole} and scaled as '{first['name']}', as at the "
                "first call of the guide, which read it as one loop. Make a new guide for another loop."
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

    parts: tuple[LoopSites | SeriesSites, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.parts)

    @property
    def states(self) -> dict[str, LoopSites | SeriesSites]:
        """Name -> states of a loop, as one latent."""
        return {held.name: held for held in self.parts if not held.is_observed}

    @property
    def rows(self) -> dict[str, int]:
        """Observed site -> the dim along which its rows read the states of a series, one step after another."""
        series = [held for held in self.parts if isinstance(held, SeriesSites)]
        return {name: dim for held in series for name, dim in held.rows}

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

    def wholes_of(self, names: Iterable[str]) -> set[str]:
        """Returns names with each site of a loop as the whole."""
        of = {site: held.name for held in self.parts for site in held.sites}
        return {of.get(name, name) for name in names}

    def split(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns values by site, given those of loops as a whole; functions of a prior become those of the sites'."""
        found = dict(values)
        for held in self.parts:
            if held.name in found:
                value = found.pop(held.name)
                parts: Sequence[Any] = (
                    _Lazy(held, value).parts() if callable(value) else held.split(value)
                )
                found.update(zip(held.sites, parts))
        return found

    def joined(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns values with loops as a whole, where all of their sites have one."""
        found = dict(values)
        for held in self.parts:
            if found.keys() >= set(held.sites):
                found[held.name] = held.joined([found.pop(site) for site in held.sites])
        return found

    def messages(self, sites: Mapping[str, Any], is_whole: bool = True) -> dict[str, Any]:
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
        for name, dim in self.rows.items():
            if name in found:
                found[name] = {**found[name], "along": dim}
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


class _Lazy:
    """Values of the sites of a loop, where a function of a prior makes that of the whole: once, at the first site."""

    def __init__(self, held: LoopSites | SeriesSites, make: Callable[[Any], Tensor]) -> None:
        self._held, self._make = held, make
        self._values: Sequence[Tensor] | None = None

    def parts(self) -> list[Callable[[Any], Tensor]]:
        return [partial(self._part, i) for i in range(len(self._held.sites))]

    def _part(self, i: int, fn: Any) -> Tensor:
        if self._values is None:
            # of the prior only the shape is known yet
            whole = dist.Delta(self._held.zeros(fn)).to_event(1)
            self._values = self._held.split(self._make(whole))
        return self._values[i]


def element_mask(site: Any) -> Tensor | None:
    """Returns which elements a run counts of a site, ``(*plates, *event)``, each dim of 1 or whole; None: all."""
    fn, mask = site["fn"], site["mask"]
    found = None
    if mask is not None and mask is not True:
        found = torch.as_tensor(mask)[(...,) + (None,) * fn.event_dim]
    for layer in layers(fn):
        if isinstance(layer, MaskedDistribution):
            own = torch.as_tensor(layer._mask)[(...,) + (None,) * layer.event_dim]
            found = own if found is None else found & own
    return found


def _flat(part: Tensor, event: torch.Size) -> Tensor:
    """Returns a Normal's parameter with its event as a vector."""
    if not event:
        return part.unsqueeze(-1)
    shape = part.shape[: max(0, part.dim() - len(event))]
    return part.expand(shape + event).reshape((*shape, -1))


def _concatenated(parts: Sequence[Tensor]) -> Tensor:
    """Returns vectors as one, each repeated along the batch dims of the others."""
    batches = {part.shape[:-1] for part in parts}
    if len(batches) > 1:
        batch = torch.broadcast_shapes(*batches)
        parts = [part.expand(batch + part.shape[-1:]) for part in parts]
    return torch.cat(list(parts), -1)


def _stacked(parts: Sequence[Tensor], right: int) -> Tensor:
    """Returns tensors as one, with a dim to the left of some dims on the right."""
    shapes = {part.shape for part in parts}
    if len(shapes) > 1:
        shape = torch.broadcast_shapes(*shapes)
        parts = [part.expand(shape) for part in parts]
    return torch.stack(list(parts), -1 - right)


def _stacked_distributions(fns: Sequence[Any], right: int) -> Any:
    """Returns distributions of one type as one, with a batch dim to the left of some on the right.

    Raises:
        NotImplementedError: one of them is of another type, or does not keep what it was made with.
    """
    first = fns[0]
    if any(type(fn) is not type(first) for fn in fns):
        raise NotImplementedError
    base = base_of(first)
    if isinstance(first, Independent):
        dims = first.reinterpreted_batch_ndims
        return _stacked_distributions([base_of(fn) for fn in fns], right + dims).to_event(dims)
    if isinstance(first, MaskedDistribution):
        masks = [torch.as_tensor(fn._mask) for fn in fns]
        return _stacked_distributions([base_of(fn) for fn in fns], right).mask(
            _stacked(masks, right)
        )
    if isinstance(first, ExpandedDistribution) or base is not None:
        raise NotImplementedError
    options: dict[str, Any] = {}
    constraints = constraints_of_parameters(first)
    for name, value in arguments_of(first).items():
        if isinstance(value, Tensor):
            own = right + (constraints[name].event_dim if name in constraints else 0)
            each = [vars(fn)[name] if name in vars(fn) else getattr(fn, name) for fn in fns]
            idle = max(own, *(part.dim() for part in each))
            if any(part.dim() < idle for part in each):
                each = [part.reshape((1,) * (idle - part.dim()) + part.shape) for part in each]
            options[name] = _stacked(each, own)
        elif any(getattr(fn, name, value) != value for fn in fns):
            raise NotImplementedError
        else:
            options[name] = value
    return type(first)(**options, validate_args=False)
