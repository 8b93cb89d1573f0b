"""What devices can do, by name: for where nothing was measured.

Rates of ``x64`` come from measured convolutions. All others are **computed** from what makers
publish, by one rule, and nobody has measured them:

- arithmetic: cores × clock × multiply-accumulates per cycle, of which half is taken to be
  sustained (of its peak, ``x64`` sustained 0.60 in float32 and 0.55 in int8);
- memory: transfers per second × width of the bus, of which a quarter is.

Multiply-accumulates per cycle follow from Arm's description of a core: 128 bits hold four float32,
and a dot product instruction multiplies 16 pairs of int8. Of a phone only the fast cores count.
"""

from __future__ import annotations

from dataclasses import dataclass

from cocofl.errors import InvalidSetting
from cocofl.named import nearest

_SUSTAINED, _STREAMED = 0.5, 0.25


@dataclass(frozen=True)
class Device:
    """What a processor can do, all cores together."""

    float32_macs_per_s: float
    int8_macs_per_s: float
    bytes_per_s: float
    basis: str
    """What these numbers come from."""


@dataclass(frozen=True)
class Cores:
    """Some equal cores, and their multiply-accumulates per cycle."""

    count: int
    name: str
    clock_ghz: float
    float32_macs: int
    int8_macs: int

    def __str__(self) -> str:
        per_cycle = f"{self.float32_macs} float32 or {self.int8_macs} int8 products a cycle"
        return f"{self.count} {self.name} at {self.clock_ghz:g} GHz ({per_cycle})"


def computed(chip: str, bus: str, bus_gb_per_s: float, *cores: Cores) -> Device:
    """The rates of a device from its specification.

    >>> one = Cores(2, "Cortex-A0", 1.5, 4, 8)
    >>> device = computed("a chip", "LPDDR4-3200, 32 bit", 12.8, one)
    >>> device.float32_macs_per_s, device.int8_macs_per_s, device.bytes_per_s
    (6000000000.0, 12000000000.0, 3200000000.0)
    """
    cycles = [1e9 * one.count * one.clock_ghz for one in cores]
    peak = (
        sum(c * one.float32_macs for c, one in zip(cycles, cores, strict=True)),
        sum(c * one.int8_macs for c, one in zip(cycles, cores, strict=True)),
    )
    found = " and ".join(map(str, cores))
    basis = f"computed, not measured: {chip}, {found}; {bus}, {bus_gb_per_s:g} GB/s"
    float32, int8 = (_SUSTAINED * rate for rate in peak)
    return Device(float32, int8, _STREAMED * 1e9 * bus_gb_per_s, basis)


DEVICES = {
    "x64": Device(
        float32_macs_per_s=70e9,
        int8_macs_per_s=260e9,
        bytes_per_s=12e9,
        basis="measured: MobileNetV2 and ResNet18 on two Zen 4 cores with AVX512-VNNI",
    ),
    # One 128-bit pipe multiplies; without dot products eight int8 pairs take one instruction.
    "pi4": computed("BCM2711", "LPDDR4-3200, 32 bit", 12.8, Cores(4, "Cortex-A72", 1.5, 4, 8)),
    # From the Cortex-A76 on there are two such pipes, and dot products.
    "pi5": computed("BCM2712", "LPDDR4X-4267, 32 bit", 17.1, Cores(4, "Cortex-A76", 2.4, 8, 32)),
    # Its processor, not its GPU: a client trains on the processor.
    "jetson-orin-nano": computed(
        "Orin Nano 8 GB", "LPDDR5, 128 bit", 68.0, Cores(6, "Cortex-A78AE", 1.5, 8, 32)
    ),
    "phone-entry": computed(
        "Snapdragon 4 Gen 2", "LPDDR5X-6400, 32 bit", 25.6, Cores(2, "Cortex-A78", 2.2, 8, 32)
    ),
    "phone-flagship": computed(
        "Snapdragon 8 Gen 2",
        "LPDDR5X-8400, 64 bit",
        67.2,
        Cores(1, "Cortex-X3", 3.2, 16, 64),
        Cores(4, "Cortex-A715 and A710", 2.8, 8, 32),
    ),
}


def device_named(name: str) -> Device:
    """The device of this name."""
    if name not in DEVICES:
        raise InvalidSetting(
            f"unknown device {name!r}{nearest(name, DEVICES)}; expected one of {', '.join(DEVICES)}"
        )
    return DEVICES[name]
