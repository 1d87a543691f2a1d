"""Figure 4: relaxed Bernoulli VAEs of binary images, with mean-field and with faithful encoders of equal size.

A decoder p(x | z) and an encoder q(z | x) are trained together on the ELBO (Webb et al. 2018, section 3.1, supplement
D.1). The 30 latents are relaxed Bernoulli with p = 1/2, at temperature 1/2 in the model and 2/3 in the encoder. They
are kept as logits, as in Maddison et al. 2017, C.3: the model's site is Logistic(0, 2), and a factor of the guide is
Logistic(logit / temperature, 1 / temperature); relaxed values themselves round to 0 and 1 in single precision. Given an
image all latents depend on each other, so a faithful inverse is fully connected: here one site of 30 numbers, drawn in
sequence by a masked autoregressive network (MADE). Mean field draws them independently. Three panels against the
number of the encoder's parameters: (a) the negative ELBO of the test set, (b) the negative log likelihood of some test
images by annealed importance sampling from the prior, (c) the gap between both on these images.

``--paper`` is the paper's setting: encoders [100, 100] to [1000, 1000], 1,000 epochs of Adam at 1e-4 in batches of 100,
5 chains of 5,000 temperatures (10 leapfrog steps each, which the paper does not tell). These are 500,000 steps for each
of 20 encoders and 6e15 floating-point operations, minutes of a GPU; what takes time is to start kernels, an estimated
4 ms a step for mean field and 15 ms for a faithful encoder with its 30 draws in sequence. Processes side by side share
the GPU: ``--paper --device cuda --jobs 8`` should take about 4 hours, and one process 26.

The default takes minutes on a CPU: three sizes, a few epochs in larger batches at a larger rate that warms up and
decays, annealing on fewer images with fewer temperatures. It can show the *difference* between the kinds at equal size,
and runs are paired for it: at each seed both start from one decoder and see the same batches. One pair is annealed with
four times the temperatures as well. In both kinds outputs also read the pixels directly (skip weights, counted), and
the decoder's output bias starts at the mean image. Parameters are the weights that masks leave; faithful encoders are
widened to have as many as mean field, within 1%. Run with::

    python examples/paper/vae.py --data FOLDER [--smoke | --paper] [--device cpu] [--seeds 4] [--jobs 2]

FOLDER holds MNIST (see images.py). Without ``--data`` scikit-learn's digits of 8 by 8 stand in, and the figure says so.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from experiment import (
    Cell,
    Run,
    draw_band,
    mean_and_error,
    parse,
    print_table,
    run_cells,
    write_results,
)
from images import Images, read_images
from pyro.infer import Trace_ELBO
from torch import Tensor, nn

from pyro_nami import AutoNaMIGuide, annealed_importance_sampling, relaxed

LATENTS, DECODER_UNITS = 30, 200
MODEL_TEMPERATURE, GUIDE_TEMPERATURE = 1 / 2, 2 / 3
KINDS = {"mean field": "independent", "faithful": "autoregressive"}
KEEP_EVERY, TELL_EVERY = 120, 20  # seconds between checkpoints, steps between signs of life


class Setting(NamedTuple):
    """How long and how large. ``sizes`` are the hidden units of mean-field encoders; AIS is of ``images``."""

    sizes: tuple[int, ...]
    epochs: int
    batch: int
    learning_rate: float
    decays: bool
    images: int
    chains: int
    temperatures: int
    leapfrog_steps: int
    draws: int


SMOKE = Setting((32,), 2, 400, 5e-3, True, 2, 2, 5, 2, 1)
DEFAULT = Setting((100, 200, 400), 10, 250, 5e-3, True, 100, 5, 300, 5, 4)
PAPER = Setting(tuple(range(100, 1001, 100)), 1000, 100, 1e-4, False, 10_000, 5, 5000, 10, 4)


# ---- model and guide


class Decoder(nn.Module):
    """The generative model: latents z, as logits, through a tanh network to pixels x."""

    def __init__(self, mean_image: Tensor) -> None:
        super().__init__()
        units, pixels = DECODER_UNITS, len(mean_image)
        layers = [nn.Linear(LATENTS, units), nn.Tanh(), nn.Linear(units, units), nn.Tanh()]
        self.network = nn.Sequential(*layers, nn.Linear(units, pixels))
        with torch.no_grad():
            self.network[-1].bias.copy_(mean_image.clamp(1e-3, 1 - 1e-3).logit())

    def forward(self, x: Tensor) -> None:
        with pyro.plate("images", len(x)):
            prior = dist.Logistic(x.new_zeros(LATENTS), 1 / MODEL_TEMPERATURE)
            z = pyro.sample("z", prior.to_event(1))
            logits = self.network(2 * z.sigmoid() - 1)
            pyro.sample("x", dist.Bernoulli(logits=logits).to_event(1), obs=x)


def make_guide(decoder: Decoder, kind: str, units: int) -> AutoNaMIGuide:
    """Returns an encoder with two hidden layers of ``units``."""
    return AutoNaMIGuide(
        decoder,
        families={"z": relaxed(GUIDE_TEMPERATURE)},
        within=KINDS[kind],
        mode="minibatches",
        hidden_features=(units, units),
        activation=torch.tanh,
    )


def matching_units(size: int, pixels: int) -> int:
    """Returns the units with which a faithful encoder is as large as mean field with ``size``.

    A hidden unit of a MADE belongs to one of the 30 latents and reads what it may read: half of all units on average.
    """
    half = (LATENTS + 1) / 2
    target = size**2 + size * (pixels + LATENTS + 2) + LATENTS * (pixels + 1)

    def excess(units: int) -> float:
        own = (
            units**2 * half / LATENTS + units * (pixels + 2 * half + 1) + LATENTS * (pixels + half)
        )
        return abs(own - target)

    return min(range(size, 2 * size), key=excess)


# ---- one cell


def measure(cell: Cell, run: Run) -> dict[str, Any]:
    """Trains a decoder with an encoder; returns the encoder's size, the loss on the way, and what the figure shows."""
    setting, device = run.options.choose(SMOKE, DEFAULT, PAPER), run.options.device
    started = time.process_time()
    data = read_images(run.options.extra["data"])
    data = data._replace(
        **{part: getattr(data, part).to(device) for part in ("train", "valid", "test")}
    )
    units = (
        cell["size"] if cell["kind"] == "mean field" else matching_units(cell["size"], data.side**2)
    )
    with pyro.validation_enabled(False):
        decoder = Decoder(data.train.mean(0).cpu()).to(device)
        guide = make_guide(decoder, cell["kind"], units)
        curve = train(decoder, guide, data, setting, cell["seed"], run)
        images = data.test[: setting.images]
        result = {
            "units": units,
            "training_cpu_seconds": time.process_time() - started,
            "parameters": guide.num_parameters,
            "curve": curve,
            "negative_elbo": negative_elbo(decoder, guide, data.test, setting.draws),
            "negative_elbo_of_images": negative_elbo(decoder, guide, images, 25 * setting.draws),
            "negative_ais": negative_ais(decoder, images, setting, setting.temperatures),
        }
        if cell["anneals_longer"]:
            result["negative_ais_longer"] = negative_ais(
                decoder, images, setting, 4 * setting.temperatures
            )
    gap = result["negative_elbo_of_images"] - result["negative_ais"]
    return {**result, "gap": gap, "cpu_seconds": time.process_time() - started}


