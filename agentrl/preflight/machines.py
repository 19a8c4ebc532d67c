"""Machines that a run can be planned for: `8xH100-80GB`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from agentrl.errors import ConfigError
from agentrl.suggest import did_you_mean

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU, by its data sheet.

    Attributes:
        memory_gib: memory.
        bandwidth: of the memory, in bytes per second.
        flops: dense bfloat16 operations per second.
        link: between GPUs of one node, in bytes per second and direction.
        price: dollars per hour on demand; cloud prices differ by a factor of two.
    """

    memory_gib: float
    bandwidth: float
    flops: float
    link: float
    price: float


CARDS: Mapping[str, Card] = {
    "L4": Card(22.5, 0.30e12, 121e12, 25e9, 0.8),
    "L40S": Card(45, 0.864e12, 362e12, 25e9, 1.5),
    "L20": Card(45, 0.864e12, 119.5e12, 25e9, 0.6),
    "A10": Card(22.5, 0.60e12, 125e12, 25e9, 0.9),
    "A10G": Card(22.5, 0.60e12, 70e12, 25e9, 1.0),
    "A30": Card(23.6, 0.933e12, 165e12, 25e9, 0.5),
    "A40": Card(45, 0.696e12, 150e12, 25e9, 0.5),
    "A6000": Card(47.5, 0.768e12, 155e12, 25e9, 0.6),
    "RTX6000Ada": Card(47.5, 0.96e12, 364e12, 25e9, 0.9),
    "RTX3090": Card(23.6, 0.936e12, 71e12, 25e9, 0.3),
    "RTX4090": Card(23.6, 1.008e12, 165e12, 25e9, 0.5),
    "RTX5090": Card(31.4, 1.792e12, 209e12, 50e9, 0.8),
    "RTXPRO6000": Card(95, 1.792e12, 503e12, 50e9, 1.8),
    "A100-40GB": Card(39.5, 1.555e12, 312e12, 300e9, 1.8),
    "A100-80GB": Card(79.1, 2.039e12, 312e12, 300e9, 2.0),
    "A800-80GB": Card(79.1, 2.039e12, 312e12, 200e9, 1.5),
    "H20-96GB": Card(95, 4.0e12, 148e12, 450e9, 1.6),
    "H800-80GB": Card(79.1, 3.35e12, 989e12, 200e9, 2.5),
    "H100-80GB": Card(79.1, 3.35e12, 989e12, 450e9, 3.0),
    "H200-141GB": Card(139.8, 4.8e12, 989e12, 450e9, 3.8),
    "GH200-96GB": Card(94.5, 4.0e12, 989e12, 450e9, 2.5),
    "B200-180GB": Card(178.0, 8.0e12, 2250e12, 900e9, 6.0),
    "GB200-186GB": Card(184.0, 8.0e12, 2500e12, 900e9, 7.0),
    "B300-288GB": Card(268.0, 8.0e12, 2250e12, 900e9, 7.5),
    "GB300-288GB": Card(277.0, 8.0e12, 2500e12, 900e9, 8.5),
}
SIMILAR_MEMORY = 0.07
"""How far the memory in a name, such as 24 of RTX3090-24GB, may be from the card's usable memory."""
BETWEEN_NODES = 50e9
"""Bytes per second between nodes: one 400 Gbit/s port for each GPU."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The GPUs of a run.

    Attributes:
        name: of the card.
        gpus: per node.
    """

    name: str
    card: Card
    gpus: int
    nodes: int = 1

    @property
    def total(self) -> int:
        """All GPUs."""
        return self.gpus * self.nodes

    @property
    def memory_bytes(self) -> int:
        """Of one GPU."""
        return int(self.card.memory_gib * GIB)

    @property
    def link(self) -> float:
        """The slowest link between two GPUs."""
        return self.card.link if self.nodes == 1 else min(self.card.link, BETWEEN_NODES)

    def between(self, ranks: int) -> float:
        """Bytes per second that each of so many GPUs receives when all of them gather something.

        Between nodes, the ports of all GPUs of a node carry it together.
        """
        return self.card.link if ranks <= self.gpus else min(self.card.link, BETWEEN_NODES * self.gpus)

    @property
    def price(self) -> float:
        """Dollars per hour."""
        return self.total * self.card.price

    def __str__(self) -> str:
        return f"{f'{self.nodes} nodes of ' if self.nodes > 1 else ''}{self.gpus} x {self.name}"


def machine_of(text: str, nodes: int = 1) -> Machine:
    """The machine that `8xH100-80GB`, `H100-80GB` or `8xH100` names.

    Raises:
        ConfigError: there is no such card, or no GPU.
    """
    match = re.fullmatch(r"(?:([0-9]{1,5})\s*[xX*×]\s*)?([A-Za-z][\w-]*)", text.strip())
    if match is None or (match[1] is not None and int(match[1]) == 0) or nodes < 1:
        raise ConfigError(f"--gpus {text}: write NUMBERxCARD, such as 8xH100-80GB")
    found = _named(match[2])
    if not found:
        hint = did_you_mean(match[2], list(CARDS), otherwise=f"known are {', '.join(CARDS)}")
        raise ConfigError(
            f"--gpus {text}: unknown card {match[2]!r}; {hint}; for another card, give its memory with --memory "
            "GIB"
        )
    if len(found) > 1:
        raise ConfigError(f"--gpus {text}: say which: {' or '.join(found)}")
    return Machine(found[0], CARDS[found[0]], int(match[1] or 1), nodes)


def _named(card: str) -> list[str]:
    """The cards that this may name: with or without their memory and hyphens."""
    wanted = card.lower().replace("_", "-")
    found = [name for name in CARDS if wanted.replace("-", "") in (_plain(name), _plain(name.partition("-")[0]))]
    sized = re.fullmatch(r"(.+)-([0-9]{1,4})gb?", wanted)
    if found or sized is None:
        return found
    memory = float(sized[2])
    return [
        name
        for name in _named(sized[1])
        if abs(CARDS[name].memory_gib * GIB / 1e9 - memory) <= SIMILAR_MEMORY * memory
    ]


def _plain(name: str) -> str:
    return name.lower().replace("-", "")
