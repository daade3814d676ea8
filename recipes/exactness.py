"""Are the log-probabilities of a real model in a GGUF file those that transformers computes from the same file?

    python recipes/exactness.py [--prompts 200] [--model FILE.gguf] [--out docs/results/real-model.md]

Prompts and answers are those of sft/instructions.jsonl, in the model's chat template. transformers opens the file itself
and computes each text alone. Beside it are the model as posttrain opens it (native, where it is) and as it opens it through
transformers. A greedy reply is compared by the likeliest token that transformers has at each place of it.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch
from pages import write_page
from torch import Tensor

from posttrain.cli.real_model import fetched
from posttrain.core.batch import Layout
from posttrain.core.types import Sampling
from posttrain.engines.local.embedded import embedded
from posttrain.models.checkpoint_folder import load_model
from posttrain.models.hf.transformers_folder import load_backed
from posttrain.models.json_files import read_json
from posttrain.models.tokenizer.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[1]
ROWS = ROOT.parent / "shared" / "data" / "sft" / "instructions.jsonl"
TOKENS = 16  # of a greedy reply
ROUNDED = 20  # texts that are computed in bfloat16 too: it takes a processor without it much longer


@dataclass
class Apart:
    """Differences of log-probabilities, in nats."""

    text: list[float] = field(default_factory=list)  # largest over the tokens of each text
    vocabulary: float = 0.0  # largest over all tokens at all places
    tokens: int = 0
    sum: float = 0.0

    def add(self, own: Tensor, theirs: Tensor, ids: Tensor) -> None:
        """Compare two tables [L, V] of the same text."""
        apart = (own.float() - theirs.float()).abs()
        chosen = apart[:-1].gather(-1, ids[1:, None])
        self.text.append(float(chosen.max()))
        self.tokens, self.sum = self.tokens + chosen.numel(), self.sum + float(chosen.sum())
        self.vocabulary = max(self.vocabulary, float(apart.max()))

    def row(self, name: str) -> str:
        ordered = sorted(self.text)
        middle = ordered[len(ordered) // 2]
        return f"| {name} | {self.sum / self.tokens:.1e} | {middle:.1e} | {ordered[-1]:.1e} | {self.vocabulary:.1e} |"


def opened_by_transformers(path: Path) -> Any:
    """The model as transformers opens the file, in float32."""
    import transformers

    how = (
        {"quantization_config": transformers.GgufConfig(dequantize=True)} if hasattr(transformers, "GgufConfig") else {}
    )
    kind = transformers.AutoModelForCausalLM
    return kind.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, local_files_only=True, **how
    ).eval()


def texts(tokenizer: Tokenizer, count: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yield (prompt, prompt with answer), as ids."""
    with ROWS.open() as file:
        for line, _ in zip(file, range(count), strict=False):
            row = json.loads(line)
            asked = [{"role": "user", "content": row["prompt"]}]
            if tokenizer.chat_template is None:
                prompt = tokenizer.encode(row["prompt"], start=True)
                yield prompt, prompt + tokenizer.encode(" " + row["response"])
            else:
                whole = tokenizer.render([*asked, {"role": "assistant", "content": row["response"]}], False)
                yield tokenizer.encode(tokenizer.render(asked)), tokenizer.encode(whole)


@torch.no_grad()
def own_table(model: Any, ids: Tensor) -> Tensor:
    """Log-probabilities [L, V] of a model of ours."""
    count = len(ids)
    layout = Layout(ids, torch.arange(count), (0,), (count,), (-1,))
    return model.head.logits(model.hidden(layout, torch.arange(count))).float().log_softmax(-1)


@torch.no_grad()
def their_table(model: Any, ids: Tensor) -> Tensor:
    return model(input_ids=ids[None], use_cache=False).logits[0].float().log_softmax(-1)


