"""The parts in which posttrain stands beside others: sampling, and steps of GRPO, SFT, DPO, reward models, distillation.

Every round asks the sides one after the other, so that a machine that becomes slower does so for all of them; ratios are
taken within a round.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flops import config_of, forward
from plan import Plan, Rival
from processes import Failed, Machine, Side, Sides
from tables import Figure, Goal, Table, number
from work import (
    BACKED_TOKENS,
    BUDGETS,
    CASES,
    DISTILLED,
    FIXED,
    KINDS_OF_PAIRS,
    MAX_TOKENS,
    PAIRS,
    REAL,
    REQUESTS,
    SFT_ROWS,
    pairs,
    rows,
    tokens_of,
    tokens_of_pairs,
)

from posttrain.models.native.decoder_flops import BACKWARD

OF_THE_PEAK = (
    "Of the peak: useful arithmetic (the prompt of a pair once, no padding) over what matrix products reach here at best; "
    "goal is: what the goal would take, at the speed of TRL in this run."
)

# -- sampling ----------------------------------------------------------------------------------------------------------


def sampling(machine: Machine, plan: Plan) -> list[Table]:
    """Tokens per second of all requests at once."""
    table = Table(
        "Sampling, tokens per second",
        ("model, work", "posttrain", "generate", "ratio", "goal", "vLLM", "ratio", "goal"),
        notes=[
            "Prefill included, model loading not; only tokens that were asked for count. posttrain and vLLM return the "
            "log-probability of each token, generate does not.",
            f"{REQUESTS} requests at once. fixed: {FIXED} tokens each; ragged: natural lengths, mean "
            f"{sum(BUDGETS) / len(BUDGETS):.0f}, longest {max(BUDGETS)}."
            + (" vLLM ran uncompiled." if plan.eager else ""),
        ],
    )
    names = ["posttrain", "generate", *(["vllm"] if machine.vllm.exists() else [])]
    if "vllm" not in names:
        table.notes.append(f"vLLM was not measured: {machine.vllm} is missing.")
    for rival in plan.rivals:
        speed: dict[str, dict[str, list[float]]] = {case: {name: [] for name in names} for case in CASES}
        settings = {"model": machine.model(rival.model), "precision": rival.precision, "eager": plan.eager}
        with Sides(machine) as sides:
            running = {name: sides.start(name, "serve", **settings) for name in names}
            for side in running.values():
                side.ask(do="sample", case="warm")
            for _ in range(plan.rounds["sampling"][rival.model]):
                for case in CASES:
                    for name, side in running.items():
                        found = side.ask(do="sample", case=case)
                        speed[case][name].append(found["tokens"] / found["seconds"])
        for case in CASES:
            ours, *others = (Figure.of(speed[case][name]) for name in names)
            cells: list[object] = []
            for other, bound in zip(others, (2.5, 1.5), strict=False):
                ratio = ours.over(other)
                cells += [other, ratio, Goal(bound).judge(ratio.median)]
            table.add(f"{rival.name}, {case}", ours, *cells, *[""] * (6 - len(cells)))
    return [table]


# -- GRPO --------------------------------------------------------------------------------------------------------------


def grpo(machine: Machine, plan: Plan) -> list[Table]:
    """Whole steps: rollouts, rewards, update, record."""
    speed = Table(
        "A step of GRPO from end to end, 8 prompts x 8 rollouts, sampled tokens per second",
        ("model, reward", "posttrain", "TRL", "ratio", "goal", "posttrain s/step", "of it update", "TRL s/step"),
    )
    memory = _memory_table("model, reward")
    for rival in plan.rivals:
        common = _settings(machine, rival)
        way, note = _choose(machine, plan, rival)
        speed.notes.append(note)
        with Sides(machine) as sides:
            kinds = plan.slow_rewards if rival.model == REAL else plan.rewards
            ours = {kind: sides.start("posttrain", "grpo", reward=kind, **common) for kind in kinds}
            theirs = sides.start("trl", "grpo", way=way, **common)
            found: dict[tuple[str, str], list[dict[str, Any]]] = {}
            for _ in range(plan.rounds["grpo"][rival.model]):
                for kind, side in ours.items():
                    found.setdefault(("posttrain", kind), []).append(side.ask())
                    found.setdefault(("trl", kind), []).append(theirs.ask(reward=kind))
        for kind in ours:
            mine, peer = found["posttrain", kind], found["trl", kind]
            _add_step(speed, f"{rival.name}, {kind}", mine, peer, Goal(8 if kind == "sparse" else 5))
            _add_memory(memory, f"{rival.name}, {kind}", mine[-1], peer[-1])
    return [speed, memory]


def _settings(machine: Machine, rival: Rival) -> dict[str, Any]:
    model = rival.model
    return {"model": machine.model(model), "precision": rival.precision, "max_tokens": MAX_TOKENS[model]}


def _choose(machine: Machine, plan: Plan, rival: Rival) -> tuple[str, str]:
    """The way in which TRL is fastest, and how that was found."""
    ways = plan.ways[rival.model]
    if len(ways) == 1:
        return ways[0], f"{rival.name}: TRL {_told(ways[0])}."
    with Sides(machine) as sides:
        tried = sides.start("trl", "choose", ways=ways, **_settings(machine, rival)).first
    best = min(tried, key=lambda way: tried[way])
    listed = "; ".join(f"{_told(way)}: {number(seconds)} s" for way, seconds in tried.items())
    return best, f"{rival.name}: TRL {_told(best)}, its fastest (one step each, per 1,000 tokens: {listed})."


def _told(way: str) -> str:
    batch = way.removesuffix("+")
    return f"updates with {batch} rollouts at once" + (" and samples with continuous batching" if way != batch else "")


def _add_step(table: Table, name: str, mine: list[dict[str, Any]], peer: list[dict[str, Any]], goal: Goal) -> None:
    ours, theirs = (Figure.of([x["tokens"] / x["seconds"] for x in found]) for found in (mine, peer))
    seconds, theirs_seconds = (Figure.of([x["seconds"] for x in found]) for found in (mine, peer))
    update = Figure.of([x["update"] for x in mine])
    ratio = ours.over(theirs)
    table.add(name, ours, theirs, ratio, goal.judge(ratio.median), seconds, update, theirs_seconds)


def _memory_table(first: str) -> Table:
    """A table of what `_add_memory` adds, whose first column has this name."""
    return Table(
        "Most memory in these steps, MiB",
        (first, "posttrain, added", "TRL, added", "ratio", "goal", "posttrain, all", "TRL, all", "ratio"),
        notes=["Added: over imports and one loaded model. posttrain's includes the process that scores."],
    )


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
        ("model", "posttrain", "TRL, padded", "TRL, packed", "ratio to the better", "goal", "of the peak", "goal is"),
        notes=[
            "Learned: tokens of the solutions; prompts are read but not learned. Preparing the data is left out.",
            f"{OF_THE_PEAK} In float32 alone.",
        ],
    )
    memory = _memory_table("model, TRL's way")
    count = 1000
    for rival in plan.rivals:
        model = rival.model
        common = {"model": machine.model(model), "precision": rival.precision, "rows": count}
        packed = _packed_rows(machine.model(model), count)
        ways = {"padded": {"packed": False, "batch": SFT_ROWS}, "packed": {"packed": True, "batch": packed}}
        ours, theirs = dict[str, Figure](), dict[str, Figure]()
        last: dict[tuple[str, str], dict[str, Any]] = {}
        for way, how in ways.items():  # one after the other: both at once do not fit into 24 GiB with a real vocabulary
            speed: dict[str, list[float]] = {"ours": [], way: []}
            with Sides(machine) as sides:
                running = {
                    "ours": sides.start("posttrain", "sft", **common),
                    way: sides.start("trl", "sft", **how, **common),
                }
                for _ in range(plan.rounds["sft"][model]):
                    for name, side in running.items():
                        last[way, name] = found = side.ask(steps=plan.sft_steps[model])
                        speed[name].append(found["tokens"] / found["seconds"])
            ours[way], theirs[way] = Figure.of(speed["ours"]), Figure.of(speed[way])
        better = max(theirs, key=lambda way: theirs[way].median)
        ratio = ours[better].over(theirs[better])
        goal, shares = Goal(4), ("", "")
        if rival.precision == "float32":
            share = _work_of_a_token(machine.model(model), count) / _peak(machine, model)
            shares = (f"{ours[better].median * share:.0%}", f"{goal.bound * theirs[better].median * share:.0%}")
        table.add(rival.name, ours[better], *theirs.values(), ratio, goal.judge(ratio.median), *shares)
        _add_memory(memory, f"{rival.name}, {better}", last[better, "ours"], last[better, better])
    table.notes.append(f"TRL packs into rows of 1,024 tokens, {packed} of them a step: about {SFT_ROWS} rows of GSM8K.")
    return [table, memory]


def _work_of_a_token(folder: str, count: int) -> float:
    """Useful FLOP of an update for each learned token of these rows."""
    some = rows(count)
    prompts, replies = (
        list(map(len, tokens_of(folder, [row[name] for row in some]))) for name in ("prompt", "response")
    )
    groups = [(p, [r + 1]) for p, r in zip(prompts, replies, strict=True)]
    return BACKWARD * forward(config_of(folder), groups) / sum(r + 1 for r in replies)


# -- models of transformers -------------------------------------------------------------------------------------------


def backed(machine: Machine, plan: Plan) -> list[Table]:
    """GRPO and SFT of models that transformers computes on both sides."""
    speed = Table(
        f"Models that transformers computes on both sides: GRPO, 8 prompts x 8 rollouts of {BACKED_TOKENS} tokens",
        ("model", "posttrain", "TRL", "ratio", "goal", "posttrain s/step", "of it update", "TRL s/step"),
    )
    memory = _memory_table("model")
    learned = Table(
        f"The same models: SFT, {SFT_ROWS} rows of GSM8K a step, learned tokens per second",
        ("model", "posttrain", "TRL, padded", "ratio", "goal"),
    )
    for model in plan.backed:
        common = {"model": machine.model(model), "precision": "float32", "max_tokens": BACKED_TOKENS, "backed": True}
        found: dict[str, list[dict[str, Any]]] = {"posttrain": [], "trl": []}
        with Sides(machine) as sides:
            running = {
                "posttrain": sides.start("posttrain", "grpo", reward="signal", **common),
                "trl": sides.start("trl", "grpo", way="8", **common),
            }
            for _ in range(plan.backed_rounds):
                for name, side in running.items():
                    found[name].append(side.ask())
        _add_step(speed, model, found["posttrain"], found["trl"], Goal(2))
        _add_memory(memory, model, found["posttrain"][-1], found["trl"][-1])
        rates: dict[str, list[float]] = {"posttrain": [], "trl": []}
        with Sides(machine) as sides:
            running = {
                "posttrain": sides.start("posttrain", "sft", rows=200, **common),
                "trl": sides.start("trl", "sft", packed=False, batch=SFT_ROWS, rows=200, **common),
            }
            for _ in range(plan.backed_rounds):
                for name, side in running.items():
                    lap = side.ask(steps=1)
                    rates[name].append(lap["tokens"] / lap["seconds"])
        mine, peer = (Figure.of(values) for values in rates.values())
        ratio = mine.over(peer)
        learned.add(model, mine, peer, ratio, Goal(1.5).judge(ratio.median))
    return [speed, memory, learned]


# -- pairs -------------------------------------------------------------------------------------------------------------


def dpo(machine: Machine, plan: Plan) -> list[Table]:
    """Steps of DPO, the reference's log-probabilities computed beforehand on both sides."""
    return _of_pairs("dpo", "DPO", {"gsm8k": Goal(4), "short": Goal(3)}, machine, plan)


