"""Networks of the guide, in torch alone: masked perceptrons that obey a dependency matrix, and pooling encoders.

`masks` says which units may be connected; `masked` and `separate` compute the pass, densely or step by step, on what
`stepped` holds. `pooling` and
`attention` turn a set of instances into features that do not depend on their order, `encoders` chooses between them,
`evidence` makes sums that contract a Normal factor, and `reductions` says which instances form a set.
"""

from pyro_nami.nn.attention import AttentionEncoder
from pyro_nami.nn.encoders import ENCODERS, OwnEncoder, make_encoder
from pyro_nami.nn.evidence import Evidence
from pyro_nami.nn.masked import MaskedMLP, MaskedState
from pyro_nami.nn.pace import Pace
from pyro_nami.nn.pooling import MaxEncoder, MeanEncoder, SetEncoder, SumEncoder
from pyro_nami.nn.reductions import Along, Reduction, Segments
from pyro_nami.nn.running import Running, tempered
from pyro_nami.nn.separate import SeparateMLP, SeparateState
from pyro_nami.nn.stepped import Base

__all__ = [
    "ENCODERS",
    "Along",
    "AttentionEncoder",
    "Base",
    "Evidence",
    "MaskedMLP",
    "MaskedState",
    "MaxEncoder",
    "MeanEncoder",
    "OwnEncoder",
    "Pace",
    "Reduction",
    "Running",
    "Segments",
    "SeparateMLP",
    "SeparateState",
    "SetEncoder",
    "SumEncoder",
    "make_encoder",
    "tempered",
]
