"""The side of transformers' `generate`. Runs in TRL's environment.

python benchmarks/speed/generate_side.py serve SETTINGS     (started by bench.py; SETTINGS is JSON)
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from side import Line, use_threads
from transformers import AutoModelForCausalLM
from work import requests, tokens_of

transformers.logging.set_verbosity_error()


def serve(line: Line, settings: dict[str, Any]) -> None:
    use_threads(settings["threads"])
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=getattr(torch, settings["precision"])).eval()
    model.generation_config.eos_token_id = None  # replies have exactly the lengths that are asked for

    def sample(case: str) -> dict[str, Any]:
        """All requests as one batch, which runs to the longest of them; only what was asked for is counted."""
        wanted = requests(case)
        begin = time.perf_counter()
        ids = tokens_of(settings["model"], [text for text, _ in wanted])
        widest = max(map(len, ids))
        with torch.inference_mode():
            out = model.generate(
                input_ids=torch.tensor([[0] * (widest - len(row)) + row for row in ids]),
                attention_mask=torch.tensor([[0] * (widest - len(row)) + [1] * len(row) for row in ids]),
                max_new_tokens=max(n for _, n in wanted),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                pad_token_id=0,
                use_cache=True,
            )
        seconds = time.perf_counter() - begin
        assert out.shape[1] == widest + max(n for _, n in wanted)
        return {"seconds": seconds, "tokens": sum(n for _, n in wanted)}

    line.serve({"sample": sample})


if __name__ == "__main__":
    serve(Line(), json.loads(sys.argv[2]))
