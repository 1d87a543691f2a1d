"""Reductions and pooling encoders: against loops over sets, invariance, sizes, empty sets, and choice by name."""

import copy
import math

import pytest
import torch
from torch import nn

from pyro_nami.networks import (
    Along,
    AttentionEncoder,
    MeanEncoder,
    OwnEncoder,
    PrecisionSums,
    Segments,
    make_encoder,
)

INDEX = torch.tensor([0, 3, 3, 1, 5, 0, 3, 1, 0])
NUM_SEGMENTS = 6  # 2 and 4 are empty


def randn(*shape, dtype=torch.double):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(1))


def own_module(num_inputs):
    return nn.Sequential(nn.Linear(num_inputs, 7), nn.Tanh(), nn.Linear(7, 5))


ENCODERS = {"mean": "mean", "attention": "attention", "own": own_module}


class FlatSums(PrecisionSums):
    """Its sums as features, so that all laws of encoders can be asked of it."""

    num_features = 10

    def forward(self, *inputs):
        return super().forward(*inputs).flatten(-2)


@pytest.fixture(params=[*ENCODERS, "precision sums"])
def pooled_net(request):
    """An encoder, or a sum of pseudo-observations: what holds of every function of sets."""
    if request.param != "precision sums":
        return make_encoder(ENCODERS[request.param], 3, 5, (16, 16), dtype=torch.double)
    sums = FlatSums(3, 2, dtype=torch.double)
    nn.init.normal_(sums.heads_weight, std=0.3)
    return sums


@pytest.fixture(params=ENCODERS)
def net(request):
    return make_encoder(ENCODERS[request.param], 3, 5, (16, 16), dtype=torch.double)


def looped(x, dim, reduce):
    """Applies ``reduce`` to the instances (first) of every segment, and puts results along ``dim``."""
    x = x.movedim(dim - 1, 0)
    return torch.stack([reduce(x[INDEX.eq(segment)]) for segment in range(NUM_SEGMENTS)]).movedim(
        0, dim - 1
    )


def largest(members):
    return members.amax(0) if len(members) else torch.zeros_like(members.sum(0))


REDUCTIONS = {
    "sum": lambda members: members.sum(0),
    "mean": lambda members: members.sum(0) / max(len(members), 1),
    "amax": largest,
}


@pytest.mark.parametrize("dtype", [torch.float, torch.double])
@pytest.mark.parametrize("dim", [-1, -2, -3])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_over_segments_agree_with_a_loop(name, dim, dtype):
    shape = [2, 4, 3]
    shape[dim] = len(INDEX)
    x = randn(*shape, 3, dtype=dtype)
    segments = Segments(INDEX, NUM_SEGMENTS, dim)
    torch.testing.assert_close(getattr(segments, name)(x), looped(x, dim, REDUCTIONS[name]))
    count = segments.count(x)
    expected = looped(torch.ones_like(x[..., :1]), dim, REDUCTIONS["sum"])
    assert torch.equal(count.expand_as(expected), expected)


@pytest.mark.parametrize("dim", [-1, -2, -3])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_along_a_dim_agree_with_one_segment(name, dim):
    x = randn(2, 4, 5, 3)
    one = Segments(torch.zeros(x.shape[dim - 1], dtype=torch.long), 1, dim)
    torch.testing.assert_close(getattr(Along(dim), name)(x), getattr(one, name)(x))
    assert Along(dim).count(x).item() == one.count(x).item() == x.shape[dim - 1]


@pytest.mark.parametrize("dim", [-1, -2])
def test_gather_gives_each_instance_what_its_set_holds(dim):
    z = randn(4, 6, 2) if dim == -1 else randn(6, 4, 2)
    segments = Segments(INDEX, NUM_SEGMENTS, dim)
    gathered = segments.gather(z)
    for n, segment in enumerate(INDEX.tolist()):
        assert torch.equal(gathered.select(dim - 1, n), z.select(dim - 1, segment))
    one = z.narrow(dim - 1, 0, 1)
    assert torch.equal(segments.gather(one), one.expand_as(gathered))
    assert torch.equal(Along(dim).gather(one), one)


@pytest.mark.parametrize("name", ["sum", "mean", "amax", "gather"])
def test_gradients_of_segments_are_right_to_second_order(name):
    segments = Segments(INDEX, NUM_SEGMENTS, -2)
    x = randn(NUM_SEGMENTS if name == "gather" else len(INDEX), 2, 3).requires_grad_()
    assert torch.autograd.gradcheck(getattr(segments, name), (x,))
    assert torch.autograd.gradgradcheck(lambda value: getattr(segments, name)(value).sin(), (x,))


def test_gradients_in_single_precision_agree_with_double():
    x = randn(3, len(INDEX), 4).requires_grad_()
    single = x.detach().float().requires_grad_()
    segments = Segments(INDEX, NUM_SEGMENTS, -1)
    for value in (x, single):
        segments.gather(segments.sum(value).sin()).cos().sum().backward()
    torch.testing.assert_close(single.grad.double(), x.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float, torch.double])
