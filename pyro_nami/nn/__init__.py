"""Networks of the guide, in torch alone: masked perceptrons that obey a dependency matrix, and pooling encoders.

`masks` says which units may be connected, `masked` computes the pass, densely or step by step, and `pooling` turns a
plate of instances into features that do not depend on their order.
"""

from pyro_nami.nn.masked import MaskedMLP, MaskedState
from pyro_nami.nn.pooling import PoolingEncoder, segment_mean
from pyro_nami.nn.separate import SeparateMLP, SeparateState

__all__ = ["MaskedMLP", "MaskedState", "PoolingEncoder", "SeparateMLP", "SeparateState", "segment_mean"]
