"""`fit`: the posterior of a model given one data set, in one call.

What the model gives in closed form is derived, what it nearly gives is located, and the rest is
learned. Importance weights check the draws. Where they are bad, there are more draws, then chains
that begin at the draws. Where a conditional is learned, chains come first, then steps of training.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pyro
import torch
from pyro import poutine
from tqdm.auto import tqdm

from pyro_nami.deriving.collapsed import OPEN
from pyro_nami.fit.chains import MOST_R_HAT, run_chains
from pyro_nami.fit.posterior import Posterior, derivation, learned
from pyro_nami.fit.training import train
from pyro_nami.fit.verdict import LEAST_EFFECTIVE, checked, of_weights, untrusted
from pyro_nami.guide import first_latents
from pyro_nami.guide.nami import AutoNaMIGuide
from pyro_nami.inference.importance import weighted_draws
from pyro_nami.inference.target import Target
from pyro_nami.inference.weighted_samples import K_MAX, WeightedSamples
from pyro_nami.messages import check_counts, once, quoted, warn
from pyro_nami.program.first_run import unmarked
from pyro_nami.program.flat_priors import is_improper
from pyro_nami.program.isolation import forked_rng, kept_store, seed_rng
from pyro_nami.program.program import Program

__all__ = ["Interrupted", "fit"]

# Effective share of the draws from which more draws change little. At a tenth of it, errors are three times as large;
# at twice as much, all guides but exact ones are drawn from again.
ENOUGH = 0.5
# Share of the draws that are the prior's, where conditionals are learned. At ten times more, half of the draws are
# wasted; at ten times less, few draws are left to show a mode that the guide misses.
DEFENSIVE = 0.05
# Draws that tell whether a guide is right. A tenth are fewer than have to be effective; ten times more take ten times
# as long where few draws were asked for.
FEWEST = 1000
# Seconds of processor time that more draws, training, and chains may take. A posterior that is not trusted by then is
# returned as it is. With ten times more, a call may take twenty minutes; with ten times less, little is mended.
DRAWING = 20.0
TRAINING = 60.0
CHAINS = 45.0
# Share of searches for modes that may lead to modes other than those found. At ten times more, draws may lack the modes
# of a fifth of the searches; at ten times less, it takes hundreds of searches to tell.
MOST_UNSEEN = 0.02
MODES = "Tell modes apart by priors, or by an order of the latents."
REMEDY = (
    "Look at `posterior.guide.rules` for what was learned, and why; tell the model more by its priors, or scale its "
    "data."
)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during `fit` or `amortize`, with what there was by then.

    Attributes:
        partial: the `Posterior` that `fit` had found; None if there is none.
        simulations: those that `amortize` had drawn, which it takes as ``simulations=``; None if there are none.
    """

    partial: Posterior | None = None
    simulations: Any = None


def fit(
    model: Callable,
    *args: Any,
    draws: int = 4000,
    seed: int | None = None,
    progress: bool = True,
    **kwargs: Any,
) -> Posterior:
    """Returns the posterior of a model given the data among its arguments, with a verdict on how wrong it may be.

    Nothing is to be tuned, and there is no guide to choose. Where the model has conditionals in closed form, or on a
    grid, draws are exact. Elsewhere importance weights check and correct them. Parameters of the model's own
    (`pyro.param`) are taken as they are. For families or rules of your choice train an `AutoNaMIGuide` by SVI.

    Args:
        model: a Pyro model, with all data at once (no subsampled plates).
        *args, **kwargs: its arguments, the data among them.
        draws: number of draws.
        seed: of the random numbers; by default these are Pyro's as they come.
        progress: whether to show what is being done.

    Raises:
        ValueError: a model without latents, or without data; an improper posterior (the message names the latent); a
            log density that is finite nowhere.
        NotImplementedError: plates with random subsampling.
        Interrupted: at Ctrl-C, with what was found so far.

    Warns:
        UserWarning: draws that are not to be trusted, with the reason; parameters of the model's own; latents of which
            no further modes could be searched for.

    Example:
        >>> import pyro, torch, pyro.distributions as dist
        >>> def model(y):
        ...     mean, sd = pyro.sample("mean", dist.Normal(0.0, 10.0)), pyro.sample("sd", dist.HalfNormal(5.0))
        ...     with pyro.plate("rows", len(y)):
        ...         pyro.sample("y", dist.Normal(mean, sd), obs=y)
        >>> posterior = fit(model, torch.tensor([1.0, 2.0, 4.0]), seed=0, progress=False)
        >>> posterior["mean"].shape, posterior.verdict.kind
        (torch.Size([4000]), 'exact')
    """
    check_counts(draws=draws)
    random = contextlib.nullcontext() if seed is None else forked_rng()
    shown = "{desc} [{n_fmt} steps, {elapsed}]"
    bar = tqdm(desc="fit", bar_format=shown, leave=False, disable=not progress)
    search = _Fitting(Program(model, args, kwargs), max(draws, FEWEST), bar)
    with random, bar, _without_other_guides(), poutine.block(), once():
        if seed is not None:
            seed_rng(seed)
        try:
            posterior = search.posterior()
            search.guide.mix(is_weighted=False)
            if draws < FEWEST:
                posterior = _fewer(posterior, draws)
        except KeyboardInterrupt as error:
            interrupted = Interrupted("fit was interrupted; see `partial` for what it had found.")
            interrupted.partial = search.partial()
            raise interrupted from error
    _warn_of(posterior)
    return posterior


