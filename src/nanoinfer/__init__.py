"""nanoinfer: a small, fast LLM inference engine that shows what happens inside."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanoinfer.config import EngineConfig, SamplingParams
    from nanoinfer.engine.outputs import CompletionOutput, OutputDelta, RequestOutput
    from nanoinfer.errors import ConfigError, EngineError, ModelError, NanoinferError, RequestError, UserError
    from nanoinfer.llm import LLM

__version__ = "0.1.0"

_HOME_OF = {
    "LLM": "nanoinfer.llm",
    "EngineConfig": "nanoinfer.config",
    "SamplingParams": "nanoinfer.config",
    "RequestOutput": "nanoinfer.engine.outputs",
    "CompletionOutput": "nanoinfer.engine.outputs",
    "OutputDelta": "nanoinfer.engine.outputs",
    "NanoinferError": "nanoinfer.errors",
    "UserError": "nanoinfer.errors",
    "ConfigError": "nanoinfer.errors",
    "ModelError": "nanoinfer.errors",
    "RequestError": "nanoinfer.errors",
    "EngineError": "nanoinfer.errors",
}

__all__ = [
    "LLM",
    "CompletionOutput",
    "ConfigError",
    "EngineConfig",
    "EngineError",
    "ModelError",
    "NanoinferError",
    "OutputDelta",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "UserError",
]


def __getattr__(name: str) -> Any:
    # Public names are imported on first use, so that `import nanoinfer` stays free of torch.
    if name not in _HOME_OF:
        raise AttributeError(f"module 'nanoinfer' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)
