"""Compares a judge that reasons before its verdict, one that does not, and a reward model's head, of one size.

    python recipes/generative_verifier.py [--seeds 0 1 2] [--out runs/generative-verifier] [--docs docs]

The question is whether the last digit of a chain of additions and multiplications is right. A judge that reasons first
imitates some worked checks. Then `rl` rewards right verdicts, from labels alone (the environment "verdict"). The judge
without reasoning trains in the same way with the verdict alone. The head is a reward model (`outcome`) on the judge's own
start, with all labels that either has seen. Every figure is measured through the service: `label --with judge=RECIPE` and
`reward-model=FOLDER`, on unseen chains, each with a right and a wrong answer.

A finished seed with the same settings is not repeated (delete its folder to repeat it). The text between the marks of the
page is written anew each time.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pages import write_page

import posttrain
from posttrain.core.intervals import student_interval
from posttrain.core.seeds import seed_of
from posttrain.runs.run_reading import read_run

DOCS = Path(__file__).resolve().parents[1] / "docs"
STEPS = 5
SHOWN, LABELLED, UNSEEN = 3000, 2560, 200  # chains with a worked check; with a label alone; held out
TEMPLATE = "{prompt}{response}\n"
VOTES = 5
SIZE: dict[str, Any] = {"tokenizer": "characters", "hidden": 64, "layers": 2, "heads": 4, "context": 80}
QUIET: dict[str, Any] = {"threads": 1, "quiet": True, "overwrite": True, "save_every": 10**6}
SFT: dict[str, Any] = {"epochs": 10, "rows": 32, "lr": 5e-3, "betas": (0.9, 0.95), "warmup": 20}
RL: dict[str, Any] = {
    "steps": 40, "prompts": 64, "group": 8, "max_tokens": 48, "lr": 3e-4, "betas": (0.9, 0.95), "warmup": 10,
    "schedule": "linear", "env_workers": 1, "settings": {"kl": 0.0},
}  # fmt: skip
HEAD: dict[str, Any] = {"algorithm": "outcome", "epochs": 6, "rows": 32, "lr": 1e-3}
SETTINGS = {"steps": STEPS, "rows": [SHOWN, LABELLED, UNSEEN], "votes": VOTES, "sft": SFT, "rl": RL, "head": HEAD}

Rows = list[dict[str, Any]]


# -- rows --------------------------------------------------------------------------------------------------------------


def chains(count: int, seed: int, held_out: bool = False) -> Rows:
    """Different ones, "3*7+4*9=" with its last digit: a tenth of all possible ones is held out, whatever the seed."""
    draw = random.Random(seed_of(seed, "chains", held_out))
    found: dict[str, str] = {}
    while len(found) < count:
        steps = [draw.choice(("+", "*")) for _ in range(STEPS)]
        prompt = str(draw.randrange(10)) + "".join(s + draw.choice("123456789" if s == "+" else "379") for s in steps)
        if (seed_of("held out", prompt) % 10 == 0) == held_out:
            found[prompt] = results(prompt)[-1]
    return [{"id": prompt, "prompt": f"{prompt}=", "answer": answer} for prompt, answer in found.items()]


def results(chain: str) -> list[str]:
    """The last digit after each step, from left to right."""
    value, found = int(chain[0]), []
    for sign, number in re.findall(r"([+*])(\d)", chain):
        value = (value + int(number) if sign == "+" else value * int(number)) % 10
        found.append(str(value))
    return found


def wrong(task: dict[str, Any], seed: int) -> str:
    """Another digit."""
    return random.Random(seed_of(seed, "wrong", task["id"])).choice([d for d in "0123456789" if d != task["answer"]])


def labelled(tasks: Rows, seed: int) -> Rows:
    """A reply to each chain and whether it is right: every other one is."""
    return [
        {"id": t["id"], "prompt": t["prompt"], "response": t["answer"] if good else wrong(t, seed), "label": good}
        for place, t in enumerate(tasks)
        for good in [place % 2 == 0]
    ]


def worked(prompt: str, response: str, label: bool) -> str:
    """A check: "3*7=1+4=5*9=5 54/ verdict: no" of the answer 4 to 3*7+4*9."""
    found, steps = results(prompt), re.findall(r"[+*]\d", prompt)
    text = prompt[0] + "".join(f"{step}={value}" for step, value in zip(steps, found, strict=True))
    return f"{text} {found[-1]}{response}{'=' if found[-1] == response else '/'} {straight(label)}"


def straight(label: bool) -> str:
    return f"verdict: {'yes' if label else 'no'}"


def demonstrations(rows: Rows, reasons: bool) -> Rows:
    return [
        {
            "id": row["id"],
            "prompt": TEMPLATE.format(**row),
            "response": worked(row["prompt"], row["response"], row["label"]) if reasons else straight(row["label"]),
        }
        for row in rows
    ]


def questions(seed: int) -> Rows:
    """Held-out chains, each with a right and a wrong answer, in this order."""
    return [
        {"id": t["id"], "prompt": t["prompt"], "responses": [t["answer"], wrong(t, seed)]}
        for t in chains(UNSEEN, seed, held_out=True)
    ]


# -- runs --------------------------------------------------------------------------------------------------------------


def one(out: Path, seed: int) -> dict[str, Any]:
    """All figures of a seed."""
    done = out / "result.json"
    if done.exists() and (known := json.loads(done.read_text()))["settings"] == json.loads(json.dumps(SETTINGS)):
        return dict(known)
    out.mkdir(parents=True, exist_ok=True)
    begin = time.process_time()
    rows = labelled(chains(SHOWN + LABELLED, seed), seed)
    shown, rest = rows[:SHOWN], rows[SHOWN:]
    figures: dict[str, dict[str, float]] = {}
    starts: dict[str, str] = {}
    for name, reasons in (("reasons", True), ("straight away", False)):
        folder = out / name.replace(" ", "-")
        tokenizer = {} if not starts else {"tokenizer": starts["reasons"]}
        made = {**SIZE, **tokenizer, **SFT, **QUIET, "seed": seed}
        start = posttrain.sft(demonstrations(shown, reasons), out=str(folder / "sft"), **made)
        starts[name] = str(start.checkpoint)
        run = posttrain.rl(
            rest, "verdict", starts[name], out=str(folder / "rl"), prompt_template=TEMPLATE, seed=seed, **RL, **QUIET
        )
        figures |= {f"{name}, after sft": judged(out, starts[name], seed)}
        figures |= {f"{name}, after rl": judged(out, str(run.checkpoint), seed)}
    head = posttrain.reward_model(rows, starts["reasons"], out=str(out / "head"), seed=seed, **HEAD, **QUIET)
    scores = labels(out, f"reward-model={head.checkpoint}", seed)[0]
    figures["head"] = {"accuracy": right([None if s is None else float(s > 0) for s in scores])}
    record = read_run(head.path)
    result = {
        "settings": SETTINGS, "seed": seed, "figures": figures, "seconds": round(time.process_time() - begin, 1),
        **{name: record[name] for name in ("end", "git", "versions", "machine")},
    }  # fmt: skip
    done.write_text(json.dumps(result) + "\n")
    return result


def judged(out: Path, model: str, seed: int) -> dict[str, float]:
    """Accuracy of a judge with one vote or several, and its tokens a vote. A tie is no verdict."""
    found: dict[str, float] = {}
    ways = {"greedy": (1, 0.0, "share"), "one vote": (1, 1.0, "share"), "votes": (VOTES, 1.0, "share"),
            "probability": (VOTES, 1.0, "probability")}  # fmt: skip
    for name, (votes, heat, answer) in ways.items():
        recipe = out / "judge.toml"
        recipe.write_text(
            f"model = {json.dumps(model)}\ntemplate = {json.dumps(TEMPLATE)}\nvotes = {votes}\ntemperature = {heat}\n"
            f'answer = "{answer}"\nmax_tokens = {RL["max_tokens"]}\nseed = {seed}\n'
        )
        scores, told = labels(out, f"judge={recipe}", seed)
        found[name] = right([None if s is None or s == 0.5 else float(s > 0.5) for s in scores])
        found["tokens"] = told["tokens/reply"] / told["votes"]
        found[f"{name}, invalid"] = told.get("invalid", 0.0)
    return found


def labels(out: Path, by: str, seed: int) -> tuple[list[float | None], dict[str, float]]:
    """A service's labels of the held-out answers, right and wrong in turn, and its counts."""
    made = posttrain.label(questions(seed), by, out=str(out / "labels.jsonl"), overwrite=True, threads=1)
    rows = [json.loads(line) for line in (out / "labels.jsonl").read_text().splitlines()]
    counted = re.findall(r"([\w/]+) ([\d.e+]+)", made.notes[0])
    return [score for row in rows for score in row["scores"]], {name: float(number) for name, number in counted}


