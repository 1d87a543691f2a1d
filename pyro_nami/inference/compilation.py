"""`InferenceCompilation`: trains a guide on its model's simulations, for all data sets at once.

This module holds the training loop; `batches` yields what it runs over, and `trainer` takes its
steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pyro.optim import PyroOptim
from torch import Tensor, nn
from tqdm import tqdm

from pyro_nami.inference.batches import (
    ArgumentsAt,
    Simulations,
    Stream,
    are_all,
    as_draws,
    stream_of,
)
from pyro_nami.inference.checkpoint import load_checkpoint, save_checkpoint
from pyro_nami.inference.history import History
from pyro_nami.inference.latent_moves import LatentMoves
from pyro_nami.inference.observations import observed_names
from pyro_nami.inference.optimizers import optimization_of
from pyro_nami.inference.simulate import Batch, Simulator
from pyro_nami.inference.target import bind
from pyro_nami.inference.trackers import Tracker, callback
from pyro_nami.inference.trainer import Trainer
from pyro_nami.messages import check_counts, warn
from pyro_nami.program.isolation import rng_state, set_rng_state

__all__ = ["InferenceCompilation"]


class InferenceCompilation:
    """Trains a guide on joint draws of a model, to minimize E_p(z, x)[-log q(z | x)].

    That is the KL divergence from posterior to guide, averaged over the model's own data, up to a constant. A step is
    one vectorized run of the model and one dense pass of the guide.

    The model's parameters are left alone. Data among its arguments are resampled, so only their shapes count.

    Under ``torchrun``, after ``torch.distributed.init_process_group``, ``wrap=DistributedDataParallel`` makes many
    processes train one guide, which must be a module. Each simulates ``batch_size`` draws a step, from random numbers
    of its own though a script seeds all alike. A step is that of one process with all draws; losses, validation and
    the end are the same for all. The first process alone shows progress, logs, and writes and reads the checkpoint.
    All must call `step` and `fit`, and `evaluate_loss` where it is the first of the calls.

    Args:
        model: a Pyro model.
        guide: any guide that accepts ``observations=``; see `CompilationLoss`.
        optim: an optimizer of Pyro's, or a function from the guide's parameters to one of torch's.
        batch_size: simulations a step, of each process; or a function from the number of steps done to it. Batches of
            ``data`` given all at once change their size with the epoch.
        observed: sites to condition on that the model samples without data, beside those of ``guide.observed``.
        scheduler: a function from a torch optimizer to one of torch's schedulers; see `Optimization`.
        clip_norm: largest norm of the gradient.
        wrap: what wraps the loss module before its first use, such as `DistributedDataParallel`.

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
        wrap: Callable[[nn.Module], nn.Module] | None = None,
    ) -> None:
        self._optimization = optimization_of(optim, scheduler, clip_norm)
        check_counts(batch_size=batch_size(0) if callable(batch_size) else batch_size)
        self.model = model
        self.guide = guide
        self.batch_size = batch_size
        self._observed, self._wrap = observed, wrap
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
                step at which they were. If more than a tenth of all simulations are not finite, naming the site.
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
        checkpoint: str | Path | None = None,
        checkpoint_every: int = 100,
        progress: bool = True,
        tracker: Tracker | Callable[[str, float, int], Any] | None = None,
    ) -> History:
        """Takes a number of training steps; a single one if all conditionals are derived and the guide has no weights.

        With validation the guide ends with the weights of the lowest validation loss, otherwise with the last ones; see
        `Trainer.validate` for latents that move. With a checkpoint that exists, training goes on from there, on a CPU
        with as many processes to the same bits as without the interruption; delete the file to start anew.

        Args:
            steps: number of steps, those before the checkpoint included.
            args, kwargs: the model's arguments; or ``args`` is a function from the step to a pair of them.
            data: simulations made before, all at once or an iterable of batches, in a form that `as_draws` takes. All
                are shuffled into batches; batches are read again from the start, but an iterator ends the training. A
                `DataLoader` with workers simulates ahead, for models that are slow.
            refresh: draws of the guide that latents of ``data``, given all at once, may move to after an epoch.
            validation, validate_every: number of held-out simulations, or the simulations; steps between validations.
            patience: validations without others to keep after which training ends.
            checkpoint: file to write to and to go on from.
            checkpoint_every: steps between checkpoints; one more comes at the end.
            progress: whether to show a progress bar.
            tracker: where to log ``loss`` and ``validation_loss``; a function of name, value and step will do.

        Raises:
            ValueError: as `step` does; or if the checkpoint is of another structure, naming the sites.
        """
        check_counts(steps=steps, validate_every=validate_every, checkpoint_every=checkpoint_every)
        _check_validation(validation, patience)
        if refresh:
            _check_refresh(refresh, args, data)
        arguments = args if callable(args) else _constant(tuple(args), dict(kwargs or {}))
        self._ask_for_any_data()
        trainer, simulations = self._set_up(arguments, data)
        held_out = simulations.held_out(validation)
        checkpoint, place = _resume(trainer, checkpoint)
        ahead = range(len(trainer.history.losses), steps)
        renew = None
        if refresh:
            renew = LatentMoves(simulations.at(0), self.guide, refresh)
        stream = stream_of(simulations, ahead, data, place, trainer.processes, renew)
        first = trainer.processes.first
        log = callback(tracker if first else None)
        plan = _Schedule(
            ahead, validate_every, patience, checkpoint, checkpoint_every, log, progress and first
        )
        _train(trainer, stream, held_out, plan)
        return trainer.history

    def _ask_for_any_data(self) -> None:
        """Has a guide answer for the data of each call, where nothing was said of its mode."""
        ask = getattr(self.guide, "serve_any_data", None)
        if ask is not None:
            ask()

    def _set_up(self, arguments: ArgumentsAt, data: Any = None) -> tuple[Trainer, Simulations]:
        """Returns the trainer, which the first call makes with the guide's structure, and simulations at arguments."""
        args, kwargs = arguments(0)
        if self._trainer is None:
            simulator = Simulator(
                self.model, args, kwargs, observed_names(self._observed, self.guide)
            )
            bind(self.guide, simulator.model)
            given = as_draws(data, simulator) if are_all(data) else None
            self._trainer = Trainer(simulator, self.guide, self._optimization, self._wrap, given)
        return self._trainer, Simulations(self._trainer.simulator, arguments, self.batch_size)


