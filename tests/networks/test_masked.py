"""Masked networks: the Jacobian law, and the laws of the incremental pass."""

import copy
import itertools

import pyro
import pytest
import torch
from pyro.nn import PyroParam
from pyro.nn.module import to_pyro_module_
from torch import nn
from torch.distributions import MultivariateNormal, Normal, constraints
from torch.utils.flop_counter import FlopCounterMode

from pyro_nami.networks import MaskedMLP


def ones(outputs, inputs):
    return torch.ones(outputs, inputs, dtype=torch.bool)


def random_rows(seed, outputs=11, inputs=8):
    """Random rows, some of them empty and some repeated, the last reading the last input."""
    torch.manual_seed(seed)
    dependency = torch.rand(outputs, inputs) < torch.rand(outputs, 1)
    dependency[3], dependency[5], dependency[7] = False, dependency[2], dependency[2]
    return dependency


def tree(depth=4):
    """Each node of a binary tree reads itself and its ancestors, as in a Tree-MADE."""
    dependency = torch.zeros(2**depth - 1, 2**depth - 1, dtype=torch.bool)
    for node in range(len(dependency)):
        ancestor = node + 1
        while ancestor:
            dependency[node, ancestor - 1] = True
            ancestor //= 2
    return dependency


DEPENDENCIES = {
    "chain": ones(20, 20).tril(),
    "strict chain": ones(9, 9).tril(-1),
    "markov": ones(12, 12).tril() & ones(12, 12).triu(-2),
    "tree": tree(),
    "dense": ones(4, 6),
    "duplicates": ones(5, 5).tril().repeat_interleave(3, 0),
    "single": torch.eye(6, dtype=torch.bool),
    "no parents": ~ones(3, 4),
    "no inputs": ones(3, 0),
    **{f"random {seed}": random_rows(seed) for seed in range(6)},
}


def randomized(mlp, seed=0):
    """The same network with weights drawn at random, those of the output layer too."""
    torch.manual_seed(seed)
    for parameter in mlp.parameters():
        nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return mlp


def support_of(mlp, inputs):
    torch.manual_seed(1)
    points = torch.randn(3, inputs, dtype=torch.double)
    jacobian = torch.stack([torch.autograd.functional.jacobian(mlp, point) for point in points])
    return (jacobian != 0).any(0)


def sampler(seed=0, steps=12, width=16, depth=2, **options):
    """A network over steps of 0 to 2 columns and 0 to 3 rows, in which every row reads some earlier columns."""
    torch.manual_seed(seed)
    inputs, outputs = torch.randint(0, 3, (steps,)).tolist(), torch.randint(0, 4, (steps,)).tolist()
    known = torch.tensor(inputs).cumsum(0).repeat_interleave(torch.tensor(outputs))
    dependency = (torch.rand(sum(outputs), sum(inputs)) < 0.6) & (
        torch.arange(sum(inputs)) < known[:, None]
    )
    options = {"dtype": torch.double, **options}
    mlp = MaskedMLP(
        dependency, (width,) * depth, input_splits=inputs, output_splits=outputs, **options
    )
    return randomized(mlp, seed), inputs


def one_by_one(mlp, x, inputs):
    """The rows of a pass that takes one step after the other."""
    return torch.cat(advance_all(mlp, x, inputs, range(1, len(inputs) + 1)), -1)


def advance_all(mlp, x, inputs, stops):
    """Rows of a pass that takes the steps up to each stop at once; ``x`` may be one tensor, or one per advance."""
    state, rows, step = mlp.start(), [], 0
    for index, stop in enumerate(stops):
        chunk = x[index] if isinstance(x, list) else x[..., sum(inputs[:step]) : sum(inputs[:stop])]
        new, state = state.advance(chunk, stop)
        rows.append(new)
        step = stop
    return rows


# The Jacobian law


@pytest.mark.parametrize(
    "hidden_features", [(1,), (2,), (4,), (7, 3), (16,), (64,), (5, 64, 2)], ids=str
)
@pytest.mark.parametrize("dependency", DEPENDENCIES.values(), ids=DEPENDENCIES)
def test_jacobian_support_is_the_dependency_at_every_width(dependency, hidden_features):
    mlp = randomized(MaskedMLP(dependency, hidden_features, dtype=torch.double))
    assert torch.equal(support_of(mlp, dependency.shape[1]), dependency)


