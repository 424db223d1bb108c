"""Pages of docs/ say what the code says: configuration, commands, operations, metrics, events."""

import re
from pathlib import Path

import pytest

from ledger.webhooks.events import EVENT_TYPES
from scripts.reference.configuration import meanings_without_key
from scripts.reference.pages import DOCS, generated

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return generated()


@pytest.mark.parametrize(
    "name", ["adr/README.md", "reference/cli.md", "reference/configuration.md", "reference/http.md"]
)
def test_generated_pages_are_up_to_date(name: str, pages: dict[str, str]) -> None:
    assert (DOCS / name).read_text() == pages[name], "run: make reference"


def test_every_generated_page_is_checked(pages: dict[str, str]) -> None:
    assert len(pages) == 4


def test_meanings_are_of_keys_that_exist() -> None:
    assert meanings_without_key() == []


def test_every_metric_is_in_the_reference() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "gateway").rglob("*.py"))
    names = set(re.findall(r'"(spillway_[a-z_]+)"', sources))
    page = (DOCS / "reference/metrics.md").read_text()
    assert names
    assert sorted(name for name in names if f"`{name}" not in page) == []


def test_every_event_is_in_the_page_of_webhooks() -> None:
    page = (DOCS / "how-to/webhooks.md").read_text()
    assert [name for name in EVENT_TYPES if f"`{name}`" not in page] == []
