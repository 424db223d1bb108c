"""MkDocs hooks: examples/ become pages, links that leave the site become paths, each page's Markdown is published."""

import logging
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation, Section
from mkdocs.structure.pages import Page

log = logging.getLogger("mkdocs.hooks.spillway")

FENCES: Final = re.compile(r"(^ *```.*?^ *```)", re.MULTILINE | re.DOTALL)
LINK: Final = re.compile(r"\[([^\]]*)\]\((?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?\)")
NUMBERED: Final = re.compile(r"\d+\. ")
ROOT: Final = Path(__file__).resolve().parents[2]

_pages: dict[str, Page] = {}
_navigation: list[Navigation] = []


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of examples/, which lie beside docs/."""
    _pages.clear()
    _navigation.clear()
    for path in sorted(ROOT.glob("examples/**/README.md")):
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> Navigation:  # noqa: ARG001  # MkDocs passes them by name
    """Keep the navigation for llms.txt."""
    _navigation.append(nav)
    return nav


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001  # by name
    """Replace links to files outside the site by their paths in the repository, and links to folders by their pages."""
    folder = posixpath.dirname(page.file.src_uri)
    in_repository = folder if folder.startswith("examples") else posixpath.join("docs", folder)

    def replace(match: re.Match[str]) -> str:
        label, target, anchor = match[1], match[2], match[3] or ""
        name = posixpath.normpath(posixpath.join(in_repository, target))
        if not (ROOT / name).exists():
            log.warning("%s: %s does not exist", page.file.src_uri, target)
        for on_site in (name.removeprefix("docs/"), f"{name.removeprefix('docs/')}/README.md"):
            if name.startswith(("docs/", "examples")) and files.get_file_from_path(on_site):
                return f"[{label}]({posixpath.relpath(on_site, folder or '.')}{anchor})"
        return f"`{name}`" if label.strip("`") in {name, posixpath.basename(name)} else f"{label} (`{name}`)"

    page.meta["source"] = markdown
    parts = FENCES.split(_indented(markdown))  # every second part is code
    parts[::2] = [LINK.sub(replace, part) for part in parts[::2]]
    _pages[page.file.src_uri] = page
    return "".join(parts)


def _indented(markdown: str) -> str:
    """Return the text with blocks of numbered items indented by four columns, as Python-Markdown wants; not three."""
    lines, in_item = [], False
    for line in markdown.splitlines():
        if NUMBERED.match(line):
            in_item = True
        elif line.startswith("   ") and in_item:
            line = f" {line}"  # noqa: PLW2901
        elif line:
            in_item = False
        lines.append(line)
    return "\n".join(lines)


def on_post_build(config: MkDocsConfig) -> None:
    """Write llms.txt (https://llmstxt.org) and, beside each page, its Markdown."""
    site = Path(config.site_dir)
    for page in _pages.values():
        path = site / _markdown_path(page)
        path.write_text(page.meta["source"])
    lines = [f"# {config.site_name}", "", f"> {config.site_description}"]
    for section in _navigation[-1].items:
        lines += ["", f"## {section.title}", ""] if isinstance(section, Section) else [""]
        lines += [f"- [{page.title}]({_markdown_path(page)}){_summary(page)}" for page in _pages_of(section)]
    (site / "llms.txt").write_text("\n".join(lines) + "\n")


def _pages_of(item: Any) -> Iterator[Page]:  # noqa: ANN401  # an item of the navigation
    if isinstance(item, Page):
        yield item
    for child in getattr(item, "children", None) or ():
        yield from _pages_of(child)


def _markdown_path(page: Page) -> str:
    return page.file.dest_uri.removesuffix(".html") + ".md"


def _summary(page: Page) -> str:
    """Return the first sentence of a page after a colon, without marks and links; nothing if it begins with code."""
    blocks = (block for block in page.meta["source"].split("\n\n") if re.match(r"(?!```)[A-Z`*\[]", block.lstrip()))
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(next(blocks, "").split())).replace("*", "")
    sentence = re.split(r"(?<=[.?])\s", text)[0].rstrip(":")
    return f": {sentence}" if sentence else ""
