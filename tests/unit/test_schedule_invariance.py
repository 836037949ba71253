"""The schedule never changes a result: some hundred random steps; tests/faults/test_schedule_soak.py runs thousands."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from schedule_properties import STRATEGIES, check
from thoroughness import examples


@pytest.mark.parametrize("property_", STRATEGIES, ids=lambda property_: property_.__name__)
def test_over_random_schedules(property_: Callable[..., None]) -> None:
    check(property_, examples=examples(15))
