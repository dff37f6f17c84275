"""The attention of packed rows: a mask that keeps documents apart, and a check that a model heeds it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mtcompile.capture.refusals import first_line

_LENGTHS = 5, 7  # of the two documents of the check
# Of the largest logit; narrower numbers: 0.05. Models in float64 often compute their softmax in float32.
_TOLERANCES = {torch.float64: 1e-4, torch.float32: 1e-4}


def document_mask(config: Any, documents: Tensor, dtype: torch.dtype) -> Any:
    """Returns the attention mask of packed rows for a model of Transformers of this configuration, in the form that its
    attention takes: of shape (rows, 1, seq, seq), or one for each type of its layers. ``documents``: the number of each token's
    document, of shape (rows, seq). Tokens attend to earlier ones of their document. Returns None if Transformers makes no mask
    for the model."""
    from transformers.masking_utils import create_masks_for_generate

    def same(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return documents[batch, query] == documents[batch, key]

    widthless = torch.empty((*documents.shape, 0), dtype=dtype)
    masks = create_masks_for_generate(config, widthless, None, None, and_mask_function=same)
    return next(iter(masks.values())) if isinstance(masks, dict) and len(masks) == 1 else masks


def check_packing(model: Any, seq: int) -> None:
    """Raises ValueError unless documents packed into rows of ``seq`` tokens give the logits that they give alone, whatever is
    beside them. Tries two short documents of random tokens; the model and torch's generator are left as they are."""
    chunk = getattr(model.config.get_text_config(), "attention_chunk_size", None)
    if chunk is not None and seq > chunk:
        raise _cannot(model, f"its attention is cut at every {chunk} tokens of a row, wherever documents begin")
    if (length := _length_that_changes_frequencies(model.config.get_text_config())) is not None and seq > length:
        raise _cannot(model, f"the frequencies of its position embedding change where a row has positions beyond {length}")
    generator = torch.Generator().manual_seed(0)
    first, other, second = (
        torch.randint(model.config.get_text_config().vocab_size, (1, length), generator=generator)
        for length in (_LENGTHS[0], _LENGTHS[0], _LENGTHS[1])
    )
    documents = torch.tensor([[1] * _LENGTHS[0] + [2] * _LENGTHS[1]])
    positions = torch.cat([torch.arange(length) for length in _LENGTHS])[None]
    training = model.training
    model.eval()
    try:
        mask = document_mask(model.config, documents, model.dtype)
        if mask is None:
            raise ValueError("Transformers makes no attention mask for its layers")
        with torch.no_grad():
            packed, beside = (
                model(
                    input_ids=torch.cat((one, second), 1), position_ids=positions, attention_mask=mask, use_cache=False
                ).logits
                for one in (first, other)
            )
            alone = torch.cat([model(input_ids=each, use_cache=False).logits for each in (first, second)], 1)
    except Exception as error:
        raise _cannot(model, first_line(error)) from error
    finally:
        model.train(training)
    bound = _TOLERANCES.get(packed.dtype, 0.05) * float(alone.abs().max())
    if float((packed - beside)[:, _LENGTHS[0] :].abs().max()) > bound:
        raise _cannot(model, "a document's logits change with the document before it")
    if float((packed - alone).abs().max()) > bound:
        raise _cannot(model, "a document's logits are not those that it gives alone")


def _length_that_changes_frequencies(config: Any) -> int | None:
    """Returns the number of positions beyond which the rotary embedding of a whole batch takes other frequencies; None if they
    are the same at all positions."""
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for parameters in (given, *(each for each in given.values() if isinstance(each, dict))):
        if parameters.get("rope_type", parameters.get("type")) in ("dynamic", "longrope"):
            lengths = (
                parameters.get("original_max_position_embeddings"),
                getattr(config, "original_max_position_embeddings", None),
                getattr(config, "max_position_embeddings", None),
            )
            return next((int(length) for length in lengths if length), 0)
    return None


def _cannot(model: Any, reason: str) -> ValueError:
    return ValueError(
        f"expected packed samples that do not attend to one another, found that {type(model).__name__} cannot tell them "
        f"apart: {reason}. Try --no-packing"
    )
