"""`SOAP` against torch's Adam, which it is in coordinates that it finds, but for those that wait."""

import copy

import pytest
import torch
from torch.optim import Adam

from pyro_nami.amortize import SOAP


def descend(optimizer, parameters, gradients):
    """Takes a step by each of the gradients, one of each parameter."""
    for step in gradients:
        for parameter, gradient in zip(parameters, step):
            parameter.grad = gradient.clone()
        optimizer.step()


class CautiousAdam(Adam):
    """Torch's, with coordinates put back whose mean and last gradient have other signs."""

    def step(self):
        (group,) = self.param_groups
        before = [each.detach().clone() for each in group["params"]]
        super().step()
        for parameter, old in zip(group["params"], before):
            waits = self.state[parameter]["exp_avg"] * parameter.grad <= 0
            parameter.data[waits] = old[waits]


def rotation(size):
    return torch.linalg.qr(torch.randn(size, size))[0]


def test_a_vector_and_sides_that_are_too_long_are_moved_by_cautious_adam():
    starts = [torch.randn(3), torch.randn(4, 5), torch.randn(2, 4, 5)]
    gradients = [[torch.randn_like(start) for start in starts] for _ in range(30)]
    ours, theirs = ([start.clone().requires_grad_() for start in starts] for _ in range(2))
    descend(SOAP(ours, lr=0.1, max_side=3), ours, gradients)
    descend(CautiousAdam(theirs, lr=0.1, betas=(0.95, 0.99)), theirs, gradients)
    for own, other in zip(ours, theirs):
        assert torch.allclose(own, other, atol=1e-5)


@pytest.mark.parametrize("shape", [(4, 6), (2, 4, 6)])
def test_in_the_eigenbasis_of_gradients_it_is_cautious_adam(shape):
    """Gradients that a rotation makes of independent ones of unequal sizes, whose coordinates are the eigenbasis."""
    left, right = rotation(4), rotation(6)
    sizes = torch.logspace(0, -1.5, 4)[:, None] * torch.logspace(0, -2, 6)
    drift = 0.5 * sizes * torch.randn(shape).sign()
    plain = [drift * 0.05 + sizes * torch.randn(shape) for _ in range(3000)]
    turned = torch.zeros(shape, requires_grad=True)
    descend(
        SOAP([turned], lr=0.01, basis_beta=0.999),
        [turned],
        ([left @ each @ right.mT] for each in plain),
    )
    known = torch.zeros(shape, requires_grad=True)
    options = {"lr": 0.01, "betas": (0.95, 0.99)}
    descend(CautiousAdam([known], **options), [known], ([each] for each in plain[1:]))
    inside = left.mT @ turned.detach() @ right
    gap, size = (inside - known.detach()).norm(), known.detach().norm()
    assert gap < 0.4 * size, (gap, size)
    without = torch.zeros(shape, requires_grad=True)
    descend(
        CautiousAdam([without], **options),
        [without],
        ([left @ each @ right.mT] for each in plain[1:]),
    )
    assert (left.mT @ without.detach() @ right - known.detach()).norm() > 2 * gap


def ill_conditioned(optimizer, steps):
    """The loss of a linear regression on inputs of unequal sizes that are mixed, after some steps."""
    torch.manual_seed(2)
    inputs = torch.randn(500, 8) * torch.logspace(0, -2, 8) @ rotation(8)
    outputs = inputs @ torch.randn(8, 3) * 10
    weight = torch.zeros(3, 8, requires_grad=True)
    descent = optimizer([weight])
    for step in range(steps):
        for group in descent.param_groups:
            group["lr"] = 0.3 * (1 - step / steps)
        descent.zero_grad()
        loss = (inputs @ weight.mT - outputs).square().mean()
        loss.backward()
        descent.step()
    return loss.item()


def test_mixed_inputs_of_unequal_sizes_are_learned_sooner():
    assert ill_conditioned(SOAP, 300) < 0.1 * ill_conditioned(Adam, 300)


def test_weights_decay_but_not_those_of_vectors():
    weight, bias = torch.ones(2, 2, requires_grad=True), torch.ones(2, requires_grad=True)
    descend(
        SOAP([weight, bias], lr=0.1, weight_decay=1.0),
        [weight, bias],
        [[torch.zeros(2, 2), torch.zeros(2)]] * 3,
    )
    # the first step of a matrix measures
    assert torch.allclose(weight, torch.tensor(0.9**2)) and (bias == 1).all()


def test_parameters_of_one_shape_do_not_mix():
    gradients = [
        [torch.randn(4, 5), torch.randn(4, 5), torch.randn(3), torch.randn(3)] for _ in range(30)
    ]
    together = [torch.zeros_like(each, requires_grad=True) for each in gradients[0]]
    descend(SOAP(together), together, gradients)
    for i, own in enumerate(together):
        alone = torch.zeros_like(own, requires_grad=True)
        descend(SOAP([alone]), [alone], ([step[i]] for step in gradients))
        assert torch.allclose(own, alone, atol=1e-5)


@pytest.mark.parametrize("shape", [(3,), (4, 5)])
def test_without_a_gradient_parameters_stay(shape):
    first, second = (torch.ones(shape, requires_grad=True) for _ in range(2))
    optimizer = SOAP([first, second], weight_decay=1.0)
    descend(optimizer, [first], [[torch.randn(shape)] for _ in range(3)])
    assert (second == 1).all() and (first != 1).all()
    descend(optimizer, [second], [[torch.randn(shape)]])
    assert (second != 1).all()


def test_it_goes_on_from_its_state():
    gradients = [[torch.randn(4, 5), torch.randn(3)] for _ in range(40)]
    whole, halves = (
        [torch.zeros(4, 5, requires_grad=True), torch.zeros(3, requires_grad=True)]
        for _ in range(2)
    )
    descend(SOAP(whole), whole, gradients)
    first = SOAP(halves)
    descend(first, halves, gradients[:15])
    second = SOAP(halves)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    descend(second, halves, gradients[15:])
    assert all(map(torch.equal, whole, halves))


@pytest.mark.parametrize(
    "wrong", [{"lr": -1.0}, {"betas": (0.9, 1.0)}, {"basis_beta": 1.0}, {"basis_every": 0}]
)
def test_settings_without_a_meaning_are_refused(wrong):
    with pytest.raises(
        ValueError, match=r"^Expected lr >= 0, betas and basis_beta within \[0, 1\)"
    ):
        SOAP([torch.zeros(2, requires_grad=True)], **wrong)
