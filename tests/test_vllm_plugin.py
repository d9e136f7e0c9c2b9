"""The vLLM plugin: the version table, the loading, and decode steps of real vLLM files.

Loading is tested on a small package that stands for vLLM. Decode steps are compared on real files:
``FUSED_MARKOV_VLLM`` names unpacked vLLM packages (the directories with vLLM's ``__init__.py``,
separated by ``os.pathsep``) and ``FUSED_MARKOV_VLLM_PYTHON`` a Python that has vLLM installed
(vllm_plugin/requirements.txt says what that takes); without them those tests are skipped.
"""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fused_markov import DraftResult
from fused_markov.integrations import vllm as plugin
from fused_markov.integrations import vllm_versions
from fused_markov.integrations.vllm_counters import POLL_STEPS, Counters

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src"
COMPARE = TESTS / "vllm_plugin" / "compare.py"

LEFT = {"watermarker", "capped top k", "fp64 base", "transform"}


# The version table


@pytest.mark.parametrize(
    ("version", "series"),
    [
        ("0.33.0", "0.33"),
        ("0.33.1", "0.33"),
        ("0.33.0+cu130", "0.33"),
        ("0.32.0.post1", "0.32"),
        ("0.25.1", "0.25"),
        ("0.34.0", None),
        ("0.24.0", None),
        ("0.3.3", None),
        ("0.33.0rc1", None),
        ("0.33.1.dev12+gabc", None),
        ("nonsense", None),
        ("", None),
    ],
)
def test_lookup(version: str, series: str | None) -> None:
    row = vllm_versions.lookup(version)
    assert (row.series if row else None) == series


def test_table_has_each_series_once() -> None:
    series = [row.series for row in vllm_versions.TABLE]
    assert len(set(series)) == len(series)


# Loading, on a package that stands for vLLM

SPECULATOR = """
def gumbel_sample({gumbel}):
    pass


class Base:
    def propose(self, num_reqs, head_hidden, dummy_run=False):
        self._sample_sequential(num_reqs, head_hidden)


class DSparkSpeculator(Base):
    def load_draft_model(self, target_model, target_attn_layer_names):
        return target_model

    def _sample_sequential(self, {parameters}):
        sample_sequential = getattr(self.model, {hook!r}, None)
        self.ran = "vllm"
"""

PLUGINS = """
loaded = False


def load_general_plugins():
    global loaded
    if loaded:
        return
    loaded = True
    from importlib.metadata import entry_points

    for entry in entry_points(group="vllm.general_plugins"):
        entry.load()()
"""

ENTRY = """[vllm.general_plugins]
fused_markov = fused_markov.integrations.vllm:register
"""


def fake_vllm(
    folder: Path,
    version: str = "0.33.0",
    parameters: str = "num_reqs, head_hidden",
    hook: str = "sample_sequential",
) -> Path:
    """A vllm package with a plugin loader and a speculator, and our entry point beside it."""
    row = vllm_versions.lookup(version) or vllm_versions.TABLE[-1]
    module = folder / Path(*vllm_versions.SPECULATOR_MODULE.split(".")).with_suffix(".py")
    module.parent.mkdir(parents=True)
    for parent in module.relative_to(folder).parents:
        if parent != Path("."):
            (folder / parent / "__init__.py").touch()
    (folder / "vllm" / "__init__.py").write_text(f"__version__ = {version!r}\n")
    (folder / "vllm" / "plugins.py").write_text(PLUGINS)
    module.write_text(
        SPECULATOR.format(gumbel=", ".join(row.gumbel), parameters=parameters, hook=hook)
    )
    entry_point(folder)
    return folder


def entry_point(folder: Path) -> None:
    """Metadata of a distribution that has our entry point, where the library is not installed."""
    info = folder / "fused_markov_entry-0.dist-info"
    info.mkdir(parents=True)
    info.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: fm-entry\nVersion: 0\n")
    info.joinpath("entry_points.txt").write_text(ENTRY)


