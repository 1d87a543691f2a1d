"""A guide without the derived conditionals that simulations refute."""

from __future__ import annotations

__all__ = ["TOLERATED", "first_guide", "named"]

import itertools
from collections.abc import Mapping
from typing import Any

import torch

from pyro_nami.guide.first_latents import CHECKED_DRAWS
from pyro_nami.guide.nami import AutoNaMIGuide
from pyro_nami.inference.simulate import JointDraws, Simulator
from pyro_nami.program.memory import rows_in_memory

# Share of data sets at which a conditional may be wrong, ten times that for a Normal about a mode; or that may lie
# outside of all simulations. At ten times less, chance refutes; at ten times more, conditionals that are wrong stay.
TOLERATED = 0.02

_numbers = itertools.count()


def first_guide(
    simulator: Simulator, draws: JointDraws, own: bool, given: Mapping[str, Any]
) -> tuple[AutoNaMIGuide, dict[str, Any]]:
    """Returns a guide after its first call, and its options, by which it learns the conditionals that are refuted.

    Args:
        simulator: of the model.
        draws: simulations to learn from.
        own: whether the simulator made the draws; draws from another prior cannot refute a conditional.
        given: options of the guide that were asked for.
    """
    few = simulator.batch(
        draws.select(torch.arange(2) if simulator.vectorized else torch.tensor(0))
    )
    rules: dict[str, str] = dict(given.get("rules") or {})
    options: dict[str, Any] = dict(given)
    while True:
        guide = named(AutoNaMIGuide(simulator.model, observed=simulator.observed, **options))
        with torch.no_grad():
            guide.log_prob(few.draws.latents, *few.args, **few.with_data)
        if simulator.vectorized:
            refuted = _refuted(guide, simulator, draws if own else None)
            rules |= dict.fromkeys(refuted, "learned")
            again = {**given, "rules": dict(rules)} if refuted else options
        else:  # conditionals of many simulations at once need a vectorized model
            again = {**given, "exact": False, "anchor": False} if guide.num_parameters else options
        if again == options:
            return guide, options
        options = again


def named(guide: AutoNaMIGuide) -> AutoNaMIGuide:
    """Gives a new guide a name of its own in the parameter store."""
    guide._pyro_set_supermodule(f"amortized_{next(_numbers)}", guide._pyro_context)
    return guide


def _refuted(guide: AutoNaMIGuide, simulator: Simulator, draws: JointDraws | None) -> list[str]:
    """Returns the latents whose derived conditionals simulations refute: by ranks, or as they are not finite.

    Without draws given, new simulations are drawn.
    """
    if all(rule.group is None for rule in guide._made().rules.values()):
        return []
    if draws is None:
        draws, _ = simulator.draw(1000).finite()
    if not guide.num_parameters:  # and nothing will be learned from them
        draws = draws.select(torch.arange(min(draws.num, 100)))
    counts: dict[str, Any] = {}  # of draws that are not finite, and of low ones
    latents = sum(value[0].numel() for value in draws.latents.values())
    data = sum(value[0].numel() for value in draws.observed.values())
    for part in draws.in_batches(rows_in_memory(CHECKED_DRAWS * latents + data)):
        batch = simulator.batch(part)
        seen = guide.misfits(part.latents, *batch.args, **batch.with_data)
        for name, flags in seen.items():
            counts[name] = counts.get(name, 0) + flags.sum(1)
    # training ends at a density that is not finite
    most_not_finite = 0 if guide.num_parameters else TOLERATED * draws.num
    chance = draws.num / (CHECKED_DRAWS + 1)
    refuted = []
    for name, (not_finite, low) in counts.items():
        tolerated = TOLERATED * (10 if guide.rules[name].rule == "newton" else 1)
        most_low = chance + 6 * chance**0.5 + tolerated * draws.num
        if not_finite > most_not_finite or low > most_low:
            refuted.append(name)
    return refuted
