"""`AutoNaMIGuide` and its parts: from a model's inverse to sample sites."""

from pyro_nami.guide.nami import AutoNaMIGuide

__all__ = ["AutoNaMIGuide"]