def python(folder: Path, script: str, **environment: str) -> str:
    """Run a script with the folder and the library importable; what it wrote, logs included."""
    file = folder / "script.py"
    file.write_text(PREAMBLE + textwrap.dedent(script))
    result = subprocess.run(
        [sys.executable, str(file)],
        env={**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{SOURCE}", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


PREAMBLE = """
import logging, sys
logging.basicConfig(level=logging.INFO, format="%(message)s")
NAME = "vllm.v1.worker.gpu.spec_decode.dspark.speculator"


def speculator():
    import importlib
    return importlib.import_module(NAME).DSparkSpeculator


def wrapped(cls):
    return getattr(cls.load_draft_model, "_fused_markov", False)


"""


def test_importing_and_registering_cost_nothing_of_vllm(tmp_path: Path) -> None:
    out = python(
        fake_vllm(tmp_path),
        """
        import vllm.plugins
        vllm.plugins.load_general_plugins()
        assert not [name for name in sys.modules if name.startswith("vllm.v1")]
        assert "fused_markov.integrations.vllm_step" not in sys.modules
        import importlib.util
        assert importlib.util.find_spec(NAME) is not None  # looking is not importing
        assert wrapped(speculator())
        module = sys.modules[NAME]
        assert type(module.__spec__.loader).__name__ == "SourceFileLoader"
        assert type(module.__loader__).__name__ == "SourceFileLoader"
        assert not [f for f in sys.meta_path if type(f).__module__.startswith("fused_markov")]
        """,
    )
    assert "not installed" not in out


def test_loading_twice_wraps_once(tmp_path: Path) -> None:
    python(
        fake_vllm(tmp_path),
        """
        import vllm.plugins
        from fused_markov.integrations import vllm as plugin
        vllm.plugins.load_general_plugins()
        vllm.plugins.loaded = False
        vllm.plugins.load_general_plugins()
        plugin.register()
        cls = speculator()
        first = cls.load_draft_model
        assert wrapped(cls) and not hasattr(first.__wrapped__, "__wrapped__")
        plugin._registered = False
        plugin.register()
        plugin.install(sys.modules[NAME])
        assert cls.load_draft_model is first
        """,
    )


def test_speculator_imported_before_the_plugin(tmp_path: Path) -> None:
    python(
        fake_vllm(tmp_path),
        """
        cls = speculator()
        assert not wrapped(cls)
        import vllm.plugins
        vllm.plugins.load_general_plugins()
        assert wrapped(cls)
        """,
    )


@pytest.mark.parametrize("imported", [True, False])
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_worker_processes(tmp_path: Path, method: str, imported: bool) -> None:
    """vLLM calls its plugin loader in every worker; a forked one inherits the parent's state."""
    python(
        fake_vllm(tmp_path),
        f"""
        import multiprocessing

        def worker(queue):
            import vllm.plugins
            vllm.plugins.load_general_plugins()
            queue.put(wrapped(speculator()))

        if __name__ == "__main__":
            import vllm.plugins
            vllm.plugins.load_general_plugins()
            if {imported}:
                speculator()
            context = multiprocessing.get_context("{method}")
            queue = context.Queue()
            process = context.Process(target=worker, args=(queue,))
            process.start()
            assert queue.get(timeout=120) is True
            process.join()
            assert process.exitcode == 0
        """,
    )


RUNS_AS_BEFORE = """
import vllm.plugins
vllm.plugins.load_general_plugins()
cls = speculator()
assert not wrapped(cls)
spec = cls()
spec.model = spec.load_draft_model("model", set())
spec._sample_sequential(1, None)
assert spec.ran == "vllm"
"""


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"parameters": "num_reqs, head_hidden, extra=None"},
            "_sample_sequential has parameters (self, num_reqs, head_hidden, extra)",
        ),
        ({"hook": "something_else"}, "does not ask the draft model for sample_sequential"),
        ({"version": "0.32.0"}, "_sample_sequential asks the draft model for sample_sequential"),
        ({"version": "0.99.0"}, "vLLM 0.99.0 is not one of the versions known"),
        ({"version": "0.34.0rc1"}, "vLLM 0.34.0rc1 is not one of the versions known"),
    ],
)
def test_refuses_with_the_reason(tmp_path: Path, options: dict[str, str], reason: str) -> None:
    out = python(fake_vllm(tmp_path, **options), RUNS_AS_BEFORE)
    lines = [line for line in out.splitlines() if "fused-markov is not installed" in line]
    assert len(lines) == 1
    assert reason in lines[0]


