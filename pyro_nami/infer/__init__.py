"""Inference with any pair of a model and a guide: compilation, weights, annealing, calibration, checkpoints."""
