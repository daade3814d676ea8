"""vLLM's side. Runs in vLLM's environment (`.venv-vllm`).

    python benchmarks/speed/vllm_side.py serve SETTINGS     (started by bench.py; SETTINGS is JSON)

Every request returns the log-probability of each sampled token, as a trainer needs it (posttrain's engine does the same,
`generate` does not). Prompts that were computed in an earlier round are forgotten before each one.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_OMP_THREADS_BIND="nobind",  # as many threads as the others have, on whatever processors are free
    VLLM_CPU_KVCACHE_SPACE="2",
    VLLM_NO_USAGE_STATS="1",
)

from side import Line, use_threads
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
from work import REQUESTS, requests, tokens_of


def serve(line: Line, settings: dict[str, Any]) -> None:
    use_threads(settings["threads"])
    llm = LLM(
        settings["model"],
        dtype=settings["precision"],
        max_model_len=512,
        max_num_seqs=REQUESTS,
        skip_tokenizer_init=True,
        generation_config="vllm",
        enforce_eager=settings.get("eager", False),
        seed=0,
    )

    def sample(case: str) -> dict[str, Any]:
        wanted = requests(case)
        llm.reset_prefix_cache()
        begin = time.perf_counter()
        ids = tokens_of(settings["model"], [text for text, _ in wanted])
        outputs = llm.generate(
            [TokensPrompt(prompt_token_ids=row) for row in ids],
            [
                SamplingParams(temperature=1.0, max_tokens=n, ignore_eos=True, detokenize=False, logprobs=0)
                for _, n in wanted
            ],
            use_tqdm=False,
        )
        seconds = time.perf_counter() - begin
        sampled = [len(output.outputs[0].token_ids) for output in outputs]
        assert sampled == [n for _, n in wanted]
        return {"seconds": seconds, "tokens": sum(sampled)}

    line.serve({"sample": sample})


if __name__ == "__main__":
    serve(Line(), json.loads(sys.argv[2]))
