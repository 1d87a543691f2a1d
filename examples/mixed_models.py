"""Mixed models, linear and generalized, against the exact posterior: all guides train alike.

| Name | Data | Likelihood | Effects |
|---|---|---|---|
| radon | log radon in 919 houses of 85 counties of Minnesota | Normal | intercepts and slopes of counties |
| penicillin | 6 samples on each of 24 plates (Davies and Goldsmith 1972) | Normal | plates crossed with samples |
| seeds | germination on 21 plates, two factors (Crowder 1978) | Binomial | plates |
| epilepsy | seizures of 59 patients at 4 visits (Thall and Vail 1990) | Poisson | patients, and visits of each |
| sparse | simulated: 300 by 40 groups, most pairs empty, of very different sizes (as InstEval) | Normal | crossed |

Radon is as in Gelman and Hill (2006), chapter 12, with the priors of posteriordb's
``radon_variable_intercept_slope_centered``; some counties have 116 houses and some have one. Given the data, every
plate's effect on penicillin depends on every sample's, and all on the mean. Seeds and epilepsy (model III of Breslow
and Clayton 1993) are examples of BUGS, here with Normal(0, 5) coefficients and HalfNormal(1) sds. All models are
centered, and read groups through indices, ``alpha[..., county]``. Run with::

    python examples/mixed_models.py [NAME ...] [--guides GUIDE ...] [--rate 0.01] [--steps 3000] [--seed 0] [--nuts]
                                    [--sparse A B ROWS] [--smoke] [--device cpu] [--out out/mixed_models]
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from references import GeneralizedModel, LinearModel, Problem
from study import GUIDES, Row, argument_parser, draw_intervals, pyplot, study
from torch import Tensor
from torch.nn.functional import one_hot

PRIOR_SD = 5.0  # of coefficients of generalized models


def read_table(name: str, *text: str) -> dict[str, Tensor]:
    """The columns of a file of numbers, without those that hold text."""
    with (Path(__file__).parent / "data" / f"{name}.csv").open() as file:
        rows = list(csv.DictReader(file))
    return {
        key: torch.tensor([float(row[key]) for row in rows]) for key in rows[0] if key not in text
    }


# ---- radon


def radon(county: Tensor, floor: Tensor, y: Tensor | None = None) -> Tensor:
    """Varying intercepts and slopes; ``county`` holds numbers from 0; all arguments of shape ``(houses,)``."""
    mu_a = pyro.sample("mu_a", dist.Normal(0.0, 10.0))
    mu_b = pyro.sample("mu_b", dist.Normal(0.0, 10.0))
    tau_a = pyro.sample("tau_a", dist.HalfNormal(1.0))
    tau_b = pyro.sample("tau_b", dist.HalfNormal(1.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    with pyro.plate("counties", 85):
        alpha = pyro.sample("alpha", dist.Normal(mu_a, tau_a))
        beta = pyro.sample("beta", dist.Normal(mu_b, tau_b))
    with pyro.plate("houses", len(county)):
        mean = alpha[..., county] + beta[..., county] * floor
        return pyro.sample("y", dist.Normal(mean, sigma), obs=y)


def read_radon() -> tuple[Tensor, Tensor, Tensor]:
    """County, floor and log radon of every house, ``(919,)`` each."""
    table = read_table("radon_mn")
    return table["county"].long() - 1, table["floor"], table["radon"].log()


def linear_radon(county: Tensor, floor: Tensor, y: Tensor) -> LinearModel:
    """The same model in the terms of which its exact posterior is computed."""
    own = one_hot(county).double()
    terms: dict[str, tuple[Tensor, float | str]] = {
        "mu_a": (torch.ones_like(floor)[:, None], 10.0),
        "mu_b": (floor[:, None], 10.0),
        "alpha": (own, "tau_a"),
        "beta": (own * floor[:, None], "tau_b"),
    }
    priors = {"tau_a": 1.0, "tau_b": 1.0, "sigma": 1.0}
    return LinearModel(terms, "sigma", priors, y, around={"alpha": "mu_a", "beta": "mu_b"})


# ---- penicillin, and other crossed designs


def crossed(
    first: Tensor, second: Tensor, sizes: tuple[int, int], y: Tensor | None = None
) -> Tensor:
    """Effects of two kinds of groups, which cross.

    Args:
        first, second: each measurement's group of either kind, numbered from 0, ``(rows,)``.
        sizes: numbers of groups.
        y: measurements, centered, ``(rows,)``.
    """
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau_a = pyro.sample("tau_a", dist.HalfNormal(2.0))
    tau_b = pyro.sample("tau_b", dist.HalfNormal(2.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(2.0))
    with pyro.plate("plates", sizes[0]):
        a = pyro.sample("a", dist.Normal(0.0, tau_a))
    with pyro.plate("samples", sizes[1]):
        b = pyro.sample("b", dist.Normal(0.0, tau_b))
    with pyro.plate("rows", len(first)):
        return pyro.sample("y", dist.Normal(mu + a[..., first] + b[..., second], sigma), obs=y)


def read_penicillin() -> tuple[Tensor, Tensor, tuple[int, int], Tensor]:
    """Plate, sample and diameter of every measurement, centered at 23 mm, ``(144,)`` each."""
    table = torch.stack(list(read_table("penicillin", "plate").values()), -1)
    first, second = torch.cartesian_prod(torch.arange(24), torch.arange(6)).unbind(-1)
    return first, second, (24, 6), table.flatten() - 23.0


def simulate(many: int, few: int, rows: int) -> tuple[Tensor, Tensor, tuple[int, int], Tensor]:
    """A sparse crossed design with groups of very different sizes; mu 0.3, sds 0.6, 0.9 and 1."""
    first = torch.multinomial(torch.rand(many), rows, replacement=True)
    second = torch.multinomial(torch.rand(few), rows, replacement=True)
    a, b = 0.6 * torch.randn(many), 0.9 * torch.randn(few)
    return first, second, (many, few), 0.3 + a[first] + b[second] + torch.randn(rows)


def linear_crossed(first: Tensor, second: Tensor, sizes: tuple[int, int], y: Tensor) -> LinearModel:
    terms: dict[str, tuple[Tensor, float | str]] = {
        "mu": (torch.ones(len(y), 1), 5.0),
        "a": (one_hot(first, sizes[0]), "tau_a"),
        "b": (one_hot(second, sizes[1]), "tau_b"),
    }
    return LinearModel(terms, "sigma", {"tau_a": 2.0, "tau_b": 2.0, "sigma": 2.0}, y)


# ---- seeds that germinated


def seeds(seed: Tensor, extract: Tensor, total: Tensor, germinated: Tensor | None = None) -> Tensor:
    """Two factors and their interaction; ``seed`` and ``extract`` are 0 or 1; all arguments of shape ``(plates,)``."""
    intercept = pyro.sample("intercept", dist.Normal(0.0, PRIOR_SD))
    of_seed = pyro.sample("of_seed", dist.Normal(0.0, PRIOR_SD))
    of_extract = pyro.sample("of_extract", dist.Normal(0.0, PRIOR_SD))
    of_both = pyro.sample("of_both", dist.Normal(0.0, PRIOR_SD))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    with pyro.plate("plates", len(total)):
        effect = pyro.sample("effect", dist.Normal(0.0, sigma))
        logits = (
            intercept + of_seed * seed + of_extract * extract + of_both * seed * extract + effect
        )
        return pyro.sample("germinated", dist.Binomial(total, logits=logits), obs=germinated)


def read_seeds() -> tuple[Tensor, ...]:
    """Kind of seed, kind of root extract, numbers of seeds and of those that germinated, ``(21,)`` each."""
    return tuple(read_table("seeds").values())


def generalized_seeds(
    seed: Tensor, extract: Tensor, total: Tensor, germinated: Tensor
) -> GeneralizedModel:
    names = ("intercept", "of_seed", "of_extract", "of_both")
    columns = (torch.ones_like(seed), seed, extract, seed * extract)
    return GeneralizedModel(
        {name: column[:, None] for name, column in zip(names, columns)},
        PRIOR_SD,
        lambda logits: dist.Binomial(total.double(), logits=logits),
        germinated,
        {"sigma": 1.0},
        rows=("effect", "sigma"),
    )


# ---- epileptic seizures


def epilepsy(design: Tensor, patient: Tensor, seizures: Tensor | None = None) -> Tensor:
    """Six coefficients of a design ``(rows, 6)``; ``patient`` holds numbers from 0, ``(rows,)`` as ``seizures``."""
    beta = pyro.sample("beta", dist.Normal(0.0, PRIOR_SD).expand([design.shape[-1]]).to_event(1))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    with pyro.plate("patients", 59):
        own = pyro.sample("own", dist.Normal(0.0, tau))
    with pyro.plate("visits", len(patient)):
        visit = pyro.sample("visit", dist.Normal(0.0, sigma))
        log_rate = (design * beta).sum(-1) + own[..., patient] + visit
        return pyro.sample("seizures", dist.Poisson(log_rate.exp()), obs=seizures)


def read_epilepsy() -> tuple[Tensor, Tensor, Tensor]:
    """Design ``(236, 6)``, patient ``(236,)`` and seizures ``(236,)``, visit by visit of each patient.

    The design's columns are the intercept, and centered: log(base / 4), treated, their product, log(age), fourth visit.
    """
    table = read_table("epilepsy")
    base, treated = (table["base"] / 4).log(), table["treated"]
    patient = torch.arange(59).repeat_interleave(4)
    columns = [column[patient] for column in (base, treated, base * treated, table["age"].log())]
    design = torch.stack([*columns, torch.tensor([0.0, 0.0, 0.0, 1.0]).repeat(59)], -1)
    design = torch.cat([torch.ones(236, 1), design - design.mean(0)], -1)
    return design, patient, torch.stack([table[f"visit{k}"] for k in range(1, 5)], -1).flatten()


def generalized_epilepsy(design: Tensor, patient: Tensor, seizures: Tensor) -> GeneralizedModel:
    return GeneralizedModel(
        {"beta": design},
        PRIOR_SD,
        lambda log_rate: dist.Poisson(log_rate.exp()),
        seizures,
        {"tau": 1.0, "sigma": 1.0},
        rows=("visit", "sigma"),
        groups=("own", "tau", patient),
    )


# ---- all of them


class Study(NamedTuple):
    """A model, where its data come from, its exact posterior, and what else a `Problem` has."""

    model: Callable
    read: Callable[..., tuple]
    exact: Callable[..., LinearModel | GeneralizedModel]
    common: tuple[str, ...]
    effects: tuple[str, ...]
    noncentered: tuple[str, ...] = ()
    dense: tuple[tuple[str, ...], ...] = ()


COUNTIES = ("alpha", "beta")
CROSSED: Any = (linear_crossed, ("mu", "tau_a", "tau_b", "sigma"), ("a", "b"), (), (("mu", "b"),))
STUDIES = {
    "radon": Study(
        radon,
        read_radon,
        linear_radon,
        ("mu_a", "mu_b", "tau_a", "tau_b", "sigma"),
        COUNTIES,
        COUNTIES,
    ),
    "penicillin": Study(crossed, read_penicillin, *CROSSED),
    "seeds": Study(
        seeds,
        read_seeds,
        generalized_seeds,
        ("intercept", "of_seed", "of_extract", "of_both", "sigma"),
        ("effect",),
        ("effect",),
    ),
    "epilepsy": Study(
        epilepsy,
        read_epilepsy,
        generalized_epilepsy,
        ("beta", "tau", "sigma"),
        ("own", "visit"),
        ("own", "visit"),
    ),
    "sparse": Study(crossed, simulate, *CROSSED),
}


def plot_effects(problem: Problem, rows: Mapping[str, Row], path: Path) -> None:
    """The effects of each kind by their exact mean, with 90% intervals; of many, every n-th."""
    plt = pyplot()
    count = len(problem.effects)
    figure, axes = plt.subplots(count, figsize=(12, 4 * count), layout="constrained", squeeze=False)
    colors = {"exact draws": "black", "AutoNormal": "tab:orange", "AutoNaMIGuide": "tab:blue"}
    for axis, site in zip(axes[:, 0], problem.effects):
        order = rows["exact draws"].draws[site].mean(0).argsort()
        order = order[:: -(-len(order) // 60)]
        intervals = [
            (name, rows[name].draws[site][:, order], color)
            for name, color in colors.items()
            if name in rows
        ]
        draw_intervals(axis, intervals)
        axis.set(title=f"effects '{site}'", xlabel="ordered by mean", xticks=[])
    axes[0, 0].legend(frameon=False, loc="upper left")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    """Trains all guides on each model, prints the tables and writes the plots."""
    parser = argument_parser(__doc__, "out/mixed_models")
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"of {', '.join(STUDIES)}; the first four by default",
    )
    parser.add_argument("--rate", type=float, default=0.01, help="learning rate of all guides")
    parser.add_argument(
        "--guides", nargs="+", choices=GUIDES, default=list(GUIDES), metavar="GUIDE"
    )
    parser.add_argument("--nuts", action="store_true", help="judge by NUTS as well")
    parser.add_argument(
        "--sparse", type=int, nargs=3, metavar=("A", "B", "ROWS"), default=(300, 40, 1200)
    )
    arguments = parser.parse_args()
    if unknown := set(arguments.names).difference(STUDIES):
        parser.error(f"expected names of {', '.join(STUDIES)}; got {', '.join(sorted(unknown))}")
    torch.set_num_threads(1)
    gaps: dict[str, dict[str, float]] = {}
    for name in arguments.names or list(STUDIES)[:4]:
        print(f"\n==== {name}")
        model, read, exact, *rest = STUDIES[name]
        pyro.set_rng_seed(arguments.seed)
        data = read(*arguments.sparse) if name == "sparse" else read()
        problem, out = Problem(model, data, *rest), arguments.out / name
        rows = study(problem, exact(*data), arguments, out)
        plot_effects(problem, rows, out / "effects.png")
        gaps[name] = {
            guide: rows["exact draws"].elbo - rows[guide].elbo for guide in arguments.guides
        }
    print(
        "\nLog evidence minus ELBO, nats\n\n" + " " * 31 + "".join(f"{name:>12}" for name in gaps)
    )
    for guide in arguments.guides:
        print(f"{guide:<31}" + "".join(f"{found[guide]:>12.3f}" for found in gaps.values()))
    print(f"\nWritten to {arguments.out}, a folder for each: results.json, errors.png, effects.png")


if __name__ == "__main__":
    main()