ACTIVATIONS = torch.tanh, nn.functional.elu, nn.Softplus()
WITHOUT_SKIP = "chain", "tree", "random 1", "random 3"


@pytest.mark.parametrize(
    ("name", "hidden_features", "options"),
    [
        *(("random 0", (6, 6), {"activation": f}) for f in ACTIVATIONS),
        # Hidden units alone carry every dependency when wide enough.
        *((name, (20,) * depth, {"skip": False}) for name in WITHOUT_SKIP for depth in (1, 3)),
        ("chain", (4, 4), {}),
    ],
)
def test_jacobian_law_holds_for_other_activations_and_without_a_skip(
    name, hidden_features, options
):
    mlp = randomized(MaskedMLP(DEPENDENCIES[name], hidden_features, dtype=torch.double, **options))
    assert torch.equal(support_of(mlp, DEPENDENCIES[name].shape[1]), DEPENDENCIES[name])


@pytest.mark.parametrize("skip", [True, False])
def test_hidden_units_carry_more_than_the_skip_does(skip):
    dependency = ones(4, 4).tril()
    mlp = randomized(MaskedMLP(dependency, (8,), skip=skip, dtype=torch.double))
    x = torch.randn(2, 4, dtype=torch.double)
    first, second = (torch.autograd.functional.jacobian(mlp, point) for point in x)
    assert torch.equal((first - second).abs() > 1e-9, dependency)


def test_rows_without_parents_are_their_bias():
    dependency = DEPENDENCIES["random 2"]
    mlp = randomized(MaskedMLP(dependency, (16,)))
    mlp.set_output_bias(torch.arange(11.0))
    empty = ~dependency.any(1)
    torch.testing.assert_close(
        mlp(torch.randn(7, 8))[:, empty], torch.arange(11.0)[empty].expand(7, -1)
    )
    assert empty.any()


TRIANGLE, TWO = ones(20, 20).tril(), ones(2, 2)
REPEATED = torch.tensor([[1, 0], [0, 1], [0, 1]]).bool()
IN_STEPS = {"input_splits": [2, 0], "output_splits": [2, 1]}


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (
            lambda: MaskedMLP(TRIANGLE, (4,), skip=False),
            r"skip=False; got hidden_features=\[4\], which loses \d+ of 210\. 20 units",
        ),
        (lambda: MaskedMLP(TWO, (8, 0)), r"at least 1 each; got \[8, 0\]"),
        (lambda: MaskedMLP(TWO, (), skip=False), "Expected at least one hidden layer or skip=True"),
    ],
)
def test_networks_that_cannot_be_are_errors(make, error):
    with pytest.raises(ValueError, match=error):
        make()


# What the networks compute


def test_masked_network_is_a_perceptron_with_masked_weights():
    """Oracle: the layers written out, with masks from set inclusion of labels read off the first layer's mask."""
    dependency = DEPENDENCIES["random 4"]
    mlp = randomized(MaskedMLP(dependency, (30, 25), dtype=torch.double))
    layer_0, layer_1, output = (parameter.detach() for parameter in mlp.parameters())
    x = torch.randn(5, 8, dtype=torch.double)
    labels = mlp.layer_0_mask[:, :-1].bool()
    assert set(map(tuple, labels.tolist())) == {
        tuple(row) for row in dependency.tolist() if any(row)
    }
    x = torch.cat((x, torch.zeros(1, 8, dtype=torch.double)))
    lower = (layer_0[:, :-1] * labels) @ x.T + layer_0[:, -1:]
    upper_labels = torch.stack([labels[mask.bool()].any(0) for mask in mlp.layer_1_mask[:, :-1]])
    inside = (labels[None] <= upper_labels[:, None]).all(-1)
    upper = (layer_1[:, :-1] * inside) @ nn.functional.silu(lower) + layer_1[:, -1:]
    inside = (upper_labels[None] <= dependency[:, None]).all(-1)
    units = nn.functional.silu(upper)
    units = units - units[:, -1:]  # relative to what they are at zero
    rows = (output[:, :25] * inside) @ units + (output[:, 25:33] * dependency) @ x.T
    torch.testing.assert_close(mlp(x), (rows + output[:, -1:]).T)


