"""Sums of pseudo-observations: against the formula, over unions and copies, and exact for a conjugate Normal.

What holds of every function of sets, `test_pooling.py` asks of them too.
"""

import pytest
import torch
from torch import nn

from pyro_nami.networks import Along, PrecisionSums

INDEX = torch.tensor([0, 3, 3, 1, 0, 3])


def randn(*shape):
    return torch.randn(*shape, dtype=torch.double, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def net():
    evidence = PrecisionSums(3, 2, dtype=torch.double)
    nn.init.normal_(evidence.heads_weight, std=0.3)
    return evidence


def test_sums_follow_the_formula(net):
    x = randn(4, 6, 3)
    sums = net(x, Along(-1))
    assert sums.shape == (4, 1, 2, 5)
    for head in range(2):
        log_precision = x @ net.heads_weight[head, :3] + net.heads_weight[head, 3]
        slope = x @ net.heads_weight[2 + head, :3] + net.heads_weight[2 + head, 3]
        precision = log_precision.exp()
        terms = torch.stack((precision * slope**2, precision * slope), -1)
        expected = torch.cat((terms, (precision * slope)[..., None] * x), -1).sum(1, keepdim=True)
        torch.testing.assert_close(sums[..., head, :], expected)


def test_each_instance_starts_as_one_observation_of_unit_precision():
    x = randn(6, 3)
    sums = PrecisionSums(3, 2, dtype=torch.double)(x, Along(-1))
    torch.testing.assert_close(sums, torch.cat((x.new_full((2,), 6.0), x.sum(0))).expand(1, 2, 5))


def test_a_conjugate_normal_posterior_is_represented_exactly():
    noise, slope, y = 0.3, 1.7, randn(50, 1)  # y_n = slope * v + Normal(0, noise), v ~ Normal(0, 1)
    net = PrecisionSums(1, 1, dtype=torch.double)
    with torch.no_grad():
        net.heads_weight.copy_(torch.tensor([[0.0, -2 * torch.tensor(noise).log()], [0.0, slope]]))
    precision, _, weighted = net(y, Along(-1))[0, 0]
    covariance = torch.eye(50).double() * noise**2 + slope**2  # of y, in its joint with v
    gain = slope * torch.linalg.solve(covariance, torch.ones(50, 1).double())
    assert 1 / (1 + precision.item()) == pytest.approx(1 - slope * gain.sum().item(), rel=1e-5)
    assert weighted.item() / (1 + precision.item()) == pytest.approx(
        (gain * y).sum().item(), rel=1e-5
    )


def test_sums_add_over_unions_and_copies(net):
    x, over = randn(2, 9, 3), Along(-1)
    torch.testing.assert_close(net(x[:, :4], over) + net(x[:, 4:], over), net(x, over))
    torch.testing.assert_close(net(x.repeat(1, 7, 1), over), 7 * net(x, over))


def test_log_precisions_are_bounded():
    net = PrecisionSums(1, 1, dtype=torch.double)
    with torch.no_grad():
        net.heads_weight[0, 0] = 1.0
    x = torch.tensor([[[-1e3]], [[1e3]]], dtype=torch.double)
    torch.testing.assert_close(
        net(x, Along(-1))[:, 0, 0, 0].log(), torch.tensor([-10.0, 10.0]).double()
    )
