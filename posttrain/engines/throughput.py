"""Throughput of an engine: seconds and decoding steps by the number of running requests, and seconds of prefill.

`posttrain plan` predicts other machines from these figures. Numbers of requests are grouped by powers of two, so that
each step of a run records only a few counters.
"""

from __future__ import annotations


class Throughput:
    """Counters since the beginning, which require two readings of the clock per decoding step."""

    def __init__(self) -> None:
        self._steps: dict[int, int] = {}  # decoding steps, by bit length of the requests: 3 for 4 to 7
        self._rows: dict[int, int] = {}  # requests summed over these steps: each samples a token per step
        self._seconds: dict[int, float] = {}
        self._read_tokens, self._read_seconds = 0, 0.0

    def decoded(self, running: int, seconds: float, steps: int = 1) -> None:
        """Count decoding steps with `running` requests, which took `seconds` together."""
        power = running.bit_length()
        self._steps[power] = self._steps.get(power, 0) + steps
        self._rows[power] = self._rows.get(power, 0) + steps * running
        self._seconds[power] = self._seconds.get(power, 0.0) + seconds

    def read(self, tokens: int, seconds: float) -> None:
        """Count the prefill of tokens, of prompts or of environments' messages."""
        self._read_tokens += tokens
        self._read_seconds += seconds

    def counts(self) -> dict[str, float]:
        """Return the counters by their names in timing.jsonl: `decoding/4/steps` counts steps with 4 to 7 requests."""
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
