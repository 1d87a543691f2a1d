"""`InferenceCompilation`: trains a guide on its model's simulations, for all data sets at once.

This module holds the training loop; `batches` yields what it runs over, and `trainer` takes its
steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from pyro.optim import PyroOptim
from torch import Tensor
from tqdm import tqdm

from pyro_nami.inference.batches import (
    ArgumentsAt,
    Simulations,
    are_all,
    batches_of,
)
from pyro_nami.inference.history import History
from pyro_nami.inference.latent_moves import GroupMoves
from pyro_nami.inference.observations import observed_names
from pyro_nami.inference.optimizers import optimization_of
from pyro_nami.inference.simulate import Batch, Simulator
from pyro_nami.inference.target import bind
from pyro_nami.inference.trainer import Trainer
from pyro_nami.messages import check_counts, warn

__all__ = ["InferenceCompilation"]


class InferenceCompilation:
    """Trains a guide on joint draws of a model, to minimize E_p(z, x)[-log q(z | x)].

    Up to a constant, that is the KL divergence from the posterior to the guide, averaged over data sets that the model
    simulates. A step is one vectorized run of the model and one dense pass of the guide.

    The model's parameters are not trained. Data among its arguments are simulated anew, so only their shapes count.

    Args:
        model: a Pyro model.
        guide: any guide that accepts ``observations=``; see `CompilationLoss`.
        optim: an optimizer of Pyro's, or a function from the guide's parameters to one of torch's.
        batch_size: number of simulations a step, or a function from the number of steps done to that number. If
            ``data`` are given all at once, the size changes only between epochs.
        observed: sites to condition on that the model samples without data, beside those of ``guide.observed``.
        scheduler: a function from a torch optimizer to one of torch's schedulers; see `Optimization`.
        clip_norm: largest norm of the gradient.

    References:
        Le, Baydin and Wood 2017, "Inference Compilation and Universal Probabilistic Programming".

    Example:
        >>> import pyro, pyro.distributions as dist
        >>> def model():
        ...     pyro.sample("x", dist.Normal(pyro.sample("z", dist.Normal(0.0, 1.0)), 0.1), obs=torch.tensor(0.0))
        >>> def guide(observations):
        ...     pyro.sample("z", dist.Normal(pyro.param("slope", torch.tensor(0.0)) * observations["x"], 0.1))
        >>> compilation = InferenceCompilation(model, guide, lambda p: torch.optim.Adam(p, lr=0.1), batch_size=100)
        >>> losses = compilation.fit(10, progress=False).losses
        >>> losses[-1] < losses[0] / 2  # the slope goes from 0 to 1
        True
    """

    def __init__(
        self,
        model: Callable,
        guide: Callable,
        optim: PyroOptim | Callable[[list[Tensor]], torch.optim.Optimizer],
        *,
        batch_size: int | Callable[[int], int],
        observed: Sequence[str] = (),
        scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
        clip_norm: float | None = None,
    ) -> None:
        self._optimization = optimization_of(optim, scheduler, clip_norm)
        check_counts(batch_size=batch_size(0) if callable(batch_size) else batch_size)
        self.model = model
        self.guide = guide
        self.batch_size = batch_size
        self._observed = observed
        self._trainer: Trainer | None = None

    @property
    def history(self) -> History:
        """Losses and counts of the last `fit`, or of the steps so far."""
        return History() if self._trainer is None else self._trainer.history

    def step(self, *args: Any, **kwargs: Any) -> float:
        """Takes one step on a fresh batch of simulations at the model's arguments.

        Returns:
            The loss, in nats per simulation.

        Raises:
            ValueError: if loss or gradient are not finite, naming the site; the guide then has the weights of the last
                step at which they were. Also if more than a tenth of all simulations are not finite.
        """
        self._ask_for_any_data()
        trainer, simulations = self._set_up(_constant(args, kwargs))
        return trainer.step(simulations.fresh(0))

    def evaluate_loss(self, *args: Any, num: int = 1000, **kwargs: Any) -> float:
        """Returns the loss on ``num`` fresh simulations at the model's arguments, in nats per simulation."""
        check_counts(num=num)
        trainer, simulations = self._set_up(_constant(args, kwargs))
        return float(trainer.losses(simulations.total(num)).mean())

    def fit(
        self,
        steps: int,
        args: Sequence[Any] | ArgumentsAt = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        data: Any = None,
        refresh: int = 0,
        validation: Any = None,
        validate_every: int = 100,
        patience: int | None = None,
        progress: bool = True,
        tracker: Callable[[str, float, int], Any] | None = None,
    ) -> History:
        """Takes a number of training steps; a single one if all conditionals are derived and the guide has no weights.

        With validation the guide ends with the weights of the lowest validation loss (where latents move, see
        `Trainer.validate`), otherwise with the last ones. A further call goes on with weights and optimizer, and begins
        a new history.

        Args:
            steps: number of steps.
            args, kwargs: the model's arguments; or ``args`` is a function from the step to a pair of them.
            data: simulations made before, all at once or an iterable of batches, in a form that `as_draws` takes. All
                are shuffled into batches; batches are read again from the start, but an iterator ends the training. A
                `DataLoader` with workers simulates ahead, for models that are slow. A list of `Batch` holds all
                simulations that were made at several arguments; guides make their first call at those of the first.
            refresh: draws of the guide that latents of ``data``, given all at once, may move to after an epoch.
            validation, validate_every: number of held-out simulations, or the simulations; steps between validations.
            patience: number of validations in a row without better weights after which training ends.
            progress: whether to show a progress bar.
            tracker: a function of name, value and step, called with each ``loss`` and ``validation_loss``.

        Raises:
            ValueError: as `step` does.
        """
        check_counts(steps=steps, validate_every=validate_every)
        _check_validation(validation, patience)
        if refresh:
            _check_refresh(refresh, args, data)
        arguments = args if callable(args) else _constant(tuple(args), dict(kwargs or {}))
        self._ask_for_any_data()
        trainer, simulations = self._set_up(arguments, data)
        held_out = simulations.held_out(validation)
        trainer.begin()
        moves = GroupMoves(simulations.simulator, self.guide, refresh) if refresh else None
        batches = itertools.islice(batches_of(simulations, data, moves), steps)
        bar = tqdm(batches, "compiling", steps, disable=not progress, mininterval=0.2)
        _train(trainer, bar, held_out, moves, tracker or _ignored, validate_every, patience)
        return trainer.history

    def _ask_for_any_data(self) -> None:
        """Has a guide answer for the data of each call, where nothing was said of its mode."""
        ask = getattr(self.guide, "serve_any_data", None)
        if ask is not None:
            ask()

    def _set_up(self, arguments: ArgumentsAt, data: Any = None) -> tuple[Trainer, Simulations]:
        """Returns the trainer, which the first call makes with the guide's structure, and simulations at arguments."""
        several = data if isinstance(data, list) and are_all(data) else ()
        if self._trainer is None:
            args, kwargs = several[0][:2] if several else arguments(0)
            simulator = Simulator(
                self.model, args, kwargs, observed_names(self._observed, self.guide)
            )
            bind(self.guide, simulator.model)
            first = Simulations(simulator, arguments, self.batch_size)
            given = first.groups(data) if are_all(data) else []
            self._trainer = Trainer(simulator, self.guide, self._optimization, given)
        return self._trainer, Simulations(self._trainer.simulator, arguments, self.batch_size)


