"""`InferenceCompilation`: what training reaches, what it reads, what it skips and what it refuses."""

import functools
import math
import sys

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import (
    CHAIN,
    COLLIDER,
    LinearGaussian,
    conjugate_normal,
    conjugate_normal_posterior,
    drawn_normal,
    learned,
    learned_scale,
    pair,
    scatter,
    told,
)
from scripts import ROOT
from torch.optim import lr_scheduler as schedulers
from torch.utils.data import DataLoader, TensorDataset

from pyro_nami import AutoNaMIGuide
from pyro_nami.inference.compilation import InferenceCompilation
from pyro_nami.inference.losses import CompilationLoss, site_log_probs
from pyro_nami.inference.simulate import Batch, JointDraws, Simulator
from pyro_nami.inference.trainer import Trainer

sys.path.append(str(ROOT / "examples" / "noisy_or"))

from noisy_or_distribution import NoisyOr  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("error"),
    # which the guide says of `if`
    pytest.mark.filterwarnings("ignore:Site .y. depends on .a. through"),
]
Adam = functools.partial(torch.optim.Adam, lr=0.02)
ZERO, HALF = (torch.zeros(()),), (torch.tensor(0.5),)


def by_if(y=None):
    """No run of it can be vectorized."""
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    pyro.sample("y", dist.Normal(1.0 if a > 0 else -1.0, 1.0), obs=y)


def compiled(model=CHAIN, args=ZERO, steps=0, *, guide=None, optim=Adam, batch_size=20, **options):
    guide = learned(model, observed=["y"]) if guide is None else guide
    compilation = InferenceCompilation(
        model, guide, optim, batch_size=batch_size, observed=["y"], **options
    )
    if steps:
        compilation.fit(steps, args, progress=False)
    return compilation


def weights(guide):
    return torch.cat([value.detach().flatten() for value in guide.parameters()])


# ---- what training reaches


@pytest.mark.usefixtures("double")
def test_training_reaches_the_expected_conditional_entropy():
    """min_q -E log q(z | y) is H(z | y), for a linear-Gaussian model the same at all y. The simulations of the
    comparison serve the exact posterior too, so their error is that of the KL divergence, about 0.002 nats."""
    optim, steps = functools.partial(torch.optim.Adam, lr=0.05), 500
    scheduler = functools.partial(schedulers.OneCycleLR, max_lr=0.05, total_steps=steps)
    guide = learned(COLLIDER, hidden_features=())
    compilation = InferenceCompilation(
        COLLIDER, guide, optim, batch_size=200, scheduler=scheduler, clip_norm=20.0
    )
    history = compilation.fit(steps, ZERO, progress=False)
    assert (
        history.simulations == 200 * steps and history.skipped == 0 and len(history.losses) == steps
    )
    covariance = COLLIDER.posterior(0.0)[1]
    entropy = 0.5 * torch.logdet(2 * math.pi * math.e * covariance).item()
    draws = Simulator(COLLIDER, ZERO).draw(10_000)
    with torch.no_grad():
        losses = CompilationLoss(guide)(Batch(ZERO, {}, draws))
    mean = draws.observed["d"].unsqueeze(-1) * COLLIDER.posterior(1.0)[0]
    values = torch.stack([draws.latents[name] for name in COLLIDER.latent], -1)
    exact = -torch.distributions.MultivariateNormal(mean, covariance).log_prob(values)
    gap = losses - exact
    assert gap.std() / 100 < 3e-3
    assert -0.01 < gap.mean() < 0.02
    assert (
        abs(compilation.evaluate_loss(*ZERO, num=10_000) - entropy) < 0.02 + 5 * losses.std() / 100
    )


@pytest.mark.usefixtures("double")
def test_a_guide_trained_over_sizes_is_right_at_each():
    guide = learned(drawn_normal, observed=["y"], hidden_features=())
    compilation = compiled(drawn_normal, guide=guide, batch_size=100)

    def arguments(step):
        return (2 + int(torch.randint(10, ())),), {}

    # at seeds 0 to 7 means are at most 0.19 sd off
    compilation.fit(800, arguments, validation=500, progress=False)
    for size in (3, 9):
        y = torch.linspace(0.0, 2.0, size)
        mean, sd = conjugate_normal_posterior(y)
        with torch.no_grad(), pyro.plate("draws", 4000, dim=-2):
            draws = guide(size, observations={"y": y})["mu"]
        assert abs(draws.mean() - mean) < 0.25 * sd and abs(draws.std() / sd - 1) < 0.15


