"""The built wheel in an empty environment: all subpackages are there, and both ways to start the program work."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src" / "nanoinfer"


def run(*command: object, **options: object) -> subprocess.CompletedProcess[str]:
    result = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=900, **options)  # type: ignore[call-overload]
    assert result.returncode == 0, f"{command}: {result.stdout}\n{result.stderr}"
    return result


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, ROOT)
    return next(folder.glob("nanoinfer-*.whl"))


def test_the_wheel_has_every_module_and_data_file(wheel: Path) -> None:
    """A package built from a peer's repository lacked its subpackages."""
    names = set(zipfile.ZipFile(wheel).namelist())
    files = [p for p in SOURCES.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    missing = [str(p.relative_to(ROOT / "src")) for p in files if str(p.relative_to(ROOT / "src")) not in names]
    assert missing == []


@pytest.mark.timeout(1200)  # torch is installed once more
def test_the_wheel_installs_into_an_empty_environment_and_runs(wheel: Path, tmp_path: Path) -> None:
    home = tmp_path / "env"
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", "--no-compile", "-c", ROOT / "constraints-cpu.txt", wheel)
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONSAFEPATH": "1"}
    for command in ([home / "bin" / "nanoinfer"], [python, "-m", "nanoinfer"]):
        assert "chat" in run(*command, "--help", env=environment, cwd=tmp_path).stdout
    code = (
        "from nanoinfer import LLM, SamplingParams\n"
        "with LLM(load_format='dummy', device='cpu', num_blocks=8) as llm:\n"
        "    output = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3, ignore_eos=True))[0]\n"
        "    print(len(output.outputs[0].token_ids))\n"
    )
    assert run(python, "-c", code, env=environment, cwd=tmp_path).stdout.strip() == "3"