def _train(
    trainer: Trainer,
    batches: tqdm,
    held_out: Callable[[], Iterable[Batch]] | None,
    moves: GroupMoves | None,
    log: Callable[[str, float, int], Any],
    validate_every: int,
    patience: int | None,
) -> None:
    """Takes a step on each batch, until the patience or the batches end; see `InferenceCompilation.fit`."""
    history = trainer.history
    for done, batch in enumerate(batches, 1):
        log("loss", trainer.step(batch), done)
        if getattr(trainer.guide, "num_parameters", 1) == 0:  # all conditionals are derived
            break
        if held_out is not None and (done % validate_every == 0 or done == batches.total):
            moved = 0.0 if moves is None else moves.moved
            log("validation_loss", trainer.validate(held_out(), moved), done)
            if patience is not None and history.validations_since_best() >= patience:
                break
        if done % 50 == 0:
            batches.set_postfix_str(history.recent(), refresh=False)
    batches.close()
    if trainer.best is not None:
        trainer.load_weights(trainer.best)
    if history.skipped:
        warn(f"{history.shortfall()}; they were left out.")


def _ignored(name: str, value: float, step: int) -> None:
    """Logs nothing."""


def _constant(args: tuple, kwargs: dict[str, Any]) -> ArgumentsAt:
    return lambda step: (args, kwargs)


def _check_validation(validation: Any, patience: int | None) -> None:
    if isinstance(validation, int):
        check_counts(validation=validation)
    if patience is not None and validation is None:
        raise ValueError("Expected validation with patience; got none. Pass validation=1000, say.")


def _check_refresh(refresh: int, args: Any, data: Any) -> None:
    if callable(args) or not are_all(data):
        given = "arguments that vary" if callable(args) else type(data).__name__
        raise ValueError(
            f"Expected simulations all at once in data, of the same arguments, with refresh={refresh}; got {given}."
        )
