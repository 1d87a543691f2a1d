import re
import stat
import sys

import pytest

from pyro_nami.graph import BayesNet, Site, nami
from pyro_nami.show.render import IMAGE_FORMATS, render

AWKWARD = [
    *(1, "1", ("z", 1), 'quo"te', "back\\slash", "trailing\\", "a&lt;b", "line\nbreak"),
    *("#34;", "`x`", None, "é", "]"),
]


@pytest.fixture
def net():
    return BayesNet(
        [
            Site("mu"),
            Site("theta", plates={"school"}),
            Site("k", plates={"school", "pupil"}, marginalized=True),
            Site("y", plates={"school", "pupil"}, observed=True),
            Site("w", plates={"pupil"}),
            Site("pred", plates={"school"}),
        ],
        [("mu", "theta"), ("theta", "k"), ("k", "y"), ("w", "y"), ("theta", "pred")],
        {"pupil": 5, "school": 8},
    )


def plain(count):
    return BayesNet.from_edges([(0, i) for i in range(1, count)], observed=[1])


@pytest.mark.parametrize("invert", [lambda net: net, nami])
def test_text_is_the_objects_own(net, invert):
    assert render(invert(net)) == str(invert(net)) == render(invert(net), "text")


def test_a_network_in_mermaid(net):
    assert render(net, "mermaid").splitlines() == [
        "flowchart TD",
        '  n0(["mu"])',
        '  subgraph p0["school (8)"]',
        '    n1(["theta"])',
        '    n5(["pred"])',
        '    subgraph p1["pupil (5)"]',
        '      n2(["k<br>marginalized"]):::dashed',
        '      n4(["y"]):::observed',
        "    end",
        "  end",
        '  subgraph p2["pupil (5)"]',
        '    n3(["w"])',
        "  end",
        "  n0 --> n1",
        "  n1 --> n2",
        "  n2 --> n4",
        "  n3 --> n4",
        "  n1 --> n5",
        "  classDef observed fill:#bbb",
        "  classDef dashed stroke-dasharray:6 4",
    ]


def test_an_inverse_in_mermaid_marks_fill_in_pooling_blocks_and_predictive_latents(net):
    inverse = nami(net, direction="forward")
    drawn = render(inverse, "mermaid")
    assert "k" not in re.findall(r'\["(\w+)', drawn)  # marginalized: no part of the inverse
    ids = {name: id for id, name in re.findall(r'(n\d+)\(\["(\w+)', drawn)}
    arrows = {
        (a, b): (arrow, text)
        for a, arrow, text, b in re.findall(r'(n\d+) (-+>|-\.->)(?:\|"(.*)"\|)? (n\d+)', drawn)
    }
    for v, reads in inverse.parents.items():
        for u in reads:
            arrow, text = arrows.pop((ids[u], ids[v]))
            is_fill_in = (u, v) not in net.edges and (v, u) not in net.edges
            assert arrow == ("-.->" if is_fill_in else "-->")
            assert set(re.findall("school|pupil", text)) == inverse.pooled(v, u)
    assert not arrows
    assert f'{ids["pred"]}(["pred<br>from the model"]):::dotted' in drawn
    for v in inverse.order:
        assert (f"{v}<br>jointly over" in drawn) == bool(inverse.joint[v])
    assert any(inverse.joint.values())


def test_an_inverse_in_dot():
    net = BayesNet.from_edges(
        [("m", "a"), ("m", "b"), ("a", "x"), ("b", "y")],
        observed=["x", "y"],
        plates={"a": ["n"], "x": ["n"]},
        plate_sizes={"n": 3},
    )
    assert render(nami(net, direction="forward"), "dot").splitlines() == [
        "digraph {",
        '  n0 [label="m", style=filled, fillcolor=white]',
        '  n2 [label="b", style=filled, fillcolor=white]',
        '  n4 [label="y", style=filled, fillcolor=gray]',
        "  subgraph cluster_0 {",
        '    label="n (3)"; labeljust=r; labelloc=b',
        '    n1 [label="a\\njointly over n", style=filled, fillcolor=white]',
        '    n3 [label="x", style=filled, fillcolor=gray]',
        "  }",
        '  n3 -> n1 [label="over n"]',
        "  n4 -> n1 [style=dashed]",
        '  n1 -> n2 [style=dashed, label="over n"]',
        "  n4 -> n2",
        '  n1 -> n0 [label="over n"]',
        "  n2 -> n0",
        "}",
    ]


def unquoted(body):
    return re.sub(r"\\(.)", lambda found: found[1], body).replace("&amp;", "&")


