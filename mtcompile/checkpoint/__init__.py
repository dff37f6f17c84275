"""Checkpoints: all that a training needs to continue with the same bits, in files that hold tensors and numbers, no code.

    folder/step-00000012/
      manifest.json                     what there is: sizes and checksums of the files, step, numbers, and where tensors go
      model.safetensors                 weights and buffers by name, as from_pretrained and plain torch load them; large
                                        models have several files and model.safetensors.index.json
                                        (of adapters on a frozen base: adapter_model.safetensors, as PEFT loads it)
      state.safetensors                 tensors of the optimizer, the scheduler and the random generators

``save`` writes into a new folder beside the others and renames it when everything is on the disk. ``load`` looks at every byte
before it changes anything.
"""

from mtcompile.checkpoint.autosave import Autosave, autosave
from mtcompile.checkpoint.hf_trainer import autosave_trainer
from mtcompile.checkpoint.reading import Loaded, inspect, latest, load
from mtcompile.checkpoint.saving import BackgroundSave, save, save_in_background

__all__ = [
    "Autosave",
    "BackgroundSave",
    "Loaded",
    "autosave",
    "autosave_trainer",
    "inspect",
    "latest",
    "load",
    "save",
    "save_in_background",
]
