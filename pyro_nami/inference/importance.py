"""Importance sampling with any guide as the proposal, for all draws and data sets at once.

One run of the guide and one of the model (`Pair`) give a chunk of draws for every data set. The first chunk is checked
against single runs. Change this module for another way of drawing; what is done with the weights is in `weights`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_nami.inference.observations import as_mapping
from pyro_nami.inference.pair import BadDensity, Pair, Traces
from pyro_nami.inference.weights import K_MAX, WeightedSamples

__all__ = ["importance_sample"]

_ELEMENTS = 2**20  # of all sites' values, of one chunk by default


def importance_sample(
    model: Callable,
    guide: Callable,
    *args: Any,
    num_samples: int,
    observations: Mapping[str, Any] | None = None,
    chunk_size: int | None = None,
    **kwargs: Any,
) -> WeightedSamples:
    """Draws from a guide and weights the draws by log p(latents, data) - log q(latents | data).

    Model and guide are run without gradients and unseen by handlers outside; parameters are used as they are. The
    model's masks and scales count, as in `pyro.infer.Importance`. A model or guide that cannot be run for all draws at
    once is run draw by draw, with a warning that says why.

    Args:
        model: a Pyro model.
        guide: a guide that samples every latent of the model.
        *args, **kwargs: the arguments of both.
        num_samples: number of draws for each data set.
        observations: observed site -> value, in place of what the model observes itself. Of the site's shape in a
            single run of the model, it is one data set; with one dim more in front, ``(data sets, *site shape)``, it
            is a batch of them (also with all plate dims of the model, as in `JointDraws`). Sites without that dim are
            the same in all data sets. Passed on as ``observations=`` to a guide and a model that take it.
        chunk_size: draws in memory at a time, for all data sets together; by default as many as make about a million
            elements of all sites. The result itself holds all draws.

    Returns:
        `WeightedSamples` with `num_samples` draws of the model's latents, for each data set if there is a batch.

    Raises:
        ValueError: ``num_samples`` or ``chunk_size`` below 1; observations of an unknown site or of a wrong shape; a
            latent that only one of model and guide has; a log density that is NaN (the message names the site); a data
            set for which all weights are zero; a guide that is a point (AutoDelta).
        NotImplementedError: plates with random subsampling.

    Warns:
        UserWarning: k-hat above 0.7, or draws one by one.

    Example:
        >>> import pyro
        >>> import pyro.distributions as dist
        >>> def model():
        ...     z = pyro.sample("z", dist.Normal(0.0, 1.0))
        ...     pyro.sample("x", dist.Normal(z, 1.0), obs=torch.tensor(2.0))
        >>> def guide():
        ...     pyro.sample("z", dist.Normal(1.0, 0.5**0.5))  # the exact posterior
        >>> importance_sample(model, guide, num_samples=100).log_evidence
        tensor(-2.2655)
    """
    _check_count("num_samples", num_samples)
    if chunk_size is not None:
        _check_count("chunk_size", chunk_size)
    pair = Pair(model, guide, args, kwargs, as_mapping(observations))
    size = min(num_samples, chunk_size or max(1, _ELEMENTS // pair.elements))
    sampler = _Sampler(pair)
    chunks = [sampler.draw(min(size, num_samples - start)) for start in range(0, num_samples, size)]
    result = WeightedSamples(
        {name: torch.cat([chunk.values[name] for chunk in chunks]) for name in chunks[0].values},
        torch.cat([chunk.log_weights for chunk in chunks]),
        pair.plates,
    )
    if (result.pareto_k > K_MAX).any():
        warnings.warn(f"The importance weights are {result.verdict} {_ADVICE}", stacklevel=2)
    return result


class _Draws(NamedTuple):
    """Draws ``(draws, *data sets, *site shape)`` and their log weights ``(draws, *data sets)``."""

    values: dict[str, Tensor]
    log_weights: Tensor


class _Sampler:
    """Draws chunks: all draws of a chunk at once, or one by one where the first chunk shows that this goes wrong."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.vectorized: bool | None = None  # None before the first chunk

    def draw(self, count: int) -> _Draws:
        """Returns ``count`` draws for every data set."""
        batch = (count, *self.pair.sets)
        if self.vectorized is None:
            try:
                traces = self.pair.run(batch)
                draws, reason = self._weighted(traces, batch), self._difference(traces, batch)
            except (BadDensity, torch.OutOfMemoryError):
                raise
            except Exception as error:  # whatever a model does with batch dims that it was not written for
                reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300].rstrip('.')}"
            self.vectorized = reason is None
            if self.vectorized:
                return draws
            warnings.warn(_LOOP.format(reason), stacklevel=4)
        return self._weighted(self.pair.run(batch), batch) if self.vectorized else self._draw_in_turn(batch)

    def _draw_in_turn(self, batch: tuple[int, ...]) -> _Draws:
        sets = range(self.pair.sets[0]) if self.pair.sets else (0,)
        runs = [self._weighted(self.pair.run((), which), ()) for _ in range(batch[0]) for which in sets]

        def stacked(parts: list[Tensor]) -> Tensor:
            return torch.stack(parts).reshape(batch + parts[0].shape)

        values = {name: stacked([run.values[name] for run in runs]) for name in self.pair.latents}
        return _Draws(values, stacked([run.log_weights for run in runs]))

    def _weighted(self, traces: Traces, batch: tuple[int, ...]) -> _Draws:
        log_q, log_p = (_total(self.pair.log_probs(trace, batch), batch) for trace in traces)
        log_weights = log_p - log_q
        if not (log_weights < torch.inf).all():
            self.pair.check_densities(traces, batch)
        return _Draws(self.pair.values(traces, batch), log_weights)

    def _difference(self, traces: Traces, batch: tuple[int, ...]) -> str | None:
        """Returns where a run for many draws differs from runs for its first and last one; None if nowhere."""
        pair = self.pair
        together = [pair.log_probs(trace, batch) for trace in traces]
        for end in (0, -1):
            held = pair.one_draw(traces.guide, (end,) * len(batch))
            alone = pair.run((), pair.sets[0] - 1 if pair.sets and end else 0, held)
            for role, many, trace in zip(("guide", "model"), together, alone):
                one = pair.log_probs(trace, ())
                if one.keys() != many.keys():
                    return f"the {role} has other sites"
                for name, log_prob in one.items():
                    scale = trace.nodes[name]["log_prob"].abs().sum()
                    if not _close(log_prob, many[name][(end,) * len(batch)], scale):
                        return f"the {role}'s log density of site '{name}' differs from that in a single run"
        return None


def _check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"Expected {name} to be an int; got {value!r}.")
    if value < 1:
        raise ValueError(f"Expected {name} to be at least 1; got {value}.")


def _total(log_probs: Mapping[str, Tensor], batch: tuple[int, ...]) -> Tensor:
    return sum(log_probs.values()) if log_probs else torch.zeros(batch)  # type: ignore[return-value]


def _close(one: Tensor, many: Tensor, scale: Tensor) -> bool:
    """Whether two sums of terms agree within rounding, given the sum of the terms' sizes."""
    tolerance = 1e-6 if many.dtype == one.dtype == torch.float64 else 1e-3
    same = (one == many) | (torch.isnan(one) & torch.isnan(many))
    return bool(same | ((one - many).abs() <= tolerance * (1 + scale)))


_LOOP = (
    "The model and the guide cannot be run for all draws at once: {}. Draws are made one by one, which is slow. Write "
    "both for batch dims on the left: `alpha[..., index]` for `alpha[index]`, dims counted from the right, "
    "`torch.where` for `if`."
)
_ADVICE = (
    "The guide may miss a part of the posterior: train it longer, give it a richer family "
    "(AutoNaMIGuide(families='flow')), or draw more samples. Resampling cannot help."
)
