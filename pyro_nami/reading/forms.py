"""Which latents of a plate have a conditional that is known exactly, in one of the forms that the guide can draw from.

There is one form, `joint_gaussian`: a latent, the latents of its plates that are drawn after it and share its children
(with it: ``members``), and those children, which are observed, have a density that is quadratic in the members. Then
p(member | members before it, what is drawn before, data) needs no weights, holds for any data and any number of
instances, and is differentiable in what was drawn before. It costs derivatives of one run of the model in each call.

`find_conjugate` tells by the network, who has to be known, and by probing, which form holds, at data drawn with the
latents as well. Change this module to let other latents have a form, or to ask for another form.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.distributions import constraints

from pyro_nami.factors.family import Family
from pyro_nami.factors.unconstrained import NormalFamily
from pyro_nami.graph.inverse import Inverse
from pyro_nami.graph.network import BayesNet
from pyro_nami.reading.first_run import allows_nan
from pyro_nami.reading.joint_gaussian import ConjugateGroup, is_quadratic
from pyro_nami.reading.runner import RunModel

__all__ = ["find_conjugate"]

_MOST_MEMBERS = 4


def find_conjugate(
    net: BayesNet,
    inverse: Inverse,
    order: Sequence[str],
    nodes: Mapping[str, Any],
    families: Mapping[str, Family],
    frames: Mapping[str, frozenset[str]],
    *,
    subsampled: Collection[str],
    excluded: Collection[str],
    run: RunModel,
    draws: Sequence[Mapping[str, Tensor]],
) -> dict[str, ConjugateGroup]:
    """Returns the latents that are drawn from their exact conditional, each with its group.

    They are real numbers in a plate, without a mask. Their children are not sites that only a mini-batch is seen of, or
    that may be missing, and nothing that they depend on is discrete, as enumeration gives that dims of its own.

    Args:
        order: latents in sampling order.
        nodes: the sites of a run of the model, and ``frames`` the plates of each.
        families: of the latents whose instances are no joint block.
        draws: values of all latents, at which densities are probed; those that lack a latent are passed over.
    """

    def is_able(name: str) -> bool:
        fn, real = nodes[name]["fn"], type(families[name]) is NormalFamily
        real = real and fn.event_dim == 0 and fn.support is constraints.real
        return real and bool(frames[name]) and name not in excluded and nodes[name]["mask"] is None

    def is_data(name: str) -> bool:
        above = [parent for parent in net.graph.predecessors(name) if parent in able]
        whole = all(frames[name].intersection(subsampled) <= frames[parent] for parent in above)
        return whole and not allows_nan(nodes[name])

    able = set(filter(is_able, families))
    data = set(filter(is_data, nodes.keys() & set(net.observed)))
    counted = {name for name in order if nodes[name]["fn"].has_enumerate_support}
    found: dict[str, ConjugateGroup] = {}
    for members, children in _candidates(net, inverse, order, counted):
        first = members[0]
        alike = all(name in able and frames[name] == frames[first] for name in members)
        if first in found or not alike or not children <= data:
            continue
        group = ConjugateGroup(tuple(sorted(members, key=order.index)), tuple(sorted(children)))
        drawn = order[: order.index(first)]
        # With data of the same draw: far from the data many a density looks quadratic.
        given = children.union(drawn)
        probed = [{name: draw[name] for name in given & draw.keys()} for draw in draws if draw.keys() >= set(drawn)]
        if all(is_quadratic(group, run, values) for values in probed):
            found.update(dict.fromkeys(group.members, group))
    return found


def _candidates(
    net: BayesNet, inverse: Inverse, order: Sequence[str], counted: Collection[str]
) -> Iterator[tuple[list[str], set[str]]]:
    """Yields members, and children, whose conditional the network allows: their factor reads what it takes to know."""
    graph, observed = net.graph, set(net.observed)
    predictive = set(inverse.predictive).difference(order)  # which integrate to 1
    for i, name in enumerate(order):
        drawn = observed.union(order[:i])
        members = [name]
        children: set[str] = set()
        needed: set[str] = set()
        for member in members:  # which grows
            below = set(graph.successors(member))
            children |= below & observed
            near = below.union(graph.predecessors(member), *map(graph.predecessors, below & observed)) - predictive
            needed |= near & drawn
            members += sorted(near - drawn - set(members), key=str)
            if len(members) > _MOST_MEMBERS:
                break
        known = needed <= set(inverse.parents[name]).difference(counted)
        if len(members) <= _MOST_MEMBERS and children and known:
            yield members, children
