"""Loads checkpoint folders through transformers as `Backed`, selects the mode of the model, and verifies its results.

For every architecture, two texts are scored by the model's own forward and by ours. A model whose log-probabilities
differ is refused. transformers is imported only here, and for tokenizers that only it can read.
"""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, redirect_stderr, suppress
from dataclasses import replace
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.core.batch import Layout
from posttrain.core.extras import install, installed
from posttrain.core.messages import one_line
from posttrain.core.pictures import PICTURES, PictureError, png
from posttrain.core.transcripts import Media, Transcript, positions_of
from posttrain.core.types import UserError
from posttrain.models.checkpoint_summary import context_of
from posttrain.models.free_memory import available_memory
from posttrain.models.gguf.gguf_config import MODEL_TYPES, NATIVE
from posttrain.models.gguf.gguf_file import is_gguf, read_gguf
from posttrain.models.hf.backed import Backed, Way
from posttrain.models.hf.backed_writer import quiet
from posttrain.models.hf.experts import watching
from posttrain.models.hf.headless import let_head_go, names_of_head
from posttrain.models.hf.linear_layers import narrow_products, state_spaces
from posttrain.models.hf.pass_memory import without_numbers
from posttrain.models.hf.probes import BEGINNING, PROBES, probe_ids
from posttrain.models.hf.size_check import check_layers, check_room, other_shape
from posttrain.models.hf.token_mixing import NAME, NotFlatError, follow_layouts, layout_attention, mixing
from posttrain.models.hf.vision import Vision
from posttrain.models.image_processor import ImageProcessor, placeholder_ids
from posttrain.models.json_files import read_json, shown
from posttrain.models.native.attention import AttentionVariant
from posttrain.models.native.decoder_config import read_eos_ids
from posttrain.models.native.head import Head
from posttrain.models.weight_files import HEADS, SCORE, reward_model_error, tensors_error

ACTIVATIONS = 0.5  # share of the memory left beside the weights that activations of a backward pass may take
TOLERANCE = 1e-4  # allowed difference of log-probabilities in nats, in float32 and float64
COARSE = 0.1  # the same in narrower types
LARGE = 32.0  # beyond logits of this size the tolerance grows in proportion; those of Gemma reach -135
TRUST = "POSTTRAIN_TRUST_REMOTE_CODE"
"""An environment variable, not an option, since recipes may come from other people."""
RECORDING = "posttrain_recording"  # our attention while a model is analysed


def load_backed(
    folder: Path,
    source: Mapping[str, Any],
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    headless: bool = False,
    matrices: torch.dtype | None = None,
) -> Backed:
    """Load the model of a folder. Python code in the folder runs only if the environment variable TRUST is 1.

    `headless`: only hidden states are used, and the output head may be missing or another. `matrices`: a narrower type
    for the weights of linear layers.

    Raises UserError if transformers does not support its architecture, if it is not a decoder, if weights are missing
    or unknown, or if the log-probabilities differ from those of the model's own forward.
    """
    trust = os.environ.get(TRUST) == "1"
    _check(folder, source, trust)
    inner = _opened(folder, source, dtype, trust, headless)
    if matrices is not None:
        narrow_products(inner, matrices)
    inner = inner.to(device)
    for name, parameter in inner.named_parameters():
        if not parameter.isfinite().all():
            raise UserError(
                f"{folder}: {name} has numbers that are not finite (NaN or infinity): give a checkpoint without them"
            )
    if dtype == torch.float64 and hasattr(inner, "set_experts_implementation"):
        inner.set_experts_implementation("eager")  # the batched implementation does not support float64
    model = Backed(inner, context_of(folder, source), vision=_vision(inner, folder, source))
    model.generation = read_json(folder / "generation_config.json", optional=True)
    text = source.get("text_config")
    ends = {**(text if isinstance(text, dict) else {}), **source}
    model.eos_ids = read_eos_ids(folder, ends, model.generation, model.config.vocab)
    if model.vision is not None and set(model.eos_ids) & set(model.vision.placeholders):
        raise UserError(
            f"{folder / 'config.json'}: the same token ends replies and is the picture placeholder: no reply would ever end"
        )
    choose_mode(model, folder)
    if headless:
        let_head_go(model)
    model.activation_room = available_memory(model.head.device) * ACTIVATIONS
    model.kept_per_token = _kept_per_token(model)
    model.find_routers()
    return model


