"""The options of a guide, checked. `planner` and `build` put them into effect."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from pyro_nami.guide.mode import Mode
from pyro_nami.messages import quoted
from pyro_nami.networks.pooling import ENCODERS

__all__ = ["Options", "check_names"]

RULES = ("exact", "located", "learned", "bounded", "bound")


class Options(NamedTuple):
    """The options of a guide, as `AutoNaMIGuide` documents them. With ``mode=None`` training steps decide the mode."""

    inverse: Any
    blocks: Sequence[Sequence[str]] | None
    observed: tuple[str, ...]
    mode: Mode | None
    families: Any
    hidden_features: tuple[int, ...] | None
    shared: bool
    skip: bool
    within: str
    embeddings: Mapping[str, nn.Module]
    pooling: Any
    evidence: bool
    anchor: bool
    exact: bool
    rules: Mapping[str, str]
    max_offsets: int
    init_loc_fn: Callable | None
    init_scale: float
    activation: Callable[[Tensor], Tensor] | None
    save_data: bool
    is_weighted: bool = False  # whether draws are for importance weights, not for SVI
    # sites of which training steps had other data, and the plates that these may be rows of
    moving: frozenset[str] = frozenset()
    along: frozenset[str] = frozenset()

    @property
    def simulated(self) -> bool:
        """Whether the data of each call decide, as where a guide is trained on simulations."""
        return self.mode is Mode.AMORTIZED

    def check(self) -> None:
        """Raises for invalid options that can be told before the guide's first call."""
        if not (isinstance(self.init_scale, float) and self.init_scale > 0):
            raise ValueError(f"Expected init_scale > 0.; got {self.init_scale}.")
        if self.within not in ("autoregressive", "independent"):
            raise ValueError(
                f"Expected within to be 'autoregressive' or 'independent'; got {self.within!r}."
            )
        if self.pooling not in ENCODERS and not callable(self.pooling):
            names = ", ".join(ENCODERS)
            raise ValueError(
                f"Expected pooling to be one of {names}, or a callable; got {self.pooling!r}."
            )
        if self.max_offsets < 0:
            raise ValueError(f"Expected max_offsets >= 0; got {self.max_offsets}.")
        for site, rule in self.rules.items():
            if rule not in RULES:
                names = quoted(RULES)
                raise ValueError(f"Expected rules to be one of {names}; got {rule!r} for '{site}'.")


def check_names(option: str, names: Collection[str], known: Collection[str], kind: str) -> None:
    """Raises for a key of an option that is not known."""
    for name in names:
        if name not in known:
            raise ValueError(
                f"Expected the keys of `{option}` to be {kind} each, one of {quoted(known) or 'none'}; "
                f"got {name!r}."
            )
