"""`WeightedSamples`: draws with importance weights, their estimates, and whether the estimates can be trusted.

Estimates are computed from the draws and log weights when asked for, and cached. `importance`
draws, and `psis` smooths the weights.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_nami.inference.loop_names import draws_of, sites_by_name
from pyro_nami.inference.psis import check_log_weights, smooth
from pyro_nami.inference.site_messages import Values
from pyro_nami.messages import aligned, check_counts, quoted, warn

__all__ = [
    "K_MAX",
    "Pool",
    "WeightedSamples",
    "interval",
    "log_mean",
    "log_mean_error",
    "over",
    "resampled",
    "warn_of_bad",
]

# k-hat below which the weights' variance is finite; k-hat above which no practical number of draws is enough. Both are
# from Vehtari et al. 2024.
K_GOOD, K_MAX = 0.5, 0.7


class Pool(NamedTuple):
    """Errors that resampled draws inherit from the weights that they were resampled by, ``(*data sets)``.

    Attributes:
        evidence: variance of the log evidence by them, nats squared.
        draws: variance of means of draws by them, in variances of a draw: 1 / effective size less 1 / size; 0 where
            draws have moved since.
        pareto_k: the shape of their tail.
    """

    evidence: Tensor
    draws: Tensor
    pareto_k: Tensor

    @classmethod
    def none(cls, like: Tensor) -> Pool:
        """Returns the pool of draws that were not resampled."""
        return cls(torch.zeros_like(like), torch.zeros_like(like), torch.full_like(like, -math.inf))

    @classmethod
    def unknown(cls, like: Tensor) -> Pool:
        """Returns the pool of draws whose weights are not known."""
        return cls(like * math.nan, torch.zeros_like(like), like * math.nan)


@dataclass(frozen=True, eq=False, repr=False)
class WeightedSamples:
    """Draws z from a proposal, with weights w = p(z, x) / q(z) that make them draws from the posterior.

    Summaries weight by the smoothed weights unless ``smoothed=False``; evidence and sample size by the raw ones. The
    sites of a loop, as ``z_0`` to ``z_99``, are also one site ``z`` with a dim of 100 before its own.

    Args:
        samples: site -> ``(num_samples, *data sets, *site shape)``, the shape in one run: plates, then event.
        log_weights: log p(z, x) - log q(z), ``(num_samples, *data sets)``, nats. Not normalized; -inf is zero weight.
        plates: site -> name of the plate of each batch dim, None for a dim that is no plate's; for `to_arviz`.
        pool: for resampled draws, the errors and k-hat of the weights that they were resampled by.

    Raises:
        ValueError: weights that are NaN, inf, or all zero for a data set; samples that do not fit the weights.

    Example:
        >>> draws = WeightedSamples({"z": torch.tensor([0.0, 1.0])}, torch.tensor([0.0, math.log(3.0)]))
        >>> draws.mean("z")
        tensor(0.7500)
    """

    samples: Values
    log_weights: Tensor
    plates: Mapping[str, Sequence[str | None]] = field(default_factory=dict)
    pool: Pool | None = None

    def __post_init__(self) -> None:
        check_log_weights(
            self.log_weights.movedim(0, -1) if self.log_weights.dim() else self.log_weights
        )
        shape = self.log_weights.shape
        for name, value in self.samples.items():
            if value.shape[: len(shape)] != shape:
                raise ValueError(
                    f"Expected samples of site '{name}' of shape (num_samples, *data sets, *site shape) with "
                    f"{tuple(shape)} in front, as the weights have; got {tuple(value.shape)}."
                )

    # ---- the weights

    @property
    def num_samples(self) -> int:
        return self.log_weights.shape[0]

    @cached_property
    def log_evidence(self) -> Tensor:
        """Estimate of log p(x), ``(*data sets)``, nats: log of the mean weight; NaN where no weights are known."""
        found = log_mean(self.log_weights)
        return found.where(~self._pool.evidence.isnan(), math.nan)

    @cached_property
    def log_evidence_error(self) -> Tensor:
        """Standard error of `log_evidence`, ``(*data sets)``, nats: sd of the mean weight over its mean (delta method).

        inf for a single draw. Not to be trusted where `pareto_k` is not: the weights' variance may be infinite.
        """
        error = log_mean_error(self.log_weights)
        return (error.square() + self._pool.evidence).sqrt()

    @cached_property
    def effective_sample_size(self) -> Tensor:
        """(sum w)^2 / sum w^2, ``(*data sets)``: the number of draws from the posterior of the same variance."""
        inverse = self._weights(smoothed=False).square().sum(0)
        return 1 / (inverse + self._pool.draws)

    @cached_property
    def _smoothed(self) -> tuple[Tensor, Tensor]:
        smoothed, shape = smooth(self.log_weights.movedim(0, -1))
        return smoothed.movedim(-1, 0), shape

    @property
    def smoothed_log_weights(self) -> Tensor:
        """Log weights with their tail smoothed, ``(num_samples, *data sets)``, nats; see `psis.smooth`."""
        return self._smoothed[0]

    @property
    def pareto_k(self) -> Tensor:
        """Shape of the weights' tail, ``(*data sets)``; above 0.7 estimates are unreliable. See `psis.smooth`."""
        return self._smoothed[1].maximum(self._pool.pareto_k)

    @property
    def _pool(self) -> Pool:
        return self.pool or Pool.none(self.log_weights[0])

    def _weights(self, smoothed: bool) -> Tensor:
        """Normalized weights, ``(num_samples, *data sets)``."""
        return (self.smoothed_log_weights if smoothed else self.log_weights).softmax(0)

    # ---- estimates

    def mean(self, site: str, *, smoothed: bool = True) -> Tensor:
        """Returns the posterior mean of a site, ``(*data sets, *site shape)``."""
        value, weights = self._weighted(site, smoothed)
        return (value * weights).sum(0)

    def std(self, site: str, *, smoothed: bool = True) -> Tensor:
        """Returns the posterior standard deviation of a site, elementwise, ``(*data sets, *site shape)``."""
        value, weights = self._weighted(site, smoothed)
        off = value - (value * weights).sum(0)
        return (off.square() * weights).sum(0).sqrt()

    def quantile(
        self, site: str, q: float | Sequence[float] | Tensor, *, smoothed: bool = True
    ) -> Tensor:
        """Returns quantiles of a site, elementwise, ``(*shape of q, *data sets, *site shape)``.

        The quantile is the smallest draw such that the draws up to it have a share of at least q of all weight.

        Raises:
            ValueError: q outside [0, 1]; an unknown site.
        """
        value, weights = self._weighted(site, smoothed)
        probabilities = torch.as_tensor(q, dtype=torch.float64, device=weights.device)
        if not ((probabilities >= 0) & (probabilities <= 1)).all():
            raise ValueError(f"Expected quantiles between 0 and 1; got {q}.")
        ordered, index = self._named_draws(site).sort(0)
        below = weights.expand(value.shape).gather(0, index).double().cumsum(0)
        # draws last, as searchsorted wants them
        below = (below / below[-1:]).movedim(0, -1).contiguous()
        wanted = probabilities.reshape(-1).expand(*below.shape[:-1], -1).contiguous()
        # The first draw of positive weight serves q = 0; rounding is not to push a q on a step to the next draw.
        wanted = wanted.clamp(min=torch.finfo(torch.float64).tiny) - 1e-12 * wanted
        found = torch.searchsorted(below, wanted).clamp(max=self.num_samples - 1)
        return ordered.gather(0, found.movedim(-1, 0)).reshape(
            probabilities.shape + value.shape[1:]
        )

    def resample(self, num: int, *, smoothed: bool = True) -> dict[str, Tensor]:
        """Returns draws of equal weight, site -> ``(num, *data sets, *site shape)``, in random order.

        Each draw, of all sites together, comes up its expected number of times, rounded up or down; see `resampled`.

        Args:
            num: number of draws, with repetitions.
            smoothed: whether to resample by the smoothed weights.
        """
        check_counts(num=num)
        index = resampled(self._weights(smoothed).reshape(self.num_samples, -1), num)
        index = index.reshape(num, *self.log_weights.shape[1:])
        return {
            name: value.gather(0, over(index, value).expand(num, *value.shape[1:]))
            for name, value in self.samples.items()
        }

    def equally_weighted(self, num: int) -> WeightedSamples:
        """Returns draws of equal weight, as `resample` does, with the evidence and the errors of the weights."""
        own = self.effective_sample_size.reciprocal() - 1 / self.num_samples
        pool = Pool(self.log_evidence_error.square(), own.clamp(min=0.0), self.pareto_k)
        log_weights = self.log_evidence.expand(num, *self.log_evidence.shape)
        return WeightedSamples(self.resample(num), log_weights, self.plates, pool)

    def to_arviz(self, num: int | None = None) -> Any:
        """Returns resampled draws as ArviZ's ``InferenceData`` (from 1.0 on xarray's ``DataTree``).

        One chain of draws of equal weight, with plates as named dims; a batch of data sets is the dim ``data_set``,
        before the plates. The evidence, k-hat and effective sample size are attributes of the group ``posterior``.

        Args:
            num: number of draws; as many as there are samples by default.

        Raises:
            ImportError: ArviZ is not installed.
        """
        try:
            import arviz
        except ImportError as error:
            raise ImportError("to_arviz needs ArviZ: pip install pyro-nami[arviz]") from error
        drawn = self.resample(self.num_samples if num is None else num)
        posterior, dims = {}, {}
        for name, value in drawn.items():
            value, dims[name] = self._named(name, value)
            posterior[name] = value[None].cpu().numpy()
        if "posterior" in inspect.signature(arviz.from_dict).parameters:  # before 1.0
            result = arviz.from_dict(posterior=posterior, dims=dims)
        else:
            result = arviz.from_dict({"posterior": posterior}, dims=dims)
        for key in ("log_evidence", "log_evidence_error", "pareto_k", "effective_sample_size"):
            values = getattr(self, key).cpu().numpy()
            result["posterior"].attrs[key] = values.reshape(-1) if values.ndim else values.item()
        return result

    def _named(self, name: str, value: Tensor) -> tuple[Tensor, list[str]]:
        """Returns a site's draws without dims of plates that it is not in, and names for all dims but the draws'."""
        sets = ["data_set"] * (self.log_weights.dim() - 1)
        names = [*sets, *self.plates.get(name, ())]
        idle = [1 + i for i, plate in enumerate(names) if plate is None and value.shape[1 + i] == 1]
        value = value.squeeze(idle) if idle else value
        names = [plate for i, plate in enumerate(names) if 1 + i not in idle]
        names += [None] * (value.dim() - 1 - len(names))
        return value, [plate or f"{name}_dim_{i}" for i, plate in enumerate(names)]

    # ---- for the reader

    def summary(self, prob: float = 0.9, *, elements: int = 100) -> str:
        """Returns the verdict, and a table of the posterior with a line for each element, the smallest sites first.

        Its columns are the mean, the standard deviation, the median and the ends of a central interval; ``draws``, the
        number of independent draws by which the mean would be known as well; and ``moved``, by how many standard
        deviations the weights moved the mean of the draws.

        Args:
            prob: of the central interval.
            elements: how many lines a site has at most.
        """
        ends = interval(prob)
        head = ("", "mean", "sd", *(f"{100 * end:.3g}%" for end in ends), "draws", "moved")
        rows: list[tuple[str, ...]] = [head]
        sizes = {name: self._named_draws(name)[0].numel() for name in self._sites}
        for name in sorted(sizes, key=sizes.__getitem__):
            value, mean, sd = self._named_draws(name), self.mean(name), self.std(name)
            is_constant = (value == value[:1]).all(0)
            moved = ((value.to(mean).mean(0) - mean).abs() / sd).where(~is_constant, 0.0)
            told = torch.stack(
                [mean, sd, *self.quantile(name, ends).to(mean), self._effective(name), moved]
            )
            labels = self._labels(name, mean.shape, elements)
            for label, (*numbers, effective, off) in zip(labels, told.reshape(7, -1).T.tolist()):
                shown = (f"{number:.3g}" for number in numbers)
                rows.append((label, *shown, f"{effective:.0f}", f"{off:.2f}"))
            if mean.numel() > elements:
                rows.append((f"{name}: {mean.numel() - elements:,} more", *[""] * 7))
        return "\n".join([repr(self), "", *aligned(rows, words=(0,))])

    def _effective(self, name: str) -> Tensor:
        """Returns how many independent draws would tell the mean of each element as well, ``(*site shape)``."""
        value, weights = self._weighted(name, smoothed=True)
        off = (value - (weights * value).sum(0)).square()
        variance = (weights * off).sum(0)
        error = (weights.square() * off).sum(0) + variance * over(self._pool.draws[None], value)[0]
        return (variance / error).where(variance > 0, float(self.num_samples))

    def __repr__(self) -> str:
        sets = self.log_weights.shape[1:]
        told = []
        for name, steps in self._sites.items():
            shape = tuple(self.samples[steps[0]].shape[1 + len(sets) :])
            label = name if name in self.samples else f"{steps[0]} ... {steps[-1]}"
            told.append(f"{label} {shape}" if shape else label)
        sites = ", ".join(told)
        over = f" for each of {sets.numel()} data sets" if sets else ""
        if not self.log_weights.any():
            return f"WeightedSamples: {self.num_samples:,} draws of {sites}{over}, without weights"
        error = f" +- {_range(self.log_evidence_error)}" if not sets else ""
        size = self.effective_sample_size
        return (
            f"WeightedSamples: {self.num_samples:,} draws of {sites}{over}\n"
            f"  log evidence           {_range(self.log_evidence, '.4f')}{error} nats\n"
            f"  effective sample size  {_range(size, '.1f')} ({_range(100 * size / self.num_samples, '.3g')}%)\n"
            f"  Pareto k-hat           {_range(self.pareto_k, '.2f')}\n"
            f"  {self.verdict}"
        )

    @property
    def verdict(self) -> str:
        """What k-hat says of the estimates, as a sentence."""
        k = self.pareto_k
        if k.isnan().all():
            return "without weights: nothing says how near the draws are to the posterior."
        bad, count = int((k > K_MAX).sum()), k.numel()
        where = f" for {bad} of {count} data sets" if k.dim() else ""
        if bad and bool(torch.isposinf(k[k > K_MAX]).all()):
            return f"unknown: k-hat could not be estimated{where}; too few draws have weight."
        if bad:
            return f"unreliable: k-hat is above {K_MAX}{where} (largest {float(k.max()):.2f})."
        if bool((k > K_GOOD).any()):
            return f"usable: k-hat is below {K_MAX}, but the estimates converge slowly."
        return f"reliable: k-hat is below {K_GOOD}."

    @cached_property
    def _sites(self) -> dict[str, list[str]]:
        """Name -> sites, those of a loop under one name."""
        return sites_by_name(self.samples)

    def _named_draws(self, site: str) -> Tensor:
        """Returns a site's draws, or those of the sites of a loop with a dim of its steps after the data sets."""
        if site not in self.samples and site not in self._sites:
            raise ValueError(f"Expected one of the sites {quoted(self._sites)}; got '{site}'.")
        return draws_of(self.samples, self._sites.get(site, ()), site, self.log_weights.dim())

    def _labels(self, name: str, shape: Sequence[int], most: int) -> list[str]:
        """Returns the names of a site's first elements, ``name[i, j]``, or its own name if it has no dims."""
        step_dim = self.log_weights.dim() - 1
        labels = []
        for place in itertools.islice(itertools.product(*map(range, shape)), most):
            site = name
            if name not in self.samples:
                site = self._sites[name][place[step_dim]]
                place = place[:step_dim] + place[step_dim + 1 :]
            labels.append(site + (str(list(place)) if place else ""))
        return labels

    def _weighted(self, site: str, smoothed: bool) -> tuple[Tensor, Tensor]:
        """A site's draws as floats, and weights that broadcast against them."""
        weights = self._weights(smoothed)
        value = self._named_draws(site)
        if not value.is_floating_point():
            value = value.to(weights.dtype)
        return value, over(weights, value)