def test_awkward_names_stay_apart_and_are_escaped():
    net = BayesNet.from_edges(zip(AWKWARD, AWKWARD[1:]), observed=AWKWARD[-1:], nodes=AWKWARD)
    mermaid, dot = render(net, "mermaid"), render(net, "dot")
    nodes = re.findall(r'^  (n\d+)\(\["(.*)"\]\)', mermaid, flags=re.M)
    assert len(dict(nodes)) == len({text for _, text in nodes}) == len(AWKWARD)
    assert all(re.fullmatch(r"(?:[\w .,:()\[\]'/-]|#\d+;)*", text) for _, text in nodes)
    decoded = [re.sub(r"#(\d+);", lambda code: chr(int(code[1])), text) for _, text in nodes]
    labels = re.findall(
        r'^  n\d+ \[label="((?:[^"\\]|\\.)*)", style=filled, fillcolor=\w+\]$', dot, flags=re.M
    )
    assert decoded == [unquoted(text) for text in labels]
    assert decoded == [name if name == "é" else repr(name) for name in AWKWARD]
    assert len(mermaid.splitlines()) == 1 + len(AWKWARD) + len(AWKWARD) - 1 + 1
    assert len(dot.splitlines()) == 2 + len(AWKWARD) + len(AWKWARD) - 1


@pytest.mark.parametrize(
    ("plates", "sizes", "nesting", "titles"),
    [
        (
            ["obs", "county"],
            {"obs": 9, "county": 3},
            {"obs": ["county"]},
            ["county (3)", "obs (9 in all)"],
        ),
        (["a", "b"], {"b": 2, "a": 3}, {}, ["b (2)", "a (3)"]),
    ],
    ids=[
        "a ragged plate inside those it determines",
        "plates of the same sites as they were given",
    ],
)
def test_plates_are_drawn_in(plates, sizes, nesting, titles):
    of_sites = {"y": plates, "w": plates}
    net = BayesNet.from_edges(
        [("y", "w")], observed=["w"], plates=of_sites, plate_sizes=sizes, nesting=nesting
    )
    assert re.findall(r'subgraph p\d\["(.*)"\]', render(net, "mermaid")) == titles


@pytest.mark.parametrize("format", ["text", "mermaid", "dot"])
def test_a_path_gets_what_is_returned(tmp_path, net, format):
    path = tmp_path / "net"
    drawn = render(net, format, path)
    assert path.read_text(encoding="utf-8") == drawn


def test_the_graphviz_object_holds_the_dot_text(net):
    graphviz = pytest.importorskip("graphviz")
    source = render(nami(net), "graphviz")
    assert isinstance(source, graphviz.Source) and source.source.strip() == render(nami(net), "dot")


@pytest.fixture
def stub_dot(tmp_path, monkeypatch):
    """A ``dot`` that copies its input, so that the call is tested where Graphviz is not installed."""
    pytest.importorskip("graphviz")
    program = tmp_path / "dot"
    program.write_text('#!/bin/sh\necho "$@"\n/bin/cat\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.skipif(sys.platform == "win32", reason="the stub is a shell script")
def test_images_are_bytes_from_dot(stub_dot, tmp_path, net):
    drawn = render(net, "svg", tmp_path / "net.svg")
    assert drawn.decode().split() == ["-Kdot", "-Tsvg", *render(net, "dot").split()]
    assert (tmp_path / "net.svg").read_bytes() == drawn


@pytest.mark.parametrize("format", IMAGE_FORMATS)
def test_without_the_program_the_error_says_what_to_install(monkeypatch, tmp_path, format):
    pytest.importorskip("graphviz")
    monkeypatch.setenv("PATH", str(tmp_path))
    message = r"`dot` on the PATH .*pip install pyro_nami\[viz\].*apt install graphviz"
    with pytest.raises(RuntimeError, match=message):
        render(plain(2), format)


@pytest.mark.parametrize("format", ["graphviz", "png"])
def test_without_the_package_the_error_says_what_to_install(monkeypatch, format):
    monkeypatch.setitem(sys.modules, "graphviz", None)
    with pytest.raises(ImportError, match=r"graphviz package .*Run `pip install pyro_nami\[viz\]`"):
        render(plain(2), format)
    assert render(plain(2), "dot") and render(plain(2), "mermaid")


def test_an_unknown_format_is_an_error():
    with pytest.raises(
        ValueError, match="one of text, mermaid, dot, graphviz, png, .*; got 'ascii'"
    ):
        render(plain(2), "ascii")


def test_only_networks_and_inverses_are_drawn():
    with pytest.raises(TypeError, match="BayesNet or an Inverse; got dict"):
        render({})