def train(
    decoder: Decoder, guide: AutoNaMIGuide, data: Images, setting: Setting, seed: int, run: Run
) -> list[float]:
    """Maximizes the ELBO, going on from the checkpoint if there is one.

    Returns:
        Negative ELBO of an image of the validation set, after each of up to 50 equal parts of training.
    """
    elbo = Trace_ELBO()(decoder, guide)
    elbo(data.train[: setting.batch])  # a guide makes its networks at its first call
    optimizer = torch.optim.Adam(elbo.parameters(), lr=setting.learning_rate)
    length = math.ceil(len(data.train) / setting.batch)
    first, curve = 0, []
    kept_state = run.kept()
    if kept_state is not None:
        first, curve = kept_state["step"], kept_state["curve"]
        elbo.load_state_dict(kept_state["elbo"])
        optimizer.load_state_dict(kept_state["optimizer"])
    steps, kept = setting.epochs * length, time.monotonic()
    looks = {math.ceil(setting.epochs * (i + 1) / 50) * length for i in range(50)}
    for step in range(first, steps):
        if step % length == 0 or step == first:
            generator = torch.Generator().manual_seed(1_000_000 * seed + step // length)
            batches = (
                torch.randperm(len(data.train), generator=generator)
                .to(data.train.device)
                .split(setting.batch)
            )
        batch = data.train[batches[step % length]]
        for group in optimizer.param_groups:
            group["lr"] = setting.learning_rate * (_share(step / steps) if setting.decays else 1)
        optimizer.zero_grad()
        (elbo(batch) / len(batch)).backward()
        optimizer.step()
        if step + 1 in looks:
            curve.append(negative_elbo(decoder, guide, data.valid[:2000], 1))
        if time.monotonic() - kept > KEEP_EVERY or step + 1 == steps:
            run.keep(
                {
                    "elbo": elbo.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "step": step + 1,
                    "curve": curve,
                }
            )
            kept = time.monotonic()
        if step % TELL_EVERY == 0:
            run.tell(0.7 * step / steps)
    return curve


@torch.no_grad()
def negative_elbo(decoder: Decoder, guide: AutoNaMIGuide, images: Tensor, draws: int) -> float:
    """Returns the negative ELBO of an image in nats, with this many draws for each."""
    elbo = Trace_ELBO()
    total = sum(
        elbo.loss(decoder, guide, part) for _ in range(draws) for part in images.split(1000)
    )
    return total / (draws * len(images))


def negative_ais(decoder: Decoder, images: Tensor, setting: Setting, temperatures: int) -> float:
    """Returns the negative log likelihood of an image in nats by annealing; every image is a data set of its own."""
    result = annealed_importance_sampling(
        decoder,
        None,
        images[:1],
        observations={"x": images.unsqueeze(1)},
        num_chains=setting.chains,
        num_temperatures=temperatures,
        num_leapfrog_steps=setting.leapfrog_steps,
        step_size=0.5,
        chunk_size=2000,
    )
    return -float(result.log_evidence.mean())


def _share(done: float) -> float:
    """Returns the share of the learning rate: linear to 1 in the first twentieth, then a cosine to 0."""
    return min(20 * done, 1.0) * 0.5 * (1 + math.cos(math.pi * done))


# ---- all cells

MEASURES = {"negative_elbo": "negative ELBO", "negative_ais": "negative AIS", "gap": "gap"}
Values = Mapping[str, Tensor]  # measure -> (seeds, sizes, kinds), as cells are ordered


def judge(values: Values, annealing: Mapping[str, float]) -> list[dict[str, Any]]:
    """Returns the claims; a sign holds beyond two standard errors over seeds, at every size."""
    signs = [
        (
            f"faithful has the lower {name} at every size",
            "lower at every size",
            values[key].diff()[..., 0],
        )
        for key, name in MEASURES.items()
    ]
    gap = values["gap"][:, -1:] - values["gap"][:, :1]
    signs.append(("the gap of faithful shrinks as the encoder grows", "it shrinks", gap[..., 1]))
    signs.append(("the gap of mean field grows as the encoder grows", "it grows", -gap[..., 0]))
    rows = []
    for text, paper, change in signs:
        found = [mean_and_error(column) for column in change.t()]
        holds = all(mean < -2 * (error or 0) for mean, error in found)
        rows.append(
            (text, paper, found, holds, "Not beyond two standard errors over seeds at every size.")
        )
    shorter, longer = annealing.values()
    text = (
        "four times the temperatures change the difference in negative AIS by less than a quarter"
    )
    same = abs(longer - shorter) < 0.25 * abs(shorter)
    rows.append(
        (text, "not told", dict(annealing), same, "Annealing is too short for these decoders.")
    )
    names = ("claim", "paper", "ours", "holds", "why")
    return [dict(zip(names, (*row[:4], "" if row[3] else row[4]))) for row in rows]


def draw(values: Values, parameters: Sequence[Sequence[int]], title: str, file: Path) -> None:
    """Draws the three panels against the number of parameters, with one standard error over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    for letter, panel, (key, name) in zip("abc", panels, MEASURES.items()):
        for i, (kind, color, marker) in enumerate(zip(KINDS, ("tab:orange", "tab:blue"), "so")):
            x = [pair[i] / 1000 for pair in parameters]
            draw_band(panel, x, values[key][..., i], kind, color=color, marker=marker, ms=4)
        panel.set(xlabel="parameters of the encoder, thousands", ylabel="nats an image")
        panel.set_title(f"({letter}) {name}", fontsize=10)
        panel.grid(alpha=0.3)
    panels[0].legend(frameon=False)
    figure.suptitle(title, fontsize=11)
    figure.savefig(file, dpi=150)


def main() -> None:
    """Runs all cells, prints the tables, and writes the numbers and the figure."""
    told = "folder with MNIST; scikit-learn's digits without it"
    options = parse(
        __doc__, (2, 4, 1), lambda parser: parser.add_argument("--data", type=Path, help=told)
    )
    try:
        data = read_images(options.extra["data"])
    except ValueError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    setting: Setting = options.choose(SMOKE, DEFAULT, PAPER)
    sizes, seeds = setting.sizes, range(options.seeds)
    pairs = [(size, kind) for size in sizes for kind in KINDS]
    longer = sizes[len(sizes) // 2], 0
    cells = [
        {"kind": kind, "size": size, "seed": seed, "anneals_longer": (size, seed) == longer}
        for seed in seeds
        for size, kind in pairs
    ]
    settings = {**setting._asdict(), "data": data.name}
    results = run_cells("vae", measure, cells, settings, options)

    def table(key: str) -> Tensor:
        found = torch.tensor([float(result[key]) for result in results], dtype=torch.float64)
        return found.view(len(seeds), len(sizes), len(KINDS))

    values = {key: table(key) for key in MEASURES}
    means = {
        key: [mean_and_error(run) for run in value.flatten(1).t()] for key, value in values.items()
    }
    paired = {
        key: [mean_and_error(run) for run in value.diff()[..., 0].t()]
        for key, value in values.items()
    }
    header = [column for name in MEASURES.values() for column in (name, "s.e.")]
    firsts = [[f"{kind} {size}", results[i]["parameters"]] for i, (size, kind) in enumerate(pairs)]
    lines = [[*own, *sum(each, ())] for own, each in zip(firsts, zip(*means.values()))]
    print_table(["encoder", "parameters", *header], lines)
    lines = [[f"size {size}", *sum(each, ())] for size, each in zip(sizes, zip(*paired.values()))]
    print_table(["faithful - mean field", *header], lines)

    checked = [result for cell, result in zip(cells, results) if cell["anneals_longer"]]
    keys = ("negative_ais", "negative_ais_longer")
    claims = judge(values, {key: checked[1][key] - checked[0][key] for key in keys})
    payload = {
        "settings": {**settings, "seeds": options.seeds},
        "encoders": [{"encoder": name, "parameters": count} for name, count in firsts],
        "means and standard errors, by encoder": means,
        "faithful less mean field, by size": paired,
        "runs": [{**cell, **result} for cell, result in zip(cells, results)],
        "claims": claims,
    }
    figure = write_results("vae", payload, options)
    parameters = table("parameters")[0].tolist()
    draw(
        values,
        parameters,
        f"{data.name}: relaxed Bernoulli VAE after {setting.epochs} epochs",
        figure,
    )


if __name__ == "__main__":
    main()
