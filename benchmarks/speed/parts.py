"""The parts of the benchmark: which sides each one starts, what it asks them in which order, which tables it makes.

Every round asks the sides one after the other, so that a machine that becomes slower does so for all of them; ratios are
taken within a round.
"""

from __future__ import annotations

import json
import math
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flops import BACKWARD, Shape, forward
from sides import ROOT, Machine, Side, Sides
from tables import Figure, Goal, Table, number
from work import (
    BUDGETS,
    FIXED,
    GROUP,
    MAX_TOKENS,
    PROMPTS,
    REQUESTS,
    SFT_ROWS,
    VOCABULARIES,
    requests,
    rows,
    tasks,
    tokens_of,
)


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    models: tuple[str, ...]
    rounds: dict[str, dict[str, int]]  # part -> model -> rounds
    batches: dict[str, tuple[int, ...]]  # model -> rollouts at once in TRL's update, the fastest of which counts
    vocabularies: tuple[int, ...]
    contexts: tuple[int, ...]
    starts: int
    starts_of_trl: int
    eager: bool  # vLLM without compiling: starts sooner, samples slower
    sft_steps: int = 4  # in a round


WHOLE = Plan(
    models=("5m", "27m"),
    rounds={
        "sampling": {"5m": 5, "27m": 3},
        "grpo": {"5m": 4, "27m": 2},
        "sft": {"5m": 4, "27m": 3},
        "peak": {"5m": 6, "27m": 3},
        "growth": {"long": 2},
    },
    batches={"5m": (64, 16, 8), "27m": (64, 16)},
    vocabularies=VOCABULARIES,
    contexts=(512, 1024, 2048, 4096),
    starts=5,
    starts_of_trl=3,
    eager=False,
)
QUICK = Plan(
    models=("5m",),
    rounds={part: {"5m": 1, "long": 1} for part in WHOLE.rounds},
    batches={"5m": (8,), "27m": (8,)},
    vocabularies=(4096, 32768),
    contexts=(512, 1024),
    starts=1,
    starts_of_trl=1,
    eager=True,
    sft_steps=1,
)

Part = Callable[[Machine, Plan], list[Table]]


# -- sampling ----------------------------------------------------------------------------------------------------------

CASES = {
    "fixed": f"{REQUESTS} x {FIXED} tokens",
    "ragged": f"{REQUESTS} natural lengths, mean {sum(BUDGETS) / len(BUDGETS):.0f}, longest {max(BUDGETS)}",
}


def sampling(machine: Machine, plan: Plan) -> list[Table]:
    """Tokens per second of all requests at once."""
    table = Table(
        "Sampling, tokens per second",
        ("model, work", "posttrain", "generate", "ratio", "goal", "vLLM", "ratio", "goal"),
        notes=[
            "Prefill included, model loading not; only tokens that were asked for count. posttrain and vLLM return the "
            "log-probability of each token, generate does not." + (" vLLM ran uncompiled." if plan.eager else "")
        ],
    )
    for model in plan.models:
        names = ("posttrain", "generate", "vllm")
        speed: dict[str, dict[str, list[float]]] = {case: {name: [] for name in names} for case in CASES}
        with Sides(machine) as sides:
            running = {name: sides.start(name, "serve", model=machine.model(model), eager=plan.eager) for name in names}
            for side in running.values():
                side.ask(do="sample", case="warm")
            for _ in range(plan.rounds["sampling"][model]):
                for case in CASES:
                    for name, side in running.items():
                        found = side.ask(do="sample", case=case)
                        speed[case][name].append(found["tokens"] / found["seconds"])
        for case, what in CASES.items():
            ours, generate, vllm = (Figure.of(speed[case][name]) for name in names)
            beside = [ours.over(generate), ours.over(vllm)]
            goals = [Goal(2.5).judge(beside[0].median), Goal(1.5).judge(beside[1].median)]
            table.add(f"{model}, {what}", ours, generate, beside[0], goals[0], vllm, beside[1], goals[1])
    return [table]


# -- GRPO --------------------------------------------------------------------------------------------------------------


