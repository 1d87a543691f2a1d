"""`Trainer`: a guide with its optimizer: initial state, one training step, and validation."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pyro
import torch
from pyro import poutine
from torch import Tensor, nn

from pyro_nami.inference.history import History
from pyro_nami.inference.losses import CompilationLoss, non_finite_sites, site_log_probs
from pyro_nami.inference.optimizers import Optimization
from pyro_nami.inference.simulate import Batch, Simulator
from pyro_nami.inference.site_messages import Values
from pyro_nami.messages import quoted, warn
from pyro_nami.program.isolation import forked_rng
from pyro_nami.program.many_draws import MANY_DRAWS

__all__ = ["Trainer"]

REGRESSED = 2000  # simulations that a guide is regressed on; a tenth are fewer than the features of many guides


class Trainer:
    """Trains a guide's weights, after the guide's first call, which is made here.

    The first call is on the first group of simulations ``given``, or else on simulations that are drawn for it.

    Attributes:
        history: of the steps since the last `begin`.
        best: the weights of the latest validation whose loss was as low as others', see `validate`.
        lowest: the loss of each held-out simulation where their mean was lowest.
    """

    def __init__(
        self,
        simulator: Simulator,
        guide: Callable,
        optimization: Callable[[list[Tensor]], Optimization],
        given: Sequence[Batch],
    ) -> None:
        if simulator.trainable:
            warn(
                f"The model has trainable parameters, {quoted(simulator.trainable)}. Compilation leaves them as they "
                "are, and trains the guide for the model with these. Fit them first, for instance by SVI."
            )
        self.simulator = simulator
        self.guide = guide
        self.loss = CompilationLoss(guide)
        self.parameters = _first_call(self.loss, simulator, given)
        if not self.parameters:
            raise ValueError("Expected a guide with parameters; got none.")
        self.optimization = optimization([*self.parameters.values()])
        self.finite = [value.detach().clone() for value in self.parameters.values()]
        self.begin()

    def begin(self) -> None:
        """Begins a history, and validations that no earlier weights are compared with."""
        self.history = History()
        self.best: dict[str, Any] | None = None
        self.lowest: Tensor | None = None

    def step(self, batch: Batch) -> float:
        """Moves the weights by one step; returns the loss before, NaN where no simulation is finite."""
        batch = self._kept(batch, self.history)
        loss = self._descend(batch) if batch.draws.num else math.nan
        self.history.losses.append(loss)
        return loss

    def _kept(self, batch: Batch, history: History) -> Batch:
        """Returns the finite simulations of a batch, which a loader may have on the host, and counts the others."""
        draws = history.finite(batch.draws.to(self.finite[0].device))
        return batch._replace(draws=draws)

    def validate(
        self, batches: Iterable[Batch], moved: float = 0.0, *, reach: float = 10.0
    ) -> float:
        """Returns the mean loss on held-out batches, and keeps the weights if it is low enough.

        Few held-out simulations do not tell which of many weights are best. Where the latents of the training
        simulations are moved, so that they are not overfit, later weights are better, as the learning rate falls.
        So the loss of later weights may be above the lowest loss, by the share of the latents that ``moved`` times
        the standard error of the difference.

        Args:
            batches: held-out simulations.
            moved: the share of the latents of the training simulations that moves between epochs.
            reach: largest loss of a simulation, in widths of the central 68% of losses above these; so that one
                simulation far out does not choose the weights.
        """
        losses, done = self.losses(batches), len(self.history.losses)
        low, high = losses.quantile(0.16), losses.quantile(0.84)
        losses = losses.clamp(max=high + reach * (high - low))
        loss = float(losses.mean())
        self.history.validation.append((done, loss))
        self.optimization.validated(loss)
        if self._is_low(losses, moved):
            self.best, self.history.best_step = copy.deepcopy(self.weights()), done
        return loss

    def _is_low(self, losses: Tensor, errors: float) -> bool:
        """Whether the mean held-out loss is above the lowest by at most a number of standard errors."""
        lowest = torch.zeros(()) if self.lowest is None else self.lowest.to(losses)
        above = losses - (lowest if lowest.shape == losses.shape else lowest.mean())
        mean = float(above.mean())
        if self.lowest is None or mean < 0:
            self.lowest = losses
            return math.isfinite(mean)
        return mean <= errors * float(above.std(correction=0)) / math.sqrt(len(above))

    @torch.no_grad()
    def losses(self, batches: Iterable[Batch]) -> Tensor:
        """Returns the losses of all finite simulations, in float64; warns of the others."""
        losses, seen = [], History()
        with _unseen():
            for batch in batches:
                batch = self._kept(batch, seen)
                if batch.draws.num:
                    losses.append(self.loss(batch, whole=True).double())
        if not losses:
            raise ValueError(
                f"Expected finite simulations to evaluate the loss on; {seen.shortfall()}."
            )
        if seen.skipped:
            warn(f"Held out: {seen.shortfall()}; they were left out.")
        return torch.cat(losses)

    def _descend(self, batch: Batch) -> float:
        parameters = self.optimization.parameters
        with _unseen():
            loss = self.loss(batch).mean()
            norm = self.optimization.backward(loss)
        loss_value, norm_value = torch.stack((loss.detach(), norm.to(loss))).tolist()
        if math.isfinite(loss_value) and math.isfinite(norm_value):
            _copy(parameters, self.finite)
            self.optimization.step()
            return loss_value
        message = self._non_finite(loss_value, batch)
        _copy(self.finite, parameters)
        raise ValueError(message)

    def _non_finite(self, loss: float, batch: Batch) -> str:
        """Returns the message for a loss or gradient that is not finite, with the sites that it comes from."""
        with pyro.validation_enabled(False):
            sites, largest = non_finite_sites(self.guide, self.optimization.parameters, batch)
        latents = batch.draws.latents
        found = [f"'{name}' (values up to {latents[name].abs().max():.3g})" for name in sites]
        where = ", ".join(found) or f"no single site (the largest loss is that of '{largest}')"
        return (
            f"Expected a finite loss and gradient; in step {len(self.history.losses) + 1} the guide's log density or "
            f"its gradient is not finite at {where}, and the loss is {loss:.3g}. The guide has the weights of the last "
            "step at which all was finite. Lower the learning rate, pass clip_norm=, or give the site a prior with "
            "lighter tails."
        )

    def weights(self) -> dict[str, Any]:
        """Returns the guide's state; its tensors go on to move."""
        if isinstance(self.guide, nn.Module):
            return self.guide.state_dict()
        return {name: value.detach() for name, value in self.parameters.items()}

    def load_weights(self, state: Mapping[str, Any]) -> None:
        if isinstance(self.guide, nn.Module):
            self.guide.load_state_dict(state)
        else:
            _copy([state[name] for name in self.parameters], self.optimization.parameters)
        _copy(self.optimization.parameters, self.finite)


