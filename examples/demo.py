"""The main job in two minutes on two cores: imitate, then learn from a verifier, and see the difference.

A decoder of 0.1 M parameters is trained from scratch on some 1,300 sums of four digits, such as 3+5+2+7=17. After
imitation it is right two fifths to half of the time. GRPO then trains on 8,800 sums, with only an exact check of the answer
as the reward, and both are measured on sums that neither has seen.

    python examples/demo.py [--seed 0] [--out runs/demo]
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path

import posttrain
from posttrain.core.intervals import told
from posttrain.envs.builtin import arithmetic
from posttrain.runs.curves import curves
from posttrain.runs.record.rollout_reading import read_rollouts
from posttrain.runs.run_reading import rollout_steps
from posttrain.runs.terminal.printing import sample, table

STEPS = 400
PER_ANSWER = 45  # demonstrations: what imitation has never seen, exploration hardly finds, and rare sums are rare


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="runs/demo")
    options = parser.parse_args()
    out, seed, begin = Path(options.out), options.seed, time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)

    practice = arithmetic.tasks(8800, seed, digits=1, operands=4)
    unseen = arithmetic.tasks(500, seed, digits=1, operands=4, held_out=True)
    for name, tasks in (("practice", practice), ("unseen", unseen)):
        (out / f"{name}.jsonl").write_text("".join(json.dumps(t) + "\n" for t in tasks))

    shown: Counter[str] = Counter()
    demonstrations = []
    for task in practice:
        shown[task["answer"]] += 1
        if shown[task["answer"]] <= PER_ANSWER:
            demonstrations.append(task)

    imitated = posttrain.sft(
        demonstrations,
        out=str(out / "sft"), overwrite=True, seed=seed, threads=1,
        hidden=64, layers=2, heads=4, context=32, tokenizer="characters",
        epochs=10, rows=64, lr=5e-3, warmup=20,
    )  # fmt: skip
    learned = posttrain.rl(
        practice, "arithmetic", str(imitated.path), algorithm="grpo",
        out=str(out / "rl"), overwrite=True, seed=seed, threads=1,
        steps=STEPS, prompts=64, group=8, minibatches=2, max_tokens=4, kl=0.0,
        lr=1e-3, betas=(0.9, 0.95), warmup=10, schedule="linear",
        eval_tasks=str(out / "unseen.jsonl"), eval_every=20, save_every=100,
    )  # fmt: skip
    found = posttrain.evaluate(
        unseen,
        "arithmetic",
        str(learned.path),
        against=str(imitated.path),
        samples=8,
        k=(1, 8),
        max_tokens=4,
        threads=1,
    )

    assert found.against is not None and found.differences is not None
    rows = [
        [stage, *(told(figures[name]) for name in ("accuracy", "pass@1", "pass@8"))]
        for stage, figures in (("before: imitation", found.against), ("after: GRPO", found.figures))
    ]
    table(f"{len(unseen)} sums never seen, 8 replies each, 95% intervals", ["", "accuracy", "pass@1", "pass@8"], rows)
    print(f"gained {told(found.differences['accuracy'])}, the same sums compared one by one")
    last = read_rollouts(learned.path, rollout_steps(learned.path)[-1])
    sample(last[::8], 5)  # one of each group
    print(f"curves      {curves(learned.path, out / 'curves.png')}")
    print(f"every token {learned.path / 'rollouts'}")
    print(f"checkpoint  {learned.checkpoint}")
    print(f"took        {time.perf_counter() - begin:.0f} s")
    print(
        f"next        .venv/bin/posttrain rl --model {out / 'sft'} --tasks {out / 'practice.jsonl'} --env arithmetic "
        "--algorithm dr-grpo --prompts 64 --lr 1e-3 --max-tokens 4"
    )
    print(f"look        .venv/bin/posttrain view {learned.path}")


if __name__ == "__main__":
    main()
