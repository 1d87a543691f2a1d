"""How guides of Gaussian trees are compiled and measured; the tree experiments share it.

A guide is trained by Adam on fresh simulations, 10 mini-batches an epoch, and measured as in Figure 6 of Webb et al.
(2018): by its KL divergence from the exact posterior on the simulations that it trains on and on others, and by how
likely its samples for five fixed data sets are under the exact posterior. Its networks are two hidden layers of ReLU
units; with ``skip`` rows also read their inputs directly, which the paper has for its masked networks alone.
"""

from __future__ import annotations

import bisect
import ctypes
import functools
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pyro
import torch
from experiment import Run
from gaussian_tree import GaussianTree
from torch import Tensor

from pyro_nami import AutoNaMIGuide, BayesNet, InferenceCompilation, Inverse, extract_bayesnet
from pyro_nami.inference import JointDraws, Simulator

_RELEASED_EVERY = 10  # epochs
_TEST_BATCH, _DATA_SETS, _SAMPLES, _FINAL = 500, 5, 200, 50_000


class Schedule(NamedTuple):
    """How a guide is trained: by the learning rate, divided by 10 at epoch ``decimated``, or to 0 on half a cosine.

    ``sampled_every`` are the epochs between samples of the guide, ``final`` the simulations that it is judged by.
    """

    epochs: int
    decimated: int | None = 100
    learning_rate: float = 1e-3
    batch_size: int = 250
    batches: int = 10
    sampled_every: int = 5
    final: int = _FINAL

    @property
    def steps(self) -> int:
        """All steps of the optimizer."""
        return self.epochs * self.batches

    def scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        """Returns the scheduler of an optimizer, which steps once a step."""
        if self.decimated is None:
            return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.steps)
        return torch.optim.lr_scheduler.MultiStepLR(
            optimizer, [self.decimated * self.batches], gamma=0.1
        )


class Networks(NamedTuple):
    """The networks of a guide: one for all factors or one each, and the width of its two hidden layers."""

    shared: bool
    width: int
    skip: bool = True


def network_of(tree: GaussianTree) -> BayesNet:
    """Returns the Bayesian network of a tree."""
    return extract_bayesnet(tree, tree.example())


def make_guide(tree: GaussianTree, inverse: Inverse, networks: Networks) -> AutoNaMIGuide:
    """Returns a guide whose factors start at a standard deviation of 1, and know the model by its simulations only."""
    guide = AutoNaMIGuide(
        tree,
        inverse=inverse,
        hidden_features=(networks.width, networks.width),
        shared=networks.shared,
        skip=networks.skip,
        anchor=False,
        init_scale=1.0,
        activation=torch.relu,
    )
    guide(tree.example())
    return guide


def count_parameters(tree: GaussianTree, inverse: Inverse, networks: Networks) -> int:
    """Returns the number of weights that a guide computes with: those that are not masked."""
    pyro.clear_param_store()
    guide = make_guide(tree, inverse, networks)
    pyro.clear_param_store()
    return guide.num_parameters


def closest_width(
    tree: GaussianTree, inverse: Inverse, num_parameters: int, *, shared: bool, skip: bool
) -> Networks:
    """Returns the networks whose number of weights comes closest."""

    def count(width: int) -> int:
        return count_parameters(tree, inverse, Networks(shared, width, skip))

    most = 16
    while count(most) < num_parameters:
        most *= 2
    above = 1 + bisect.bisect_left(range(1, most), num_parameters, key=count)
    width = min(max(above - 1, 1), above, key=lambda width: abs(count(width) - num_parameters))
    return Networks(shared, width, skip)


# ---- training


def train(
    tree: GaussianTree,
    inverse: Inverse,
    networks: Networks,
    schedule: Schedule,
    run: Run,
    data_seed: int,
) -> dict[str, Any]:
    """Returns curves over epochs, and what was reached in the end."""
    start = time.process_time()
    with torch.device(run.options.device):
        guide = make_guide(tree, inverse, networks)
        simulations = Simulations(tree, schedule)
        measurements = Measurements(tree, guide, simulations, schedule, run.tell, data_seed)
        InferenceCompilation(
            tree,
            guide,
            functools.partial(torch.optim.Adam, lr=schedule.learning_rate, fused=True),
            batch_size=schedule.batch_size,
            scheduler=schedule.scheduler,
        ).fit(
            schedule.steps,
            (tree.example(),),
            data=simulations,
            progress=False,
            tracker=measurements,
        )
        kl, error = divergence(tree, guide, schedule.final)
    return {
        **measurements.curves(),
        "kl": kl,
        "kl_standard_error": error,
        "limit": tree.limit(inverse),
        "entropy": tree.posterior_entropy(),
        "parameters": guide.num_parameters,
        "width": networks.width,
        "edges": inverse.num_edges,
        "cpu_seconds": time.process_time() - start,
    }