def _first_call(loss: CompilationLoss, simulator: Simulator, given: Sequence[Batch]) -> Values:
    """Calls a guide, which makes lazy parameters, and regresses it if it can be; returns its parameters by name."""
    guide: Any = loss.guide
    regress: Any = getattr(guide, "regress", None) if simulator.vectorized else None
    count = MANY_DRAWS if regress is None else REGRESSED
    with forked_rng():
        draws = next(given[0].draws.in_batches(count)) if given else simulator.draw(count)
    draws, _ = draws.finite()
    batch = simulator.batch(draws)
    few = batch._replace(draws=next(draws.in_batches(MANY_DRAWS)))
    with torch.no_grad(), _unseen():
        if not isinstance(guide, nn.Module):
            seen = poutine.trace(guide, param_only=True)
            site_log_probs(seen, few)
            nodes: Any = seen.trace.nodes
            return {name: nodes[name]["value"].unconstrained() for name in seen.trace.param_nodes}
        loss(few)
    if regress is not None:
        with forked_rng(), _unseen():
            regress(draws.latents, *batch.args, **batch.with_data)
    if simulator.vectorized and hasattr(guide, "log_prob_of") and guide.num_parameters:
        with torch.no_grad(), _unseen():
            loss.derive(batch)
            for group in given[1:]:
                loss.derive(group._replace(draws=next(group.draws.in_batches(count))))
    return {name: value for name, value in guide.named_parameters() if value.requires_grad}


@contextmanager
def _unseen() -> Iterator[None]:
    with pyro.validation_enabled(False), poutine.block():
        yield


@torch.no_grad()
def _copy(values: list[Tensor], to: list[Tensor]) -> None:
    torch._foreach_copy_(to, values)
