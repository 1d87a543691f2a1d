"""Tests the parents that provenance claims: with these held and all else changed, a site must not move."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from pyro.poutine.block_messenger import BlockMessenger
from torch import Tensor

from pyro_nami.program.vectorized import unmapped
from pyro_nami.reading.group_testing import Untested
from pyro_nami.reading.probe import Place, Probe, Run
from pyro_nami.reading.provenance import ProvenanceTracker
from pyro_nami.reading.site_records import any_along, equal, same

__all__ = ["Dependencies", "claim", "intervene", "is_blocked"]

# Draws per site downstream of a value that left torch: one draw may well take the same branch of an `if`.
_ROUNDS = 16


class Dependencies(NamedTuple):
    """What sites read: as provenance claims it, or as interventions have corrected it.

    Attributes:
        parents: site -> the earlier sites whose values reach its log density, mask, data or support.
        support: site -> the latents among them that its support depends on.
        suspects: site -> the earlier sites whose values had left torch for Python before it, or in its density.
        escaped: all sites whose values did.
        hidden: the sites that differ between runs at equal values of all sites.
        checked: the sites that were tested for all that they could read.
        lost: pairs (parent, site) that provenance did not claim.
        failed: a site that was not reached at other values, and why.
    """

    parents: Mapping[str, Set[str]]
    support: Mapping[str, Set[str]]
    suspects: Mapping[str, Set[str]]
    escaped: frozenset[str]
    hidden: Set[str]
    checked: Set[str] = frozenset()
    lost: Sequence[tuple[str, str]] = ()
    failed: tuple[str, Exception] | None = None


def claim(probe: Probe) -> Dependencies:
    """What provenance claims: follows the values of all sites through one more run at base values."""
    tracker = ProvenanceTracker()
    for name in probe.order:
        data = probe.base[name]
        # the model may read its data directly
        if name not in probe.latent and isinstance(data, Tensor):
            tracker.tag(data, tracker.provenance(data) | {name})
    with tracker:
        run = probe.run({}, tracker=tracker)
    hidden, nothing = _hidden(probe, run), [frozenset[str]()] * 3
    earlier = {name: frozenset(probe.order[:rank]) for name, rank in probe.rank.items()}
    reads = {
        name: [names & earlier[name] for names in run.reads.get(name, nothing)]
        for name in probe.order
    }
    return Dependencies(
        {name: density | support for name, (density, support, _) in reads.items()},
        {name: support & probe.latent for name, (_, support, _) in reads.items()},
        {name: escaped for name, (_, _, escaped) in reads.items()},
        tracker.escaped & set(probe.order),
        hidden,
    )


def intervene(probe: Probe, claimed: Dependencies) -> Dependencies:
    """Corrects what provenance claims, within the budget of runs; takes the safe side where no check was possible.

    Example:
        >>> import pyro, pyro.distributions as dist
        >>> def model():
        ...     z = pyro.sample("z", dist.Normal(0.0, 1.0)).item()  # leaves torch
        ...     pyro.sample("x", dist.Normal(z, 1.0), obs=torch.tensor(1.0))
        >>> probe = Probe(model, (), {}, None, (), budget=50)
        >>> claim(probe).parents["x"], intervene(probe, claim(probe)).parents["x"]
        (frozenset(), {'z'})
    """
    work = _Interventions(probe, claimed)
    if probe.budget > 0:
        work.check()
    work.settle()
    return Dependencies(
        work.parents,
        work.support,
        claimed.suspects,
        claimed.escaped,
        work.hidden,
        work.checked,
        work.lost,
        work.failed,
    )


def is_blocked(model: Any) -> bool:
    """Whether a model hides sites on purpose: it is wrapped in ``poutine.block``, whatever else is around that."""
    model = unmapped(model)
    if isinstance(model, partial):
        return any(isinstance(part, BlockMessenger) or is_blocked(part) for part in model.args)
    return False


def _hidden(probe: Probe, run: Run) -> frozenset[str]:
    """The sites that differ between a run at base values and the base run."""
    if run.error is not None:
        raise run.error
    return frozenset(name for name in probe.order if run.differs(probe.first, name))


class _Interventions:
    """The dependencies in the making, and how they came about."""

    def __init__(self, probe: Probe, claimed: Dependencies) -> None:
        self.probe = probe
        self.suspects = claimed.suspects
        self.hidden = set(claimed.hidden)
        self.parents = {name: set(parents) for name, parents in claimed.parents.items()}
        self.support = {name: set(parents) for name, parents in claimed.support.items()}
        self.checked: set[str] = set()
        self.lost: list[tuple[str, str]] = []
        self.failed: tuple[str, Exception] | None = None  # a site that was not reached, and why

    def check(self) -> None:
        """Spends the budget on the three questions that runs of the model can answer."""
        probe = self.probe
        # Hidden sites, discrete ones often, draw the same value now and then.
        for _ in range(_ROUNDS if is_blocked(probe.model) else 2):
            self.hidden |= _hidden(probe, probe.run({}))
        probe.runs = 0
        probe.redraw(probe.changeable & probe.latent, probe.first)  # the same sites?
        for plate in probe.plates:
            self._check_plate(plate)
        self._check_edges()

    def settle(self) -> None:
        """Takes sites that could not be tested to read all that they might."""
        for rank, name in enumerate(self.probe.order):
            earlier = self.probe.order[:rank]
            if name in self.hidden:
                coupled = [other for other in earlier if other in self.hidden]
                self.parents[name].update(
                    u for u in earlier if u in self.probe.latent or u in self.hidden
                )
                self.parents[name].update(u for other in coupled for u in self.parents[other])
            elif name not in self.checked:
                self.parents[name] |= self.suspects[name]

    def _check_plate(self, plate: str) -> None:
        """Changes half of the instances of a plate, the other half, and one: the rest must not move.

        Of binary instances changes of a half may cancel in what is read of all, their sum say; that of one does not.
        """
        probe = self.probe
        size = self.probe.sizes[plate]
        dim = self.probe.plates[plate].dim
        inside = [name for name in probe.order if plate in probe.plates_of[name]]
        sites = [name for name in inside if name not in self.hidden]
        if size < 2 or len(sites) < 2:
            return
        places = dict.fromkeys(inside, Place(dim, torch.arange(size, device="cpu")))
        order = torch.randperm(size, device="cpu")
        for kept in (order < size // 2, order >= size // 2, order > 0):
            if probe.spent:
                return
            run = probe.redraw_rows(probe.first, places, ~kept)
            for name in sites:
                moved = partial(self._moved, name, dim, kept)
                instances = moved(run)
                if instances and is_blocked(probe.model):
                    self.hidden.add(name)
                elif instances:
                    latents = [u for u in inside if u in probe.latent]
                    culprit = self._pivot(name, latents, probe.first, run, moved) or latents[0]
                    raise ValueError(
                        f"Expected independent instances of site '{name}', declared independent in plate '{plate}'; "
                        f"got instance {instances[0]}, which reads other instances of '{culprit}'. Declare this "
                        "dimension with `.to_event()` in place of the plate."
                    )

    def _moved(self, name: str, dim: int, kept: Tensor, run: Run) -> list[int]:
        """Which of the ``kept`` instances along ``dim`` have another log density."""
        before = self.probe.first.records[name].log_prob
        after = run.records[name].log_prob if name in run.records else None
        if before is None or after is None or before.shape != after.shape or before.dim() < -dim:
            return []
        moved = any_along(~equal(before, after), dim).cpu()
        return (moved & kept).nonzero().flatten().tolist() if len(moved) == len(kept) else []

    def _check_edges(self) -> None:
        """Changes what sites are not known to read: they must not move, or a parent was lost.

        Once from the base run; where values left torch, so that a branch may hide a dependence, then from other values
        of everything, too, and changing some of the candidates only.
        """
        probe, order = self.probe, self.probe.order
        for number in range(_ROUNDS if any(self.suspects.values()) else 1):
            untested = self._untested(first=number == 0)
            while untested.sites.any() and not probe.spent:
                origin, changed = self._origin(number), untested.plan()
                names = [name for name, change in zip(order, changed) if change]
                if number % 2:
                    names = random.sample(names, random.randint(1, len(names)))
                sites = [order[site] for site in untested.test(changed)]
                run = probe.redraw(names, origin, sites)
                for name in sites:
                    if self._repair(name, origin, run):
                        untested.hold(probe.rank[name], self._held(name))
            if number == 0:
                self.checked = {
                    name for name, waits in zip(order, untested.sites) if not waits
                } - self.hidden
            if untested.sites.any():
                return

    def _origin(self, number: int) -> Run:
        """The base run; then runs at random values, most with some sites changed so that rare ones occur."""
        if number == 0:
            return self.probe.first
        origin = self.probe.sample()
        if number % 4 == 1 or origin.error is not None:
            return origin
        latents = self.probe.changeable & self.probe.latent
        some = [name for name in self.probe.order if name in latents and random.random() < 0.5]
        return self.probe.redraw(some, origin)

    def _untested(self, first: bool) -> Untested:
        """What is to be tested, by rank: at first all sites, then those that values which left torch may reach."""
        count = len(self.probe.order)
        held = np.array([self._held(name) for name in self.probe.order], dtype=bool).reshape(
            count, count
        )
        worth = np.zeros(held.shape, dtype=np.int64)
        for rank, name in enumerate(self.probe.order):
            suspect = bool(self.suspects[name])
            if name not in self.hidden and (first or suspect):
                worth[rank, :rank] = 1 + suspect * count  # goes first
        return Untested(held, worth)

    def _held(self, name: str) -> list[bool]:
        """Whether each site has to be held in a run that tests ``name``: what it reads, and later arguments."""
        probe, rank = self.probe, self.probe.rank[name]
        free = probe.changeable - self.parents[name]
        return [
            u not in free or (i >= rank and u in probe.arguments) for i, u in enumerate(probe.order)
        ]

    def _candidates(self, name: str) -> list[str]:
        """The sites that ``name`` could read but is not known to."""
        return [
            u
            for u, held in zip(self.probe.order[: self.probe.rank[name]], self._held(name))
            if not held
        ]

    def _repair(self, name: str, origin: Run, run: Run) -> bool:
        """Adds the parents that were lost, one bisection each, until nothing else moves it; whether any were."""
        before = len(self.parents[name])
        if run.error is not None and name in origin.records and name not in run.records:
            self.failed = self.failed or (name, run.error)
        while name in origin.records and run.differs(origin, name):
            candidates = self._candidates(name)
            culprit = self._pivot(
                name, candidates, origin, run, partial(Run.differs, origin=origin, name=name)
            )
            found = candidates if culprit is None else [culprit]
            self.lost += [(parent, name) for parent in found]
            self.parents[name].update(found)
            if name in run.records and not same(
                origin.records[name].support, run.records[name].support
            ):
                self.support[name] |= self.probe.latent.intersection(found)
            if len(found) == len(candidates):
                break
            run = self.probe.redraw(self._candidates(name), origin, [name])
        return len(self.parents[name]) > before

    def _pivot(
        self, name: str, candidates: list[str], origin: Run, run: Run, changed: Callable[[Run], Any]
    ) -> str | None:
        """The candidate that, changed as in ``run`` on top of those before it, brings about what ``changed`` at a site.

        Between ``origin``, where none is changed, and ``run``, where all are, the outcome turns at some candidate;
        bisection finds it, also where only several together have an effect. None if the budget ends before.
        """
        low, high = 0, len(candidates)
        while high - low > 1:
            if self.probe.spent:
                return None
            middle = (low + high) // 2
            values = {u: run.chosen[u] for u in candidates[:middle] if u in run.chosen}
            between = self.probe.run({**origin.chosen, **values}, only=[name])
            low, high = (low, middle) if changed(between) else (middle, high)
        return candidates[low]
