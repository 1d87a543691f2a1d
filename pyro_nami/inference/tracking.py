"""Where training sends its figures: a small protocol, and adapters for TensorBoard and Weights & Biases.

Anything with the two methods of `Tracker` will do. Add an adapter here for another service.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

__all__ = ["TensorBoardTracker", "Tracker", "WandbTracker"]


class Tracker(Protocol):
    """What training logs to."""

    def log(self, name: str, value: float, step: int) -> None:
        """Takes a scalar: a loss in nats per simulation, a learning rate."""

    def figure(self, name: str, figure: Any, step: int) -> None:
        """Takes a matplotlib figure."""


class TensorBoardTracker:
    """Writes TensorBoard event files.

    Args:
        folder: where to; made if need be.

    Raises:
        ImportError: without the package tensorboard.
    """

    def __init__(self, folder: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(_MISSING.format("TensorBoardTracker", "tensorboard")) from error
        self.writer: Any = SummaryWriter(str(folder))

    def log(self, name: str, value: float, step: int) -> None:
        self.writer.add_scalar(name, value, step)

    def figure(self, name: str, figure: Any, step: int) -> None:
        self.writer.add_figure(name, figure, step)

    def close(self) -> None:
        """Writes what is pending."""
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
        try:
            import wandb
        except ImportError as error:
            raise ImportError(_MISSING.format("WandbTracker", "wandb")) from error
        self.run = wandb.run if run is None else run
        if self.run is None:
            raise ValueError("Expected a run of W&B; got none. Call wandb.init(project=...) first.")
        self._image = wandb.Image

    def log(self, name: str, value: float, step: int) -> None:
        self.run.log({name: value}, step=step)

    def figure(self, name: str, figure: Any, step: int) -> None:
        self.run.log({name: self._image(figure)}, step=step)


_MISSING = "Expected the package of {}; got none. Install it: pip install {}"
