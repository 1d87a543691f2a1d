"""The place of one latent in the networks: what its factor reads, and how its elements depend on each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pyro_nami.factors.family import Family
from pyro_nami.graph.inverse import Inverse
from pyro_nami.guide.first_call import FirstCall
from pyro_nami.messages import warn
from pyro_nami.parameters.conditioning import Plates, Read, plan_sources
from pyro_nami.parameters.factor_groups import Dependence, Factor
from pyro_nami.parameters.free_parameters import MOST_COUPLED

__all__ = ["block_of", "factor_of"]


def block_of(first: FirstCall, name: str, inverse: Inverse) -> frozenset[str]:
    """Returns the plates of a site whose instances depend on each other given the data, and are drawn as one block.

    A plate that another of the site's plates determines adds nothing: instances of that one lie in it already.
    """
    block = frozenset(inverse.joint[name]) & first.frames[name]
    if not block or first.within(name) != "independent":
        return block
    if name not in first.apart:
        plates = " and ".join(map(repr, sorted(block)))
        warn(
            f"The instances of '{name}' in plate {plates} depend on each other given the data; "
            'within="independent" gives this up, and draws each given its own data alone.'
        )
    return frozenset()


def factor_of(
    first: FirstCall,
    family: Family,
    reads: Mapping[Any, Read],
    joint: frozenset[str],
    plates: Plates,
    parts: Mapping[Any, tuple[tuple[bool, ...], ...]],
) -> Factor:
    """Returns the factor of a latent: what its network reads, and how its elements depend on each other.

    Args:
        reads: what it reads, and ``parts`` which elements of that, see `element_reads`.
        joint: plates whose instances form one block; ``plates`` are the model's.
    """
    name = family.name
    frames = {node: first.frames[node if node in first.frames else node[1]] for node in reads}
    batch = plates.closure(first.frames[name] - joint)
    flattened = plates.sort(joint)
    elements = family.num_elements
    for plate in flattened:
        elements *= plates.sizes[plate]
    # What the block couples, its members read across.
    coupled = plates.closure(joint)
    reads = {
        node: read._replace(across=read.across | (coupled & plates.closure(frames[node])) - batch)
        for node, read in reads.items()
    }
    autoregressive = first.within(name) == "autoregressive" and family.coupling != "none"
    sequential = elements > 1 and autoregressive and any(map(any, parts.get(name, [[True]])))
    linear = sequential and not first.options.simulated and family.coupling == "linear"
    dependence: Dependence = "independent"
    if sequential and family.stack is not None and name not in parts:
        dependence = family.stack  # splines in sequence make all elements depend on each other
    elif linear and elements <= MOST_COUPLED:
        dependence = "linear"
    elif sequential and not linear:
        dependence = "sequential"
    if linear and elements > MOST_COUPLED:
        warn(
            f"Site '{name}' has {elements} elements that depend on each other given the data; more than "
            f"{MOST_COUPLED} are drawn independently."
        )
    return Factor(
        name,
        batch,
        flattened,
        elements,
        family.num_params,
        family.num_features,
        plan_sources(batch, reads, frames, plates, joint),
        list(family.locations),
        dependence,
        parts=parts,
    )
