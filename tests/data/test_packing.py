"""Packed rows: every sample once, documents that do not see one another, the losses and gradients of unpacked ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from mtcompile.data.boundaries import check_packing, document_mask
from mtcompile.data.encoding import Samples, encode
from mtcompile.data.packing import Rows, pack
from mtcompile.data.records import read_records
from tests.data.folders import SIZES, VOCABULARY, chats, tokenizer_of

transformers = pytest.importorskip("transformers")
SMALL = {**SIZES, "num_hidden_layers": 2}


@given(st.lists(st.integers(1, 20), min_size=1, max_size=60))
def test_every_sample_is_in_one_row_and_rows_are_well_filled(lengths: list[int]) -> None:
    rows = pack(lengths, 20)
    assert sorted(sample for row in rows for sample in row) == list(range(len(lengths)))
    filled = [sum(lengths[sample] for sample in row) for row in rows]
    assert max(filled) <= 20 and sum(n <= 10 for n in filled) <= 1  # two such rows would be one


def samples_of(*lengths: int) -> Samples:
    starts = np.cumsum([0, *lengths])
    trained = np.ones(starts[-1], bool)
    trained[starts[:-1]] = False
    return Samples(np.arange(100, 100 + starts[-1], dtype=np.int32), trained, starts)


def test_rows_hold_tokens_labels_positions_and_documents() -> None:
    masks: list[torch.Tensor] = []
    rows = replace(Rows.cut(samples_of(3, 2, 4), 6, 1, packed=True, padding=7), mask=masks.append)
    batches = [rows.batch(step, 1, 0) for step in (1, 2)]
    first, second = sorted((batch.arguments for batch in batches), key=lambda a: int(a["input_ids"][0, 0]))
    assert first["input_ids"].tolist() == [[100, 101, 102, 7, 7, 7]] and second["input_ids"].tolist() == [
        [105, 106, 107, 108, 103, 104]
    ]
    assert second["labels"].tolist() == [[-100, 106, 107, 108, -100, 104]] and first["labels"].tolist() == [
        [-100, 101, 102] + [-100] * 3
    ]
    assert second["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1]] and first["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2]]
    assert sorted(mask.tolist() for mask in masks) == [[[1, 1, 1, 0, 0, 0]], [[1, 1, 1, 1, 2, 2]]]
    assert sorted((batch.tokens, batch.targets) for batch in batches) == [(3, 2), (6, 4)]
    with pytest.raises(
        ValueError, match="expected at least 2 rows of 6 tokens for a batch of 2, beside 1 samples held out, found 1"
    ):
        Rows.cut(samples_of(3, 3, 3), 6, 2, packed=True, held_out=True)


def test_the_last_samples_are_held_out_and_data_tells_itself_apart() -> None:
    rows = Rows.cut(samples_of(*[4] * 40), 4, 2, packed=False, held_out=True)
    assert rows.trained.count == 38 and [batch.arguments["input_ids"].shape for batch in rows.evaluation(1, 8)] == [(1, 4)] * 2
    assert next(rows.evaluation(4, 8)).arguments["input_ids"].tolist() == [[252, 253, 254, 255], [256, 257, 258, 259]]
    seen = torch.cat([rows.batch(step, 2, 3).arguments["input_ids"] for step in range(1, 20)])
    assert sorted(seen.flatten().tolist()) == list(range(100, 100 + 38 * 4))
    others = (Rows.cut(samples_of(*lengths), 4, 2, packed=False, held_out=True) for lengths in ([4] * 39, [4] * 39 + [3]))
    assert len({rows.digest, *(other.digest for other in others)}) == 3


def model_of(config: Any, dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).to(dtype)


def test_a_mask_by_hand() -> None:
    mask = document_mask(
        transformers.LlamaConfig(**SMALL, attn_implementation="sdpa"), torch.tensor([[1, 1, 2, 2, 0]]), torch.float32
    )
    assert mask.dtype == torch.bool and mask.int().tolist() == [
        [[[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 1]]]
    ]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("LlamaConfig", {}),
        ("LlamaConfig", {"attn_implementation": "eager"}),
        ("MistralConfig", {"sliding_window": 8}),
        ("Gemma2Config", {"sliding_window": 8, "head_dim": 8}),
        ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4}),
        ("MixtralConfig", {"num_local_experts": 4}),
        pytest.param("Qwen3Config", {}, marks=pytest.mark.long),
        pytest.param("Gemma3TextConfig", {"sliding_window": 8, "head_dim": 8}, marks=pytest.mark.long),
        pytest.param("GptOssConfig", {"num_local_experts": 4, "sliding_window": 8, "head_dim": 8}, marks=pytest.mark.long),
        pytest.param("OPTConfig", {"word_embed_proj_dim": 32, "ffn_dim": 48}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_packed_losses_and_gradients_are_those_of_samples_by_themselves(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    config = getattr(transformers, name)(**{**({"vocab_size": VOCABULARY} if name == "GPT2Config" else SMALL), **options})
    experts = "num_local_experts" in options  # whose kernels are not for float64
    model = model_of(config, torch.float32 if experts else torch.float64).eval()
    check_packing(model, 96)
    samples = encode(read_records([chats(tmp_path / "chats.jsonl")]), tokenizer_of(), 96)
    rows = Rows.cut(samples, 96, 1, packed=True)
    rows = replace(rows, mask=lambda documents: document_mask(model.config, documents, model.dtype))
    alone = Rows.cut(samples, 96, 1, packed=False)
    assert len(rows.rows) < len(alone.rows) / 1.5
    results = []
    for each in (rows, alone):
        model.zero_grad()
        total = torch.zeros(())
        for step in range(1, len(each.rows) + 1):
            batch = each.batch(step, 1, 0)
            loss = model(**batch.arguments).loss * batch.targets  # Transformers computes it in fp32
            loss.backward()
            total += loss.detach()
        results.append((total, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}))
    (packed, gradients), (single, others) = results
    assert torch.allclose(packed, single, rtol=1e-6) and gradients.keys() == others.keys()
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    for parameter, gradient in gradients.items():
        assert torch.allclose(gradient, others[parameter], rtol=1e-4, atol=1e-6 * largest), parameter


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("MambaConfig", {}, "Transformers makes no attention mask for its layers"),
        ("BloomConfig", {"n_layer": 1, "n_head": 4}, "too many values to unpack"),
        ("Llama4TextConfig", {"attention_chunk_size": 64, "num_local_experts": 2}, "cut at every 64 tokens of a row"),
        pytest.param(
            "RwkvConfig",
            {"num_hidden_layers": 2, "hidden_size": 32},
            "logits change with the document before it",
            marks=pytest.mark.long,
        ),
    ],
    ids=str,
)
def test_models_that_cannot_tell_documents_apart_are_refused(name: str, options: dict[str, Any], said: str) -> None:
    sizes = {key: value for key, value in SIZES.items() if name not in ("MambaConfig", "BloomConfig", "RwkvConfig")}
    config = getattr(transformers, name)(**{"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 64, **sizes, **options})
    model = model_of(config, torch.float32)
    model.train()
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match=rf"{type(model).__name__} cannot tell them apart: .*{said}.*Try --no-packing"):
        check_packing(model, 96)
    assert model.training and torch.equal(torch.get_rng_state(), before)


def test_leaks_are_seen_by_their_numbers() -> None:
    """A model that ignores what keeps documents apart, and one that ignores their positions."""
    model = model_of(transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=VOCABULARY), torch.float32)
    forward = model.forward
    model.forward = lambda **arguments: forward(**{**arguments, "attention_mask": None, "position_ids": None})
    with pytest.raises(ValueError, match="change with the document before it"):
        check_packing(model, 96)
    model.forward = lambda **arguments: forward(**{**arguments, "position_ids": None})
    with pytest.raises(ValueError, match="not those that it gives alone"):
        check_packing(model, 96)
    model.forward = forward
    check_packing(model, 96)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_frequencies_that_the_longest_sample_decides_are_refused(kind: str) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 384}
    if kind == "longrope":
        scaling = {"rope_type": kind, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
        config = transformers.Phi3Config(
            **sizes, max_position_embeddings=64, original_max_position_embeddings=16, pad_token_id=0, rope_scaling=scaling
        )
    else:
        config = transformers.LlamaConfig(**sizes, max_position_embeddings=16, rope_scaling={"rope_type": kind, "factor": 4.0})
    model = transformers.AutoModelForCausalLM.from_config(config)
    check_packing(model, 16)
    with pytest.raises(ValueError, match=r"positions beyond 16\. Try --no-packing"):
        check_packing(model, 17)
