"""The planted faults (``make planted``) still fit the code."""

import ast
from pathlib import Path

import pytest

from tests.planted.faults import Fault, load_faults

ROOT = Path(__file__).resolve().parents[3]
FAULTS = load_faults()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_planted_in_its_file(fault: Fault) -> None:
    ast.parse(fault.planted(ROOT))
    assert fault.integration_tests(ROOT)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_test_that_notices_it_exists(fault: Fault) -> None:
    file, _, name = fault.test.partition("::")
    nodes = ast.walk(ast.parse((ROOT / file).read_text()))
    assert name in {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_faults_have_names_of_their_own() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
