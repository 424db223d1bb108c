"""Texts are plain American English: words and phrases that read as translated, or are British, do not come back.

Read are comments, docstrings and texts of the product's Python, its templates, the docs, and what is deployed. Names in
code are not texts; nor is what stands in backticks. "cancelled" and "organisation" are names in the API.
"""

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.error_codes import ABOUT
from tests.reference.source_texts import ROOTS
from tests.unit.house.test_tidy import ROOT, tracked_files

pytestmark = pytest.mark.slow

WORDS = (
    # pronouns without a noun
    r"(nobody|somebody|whoever|whatever|whomever)('s)?", r"belongs? to whom", r"what (it|he|she|they) (has|have)",
    # verbs
    r"told", r"(goes|gone|going|went) on", r"go on (from|with|to|until|without|elsewhere|there|here)",
    r"(is|are|was|were|been|being) made", r"(gives?|gave|given|giving) way", r"(takes?|taken|taking|took) up",
    r"(is|are) heeded", r"(may|can) be asked for", r"(stands?|stood) in", r"(knows?|known) of",
    # phrases
    r"any more", r"lately", r"of (its|their|his|our|one's) own", r"of a kind", r"dear", r"the time before",
    r"by way of", r"as ever", r"whose turn", r"for want of", r"house('s)?",
    # British spelling
    r"\w*(behaviour|colour|favour|honour|neighbour|labour|rumour)\w*",
    r"\w*(optimis|normalis|serialis|initialis|quantis|utilis|synchronis|customis)(?!m|t)\w*",
    r"\w*(recognis|authoris|summaris|prioritis|minimis|maximis)(?!m|t)\w*",
    r"(signall|labell|modell|travell)(ed|ing)", r"whilst", r"amongst", r"catalogues?", r"licences?", r"grey",
)  # fmt: skip
PATTERN = re.compile(rf"\b(?<![/.$-])(?:{'|'.join(WORDS)})(?![\w/(=-]| = |\.\w)", re.IGNORECASE)
LOWER = re.compile(PATTERN.pattern)  # for a text in lower case: three times as fast

SUFFIXES = {".html", ".md", ".yml", ".yaml", ".toml", ".tf", ".conf", ".sh", ".json", ".js", ".css", ".txt", ".tmpl"}
READ = (*ROOTS, "docs", "deploy", "scripts", "README.md", "CONTRIBUTING.md", "SECURITY.md", "Makefile",
        "docker-compose.yml")  # fmt: skip
HISTORY = ("docs/adr/",)  # written once
OTHERS = (  # texts of other people, and what models learn from
    "gateway/documentation/static/", "console/dashboard/static/vendor/", "models/", "deploy/helm/spillway/charts/",
)  # fmt: skip
CODE_SPAN = re.compile(r"``.+?``|`[^`\n]+`")
FENCE = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)


def texts() -> list[Path]:
    """The files whose texts are read."""
    found = []
    for path in tracked_files():
        name = path.relative_to(ROOT).as_posix()
        if name.partition("/")[0] in READ and not name.startswith((*HISTORY, *OTHERS)):
            found += [path] if path.suffix in {".py", *SUFFIXES} or path.name == "Makefile" else []
    return found


def hits_of(path: Path, text: str) -> Iterator[str]:
    """Listed words of a file, each with its place."""
    if not LOWER.search(text.lower()):  # nearly all files, once the words are gone
        return
    pieces = python_texts(text) if path.suffix == ".py" else iter([(1, text)])
    for line, piece in pieces:
        bare = CODE_SPAN.sub(blank, FENCE.sub(blank, piece) if path.suffix == ".md" else piece)
        for found in PATTERN.finditer(bare):
            if not is_name(found):
                yield f"{path.relative_to(ROOT)}:{line + bare.count(chr(10), 0, found.start())}: {found[0]}"


def is_name(found: re.Match[str]) -> bool:
    """Whether it is a name in code, or a value in quotes."""
    before, after = found.string[found.start() - 1 : found.start()], found.string[found.end() : found.end() + 1]
    return "_" in found[0] or bool(re.search("[a-z][A-Z]", found[0])) or (before == after and before in {"'", '"'})


def blank(found: re.Match[str]) -> str:
    """The lines of a piece, empty."""
    return "\n" * found[0].count("\n")


def python_texts(source: str) -> Iterator[tuple[int, str]]:
    """Comments, docstrings, and strings of several words, with their lines."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        is_prose = token.type == tokenize.STRING and " " in token.string.strip("\"'fr ")
        if is_prose or token.type == tokenize.COMMENT:
            yield token.start[0], token.string


@pytest.mark.parametrize(
    ("suffix", "text", "words"),
    [
        (".py", "told = 1  # nobody is told\n", ["nobody", "told"]),
        (".py", 'STATE = "modelled"\nfail("it was modelled")\n', ["modelled"]),
        (".py", '"""Read `told` in /house/x and house.md."""\n', []),
        (".md", "Whoever\nreads\n\n```\nnobody\n```\n`somebody`\n", ["Whoever"]),
    ],
)
def test_words_are_found_in_texts_alone(suffix: str, text: str, words: list[str]) -> None:
    found = hits_of(ROOT / f"x{suffix}", text)
    assert [hit.rpartition(": ")[2] for hit in found] == words


def test_texts_have_none_of_the_listed_words() -> None:
    hits = [hit for path in texts() for hit in hits_of(path, path.read_text())]
    assert hits == []


def test_causes_and_advice_have_none_of_them() -> None:
    advice = {code: CODE_SPAN.sub("", f"{about.cause} {about.advice}") for code, about in ABOUT.items()}
    assert [text for text in advice.values() if PATTERN.search(text)] == []
