"""Classic RLHF on short stories, beside DPO and its family on the same comparisons. One command:

    python recipes/rlhf.py --seeds 0 1 2

For each seed: sft on short stories -> stories sampled from it, compared in pairs by a judge with 10% wrong labels -> a
fifth of the pairs for a reward model -> PPO against that model; and DPO, IPO, KTO and SimPO on the same fifth. Then every
policy writes stories for unseen prompts, and the judge without noise counts how often they are better than the start's.

The judge (`gold`) stands in for people. No learner sees it, and no count of letters or words satisfies it: the requested
animal has to do something, names have to stay the same, nothing may be repeated, and the story has to end.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shlex
import shutil
import sys
import time
from collections.abc import Generator, Sequence
from itertools import combinations, product
from pathlib import Path
from typing import Any

import stories
import torch
from pages import write_page

import posttrain
from posttrain import Ask, Reply, Rollout, Turn
from posttrain.core.intervals import student_interval, told
from posttrain.core.types import StopReason
from posttrain.models.checkpoint_folder import load_model
from posttrain.models.losses.likelihood import token_logp
from posttrain.runs.checkpoint import resolve
from posttrain.training.model_comparison import preferences, win_rate
from posttrain.training.sources.packing import pack, split_microbatches

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
START = DATA / "models" / "stories260K"
ANIMALS = (*stories.ANIMALS, "lion", "monkey", "horse", "pig")
OPENINGS = (*stories.OPENINGS, "In the morning, the {} woke up.", "A boy had a pet {}.")
MAX_TOKENS = 160
STORIES = 640  # that the start is fine-tuned on
NOISE = 0.1  # share of wrong labels
SHARE = 0.2  # of the pairs that are learned from
SAMPLES = 8  # stories for each held-out prompt
COMPARED = 48  # and for each of the others
DIRECT_STEPS = 220  # updates of what learns from pairs directly: a quarter of a pass
METHODS: dict[str, dict[str, Any]] = {
    "dpo": {"beta": 0.1, "lr": 1e-4},
    "ipo": {"beta": 0.5, "lr": 1e-4},
    "kto": {"beta": 0.1, "lr": 1e-4},
    "simpo": {"lr": 5e-5},
}
STILL = set("is was were are be been and had has have named called who that in on".split())  # noqa: SIM905
BETWEEN = {"very", "then", "also", "always", "never", "just"}


# -- the judge ---------------------------------------------------------------------------------------------------------


def gold(animal: str, prompt: str, story: str, ended: bool) -> float:
    """The quality of a story, from 0 to 1."""
    words = re.findall(r"[A-Za-z']+", story)
    if len(words) < 15:
        return 0.0
    worth = 0.5 * _acts(animal, story) + 0.3 * _names(prompt, story) + 0.2 * _fresh(words)
    return worth if ended and story.rstrip().endswith((".", "!", "?", '"')) else 0.3 * worth


def _acts(animal: str, story: str) -> float:
    """Different things that the animal itself does, up to two: "the dog ran", "her cat then sat"."""
    verbs = set()
    before = "the|a|little|big|old|her|his|my"
    for match in re.finditer(rf"\b(?:{before})\s+{animal}\s+([a-z]+)\s*([a-z]*)", story.lower()):
        if match[1] not in STILL:
            verbs.add(match[2] if match[1] in BETWEEN else match[1])
    return min(len(verbs), 2) / 2


def _names(prompt: str, story: str) -> float:
    """1 where nobody but one is named in the middle of sentences, 0.5 for two names, 0 for more."""
    sentences = [prompt, *re.split(r"(?<=[.!?\"])\s+", story.strip())]
    names = {name for sentence in sentences for name in re.findall(r"(?<=[a-z,] )[A-Z][a-z]+", sentence)}
    count = len(names - {"I", "Mommy", "Mom", "Daddy", "Dad"})
    return 1.0 if count <= 1 else 0.5 if count == 2 else 0.0


def _fresh(words: Sequence[str]) -> float:
    """1 where no three words in a row come twice; 0 where a tenth of them do."""
    triples = list(zip(words, words[1:], words[2:], strict=False))
    return max(0.0, 1 - 10 * (1 - len(set(triples)) / len(triples)))


def judge(task: dict[str, Any], reply: Reply) -> float:
    """The judge as a reward, for evaluation alone."""
    return gold(task["animal"], task["prompt"], str(reply), reply.stop is StopReason.EOS)


def ask_reward_model(task: dict[str, Any]) -> Generator[Any, Any, Any]:
    """The environment of PPO: the reward model's score of the story; the model knows whether it was truncated."""
    reply = yield Turn(text=task["prompt"])
    told = {"prompt": task["prompt"], "response": str(reply), "cut": reply.stop.truncated}
    return (yield Ask("reward-model", told))