def reward(machine: Machine, plan: Plan) -> list[Table]:
    """Steps of a reward model."""
    return _of_pairs("reward", "Reward model", {"gsm8k": Goal(3), "short": Goal(3)}, machine, plan)


def _of_pairs(part: str, title: str, goals: dict[str, Goal], machine: Machine, plan: Plan) -> list[Table]:
    memory = _memory_table("model, pairs")
    table = Table(
        f"{title}, {PAIRS} pairs a step, pairs per second",
        ("model", "pairs", "posttrain", "TRL", "ratio", "goal", "of the peak", "goal is", "TRL, pairs at once"),
        notes=[
            "gsm8k: a problem with its solution and that of another problem; short: prompts and replies of a line or two. "
            "A round is whole passes over the pairs, so both sides have the same ones, and the same tokens.",
            "TRL pads, and takes as many pairs at once as was fastest (in brackets: seconds per 1,000 tokens of each way).",
            OF_THE_PEAK,
        ],
    )
    for kind, rivals in plan.pairs[part].items():
        for rival in rivals:
            model = rival.model
            common = {"model": machine.model(model), "precision": rival.precision, "kind": kind}
            steps = KINDS_OF_PAIRS[kind] // PAIRS
            found: dict[str, list[float]] = {"posttrain": [], "trl": []}
            last: dict[str, dict[str, Any]] = {}
            with Sides(machine) as sides:
                running = {
                    "posttrain": sides.start("posttrain", part, **common),
                    "trl": sides.start("trl", part, ways=plan.pair_ways[model], **common),
                }
                way = _way(running["trl"].first)
                for side in running.values():
                    side.ask(steps=steps - 1)  # to the end of the first pass
                for _ in range(plan.rounds["pairs"][model]):
                    for name, side in running.items():
                        lap = side.ask(steps=steps * plan.passes[model])
                        _same_tokens(side, lap, part, kind, machine.model(model), plan.passes[model])
                        found[name].append(lap["pairs"] / lap["seconds"])
                        last[name] = lap
            _add_memory(memory, f"{rival.name}, {kind}", last["posttrain"], last["trl"])
            mine, peer = (Figure.of(values) for values in found.values())
            ratio = mine.over(peer)
            goal = goals.get(kind)
            judged = reached = needed = ""
            if goal:
                share = _work_of_a_pair(part, machine.model(model), kind) / _peak(machine, model)
                judged = goal.judge(ratio.median)
                reached, needed = f"{mine.median * share:.0%}", f"{goal.bound * peer.median * share:.0%}"
            table.add(rival.name, kind, mine, peer, ratio, judged, reached, needed, way)
    return [table, memory]


