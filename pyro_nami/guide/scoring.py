"""The log density of given values of the latents, in one dense pass; tests and regressions that use it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from pyro_nami.guide.batch_dims import left_of_plates, sum_plates
from pyro_nami.guide.draw import densities, know_all, start_pass
from pyro_nami.guide.lifecycle import LazyGuide
from pyro_nami.guide.misfits import misfits
from pyro_nami.guide.one_pass import Pass
from pyro_nami.guide.plan import new_site
from pyro_nami.parameters.regression import regress
from pyro_nami.program.isolation import on_ordinary_tensors
from pyro_nami.program.masks import log_density_of

__all__ = ["DensityGuide"]


class DensityGuide(LazyGuide):
    """A guide that takes values of all latents at once."""

    def log_prob(self, latents: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Returns log q(latents | data) in nats, summed over sites and plates, in one dense pass.

        Args:
            latents: value of every latent. Batch dims go to the left of the model's plate dims, as in Pyro's
                vectorized particles: ``(*batch, *plates, *event)``, with size 1 for plates that a site is not in; or
                as `Predictive` returns them, one batch dim in front of each site's own shape.
            *args, **kwargs: of the model, ``observations=`` included; observed values may have the same batch dims.

        Returns:
            A tensor of the shape of the batch dims. The model's masks apply; its scales do not.

        Raises:
            ValueError: for a latent that is missing, or of a shape that does not fit.
        """
        return self._log_prob(latents, None, args, kwargs)

    def log_prob_of(
        self,
        weighted: bool,
        latents: Mapping[str, Tensor],
        sites: Mapping[str, Any] | None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Returns the part of `log_prob` that depends on the guide's weights, or the rest.

        Args:
            weighted: which part.
            latents, *args, **kwargs: as for `log_prob`.
            sites: site -> message of a run of the model at these values, as the nodes of `pyro.poutine.trace` hold
                them, if there was one: anchors need no other then.
        """
        plan = self._made()
        names = plan.weighted if weighted else plan.rules.keys() - plan.weighted
        return self._log_prob(latents, sites, args, kwargs, names)

    @on_ordinary_tensors
    def _log_prob(
        self,
        latents: Mapping[str, Tensor],
        sites: Mapping[str, Any] | None,
        args: tuple,
        kwargs: dict[str, Any],
        names: Collection[str] | None = None,
    ) -> Tensor:
        """Returns the log density of all latents, or of some."""
        with self._pyro_context:
            call = self._begin(args, kwargs, draws=False)
            plan, state = self._made(), self._start(call)
            target = call.target
            hidden = target.hidden if target is not None else frozenset()
            new = [
                *call.from_prior,
                *(name for name in (target.fresh if target else ()) if name not in plan.rules),
            ]
            if new:
                raise ValueError(new_site(new[0]))
            values = left_of_plates(latents, plan, call.held.keys() | call.lacking | hidden)
            names = (plan.rules.keys() if names is None else set(names)) - hidden
            if sites is None:
                needed = names and (
                    plan.masked or any(plan.rules[name].reads_prior for name in names)
                )
                sites = call.run({**call.held, **values}, until=plan.rules) if needed else {}
            total = self.network.zero()
            for log_prob in densities(
                start_pass(plan, state, call), plan, call, values, sites, names
            ):
                total = total + sum_plates(log_prob, plan.plates.nesting)
            if target is not None and target.fresh:
                fresh = left_of_plates(latents, plan, plan.rules.keys() - target.fresh)
                sites = target.call.run({**values, **fresh}, until=fresh)
                for name in fresh:
                    total = total + sum_plates(log_density_of(sites[name]), plan.plates.nesting)
            return total

    @torch.no_grad()
    def regress(self, latents: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> None:
        """Starts an untrained guide at the linear regression on simulations; see `pyro_nami.parameters.regression`.

        Args:
            latents, *args, **kwargs: of many draws, as for `log_prob`.
        """
        current, values, sites = self._at(latents, args, kwargs)
        rules = {name: rule for name, rule in self._made().learned.items() if name in values}
        targets = {
            name: rule.target(current, values[name], sites[name]["fn"])
            for name, rule in rules.items()
        }
        dims = {name: list(rule.dims) for name, rule in rules.items()}
        regress(self.network, current.state, targets, dims, self._options.embeddings)

    @torch.no_grad()
    def misfits(
        self, latents: Mapping[str, Tensor], *args: Any, **kwargs: Any
    ) -> dict[str, Tensor]:
        """Returns where draws of the model speak against what was derived from it; see `pyro_nami.guide.misfits`.

        Args:
            latents, *args, **kwargs: of many draws, as for `log_prob`.

        Returns:
            Latent -> for each draw whether its log density, given the others and the data, is not finite, and whether
            it is below those of 64 draws from the conditional, ``(2, draws)``.
        """
        return misfits(*self._at(latents, args, kwargs), self._made().plates.nesting)

    def _at(
        self, latents: Mapping[str, Tensor], args: tuple, kwargs: dict[str, Any]
    ) -> tuple[Pass, dict[str, Tensor], dict[str, Any]]:
        """Returns a pass that knows all values, the latents' own, and the sites of a run of the model at these."""
        call = self._begin(args, kwargs, draws=False)
        plan, state = self._made(), self._start(call)
        values = left_of_plates(latents, plan, call.held)
        sites = call.run({**call.held, **values}, until=plan.rules)
        current = start_pass(plan, state, call)
        know_all(current, plan, call, values, sites)
        return current, values, sites
