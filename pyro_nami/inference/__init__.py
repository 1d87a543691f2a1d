"""Inference with any pair of a model and a guide: compilation, weights, annealing, relaxed draws, refinement."""

from pyro_nami.inference.amortizing import amortize
from pyro_nami.inference.annealing import AnnealedSamples, annealed_importance_sampling
from pyro_nami.inference.compilation import InferenceCompilation
from pyro_nami.inference.gaps import AmortizationGap, amortization_gap, optimize_directly
from pyro_nami.inference.history import History
from pyro_nami.inference.importance import importance_sample
from pyro_nami.inference.iterative import AutoIterativeGuide, Trajectory
from pyro_nami.inference.iterative_elbo import IterativeELBO
from pyro_nami.inference.posterior import AmortizedPosterior
from pyro_nami.inference.relaxation import ExponentialDecay, RelaxedELBO
from pyro_nami.inference.simulate import JointDraws, Simulator
from pyro_nami.inference.simulator_model import from_simulator
from pyro_nami.inference.soap import SOAP
from pyro_nami.inference.trackers import TensorBoardTracker, Tracker, WandbTracker
from pyro_nami.inference.transitions import sigmoid_temperatures
from pyro_nami.inference.weights import WeightedSamples

__all__ = [
    "AmortizationGap",
    "AmortizedPosterior",
    "AnnealedSamples",
    "AutoIterativeGuide",
    "ExponentialDecay",
    "History",
    "InferenceCompilation",
    "IterativeELBO",
    "JointDraws",
    "RelaxedELBO",
    "SOAP",
    "Simulator",
    "TensorBoardTracker",
    "Tracker",
    "Trajectory",
    "WandbTracker",
    "WeightedSamples",
    "amortization_gap",
    "amortize",
    "annealed_importance_sampling",
    "from_simulator",
    "importance_sample",
    "optimize_directly",
    "sigmoid_temperatures",
]
