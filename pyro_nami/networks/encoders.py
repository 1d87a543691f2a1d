"""The choice of a set encoder, by name or as a module of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyro_nami.networks.attention import AttentionEncoder
from pyro_nami.networks.pooling import Activation, MaxEncoder, MeanEncoder, SetEncoder, SumEncoder
from pyro_nami.networks.reductions import Reduction

__all__ = ["ENCODERS", "OwnEncoder", "make_encoder"]

_PERCEPTRONS = {"mean": MeanEncoder, "sum": SumEncoder, "max": MaxEncoder}
ENCODERS = (*_PERCEPTRONS, "attention")


class OwnEncoder(SetEncoder):
    """Encodes a set as the mean of the features that the user's module gives its instances, and log(1 + count).

    The number of features is found by a run on zeros.

    Args:
        module: maps inputs of instances ``(..., num_inputs)`` to features ``(..., features)``.
        num_inputs: number of inputs of each instance.
        device: device that the module is moved to.
        dtype: floating-point type that the module is converted to.

    Raises:
        TypeError: if ``module`` is no `torch.nn.Module`.
        ValueError: if its features do not have the shape of the inputs but for the last dimension.

    Attributes:
        num_features: number of features returned, those of the module and one more.
    """

    def __init__(
        self,
        module: nn.Module,
        num_inputs: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"Expected a torch.nn.Module that encodes instances; got {type(module).__name__}."
            )
        module = module.to(device=device, dtype=dtype)
        with torch.no_grad():
            features = module(torch.zeros(2, 3, num_inputs, device=device, dtype=dtype))
        if features.dim() != 3 or features.shape[:-1] != (2, 3):
            raise ValueError(
                f"Expected a module that maps inputs (..., {num_inputs}) to features (..., features); it mapped "
                f"(2, 3, {num_inputs}) to {tuple(features.shape)}."
            )
        super().__init__(num_inputs, features.shape[-1], {})
        self.module = module

    def pool(self, x: Tensor, over: Reduction, weights: Sequence[Tensor]) -> Tensor:
        """Returns the mean of the module's features; the module reads its parameters itself."""
        return over.mean(self.module(x))


def make_encoder(
    spec: str | Callable[[int], nn.Module],
    num_inputs: int,
    num_outputs: int,
    hidden_features: Sequence[int] = (16,),
    *,
    activation: Activation = F.silu,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> SetEncoder:
    """Returns the encoder that ``spec`` asks for.

    Args:
        spec: ``"mean"``, ``"sum"``, ``"max"`` or ``"attention"``, or a function of (number of inputs) that returns
            a module of the user's own, see `OwnEncoder`.
        num_inputs: number of inputs of each instance.
        num_outputs: number of features beside the logarithm of the count; a module of the user's own has its own.
        hidden_features: units in each hidden layer; attention has the width of the widest.
        activation: elementwise function of the hidden layers.
        device: device of the parameters.
        dtype: floating-point type of the parameters.

    Raises:
        ValueError: if ``spec`` is no such name.

    Example:
        >>> make_encoder("attention", 3, 16).num_features
        17
        >>> make_encoder(lambda inputs: torch.nn.Linear(inputs, 4), 3, 16).num_features
        5
    """
    if isinstance(spec, str) and spec in _PERCEPTRONS:
        perceptron = _PERCEPTRONS[spec]
        return perceptron(
            num_inputs, num_outputs, hidden_features, activation=activation, device=device, dtype=dtype
        )
    if spec == "attention":
        width = max(hidden_features, default=num_outputs)
        return AttentionEncoder(
            num_inputs, num_outputs, width, activation=activation, device=device, dtype=dtype
        )
    if callable(spec):
        return OwnEncoder(spec(num_inputs), num_inputs, device=device, dtype=dtype)
    raise ValueError(
        "Expected pooling to be 'mean', 'sum', 'max' or 'attention', or a function of the number of inputs that "
        f"returns a module; got {spec!r}."
    )
