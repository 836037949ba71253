"""A model's fingerprint tells models apart that have the same name and shape."""

from __future__ import annotations

from pathlib import Path

from nanoinfer.loading.fingerprint import model_fingerprint


def test_any_file_that_shapes_answers_counts_and_nothing_else_does(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    (tmp_path / "config.json").write_text("{}")
    weights.write_bytes(bytes(300_000))
    seen = {model_fingerprint(tmp_path)}
    (tmp_path / "README.md").write_text("text")
    weights.touch()
    assert model_fingerprint(tmp_path) in seen
    for name, content in (
        ("config.json", b"{ }"),
        ("chat_template.jinja", b"x"),
        ("model.safetensors", bytes(299_999) + b"\1"),
        ("model.safetensors", b"\1" + bytes(299_999)),
        ("model.safetensors", bytes(300_001)),
        ("model-2.safetensors", b""),
    ):
        (tmp_path / name).write_bytes(content)
        fingerprint = model_fingerprint(tmp_path)
        assert fingerprint not in seen, name
        seen.add(fingerprint)
