"""Settings of the documentation site, which `make docs` builds into ``out/docs/html``.

Every code cell of every page is run, in a kernel that runs `startup.py` first. Outputs are kept by the
content of the page and of the package, so a page is run again when either changes. A warning is an error.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
BUILT = ROOT / "out" / "docs"
# Files of the repository that are pages of the site under another name.
PAGES = {
    ROOT / "benchmarks" / "README.md": "/reference/benchmarks.md",
    ROOT / "CHANGELOG.md": "/reference/changelog.md",
    ROOT / "README.md": "/index.md",
}
# Pages that are listed in the table of contents as soon as they are written.
PLANNED = ("gallery", "guide")


def _source_hash() -> str:
    """Returns a hash of all code that the outputs of every page depend on."""
    found = hashlib.sha256()
    for path in (DOCS / "startup.py", *sorted((ROOT / "pyro_nami").rglob("*.py"))):
        found.update(path.read_bytes())
    return found.hexdigest()[:12]


def _set_up_kernels() -> None:
    """Gives the pages' kernels a profile of their own, which runs `startup.py`."""
    folder = BUILT / "ipython" / "profile_default" / "startup"
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(DOCS / "startup.py", folder)
    os.environ["IPYTHONDIR"] = str(BUILT / "ipython")


project = "pyro_nami"
author = "the pyro_nami developers"
copyright = author
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinxcontrib.mermaid",
]

# ---- pages, and the code on them
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath", "fieldlist"]
myst_fence_as_directive = ["mermaid"]
myst_heading_anchors = 4
nb_execution_mode = "cache"
nb_execution_cache_path = str(BUILT / f"cache-{_source_hash()}")
nb_execution_timeout = 180  # seconds a page; the slowest takes about 40 on an idle core
nb_execution_raise_on_error = True
nb_merge_streams = True
nb_render_markdown_format = "myst"  # a cell may return a drawing in Mermaid

# ---- docstrings
autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autosummary_generate = False
default_role = "py:obj"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
nitpick_ignore_regex = [
    # `name` in a docstring is a link where the name is public, and code otherwise
    ("py:obj", ".*"),
    # classes inside the package that public signatures show
    ("py:class", r"(pyro_nami\.\w+\.|abc\.).*"),
    ("py:.*", r"(torch|pyro|numpy|networkx|matplotlib|arviz|collections|pathlib|typing)\b.*"),
]

# ---- other projects: their inventories take a network, which the publishing workflow has
if os.environ.get("PYRO_NAMI_INTERSPHINX"):
    extensions.append("sphinx.ext.intersphinx")
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "torch": ("https://docs.pytorch.org/docs/stable", None),
        "pyro": ("https://docs.pyro.ai/en/stable", None),
    }

# ---- looks
html_theme = "furo"
html_title = "pyro_nami"
html_static_path = ["static"]
html_css_files = ["site.css"]


def _with_links_inside(text: str, folder: Path) -> str:
    """Returns a page whose links out of ``docs`` lead to pages of the site, or name a file of the repository.

    Args:
        text: of the page, in Markdown.
        folder: that its links are relative to.
    """

    def mended(found: re.Match) -> str:
        shown, place, anchor = found[1], (folder / found[2]).resolve(), found[3] or ""
        if DOCS in place.parents or not place.exists():
            return found[0]
        if place in PAGES:
            return f"[{shown}]({PAGES[place]}{anchor})"
        name = f"`{place.relative_to(ROOT)}`"
        return name if shown.strip("`") in name else f"{shown} ({name})"

    return re.sub(r"(?<!!)\[([^\]]+)\]\(([^)\s#:]+)(#[^)\s]*)?\)", mended, text)


def _read_page(app, page, source):
    """Mends a page before it is parsed: links, and entries of pages that are not written yet."""
    path = Path(app.env.doc2path(page))
    source[0] = _with_links_inside(source[0], path.parent)
    for name in PLANNED if page == "index" else ():
        if not (DOCS / f"{name}.md").exists():
            source[0] = source[0].replace(f"\n{name}\n", "\n")


def _read_included(app, path, page, source):
    """Mends the links of a file that a page includes."""
    source[0] = _with_links_inside(source[0], (DOCS / path).resolve().parent)


def _read_docstring(app, what, name, subject, options, lines):
    """Mends what napoleon would take for markup: stars of ``*args``, and a property's first sentence with a colon."""
    for i, line in enumerate(lines):
        lines[i] = re.sub(r"(\*+)(args|kwargs)(?=[,:])", r"\\\1\2", line).replace("\\**", "\\*\\*")
    if what == "property":
        lines.insert(0, "\\ ")


def setup(app):
    """Is called by Sphinx."""
    _set_up_kernels()
    # before napoleon, whose priority is 500
    app.connect("autodoc-process-docstring", _read_docstring, priority=100)
    app.connect("source-read", _read_page)
    app.connect("include-read", _read_included)
