"""`History`: losses of a training run, and the check that too many simulations have failed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from statistics import fmean

from pyro_nami.inference.simulate import JointDraws

__all__ = ["History"]


@dataclass(repr=False)
class History:
    """Losses of a training run, and how many of its simulations were not finite.

    Attributes:
        losses: -log q in nats per simulation, at every step; NaN where no simulation of a batch was finite.
        validation: pairs of the steps done and the loss on the held-out simulations then.
        best_step: steps done when the guide had the weights that it ends with; None without validation.
        simulations: number of simulations seen, skipped ones included.
        skipped: number of those with NaN or infinite values, which are not trained on.
        non_finite: site -> number of simulations that are not finite there.

    Example:
        >>> History(validation=[(100, 2.0), (200, 1.5), (300, 1.6)], best_step=200).validations_since_best()
        1
    """

    losses: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    best_step: int | None = None
    simulations: int = 0
    skipped: int = 0
    non_finite: Counter[str] = field(default_factory=Counter)

    def __repr__(self) -> str:
        told = self.recent() if self.losses else "nothing"
        best = f", best at step {self.best_step}" if self.best_step else ""
        return f"History({len(self.losses)} steps, {told}{best})"

    def validations_since_best(self) -> int:
        """Returns the number of validations after the best one."""
        best = self.best_step
        return 0 if best is None else sum(step > best for step, _ in self.validation)

    def finite(self, draws: JointDraws, most: float = 0.1) -> JointDraws:
        """Returns the simulations that are finite, and counts the others.

        Were more than a tenth left out, a guide would learn the posterior of another model.

        Raises:
            ValueError: a larger share of all simulations than ``most`` is not finite, once there are 1 / most^2.
        """
        kept, non_finite = draws.finite()
        self.simulations += draws.num
        self.skipped += draws.num - kept.num
        self.non_finite.update(non_finite)
        if self.simulations >= most**-2 and self.skipped > most * self.simulations:
            raise ValueError(
                f"Expected at most {most:.0%} of the simulations with NaN or infinite values; "
                f"{self.shortfall()}. Give the model priors under which it does not overflow."
            )
        return kept

    def shortfall(self) -> str:
        """Returns in words how many simulations are not finite, and where, the worst site first."""
        worst = self.non_finite.most_common()
        sites = ", ".join(f"'{name}' ({number})" for name, number in worst)
        return f"{self.skipped} of {self.simulations} simulations are not finite, at {sites}"

    def recent(self) -> str:
        """Returns the latest losses in words."""
        text = f"loss {fmean(self.losses[-50:]):.3f} nats"
        return f"{text}, held out {self.validation[-1][1]:.3f}" if self.validation else text
