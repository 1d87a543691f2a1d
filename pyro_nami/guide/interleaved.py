"""Drawing latents inside a run of the model, where sampling order is program order.

The messages of the latents, with the guide's distributions in place of the model's, go on to the handlers outside, and
all others stay hidden. So plates, masks and scales are the model's own, and every latent's prior, at the parents just
drawn, is at hand as its anchor. Change this module to draw otherwise along a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pyro.distributions as dist
import torch
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_nami.guide.sampling import Pass, own_infer
from pyro_nami.reading.first_run import is_latent
from pyro_nami.reading.joint_gaussian import JointGaussian
from pyro_nami.reading.runner import AllSeen, Runner

__all__ = ["Interleaved", "missing_site", "new_site"]

class Interleaved(Runner):
    """Runs the model with its latents drawn by the guide, on behalf of the handlers outside.

    Args:
        current: the pass.
        observed: values of the observed sites, as the guide reads them.
        indices: plate -> the instances that it holds.

    Attributes:
        lacking: the latent at which drawing was given up, as its exact conditional had to be derived first: another run
            can draw it. Deriving takes the rest of a run of the model, with gradients: of this one, or if this has none
            of a further one, behind it, as a model that is a handler's cannot run inside its own run.
        elimination: what this run goes on for, if it does.
    """

    def __init__(
        self,
        current: Pass,
        observed: Mapping[str, Tensor],
        indices: Mapping[str, Tensor],
    ) -> None:
        drawn = {name for name in current.program if name not in current.values}
        super().__init__({**observed, **current.values}, indices, until=drawn)
        self.current = current
        self.lacking: str | None = None
        self.elimination: JointGaussian | None = None
        self._gradients = torch.is_grad_enabled()
        self._ours: set[str] = set()

    def run(self, model: Callable, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Runs the model, and derives what it may lack; returns its sample sites, as a trace holds them."""
        validation = dist.is_validation_enabled()
        try:
            super().run(model, args, kwargs)
        finally:
            if self.elimination is not None:
                dist.enable_validation(validation)
        if self.lacking is not None:
            if self.elimination is None:
                self.current.derive(self.lacking, self.current.values)
            else:
                self.current.solve(self.lacking, self.elimination, self.sites)
        return self.sites

    def _process_message(self, msg: Any) -> None:
        super()._process_message(msg)
        name, current = msg["name"], self.current
        if self.lacking or msg["type"] != "sample" or name in current.values or site_is_subsample(msg):
            return
        if name not in current.program:
            if name not in current.assembly.names and is_latent(msg):
                raise ValueError(new_site(name))
        elif msg["is_observed"] or name in self.values:
            current.know(name, msg["value"])  # a semi-observed site, observed in this call
        elif current.lacks(name):
            self._expand(name)
            super()._process_message(msg)
        else:
            msg["stop"] = False
            self._ours.add(name)
            msg["infer"] = own_infer(msg)
            if name not in current.from_model:
                msg["fn"] = current.distribution(name, msg["fn"].batch_shape, msg["fn"])
            msg["fn"] = current.outside(msg["fn"])

    def _expand(self, name: str) -> None:
        """Goes on for the exact conditional of a latent, out of sight, or ends the run."""
        self.lacking = name
        if not (self._gradients and torch.is_grad_enabled() and self.current.derives_here(name)):
            raise AllSeen
        self.elimination = self.current.elimination(name, self.current.values)
        self.values = {**self.values, **self.elimination.points}
        self.missing = set(self.elimination.until)
        dist.enable_validation(False)  # the model's own run validates the same

    def _postprocess_message(self, msg: Any) -> None:
        if msg["type"] == "sample" and msg["name"] in self._ours and msg["value"] is not None:
            msg["value"] = self.current.take(msg["name"], msg["value"], msg["fn"])
        super()._postprocess_message(msg)


def new_site(name: str) -> str:
    """Returns the message for a site that the guide's first call did not have."""
    return (
        f"Expected the sites of the guide's first call; got a new site '{name}'. A guide's structure is fixed at its "
        "first call: make a new guide, and its first call with all sites that there may be."
    )


def missing_site(name: str) -> str:
    """Returns the message for a site of the guide's first call that a call lacks."""
    return (
        f"Expected the sites of the guide's first call; this call lacks '{name}'. A guide's structure is fixed at its "
        "first call: make a new guide, or sample the site in every call."
    )
