"""The loss of compilation, -log q of simulations: of all sites in one pass, or site by site."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pyro_nami.inference.simulate import Batch
from pyro_nami.inference.site_messages import Values
from pyro_nami.inference.target import Target
from pyro_nami.program.program import Program
from pyro_nami.program.runner import takes_observations

__all__ = ["CompilationLoss", "non_finite_sites", "site_log_probs"]


class CompilationLoss(nn.Module):
    """-log q(z | x) of simulations (z, x): a module, so that `DistributedDataParallel` can wrap it.

    A guide with ``log_prob(latents, *args, observations=..., **kwargs)`` takes one dense pass; any other runs in an
    outer plate, and takes ``observations=``, as for `CSIS`.

    Args:
        guide: takes ``observations=``.
        large: loss in nats above which the loss grows by its logarithm, so that few simulations of a heavy tail do not
            outweigh all others; at ten times less, the losses of long time series are bent.

    Attributes:
        derived: arguments, and the mean loss of the latents with conditionals derived from the model there, in nats.
            They have no weights, so this constant stands for their loss in training; at other arguments than those of
            `derive` their loss is computed.

    Example:
        >>> import pyro, pyro.distributions as dist
        >>> def guide(observations):
        ...     pyro.sample("z", dist.Normal(observations["x"], 1.0))
        >>> from pyro_nami.inference.simulate import JointDraws
        >>> draws = JointDraws({"z": torch.tensor([0.0, 1.0])}, {"x": torch.tensor([0.0, 2.0])}, nesting=0)
        >>> CompilationLoss(guide)(Batch((), {}, draws))
        tensor([0.9189, 1.4189])
    """

    def __init__(self, guide: Callable, large: float = 1e6) -> None:
        super().__init__()
        if not takes_observations(guide, is_guide=True):
            raise TypeError(
                "Expected a guide that takes observations=, a mapping from observed sites to values, as for "
                f"pyro.infer.CSIS; got {getattr(guide, '__name__', type(guide).__name__)}, which does not. Add that "
                "argument, and read the data from there."
            )
        self.guide = guide
        self.large = large
        self.derived: list[tuple[Batch, float]] = []

    def forward(self, batch: Batch, *, whole: bool = False) -> Tensor:
        """Returns the loss of every simulation in nats, ``(draws,)``; ``whole`` says to compute all of it."""
        guide: Any = self.guide
        args, _, draws = batch
        constant = None if whole else self._derived_at(batch)
        if constant is not None:
            learned = guide.log_prob_of(True, draws.latents, draws.sites, *args, **batch.with_data)
            log_prob = learned - constant
        elif hasattr(guide, "log_prob"):
            log_prob = guide.log_prob(draws.latents, *args, **batch.with_data)
        else:
            log_prob = torch.stack(list(site_log_probs(guide, batch).values())).sum(0)
        if log_prob.shape != (draws.num,):
            raise ValueError(
                f"Expected log densities of shape ({draws.num},) of the guide; got {tuple(log_prob.shape)}."
            )
        # a loss may be at the largest number
        beyond = (-log_prob / self.large).clamp(min=1)
        return torch.where(beyond > 1, self.large * (1 + beyond.log()), -log_prob)

    def derive(self, batch: Batch) -> None:
        """Has the mean loss of derived latents on a batch stand for theirs, at its arguments; not if it is infinite."""
        guide: Any = self.guide
        with_data = batch.with_data
        log_prob = guide.log_prob_of(False, batch.draws.latents, None, *batch.args, **with_data)
        if log_prob.isfinite().all():  # or else steps say where it is not
            self.derived.append((batch, -float(log_prob.mean())))

    def _derived_at(self, batch: Batch) -> float | None:
        """Returns the mean loss of derived latents at the arguments of a batch, in nats; None where it is not known."""
        here = _identities(batch.args, batch.kwargs)
        for known, constant in self.derived:
            if _identities(known.args, known.kwargs) == here:
                return constant
        return None


def _identities(args: tuple, kwargs: Mapping[str, Any]) -> list[Any]:
    """Returns which objects these arguments are, and their names."""
    return [*kwargs, *map(id, (*args, *kwargs.values()))]


def site_log_probs(guide: Callable, batch: Batch) -> Values:
    """Returns log q of simulations at every site of a guide, ``(draws,)`` each; see `Target.guide_log_probs`."""
    args, kwargs, draws = batch
    target = Target(Program(guide, args, kwargs), guide, nesting=draws.nesting)
    extent = target.extent(draws.num)._replace(data=draws.observed)
    return target.guide_log_probs(extent, draws.latents)


def non_finite_sites(
    guide: Callable, parameters: Sequence[Tensor], batch: Batch
) -> tuple[list[str], str]:
    """Returns the sites at which log q or its gradient is not finite, and the site of the largest loss.

    A sum that overflows comes from the site of the largest loss.
    """
    guilty, log_probs = [], site_log_probs(guide, batch)
    for name, log_prob in log_probs.items():
        values: list[Any] = [log_prob.detach()]
        if log_prob.requires_grad:
            values += torch.autograd.grad(
                log_prob.sum(), parameters, allow_unused=True, retain_graph=True
            )
        if not all(value.isfinite().all() for value in values if value is not None):
            guilty.append(name)
    return guilty, min(log_probs, key=lambda name: log_probs[name].min().item())
