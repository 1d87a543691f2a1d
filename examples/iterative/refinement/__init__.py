"""Iterative amortized inference (Marino et al. 2018), and how much of an ELBO amortization loses."""

from refinement.gaps import AmortizationGap, amortization_gap, optimize_directly
from refinement.iterative import AutoIterativeGuide, Trajectory
from refinement.iterative_elbo import IterativeELBO

__all__ = [
    "AmortizationGap",
    "AutoIterativeGuide",
    "IterativeELBO",
    "Trajectory",
    "amortization_gap",
    "optimize_directly",
]
