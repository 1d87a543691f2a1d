"""A site's factor as a distribution: from its prior to parameter shapes, from raw parameters to what the guide emits.

`types` is the table of what is known of each distribution type. `bijections` leads from unconstrained space to a
support, `layout` lays a value out as E elements in sequence, `elements` (`bent`, `relaxed`) has densities of one element,
batched, and `distributions` makes a site's distribution of these. A `family` says which: those of `unconstrained` space
or of the model's `own_type`, chosen by `registry`; `anchors` are location and scale of the model's own conditionals, and
`features` what is read of observed sites. Nothing here holds parameters: the guide's networks give them.
"""

from pyro_nami.factors.family import Family
from pyro_nami.factors.registry import register_family
from pyro_nami.factors.unconstrained import flow, mixture, relaxed

__all__ = ["Family", "flow", "mixture", "register_family", "relaxed"]