def test_a_value_of_size_one_stands_for_one_copy_an_instance(dtype):
    x, segments = randn(2, 1, 3, dtype=dtype), Segments(INDEX, NUM_SEGMENTS, -1)
    whole = x.expand(2, len(INDEX), 3)
    for name in REDUCTIONS:
        assert torch.equal(getattr(segments, name)(x), getattr(segments, name)(whole))
    leaf = x.clone().requires_grad_()
    segments.sum(leaf).sum().backward()
    assert torch.equal(leaf.grad, torch.full_like(x, len(INDEX)))


@pytest.mark.parametrize("dtype", [torch.float, torch.double])
def test_no_instances_and_no_segments(dtype):
    none = Segments(torch.zeros(0, dtype=torch.long), 4, -1)
    empty = Segments(torch.zeros(0, dtype=torch.long), 0, -1)
    x = randn(2, 0, 3, dtype=dtype)
    for name in REDUCTIONS:
        assert torch.equal(getattr(none, name)(x), x.new_zeros(2, 4, 3))
        assert torch.equal(getattr(Along(-1), name)(x), x.new_zeros(2, 1, 3))
        assert getattr(empty, name)(x).shape == (2, 0, 3)
    assert none.gather(x.new_zeros(2, 4, 3)).shape == (2, 0, 3)


def test_an_index_that_does_not_fit_is_an_error():
    with pytest.raises(ValueError, match="Expected size 4 along dim -1, that of the index; got 3"):
        Segments(torch.arange(4), 4, -1).sum(randn(2, 3, 1))


def instance_features(net, x):
    """The features of an instance by the documented formula, for two hidden layers of 16."""
    value = x
    for weight in (net.layer_0, net.layer_1):
        value = nn.functional.silu(value @ weight[:, :-1].T + weight[:, -1])
    return value @ net.output[:, :16].T + x @ net.output[:, 16:19].T + net.output[:, 19]


@pytest.mark.parametrize("dim", [-1, -2, -3])
def test_features_are_the_mean_over_instances_and_the_log_count(dim):
    net, x = MeanEncoder(3, 5, (16, 16), dtype=torch.double), randn(4, 7, 6, 3)
    pooled = net(x, Along(dim))
    expected = instance_features(net, x).mean(dim - 1, keepdim=True)
    torch.testing.assert_close(pooled[..., :5], expected)
    torch.testing.assert_close(
        pooled[..., 5:], torch.full_like(expected[..., :1], math.log1p(x.shape[dim - 1]))
    )


def test_no_hidden_layer_leaves_a_linear_function_of_the_mean():
    net, x = MeanEncoder(3, 5, (), dtype=torch.double), randn(4, 7, 3)
    expected = x.mean(1) @ net.output[:, :3].T + net.output[:, 3]
    torch.testing.assert_close(net(x, Along(-1))[:, 0, :5], expected)


attention = nn.functional.scaled_dot_product_attention


def test_attention_is_an_induced_set_block_and_a_seed():
    net, x = AttentionEncoder(3, 5, 6, inducing=4, dtype=torch.double), randn(7, 3)

    def linear(value, name):
        return nn.functional.linear(value, getattr(net, name)[:, :-1], getattr(net, name)[:, -1])

    def updated(value, name):
        return value + nn.functional.silu(linear(value, name))

    query, key, value = linear(x, "read_inputs").split(6, -1)
    points = updated(net.inducing + attention(net.inducing, key, value), "update_inducing")
    read = linear(points, "read_inducing").split(6, -1)
    instances = updated(query + attention(query, *read), "update_instances")
    read = linear(instances, "read_instances").split(6, -1)
    summary = updated(net.seed + attention(net.seed, *read), "update_seed")
    expected = linear(torch.cat((summary[0], x.mean(0))), "output")
    torch.testing.assert_close(net(x, Along(-1))[0, :5], expected)


def test_attention_takes_scores_that_overflow():
    net, x = (
        make_encoder("attention", 3, 5, dtype=torch.float),
        1e3 * randn(len(INDEX), 3, dtype=torch.float),
    )
    assert net(x, Segments(INDEX, NUM_SEGMENTS, -1)).isfinite().all()


