"""Small rules that keep the house in order (after TigerBeetle's tidy test)."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FORBIDDEN = re.compile(r"\b(FIXME|XXX|HACK)\b")


def tracked_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def source_files() -> list[Path]:
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"benchmarks", "tests"}
    return [path for path in tracked_files() if path.suffix == ".py" and path.relative_to(ROOT).parts[0] in packages]


def test_no_stray_markers() -> None:
    this = Path(__file__).resolve()
    texts = {
        path: path.read_text() for path in tracked_files() if path.suffix in {".py", ".sh", ".md"} and path != this
    }
    assert [str(path) for path, text in texts.items() if FORBIDDEN.search(text)] == []


def test_no_text_installs_another_projects_package() -> None:
    """On PyPI, ``spillway`` is not ours (``protocol/distribution.py``)."""
    others = re.compile(r"install\s+(?:-\S+\s+)*['\"]?spillway(?![-\w/.])")
    assert others.search("pip install 'spillway[worker]'")
    assert not others.search("pip install spillway-gateway")
    this = Path(__file__).resolve()
    texts = {".py", ".md", ".sh", ".toml", ".yml", ".yaml", ".Dockerfile", ".html"}
    told = [path for path in tracked_files() if path.suffix in texts and path != this]
    assert [str(path) for path in told if others.search(path.read_text())] == []


def test_no_drawer_for_everything() -> None:
    drawers = {"utils.py", "helpers.py", "common.py", "misc.py"}
    assert [str(path) for path in source_files() if path.name in drawers] == []


def test_who_decodes_expects_all_that_a_decoder_raises() -> None:
    """msgspec raises RecursionError and UnicodeDecodeError too: see ``protocol.wire.UNDECODABLE``."""
    partial = re.compile(r"except (?!.*RecursionError).*msgspec\.(MsgspecError|DecodeError)")
    assert [str(path) for path in source_files() if partial.search(path.read_text())] == []


def structs_decoded_late(text: str) -> list[str]:
    """Return the calls of ``msgspec.….decode`` that are told a class of their own as the type."""
    plain = {"Any", "Literal", "Raw", "msgspec"}
    found = []
    for call in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)):
        if re.fullmatch(r"msgspec\.(json|msgpack)\.decode", ast.unparse(call.func)):
            types = [keyword.value for keyword in call.keywords if keyword.arg == "type"]
            names = {node.id for kind in types for node in ast.walk(kind) if isinstance(node, ast.Name)}
            found += [ast.unparse(call)] * any(name.lstrip("_")[0].isupper() and name not in plain for name in names)
    return found


@pytest.mark.slow
def test_structs_are_decoded_by_decoders_made_at_import() -> None:
    """Two threads that decode a class for the first time may end the process (SIGSEGV, msgspec 0.22).

    One of them meets the other's half-made description of the fields. A decoder at the module's level makes it earlier.
    """
    assert structs_decoded_late("msgspec.json.decode(x, type=list[_Part])")
    assert not structs_decoded_late("msgspec.json.decode(x, type=dict[str, msgspec.Raw])")
    late = {path.name: structs_decoded_late(path.read_text()) for path in source_files()}
    assert {name: calls for name, calls in late.items() if calls} == {}


def test_timings_that_tests_shorten_are_settings() -> None:
    """A patched constant is one that no test of another kind, and no user, can set."""
    patched = re.compile(r"setattr\([^()]*\b[A-Z_]+_M?S\"")
    tests = [path for path in tracked_files() if path.suffix == ".py" and path.is_relative_to(ROOT / "tests")]
    assert [str(path) for path in tests if patched.search(path.read_text())] == []


DOCS = [
    path
    for path in tracked_files()
    if path.suffix == ".md" and path.relative_to(ROOT).parts[0] in {"docs", "examples", "README.md"}
]


@pytest.mark.parametrize("doc", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
def test_paths_quoted_in_docs_exist(doc: Path) -> None:
    """A path in backticks, such as `gateway/api/events.py`, must be there; so must the target of a relative link."""
    text = doc.read_text()
    quoted = re.findall(r"`([a-z_]+/[\w./-]*\w\.(?:py|md|sh|toml|yml))`", text)
    missing = [name for name in quoted if not (ROOT / name).exists()]
    links = [link.split("#")[0] for link in re.findall(r"\]\((?!https?:|#|mailto:)([^)\s]+)\)", text)]
    missing += [link for link in links if link and not (doc.parent / link).exists()]
    assert missing == []
