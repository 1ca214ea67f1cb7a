"""Compiled kernels are found again only while every source they came from is the same."""

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from stepkernel.cpu import cache, isa, jit


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the kernel sources, which `source_hash` reads."""
    copy = tmp_path / "cpu"
    shutil.copytree(Path(jit.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(jit, "__file__", str(copy / "jit.py"))
    return copy


def fresh() -> str:
    return jit.source_hash.__wrapped__()


def test_an_edit_of_any_source_changes_the_hash(sources: Path) -> None:
    wanted = fresh()
    assert fresh() == wanted
    files = sorted(sources.rglob("*.py"))
    assert {"gemm.py", "attend.py", "jit.py"} <= {f.name for f in files}
    for file in files:
        text = file.read_bytes()
        file.write_bytes(text + b"\n# edited\n")
        assert fresh() != wanted, file
        file.write_bytes(text)
    assert fresh() == wanted
    (sources / "stages" / "more.py").write_text("x = 1\n")
    assert fresh() != wanted


def test_the_instruction_set_changes_the_hash(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = set()
    for choice in isa.CHOICES:
        monkeypatch.setattr(isa, "chosen", lambda choice=choice: choice)
        found.add(fresh())
    assert len(found) == len(isa.CHOICES)


def test_the_directory_carries_the_hash() -> None:
    assert jit.cache_directory().name == jit.source_hash()


def test_an_edited_helper_is_compiled_again(tmp_path: Path) -> None:
    """The real thing: a kernel that calls a function of another file, in processes of their own."""
    package = tmp_path / "stepkernel"
    shutil.copytree(Path(jit.__file__).parents[1], package, ignore=shutil.ignore_patterns("__pycache__"))
    helper, kernel = package / "cpu" / "helper.py", package / "cpu" / "kernel.py"
    kernel.write_text(
        "from stepkernel.cpu.helper import twice\nfrom stepkernel.cpu.jit import entry\n\n\n"
        '@entry("int64(int64)")\ndef run(x):\n    return twice(x)\n'
    )
    body = "from stepkernel.cpu.jit import inner\n\n\n@inner\ndef twice(x):\n    return x * {}\n"
    found = []
    for factor in (2, 2, 3):
        helper.write_text(body.format(factor))
        code = "from stepkernel.cpu.kernel import run; print(run.prepare(), run(7))"
        environment = {**os.environ, "PYTHONPATH": str(tmp_path), "STEPKERNEL_CACHE_DIR": str(tmp_path / "cache")}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        found.append(done.stdout.strip())
    assert found == ["True 14", "False 14", "True 21"]


def test_the_cache_directory_can_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPKERNEL_CACHE_DIR", str(tmp_path / "a" / "b"))
    assert cache.cache_root.__wrapped__() == tmp_path / "a" / "b"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("STEPKERNEL_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(ValueError, match=r"STEPKERNEL_CACHE_DIR=.*file: no directory to write to"):
        cache.cache_root.__wrapped__()
    monkeypatch.delenv("STEPKERNEL_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # unusable: another place is found
    assert cache.cache_root.__wrapped__().is_dir()


@pytest.mark.parametrize("value", ["sse", "AVX2"])
def test_unknown_instruction_sets_are_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("STEPKERNEL_ISA", value)
    with pytest.raises(ValueError, match=f"STEPKERNEL_ISA='{value}'"):
        isa.chosen.__wrapped__()


def test_instruction_sets_follow_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STEPKERNEL_ISA", raising=False)
    monkeypatch.setattr(isa, "features", lambda: frozenset({"sse2"}))
    assert isa.chosen.__wrapped__() == "generic"
    monkeypatch.setattr(isa, "features", lambda: frozenset({"avx2", "fma"}))
    assert isa.chosen.__wrapped__() == "avx2"
    monkeypatch.setattr(isa, "features", lambda: frozenset({"avx2", "fma", "avx512f", "avx512vl", "avx512bw"}))
    width = importlib.import_module("stepkernel.cpu.width")
    for faster in (True, False):
        monkeypatch.setattr(width, "wide_is_faster", lambda faster=faster: faster)
        assert isa.chosen.__wrapped__() == ("avx512" if faster else "avx2")
    monkeypatch.setattr(isa, "features", lambda: frozenset({"sse2"}))
    monkeypatch.setenv("STEPKERNEL_ISA", "avx2")
    with pytest.raises(ValueError, match="no AVX2 with FMA"):
        isa.chosen.__wrapped__()


DAMAGED = """
import sys
from stepkernel.cpu import jit
from pathlib import Path

def three(x):
    return x + 3

entry = jit.entry("int64(int64)")(three)
compiled = entry.prepare()
print(compiled, entry(4))
"""


def test_a_damaged_cache_is_made_again(tmp_path: Path) -> None:
    script = tmp_path / "kernel.py"
    script.write_text(DAMAGED)
    environment = {**os.environ, "STEPKERNEL_CACHE_DIR": str(tmp_path / "cache")}

    def run() -> str:
        return subprocess.run(
            [sys.executable, str(script)], env=environment, capture_output=True, text=True, check=True
        ).stdout

    assert run() == "True 7\n"
    assert run() == "False 7\n"
    for pattern in ("*.nbi", "*.nbc"):
        for file in (tmp_path / "cache").rglob(pattern):
            file.write_bytes(b"junk")
        assert run().endswith(" 7\n"), pattern


def test_another_process_compiles(tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text(
        'from stepkernel.cpu.jit import entry\n\n\n@entry("int64(int64)")\ndef run(x):\n    return x + 3\n'
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "STEPKERNEL_CACHE_DIR": str(tmp_path / "cache")}
    code = (
        "from kernel import run; print(run.prepare_apart(), sum(run._dispatcher.stats.cache_misses.values()), run(4))"
    )

    def run(**variables: str) -> str:
        command = [sys.executable, "-c", code]
        return subprocess.run(
            command, env=environment | variables, capture_output=True, text=True, check=True, cwd=tmp_path
        ).stdout

    assert run() == "True 0 7\n"
    assert run() == "False 0 7\n"
    # The child does not find the module: this process compiles it.
    assert run(PYTHONPATH="", STEPKERNEL_CACHE_DIR=str(tmp_path / "other")) == "True 1 7\n"
