"""Conditionals of one latent in closed form: its prior is an exponential family, its children add to its parameters.

With a prior of sufficient statistics T1, T2 and children of log density c + e1 T1(z) + e2 T2(z) the conditional is of
the prior's family. Slope and curvature at one point give e1 and e2; those at further points refute the equation. To add
a form, add a row to `FORMS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import transform_to

from pyro_nami.deriving.expansion import (
    TOLERANCE,
    derivatives,
    irregular,
    squeezed,
)
from pyro_nami.deriving.probing import ProbedExpansion
from pyro_nami.factors.truncated_normal import TruncatedNormal
from pyro_nami.factors.wrappers import innermost
from pyro_nami.program.runner import Sites, Values

__all__ = ["FORMS", "ByStatistics", "Form", "forms_of"]


def _about_mean(prior: Any, t: Tensor) -> Tensor:
    """Returns the prior's mean moved by t in unconstrained space."""
    bijection = transform_to(prior.support)
    return bijection(bijection.inv(prior.mean) + t)


class Form(NamedTuple):
    """A family of conditionals.

    Attributes:
        priors: types of the prior.
        statistics: z -> T1(z), T2(z), elementwise.
        kind: type of the conditional.
        parameters: prior, e1, e2 -> those of the conditional.
        at: prior, t -> a point in the support, whatever t is; near the prior's bulk for small ones.
    """

    priors: tuple[type, ...]
    statistics: Callable[[Tensor], tuple[Tensor, Tensor]]
    kind: Any
    parameters: Callable[[Any, Tensor, Tensor], tuple[Tensor, ...]]
    at: Callable[[Any, Tensor], Tensor] = _about_mean


def _log_normal(prior: Any, e1: Tensor, e2: Tensor) -> tuple[Tensor, ...]:
    precision = prior.scale.square().reciprocal()
    total = precision - e2
    return (e1 + precision * prior.loc) / total, total.rsqrt()


def _gamma(prior: Any, e1: Tensor, e2: Tensor) -> tuple[Tensor, ...]:
    return getattr(prior, "concentration", 1.0) + e1, prior.rate - e2  # an Exponential has none


def _beta(prior: Any, e1: Tensor, e2: Tensor) -> tuple[Tensor, ...]:
    if isinstance(prior, dist.Uniform):
        return 1 + e1, 1 + e2
    return prior.concentration1 + e1, prior.concentration0 + e2


def _truncated(prior: Any, e1: Tensor, e2: Tensor) -> tuple[Tensor, ...]:
    low, high = (
        (prior.low, prior.high)
        if isinstance(prior, dist.Uniform)
        else (0 * prior.mean, prior.mean + torch.inf)
    )
    slope = -prior.rate if isinstance(prior, dist.Exponential) else 0.0
    own = prior.scale.square().reciprocal() if isinstance(prior, dist.HalfNormal) else 0.0
    # A Normal that is much wider than the prior counts as flat.
    precision, least = own - e2, torch.finfo(e2.dtype).eps / prior.variance
    precision = torch.where(precision > -least, precision.clamp(min=least), torch.nan)
    return torch.broadcast_tensors((slope + e1) / precision, precision.rsqrt(), low, high)


FORMS: dict[str, Form] = {
    "LogNormal": Form(
        (dist.LogNormal,),
        lambda z: (z.log(), z.log().square() / 2),
        dist.LogNormal,
        _log_normal,
        lambda prior, t: (prior.loc + prior.scale * t).exp(),
    ),
    "Gamma": Form(
        (dist.Gamma, dist.Exponential, dist.Chi2),
        lambda z: (z.log(), z),
        dist.Gamma,
        _gamma,
    ),
    "InverseGamma": Form(
        (dist.InverseGamma,),
        lambda z: (z.log(), z.reciprocal()),
        dist.InverseGamma,
        lambda prior, e1, e2: (prior.concentration - e1, prior.rate - e2),
        lambda prior, t: prior.rate / (prior.concentration + 1) * t.exp(),
    ),
    "Beta": Form(
        (dist.Beta, dist.Uniform),
        lambda z: (z.log(), (-z).log1p()),
        dist.Beta,
        _beta,
    ),
    # The second statistic sums to a constant: it takes up how far a model normalizes by itself.
    "Dirichlet": Form(
        (dist.Dirichlet,),
        lambda z: (z.log(), z),
        dist.Dirichlet,
        lambda prior, e1, e2: (prior.concentration + e1,),
    ),
    "TruncatedNormal": Form(
        (dist.Uniform, dist.HalfNormal, dist.Exponential),
        lambda z: (z, z.square() / 2),
        TruncatedNormal,
        _truncated,
    ),
}