def right(verdicts: Sequence[float | None]) -> float:
    """Accuracy; no verdict is a wrong one."""
    return sum(v == float(place % 2 == 0) for place, v in enumerate(verdicts)) / len(verdicts)


# -- the page ----------------------------------------------------------------------------------------------------------


def page(results: Sequence[dict[str, Any]], docs: Path) -> Path:
    first = results[0]
    revisions = sorted({(r["git"] or {"revision": "unknown"})["revision"][:8] for r in results})
    minutes = sum(r["seconds"] for r in results) / 60
    kinds = [name for name in first["figures"] if name != "head"]
    lines = [
        "# Judges that reason",
        "",
        f"    python recipes/generative_verifier.py --seeds {' '.join(str(r['seed']) for r in results)}",
        "",
        f"{max(r['end'] for r in results)[:10]}, revision {', '.join(revisions)}, {first['machine']['platform']}, "
        f"{first['machine']['cores']} cores, one thread, Python {first['versions']['python']}, torch "
        f"{first['versions']['torch']}, float32. {minutes:.0f} minutes of a core for {len(results)} seeds.",
        "",
        *TOLD,
        "",
        f"| | greedy | one vote | {VOTES} votes | mean probability of {VOTES} | tokens a vote |",
        "|---|---|---|---|---|---|",
    ]
    for kind in kinds:
        ways = ("greedy", "one vote", "votes", "probability")
        cells = [figure([r["figures"][kind][way] for r in results]) for way in ways]
        tokens = sum(r["figures"][kind]["tokens"] for r in results) / len(results)
        lines.append(f"| {kind} | {' | '.join(cells)} | {tokens:.1f} |")
    lines.append(f"| head | {figure([r['figures']['head']['accuracy'] for r in results])} | | | | 0 |")
    unread = sum(
        r["figures"][kind][f"{way}, invalid"] for r in results for kind in kinds for way in ("one vote", "votes")
    )
    asked = 2 * 2 * UNSEEN * len(kinds) * len(results)
    lines += ["", f"Invalid, and counted as wrong: {unread:g} of {asked} answers of one vote or {VOTES}.", "", *READ]
    return write_page(docs / "results" / "generative-verifier.md", lines)


