"""The cards that plans know by name, known before torch is imported: a command that names another one fails at once."""

from __future__ import annotations

from typing import NamedTuple

from mtcompile.errors import did_you_mean, nearest_file

# A drive: GB/s of reads and writes, TB, and TB that may be written in its life, by data sheets.
_PCIE4, _PCIE5 = (6.8, 5.0, 2, 1200), (11.0, 9.0, 2, 1200)  # consumer drives
_SERVER = (6.5, 3.5, 8, 14_000)


# Peak TFLOP/s in fp32 without TF32 and in fp64, on tensor cores where they do that, by NVIDIA's data sheets and white papers.
_HOPPER, _B200, _A100 = (67.0, 67.0), (80.0, 40.0), (19.5, 19.5)
_A6000, _RTX3090, _RTX4090, _RTX5090 = (38.7, 0.6), (35.6, 0.56), (82.6, 1.29), (104.8, 1.64)


class Card(NamedTuple):
    """The speeds of a card and of what it is usually built into. ``flops``: sustained, of products in bf16, a second; ``wide``:
    peak TFLOP/s of wider products; ``gbps``: of device memory, and of the link to and from the device; ``host``: GB/s of host
    memory; ``gigabytes``: of device memory; ``ram``: GB of host memory that hosts of this card often have; ``drive``: as
    above; ``watts``: the card's limit by its data sheet, of gh200 with its processor."""

    name: str
    flops: float
    wide: tuple[float, float]
    gbps: tuple[float, float, float]
    host: float
    gigabytes: int
    ram: int
    drive: tuple[float, float, int, int]
    watts: int


CARDS = {
    card.name: card
    for card in (
        Card("h200-sxm", 6.85e14, _HOPPER, (4300.0, 50.0, 50.0), 200.0, 141, 1500, _SERVER, 700),
        Card("gh200", 6.85e14, _HOPPER, (3700.0, 377.0, 297.0), 348.0, 96, 480, _SERVER, 1000),
        Card("h100-sxm", 6.85e14, _HOPPER, (3000.0, 50.0, 50.0), 250.0, 80, 200, _SERVER, 700),
        Card("b200", 1.4e15, _B200, (7000.0, 50.0, 50.0), 300.0, 192, 1500, _SERVER, 1000),
        Card("a100-pcie", 2.0e14, _A100, (1800.0, 25.0, 25.0), 150.0, 80, 200, _SERVER, 300),
        Card("a6000", 1.0e14, _A6000, (770.0, 25.0, 25.0), 100.0, 48, 128, _PCIE4, 300),
        Card("rtx3090", 5.5e13, _RTX3090, (850.0, 25.0, 25.0), 40.0, 24, 128, _PCIE4, 350),
        Card("rtx4090", 1.3e14, _RTX4090, (920.0, 25.0, 25.0), 70.0, 24, 128, _PCIE4, 450),
        Card("rtx5090", 1.6e14, _RTX5090, (1600.0, 50.0, 50.0), 70.0, 32, 128, _PCIE5, 575),
    )
}


def check_machine(name: str) -> None:
    """Raises ValueError, with the most similar name, unless this is a known card, ``this`` or a .json file."""
    if name not in CARDS and name != "this" and not name.endswith(".json"):
        expected = f"{', '.join(CARDS)}, this (measured here) or a .json file"
        close = did_you_mean(name, [*CARDS, "this"]) or nearest_file(name)
        own = '{"like": "rtx4090", "device_nbytes": 16000000000, "flops": 8e13, "host_nbytes": 64000000000}'
        way = f"{'' if close else '.'} For another card, pass a file with what is different about it: {own}"
        raise ValueError(f"expected machine to be one of {expected}, found {name!r}{close}{way}")
