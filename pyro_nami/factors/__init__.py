"""A site's factor as a distribution: from its prior to parameter shapes, from raw parameters to what the guide emits.

`types` is the table of what is known of each distribution type; `bijections` lead from unconstrained space to supports;
a `layout` cuts a value into elements, whose densities are in `elements`, `normals` and `sequential`; a `distribution`
is made of both. A `family` says of which: those of `unconstrained` space or of the model's `own_type`, chosen by the
`registry`. `noisy_or` is a distribution for models, on `sparse` weights; `bounds` on its
density and others' are of closed form; `gumbel_softmax` relaxes the draws of binary and one-hot types. Nothing here
holds parameters: the guide's networks give them.
"""

from pyro_nami.factors.bounds import Bound, register_bound
from pyro_nami.factors.family import Family
from pyro_nami.factors.noisy_or import NoisyOr
from pyro_nami.factors.registry import register_family
from pyro_nami.factors.unconstrained import flow, mixture, relaxed

__all__ = [
    "Bound",
    "Family",
    "NoisyOr",
    "flow",
    "mixture",
    "register_bound",
    "register_family",
    "relaxed",
]
