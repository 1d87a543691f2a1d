"""Automatic, structured, amortized guides for Pyro."""
from pyro_nami.guides.nami import AutoNaMIGuide
