"""The cache of imported models: nothing half-made is ever seen, whatever happens to the process that makes it."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from gguf_files import write_tiny
from safetensors.torch import load_file

from nanoinfer.errors import ModelError
from nanoinfer.loading import gguf as importer
from nanoinfer.loading.gguf import import_gguf


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "nanoinfer" / "models"


def run(code: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


IMPORT = """
import os, signal, sys
from pathlib import Path
from nanoinfer.loading.gguf import import_gguf

def notify(stage, done, total):
    if done >= total * float(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    print(stage, flush=True)

print(import_gguf(Path(sys.argv[1]), notify))
"""


def test_the_second_import_of_a_file_reads_nothing_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tiny(tmp_path / "m.gguf")
    folder = import_gguf(path)
    monkeypatch.setattr(importer, "read_gguf", None)
    assert import_gguf(path) == folder


def test_a_changed_file_is_imported_again(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", seed=0)
    size, first = path.stat().st_size, import_gguf(path)
    write_tiny(path, seed=1)
    assert path.stat().st_size == size
    second = import_gguf(path)
    assert first != second
    name = "model.layers.0.mlp.up_proj.weight"
    assert not load_file(first / "model.safetensors")[name].equal(load_file(second / "model.safetensors")[name])


def test_a_file_that_moved_is_not_imported_again(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf")
    first = import_gguf(path)
    (tmp_path / "elsewhere").mkdir()
    assert import_gguf(path.rename(tmp_path / "elsewhere" / "m.gguf")) == first


@pytest.mark.parametrize("when", [0.0, 0.5, 1.0])
def test_kill_9_in_the_middle_leaves_nothing_that_looks_like_a_model(tmp_path: Path, cache: Path, when: float) -> None:
    path = write_tiny(tmp_path / "m.gguf")
    with run(IMPORT, path, when) as process:
        assert process.wait() == -signal.SIGKILL
    assert [p.suffix for p in cache.iterdir() if p.is_dir()] == [".part"]
    folder = import_gguf(path)
    assert len(load_file(folder / "model.safetensors")) == 20
    assert [p for p in cache.iterdir() if p.is_dir()] == [folder]


def test_processes_that_start_together_import_once(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf")
    processes = [run(IMPORT, path, 2) for _ in range(3)]
    outputs = [process.communicate()[0].split() for process in processes]
    assert all(process.returncode == 0 for process in processes)
    assert {output[-1] for output in outputs} == {str(import_gguf(path))}
    assert sorted("import" in output for output in outputs) == [False, False, True]


def test_a_full_disk_is_a_clear_error_and_leaves_nothing(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tiny(tmp_path / "m.gguf")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1_000_000))
    with pytest.raises(ModelError, match=r"importing m\.gguf needs 0\.00 GB .* make room"):
        import_gguf(path)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def no_space(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(importer, "write_safetensors", no_space)
    with pytest.raises(ModelError, match=r"No space left on device.*XDG_CACHE_HOME"):
        import_gguf(path)
    assert not [p for p in cache.iterdir() if p.is_dir()]


def test_a_cache_that_cannot_be_written_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tiny(tmp_path / "m.gguf")
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="cannot be written"):
        import_gguf(path)


def test_progress_counts_the_bytes_that_are_written(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    folder = import_gguf(write_tiny(tmp_path / "m.gguf"), lambda *report: seen.append(report))
    total = sum(t.numel() * 4 for t in load_file(folder / "model.safetensors").values())
    assert seen[0] == ("import", 0, total)
    assert seen[-1] == ("import", total, total)
    assert seen == sorted(seen)


START = """
import sys
from pathlib import Path
from nanoinfer.loading.resolve import resolve_model
print(resolve_model(sys.argv[1]).folder)
print(sorted({"torch", "transformers", "gguf", "huggingface_hub", "tokenizers", "filelock"} & set(sys.modules)))
"""


def test_a_start_from_an_imported_file_loads_no_heavy_module(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf")
    folder = import_gguf(path)
    with run(START, path) as process:
        assert process.communicate()[0].splitlines() == [str(folder), "[]"]
