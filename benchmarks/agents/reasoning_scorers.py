"""Every data set of reasoning-gym through the bridge: what own answers and hostile ones earn, and how long scoring takes.

    python benchmarks/agents/reasoning_scorers.py [--only leg_counting countdown]

Of each data set two rows are made, written as JSON and read again. Their own answers have to earn 1 (where they have one),
and nothing that is hostile may be Invalid or earn that. Prints what is otherwise, and a summary.
"""

from __future__ import annotations

import argparse
import json
import time

from reasoning_gym.factory import DATASETS

from posttrain.core.types import Invalid
from posttrain.envs.bridges.reasoning import reward, tasks

HOSTILE = (
    "", " ", "}{ )))", "1e999", "9" * 5000, "9**9**9**9", "\x00", "\u0661\u200b", "[[[[" * 300, "(" * 3000, "-" * 3000,
    "so we get 12, " * 1000, "__import__('os').system('touch escaped')", "[exit() for _ in [1]]",
    "None", "True", "nan", "inf", "{}", "[]",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", nargs="+", default=sorted(set(DATASETS) - {"composite"}))
    found, slowest, known, odd = 0, (0.0, ""), 0, []
    for dataset in parser.parse_args().only:
        rows = json.loads(json.dumps(tasks(2, 0, dataset)))
        reward(rows[0], "<answer>to warm up</answer>")
        found += 1
        for row in rows:
            if "response" in row:
                known += 1
                if (right := reward(row, row["response"])) != 1.0:
                    odd.append(f"{dataset}: its own answer earns {right}: {row['answer'][:60]!r}")
        for reply in HOSTILE:
            began = time.perf_counter()
            earned = reward(rows[0], f"<answer>{reply}</answer>")
            slowest = max(slowest, (time.perf_counter() - began, f"{dataset}, {reply[:20]!r}"))
            if isinstance(earned, Invalid) or (earned >= 1.0 and reply != rows[0].get("answer")):
                odd.append(f"{dataset}: {reply[:40]!r} earns {earned}")
    print(*odd, sep="\n")
    print(f"{found} data sets, {known} own answers, {len(HOSTILE)} hostile answers each; {len(odd)} are odd")
    print(f"slowest: {slowest[0]:.1f} s ({slowest[1]})")


if __name__ == "__main__":
    main()
