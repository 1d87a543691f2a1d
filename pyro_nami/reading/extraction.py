"""`extract_bayesnet`: reads the Bayesian network off a Pyro model.

The model is run once to draw base values (`Probe`), and again at these values under a
`ProvenanceTracker`, by which every site *claims* its parents (`claim`). Values that leave torch
(``.item()``, ``if``, numpy, lists) lose their provenance, so the claims are tested (`intervene`):
with a site's claimed parents held and other earlier sites changed, it must not move by a bit. If a
site reads a plate that it does not lie in through an index, `search_maps` finds the index map, and
nests its plate there.

Deterministic and Delta sites are transparent, ``pyro.factor`` is an observed site, and plates are
the vectorized ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import pyro
import torch
from pyro import poutine
from torch import Tensor

from pyro_nami.graph.network import BayesNet
from pyro_nami.graph.sites import Site, closed_nesting
from pyro_nami.messages import warn
from pyro_nami.program.first_run import is_enumerated
from pyro_nami.program.isolation import untouched
from pyro_nami.program.loops import NO_LOOPS, Loops
from pyro_nami.program.program import Program
from pyro_nami.reading.index_maps.decoding import MapPlan
from pyro_nami.reading.index_maps.search import search_maps
from pyro_nami.reading.interventions import Dependencies, claim, intervene, is_blocked
from pyro_nami.reading.loops import find_loops, with_loops
from pyro_nami.reading.probe import Probe
from pyro_nami.reading.series import find_series

__all__ = ["Extraction", "extract", "extract_bayesnet"]


class Extraction(NamedTuple):
    """What `extract` found.

    Attributes:
        bayesnet: the network, its sites in model order.
        trace: the base run: every site with a plain, detached value.
        checked: how many sites were tested by intervention (sites with nothing to test count).
        escaped: the sites whose values left torch for Python somewhere in the model.
        hidden_randomness: the sites that differ between runs at equal values of all sites.
        index_maps: for plates (q, p), nested raggedly, the instance of p to which each instance of q belongs,
            ``(size_q,)``: as sites read it, without what follows from two of them.
        map_plans: how to find these maps in other calls.
        loops: the loops of the model, if they were asked for; the network has them as one site each.
        computed: the observed sites whose data are computed from latents, as in ``obs=y - z``.
    """

    bayesnet: BayesNet
    trace: poutine.Trace
    checked: int
    escaped: frozenset[str]
    hidden_randomness: frozenset[str]
    index_maps: dict[tuple[str, str], Tensor]
    map_plans: tuple[MapPlan, ...]
    loops: Loops = NO_LOOPS
    computed: frozenset[str] = frozenset()


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
    lifted: bool = False,
    learned: bool = False,
) -> Extraction:
    """The Bayesian network of a model, and the run that it was read off.

    The random number generators, the parameter store and the modules that the model uses are left as they were, and
    Pyro handlers around the call see nothing. Dropout and batch normalization are in evaluation mode meanwhile.

    Args:
        model: any callable with Pyro primitives.
        args, kwargs: its arguments.
        observed: names of sites that this call samples but that inference will condition on.
        checks: the most runs of interventions. Beyond, values that left torch are taken to reach all later sites.
        init: site -> a constrained value, of latents that cannot be sampled; by default a draw in unconstrained space.
        lifted: whether the sites of a loop are to be one site, where provenance is sure of what they read.
        learned: whether networks are to say what its states are; see `find_loops`.

    Raises:
        ValueError: a name in ``observed`` is not a site; sites appear or disappear with the values of others; or
            instances of a plate depend on each other.
        NotImplementedError: a latent site can neither be sampled nor initialized.
    """
    program = Program(model, args, kwargs or {})
    with untouched(*program.roots), torch.no_grad(), pyro.validation_enabled(False):
        probe = Probe(program, init, tuple(observed), checks)
        claims = claim(probe)
        if lifted and (extraction := _lifted(probe, claims, learned)) is not None:
            return extraction
        found = intervene(probe, claims)
        maps, plans, finished = search_maps(probe, found)
    _warn(probe, found, finished)
    return Extraction(
        _network(probe, found, maps),
        probe.trace,
        len(found.checked),
        found.escaped,
        frozenset(found.hidden),
        maps,
        plans,
        computed=frozenset(found.computed),
    )


def _lifted(probe: Probe, found: Dependencies, learned: bool) -> Extraction | None:
    """Returns the network with loops as one site each; None if there is none, or values have left torch on the way."""
    if found.escaped or found.hidden:
        return None
    sites = probe.first.sites
    loops = NO_LOOPS
    if len(probe.plates) <= 1:
        loops = find_loops(sites, found.parents, probe.observed, learned)
    if not (loops or learned):
        loops = find_series(probe, found.parents)
    if not loops:
        return None
    try:
        net = with_loops(_network(probe, found, ()), loops)
    except ValueError:
        return None
    computed = frozenset(found.computed)
    return Extraction(
        net, probe.trace, len(sites), found.escaped, frozenset(), {}, (), loops, computed
    )


def _network(
    probe: Probe, found: Dependencies, index_maps: Collection[tuple[str, str]]
) -> BayesNet:
    """The network, with plates nested as the keys (inner, outer) of index maps say."""
    nesting: dict[Any, set[str]] = defaultdict(set)
    for q, p in index_maps:
        nesting[q].add(p)
    sites = []
    edges = []
    outer = closed_nesting({}, nesting)
    for name in probe.order:
        own = probe.plates_of[name]
        plates = own.union(*(outer.get(plate, ()) for plate in own))
        if name in probe.observed:
            sites.append(Site(name, plates, observed=True))
        else:
            support = frozenset(found.support[name])
            marginalized = is_enumerated(probe.first.sites[name])
            sites.append(Site(name, plates, support_parents=support, marginalized=marginalized))
        edges += [(parent, name) for parent in found.parents[name]]
    sizes: dict[Any, int] = {
        plate: max(frame.full_size or 0, probe.sizes[plate])
        for plate, frame in probe.plates.items()
    }
    return BayesNet(sites, edges, sizes, nesting)


def _warn(probe: Probe, found: Dependencies, finished: bool) -> None:
    """Says what was lost, hidden and not looked for, and how to avoid it."""
    if found.failed is not None:
        name, error = found.failed
        warn(
            f"The model fails before site '{name}' at other values of the sites before it, with "
            f"{type(error).__name__}: {error} Such sites are taken to read all that was changed. Mend the model "
            "such that it runs at draws of its prior."
        )
    if found.lost:
        parent, name = found.lost[0]
        more = f" (and {len(found.lost) - 1} more such pairs)" if len(found.lost) > 1 else ""
        warn(
            f"Site '{name}' depends on '{parent}' through something other than torch operations{more}; "
            "the edge was found by intervention. To be certain of every edge keep values in tensors: "
            "`torch.where` for `if`, tensors as indices, no `.item()`, `float()` or numpy in between."
        )
    sites = probe.first.sites
    hidden = [name for name in probe.order if name in found.hidden]
    hidden = [name for name in hidden if not sites[name]["infer"].get("_drawn")]
    if hidden and not is_blocked(probe.program.model):
        names = ", ".join(f"'{name}'" for name in hidden)
        warn(
            f"Hidden randomness: {names} differ between runs of the model at equal values of all sites, "
            "and are taken to depend on all latents before them. Draw all random numbers by "
            "`pyro.sample`; to hide a latent on purpose (for enumeration, say), wrap the model in `poutine.block`."
        )
    if not finished:
        warn(
            "Not every plate that another one reads was tested for an index map: the budget of "
            f"{probe.budget} runs is spent. Sites that read such a plate are taken to read all of it. Raise `checks`."
        )
