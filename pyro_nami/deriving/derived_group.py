"""A group of latents whose conditionals are derived together, and the form of these conditionals."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import NamedTuple

__all__ = ["ConjugateGroup"]

# Forms of states of a loop that are approximations about a mode.
LOCATED_STATES = ("states about a mode", "states nearest", "states nonlinear")


class ConjugateGroup(NamedTuple):
    """Latents that are drawn from their exact conditionals together.

    Attributes:
        members: the latents, in sampling order.
        children: observed sites that they are parents of.
        form: of conditionals: a name in `exponential_families.FORMS`, "enumeration", "Gaussian" for a joint block,
            "Newton" for one whose density is concave, "quadrature" for one with one or two elements of that kind,
            "marginal" for what comes first on a grid, with all others integrated out, "rough grid" where that is
            off, "collapsed" for the same about its mode, "Bernoulli" for binary ones by bounds, "states" for those of a
            loop, "states about a mode", "states nearest" for the Normal nearest to their posterior, "states
            nonlinear" for those about a mode that are not linear in states before, or "states enumerated".
        bound: what stands for the likelihood of children that have one: "" for nothing, "bounded" for a bound (see
            `pyro_nami.factors.bounds`) whose parameters networks give, "bound" for the tightest.
        depths: of a joint block, the level of each member: those of levels below ``num_lifted`` are eliminated instance
            by instance of their plates, which are the same in a level; the others are elements of one vector.
        num_lifted: number of such levels.
        elements: number of elements of each member, of one instance or of the vector, at the guide's first call.
        band: of the states of a loop, ``width``, ``back`` and ``span`` of its `LoopSites`.
        flat: members with flat priors, which say nothing; see `pyro_nami.program.flat_priors`.
        needed: latents drawn before that the density reads.
        in_turn: whether they are binary, and those that come later are explained away by those before.
        is_weighted: whether weights correct draws, so that a grid may be coarse, and a search rough.
    """

    members: tuple[str, ...]
    children: tuple[str, ...]
    form: str = "Gaussian"
    depths: tuple[int, ...] = ()
    num_lifted: int = 0
    elements: tuple[int, ...] = ()
    band: tuple[int, int, int] = (1, 1, 1)
    flat: frozenset[str] = frozenset()
    needed: frozenset[str] = frozenset()
    in_turn: bool = False
    bound: str = ""
    is_weighted: bool = False

    @property
    def is_exact(self) -> bool:
        """Whether the conditionals are exact: those about a mode, on a rough grid, and by a bound are not."""
        return not (self.is_located or self.bound or self.form == "rough grid")

    @property
    def is_located(self) -> bool:
        """Whether they are approximations about a mode."""
        return self.form in ("Newton", "collapsed") or self.form in LOCATED_STATES

    @property
    def is_loop(self) -> bool:
        """Whether they are the states of a loop."""
        return self.form.startswith("states")

    @property
    def drawn(self) -> ConjugateGroup:
        """The group that draws are from: of states about a mode a nearer Normal, if each datum reads one of them."""
        is_nearest = self.form == "states about a mode" and self.band[2] == 1
        return self._replace(form="states nearest") if is_nearest else self

    @property
    def comes_first(self) -> bool:
        """Whether all other latents are integrated out."""
        return self.form in ("marginal", "collapsed", "rough grid")

    @property
    def is_tabulated(self) -> bool:
        """Whether they are found by quadrature."""
        return self.form in ("quadrature", "marginal", "rough grid")

    @property
    def has_mode(self) -> bool:
        """Whether they are found about a mode, which takes several runs of the model."""
        return self.is_tabulated or self.is_located

    @property
    def iterates(self) -> bool:
        """Whether they take several runs of the model."""
        return self.has_mode or self.bound == "bound" or self.in_turn

    def alone(self, form: str) -> ConjugateGroup:
        """Returns the first member by itself, with a form of one latent."""
        return ConjugateGroup(self.members[:1], self.children, form, needed=self.needed)

    def without(self, lacking: Collection[str], observed: Collection[str] = ()) -> ConjugateGroup:
        """Returns the group without sites that a call lacks; members that it observes are children."""
        kept = [name not in lacking and name not in observed for name in self.members]
        members = tuple(itertools.compress(self.members, kept))
        children = (*self.children, *(name for name in self.members if name in observed))
        return self._replace(
            members=members,
            children=tuple(name for name in children if name not in lacking),
            depths=tuple(itertools.compress(self.depths, kept)),
            elements=tuple(itertools.compress(self.elements, kept)),
            flat=self.flat.intersection(members),
        )
