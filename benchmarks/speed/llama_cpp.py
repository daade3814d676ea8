"""Sampling beside llama.cpp's batched decoding: 64 replies of 128 tokens of SmolLM2-135M-Instruct.

    python llama.cpp/convert_hf_to_gguf.py runs/bench/models/smollm2 --outfile f32.gguf --outtype f32        # and q8_0
    python benchmarks/speed/llama_cpp.py llama.cpp/build/bin/llama-batched-bench f32.gguf q8_0.gguf --rounds 3

llama-batched-bench gets the easier work: it decodes given tokens and samples none, and computes one prompt for all 64
replies. posttrain computes eight prompts, samples at temperature 1 and returns the log-probability of each token. The sides
take turns; ratios are taken within a round.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from bench import commit, processor
from processes import HERE, ROOT, Machine, Sides
from tables import Figure, Table
from work import FIXED, REAL, REQUESTS, requests, tokens_of

PRECISIONS = ("float32", "bfloat16")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("bench", type=Path, help="llama-batched-bench")
    parser.add_argument("files", type=Path, nargs="+", help="the model as GGUF, in one or more types")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--place", type=Path, default=ROOT / "runs" / "bench", help="models and logs")
    options = parser.parse_args()
    ours = Path(sys.executable)
    machine = Machine(ours, ours, ours, options.place.absolute(), options.threads)
    model = Path(machine.model(REAL))
    if not model.is_dir():
        subprocess.run([ours, HERE / "models.py", model.parent], check=True, env=machine.environment(), cwd=ROOT)
    prompts = tokens_of(model, [text for text, _ in requests("fixed")])
    prompt = sum(map(len, prompts)) // len(prompts)
    found: dict[str, list[float]] = {}
    with Sides(machine) as sides:
        sampling = {
            name: sides.start("posttrain", "serve", model=str(model), precision=name, eager=False)
            for name in PRECISIONS
        }
        for side in sampling.values():
            side.ask(do="sample", case="warm")
        for _ in range(options.rounds):
            for name, side in sampling.items():
                answer = side.ask(do="sample", case="fixed")
                found.setdefault(name, []).append(answer["tokens"] / answer["seconds"])
            for file in options.files:
                found.setdefault(file.name, []).append(decoded(options.bench, file, prompt, options.threads))
    table = Table(
        "Sampling beside llama.cpp",
        ("", "tokens per second", *(f"posttrain in {name} over it" for name in PRECISIONS)),
    )
    mine = [Figure.of(found[name]) for name in PRECISIONS]
    for name, own in zip(PRECISIONS, mine, strict=True):
        table.add(f"posttrain, {name}", own, "", "")
    for file in options.files:
        theirs = Figure.of(found[file.name])
        table.add(f"llama.cpp, {file.name}", theirs, *(own.over(theirs) for own in mine))
    print(f"{processor()}, {options.threads} threads, commit {commit()}; prompts of {prompt} tokens on average")
    print(table.markdown())
    return 0


def decoded(bench: Path, file: Path, prompt: int, threads: int) -> float:
    """Tokens per second of all replies, their one prompt included."""
    sizes = {"-npp": prompt, "-ntg": FIXED, "-npl": REQUESTS, "-t": threads, "-b": 2048, "-ub": 512}
    sizes["-c"] = prompt + REQUESTS * FIXED + 512
    command = [bench, "-m", file, "-pps", "--output-format", "jsonl", *(str(x) for pair in sizes.items() for x in pair)]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    line = next(json.loads(text) for text in out.splitlines() if text.startswith("{"))
    return REQUESTS * FIXED / float(line["t_pp"] + line["t_tg"])


if __name__ == "__main__":
    sys.exit(main())