def test_switched_off(tmp_path: Path) -> None:
    out = python(fake_vllm(tmp_path), RUNS_AS_BEFORE, FUSED_MARKOV="0")
    assert "fused-markov is not installed into vLLM: FUSED_MARKOV=0" in out


def test_without_vllm(tmp_path: Path) -> None:
    out = python(
        tmp_path,
        """
        sys.modules["vllm"] = None  # as if it could not be imported
        import importlib.metadata as metadata
        real = metadata.version

        def version(name):
            if name == "vllm":
                raise metadata.PackageNotFoundError(name)
            return real(name)

        metadata.version = version
        from fused_markov.integrations import vllm as plugin
        plugin.register()
        """,
    )
    assert "vLLM is not installed here" in out


def test_an_unknown_engine_is_refused_with_the_choices(tmp_path: Path) -> None:
    """Whatever keeps a drafter from being built is logged, and vLLM goes on."""
    out = python(
        fake_vllm(tmp_path),
        f"""
        sys.path.insert(0, {str(COMPARE.parent)!r})
        import tiny, vllm.plugins
        vllm.plugins.load_general_plugins()
        module = sys.modules[speculator().__module__]
        case = tiny.CASES[0]
        spec = tiny.make_speculator(module.DSparkSpeculator, case, 0)
        spec.model = spec.load_draft_model(tiny.make_model(case, 0), set())
        spec.propose(1, None)
        assert spec.ran == "vllm"
        """,
        FUSED_MARKOV_ENGINE="warp drive",
    )
    assert "fused-markov leaves TinyDraft to vLLM: EngineUnavailableError" in out


def test_a_draft_without_markov_head_is_left_to_vllm(tmp_path: Path) -> None:
    out = python(
        fake_vllm(tmp_path),
        """
        import vllm.plugins
        vllm.plugins.load_general_plugins()
        spec = speculator()()
        spec.model = spec.load_draft_model(object(), set())
        spec.propose(1, None)
        assert spec.ran == "vllm"
        """,
    )
    assert "fused-markov leaves object to vLLM: no Markov head" in out


def test_a_model_with_a_hook_of_its_own_keeps_it() -> None:
    """vLLM's own sample_sequential (DeepSeek-V4.1 on AMD) is asked where ours declines."""

    class Model:
        def sample_sequential(self, speculator: Any, num_reqs: int, hidden: Any) -> bool:
            asked.append(num_reqs)
            return True

    class Derived(Model):
        pass

    asked: list[int] = []
    plugin._hook_model(Model)
    hooked = Model.sample_sequential
    plugin._hook_model(Derived)  # inherits the hook
    plugin._hook_model(Model)
    assert Model.sample_sequential is hooked is Derived.sample_sequential
    drafter = SimpleNamespace(sample=lambda speculator, num_reqs, hidden: num_reqs > 1)
    speculator = SimpleNamespace(**{plugin.DRAFTER: drafter})
    assert Model().sample_sequential(speculator, 2, None)
    assert not asked
    assert Model().sample_sequential(speculator, 1, None)
    assert Model().sample_sequential(SimpleNamespace(), 7, None)
    assert asked == [1, 7]


