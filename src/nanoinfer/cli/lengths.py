"""Lengths of prompts and answers as an option has them: a number, or a range."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LengthRange:
    """A length in tokens: fixed where low == high, else uniform over low..high, both ends included."""

    low: int
    high: int

    @classmethod
    def parse(cls, value: str | int) -> LengthRange:
        """From `512` or `100:1024`; ValueError for anything else."""
        low, colon, high = str(value).partition(":")
        try:
            parsed = cls(int(low), int(high if colon else low))
        except ValueError:
            raise ValueError(f"{value!r} is not a length; write 512 or a range like 100:1024") from None
        if not 1 <= parsed.low <= parsed.high:
            raise ValueError(f"{value!r} must be at least 1, and its second number not below the first")
        return parsed

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"
