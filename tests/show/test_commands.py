"""The command line on files written for the purpose: what it prints, and how it exits."""

import json
import re
import sys
import warnings

import pytest
import torch
from scripts import ROOT, python

from pyro_nami import Posterior
from pyro_nami.graph import BayesNet, Site, nami, nami_steps
from pyro_nami.reading.extraction import extract
from pyro_nami.show import main
from pyro_nami.show.render import render

SOURCE = '''
"""Models of all kinds."""
import functools
import math
from functools import partial

import neighbour
import pyro
import pyro.distributions as dist
import torch
from pyro import poutine

print("imported")
sigma = torch.tensor([15.0, 10.0, 16.0])
LATENT = 3


def data():
    return sigma, 1.0 + torch.zeros(3)


def schools(sigma, y=None):
    print("running")
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(5.0))
    with pyro.plate("schools", len(sigma)):
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        pyro.sample("y", dist.Normal(theta, sigma), obs=y)


def tree(d=torch.tensor(0.3), e=torch.tensor(0.4)):
    """Figure 1 of Webb et al. 2018: a root with two branches whose leaves are observed."""
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    b = pyro.sample("b", dist.Normal(a, 1.0))
    c = pyro.sample("c", dist.Normal(a, 1.0))
    pyro.sample("d", dist.Normal(b, 1.0), obs=d)
    pyro.sample("e", dist.Normal(c, 1.0), obs=e)


branches = partial(tree, e=torch.tensor(0.1))
hidden = poutine.block(tree, hide=["e"])


def rows(y):
    """Ragged groups: each row reads one group through an index; the group's scale is a support parent."""
    hi = pyro.sample("hi", dist.LogNormal(0.0, 1.0))
    with pyro.plate("groups", 3):
        z = pyro.sample("z", dist.Uniform(0.0, hi))
    with pyro.plate("rows", 6):
        pyro.sample("y", dist.Normal(z[..., torch.tensor([0, 0, 1, 1, 2, 2])], 1.0), obs=y)


rows_args = torch.zeros(6)


def leaky(y=torch.tensor(1.0)):
    z = pyro.sample("z", dist.Normal(0.0, 1.0))
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    scale = 2.0 if float(w) > 0 else 1.0
    pyro.sample("noise", dist.Normal(float(torch.randn(())), 1.0))
    pyro.sample("y", dist.Normal(z, scale), obs=y)


def coupled():
    with pyro.plate("n", 3):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("x", dist.Normal(z.sum(), 1.0), obs=torch.zeros(3))


def breaks(size):
    z = pyro.sample("z", dist.Normal(torch.zeros(size), 1.0).to_event(1))
    raise ValueError(f"cannot go on with {size}.\\nThis is why.")


def nothing():
    return 1


def data_only():
    pyro.sample("x", dist.Normal(0.0, 1.0), obs=torch.tensor(1.0))


def local_index(value, *, twice=False):
    with pyro.plate("n", 2):
        pyro.sample("v", dist.Normal(torch.as_tensor(value), 1.0))
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    (folder / "models_of_test.py").write_text(SOURCE)
    (folder / "neighbour.py").write_text("VALUE = 1\n")
    (folder / "broken.py").write_text("x = 1\nraise RuntimeError('no')\n")
    (folder / "syntax.py").write_text("def model(:\n")
    (folder / "leaving.py").write_text("import sys\nsys.exit(3)\n")
    (folder / "empty.py").write_text("")
    return folder


@pytest.fixture
def run(folder, monkeypatch, capsys):
    """Runs a command in the folder of the models; returns exit code, stdout, stderr."""
    monkeypatch.chdir(folder)

    def run(command: str, target: str, *options: str) -> tuple[int, str, str]:
        target = f"models_of_test.py:{target}" if ":" not in target else target
        before = list(sys.path), set(sys.modules)
        code = main([command, target, *options])
        assert sys.path == before[0] and "__model__" not in sys.modules
        return code, *capsys.readouterr()

    yield run
    for name in ("models_of_test", "neighbour"):
        sys.modules.pop(name, None)


@pytest.fixture
def found(run):
    """Runs a command that must succeed, and reads its JSON."""

    def found(*arguments: str, code: int = 0) -> dict:
        left, out, _ = run(*arguments, "--format", "json")
        assert left == code
        return json.loads(out)

    return found


def rebuilt(found: dict) -> BayesNet:
    """The network that JSON describes."""
    sites = [Site(**site) for site in found["sites"]]
    return BayesNet(sites, found["edges"], found["plate_sizes"], found["nesting"])


def extracted(name: str, *args: str) -> BayesNet:
    """A model's network without the command line; its arguments are names in the file, or code."""
    scope = {"__name__": "apart"}
    source = SOURCE.replace("import neighbour", "").replace("print(", "str(")
    exec(compile(source, "apart", "exec"), scope)
    return extract(scope[name], tuple(eval(code, scope) for code in args)).bayesnet


SCHOOLS = ("schools", "--args", "data()")
# inverse -> whether it is faithful to a tree, and minimal
INVERSES = dict.fromkeys(("auto", "forward", "reverse", "free"), (True, True))
INVERSES |= {
    "fully_connected": (True, False),
    "stuhlmueller": (False, False),
    "mean_field": (False, False),
}


@pytest.fixture(scope="module")
def schools():
    """Eight schools, three of them."""
    return extracted("schools", *(f"data()[{i}]" for i in range(2)))


# ---- formats


def test_inspect_prints_the_network(run, schools):
    code, out, err = run("inspect", *SCHOOLS)
    assert code == 0 and out == str(schools) + "\n"
    assert err == "imported\n"  # what the model prints in its many runs is dropped


@pytest.mark.parametrize("format", ["mermaid", "dot"])
@pytest.mark.parametrize("command", ["inspect", "invert"])
def test_drawings_are_those_of_render(run, schools, command, format):
    code, out, _ = run(command, *SCHOOLS, "--format", format)
    inverse = nami(schools, direction="reverse", blocks=EXACT_FIRST)
    drawn = render(schools if command == "inspect" else inverse, format)
    assert code == 0 and out == f"{drawn}\n"


def test_json_of_inspect_makes_the_network_again(run, schools):
    code, out, _ = run("inspect", *SCHOOLS, "--format", "json")
    found = json.loads(out)
    assert code == 0 and rebuilt(found) == schools
    assert found["command"] == "inspect" and found["model"] == "models_of_test.py:schools"
    keys = [
        "sites",
        "edges",
        "plate_sizes",
        "nesting",
        "index_maps",
        "escaped",
        "hidden_randomness",
    ]
    assert list(found)[3:] == keys
    assert out == run("inspect", *SCHOOLS, "--format", "json")[1]


def test_json_holds_support_parents_nesting_and_index_maps(found):
    told = found("inspect", "rows")
    assert rebuilt(told) == extracted("rows", "rows_args")
    assert told["index_maps"] == [{"plate": "rows", "outer": "groups", "map": [0, 0, 1, 1, 2, 2]}]
    assert told["nesting"] == {"rows": ["groups"]} and told["sites"][1]["support_parents"] == ["hi"]


EXACT_FIRST = [["theta"], ["mu"], ["tau"]]  # what is exact given the rest is eliminated before it
INVERSE = [
    "Inverse: latents 3, edges 6 (16 between instances), levels 3",  # 3 + 1 + 3 + 3 * 3
    "  tau | y over schools",
    "  mu | tau, y over schools",
    "  theta[schools] | mu, tau, y",
    "Eliminated first, as the model gives their conditionals: theta, mu",
    "Sampled in turn: tau; mu; theta",
    "Drawn by:",
    "  mu: exact, reads tau, y",
    "  tau: quadrature, reads y; not exact: its prior, HalfCauchy, is of no such form",
    "  theta: exact, reads mu, tau, y",
]
STEPS = [
    "Eliminated in turn:",
    "  1. theta among theta: reads mu, tau, y; fill-in mu - y, tau - y, cost 6",
    "  2. mu among mu: reads tau, y; fill-in y - y, cost 3",
    "  3. tau among tau: reads y",
]
UNFAITHFUL = ("verify", "tree", "--inverse", "stuhlmueller")
COUNTEREXAMPLE = [
    "models_of_test.py:tree, inverse stuhlmueller: not faithful",
    "  missing d -> c: c is taken to be independent of d, given e",
    "  missing c -> b: b is taken to be independent of c, given d",
]


@pytest.mark.parametrize(
    ("arguments", "code", "lines"),
    [
        (("inspect", "rows"), 0, ["Index map rows -> groups: 0, 0, 1, 1, 2, 2"]),
        (("invert", *SCHOOLS), 0, INVERSE),
        (("invert", *SCHOOLS, "--steps"), 0, STEPS),
        (UNFAITHFUL, 1, COUNTEREXAMPLE),
    ],
    ids=[
        "index maps",
        "factors, counts and levels",
        "steps of an elimination",
        "the paper's counterexample",
    ],
)
def test_text_ends_in(run, arguments, code, lines):
    left, out, _ = run(*arguments)
    assert left == code and out.splitlines()[-len(lines) :] == lines
    assert (
        arguments[0] == "inspect" or "--steps" in arguments or len(out.splitlines()) == len(lines)
    )


def test_fit_prints_the_summary_and_writes_the_draws(run, tmp_path):
    path = tmp_path / "posterior.pt"
    code, out, _ = run("fit", *SCHOOLS, "--draws", "200", "-o", str(path))
    assert code == 0 and "exact: all conditionals" in out and "theta[2]" in out
    assert Posterior.load(path)["theta"].shape == (200, 3)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("data_only",), "at least one latent"),
        (("breaks", "--args", "3"), "fails"),
        (("tree", "-o", "posterior.csv"), "ends in .nc or .pt"),
    ],
)
def test_fit_tells_in_one_line_what_is_wrong(run, arguments, error):
    code, _, told = run("fit", *arguments)
    assert code == 2 and error in told.splitlines()[-1]


def test_json_of_an_inverse_has_what_each_factor_reads(found, schools):
    told, inverse = (
        found("invert", *SCHOOLS, "--inverse", "forward"),
        nami(schools, direction="forward"),
    )
    assert rebuilt(told) == schools and told["inverse"] == "forward"
    factors = {factor["latent"]: factor for factor in told["factors"]}
    assert list(factors) == list(reversed(inverse.order))
    for v, factor in factors.items():
        pooled = {u: set(inverse.pooled(v, u)) for u in inverse.parents[v]}
        assert {p["site"]: set(p["over"]) for p in factor["parents"]} == pooled
        assert set(factor["joint"]) == inverse.joint[v] and factor["predictive"] == (
            v in inverse.predictive
        )
    assert told["num_edges"] == inverse.num_edges
    assert told["num_grounded_edges"] == inverse.num_grounded_edges
    assert told["levels"] == [list(level) for level in inverse.levels]


@pytest.mark.parametrize("name", ["schools.json", "schools.mmd", "schools.dot", "schools.txt"])
@pytest.mark.parametrize("command", ["inspect", "invert", "verify"])
def test_a_file_gets_what_stdout_would_in_the_format_of_its_name(run, tmp_path, command, name):
    format = {"json": "json", "mmd": "mermaid", "dot": "dot", "txt": "text"}[name.split(".")[1]]
    _, printed, _ = run(command, *SCHOOLS, "--format", format)
    code, out, _ = run(command, *SCHOOLS, "-o", str(tmp_path / name))
    assert code == 0 and out == "" and (tmp_path / name).read_text() == printed


def test_a_given_format_goes_before_that_of_the_name(run, tmp_path):
    path = tmp_path / "net.md"
    code, _, _ = run("inspect", "tree", "-o", str(path), "--format", "mermaid")
    assert code == 0 and path.read_text().startswith("flowchart")


# ---- inverses


@pytest.mark.parametrize("name", sorted(INVERSES))
def test_every_inverse_has_a_verdict(found, name):
    faithful, minimal = INVERSES[name]
    told = found("verify", "tree", "--inverse", name, code=int(not faithful))
    assert told["inverse"] == name and told["faithful"] is faithful and told["minimal"] is minimal
    assert bool(told["missing"]) is not faithful


def test_drawings_of_an_unfaithful_inverse_say_so_and_json_lists_what_is_missing(run, found):
    lines = run(*UNFAITHFUL, "--format", "mermaid")[1].splitlines()
    assert lines[1] == f"%% {COUNTEREXAMPLE[1]}" and lines[3] == "flowchart TD"
    drawn = run(*UNFAITHFUL, "--format", "dot")[1]
    assert drawn.startswith("// models_of_test.py:tree") and "\ndigraph {" in drawn
    assert found(*UNFAITHFUL, code=1)["missing"] == [
        {"parent": "d", "latent": "c", "across": []},
        {"parent": "c", "latent": "b", "across": []},
    ]


def test_an_inverse_that_is_not_minimal_fails_only_on_demand(run):
    options = "tree", "--inverse", "fully_connected"
    code, out, _ = run("verify", *options)
    assert code == 0 and "faithful, not minimal\n" in out and "  redundant " in out
    assert run("verify", *options, "--minimal") == (1, out, "imported\n")
    assert run("verify", "tree", "--minimal")[0] == 0


def test_a_dependence_across_instances_is_named(run):
    code, out, _ = run("verify", "rows", "--inverse", "mean_field")
    assert code == 1 and "missing hi -> z: z is taken to be independent of hi, given y\n" in out
    options = "--args", "(sigma,)", "--observed", "y", "--inverse", "fully_connected"
    code, out, _ = run("verify", "schools", *options)
    assert code == 0 and "  redundant theta -> theta across schools\n" in out


def test_json_of_an_elimination_has_its_steps(found, schools):
    steps = nami_steps(schools, direction="reverse", blocks=EXACT_FIRST)
    for step, told in zip(steps, found("invert", *SCHOOLS, "--steps")["steps"], strict=True):
        assert told["site"] == step.site and told["frontier"] == list(step.frontier)
        assert told["parents"] == list(step.parents) and told["cost"] == step.cost
        assert told["fill"] == [list(pair) for pair in step.fill]


def test_blocks_set_the_order_and_make_observed_sites_latent(found):
    assert found("invert", "tree", "--blocks", "b, c ; a")["factors"][0]["latent"] == "a"
    factors = found("invert", "tree", "--blocks", "a,b,c,e")["factors"]
    assert {factor["latent"] for factor in factors} == {"a", "b", "c", "e"}


def test_a_blocked_model_is_inverted_with_its_hidden_evidence(found):
    """Without it c would be barren, and its factor the model's own."""
    factors = {factor["latent"]: factor for factor in found("invert", "hidden")["factors"]}
    assert not factors["c"]["predictive"]
    assert "('hidden',)" in {parent["site"] for parent in factors["c"]["parents"]}


# ---- targets and arguments


def test_a_target_may_be_a_module_and_a_partial(run, folder):
    module = run("inspect", "models_of_test:branches")
    file = run("inspect", f"{folder / 'models_of_test.py'}:branches")
    assert module == file and module[0] == 0 and "b: latent, given a" in module[1]


def test_arguments_are_the_files_variable_unless_given(run):
    assert "plate rows of 6" in run("inspect", "rows")[1]
    code, _, err = run("inspect", "rows", "--args", "torch.zeros(5)")
    assert code == 2 and "called with 1 argument(s), fails" in err


@pytest.mark.parametrize(
    "arguments", ["(np.zeros(2),)", "numpy.zeros(2)", "[1.0, 2.0]", "sigma[:2]", "(sigma[:2],)"]
)
def test_a_tuple_gives_all_arguments_and_anything_else_the_only_one(run, arguments):
    code, out, _ = run(
        "inspect", "local_index", "--args", arguments, "--kwargs", "dict(twice=True)"
    )
    assert code == 0 and "v[n]: latent" in out


def test_sites_may_be_named_observed(found):
    sites = found("inspect", "schools", "--args", "sigma", "--observed", "y, mu")["sites"]
    assert {site["name"] for site in sites if site["observed"]} == {"mu", "y"}


def test_random_arguments_follow_the_seed(run, monkeypatch):
    seen = []

    def spy(model, args, kwargs, **options):
        seen.append(args[0])
        return extract(model, args, kwargs, **options)

    monkeypatch.setattr("pyro_nami.show.model_file.extract", spy)
    for seed in "0", "0", "1":
        run("inspect", "local_index", "--args", "torch.randn(2)", "--seed", seed)
    assert torch.equal(seen[0], seen[1]) and not torch.equal(seen[0], seen[2])


def test_warnings_are_a_line_each_on_stderr_and_notes_in_the_output(run, found):
    with warnings.catch_warnings(record=True) as caught:
        code, out, err = run("inspect", "leaky")
    assert code == 0 and not caught
    lines = [line for line in err.splitlines() if line.startswith("pyro-nami: warning: ")]
    assert len(lines) == len(err.splitlines()) - 1 >= 2  # the first is what the import prints
    assert any("Hidden randomness: 'noise'" in line for line in lines)
    assert "Values left torch; edges from here are found by intervention: w\n" in out
    assert "Hidden randomness; taken to depend on all latents before: noise\n" in out
    told = found("inspect", "leaky")
    assert told["escaped"] == ["w"] and told["hidden_randomness"] == ["noise"]
    assert [f"pyro-nami: warning: {message}" for message in told["warnings"]] == lines


# ---- failures


TREE = ("inspect", "tree")
STEPS_OF_TREE = ("invert", "tree", "--steps")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["inspect", "absent.py:model"],
            r"Expected a Python file; got 'absent.py', which does not exist",
        ),
        (
            ["inspect", "absent:model"],
            r"'absent' to import; got ModuleNotFoundError: No module named",
        ),
        (
            ["inspect", "models_of_test.py:"],
            r"Expected path/to/file.py:name or package.module:name",
        ),
        (["inspect", "broken.py:model"], r"to import; got RuntimeError: no \(broken.py, line 2\)"),
        (["inspect", "syntax.py:model"], r"'syntax.py' to import; got SyntaxError: .*line 1"),
        (["inspect", "leaving.py:model"], r"'leaving.py' to import; got SystemExit: 3"),
        (["inspect", "empty.py:model"], r"a name in 'empty.py'; got 'model'\."),
        (["inspect", "school"], r"got 'school'\."),
        (["inspect", "LATENT"], r"a callable; got 'LATENT', which is not callable"),
        (["inspect", "partial"], r"got 'partial', which is a class; make an instance"),
        (
            ["inspect", "schools"],
            r"called with no arguments, fails: TypeError: .*'sigma'. Give .* by --args",
        ),
        (
            ["inspect", "breaks", "--args=(3,)"],
            r"cannot go on with 3 \(models_of_test.py, line \d+\). Give",
        ),
        (
            ["inspect", "breaks", "--kwargs={'size': 'x'}"],
            r"with 1 argument\(s\), fails: TypeError: zeros",
        ),
        (
            [*TREE, "--args", "datum()"],
            r"--args to be a Python expression; got 'datum\(\)': NameError",
        ),
        ([*TREE, "--args", "(1"], r"--args to be a Python expression; got '\(1': SyntaxError"),
        (
            [*TREE, "--kwargs", "(1,)"],
            r"Expected --kwargs to be a dict with names as keys; got '\(1,\)'",
        ),
        ([*TREE, "--kwargs", "{1: 2}"], r"Expected --kwargs to be a dict"),
        ([*TREE, "--observed", "zz"], r"names of sample sites in `observed`; got 'zz'"),
        (
            ["inspect", "coupled"],
            r"error: Expected independent instances of site 'x', .* in plate 'n'",
        ),
        (
            ["inspect", "nothing"],
            r"with sample sites; got 'models_of_test.py:nothing', which has none",
        ),
        (
            [*TREE, "-o", "net.png"],
            r"ends in one of .txt, .mmd, .dot, .json; got 'net.png'. Give --format",
        ),
        ([*TREE, "-o", "absent/net.txt"], r"Expected to write the output; got FileNotFoundError"),
        (
            ["invert", "tree", "--blocks", "a;b"],
            r"Expected every latent in blocks; got none for 'c'",
        ),
        (
            ["verify", "tree", "--blocks", "a,b,c", "--inverse", "mean_field"],
            r"that honours `blocks`",
        ),
        (
            ["invert", "data_only"],
            r"at least one latent; got observed sites only: 'x'. Pass no data",
        ),
        (["verify", "data_only"], r"at least one latent"),
        (
            ["invert", "rows", "--inverse", "forward", "--blocks", "hi;z"],
            r"'z' to be eliminated before 'hi'",
        ),
        ([*STEPS_OF_TREE, "--format", "dot"], r"--steps with --format text or json; got dot"),
        (
            [*STEPS_OF_TREE, "--inverse", "mean_field"],
            r"--steps with --inverse auto, .*got mean_field",
        ),
    ],
)
def test_no_answer_is_exit_code_2_and_one_line(run, arguments, message):
    code, out, err = run(*arguments)
    line = err.splitlines()[-1]
    assert code == 2 and out == "" and line.startswith("pyro-nami: error: ")
    assert re.search(message, line)
    # the first is what the import prints
    assert len(err.splitlines()) <= 2 and "Traceback" not in err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["inspect"],
        ["invert", "a.py:b", "--inverse", "best"],
        ["inspect", "a.py:b", "--format", "png"],
    ],
)
def test_options_that_argparse_does_not_know_are_exit_code_2(arguments, capsys):
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2 and "usage: pyro-nami" in capsys.readouterr().err


def test_help_documents_every_key_of_the_json(found, capsys):
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    told = capsys.readouterr().out
    assert left.value.code == 0
    for command in (["inspect", "rows"], ["invert", "rows", "--steps"], ["verify", "rows"]):
        outer = found(*command)
        parts = [part for key in ("index_maps", "factors", "steps") for part in outer.get(key, ())]
        for key in (*outer, *outer["sites"][0], *(key for part in parts for key in part)):
            assert re.search(rf"\b{key}\b", told), key


# ---- as a process


def test_the_program_runs_as_a_module_of_python(folder):
    command = ["-m", "pyro_nami", "verify", "models_of_test.py:tree", "--inverse", "stuhlmueller"]
    done = python(*command, "--format", "json", cwd=folder)
    assert done.code == 1 and json.loads(done.printed)["missing"]
    assert done.errors == "imported\n"


def test_the_script_of_the_package_is_main():
    text = (ROOT / "pyproject.toml").read_text()
    assert '[project.scripts]\npyro-nami = "pyro_nami.show:main"\n' in text