TOLD = [
    f"The task is chains of {STEPS} steps from left to right, each of which keeps the last digit, such as `3*7+4*9=`",
    "with the answer 5. Half of the answers are wrong by another digit. All models have 2 layers of width 64 and",
    "one tokenizer of characters. A judge reads `3*7+4*9=4`; a judge that reasons writes `3*7=1+4=5*9=5 54/",
    "verdict: no`: step by step, then both digits.",
    "",
    f"- **reasons**: imitates {SHOWN:,} such checks, then trains with `rl --env verdict` (GRPO) on {LABELLED:,}",
    "  other chains, once each, with nothing but their labels.",
    "- **straight away**: the same with `verdict: yes` alone, on the same chains.",
    "- **head**: `reward-model --algorithm outcome` from the checkpoint that the reasoning judge's `rl` starts",
    f"  from, on all {SHOWN + LABELLED:,} labels, {HEAD['epochs']} times.",
    "",
    f"The table shows accuracy on {UNSEEN} held-out chains with a right and a wrong answer each, as `label --with",
    "judge=RECIPE` and `reward-model=FOLDER` answer. No verdict, or a tie, counts as wrong. Each seed: **mean**",
    "[Student's 95% interval].",
    "",
    "We chose the length of imitation so that something is left to learn: on seed 9, which is not in the table, 5",
    "and 8 epochs gave .673 and .690 (greedy), 12 gave 1.000; 6 epochs on seed 0 gave .528. We tried the head's",
    "learning rate and epochs on seed 9: 1e-3 for 6 epochs .500, 3e-3 for 12 .503, 5e-3 for 6 .513. We chose the",
    "task so that steps matter: on sums of four digits, tried first with an earlier form of this recipe, a head",
    "scored .994 and a judge that reasons .888.",
]
READ = ["One vote and several are sampled at temperature 1. Tokens are those of a reply with its end."]


def figure(values: Sequence[float]) -> str:
    each, mean = ", ".join(f"{value:.3f}" for value in values), sum(values) / len(values)
    if len(values) < 2:
        return each
    return f"{each}: **{mean:.3f}** {student_interval(list(values)).text()}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/generative-verifier"))
    parser.add_argument("--docs", type=Path, default=DOCS, help="where the page goes")
    options = parser.parse_args()
    results = []
    for seed in options.seeds:
        results.append(one(options.out / f"seed-{seed}", seed))
        print(seed, json.dumps(results[-1]["figures"]), f"{results[-1]['seconds']} s", flush=True)
    print(page(results, options.docs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
