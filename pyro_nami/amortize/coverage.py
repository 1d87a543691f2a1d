"""Whether a guide's intervals hold the latents of held-out simulations as often as they should, and what to do if not.

A guide that overfits its simulations is overconfident: its posteriors are too narrow at other data. Held-out
simulations show it, by the share of their latents in central intervals of the guide. `widen` gives the noise of each
learned factor the standard deviation that they ask for.
"""

from __future__ import annotations

__all__ = ["Coverage", "measured", "widen"]

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pyro
import torch
from pyro import poutine
from torch import Tensor

from pyro_nami.guide.nami import AutoNaMIGuide
from pyro_nami.inference.ranks import below, density_ranks, guide_draws, ranks_among
from pyro_nami.inference.simulate import Batch, JointDraws, Simulator
from pyro_nami.inference.target import Target
from pyro_nami.program.isolation import forked_rng
from pyro_nami.program.memory import rows_in_memory
from pyro_nami.program.runner import Runner

# Probability of the intervals; of narrower ones, the shares of a guide that is too narrow are less off.
LEVEL = 0.9
# Draws of the guide for each held-out simulation. With ten times fewer, ranks are too coarse for the level.
DRAWS = 99
# Most held-out simulations that are looked at; the standard error of a share is then one percent.
MOST_LOOKED_AT = 1000
# A share is too low if it is so many standard errors and the slack below the level; nobody would notice the slack.
ERRORS, SLACK = 3.0, 0.01
TOGETHER = "all together"


class Coverage(NamedTuple):
    """How often central intervals of a guide held the true latents of held-out simulations.

    Attributes:
        shares: latent -> share of its elements within the intervals; ``"all together"`` -> share of simulations within
            the guide's regions of highest density.
        num: simulations.
        by_size: of simulations at several sizes of plates, the sizes of the smallest, middle and largest third -> the
            share of these within regions of highest density.
        widened: latent -> the factor by which its noise was widened after training, where it was.
        level: probability of the intervals.
    """

    shares: Mapping[str, float]
    num: int
    by_size: Mapping[str, float] = {}
    widened: Mapping[str, float] = {}
    level: float = LEVEL

    @property
    def overconfident(self) -> list[str]:
        """The latents, and the sizes, whose shares are too low for chance; the lowest first."""
        parts = max(1, len(self.by_size))
        low = [name for name, share in self.shares.items() if share < self._least(self.num)]
        low += [
            name for name, share in self.by_size.items() if share < self._least(self.num / parts)
        ]
        return sorted(low, key={**self.shares, **self.by_size}.__getitem__)

    def _least(self, num: float) -> float:
        """Returns the least share of so many simulations that chance explains."""
        return self.level - ERRORS * math.sqrt(self.level * (1 - self.level) / num) - SLACK

    def __str__(self) -> str:
        shares = ", ".join(
            f"{share:.0%} of '{name}'" for name, share in list(self.shares.items())[:6]
        )
        text = f"{self.level:.0%} intervals hold {shares}, of {self.num:,} held-out simulations"
        if self.by_size:
            sizes = ", ".join(f"{share:.0%} at {name}" for name, share in self.by_size.items())
            text += f"; all together {sizes}"
        if self.widened:
            factors = ", ".join(f"'{name}' by {scale:.2f}" for name, scale in self.widened.items())
            text += f"; widened after training: {factors}"
        return text