def forms_of(prior: Any, moving: bool = False) -> list[str]:
    """Returns the names of the forms that a prior may have; ``moving``: its bounds may depend on latents."""
    base = innermost(prior)
    names = [name for name, form in FORMS.items() if type(base) in form.priors]
    if type(base) is dist.Uniform and (
        moving or not bool(((base.low == 0) & (base.high == 1)).all())
    ):
        names.remove("Beta")
    return names


class ByStatistics(ProbedExpansion):
    """The exact conditional of one latent: its prior with e1 and e2 added to the parameters.

    Args:
        group, leading, nesting, differentiable, away: as for `Expansion`.
    """

    @property
    def _form(self) -> Form:
        return FORMS[self.group.form]

    def start(self, name: str, prior: Any, shape: torch.Size) -> Tensor:
        base = innermost(prior)
        if self.group.form not in forms_of(prior):
            raise ValueError(
                f"Expected '{name}' to be uniform on (0, 1), as at the guide's first call; got other bounds. "
                f"Make the guide with rules={{'{name}': 'learned'}}."
            )
        # Not at the mean itself: at 1/2 some densities have no curvature by their implementation.
        with torch.no_grad():
            t = (TOLERANCE if self.away is None else self.away) * irregular(shape, base.mean, 1)
            return self._form.at(base, t).expand(shape)

    def solve(self, sites: Sites) -> None:
        """Solves e1 T1' + e2 T2' = l' and e1 T1'' + e2 T2'' = l'', the latter along one direction in a simplex."""
        leaf, slope = self.values[self.first], self.take(sites, again=True)[self.first]
        z, along = leaf.detach(), torch.ones_like(leaf)
        if innermost(self.priors[self.first]).event_shape:
            along[..., -1] = 1.0 - leaf.shape[-1]
        with derivatives():
            at = z.clone().requires_grad_()
            firsts = [_derivative(each, at) for each in self._form.statistics(at)]
            seconds = [_derivative(each * along, at).detach() for each in firsts]
            bend = _derivative(slope * along, leaf, again=self.differentiable)
            # Times z and its square, as by log z, numbers overflow later.
            first1, first2, slope = (z * each for each in (*map(Tensor.detach, firsts), slope))
            second1, second2, bend = (z * (z * each) for each in (*seconds, bend))
            det = first1 * second2 - first2 * second1
            e1 = (slope * second2 - first2 * bend) / det
            e2 = (first1 * bend - slope * second1) / det
        finite = self.finite[self.first] = e1.isfinite() & e2.isfinite()
        e1, e2 = (torch.where(finite, each, 0.0) for each in (e1, e2))
        self.natural = (e1, e2) if self.differentiable else (e1.detach(), e2.detach())

    def conditional(self, name: str, values: Values, dims: int | None = None) -> Any:
        prior = self.priors[name]
        event_dim = len(prior.event_shape)
        parameters = self._form.parameters(innermost(prior), *self.natural)
        trim = (squeezed(each, dims, event_dim) for each in parameters)
        fn = self._form.kind(*trim, validate_args=False)
        return fn.to_event(event_dim - len(fn.event_shape))

    def reaches(self, sites: Sites) -> bool:
        parameters = self._form.parameters(innermost(self.priors[self.first]), *self.natural)
        try:
            self._form.kind(*parameters, validate_args=True)
        except ValueError:
            return False
        return super().reaches(sites)

    def predict(self, values: Values) -> list[Tensor]:
        statistics = self._form.statistics(values[self.first])
        return [e * each for e, each in zip(self.natural, statistics)]

    def explains(self, far: ByStatistics) -> bool:
        if self._form.kind is dist.Dirichlet:  # of a sum that is one nothing can be learned
            mean = self.natural[1].mean(-1, keepdim=True)
            size = self.natural[0].abs().amax(-1, keepdim=True) + mean.abs()
            if not ((self.natural[1] - mean).abs() <= TOLERANCE * size).all():
                return False
        return super().explains(far)


def _derivative(values: Tensor, at: Tensor, again: bool = True) -> Tensor:
    """Returns the derivative of the sum of some values, zero where they do not depend on ``at``."""
    if not values.requires_grad:
        return torch.zeros_like(at)
    return torch.autograd.grad(
        values.sum(), at, create_graph=again, retain_graph=True, materialize_grads=True
    )[0]
