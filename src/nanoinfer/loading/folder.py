"""What a model folder holds: its configuration files, its end-of-sequence ids and its weight files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from nanoinfer.errors import ModelError
from nanoinfer.models.config import ModelConfig, token_ids, unwrap_text_config

_SHARD = re.compile(r".*-(\d{5})-of-(\d{5})\.safetensors")
_PICKLE = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; ModelError if it cannot be read or is not an object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON ({error}); fetch the file again.") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds a JSON {type(content).__name__} instead of an object.")
    return content


def read_model_config(folder: Path) -> ModelConfig:
    """The folder's config.json, checked; ModelError as in `ModelConfig.from_dict`."""
    path = folder / "config.json"
    return ModelConfig.from_dict(read_json(path), source=str(path))


def read_generation_config(folder: Path) -> dict[str, Any]:
    """The folder's generation_config.json (default sampling values), empty where there is none."""
    path = folder / "generation_config.json"
    return read_json(path) if path.exists() else {}


def read_eos_token_ids(folder: Path) -> tuple[int, ...]:
    """The ids that generation_config.json or config.json says end a sequence, sorted; each has one, a list or none."""
    ids = set(token_ids(read_generation_config(folder).get("eos_token_id")))
    ids.update(token_ids(unwrap_text_config(read_json(folder / "config.json")).get("eos_token_id")))
    return tuple(sorted(ids))


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, all shards, sorted; ModelError if one is missing or there are none."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{index} has no weight_map; fetch the file again.")
        names = sorted({Path(str(name)).name for name in weight_map.values()})
        _refuse_missing(folder, [name for name in names if not (folder / name).exists()])
        return [folder / name for name in names]
    if (folder / "model.safetensors").exists():
        return [folder / "model.safetensors"]
    # Mistral's repositories carry the same weights a second time, under the names of another framework.
    files = sorted(p for p in folder.glob("*.safetensors") if not p.name.startswith("consolidated"))
    if not files:
        raise ModelError(_no_weights(folder))
    shards = [match for match in (_SHARD.fullmatch(p.name) for p in files) if match]
    if shards:
        have, count = {int(m[1]) for m in shards}, int(shards[0][2])
        stem = shards[0][0].rsplit("-", 3)[0]
        _refuse_missing(
            folder, [f"{stem}-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1) if i not in have]
        )
    return files


def _refuse_missing(folder: Path, missing: list[str]) -> None:
    if missing:
        raise ModelError(f"model folder {folder} lacks the weight file {', '.join(missing)}; download the model again.")


def _no_weights(folder: Path) -> str:
    pickles = sorted(p.name for pattern in _PICKLE for p in folder.glob(pattern))
    ggufs = sorted(p.name for p in folder.glob("*.gguf"))
    if pickles:
        return (
            f"model folder {folder} holds its weights only as {pickles[0]}; such pickle files can run code when they "
            "are opened and are never read: use a version of the model with .safetensors files."
        )
    if ggufs:
        return f"model folder {folder} holds GGUF files; name one of them, such as {folder / ggufs[0]}."
    return f"model folder {folder} holds no weights (no .safetensors file); download the model again."


def has_weights(folder: Path) -> bool:
    """Whether the folder holds a complete set of weight files."""
    try:
        return bool(weight_files(folder))
    except ModelError:
        return False
