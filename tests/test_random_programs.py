"""Laws that hold for every program: each of many random ones, with a guide of random options, is held to all of them.

`random_programs` makes the programs; `PYRO_NAMI_PROGRAMS` says how many (300 by default), `PYRO_NAMI_DEVICE` where.
Every parameter of a guide is moved before the laws on densities are checked, so that no weight hides behind its first
value of zero. A failure names the seed: ``random_program(seed).describe()`` shows the program.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import networkx as nx
import pyro
import pytest
import torch
from models import scatter
from pyro import poutine
from pyro.infer import SVI, Predictive
from pyro.optim import Adam
from pyro.poutine.util import site_is_subsample
from random_programs import COUNT, Program, event_dim, random_program
from torch import Tensor
from torch.distributions import Transform, biject_to, constraints
from torch.distributions.constraints import Constraint
from torch.distributions.utils import _standard_normal

from pyro_nami import AutoNaMIGuide, InferenceCompilation

pytestmark = pytest.mark.filterwarnings("ignore")
DEVICE = os.environ.get("PYRO_NAMI_DEVICE", "cpu")
LOG_TWO_PI = math.log(2 * math.pi)
FAR = 15.0
pytestmark = pytest.mark.usefixtures("own_parameters")

DEAR = 12  # laws that take long are checked at every so many seeds


@pytest.mark.parametrize("seed", range(COUNT))
def test_laws(seed):
    check(random_program(seed, DEVICE), dear=seed % DEAR == 0)


@pytest.mark.cuda
@pytest.mark.parametrize("seed", range(20))
def test_laws_on_a_gpu(seed):
    check(random_program(seed, "cuda"), dear=True)


def check(program: Program, dear: bool) -> None:
    guide = guide_of(program)
    the_network_is_as_generated(program, guide)
    the_inverse_is_faithful(program, guide)
    scatter(guide)
    trace = draw(program, guide)
    assert {site["value"].device for site in latent_sites(program, trace).values()} == {
        program.plan.like.device
    }
    draws_lie_in_their_supports(program, trace)
    a_replayed_draw_has_its_density(program, guide, trace)
    a_dense_pass_gives_the_density(program, guide, trace)
    draws_have_the_density(program, guide, trace)
    instances_of_a_plate_are_exchangeable(program, guide)
    particles_change_nothing(program, guide)
    if dear:
        a_saved_guide_has_the_same_density(program, guide, trace)
        predictions_have_their_shapes(program, guide)
        training_stays_finite(program)


# ---- the graph


def the_network_is_as_generated(program: Program, guide: AutoNaMIGuide) -> None:
    net = guide.bayesnet
    assert set(net.latent) == set(program.latents), program.describe()
    assert set(net.observed) == set(program.observed), program.describe()
    missing, extra = program.edges - set(net.edges), set(net.edges) - program.edges
    assert not missing and not extra, f"missing {missing}, too many {extra}: {program.describe()}"


def the_inverse_is_faithful(program: Program, guide: AutoNaMIGuide) -> None:
    """What it says is independent is so by d-separation in the true network, all instances of plates written out."""
    if program.options["inverse"] in ("mean_field", "stuhlmueller"):  # which are not, on purpose
        return
    grounded, places = ground(program), coordinates(program)
    inverse, plates = guide.inverse, guide.bayesnet.plates
    before = {(v, i) for v in program.observed for i in range(len(places[v]))}
    for v in reversed(inverse.order):
        for i, place in enumerate(places[v]):
            apart = inverse.joint[v]
            reads = {
                (u, k)
                for u, across in inverse.parents[v].items()
                for k, other in enumerate(places[u])
                if agree(place, other, plates[u] & plates[v] - across)
            }
            reads |= {
                (v, k) for k in range(i) if apart and agree(place, places[v][k], plates[v] - apart)
            }
            rest = before - reads
            separated = not rest or nx.is_d_separator(grounded, {(v, i)}, rest, reads & before)
            assert separated, (
                f"'{v}' needs more than {dict(inverse.parents[v])}: {program.describe()}"
            )
            before.add((v, i))


def agree(place: Mapping[str, int], other: Mapping[str, int], plates: frozenset[str]) -> bool:
    return all(place[plate] == other[plate] for plate in plates)


def coordinates(program: Program) -> dict[str, list[dict[str, int]]]:
    """Returns for each node of the network its instances: their index in each plate, index maps followed."""
    plates, found = program.plan.plates, {}
    for site in program.plan.sites:
        sizes = [plates[name].batch or plates[name].size for name in site.plates]
        places = [dict(zip(site.plates, index)) for index in itertools.product(*map(range, sizes))]
        for place in places:
            while more := {
                target: int(program.inputs[f"index {name} {target}"][k])
                for name, k in place.items()
                for target in plates[name].maps
                if target not in place
            }:
                place.update(more)
        found.update(dict.fromkeys(site.nodes, places))
    return found


def ground(program: Program) -> nx.DiGraph:
    """Returns the true network with an instance a node, ``(site, number)``."""
    places, graph = coordinates(program), nx.DiGraph()
    graph.add_nodes_from(
        (name, i) for name, instances in places.items() for i in range(len(instances))
    )
    for u, v in program.edges:
        for (i, place), (k, other) in itertools.product(enumerate(places[u]), enumerate(places[v])):
            if agree(place, other, place.keys() & other.keys()):
                graph.add_edge((u, i), (v, k))
    return graph


# ---- densities


def guide_of(program: Program) -> AutoNaMIGuide:
    """Returns the program's guide after its first call."""
    pyro.set_rng_seed(program.seed)
    guide = AutoNaMIGuide(program.model, **program.options)
    program.call(guide)
    return guide