def empty_backed(
    folder: Path, dtype: torch.dtype, device: torch.device, context: int, how: Mapping[str, Any]
) -> Backed:
    """Build the model of a config.json, with uninitialised weights. `how`: the result of `Backed.how_it_runs`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with quiet():
        place, how_to_read = _place(folder)
        inner: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(place, **how_to_read), dtype=dtype)
    if dtype == torch.float64 and hasattr(inner, "set_experts_implementation"):
        inner.set_experts_implementation("eager")
    model = Backed(inner.to(device), context)
    model.scale, model.cap, model.rows_attention = how["scale"], how["cap"], how["attention"]
    model.attend(model.rows_attention)
    model.find_routers()
    model.replays = how["replays"]
    return model


def shaped_backed(folder: Path, source: Mapping[str, Any], headless: bool = False) -> Backed:
    """Build the model of a config.json with shapes and without numbers, on the "meta" device. Raises UserError if it is
    not supported.
    """
    from transformers import AutoConfig

    trust = os.environ.get(TRUST) == "1"
    _check(folder, source, trust)
    check_layers(folder, source)
    try:
        with quiet(), torch.device("meta"):
            config = AutoConfig.from_pretrained(folder, trust_remote_code=trust, local_files_only=True)
            inner = _kind(source).from_config(config, trust_remote_code=trust, dtype=torch.float32)
    except Exception as error:  # code of models raises errors of any type
        raise UserError(f"{folder}: transformers cannot build this model: {one_line(error):.300}") from error
    model = Backed(inner, context_of(folder, source), vision=_vision(inner, folder, source))
    if headless:
        let_head_go(model)
    _register()
    follow_layouts(model.inner)
    with without_numbers(model) as (short, _):
        flat = _is_flat(short, numbers=False)
    model.way = "flat" if flat else "rows"
    for attention in (NAME,) if flat else ("sdpa", "eager"):
        with suppress(ValueError, NotImplementedError):
            model.attend(attention)
            break
    return model


def _vision(inner: Any, folder: Path, source: Mapping[str, Any]) -> Vision | None:
    """Return the vision part of a model; None if it is text-only."""
    processor = ImageProcessor.of(folder, source)
    if processor is None or not hasattr(inner.base_model, "get_image_features"):
        return None
    vocab = inner.get_output_embeddings().weight.shape[0]
    if odd := [id for id in placeholder_ids(source) if not 0 <= id < vocab]:
        raise UserError(
            f"{folder / 'config.json'}: token {odd[0]} is the placeholder of pictures or videos, but the vocabulary ends at "
            f"{vocab - 1}"
        )
    return Vision(inner, processor, placeholder_ids(source))


def _check(folder: Path, source: Mapping[str, Any], trust: bool) -> None:
    """Check config.json alone. Raises UserError for an unsupported model."""
    file, kind = folder / "config.json", source.get("model_type")
    try:
        from transformers import CONFIG_MAPPING
    except ImportError as error:
        raise UserError(f"{file}: model_type {shown(kind)} needs transformers: {install('transformers')}") from error
    if is_gguf(folder):
        _check_gguf(folder)
    if source.get("auto_map") and not trust and kind not in CONFIG_MAPPING:
        raise UserError(f"{file}: this model runs Python code of its own: read the code, then set {TRUST}=1")
    if kind not in CONFIG_MAPPING and not trust:
        raise UserError(
            f"{file}: model_type {shown(kind)} is unknown to posttrain and to the installed transformers: give another "
            "model, or upgrade transformers"
        )
    if source.get("is_encoder_decoder"):
        raise UserError(f"{file}: {kind} is an encoder with a decoder; posttrain trains decoders only")
    if source.get("quantization_config"):
        raise UserError(f"{file}: quantized weights cannot be trained; give the unquantized checkpoint")


def _opened(folder: Path, source: Mapping[str, Any], dtype: torch.dtype, trust: bool, headless: bool) -> Any:
    from transformers import CONFIG_MAPPING, AutoConfig

    kind = _kind(source)
    check_layers(folder, source)
    how: dict[str, Any] = dict(trust_remote_code=trust, local_files_only=True)
    place, reading = _place(folder)
    model_type, more, shapes = source.get("model_type"), {}, {}
    if read_json(folder / "config.json").get("model_type") != model_type:  # a reward model in this package's own format
        described: Any = CONFIG_MAPPING[model_type]  # type: ignore[index]
        entries, _ = described.get_config_dict(folder)  # reads the file as transformers does: with infinities
        more["config"] = described.from_dict({**entries, "model_type": model_type})
    try:
        with quiet(), redirect_stderr(StringIO()) if reading else nullcontext():  # GGUF files have their own bar
            config = more.get("config") or AutoConfig.from_pretrained(place, **reading, **how)
            if reading:
                more = {"config": config, **reading, **_dequantized()}  # otherwise it would read the config again
            with torch.device("meta"):
                shapes = check_room(folder, kind.from_config(copy.deepcopy(config), trust_remote_code=trust), dtype)
            opened: Any = kind.from_pretrained(
                place, dtype=dtype, use_safetensors=True, output_loading_info=True, **how, **more
            )
    except UserError:
        raise
    except Exception as error:  # code of models raises errors of any type
        other = other_shape(folder, shapes)
        said = f"{folder}: {other}" if other else f"{folder}: transformers cannot open {model_type} as a language model"
        raise UserError(said if other else f"{said}: {one_line(error):.300}") from error
    inner, told = opened
    _check_tensors(folder, inner, told, headless)
    return inner


def _kind(source: Mapping[str, Any]) -> Any:
    """Return transformers' class that opens the model of a config.json."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as SEEING

    sees = source.get("model_type") in SEEING and isinstance(source.get("vision_config"), dict)
    return AutoModelForImageTextToText if sees else AutoModelForCausalLM


