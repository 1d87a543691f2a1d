"""Stages of a pass: which latents a run of the model draws, and which group is derived and drawn after it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from pyro_nami.deriving.derived_group import ConjugateGroup
from pyro_nami.guide.rules import Rule

__all__ = ["Stage", "stages_of"]


class Stage(NamedTuple):
    """One stage of a pass.

    Attributes:
        drawn: latents that one run of the model draws, in program order; the run ends behind the last of them.
        group: the group whose conditionals are derived then, and drawn; None at the end of the program.
    """

    drawn: tuple[str, ...]
    group: ConjugateGroup | None


def stages_of(rules: Mapping[str, Rule], known: Collection[str]) -> Iterator[Stage]:
    """Yields the stages in which all latents are drawn.

    A group comes where its first member does, after all that its density reads.

    Args:
        rules: latent -> its rule, in program order.
        known: latents that have a value already.

    Example:
        >>> from pyro_nami.guide.rules import Exact, Prior
        >>> group = ConjugateGroup(("a",), ("x",), needed=frozenset({"c"}))
        >>> rules = {"a": Exact("a", group), "b": Prior("b"), "c": Prior("c")}
        >>> [(stage.drawn, stage.group is group) for stage in stages_of(rules, ())]
        [(('c',), True), (('b',), False)]
    """
    rank = {name: i for i, name in enumerate(rules)}
    drawn = set(known)
    waiting: list[str] = []  # drawn by the next run
    derived: set[ConjugateGroup] = set()

    def stages_before(group: ConjugateGroup) -> Iterator[Stage]:
        derived.add(group)
        needed = sorted(group.needed & rank.keys(), key=rank.__getitem__)
        for name in needed:
            other = rules[name].group
            if other is not None and other not in derived and name not in drawn:
                yield from stages_before(other)
        waiting.extend(name for name in needed if rules[name].group is None and name not in drawn)
        drawn.update(needed)
        yield Stage(tuple(waiting), group)
        waiting.clear()

    for name, rule in rules.items():
        if name in drawn:
            continue
        if rule.group is None:
            drawn.add(name)
            waiting.append(name)
        elif rule.group not in derived:
            yield from stages_before(rule.group)
    if waiting:
        yield Stage(tuple(waiting), None)
