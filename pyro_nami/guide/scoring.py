"""The log density of given values of the latents, in one dense pass; tests and regressions that use it.

Inside the guide every tensor has its batch dims to the left of all plate dims; outside, a site has
only its own plate dims.

References:
    Talts et al. 2018, "Validating Bayesian inference algorithms with simulation-based calibration".
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from pyro_nami.guide.draw import densities, know_all, start_pass
from pyro_nami.guide.first_latents import CHECKED_DRAWS
from pyro_nami.guide.lifecycle import LazyGuide
from pyro_nami.guide.one_pass import Pass, sum_plates
from pyro_nami.guide.plan import Plan, new_site
from pyro_nami.guide.rules import Exact, Located
from pyro_nami.parameters.regression import regress
from pyro_nami.program.isolation import on_ordinary_tensors
from pyro_nami.program.masks import log_density_of
from pyro_nami.program.runner import Sites, Values

__all__ = ["DensityGuide"]


class DensityGuide(LazyGuide):
    """A guide that takes values of all latents at once."""

    def log_prob(self, latents: Values, *args: Any, **kwargs: Any) -> Tensor:
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
        latents: Values,
        sites: Sites | None,
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
        latents: Values,
        sites: Sites | None,
        args: tuple,
        kwargs: dict[str, Any],
        names: Collection[str] | None = None,
    ) -> Tensor:
        """Returns the log density of all latents, or of some."""
        with self._pyro_context:
            call = self._begin(args, kwargs, draws=False)
            plan, state = self._made(), self._start(call)
            target, loops = call.target, call.program.loops
            new = [*call.from_prior, *(name for name in target.fresh if name not in plan.rules)]
            if new:
                raise ValueError(new_site(new[0]))
            latents = loops.joined(latents)
            sites = sites and loops.messages(sites)
            known = call.held.keys() | call.lacking | target.hidden
            values = _left_of_plates(latents, plan, known)
            names = (plan.rules.keys() if names is None else set(names)) - target.hidden
            if sites is None:
                is_masked = any(site.is_masked for site in plan.sites.values())
                reads = is_masked or any(plan.rules[name].reads_prior for name in names)
                is_run = names and reads
                sites = call.run({**call.held, **values}, until=plan.rules) if is_run else {}
            terms = [*densities(start_pass(plan, state, call), values, sites, names)]
            if target.fresh:
                fresh = _left_of_plates(latents, plan, plan.rules.keys() - target.fresh)
                sites = target.call.run({**values, **fresh}, until=fresh)
                terms += [log_density_of(sites[name]) for name in fresh]
            total = self.network.zero()
            for term in terms:
                total = total + sum_plates(term, plan.plates.nesting)
            return total

    @torch.no_grad()
    def regress(self, latents: Values, *args: Any, **kwargs: Any) -> None:
        """Starts an untrained guide at the linear regression on simulations; see `pyro_nami.parameters.regression`.

        Args:
            latents, *args, **kwargs: of many draws, as for `log_prob`.
        """
        current, values, sites = self._at(latents, args, kwargs)
        plan, series = self._made(), self.network.series
        rules = {name: rule for name, rule in plan.learned.items() if name in values}
        learned = {}
        if plan.series is not None and series is not None:
            learned[plan.series.data[0]] = series.num_learned
        targets = {
            name: rule.target(current, values[name], sites[name]["fn"])
            for name, rule in rules.items()
        }
        regress(self.network, current.state, targets, self._options.embeddings, learned)

    @torch.no_grad()
    def misfits(self, latents: Values, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Returns where draws of the model speak against what was derived from it.

        Args:
            latents, *args, **kwargs: of many draws, as for `log_prob`.

        Returns:
            Latent -> for each draw whether its log density, given the others and the data, is not finite, and whether
            it is below those of 64 draws from the conditional, ``(2, draws)``.
        """
        current, values, sites = self._at(latents, args, kwargs)
        nesting, found = current.plan.plates.nesting, {}
        for name, value in values.items():
            rule = current.rules[name]
            if rule.group is None:
                continue
            each: Any = rule.log_prob(current, value, sites[name])
            own = sum_plates(each, nesting)
            low = torch.zeros_like(own, dtype=torch.bool)
            if isinstance(rule, (Exact, Located)) and sites[name]["mask"] is None:
                fn = rule.distribution(current, each.shape, None)
                try:
                    others = sum_plates(fn.log_prob(fn.sample((CHECKED_DRAWS,))), nesting)
                    low = own < others.amin(0)
                except torch.OutOfMemoryError:
                    raise
                except (RuntimeError, ValueError):
                    # A value that is no number; its log density shows it.
                    pass
            found[name] = torch.stack([~own.isfinite(), low])
        return found

    def _at(
        self, latents: Values, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[Pass, Values, Sites]:
        """Returns a pass that knows all values, the latents' values, and the sites of a run of the model at them."""
        call = self._begin(args, kwargs, draws=False)
        plan, state = self._made(), self._start(call)
        latents = call.program.loops.joined(latents)
        values = _left_of_plates(latents, plan, call.held)
        sites = call.run({**call.held, **values}, until=plan.rules)
        current = start_pass(plan, state, call)
        know_all(current, values, sites)
        return current, values, sites


def _left_of_plates(latents: Values, plan: Plan, known: Collection[str]) -> Values:
    """Returns every latent's value with batch dims left of the plate dims; see `AutoNaMIGuide.log_prob`."""
    nesting = plan.plates.nesting
    wanted = [name for name in plan.rules if name not in known and name in plan.bayesnet.sites]
    for name in wanted:
        if name not in latents:
            raise ValueError(f"Expected a value for every latent, {wanted}; got none for '{name}'.")
    own_dims = {
        name: {plan.plates.dims[plate] for plate in plan.sites[name].plates} for name in wanted
    }

    def fits(name: str) -> bool:
        value = latents[name]
        batch = value.shape[: value.dim() - plan.sites[name].event_dim]
        return all(
            batch[dim] == 1
            for dim in range(-min(len(batch), nesting), 0)
            if dim not in own_dims[name]
        )

    if all(map(fits, wanted)):
        return {name: latents[name] for name in wanted}
    values = {}
    for name in wanted:
        value, depth = latents[name], -min(own_dims[name], default=0)
        cut = value.dim() - plan.sites[name].event_dim - depth
        if cut != 1:
            raise ValueError(
                f"Expected latent '{name}' of shape (*batch, *plates, *event), batch dims left of {nesting} "
                f"plate dims, or with one batch dim in front of its own shape; got {tuple(value.shape)}."
            )
        values[name] = value.reshape(value.shape[:1] + (1,) * (nesting - depth) + value.shape[1:])
    return values
