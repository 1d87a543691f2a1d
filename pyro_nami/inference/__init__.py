"""Inference with any pair of a model and a guide: simulations, compilation, importance weights, relaxed draws."""

from pyro_nami.inference.compilation import InferenceCompilation
from pyro_nami.inference.history import History
from pyro_nami.inference.importance import importance_sample
from pyro_nami.inference.relaxation import ExponentialDecay, RelaxedELBO
from pyro_nami.inference.simulate import JointDraws, Simulator
from pyro_nami.inference.simulator_model import from_simulator
from pyro_nami.inference.trackers import TensorBoardTracker, Tracker, WandbTracker
from pyro_nami.inference.weighted_samples import WeightedSamples

__all__ = [
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
    "from_simulator",
    "importance_sample",
]
