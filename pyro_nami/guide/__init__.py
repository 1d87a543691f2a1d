"""Guides: from a model's inverse to sample sites. `nami` is the guide; the other modules are its parts."""

from pyro_nami.guide.nami import AutoNaMIGuide

__all__ = ["AutoNaMIGuide"]
