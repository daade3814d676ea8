"""What HTTP costs: replies over `posttrain serve-policy` beside the same replies in process.

    python benchmarks/agents/serving.py

Clients in a process of their own ask the token endpoint, each again as soon as it is answered; in process the same requests
are submitted at once. The engine has as many slots as there are clients. Both take turns, in rounds; the ratio of tokens per
second is the median of the rounds with its range. Every token and log-probability that comes over HTTP has to be the one
that was sampled in process. Then how long one request of one token takes, alone.

The model is the one of 5 M parameters; its replies end at their budget alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[3] / "shared" / "data" / "models" / "gsm8k-5m"
PROMPT, REPLY = 200, 100
Replies = list[tuple[list[int], list[float]]]


def requests(count: int) -> list[dict[str, Any]]:
    """Prompts that share nothing, with a seed each."""
    draw = random.Random(0)
    return [
        {
            "token_ids": [draw.randrange(5, 1000) for _ in range(PROMPT)],
            "sampling_params": {"max_tokens": REPLY, "seed": number, "logprobs": 0},
        }
        for number in range(count)
    ]


def engine(folder: Path, clients: int) -> Any:
    from posttrain.engines.local.local_engine import LocalEngine
    from posttrain.models.checkpoint_folder import load_model
    from posttrain.models.tokenizer.tokenizer import Tokenizer

    model = load_model(folder)
    model.eos_ids = (model.config.vocab - 1,)
    return LocalEngine(model, Tokenizer.load(folder), slots=clients, rests=False)


# -- in process --------------------------------------------------------------------------------------------------------


def in_process(sampler: Any, asked: list[dict[str, Any]]) -> tuple[float, Replies]:
    from posttrain.core.types import Sampling

    began = time.perf_counter()
    for number, request in enumerate(asked):
        how = request["sampling_params"]
        sampler.submit(number, request["token_ids"], Sampling(max_tokens=how["max_tokens"], seed=how["seed"]))
    done: dict[int, Any] = {}
    while len(done) < len(asked):
        done.update({completion.id: completion for completion in sampler.poll()})
    seconds = time.perf_counter() - began
    return seconds, [(list(done[n].tokens), list(done[n].logp)) for n in range(len(asked))]


# -- over HTTP ---------------------------------------------------------------------------------------------------------


async def clients(port: int, asked: list[dict[str, Any]], count: int, alone: int) -> dict[str, Any]:
    """So many at once; then `alone` requests of one token, one after the other."""
    import aiohttp

    address = f"http://127.0.0.1:{port}/inference/v1/generate"
    replies: list[Any] = [None] * len(asked)
    line = iter(range(len(asked)))
    connector = aiohttp.TCPConnector(limit=count)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def client() -> None:
            for number in line:
                async with session.post(address, json=asked[number]) as answer:
                    [choice] = (await answer.json())["choices"]
                    logp = [entry["logprob"] for entry in choice["logprobs"]["content"]]
                    replies[number] = choice["token_ids"], logp

        began = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(count)))
        seconds = time.perf_counter() - began
        each = []
        for _ in range(alone):
            start = time.perf_counter()
            small = {"token_ids": [5], "sampling_params": {"max_tokens": 1, "seed": 1}}
            async with session.post(address, json=small) as answer:
                await answer.read()
            each.append(time.perf_counter() - start)
    return {"seconds": seconds, "replies": replies, "alone": each}


async def over_http(sampler: Any, asked: list[dict[str, Any]], count: int, alone: int) -> dict[str, Any]:
    """What clients in another process measure while the engine is served here."""
    from posttrain.engines.serving.engine_policy import EnginePolicy
    from posttrain.engines.serving.engine_thread import EngineThread
    from posttrain.engines.serving.policy_server import PolicyHandlers, ServerLimits, serving

    context = sampler.context
    policy = EnginePolicy(EngineThread(sampler), sampler.tokenizer, "policy", context, sampler.eos_ids)
    async with serving(PolicyHandlers(lambda request: policy, ServerLimits()).application()) as port:
        command = [sys.executable, __file__, "--port", str(port), "--clients", str(count), "--alone", str(alone)]
        process = await asyncio.create_subprocess_exec(
            *command, "--requests", str(len(asked)), stdout=subprocess.PIPE, limit=1 << 28
        )
        said, _ = await process.communicate()
    policy.close()
    found: dict[str, Any] = json.loads(said)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--alone", type=int, default=200)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--port", type=int, help="be the clients of the server there")
    options = parser.parse_args()
    asked = requests(options.requests)
    if options.port is not None:
        print(json.dumps(asyncio.run(clients(options.port, asked, options.clients, options.alone))))
        return
    import torch

    torch.set_num_threads(options.threads)
    sampler = engine(options.folder, options.clients)
    in_process(sampler, asked[: options.clients])  # compiles, if need be
    tokens, ratios, rates, alone = REPLY * len(asked), [], [], []
    for _ in range(options.rounds):
        seconds, own = in_process(sampler, asked)
        served = asyncio.run(over_http(sampler, asked, options.clients, options.alone))
        assert [(list(t), list(p)) for t, p in served["replies"]] == own, "what came over HTTP is not what is sampled"
        ratios.append(seconds / served["seconds"])
        rates.append((tokens / seconds, tokens / served["seconds"]))
        alone += served["alone"]
    here, there = (statistics.median(rate[side] for rate in rates) for side in (0, 1))
    alone.sort()
    print(f"{sampler.backend}, {options.clients} clients, {options.requests} requests of {PROMPT} + {REPLY} tokens")
    print(f"in process {here:,.0f} tokens/s, over HTTP {there:,.0f}: ", end="")
    print(f"{statistics.median(ratios):.3f} [{min(ratios):.3f}, {max(ratios):.3f}] of it")
    print(
        f"one token alone: median {1e3 * statistics.median(alone):.1f} ms, p99 {1e3 * alone[len(alone) * 99 // 100]:.1f} ms"
    )


if __name__ == "__main__":
    main()