def _place(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Return the folder that transformers has to open, and further arguments of its `from_pretrained`."""
    return (folder.parent, {"gguf_file": folder.name}) if is_gguf(folder) else (folder, {})


def _dequantized() -> dict[str, Any]:
    """Return the argument that makes transformers dequantize a whole GGUF file; older versions always do."""
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


def _check_gguf(folder: Path) -> None:
    """Raise UserError for a GGUF file whose architecture transformers cannot read from one."""
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    try:
        newer: Any = import_module("transformers.integrations.gguf").GGUF_CONFIG_ARCHS
    except (ImportError, AttributeError):
        newer = ()
    known = {*NATIVE, *GGUF_SUPPORTED_ARCHITECTURES, *newer} - set(MODEL_TYPES.values())
    known |= {name for name, kind in MODEL_TYPES.items() if kind in GGUF_SUPPORTED_ARCHITECTURES}
    if (kind := read_gguf(folder).architecture) not in known:
        raise UserError(
            f"{folder}: architecture {kind!r:.60} cannot be read from a GGUF file; known are {', '.join(sorted(known))}: "
            "give the Hugging Face folder"
        )
    if not installed("accelerate"):
        raise UserError(f"{folder}: transformers reads a GGUF file of {kind} with accelerate: {install('gguf')}")


def _check_tensors(folder: Path, inner: Any, told: Mapping[str, Any], headless: bool) -> None:
    """Raise UserError unless the tensors of a folder are exactly the model's. `told`: transformers' loading report."""
    found = {key: set(map(str, names)) for key, names in told.items() if key.endswith("_keys")}
    if headless:
        found["missing_keys"] -= names_of_head(inner)
        found["unexpected_keys"] -= set(HEADS)
    if SCORE in found["unexpected_keys"]:
        raise reward_model_error(folder, SCORE)
    problems = {"missing_keys": "lacks", "unexpected_keys": "holds unknown", "mismatched_keys": "has other shapes of"}
    for key, what in problems.items():
        if names := sorted(found[key]):
            raise tensors_error(folder, what, names)


# -- choice of the mode, and check of its results ----------------------------------------------------------------------


def choose_mode(model: Backed, folder: Path) -> None:
    """Set the mode that reproduces the log-probabilities of the model's own forward. Raises UserError if none does."""
    _register()
    follow_layouts(model.inner)
    limit = TOLERANCE if model.head.dtype in (torch.float32, torch.float64) else COARSE
    with torch.no_grad(), quiet():
        try:
            own, states = _own_forward(model, folder)
        except UserError:
            raise
        except Exception as error:  # config.json may contradict its code
            kind = type(model.inner).__name__
            raise UserError(
                f"{folder}: the forward of {kind} fails, correct config.json: {one_line(error):.300}"
            ) from error
        model.scale, model.cap = _head_of(model, states, own)
        limit *= max(1.0, float(own.abs().max()) / LARGE)  # rounding errors grow with the numbers
        apart = _difference(model.head.logits(states), own)
        if not apart <= limit:
            raise _refused(folder, model, apart, "its output head", "of weight, bias, scale and soft cap alone")
        for way, attention in _ways(model):
            model.way = way
            try:
                model.attend(attention)
                apart = _difference(model.head.logits(model.hidden(*probe(model))), own)
            except (NotFlatError, ValueError, NotImplementedError):
                continue
            if apart <= limit:
                model.rows_attention = attention if way == "rows" else _for_rows(model, own, limit)
                return
    raise _refused(folder, model, apart, "its attention", "to all that came before a token, or computed row by row")


def _refused(folder: Path, model: Backed, apart: float, what: str, known: str) -> UserError:
    kind = type(model.inner).__name__
    return UserError(
        f"{folder}: log-probabilities of {kind} are {apart:.2g} nats off its own forward; the suspect is {what}, "
        f"which is not {known}"
    )


def _difference(logits: Tensor, own: Tensor) -> float:
    """Return the largest absolute difference of log-probabilities; NaN if either contains NaN."""
    return float((logits.log_softmax(-1) - own.log_softmax(-1)).abs().max())


def _beginning(model: Backed) -> Transcript:
    """Build the common prefix of both texts, with a picture if the model reads pictures and its folder has an image
    processor.
    """
    found = Transcript()
    found.observe(probe_ids(model, BEGINNING))
    if model.vision is None or not model.vision.processor.files:
        return found
    rows, columns = torch.meshgrid(torch.arange(40), torch.arange(56), indexing="ij")
    picture = torch.stack(((7 * rows + 3 * columns) % 256, (rows * columns) % 256, (5 * columns) % 256), -1)
    digest = PICTURES.hold(png(picture.to(torch.uint8).numpy()))
    try:
        pixels = model.vision.processor.pixels(digest)
    except PictureError:  # reported when a picture is used: the model may be used for text only
        return found
    seen = Transcript()
    tokens = [found.tokens[0], *[model.vision.placeholders[0]] * pixels.count, *found.tokens[1:]]
    seen.observe(tokens, media=[Media(1, pixels.count, digest, pixels.grid)])
    return seen if len(seen) + max(map(len, PROBES)) <= model.config.context else found


def probe(model: Backed) -> tuple[Layout, Tensor]:
    """Return a micro-batch of two texts with a common prefix, and the indices of all tokens of the first text, then of
    the second.
    """
    first, device = _beginning(model), model.head.device
    shared, one, other = len(first), *map(len, PROBES)
    tokens = torch.tensor([*first.tokens, *probe_ids(model, PROBES[0]), *probe_ids(model, PROBES[1])], device=device)
    whole = positions_of(shared + one, first.media)
    place = torch.arange(shared + one) if whole is None else torch.from_numpy(whole)
    position = torch.cat([place, place[..., shared : shared + other]], -1).to(device)
    media = tuple(first.media)
    layout = Layout(tokens, position, (0, shared, shared + one), (shared, one, other), (-1, 0, 0), media)
    both = [*range(shared + one), *range(shared), *range(shared + one, shared + one + other)]
    return layout, torch.tensor(both, device=device)


def _own_forward(model: Backed, folder: Path) -> tuple[Tensor, Tensor]:
    """Return (logits, last hidden states) of both texts, each from a separate call of the model's own forward."""
    if model.attention != "eager":
        model.attend("eager")
    first, logits, states = _beginning(model), [], []
    for text in PROBES:
        ids = torch.tensor([[*first.tokens, *probe_ids(model, text)]], device=model.head.device)
        more = _seen(model, ids, first.media)
        try:
            out = model.inner(input_ids=ids, use_cache=False, **more).logits[0]
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            if not more:
                raise
            raise UserError(
                f"{folder}: the model cannot read the pictures of its image processor: copy the preprocessor_config.json of "
                f"this model ({one_line(error):.120})"
            ) from None
        logits.append(out if model.vision is None else out + model.vision.forbidden)
        states.append(model.inner.base_model(input_ids=ids, use_cache=False, **more).last_hidden_state[0])
    if hasattr(model.inner.base_model, "rope_deltas"):
        model.inner.base_model.rope_deltas = None  # the positions of these texts must not be kept
    return torch.cat(logits), torch.cat(states)


def _seen(model: Backed, ids: Tensor, media: Sequence[Media]) -> dict[str, Tensor]:
    """Return the inputs of the model's own forward for at most one picture."""
    if model.vision is None or not media:
        return {}
    found = {name: x.to(ids.device) for name, x in model.vision.processor.pixels(media[0].digest).inputs.items()}
    if "mm_token_type_ids" in inspect.signature(model.inner.forward).parameters:
        found["mm_token_type_ids"] = (ids == model.vision.placeholders[0]).int()
    return found


def _head_of(model: Backed, states: Tensor, own: Tensor) -> tuple[float, float | None]:
    """Return scale and cap of the head: of the values in the configuration, those that best reproduce the model's own
    logits.
    """
    config = model.inner.config.get_text_config()
    cap = getattr(config, "final_logit_softcapping", None)
    scales = {1.0}
    for name in ("logits_scaling", "logit_scale", "lm_head_multiplier", "logits_scale"):
        value = getattr(config, name, None)
        if isinstance(value, int | float) and not isinstance(value, bool) and value:
            scales |= {float(value), 1.0 / value}
    found = [(scale, float(c) if c else None) for scale in scales for c in dict.fromkeys((cap, None))]
    plain = model.head
    return min(found, key=lambda kind: float((Head(plain.weight, plain.bias, *kind).logits(states) - own).abs().max()))


def _ways(model: Backed) -> Iterator[tuple[Way, str]]:
    if _is_flat(model):
        yield "flat", NAME
    yield from (("rows", "sdpa"), ("rows", "eager"))


def _kept_per_token(model: Backed) -> float:
    """Return the bytes of activations that a forward pass keeps per token, measured on the probes."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # an operation that held its own result would never be freed

    layout, at = probe(model)
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        found = model.hidden(layout, at)  # kept alive until the bytes are counted: a freed address could be reused
        count = sum(kept.values())
    del found
    return count / len(layout.tokens)


def _for_rows(model: Backed, own: Tensor, limit: float) -> str:
    """Return the name of the attention with which a flat model samples with a cache: torch's fused one, if it gives the
    model's own logits, which it does not for soft caps and sinks.
    """
    model.way = "rows"
    try:
        model.attend("sdpa")
        apart = _difference(model.head.logits(model.hidden(*probe(model))), own)
    except (ValueError, NotImplementedError):
        return "eager"
    finally:
        model.way = "flat"
        model.attend(NAME)
    return "sdpa" if apart <= limit else "eager"


class _Recording:
    """Counts how the layers of a model mix tokens, in place of mixing them, and compares their windows with their masks."""

    def __init__(self, numbers: bool) -> None:
        self.numbers = numbers  # whether masks have any
        self.attentions = self.convolutions = self.rules = 0

    def attention(self, q: Tensor, k: Tensor, v: Tensor, how: AttentionVariant, mask: Tensor | None) -> Tensor:
        self.attentions += 1
        if not self.numbers:
            return q
        windows = {0} if mask is None else set(mask.unique().tolist())
        if windows != {how.window or 0}:
            raise NotFlatError("the window of a layer is not that of its mask")
        return q

    def convolution(self, function: Callable[..., Tensor], x: Tensor, *given: Any, **named: Any) -> Tensor:
        self.convolutions += 1
        return x

    def rule(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, normed: bool) -> Tensor:
        self.rules += 1
        return v


def _is_flat(model: Backed, numbers: bool = True) -> bool:
    """Return whether every layer calls our attention exactly once, with a causal mask or a window, or our functions for
    linear attention, and nothing besides. Texts of a few tokens do not show what a long window hides, so the masks are
    looked at. Nor do numbers of little precision show all that else mixes tokens, so gradients are: without our functions
    a token's state depends on no other token. Without `numbers` state spaces are known by their weights.
    """
    found, begins = _Recording(numbers), list[Tensor]()
    ids = torch.tensor([probe_ids(model, BEGINNING)], device=model.head.device)

    def begin(module: nn.Module, given: Any, out: Tensor) -> Tensor:
        begins.append(out.detach().requires_grad_())
        return begins[-1]

    hook = model.inner.get_input_embeddings().register_forward_hook(begin)
    try:
        model.attend(RECORDING)
        with mixing(found), torch.enable_grad():
            last = model.inner.base_model(input_ids=ids, use_cache=False).last_hidden_state[0, -1]
            [gradient] = torch.autograd.grad((last * torch.arange(len(last)).to(last)).sum(), begins)
    except Exception:  # code of models raises errors of any type, such as for the mask that is missing (DeepSeek V3.2)
        return False
    finally:
        hook.remove()
    layers = model.inner.config.get_text_config().num_hidden_layers
    mixed = bool(gradient[0, :-1].any() or not gradient[0, -1].any()) if numbers else bool(state_spaces(model.inner))
    return not mixed and found.attentions + max(found.convolutions, found.rules) == layers


# -- mixtures of experts -----------------------------------------------------------------------------------------------


def replay_routing(model: Backed) -> None:
    """Make the model use the experts that layouts give. Raises UserError if a test shows that it does not.

    The test: the model's own experts, given in another order, must reproduce its log-probabilities; other experts must
    be used, and change them.
    """
    kind = type(model.inner).__name__
    if model.routers is None:
        raise UserError(f"--routing-replay: no router was found in {kind}: leave it out")
    layout, at = probe(model)
    with torch.no_grad(), watching(model) as routed:
        own = model.head.logits(model.hidden(layout, at))
    chosen = routed.taken[0]
    experts = torch.full((layout.tokens.numel(), *chosen.shape[1:]), -1, dtype=torch.int16, device=at.device)
    experts[at] = chosen.short()
    model.replays = True
    same, other = experts.flip(-1), (experts + 1) % model.routers.experts
    found = []
    for given in (same, other):
        with torch.no_grad(), watching(model) as routed:
            found.append(model.head.logits(model.hidden(replace(layout, experts=given), at)))
        taken = bool((routed.taken[0] == given[at]).all())
        if not taken:
            break
    limit = TOLERANCE if model.head.dtype in (torch.float32, torch.float64) else COARSE
    if not taken or not _difference(found[0], own) <= limit or torch.equal(found[1], own):
        model.replays = False
        raise UserError(f"--routing-replay: {kind} does not follow the experts that it is given: leave it out")


def _register() -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, layout_attention)  # without a mask function no mask is made
    AttentionInterface.register(RECORDING, layout_attention)
    AttentionMaskInterface.register(RECORDING, _recorded_mask)


def _recorded_mask(
    *_: Any, q_length: int, kv_length: int, mask_function: Callable[..., Any], **more: Any
) -> Tensor | None:
    """Return, for a mask with a window, the window in place of the mask, [1, 1, q, kv]; None for a causal mask. Raises
    NotFlatError for other masks.
    """
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from transformers.masking_utils import causal_mask_function

    if mask_function is causal_mask_function:
        return None
    window = more.get("local_size") or 0
    with unset_fake_temporarily():  # numbers, also where those of a model are missing
        zero, keys = torch.tensor(0), torch.arange(3 * window + 8)
        for query in (0, window, 3 * window + 5):
            distance = query - keys
            try:
                seen = mask_function(zero, zero, torch.tensor(query), keys)
            except (IndexError, TypeError, RuntimeError):  # a mask of something else than two places
                raise NotFlatError("a mask depends on more than distances") from None
            if not torch.equal(seen, (distance >= 0) & (distance < window)):
                raise NotFlatError("a mask is neither causal nor a window")
    return torch.full((1, 1, q_length, kv_length), float(window))
