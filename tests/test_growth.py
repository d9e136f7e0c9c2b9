"""benchmarks/growth.py: what varies, what it writes."""

import importlib.util
import json
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "growth.py"


def test_writes_lines_and_a_plot_for_each_of_the_three(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("growth", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    growth = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(growth)
    out = tmp_path / "growth"
    shapes = ["--rows", "1", "2", "--steps", "2", "3", "--vocab", "200", "300", "--rank", "16"]
    assert growth.main([*shapes, "--dtype", "float32", "--device", "cpu", "--out", str(out)]) == 0
    lines = json.loads(out.with_suffix(".json").read_text())
    assert [line["rows"] for line in lines["rows"]] == [1, 2]
    assert [line["steps"] for line in lines["steps"]] == [2, 3]
    assert [line["vocab"] for line in lines["vocab"]] == [200, 300]
    assert all(line["floor_us"] > 0 for some in lines.values() for line in some)
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
