"""Set encoders: a set of instances becomes features that do not depend on their order or number.

Every instance goes through one small network, what comes out is reduced over the set, and the logarithm of the number
of instances is put beside it, because how much is known depends on it (Zaheer et al. 2017). No parameter has a shape
that depends on the size of a set. Which instances form a set is said by a reduction (`Along`, `Segments`).

To add a pooling:

* write a subclass of `SetEncoder` with `pool`, which asks a `Reduction` for all that concerns sets;
* name it in `ENCODERS`, which the option ``pooling=`` and its error message read, and build it in `make_encoder`.

References:
    Zaheer et al. 2017, "Deep Sets", theorem 2.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyro_nami.networks.reductions import Reduction
from pyro_nami.networks.stepped import Activation

__all__ = [
    "ENCODERS",
    "AttentionEncoder",
    "MeanEncoder",
    "OwnEncoder",
    "SetEncoder",
    "make_encoder",
]

ENCODERS = "mean", "attention"


class SetEncoder(nn.Module):
    """An encoder of sets, ``(pool(x_1, ..., x_n), log(1 + n))``; a subclass says how in `pool`.

    Args:
        num_inputs: number of inputs of each instance.
        num_outputs: number of features that `pool` returns, those beside the logarithm of the count.
        layers: name -> units, columns and gain of each parameter. A layer has the bias as last column, and weights of
            variance gain / inputs at first; gain None stands for learned points, standard normal.
        **factory: device and dtype of the parameters.
    """

    # Sizes of the smallest and the largest set that gradients have come back from. What depends on a count outside is
    # extrapolation, so the logarithm of the count is held within this range.
    trained: tuple[int, int] | None = None

    def __init__(
        self,
        num_inputs: int,
        num_outputs: int,
        layers: Mapping[str, tuple[int, int, float | None]],
        **factory: Any,
    ) -> None:
        super().__init__()
        self.num_inputs = num_inputs
        self.num_features = num_outputs + 1
        self._gains = {name: gain for name, (_, _, gain) in layers.items()}
        for name, (units, columns, _) in layers.items():
            self.register_parameter(name, nn.Parameter(torch.empty(units, columns, **factory)))
        self.reset_parameters()

    def extra_repr(self) -> str:
        return f"{self.num_inputs} -> {self.num_features}"

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws all parameters anew: n inputs' weights with variance gain/n, biases within 1/sqrt(n) as PyTorch's."""
        for name, gain in self._gains.items():
            weight = getattr(self, name)
            fan_in = max(weight.shape[1] - 1, 1)
            weight.normal_(std=1.0 if gain is None else (gain / fan_in) ** 0.5)
            if gain is not None:
                weight[:, -1].uniform_(-1, 1).mul_(fan_in**-0.5)

    def pool(self, x: Tensor, over: Reduction, weights: Sequence[Tensor]) -> Tensor:
        """Returns features of each set, ``(*sets, num_outputs)``, zeros for an empty one; arguments as of `forward`."""
        raise NotImplementedError

    def weights(self) -> list[Tensor]:
        """Returns the parameters, read by attribute, layer by layer."""
        return [getattr(self, name) for name in self._gains]

    def forward(
        self, x: Tensor, over: Reduction, weights: Sequence[Tensor] | None = None
    ) -> Tensor:
        """Returns the features of each set of instances.

        Args:
            x: inputs of the instances, ``(*batch, num_inputs)``.
            over: which instances form a set.
            weights: what `weights` returned, to read no parameter now.

        Returns:
            ``(*sets, num_features)``, last log(1 + number of instances), or the nearest of ``trained``.
        """
        pooled = self.pool(x, over, self.weights() if weights is None else weights)
        count = over.count(x)
        held = count if self.trained is None else count.clamp(*self.trained)
        features = torch.cat((pooled, held.log1p().expand(*pooled.shape[:-1], 1)), -1)
        if features.requires_grad:
            features.register_hook(functools.partial(self._train_on, count))
        return features

    def _train_on(self, count: Tensor, gradient: Tensor) -> None:
        """Notes that the encoder learns from sets of these sizes, as a hook of what it returned."""
        if count.numel():
            sizes = (*(self.trained or ()), int(count.min()), int(count.max()))
            self.trained = min(sizes), max(sizes)

    def get_extra_state(self) -> list[int]:
        """Returns ``trained``, as plain numbers."""
        return list(self.trained or ())

    def set_extra_state(self, state: Sequence[int]) -> None:
        """Restores ``trained``."""
        self.trained = (state[0], state[1]) if state else None


