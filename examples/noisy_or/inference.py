"""Inference with the true model: how close each posterior comes to the exact one, at 1,000, 100 and 20 points.

Yan, Ailem and Sha 2019, section 4.2 and Table 2, with patterns of our own (`worlds.patterns`). Posteriors are trained
on few points and judged on 1,000 others, which are the same for all: negative ELBO in nats a point from 100 true draws,
and macro F1 and exact match of one draw with the z that made the point. The floor is the exact posterior, by
enumeration of its 256 states. Settings are those of least negative ELBO on 1,000 further points, of ``--search`` ones.

The second figure is the paper's Figure 3, conjugate dual inference (CDI): the bound on log p(x) and the ELBO after each
round of its fixed point. Two ways to go there are drawn: a search makes each round tighten the bound; without, the full
step of the fixed point oscillates, and its ELBO is near the one that the paper's Table 2 has. Run with::

    python examples/noisy_or/inference.py [--smoke] [--search 10] [--seeds 5] [--jobs 2] [--device cpu]
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from measures import Rounds, cdi, exact, exact_match, macro_f1
from search import (
    Cell,
    Options,
    Run,
    mean_and_error,
    parse_options,
    print_table,
    pyplot,
    run_cells,
    searched,
    shown,
    write_results,
)
from systems import LEARNED, NoisyOrModel, draw_latents, fit, negative_elbo, setting
from worlds import patterns, split

NAME = "inference"
STEPS = 2000
MEASURES = ("negative ELBO", "F1", "exact match")
PAPER = {  # Table 2
    ("AVI", 1000): (14.0, 94.5, 91.0),
    ("ACP", 1000): (14.4, 94.3, 90.4),
    ("AVI", 100): (18.4, 86.6, 76.8),
    ("ACP", 100): (17.4, 87.1, 81.1),
    ("AVI", 20): (37.2, 49.2, 47.6),
    ("ACP", 20): (22.2, 76.1, 64.0),
    ("CDI", None): (96.6, 24.6, 39.0),
}
ROUNDS, START = 30, 0.5
HELD_OUT = 100, 1000, 1000
WAYS = {"searched": True, "full steps": False}


def run_cell(cell: Cell, run: Run) -> dict[str, Any]:
    """Trains a system on the points of a seed; CDI has nothing to train."""
    world = patterns()
    data = split(world, cell["points"] or 1, cell["seed"], run.options.choose(*HELD_OUT))
    device = run.options.device
    model = NoisyOrModel(world).to(device)
    x = data.train.x.to(device)
    guide = fit(
        model, cell["system"], x, setting(cell["setting"]), run.options.extra["steps"], run.tell
    )
    if cell["search"]:
        return {"valid": negative_elbo(model, guide, data.valid.x.to(device))}
    test = data.test.x.to(device)
    found = draw_latents(guide, test).cpu()
    values = (
        negative_elbo(model, guide, test),
        macro_f1(found, data.test.z),
        exact_match(found, data.test.z),
    )
    return dict(zip(MEASURES, values))


def floor(options: Options) -> dict[str, float]:
    """Returns the measures of the exact posterior, on the points of all cells."""
    world = patterns()
    test = split(world, 1, 0, options.choose(*HELD_OUT)).test
    posterior = exact(world, test.x)
    found = posterior.draw()
    values = (
        -posterior.log_evidence.mean().item(),
        macro_f1(found, test.z),
        exact_match(found, test.z),
    )
    return dict(zip(MEASURES, values))


def curves() -> dict[str, Any]:
    """Returns the rounds of CDI both ways, and the measures of where they end."""
    world = patterns()
    test = split(world, 1, 0).test
    results = {}
    for way, searches in WAYS.items():
        rounds: Rounds = cdi(world, test.x, ROUNDS, start=START, searches=searches)
        found = rounds.logits.sigmoid().bernoulli()
        values = -rounds.elbo[-1].item(), macro_f1(found, test.z), exact_match(found, test.z)
        results[way] = {
            "upper": rounds.upper.tolist(),
            "ELBO": rounds.elbo.tolist(),
            **dict(zip(MEASURES, values)),
        }
    return results


# ---- the report


def claims(rows: list[dict[str, Any]], best: float, rounds: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns what is claimed, beside what was found; means over seeds, differences of seeds by pairs."""
    runs = {(row["system"], row["points"]): row["runs"] for row in rows if row["points"]}
    sizes = sorted({points for _, points in runs})
    loss = {key: [run["negative ELBO"] for run in found] for key, found in runs.items()}
    mean = {key: mean_and_error(values)[0] for key, values in loss.items()}

    def claim(
        text: str, ours: Any, holds: bool, why: str, paper: str = "Table 2"
    ) -> dict[str, Any]:
        return {
            "claim": text,
            "paper": paper,
            "ours": ours,
            "holds": bool(holds),
            "why": "" if holds else why,
        }

    gains = {
        n: mean_and_error([a - b for a, b in zip(loss["AVI", n], loss["ACP", n])]) for n in sizes
    }
    text = {
        n: f"{gain:.2f}" + (f" +- {error:.2f}" if error is not None else "")
        for n, (gain, error) in gains.items()
    }
    few, some, many = sizes[0], sizes[len(sizes) // 2], sizes[-1]
    over = {
        n: mean["faithful, bounded", n] - min(mean[system, n] for system in LEARNED) for n in sizes
    }
    gap = mean["faithful, bounded", many] - best
    first, last = (rounds["searched"]["ELBO"][i] for i in (0, -1))
    tighter = rounds["searched"]["upper"][-1] < rounds["searched"]["upper"][0]
    return [
        claim(
            f"ACP is at least 5 nats better than AVI at {few} points",
            gains[few],
            gains[few][0] >= 5,
            text[few],
        ),
        claim(
            f"ACP is better than AVI at {some} points", gains[some], gains[some][0] > 0, text[some]
        ),
        claim(
            f"ACP and AVI are within 1 nat at {many} points",
            gains[many],
            abs(gains[many][0]) <= 1,
            text[many],
        ),
        claim(
            "the bound in the faithful inverse is the best, or within 0.1 nats of it, at every number of points",
            over,
            max(over.values()) <= 0.1,
            ", ".join(f"{n}: {value:.2f} nats over" for n, value in over.items()),
            "not in the paper",
        ),
        claim(
            f"it is within 0.3 nats of the exact posterior at {many} points",
            gap,
            gap <= 0.3,
            f"{gap:.2f}",
            "not in the paper",
        ),
        claim(
            "CDI: a tighter bound on the evidence, and a worse ELBO",
            {"ELBO at first": first, "at last": last},
            tighter and last < first,
            f"{first:.2f}, {last:.2f}",
            "Figure 3",
        ),
    ]


def report(rows: list[dict[str, Any]], best: dict[str, float], rounds: dict[str, Any]) -> None:
    """Prints a row for each system and number of points, with the gap to the exact posterior and the paper's row."""
    table: list[list[Any]] = [
        ["exact", "", *(f"{best[measure]:.2f}" for measure in MEASURES), "0.00", ""]
    ]
    for row in rows:
        values = {measure: [run[measure] for run in row["runs"]] for measure in MEASURES}
        gap = mean_and_error(values["negative ELBO"])[0] - best["negative ELBO"]
        theirs = " / ".join(map(str, PAPER.get((row["system"], row["points"]), ())))
        cells = [shown(values[measure]) for measure in MEASURES]
        table.append([row["system"], row["points"] or "", *cells, f"{gap:.2f}", theirs])
    for way, found in rounds.items():
        cells = [f"{found[measure]:.2f}" for measure in MEASURES]
        gap = found["negative ELBO"] - best["negative ELBO"]
        theirs = " / ".join(map(str, PAPER["CDI", None]))
        table.append([f"CDI in {ROUNDS} rounds, {way}", "", *cells, f"{gap:.2f}", theirs])
    print_table(["", "points", *MEASURES, "gap", "the paper, other patterns"], table)


def draw(file: Path, rows: list[dict[str, Any]], best: float, rounds: dict[str, Any]) -> None:
    """Draws gaps to the exact posterior against the number of points, and the rounds of CDI."""
    plt = pyplot()
    figure, (gaps, bound) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for place, system in enumerate(LEARNED):
        found = [row for row in rows if row["system"] == system]
        sizes = [row["points"] * 1.06 ** (place - 1.5) for row in found]
        stats = [
            mean_and_error([run["negative ELBO"] - best for run in row["runs"]]) for row in found
        ]
        gaps.errorbar(
            sizes,
            [m for m, _ in stats],
            [e or 0.0 for _, e in stats],
            label=system,
            marker="o",
            capsize=3,
        )
    sizes = sorted({row["points"] for row in rows if row["points"]})
    gaps.set(
        xscale="log",
        yscale="log",
        xlabel="points trained on",
        ylabel="gap to the exact posterior, nats a point",
    )
    gaps.set_xticks(sizes, [str(size) for size in sizes])
    gaps.minorticks_off()
    gaps.legend(frameon=False)
    for (way, found), style in zip(rounds.items(), ("-", ":")):
        bound.plot(found["upper"], style, color="tab:orange", label=f"bound on log p(x), {way}")
        bound.plot(found["ELBO"], style, color="tab:blue", label=f"ELBO, {way}")
    bound.axhline(-best, color="gray", linewidth=1, label="log p(x)")
    bound.set(xlabel="round of CDI", ylabel="nats a point", ylim=(-110, 20))
    bound.legend(frameon=False, fontsize=8)
    figure.savefig(file, dpi=130)
    plt.close(figure)


def measure(options: Options) -> list[dict[str, Any]]:
    """Returns a row with its runs for every system and number of points, and one for the guide's CDI."""
    sizes = options.choose((20,), (20, 100, 1000), (20, 100, 1000))
    conditions = [
        {"system": system, "points": points} for points in reversed(sizes) for system in LEARNED
    ]
    runs = searched(NAME, run_cell, conditions, {}, options)
    rows = [{**condition, "runs": found} for condition, found in zip(conditions, runs)]
    alone = {"system": "CDI", "points": None, "setting": 0, "seed": 0, "search": False}
    found = run_cells(f"{NAME}, CDI", run_cell, [alone], {}, options)
    return [*rows, {"system": "CDI", "points": None, "runs": found}]


def main() -> None:
    """Trains all systems, then prints the table and writes numbers and figure."""
    options = parse_options(__doc__, STEPS)
    rows, best, rounds = measure(options), floor(options), curves()
    report(rows, best, rounds)
    payload = {
        "exact": best,
        "rows": rows,
        "CDI": rounds,
        "claims": claims(rows, best["negative ELBO"], rounds),
    }
    extra = {name: options.extra[name] for name in ("steps", "search")}
    draw(
        write_results(NAME, {"settings": extra, **payload}, options),
        rows,
        best["negative ELBO"],
        rounds,
    )


if __name__ == "__main__":
    main()
