"""Annealed importance sampling with any pair of a model and a guide."""

from pyro_nami.annealing.annealing import AnnealedSamples, annealed_importance_sampling
from pyro_nami.annealing.transitions import sigmoid_temperatures

__all__ = ["AnnealedSamples", "annealed_importance_sampling", "sigmoid_temperatures"]
