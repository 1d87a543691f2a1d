"""Inference compilation: a guide trained on a model's own simulations, for all data sets at once.

Change this module when the loss or the loop of training changes. Its parts: `joint` simulates, `batches` says where
simulations come from, `losses` what they cost, `optimizing` moves the weights, `checkpoint` keeps them, and `ranks` are
the processes that share the work.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.optim import PyroOptim
from torch import Tensor, nn
from tqdm import tqdm

from pyro_nami.inference.batches import (
    Arguments,
    Batch,
    FreshBatches,
    OfflineBatches,
    WorkerBatches,
    held_out_batches,
    simulated,
)
from pyro_nami.inference.checkpoint import (
    check_structure,
    fingerprint,
    load_checkpoint,
    rng_state,
    save_checkpoint,
    set_rng_state,
    structure_of,
)
from pyro_nami.inference.history import History
from pyro_nami.inference.losses import CompilationLoss, non_finite_sites
from pyro_nami.inference.optimizing import Optimization, check_optimizer
from pyro_nami.inference.ranks import Ranks
from pyro_nami.inference.simulate import JointDraws, Simulator, forked_rng
from pyro_nami.inference.tracking import Tracker

__all__ = ["InferenceCompilation"]

_REGRESSED = 2000  # simulations that a guide starts from


class InferenceCompilation:
    """Trains a guide on joint draws of a model, to minimize E_p(z, x)[-log q(z | x)].

    That is the KL divergence from posterior to guide, averaged over the model's own data, up to a constant. A step is
    one vectorized run of the model and one dense pass of the guide::

        compilation = InferenceCompilation(model, guide, lambda p: torch.optim.Adam(p, lr=1e-3), batch_size=250)
        compilation.fit(2000, args=(x,), validation=1000, checkpoint="tree.ckpt")

    The model is fixed: parameters that it may have are left alone. Data among its arguments are resampled, so only
    their shapes count.

    Under ``torchrun``, after ``torch.distributed.init_process_group``, ``wrap=DistributedDataParallel`` makes many
    processes train one guide, which must be a module. Each simulates ``batch_size`` draws a step, from random numbers
    of its own though a script seeds all alike. A step is that of one process with all draws; losses, validation and
    the end are the same for all. The first process alone shows progress, logs, and writes and reads the checkpoint.
    All must call `step` and `fit`, and `evaluate_loss` where it is the first of the calls.

    Args:
        model: a Pyro model.
        guide: any guide that accepts ``observations=``; see `CompilationLoss`.
        optim: an optimizer of Pyro's, or a function from the guide's parameters to one of torch's, as
            ``functools.partial(torch.optim.Adam, lr=1e-3)``.
        batch_size: simulations a step, of each process.
        observed: sites that the model samples when no data is given, but that the guide conditions on; those of a
            guide with an attribute ``observed`` need not be named.
        scheduler: a function from a torch optimizer to one of torch's schedulers, which steps once a step
            (`ReduceLROnPlateau`: once a validation).
        clip_norm: largest norm of the gradient.
        wrap: what wraps the loss module before its first use, such as `DistributedDataParallel`.

    Attributes:
        history: of the last `fit`, or of the steps so far.

    References:
        Le, Baydin and Wood 2017, "Inference Compilation and Universal Probabilistic Programming".
    """

    def __init__(
        self,
        model: Callable,
        guide: Callable,
        optim: PyroOptim | Callable[[list[Tensor]], torch.optim.Optimizer],
        *,
        batch_size: int,
        observed: Sequence[str] = (),
        scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
        clip_norm: float | None = None,
        wrap: Callable[[nn.Module], nn.Module] | None = None,
    ) -> None:
        check_optimizer(optim, scheduler, clip_norm)
        _check_count("batch_size", batch_size)
        self.model, self.guide, self.batch_size = model, guide, batch_size
        self.history = History()
        self._observed = (observed,) if isinstance(observed, str) else tuple(observed)
        self._options = optim, scheduler, clip_norm
        self._wrap = wrap
        self._simulator: Simulator | None = None

    # ---- single steps

    def step(self, *args: Any, **kwargs: Any) -> float:
        """Takes one step on a fresh batch of simulations at the model's arguments.

        Returns:
            The loss, in nats per simulation.

        Raises:
            ValueError: if loss or gradient are not finite, naming the site; the guide then has the weights of the last
                step at which they were. If more than a tenth of all simulations are not finite, naming the site.
        """
        loss = self._update(
            next(FreshBatches(self._set_up(args, kwargs), _constant(args, kwargs), self.batch_size))
        )
        self.history.losses.append(loss)
        return loss

    def evaluate_loss(self, *args: Any, num: int = 1000, **kwargs: Any) -> float:
        """Returns the loss on ``num`` fresh simulations at the model's arguments, in nats per simulation."""
        _check_count("num", num)
        return self._mean_loss(
            simulated(self._set_up(args, kwargs), _constant(args, kwargs), self.batch_size, num)
        )

    # ---- the whole of training

    def fit(
        self,
        steps: int,
        args: Sequence[Any] | Arguments = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        data: Iterable[Any] | None = None,
        num_workers: int = 0,
        validation: int | Iterable[Any] | None = None,
        validate_every: int = 100,
        patience: int | None = None,
        checkpoint: str | Path | None = None,
        checkpoint_every: int = 100,
        progress: bool = True,
        tracker: Tracker | None = None,
    ) -> History:
        """Trains for a number of steps.

        With validation the guide ends with the weights of the lowest validation loss, otherwise with the last ones.
        With a checkpoint that exists, training goes on from there, and on a CPU with as many processes to the same bits
        as without the interruption; delete the file to start anew.

        Args:
            steps: number of steps, those before the checkpoint included.
            args, kwargs: the model's arguments; or ``args`` is a function from the step to a pair of them, for
                training over plates of varying size.
            data: batches of simulations made before, read instead of fresh ones and again from the start when they
                end: `JointDraws`, or site -> values ``(draws, *plates, *event)`` of latents and observed sites. Any
                iterable, a `DataLoader` say. An iterator ends the training with its last batch. Of many processes each
                reads its own: give them parts, by a `DistributedSampler` say.
            num_workers: processes that simulate ahead, for models that are slow; 0: none.
            validation: number of held-out simulations, the same in every run; or batches of them, as in ``data``.
            validate_every: steps between validations.
            patience: validations without a new lowest loss after which training ends.
            checkpoint: file to write to and to go on from.
            checkpoint_every: steps between checkpoints; one more comes at the end.
            progress: whether to show a progress bar.
            tracker: where to log ``loss`` and ``validation_loss``.

        Raises:
            ValueError: as `step` does; or if the checkpoint is of another structure, naming the sites.
        """
        _check_count("steps", steps)
        _check_count("validate_every", validate_every)
        _check_count("checkpoint_every", checkpoint_every)
        if isinstance(validation, int):
            _check_count("validation", validation)
        if patience is not None and validation is None:
            raise ValueError("Expected validation with patience; got none. Pass validation=1000, say.")
        arguments = args if callable(args) else _constant(tuple(args), dict(kwargs or {}))
        simulator = self._set_up(*arguments(0))
        held_out = held_out_batches(validation, simulator, arguments, self.batch_size)
        ranks = self._ranks
        history = self.history = History()
        best: dict[str, Any] | None = None
        saved: dict[str, Any] = {}
        if checkpoint is not None and ranks.first and Path(checkpoint).exists():
            saved = load_checkpoint(checkpoint)
        checkpoint, saved = ranks.of_first((checkpoint, saved))
        if saved:
            check_structure(saved["structure"], self._structure)
            self._load_guide(saved["guide"])
            self._optimization.load(saved["optimization"])
            history = self.history = History.from_state(saved["history"])
            best = saved["best"]
        start = len(history.losses)
        sessions = [saved, *saved.get("others", ())]  # by rank, if as many processes go on
        own = sessions[ranks.rank] if len(sessions) == ranks.size else {}
        if not own:
            if saved:
                set_rng_state(saved["rng"])
            ranks.part()
        stream: Any
        state = own.get("stream")
        if data is not None:
            stream = OfflineBatches(data, simulator, arguments, start, state)
        elif num_workers > 0:
            ahead = range(start, steps)
            stream = WorkerBatches(simulator, arguments, self.batch_size, ahead, num_workers, state)
        else:
            stream = FreshBatches(simulator, arguments, self.batch_size, start)
        if own:
            set_rng_state(own["rng"])

        def save() -> None:
            if checkpoint is not None:
                now, *others = ranks.gather({"rng": rng_state(), "stream": stream.state()})
                if ranks.first:
                    now = {**now, "others": others} if others else now
                    save_checkpoint(checkpoint, {**self._state(), **now, "best": best})

        tracker, progress = (tracker, progress) if ranks.first else (None, False)
        with tqdm(total=steps, initial=start, desc="compiling", disable=not progress, mininterval=0.2) as bar:
            while (step := len(history.losses)) < steps:
                if patience is not None and history.validations_since_best() >= patience:
                    break
                batch: Any = next(stream, None)
                if data is not None and ranks.any(batch is None):
                    break
                loss = self._update(batch)
                history.losses.append(loss)
                step += 1
                if tracker is not None:
                    tracker.log("loss", loss, step)
                if held_out is not None and (step % validate_every == 0 or step == steps):
                    validated = ranks.mean(self._mean_loss(held_out()))
                    history.validation.append((step, validated))
                    self._optimization.validated(validated)
                    if history.best_step == step:
                        best = copy.deepcopy(self._guide_state())
                    if tracker is not None:
                        tracker.log("validation_loss", validated, step)
                if step % checkpoint_every == 0 and step < steps:
                    save()
                if step % 50 == 0:
                    bar.set_postfix_str(history.recent(), refresh=False)
                bar.update()
        if len(history.losses) > start:
            save()
        if best is not None:
            self._load_guide(best)
        if history.skipped and ranks.first:
            warnings.warn(f"{history.shortfall()}; they were left out.", stacklevel=2)
        return history

    # ---- set-up

    def _set_up(self, args: tuple, kwargs: dict[str, Any]) -> Simulator:
        """Returns the simulator; at the first call makes it, the guide's structure and all that depends on it."""
        if self._simulator is not None:
            return self._simulator
        observed = dict.fromkeys((*self._observed, *getattr(self.guide, "observed", ())))
        simulator = Simulator(self.model, args, kwargs, tuple(observed))
        if simulator.trainable:
            warnings.warn(
                f"The model has trainable parameters, {', '.join(map(repr, simulator.trainable))}. The guide is "
                "compiled for the model as it is, and they are left alone; fit them first, by SVI say.",
                stacklevel=4,
            )
        with forked_rng():
            draws, _ = simulator.draw(16).finite()
        loss = CompilationLoss(self.guide)
        with torch.no_grad(), pyro.validation_enabled(False), poutine.trace(param_only=True) as capture:
            loss(draws, args, kwargs)  # lazy guides get their parameters
        if simulator.vectorized and hasattr(self.guide, "regress"):
            with forked_rng(), pyro.validation_enabled(False), poutine.block():
                draws, _ = simulator.draw(_REGRESSED, keep_sites=True).finite()
                if draws.sites is not None:
                    self.guide.regress(draws.sites, *args, **{**kwargs, "observations": draws.observed})
        if isinstance(self.guide, nn.Module):
            parameters: dict[str, Tensor] = {
                n: p for n, p in self.guide.named_parameters() if p.requires_grad
            }
        else:
            sites: dict[str, Any] = dict(capture.trace.nodes)
            parameters = {name: site["value"].unconstrained() for name, site in sites.items()}
        if not parameters:
            raise ValueError("Expected a guide with parameters; got none.")
        self._parameters = parameters
        self._optimization = Optimization(*self._options, parameters)
        self._structure = structure_of(self.guide, parameters)
        self._bare_loss = loss
        self._loss: nn.Module = loss if self._wrap is None else self._wrap(loss)
        self._finite = [value.detach().clone() for value in parameters.values()]  # as the wrapper set them
        self._ranks = Ranks(self._loss, self._finite[0].device)
        self._ranks.part()
        self._simulator = simulator
        return simulator

    def _state(self) -> dict[str, Any]:
        """Returns what a checkpoint holds of training, alike in all processes, besides the best weights."""
        return {
            "structure": self._structure,
            "fingerprint": fingerprint(self._structure),
            "guide": self._guide_state(),
            "optimization": self._optimization.state(),
            "history": self.history.state(),
        }

    def _guide_state(self) -> dict[str, Any]:
        if isinstance(self.guide, nn.Module):
            return self.guide.state_dict()
        return {name: value.detach() for name, value in self._parameters.items()}

    def _load_guide(self, state: Mapping[str, Any]) -> None:
        if isinstance(self.guide, nn.Module):
            self.guide.load_state_dict(state)
        else:
            with torch.no_grad():
                for name, value in self._parameters.items():
                    value.copy_(state[name])
        torch._foreach_copy_(self._finite, [*self._parameters.values()])

    # ---- losses

    @torch.no_grad()
    def _mean_loss(self, batches: Iterable[Batch]) -> float:
        """Returns the mean loss over all finite simulations of this process; warns of those left out."""
        total, seen = 0.0, History()
        with pyro.validation_enabled(False), poutine.block():
            for args, kwargs, draws in batches:
                kept, non_finite = draws.to(self._finite[0].device).finite()
                seen.count(draws.num, draws.num - kept.num, non_finite)
                if kept.num:
                    total += self._bare_loss(kept, args, kwargs).sum().item()
        if seen.skipped == seen.simulations:
            raise ValueError(f"Expected finite simulations to evaluate the loss on; {seen.shortfall()}.")
        if seen.skipped:
            warnings.warn(f"Held out: {seen.shortfall()}; they were left out.", stacklevel=3)
        return total / (seen.simulations - seen.skipped)

    def _update(self, batch: Batch) -> float:
        """Moves the weights by one step; returns the loss before, over the simulations of all processes."""
        args, kwargs, drawn = batch
        draws, non_finite = drawn.to(self._finite[0].device).finite()  # a loader's may be on the host
        sites = (*drawn.latents, *drawn.observed)
        own = (drawn.num, draws.num, draws.num == 0, *(non_finite.get(name, 0) for name in sites))
        total, kept, empty, *bad = map(int, self._ranks.sum(own))
        self.history.count(total, total - kept, {name: count for name, count in zip(sites, bad) if count})
        if empty:  # in any process: none may go on alone
            return math.nan
        parameters: list[Tensor] = [*self._parameters.values()]
        with pyro.validation_enabled(False), poutine.block():
            share = draws.num * self._ranks.size / kept  # as gradients are averaged over processes
            loss = self._loss(draws, args, kwargs).mean() * share
            self._optimization.zero_grad()
            loss.backward(inputs=parameters)  # none for the model's own
        norm = self._optimization.clip()
        loss_value, norm_value = torch.stack((loss.detach(), norm.to(loss))).tolist()
        loss_value = self._ranks.mean(loss_value)
        if not (math.isfinite(loss_value) and math.isfinite(norm_value)):
            message = self._non_finite(loss_value, draws, args, kwargs)
            with torch.no_grad():
                torch._foreach_copy_(parameters, self._finite)
            raise ValueError(message)
        torch._foreach_copy_(self._finite, parameters)
        self._optimization.step()
        return loss_value

    def _non_finite(self, loss: float, draws: JointDraws, args: tuple, kwargs: dict[str, Any]) -> str:
        """Returns the message for a loss or gradient that is not finite, with the sites that it comes from."""
        with pyro.validation_enabled(False):
            sites, largest = non_finite_sites(self.guide, [*self._parameters.values()], draws, args, kwargs)
        found = [f"'{name}' (values up to {draws.latents[name].abs().max().item():.3g})" for name in sites]
        found = [words for part in self._ranks.gather(found) for words in part]
        where = ", ".join(found) or f"no single site (the largest loss is that of '{largest}')"
        return (
            f"Expected a finite loss and gradient; in step {len(self.history.losses) + 1} the guide's log density or "
            f"its gradient is not finite at {where}, and the loss is {loss:.3g}. The guide has the weights of the last "
            "step at which all was finite. Lower the learning rate, pass clip_norm=, or give the site a prior with "
            "lighter tails."
        )


def _constant(args: tuple, kwargs: dict[str, Any]) -> Arguments:
    return lambda step: (args, kwargs)


def _check_count(name: str, value: Any) -> None:
    if not (isinstance(value, int) and value > 0):
        raise ValueError(f"Expected {name} to be a positive number; got {value!r}.")
