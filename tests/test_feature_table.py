"""docs/features.md: every cell of its table names tests that are there, for the engine it says."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TEST = re.compile(r"`([\w/]+\.py)::(\w+)(?:\[([^`]*)\])?`")
REASON = re.compile(r"\w+( [\w,]+){3,}")  # some words


def table_of(text: str) -> dict[tuple[str, str], str]:
    """Cells of a page's first table by feature and engine."""
    after = itertools.dropwhile(lambda line: not line.startswith("|"), text.splitlines())
    lines = list(itertools.takewhile(lambda line: line.startswith("|"), after))
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    (_, *engines), _, *rows = cells
    assert all(len(row) == len(engines) + 1 for row in rows)
    return {
        (row[0], engine): cell
        for row in rows
        for engine, cell in zip(engines, row[1:], strict=True)
    }


def wrong_cells(table: dict[tuple[str, str], str], tests: set[str], engines: set[str]) -> list[str]:
    """What is wrong with a table beside the ids of the tests that there are."""
    found = []
    for (feature, engine), cell in table.items():
        named = TEST.findall(cell)
        if not named and not REASON.search(cell):
            found.append(f"{feature}, {engine}: neither a test nor a reason")
        if cell.count("::") != len(named):
            found.append(f"{feature}, {engine}: not all are tests' names: {cell}")
        for file, function, parameter in named:
            ids = [i for i in tests if i == f"{file}::{function}"]
            ids += [i for i in tests if i.startswith(f"{file}::{function}[")]
            ids = [i for i in ids if parameter in i.partition("[")[2]]
            # Where a test is run for several engines, it must be for this one.
            mine = [i for i in ids if not (of := engines & set(parts(i))) or engine in of]
            if not mine:
                found.append(f"{feature}, {engine}: no test {file}::{function}[{parameter}]")
    return found


def parts(test: str) -> list[str]:
    """The parameters of a test's id, as far as dashes tell."""
    return test.partition("[")[2].rstrip("]").split("-")


def collected(tests: Path, files: set[str]) -> set[str]:
    """Ids of the tests in ``files``, relative to the folder ``tests``; nothing is run."""
    runs = []
    for interpret in (False, True):
        some = sorted(f for f in files if f.startswith("interpret/") == interpret)
        environment = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
        environment |= {"TRITON_INTERPRET": "1"} if interpret else {}
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
        runs.append(
            subprocess.Popen(
                [*command, *some],
                cwd=tests,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    found: set[str] = set()
    for run in runs:
        out, _ = run.communicate()
        assert run.returncode == 0, out
        found |= {line.removeprefix("tests/") for line in out.splitlines() if "::" in line}
    return found


def test_every_cell_names_tests_that_are_there(repository: Path) -> None:
    table = table_of((repository / "docs" / "features.md").read_text())
    engines = {engine for _, engine in table}
    assert engines == {"reference", "cpu", "per_step", "one_pass"}
    assert len(table) > 150
    files = {file for cell in table.values() for file, _, _ in TEST.findall(cell)}
    assert wrong_cells(table, collected(repository / "tests", files), engines) == []


TABLE = """
| feature | cpu | per_step |
|---|---|---|
| bans | `test_a.py::test_bans[plain]` | {} |
"""
HERE = {
    "test_a.py::test_bans[plain-cpu]",
    "test_a.py::test_bans[plain-per_step]",
    "test_a.py::test_b",
}


@pytest.mark.parametrize(
    ("cell", "wrong"),
    [
        ("`test_a.py::test_bans[plain]`", ""),
        ("`test_a.py::test_b`", ""),
        ("It never looks at such a thing", ""),
        ("", "neither a test nor a reason"),
        ("–", "neither a test nor a reason"),
        ("`test_a.py::test_bams[plain]`", "no test"),
        ("`test_a.py::test_ban`", "no test"),
        ("`test_a.py::test_bans[plane]`", "no test"),
        ("`test_a.py::test_bans[plain-cpu]`", "no test"),
        ("`test_a.py::test_b`<br>`test_a::test_b`", "not all are tests' names"),
    ],
)
def test_a_wrong_cell_is_found(cell: str, wrong: str) -> None:
    found = wrong_cells(table_of(TABLE.format(cell)), HERE, {"cpu", "per_step"})
    assert len(found) == bool(wrong)
    assert all(wrong in text for text in found)