PYROS = {"optimizer": torch.optim.SGD, "optim_args": {"lr": 1e-3}, "gamma": 0.5}


@pytest.mark.parametrize(
    ("optim", "options"),
    [
        (Adam, {}),
        (Adam, {"clip_norm": 1e-3}),
        (Adam, {"scheduler": functools.partial(schedulers.StepLR, step_size=1, gamma=0.5)}),
        (pyro.optim.ClippedAdam({"lr": 0.02}), {}),
        (pyro.optim.ExponentialLR(PYROS), {}),
    ],
    ids=["torch", "clipped", "scheduled", "Pyro", "Pyro scheduled"],
)
def test_optimizers_of_torch_and_pyro_move_the_weights(optim, options):
    compilation = compiled(optim=optim, **options)
    compilation.step(*ZERO)
    before = weights(compilation.guide)
    assert math.isfinite(compilation.step(*ZERO)) and not torch.equal(
        weights(compilation.guide), before
    )
    assert len(compilation.history.losses) == 2


@pytest.mark.parametrize(
    ("scheduler", "options", "expected"),
    [
        (
            functools.partial(schedulers.StepLR, step_size=2, gamma=0.5),
            {},
            [0.02, 0.01, 0.01, 0.005],
        ),
        (
            functools.partial(schedulers.ReduceLROnPlateau, patience=0, threshold=1e9),
            {"validation": 20, "validate_every": 2},
            [2e-2, 2e-2, 2e-3, 2e-3, 2e-4, 2e-4],
        ),
    ],
    ids=["a step", "a validation"],
)
def test_schedules_step_once_a_step_and_plateaus_once_a_validation(scheduler, options, expected):
    rates, compilation = [], compiled(scheduler=scheduler)

    def tracker(name, value, step):
        if name == "loss":
            rates.append(compilation._trainer.optimization.parts["torch"].param_groups[0]["lr"])

    compilation.fit(len(expected), ZERO, progress=False, tracker=tracker, **options)
    assert rates == pytest.approx(expected)


@pytest.mark.usefixtures("double")
def test_the_gradient_is_clipped():
    """SGD moves by the learning rate times the clipped gradient."""
    compilation = compiled(optim=functools.partial(torch.optim.SGD, lr=1.0), clip_norm=0.01)
    compilation.evaluate_loss(*ZERO, num=1)
    before = weights(compilation.guide)
    compilation.step(*ZERO)
    assert (weights(compilation.guide) - before).norm().item() == pytest.approx(0.01, rel=1e-3)


# ---- guides without a density


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("exact", [True, False])
def test_replayed_guides_have_the_same_loss_as_dense_ones(exact):
    y, guide = torch.zeros(6), AutoNaMIGuide(conjugate_normal, exact=exact)
    guide(y)
    scatter(guide, 0.1)
    draws = Simulator(conjugate_normal, (y,)).draw(9)
    replayed = CompilationLoss(lambda *args, **kwargs: guide(*args, **kwargs))(
        Batch((y,), {}, draws)
    )
    assert torch.allclose(CompilationLoss(guide)(Batch((y,), {}, draws)), replayed, rtol=1e-10)
    assert site_log_probs(guide, Batch((y,), {}, draws)).keys() == {"mu"}


@pytest.mark.usefixtures("double")
def test_a_hand_written_guide_reaches_the_exact_posterior():
    def guide(size, observations):
        slope = pyro.param("slope", torch.tensor(0.0))
        scale = pyro.param("scale", torch.tensor(1.0), constraint=dist.constraints.positive)
        pyro.sample("mu", dist.Normal(slope * observations["y"].mean(-1, keepdim=True), scale))

    compilation = InferenceCompilation(drawn_normal, guide, Adam, batch_size=100, observed=["y"])
    compilation.fit(300, (6,), progress=False)
    precision = 1 / 4 + 6
    assert abs(pyro.param("slope").item() - 6 / precision) < 0.05
    assert abs(pyro.param("scale").item() - precision**-0.5) < 0.04


