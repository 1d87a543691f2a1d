"""`SeriesSites`: innovations of a series, along a plate or an event dim, held as its states.

Where a model sums innovations up, ``z = e.cumsum(-1)``, a datum reads all innovations up to its step. It reads one of
their sums, the states `z`, whose posterior is a Markov chain.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_nami.factors.wrappers import innermost
from pyro_nami.program.masks import is_masked

__all__ = ["SeriesSites", "StepAxis"]


class StepAxis(NamedTuple):
    """Where the values of a site have the steps of a series.

    Attributes:
        dim: of the plate whose instances are the steps; 0 where the steps are the first event dim.
        ones: number of event dims of size 1 to the right of the steps.
    """

    dim: int
    ones: int = 0

    @property
    def of_rows(self) -> StepAxis:
        """The axis of the log density of each row; in a plate event dims are summed up."""
        return StepAxis(self.dim, 0 if self.dim else self.ones)

    def last(self, value: Tensor) -> Tensor:
        """Returns values with the steps in the last dim. A dim of size 1 stays at that of the plate."""
        value = value.reshape(value.shape[: value.dim() - self.ones])
        return value.unsqueeze(-1).transpose(self.dim - 1, -1) if self.dim else value

    def in_place(self, value: Tensor) -> Tensor:
        """Returns values that have the steps in the last dim in the shape of the site; the inverse of `last`."""
        if self.dim:
            missing = max(0, 1 - self.dim - value.dim())
            value = value.reshape((1,) * missing + value.shape)
            value = value.transpose(self.dim - 1, -1).squeeze(-1)
        return value.reshape(value.shape + (1,) * self.ones)


@dataclass(frozen=True)
class SeriesSites:
    """A Normal site with one value for each step of a series, held as the vector of the series' states.

    Attributes:
        name: of the states.
        sites: the one site of the innovations.
        length: number of steps.
        axis: where the site has the steps.
        order: how many times innovations are summed up, from the first step on, to give the states.
        span: among how many states in a row those lie that a row of data reads.
        rows: observed site -> where the log density of its rows, one for each step, has the steps.
    """

    name: str
    sites: tuple[str]
    length: int
    axis: StepAxis
    order: int
    span: int
    rows: Mapping[str, StepAxis]

    is_observed: ClassVar[bool] = False
    values: ClassVar[int] = 0
    families: ClassVar[tuple] = ()

    def to_numbers(self) -> tuple[int, ...]:
        """Returns what `from_numbers` takes."""
        return self.length, *self.axis, self.order, self.span

    @classmethod
    def from_numbers(
        cls, site: str, length: int, dim: int, ones: int, order: int, span: int
    ) -> SeriesSites:
        """Returns the series of a site, as read from a file: without data, so that it can only be continued."""
        return cls(f"{site}[time]", (site,), length, StepAxis(dim, ones), order, span, {})

    @property
    def back(self) -> int:
        """How many states before it the prior of a state reads."""
        return self.order

    @property
    def width(self) -> int:
        """The states of a block, such that a block depends on the ones before and after it alone."""
        return max(self.order, self.span - 1)

    @property
    def size(self) -> int:
        """Number of states."""
        return self.length

    @property
    def events(self) -> tuple[torch.Size]:
        """Event shape of the site."""
        steps = () if self.axis.dim else (self.length,)
        return (torch.Size((*steps, *(1,) * self.axis.ones)),)

    def within(self, names: Collection[str]) -> SeriesSites:
        """Returns the series, which every call has all of."""
        return self

    def at(self, names: Iterable[str]) -> SeriesSites:
        """Returns the series, whose number of steps is fixed."""
        return self

    def zeros(self, fn: Any) -> Tensor:
        """Returns states of zeros, given the distribution of the site."""
        base: Any = innermost(fn)
        return self.axis.last(base.loc.new_zeros(fn.shape()))

    def split(self, value: Tensor) -> tuple[Tensor]:
        """Returns the innovations, given the states."""
        for _ in range(self.order):
            value = torch.cat((value[..., :1], value.diff(dim=-1)), -1)
        return (self.axis.in_place(value),)

    def joined(self, values: Sequence[Tensor]) -> Tensor:
        """Returns the states, given the innovations."""
        (value,) = values
        return self.sums(self.axis.last(value))

    def message(self, sites: Sequence[Any]) -> dict[str, Any]:
        """Returns the message of the states, given that of the site in a run.

        It has ``"part"``, the series, and ``"stack"``, the plates around the site; its own lack the plate of the steps.

        Raises:
            ValueError: the site is not as it was when the series was read: a Normal latent without a mask.
        """
        (site,) = sites
        base: Any = innermost(site["fn"])
        if type(base) is not dist.Normal or is_masked(site) or site["is_observed"]:
            raise ValueError(
                f"Expected latent '{site['name']}' of a Normal distribution, without a mask, as at the first call of "
                "the guide, which read it as innovations of a series. Make a new guide for another model."
            )
        shape = site["fn"].shape()
        innovations = self.axis.last(site["value"])
        loc, scale = (self.axis.last(each.expand(shape)) for each in (base.loc, base.scale))
        states = self.sums(innovations)
        fn = dist.Normal(loc + states - innovations, scale, validate_args=False).to_event(1)
        stack, own = site["cond_indep_stack"], self.axis.dim
        return {
            **site,
            "name": self.name,
            "fn": fn,
            "value": states,
            "cond_indep_stack": tuple(frame for frame in stack if not own or frame.dim != own),
            "part": self,
            "stack": stack,
        }

    def continued(self, known: Tensor, further: Tensor) -> Tensor:
        """Returns innovations whose first steps are known, and whose further steps are those of others.

        Args:
            known: of ``length`` steps.
            further: of as many steps as the result has.
        """
        first, last = self.axis.last(known), self.axis.last(further)
        batch = torch.broadcast_shapes(first.shape[:-1], last.shape[:-1])
        first, last = (each.expand(batch + each.shape[-1:]) for each in (first, last))
        steps = torch.cat((first[..., : last.shape[-1]], last[..., self.length :]), -1)
        return self.axis.in_place(steps)

    def sums(self, value: Tensor) -> Tensor:
        """Returns the states, given the innovations with the steps last."""
        for _ in range(self.order):
            value = value.cumsum(-1)
        return value
