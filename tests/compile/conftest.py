"""The rest of the compile matrix runs on demand: `pytest -m slow tests/compile`."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "slow" in config.option.markexpr:
        return
    here = Path(__file__).parent
    slow = [i for i in items if here in i.path.parents and i.get_closest_marker("slow")]
    items[:] = [i for i in items if i not in slow]
    config.hook.pytest_deselected(items=slow)