def test_linear_gaussian_posterior_is_exact():
    """Oracle: the conditional of a multivariate normal; skip weights are its regressions in sampling order."""
    factor = torch.randn(7, 7, dtype=torch.double)
    joint = MultivariateNormal(torch.zeros(7, dtype=torch.double), factor @ factor.T + torch.eye(7))
    context, covariance = 3, joint.covariance_matrix
    mlp = MaskedMLP(ones(4, 7).tril(context - 1), (5,), dtype=torch.double)
    weight = torch.zeros(4, 7, dtype=torch.double)
    variance = torch.zeros(4, dtype=torch.double)
    for row in range(4):
        own, known = context + row, slice(0, context + row)
        weight[row, known] = torch.linalg.solve(covariance[known, known], covariance[known, own])
        variance[row] = covariance[own, own] - weight[row, known] @ covariance[known, own]
    with torch.no_grad():
        mlp.output[:, 5:12] = weight
    x = joint.sample((50,))
    log_prob = Normal(mlp(x), variance.sqrt()).log_prob(x[:, context:]).sum(-1)
    observed = MultivariateNormal(torch.zeros(3, dtype=torch.double), covariance[:3, :3])
    torch.testing.assert_close(log_prob, joint.log_prob(x) - observed.log_prob(x[:, :3]))


def test_network_without_rows_returns_none():
    mlp = MaskedMLP(ones(0, 3), (8,), input_splits=[2, 1], output_splits=[0, 0])
    rows, state = mlp.start().advance(torch.zeros(4, 2), 1)
    assert rows.shape == (4, 0)
    assert state.advance(torch.zeros(4, 1), 2)[0].shape == mlp(torch.zeros(4, 3)).shape == (4, 0)


# The incremental pass


def test_network_without_hidden_layers_is_linear():
    mlp = randomized(MaskedMLP(ones(3, 3).tril(), (), dtype=torch.double))
    x = torch.randn(4, 3, dtype=torch.double)
    torch.testing.assert_close(mlp(x), x @ mlp.output[:, :3].tril().T + mlp.output[:, 3])


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_every_split_into_advances_gives_the_dense_rows(seed, depth):
    mlp, inputs = sampler(seed, steps=6, depth=depth)
    x = torch.randn(5, sum(inputs), dtype=torch.double)
    dense = mlp(x)
    for cuts in itertools.product([False, True], repeat=5):
        stops = [*(step + 1 for step, cut in enumerate(cuts) if cut), 6]
        torch.testing.assert_close(torch.cat(advance_all(mlp, x, inputs, stops), -1), dense)


@pytest.mark.parametrize("seed", range(8))
def test_long_passes_with_random_merges_give_the_dense_rows_and_gradients(seed):
    mlp, inputs = sampler(seed, steps=45, width=(7, 60)[seed % 2])
    x = torch.randn(3, sum(inputs), dtype=torch.double, requires_grad=True)
    weight = torch.randn(3, mlp.out_features, dtype=torch.double)
    keep = (1.0, 0.7, 0.2, 0.05)[seed % 4]
    stops = [*(step for step in range(1, 45) if torch.rand(()) < keep), 45]
    dense = mlp(x)
    rows = torch.cat(advance_all(mlp, x, inputs, stops), -1)
    torch.testing.assert_close(rows, dense)
    leaves = [x, *mlp.parameters()]
    expected = torch.autograd.grad((weight * dense.sin()).sum(), leaves)
    actual = torch.autograd.grad((weight * rows.sin()).sum(), leaves)
    torch.testing.assert_close(actual, expected)
    assert all(gradient.abs().sum() > 0 for gradient in expected)


def test_steps_agree_in_single_precision():
    mlp, inputs = sampler(3, steps=30, width=64, dtype=torch.float)
    x = torch.randn(10, sum(inputs))
    rows = one_by_one(mlp, x, inputs)
    assert rows.dtype == torch.float
    torch.testing.assert_close(rows, mlp(x))