def normal(name, shape=()):
    return pyro.sample(name, dist.Normal(torch.zeros(shape), 1.0))


def without_observations(y=None):
    pyro.sample("z", dist.Normal(pyro.param("shift", torch.tensor(0.0)), 1.0))


@pytest.mark.parametrize(
    ("guide", "error", "match"),
    [
        (lambda y, observations: None, ValueError, "got none at 'z'"),
        (lambda y, observations: [normal("z"), normal("b")], ValueError, "got 'b' as well"),
        (
            lambda y, observations: normal("z", (3, 1)),
            ValueError,
            r"batch dims \(16,\) at site 'z'; got \(3, 16\)",
        ),
        (
            without_observations,
            TypeError,
            "takes observations=.*; got without_observations, which does not",
        ),
        (lambda y, observations: normal("z"), ValueError, "guide with parameters"),
    ],
)
def test_guides_that_do_not_fit_are_named(guide, error, match):
    model = pair(dist.Normal(0.0, 1.0))
    with pytest.raises(error, match=match):
        InferenceCompilation(model, guide, Adam, batch_size=5).step(*ZERO)


def test_a_guide_may_say_itself_what_it_conditions_on():
    class Guide(AutoNaMIGuide):
        observed = ("y",)

    compilation = InferenceCompilation(
        drawn_normal, Guide(drawn_normal, observed=["y"]), Adam, batch_size=5
    )
    assert math.isfinite(compilation.step()) and compilation._trainer.simulator.observed == ("y",)


@pytest.mark.parametrize("exact", [True, False])
def test_observations_among_the_arguments_are_those_of_the_model_alone(exact):
    """The guide gets the simulated ones."""
    model = told(conjugate_normal)
    compilation = InferenceCompilation(model, AutoNaMIGuide(model, exact=exact), Adam, batch_size=5)
    assert math.isfinite(compilation.step(observations={"y": torch.zeros(6)}))


# ---- validation, offline data, trackers


def test_the_tracker_gets_losses_and_validation_losses():
    logged = []
    history = compiled().fit(
        5,
        ZERO,
        progress=False,
        validation=30,
        validate_every=2,
        tracker=lambda *figure: logged.append(figure),
    )
    losses = [figure for figure in logged if figure[0] == "loss"]
    assert losses == [("loss", loss, step) for step, loss in enumerate(history.losses, 1)]
    assert [(s, v) for n, v, s in logged if n == "validation_loss"] == history.validation
    assert [step for step, _ in history.validation] == [2, 4, 5]


def test_a_second_fit_goes_on_with_the_weights_and_begins_a_history():
    compilation = compiled()
    losses = [compilation.fit(20, ZERO, progress=False).losses for _ in range(2)]
    assert list(map(len, losses)) == [20, 20]
    assert sum(losses[1]) < sum(losses[0]) and compilation.history.losses == losses[1]


@pytest.mark.usefixtures("double")
def test_patience_ends_training():
    """Where few simulations are overfit."""
    data = Simulator(CHAIN, ZERO).draw(8)
    compilation = compiled(optim=functools.partial(torch.optim.Adam, lr=0.05), batch_size=8)
    history = compilation.fit(
        500, ZERO, progress=False, data=data, validation=400, validate_every=1, patience=5
    )
    assert len(history.losses) < 500 and history.validations_since_best() == 5
    assert history.best_step == len(history.losses) - 5
    losses = dict(history.validation)
    assert losses[history.best_step] == min(losses.values()) < losses[len(history.losses)]


