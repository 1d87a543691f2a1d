"""Families: from a site's prior to parameter shapes, and from raw parameters to the distribution at the site.

`make_family` chooses; `base` says what a family is; `unconstrained`, `discrete` and `own_type` hold the built-in ones;
`observed` reads observed sites. A family holds no parameters: the guide's network gives them.
"""

from .base import Family
from .observed import SiteFeatures, features_of
from .registry import FamilyFactory, FamilySpec, make_family, register_family
from .unconstrained import (
    FlowFamily,
    MixtureFamily,
    NormalFamily,
    RelaxedFamily,
    SinhArcsinhFamily,
    flow,
    mixture,
    relaxed,
)

__all__ = [
    "Family",
    "FamilyFactory",
    "FamilySpec",
    "FlowFamily",
    "MixtureFamily",
    "NormalFamily",
    "RelaxedFamily",
    "SinhArcsinhFamily",
    "SiteFeatures",
    "features_of",
    "flow",
    "make_family",
    "mixture",
    "register_family",
    "relaxed",
]
