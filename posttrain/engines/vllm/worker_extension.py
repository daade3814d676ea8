"""Extension of vLLM's workers (`vllm serve --worker-extension-cls`), which loads the weights that the learner offers.

The methods are called over HTTP (/collective_rpc) with plain JSON data, in each process of a server.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posttrain.engines.weight_sync import Received, checksum_of, offered
from posttrain.models.adapters.adapter_config import ADAPTER
from posttrain.models.tensor_files import open_tensors

FIRST_EXPERT = re.compile(r"\.experts\.0\.(gate_proj|w1)\.weight$")


class WorkerExtension:
    """Base class that vLLM gives its worker."""

    def posttrain_load(self: Any, layout: dict[str, Any], offer: dict[str, Any]) -> list[int]:
        """Load offered weights in place. Return [version, checksum of the weights that were read]."""
        received, checksum = Received(layout, offered(offer)), 0

        def weights() -> Iterator[tuple[str, Tensor]]:
            nonlocal checksum
            for stored in received.stored:
                checksum = stored.checksum(received.memory, received.dtype, checksum)
                yield stored.name, stored.tensor_in(received.memory, received.dtype)

        self.reload_weights(weights_iterator=weights())
        gates = [tensor for name, tensor in received.named_parameters() if FIRST_EXPERT.search(name)]
        if gates and not torch.cuda.is_available():
            pack_experts(self.model_runner.get_model(), gates)
        return [offer["version"], checksum]

    def posttrain_adapter(self: Any, folder: str) -> list[int]:
        """Return [checksum of the adapters in a folder, number of matrices of vLLM's model that have one]."""
        with open_tensors(Path(folder) / ADAPTER) as stored:
            checksum = checksum_of((name, stored.get_tensor(name)) for name in sorted(stored.keys()))
        return [checksum, count_adapted(self.model_runner.lora_manager)]


def pack_experts(model: Any, gates: Sequence[Tensor]) -> None:
    """Make vLLM pack experts that are unpacked in its model: on processors it would compute wrong products from reloaded
    ones (seen in 0.32). `gates`: gate weights of each layer's first expert.
    """
    for layer in model.modules():
        impl = getattr(getattr(getattr(layer, "quant_method", None), "moe_kernel", None), "impl", None)
        experts, weight = getattr(impl, "fused_experts", None), getattr(layer, "w13_weight", None)
        if experts is None or weight is None:
            continue
        if any(torch.equal(weight[0, : len(gate)], gate) for gate in gates):  # not packed: packing reorders numbers
            experts.process_weights_after_loading(layer)


def count_adapted(manager: Any) -> int:
    """Count the matrices of vLLM's model that use the one adapter: those with a nonzero A."""
    known = manager._adapter_manager
    (place,) = [place for place, number in enumerate(known.lora_index_to_id) if number is not None]
    stacks = (getattr(module, "lora_a_stacked", ()) for module in known.modules.values())
    return sum(bool(a[place].any()) for stack in stacks for a in (stack if isinstance(stack, tuple) else (stack,)))