def grpo(machine: Machine, plan: Plan) -> list[Table]:
    """Whole steps: rollouts, rewards, update, record."""
    speed = Table(
        "A step of GRPO from end to end, 8 prompts x 8 rollouts, sampled tokens per second",
        ("model, reward", "posttrain", "TRL", "ratio", "goal", "posttrain s/step", "of it update", "TRL s/step"),
    )
    memory = Table(
        "Most memory in these steps, MiB",
        ("model, reward", "posttrain, added", "TRL, added", "ratio", "goal", "posttrain, all", "TRL, all", "ratio"),
        notes=["Added: over imports and one loaded model. posttrain's includes the process that scores."],
    )
    for model in plan.models:
        common = {"model": machine.model(model), "max_tokens": MAX_TOKENS[model]}
        batch, note = _choose(machine, plan, model)
        speed.notes.append(note)
        with Sides(machine) as sides:
            ours = {kind: sides.start("posttrain", "grpo", reward=kind, **common) for kind in ("signal", "sparse")}
            theirs = sides.start("trl", "grpo", batch=batch, **common)
            found: dict[tuple[str, str], list[dict[str, Any]]] = {}
            for _ in range(plan.rounds["grpo"][model]):
                for kind, side in ours.items():
                    found.setdefault(("posttrain", kind), []).append(side.ask())
                    found.setdefault(("trl", kind), []).append(theirs.ask(reward=kind))
        for kind in ours:
            mine, peer = found["posttrain", kind], found["trl", kind]
            _add_step(speed, f"{model}, {kind}", mine, peer, Goal(8 if kind == "sparse" else 5))
            _add_memory(memory, f"{model}, {kind}", mine[-1], peer[-1])
    return [speed, memory]


def _choose(machine: Machine, plan: Plan, model: str) -> tuple[int, str]:
    """The batch in which TRL is fastest, and how that was found."""
    batches = plan.batches[model]
    if len(batches) == 1:
        return batches[0], f"{model}: TRL's update takes {batches[0]} rollouts at once."
    with Sides(machine) as sides:
        settings = {"model": machine.model(model), "max_tokens": MAX_TOKENS[model], "batches": batches}
        tried = sides.start("trl", "choose", **settings).first
    best = min(batches, key=lambda b: tried[str(b)])
    listed = ", ".join(f"{b} at once {number(tried[str(b)])} s" for b in batches)
    return best, f"{model}: TRL's update takes {best} rollouts at once, its fastest (per 1,000 tokens: {listed})."


def _add_step(table: Table, name: str, mine: list[dict[str, Any]], peer: list[dict[str, Any]], goal: Goal) -> None:
    ours, theirs = (Figure.of([x["tokens"] / x["seconds"] for x in found]) for found in (mine, peer))
    seconds, theirs_seconds = (Figure.of([x["seconds"] for x in found]) for found in (mine, peer))
    update = Figure.of([x["update"] for x in mine])
    ratio = ours.over(theirs)
    table.add(name, ours, theirs, ratio, goal.judge(ratio.median), seconds, update, theirs_seconds)


def _add_memory(table: Table, name: str, mine: dict[str, Any], peer: dict[str, Any]) -> None:
    ratio = mine["added"] / peer["added"]
    cells = [number(x) for x in (mine["added"], peer["added"], ratio)]
    everything = [number(x) for x in (mine["peak"], peer["peak"], mine["peak"] / peer["peak"])]
    table.add(name, *cells, Goal(0.4, least=False).judge(ratio), *everything)


# -- SFT ---------------------------------------------------------------------------------------------------------------


