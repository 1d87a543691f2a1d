"""The distributions that a guide emits at its sites, built up in four steps.

`bijections` (unconstrained space to a support), `layout` (a value as E elements in sequence), `elements` (densities of
one element, batched) and `factor` (a site's distribution from the three). `anchors` holds the location and scale of a
model's own conditionals in unconstrained space.
"""

from .anchors import location_and_scale, through_wrappers
from .bijections import bijection_to
from .elements import Elements, positive
from .factor import AutoregressiveFactor, Conditionals, Factor
from .layout import Layout, OwnLayout, UnconstrainedLayout

__all__ = [
    "AutoregressiveFactor",
    "Conditionals",
    "Elements",
    "Factor",
    "Layout",
    "OwnLayout",
    "UnconstrainedLayout",
    "bijection_to",
    "location_and_scale",
    "positive",
    "through_wrappers",
]
