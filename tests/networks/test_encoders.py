"""Encoders of images, series and tables: what they do not depend on, and which is chosen."""

import pytest
import torch
import torch.nn.functional as F

from pyro_nami.networks.encoders import (
    SHAPES,
    ImageEncoder,
    RowsEncoder,
    SeriesEncoder,
    encoder_of,
    kind_of,
)

CASES = {
    "image": (2, 17, 20),
    "series": (150, 2),
    "set": (30, 2),
}


@pytest.mark.parametrize("kind", SHAPES)
def test_units_of_values_do_not_count_and_all_weights_learn(kind):
    torch.manual_seed(0)
    x = torch.randn(12, *CASES[kind])
    found = []
    for scale, shift in ((1.0, 0.0), (1e4, 3e4)):
        torch.manual_seed(1)
        encoder = encoder_of(kind, scale * x + shift)
        found.append(encoder(scale * x + shift))
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)
    assert found[1].dim() == 2 and len(found[1]) == 12
    found[1].square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in encoder.parameters())
    one = encoder(1e4 * x[3:4] + 3e4)
    torch.testing.assert_close(one, found[1][3:4], rtol=1e-4, atol=1e-4)


def test_convolutions_are_those_of_torch():
    torch.manual_seed(0)
    x = torch.randn(6, 16, 16)
    encoder = ImageEncoder(x)
    out = encoder.standard(x.unsqueeze(-1)).movedim(-1, 1)
    for layer in encoder.layers:
        weight = layer.weight.reshape(layer.size)
        out = F.silu(F.conv2d(out, weight, layer.bias, stride=2, padding=1))
    torch.testing.assert_close(encoder.output(out.flatten(1)), encoder(x))


def test_rows_have_no_order_and_steps_have_one():
    torch.manual_seed(0)
    x = torch.randn(5, 30)
    order = torch.randperm(30)
    rows, series = RowsEncoder(x), SeriesEncoder(x)
    torch.testing.assert_close(rows(x), rows(x[:, order]), rtol=1e-4, atol=1e-5)
    assert (series(x) - series(x[:, order])).abs().max() > 0.01


def test_kinds_are_chosen_by_shape_and_others_refused():
    kinds = {
        (32, 32): "image",
        (3, 16, 64): "image",
        (16, 65): None,
        (100,): "series",
        (400, 3): "series",
        (99,): None,
        (100, 20): None,
        (10, 10): None,
        (): None,
    }
    for shape, kind in kinds.items():
        assert kind_of(torch.Size(shape)) == kind, shape
    with pytest.raises(ValueError, match="an encoder of 'image', 'series', 'set'; got 'text'"):
        encoder_of("text", torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"of 2 or 3 dims for 'image'; got shape \(3,\)"):
        encoder_of("image", torch.zeros(2, 3))
