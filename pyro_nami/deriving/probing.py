"""Whether a log density has the form that an expansion assumes: the fitted form predicts it at other points."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.distributions import TransformedDistribution

from pyro_nami.deriving.expansion import Expansion, agree, derivatives
from pyro_nami.factors.wrappers import base_of
from pyro_nami.program.masks import without_gaps
from pyro_nami.program.runner import Sites, Values

__all__ = ["ProbedExpansion"]


class ProbedExpansion(Expansion):
    """An expansion whose form is fitted at one point, and compared with the model at others.

    Attributes:
        slopes: the slopes of the children's log density by each member's values, once they are measured; none of
            discrete members.
        total: the children's log density, summed, in nats.
        noise: by how many deviations rounding may move means, where these are not the means of a prior.
    """

    # where the form is compared with the model, in prior deviations; further out some overflow
    probed_at: tuple[float, ...] = (0.0, 1.0, -1.0, 4.0, -4.0)
    asked = "add to a {} prior"  # of the children's log density
    noise = 0.0

    def fit(self, sites: Sites) -> None:
        """Finds the form's parameters from the sites of the run, of a form that is not known to hold yet."""
        self.solve(sites)

    def predict(self, values: Values) -> list[Tensor]:
        """Returns terms that add up to the children's log density at values of the members, up to a constant."""
        raise NotImplementedError

    def measure(self, sites: Sites) -> None:
        """Takes slopes and the log density of the children."""
        self.slopes: dict[str, Tensor] = {}
        if all(leaf.requires_grad for leaf in self.values.values()):
            self.slopes = {name: each.detach() for name, each in self.take(sites).items()}
        self.total = torch.stack([self._total(sites, name) for name in self.group.children]).sum()

    def reaches(self, sites: Sites) -> bool:
        """Whether each child says something of the members, and the conditional is a proper one."""
        for child in self.group.children:
            slopes = self.take(sites, parts=[child])
            if not any(bool((slope != 0).any()) for slope in slopes.values()):
                return False
        return True

    def explains(self, far: Any) -> bool:
        """Whether the fitted form has the slopes that were measured at another point, to a thousandth."""
        with derivatives():
            at = {name: each.detach().requires_grad_() for name, each in far.values.items()}
            terms = self.predict(at)
            slopes = [
                torch.autograd.grad(term.sum(), list(at.values()), materialize_grads=True)
                for term in terms
                if term.requires_grad
            ]
        for (name, value), *each in zip(at.items(), *slopes):
            terms = [value.detach() * slope for slope in each]
            # times the value, as slopes by its log
            found = value.detach() * far.slopes[name]
            if not agree(found, torch.zeros_like(found), terms):
                return False
        return True

    def gain(self, near: Any, far: Any) -> tuple[Tensor, Tensor]:
        """Returns what the log density gains between two points by the form, and the size of its terms."""
        terms = zip(self.predict(near.values), self.predict(far.values))
        gains = [(end - start).detach() for start, end in terms]
        total: Any = sum(each.sum() for each in gains)
        size: Any = sum(each.abs().sum() for each in gains)
        return total, size

    def _total(self, sites: Sites, name: str) -> Tensor:
        """Returns a site's log density, summed; minus infinity where its value is outside of its support."""
        fn, value = sites[name]["fn"], without_gaps(sites[name])
        with suppress(NotImplementedError):
            if not value.isnan().any() and not _is_supported(fn, value):
                return value.new_full((), -torch.inf, dtype=torch.get_default_dtype())
        return self.density(sites, name).detach().sum()


def _is_supported(fn: Any, value: Tensor) -> bool:
    """Whether a value is in the support, for transformed distributions that of the base."""
    if not fn.support.check(value).all():
        return False
    if isinstance(fn, TransformedDistribution):
        for transform in reversed(fn.transforms):
            value = transform.inv(value)
    below = base_of(fn)
    return below is None or _is_supported(below, value)
