"""`amortization_gap`: how much of a guide's ELBO is lost to amortization, and how much to its family."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_nami.annealing.annealing import annealed_importance_sampling
from refinement.iterative import AutoIterativeGuide
from refinement.updates import Refinement

__all__ = ["AmortizationGap", "OPTIMIZERS", "amortization_gap", "optimize_directly"]

OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": torch.optim.SGD,
    "momentum": lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9),
    "RMSProp": torch.optim.RMSprop,
    "Adam": torch.optim.Adam,
}


class AmortizationGap(NamedTuple):
    """ELBOs and bounds in nats; the last dim are instances, see `AutoIterativeGuide.log_weights`.

    Attributes:
        refined: ELBO at the guide's own estimate and after each learned step, ``(steps + 1, instances)``.
        optimized: ELBO after direct optimization of the same parameters, ``(instances,)``.
        importance: the importance-weighted bound with draws of the optimized q, ``(instances,)``.
        annealed: log evidence of all data by annealed importance sampling, and its standard error; None if not asked.
    """

    refined: Tensor
    optimized: Tensor
    importance: Tensor
    annealed: tuple[float, float] | None

    @property
    def log_evidence(self) -> float:
        """The larger of the bounds on the log evidence of all data, in nats."""
        best = float(self.importance.sum())
        return best if self.annealed is None else max(best, self.annealed[0])

    def rows(self) -> list[tuple[str, float, float]]:
        """Returns names of ELBOs and bounds, their values, and distances to `log_evidence`, in nats an instance."""
        count = self.optimized.numel()
        found = [
            ("guide", float(self.refined[0].mean())),
            (f"{len(self.refined) - 1} learned steps", float(self.refined[-1].mean())),
            ("direct optimization", float(self.optimized.mean())),
            ("importance-weighted bound", float(self.importance.mean())),
        ]
        if self.annealed is not None:
            found.append(("annealed importance sampling", self.annealed[0] / count))
        return [(name, value, self.log_evidence / count - value) for name, value in found]

    def __str__(self) -> str:
        rows = self.rows()
        guide, steps, best = (row[1] for row in rows[:3])
        lines = [f"{name:30} {value:12.3f} {gap:10.3f}" for name, value, gap in rows]
        return "\n".join(
            [
                f"{'nats an instance':30} {'ELBO':>12} {'gap':>10}",
                *lines,
                f"lost to amortization {best - guide:.3f}, of which steps learned to bring back {steps - guide:.3f}; "
                f"to the family {rows[2][2]:.3f}",
            ]
        )


def optimize_directly(
    guide: AutoIterativeGuide,
    *args: Any,
    steps: int,
    lr: float,
    optimizer: str = "Adam",
    samples: int = 1,
    **kwargs: Any,
) -> list[Refinement]:
    """Optimizes the parameters that learned steps refine by gradients, from the guide's own estimate on.

    Args:
        guide: whose networks stay as they are.
        *args, **kwargs: of the model.
        steps: of the optimizer.
        lr: its rate.
        optimizer: a name in `OPTIMIZERS`.
        samples: draws of a gradient.

    Returns:
        The estimate at first and after each step, for `AutoIterativeGuide.log_weights`.
    """
    with torch.no_grad():
        call, (estimate,), *_ = guide.trajectory(*args, steps=0, **kwargs)
    leaves = {name: value.clone().requires_grad_() for name, value in estimate.items()}
    optimizing = OPTIMIZERS[optimizer]([*leaves.values()], lr=lr)
    found = [estimate]
    for _ in range(steps):
        for name, gradient in guide.gradient(call, leaves, samples).items():
            leaves[name].grad = -gradient
        optimizing.step()
        found.append({name: value.detach().clone() for name, value in leaves.items()})
    return found


def amortization_gap(
    model: Callable,
    guide: AutoIterativeGuide,
    *args: Any,
    steps: int | None = None,
    num_particles: int = 100,
    rates: Sequence[float] = (0.01, 0.03, 0.1),
    optimizer_steps: int = 500,
    num_temperatures: int = 0,
    num_chains: int = 10,
    **kwargs: Any,
) -> AmortizationGap:
    """Returns how much of the ELBO a guide loses to amortization, and how much to its family.

    Args:
        model: for annealed importance sampling.
        guide: a trained iterative guide; wrap an `AutoNaMIGuide` with ``steps=0`` to judge one that takes no steps.
        *args, **kwargs: of the model.
        steps: learned steps; by default the guide's own number.
        num_particles: draws by which bounds are estimated.
        rates: of Adam in direct optimization; the best one counts.
        optimizer_steps: for each of these; the last tenth of the estimates is averaged.
        num_temperatures: of annealed importance sampling from the prior, 0 for none; `num_chains` are its chains.
    """
    with torch.no_grad():
        path = guide.trajectory(*args, steps=steps, **kwargs)
        refined = torch.stack(
            [guide.log_weights(path.call, each, num_particles).mean(0) for each in path.estimates]
        )
    found = []
    for rate in rates:
        taken = optimize_directly(guide, *args, steps=optimizer_steps, lr=rate, **kwargs)
        tail = taken[-max(1, optimizer_steps // 10) :]
        mean = {name: torch.stack([each[name] for each in tail]).mean(0) for name in tail[0]}
        with torch.no_grad():
            found.append(guide.log_weights(path.call, mean, num_particles))
    best = max(found, key=lambda weights: float(weights.mean(0).sum().nan_to_num(-math.inf)))
    importance = best.logsumexp(0) - math.log(num_particles)
    annealed = None
    if num_temperatures:
        chains = annealed_importance_sampling(
            model,
            None,
            *args,
            num_chains=num_chains,
            num_temperatures=num_temperatures,
            **kwargs,
        )
        annealed = float(chains.log_evidence), float(chains.log_evidence_error)
    return AmortizationGap(refined, best.mean(0), importance, annealed)
