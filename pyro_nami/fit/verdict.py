"""`Verdict`: whether draws stand for a posterior, with the error that they stand for it with."""

from __future__ import annotations

import math

from pyro_nami.inference.weighted_samples import K_MAX, WeightedSamples, over

__all__ = ["LEAST_EFFECTIVE", "Verdict", "checked", "of_weights", "untrusted"]

# Effective draws by which a mean is within 0.1 posterior standard deviations (two standard errors). Ten times fewer
# leave three times the error; ten times more are all of the 4,000 draws that `fit` makes by default.
LEAST_EFFECTIVE = 400
# Largest standard deviation of the log weights of an exact guide, in nats: what single precision and tables leave. It
# moves means by less than as many posterior standard deviations. At ten times more, errors that count pass for
# rounding; at ten times less, rounding passes for an error.
MOST_SPREAD = 0.02
# Share by which a standard deviation may be off before its latent is named: 10%, what `fit` is asked for.
TOLD_SPREAD = 0.1


class Verdict(str):
    """A sentence that says whether draws can be trusted.

    Args:
        kind: ``"exact"``, ``"checked"`` or ``"not to be trusted"``; the sentence begins with it.
        reason: what was found, and where draws are not to be trusted what to do.
        error: by how much a mean may be off, in posterior standard deviations (two standard errors).
        spread: by what share a standard deviation may be off at most, of any latent (two standard errors).
        worst: the latent of which it may be so far off.

    Example:
        >>> verdict = Verdict("checked", "the importance weights have k-hat 0.20", 0.02, 0.03)
        >>> verdict.kind, verdict.is_trusted
        ('checked', True)
        >>> print(verdict)
        checked: the importance weights have k-hat 0.20; means are within 0.02 sd, sds within 3%.
    """

    kind: str
    reason: str
    error: float
    spread: float
    worst: str

    def __new__(
        cls, kind: str, reason: str, error: float, spread: float, worst: str = ""
    ) -> Verdict:
        percent = format(100 * spread, ".2g" if spread < TOLD_SPREAD else ".0f")
        named = f" (worst: '{worst}')" if worst and spread > TOLD_SPREAD else ""
        text = f"{kind}: {reason}; means are within {error:.2g} sd, sds within {percent}%{named}."
        if not math.isfinite(error):
            text = f"{kind}, because {reason}"
        verdict = super().__new__(cls, text)
        verdict.kind, verdict.reason, verdict.error = kind, reason, error
        verdict.spread, verdict.worst = spread, worst
        return verdict

    def __getnewargs__(self) -> tuple[str, str, float, float, str]:  # type: ignore[override]
        return self.kind, self.reason, self.error, self.spread, self.worst

    @property
    def is_trusted(self) -> bool:
        """Whether the draws are exact or checked."""
        return self.kind != "not to be trusted"

    def of_fewer(self, effective: float) -> Verdict:
        """Returns the verdict on draws that were taken from these, with an effective number of their own."""
        error = max(self.error, _error(effective))
        return Verdict(self.kind, self.reason, error, self.spread * error / self.error, self.worst)


def checked(reason: str, drawn: WeightedSamples, effective: float) -> Verdict:
    """Returns the verdict on draws that were checked, of an effective number."""
    return Verdict("checked", reason, _error(effective), *_spread(drawn, effective))


def untrusted(reason: str, remedy: str) -> Verdict:
    """Returns the verdict on draws that may be wrong by any amount."""
    return Verdict("not to be trusted", f"{reason}. {remedy}", math.inf, math.inf)


def of_weights(drawn: WeightedSamples, is_derived: bool, remedy: str) -> Verdict:
    """Returns the verdict of importance weights, of one data set; for several the verdict on the worst.

    Args:
        drawn: weighted draws.
        is_derived: whether all conditionals of the guide are in closed form, or on a grid.
        remedy: what to do about draws that are not to be trusted.
    """
    k, effective = float(drawn.pareto_k.max()), float(drawn.effective_sample_size.min())
    if math.isnan(k):
        reason = "the data have no density, so that nothing checks the draws given these data"
        return untrusted(reason, "`pyro_nami.calibrate` tells how the guide does on average.")
    spread = float(drawn.log_weights.std(0).max()) if drawn.num_samples > 1 else math.inf
    is_resampled = drawn.pool is not None and bool((drawn.pool.draws > 0).any())
    if is_derived and spread <= MOST_SPREAD and not is_resampled:
        derived = "all conditionals are in closed form or on a grid"
        agreed = f"{derived}, and log weights agree to {spread:.1g} nats"
        return Verdict("exact", agreed, _error(effective), *_spread(drawn, effective))
    if not k <= K_MAX:
        return untrusted(f"the importance weights have a heavy tail (k-hat {k:.2f})", remedy)
    if effective < LEAST_EFFECTIVE:
        few = f"only {effective:.0f} of {drawn.num_samples:,} draws are effective"
        return untrusted(few, remedy)
    tail = f"k-hat {k:.2f}" if k > -math.inf else "no tail"
    return checked(f"the importance weights have {tail}", drawn, effective)


def _error(effective: float) -> float:
    """Returns two standard errors of a mean, in posterior standard deviations."""
    return 2 / math.sqrt(effective)


def _spread(drawn: WeightedSamples, effective: float) -> tuple[float, str]:
    """Returns the largest relative error of a standard deviation of continuous latents, and the latent that has it.

    The relative error of a variance is the root of (kurtosis - 1) / draws.
    """
    weights = drawn.smoothed_log_weights.double().softmax(0)
    largest = {"": 1.0}  # latent -> kurtosis
    for name, value in drawn.samples.items():
        if (value != value.round()).any():
            own, each = over(weights, value), value.double()
            square = (each - (own * each).sum(0)).square()
            variance = (own * square).sum(0)
            kurtosis = (own * square.square()).sum(0) / variance.square()
            largest[name] = float(kurtosis.nan_to_num(0.0, 0.0, 0.0).max())
    worst = max(largest, key=largest.__getitem__)
    return _error(effective) * math.sqrt(largest[worst] - 1) / 2, worst
