"""`--load-format dummy`: random weights in a model's real shapes, for benchmarks without a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

from nanoinfer.models.weights import WeightSlot


def fill_with_random_weights(slots: Mapping[str, WeightSlot], *, seed: int) -> None:
    """Normal weights with deviation 0.02 (the usual initialiser_range), norm weights 1, biases 0.

    The values depend only on `seed`, the names' order and the device's type.
    """
    import torch

    generators: dict[torch.device, torch.Generator] = {}
    for name, slot in slots.items():
        target = slot.target
        if name.endswith("norm.weight"):
            target.fill_(1.0)
        elif name.endswith(".bias"):
            target.zero_()
        else:
            if target.device not in generators:
                generators[target.device] = torch.Generator(target.device).manual_seed(seed)
            target.normal_(0.0, 0.02, generator=generators[target.device])
