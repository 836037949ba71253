"""Who may import whom, read from the source; and that the pure parts really run without torch."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from thoroughness import THOROUGH

SRC = Path(__file__).parents[2] / "src" / "nanoinfer"
IMPORT = re.compile(r"^( *)(?:import ([\w.]+)|from ([\w.]+) import (\([^)]*\)|.*))", re.MULTILINE)
MODULES = sorted(SRC.rglob("*.py"))

# What a module may import from nanoinfer, by the folder (or file) that it is in. "llm" is imported by commands only.
MAY_IMPORT = {
    "errors": set(),
    "config": {"errors"},
    "engine": {"engine", "errors", "config"},
    "kernels": {"kernels"},
    "attention": {"kernels", "attention"},
    "layers": {"kernels", "layers", "attention", "models.weights", "models.config", "models.partition"},
    "models": {"models", "layers", "attention", "kernels", "errors"},
    "loading": {"loading", "models.config", "models.weights", "errors"},
    "runner": {
        "runner", "models", "layers", "attention", "kernels", "errors", "config", "engine.batch", "engine.info",
    },
    "ui": {"ui", "engine.events", "engine.metrics", "engine.latency", "engine.info", "errors"},
    "data_plane": {
        "runner", "loading", "config", "engine.batch", "models.config", "models.partition", "worker",
    },
    "prompt": {"errors"},
    "llm": {"engine", "runner", "loading", "config", "errors", "models.config", "data_plane", "prompt"},
    "worker": {"runner", "loading", "config", "errors", "models.partition", "models.weights", "engine.batch"},
    "cli": {
        "cli", "ui", "config", "errors", "models.config", "models.partition", "runner.memory", "runner.machine",
        "runner.torchrun", "worker", "loading", "llm",
        "engine.event_log", "engine.metrics", "engine.latency", "engine.events", "engine.outputs", "engine.batch",
        "engine.chat_template", "engine.cache_snapshot", "engine.info", "engine.tokenizer",
    },
}  # fmt: skip

# Third-party packages that the control plane may use; tokenizers and jinja2 only inside functions.
ENGINE_PACKAGES = {"numpy", "xxhash", "tokenizers", "jinja2", "transformers"}

PURE = [
    "nanoinfer", "nanoinfer.errors", "nanoinfer.config", "nanoinfer.llm", "nanoinfer.data_plane", "nanoinfer.prompt",
    "nanoinfer.models.config", "nanoinfer.models.weights", "nanoinfer.models.partition",
    "nanoinfer.runner.memory", "nanoinfer.runner.input_batch",
    "nanoinfer.runner.channel", "nanoinfer.runner.ranks", "nanoinfer.runner.torchrun", "nanoinfer.worker",
    "nanoinfer.cli.app",
    *sorted(f"nanoinfer.{p.parent.name}.{p.stem}" for p in MODULES if p.parent.name in ("engine", "ui", "loading")
            and p.stem != "__init__"),
]  # fmt: skip


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """(absolute module name, whether the import is at the top level) of every import in a file."""
    source = path.read_text(encoding="utf-8")
    for module, names, is_top in parsed(source) if THOROUGH else read(source):
        yield module, is_top
        for name in names:  # `from nanoinfer.runner import memory` means the module
            if (SRC.parent / module.replace(".", "/") / f"{name}.py").exists():
                yield f"{module}.{name}", is_top


def parsed(source: str) -> Iterator[tuple[str, list[str], bool]]:
    """(module, names imported from it, whether at the top level) from the syntax tree."""
    tree = ast.parse(source)
    top = set(map(id, tree.body))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, [], id(node) in top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, [alias.name for alias in node.names], id(node) in top


def read(source: str) -> Iterator[tuple[str, list[str], bool]]:
    """The same from the lines, ten times as fast: the formatter writes one import a line, or many in parentheses."""
    for indent, module, origin, names in IMPORT.findall(source):
        names = re.sub(r"#.*| as \w+", "", names)
        yield module or origin, re.findall(r"\w+", names), not indent


IMPORTS = {path: list(imports(path)) for path in MODULES}


def area(path: Path) -> str:
    parts = path.relative_to(SRC).with_suffix("").parts
    return parts[0]


def misplaced(path: Path) -> Iterator[str]:
    """What a module imports from nanoinfer (or, in the control plane, from outside) that its folder may not."""
    here = area(path)
    if here in ("__init__", "__main__"):
        return
    allowed = MAY_IMPORT[here]
    for name, _ in IMPORTS[path]:
        if name.startswith("nanoinfer."):
            inner = name.removeprefix("nanoinfer.")
            prefixes = {inner, inner.split(".")[0], ".".join(inner.split(".")[:2])}
            package_only = (SRC / inner.replace(".", "/")).is_dir() and any(a.startswith(f"{inner}.") for a in allowed)
            if not (prefixes & allowed or package_only):
                yield f"{path.relative_to(SRC)} imports {name}"
        elif here == "engine":
            package = name.split(".")[0]
            if package not in sys.stdlib_module_names | ENGINE_PACKAGES | {"nanoinfer"}:
                yield f"{path.relative_to(SRC)} imports {name}"


@pytest.mark.skipif(not THOROUGH, reason="thorough form")
def test_imports_read_from_lines_are_those_of_the_syntax_tree() -> None:
    for path in MODULES:
        source = path.read_text(encoding="utf-8")
        assert sorted(read(source)) == sorted(parsed(source)), path


def test_modules_import_only_what_their_folder_may() -> None:
    assert [line for path in MODULES for line in misplaced(path)] == []


def test_slow_packages_are_imported_inside_functions() -> None:
    slow = {"torch", "triton", "transformers", "huggingface_hub", "gguf", "tokenizers", "jinja2", "prompt_toolkit"}
    data_plane = {"runner", "models", "layers", "attention", "kernels"}
    found = []
    for path in MODULES:
        allowed_at_top = {"torch", "triton", "flash_attn"} if area(path) in data_plane else set()
        for name, is_top in IMPORTS[path]:
            if is_top and name.split(".")[0] in slow - allowed_at_top:
                found.append(f"{path.relative_to(SRC)} imports {name} at its top")
    assert found == []


@pytest.mark.skipif(not THOROUGH, reason="thorough form")
def test_pure_modules_run_with_torch_triton_and_transformers_blocked() -> None:
    blocked = dict.fromkeys(("torch", "triton", "transformers"))
    code = f"import sys, importlib; sys.modules |= {blocked}\nfor name in {PURE}: importlib.import_module(name)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


def test_public_names_are_the_sorted_all() -> None:
    import nanoinfer

    assert sorted(nanoinfer.__all__) == sorted(nanoinfer._HOME_OF)
    for name in nanoinfer.__all__:
        assert getattr(nanoinfer, name).__name__ == name
