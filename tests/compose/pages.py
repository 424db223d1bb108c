"""The commands of a page of the deploy guide, as they stand there."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.unit.deploy.description import ROOT

BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


class Page:
    """A page of ``docs/``, by its headings."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self.parts = parts_of(path.read_text())

    def blocks(self, heading: str, language: str) -> list[str]:
        """Return the fenced blocks of a language under a heading, without those of the headings below it."""
        return [dedented(text) for name, text in BLOCK.findall(self.parts[heading]) if name == language]

    def script(self, heading: str, block: int, ours: Mapping[str, str]) -> str:
        """Return a block of shell commands under a heading, with each of these texts that it has replaced."""
        text = self.blocks(heading, "sh")[block]
        for theirs, replacement in ours.items():
            text = text.replace(theirs, replacement)
        return text

    def scripts(self) -> Iterator[tuple[str, str, int]]:
        """Yield page, heading and number of each block of shell commands."""
        for heading in self.parts:
            for number in range(len(self.blocks(heading, "sh"))):
                yield self.name, heading, number


def parts_of(text: str) -> dict[str, str]:
    """Return heading to text. What looks like a heading in a block is a comment of the shell."""
    hidden = BLOCK.sub(lambda block: "·" * len(block[0]), text)
    headings = list(HEADING.finditer(hidden))
    ends = [heading.start() for heading in headings[1:]] + [len(text)]
    return {heading[1]: text[heading.end() : end] for heading, end in zip(headings, ends, strict=True)}


def dedented(text: str) -> str:
    """Return a block without the indentation of the list that it stands in."""
    lines = text.splitlines()
    indent = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    return "".join(f"{line[indent:]}\n" for line in lines)


ONE_BOX = Page(ROOT / "docs/deploy/one-box.md")
COMPOSE = Page(ROOT / "docs/deploy/compose.md")
OBSERVABILITY = Page(ROOT / "docs/how-to/observability.md")
