"""Reading the Bayesian network off a Pyro model: run it, follow the values, then check by intervention.

A model is run once to draw base values, and once more at these values under a `ProvenanceTracker`, which
gives the *claimed* parents of every site: the sites whose values reached its log density, mask or support.
Values that leave torch (``.item()``, ``if``, numpy, lists) lose their provenance, so the claims are then
tested: with a site's claimed parents held and other earlier sites changed, its log density, shape and support
must not move by a bit. `group_testing` plans runs that do so for many sites at once, until every site was
tested for every other. Where one moves, bisection names the parent that was lost. A random half of the
instances of a plate is changed in the same way to see that the other half, declared independent, is. Where a site
reads a plate that it does not lie in through an index, `map_search` finds the index map, and nests its plate there.

Deterministic and Delta sites are transparent, ``pyro.factor`` is an observed site, and plates are the
vectorized ones. Change this module when Pyro gets a new kind of site, or when another property of the model
must be read off.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyro
import torch
from pyro import poutine
from pyro.poutine.block_messenger import BlockMessenger
from torch import Tensor

from pyro_nami.graph.network import BayesNet
from pyro_nami.graph.sites import Site
from pyro_nami.messages import warn
from pyro_nami.reading.group_testing import Untested
from pyro_nami.reading.index_maps.finder import MapPlan
from pyro_nami.reading.index_maps.search import search_maps
from pyro_nami.reading.isolation import untouched
from pyro_nami.reading.probe import Probe, Run, equal, redraw_part, same
from pyro_nami.reading.provenance import ProvenanceTracker

__all__ = ["Extraction", "extract", "extract_bayesnet", "is_blocked"]

# Draws per site downstream of a value that left torch: one draw may well take the same branch of an `if`.
_ROUNDS = 16


class Extraction(NamedTuple):
    """What `extract` found.

    Attributes:
        bayesnet: The network, its sites in model order.
        trace: The base run: every site with a plain, detached value.
        checked: How many sites were tested by intervention (sites with nothing to test count).
        escaped: The sites whose values left torch for Python somewhere in the model.
        hidden_randomness: The sites that differ between runs at equal values of all sites.
        index_maps: For plates (q, p), nested raggedly, the instance of p to which each instance of q belongs,
            ``(size_q,)``: as sites read it, without what follows from two of them.
        map_plans: How to find these maps in other calls, for those that the caller did not give.
    """

    bayesnet: BayesNet
    trace: poutine.Trace
    checked: int
    escaped: frozenset[str]
    hidden_randomness: frozenset[str]
    index_maps: dict[tuple[str, str], Tensor]
    map_plans: tuple[MapPlan, ...]


def extract_bayesnet(
    model: Callable, *args: Any, observed: Iterable[str] = (), checks: int = 200, **kwargs: Any
) -> BayesNet:
    """The Bayesian network of ``model(*args, **kwargs)``; see `extract`.

    Example:
        >>> import pyro, torch, pyro.distributions as dist
        >>> def model(y):
        ...     scale = pyro.sample("scale", dist.HalfNormal(1.0))
        ...     with pyro.plate("data", len(y)):
        ...         z = pyro.sample("z", dist.Normal(0.0, scale))
        ...         pyro.sample("y", dist.Normal(z, 1.0), obs=y)
        >>> net = extract_bayesnet(model, torch.zeros(5))
        >>> list(net.edges), net.latent, net.plate_sizes["data"]
        ([('scale', 'z'), ('z', 'y')], ('scale', 'z'), 5)
    """
    return extract(model, args, kwargs, observed=observed, checks=checks).bayesnet


def extract(
    model: Callable,
    args: tuple = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    observed: Iterable[str] = (),
    checks: int = 200,
    init: Callable[[dict], Tensor] | None = None,
    index_maps: Mapping[tuple[str, str], Tensor] | None = None,
) -> Extraction:
    """The Bayesian network of a model, and the run that it was read off.

    The random number generators, the parameter store and the modules that the model uses are left as they
    were, and Pyro handlers around the call see nothing. Dropout and batch normalization are in evaluation
    mode meanwhile.

    Args:
        model: A Pyro model: any callable with Pyro primitives.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        observed: Names of sites that this call samples but that inference will condition on.
        checks: The most model runs to spend on interventions. Where they do not reach, values that left torch
            are taken to reach every later site.
        init: Takes a site and returns a constrained value, for latents that cannot be sampled
            (``ImproperUniform``); by default such sites are drawn in unconstrained space.
        index_maps: By pair (latent, site), the instance of the latent that each row of the site reads, integers
            ``(rows,)``. These pairs are not tested; other maps are found by intervention, within ``checks``.

    Raises:
        TypeError: An index map is not a tensor of integers.
        ValueError: A name in ``observed`` or ``index_maps`` is not a site; an index map points outside its plate;
            sites appear or disappear with the values of others; or instances of a plate depend on each other.
        NotImplementedError: A latent site can neither be sampled nor initialized.
    """
    kwargs = dict(kwargs or {})
    quiet = untouched(model, *args, *kwargs.values())
    with quiet, poutine.block(), torch.no_grad(), pyro.validation_enabled(False):
        probe = Probe(model, args, kwargs, init)
        probe.add_observed(observed)
        network = _Network(probe, checks)
        network.claim()
        if checks > 0:
            network.check()
        checked = network.checked
        network.settle(checked)
        found = search_maps(probe, network.parents, network.hidden, checks, index_maps or {})
    network.warn()
    if not found.finished:
        warn(
            f"Not every plate that is read from another one was tested for an index map: the budget of {checks} runs "
            "is spent. Such sites are taken to read all of it. Raise `checks`, or give the maps by `index_maps`."
        )
    return Extraction(
        network.build(found.maps),
        probe.trace,
        len(checked),
        network.escaped,
        frozenset(network.hidden),
        found.maps,
        found.plans,
    )


class _Network:
    """The network under construction: claimed parents, corrected by interventions within a budget of runs."""

    def __init__(self, probe: Probe, checks: int) -> None:
        self.probe, self.budget = probe, checks
        self.parents: dict[str, set[str]] = {name: set() for name in probe.order}
        self.support: dict[str, set[str]] = {name: set() for name in probe.order}
        self.suspects: dict[str, frozenset[str]] = dict.fromkeys(probe.order, frozenset())
        self.escaped: frozenset[str] = frozenset()
        self.hidden: set[str] = set()
        self.untested: Untested | None = None
        self.lost: list[tuple[str, str]] = []
        self.failed: tuple[str, Exception] | None = None  # a site that was not reached, and why

    @property
    def checked(self) -> set[str]:
        """The sites that were tested for all that they could read."""
        waiting = [True] * len(self.probe.order) if self.untested is None else self.untested.sites
        return {name for name, waits in zip(self.probe.order, waiting) if not waits} - self.hidden

    @property
    def spent(self) -> bool:
        return self.probe.runs >= self.budget

    def claim(self) -> None:
        """Takes the parents of each site from the provenance of its log density, mask, data and support."""
        probe, tracker = self.probe, ProvenanceTracker()
        for name in probe.order:
            data = probe.base[name]
            if name not in probe.latent and isinstance(data, Tensor):  # the model may read its data directly
                tracker.tag(data, tracker.provenance(data) | {name})
        with tracker:
            run = probe.run({}, tracker=tracker)
        self.escaped = tracker.escaped & set(probe.order)
        for name, (density, support, escaped) in run.reads.items():
            self.parents[name] = {u for u in density | support if probe.rank[u] < probe.rank[name]}
            self.support[name] = self.parents[name] & support & probe.latent
            self.suspects[name] = frozenset(u for u in escaped if probe.rank[u] < probe.rank[name])
        self._find_hidden(run)

    def check(self) -> None:
        """Spends the budget on the three questions that runs of the model can answer."""
        blocked = is_blocked(self.probe.model)  # hidden sites, discrete ones often, draw the same value now and then
        for _ in range(_ROUNDS if blocked else 2):
            self._find_hidden(self.probe.run({}))
        self.probe.runs = 0
        self.probe.redraw(self.probe.changeable & self.probe.latent, self.probe.first)  # the same sites?
        for plate, frame in self.probe.plates.items():
            self._check_plate(plate, frame)
        self._check_edges()

    def settle(self, checked: Collection[str]) -> None:
        """Takes the safe side where no check was possible."""
        for name in self.probe.order:
            earlier = self.probe.earlier(name)
            if name in self.hidden:
                coupled = [other for other in earlier if other in self.hidden]
                self.parents[name].update(u for u in earlier if u in self.probe.latent or u in self.hidden)
                self.parents[name].update(u for other in coupled for u in self.parents[other])
            elif name not in checked:
                self.parents[name] |= self.suspects[name]

    def _find_hidden(self, run: Run) -> None:
        if run.error is not None:
            raise run.error
        self.hidden |= {name for name in self.probe.order if _differs(run, self.probe.first, name)}

    def _check_plate(self, plate: str, frame: Any) -> None:
        """Changes half of the instances of a plate, then the other half: the rest must not move."""
        inside = [name for name in self.probe.order if frame in self.probe.frames(name)]
        sites = [name for name in inside if name not in self.hidden]
        size = self.probe.plate_size(frame)
        if size < 2 or len(sites) < 2:
            return
        half = torch.randperm(size, device="cpu") < size // 2
        for kept in (half, ~half):
            if self.spent:
                return
            run = self.probe.run({}, partial(redraw_part, base=self.probe.base, plate=plate, kept=kept))
            for name in sites:
                moved = partial(self._moved_instance, name=name, dim=frame.dim, kept=kept)
                if moved(run) is not None and is_blocked(self.probe.model):
                    self.hidden.add(name)
                elif moved(run) is not None:
                    self._report_coupling(name, plate, run, moved)

    def _report_coupling(self, name: str, plate: str, run: Run, moved: Callable[[Run], int | None]) -> None:
        inside = [u for u in self.probe.order if plate in self.probe.plate_names(u)]
        latents = [u for u in inside if u in self.probe.latent]
        culprit = self._pivot(name, latents, self.probe.first, run, lambda run: moved(run) is not None)
        raise ValueError(
            f"Expected independent instances of site '{name}', declared independent in plate '{plate}'; got "
            f"instance {moved(run)}, which reads other instances of '{culprit or latents[0]}'. "
            "Declare this dimension with `.to_event()` in place of the plate."
        )

    def _moved_instance(self, run: Run, name: str, dim: int, kept: Tensor) -> int | None:
        """The first of the ``kept`` instances along ``dim`` whose log density changed."""
        before = self.probe.first.records[name].log_prob
        after = run.records[name].log_prob if name in run.records else None
        if before is None or after is None or before.shape != after.shape or before.dim() < -dim:
            return None
        moved = (~equal(before, after)).movedim(dim, 0).reshape(before.shape[dim], -1).any(1).cpu()
        moved = moved & kept if len(moved) == len(kept) else moved[:0]
        return int(moved.nonzero()[0]) if moved.any() else None

    def _check_edges(self) -> None:
        """Changes what sites are not known to read: they must not move, or a parent was lost.

        Once from the base run; where values left torch, so that a branch may hide a dependence, then from
        other values of everything, too, and changing some of the candidates only.
        """
        order = self.probe.order
        for number in range(_ROUNDS if any(self.suspects.values()) else 1):
            untested = self._untested(first=number == 0)
            self.untested = self.untested or untested
            while untested.sites.any():
                if self.spent:
                    return
                origin, changed = self._origin(number), untested.plan()
                names = [name for name, change in zip(order, changed) if change]
                if number % 2:
                    names = random.sample(names, random.randint(1, len(names)))
                sites = [order[site] for site in untested.test(changed)]
                run = self.probe.redraw(names, origin, sites)
                for name in sites:
                    if self._repair(name, origin, run):
                        untested.hold(self.probe.rank[name], self._held(name))

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
        held = np.array([self._held(name) for name in self.probe.order], dtype=bool).reshape(count, count)
        worth = np.zeros(held.shape, dtype=np.int64)
        for rank, name in enumerate(self.probe.order):
            suspect = bool(self.suspects[name])
            if name not in self.hidden and (first or suspect):
                worth[rank, :rank] = 1 + suspect * count  # goes first
        return Untested(held, worth)

    def _held(self, name: str) -> list[bool]:
        """Whether each site has to be held in a run that tests ``name``: what it reads, and later arguments."""
        probe, parents = self.probe, self.parents[name]
        rank = probe.rank[name]
        return [
            u in parents or u not in probe.changeable or (i >= rank and u in probe.arguments)
            for i, u in enumerate(probe.order)
        ]

    def _candidates(self, name: str) -> list[str]:
        """The sites that ``name`` could read but is not known to."""
        parents, changeable = self.parents[name], self.probe.changeable
        return [u for u in self.probe.earlier(name) if u in changeable and u not in parents]

    def _repair(self, name: str, origin: Run, run: Run) -> bool:
        """Adds the parents that were lost, one bisection each, until nothing else moves it; whether any were."""
        before = len(self.parents[name])
        if run.error is not None and name in origin.records and name not in run.records:
            self.failed = self.failed or (name, run.error)
        while name in origin.records and _differs(run, origin, name):
            candidates = self._candidates(name)
            culprit = self._pivot(name, candidates, origin, run, lambda run: _differs(run, origin, name))
            found = candidates if culprit is None else [culprit]
            self.lost += [(parent, name) for parent in found]
            self.parents[name].update(found)
            self._find_support(name, found, origin, run)
            if len(found) == len(candidates):
                break
            run = self.probe.redraw(self._candidates(name), origin, [name])
        return len(self.parents[name]) > before

    def _find_support(self, name: str, found: list[str], origin: Run, run: Run) -> None:
        """Whether parents that were just found change the support, too."""
        before = origin.records[name].support
        if name in run.records and not same(before, run.records[name].support):
            for parent in self.probe.latent.intersection(found):
                alone = self.probe.run({**origin.chosen, parent: run.values[parent]})
                if name not in alone.records or not same(before, alone.records[name].support):
                    self.support[name].add(parent)

    def _pivot(
        self, name: str, candidates: list[str], origin: Run, run: Run, changed: Callable[[Run], bool]
    ) -> str | None:
        """The candidate that, changed as in ``run`` on top of those before it, brings about what changed at a site.

        Between ``origin``, where none is changed, and ``run``, where all are, the outcome turns at some
        candidate; bisection finds it, also where only several together have an effect. None if the budget
        ends before.
        """
        low, high = 0, len(candidates)
        while high - low > 1:
            if self.spent:
                return None
            middle = (low + high) // 2
            values = {u: run.chosen[u] for u in candidates[:middle] if u in run.chosen}
            between = self.probe.run({**origin.chosen, **values}, only=[name])
            low, high = (low, middle) if changed(between) else (middle, high)
        return candidates[low]

    def build(self, index_maps: Collection[tuple[str, str]]) -> BayesNet:
        """The network as it stands, with plates nested as the keys (inner, outer) of index maps say."""
        probe, sites = self.probe, []
        nesting: dict[Any, set[str]] = {
            q: {p for inner, p in index_maps if inner == q} for q, _ in index_maps
        }
        for name in probe.order:
            plates = _closed(probe.plate_names(name), nesting)
            if name in probe.observed:
                sites.append(Site(name, plates, observed=True))
            else:
                enumerated = (probe.trace.nodes[name]["infer"] or {}).get("enumerate") == "parallel"
                support = frozenset(self.support[name])
                sites.append(Site(name, plates, support_parents=support, marginalized=enumerated))
        edges = [
            (u, name) for name in probe.order for u in sorted(self.parents[name], key=probe.rank.__getitem__)
        ]
        sizes = {
            plate: max(frame.full_size or 0, probe.plate_size(frame)) for plate, frame in probe.plates.items()
        }
        return BayesNet(sites, edges, sizes, nesting)

    def warn(self) -> None:
        """Says once what was lost and what is hidden, and how to avoid it."""
        if self.failed is not None:
            name, error = self.failed
            warn(
                f"The model fails before site '{name}' at other values of the sites before it, with "
                f"{type(error).__name__}: {error} Such sites are taken to read all that was changed. Mend the model "
                "such that it runs at draws of its prior."
            )
        if self.lost:
            parent, name = self.lost[0]
            more = f" (and {len(self.lost) - 1} more such pairs)" if len(self.lost) > 1 else ""
            warn(
                f"Site '{name}' depends on '{parent}' through something other than torch operations{more}; "
                "the edge was found by intervention. To be certain of every edge keep values in tensors: "
                "`torch.where` for `if`, tensors as indices, no `.item()`, `float()` or numpy in between."
            )
        if self.hidden and not is_blocked(self.probe.model):
            names = ", ".join(f"'{name}'" for name in self.probe.order if name in self.hidden)
            warn(
                f"Runner randomness: {names} differ between runs of the model at equal values of all sites, "
                "and are taken to depend on all latents before them. Draw all random numbers by "
                "`pyro.sample`; to hide a latent on purpose (for enumeration, say), wrap the model in `poutine.block`."
            )


def _closed(plates: frozenset[str], nesting: Mapping[str, set[str]]) -> frozenset[str]:
    """The plates with all those that they determine."""
    outer = plates.union(*(nesting.get(plate, ()) for plate in plates))
    return plates if outer == plates else _closed(outer, nesting)


def is_blocked(model: Any) -> bool:
    """Whether a model hides sites on purpose: it is wrapped in ``poutine.block``, whatever else is around that."""
    if isinstance(model, partial):
        return any(isinstance(part, BlockMessenger) or is_blocked(part) for part in model.args)
    return False


def _differs(run: Run, origin: Run, name: str) -> bool:
    """Whether a site is not, to the bit, in one run what it was in the other."""
    if name not in run.records or name not in origin.records:
        return name in run.records or name in origin.records
    return not same(run.records[name], origin.records[name])
