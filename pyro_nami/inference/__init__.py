"""Inference with any pair of a model and a guide: simulations, compilation, importance weights."""

from pyro_nami.inference.black_box import from_simulator
from pyro_nami.inference.compilation import InferenceCompilation
from pyro_nami.inference.history import History
from pyro_nami.inference.importance import importance_sample
from pyro_nami.inference.simulate import JointDraws, Simulator
from pyro_nami.inference.weighted_samples import WeightedSamples

__all__ = [
    "History",
    "InferenceCompilation",
    "JointDraws",
    "Simulator",
    "WeightedSamples",
    "from_simulator",
    "importance_sample",
]