class _Schedule(NamedTuple):
    """When training validates, stops and writes checkpoints, in steps, and where it logs."""

    ahead: range
    validate_every: int
    patience: int | None
    checkpoint: str | Path | None
    checkpoint_every: int
    log: Callable[[str, float, int], Any]
    progress: bool


def _train(
    trainer: Trainer,
    stream: Stream,
    held_out: Callable[[], Iterable[Batch]] | None,
    plan: _Schedule,
) -> None:
    """Takes the steps of a schedule, until the patience or the batches end."""
    history, log = trainer.history, plan.log
    done, last = plan.ahead.start, plan.ahead.stop
    hidden = not plan.progress
    with tqdm(desc="compiling", initial=done, total=last, disable=hidden, mininterval=0.2) as bar:
        while done < last and _patient(history, plan) and (batch := next(stream.batches, None)):
            done += 1
            log("loss", trainer.step(batch), done)
            if getattr(trainer.guide, "num_parameters", 1) == 0:  # all conditionals are derived
                break
            if held_out is not None and (done % plan.validate_every == 0 or done == last):
                log("validation_loss", trainer.validate(held_out(), stream.moved), done)
            if done % plan.checkpoint_every == 0 and done < last:
                _save(trainer, stream, plan.checkpoint)
            if done % 50 == 0:
                bar.set_postfix_str(history.recent(), refresh=False)
            bar.update()
    if done > plan.ahead.start:
        _save(trainer, stream, plan.checkpoint)
    if trainer.best is not None:
        trainer.load_weights(trainer.best)
    if history.skipped and trainer.processes.first:
        warn(f"{history.shortfall()}; they were left out.")


def _patient(history: History, plan: _Schedule) -> bool:
    return plan.patience is None or history.validations_since_best() < plan.patience


def _save(trainer: Trainer, stream: Stream, checkpoint: str | Path | None) -> None:
    if checkpoint is None:
        return
    own, *others = trainer.processes.gather({"rng": rng_state(), "stream": stream.state})
    if trainer.processes.first:
        save_checkpoint(checkpoint, {**trainer.state(), **own, "others": others})


def _resume(
    trainer: Trainer, checkpoint: str | Path | None
) -> tuple[str | Path | None, dict[str, Any]]:
    """Resumes from the first process's checkpoint; returns its path and the state of this process's stream.

    Random states are restored. With another number of processes than before, the first process gets its state back, and
    the others are seeded anew.
    """
    processes = trainer.processes
    saved: dict[str, Any] = {}
    if checkpoint is not None and processes.first and Path(checkpoint).exists():
        saved = load_checkpoint(checkpoint)
    checkpoint, saved = processes.of_first((checkpoint, saved))
    trainer.load(saved)
    parts = [saved, *saved.get("others", ())]
    own = parts[processes.rank] if len(parts) == processes.size else {}
    if saved:
        set_rng_state((own or saved)["rng"])
    if not own:
        processes.part()
    return checkpoint, own.get("stream", {})


def _constant(args: tuple, kwargs: dict[str, Any]) -> ArgumentsAt:
    return lambda step: (args, kwargs)


def _check_validation(validation: Any, patience: int | None) -> None:
    if isinstance(validation, int):
        check_counts(validation=validation)
    if patience is not None and validation is None:
        raise ValueError("Expected validation with patience; got none. Pass validation=1000, say.")


def _check_refresh(refresh: int, args: Any, data: Any) -> None:
    given = "none" if data is None else type(data).__name__
    if callable(args):
        given = "arguments that vary"
    if callable(args) or not are_all(data):
        raise ValueError(
            f"Expected simulations all at once in data, of the same arguments, with refresh={refresh}; got {given}."
        )
