"""What `generate` tells a person: problems in the input, the sampling in force, and how the run ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nanoinfer.cli.batch_input import Batch
from nanoinfer.cli.batch_run import BatchTotals
from nanoinfer.cli.session import Session
from nanoinfer.config import SamplingParams
from nanoinfer.ui import text
from nanoinfer.ui.console import Console

if TYPE_CHECKING:
    from nanoinfer.llm import LLM

LONGEST_PROBLEM = 400  # characters: a message may quote what the line holds
# Beyond this share of answers cut at their limit, the limit is probably not what the person meant.
MANY_CUT = 0.05

_ALWAYS_SHOWN = ("temperature", "top_p", "top_k", "max_tokens")


def report_problems(console: Console, batch: Batch) -> None:
    """The lines that cannot run, the first 20 of them, with their numbers."""
    bad = batch.bad_lines
    if not bad:
        return
    console.warn(f"{batch.name}: {len(bad)} of {text.plural(len(batch.entries), 'line')} cannot run:")
    console.more_of([f"line {line.line}: {text.one_line(line.message, LONGEST_PROBLEM)}" for line in bad])


def validation(batch: Batch) -> dict[str, Any]:
    """The result of --validate-only as a document."""
    problems = [{"line": bad.line, "id": bad.id, "code": bad.code, "message": bad.message} for bad in batch.bad_lines]
    return {"source": batch.name, "lines": len(batch.entries), "valid": len(batch.requests), "problems": problems}


def show_validation(session: Session, batch: Batch) -> None:
    if session.display.json:
        session.show_json(validation(batch))
    else:
        session.show(f"{batch.name}: {text.plural(len(batch.entries), 'line')}, {len(batch.requests)} can run")


def report_sampling(console: Console, llm: LLM, sampling: SamplingParams, batch: Batch) -> None:
    """Once per run: what holds for the lines that do not say otherwise, and whose defaults these are."""
    defaults = SamplingParams()
    names = [name for name in vars(sampling) if name not in ("n", "seed", "stop", "stop_token_ids", "logprobs")]
    shown = [n for n in names if n in _ALWAYS_SHOWN or getattr(sampling, n) != getattr(defaults, n)]
    values = ", ".join(f"{name} {getattr(sampling, name)}" for name in shown)
    own = sum(bool(request.sampling) for request in batch.requests)
    lines = f"; {own} of {text.plural(len(batch.requests), 'line')} say something else" if own else ""
    console.dim(f"sampling: {values}" + (f", n {sampling.n}" if sampling.n > 1 else "") + lines)
    others = sorted({r.model for r in batch.requests if r.model is not None and r.model != llm.info.model})
    if others:
        named = ", ".join(f"'{text.one_line(name)}'" for name in others[:3])
        console.say(f"note: lines ask for {named}; all are answered by {llm.info.model}.")


def run_summary(totals: BatchTotals, seconds: float, output: str) -> dict[str, Any]:
    """The result of a run as a document (--json)."""
    return {
        "output": output,
        "requests": totals.done,
        "failed": totals.failed,
        "kept_from_before": totals.kept,
        "cut_at_limit": totals.cut,
        "prompt_tokens": totals.prompt_tokens,
        "cached_tokens": totals.cached_tokens,
        "output_tokens": totals.output_tokens,
        "seconds": round(seconds, 3),
        "output_tokens_per_second": round(totals.output_tokens / seconds, 2) if seconds > 0 else None,
    }


def report_run(console: Console, totals: BatchTotals, seconds: float, output: str) -> None:
    """How the run ended: failures that were not known before it, a warning about cut answers, one summary line."""
    for message in totals.failures:
        console.warn(message)
    answered = totals.done - totals.failed
    new = answered - (totals.kept - totals.kept_failed)
    if new and totals.cut / new > MANY_CUT:
        console.warn(
            f"{totals.cut} of {text.plural(new, 'answer')} ended at the token limit "
            "(max_tokens of the line, else --max-tokens)."
        )
    if not totals.done - totals.kept:
        console.say(f"{text.plural(answered, 'answer')}, all from before -> {output}")
        return
    kept = f" ({text.count(answered - new)} from before)" if totals.kept else ""
    failed = f", {totals.failed} failed" if totals.failed else ""
    share = f" ({100 * totals.cached_tokens / totals.prompt_tokens:.0f}% cached)" if totals.prompt_tokens else ""
    console.say(
        f"{text.plural(answered, 'answer')}{kept}{failed} in {text.duration(seconds)}: "
        f"{text.plural(totals.prompt_tokens, 'prompt token')}{share}, "
        f"{text.plural(totals.output_tokens, 'output token')}, "
        f"{text.rate(totals.output_tokens / seconds if seconds else 0)} tok/s -> {output}"
    )