def kept_by(losses, moved):
    """Which of these columns of losses of held-out simulations training keeps, by the definition."""
    lowest = losses.mean(0).argmin()
    above = losses - losses[:, [lowest]]
    good = above.mean(0) <= moved * above.std(0, correction=0) / len(losses) ** 0.5
    return int(good.nonzero().max())


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("moved", [0.0, 1.0])
def test_the_guide_ends_with_the_weights_of_the_lowest_loss_or_later_ones_if_latents_move(
    moved, monkeypatch
):
    compilation = compiled(
        optim=functools.partial(torch.optim.SGD, lr=0.2), clip_norm=1.0, batch_size=50
    )
    batches, seen = [Simulator(CHAIN, ZERO).draw(size) for size in (200, 100)], []
    losses_of = Trainer.losses

    def losses(*args):
        # so that the last weights are never those kept
        seen.append(losses_of(*args) + 10 * (len(seen) == 39))
        return seen[-1]

    monkeypatch.setattr(Trainer, "losses", losses)
    validate = Trainer.validate
    monkeypatch.setattr(
        Trainer, "validate", lambda self, held_out, _: validate(self, held_out, moved)
    )
    history = compilation.fit(40, ZERO, progress=False, validation=batches, validate_every=1)
    kept = kept_by(torch.stack(seen, 1), moved)
    means = [loss for _, loss in history.validation]
    assert history.best_step == kept + 1 < 40 and (means[kept] == min(means) or moved > 0)
    with torch.no_grad():
        loss = CompilationLoss(compilation.guide)
        found = torch.cat([loss(Batch(ZERO, {}, batch)) for batch in batches]).mean().item()
    assert found == pytest.approx(means[kept], rel=1e-12)


@pytest.mark.usefixtures("double")
def test_one_held_out_simulation_does_not_choose_the_weights():
    """A hundred, and one that is a thousand spreads away."""
    simulator = Simulator(CHAIN, ZERO)
    held_out = simulator.draw(101)
    for value in held_out.latents.values():
        value[-1] += 1000 * value.std()
    histories = []
    for part in (held_out.select(torch.arange(100)), held_out):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        compilation = compiled(optim=functools.partial(torch.optim.Adam, lr=0.03), batch_size=100)
        histories.append(
            compilation.fit(200, ZERO, progress=False, validation=part, validate_every=5)
        )
    without, with_it = histories
    # 26,860 nats if all of it counts
    assert abs(without.validation[-1][1] - with_it.validation[-1][1]) < 1
    losses = dict(without.validation)
    assert losses[with_it.best_step] < losses[without.best_step] + 0.05


@pytest.mark.usefixtures("double")
def test_offline_simulations_are_read_again_and_an_iterator_once():
    simulator = Simulator(CHAIN, ZERO)
    batches = [simulator.draw(10) for _ in range(3)]
    as_mapping = [{**draws.latents, **draws.observed} for draws in batches]
    losses = []
    for data in (batches, as_mapping):
        pyro.clear_param_store()
        pyro.set_rng_seed(3)
        losses.append(compiled().fit(7, ZERO, data=data, progress=False).losses)
    assert len(losses[0]) == 7 and losses[0] == losses[1]
    history = compiled().fit(7, ZERO, data=iter(batches), progress=False)
    assert len(history.losses) == 3 and history.simulations == 30


def test_a_shuffling_loader_is_data():
    draws = Simulator(CHAIN, ZERO).draw(40)
    rows = [
        {name: v[i] for name, v in {**draws.latents, **draws.observed}.items()} for i in range(40)
    ]
    history = compiled().fit(
        6, ZERO, data=DataLoader(rows, batch_size=10, shuffle=True), progress=False
    )
    assert len(history.losses) == 6 and history.simulations == 60


@pytest.mark.parametrize("kind", ["draws", "mapping", "tensors", "batches of tensors"])
def test_simulations_are_given_all_at_once(kind):
    """Shuffled into batches, so that in two epochs each is seen twice; held-out ones as they are."""
    draws = Simulator(CHAIN, ZERO, observed=["y"]).draw(50)
    sites = {**draws.latents, **draws.observed}
    dataset = TensorDataset(*sites.values())
    loader = DataLoader(dataset, batch_size=20, shuffle=True, drop_last=True)
    given = {"draws": draws, "mapping": sites, "tensors": dataset, "batches of tensors": loader}[
        kind
    ]
    compilation, seen = compiled(), []
    compilation.step(*ZERO)
    step = compilation._trainer.step
    compilation._trainer.step = lambda batch: (seen.append(batch.draws), step(batch))[1]
    history = compilation.fit(
        4, ZERO, data=given, validation=given, validate_every=4, progress=False
    )
    assert [each.num for each in seen] == [20] * 4 and "held out" in repr(history)
    for epoch in (seen[:2], seen[2:]):
        rows = torch.cat(
            [torch.stack([part.observed["y"], part.latents["a"]], -1) for part in epoch]
        )
        known = torch.stack([sites["y"], sites["a"]], -1)
        assert len(rows.unique(dim=0)) == 40 and (rows[:, None] == known).all(-1).any(-1).all()