def sft(machine: Machine, plan: Plan) -> list[Table]:
    """Steps over GSM8K's worked solutions."""
    table = Table(
        f"SFT, {SFT_ROWS} rows of GSM8K a step, learned tokens per second",
        ("model", "posttrain", "TRL, padded", "TRL, packed", "ratio to the better", "goal"),
        notes=["Learned: tokens of the solutions; prompts are read but not learned. Preparing the data is left out."],
    )
    count = 1000
    for model in plan.models:
        common = {"model": machine.model(model), "rows": count}
        packed = _packed_rows(machine.model(model), count)
        speed: dict[str, list[float]] = {"ours": [], "padded": [], "packed": []}
        with Sides(machine) as sides:
            running = {
                "ours": sides.start("posttrain", "sft", **common),
                "padded": sides.start("trl", "sft", packed=False, batch=SFT_ROWS, **common),
                "packed": sides.start("trl", "sft", packed=True, batch=packed, **common),
            }
            for _ in range(plan.rounds["sft"][model]):
                for name, side in running.items():
                    found = side.ask(steps=plan.sft_steps)
                    speed[name].append(found["tokens"] / found["seconds"])
        figures = {name: Figure.of(values) for name, values in speed.items()}
        better = max(("padded", "packed"), key=lambda name: figures[name].median)
        ratio = figures["ours"].over(figures[better])
        table.add(model, *figures.values(), ratio, Goal(4).judge(ratio.median))
    table.notes.append(f"TRL packs into rows of 1,024 tokens, {packed} of them a step: about {SFT_ROWS} rows of GSM8K.")
    return [table]


def _packed_rows(folder: str, count: int) -> int:
    """How many rows of 1,024 tokens hold about as much as `SFT_ROWS` rows of the data."""
    texts = [r["prompt"] + r["response"] for r in rows(count)]
    mean = sum(len(ids) + 1 for ids in tokens_of(folder, texts)) / count
    return max(1, round(SFT_ROWS * mean / 1024))


# -- share of the peak -------------------------------------------------------------------------------------------------


def peak(machine: Machine, plan: Plan) -> list[Table]:
    """Useful FLOP per second beside what the machine's matrix products reach in the same round."""
    table = Table(
        "Share of the measured peak of matrix products (float32)",
        ("model, work", "GFLOP/s, useful", "GFLOP/s, peak", "share, %", "goal"),
        notes=[
            "Useful: prompts once per group, output head at scored tokens only, the causal half of attention, no padding, "
            "no recomputation. Updates: the ragged work, 3 forward passes' worth."
        ],
    )
    for model in plan.models:
        folder = machine.model(model)
        useful = {"update": BACKWARD * _flops(folder, "ragged"), **{case: _flops(folder, case) for case in CASES}}
        rates: dict[str, list[float]] = {name: [] for name in ("peak", *useful)}
        with Sides(machine) as sides:
            side = sides.start("posttrain", "serve", model=folder)
            for first in (True, *[False] * plan.rounds["peak"][model]):
                found = {"peak": side.ask(do="peak")["flops"]}
                found["update"] = useful["update"] / side.ask(do="update")["seconds"]
                for case in CASES:
                    found[case] = useful[case] / side.ask(do="sample", case="warm" if first else case)["seconds"]
                if not first:
                    for name, rate in found.items():
                        rates[name].append(rate / 1e9)
        top = Figure.of(rates["peak"])
        for name in useful:
            rate = Figure.of(rates[name])
            share = Figure.of([100 * x for x in rate.over(top).values])
            goal = Goal(60 if name == "update" else 40, unit="%").judge(share.median)
            table.add(f"{model}, {'update' if name == 'update' else 'sampling, ' + name}", rate, top, share, goal)
    return [table]


def _flops(folder: str, case: str) -> float:
    """FLOP of a forward pass over the requests of a case."""
    wanted = requests(case)
    lengths = [len(ids) for ids in tokens_of(folder, [text for text, _ in wanted[::GROUP]])]
    replies = [[n for _, n in wanted[i * GROUP : (i + 1) * GROUP]] for i in range(PROMPTS)]
    return forward(Shape.read(folder), list(zip(lengths, replies, strict=True)))


# -- memory beside the vocabulary --------------------------------------------------------------------------------------

SHORT = 64  # tokens of each reply


