"""A real model learns to answer questions on a text with the few words that answer it. One command, which also resumes:

    python -m recipes.real.reading

SmolLM2-135M-Instruct answers in sentences, and the exact match of SQuAD wants the words of the text. Some arms, each for
every seed, are measured on the same questions of held-out articles, greedy:

    start           the untrained model
    SFT             the gold answers of as many questions as GRPO sees
    GRPO            8 replies to each question; the reward is the mean of exact match and F1, and no answer is shown
    SFT on half     the gold answers of half of them; then GRPO on the other half, with two learning rates
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import posttrain
from recipes.real.study import Figures, Study, finished, number, options, read, run, shuffled

Row = dict[str, Any]

HELD_OUT = 5  # every fifth article
TEXT = 400  # characters of a text, at most
SENTENCE = re.compile(r"(?<=[.!?]) +(?=[A-Z\"“])")
REWARD = "verify:exact_match,answer=reply*0.5 + verify:f1,answer=reply*0.5"
SYSTEM = "Answer with a few words of the text."
SHOWN = (
    ("Marie Curie was born in Warsaw in 1867 and moved to Paris in 1891.", "When was Marie Curie born?", "1867"),
    ("Whales are mammals. The largest of them, the blue whale, eats krill.", "What do blue whales eat?", "krill"),
)
LONGEST = 16  # tokens of a reply
RATE: dict[str, Any] = {"lr": 5e-5, "warmup": 3, "schedule": "linear"}
AFTER_SFT = 1e-5  # learning rate of GRPO there
HALF = "SFT on half"
ARMS = ("start", "SFT", "GRPO", HALF, f"{HALF}, then GRPO", f"{HALF}, then GRPO at 5e-5")
COLUMNS = {"exact_match": "exact match", "f1": "F1", "words": "words of a reply", "minutes": "minutes"}


@dataclass
class Reading:
    """The arms of one seed: how each is trained, and how all are measured."""

    study: Study
    seed: int
    learned: list[Row]
    unseen: list[Row]
    prompts: int

    def sft(self, arm: str, rows: list[Row]) -> str:
        options = {"rows": self.prompts, "epochs": 1, "chat": True, **RATE}
        common = self.study.common(arm, self.seed)
        return finished(posttrain.sft(rows, model=self.study.model, **options, **common))

    def grpo(self, arm: str, model: str, tasks: list[Row], **rate: float) -> str:
        size = {"prompts": self.prompts, "group": 8, "max_tokens": LONGEST, "steps": len(tasks) // self.prompts}
        options = {"algorithm": "grpo", "kl": 0.0, **size, **RATE, **rate}
        return finished(posttrain.rl(tasks, REWARD, model, **options, **self.study.common(arm, self.seed)))

    def measured(self, model: str) -> Figures:
        rollouts = self.study.evaluate(self.unseen, REWARD, model, max_tokens=LONGEST).rollouts
        mean = {name: sum(r.rewards[name] for r in rollouts) / len(rollouts) for name in ("exact_match", "f1")}
        words = sum(len(r.text.split()) for r in rollouts) / len(rollouts)
        return {**mean, "words": words, "replies": [said(r) for r in rollouts[:6]]}

    def run(self, arms: Sequence[str]) -> None:
        start, half = self.study.model, len(self.learned) // 2
        first, rest = self.learned[:half], self.learned[half:]
        begun = str(self.study.folder(HALF, self.seed))
        work = {
            "start": lambda arm: start,
            "SFT": lambda arm: self.sft(arm, self.learned),
            "GRPO": lambda arm: self.grpo(arm, start, self.learned),
            HALF: lambda arm: self.sft(arm, first),
            f"{HALF}, then GRPO": lambda arm: self.grpo(arm, begun, rest, lr=AFTER_SFT),
            f"{HALF}, then GRPO at 5e-5": lambda arm: self.grpo(arm, begun, rest),
        }
        for arm in arms:
            self.study.once(arm, self.seed, lambda arm=arm: self.measured(work[arm](arm)))


def main() -> None:
    parser = options(__doc__ or "", "reading")
    parser.add_argument("--steps", type=int, default=40, help="of GRPO, with 8 questions each that no other step has")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="only these; no page is written")
    given = parser.parse_args()
    steps, prompts, asked = (2, 2, 8) if given.small else (given.steps, 8, 200)
    study = Study(given, {"steps": steps, "prompts": prompts, "questions": asked, "after SFT": AFTER_SFT, **RATE})
    learned, held_out = questions(given)
    unseen = sorted(held_out, key=lambda row: number(row["id"]))[:asked]
    for seed in study.seeds:
        Reading(study, seed, shuffled(learned, seed, "reading")[: steps * prompts], unseen, prompts).run(given.arms)
    if given.arms == list(ARMS):
        study.finish(page(study, len(unseen), steps * prompts))
    else:
        print("\n".join([*study.head("reading"), *study.table(given.arms, COLUMNS)]))


def questions(given: Any) -> tuple[list[Row], list[Row]]:
    """Questions of SQuAD with some sentences of their text: those to learn from, and those of held-out articles."""
    passages = {row["id"]: row for row in read(given.data / "retrieval" / "passages.jsonl")}
    sides: tuple[list[Row], list[Row]] = ([], [])
    for row in read(given.data / "retrieval" / "questions.jsonl"):
        if row["dataset"] != "squad" or not row["gold_ids"]:
            continue
        passage = passages[row["gold_ids"][0]]
        if text := excerpt(passage["text"], row["answers"][0], row["id"]):
            is_unseen = number(passage["title"]) % HELD_OUT == 0
            sides[is_unseen].append(task(row["id"], text, row["question"], row["answers"]))
    return sides


def excerpt(text: str, answer: str, name: str) -> str | None:
    """Whole sentences of a text, as many as fit, with the answer in one of them; which ones depends on the name alone.

    None where the sentence with the answer is too long.
    """
    sentences = SENTENCE.split(text)
    runs = []
    for first in range(len(sentences)):
        last = first
        while last < len(sentences) and len(" ".join(sentences[first : last + 1])) <= TEXT:
            last += 1
        if any(answer in sentence for sentence in sentences[first:last]):
            runs.append(" ".join(sentences[first:last]))
    return runs[number(name) % len(runs)] if runs else None


def task(name: str, text: str, question: str, answers: list[str]) -> Row:
    """A row for rl, eval and sft: two answered questions, then this one."""
    messages = [{"role": "system", "content": SYSTEM}]
    for *asked, reply in SHOWN:
        messages += [{"role": "user", "content": "\n".join(asked)}, {"role": "assistant", "content": reply}]
    messages.append({"role": "user", "content": f"{text}\n{question}"})
    return {"id": name, "prompt": messages, "question": question, "answer": answers, "response": answers[0]}


def said(rollout: Any) -> dict[str, Any]:
    """A reply for the page."""
    return {"question": rollout.task["question"], "answers": rollout.task["answer"][:3], "reply": rollout.text.strip()}


def page(study: Study, count: int, trained: int) -> list[str]:
    """The part of the page that the recipe writes."""
    lines = [
        *study.head("reading"),
        f"{count} questions of held-out articles, greedy. Mean over seeds with its 95% interval (Student), then every seed.",
        f"SFT and GRPO saw {trained} questions, each once; after SFT on half, GRPO saw the other half.",
        "",
        *study.table(ARMS, COLUMNS),
        "",
        f"GRPO above SFT, seed by seed, exact match: {study.gain('GRPO', 'SFT', 'exact_match')}; "
        f"GRPO after SFT on half above that SFT: {study.gain(f'{HALF}, then GRPO', HALF, 'exact_match')}.",
        "",
        "The first replies to held-out questions, of the first seed:",
        "",
        f"| question | gold | {' | '.join(ARMS[:3])} |",
        "|---" * 5 + "|",
    ]
    replies = [study.figures(arm)[0]["replies"] for arm in ARMS[:3]]
    for same in zip(*replies, strict=True):
        cells = [same[0]["question"], " / ".join(same[0]["answers"]), *(reply["reply"] for reply in same)]
        lines.append("| " + " | ".join(" ".join(cell.replace("|", "/").split()) for cell in cells) + " |")
    return lines


if __name__ == "__main__":
    run(main)