def draw(program: Program, function, particles: int = 0) -> poutine.Trace:
    """Returns a trace of a guide, in a plate of particles if there are any."""
    sizes = (particles,) if particles else ()
    with pyro.plate_stack("particles", sizes, rightmost_dim=-1 - program.nesting):
        trace = program.call(poutine.trace(function).get_trace)
    trace.compute_log_prob()
    return trace


def latent_sites(program: Program, trace: poutine.Trace) -> dict:
    return {name: trace.nodes[name] for name in program.latents}


def batches(trace: poutine.Trace) -> dict[str, Tensor]:
    """Returns the instances of subsampled plates."""
    plates = {name: site for name, site in trace.nodes.items() if site_is_subsample(site)}
    return {
        name: site["value"] for name, site in plates.items() if len(site["value"]) < site["fn"].size
    }


def density(site: dict) -> Tensor:
    """Returns a site's log density with its mask, without its scale."""
    log_prob, mask = site["unscaled_log_prob"], site["mask"]
    return log_prob if mask is None else log_prob.masked_fill(~torch.as_tensor(mask), 0.0)


def total(program: Program, trace: poutine.Trace, particles: int = 0) -> Tensor:
    """Returns the log density of all latents, ``(particles,)`` or ``()``."""
    shape = (particles, -1) if particles else (-1,)
    return sum(
        density(site).reshape(shape).sum(-1) for site in latent_sites(program, trace).values()
    )


def same_density(
    program: Program, actual: Tensor, expected: Tensor, trace: poutine.Trace, of: str
) -> None:
    """Asserts it but for rounding, of values near a bound of their support as well."""
    actual, expected = torch.broadcast_tensors(actual.detach(), expected.detach())
    tolerance = (1e-6 if program.dtype == torch.float64 else 1e-2) + rounding(program, trace)
    same = tolerance > 1 or torch.allclose(actual, expected, rtol=tolerance, atol=tolerance)
    assert same, f"{of} has {actual}, not {expected}: {program.describe()}"


def values_of(program: Program, trace: poutine.Trace) -> dict[str, Tensor]:
    """Returns copies of the latents, which no memory of the latest draw knows."""
    return {
        name: site["value"].detach().clone() for name, site in latent_sites(program, trace).items()
    }


def rounding(program: Program, trace: poutine.Trace) -> float:
    """Returns how much of a log density is lost when values x are written down.

    With u the value in unconstrained space, it is known to about eps abs(x) exp(abs(u)), and a density changes with u
    the faster, the narrower it is, that is the higher.
    """
    lost = 0.0
    for site in latent_sites(program, trace).values():
        x, support = site["value"].detach(), site["fn"].support
        if is_continuous(site):
            u = coordinates_on(support).inv(x)
            steep = 0.0 if support is constraints.real else u.abs().max().item()
            # made of hyperbolic tangents
            steep *= 1 + isinstance(support, type(constraints.corr_cholesky))
            log_prob = site["unscaled_log_prob"].detach()
            high = log_prob.max().item() * log_prob.numel() / u.numel()
            size = torch.finfo(program.dtype).eps * max(1.0, x.abs().max().item())
            lost += 100 * size * math.exp(min(steep + max(high, 0.0), 99.0))
    return lost


def coordinates_on(support: Constraint) -> Transform:
    """Returns a bijection from real numbers; Torch knows none for mixtures, whose support is that of their parts."""
    mixture = type(support).__name__ == "MixtureSameFamilyConstraint"
    return biject_to(support.base_constraint if mixture else support)


def is_continuous(site: dict) -> bool:
    return not site["fn"].support.is_discrete


def log_prob(program: Program, guide: AutoNaMIGuide, values: Mapping, rows: Mapping) -> Tensor:
    """Returns `guide.log_prob` at the given instances of subsampled plates."""
    with poutine.condition(data=dict(rows)):
        return program.call(guide.log_prob, dict(values))


