"""Masks that make a multilayer perceptron obey any boolean dependency matrix.

The rule is MADE's (Germain et al. 2015) with sets in place of numbers, as in the Tree-MADE of Webb
et al. (2018). Every hidden unit carries a *label*: the set of input columns that it may depend on.
Column j feeds unit S iff j is in S; unit S feeds unit S' iff S is contained in S'; unit S feeds row
i iff S is contained in the columns that row i may read. No path can then leave the dependency
matrix; what is left to choose is which labels the units get (`allot_labels`). Nothing here has
parameters.

References:
    Germain et al. 2015, "MADE: Masked Autoencoder for Distribution Estimation", section 4. Webb et
    al. 2018, "Faithful Inversion of Generative Models for Effective Amortized Inference", section
    4.
"""

from __future__ import annotations

__all__ = [
    "LayerMasks",
    "Steps",
    "allot_labels",
    "check_width",
    "distinct_labels",
    "jacobian_support",
    "layer_masks",
    "split_steps",
    "unit_steps",
]

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Steps(NamedTuple):
    """Where each step begins: step s owns columns ``columns[s]:columns[s + 1]``, and rows likewise."""

    columns: tuple[int, ...]
    rows: tuple[int, ...]


class LayerMasks(NamedTuple):
    """Masks of a stack of layers, and for its hidden units the last columns of their labels, in ascending order."""

    # boolean ``(units, units of the layer below)``; the lowest reads the inputs
    hidden: tuple[Tensor, ...]
    # ``(outputs, units of the last hidden layer)``, or inputs if there is no hidden layer
    output: Tensor
    last_columns: tuple[tuple[int, ...], ...]


def split_steps(
    dependency: Tensor,
    input_splits: Sequence[int] | None = None,
    output_splits: Sequence[int] | None = None,
) -> Steps:
    """Returns the step boundaries of a dependency matrix, in which no row reads a column of a later step.

    Args:
        dependency: boolean tensor ``(outputs, inputs)``; entry (i, j) says that output i may read input j.
        input_splits: number of columns that become known at each step; one step by default.
        output_splits: number of rows that are emitted at each step, after its columns are known.
    """
    sizes = [dependency.shape[1]] if input_splits is None else input_splits
    counts = [len(dependency)] if output_splits is None else output_splits
    steps = Steps(tuple(accumulate(sizes, initial=0)), tuple(accumulate(counts, initial=0)))
    row_blocks = zip(pairwise(steps.rows), steps.columns[1:])
    assert not any(dependency[first:last, known:].any() for (first, last), known in row_blocks)
    return steps


def distinct_labels(dependency: Tensor) -> Tensor:
    """Returns the distinct nonempty rows of a dependency matrix, ``(labels, inputs)``.

    They are ordered by their last column, so by the step at which they are complete; ties keep the order of rows.
    """
    rows = dependency[dependency.any(1)]
    _, first = np.unique(np.packbits(rows.numpy(), axis=1), axis=0, return_index=True)
    labels = rows[np.sort(first)]
    return labels[
        torch.tensor(_last_columns(labels), dtype=torch.long, device="cpu").argsort(stable=True)
    ]


def allot_labels(labels: Tensor, width: int) -> Tensor:
    """Returns which label each of ``width`` units carries: ascending indices ``(width,)`` into ``labels``.

    The allotment is even: with at least as many units as labels every label gets the same number of units, give or
    take one, and those that get one more are spread evenly over the order. A layer that is too narrow for that takes
    the *irreducible* labels first (those that are no union of smaller labels, which are enough to reach every column
    of every row) and fills up with others, or takes an evenly spread choice of the irreducible ones alone.
    Without labels there are no units.

    Example:
        >>> labels = torch.tensor([[1, 0, 0], [0, 1, 0], [1, 1, 0]]).bool()  # the last is a union of the others
        >>> allot_labels(labels, 5), allot_labels(labels, 2)
        (tensor([0, 0, 1, 2, 2]), tensor([0, 1]))
    """
    count = len(labels)
    if count == 0 or width >= count:
        return _evenly(count, width)
    first = _irreducible(labels)
    chosen, rest = first.nonzero().flatten(), (~first).nonzero().flatten()
    if width <= len(chosen):
        return chosen[_evenly(len(chosen), width)]
    return torch.cat([chosen, rest[_evenly(len(rest), width - len(chosen))]]).sort().values


