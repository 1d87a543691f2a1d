"""Inverses of a Bayesian network: what each latent reads when it is sampled given the data.

`nami` builds the faithful and minimal inverses of Webb et al. 2018; `stuhlmueller`, `mean_field`
and `fully_connected` are the baselines of that paper. To add an inversion:

- write a function from `BayesNet` to `Inverse`: an elimination order of ``sampled(net)``, and for
  each latent the sites that it reads, each with the shared plates that it is read across;
- name it in `INVERSIONS`, from which guides take their choices;
- ask `verify_inverse` whether it is faithful and minimal.

A method that changes only the order of elimination is a heuristic in `min_fill` and a word in
`DIRECTIONS`.
"""

from __future__ import annotations

__all__ = [
    "DIRECTIONS",
    "INVERSIONS",
    "fully_connected",
    "mean_field",
    "nami",
    "nami_steps",
    "stuhlmueller",
]

import gc
from collections.abc import Callable, Hashable, Iterable, Sequence

from pyro_nami.graph.inverse import Inverse, check_partition, sampled
from pyro_nami.graph.min_fill import ForbiddenOrder, Step, steps
from pyro_nami.graph.network import BayesNet
from pyro_nami.graph.sites import NO_PLATES, Plates, Reads

DIRECTIONS = ("auto", "forward", "reverse", "free")


def nami(
    net: BayesNet, *, direction: str = "auto", blocks: Iterable[Iterable[Hashable]] | None = None
) -> Inverse:
    """Returns a faithful and minimal inverse (Webb et al. 2018, Algorithm 1).

    Args:
        net: the network.
        direction: ``"forward"`` eliminates in topological order, ``"reverse"`` in reverse topological order (so it
            samples in the model's order), ``"free"`` by min-fill alone, and ``"auto"`` takes the one of forward and
            reverse with fewer grounded edges (ties: fewer levels, then reverse); on deep networks ``"free"`` can have
            fewer than either. In every direction a latent is eliminated before the latents that its support depends
            on.
        blocks: lists of latents, each block eliminated before the next. They hold all latents but marginalized ones.

    Raises:
        TypeError: ``net`` is not a `BayesNet`.
        ValueError: an unknown direction; a site unlisted, unknown or repeated in ``blocks``; or an order that
            eliminates a site after one that its support depends on.

    References:
        Webb et al. 2018, "Faithful inversion of generative models for effective amortized inference", section 2
        and appendix B. `pyro_nami.graph.min_fill` says where this departs from it.

    Example:
        >>> edges = ["DG", "IG", "IS", "GL", "SJ", "LJ", "GH", "JH"]
        >>> net = BayesNet.from_edges(edges, observed=["H", "J"], nodes="DIGSLJH")
        >>> inverse = nami(net, direction="forward")
        >>> list(inverse.parents["L"])
        ['J', 'H']
    """
    return _best(net, direction, _parts(net, direction, blocks))[0]


def nami_steps(
    net: BayesNet, *, direction: str = "forward", blocks: Iterable[Iterable[Hashable]] | None = None
) -> list[Step]:
    """Returns the steps by which `nami` reaches its inverse; the arguments are those of `nami`.

    The first frontier holds the latents that have no latent parent, as in the paper. A latent of a later block joins
    the frontier only when all earlier blocks are eliminated.

    Example:
        >>> net = BayesNet.from_edges(["ac", "bc", "cx"], observed="x", nodes="abcx")
        >>> [(step.frontier, step.site, list(step.parents)) for step in nami_steps(net)]
        [(('a', 'b'), 'a', ['b', 'c']), (('b',), 'b', ['c']), (('c',), 'c', ['x'])]
    """
    parts = _parts(net, direction, blocks)
    if direction == "auto":
        _, direction = _best(net, direction, parts)
    return list(steps(net, direction, parts, traced=True))


