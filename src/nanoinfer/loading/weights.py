"""Fills a model's weights from wherever `load_format` says they come from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from nanoinfer.loading import Notify, silent
from nanoinfer.models.weights import WeightSlot


def fill_weights(
    slots: Mapping[str, WeightSlot], folder: Path, load_format: str, seed: int, notify: Notify = silent
) -> None:
    """From the folder's safetensors files, or random ones for "dummy". ModelError as in `load_weights`."""
    if load_format == "dummy":
        from nanoinfer.loading.dummy import fill_with_random_weights

        fill_with_random_weights(slots, seed=seed)
    else:
        from nanoinfer.loading.safetensors import load_weights

        load_weights(slots, folder, notify)
