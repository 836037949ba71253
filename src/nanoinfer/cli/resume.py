"""Going on with a batch that was interrupted: which results are kept, and why it may be refused."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanoinfer.cli.batch_input import Batch
from nanoinfer.cli.output_path import partial_path
from nanoinfer.cli.partial_file import StoredResult
from nanoinfer.cli.prompts_file import Entry
from nanoinfer.cli.records import is_failure
from nanoinfer.cli.results_file import ResultsFile, with_index
from nanoinfer.cli.run_identity import differences
from nanoinfer.errors import UserError
from nanoinfer.ui.console import Console
from nanoinfer.ui.text import one_line, plural


@dataclass(frozen=True)
class Match:
    """Results of an earlier run against the lines of today's input."""

    kept: dict[int, StoredResult]  # by index of the line
    changed: list[Entry]  # lines whose earlier result answers another content
    gone: list[str]  # ids of results without a line


def match_results(
    entries: list[Entry], keys: list[str], results: Mapping[str, StoredResult], *, retry_errors: bool = False
) -> Match:
    """Match by id and content, never by place. An earlier failure is no work that could be lost: it is kept for a line
    that is still the same (unless `retry_errors`) and forgotten with one that is not."""
    kept = {
        entry.index: results[key]
        for entry, key in zip(entries, keys, strict=True)
        if key in results and not (results[key].failed and retry_errors)
    }
    known = set(keys)
    left = {result.id for key, result in results.items() if key not in known and not result.failed}
    changed = [entry for entry, key in zip(entries, keys, strict=True) if key not in results and str(entry.id) in left]
    return Match(kept, changed, sorted(left - {str(entry.id) for entry in changed}))


def take_over(
    console: Console,
    batch: Batch,
    keys: list[str],
    output: ResultsFile,
    asked: Mapping[str, Any],
    *,
    retry_errors: bool,
) -> dict[int, StoredResult]:
    """Keep the results of the interrupted run that left `output`'s partial file; returns them by index of their line.

    UserError if its parameters were others, or if a result answers a line that has changed or is gone.
    """
    earlier = output.earlier
    if not earlier.results or earlier.header is None:
        console.say(f"note: there is nothing to resume for {output.path}; the run starts at its beginning.")
        return {}
    refuse_other_parameters(output, asked)
    match = match_results(batch.entries, keys, earlier.results, retry_errors=retry_errors)
    _refuse_other_lines(console, batch, output, match)
    output.keep(match.kept)
    rest = len(batch.entries) - len(match.kept)
    console.say(
        f"resuming: {plural(len(match.kept), 'result')} kept from {earlier.path}, {plural(rest, 'line')} to run."
    )
    if earlier.unreadable:
        console.say(f"note: {plural(earlier.unreadable, 'line')} of it had been cut off and will be computed again.")
    if rest and output.is_taken:
        raise UserError(f"the output {output.path} exists already; move it away, then resume.")
    return match.kept


def refuse_other_parameters(output: ResultsFile, now: Mapping[str, Any]) -> None:
    """UserError that names what differs from the run that left the partial file."""
    assert output.earlier.header is not None
    found = differences(output.earlier.header.get("parameters", {}), now)
    if found:
        raise UserError(
            f"{output.earlier.path} was made with other parameters: {', '.join(found)}. Resume with the same ones, or "
            "start over with --overwrite."
        )


def _refuse_other_lines(console: Console, batch: Batch, output: ResultsFile, match: Match) -> None:
    problems = [f"line {entry.line} (id {_quoted(entry.id)}) has changed" for entry in match.changed]
    problems += [f"id {_quoted(name)} is no longer there" for name in match.gone]
    if not problems:
        return
    console.warn(f"{batch.name} is not what {output.earlier.path} has answers to:")
    console.more_of(problems)
    raise UserError(
        f"{plural(len(problems), 'answered line')} of {batch.name} changed or went; put back what was there (new "
        "lines are welcome), or start over with --overwrite."
    )


def _quoted(name: object) -> str:
    return f"'{one_line(str(name))}'"


@dataclass(frozen=True)
class Finished:
    """The records of a finished output as lines, by index of their input line."""

    answers: dict[int, bytes]
    failures: dict[int, bytes]


def finished_output(output: Path, batch: Batch) -> Finished | None:
    """What is in `output`, if it holds one record for every line of the batch and nothing else; None if it does not,
    or if a run left a partial file."""
    if not output.is_file() or partial_path(output).exists():
        return None
    # Where an id comes again, its first line may have an answer, and the others only errors.
    left: dict[str, list[int]] = {}
    for entry in batch.entries:
        left.setdefault(f"{entry.id_key} {entry.id}", []).append(entry.index)
    finished = Finished({}, {})
    try:
        with output.open("rb") as file:
            for line in file:
                record = json.loads(line)
                key = next(key for key in ("custom_id", "id") if key in record)
                failed = is_failure(record)
                index = left[f"{key} {record[key]}"].pop(-1 if failed else 0)
                kind = finished.failures if failed else finished.answers
                kind[index] = with_index(line, index)
    except (OSError, ValueError, TypeError, LookupError, StopIteration):
        return None
    return None if any(left.values()) else finished


def resume_command(arguments: Sequence[str]) -> str:
    """The shell command that goes on with the run that was started with `arguments`."""
    program = Path(sys.argv[0])
    words = [f"{Path(sys.executable).name}", "-m", "nanoinfer"] if program.name == "__main__.py" else [program.name]
    if program.name != "__main__.py" and os.sep in sys.argv[0] and not _on_path(program):
        words = [sys.argv[0]]
    words += [word for word in arguments if word not in ("--overwrite", "--resume")]
    return " ".join(_shell_word(word) for word in [*words, "--resume"])


def _shell_word(word: str) -> str:
    """`word` quoted for a shell, in a form that survives being shown on a terminal and copied from it."""
    if word.isprintable():
        return shlex.quote(word)
    # Line ends, control characters and bytes that are no UTF-8: the $'...' of bash, zsh, ksh and the coming POSIX.
    return (
        "$'" + "".join(chr(b) if 32 <= b < 127 and b not in b"'\\" else f"\\x{b:02x}" for b in os.fsencode(word)) + "'"
    )


def _on_path(program: Path) -> bool:
    import shutil

    found = shutil.which(program.name)
    return found is not None and os.path.realpath(found) == os.path.realpath(program)
