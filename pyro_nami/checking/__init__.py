"""Whether a guide is right: calibration, misspecification, and both with weights in one diagnosis."""

from pyro_nami.checking.calibration import Calibration, calibrate
from pyro_nami.checking.diagnosis import Diagnosis, diagnose
from pyro_nami.checking.misspecification import Misspecification, misspecification

__all__ = [
    "Calibration",
    "Diagnosis",
    "Misspecification",
    "calibrate",
    "diagnose",
    "misspecification",
]