def draws_lie_in_their_supports(program: Program, trace: poutine.Trace) -> None:
    """Those of the model, its parents at their values, which may move them."""
    replayed = poutine.trace(poutine.replay(program.model, trace)).get_trace
    run = None if is_compiled(program) else program.call(replayed)
    for name, site in latent_sites(program, trace).items():
        value, of = site["value"], f"'{name}': {program.describe()}"
        assert value.isfinite().all(), of
        assert value.dtype == program.dtype or not value.is_floating_point(), of
        assert run is None or run.nodes[name]["fn"].support.check(value).all(), of


def a_replayed_draw_has_its_density(
    program: Program, guide: AutoNaMIGuide, trace: poutine.Trace
) -> None:
    """Also with other tensors of the same values, which no memory of the latest draw knows."""
    copied = trace.copy()
    for site in copied.nodes.values():
        if site["type"] == "sample":
            site["value"] = site["value"].detach().clone()
    for given in (trace, copied):
        again = latent_sites(program, draw(program, poutine.replay(guide, given)))
        for name, site in latent_sites(program, trace).items():
            same_density(
                program,
                density(again[name]).sum(),
                density(site).sum(),
                trace,
                f"'{name}' replayed",
            )


def a_dense_pass_gives_the_density(
    program: Program, guide: AutoNaMIGuide, trace: poutine.Trace
) -> None:
    actual = log_prob(program, guide, values_of(program, trace), batches(trace))
    same_density(program, actual, total(program, trace), trace, "a draw in a dense pass")


def draws_have_the_density(program: Program, guide: AutoNaMIGuide, trace: poutine.Trace) -> None:
    """A draw is a function of standard Normal noise e, so its log density is log N(e) - log abs det of the Jacobian.

    The Jacobian is autograd's. Latents that are not drawn so (discrete ones, those from the model, mixtures, and the
    model's own types) keep the values of an earlier draw.
    """
    rest = {name for name in drawn_by_noise(program, guide) if is_continuous(trace.nodes[name])}
    if not rest or program.dtype != torch.float64:
        return
    kept = trace.copy()
    # whose supports may move with what is drawn again
    for name in rest.union(guide.inverse.predictive):
        kept.remove_node(name)
    with recorded_noise() as noises:
        again = draw(program, poutine.replay(guide, kept))
    sites = {name: again.nodes[name] for name in rest}
    bijections = {name: coordinates_on(site["fn"].support) for name, site in sites.items()}
    free = {name: bijections[name].inv(site["value"]) for name, site in sites.items()}
    stacked = torch.cat([value.reshape(-1) for value in free.values()])
    if stacked.abs().max() > FAR:  # held off a bound, where nothing moves them
        return
    options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    rows = [torch.autograd.grad(u, noises, **options) for u in stacked]
    jacobian = torch.stack([torch.cat([part.reshape(-1) for part in row]) for row in rows])
    used, noise = (jacobian != 0).any(0), torch.cat([part.detach().reshape(-1) for part in noises])
    # runs of the model draw some that nothing comes of
    jacobian, noise = jacobian[:, used], noise[used]
    message = f"{len(noise)} random numbers for {len(stacked)} free ones: {program.describe()}"
    assert len(noise) == len(stacked), message
    expected = -jacobian.slogdet().logabsdet - 0.5 * (noise.square() + LOG_TWO_PI).sum()
    for name, site in sites.items():
        expected = expected - bijections[name].log_abs_det_jacobian(free[name], site["value"]).sum()
    actual = sum(site["unscaled_log_prob"].sum() for site in sites.values())
    same_density(program, actual, expected, again, "a draw by its noise")


def drawn_by_noise(program: Program, guide: AutoNaMIGuide) -> set[str]:
    """Returns the latents whose factor is made of Normal noise, if they are continuous."""
    families = program.options.get("families", {})
    own = {name for name in program.latents if families.get(name) in ("match", "mixture")}
    return set(program.latents) - guide.inverse.predictive - own


@contextmanager
def recorded_noise() -> Iterator[list[Tensor]]:
    """Collects all standard Normal numbers that are drawn, as leaves of the graph."""
    noises: list[Tensor] = []

    def recording(function):
        def recorded(*args, **kwargs):
            noises.append(function(*args, **kwargs).requires_grad_())
            return noises[-1]

        return recorded

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randn", recording(torch.randn))
        patch.setattr(torch.distributions.normal, "_standard_normal", recording(_standard_normal))
        yield noises