class MeanEncoder(SetEncoder):
    """Encodes a set by ``W (mean of perceptron(x_n), mean of x_n, 1)``, and log(1 + number of instances).

    The last layer is linear, so it is applied to the means. The inputs beside the units are direct weights: a mean of
    the inputs, which a linear-Gaussian posterior needs, is represented exactly. Features have the same scale for sets
    of any size.

    Parameters are ``layer_0`` ``(units, num_inputs + 1)``, ..., ``output`` ``(num_outputs, units + num_inputs + 1)``,
    with ``hidden_features`` units in the hidden layers.

    Example:
        >>> from pyro_nami.networks import Along
        >>> MeanEncoder(3, 8)(torch.randn(10, 50, 3), Along(-1)).shape
        torch.Size([10, 1, 9])
    """

    def __init__(
        self,
        num_inputs: int,
        num_outputs: int,
        hidden_features: Sequence[int] = (16,),
        *,
        activation: Activation = F.silu,
        **factory: Any,
    ) -> None:
        reads = [num_inputs, *hidden_features]
        layers = {
            f"layer_{i}": (units, reads[i] + 1, 2 if i else 1)
            for i, units in enumerate(hidden_features)
        }
        layers["output"] = (num_outputs, sum(hidden_features[-1:]) + num_inputs + 1, 1)
        super().__init__(num_inputs, num_outputs, layers, **factory)
        self.activation = activation

    def pool(self, x: Tensor, over: Reduction, weights: Sequence[Tensor]) -> Tensor:
        units, values = x, [x, x.new_ones(*x.shape[:-1], 1)]
        for weight in weights[:-1]:
            units = self.activation(_affine(units, weight))
        if len(weights) > 1:
            values.insert(0, units)
        # The gradient of a mean is one row for all instances, and activations are slow at that layout.
        if units.requires_grad:
            units.register_hook(_contiguous)
        return F.linear(torch.cat([over.mean(value) for value in values], -1), weights[-1])


class OwnEncoder(SetEncoder):
    """Encodes a set as the mean of the features that the user's module gives its instances, and log(1 + count).

    The module maps inputs ``(..., num_inputs)`` to features ``(..., features)``, how many is found by a run on zeros.

    Raises:
        TypeError: if ``module`` is no `torch.nn.Module`.
        ValueError: if its features do not have the shape of the inputs but for the last dimension.

    Example:
        >>> from pyro_nami.networks import Along
        >>> OwnEncoder(nn.Identity(), 1)(torch.tensor([[1.0], [5.0]]), Along(-1))  # mean and log(1 + 2)
        tensor([[3.0000, 1.0986]])
    """

    def __init__(self, module: nn.Module, num_inputs: int, **factory: Any) -> None:
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"Expected a torch.nn.Module that encodes instances; got {type(module).__name__}."
            )
        module = module.to(**factory)
        with torch.no_grad():
            features = module(torch.zeros(2, 3, num_inputs, **factory))
        if features.dim() != 3 or features.shape[:-1] != (2, 3):
            raise ValueError(
                f"Expected a module that maps inputs (..., {num_inputs}) to features (..., features); it mapped "
                f"(2, 3, {num_inputs}) to {tuple(features.shape)}."
            )
        super().__init__(num_inputs, features.shape[-1], {})
        self.module = module

    def pool(self, x: Tensor, over: Reduction, weights: Sequence[Tensor]) -> Tensor:
        return over.mean(self.module(x))  # the module reads its parameters itself


