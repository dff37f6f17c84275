"""Configurations of Transformers made small: as deep, wide and long as a test can afford, related as the defaults are."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Container
from typing import Any

VOCABULARY, SPECIAL = 128, 100  # ids below 100 are words, those of special tokens lie above
POSITIONS, LAYERS, WIDTH, HEADS, IMAGE, PATCH, MELS = 64, 2, 32, 4, 32, 8, 16

# The first pattern that a field's name contains says what it becomes. A number stands for itself, at most the default.
_EVERYWHERE: tuple[tuple[str, int], ...] = (
    (r"type_vocab|vocab.*(file|list)", 1 << 30),
    (r"vocab|codebook_size|num_embeddings$", VOCABULARY),
    (r"experts_per_tok|num_experts_per|top_k_experts|moe_top_?k|moe_k$|num_selected|router_top_k|^top_k$|expert_top_k", 2),
    (r"shared_experts?$|first_k_dense|^topk_group|^n_group$", 1),
    (r"(num|n|moe|local|routed|global)_.*experts$|num_experts$|num_local_experts|moe_num_experts|n_routed", 4),
    (r"layer(s|_num)?$|^depth$|num_blocks$|blocks_per|_depth$|hidden_layers|n_blocks", LAYERS),
    (r"max_.*position|n_positions|n_ctx|max_seq|seq_length|context_length|max_length|block_size|max_2d", POSITIONS),
    (r"max_source|max_target", POSITIONS),
    (r"sliding_window|^window_size$|attention_window|local_attention|attn_window|attention_chunk", 8),
    (r"image_size|crop_size|img_size|input_resolution", IMAGE),
    (r"num_mel_bins|^mel_bins$|feature_size|n_mels", MELS),
    (r"num_frames$", 4),
    (r"^n_groups$|^mamba_n_groups$", 2),
    (r"num_queries|num_query_tokens|num_latents|num_object_queries|n_queries", 8),
)
_WIDTHS: tuple[tuple[str, int], ...] = (
    (r"(kv|key_value)_heads|num_kv|multi_query_group|n_head_kv|n_kv_head", 2),
    (r"heads?$|num_attention_heads|num_.*heads$", HEADS),
    (r"lora_rank|_rank$", 16),
    (r"nope_head_dim|rope_head_dim|v_head_dim|head_dim|d_kv|kv_channels|attention_head_size|key_value_dim|head_size", 8),
    (r"patch_size$", PATCH),
    (r"intermediate|ffn_dim|ffw|mlp_dim|d_ff|n_inner|ff_dim|feed_?forward|inner_dim|linear_units|mlp_hidden", 48),
    (r"state_size|ssm_state|d_state|num_conv_pos_embeddings$", 8),
    (r"^(num|n)_conv_pos_embedding_groups|pos_embedding_groups", 2),
    (r"ratio|expan|factor|scale|kernel|stride|dropout|num_channels|in_channels|_channel$|num_groups|_iter", 1 << 30),
    (r"hidden_size|d_model|embed_dim|embedding_size|n_embd|hidden_dim|_dim$|^dim$|_width$|_size$|_channels$|d_embed", WIDTH),
)
_NEEDED = {"num_experts_per_tok": 2, "vocab_size": VOCABULARY}  # where the default is None
# What is refused: layers that a random number skips, and masks drawn by numpy.
_WITHOUT = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop", "mask_time_prob", "mask_feature_prob")
_DEEP = re.compile(r"depths?$|num_blocks$|layers$|layer_nums")
_HEADS = re.compile(r"head")
_WIDE = re.compile(r"hidden_sizes?$|dims?$|channels$|embed_dims?$|conv_dim$|widths?$")
_KEPT = re.compile(r"stride|kernel|dilation|ratio|factor|layer_types|out_indices|out_features|scales?$")

Rule = Callable[[str, int], int]


def narrow(name: str, value: int) -> int:
    """Makes everything small."""
    return _first((*_EVERYWHERE, *_WIDTHS), name, value)


def narrow_with_wide_heads(name: str, value: int) -> int:
    """Makes everything small, with heads of 16 that together are wider than the model."""
    return min(value, 16) if re.search(r"head_dim|d_kv|head_size", name) else narrow(name, value)


def narrow_with_more_heads(name: str, value: int) -> int:
    """Makes everything small, with as many heads as a state twice as wide as the model has."""
    return min(value, 8) if re.search(r"^num_heads$|n_heads$|mamba_num_heads", name) else narrow(name, value)


def narrow_with_sections(name: str, value: int) -> int:
    """Makes everything small, and so the parts of a head that say when, how high and how far to the right."""
    return narrow(name, value)


def shallow(name: str, value: int) -> int:
    """Makes everything but the widths small."""
    return _first(_EVERYWHERE, name, value)


RULES: tuple[Rule, ...] = (narrow, narrow_with_more_heads, narrow_with_wide_heads, narrow_with_sections, shallow)


def _first(patterns: tuple[tuple[str, int], ...], name: str, value: int) -> int:
    for pattern, size in patterns:
        if re.search(pattern, name):
            return min(value, size)
    return value


def shrunk(config_class: Any, rule: Rule, default: Any = None) -> Any:
    """Returns a small configuration of a class. ``default``: what it is made small from, rather than the class's own."""
    default = config_class() if default is None else default
    if not dataclasses.is_dataclass(default):
        raise TypeError(f"{config_class.__name__} is no dataclass")
    declared = {field.name: field for field in dataclasses.fields(default)}
    layers = -1 if "depths" in declared else _first_int(default, declared, "num_hidden_layers", "num_layers", "n_layer")
    heads = _first_int(default, declared, "num_attention_heads", "num_heads", "n_head")
    values: dict[str, Any] = {}
    for name, field in declared.items():
        value = _value(default, name)
        small = _small(name, value, rule, layers)
        if value == heads and re.search(r"(kv|key_value)_heads", name):
            small = rule("num_attention_heads", value)  # all heads have keys of their own
        if small is not value and small != value and (hasattr(small, "to_dict") or not _is_derived(field, name)):
            values[name] = small
    if rule is narrow_with_sections and isinstance(rope := _value(default, "rope_parameters"), dict):
        values["rope_parameters"] = {**rope, "mrope_section": _sections(rope)}
    if "use_cache" in declared:
        values["use_cache"] = False
    config = type(default)(**values)
    _switch_off(config)
    return config


