"""The calls of vLLM's server: requests are token ids at /inference/v1/generate, weights come by /collective_rpc,
/load_lora_adapter or vLLM's weight transfer.
"""

from __future__ import annotations

import base64
import io
import json
from typing import Any

from numpy.lib.format import read_array

from posttrain.engines.pool.pool_protocol import Gone
from posttrain.engines.request import Request
from posttrain.engines.servers.server_client import RETURN_EXPERTS, Sampled, ServerClient
from posttrain.engines.vllm.picture_prompts import placeholder_bias, with_single_placeholders

LOGPROBS = "processed_logprobs"  # of the sampled distribution, with the temperature applied
NEEDED = {
    "/inference/v1/generate": "--enable-scale-out",
    "/v1/load_lora_adapter": "--enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1",
}
"""Path of a call that a server lacks -> what gives it. Others come with VLLM_SERVER_DEV_MODE=1."""
WITH_PIL = {"use_fast": False}  # the learner processes pictures with PIL; torchvision gives slightly different pixels
# with PIL, vLLM 0.32 silently omits the normalization that it would do on the device
PIXELS = {"mm_processor_kwargs": WITH_PIL, "mm_device_do_normalize": False}
"""Settings of a server for pictures, as it reports them."""
WORK = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")  # metrics that grow while a server works


class VLLMClient(ServerClient):
    """The connection to one vLLM server."""

    program = "vLLM"
    key = "VLLM_API_KEY"  # as vLLM itself calls it
    min_temperature = 0.01  # vLLM silently raises lower temperatures to this value
    adapter_calls = "/v1"

    async def check(self) -> None:
        config = (await self._json("GET", "/server_info?config_format=json"))["vllm_config"]
        if config["model_config"]["logprobs_mode"] != LOGPROBS:
            raise Gone(
                f"its log-probabilities are not those of the sampled distribution: start it with --logprobs-mode {LOGPROBS}"
            )
        if self.run.routed is not None and not config["aux_output_config"]["enable_return_routed_experts"]:
            raise Gone(f"--routing-replay needs a server that returns experts: {RETURN_EXPERTS}")
        multimodal = config["model_config"].get("multimodal_config") or {}
        if self.run.tokenizer.pictures is not None and any(multimodal.get(name) != PIXELS[name] for name in PIXELS):
            raise Gone(f"its pixels are not the learner's: start it with --mm-processor-kwargs '{json.dumps(WITH_PIL)}' "
                       "--no-mm-device-do-normalize")  # fmt: skip

    async def progress(self) -> list[str]:
        lines = (await self._call("GET", "/metrics")).decode().splitlines()
        return [line for line in lines if line.startswith(WORK)]

    async def sample(self, request: Request) -> Sampled:
        prompt, pictures = list(request.prompt), dict[str, Any]()
        if request.media:
            prompt, parts = with_single_placeholders(self.run.tokenizer, prompt, request.media)
            pictures = {"content_parts": parts, "return_token_ids": True}
        body = {
            "model": self.model,
            "token_ids": prompt,
            "sampling_params": self._parameters(request),
            "stream": False,
            **pictures,
        }
        answer = await self._json("POST", "/inference/v1/generate", body)
        if pictures and answer["prompt_token_ids"] != list(request.prompt):
            raise Gone(f"its tokens of pictures are not those of this run ({len(answer['prompt_token_ids'])}, not "
                       f"{request.given}): start it with the tokenizer and the image processor of this model")  # fmt: skip
        [choice] = answer["choices"]
        tokens, logp = choice["token_ids"], [float(one["logprob"]) for one in choice["logprobs"]["content"]]
        if choice["finish_reason"] not in ("stop", "length"):
            raise ValueError(f"a reply ended with {choice['finish_reason']!r}")
        routed = choice.get("routed_experts") if self.run.routed is not None else None
        experts = None if routed is None else read_array(io.BytesIO(base64.b64decode(routed)), allow_pickle=False)
        return Sampled(tokens, logp, choice["finish_reason"] == "length", experts)

    def _parameters(self, request: Request) -> dict[str, Any]:
        """Return vLLM's sampling parameters of a request."""
        how = request.sampling
        assert not how.epsilon, "options refuse it"
        return {
            "temperature": how.temperature,
            "top_p": how.top_p,
            "top_k": how.top_k,
            "max_tokens": request.budget(self.run.context),
            "stop_token_ids": list(self.run.eos_ids),
            "ignore_eos": True,  # only the stop tokens above end a reply
            "logprobs": 0,  # only of the sampled token
            "stop": list(how.stop),
            "detokenize": bool(how.stop),
            "skip_special_tokens": False,
            **({"seed": how.seed} if self.run.seeds else {}),
            **({"logit_bias": bias} if (bias := placeholder_bias(self.run.tokenizer)) else {}),
        }

    # -- weights -------------------------------------------------------------------------------------------------------

    async def pause(self) -> None:
        await self._call("POST", "/pause?mode=abort")

    async def resume(self) -> None:
        await self._call("POST", "/reset_prefix_cache")
        if self.run.tokenizer.pictures is not None:
            await self._call("POST", "/reset_encoder_cache")  # features of pictures, by the old weights
        await self._call("POST", "/resume")

    async def read_weights(self, offer: dict[str, Any]) -> tuple[int, int]:
        if "file" in offer:
            loaded = await self._remote("posttrain_load", layout=self.run.layout, offer=offer)
            read = {(version, checksum) for version, checksum in loaded}
            if len(read) > 1:
                raise Gone(f"its processes loaded different weights: {sorted(read)}")
            return read.pop()
        if "folder" in offer:
            await self._remote("reload_weights", weights_path=offer["folder"])
        return offer["version"], offer["checksum"]  # else they have been transferred

    async def finish_adapter(self, offer: dict[str, Any]) -> int:
        if offer["base"] is None:  # a server without our extension
            return int(offer["checksum"])
        for read, matrices in await self._remote("posttrain_adapter", folder=offer["adapter"]):
            if matrices != offer["matrices"]:
                raise Gone(f"it has adapters in {matrices} of {offer['matrices']} matrices")
            if read != offer["checksum"]:
                return int(read)
        return int(offer["checksum"])

    async def transfer(self, method: str, info: Any) -> Any:
        if method == "start_weight_update":  # requests that vLLM still computes would read weights that are moved
            await self.pause()
        names = {"init_weight_transfer_engine": "init_info", "update_weights": "update_info"}
        if method == "get_world_size":
            return (await self._json("GET", f"/{method}"))["world_size"]
        await self._call("POST", f"/{method}", {names[method]: info} if method in names else {})
        return None

    async def sleep(self) -> None:
        await self._call("POST", "/sleep?level=2")

    async def wake_up(self, tag: str) -> None:
        await self._call("POST", f"/wake_up?tags={tag}")

    async def _remote(self, method: str, **arguments: Any) -> Any:
        """Call a method of vLLM's workers, and return the result of each."""
        body = {"method": method, "kwargs": arguments, "timeout": None}
        return (await self._json("POST", "/collective_rpc", body))["results"]

    @classmethod
    def remedy(cls, path: str) -> str:
        return f"start it with {NEEDED.get(path, 'VLLM_SERVER_DEV_MODE=1')}"
