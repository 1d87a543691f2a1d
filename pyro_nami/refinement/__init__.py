"""Iterative amortized inference (Marino et al. 2018), and how much of an ELBO amortization loses."""

from pyro_nami.refinement.gaps import AmortizationGap, amortization_gap, optimize_directly
from pyro_nami.refinement.iterative import AutoIterativeGuide, Trajectory
from pyro_nami.refinement.iterative_elbo import IterativeELBO

__all__ = [
    "AmortizationGap",
    "AutoIterativeGuide",
    "IterativeELBO",
    "Trajectory",
    "amortization_gap",
    "optimize_directly",
]
