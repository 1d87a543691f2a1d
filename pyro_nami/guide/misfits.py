"""Tests conditionals that were derived from the model against simulations, by ranks.

A simulated value is a draw from its exact conditional. Its log density is below those of n draws
from that conditional in one of n + 1 simulations; for Normals about a mode somewhat more often.

References:
    Talts et al. 2018, "Validating Bayesian inference algorithms with simulation-based calibration".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pyro_nami.guide.batch_dims import sum_plates
from pyro_nami.guide.one_pass import Pass
from pyro_nami.guide.rules import Exact, Located

__all__ = ["RANKED", "misfits"]

RANKED = 64  # draws that a value is compared with


def misfits(
    current: Pass, values: Mapping[str, Tensor], sites: Mapping[str, Any], nesting: int
) -> dict[str, Tensor]:
    """Returns latent -> boolean ``(2, simulations)``: whether its log density is not finite, or below all draws'.

    Args:
        current: a pass that knows all values.
        values: of the latents.
        sites: of a run of the model at these.
        nesting: number of plate dims.
    """
    found = {}
    for name, value in values.items():
        rule = current.rules[name]
        if rule.group is not None:
            each: Any = rule.log_prob(current, value, sites[name])
            own = sum_plates(each, nesting)
            low = torch.zeros_like(own, dtype=torch.bool)
            if isinstance(rule, (Exact, Located)) and sites[name]["mask"] is None:
                fn = rule.distribution(current, each.shape, None)
                try:
                    low = own < sum_plates(fn.log_prob(fn.sample((RANKED,))), nesting).amin(0)
                except torch.OutOfMemoryError:
                    raise
                except (RuntimeError, ValueError):
                    # A value that is no number; its log density shows it.
                    pass
            found[name] = torch.stack([~own.isfinite(), low])
    return found