@pytest.mark.parametrize(
    "shapes",
    [
        *(
            [(), (4,), (4,)],
            [(1,), (4,), (3, 1)],
            [(5,), (3, 5), (3, 5)],
            [(3, 1), (1, 5), (2, 1, 1)],
        ),
        *([(3, 5), (5,), ()], [(), (), ()], [(2, 3, 4)] * 3, [(0,), (0,), (2, 0)]),
    ],
    ids=str,
)
@pytest.mark.parametrize("steps", [3, 30])
def test_batch_shapes_of_advances_broadcast(steps, shapes):
    mlp, inputs = sampler(1, steps=steps)
    starts = [0, steps // 3, 2 * steps // 3, steps]
    per_step = [shapes[sum(step >= start for start in starts[1:])] for step in range(steps)]
    chunks = [
        torch.randn(*shape, size, dtype=torch.double) for shape, size in zip(per_step, inputs)
    ]
    rows = advance_all(mlp, chunks, inputs, range(1, steps + 1))
    full = torch.broadcast_shapes(*shapes)
    dense = mlp(torch.cat([chunk.expand(*full, -1) for chunk in chunks], -1))
    for step, new in enumerate(rows):
        assert new.shape[:-1] == torch.broadcast_shapes(*per_step[: step + 1])
    torch.testing.assert_close(torch.cat([new.expand(*full, -1) for new in rows], -1), dense)


def test_a_state_may_be_advanced_twice():
    mlp, inputs = sampler(2, steps=20)
    x, y = torch.randn(2, 4, sum(inputs), dtype=torch.double)
    state = mlp.start()
    for step in range(10):
        _, state = state.advance(x[:, sum(inputs[:step]) : sum(inputs[: step + 1])], step + 1)
    half = sum(inputs[:10])
    versions = [tensor._version for tensor in mlp.parameters()]
    for tail in (x, y, x):
        rows, end = state.advance(tail[:, half:], 20)
        expected = mlp(torch.cat([x[:, :half], tail[:, half:]], -1))[:, -rows.shape[1] :]
        torch.testing.assert_close(rows, expected)
        assert (state.step, end.step) == (10, 20)
    assert [tensor._version for tensor in mlp.parameters()] == versions


def test_samples_carry_gradients_to_every_parameter():
    splits = {"input_splits": [0] + [1] * 12, "output_splits": [1] * 12 + [0]}
    mlp = randomized(MaskedMLP(ones(12, 12).tril(-1), (6, 6), **splits))
    state, x, total = mlp.start(), torch.empty(5, 0), 0.0
    for step in range(12):
        rows, state = state.advance(x, step + 1)
        x = rows + torch.randn(5, 1)
        total = total + x.square().sum()
    total.backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in mlp.parameters())


def count_flops(function):
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        function()
    return counter.get_total_flops()


@pytest.mark.parametrize("steps", [3, 20, 100])
def test_sampling_multiplies_no_more_than_one_dense_pass(steps):
    inputs, dependency = [0] + [1] * steps, ones(steps, steps).tril(-1).repeat_interleave(2, 0)
    mlp = MaskedMLP(dependency, (200, 200), input_splits=inputs, output_splits=[2] * steps + [0])
    x = torch.randn(10, steps)
    dense = count_flops(lambda: mlp(x))
    assert 0 < count_flops(lambda: one_by_one(mlp, x, inputs)) <= dense


def test_each_hidden_unit_is_computed_once():
    computed = []
    mlp, inputs = sampler(0, steps=20, activation=lambda x: computed.append(x.numel()) or x.tanh())
    x = torch.randn(5, sum(inputs), dtype=torch.double)
    one_by_one(mlp, x, inputs)
    incremental = sum(computed)
    computed.clear()
    mlp(x)
    assert incremental == sum(computed) > 0


