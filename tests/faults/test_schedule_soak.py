"""The schedule never changes a result: thousands of random steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from schedule_properties import STRATEGIES, check


@pytest.mark.parametrize("property_", STRATEGIES, ids=lambda property_: property_.__name__)
def test_over_random_schedules(property_: Callable[..., None]) -> None:
    check(property_, examples=300)
