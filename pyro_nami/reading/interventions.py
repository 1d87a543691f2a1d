"""Tests the parents that provenance claims: with these held and all else changed, a site must not move."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from pyro.poutine.block_messenger import BlockMessenger
from torch import Tensor

from pyro_nami.program.vectorized import unmapped
from pyro_nami.reading.changes import numbers_in, same_support
from pyro_nami.reading.probe import ROUNDS, Place, Probe, Run
from pyro_nami.reading.provenance import ProvenanceTracker
from pyro_nami.reading.untested_pairs import Untested

__all__ = ["Dependencies", "claim", "intervene", "is_blocked"]


@dataclass
class Dependencies:
    """What sites read: as provenance claims it, or as interventions have corrected it.

    Attributes:
        parents: site -> the earlier sites whose values reach its log density, mask, data or support.
        support: site -> the latents among them that its support depends on.
        suspects: site -> the earlier sites whose values had left torch for Python before it, or in its density.
        escaped: all sites whose values did.
        computed: the observed sites whose data are computed from latents, as in ``obs=y - z``.
        hidden: the sites that differ between runs at equal values of all sites.
        checked: the sites that were tested for all that they could read.
        lost: pairs (parent, site) that provenance did not claim.
        failed: a site that was not reached at other values, and why.
    """

    parents: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    support: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    suspects: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    escaped: frozenset[str] = frozenset()
    computed: set[str] = field(default_factory=set)
    hidden: set[str] = field(default_factory=set)
    checked: set[str] = field(default_factory=set)
    lost: list[tuple[str, str]] = field(default_factory=list)
    failed: tuple[str, Exception] | None = None


def claim(probe: Probe) -> Dependencies:
    """What provenance claims: follows the values of all sites through one more run at base values."""
    tracker = ProvenanceTracker()
    for name in probe.order:
        data = probe.base[name]
        # the model may read its data directly
        if name not in probe.latent and isinstance(data, Tensor):
            tracker.tag(data, tracker.provenance(data) | {name})
    found = Dependencies()

    def note(msg: Any) -> None:
        """Notes what the site reads, and makes its own name the provenance of its value."""
        name, fn, value = msg["name"], msg["fn"], msg["value"]
        earlier = set(probe.order[: probe.rank[name]])
        escaped = tracker.escaped
        # other sites may observe the same data; that alone is no dependence
        origin = tracker.provenance(value) - tracker.provenance(probe.base[name])
        if isinstance(value, Tensor):
            msg["value"] = value = value.clone()
            tracker.tag(value, {name})
        try:
            density: Any = fn.log_prob(value)
        # from a transform that knows the inverse of its own draws only
        except (NotImplementedError, KeyError):
            density = numbers_in(fn)
        support = tracker.provenance(numbers_in(fn.support))
        reads = origin | support | tracker.provenance(density, msg["mask"], msg["scale"])
        found.parents[name] = earlier & reads
        found.support[name] = earlier & support & probe.latent
        found.suspects[name] = earlier & tracker.escaped
        if not origin.isdisjoint(probe.latent):
            found.computed.add(name)
        tracker.escaped = escaped  # what log_prob takes out of torch concerns this site only

    with tracker:
        run = probe.run({}, note=note)
    found.hidden = _hidden(probe, run)
    found.escaped = tracker.escaped & set(probe.order)
    return found


def intervene(probe: Probe, found: Dependencies) -> Dependencies:
    """Corrects what provenance claims, within the budget of runs; takes the safe side where no check was possible.

    Example:
        >>> import pyro, pyro.distributions as dist
        >>> from pyro_nami.program.program import Program
        >>> def model():
        ...     z = pyro.sample("z", dist.Normal(0.0, 1.0)).item()  # leaves torch
        ...     pyro.sample("x", dist.Normal(z, 1.0), obs=torch.tensor(1.0))
        >>> probe = Probe(Program(model, (), {}), None, (), budget=50)
        >>> claim(probe).parents["x"], intervene(probe, claim(probe)).parents["x"]
        (set(), {'z'})
    """
    if probe.budget > 0:
        _Interventions(probe, found).check()
    for rank, name in enumerate(probe.order):
        earlier = probe.order[:rank]
        if name in found.hidden:
            coupled = found.hidden.intersection(earlier)
            found.parents[name].update(probe.latent.intersection(earlier), coupled)
            found.parents[name].update(*(found.parents[other] for other in coupled))
        elif name not in found.checked:
            found.parents[name] |= found.suspects[name]
    return found


def is_blocked(model: Any) -> bool:
    """Whether a model hides sites on purpose: it is wrapped in ``poutine.block``, whatever else is around that."""
    model = unmapped(model)
    if isinstance(model, partial):
        return any(isinstance(part, BlockMessenger) or is_blocked(part) for part in model.args)
    return False


def _hidden(probe: Probe, run: Run) -> set[str]:
    """The sites that differ between a run at base values and the base run."""
    if run.error is not None:
        raise run.error
    return {name for name in probe.order if run.differs(probe.first, name)}


class _Interventions:
    """Runs of a model that test dependencies, and correct them."""

    def __init__(self, probe: Probe, found: Dependencies) -> None:
        self.probe = probe
        self.found = found

    def check(self) -> None:
        """Spends the budget on the three questions that runs of the model can answer."""
        probe = self.probe
        # Hidden sites, discrete ones often, draw the same value now and then.
        for _ in range(ROUNDS if is_blocked(probe.program.model) else 2):
            self.found.hidden |= _hidden(probe, probe.run({}))
        probe.runs = 0
        self._redraw(probe.movable, probe.first)  # the same sites?
        for plate in probe.plates:
            self._check_plate(plate)
        self._check_edges()

    def _redraw(self, names: Collection[str], origin: Run) -> Run:
        """Repeats a run with other values at some sites, and others again if the model fails at these."""
        for _ in range(self.probe.tries):
            run = self.probe.redraw(names, origin)
            if run.error is None:
                break
        return run

    def _check_plate(self, plate: str) -> None:
        """Changes half of the instances of a plate, the other half, and one: the rest must not move.

        Of binary instances changes of a half may cancel in what is read of all, their sum say; that of one does not.
        """
        probe = self.probe
        size = self.probe.sizes[plate]
        inside = [name for name in probe.order if plate in probe.plates_of[name]]
        sites = [name for name in inside if name not in self.found.hidden]
        if size < 2 or len(sites) < 2:
            return
        place = Place(self.probe.plates[plate].dim, torch.arange(size, device="cpu"))
        order = torch.randperm(size, device="cpu")
        for changed in (order < size // 2, order >= size // 2, order == 0):
            if probe.spent:
                return
            run = probe.redraw_rows(probe.first, dict.fromkeys(inside, place), changed)
            for name in sites:
                strayed = partial(self._strayed, name=name, place=place, changed=changed)
                instances = strayed(run)
                if instances and is_blocked(probe.program.model):
                    self.found.hidden.add(name)
                elif instances:
                    latents = [u for u in inside if u in probe.latent]
                    culprit = self._pivot(latents, probe.first, run, strayed) or latents[0]
                    raise ValueError(
                        f"Expected independent instances of site '{name}', declared independent in plate '{plate}'; "
                        f"got instance {instances[0]}, which reads other instances of '{culprit}'. Declare this "
                        "dimension with `.to_event()` in place of the plate."
                    )

    def _strayed(self, run: Run, name: str, place: Place, changed: Tensor) -> list[int]:
        """Returns the instances of a site that moved, though they were not changed; none where its shape differs."""
        first, site = self.probe.first, run.sites.get(name)
        if site is None or site["fn"].batch_shape != first.sites[name]["fn"].batch_shape:
            return []
        return run.strayed(first, name, place, changed).nonzero().flatten().tolist()

    def _check_edges(self) -> None:
        """Changes what sites are not known to read: they must not move, or a parent was lost.

        Once from the base run; where values left torch, so that a branch may hide a dependence, then from other values
        of everything, too, and changing some of the candidates only.
        """
        probe, order = self.probe, self.probe.order
        # each run may take the same branch of an `if` behind a value that left torch, so more of them
        for number in range(2 * ROUNDS if any(self.found.suspects.values()) else 1):
            untested = self._untested(first=number == 0)
            while untested.sites.any() and not probe.spent:
                origin, changed = self._origin(number), untested.plan()
                names = [name for name, change in zip(order, changed) if change]
                if number % 2:
                    names = random.sample(names, random.randint(1, len(names)))
                sites = [order[site] for site in untested.test(changed)]
                run = self._redraw(names, origin)
                for name in sites:
                    if self._repair(name, origin, run):
                        untested.hold(probe.rank[name], self._held(name))
            if number == 0:
                self.found.checked = {
                    name for name, waits in zip(order, untested.sites) if not waits
                } - self.found.hidden
            if untested.sites.any():
                return

    def _origin(self, number: int) -> Run:
        """The base run; then runs with other values at about half of the latents."""
        if number == 0:
            return self.probe.first
        movable = [u for u in self.probe.order if u in self.probe.movable]
        return self._redraw([u for u in movable if random.random() < 0.5], self.probe.first)

    def _untested(self, first: bool) -> Untested:
        """What is to be tested, by rank: at first all sites, then those that values which left torch may reach."""
        count = len(self.probe.order)
        held = np.array([self._held(name) for name in self.probe.order], dtype=bool)
        worth = np.zeros((count, count), dtype=np.int64)
        for rank, name in enumerate(self.probe.order):
            suspect = bool(self.found.suspects[name])
            if name not in self.found.hidden and (first or suspect):
                worth[rank, :rank] = 1 + suspect * count  # goes first
        return Untested(held.reshape(count, count), worth)

    def _held(self, name: str) -> list[bool]:
        """Whether each site has to be held in a run that tests ``name``: what it reads, and later arguments."""
        probe = self.probe
        later = probe.arguments.intersection(probe.order[probe.rank[name] :])
        free = probe.changeable - self.found.parents[name] - later
        return [u not in free for u in probe.order]

    def _candidates(self, name: str) -> list[str]:
        """The sites that ``name`` could read but is not known to."""
        earlier = self.probe.order[: self.probe.rank[name]]
        return [u for u, held in zip(earlier, self._held(name)) if not held]

    def _repair(self, name: str, origin: Run, run: Run) -> bool:
        """Adds the parents that were lost, one bisection each, until nothing else moves it; whether any were."""
        before = len(self.found.parents[name])
        if name not in origin.sites:
            return False
        if run.error is not None and name not in run.sites:
            self.found.failed = self.found.failed or (name, run.error)
        while run.differs(origin, name):
            candidates = self._candidates(name)
            moves = partial(Run.differs, origin=origin, name=name)
            culprit = self._pivot(candidates, origin, run, moves)
            found = candidates if culprit is None else [culprit]
            self.found.lost += [(parent, name) for parent in found]
            self.found.parents[name].update(found)
            if name in run.sites and not same_support(
                origin.sites[name]["fn"], run.sites[name]["fn"]
            ):
                self.found.support[name] |= self.probe.latent.intersection(found)
            if len(found) == len(candidates):
                break
            run = self._redraw(self._candidates(name), origin)
        return len(self.found.parents[name]) > before

    def _pivot(
        self, candidates: list[str], origin: Run, run: Run, changed: Callable[[Run], Any]
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
            values = {u: run.values[u] for u in candidates[:middle] if u in run.values}
            between = self.probe.run({**origin.values, **values})
            low, high = (low, middle) if changed(between) else (middle, high)
        return candidates[low]