def _work_of_a_pair(part: str, folder: str, kind: str) -> float:
    """Useful FLOP of an update, on average over the pairs. A reward model has one score in place of the vocabulary."""
    some = pairs(kind)
    prompts, chosen, rejected = (
        list(map(len, tokens_of(folder, [row[name] for row in some]))) for name in ("prompt", "chosen", "rejected")
    )
    groups = [(p, [c + 1, r + 1]) for p, c, r in zip(prompts, chosen, rejected, strict=True)]
    config = config_of(folder)
    return BACKWARD * forward(replace(config, vocab=1) if part == "reward" else config, groups) / len(some)


def _peak(machine: Machine, model: str) -> float:
    """FLOP/s of this machine's best matrix product."""
    with Sides(machine) as sides:
        side = sides.start("posttrain", "serve", model=machine.model(model))
        return float(side.ask(do="peak")["flops"])


def _way(said: dict[str, Any]) -> str:
    """How many examples TRL takes at once, and what was tried."""
    listed = ", ".join(f"{way}: {number(seconds)}" for way, seconds in said["tried"].items())
    return f"{said['way']} ({listed})"


def _same_tokens(side: Side, lap: dict[str, Any], part: str, kind: str, folder: str, passes: int) -> None:
    """Raise Failed unless a side read exactly the tokens of these passes: those of the folder's tokenizer."""
    expected = tokens_of_pairs(folder, kind)
    if part == "reward" and side.name.startswith("trl"):  # counts what it reads, the prompt of a pair twice
        expected += 2 * sum(map(len, tokens_of(folder, [row["prompt"] for row in pairs(kind)])))
    if lap["tokens"] != passes * expected:
        raise Failed(f"{side.name} had {lap['tokens']} tokens instead of {passes * expected}")


