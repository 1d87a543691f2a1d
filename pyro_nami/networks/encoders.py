"""The choice of a set encoder, by name or as a module of the user's own.

To add a pooling:

* a reduction of a perceptron's units: write it as a method of `reductions.Along` and `reductions.Segments`, and name
  the method in a class of three lines beside `pooling.MeanEncoder`;
* anything else: subclass `pooling.SetEncoder` with the shapes of its parameters and `pool`, which asks a `Reduction`
  for all that concerns sets, as `attention` does;
* give it a name in `_BUILDERS`: the guide's ``pooling=`` and its error message know it then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.nn.functional as F
from torch import nn

from pyro_nami.networks.attention import AttentionEncoder
from pyro_nami.networks.pooling import Activation, MaxEncoder, MeanEncoder, OwnEncoder, SetEncoder, SumEncoder

__all__ = ["ENCODERS", "make_encoder"]


def _attention(num_inputs: int, num_outputs: int, hidden_features: Sequence[int], **options: Any) -> SetEncoder:
    return AttentionEncoder(num_inputs, num_outputs, max(hidden_features, default=num_outputs), **options)


_BUILDERS: dict[str, Callable[..., SetEncoder]] = {
    "mean": MeanEncoder,
    "sum": SumEncoder,
    "max": MaxEncoder,
    "attention": _attention,
}
ENCODERS = tuple(_BUILDERS)


def make_encoder(
    spec: str | Callable[[int], nn.Module],
    num_inputs: int,
    num_outputs: int,
    hidden_features: Sequence[int] = (16,),
    *,
    activation: Activation = F.silu,
    **factory: Any,
) -> SetEncoder:
    """Returns the encoder that ``spec`` asks for.

    Args:
        spec: one of `ENCODERS`, or a function of (number of inputs) that returns a module, see `OwnEncoder`.
        num_inputs, num_outputs, factory: see `SetEncoder`; a module of the user's own has its own outputs.
        hidden_features: units in each hidden layer; attention has the width of the widest.
        activation: elementwise function of the hidden layers.

    Example:
        >>> make_encoder("attention", 3, 16).num_features
        17
        >>> make_encoder(lambda inputs: torch.nn.Linear(inputs, 4), 3, 16).num_features
        5
    """
    if callable(spec):
        return OwnEncoder(spec(num_inputs), num_inputs, **factory)
    encoder = _BUILDERS[spec]
    return encoder(num_inputs, num_outputs, hidden_features, activation=activation, **factory)