@dataclass
class _Fitting:
    """The stages of `fit`, and what they found so far."""

    program: Program
    num: int
    bar: Any
    guide: Any = None
    found: Any = None  # the `Posterior`
    chained: Posterior | None = None  # the draws of the last chains, whether these agree or not
    unseen: float = 0.0  # share of searches that would lead to modes that are not known
    a_draw: float = 0.0  # seconds of processor time that it takes

    def posterior(self) -> Posterior:
        """Returns the posterior, by as many stages as it takes."""
        self._say("reading the model, deriving")
        self._derive()
        if any(site.marginalized for site in self.guide.bayesnet.sites.values()):
            # Latents that are marked for enumeration by an ELBO are drawn here, as all others are.
            self.program = self.program._replace(model=unmarked(self.program.model))
            self._derive()
        self._check()
        self.guide.answer_for(*self.program.args, **self.program.kwargs)
        self.unseen = self.guide.mix() or 0.0
        self._say("weighing draws")
        if learned(self.guide):
            self._take(self._weighed(LEAST_EFFECTIVE))  # more may take long, before training
        if not learned(self.guide) or self._is_enough:
            self._take(self._weighed(self.num))
        if self.unseen > MOST_UNSEEN:
            return self.found  # which no further draws mend
        if learned(self.guide) and not self._is_enough:
            if self._run_chains():
                return self.found
            self._take(self._trained())
        if self.found.pareto_k <= K_MAX:
            self._draw_more()
        if not self.found.verdict.is_trusted and not self._run_chains():
            self._draw_more()
            if self.chained is not None and not self.found.verdict.is_trusted:
                return self.chained
        return self.found

    def partial(self) -> Posterior | None:
        """Returns what was found so far."""
        if self.found is None:
            return None
        return replace(self.found, judged=untrusted("the search was interrupted", "Let it end."))

    # ---- stages

    def _derive(self) -> None:
        """Makes the guide, whose first call derives what the model gives."""
        self.guide = AutoNaMIGuide(self.program.model).for_weights()
        with torch.no_grad(), _without_log_of_modes():
            self.guide(*self.program.args, **self.program.kwargs)

    def _weighed(self, num: int = FEWEST) -> WeightedSamples:
        """Returns weighted draws of the guide."""
        before = time.process_time()
        drawn = weighted_draws(self._target, {}, num)
        self.a_draw = (time.process_time() - before) / num
        return drawn

    def _trained(self) -> WeightedSamples:
        """Returns weighted draws of the guide after training."""
        self._say("learning")
        train(self._target, self.found, self.num, self._weighed, TRAINING, self.bar.update)
        return self._weighed(self.num)

    def _draw_more(self) -> None:
        """Takes draws resampled from 4, 16 or 64 times as many, while few are effective or weights are heavy-tailed."""
        for factor in (4, 16, 64):
            num = factor * self.num
            effective = factor * float(self.found.effective_sample_size)
            is_hopeless = effective < LEAST_EFFECTIVE or num * self.a_draw > DRAWING
            if self._is_enough or is_hopeless:
                break
            self._say(f"weighing {num:,} draws")
            self._take(self._weighed(num).equally_weighted(self.num))

    def _run_chains(self) -> bool:
        """Takes draws of chains if these agree; returns whether they do."""
        self._say("running chains")
        try:
            found = run_chains(self._target, self.found, self.num, CHAINS, self.bar.update)
        except (NotImplementedError, ValueError):
            return False
        agree = "agree" if found.r_hat <= MOST_R_HAT else "do not agree"
        how = f"chains from the guide's draws {agree} (R-hat {found.r_hat:.2f})"
        drawn = found.draws(self.found)
        if found.agree:
            judged = checked(how, drawn, found.effective)
        else:
            few = f", but only {found.effective:.0f} of their draws are effective"
            judged = untrusted(how + (few if agree == "agree" else ""), REMEDY)
        self.chained = Posterior.of(drawn, self._target, judged)
        if found.agree:
            self.found = self.chained
        return found.agree

    # ---- what is known

    @property
    def _flat(self) -> list[str]:
        """The latents with improper priors."""
        nodes = self.guide.prototype_trace.nodes
        return [n for n in self.guide.rules if n in nodes and is_improper(nodes[n]["fn"])]

    @property
    def _target(self) -> Target:
        """The model and the guide; some draws are the prior's, which show modes that a guide has not learned."""
        share = DEFENSIVE if learned(self.guide) and not self._flat else 0.0
        return Target(self.program, self.guide, prior_share=share)

    def _take(self, drawn: WeightedSamples) -> None:
        if self.unseen > MOST_UNSEEN:
            judged = untrusted("searches keep finding further modes", MODES)
        else:
            judged = of_weights(drawn, derivation(self.guide), REMEDY)
        self.found = Posterior.of(drawn, self._target, judged)

    @property
    def _is_enough(self) -> bool:
        """Whether more draws would change little."""
        found = self.found
        many = found.effective_sample_size >= ENOUGH * found.num_samples
        return bool(many and found.pareto_k <= K_MAX)

    def _say(self, stage: str) -> None:
        self.bar.set_description_str(f"fit: {stage}")

    def _check(self) -> None:
        """Raises ValueError where there is no posterior to draw from."""
        net, rules = self.guide.bayesnet, self.guide.rules
        if not net.latent:
            raise ValueError(
                f"Expected a model with at least one latent; got observed sites only: {quoted(net.observed)}."
            )
        if not net.observed:
            raise ValueError(
                f"Expected a model with data; got one that samples all of {quoted(net.sites)}, so that the posterior "
                "is the prior. Pass the data as its arguments, to `obs=` of a `pyro.sample`."
            )
        if self.guide.model_learns:
            warn(
                "The model has parameters of its own, which fit takes as they are. Learn them by SVI first, or give "
                "them priors."
            )
        flat = self._flat
        for name, note in rules.items():
            if flat and OPEN in (note.reason or ""):
                raise ValueError(
                    f"Expected a posterior; the one of '{name}' is improper: {note.reason}. Give {quoted(flat)} a "
                    "proper prior, or more data."
                )


