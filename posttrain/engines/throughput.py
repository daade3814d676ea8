"""Throughput of an engine: seconds and decoding steps by the number of running requests, and seconds of prefill.

`posttrain plan` predicts other machines from these figures. Numbers of requests are grouped by powers of two, so that a
step of a run records a handful of them, whatever it sampled.
"""

from __future__ import annotations


class Throughput:
    """Counters since the beginning. They cost two looks at the clock a step."""

    def __init__(self) -> None:
        self._steps: dict[int, int] = {}  # by the power of two: 3 for 4 to 7 requests
        self._rows: dict[int, int] = {}  # requests, summed over those steps: each samples a token
        self._seconds: dict[int, float] = {}
        self._read_tokens, self._read_seconds = 0, 0.0

    def decoded(self, running: int, seconds: float, steps: int = 1) -> None:
        """Count decoding steps with `running` requests; seconds of all of them."""
        power = running.bit_length()
        self._steps[power] = self._steps.get(power, 0) + steps
        self._rows[power] = self._rows.get(power, 0) + steps * running
        self._seconds[power] = self._seconds.get(power, 0.0) + seconds

    def read(self, tokens: int, seconds: float) -> None:
        """Count the prefill of tokens, of prompts or of what environments returned."""
        self._read_tokens += tokens
        self._read_seconds += seconds

    def counts(self) -> dict[str, float]:
        """Return counters by name, as timing.jsonl has them: `decoding/4/steps` counts the steps of 4 to 7 requests."""
        found: dict[str, float] = {}
        for power, steps in sorted(self._steps.items()):
            name = f"decoding/{1 << power - 1}"
            found |= {
                f"{name}/steps": steps,
                f"{name}/rows": self._rows[power],
                f"{name}/seconds": self._seconds[power],
            }
        if self._read_tokens:
            found |= {"reading/tokens": self._read_tokens, "reading/seconds": self._read_seconds}
        return found
