"""Pooling encoders: invariance, sizes, masks, and the segmented form against a loop."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from pyro_nami.nn import PoolingEncoder, segment_mean


def encoder(**options):
    torch.manual_seed(0)
    return PoolingEncoder(3, 5, (16, 16), dtype=torch.double, **options)


def randn(*shape):
    torch.manual_seed(1)
    return torch.randn(*shape, dtype=torch.double)


@pytest.mark.parametrize("dim", [-1, -2, -3])
def test_features_are_the_mean_over_instances_and_the_log_count(dim):
    net, x = encoder(), randn(4, 7, 6, 3)
    pooled = net(x, dim)
    assert pooled.shape[:-1] == tuple(1 if axis == 3 + dim else size for axis, size in enumerate((4, 7, 6)))
    assert pooled.shape[-1] == net.num_features == 6
    instances = x.movedim(dim - 1, 0)
    expected = sum(net.instance_features(instance) for instance in instances) / len(instances)
    torch.testing.assert_close(pooled[..., :5], expected.unsqueeze(dim - 1))
    torch.testing.assert_close(pooled[..., 5], torch.full_like(pooled[..., 5], math.log1p(len(instances))))


def test_instance_features_are_a_perceptron_with_a_linear_part():
    net, x = encoder(), randn(4, 3)
    value = x
    for weight in (net.layer_0, net.layer_1):
        value = torch.nn.functional.silu(value @ weight[:, :-1].T + weight[:, -1])
    expected = value @ net.output[:, :16].T + x @ net.output[:, 16:19].T + net.output[:, 19]
    torch.testing.assert_close(net.instance_features(x), expected)


def test_order_does_not_matter_and_instances_do():
    net, x = encoder(), randn(2, 9, 3)
    torch.testing.assert_close(net(x[:, torch.randperm(9)], -1), net(x, -1))
    assert not torch.allclose(net(x[:, :8], -1), net(x, -1))


@pytest.mark.parametrize("hole", [math.nan, math.inf, 1e30])
def test_masked_instances_have_no_influence_on_values_or_gradients(hole):
    net, x = encoder(), randn(6, 9, 3)
    mask = torch.rand(6, 9) < 0.5
    mask[0], mask[1] = True, False
    holes = torch.where(mask[..., None], x, hole).requires_grad_()
    pooled = net(holes, -1, mask)
    for row in range(6):
        torch.testing.assert_close(pooled[row], net(x[row, mask[row]], -1))
    pooled.sum().backward()
    assert torch.equal((holes.grad != 0).any(-1), mask)
    assert all(parameter.grad.isfinite().all() for parameter in net.parameters())


def test_masks_broadcast():
    net, x, mask = encoder(), randn(4, 6, 3), torch.arange(6) < 4
    torch.testing.assert_close(net(x, -1, mask), net(x[:, :4], -1))


def test_an_empty_set_gives_zeros():
    net = encoder()
    zeros = torch.zeros(2, 1, 6, dtype=torch.double)
    assert torch.equal(net(randn(2, 0, 3), -1), zeros)
    assert torch.equal(net(randn(2, 4, 3), -1, torch.zeros(2, 4, dtype=torch.bool)), zeros)


def test_one_network_takes_any_number_of_instances():
    net = encoder()
    assert {tuple(net(randn(size, 3), -1).shape) for size in (1, 50, 5000)} == {(1, 6)}


def test_segments_agree_with_a_loop():
    net, x = encoder(), randn(2, 20, 3)
    index = torch.randint(0, 6, (20,))
    index[index == 4] = 3
    pooled = segment_mean(net.instance_features(x), index, 6)
    assert pooled.shape == (2, 6, net.num_features)
    for segment in range(6):
        torch.testing.assert_close(pooled[:, segment], net(x[:, index == segment], -1).squeeze(1))
    assert torch.equal(pooled[:, 4], torch.zeros_like(pooled[:, 4]))


def test_masked_segments_agree_with_a_loop():
    x = randn(2, 20, 3)
    index, mask = torch.randint(0, 3, (20,)), torch.rand(2, 20) < 0.5
    holes = torch.where(mask[..., None], x, math.nan)
    pooled = segment_mean(holes, index, 3, mask=mask)
    for row in range(2):
        for segment in range(3):
            members = x[row, (index == segment) & mask[row]]
            torch.testing.assert_close(pooled[row, segment, :3], members.sum(0) / max(len(members), 1))
            assert pooled[row, segment, 3].item() == pytest.approx(math.log1p(len(members)))


def test_segments_pass_gradients():
    x = randn(7, 2).requires_grad_()
    index = torch.tensor([0, 0, 1, 2, 2, 2, 1])
    assert torch.autograd.gradcheck(lambda value: segment_mean(value, index, 4), (x,))


def test_parameters_have_the_documented_shapes_and_copy():
    net = encoder()
    shapes = {name: tuple(parameter.shape) for name, parameter in net.named_parameters()}
    assert shapes == {"layer_0": (16, 4), "layer_1": (16, 17), "output": (5, 20)}
    assert set(net.state_dict()) == set(shapes)
    x = randn(4, 3)
    assert torch.equal(copy.deepcopy(net)(x, -1), net(x, -1))
    assert net.to(torch.float)(x.float(), -1).dtype == torch.float


def test_arguments_that_do_not_fit_are_errors():
    net, x = encoder(), randn(4, 3)
    for dim in (0, -2):
        with pytest.raises(ValueError, match=f"Expected dim from -1 to -1.*got {dim}"):
            net(x, dim)
    with pytest.raises(ValueError, match=r"Expected x of shape \(\*batch, 3\); got \(4, 2\)"):
        net(x[:, :2], -1)
    with pytest.raises(TypeError, match=r"boolean mask; got torch\.float32"):
        net(x, -1, torch.ones(4))
    with pytest.raises(ValueError, match=r"Expected a mask that broadcasts to \(4,\); got \(3,\)"):
        net(x, -1, torch.ones(3, dtype=torch.bool))
    with pytest.raises(ValueError, match="num_outputs and hidden_features of at least 1"):
        PoolingEncoder(3, 0)
    with pytest.raises(ValueError, match="Expected features"):
        segment_mean(x, torch.zeros(3, dtype=torch.long), 2)
    with pytest.raises(ValueError, match="Expected index from 0 to 1; got 0 to 3"):
        segment_mean(x, torch.arange(4), 2)