def layer_masks(dependency: Tensor, hidden_features: Sequence[int]) -> LayerMasks:
    """Returns the masks of a perceptron with these hidden widths that obeys ``dependency``, ``(outputs, inputs)``.

    In every hidden layer the units are ordered by the last column of their labels, so that those which become
    computable at one step are neighbours. Rows without parents are fed by no unit.

    Example:
        >>> masks = layer_masks(torch.tensor([[1, 0], [1, 1]]).bool(), [2])
        >>> masks.hidden[0].int().tolist(), masks.output.int().tolist()  # row 0 reads the unit of column 0 alone
        ([[1, 0], [1, 1]], [[1, 0], [1, 1]])
    """
    labels = distinct_labels(dependency)
    last = _last_columns(labels)
    units = [allot_labels(labels, width) for width in hidden_features]
    sets = [labels[each] for each in units]
    if not sets:
        return LayerMasks((), dependency, ())
    hidden = sets[:1] + [_contained(below, above) for below, above in pairwise(sets)]
    last_columns = tuple(tuple(last[unit] for unit in each.tolist()) for each in units)
    return LayerMasks(tuple(hidden), _contained(sets[-1], dependency), last_columns)


def jacobian_support(masks: Sequence[Tensor]) -> Tensor:
    """Returns which inputs each output can reach through a stack of masks, a boolean ``(outputs, inputs)``.

    Args:
        masks: boolean tensors ``(units, units of the layer below)``, from the lowest layer to the output.
    """
    reached = masks[0]
    for mask in masks[1:]:
        reached = mask.float() @ reached.float() > 0
    return reached


def check_width(dependency: Tensor, masks: Sequence[Tensor]) -> None:
    """Raises ``ValueError`` unless every dependency has a path through a stack of masks."""
    missing = int((dependency & ~jacobian_support(masks)).sum())
    if missing:
        widths = [len(mask) for mask in masks[:-1]]
        enough = int(_irreducible(distinct_labels(dependency)).sum())
        raise ValueError(
            f"Expected hidden layers wide enough to carry every dependency when skip=False; got hidden_features="
            f"{widths}, which loses {missing} of {int(dependency.sum())}. {enough} units a layer are enough; "
            "with skip=True any number is."
        )


def unit_steps(last_columns: Sequence[int], steps: Steps) -> tuple[int, ...]:
    """Returns where the units begin that become computable at each step, by the last column that each depends on."""
    return tuple(bisect_left(last_columns, end) for end in steps.columns)


def _irreducible(labels: Tensor) -> Tensor:
    """Says which labels hold a column that no strictly smaller label inside them holds, ``(labels,)``."""
    smaller = _contained(labels, labels).fill_diagonal_(False)
    union = smaller.float() @ labels.float() > 0
    return (union != labels).any(-1)


def _contained(smaller: Tensor, larger: Tensor) -> Tensor:
    """Says whether set ``smaller[a]`` is contained in set ``larger[b]``, a boolean ``(b, a)``."""
    return (~larger).float() @ smaller.float().mT == 0


def _evenly(count: int, width: int) -> Tensor:
    """Returns ``width`` ascending indices spread evenly over ``range(count)``; none if that is empty."""
    return (
        (2 * torch.arange(width if count else 0, device="cpu") + 1) * count // (2 * max(width, 1))
    )


def _last_columns(labels: Tensor) -> list[int]:
    """Returns the index of the last column in each nonempty label."""
    return [int(label.nonzero()[-1]) for label in labels]
