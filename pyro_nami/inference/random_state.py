"""The states of all random number generators, as plain data for a checkpoint."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

__all__ = ["rng_state", "set_rng_state"]


def rng_state() -> dict[str, Any]:
    """Returns the states of the random number generators of torch (CUDA as well), numpy and Python, as plain data."""
    numpy_state: Any = np.random.get_state(legacy=True)
    kind, keys, *rest = numpy_state
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "numpy": [kind, torch.from_numpy(keys.astype(np.int64)), *rest],
        "python": random.getstate(),
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Sets a result of `rng_state`; CUDA generators only where there are as many devices."""
    torch.set_rng_state(state["torch"])
    if (
        state["cuda"]
        and torch.cuda.is_available()
        and torch.cuda.device_count() == len(state["cuda"])
    ):
        torch.cuda.set_rng_state_all(state["cuda"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    random.setstate(state["python"])
