"""Networks of the guide, in torch alone: masked perceptrons that obey a dependency matrix, and pooling encoders.

`masks` says which units may be connected. `masked` holds the parameters of a perceptron, and `stepped` is a pass
through it in which inputs come to be known step by step.
`running` scales their inputs, `pace` the steps of their parameters.

`reductions` says which instances form a set. `pooling` turns a set into features and tells how to add a way to do so,
and `precision_sums` takes instances for pseudo-observations, which add up. `encoders` read one value, such as an image.
"""

from pyro_nami.networks.masked import Base, MaskedMLP
from pyro_nami.networks.pace import Pace
from pyro_nami.networks.pooling import (
    ENCODERS,
    AttentionEncoder,
    MeanEncoder,
    OwnEncoder,
    SetEncoder,
    make_encoder,
)
from pyro_nami.networks.precision_sums import PrecisionSums
from pyro_nami.networks.reductions import Along, Reduction, Segments
from pyro_nami.networks.running import Running, tempered
from pyro_nami.networks.stepped import SteppedState

__all__ = [
    "ENCODERS",
    "Along",
    "AttentionEncoder",
    "Base",
    "MaskedMLP",
    "MeanEncoder",
    "OwnEncoder",
    "Pace",
    "PrecisionSums",
    "Reduction",
    "Running",
    "Segments",
    "SetEncoder",
    "SteppedState",
    "make_encoder",
    "tempered",
]