# -- distillation ------------------------------------------------------------------------------------------------------


def distill(machine: Machine, plan: Plan) -> list[Table]:
    """Whole steps of distillation on policy: replies, the teacher's distribution at each of their tokens, update."""
    table = Table(
        f"On-policy distillation, {DISTILLED} prompts a step and a reply each, sampled tokens per second",
        (
            *("loss, replies", "posttrain", "TRL", "ratio", "posttrain s/step", "of it sampling", "learning"),
            *("TRL s/step", "of it sampling", "learning", "TRL, replies at once"),
        ),
        notes=[
            "Student: 5 M parameters, teacher: 27 M, random, of the same tokenizer; exact divergences over the whole "
            "vocabulary. Learning includes the teacher's pass.",
            "TRL: DistillationTrainer. It samples all replies at once and learns from as many as was fastest (in brackets: "
            "seconds per 1,000 tokens of each way).",
        ],
    )
    for lesson in plan.lessons:
        common = {
            "model": machine.model(lesson.student),
            "teacher": machine.model(lesson.teacher),
            "precision": "float32",  # TRL would learn in float32 anyway: see README.md here
            "divergence": lesson.divergence,
            "max_tokens": lesson.max_tokens,
        }
        found: dict[str, list[dict[str, Any]]] = {"posttrain": [], "trl": []}
        with Sides(machine) as sides:
            running = {
                "posttrain": sides.start("posttrain", "distill", **common),
                "trl": sides.start("trl", "distill", ways=plan.lesson_ways, **common),
            }
            for _ in range(plan.rounds["distill"][lesson.student]):
                for name, side in running.items():
                    found[name].append(side.ask())
            way = _way(running["trl"].first)
        ours, theirs = (Figure.of([lap["tokens"] / lap["seconds"] for lap in laps]) for laps in found.values())
        spent = [_spent(laps) for laps in found.values()]
        table.add(lesson.name, ours, theirs, ours.over(theirs), *spent[0], *spent[1], way)
    return [table]


def _spent(laps: list[dict[str, Any]]) -> tuple[Figure, Figure, Figure]:
    """Seconds of a step, of its sampling, and of the rest."""
    whole, sampling = ([lap[name] for lap in laps] for name in ("seconds", "rollout"))
    return Figure.of(whole), Figure.of(sampling), Figure.of([a - b for a, b in zip(whole, sampling, strict=True)])


def _packed_rows(folder: str, count: int) -> int:
    """How many rows of 1,024 tokens hold about as much as `SFT_ROWS` rows of the data."""
    texts = [r["prompt"] + r["response"] for r in rows(count)]
    mean = sum(len(ids) + 1 for ids in tokens_of(folder, texts)) / count
    return max(1, round(SFT_ROWS * mean / 1024))
