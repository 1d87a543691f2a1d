"""Whether a guide is right, and whether data are like its simulations: calibration and misspecification."""

from pyro_nami.checking.calibration import Calibration, calibrate
from pyro_nami.checking.misspecification import Misspecification, misspecification

__all__ = [
    "Calibration",
    "Misspecification",
    "calibrate",
    "misspecification",
]
