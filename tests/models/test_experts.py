"""Mixtures of experts as people write them train with the bits of plain PyTorch, whatever fits on the device."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

import mtcompile
from mtcompile.execution.compiled import CompiledStep
from mtcompile.runtime.schedule import Schedule
from mtcompile.runtime.trace import Trace, moved_nbytes
from tests.helpers.training import adamw, assert_plain_at_three_budgets, compiled_run, same, train

pytestmark = [pytest.mark.slow, pytest.mark.long]  # it compiles many models

SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "use_cache": False, "num_experts_per_tok": 2,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
CONFIGS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 16},
    "Qwen2Moe": {"num_experts": 16, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    "Qwen3Moe": {"num_experts": 16, "moe_intermediate_size": 32, "head_dim": 16},
    "Olmoe": {"num_experts": 16},
    "DeepseekV3": {
        "n_routed_experts": 16, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, **LATENT
    },
    "GptOss": {"num_local_experts": 16, "head_dim": 16, "sliding_window": 16},
}  # fmt: skip


@pytest.mark.filterwarnings("error:the forward is compiled in parts")
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize("name", CONFIGS)
def test_mixtures_of_transformers_fetch_the_experts_that_are_used(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MT_CHECK", "1")  # what is not fetched holds NaN
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SMALL, **CONFIGS[name])
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(torch.bfloat16).train()
    tokens = torch.randint(3, 64, (1, 5))
    report = assert_plain_at_three_budgets(model, {"input_ids": tokens, "labels": tokens}, experts="used", fragments=None)
    assert report["fetched_bytes"] < 0.75 * report["planned_fetched_bytes"]  # 10 of 16 at most


# ------------------------------------------------------------------------------------------------- experts in a ModuleList


class Expert(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)))


Chosen = Iterator[tuple[Tensor, Tensor, nn.Module]]  # the tokens of an expert, and which of their choices it is


def if_any(experts: nn.ModuleList, chosen: Tensor) -> Chosen:
    for number, expert in enumerate(experts):
        mask = chosen == number
        if mask.any():
            yield (*torch.where(mask), expert)


def each(experts: nn.ModuleList, chosen: Tensor) -> Chosen:
    for number, expert in enumerate(experts):
        yield (*torch.where(chosen == number), expert)


def one_hot(experts: nn.ModuleList, chosen: Tensor) -> Chosen:
    mask = F.one_hot(chosen, len(experts)).permute(2, 1, 0)
    for number in range(len(experts)):
        choice, tokens = torch.where(mask[number])
        yield tokens, choice, experts[number]


def those_hit(experts: nn.ModuleList, chosen: Tensor) -> Chosen:
    mask = F.one_hot(chosen, len(experts)).permute(2, 1, 0)
    for number in torch.greater(mask.sum((-1, -2)), 0).nonzero():
        choice, tokens = torch.where(mask[number].squeeze(0))
        yield tokens, choice, experts[number]


FORMS: dict[str, Callable[[nn.ModuleList, Tensor], Chosen]] = {
    "if mask.any()": if_any,
    "torch.where": each,
    "one-hot": one_hot,
    "those hit": those_hit,
}


class Listed(nn.Module):
    """A mixture of experts in a ModuleList. ``form``: how the tokens of each expert are found; none: all are computed."""

    def __init__(self, form: str | None, width: int = 16, experts: int = 8) -> None:
        super().__init__()
        self.form, self.embed, self.head = form, nn.Embedding(32, width), nn.Linear(width, 32)
        self.router, self.experts = nn.Linear(width, experts), nn.ModuleList(Expert(width) for _ in range(experts))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens).flatten(0, 1)
        scores, chosen = self.router(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        if self.form is None:
            weights = torch.zeros_like(self.router(x)).scatter(1, chosen, scores)
            for number, expert in enumerate(self.experts):
                out = out + expert(x) * weights[:, number, None]
        else:
            for rows, choice, expert in FORMS[self.form](self.experts, chosen):
                out.index_add_(0, rows, expert(x[rows]) * scores[rows, choice, None])
        return F.cross_entropy(self.head(x + out), tokens.flatten())


TOKENS = {"tokens": torch.tensor([[3, 1, 3, 30, 2]])}


def smallest_in_parts(model: nn.Module) -> int:
    """The smallest budget for all parts, of which each says what it needs beside those before it."""
    needed = 1
    for _ in range(10):
        try:
            compiled_run(model, TOKENS, needed, steps=2)
        except mtcompile.BudgetError as error:
            needed = error.minimum_bytes
            del error
            gc.collect()
        else:
            return needed
    raise AssertionError(f"expected a budget that works, found none up to {needed}")


@pytest.mark.filterwarnings("ignore:the forward is compiled in parts")
@pytest.mark.parametrize("form", FORMS)
def test_experts_in_a_list_train_in_parts_with_the_bits_of_plain_pytorch(form: str) -> None:
    torch.manual_seed(0)
    model = Listed(form)
    plain = copy.deepcopy(model)
    expected = train(plain, adamw(plain.parameters()), TOKENS)
    least = smallest_in_parts(model)
    for memory in (2**30, int(1.3 * least), least):
        actual, report, _ = compiled_run(model, TOKENS, memory)
        assert same(expected, actual)  # None for the gradients of an expert that was not called
        assert report["peak_device_bytes"] <= report["planned_peak_device_bytes"] <= memory


class Fetches:
    """Listens to a session: the bytes that each part's step fetched."""

    def __init__(self) -> None:
        self.nbytes: list[int] = []

    def wants_device_times(self, schedule: Schedule) -> bool:
        return False

    def step_ran(self, compiled: CompiledStep, measured: Trace | None) -> None:
        assert measured is not None
        self.nbytes.append(moved_nbytes(compiled.schedule, measured, "h2d"))


@pytest.mark.filterwarnings("ignore:the forward is compiled in parts")
def test_experts_in_a_list_that_are_not_called_are_not_fetched() -> None:
    torch.manual_seed(0)
    model = Listed("if mask.any()")
    expert = sum(p.numel() * p.element_size() for p in model.experts[0].parameters())
    optimizer, fetches = adamw(model.parameters()), Fetches()
    compiled = mtcompile.compile(model, memory=36_000, optimizer=optimizer)  # too little for all of them
    compiled._mt_model.session.listeners.append(fetches)
    for _ in range(2):
        compiled(torch.full((1, 5), 3)).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert len(fetches.nbytes) == 2 and all(expert < nbytes <= 2.2 * expert for nbytes in fetches.nbytes)  # two are chosen
        fetches.nbytes.clear()


def test_experts_in_a_list_that_compute_all_tokens_are_one_plan() -> None:
    torch.manual_seed(0)
    assert_plain_at_three_budgets(Listed(None), TOKENS)
