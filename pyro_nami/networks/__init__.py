"""Networks of the guide, in torch alone: masked perceptrons that obey a dependency matrix, and pooling encoders.

`masks` says which units may be connected; `masked` and `separate` compute the pass, densely or step by step, on what
`stepped` holds. `pooling` and
`attention` turn a set of instances into features that do not depend on their order, `encoders` chooses between them,
`evidence` makes sums that contract a Normal factor, and `reductions` says which instances form a set.
"""

from pyro_nami.networks.attention import AttentionEncoder
from pyro_nami.networks.encoders import ENCODERS, make_encoder
from pyro_nami.networks.masked import MaskedMLP
from pyro_nami.networks.pace import Pace
from pyro_nami.networks.passes import SteppedState
from pyro_nami.networks.pooling import MaxEncoder, MeanEncoder, OwnEncoder, SetEncoder, SumEncoder
from pyro_nami.networks.precision_sums import PrecisionSums
from pyro_nami.networks.reductions import Along, Reduction, Segments
from pyro_nami.networks.running import Running, tempered
from pyro_nami.networks.separate import SeparateMLP
from pyro_nami.networks.stepped import Base

__all__ = [
    "ENCODERS",
    "Along",
    "AttentionEncoder",
    "Base",
    "MaskedMLP",
    "MaxEncoder",
    "MeanEncoder",
    "OwnEncoder",
    "Pace",
    "PrecisionSums",
    "Reduction",
    "Running",
    "Segments",
    "SeparateMLP",
    "SetEncoder",
    "SteppedState",
    "SumEncoder",
    "make_encoder",
    "tempered",
]