@torch.no_grad()
def measured(
    simulator: Simulator, guide: AutoNaMIGuide, held_out: Sequence[Batch]
) -> Coverage | None:
    """Returns how often the guide's intervals hold the latents of held-out simulations; None where it cannot draw so.

    The random state outside stays as it was.

    Args:
        simulator: of the model.
        guide: a trained guide.
        held_out: simulations, by the arguments that they were made at.
    """
    found: dict[str, list[Tensor]] = {}
    looked_at = _spread(held_out, MOST_LOOKED_AT)
    with forked_rng(), poutine.block(), pyro.validation_enabled(False):
        try:
            for batch in looked_at:
                for name, inside in _inside(simulator, guide, batch).items():
                    found.setdefault(name, []).append(inside)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, NotImplementedError):
            return None
    shares = {name: _mean(parts) for name, parts in found.items()}
    sizes = [_data_size(batch.draws) for batch in looked_at]
    order = sorted(range(len(sizes)), key=sizes.__getitem__)
    parts = [order[i * len(order) // 3 : (i + 1) * len(order) // 3] for i in range(3)]
    by_size = {
        f"{sizes[rows[0]]} to {sizes[rows[-1]]} numbers of data": _mean(
            [found[TOGETHER][i] for i in rows]
        )
        for rows in (parts if len(set(sizes)) >= 3 else ())
    }
    return Coverage(shares, sum(batch.draws.num for batch in looked_at), by_size)


def _mean(parts: Sequence[Tensor]) -> float:
    return float(torch.cat([*parts]).double().mean())


def _data_size(draws: JointDraws) -> int:
    """Returns how many numbers the data of a simulation are."""
    return sum(value[0].numel() for value in draws.observed.values())


def _spread(held_out: Sequence[Batch], most: int) -> list[Batch]:
    """Returns at most so many of the simulations, the same share of each group."""
    share = min(1.0, most / sum(batch.draws.num for batch in held_out))
    counts = [max(1, round(share * batch.draws.num)) for batch in held_out]
    pairs = zip(held_out, counts)
    return [batch._replace(draws=next(batch.draws.in_batches(count))) for batch, count in pairs]


def _inside(simulator: Simulator, guide: AutoNaMIGuide, batch: Batch) -> dict[str, Tensor]:
    """Returns latent -> which of its elements are in the intervals; and which simulations are, of all together."""
    target = Target(
        simulator.at(*batch.args, **batch.kwargs).program, guide, nesting=simulator.nesting
    )
    elements = sum(value[0].numel() for value in batch.draws.latents.values())
    found: dict[str, list[Tensor]] = {}
    for part in batch.draws.in_batches(rows_in_memory(DRAWS * elements)):
        extent = target.extent(DRAWS, slice(0, part.num))._replace(data=part.observed)
        draws = guide_draws(target.run_guide(extent, Runner({})), DRAWS, part)
        for name, drawn in draws.items():
            ranks = ranks_among(drawn, part.latents[name], name)
            low = (1 - LEVEL) / 2
            share = below(ranks, 1 - low, DRAWS) - below(ranks, low, DRAWS)
            found.setdefault(name, []).append(share.flatten())
        denser = density_ranks(target, extent, draws, part, TOGETHER)
        found.setdefault(TOGETHER, []).append(below(denser, LEVEL, DRAWS))
    return {name: torch.cat(parts) for name, parts in found.items()}


@torch.no_grad()
def widen(guide: AutoNaMIGuide, held_out: Sequence[Batch]) -> dict[str, float]:
    """Widens the noise of learned factors until the ball that is to hold it at 90% of held-out simulations does.

    With noise e of standard deviation s, in place of 1, the log density of n numbers is a constant less
    ``n log s + |e|^2 / (2 s^2)``. Its values at s of 1 and 2 give ``|e|^2``, which is a chi-squared variable times s^2.

    Returns:
        Latent -> its standard deviation, where that is above one by more than its standard error, ``num ** -0.5``.
    """
    widened = {}
    before = _log_densities(guide, held_out)
    for name, rule in guide._made().learned.items():
        family: Any = rule.family
        if getattr(family, "noise_scale", None) != 1.0:
            continue
        family.noise_scale = 2.0
        gained = _log_densities(guide, held_out) - before
        values = [family.layout.elements(batch.draws.latents[name]) for batch in held_out]
        num = torch.cat([gained.new_full((len(each),), each[0].numel()) for each in values])
        square = (gained + num * math.log(2.0)) * 8 / 3
        scale = math.sqrt(max(0.0, float((square / _chi_squared(num)).quantile(LEVEL))))
        is_narrow = scale > 1 + len(square) ** -0.5
        family.noise_scale = scale if is_narrow else 1.0
        if is_narrow:
            widened[name] = scale
    return widened


def _chi_squared(freedom: Tensor) -> Tensor:
    """Returns the quantiles of chi-squared variables at the level, by Wilson and Hilferty (1931): to 3 percent."""
    part = 2 / (9 * freedom)
    normal = math.sqrt(2) * torch.erfinv(torch.tensor(2 * LEVEL - 1)).to(freedom)
    return freedom * (1 - part + normal * part.sqrt()) ** 3


def _log_densities(guide: AutoNaMIGuide, held_out: Sequence[Batch]) -> Tensor:
    """Returns the guide's log density at each held-out simulation, in nats, ``(simulations,)`` in float64."""
    found = [
        guide.log_prob(batch.draws.latents, *batch.args, **batch.with_data) for batch in held_out
    ]
    return torch.cat(found).double()
