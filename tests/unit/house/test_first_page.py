"""The first page is read in five minutes, and shows what it speaks of."""

import re

from tests.unit.house.test_tidy import DOCS, ROOT

README = ROOT / "README.md"
README_LINES_LIMIT = 110  # a screen and a half
README_COLUMNS_LIMIT = 120
IMAGE = re.compile(
    r"!\[[^\]]*\]\((?!https?:)([^)\s]+)\)"
    r"|^\[[^\]]+\]: (?!https?:)(\S+\.png)$"
    r"|<(?:img|source)[^>]*\ssrc(?:set)?=\"(?!https?:)([^\"\s]+)\"",
    re.MULTILINE,
)


def test_it_is_short() -> None:
    lines = README.read_text().splitlines()
    assert len(lines) <= README_LINES_LIMIT
    assert [line for line in lines if len(line) > README_COLUMNS_LIMIT] == []


def test_its_references_are_used_and_there() -> None:
    text = README.read_text()
    used = set(re.findall(r"\]\[(\w+)\]", text))
    targets = dict(re.findall(r"^\[(\w+)\]: (\S+)$", text, re.MULTILINE))
    assert used == set(targets)
    assert [target for target in targets.values() if not (ROOT / target).exists()] == []


def test_it_shows_the_path_and_a_rescued_stream() -> None:
    images = {"".join(found) for found in IMAGE.findall(README.read_text())}
    assert {"docs/images/path.svg", "docs/images/dashboard-request.png"} <= images


def test_images_exist() -> None:
    shown = {doc.parent / "".join(found) for doc in DOCS for found in IMAGE.findall(doc.read_text())}
    assert [str(image) for image in sorted(shown) if not image.is_file()] == []


def test_its_targets_of_make_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z][a-z-]*)", README.read_text())) <= targets


def test_every_reference_of_the_comparison_is_used_and_there() -> None:
    text = (ROOT / "docs/explanation/comparison.md").read_text()
    assert set(re.findall(r"\]\[(\w+)\]", text)) == set(re.findall(r"^\[(\w+)\]: https://", text, re.MULTILINE))
