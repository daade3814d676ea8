"""A real model learns to answer questions with a search engine, as in Search-R1. One command, which also resumes:

    python -m recipes.real.search

The questions are those of SQuAD and PopQA over the 22,187 passages of ../shared/data/retrieval; whole articles of SQuAD and
a fifth of PopQA's questions are held out. For every seed:

    SFT           imitates scripted episodes: a search for the question, then the answer that the passage shows
    GRPO          the model searches; the reward is the exact match of its answer alone (Search-R1, arXiv 2503.09516)
    without ...   the same two stages without a search engine

Where are the questions lost that GRPO does not answer? Its policy also answers with a search that is scripted, for the
words of the question, and with the gold passage. Policies are measured on the same held-out questions, greedy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import posttrain
from posttrain import Rollout
from posttrain.core.types import SpanKind
from posttrain.envs.builtin.search_qa import SEARCH, row_to_task
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.services.retrieval.passage_index import PassageIndex, build, open_index
from posttrain.verify.short_answer import contains_answer
from recipes import search_qa
from recipes.real.study import Figures, Study, conversation, finished, options, right_and_wrong, run, shuffled

Row = dict[str, Any]

SHOWN = 800  # characters of a passage
SIZE = search_qa.Size(topk=1, shown=SHOWN)
LONGEST = 48  # tokens of a reply
SFT_LR, GRPO_LR = 5e-5, 1e-5
WITHOUT, SCRIPTED, GOLD = "without search, ", "GRPO, scripted search", "GRPO, gold passage"
ARMS = ("start", "SFT", "GRPO", SCRIPTED, GOLD, f"{WITHOUT}SFT", f"{WITHOUT}GRPO")
FIGURES = ("exact", "answered", "form", "searches", "found")


@dataclass
class Searching:
    """The arms of one seed: how each is trained, and how all are measured."""

    study: Study
    seed: int
    index: PassageIndex
    place: str  # folder of the index
    learned: list[Row]
    unseen: list[Row]
    demonstrations: int
    prompts: int
    steps: int

    def env(self, arm: str) -> dict[str, Any]:
        """The environment of an arm, with the search engine or without."""
        if arm.startswith(WITHOUT):
            return {"env": search_qa.named({"searches": 0, "chat": "true"})}
        shown = {"topk": 1, "shown": SHOWN, "searches": 1, "chat": "true"}
        return {"env": search_qa.named(shown), "retriever": (self.place,)}

    def sft(self, arm: str) -> str:
        first = self.learned[: 4 * self.demonstrations]  # the search does not answer all of them
        rows = search_qa.imitation_rows(self.index, first, not arm.startswith(WITHOUT), SIZE)[: self.demonstrations]
        options = {"rows": 8, "epochs": 1, "lr": SFT_LR, "warmup": 3, "schedule": "linear", **self.env(arm)}
        return finished(posttrain.sft(rows, model=self.study.model, **options, **self.study.common(arm, self.seed)))

    def grpo(self, arm: str) -> str:
        start = str(self.study.folder(arm.replace("GRPO", "SFT"), self.seed))
        tasks = self.learned[4 * self.demonstrations :]
        options = {
            "algorithm": "grpo",
            "kl": 0.0,
            "group": 8,
            "max_tokens": LONGEST,
            "lr": GRPO_LR,
            "warmup": 3,
            **self.env(arm),
        }
        size = {"steps": self.steps, "prompts": self.prompts}
        return finished(posttrain.rl(tasks, model=start, **options, **size, **self.study.common(arm, self.seed)))

    def measured(self, arm: str, model: str) -> Figures:
        rollouts = self.study.evaluate(self.unseen, model=model, max_tokens=LONGEST, **self.env(arm)).rollouts
        mean = {name: sum(r.rewards.get(name, 0.0) for r in rollouts) / len(rollouts) for name in FIGURES}
        return {**mean, "queries": queries(rollouts), "episodes": [conversation(r) for r in right_and_wrong(rollouts)]}

    def with_given_passage(self, arm: str) -> Figures:
        """The policy of GRPO answers from what a scripted search found, or from the gold passage."""
        words = Tokenizer.load(self.study.model)
        rows = [scripted(row, self.index, arm == GOLD, words) for row in self.unseen]
        model = str(self.study.folder("GRPO", self.seed))
        how = {"max_tokens": LONGEST, "chat": False, "stop": ("</answer>",)}
        rollouts = self.study.evaluate(rows, "verify:exact_match,answer=tags", model, **how).rollouts
        exact = sum(r.reward or 0.0 for r in rollouts) / len(rollouts)
        return {"exact": exact, "found": sum(row["found"] for row in rows) / len(rows)}

    def run(self) -> None:
        for arm in ARMS:
            self.study.once(arm, self.seed, lambda arm=arm: self.figures(arm))

    def figures(self, arm: str) -> Figures:
        if arm in (SCRIPTED, GOLD):
            return self.with_given_passage(arm)
        if arm == "start":
            return self.measured(arm, self.study.model)
        return self.measured(arm, self.sft(arm) if arm.endswith("SFT") else self.grpo(arm))


def main() -> None:
    given = options(__doc__ or "", "search").parse_args()
    demonstrations, steps, prompts, asked = (8, 2, 2, 8) if given.small else (320, 16, 8, 150)
    settings = {
        "demonstrations": demonstrations,
        "steps": steps,
        "prompts": prompts,
        "questions": asked,
        "shown": SHOWN,
        "rates": [SFT_LR, GRPO_LR],
    }
    study = Study(given, settings)
    place = study.out / "index"
    if not place.exists():
        build(given.data / "retrieval" / "passages.jsonl", str(place))
    index = open_index(str(place))
    learned, held_out = search_qa.questions(given.data / "retrieval", None)
    unseen = search_qa.sample(held_out, asked)
    for seed in study.seeds:
        rows = shuffled(learned, seed, "search")
        Searching(study, seed, index, str(place), rows, unseen, demonstrations, prompts, steps).run()
    study.finish(page(study, len(unseen), demonstrations, steps * prompts))


def scripted(row: Row, index: PassageIndex, is_gold: bool, words: Tokenizer) -> Row:
    """A row whose prompt ends behind <information>: what a search for the question finds, or the gold passage."""
    task = row_to_task(row)
    assert task is not None
    gold = next(passage for passage in index.passages if passage.id in row["gold_ids"]) if is_gold else None
    contents = gold.contents if gold else search_qa.found(index, task["question"], 1)[0]["contents"]
    title, _, text = contents.partition("\n")
    prompt = words.render([{"role": "user", "content": SEARCH.format(question=task["question"])}])
    prompt += f"<think> I have to look this up. </think>\n<search> {task['question']} </search>"
    shown = f"Doc 1(Title: {title}) {text[:SHOWN]}"
    is_found = contains_answer(shown, task["answers"], words=True) == 1.0
    return {
        "id": row["id"], "prompt": f"{prompt}\n\n<information>{shown}</information>\n\n", "answer": task["answers"],
        "found": is_found,
    }  # fmt: skip


def queries(rollouts: Sequence[Rollout]) -> list[list[str]]:
    """Some questions with the queries that the policy searched for."""
    found = []
    for rollout in rollouts:
        asked = [turn.text for turn in rollout.turns if turn.kind is SpanKind.SAMPLED and "<search>" in turn.text]
        if asked:
            query = asked[0].partition("<search>")[2].partition("</search>")[0].strip()
            found.append([rollout.task["question"], query])
    return found[:8]


def page(study: Study, count: int, shown: int, trained: int) -> list[str]:
    """The part of the page that the recipe writes."""
    columns = {"exact": "exact match", "found": "the passage contains the answer", "minutes": "minutes"}
    acts = {"searches": "searches", "answered": "answered", "form": "format kept"}
    played = [arm for arm in ARMS if arm not in (SCRIPTED, GOLD)]
    lines = [
        *study.head("search"),
        f"{count} held-out questions, greedy. Mean over seeds with its 95% interval (Student), then every seed. "
        f"SFT imitates {shown} episodes; GRPO then samples rollouts for {trained} questions.",
        "",
        *study.table(ARMS, columns),
        "",
        "Behaviour of the policies, as shares of episodes:",
        "",
        *study.table(played, acts),
        "",
        f"Exact match, seed by seed: with search minus without {study.gain('GRPO', 'without search, GRPO', 'exact')}; "
        f"GRPO minus its SFT {study.gain('GRPO', 'SFT', 'exact')}.",
        "",
        "Queries of the first seed after GRPO:",
        "",
        "| question | query |",
        "|---|---|",
    ]
    first = study.figures("GRPO")[0]
    for asked in first["queries"]:
        lines.append("| " + " | ".join(" ".join(text.replace("|", "/").split()) for text in asked) + " |")
    lines += ["", "The first right and the first wrong held-out episode of the first seed after GRPO:", ""]
    for episode in first["episodes"]:
        lines += episode
    return lines


if __name__ == "__main__":
    run(main)