def replies(model: Any, tokenizer: Tokenizer, prompts: Sequence[list[int]]) -> list[list[int]]:
    """Greedy replies of our engine, all prompts at once."""
    engine, done = embedded(model, tokenizer), {}
    for id, prompt in enumerate(prompts):
        engine.submit(id, prompt, Sampling(0.0, max_tokens=TOKENS))
    while len(done) < len(prompts):
        done.update({c.id: list(c.tokens) for c in engine.poll()})
    engine.close()
    return [done[id] for id in range(len(prompts))]


def margins(model: Any, prompt: list[int], reply: list[int]) -> list[float]:
    """For each token of a reply that is not the likeliest one of transformers: by how many nats it is not."""
    found = their_table(model, torch.tensor(prompt + reply))[len(prompt) - 1 : -1]
    less = found.max(-1).values - found.gather(-1, torch.tensor(reply)[:, None])[:, 0]
    return [float(x) for x in less if x > 0]


def compare(path: Path, count: int, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Compare everything. Returns the `Apart` of each way, by name, and (tokens, margins) of its greedy replies.

    bfloat16 is that of `--precision`: float32 weights, products in bfloat16; beside it transformers in the same way.
    """
    tokenizer, theirs = Tokenizer.load(path), opened_by_transformers(path)
    both = list(texts(tokenizer, count))
    models = (load_model(path), load_backed(path, read_json(path / "config.json")))
    ways = {type(model).__name__: model for model in models}
    found: dict[str, Any] = {f"{name}, {kind}": Apart() for kind in ("float32", "bfloat16") for name in ways}
    found["transformers itself, bfloat16"] = Apart()
    for number, (_, text) in enumerate(both):
        ids = torch.tensor(text)
        exact = their_table(theirs, ids)
        for kind in ("float32", "bfloat16") if number < ROUNDED else ("float32",):
            with torch.autocast("cpu", torch.bfloat16, enabled=kind == "bfloat16"):
                for name, model in ways.items():
                    found[f"{name}, {kind}"].add(own_table(model, ids), exact, ids)
                if kind == "bfloat16":
                    found["transformers itself, bfloat16"].add(their_table(theirs, ids), exact, ids)
    say(f"compared    {count} texts")
    prompts = [prompt for prompt, _ in both]
    known: dict[int, tuple[list[int], list[float]]] = {}  # the two ways mostly have the same replies
    for name, model in ways.items():
        sampled, odd = replies(model, tokenizer, prompts), []
        for number, reply in enumerate(sampled):
            if number not in known or known[number][0] != reply:
                known[number] = reply, margins(theirs, prompts[number], reply)
            odd.append(known[number][1])
        say(f"compared    replies of {name}")
        found[f"{name}, replies"] = sum(map(len, sampled)), [m for m in odd if m]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "real-model.md")
    options = parser.parse_args()
    path, begun = options.model or fetched(), time.time()
    found = compare(path, options.prompts)
    print("page       ", write_page(options.out, report(path, options.prompts, found, time.time() - begun)))


def report(path: Path, count: int, found: dict[str, Any], seconds: float) -> list[str]:
    import transformers

    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    rounded = min(count, ROUNDED)
    lines = [
        f"`python recipes/exactness.py --prompts {count}` on {path.name}, {date.today()}, commit {commit}, "
        f"{torch.get_num_threads()} threads of {platform.machine()}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}, {seconds / 60:.0f} minutes. Texts: {count}, of "
        f"which {rounded} in bfloat16.",
        "",
        "| way | mean of all tokens | median text | worst text | worst of the whole vocabulary |",
        "|---|---|---|---|---|",
        *(apart.row(name) for name, apart in found.items() if isinstance(apart, Apart)),
        "",
    ]
    for name, told in found.items():
        if not isinstance(told, Apart):
            tokens, odd = told
            worst = f", by at most {max(max(m) for m in odd):.1e} nats" if odd else ""
            lines.append(
                f"{name.removesuffix(', replies')}: {count} greedy replies, {tokens:,} tokens; {len(odd)} replies have a "
                f"token that is not transformers' likeliest{worst}."
            )
    return lines


if __name__ == "__main__":
    main()