class AttentionEncoder(SetEncoder):
    """Encodes a set by an induced-set attention block, attention of one seed, and the mean of the inputs.

    Inducing points read the instances, every instance reads the points of its set, and a seed reads the instances;
    each time what is read is added to the reader, followed by a residual layer. Attention between all pairs of n
    instances costs n^2; through m points it costs m an instance. Softmax over a set is a maximum and sums of it.

    Args:
        num_inputs, num_outputs, factory: see `SetEncoder`.
        width: features of queries, keys and values.
        inducing: number of inducing points.
        activation: elementwise function of the residual layers.

    References:
        Lee et al. 2019, "Set Transformer: A Framework for Attention-based Permutation-Invariant Neural Networks",
        equations 9 to 11 (ISAB and PMA). Departures: one head (the inducing points are several queries as it is), no
        layer normalization, learned points that are queries themselves, and the mean of the inputs beside what is read.

    Example:
        >>> from pyro_nami.networks import Along
        >>> AttentionEncoder(3, 8)(torch.randn(10, 50, 3), Along(-1)).shape
        torch.Size([10, 1, 9])
    """

    def __init__(
        self,
        num_inputs: int,
        num_outputs: int,
        width: int = 16,
        *,
        inducing: int = 8,
        activation: Activation = F.silu,
        **factory: Any,
    ) -> None:
        layers = {
            "inducing": (inducing, width, None),
            "read_inputs": (3 * width, num_inputs + 1, 1),  # query, key and value of an instance
            "update_inducing": (width, width + 1, 1),
            "read_inducing": (2 * width, width + 1, 1),  # key and value
            "update_instances": (width, width + 1, 1),
            "seed": (1, width, None),
            "read_instances": (2 * width, width + 1, 1),
            "update_seed": (width, width + 1, 1),
            "output": (num_outputs, width + num_inputs + 1, 1),
        }
        super().__init__(num_inputs, num_outputs, layers, **factory)
        self.activation = activation

    def pool(self, x: Tensor, over: Reduction, weights: Sequence[Tensor]) -> Tensor:
        (inducing, read_inputs, update_inducing, read_inducing, update_instances) = weights[:5]
        (seed, read_instances, update_seed, output) = weights[5:]
        query, key, value = _affine(x, read_inputs).chunk(3, -1)
        points = self._updated(inducing + _read_set(inducing, key, value, over), update_inducing)
        points = over.gather(_affine(points, read_inducing).flatten(-2)).unflatten(
            -1, (len(inducing), -1)
        )
        instances = self._updated(
            query + _read_points(query, *points.chunk(2, -1)), update_instances
        )
        key, value = _affine(instances, read_instances).chunk(2, -1)
        summary = self._updated(seed + _read_set(seed, key, value, over), update_seed).squeeze(-2)
        inputs = over.mean(F.pad(x, (0, 1), value=1.0))
        # The mean of ones, 0 for an empty set.
        return F.linear(torch.cat((summary * inputs[..., -1:], inputs), -1), output)

    def _updated(self, x: Tensor, weight: Tensor) -> Tensor:
        return x + self.activation(_affine(x, weight))


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
    if spec == "attention":
        width = max(hidden_features, default=num_outputs)
        return AttentionEncoder(num_inputs, num_outputs, width, activation=activation, **factory)
    return MeanEncoder(num_inputs, num_outputs, hidden_features, activation=activation, **factory)


def _contiguous(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.contiguous()


def _affine(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight[:, :-1], weight[:, -1])


def _read_set(queries: Tensor, key: Tensor, value: Tensor, over: Reduction) -> Tensor:
    """Returns what queries ``(queries, width)`` read of each set, ``(*sets, queries, width)``; zeros of an empty one.

    Keys and values are those of the instances, ``(*batch, width)``.
    """
    scores = F.linear(key, queries) * queries.shape[-1] ** -0.5
    weight = (scores - over.gather(over.amax(scores.detach()))).exp()
    total = over.sum((weight.unsqueeze(-1) * value.unsqueeze(-2)).flatten(-2)).unflatten(
        -1, (len(queries), -1)
    )
    # The largest weight of a set is 1, so the bound concerns empty sets only, and no sum lies on it.
    return total / over.sum(weight).clamp(min=0.5).unsqueeze(-1)


def _read_points(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Returns what queries ``(*batch, width)`` read of points with keys and values ``(*batch, points, width)``."""
    scores = (query.unsqueeze(-2) * key).sum(-1, keepdim=True) * query.shape[-1] ** -0.5
    return (scores.softmax(-2) * value).sum(-2)
