"""A site's factor as a distribution: from its prior to parameter shapes, from raw parameters to what the guide emits.

`bijections` leads from unconstrained space to a support, `layout` lays a value out as E elements in sequence,
`elements` has densities of one element, batched, and `factor` makes a site's distribution of the three. A family says
which: `base` what it is, `unconstrained`, `discrete` and `own_type` the built-in ones, `registry` chooses; `observed`
reads observed sites. `anchors` holds location and scale of a model's own conditionals in unconstrained space. Nothing
here holds parameters: the guide's networks give them.
"""

from pyro_nami.factors.base import Family
from pyro_nami.factors.registry import register_family
from pyro_nami.factors.unconstrained import flow, mixture, relaxed

__all__ = ["Family", "flow", "mixture", "register_family", "relaxed"]
