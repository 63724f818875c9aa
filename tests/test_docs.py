"""Every code block of README and docs runs: Python as it stands, `mirrordp ...` through the CLI.

The blocks of a page share one namespace and one empty folder, in order, like the cells of a
notebook. A block that cannot run has a line above it that says so to the reader, with the reason:
`*Not run in CI: needs PyTorch.*`
"""

import importlib.util
import os
import re
import shlex
import warnings
from pathlib import Path

import pytest

from mirrordp import cli

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NOT_RUN = re.compile(r"^\*Not run in CI[^:]*: .{10,}\*$")
# Pages in which a block may be marked, so that nobody marks one to make a test pass.
MAY_MARK = {
    **{"federated.md": 1, "migrating.md": 1, "logging.md": 2, "scaling.md": 1},
    "using-a-model.md": 1,
}


def blocks(text):
    """(line number, kind, code, whether it is marked as not run) of each fenced block."""
    found = []
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, flags=re.M | re.S):
        before = text[: match.start()].rstrip("\n").rpartition("\n")[2]
        line = text[: match.start()].count("\n") + 2
        found.append((line, match[1], match[2], bool(NOT_RUN.match(before))))
    return found


def run_python(code, name, line, namespace):
    # Line numbers of errors are those of the page.
    exec(compile("\n" * (line - 1) + code, name, "exec"), namespace)


def run_shell(code):
    for command in code.replace("\\\n", " ").splitlines():
        words = shlex.split(command, comments=True)
        if words and not command.startswith("python3 -m venv"):
            assert words[0] == "mirrordp", f"cannot run {command!r}: mark the block as not run"
            assert cli.main(words[1:]) == 0, command


# Rows beyond the public range are part of what the page on frames shows.
@pytest.mark.filterwarnings("ignore:.*beyond the public range")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = page.read_text(encoding="utf-8")
    needs_opacus = "import torch" in text and "MIRRORDP_REQUIRE_OPACUS" not in os.environ
    if needs_opacus and importlib.util.find_spec("opacus") is None:
        # CI sets the variable, and the page fails there without it.
        pytest.skip("Opacus is an extra that is not installed (mirrordp[opacus]); CI runs the page")
    if page.name == "README.md":
        # The README's commands take any tables; these are the ones that its page makes.
        tables = (ROOT / "docs" / "two-csv-files.md").read_text(encoding="utf-8")
        exec(blocks(tables)[0][2], {})
    namespace = {"__name__": "docs"}
    for line, kind, code, is_marked in blocks(text):
        if is_marked or kind == "":
            continue
        if kind == "python":
            with warnings.catch_warnings():
                # What a page shows must work as it says.
                warnings.filterwarnings("error", message=".*did not converge")
                run_python(code, page.name, line, namespace)
        else:
            assert kind == "bash", f"{page.name}:{line}: write python, bash or nothing, not {kind}"
            run_shell(code)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_few_blocks_are_not_run(page):
    found = blocks(page.read_text(encoding="utf-8"))
    assert sum(is_marked for *_, is_marked in found) <= MAY_MARK.get(page.name, 0)
    # A block without a language is a drawing, not code that escapes the test.
    plain = [code for _, kind, code, is_marked in found if kind == "" and not is_marked]
    assert not any(re.search(r"^(mirrordp|import|from|python|pip|\$) ", c, re.M) for c in plain)
    text = page.read_text(encoding="utf-8")
    assert text.count("\n```") % 2 == 0
    # Nor is an indented block, which Markdown shows as code too; formulas are.
    unfenced = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    escaped = r"^\n    (mirrordp|import|from|python|pip|assert|\$|\w+ = [\w.]+\() ?"
    assert re.findall(escaped, unfenced, re.M) == []


def test_a_broken_block_is_noticed(tmp_path):
    with pytest.raises(NameError):
        run_python("undefined_name\n", "page.md", 3, {})
    with pytest.raises(AssertionError):
        run_shell("mirrordp account --nonsense")
    with pytest.raises(AssertionError, match="mark the block"):
        run_shell("rm -r folder")


def test_marks_need_a_reason():
    marked = "*Not run in CI: needs PyTorch and Opacus.*\n\n```python\nimport torch\n```\n"
    assert blocks(marked) == [(4, "python", "import torch\n", True)]
    assert not blocks(marked.replace(": needs PyTorch and Opacus.", ""))[0][3]


def test_the_tests_that_catch_sabotage_exist():
    page = (ROOT / "docs" / "auditing.md").read_text(encoding="utf-8")
    named = re.findall(r"`(test_\w+\.py)((?:::\w+)+)", page)
    assert len(named) > 10
    for file, names in named:
        text = (ROOT / "tests" / file).read_text(encoding="utf-8")
        for name in names.split("::")[1:]:
            # A name may be cut short ("test_types_refuse_...").
            assert re.search(rf"^\s*(def|class) {name}", text, re.M), (file, name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_exist(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", text)
    assert [link for link in links if not (page.parent / link).exists()] == []


def anchors(page):
    """Those of a page's headings, where GitHub and the site agree on them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    slugs = set()
    for heading in re.findall(r"^#+ (.+)$", text, re.M):
        slug = re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).strip().replace(" ", "-")
        # The site drops letters that are not ASCII, GitHub keeps them.
        if slug.isascii():
            slugs.add(slug)
    return slugs


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_anchors_exist(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", text):
        other = page.parent / target if target else page
        assert anchor in anchors(other), (target, anchor)


GLOSSARY = (
    *("epsilon", "delta", "pld", "rdp", "adjacency", "add-remove", "zero-out", "replace"),
    *("charged", "card", "cold", "warm", "alpha", "psi", "canary", "clip-norm"),
    *("noise-multiplier", "user-level", "ledger", "budget"),
)


def test_terms_are_explained_and_linked():
    glossary = ROOT / "docs" / "glossary.md"
    assert set(GLOSSARY) <= anchors(glossary)
    others = [page for page in PAGES[1:] if page != glossary]
    texts = {page.name: page.read_text(encoding="utf-8") for page in others}
    assert [name for name, text in texts.items() if "](glossary.md#" not in text] == []
    linked = {a for text in texts.values() for a in re.findall(r"\(glossary\.md#([\w-]+)\)", text)}
    assert set(GLOSSARY) - linked == set()


def test_every_page_is_in_the_navigation():
    listed = re.findall(r"^ +- (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert sorted(listed) == sorted(page.name for page in PAGES[1:])


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 900
