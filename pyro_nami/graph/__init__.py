"""The graph layer: Bayesian networks, their inverses, and the check that one is right. No torch, no Pyro."""

from pyro_nami.graph.elimination import Elimination, eliminate, moralize
from pyro_nami.graph.inverse import Inverse
from pyro_nami.graph.inversion_methods import (
    fully_connected,
    mean_field,
    nami,
    nami_steps,
    stuhlmueller,
)
from pyro_nami.graph.min_fill import Step
from pyro_nami.graph.network import BayesNet, Instance
from pyro_nami.graph.sites import Site
from pyro_nami.graph.verification import Verification, d_separated, verify_inverse

__all__ = [
    "BayesNet", "Elimination", "Instance", "Inverse", "Site", "Step", "Verification",
    "d_separated", "eliminate", "fully_connected", "mean_field", "moralize", "nami", "nami_steps",
    "stuhlmueller", "verify_inverse",
]  # fmt: skip
