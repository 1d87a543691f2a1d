"""Inference with any pair of a model and a guide: compilation, weights, annealing, relaxed draws, checkpoints."""

from pyro_nami.inference.annealing import AnnealedSamples, annealed_importance_sampling, sigmoid_temperatures
from pyro_nami.inference.compilation import InferenceCompilation
from pyro_nami.inference.history import History
from pyro_nami.inference.importance import importance_sample
from pyro_nami.inference.relaxation import ExponentialDecay, RelaxedELBO
from pyro_nami.inference.simulate import JointDraws, Simulator
from pyro_nami.inference.trackers import TensorBoardTracker, Tracker, WandbTracker
from pyro_nami.inference.weights import WeightedSamples

__all__ = [
    "AnnealedSamples",
    "ExponentialDecay",
    "History",
    "InferenceCompilation",
    "JointDraws",
    "RelaxedELBO",
    "Simulator",
    "TensorBoardTracker",
    "Tracker",
    "WandbTracker",
    "WeightedSamples",
    "annealed_importance_sampling",
    "importance_sample",
    "sigmoid_temperatures",
]
