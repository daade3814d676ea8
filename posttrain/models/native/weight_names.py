"""Mapping from parameters to the tensors of a Hugging Face checkpoint.

q, k, v and gate, up are stored separately and computed together.
"""

from __future__ import annotations

from posttrain.models.native.decoder_shape import DecoderConfig

Pieces = tuple[tuple[str, tuple[int, ...]], ...]
"""The stored tensors (name, shape) that fill one parameter, concatenated along their first dimension."""


def stored_pieces(config: DecoderConfig) -> dict[str, Pieces]:
    """Return, for the name of each parameter of `Decoder`, the tensors of the checkpoint that it consists of."""
    hidden, size = config.hidden, config.head_size
    width, kv_width, intermediate = config.heads * size, config.kv_heads * size, config.intermediate
    pieces: dict[str, Pieces] = {"embed.weight": (("model.embed_tokens.weight", (config.vocab, hidden)),)}
    for number in range(config.layers):
        ours, theirs = f"layers.{number}.", f"model.layers.{number}."
        attention, mlp = theirs + "self_attn.", theirs + "mlp."
        linear = {
            "qkv": (
                ((attention + "q_proj", width), (attention + "k_proj", kv_width), (attention + "v_proj", kv_width)),
                hidden,
            ),
            "o": (((attention + "o_proj", hidden),), width),
            "gate_up": (((mlp + "gate_proj", intermediate), (mlp + "up_proj", intermediate)), hidden),
            "down": (((mlp + "down_proj", hidden),), intermediate),
        }
        biased = {"qkv": config.qkv_bias, "o": config.o_bias, "gate_up": config.mlp_bias, "down": config.mlp_bias}
        for name, (outputs, inputs) in linear.items():
            pieces[f"{ours}{name}.weight"] = tuple((f"{stored}.weight", (rows, inputs)) for stored, rows in outputs)
            if biased[name]:
                pieces[f"{ours}{name}.bias"] = tuple((f"{stored}.bias", (rows,)) for stored, rows in outputs)
        pieces[ours + "attention_norm.weight"] = ((theirs + "input_layernorm.weight", (hidden,)),)
        pieces[ours + "mlp_norm.weight"] = ((theirs + "post_attention_layernorm.weight", (hidden,)),)
        if config.qk_norm:
            norms = (attention + "q_norm.weight", attention + "k_norm.weight")
            pieces[ours + "qk_norm"] = tuple((stored, (size,)) for stored in norms)
    pieces["norm.weight"] = (("model.norm.weight", (hidden,)),)
    if not config.tied:
        pieces["output"] = (("lm_head.weight", (config.vocab, hidden)),)
    return pieces
