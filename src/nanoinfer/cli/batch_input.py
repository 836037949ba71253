"""Where a batch's prompts come from: a file, standard input or the command line; read and checked as a whole."""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

from nanoinfer.cli.prompts_file import BadLine, Entry, PromptRequest, parse_prompts, prompts_from_texts, sniff
from nanoinfer.config import SamplingParams
from nanoinfer.errors import UserError


@dataclass(frozen=True)
class Batch:
    """The prompts of one run. `name` is what to call their source; `files` what must not become the output; `sha256` is
    of the source as it was read."""

    name: str
    entries: list[Entry]
    files: list[Path] = field(default_factory=list)
    from_command_line: bool = False
    sha256: str = ""

    @property
    def is_standard_input(self) -> bool:
        return not self.files and not self.from_command_line

    @property
    def requests(self) -> list[PromptRequest]:
        return [entry for entry in self.entries if isinstance(entry, PromptRequest)]

    @property
    def bad_lines(self) -> list[BadLine]:
        return [entry for entry in self.entries if isinstance(entry, BadLine)]

    def sequences(self, sampling: SamplingParams) -> int:
        """Answers to expect in all, where `sampling` holds for lines that say nothing else."""
        return sum(request.sampling.get("n", sampling.n) for request in self.requests)

    def mean_limit(self, sampling: SamplingParams) -> float:
        """The mean of the lines' token limits, for the time to the end. A line without a limit counts as 0."""
        limits = [request.sampling.get("max_tokens", sampling.max_tokens) or 0 for request in self.requests]
        return sum(limits) / len(limits) if limits else 0.0


def read_batch(file: str | None, texts: list[str], defaults: SamplingParams) -> Batch:
    """The prompts of -f and -p, or of standard input if neither is given. UserError if there is nothing to read."""
    if file is not None and texts:
        raise UserError("-f and -p are both given; give the prompts in one way.")
    if texts:
        sha256 = hashlib.sha256(json.dumps(texts).encode()).hexdigest()
        return Batch("the command line", prompts_from_texts(texts), from_command_line=True, sha256=sha256)
    if file is None and sys.stdin.isatty():
        raise UserError("there are no prompts: name a file with -f, or pipe them in.")
    if file is None or file == "-":
        name, data, files = "standard input", sys.stdin.buffer.read(), []
    else:
        name, data, files = file, _read(Path(file)), [Path(file)]
    entries = parse_prompts(data, sniff(name, data), defaults)
    if not entries:
        raise UserError(f"{name} is empty; put one prompt on each line.")
    return Batch(name, entries, files, sha256=hashlib.sha256(data).hexdigest())


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"there is no file {path}.") from None
    except IsADirectoryError:
        raise UserError(f"{path} is a folder; give a file of prompts.") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}.") from error