def test_counters(caplog: pytest.LogCaptureFixture) -> None:
    """Steps count where vLLM proposes, replayed ones too; a reason is logged once."""
    counters = Counters(logging.getLogger("vllm.fused_markov"), torch.device("cpu"))
    counters.proposed()  # nothing was decided yet
    tokens = torch.zeros(1, 1, dtype=torch.int64)
    counters.took(DraftResult(tokens, tokens.bool(), "reference", torch.tensor(2)))
    for _ in range(POLL_STEPS):
        counters.proposed()
    assert counters.steps == {"": POLL_STEPS}
    assert counters.decided == {"": 1}
    assert counters.passes == 2
    for _ in range(3):
        counters.left("a reason")
        counters.proposed()
    assert counters.steps == {"": POLL_STEPS, "a reason": 3}
    assert [r.getMessage() for r in caplog.records] == [
        "fused-markov leaves steps to vLLM: a reason"
    ]


# Decode steps of real files


INTERPRETED = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}


def installed(test: Callable[..., None]) -> Callable[..., None]:
    """Marks of a test that needs a Python with vLLM."""
    test = pytest.mark.skipif(
        "FUSED_MARKOV_VLLM_PYTHON" not in os.environ,
        reason="FUSED_MARKOV_VLLM_PYTHON names no Python with vLLM",
    )(test)
    return pytest.mark.slow(pytest.mark.interpret(test))


def compare(executable: str, arguments: list[str], path: list[str]) -> dict[str, dict[str, object]]:
    """Run vllm_plugin/compare.py in a process of its own; its cases."""
    result = subprocess.run(
        [executable, str(COMPARE), *arguments],
        env={**os.environ, **INTERPRETED, "PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    lines = result.stdout.strip().splitlines()
    assert lines, result.stderr[-4000:]
    cases = json.loads(lines[-1])["cases"]
    different = {name: case["different"] for name, case in cases.items() if case["different"]}
    assert not different
    assert result.returncode == 0, result.stderr[-4000:]
    for name, case in cases.items():
        assert case["drafted"] or case["left"], f"{name} was left to vLLM without a reason"
    return dict(cases)


def packages() -> list[Path]:
    return [Path(p) for p in os.environ.get("FUSED_MARKOV_VLLM", "").split(os.pathsep) if p]


def package_version(package: Path) -> str:
    text = (package / "_version.py").read_text()
    found = re.search(r"^__version__ = version = ['\"]([^'\"]+)['\"]", text, re.M)
    assert found, f"no version in {package / '_version.py'}"
    return found[1]


@pytest.mark.slow
@pytest.mark.interpret
@pytest.mark.skipif(not packages(), reason="FUSED_MARKOV_VLLM names no unpacked vLLM")
@pytest.mark.parametrize("package", packages(), ids=str)
def test_unpacked_vllm(package: Path, tmp_path: Path) -> None:
    """Every release of the table, its own plugin loader, speculator and sampler: all drafted, and
    equal.
    """
    entry_point(tmp_path)
    version = package_version(package)
    row = vllm_versions.lookup(version)
    assert row is not None
    cases = compare(sys.executable, [str(package), version], [str(tmp_path), str(SOURCE)])
    drafted = {name for name, case in cases.items() if case["drafted"]}
    # Releases that do not ask for a transform apply none.
    assert drafted == set(cases) - (LEFT if row.transforms else LEFT - {"transform"})
    assert {"probabilistic", "fp64 noise", "greedy"} <= drafted


@installed
def test_installed_vllm(tmp_path: Path) -> None:
    """vLLM's plugin loader loads ours, and its own classes draft the same with and without it."""
    entry_point(tmp_path)
    executable = os.environ["FUSED_MARKOV_VLLM_PYTHON"]
    cases = compare(executable, ["installed"], [str(tmp_path), str(SOURCE)])
    assert {name for name, case in cases.items() if case["drafted"]} == set(cases) - LEFT


@installed
def test_tensor_parallel_ranks_agree(tmp_path: Path) -> None:
    entry_point(tmp_path)
    script = COMPARE.with_name("tensor_parallel.py")
    path = os.pathsep.join([str(tmp_path), str(SOURCE)])
    result = subprocess.run(
        [os.environ["FUSED_MARKOV_VLLM_PYTHON"], str(script)],
        env={**os.environ, **INTERPRETED, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert result.returncode == 0, result.stdout + result.stderr[-4000:]
    assert "probabilistic: equal on 2 ranks" in result.stdout