def test_a_small_context_is_not_computed_at_the_size_of_the_samples():
    inputs = [50] + [1] * 7
    mlp = MaskedMLP(ones(8, 57).tril(49), (64,), input_splits=inputs, output_splits=[1] * 8)
    chunks = [torch.randn(2, 50), *torch.randn(1000, 2, 7).split(1, -1)]
    dense = count_flops(lambda: mlp(torch.randn(1000, 2, 57)))
    assert count_flops(lambda: advance_all(mlp, chunks, inputs, range(1, 9))) < 0.6 * dense


# Parameters


def test_the_output_starts_at_the_bias_that_is_set():
    mlp = MaskedMLP(DEPENDENCIES["random 5"], (16, 16))
    x = torch.randn(4, 8)
    assert torch.equal(mlp(x), torch.zeros(4, 11))
    mlp.set_output_bias(torch.linspace(-1, 1, 11))
    torch.testing.assert_close(mlp(x), torch.linspace(-1, 1, 11).expand(4, -1))


def test_units_start_at_unit_scale_however_many_inputs_they_have():
    """Weights of variance 1/n on n standardized inputs, and biases of variance 1/(3n); 5 standard errors."""
    taken = []
    dependency = ones(30, 30).tril()[[0, 4, 29]]
    mlp = MaskedMLP(
        dependency, (3000,), activation=lambda x: taken.append(x) or x, dtype=torch.double
    )
    mlp(torch.randn(2000, 30, dtype=torch.double))
    mean_square = taken[-1].square().flatten(0, -1).mean()
    fan_in = torch.tensor([1.0, 5.0, 30.0])
    assert mean_square.item() == pytest.approx((1 + 1 / (3 * fan_in)).mean().item(), abs=0.1)


def test_parameters_have_the_documented_shapes():
    network = MaskedMLP(ones(3, 4), (5, 6))
    expected = {"layer_0": (5, 5), "layer_1": (6, 6), "output": (3, 11)}
    assert {
        name: tuple(parameter.shape) for name, parameter in network.named_parameters()
    } == expected
    assert set(network.state_dict()) > set(expected)


def test_copies_and_loaded_networks_agree():
    mlp, inputs = sampler(0)
    x = torch.randn(3, sum(inputs), dtype=torch.double)
    duplicate = copy.deepcopy(mlp)
    loaded, _ = sampler(0)
    for parameter in loaded.parameters():
        nn.init.zeros_(parameter)
    loaded.load_state_dict(mlp.state_dict())
    expected = mlp(x)
    for parameter in mlp.parameters():
        nn.init.zeros_(parameter)
    for other in (duplicate, loaded):
        assert torch.equal(other(x), expected)
        torch.testing.assert_close(one_by_one(other, x, inputs), expected)


def test_networks_move_between_types():
    mlp, inputs = sampler(0)
    x = torch.randn(3, sum(inputs), dtype=torch.double)
    expected = mlp(x)
    single = copy.deepcopy(mlp).to(torch.float)
    rows = one_by_one(single, x.float(), inputs)
    assert rows.dtype == torch.float
    torch.testing.assert_close(rows.double(), expected, rtol=1e-4, atol=1e-5)
    assert mlp.to("meta")(x.to("meta")).shape == expected.shape


def test_parameters_may_become_pyro_params():
    pyro.clear_param_store()
    mlp, inputs = sampler(0)
    x = torch.randn(3, sum(inputs), dtype=torch.double)
    expected = mlp(x)
    names = [name for name, _ in mlp.named_parameters()]
    to_pyro_module_(mlp)
    for name in names:
        value = getattr(mlp, name).detach().clone()
        setattr(mlp, name, PyroParam(value, constraint=constraints.real))
    torch.testing.assert_close(mlp(x), expected)
    rows = one_by_one(mlp, x, inputs)
    torch.testing.assert_close(rows, expected)
    rows.square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in mlp.named_parameters()}
    assert set(gradients) == {f"{name}_unconstrained" for name in names}
    assert all(gradient.abs().sum() > 0 for gradient in gradients.values())
    bias = torch.arange(mlp.out_features, dtype=torch.double)
    mlp.set_output_bias(torch.zeros_like(bias))
    without = mlp(x)
    mlp.set_output_bias(bias)
    torch.testing.assert_close(mlp(x) - without, bias.expand(3, -1))
