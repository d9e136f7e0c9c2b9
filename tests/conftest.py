"""What all tests share: the devices there are, and a run that proves nothing fails."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

# Interpreted kernels cannot be compiled in the same process: each kind has its own run.
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
# What somebody tuned on this machine is no part of the tests.
os.environ["FUSED_MARKOV_TUNED"] = "0"
collect_ignore = [] if INTERPRETING else ["interpret"]


def pytest_report_header() -> list[str]:
    """The versions that a log must tell."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    threads = torch.get_num_threads()
    return [f"torch {torch.__version__}, triton {_version('triton')}, {threads} threads, {gpu}"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no GPU here"))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A run in which no test passed is a failure, whatever was skipped and why."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or session.config.option.collectonly:
        return
    if not reporter.stats.get("passed") and session.exitstatus == pytest.ExitCode.OK:
        reporter.write_line("")
        reporter.write_line("no test passed: the run counts as failed", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Every kind of device, those that are not there skipped."""
    return str(request.param)


@pytest.fixture(scope="session")
def repository() -> Path:
    return Path(__file__).parent.parent


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
