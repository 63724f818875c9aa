"""Hooks of the documentation build: the order of the pages, and a reference page for every module.

Pages that are not in `ORDER` follow by name, and modules are found by looking, so that what is
added later appears without a change here.
"""

import re
from pathlib import Path

from mkdocs.structure.files import File

PACKAGE = Path(__file__).parent.parent / "mirrordp"
ORDER = (
    "index.md",
    "two-csv-files.md",
    "networks.md",
    "choosing.md",
    "protection.md",
    "sharp-edges.md",
    "reports.md",
    "migrating.md",
    "logging.md",
    "mirror-maps.md",
    "overview.md",
    "theory.md",
)
# How the command line is used is said by its help; the rest has its page elsewhere.
NOT_REFERENCE = {"cli", "demo", "page", "charts"}


def on_files(files, config):
    """Adds the reference and sets the navigation."""
    modules = sorted(
        path.stem
        for path in PACKAGE.iterdir()
        if (path.suffix == ".py" or (path / "__init__.py").exists())
        and not path.stem.startswith("_")
        and path.stem not in NOT_REFERENCE
    )
    # This package holds nothing itself: its modules are what one looks for.
    modules.remove("integrations")
    bridges = sorted((PACKAGE / "integrations").glob("[!_]*.py"))
    modules += [f"integrations.{path.stem}" for path in bridges]
    for name in modules:
        content = f"# mirrordp.{name}\n\n::: mirrordp.{name}\n"
        files.append(File.generated(config, f"api/{name}.md", content=content))
    pages = [page.src_uri for page in files.documentation_pages()]
    written = [uri for uri in pages if not uri.startswith("api/")]
    known = [uri for uri in ORDER if uri in written]
    later = sorted(set(written) - set(known))
    config.nav = [
        {"Guide": [*known, *later]},
        {"API reference": [{name: f"api/{name}.md"} for name in modules]},
    ]
    return files


def on_page_markdown(markdown, page, config, files):
    """Lets pages link to files of the repository that are not part of the site, by naming them."""
    del page, config, files
    # [text](../path) becomes text (path): true in the repository and on the site.
    return re.sub(r"\[([^\]]+)\]\(\.\./([^)#]+)\)", r"\1 (`\2`)", markdown)