def stuhlmueller(net: BayesNet) -> Inverse:
    """Returns the heuristic inverse of Stuhlmüller et al. 2013: each latent reads its children and co-parents.

    Sampled from the last latent in model order to the first, a latent reads those of its children and of its
    children's other parents that are observed or come after it. Not faithful in general. Where a child lacks a
    plate of its parent, the parent's instances are co-parents of each other, so they form a joint block.

    References:
        Webb et al. 2018, supplement, appendix C; here observed co-parents are read wherever they come in the model.

    Example:
        >>> list(stuhlmueller(BayesNet.from_edges(["ax", "bx"], observed="x")).parents["a"])
        ['b', 'x']
    """
    order = sampled(net)
    names, position, parents, children, plates = net.indexed
    readable = {position[name] for name in (*net.observed, *order)}
    joint: dict[Hashable, Plates] = {}
    reads: dict[Hashable, Reads] = {}
    for v, i in zip(order, map(position.__getitem__, order)):
        readable.remove(i)
        joint[v] = NO_PLATES.union(*(plates[i] - plates[t] for t in children[i]))
        family = {u for t in children[i] for u in (t, *parents[t])}
        reads[v] = {names[u]: joint[v] & plates[u] for u in sorted(family & readable)}
    return Inverse(net, order, reads, joint)


def mean_field(net: BayesNet) -> Inverse:
    """Returns the inverse in which every latent reads all observed sites and no latent.

    Sites are aligned on the plates they share: an instance of a local latent reads its own instance of the data.

    Example:
        >>> list(mean_field(BayesNet.from_edges(["ax", "bx"], observed="x")).parents["a"])
        ['x']
    """
    order = sampled(net)[::-1]
    return Inverse(net, order, {v: dict.fromkeys(net.observed, NO_PLATES) for v in order})


def fully_connected(net: BayesNet) -> Inverse:
    """Returns the inverse that assumes no independence: each latent reads all data and all earlier latents.

    Latents are sampled in model order, and every instance reads all earlier ones: each is one block over its plates.

    Example:
        >>> list(fully_connected(BayesNet.from_edges(["ax", "bx"], observed="x")).parents["b"])
        ['x', 'a']
    """
    order = sampled(net)[::-1]
    parents = {
        v: {u: net.plates[u] & net.plates[v] for u in (*net.observed, *reversed(order[i + 1 :]))}
        for i, v in enumerate(order)
    }
    return Inverse(net, order, parents, {v: net.plates[v] for v in order})


# The inversions besides the directions of `nami`, by name.
INVERSIONS: dict[str, Callable[[BayesNet], Inverse]] = {
    "stuhlmueller": stuhlmueller,
    "mean_field": mean_field,
    "fully_connected": fully_connected,
}


def _best(net: BayesNet, direction: str, blocks: Sequence[Sequence[int]]) -> tuple[Inverse, str]:
    """Returns the inverse in the given direction, or for "auto" the better one, and its direction."""
    if direction != "auto":
        return _invert(net, direction, blocks), direction
    reverse = _invert(net, "reverse", blocks)
    try:
        forward = _invert(net, "forward", blocks)
    except ForbiddenOrder:
        return reverse, "reverse"
    sizes = [(inverse.num_grounded_edges, len(inverse.levels)) for inverse in (reverse, forward)]
    return (forward, "forward") if sizes[1] < sizes[0] else (reverse, "reverse")


def _invert(net: BayesNet, direction: str, blocks: Sequence[Sequence[int]]) -> Inverse:
    enabled = gc.isenabled()
    # There is no cycle to find, and at 100,000 sites garbage collection takes as long as all else.
    gc.disable()
    try:
        taken = {step.site: step for step in steps(net, direction, blocks)}
        return Inverse(
            net,
            tuple(taken),
            {v: step.parents for v, step in taken.items()},
            {v: step.joint for v, step in taken.items()},
            frozenset(v for v, step in taken.items() if step.predictive),
        )
    finally:
        if enabled:
            gc.enable()


def _parts(
    net: BayesNet, direction: str, blocks: Iterable[Iterable[Hashable]] | None
) -> list[list[int]]:
    """Checks the arguments, and returns the blocks in indices."""
    latents = sampled(net)
    if direction not in DIRECTIONS:
        raise ValueError(
            f"Expected direction to be one of {', '.join(DIRECTIONS)}; got {direction!r}."
        )
    blocks = [latents] if blocks is None else list(blocks)
    for block in blocks:
        if isinstance(block, str):
            raise TypeError(f"Expected blocks to be lists of site names; got the string {block!r}.")
    parts = [list(block) for block in blocks]
    check_partition(net, parts, "blocks")
    return [[net.indexed.position[name] for name in part] for part in parts]
