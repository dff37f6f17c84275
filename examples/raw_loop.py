"""A loop of plain PyTorch in fp16 with GradScaler, an exponential moving average (EMA) and stochastic weight averaging (SWA).

python examples/raw_loop.py              # a convolutional net on noise with a pattern
python examples/raw_loop.py --plain      # the same training without mtcompile: the same losses
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

import mtcompile


def net() -> nn.Module:
    def layer(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]

    return nn.Sequential(*layer(1, 16), *layer(16, 32), *layer(32, 64), nn.Flatten(), nn.Dropout(0.1), nn.Linear(1024, 10))


def batches(count: int, size: int = 16) -> list[tuple[Tensor, Tensor]]:
    """Makes images (size, 1, 32, 32) of ten classes."""
    patterns, labels = torch.randn(10, 1, 32, 32), torch.randint(10, (count, size))
    return [(patterns[classes] + torch.randn(size, 1, 32, 32), classes) for classes in labels]


def train(memory: str | None, epochs: int = 3, dtype: torch.dtype = torch.float16) -> tuple[dict[str, Any], list[float]]:
    """Trains. Returns the models by name, and the losses. ``memory``: the device budget; None for a plain run."""
    torch.manual_seed(0)
    model: Any = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if memory is not None:
        model = mtcompile.compile(model, memory=memory, optimizer=optimizer)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    scaler = torch.amp.GradScaler(device, init_scale=2.0**16, growth_interval=4)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    swa, swa_schedule = AveragedModel(model), SWALR(optimizer, swa_lr=5e-4, anneal_epochs=1)
    data, losses = batches(4), []
    for epoch in range(epochs):
        for images, labels in data:
            with torch.autocast(device, dtype):
                loss = F.cross_entropy(model(images), labels.to(device))
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)  # left out if a gradient is not finite
            scaler.update()
            optimizer.zero_grad()
            ema.update_parameters(model)
            losses.append(loss.item())
        if epoch > 0:
            swa.update_parameters(model)
            swa_schedule.step()
    update_bn([images for images, _ in data], swa)  # the averages are plain models in host memory
    return {"model": model, "ema": ema, "swa": swa}, losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--memory", default="8MiB")
    given = parser.parse_args()
    print("losses:", train(None if given.plain else given.memory)[1])
