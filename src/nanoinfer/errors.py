"""One exception tree: every error a user can cause carries its advice and the exit code of the command line.

NanoinferError                exit 1
├── UserError                 exit 2   the message says what to do about it
│   ├── ConfigError                    an option or sampling parameter is unknown or out of range
│   ├── ModelError                     a model folder or file is missing, broken or not supported
│   ├── MemoryBudgetError              the model or its KV pool does not fit in the memory there is
│   └── RequestError                   a request can never run; `code` is a stable machine-readable name
└── EngineError               exit 1   something failed while the engine was running
    └── RankError                      an exchange between tensor-parallel ranks failed
"""

from __future__ import annotations


class NanoinferError(Exception):
    """Base of all errors that nanoinfer raises on purpose."""

    exit_code = 1


class UserError(NanoinferError):
    """The input was wrong; the message is one or two sentences that say what to do."""

    exit_code = 2


class ConfigError(UserError):
    """An engine option or sampling parameter is unknown, of the wrong type or out of range."""


class ModelError(UserError):
    """A model could not be found, is incomplete, or needs something that nanoinfer does not support."""


class MemoryBudgetError(UserError):
    """The weights, or the smallest useful KV pool, do not fit; the message has the numbers."""


class RequestError(UserError):
    """A request was refused. `code` is one of `empty_prompt`, `prompt_too_long`, `exceeds_kv_pool`,
    `invalid_token`, `duplicate_id`, `no_tokenizer`, `no_chat_template`, `invalid_request`."""

    def __init__(self, message: str, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.code = code


class EngineError(NanoinferError):
    """The engine failed while it was running; finished results stay valid."""


class RankError(EngineError):
    """An exchange between the ranks of tensor parallelism failed, most often because another rank has failed."""
