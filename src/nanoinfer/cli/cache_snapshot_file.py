"""`inspect-cache --cache-snapshot FILE`: the report of a KV pool that an earlier run saved."""

from __future__ import annotations

from pathlib import Path

from nanoinfer.cli.cache_report import analyse, snapshot_problems
from nanoinfer.cli.cache_view import Look, snapshot_as_document, snapshot_as_text
from nanoinfer.cli.command import ENGINE_FAILURE, OK
from nanoinfer.cli.records import Decode
from nanoinfer.cli.session import Session
from nanoinfer.config import EngineConfig
from nanoinfer.engine.cache_snapshot import CacheSnapshot
from nanoinfer.errors import UserError
from nanoinfer.ui.glyphs import glyphs_of


def report_snapshot(session: Session, config: EngineConfig, path: Path, *, top: int, show_text: bool) -> int:
    """Returns the exit code: 1 if the pool's own invariants are broken."""
    snapshot = CacheSnapshot.read(path)
    report, problems = analyse(snapshot), snapshot_problems(snapshot)
    if session.display.json:
        session.show_json(snapshot_as_document(report, problems, snapshot.engine))
    else:
        decode = _decoder(config, snapshot) if show_text else None
        look = Look(top, decode, glyphs_of(session.console))
        session.show(snapshot_as_text(report, problems, snapshot.engine, look))
    if problems:
        session.console.error(f"{path} does not hold together: the file was changed, or nanoinfer has a defect.")
        return ENGINE_FAILURE
    return OK


def _decoder(config: EngineConfig, snapshot: CacheSnapshot) -> Decode:
    """The tokenizer of the model that was named, or else of the snapshot's own; no weights are read."""
    from nanoinfer.engine.tokenizer import Tokenizer, has_tokenizer
    from nanoinfer.loading.resolve import resolve_model

    model = config.model or snapshot.engine.get("model")
    if model is None:
        raise UserError("the snapshot does not say which model it is of; name the model for --show-text with -m.")
    try:
        source = resolve_model(str(model), revision=config.revision)
    except UserError as error:
        raise UserError(f"{error} --show-text needs the model's tokenizer; name its folder with -m.") from error
    if not has_tokenizer(source.folder):
        raise UserError(f"{source.name} has no tokenizer, so there is no text to show; leave --show-text out.")
    return Tokenizer.from_folder(source.folder).decode