def memory(machine: Machine, plan: Plan) -> list[Table]:
    """Most memory of a GRPO step under vocabularies of several sizes."""
    table = Table(
        f"Most memory of a GRPO step beside the vocabulary: the 5 M trunk, {REQUESTS} replies of {SHORT} tokens, MiB added",
        (
            "vocabulary",
            "posttrain",
            "of it work",
            "TRL, 64 at once",
            "TRL, 8 at once",
            "ratio to 64",
            "ratio to 8",
            "goal",
        ),
        notes=[
            "Added: over imports and one loaded model. Work: without gradients and AdamW's moments (12 bytes a parameter), "
            "which grow with the vocabulary in any trainer."
        ],
    )
    work = {}
    for vocabulary in plan.vocabularies:
        model = machine.model(f"vocab-{vocabulary}")
        added = _added(machine, "posttrain", model=model, reward="signal")
        state = 12 * _parameters(Shape.read(model)) / (1 << 20)
        work[vocabulary] = added - state
        cells: list[str] = ["", "", "", "", ""]
        if vocabulary <= 32768:
            theirs = [_added(machine, "trl", model=model, batch=batch) for batch in (64, 8)]
            ratios = [added / x for x in theirs]
            cells = [*map(number, theirs), *map(number, ratios), Goal(0.4, least=False).judge(ratios[1])]
        table.add(f"{vocabulary:,}", number(added), number(work[vocabulary]), *cells)
    growth = work[max(work)] / work[min(work)]
    flat = Goal(1.25, least=False).judge(growth)
    table.notes.append(
        f"Flat in the vocabulary: work grows {number(growth)}x from {min(work):,} to {max(work):,} ({flat})."
    )
    return [table]


def _added(machine: Machine, name: str, **settings: Any) -> float:
    with Sides(machine) as sides:
        side = sides.start(name, "grpo", max_tokens=SHORT, **settings)
        return float(side.ask()["added"])


def _parameters(shape: Shape) -> int:
    return shape.trunk + shape.vocabulary * shape.hidden  # tied; norms and biases are not worth counting


# -- start -------------------------------------------------------------------------------------------------------------


def start(machine: Machine, plan: Plan) -> list[Table]:
    """Seconds until a run has finished its first step, and what the imports take of them."""
    table = Table(
        "Start, seconds (a random model of 0.1 M parameters, 8 prompts x 8 rollouts of at most 64 tokens)",
        ("", "posttrain", "TRL", "ratio", "goal"),
        notes=["From the command to the first finished step: `posttrain rl ...`, and a script with TRL's trainer."],
    )
    first: dict[str, list[float]] = {"ours": [], "theirs": []}
    imports: dict[str, list[float]] = {"ours": [], "theirs": []}
    for place in range(-1, plan.starts):  # the first round only fills the file cache
        found = {"ours": (_first_step(machine), _import(machine, machine.ours, "import posttrain.run"))}
        if place < plan.starts_of_trl:
            statement = "from trl import GRPOConfig, GRPOTrainer"
            found["theirs"] = (_first_step_of_trl(machine), _import(machine, machine.trl, statement))
        for name, (step, brought) in found.items() if place >= 0 else ():
            first[name].append(step)
            imports[name].append(brought)
    for what, seconds, goal in (("first finished step", first, 3.0), ("imports", imports, 2.0)):
        ours, theirs = Figure.of(seconds["ours"]), Figure.of(seconds["theirs"])
        table.add(what, ours, theirs, ours.over(theirs), Goal(goal, least=False, unit=" s").judge(ours.median))
    return [table]


def _first_step(machine: Machine) -> float:
    """`posttrain rl`, until its record holds a finished step."""
    folder = machine.place / "scratch" / "start"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks()))
    timing = folder / "run" / "timing.jsonl"
    timing.unlink(missing_ok=True)
    command = [
        machine.ours.with_name("posttrain"), "rl", "--model", machine.model("tiny"), "--tasks", folder / "tasks.jsonl",
        "--env", f"{Path(__file__).with_name('rewards.py')}:signal", "--out", folder / "run", "--overwrite",
        "--steps", "1", "--prompts", str(PROMPTS), "--group", str(GROUP), "--max-tokens", str(SHORT), "--kl", "0",
        "--threads", str(machine.threads),
    ]  # fmt: skip
    begin = time.perf_counter()
    with (machine.place / "logs" / "start.txt").open("w") as log:
        process = subprocess.Popen(
            [str(c) for c in command], stdout=log, stderr=log, env=machine.environment(), cwd=ROOT
        )
        while process.poll() is None and not (timing.exists() and timing.stat().st_size):
            time.sleep(0.002)
        seconds = time.perf_counter() - begin
        assert process.wait() == 0, (machine.place / "logs" / "start.txt").read_text()
    return seconds


