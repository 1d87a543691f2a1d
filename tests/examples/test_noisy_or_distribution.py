"""Noisy-OR: the formula, the sum over all states, sparse weights as dense ones, and at size."""

import copy
import io
import math
import pickle
import sys
from itertools import product

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO, TraceEnum_ELBO, config_enumerate
from pyro.infer.inspect import get_dependencies
from scripts import ROOT
from torch.autograd import gradcheck, gradgradcheck

from pyro_nami import AutoNaMIGuide

sys.path.append(str(ROOT / "examples" / "noisy_or"))

from noisy_or_distribution import NoisyOr  # noqa: E402
from sparse_products import sparse_linear  # noqa: E402

D, K = 6, 4
LAYOUTS = ["dense", "coo", "csr"]


def weights_of(dense, layout):
    return {"dense": dense, "coo": dense.to_sparse_coo(), "csr": dense.to_sparse_csr()}[layout]


@pytest.fixture
def drawn(double):
    """Weights, half of them zero, and one column and row; leak; z of a batch of 3."""
    weights = torch.rand(D, K) * (torch.rand(D, K) < 0.5)
    weights[:, 1], weights[2] = 0.0, 0.0
    return weights, torch.rand(D) * 0.3, torch.bernoulli(torch.full((3, K), 0.5))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rates_and_densities_are_those_of_the_products_of_failures(drawn, layout):
    weights, leak, z = drawn
    fn = NoisyOr(weights=weights_of(weights, layout), leak=leak, z=z)
    # Every cause fails on its own: Yan et al. 2019, equation 4.
    absent = (1 - -torch.expm1(-leak)) * (torch.exp(-weights) ** z.unsqueeze(-2)).prod(-1)
    x = torch.bernoulli(torch.full((3, D), 0.5))
    torch.testing.assert_close(fn.rates, -absent.log())
    torch.testing.assert_close(
        fn.log_prob(x), torch.where(x == 1, 1 - absent, absent).log().sum(-1)
    )
    torch.testing.assert_close(fn.mean, 1 - absent)
    torch.testing.assert_close(fn.variance, absent * (1 - absent))
    assert (fn.batch_shape, fn.event_shape) == ((3,), (D,))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_probabilities_of_all_states_add_up_to_one(drawn, layout):
    weights, leak, z = drawn
    states = torch.tensor(list(product([0.0, 1.0], repeat=D))).unsqueeze(1)
    total = NoisyOr(weights_of(weights, layout), leak, z).log_prob(states).logsumexp(0)
    torch.testing.assert_close(total, torch.zeros(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("exponent", range(-12, 4))
def test_log_prob_and_gradient_are_precise_at_any_rate(dtype, exponent):
    leak = torch.tensor([10.0**exponent, 0.7 * 10.0**exponent], dtype=dtype).requires_grad_()
    exact = leak.detach().double()
    fn = NoisyOr(torch.zeros(2, 1, dtype=dtype), leak, torch.zeros(1, dtype=dtype))
    rtol = 8 * torch.finfo(dtype).eps

    def grad(x):
        log_prob = fn.log_prob(x)
        return log_prob.double(), torch.autograd.grad(log_prob, leak, retain_graph=True)[0].double()

    present, slope = grad(torch.ones(2, dtype=dtype))
    # By Python's math in double precision: log p is log(1 - e^-a), its slope 1 / (e^a - 1); 1e-38 is single's smallest.
    expected = [
        math.log(-math.expm1(-a)) if a < 0.5 else math.log1p(-math.exp(-a)) for a in exact.tolist()
    ]
    slopes = [math.exp(-a) / -math.expm1(-a) for a in exact.tolist()]
    torch.testing.assert_close(present.item(), math.fsum(expected), rtol=rtol, atol=1e-37)
    torch.testing.assert_close(slope.tolist(), slopes, rtol=rtol, atol=1e-37)
    absent, slope = grad(torch.zeros(2, dtype=dtype))
    assert absent.item() == pytest.approx(-exact.sum().item(), rel=rtol)
    assert slope.tolist() == [-1.0, -1.0]


@pytest.mark.parametrize("layout", ["dense", "coo"])
def test_gradients_in_values_leak_and_relaxed_z(drawn, layout):
    weights, leak, _ = drawn
    index = weights.nonzero().T
    x = torch.bernoulli(torch.full((3, D), 0.5))

    def log_prob(values, leak, z):
        made = torch.sparse_coo_tensor(
            index, values, (D, K), is_coalesced=True, check_invariants=True
        )
        return NoisyOr(
            made if layout == "coo" else made.to_dense(), leak, z, validate_args=False
        ).log_prob(x)

    values = weights[tuple(index)].clone().requires_grad_()
    inputs = values, (leak + 0.1).requires_grad_(), (0.1 + 0.8 * torch.rand(3, K)).requires_grad_()
    assert gradcheck(log_prob, inputs)
    assert gradgradcheck(log_prob, inputs)


@pytest.mark.parametrize("layout", ["coo", "csr"])
@pytest.mark.parametrize("batch", [(), (3,), (2, 1, 3)])
def test_sparse_weights_give_what_dense_ones_give(drawn, layout, batch):
    weights, leak, _ = drawn
    z, x = torch.rand(*batch, K), torch.bernoulli(torch.full((*batch, D), 0.5))
    results = []
    for kind in ("dense", layout):
        leaves = weights_of(weights, kind).requires_grad_(), z.clone().requires_grad_()
        log_prob = NoisyOr(leaves[0], leak + 0.1, leaves[1]).log_prob(x)
        of_weights, of_z = torch.autograd.grad(log_prob.sum(), leaves)
        results.append((log_prob, of_weights.to_dense() * (weights != 0), of_z))
    torch.testing.assert_close(*results)


def test_an_uncoalesced_tensor_and_one_without_entries(double):
    values = torch.tensor([1.0, 2.0, 4.0]).requires_grad_()
    weights = torch.sparse_coo_tensor([[1, 0, 1], [0, 1, 0]], values, (2, 2), check_invariants=True)
    fn = NoisyOr(weights, torch.zeros(2), torch.tensor([1.0, 1.0]))
    assert fn.rates.tolist() == [2.0, 5.0]
    assert torch.autograd.grad(fn.rates[1], values)[0].tolist() == [1.0, 0.0, 1.0]
    empty = torch.zeros(2, 2).to_sparse_coo().requires_grad_()
    z = torch.ones(3, 2).requires_grad_()
    rates = NoisyOr(empty, torch.ones(2), z).rates
    assert rates.tolist() == [[1.0, 1.0]] * 3 and torch.autograd.grad(rates.sum(), z)[0].eq(0).all()


def test_ten_thousand_by_ten_thousand_holds_no_dense_matrix():
    size, batch, nonzeros = 10_000, 128, 100_000
    index = torch.randint(size * size, (nonzeros,)).unique()
    index = torch.stack([index // size, index % size])
    values = torch.rand(index.shape[1]).requires_grad_()
    z = torch.bernoulli(torch.full((batch, size), 0.5)).requires_grad_()
    weights = torch.sparse_coo_tensor(
        index, values, (size, size), is_coalesced=True, check_invariants=False
    )
    made = Sizes()
    with made:
        fn = NoisyOr(weights, torch.full((size,), 0.1), z)
        fn.log_prob(fn.sample()).sum().backward()
    assert values.grad.isfinite().all() and z.grad.isfinite().all()
    # A dense matrix has 1e8 numbers, a gather of all entries 1.28e7.
    assert max(made.sizes) <= batch * size


class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the sizes of all tensors that are made, in the backward pass as well."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        flat = result if isinstance(result, (tuple, list)) else [result]
        strided = [x for x in flat if isinstance(x, torch.Tensor) and x.layout == torch.strided]
        self.sizes += [x.untyped_storage().nbytes() // x.element_size() for x in strided]
        return result


def test_the_product_is_one_of_any_number_of_columns_at_once(monkeypatch, drawn):
    weights, _, z = drawn
    monkeypatch.setattr("sparse_products.CHUNK", 4)  # one entry at a time
    leaf = weights.to_sparse_coo().requires_grad_()
    grad = torch.autograd.grad(sparse_linear(z, leaf).square().sum(), leaf)[0]
    torch.testing.assert_close(grad.to_dense(), 2 * ((z @ weights.T).T @ z) * (weights != 0))


def test_the_product_is_mapped_and_differentiated_by_torch_func(drawn):
    weights, _, z = drawn
    leaf, layouts = weights.to_sparse_coo(), []

    def total(z):
        layouts.append(leaf.detach().layout)
        return sparse_linear(z, leaf).square().sum()

    try:
        slope = torch.func.vmap(torch.func.grad(total))(z)
    except RuntimeError:
        if layouts == [torch.strided]:
            pytest.skip("this torch (2.4) has no sparse tensors within torch.func")
        raise
    torch.testing.assert_close(slope, 2 * z @ weights.T @ weights)


def test_frequencies_of_draws_are_the_mean(drawn):
    weights, leak, z = drawn
    fn, n = NoisyOr(weights, leak, z), 20_000
    score = (fn.sample((n,)).mean(0) - fn.mean) / (fn.variance / n).sqrt()
    assert score.abs().max() < 5  # standard Normals, 18 of them
    assert not fn.sample().requires_grad and not fn.has_rsample


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_positive_observation_without_a_cause(layout):
    weights = weights_of(torch.tensor([[0.0, 2.0], [3.0, 0.0]]), layout).requires_grad_()
    leak, z = torch.zeros(2).requires_grad_(), torch.tensor([0.0, 1.0]).requires_grad_()
    fn = NoisyOr(weights, leak, z)
    assert fn.log_prob(torch.tensor([1.0, 1.0])) == -math.inf
    assert fn.log_prob(torch.tensor([0.0, 0.0])) == -2.0
    grads = torch.autograd.grad(fn.log_prob(torch.tensor([1.0, 1.0])), (weights, leak, z))
    assert grads[1].tolist() == [pytest.approx(1 / math.expm1(2.0)), 0.0]
    assert all(grad.to_dense().isfinite().all() for grad in grads)


def test_batch_dims_broadcast_and_expand(drawn):
    weights, leak, z = drawn
    wide = NoisyOr(torch.stack([weights, 2 * weights]).unsqueeze(1), leak.expand(3, D), z)
    assert wide.batch_shape == (2, 3)
    torch.testing.assert_close(wide.rates[1], leak + 2 * z @ weights.T)
    fn = NoisyOr(weights, leak, z)
    x = fn.expand((5, 3)).sample()
    torch.testing.assert_close(fn.expand((5, 3)).log_prob(x), fn.log_prob(x))
    assert fn.expand((5, 3)).z.shape == (5, 3, K)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_copies_and_pickles_have_rates_of_their_own(drawn, layout):
    weights, leak, z = drawn
    fn = NoisyOr(weights_of(weights, layout).requires_grad_(), leak, z).expand((2, 3))
    buffer = io.BytesIO()
    torch.save(fn, buffer)
    buffer.seek(0)
    copies = (
        copy.deepcopy(fn),
        pickle.loads(pickle.dumps(fn)),
        torch.load(buffer, weights_only=False),
    )
    for other in copies:
        torch.testing.assert_close(other.rates, fn.rates)
        assert (other.batch_shape, other.event_shape) == (fn.batch_shape, fn.event_shape)
        assert other.weights is not fn.weights
    # Pickles of sparse tensors lose requires_grad, whatever holds them.
    assert torch.autograd.grad(copies[0].rates.sum(), copies[0].weights)[0].shape == (D, K)


def patients(weights, leak, x):
    """Each patient has K diseases, each with probability 1/4, and D findings: masked where the first is negative."""
    with pyro.plate("patients", len(x)):
        z = pyro.sample("z", dist.Bernoulli(torch.full((K,), 0.25)).to_event(1))
        with poutine.mask(mask=x[:, 0] >= 0), poutine.scale(scale=2.0):
            pyro.sample("x", NoisyOr(weights, leak, z), obs=x.clamp(min=0))


def test_plates_masks_scales_and_particles(drawn):
    weights, leak, z = drawn
    x = torch.bernoulli(torch.full((3, D), 0.5))
    x[1] = -1.0  # masked
    z = torch.bernoulli(torch.full((7, 3, K), 0.5))
    with pyro.plate("particles", 7, dim=-2):
        trace = poutine.trace(poutine.condition(patients, {"z": z})).get_trace(weights, leak, x)
    expected = 2 * NoisyOr(weights, leak, z).log_prob(x.clamp(min=0))
    expected[:, 1] = 0.0
    trace.compute_log_prob()
    torch.testing.assert_close(trace.nodes["x"]["log_prob"], expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_evidence_by_enumeration_is_the_sum_over_all_causes(drawn, layout):
    weights, leak, _ = drawn
    weights, x = weights_of(weights, layout), torch.bernoulli(torch.full((D,), 0.5))

    @config_enumerate
    def model():
        z = [pyro.sample(f"z{k}", dist.Bernoulli(torch.tensor(0.25))) for k in range(K)]
        pyro.sample(
            "x", NoisyOr(weights, leak, torch.stack(torch.broadcast_tensors(*z), -1)), obs=x
        )

    prior, states = (
        dist.Bernoulli(torch.full((K,), 0.25)),
        torch.tensor(list(product([0.0, 1.0], repeat=K))),
    )
    evidence = (
        prior.log_prob(states).sum(-1) + NoisyOr(weights, leak, states).log_prob(x)
    ).logsumexp(0)
    loss = TraceEnum_ELBO(max_plate_nesting=0).loss(model, lambda: None)
    assert -loss == pytest.approx(evidence.item())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_guide_of_it_trains_with_vectorized_particles(drawn, layout):
    weights, leak, z = drawn
    x = torch.bernoulli(NoisyOr(weights, leak + 0.1, z).mean)
    arguments = weights_of(weights, layout), leak + 0.1, x
    guide = AutoNaMIGuide(patients)
    elbo = Trace_ELBO(num_particles=4, vectorize_particles=True)
    svi = SVI(patients, guide, pyro.optim.Adam({"lr": 0.01}), elbo)
    assert all(math.isfinite(svi.step(*arguments)) for _ in range(3))
    assert ("z", "x") in guide.bayesnet.edges
    assert get_dependencies(patients, arguments)["prior_dependencies"]["x"] == {
        "x": set(),
        "z": set(),
    }


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda weights, leak, z: (weights - 1e-3, leak, z), "nonnegative weights"),
        (lambda weights, leak, z: (weights, -leak, z), "nonnegative leak"),
        (lambda weights, leak, z: (weights, leak * math.nan, z), "nonnegative leak"),
        (lambda weights, leak, z: (weights, leak, z + 1.5), r"z in \[0, 1\]"),
        (
            lambda weights, leak, z: (weights, leak[1:], z),
            r"leak of shape \(\*batch, 6\).*got \(5,\)",
        ),
        (
            lambda weights, leak, z: (weights, leak, z[:, 1:]),
            r"z of shape \(\*batch, 4\).*got \(3, 3\)",
        ),
        (lambda weights, leak, z: (weights, leak.expand(2, D), z), "batch shapes"),
        (lambda weights, leak, z: (weights[0], leak, z), r"weights to be a dense tensor.*\(4,\)"),
    ],
)
def test_bad_parameters(drawn, layout, change, match):
    weights, leak, z = change(*drawn)
    with pytest.raises(ValueError, match=match):
        NoisyOr(weights_of(weights, layout) if weights.dim() == 2 else weights, leak, z)


def test_bad_values_are_seen_with_validation_alone(drawn):
    weights, leak, z = drawn
    fn = NoisyOr(weights, leak, z)
    with pytest.raises(ValueError, match=r"x in \{0, 1\}"):
        fn.log_prob(torch.full((3, D), 0.5))
    with pytest.raises(ValueError, match=r"x of shape \(\*batch, 6\).*got \(3, 5\)"):
        fn.log_prob(torch.ones(3, 5))
    with pytest.raises(ValueError, match="dense tensor"):
        NoisyOr(weights.to_sparse_csc(), leak, z)
    unchecked = NoisyOr(-weights, leak, z, validate_args=False)
    assert unchecked.log_prob(torch.full((3, D), 0.5)).shape == (3,)
    assert not unchecked.expand((2, 3))._validate_args


@pytest.mark.cuda
@pytest.mark.parametrize("layout", LAYOUTS)
def test_on_a_gpu(drawn, layout):
    weights, leak, z = drawn
    x = torch.bernoulli(torch.full((3, D), 0.5))
    results = []
    for device in ("cpu", "cuda"):
        leaf = weights_of(weights, layout).to(device).requires_grad_()
        log_prob = NoisyOr(leaf, leak.to(device) + 0.1, z.to(device)).log_prob(x.to(device))
        grad = torch.autograd.grad(log_prob.sum(), leaf)[0].to_dense() * (weights.to(device) != 0)
        results.append((log_prob.cpu(), grad.cpu()))
    torch.testing.assert_close(*results)