def particles_change_nothing(program: Program, guide: AutoNaMIGuide, particles: int = 2) -> None:
    trace = draw(program, guide, particles)
    values, rows = values_of(program, trace), batches(trace)
    dense = log_prob(program, guide, values, rows)
    same_density(program, dense, total(program, trace, particles), trace, "a draw of particles")
    for i in range(particles):
        one = {name: one_of(value, i, particles) for name, value in values.items()}
        single = log_prob(program, guide, one, rows)
        same_density(program, single, dense[i], trace, "a particle by itself")


def one_of(values: Tensor, number: int, count: int) -> Tensor:
    """Returns the value of one particle; all have the same where there is no dim for them."""
    return values[number] if values.shape[:1] == (count,) else values


# ---- exchangeability


def instances_of_a_plate_are_exchangeable(program: Program, guide: AutoNaMIGuide) -> None:
    """Where no instance has parameters of its own, and none is drawn given the others one by one."""
    if (
        not (program.options["mode"] == "amortized" or is_compiled(program))
        or program.style == "condition"
    ):
        return
    joint = frozenset().union(*guide.inverse.joint.values())
    plates = program.plan.plates
    trace = draw(program, guide)
    values = values_of(program, trace)
    before = log_prob(program, guide, values, batches(trace))
    for name in {plate for site in program.plan.sites for plate in site.plates} - joint:
        if plates[name].batch is None:
            order = torch.randperm(plates[name].size, device=before.device)
            moved = permuted(program, name, order)
            at = {v: along(program, v, name, value, order) for v, value in values.items()}
            after = log_prob(moved, guide, at, batches(trace))
            same_density(program, after, before, trace, f"'{name}' in the order {order}")


def permuted(program: Program, plate: str, order: Tensor) -> Program:
    """Returns the program with the instances of a plate in another order, in everything that is passed."""
    inputs = {}
    for key, value in program.inputs.items():
        what, _, name = key.rpartition(" ")
        if what.startswith("index"):
            value = order.argsort()[value] if name == plate else value
            inputs[key] = value[order] if what == f"index {plate}" else value
        elif what == "batch":
            inputs[key] = value
        else:
            inputs[key] = along(program, name, plate, value, order, event=not what)
    return program.with_inputs(inputs)


def along(
    program: Program, node: str, plate: str, value: Tensor, order: Tensor, event: bool = True
) -> Tensor:
    """Returns a value, or something of its batch shape, with the instances of a plate in another order."""
    site = next(site for site in program.plan.sites if node in (site.name, *site.nodes))
    if plate not in site.plates:
        return value
    dim = program.plan.plates[plate].dim - (event_dim(site.kind) if event else 0)
    return value.index_select(dim, order)


# ---- the rest


def a_saved_guide_has_the_same_density(
    program: Program, guide: AutoNaMIGuide, trace: poutine.Trace
) -> None:
    values, rows = values_of(program, trace), batches(trace)
    expected = log_prob(program, guide, values, rows)
    loaded = guide_of(program)
    loaded.load_state_dict(guide.state_dict())
    early = AutoNaMIGuide(program.model, **program.options)
    early.load_state_dict(guide.state_dict())
    for other in (loaded, early, copy.deepcopy(guide)):
        same_density(
            program, log_prob(program, other, values, rows), expected, trace, "a draw, once loaded,"
        )


def predictions_have_their_shapes(program: Program, guide: AutoNaMIGuide) -> None:
    if is_compiled(program):
        return
    expected = program.call(poutine.trace(program.model).get_trace).nodes
    draws = program.call(
        Predictive(program.model, guide=guide, num_samples=3, return_sites=program.latents)
    )
    for name, values in draws.items():
        shape = expected[name]["value"].shape
        # Pyro puts ones for plates in front
        shape = (3, *[1] * (values.dim() - 1 - len(shape)), *shape)
        assert values.shape == shape, (
            f"'{name}' has {tuple(values.shape)}, not {shape}: {program.describe()}"
        )
        assert values.isfinite().all(), f"'{name}' is not finite: {program.describe()}"


def training_stays_finite(program: Program) -> None:
    guide = guide_of(program)
    if not list(guide.parameters()):  # all latents are drawn from the model's own conditional
        return
    if is_compiled(program):
        rest = {name: value for name, value in program.inputs.items() if name not in program.data}
        adam = functools.partial(torch.optim.Adam, lr=0.01)
        compilation = InferenceCompilation(program.model, guide, adam, batch_size=4)
        losses = [float(compilation.step(rest)) for _ in range(2)]
    else:
        svi = SVI(program.model, guide, Adam({"lr": 0.01}), program.elbo())
        losses = [program.call(svi.step) for _ in range(3)]
    assert all(map(math.isfinite, losses)), f"losses {losses}: {program.describe()}"
    bad = [name for name, value in guide.named_parameters() if not value.isfinite().all()]
    assert not bad, f"not finite: {bad}: {program.describe()}"


def is_compiled(program: Program) -> bool:
    return program.style == "compile"
