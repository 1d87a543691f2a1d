"""Inference with any pair of a model and a guide: compilation, weights, annealing, calibration, checkpoints."""

from pyro_nami.infer.annealing import AnnealedSamples, annealed_importance_sampling, sigmoid_temperatures
from pyro_nami.infer.calibration import Calibration, calibrate
from pyro_nami.infer.compilation import InferenceCompilation
from pyro_nami.infer.diagnose import Diagnosis, diagnose
from pyro_nami.infer.history import History
from pyro_nami.infer.importance import importance_sample
from pyro_nami.infer.joint import JointDraws, Simulator
from pyro_nami.infer.misspecification import Misspecification, misspecification
from pyro_nami.infer.tracking import TensorBoardTracker, Tracker, WandbTracker
from pyro_nami.infer.weights import WeightedSamples

__all__ = [
    "AnnealedSamples",
    "Calibration",
    "Diagnosis",
    "History",
    "InferenceCompilation",
    "JointDraws",
    "Misspecification",
    "Simulator",
    "TensorBoardTracker",
    "Tracker",
    "WandbTracker",
    "WeightedSamples",
    "annealed_importance_sampling",
    "calibrate",
    "diagnose",
    "importance_sample",
    "misspecification",
    "sigmoid_temperatures",
]
