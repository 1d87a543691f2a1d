"""What a guide is made of, fixed at its first call: its options and its structure, plain data both.

`assembly` makes a structure, and every other module of the guide reads it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pyro_nami.factors.base import Family
from pyro_nami.graph.inverse import Inverse
from pyro_nami.graph.network import BayesNet
from pyro_nami.guide.groups import Factor
from pyro_nami.networks.encoders import ENCODERS
from pyro_nami.reading.covariates import MASK
from pyro_nami.reading.forms import ConjugateGroup
from pyro_nami.reading.index_maps.finder import MapPlan

__all__ = ["Assembly", "Options", "check_names"]


class Options(NamedTuple):
    """The options of a guide, as `AutoNaMIGuide` documents them, and whether it is trained on simulations."""

    inverse: Any
    blocks: Sequence[Sequence[str]] | None
    observed: tuple[str, ...]
    simulated: bool
    families: Any
    hidden_features: tuple[int, ...]
    shared: bool
    skip: bool
    within: str
    embeddings: Mapping[str, nn.Module]
    covariates: Any
    index_maps: Mapping[tuple[str, str], Callable]
    pooling: Any
    evidence: bool
    anchor: bool
    conjugate: bool
    refine: str | None
    init_loc_fn: Callable
    init_scale: float
    activation: Callable[[Tensor], Tensor] | None
    save_data: bool

    def check(self) -> None:
        """Raises for what can be told to be wrong before the guide's first call."""
        if not (isinstance(self.init_scale, float) and self.init_scale > 0):
            raise ValueError(f"Expected init_scale > 0.; got {self.init_scale}.")
        if self.within not in ("autoregressive", "independent"):
            raise ValueError(f"Expected within to be 'autoregressive' or 'independent'; got {self.within!r}.")
        if self.covariates is not None and self.covariates != "auto" and not callable(self.covariates):
            raise TypeError(f"Expected covariates to be 'auto', None or a callable; got {self.covariates!r}.")
        if self.pooling not in ENCODERS and not callable(self.pooling):
            names = ", ".join(ENCODERS)
            raise ValueError(f"Expected pooling to be one of {names}, or a callable; got {self.pooling!r}.")
        if self.refine not in ("auto", None):
            raise ValueError(f"Expected refine to be 'auto' or None; got {self.refine!r}.")
        for pair, given in self.index_maps.items():
            if not (isinstance(pair, tuple) and len(pair) == 2 and callable(given)):
                raise TypeError(
                    f"Expected index_maps to map pairs (latent, site) to callables; got {pair!r}: {given!r}."
                )


@dataclasses.dataclass
class Assembly:
    """A guide's fixed structure.

    Attributes:
        bayesnet: the model's network; inverse: its inverse.
        order: latents that the guide draws given what it reads, in sampling order.
        predictive: latents drawn from the model's own conditional, in model order.
        transparent: latent Delta sites, which the guide passes through.
        program: all latents that the guide emits, in model order.
        factors: of the latents in ``order`` that networks serve; families: of each of them.
        encodings: latent or observed site -> what gives its raw features, its family or another object that does.
        event_dims: site -> event dims of its value.
        dims: plate -> batch dim; nesting: the deepest.
        frames: site -> the plates that its tensor has dims for; `bayesnet` has those that these determine as well.
        subsampled: plates that the model subsamples.
        map_plans: how a call's index maps are found.
        anchored: latents whose factor is relative to the model's own conditional.
        experts: those of them whose prior other latents move, and whose factor is that prior times evidence of its own.
        conjugate: latents without a factor, which are drawn from their exact conditional.
        masked: whether the model masks latents.
        interleaved: whether sampling order is program order, so that one run of the model draws all latents.
        read: observed sites that some factor reads.
        semi_observed: latents that a call may observe.
        columns: site -> its covariates; references: values of the latents at the draws they were found at.
        reference: initial values of all latents, first instances.
        sizes: plate -> size at the first call.
        factory: dtype and device of the networks.
        names: all sites of the model, deterministic ones included.
        nan_allowed: observed sites whose distribution or mask allows for NaN.
        flattened: plate of fixed size -> a latent whose instances form one block over it.
    """

    bayesnet: BayesNet
    inverse: Inverse
    order: tuple[str, ...]
    predictive: tuple[str, ...]
    transparent: tuple[str, ...]
    program: tuple[str, ...]
    factors: dict[str, Factor]
    families: dict[str, Family]
    encodings: dict[str, Any]
    event_dims: dict[str, int]
    dims: dict[str, int]
    frames: dict[str, frozenset[str]]
    subsampled: frozenset[str]
    map_plans: tuple[MapPlan, ...]
    anchored: frozenset[str]
    experts: frozenset[str]
    conjugate: dict[str, ConjugateGroup]
    masked: bool
    interleaved: bool
    read: tuple[str, ...]
    semi_observed: frozenset[str]
    columns: dict[str, tuple]
    references: list[dict[str, Tensor]]
    reference: dict[str, Tensor]
    sizes: dict[str, int]
    factory: dict[str, Any]
    names: frozenset[str]
    flattened: dict[str, str]
    nan_allowed: frozenset[str]

    @property
    def varies(self) -> bool:
        """Whether the support or a count of some latent depends on the call."""
        return any(family.varies for family in self.families.values())

    def apply(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Applies ``fn`` to all tensors held, to move them to another device."""
        self.factory = {"dtype": (like := fn(torch.empty(0, **self.factory))).dtype, "device": like.device}
        self.reference = {name: fn(value) for name, value in self.reference.items()}
        self.map_plans = tuple(
            plan._replace(values={name: (fn(a), fn(b)) for name, (a, b) in plan.values.items()})
            for plan in self.map_plans
        )
        self.references = [{name: fn(value) for name, value in draw.items()} for draw in self.references]

    def mask_column(self, name: str) -> int | None:
        """Returns which of a site's covariates is its mask, if one is."""
        columns = enumerate(self.columns.get(name, ()))
        return next((i for i, column in columns if getattr(column, "parameter", None) == MASK), None)

    def features(self, name: str, value: Tensor) -> Tensor:
        """Returns the raw features of a site's value, ``(*batch, features)``."""
        return self.encodings[name].features(value).flatten(-2)

    @property
    def nesting(self) -> int:
        """The number of plate dims."""
        return -min(self.dims.values(), default=0)


def check_names(option: str, names: Collection[str], known: Collection[str], kind: str) -> frozenset[str]:
    """Returns the names as a set; raises for one that is not known."""
    for name in names:
        if name not in known:
            raise ValueError(
                f"Expected the keys of `{option}` to be {kind} each, one of {', '.join(map(repr, known)) or 'none'}; "
                f"got {name!r}."
            )
    return frozenset(names)
