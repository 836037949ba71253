"""Which model is meant, and its folder: a local folder, a GGUF file, a hub id, the built-in model, or the default."""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from nanoinfer.errors import ModelError
from nanoinfer.loading import Notify, silent
from nanoinfer.loading.folder import weight_files

DEFAULT_MODEL = "Qwen/Qwen3-0.6B"
BUILTIN_MODEL = "smollm2"

_HUB_PATIENCE = 1.0  # seconds
_SHAPES = Path(__file__).parent / "shapes"


@dataclass(frozen=True)
class ModelSource:
    """A model on this machine. `reason` says in one line which model was chosen and why."""

    folder: Path
    name: str
    reason: str


def resolve_model(
    model: str | None = None,
    *,
    named: str = "as asked for",
    revision: str | None = None,
    load_format: str = "auto",
    device_is_gpu: bool = False,
    notify: Notify = silent,
) -> ModelSource:
    """Find, and if needed fetch or import, the model that is meant.

    `named` says who named `model`. Without one: the environment's NANOINFER_MODEL, then the default. With load_format
    "dummy" only config.json is needed, and the default is a Qwen3 shape for the device. ModelError if there is no such
    model, or if its folder is incomplete.
    """
    why = named
    if model is None and os.environ.get("NANOINFER_MODEL"):
        model, why = os.environ["NANOINFER_MODEL"], "from NANOINFER_MODEL"
    weights = load_format != "dummy"
    if model is None:
        if revision is not None:
            raise ModelError("a revision was given without a model; name the hub model that it belongs to.")
        if not weights:
            return _shape(device_is_gpu)
        model, why = _default()
    folder, name = _locate(model, revision, weights, notify)
    if weights:
        weight_files(folder)
    return ModelSource(folder, name, f"{name}, {why}")


def _shape(device_is_gpu: bool) -> ModelSource:
    name = "qwen3-0.6b" if device_is_gpu else "qwen3-small"
    return ModelSource(_SHAPES / name, name, f"the {name} shape with random weights, because no model was named")


@cache
def _default() -> tuple[str, str]:
    """Decided once in a process: prompts are checked against the model that then answers them, and a hub that does not
    answer is waited for once."""
    from nanoinfer.loading.hub import cached_model, hub_answers

    if cached_model(DEFAULT_MODEL) is not None:
        return DEFAULT_MODEL, "the default, which is in the local hub cache"
    if hub_answers(DEFAULT_MODEL, _HUB_PATIENCE):
        return DEFAULT_MODEL, "the default, from the Hugging Face hub"
    return BUILTIN_MODEL, f"built in, because {DEFAULT_MODEL} is not in the cache and the hub did not answer"


def _locate(model: str, revision: str | None, weights: bool, notify: Notify) -> tuple[Path, str]:
    path = Path(model).expanduser()
    if revision is not None and (path.exists() or model == BUILTIN_MODEL):
        raise ModelError(f"a revision applies only to models on the hub, and '{model}' is local; leave it out.")
    if model == BUILTIN_MODEL:
        from nanoinfer.loading.builtin import SMOLLM2_NAME, smollm2_folder

        return smollm2_folder(notify), SMOLLM2_NAME
    if path.is_dir():
        if not (path / "config.json").exists():
            raise ModelError(_not_a_model(path))
        return path, path.resolve().name
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"{path} is a file but no .gguf file; name the model's folder instead.")
        from nanoinfer.loading.gguf import import_gguf

        return import_gguf(path, notify), path.stem
    from nanoinfer.loading.hub import fetch_model, is_hub_id

    if _looks_like_path(model) or not is_hub_id(model):
        raise ModelError(_no_such_path(model, path))
    return fetch_model(model, revision, weights=weights, notify=notify), model


def _looks_like_path(model: str) -> bool:
    first, _, rest = model.partition("/")
    return model.startswith((".", "/", "~")) or model.endswith((".gguf", "/")) or (bool(rest) and Path(first).is_dir())


def _not_a_model(folder: Path) -> str:
    ggufs = sorted(folder.glob("*.gguf"))
    if ggufs:
        return f"{folder} holds GGUF files; name one of them, such as {ggufs[0]}."
    inside = sorted(p.parent for p in folder.glob("*/config.json"))
    hint = f"did you mean {inside[0]}?" if inside else "name the folder that holds the model's config.json."
    return f"{folder} is no model folder (it has no config.json); {hint}"


def _no_such_path(model: str, path: Path) -> str:
    names = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    if "/" not in model:
        names.append(BUILTIN_MODEL)
    near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.7)
    near = [name for name in names if name.lower() == path.name.lower()][:1] or near
    if near:
        found = near[0] if near[0] == BUILTIN_MODEL else path.parent / near[0]
        return f"there is no model '{model}'; did you mean {found}?"
    return f"there is no model '{model}': no such folder or file here; a hub model is named owner/name."