def interval(prob: float) -> list[float]:
    """Returns the quantiles of a central interval of a probability: its lower end, the median, and its upper end.

    Raises:
        ValueError: a probability outside of (0, 1).
    """
    if not 0 < prob < 1:
        raise ValueError(f"Expected a probability between 0 and 1; got {prob}.")
    return [(1 - prob) / 2, 0.5, (1 + prob) / 2]


def log_mean(log_weights: Tensor) -> Tensor:
    """Returns the log of the mean weight, from log weights ``(draws, *batch)``."""
    return torch.logsumexp(log_weights, 0) - math.log(len(log_weights))


def log_mean_error(log_weights: Tensor) -> Tensor:
    """Returns the standard error of `log_mean`, ``(*batch)``: sd of the mean weight over its mean (delta method)."""
    mean = log_mean(log_weights)
    if len(log_weights) == 1:
        return torch.full_like(mean, math.inf)
    return (log_weights - mean).exp().std(0) / math.sqrt(len(log_weights))


_ADVICE = (
    "train it longer, give it a richer family (AutoNaMIGuide(families='flow')), or draw more samples. Resampling "
    "cannot help."
)


def warn_of_bad(drawn: WeightedSamples, advice: str = _ADVICE) -> None:
    """Warns of weights with k-hat above 0.7."""
    if (drawn.pareto_k > K_MAX).any():
        warn(
            f"The importance weights are {drawn.verdict} The guide may miss a part of the posterior: {advice}"
        )


def resampled(weights: Tensor, num: int) -> Tensor:
    """Returns indices of draws ``(num, data sets)`` by their weights ``(draws, data sets)``, in random order.

    By systematic resampling (Kitagawa 1996, "Monte Carlo Filter and Smoother for Non-Gaussian Nonlinear State Space
    Models").
    """
    cumulative = weights.double().T.cumsum(-1)
    cumulative = (cumulative / cumulative[:, -1:]).contiguous()
    offset = torch.rand_like(cumulative[:, :1])
    order = torch.rand_like(offset.expand(-1, num)).argsort(-1)
    positions = (order + offset) / num
    return torch.searchsorted(cumulative, positions, right=True).clamp(max=len(weights) - 1).T


def over(weights: Tensor, value: Tensor) -> Tensor:
    """Returns a tensor with dims of size 1 to its right, as many as ``value`` has more."""
    return weights.reshape(weights.shape + (1,) * (value.dim() - weights.dim()))


def _range(values: Tensor, form: str = ".2g") -> str:
    """One number, or the smallest and the largest of several."""
    low, high = format(float(values.min()), form), format(float(values.max()), form)
    return low if low == high else f"{low} to {high}"
