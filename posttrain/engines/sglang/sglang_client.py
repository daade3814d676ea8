"""The calls of SGLang's server, as of SGLang 0.5.23: requests are token ids at /generate, weights come as checkpoints.

Traps that this module avoids: `ignore_eos` would switch off `stop_token_ids` too; a reply whose probabilities are not
numbers ends as if at a stop string; a reply is cut where the cache has no room; log-probabilities are those before top-p
and top-k; and with `--enable-deterministic-inference` all requests without a seed have the same one.
"""

from __future__ import annotations

import base64
import secrets
from typing import Any

import numpy as np
from numpy.typing import NDArray

from posttrain.engines.pool.pool_protocol import Gone
from posttrain.engines.request import Request
from posttrain.engines.servers.server_client import RETURN_EXPERTS, Sampled, ServerClient

RESERVED = 2  # tokens of its context that SGLang never samples
MOST_STOPS = 32  # stop strings of a request; further ones are found here alone
IDLE_SECONDS = 30  # for requests that were ended to leave the server


class SGLangClient(ServerClient):
    """The connection to one SGLang server."""

    program = "SGLang"
    key = "SGLANG_API_KEY"
    min_temperature = 1e-6  # SGLang samples greedily below
    truncated_logp = False

    def __init__(self, *where: Any, **how: Any) -> None:
        self._nonce = secrets.token_hex(8)  # other runs may ask the same server
        super().__init__(*where, **how)

    async def check(self) -> None:
        options = await self._json("GET", "/server_info")
        if self.run.seeds and not options["enable_deterministic_inference"]:
            raise Gone("--engine-seeds needs a server that was started with --enable-deterministic-inference")
        if self.run.routed is not None and not options["enable_return_routed_experts"]:
            raise Gone(f"--routing-replay needs a server that returns experts: {RETURN_EXPERTS}")
        greatest = set()  # the greatest log-probability at two temperatures
        for temperature in (1.0, 2.0):
            how = {"temperature": temperature, "max_new_tokens": 1}
            body = {"input_ids": [0], "sampling_params": how, "return_logprob": True, "top_logprobs_num": 1}
            greatest.add((await self._json("POST", "/generate", body))["meta_info"]["output_top_logprobs"][0][0][0])
        if len(greatest) == 1:
            raise Gone("its log-probabilities are those before the temperature: start it without "
                       "SGLANG_RETURN_ORIGINAL_LOGPROB")  # fmt: skip

    async def progress(self) -> float:
        await self._call("GET", "/health_generate")  # answers only if the scheduler has
        return self._loop.time()

    async def sample(self, request: Request) -> Sampled:
        body = {
            "rid": self._rid(request.id),
            "input_ids": list(request.prompt),
            "sampling_params": self._parameters(request),
            "return_logprob": True,
            "stream": False,
            **({"lora_path": self.model} if self.model != self.name else {}),
            **({"return_routed_experts": True} if self.run.routed is not None else {}),
        }
        answer = await self._json("POST", "/generate", body)
        about, tokens = answer["meta_info"], answer["output_ids"]
        logprobs = about["output_token_logprobs"]
        if [token for _, token, *_ in logprobs] != tokens:
            raise ValueError("the log-probabilities of a reply are those of other tokens")
        if about["weight_version"] != str(self.version):
            raise Gone(f"it sampled with weights of version {about['weight_version']}, not {self.version}")
        cut = self._is_cut(request, tokens, about["finish_reason"])
        experts = self._experts(about.get("routed_experts"), request.given + len(tokens) - 1)
        return Sampled(tokens, [float(logp) for logp, *_ in logprobs], cut, experts)

    def _experts(self, content: str | None, computed: int) -> NDArray[np.integer] | None:
        """Decode the experts [computed, L, k], which come as int32 without their shape."""
        if content is None or self.run.routed is None:
            return None
        return np.frombuffer(base64.b64decode(content), np.int32).reshape(computed, -1, self.run.routed.taken)

    def _is_cut(self, request: Request, tokens: list[int], finish: dict[str, Any]) -> bool:
        """Return whether a reply ended at its maximum of tokens. Raises Gone if it ended in a way that is none of ours."""
        ended = finish["type"], finish.get("matched")
        if ended[0] == "length" and len(tokens) < request.budget(self.run.context) - RESERVED:
            raise Gone(f"it cut a reply after {len(tokens)} tokens: its cache has no room for longer ones")
        ends = [("stop", end) for end in (*self.run.eos_ids, *request.sampling.stop)]
        if ended[0] != "length" and ended not in ends:
            raise Gone(f"it ended a reply in a way that is none of this run's: {finish}")
        return ended[0] == "length"

    def _parameters(self, request: Request) -> dict[str, Any]:
        """Return SGLang's sampling parameters of a request: all of them, since a server may have other defaults."""
        how = request.sampling
        assert not how.epsilon and how.top_p == 1 and not how.top_k, "the pool refuses it"
        return {
            "temperature": how.temperature,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "repetition_penalty": 1.0,
            "min_new_tokens": 0,
            "max_new_tokens": request.budget(self.run.context),
            "stop_token_ids": list(self.run.eos_ids),
            "ignore_eos": False,
            "stop": list(how.stop)[:MOST_STOPS],
            "skip_special_tokens": False,
            "sampling_seed": how.seed,
        }

    async def abandon(self, id: int) -> None:
        await self._call("POST", "/abort_request", {"rid": self._rid(id)})

    def _rid(self, id: int) -> str:
        return f"{self._nonce}-{id}."  # none begins with another: SGLang ends all that begin with the named one

    # -- weights -------------------------------------------------------------------------------------------------------

    async def pause(self) -> None:
        await self._call("POST", "/pause_generation", {"mode": "abort"})

    async def resume(self) -> None:
        await self._call("POST", f"/flush_cache?timeout={IDLE_SECONDS}")
        await self._call("POST", "/continue_generation", {})

    async def read_weights(self, offer: dict[str, Any]) -> tuple[int, int]:
        version = {"weight_version": str(offer["version"]), "flush_cache": False}  # its memory may not be there yet
        await self._call(
            "POST", "/update_weights_from_disk", {"model_path": offer["folder"], "load_format": "auto", **version}
        )
        return offer["version"], offer["checksum"]

    async def finish_adapter(self, offer: dict[str, Any]) -> int:
        version = {"new_version": str(offer["version"]), "abort_all_requests": False}
        await self._call("POST", "/update_weight_version", version)
        return int(offer["checksum"])

    async def sleep(self) -> None:
        await self.pause()
        await self._call(
            "POST", f"/flush_cache?timeout={IDLE_SECONDS}"
        )  # it dies if it still works when asked to sleep
        await self._call("POST", "/release_memory_occupation", {"tags": ["weights", "kv_cache"]})

    async def wake_up(self, tag: str) -> None:
        await self._call("POST", "/resume_memory_occupation", {"tags": [tag]})

    @classmethod
    def remedy(cls, path: str) -> str:
        return f"it needs an SGLang that has {path}, such as 0.5.23"