def _warn_of(posterior: Posterior) -> None:
    """Warns of draws that are not to be trusted, and where modes could not be searched for.

    Weights and chains tell little of a mode without draws.
    """
    if not posterior.verdict.is_trusted:
        warn(f"The posterior is {posterior.verdict}")
    guide = posterior.guide
    failed = first_latents.FAILED_SEARCH
    reasons = {name: guide.rules[name].reason for name in learned(guide)}
    unsearched = {name: each for name, each in reasons.items() if failed in each}
    if unsearched:
        reason = next(iter(unsearched.values()))
        warn(
            f"No further modes of {quoted(unsearched)} were looked for, so draws may be of one of several, whatever "
            f"the verdict: {reason[reason.index(failed) :]}. Let the model take latents with batch dims on the left "
            f"(`alpha[..., index]`). {MODES}"
        )


def _fewer(posterior: Posterior, num: int) -> Posterior:
    """Returns fewer draws of a posterior, of equal weight."""
    fewer = posterior.equally_weighted(num)
    effective = float(fewer.effective_sample_size)
    judged = posterior.verdict.of_fewer(effective)
    return Posterior.of(fewer, posterior.target, judged)


@contextlib.contextmanager
def _without_other_guides() -> Iterator[None]:
    """Hides the weights of other guides in the parameter store, which have the same names as the guide's own."""
    with kept_store():
        store = pyro.get_param_store()
        for name in [name for name in store if name.startswith(f"{AutoNaMIGuide.__name__}.")]:
            del store[name]
        yield


@contextlib.contextmanager
def _without_log_of_modes() -> Iterator[None]:
    """Silences the log of modes that a guide does not draw about, as mixtures draw about them."""
    logger = logging.getLogger(first_latents.__name__)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
