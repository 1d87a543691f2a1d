"""Trackers of training figures: any callback, or ready ones for TensorBoard and Weights & Biases."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

__all__ = ["TensorBoardTracker", "Tracker", "WandbTracker", "callback"]


class Tracker(Protocol):
    """What training logs to; a function with the arguments of `log` will do as well."""

    def log(self, name: str, value: float, step: int) -> None:
        """Takes a scalar: a loss in nats per simulation, after so many steps."""


def callback(
    tracker: Tracker | Callable[[str, float, int], Any] | None,
) -> Callable[[str, float, int], Any]:
    """Returns a tracker as a function of name, value and step; without a tracker, a function that does nothing."""
    if tracker is None:
        return lambda name, value, step: None
    return tracker if callable(tracker) else tracker.log


class TensorBoardTracker:
    """Writes TensorBoard event files, by ``writer``.

    Args:
        folder: where to; made if need be.

    Raises:
        ImportError: without the package tensorboard.
    """

    def __init__(self, folder: str | Path) -> None:
        self.writer = _imported("torch.utils.tensorboard", "tensorboard").SummaryWriter(str(folder))

    def log(self, name: str, value: float, step: int) -> None:
        self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Writes pending events to the disk."""
        self.writer.close()


class WandbTracker:
    """Logs to a run of Weights & Biases.

    Args:
        run: what ``wandb.init(...)`` returned; None: the run that is active.

    Raises:
        ImportError: without the package wandb.
        ValueError: if there is no run.
    """

    def __init__(self, run: Any = None) -> None:
        self.run = _imported("wandb", "wandb").run if run is None else run
        if self.run is None:
            raise ValueError("Expected a run of W&B; got none. Call wandb.init(project=...) first.")

    def log(self, name: str, value: float, step: int) -> None:
        self.run.log({name: value}, step=step)


def _imported(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"Expected the package {package} for this tracker; pip install {package}"
        ) from error
