"""The table of requirements names tests that exist, for blocks without and with a camera branch."""

from __future__ import annotations

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent
FOLDERS = {
    "integration": HERE,
    **{name: HERE.parent / "packages" / f"gdn-{name}" / "tests" for name in ("kernels", "cp", "models")},
}
ROW = re.compile(r"^\| (\d+) \| (.*?) \| (.*?) \| (.*?) \|$", re.MULTILINE)


def missing(table: str) -> list[str]:
    """Return the tests that the table names and nobody wrote."""
    names = re.findall(r"`(\w+)::([\w/]+)::(\w+)`", table)
    found = []
    for folder, file, test in names:
        path = FOLDERS[folder] / f"{file}.py"
        tree = ast.parse(path.read_text()) if path.exists() else ast.Module([], [])
        if test not in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}:
            found.append(f"{folder}::{file}::{test}")
    return found


def test_every_row_names_tests_that_exist() -> None:
    table = (HERE / "REQUIREMENTS.md").read_text()
    rows = ROW.findall(table)
    assert [int(row[0]) for row in rows] == list(range(1, 28))
    without = [row[0] for row in rows for cell in row[2:] if "::" not in cell]
    assert without == ["9", "11", "12", "18", "27", "27"], "a cell without a test says why in words"
    assert missing(table) == []


def test_a_test_that_nobody_wrote_is_found() -> None:
    known = "`integration::test_requirements::test_every_row_names_tests_that_exist`"
    assert missing(known) == []
    assert missing(known.replace("exist", "exit") + "`models::test_nothing::test_x`") == [
        "integration::test_requirements::test_every_row_names_tests_that_exit",
        "models::test_nothing::test_x",
    ]
