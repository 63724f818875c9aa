"""Hooks of the documentation build: the reference, its doctests, the version, and links.

The order of the written pages is `nav` in mkdocs.yml. The reference follows the wings of the
package: `REFERENCE` names them in the order of the picture in the overview, and the modules of a
wing are found by looking, so that a module that is added later appears without a change here.
"""

import ast
import logging
import os
import re
import tomllib
from pathlib import Path

from markdown import Extension
from markdown.preprocessors import Preprocessor
from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "mirrordp"
# Folders are wings with a page for each public module; the others are single modules. The command
# line is documented by `mirrordp --help`, and `demo` by the overview.
REFERENCE = (
    "data",
    "privacy",
    "mirror",
    "updates",
    "spending",
    "training",
    "tuning",
    "linear",
    "tables",
    "report",
    "auditing",
    "integrations",
    "types",
)
NOT_REFERENCE = {"cli", "demo"}

log = logging.getLogger("mkdocs.hooks.mirrordp")


def on_config(config):
    """Shows the version: in the selector of a site that mike deploys, else in the site's name.

    `mike deploy 0.3 latest` builds the site of one version and adds it to the others on a branch;
    it sets MIKE_DOCS_VERSION for the build. The selector asks its own site for `versions.json`,
    which only such a site has, so a plain build leaves the selector out.
    """
    if "MIKE_DOCS_VERSION" not in os.environ:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        config.site_name = f"{config.site_name} {project['version']}"
        config.extra.pop("version", None)
    config.markdown_extensions.append(_Doctests())
    return config


def on_files(files, config):
    """Adds the reference, after the written pages."""
    defined = _definitions()
    pages, entries = {"api/index.md": _opening(defined)}, [{"Names and wings": "api/index.md"}]
    for name in REFERENCE:
        if (PACKAGE / f"{name}.py").exists():
            pages[f"api/{name}.md"] = f"# mirrordp.{name}\n\n::: mirrordp.{name}\n"
            entries.append({name: f"api/{name}.md"})
        elif (PACKAGE / name / "__init__.py").exists():
            modules = _modules(PACKAGE / name)
            pages[f"api/{name}/index.md"] = _wing(name, modules, defined)
            for module in modules:
                pages[f"api/{name}/{module}.md"] = (
                    f"# mirrordp.{name}.{module}\n\n::: mirrordp.{name}.{module}\n"
                )
            inner = [{module: f"api/{name}/{module}.md"} for module in modules]
            entries.append({name: [{f"mirrordp.{name}": f"api/{name}/index.md"}, *inner]})
        else:
            log.warning("docs/hooks.py names mirrordp.%s, which does not exist", name)
    for name in sorted({*_modules(PACKAGE)} - {*REFERENCE} - NOT_REFERENCE):
        log.warning("mirrordp.%s is not in the reference; add it to docs/hooks.py", name)
    for path, content in pages.items():
        files.append(File.generated(config, path, content=content))
    config.nav = [*config.nav, {"Reference": entries}]
    return files


def on_page_markdown(markdown, page, config, files):
    """Lets pages link to files of the repository that are not part of the site, by naming them."""
    del page, config, files
    # [text](../path#section) becomes text (`path`): true in the repository and on the site.
    return re.sub(r"\[([^\]]+)\]\(\.\./([^)#]+)(?:#[^)]*)?\)", _named, markdown)


def _named(link: re.Match) -> str:
    text, path = link.groups()
    return f"`{path}`" if text == path else f"{text} (`{path}`)"


class _Doctests(Extension):
    """Shows doctests as code; Markdown alone takes `>>>` for a quotation of a quotation."""

    def extendMarkdown(self, md):
        """Registers the preprocessor, ahead of that of fenced code."""
        md.preprocessors.register(_FenceDoctests(md), "fence_doctests", 40)


class _FenceDoctests(Preprocessor):
    """Puts fences around paragraphs that begin with `>>>`."""

    def run(self, lines):
        """Returns the lines with the fences."""
        found, indent, is_fenced = [], None, False
        for line in [*lines, ""]:
            if line.lstrip().startswith("```"):
                is_fenced = not is_fenced
            if indent is None and not is_fenced and line.lstrip().startswith(">>> "):
                indent = line[: len(line) - len(line.lstrip())]
                found.append(f"{indent}```pycon")
            elif indent is not None and not line.strip():
                found.append(f"{indent}```")
                indent = None
            found.append(line)
        return found[:-1]


def _modules(folder: Path) -> list[str]:
    """The public modules and packages of a package."""
    return sorted(
        path.stem
        for path in folder.iterdir()
        if (path.suffix == ".py" or (path / "__init__.py").exists())
        and not path.stem.startswith("_")
    )


def _definitions() -> set[str]:
    """The public classes and functions of the modules in the reference, with their paths."""
    found = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        is_private = any(part.startswith("_") for part in parts)
        if is_private or len(parts) < 2 or parts[1] not in REFERENCE:
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                found.add(".".join((*parts, node.name)))
    return found


def _exported(init: Path, defined: set[str]) -> str:
    """The names that a package imports under `if TYPE_CHECKING:`, linked where they can be."""
    places = {
        alias.asname or alias.name: f"{statement.module}.{alias.name}"
        for block in ast.parse(init.read_text(encoding="utf-8")).body
        if isinstance(block, ast.If)
        for statement in block.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
    return ", ".join(
        f"[`{name}`][{place}]" if place in defined else f"`{name}`"
        for name, place in sorted(places.items())
    )


def _opening(defined: set[str]) -> str:
    names = _exported(PACKAGE / "__init__.py", defined)
    wings = "\n".join(
        f"- [`mirrordp.{name}`]({name}{'' if source.suffix else '/index'}.md): {_summary(source)}"
        for name in REFERENCE
        for source in _sources(PACKAGE / name)
    )
    return (
        "# Reference\n\nThis part is generated from the docstrings of the package.\n\n"
        f"## Names at the top\n\nThese can be imported from `mirrordp` itself: {names}.\n\n"
        f"## The wings\n\nEverything else is imported from its wing.\n\n{wings}\n"
    )


def _wing(name: str, modules: list[str], defined: set[str]) -> str:
    names = _exported(PACKAGE / name / "__init__.py", defined)
    exported = f"These can be imported from `mirrordp.{name}`: {names}.\n\n" if names else ""
    listed = "\n".join(
        f"- [`mirrordp.{name}.{module}`]({module}.md): {_summary(source)}"
        for module in modules
        for source in _sources(PACKAGE / name / module)
    )
    return (
        f"# mirrordp.{name}\n\n::: mirrordp.{name}\n    options:\n      members: false\n\n"
        f"{exported}{listed}\n"
    )


def _sources(path: Path) -> list[Path]:
    """The module or package at a path without its suffix, if there is one."""
    found = [path.with_suffix(".py"), path]
    return [source for source in found if source.is_file() or (source / "__init__.py").exists()]


def _summary(source: Path) -> str:
    """The first paragraph of a module's docstring."""
    file = source if source.is_file() else source / "__init__.py"
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n\n")[0].replace("\n", " ")