@torch.no_grad()
def divergence(tree: GaussianTree, guide: AutoNaMIGuide, num: int) -> tuple[float, float]:
    """Returns E_x KL(p(z | x) || q(z | x)) by ``num`` fresh simulations, and its standard error."""
    simulator, terms = Simulator(tree, (tree.example(),)), []
    for done in range(0, num, 5000):
        draws = simulator.draw(min(5000, num - done))
        terms.append(_log_ratio(tree, guide, draws))
    ratios = torch.cat(terms)
    return ratios.mean().item(), ratios.std().item() / len(ratios) ** 0.5


class Simulations:
    """The mini-batches of one epoch after the other, drawn afresh each time that they are iterated over.

    Attributes:
        log_posterior: mean of log p(z | x) over the epoch's simulations.
    """

    def __init__(self, tree: GaussianTree, schedule: Schedule) -> None:
        self.tree, self.schedule = tree, schedule
        self.simulator = Simulator(tree, (tree.example(),))
        self.log_posterior = 0.0

    def __iter__(self) -> Iterator[JointDraws]:
        size, count = self.schedule.batch_size, self.schedule.batches
        draws = self.simulator.draw(size * count)
        self.log_posterior = (
            self.tree.posterior_log_prob(draws.latents, draws.observed).mean().item()
        )
        for first in range(0, size * count, size):
            yield draws.select(slice(first, first + size))


class Measurements:
    """What is measured at the end of every epoch: `InferenceCompilation` logs its losses here, step by step."""

    def __init__(
        self,
        tree: GaussianTree,
        guide: AutoNaMIGuide,
        simulations: Simulations,
        schedule: Schedule,
        tell: Callable[[float], None],
        data_seed: int,
    ) -> None:
        self.tree, self.guide, self.simulations, self.schedule = tree, guide, simulations, schedule
        self.tell = tell
        self.epochs: dict[int, dict[str, float]] = {}
        self.losses: list[float] = []
        with torch.random.fork_rng():
            torch.manual_seed(data_seed)
            held_out = simulations.simulator.draw(_DATA_SETS)
        self.data_sets = {
            name: x.repeat_interleave(_SAMPLES) for name, x in held_out.observed.items()
        }

    def __call__(self, name: str, value: float, step: int) -> None:
        """Takes the loss of a step."""
        self.losses.append(value)
        epoch, rest = divmod(step, self.schedule.batches)
        if rest:
            return
        losses, self.losses = self.losses, []
        with torch.no_grad():
            self.epochs[epoch] = self._measure(epoch, sum(losses) / len(losses))
        if epoch % _RELEASED_EVERY == 0:
            _release_memory()
        self.tell(epoch / (self.schedule.epochs + 1))

    def curves(self) -> dict[str, list[float]]:
        """Returns what was measured, by epoch; ``nll_epochs`` are those at which guides were sampled."""
        epochs = range(1, self.schedule.epochs + 1)
        rows = [self.epochs[epoch] for epoch in epochs]
        sampled = [epoch for epoch, row in zip(epochs, rows) if "nll" in row]
        return {
            "train_kl": [round(row["train_kl"], 5) for row in rows],
            "test_kl": [round(row["test_kl"], 5) for row in rows],
            "nll_epochs": sampled,
            "nll": [round(self.epochs[epoch]["nll"], 5) for epoch in sampled],
        }

    def _measure(self, epoch: int, loss: float) -> dict[str, float]:
        draws = self.simulations.simulator.draw(_TEST_BATCH)
        measured = {
            "train_kl": self.simulations.log_posterior + loss,
            "test_kl": _log_ratio(self.tree, self.guide, draws).mean().item(),
        }
        if epoch % self.schedule.sampled_every == 0 or epoch in (1, 2, self.schedule.epochs):
            with pyro.poutine.block(), pyro.plate("draws", _DATA_SETS * _SAMPLES, dim=-1):
                latents = self.guide(self.tree.example(), observations=self.data_sets)
            measured["nll"] = -self.tree.posterior_log_prob(latents, self.data_sets).mean().item()
        return measured


def _log_ratio(tree: GaussianTree, guide: AutoNaMIGuide, draws: JointDraws) -> Tensor:
    """Returns log p(z | x) - log q(z | x) of simulations, ``(draws,)``."""
    log_q = guide.log_prob(draws.latents, tree.example(), observations=draws.observed)
    return tree.posterior_log_prob(draws.latents, draws.observed) - log_q.double()


def _release_memory() -> None:
    """Gives freed memory back: glibc before 2.38 reuses little of it for aligned blocks, and grows by 1 MB a step."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