def _switch_off(config: Any) -> None:
    for name, value in list(vars(config).items()):
        if name in _WITHOUT:
            setattr(config, name, 0.0)
        elif hasattr(value, "to_dict"):
            _switch_off(value)


def _sections(rope: dict[str, Any]) -> list[int]:
    half = int(WIDTH // HEADS * rope.get("partial_rotary_factor", 1)) // 2
    return [half - 2 * (half // 3), half // 3, half // 3]


def _first_int(config: Any, declared: Container[str], *names: str) -> int:
    return next((value for name in names if name in declared and _is_int(value := _value(config, name))), -1)


def _value(config: Any, name: str) -> Any:
    """Returns a field's value; None for one that differs from layer to layer, which some configurations refuse to name."""
    try:
        return getattr(config, name, None)
    except Exception:
        return None


def _is_derived(field: Any, name: str) -> bool:
    """Whether the configuration fills in a field itself: its own default is None, and it is no size of its own."""
    sized = name.endswith(("_config", "token_id")) or "layer_types" in name or "hidden" in name or name in _NEEDED
    return field.default is None and not sized


def _small(name: str, value: Any, rule: Rule, layers: int) -> Any:
    if hasattr(value, "to_dict") and dataclasses.is_dataclass(value):
        return shrunk(type(value), rule, value)
    if re.search(r"token_(id|index)$|_token_idx$", name):
        return _special(name, value)
    if value is None and name in _NEEDED:
        return _NEEDED[name]
    if _is_int(value):
        return rule(name, value)
    if isinstance(value, (list, tuple)) and value and len(value) == layers:
        return _kinds(value)
    if isinstance(value, (list, tuple)) and value and all(map(_is_int, value)) and not _KEPT.search(name):
        return type(value)(_small_list(name, list(value), rule))
    return value


def _small_list(name: str, values: list[int], rule: Rule) -> list[int]:
    if rule is shallow and not _DEEP.search(name):
        return [rule(name, value) for value in values]
    if _HEADS.search(name):
        return [min(value, 2) for value in values]
    if _DEEP.search(name):
        return [min(value, 1) for value in values]
    if _WIDE.search(name):
        return [min(value, WIDTH) for value in values]
    return [rule(name, value) for value in values]


def _kinds(values: Any) -> Any:
    """Returns a value for each of the layers that are left: the kinds that there are, as far as they go."""
    kinds = list(dict.fromkeys(values)) if all(isinstance(v, (str, int)) for v in values) else list(values)
    return type(values)((kinds * LAYERS)[:LAYERS])


def _special(name: str, value: Any) -> Any:
    """Returns an id within the small vocabulary, the same for the same name in every part of a configuration."""
    if isinstance(value, (list, tuple)):
        return type(value)(_special(name, member) for member in value)
    if not _is_int(value) or value < 0:
        return value
    known = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "sep_token_id": 2}
    return known.get(name, SPECIAL + sum(name.encode()) % (VOCABULARY - SPECIAL))


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