# -- data --------------------------------------------------------------------------------------------------------------


def prompts() -> list[dict[str, Any]]:
    return [
        {"id": f"{animal}-{i}", "prompt": opening.format(animal), "animal": animal}
        for animal, (i, opening) in product(ANIMALS, enumerate(OPENINGS))
    ]


def split(tasks: Sequence[dict[str, Any]], seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Tasks to learn from, and a quarter held out."""
    shuffled = list(tasks)
    random.Random(f"split {seed}").shuffle(shuffled)
    cut = len(shuffled) // 4
    return shuffled[cut:], shuffled[:cut]


def prepared(place: Path) -> Path:
    """The pretrained checkpoint, configured to end a story where it begins a new one: at its beginning-of-sequence token."""
    folder = place / "pretrained"
    shutil.copytree(START, folder, dirs_exist_ok=True)
    for name in ("config.json", "generation_config.json"):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**content, "eos_token_id": 1}, indent=1))
    return folder


def short_stories() -> list[dict[str, str]]:
    """Stories cut short: the first sentence as a prompt, the next three and the last one as the response."""
    text = (DATA / "tinystories.txt").read_text(encoding="utf-8")
    found = []
    for story in re.split(r"<\|endoftext\|>|\n\s*\n", text):
        first, *rest = re.split(r"(?<=[.!?])\s+", " ".join(story.split()))
        kept = " ".join([*rest[:3], *rest[-1:]])
        if len(rest) > 4 and len(kept) < 300 and len(first) < 120:
            found.append({"prompt": first, "response": " " + kept})
    return found[:STORIES]


def pairs(rollouts: Sequence[Rollout], seed: int) -> list[dict[str, Any]]:
    """Every pair of stories to one prompt that the judge distinguishes, a tenth of them reversed."""
    draw = random.Random(f"labels {seed}")
    by_task: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        by_task.setdefault(str(rollout.task["id"]), []).append(rollout)
    rows = []
    for own in by_task.values():
        for a, b in combinations(own, 2):
            if a.reward == b.reward or a.text == b.text:
                continue
            better, worse = (a, b) if a.reward > b.reward else (b, a)  # type: ignore[operator]
            if draw.random() < NOISE:
                better, worse = worse, better
            stops = {"chosen_stop": str(better.stop), "rejected_stop": str(worse.stop)}
            rows.append({"prompt": a.task["prompt"], "chosen": better.text, "rejected": worse.text, **stops})
    return draw.sample(rows, round(SHARE * len(rows)))


# -- measures ----------------------------------------------------------------------------------------------------------


def played(tasks: Sequence[dict[str, Any]], model: str | Path, seed: int, samples: int = SAMPLES) -> list[Rollout]:
    found = posttrain.evaluate(
        tasks, judge, model, samples=samples, max_tokens=MAX_TOKENS, seed=seed, env_workers=1, device="cpu"
    )
    return found.rollouts


def over_start(own: Sequence[Rollout], start: Sequence[Rollout]) -> dict[str, Any]:
    """How often the judge prefers a story to the start's of the same prompt and number; ties count half."""
    tasks = [str(rollout.task["id"]) for rollout in own]
    assert tasks == [str(rollout.task["id"]) for rollout in start]
    return win_rate(tasks, preferences([r.reward for r in own], [r.reward for r in start]))


@torch.no_grad()
def divergence(rollouts: Sequence[Rollout], model: str | Path, reference: str | Path) -> float:
    """KL of the policy from the reference, nats a story: the mean log ratio of its own samples."""
    total = 0.0
    for folder, sign in ((model, 1.0), (reference, -1.0)):
        loaded = load_model(resolve(str(folder)))
        parts = [r.transcripts for r in rollouts]
        for index in split_microbatches(parts, 2048):
            packed = pack([parts[i] for i in index], index)
            total += sign * token_logp(loaded.hidden(packed.layout, packed.at), loaded.head, packed.target).sum().item()
    return total / len(rollouts)


# -- one seed ----------------------------------------------------------------------------------------------------------


def one(seed: int, place: Path, steps: int, threads: int) -> dict[str, Any]:
    learning, held_out = split(prompts(), seed)
    common: dict[str, Any] = {"seed": seed, "threads": threads, "quiet": True, "overwrite": True, "device": "cpu"}
    begin = time.perf_counter()
    start = place / "sft"
    posttrain.sft(short_stories(), model=str(prepared(place)), out=str(start), rows=16, epochs=1, lr=5e-4, **common)
    sampled = played(learning, start, seed, COMPARED)
    rows = pairs(sampled, seed)
    (place / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    before = played(held_out, start, seed + 1000)
    found: dict[str, Any] = {
        "pairs": len(rows),
        "seconds": {"start": round(time.perf_counter() - begin)},
        "policies": {},
    }
    found["start"] = {"gold": _mean(before), "length": sum(r.n_sampled for r in before) / len(before)}
    scored = posttrain.reward_model(
        rows,
        start,
        out=str(place / "reward-model"),
        pooling="mean",
        rows=16,
        epochs=1,
        lr=1e-3,
        held_out=0.15,
        **common,
    )
    found["reward model"] = {k: scored.final.get(k) for k in ("eval/accuracy", "eval/longer_wins", "eval/bag_of_words")}

    def measure(name: str, folder: Path, since: float) -> None:
        stories = played(held_out, folder, seed + 1000)
        found["policies"][name] = {
            "win rate": over_start(stories, before),
            "gold": _mean(stories),
            "kl": divergence(stories, folder, start),
            "length": sum(r.n_sampled for r in stories) / len(stories),
            "ended": sum(r.stop is StopReason.EOS for r in stories) / len(stories),
            "seconds": round(time.perf_counter() - since),
            "stories": [(r.prompt, r.text, r.reward) for r in stories[:: SAMPLES * 8]],
        }

    since = time.perf_counter()
    judged = str(place / "reward-model")
    posttrain.rl(
        learning, ask_reward_model, start, algorithm="ppo", out=str(place / "ppo"), reward_model=(judged,),
        critic_model=judged, steps=steps, prompts=16, group=4, max_tokens=MAX_TOKENS, lr=1e-4,
        critic_lr=5e-4, kl=0.06, minibatches=2, env_workers=1, **common,
    )  # fmt: skip
    measure("ppo", place / "ppo", since)
    for name, options in METHODS.items():
        since = time.perf_counter()
        out = place / name
        posttrain.prefer(
            rows, start, algorithm=name, out=str(out), rows=16, steps=DIRECT_STEPS, **{**options, **common}
        )
        measure(name, out, since)
    return found


def _mean(rollouts: Sequence[Rollout]) -> float:
    return sum(float(r.reward) for r in rollouts) / len(rollouts)  # type: ignore[arg-type]


def report(found: dict[int, dict[str, Any]], command: str) -> list[str]:
    """All seeds as lines of Markdown."""
    seeds = sorted(found)
    date = time.strftime("%Y-%m-%d")
    lines = [
        "# Classic RLHF on stories, compared with methods that learn from the same comparisons directly",
        "",
        f"    {command}",
        "",
        f"{date}, torch {torch.__version__}, float32. How often a judge that no learner has seen prefers the "
        f"policy's story to the start's for the same held-out prompt, {SAMPLES} stories each, ties half. 95% intervals over "
        "prompts; of the mean, Student's over seeds.",
        "",
        "| | " + " | ".join(f"seed {seed}" for seed in seeds) + " | mean | KL, nats a story | gold | tokens |",
        "|---" * (len(seeds) + 5) + "|",
    ]

    def over(name: str, figure: str) -> str:
        return ", ".join(f"{found[seed]['policies'][name][figure]:.3g}" for seed in seeds)

    for name in ("ppo", *METHODS):
        rates = [found[seed]["policies"][name]["win rate"] for seed in seeds]
        cells = [told(rate) for rate in rates]
        means = [rate["mean"] for rate in rates]
        cells.append(f"**{sum(means) / len(means):.3f}** {student_interval(means).text()}")
        lines.append(f"| {name} | " + " | ".join([*cells, *(over(name, f) for f in ("kl", "gold", "length"))]) + " |")
    starts = [found[seed]["start"] for seed in seeds]
    lines += [
        "",
        "The start: gold "
        + ", ".join(f"{s['gold']:.3g}" for s in starts)
        + "; tokens "
        + ", ".join(f"{s['length']:.3g}" for s in starts)
        + ". Pairs: "
        + ", ".join(str(found[s]["pairs"]) for s in seeds)
        + ". Reward model, held-out accuracy, and that of a bag of words (a tenth of the labels is wrong): "
        + ", ".join(
            f"{found[s]['reward model']['eval/accuracy']:.3f} beside {found[s]['reward model']['eval/bag_of_words']:.3f}"
            for s in seeds
        )
        + ".",
        "",
        "The settings of PPO were chosen on seeds 8 and 9, which are not reported. With 24 stories a prompt instead of 48, "
        "so with some 3,500 comparisons for the reward model, its rate was 0.711 [0.664, 0.758] on seed 9, and between "
        "0.450 and 0.556 on seed 8 with KL coefficients of 0.12 and 0.2, fixed or adaptive; with 13,500 comparisons it was "
        "0.795 [0.744, 0.842] on seed 8. The options of the other methods are those of a trial on seed 0 with 16 stories a "
        "prompt; they take as many updates as there, a quarter of an epoch over the pairs.",
        "",
        f"Stories of seed {seeds[0]}, the first of some held-out prompts, with the judge's score:",
        "",
    ]
    for name in ("ppo", "dpo"):
        for prompt, story, score in found[seeds[0]]["policies"][name]["stories"][:4]:
            lines += [f"> {name}: **{prompt}** {' '.join(story.split())} ({score:.2f})", ""]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=45, help="of PPO")
    parser.add_argument("--out", default="runs/rlhf")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--into", help="write all seeds that are in --out between the marks of this page")
    options = parser.parse_args()
    for seed in options.seeds:
        place = Path(options.out) / f"seed-{seed}"
        place.mkdir(parents=True, exist_ok=True)
        found = one(seed, place, options.steps, options.threads)
        (place / "results.json").write_text(json.dumps(found, indent=1) + "\n")
        for name, figures in found["policies"].items():
            print(f"seed {seed} {name:<6} win rate {told(figures['win rate'])} kl {figures['kl']:.1f}")
    if options.into:
        files = sorted(Path(options.out).glob("seed-*/results.json"))
        found = {int(file.parent.name.removeprefix("seed-")): json.loads(file.read_text()) for file in files}
        write_page(Path(options.into), report(found, f"python {shlex.join(sys.argv)}"))


if __name__ == "__main__":
    main()