def _first_step_of_trl(machine: Machine) -> float:
    begin = time.time()
    with Sides(machine) as sides:
        side = sides.start("trl", "start", model=machine.model("tiny"), max_tokens=SHORT)
        return float(side.first["now"]) - begin


def _import(machine: Machine, python: Path, statement: str) -> float:
    begin = time.perf_counter()
    subprocess.run([python, "-c", statement], check=True, env=machine.environment(), cwd=ROOT, capture_output=True)
    return time.perf_counter() - begin


# -- growth ------------------------------------------------------------------------------------------------------------


def growth(machine: Machine, plan: Plan) -> list[Table]:
    """Long contexts, and what a group pays for its prompt."""
    with Sides(machine) as sides:
        side = sides.start("posttrain", "serve", model=machine.model("long"))
        return [_contexts(side, plan), _prompts(side)]


def _contexts(side: Side, plan: Plan) -> Table:
    table = Table(
        f"Growth with the context: {GROUP} rollouts of one prompt that fill it, tokens per second",
        ("context", "sampling", "update", "both", "time per token, relative", "goal"),
    )
    side.ask(do="context", length=plan.contexts[0] // 2)
    found: dict[int, list[dict[str, Any]]] = {context: [] for context in plan.contexts}
    for _ in range(plan.rounds["growth"]["long"]):
        for context in plan.contexts:
            found[context].append(side.ask(do="context", length=context))
    whole = {c: Figure.of([x["tokens"] / x["seconds"] for x in laps]) for c, laps in found.items()}
    exponent = _exponent([(x["tokens"], x["seconds"]) for laps in found.values() for x in laps])
    for context, laps in found.items():
        parts = [Figure.of([x["tokens"] / x[name] for x in laps]) for name in ("sampling", "update")]
        relative = whole[plan.contexts[0]].over(whole[context])
        last = context == plan.contexts[-1]
        goal = Goal(1.1, least=False, unit="").judge(exponent).replace("<=", "exponent <=") if last else ""
        table.add(f"{context:,}", *parts, whole[context], relative, goal)
    table.notes.append(
        f"Seconds grow as tokens to the power of {exponent:.2f} (1: linear; attention alone would be 2)."
    )
    return table


def _exponent(pairs: list[tuple[float, float]]) -> float:
    """Slope of log seconds over log tokens, by least squares."""
    x, y = [math.log(tokens) for tokens, _ in pairs], [math.log(seconds) for _, seconds in pairs]
    a, b = sum(x) / len(x), sum(y) / len(y)
    return sum((u - a) * (v - b) for u, v in zip(x, y, strict=True)) / sum((u - a) ** 2 for u in x)


def _prompts(side: Side) -> Table:
    prompt, reply, rounds = 1024, 16, 5
    table = Table(
        f"What a group pays for its prompt of {prompt:,} tokens, replies of {reply} tokens, seconds",
        ("rollouts", "sampling", "update", "both", "relative to one rollout"),
    )
    groups = (1, 4, 16)
    found: dict[int, list[dict[str, Any]]] = {group: [] for group in groups}
    for measured in (False, *[True] * rounds):
        for group in groups:
            lap = side.ask(do="prompt", length=prompt, reply=reply, group=group)
            found[group] += [lap] if measured else []
    seconds = {g: Figure.of([x["seconds"] for x in laps]) for g, laps in found.items()}
    for group, laps in found.items():
        parts = [Figure.of([x[name] for x in laps]) for name in ("sampling", "update")]
        table.add(str(group), *parts, seconds[group], seconds[group].over(seconds[1]))
    table.notes.append("A prompt computed once per rollout would make 16 rollouts cost about 16 times one.")
    return table


PARTS: dict[str, Part] = {
    "sampling": sampling,
    "grpo": grpo,
    "sft": sft,
    "peak": peak,
    "memory": memory,
    "start": start,
    "growth": growth,
}
