"""Lightning's Trainer and Fabric with a compiled model: ``mtcompile.compile`` is the only line that is added.

python examples/lightning_trainer.py             # predicts the next byte of the standard library's own sources
python examples/lightning_trainer.py --fabric    # a loop of Fabric's; with --plain, the same losses without mtcompile

Needs lightning: pip install lightning.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import mtcompile


def model(memory: str | None, compiled: dict[str, Any] | None = None) -> Any:
    torch.manual_seed(0)
    hidden = (layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Dropout(0.1)))
    plain = nn.Sequential(nn.Embedding(256, 16), nn.Flatten(), *hidden, nn.Linear(256, 256))
    return plain if memory is None else mtcompile.compile(plain, memory=memory, **(compiled or {}))


class Module(lightning.LightningModule):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.losses = model, list[float]()

    def training_step(self, window: Tensor, index: int) -> Tensor:
        loss = F.cross_entropy(self.model(window[:, :-1]), window[:, -1])
        self.losses.append(loss.item())
        return loss

    validation_step = training_step

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        if isinstance(self.model, mtcompile.CompiledModule):
            self.model.bind(optimizer)  # for update="backward", and for fp32 masters
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def data() -> DataLoader[Tensor]:
    text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
    return DataLoader(text.unfold(0, 17, 16)[:64], batch_size=16)  # type: ignore[arg-type]


def train(
    folder: str, memory: str | None, resume: str | None = None, compiled: dict[str, Any] | None = None, **options: Any
) -> tuple[Any, list[float], Any]:
    """Trains with the Trainer. Returns the model, its losses and the trainer. ``memory``: the device budget; None: plain.
    ``compiled``: more options of ``mtcompile.compile``."""
    module, quiet = (
        Module(model(memory, compiled)),
        {"logger": False, "enable_progress_bar": False, "enable_model_summary": False},
    )
    trainer = lightning.Trainer(default_root_dir=folder, **quiet, **{"max_epochs": 2, **options})
    trainer.fit(module, data(), data(), ckpt_path=resume)
    return module.model, module.losses, trainer


def train_with_fabric(memory: str | None, **options: Any) -> tuple[Any, list[float]]:
    fabric, own, losses = lightning.Fabric(devices=1, **options), model(memory), []
    prepared, optimizer = fabric.setup(own, torch.optim.AdamW(own.parameters(), lr=1e-3))
    for window in fabric.setup_dataloaders(data()):
        loss = F.cross_entropy(prepared(window[:, :-1]), window[:, -1])
        fabric.backward(loss)
        fabric.clip_gradients(prepared, optimizer, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return own, losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fabric", action="store_true")
    parser.add_argument("--plain", action="store_true")
    given = parser.parse_args()
    budget = None if given.plain else "2MiB"
    print("losses:", (train_with_fabric(budget) if given.fabric else train("lightning-run", budget))[1])
