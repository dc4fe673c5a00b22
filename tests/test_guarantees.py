"""Each line of GUARANTEES.md names tests that exist."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PAGE = (TESTS.parent / "GUARANTEES.md").read_text()
LINES = [line for line in PAGE.splitlines() if line.startswith("| ") and "held by" not in line]


@pytest.mark.parametrize("line", LINES, ids=lambda line: line[2:40])
def test_a_guarantee_is_held_by_tests(line):
    _, promise, held_by, _ = line.split("|")
    assert promise.strip()
    names = re.findall(r"`(test_\w+\.py)::(test_\w+)`", held_by)
    assert names
    for file, name in names:
        assert name in functions(TESTS / file), f"{file}::{name}"


def functions(path):
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}
