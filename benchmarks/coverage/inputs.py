"""Inputs for models of Transformers, from what their forward asks for: the first of several guesses with which it runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.coverage.configs import IMAGE, MELS

BATCH, SEQ, SAMPLES, IGNORED = 2, 16, 6000, -100
Data = dict[str, Any]


def guesses(model: Any, family: str) -> Iterator[Data]:
    """Yields arguments of a call, the likelier and fuller first. Each is the same for the same model."""
    names = set(inspect.signature(model.forward).parameters)
    torch.manual_seed(2)
    makers: Mapping[str, Callable[[Any, set[str]], Iterator[Data]]] = {
        "vision": _vision, "audio": _audio, "multimodal": _multimodal,
    }  # fmt: skip
    yield from makers.get(family, _language)(model, names)


def _language(model: Any, names: set[str]) -> Iterator[Data]:
    ids = _ids(BATCH, SEQ)
    extra = {}
    if "bbox" in names:
        extra["bbox"] = torch.tensor([0, 0, 20, 20]).expand(BATCH, SEQ, 4).clone()
    labels, decoded = {"labels": ids.clone()}, {"decoder_input_ids": ids}
    for labelled in (labels, {**labels, **decoded}, decoded, {}):
        data = {"input_ids": ids, **extra, **labelled}
        yield {name: value for name, value in data.items() if name in names or name == "input_ids"}


def _vision(model: Any, names: set[str]) -> Iterator[Data]:
    size = _size(model.config, "image_size", IMAGE)
    labels = {"labels": torch.arange(BATCH) % 2}
    for channels, height, width in _pictures(model.config, size):
        picture = torch.randn(BATCH, channels, height, width)
        segments = {"labels": torch.randint(0, 2, (BATCH, height, width))}
        for labelled in (labels, segments, {}) if "labels" in names else ({},):
            yield {"pixel_values": picture, **labelled}
    frames = int(getattr(model.config, "num_frames", 4))
    video = torch.randn(BATCH, frames, 3, size[0], size[1])
    key = "pixel_values_videos" if "pixel_values_videos" in names else "pixel_values"
    for labelled in (labels, {}):
        yield {key: video, **labelled}


def _pictures(config: Any, size: tuple[int, int]) -> Iterator[tuple[int, int, int]]:
    channels = getattr(config, "num_channels", 3)
    yield channels if isinstance(channels, int) else 3, *size
    yield 3, 64, 64
    yield 3, 224, 224


def _audio(model: Any, names: set[str]) -> Iterator[Data]:
    mels = _field(model.config, ("num_mel_bins", "n_mels", "feature_size", "input_feat_per_channel"), MELS)
    frames = _field(model.config, ("max_source_positions",), 32) * 2
    sounds: list[Data] = [{"input_values": torch.randn(BATCH, SAMPLES)}]
    for shape in ((mels, frames), (frames, mels), (64, mels), (mels, 3000), (_field(model.config, ("max_length",), 64), mels)):
        sounds += [{"input_features": torch.randn(BATCH, *shape)}, {"input_values": torch.randn(BATCH, *shape)}]
    labels = {"labels": _ids(BATCH, 4).clamp(max=_field(model.config, ("vocab_size",), 100) - 1)}
    classes = {"labels": torch.arange(BATCH) % 2}
    for sound in sounds:
        if set(sound) <= names:
            for labelled in (labels, classes, {"decoder_input_ids": _ids(BATCH, 4)}, {}):
                if set(labelled) <= names:
                    yield {**sound, **labelled}


def _multimodal(model: Any, names: set[str]) -> Iterator[Data]:
    size = _size(_part(model.config, "vision_config"), "image_size", IMAGE)
    picture = torch.randn(BATCH, 3, *size)
    ids = _ids(BATCH, SEQ)
    if "return_loss" in names:
        yield {"input_ids": ids, "pixel_values": picture, "return_loss": True}
    yield from _with_picture_tokens(model, ids, picture, names)
    for labelled in ({"labels": ids.clone()}, {"labels": torch.arange(BATCH) % 2}, {}):
        if set(labelled) <= names:
            if "pixel_values" in names and _token_of_pictures(model.config) is None:
                yield {"input_ids": ids, "pixel_values": picture, **labelled}
            if "pixel_values" in names and "input_ids" not in names:
                yield {"pixel_values": picture, **labelled}
    yield from _language(model, names)


def _with_picture_tokens(model: Any, ids: Tensor, picture: Tensor, names: set[str]) -> Iterator[Data]:
    """Yields ids with as many tokens of a picture as the model makes features of it."""
    token = _token_of_pictures(model.config)
    if token is None or not hasattr(model, "get_image_features"):
        return
    sizes = {"image_sizes": torch.tensor([list(picture.shape[-2:])] * BATCH)} if "image_sizes" in names else {}
    with torch.no_grad():
        for extra in (sizes, {}):
            try:
                features = model.get_image_features(pixel_values=picture, **extra)
            except Exception:  # it wants pictures in another form
                continue
            features = getattr(features, "pooler_output", features)
            parts = features if isinstance(features, (list, tuple)) else [features]
            count = sum(part.shape[:-1].numel() for part in parts)
            tokens = torch.cat([ids, torch.full((BATCH, count // BATCH), token), _ids(BATCH, 4)], dim=1)
            labels = torch.where(tokens == token, IGNORED, tokens)
            data = {"input_ids": tokens, "pixel_values": picture, **extra, "labels": labels}
            yield {name: value for name, value in data.items() if name in names}


def _token_of_pictures(config: Any) -> int | None:
    for name in ("image_token_id", "image_token_index", "media_placeholder_token_id"):
        if isinstance(value := getattr(config, name, None), int):
            return value
    return None


def _ids(*shape: int) -> Tensor:
    return torch.randint(5, 95, shape)


def _part(config: Any, name: str) -> Any:
    return getattr(config, name, None) or config


def _size(config: Any, name: str, otherwise: int) -> tuple[int, int]:
    value = getattr(config, name, None) or otherwise
    if isinstance(value, (list, tuple)):
        return int(value[0]), int(value[-1])
    return (int(value), int(value)) if isinstance(value, int) else (otherwise, otherwise)


def _field(config: Any, names: tuple[str, ...], otherwise: int) -> int:
    """Returns the first of an integer's possible names, in a configuration or its parts."""
    for part in (config, *(getattr(config, name, None) for name in ("encoder_config", "audio_config", "encoder"))):
        for name in names:
            if isinstance(value := getattr(part, name, None), int):
                return value
    return otherwise