def test_order_does_not_matter_and_instances_do(pooled_net):
    x, order = randn(2, 9, 3), torch.randperm(9, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(pooled_net(x[:, order], Along(-1)), pooled_net(x, Along(-1)))
    shuffled = Segments(INDEX[order], NUM_SEGMENTS, -1)
    over = Segments(INDEX, NUM_SEGMENTS, -1)
    torch.testing.assert_close(pooled_net(x[:, order], shuffled), pooled_net(x, over))
    features = pooled_net(x, Along(-1))[..., :-1]
    for n in range(9):
        moved = x.clone()
        moved[:, n] = 10.0
        assert not torch.allclose(pooled_net(moved, Along(-1))[..., :-1], features)


@pytest.mark.parametrize("dim", [-1, -2])
def test_segments_agree_with_a_loop_over_sets(pooled_net, dim):
    x = randn(2, 9, 3) if dim == -1 else randn(9, 2, 3)
    pooled = pooled_net(x, Segments(INDEX, NUM_SEGMENTS, dim))
    assert pooled.shape == (
        (2, 6, pooled_net.num_features) if dim == -1 else (6, 2, pooled_net.num_features)
    )
    for segment in range(NUM_SEGMENTS):
        members = x.index_select(dim - 1, INDEX.eq(segment).nonzero().flatten())
        torch.testing.assert_close(
            pooled.narrow(dim - 1, segment, 1), pooled_net(members, Along(dim))
        )


def test_an_empty_set_gives_zeros(pooled_net):
    none = torch.zeros(2, 1, pooled_net.num_features).double()
    assert torch.equal(pooled_net(randn(2, 0, 3), Along(-1)), none)
    pooled = pooled_net(randn(2, 9, 3), Segments(INDEX, NUM_SEGMENTS, -1))
    assert torch.equal(pooled[:, [2, 4]], torch.zeros_like(pooled[:, [2, 4]]))
    assert (pooled[:, [0, 1, 3, 5]] != 0).all()


def test_values_shared_by_all_instances_agree_with_copies(pooled_net):
    segments, x = Segments(INDEX, NUM_SEGMENTS, -1), randn(2, 1, 3)
    torch.testing.assert_close(pooled_net(x, segments), pooled_net(x.expand(2, 9, 3), segments))


def test_one_network_takes_any_number_of_instances(net):
    for size in (1, 50, 5000):
        pooled = net(randn(size, 3), Along(-1))
        assert pooled.shape == (1, net.num_features)
        assert pooled[0, -1].item() == pytest.approx(math.log1p(size))


def test_gradients_reach_inputs_and_parameters(pooled_net):
    x = randn(2, 9, 3).requires_grad_()
    pooled_net(x, Segments(INDEX, NUM_SEGMENTS, -1)).sin().sum().backward()
    assert all((parameter.grad != 0).any() for parameter in pooled_net.parameters())
    assert (x.grad != 0).all()
    assert torch.autograd.gradcheck(
        lambda value: pooled_net(value, Segments(INDEX, NUM_SEGMENTS, -1)), (x,)
    )


def test_given_weights_are_read_in_place_of_the_parameters(pooled_net):
    if isinstance(pooled_net, OwnEncoder):
        pytest.skip("the user's module reads its parameters itself")
    x, over, other = randn(9, 3), Along(-1), copy.deepcopy(pooled_net)
    other.reset_parameters()
    assert not torch.allclose(other(x, over), pooled_net(x, over))
    assert torch.equal(other(x, over, pooled_net.weights()), pooled_net(x, over))


def test_encoders_copy_and_convert(net):
    x, over = randn(4, 3), Along(-1)
    assert torch.equal(copy.deepcopy(net)(x, over), net(x, over))
    assert copy.deepcopy(net).to(torch.float)(x.float(), over).dtype == torch.float


def test_parameters_have_the_documented_shapes():
    def shapes(net):
        return {name: tuple(parameter.shape) for name, parameter in net.named_parameters()}

    expected = {"layer_0": (16, 4), "layer_1": (16, 17), "output": (5, 20)}
    assert shapes(MeanEncoder(3, 5, (16, 16))) == expected
    attention = shapes(AttentionEncoder(3, 5, 6, inducing=4))
    assert attention["inducing"] == (4, 6) and attention["read_inputs"] == (18, 4)
    assert attention["output"] == (5, 10) and len(attention) == 9


@pytest.mark.parametrize(
    ("module", "kind", "error"),
    [
        (7, TypeError, r"Expected a torch\.nn\.Module that encodes instances; got int"),
        (nn.Flatten(0), ValueError, r"it mapped \(2, 3, 3\) to \(18,\)"),
    ],
)
def test_modules_that_do_not_fit_are_errors(module, kind, error):
    with pytest.raises(kind, match=error):
        make_encoder(lambda n: module, 3, 5)


# ---- sizes that the encoder was never trained on


@pytest.mark.parametrize("name", ["mean", "attention"])
def test_the_count_is_held_within_the_sizes_that_gradients_came_back_from(name):
    encoder = make_encoder(name, 2, 3)

    def log_count(*sizes):
        x = torch.zeros(sum(sizes), 2)
        index = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
        over = Along(-1) if len(sizes) == 1 else Segments(index, len(sizes), -1)
        return encoder(x, over)[..., -1].flatten()

    def logs(*counts):
        return torch.tensor(counts).to(torch.get_default_dtype()).log1p()

    assert torch.allclose(log_count(100), logs(100)), "before training"
    log_count(5).sum().backward()
    log_count(7, 20).sum().backward()
    log_count(100)  # no gradient comes back
    with torch.no_grad():
        log_count(200)
    for size, held in ((3, 5), (5, 5), (12, 12), (20, 20), (100, 20)):
        assert torch.allclose(log_count(size), logs(held)), size
    assert torch.allclose(log_count(3, 12, 100), logs(5, 12, 20))
    other = make_encoder(name, 2, 3)
    other.load_state_dict(encoder.state_dict())
    assert other.trained == encoder.trained == (5, 20)
