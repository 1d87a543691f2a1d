"""A site's factor as a distribution: from its prior to the shapes of parameters, and from raw parameters to a density.

`types` is the table of distribution types, and `bijections` map unconstrained space to supports. A
`layout` cuts a value into elements, whose distributions are torch's, or are in `elements` and
`normals`; a `distribution` joins both. A `family` chooses among them: in `unconstrained` space, or of the
model's `own_type`; the `registry` names families. `bounds` bound log densities in closed form.
Nothing here holds parameters: the guide's networks give them.
"""

from pyro_nami.factors.bounds import Bound, register_bound
from pyro_nami.factors.family import Family
from pyro_nami.factors.registry import register_family
from pyro_nami.factors.unconstrained import flow, mixture, relaxed

__all__ = [
    "Bound",
    "Family",
    "flow",
    "mixture",
    "register_bound",
    "register_family",
    "relaxed",
]
