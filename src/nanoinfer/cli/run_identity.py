"""What makes two runs the same: the content of each input line, and every parameter that shapes the answers."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nanoinfer.cli.options import ThinkChoice
from nanoinfer.cli.prompts_file import BadLine, Entry
from nanoinfer.config import EngineConfig, SamplingParams

if TYPE_CHECKING:
    from nanoinfer.llm import LLM


def entry_keys(entries: list[Entry]) -> list[str]:
    """One key for each line, 32 hex digits, from its id and content and not from its place in the file.

    Lines that are equal in everything are told apart by counting them.
    """
    seen: Counter[str] = Counter()
    keys = []
    for entry in entries:
        digest = _digest(_content(entry))
        keys.append(_digest([digest, seen[digest]]) if seen[digest] else digest)
        seen[digest] += 1
    return keys


def _content(entry: Entry) -> list[Any]:
    content: list[Any] = [entry.id, entry.id_key, entry.form]
    if isinstance(entry, BadLine):
        return [*content, entry.code, entry.message]
    return [*content, entry.prompt, entry.sampling, entry.template_options, entry.metadata]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


def seed_of(seed: int, key: str) -> int:
    """The seed of a line that sets none: from --seed and the line itself, so that its answer is the same in whatever
    run and order it is computed."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{key}".encode()).digest()[:7], "big")


def parameters_asked_for(config: EngineConfig, sampling: Mapping[str, Any], think: ThinkChoice) -> dict[str, Any]:
    """Those parameters that are known before the model is loaded."""
    asked = {**sampling, "seed": config.seed, "max_model_len": config.max_model_len, "think": think}
    return asked if config.dtype == "auto" else asked | {"dtype": config.dtype}


def run_parameters(llm: LLM, config: EngineConfig, sampling: SamplingParams, think: ThinkChoice) -> dict[str, Any]:
    """All of them. `sampling` holds where a line says nothing else."""
    from nanoinfer.loading.fingerprint import model_fingerprint

    return {
        "model": llm.info.model,
        "model_files": model_fingerprint(llm.model_folder),
        **parameters_asked_for(config, vars(sampling), think),
        "dtype": llm.info.dtype,
    }


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A clause for each parameter in both that is not the same."""
    return [
        _difference(name, before[name], value)
        for name, value in json.loads(json.dumps(now)).items()
        if name in before and before[name] != value
    ]


def _difference(name: str, before: Any, now: Any) -> str:
    if name == "model_files":
        return "the model's files are not the same"
    was, is_now = ("auto" if value is None else json.dumps(value, ensure_ascii=False) for value in (before, now))
    return f"{name} was {was} and is now {is_now}"
