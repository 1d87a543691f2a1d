"""Encoders of one observed value: an image, a series or a table of rows becomes a fixed number of features.

Each standardizes what it reads by values that it is made with. Weights are matrices, which `SOAP` turns.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyro_nami.networks.pooling import MeanEncoder
from pyro_nami.networks.recurrent import SeriesSummary
from pyro_nami.networks.reductions import Along
from pyro_nami.networks.running import tempered

__all__ = ["SHAPES", "ImageEncoder", "RowsEncoder", "SeriesEncoder", "encoder_of", "kind_of"]

# Sides and steps from which a value is taken for an image or a series. At ten times more, networks read thousands of
# numbers one by one; at ten times less, tables and vectors of a few numbers pass for images and series.
LEAST_SIDE, LEAST_STEPS = 16, 100
# Most ratio of an image's sides, which tells it from a table with a column for each of some numbers.
MOST_RATIO = 4


class _Standard(nn.Module):
    """Standardized inputs: ``(x - center) / scale``, logarithmic far out."""

    center: Tensor
    scale: Tensor

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        scale = rows.std(0)
        self.register_buffer("center", rows.mean(0))
        self.register_buffer("scale", scale.where(scale > 0, 1.0))

    def forward(self, x: Tensor) -> Tensor:
        return tempered((x - self.center) / self.scale)


class _Convolution(nn.Module):
    """A convolution of stride 2 over one or two dims, whose weights are a matrix, with a row for each channel."""

    def __init__(self, inputs: int, outputs: int, dims: int, width: int = 3) -> None:
        super().__init__()
        self.size = (outputs, inputs, *(width,) * dims)
        self.weight = nn.Parameter(torch.randn(outputs, inputs * width**dims))
        with torch.no_grad():
            self.weight.mul_((2 / self.weight.shape[1]) ** 0.5)
        self.bias = nn.Parameter(torch.zeros(outputs))
        self.padding = width // 2

    def forward(self, x: Tensor) -> Tensor:
        apply = F.conv1d if len(self.size) == 3 else F.conv2d
        return F.silu(
            apply(x, self.weight.view(self.size), self.bias, stride=2, padding=self.padding)
        )


class ImageEncoder(nn.Module):
    """Encodes images ``(batch, height, width)`` or ``(batch, channels, height, width)`` by a convolutional network.

    Convolutions of stride 2 halve the sides until none is longer than 4; a linear layer reads what is left.

    Args:
        images: examples, at least two, of the sizes that it reads.
        num_features: that it returns.
        channels: of the first convolution; each later one has twice as many, up to 64.

    Example:
        >>> ImageEncoder(torch.randn(10, 20, 20))(torch.randn(5, 20, 20)).shape
        torch.Size([5, 32])
    """

    def __init__(self, images: Tensor, num_features: int = 32, channels: int = 16) -> None:
        super().__init__()
        images = self._with_channels(images)
        self.standard = _Standard(images.movedim(1, -1).flatten(0, -2))
        sides, inputs, layers = list(images.shape[-2:]), images.shape[1], []
        while max(sides) > 4:
            layers.append(_Convolution(inputs, channels, dims=2))
            sides = [(side + 1) // 2 for side in sides]
            inputs, channels = channels, min(2 * channels, 64)
        self.layers = nn.Sequential(*layers)
        self.output = nn.Linear(inputs * sides[0] * sides[1], num_features)
        self.to(images)

    @staticmethod
    def _with_channels(images: Tensor) -> Tensor:
        return images.unsqueeze(1) if images.dim() == 3 else images

    def forward(self, images: Tensor) -> Tensor:
        """Returns features ``(batch, features)``."""
        x = self.standard(self._with_channels(images).movedim(1, -1)).movedim(-1, 1)
        return self.output(self.layers(x).flatten(1))


class SeriesEncoder(nn.Module):
    """Encodes series ``(batch, steps)`` or ``(batch, steps, numbers)`` by a gated recurrent unit.

    The features are those of `SeriesSummary`: of the unit's last state, of means over steps, and of moments. Where
    there are more than ``most_steps``, convolutions of stride 2 shorten the series first.

    Args:
        series: examples, at least two, of as many numbers a step as it reads.
        num_units: of the recurrent unit.
        most_steps: that the unit reads, each of which takes time.

    Example:
        >>> SeriesEncoder(torch.randn(10, 50))(torch.randn(5, 50)).shape
        torch.Size([5, 105])
    """

    def __init__(self, series: Tensor, num_units: int = 24, most_steps: int = 32) -> None:
        super().__init__()
        series = self._with_numbers(series)
        self.standard = _Standard(series.flatten(0, -2))
        steps, inputs, layers = series.shape[1], series.shape[2], []
        while steps > most_steps:
            layers.append(_Convolution(inputs, 16, dims=1, width=5))
            steps, inputs = (steps + 1) // 2, 16
        self.layers = nn.Sequential(*layers)
        self.summary = SeriesSummary(inputs, num_units)
        self.to(series)

    @staticmethod
    def _with_numbers(series: Tensor) -> Tensor:
        return series.unsqueeze(-1) if series.dim() == 2 else series

    def forward(self, series: Tensor) -> Tensor:
        """Returns features ``(batch, features)``."""
        x = self.standard(self._with_numbers(series))
        x = self.layers(x.mT).mT if len(self.layers) else x
        return self.summary(x.transpose(0, 1))


class RowsEncoder(nn.Module):
    """Encodes tables ``(batch, rows, numbers)``, whose rows have no order, by means over the rows.

    Args:
        tables: examples, at least two, of as many numbers a row as it reads.
        num_features: that `MeanEncoder` returns beside the number of rows.

    Example:
        >>> RowsEncoder(torch.randn(10, 30, 2))(torch.randn(5, 40, 2)).shape
        torch.Size([5, 33])
    """

    def __init__(self, tables: Tensor, num_features: int = 32) -> None:
        super().__init__()
        tables = self._with_numbers(tables)
        self.standard = _Standard(tables.flatten(0, -2))
        self.rows = MeanEncoder(tables.shape[2], num_features, (64, 64))
        self.to(tables)

    @staticmethod
    def _with_numbers(tables: Tensor) -> Tensor:
        return tables.unsqueeze(-1) if tables.dim() == 2 else tables

    def forward(self, tables: Tensor) -> Tensor:
        """Returns features ``(batch, features)``."""
        return self.rows(self.standard(self._with_numbers(tables)), Along(-1)).squeeze(-2)


# name -> the encoder, and the numbers of dims of a value that it reads
SHAPES: dict[str, tuple[Callable[[Tensor], nn.Module], tuple[int, ...]]] = {
    "image": (ImageEncoder, (2, 3)),
    "series": (SeriesEncoder, (1, 2)),
    "set": (RowsEncoder, (1, 2)),
}


def kind_of(shape: torch.Size) -> str | None:
    """Returns the kind of encoder for values of a shape: images and long series; None for others.

    Example:
        >>> kind_of(torch.Size([32, 32])), kind_of(torch.Size([500, 2])), kind_of(torch.Size([10]))
        ('image', 'series', None)
    """
    if len(shape) in (2, 3):
        low, high = sorted(shape[-2:])
        if low >= LEAST_SIDE and high <= MOST_RATIO * low:
            return "image"
    if len(shape) in (1, 2) and shape[0] >= LEAST_STEPS and shape[1:].numel() < LEAST_SIDE:
        return "series"
    return None


def encoder_of(kind: str, values: Tensor) -> nn.Module:
    """Returns a new encoder of a kind, standardized by values ``(batch, *event)``.

    Raises:
        ValueError: an unknown kind, or one for values of other numbers of dims.
    """
    if kind not in SHAPES:
        raise ValueError(f"Expected an encoder of {', '.join(map(repr, SHAPES))}; got {kind!r}.")
    make, dims = SHAPES[kind]
    if values.dim() - 1 not in dims:
        expected = " or ".join(map(str, dims))
        raise ValueError(
            f"Expected values of {expected} dims for {kind!r}; got shape {tuple(values.shape[1:])}."
        )
    return make(values)