def test_batches_may_grow():
    """Fresh ones with the step, those of simulations given all at once with the epoch."""
    draws = Simulator(CHAIN, ZERO, observed=["y"]).draw(50)
    for data, sizes in ((None, [10] * 3 + [25] * 4), (draws, [10] * 5 + [25] * 2)):
        compilation, seen = compiled(batch_size=lambda step: 10 if step < 3 else 25), []
        compilation.step(*ZERO)
        step = compilation._trainer.step
        compilation._trainer.step = lambda batch, step=step, seen=seen: (
            seen.append(batch.draws.num),
            step(batch),
        )[1]
        compilation.fit(7, ZERO, data=data, validation=draws, validate_every=3, progress=False)
        assert seen == sizes
    with pytest.raises(ValueError, match="batch_size to be at least 1"):
        compiled(batch_size=lambda step: step)


def test_a_model_that_cannot_be_vectorized_is_said_once():
    compilation = InferenceCompilation(by_if, AutoNaMIGuide(by_if), Adam, batch_size=8)
    with pytest.warns(UserWarning, match="one vectorized run") as caught:
        compilation.step(*HALF)
        compilation.fit(2, HALF, progress=False)
    assert len([w for w in caught if "one vectorized run" in str(w.message)]) == 1


def errors(size, y=None):
    s = pyro.sample("s", dist.HalfCauchy(1.0))
    z = pyro.sample("z", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", size):
        pyro.sample("y", dist.Normal(z, s), obs=y)


def on_off(size):
    with pyro.plate("rows", size):
        z = pyro.sample("z", dist.Bernoulli(torch.tensor([0.2, 0.4, 0.5])).to_event(1))
        pyro.sample(
            "y", NoisyOr(torch.linspace(0.5, 2.0, 12).reshape(4, 3), torch.full((4,), 0.1), z)
        )


@pytest.mark.parametrize(
    ("model", "inverse", "derived"),
    [(errors, "auto", True), (on_off, "auto", False), (on_off, "mean_field", False)],
)
def test_steps_leave_out_what_has_no_weights(model, inverse, derived):
    guide = AutoNaMIGuide(
        model, observed=["y"], inverse=inverse, rules={"s": "learned"} if derived else None
    )
    compilation = compiled(model, (3,), guide=guide, steps=1)
    loss, draws = compilation._trainer.loss, compilation._trainer.simulator.draw(2000)
    [(_, constant)] = loss.derived
    assert (abs(constant) > 0.1) is derived
    parts = [loss(Batch((3,), {}, draws), whole=whole).mean() for whole in (False, True)]
    assert abs(parts[0] - parts[1]) < 0.1
    gradients = [
        torch.autograd.grad(part, list(guide.parameters()), allow_unused=True) for part in parts
    ]
    moved = [(a, b) for a, b in zip(*gradients) if b is not None]
    assert any(b.any() for _, b in moved) and all(
        torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in moved
    )
    # at other arguments
    assert torch.equal(
        loss(Batch((), {"size": 3}, draws)), loss(Batch((3,), {}, draws), whole=True)
    )


# ---- bad simulations, bad losses, parameters of the model


def leaky(share):
    """Its data are NaN in a share of the simulations."""

    def model(y=None):
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        u = pyro.sample("u", dist.Uniform(0.0, 1.0))
        pyro.sample("y", dist.Normal(torch.where(u < share, torch.nan, a), 1.0), obs=y)

    return model


def test_simulations_that_are_not_finite_are_skipped_and_counted():
    compilation = compiled(leaky(0.03), (), batch_size=50)
    left_out = r"of 1000 simulations are not finite, at 'y' \(\d+\); they were left out"
    with (
        pytest.warns(UserWarning, match="Held out: 1 of 100 "),
        pytest.warns(UserWarning, match=left_out),
    ):
        history = compilation.fit(20, progress=False, validation=100)
    assert 5 < history.skipped < 70 and history.non_finite == {"y": history.skipped}
    assert (
        torch.tensor(history.losses).isfinite().all()
        and weights(compilation.guide).isfinite().all()
    )
    with pytest.warns(
        UserWarning, match=r"Held out: \d+ of 2000 simulations are not finite, at 'y'"
    ):
        assert math.isfinite(compilation.evaluate_loss(num=2000))


def test_too_many_that_are_not_finite_are_an_error_that_names_the_site():
    many = r"at most 10% of the simulations.* are not finite, at 'y'"
    compilation = compiled(leaky(0.4), (), batch_size=10)
    with pytest.raises(ValueError, match=many):
        compilation.evaluate_loss(num=200)
    with pytest.raises(ValueError, match=many):
        compilation.fit(50, progress=False)
    assert 100 <= compilation.history.simulations <= 150


def test_a_batch_without_a_finite_simulation_moves_nothing():
    bad = Simulator(CHAIN, ZERO).draw(8)._replace(observed={"y": torch.full((8,), torch.nan)})
    compilation = compiled()
    compilation.evaluate_loss(*ZERO, num=1)
    before = weights(compilation.guide)
    with pytest.warns(UserWarning, match="16 of 16 simulations are not finite"):
        history = compilation.fit(2, ZERO, data=[bad], progress=False)
    assert all(map(math.isnan, history.losses)) and history.skipped == 16
    assert torch.equal(weights(compilation.guide), before)


def with_far_data(model, guide):
    """Training, four simulations, and the same with observations far away."""
    good = Simulator(model, observed=["y"]).draw(4)
    compilation = InferenceCompilation(model, guide, Adam, batch_size=4, observed=["y"])
    return compilation, good, good._replace(observed={"y": torch.full((4,), 1e3)})


@pytest.mark.parametrize("kind", ["loss", "gradient"])
@pytest.mark.usefixtures("double")
def test_a_loss_that_is_not_finite_names_the_site_and_keeps_the_last_good_weights(kind):
    """'b' alone has a density of infinity, or a gradient of NaN, when the observation is large."""

    def guide(observations):
        y, shift = observations["y"], pyro.param("shift", torch.tensor(0.1))
        pyro.sample("a", dist.Normal(shift, 1.0))
        if kind == "loss":
            scale = torch.where(y > 100, torch.inf, 1.0) * pyro.param("scale", torch.tensor(1.0))
        else:
            scale = 1.0 + (0 * shift + (y < 100)).sqrt()
        pyro.sample("b", dist.Normal(shift, scale))

    model = LinearGaussian({("a", "b"): 1.0, ("b", "y"): 1.0}, ("y",))
    compilation, good, bad = with_far_data(model, guide)
    with pytest.raises(
        ValueError, match=r"in step 3 .* not finite at 'b' \(values up to"
    ) as caught:
        compilation.fit(5, data=[good, good, bad], progress=False)
    assert "'a'" not in str(caught.value)
    assert all(value.isfinite().all() for value in pyro.get_param_store().values())
    assert pyro.param("shift").item() != 0.1 and len(compilation.history.losses) == 2


def test_a_sum_that_overflows_names_the_site_with_the_largest_loss():
    def guide(observations):
        far = observations["y"] > 100
        a = pyro.param("a0", torch.tensor(0.0)).detach() * far
        pyro.sample("a", dist.Delta(a, torch.where(far, -2e38, 0.0)))
        shift = pyro.param("shift", torch.tensor(0.1))
        pyro.sample("b", dist.Normal(shift, 1.0).mask(~far))
        pyro.sample("c", dist.Delta(0.0 * far, torch.where(far, -3e38, 0.0)))

    def model(y=None):
        a, c = (pyro.sample(name, dist.Delta(torch.tensor(0.0))) for name in "ac")
        pyro.sample("y", dist.Normal(a + c + pyro.sample("b", dist.Normal(0.0, 1.0)), 1.0), obs=y)

    compilation, good, bad = with_far_data(model, guide)
    with pytest.raises(
        ValueError, match=r"not finite at no single site \(the largest loss is that of 'c'\)"
    ):
        compilation.fit(5, data=[good, bad], progress=False)


def test_the_weights_to_go_back_to_hold_no_graph():
    """It would grow with every step."""
    compilation = compiled(steps=3)
    assert not any(value.requires_grad for value in compilation._trainer.finite)


@pytest.mark.usefixtures("double")
def test_weights_that_blow_up_go_back_to_the_last_finite_ones():
    compilation = compiled(optim=functools.partial(torch.optim.SGD, lr=1e308))
    compilation.evaluate_loss(*ZERO, num=1)
    before = weights(compilation.guide)
    with pytest.raises(ValueError, match=r"not finite at '[abc]'"):
        compilation.fit(5, ZERO, progress=False)
    assert torch.equal(weights(compilation.guide), before)


def test_parameters_of_the_model_are_left_alone():
    compilation = compiled(learned_scale, ())
    with pytest.warns(UserWarning, match="trainable parameters, 'scale'") as caught:
        compilation.fit(3, progress=False)
        compilation.step()
    assert len(caught) == 1 and caught[0].filename == __file__
    scale = pyro.param("scale")
    assert scale.item() == pytest.approx(2.0) and scale.unconstrained().grad is None


# ---- bad options


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"batch_size": 0}, ValueError, "batch_size to be at least 1; got 0"),
        ({"optim": 3}, TypeError, "got int"),
        ({"optim": torch.optim.Adam([torch.zeros(1)])}, TypeError, "lambda params"),
        ({"scheduler": 3}, TypeError, "scheduler as a function"),
        (
            {"optim": pyro.optim.Adam({"lr": 0.1}), "scheduler": len},
            TypeError,
            "Pyro's schedulers are optimizers",
        ),
        ({"clip_norm": 0.0}, ValueError, "clip_norm > 0; got 0.0"),
        ({"steps": 0}, ValueError, "steps to be"),
        ({"patience": 3}, ValueError, "validation with patience"),
        ({"validation": 0}, ValueError, "validation to"),
        ({"data": []}, ValueError, "batches of simulations in data; got none"),
        ({"data": [3.0]}, TypeError, "JointDraws, or as tensors of"),
        ({"data": [{"a": torch.zeros(3)}]}, ValueError, "none for 'b'"),
        (
            {"data": [{name: torch.zeros(3 + (name == "y")) for name in "abcy"}]},
            ValueError,
            "values of site 'y' of shape",
        ),
    ],
)
def test_bad_options_are_named(options, error, match):
    of_training = options.keys() & {"batch_size", "optim", "scheduler", "clip_norm"}
    compilation = None if of_training else compiled()
    with pytest.raises(error, match=match):
        if of_training:
            compiled(**options)
        else:
            compilation.fit(**{"steps": 2, "args": ZERO, "progress": False, **options})


def test_losses_beyond_a_million_nats_go_on_by_their_logarithm():
    def guide(observations):
        pyro.sample("z", dist.Normal(observations["x"], 1.0))

    z = torch.tensor([0.0, 1e3, 1e4, 1e15, 1e18, math.inf])
    draws = JointDraws({"z": z}, {"x": torch.zeros(6, requires_grad=True)}, nesting=0)
    with pyro.validation_enabled(False):
        loss = CompilationLoss(guide)(Batch((), {}, draws))
    torch.testing.assert_close(loss[:2], -dist.Normal(0.0, 1.0).log_prob(z[:2]))
    torch.testing.assert_close(loss[2:5], 1e6 * (1 + (z[2:5] ** 2 / 2e6).log()), rtol=1e-5, atol=0)
    assert loss[5] == math.inf  # which steps do not hide
    loss[:5].sum().backward()
    slopes = draws.observed["x"].grad[:5]
    torch.testing.assert_close(
        slopes, -torch.tensor([0.0, 1e3, 2e2, 2e-9, 2e-12]), rtol=1e-4, atol=0
    )
