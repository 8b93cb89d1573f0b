"""What devices can do, by name: for where nothing was measured.

Rates of ``x64`` come from measured convolutions. All others are **computed** from what makers
publish, by one rule, and nobody has measured them:

- arithmetic in float32: cores × clock × multiply-accumulates per cycle, of which half is taken to
  be sustained (``x64`` sustained 0.60 of its peak);
- in int8: 1.93 times as many where cores have dot product instructions, and 1.30 times elsewhere,
  the mean over the networks and phones of Paddle Lite's published benchmark;
- memory: transfers per second × width of the bus, of which a quarter is.

Multiply-accumulates per cycle follow from Arm's description of a core: 128 bits hold four float32.
Of a phone only the fast cores count.
"""

from __future__ import annotations

from dataclasses import dataclass

from cocofl.errors import InvalidSetting
from cocofl.named import nearest

_SUSTAINED, _STREAMED = 0.5, 0.25
_INT8_GAIN = {True: 1.93, False: 1.30}
"""By whether there are dot products. Paddle-Lite, docs/performance/benchmark.md at 07b851a: six
networks on one core of four phones with them, and of three without."""


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
    """Some equal cores, and their float32 multiply-accumulates per cycle."""

    count: int
    name: str
    clock_ghz: float
    float32_macs: int
    dot_products: bool = True

    def __str__(self) -> str:
        int8 = "with" if self.dot_products else "without"
        per_cycle = f"{self.float32_macs} float32 products a cycle, {int8} int8 dot products"
        return f"{self.count} {self.name} at {self.clock_ghz:g} GHz ({per_cycle})"


def computed(chip: str, bus: str, bus_gb_per_s: float, *cores: Cores) -> Device:
    """The rates of a device from its specification.

    >>> one = Cores(2, "Cortex-A0", 1.5, 4, dot_products=False)
    >>> device = computed("a chip", "LPDDR4-3200, 32 bit", 12.8, one)
    >>> device.float32_macs_per_s, device.int8_macs_per_s, device.bytes_per_s
    (6000000000.0, 7800000000.0, 3200000000.0)
    """
    rates = [_SUSTAINED * one.count * one.clock_ghz * 1e9 * one.float32_macs for one in cores]
    int8 = sum(r * _INT8_GAIN[one.dot_products] for r, one in zip(rates, cores, strict=True))
    found = " and ".join(map(str, cores))
    basis = f"computed, not measured: {chip}, {found}; {bus}, {bus_gb_per_s:g} GB/s"
    return Device(sum(rates), int8, _STREAMED * 1e9 * bus_gb_per_s, basis)


DEVICES = {
    "x64": Device(
        float32_macs_per_s=70e9,
        int8_macs_per_s=260e9,
        bytes_per_s=12e9,
        basis="measured: MobileNetV2 and ResNet18 on two Zen 4 cores with AVX512-VNNI",
    ),
    # One 128-bit pipe multiplies.
    "pi4": computed(
        "BCM2711", "LPDDR4-3200, 32 bit", 12.8, Cores(4, "Cortex-A72", 1.5, 4, dot_products=False)
    ),
    # From the Cortex-A76 on there are two such pipes, and dot products.
    "pi5": computed("BCM2712", "LPDDR4X-4267, 32 bit", 17.1, Cores(4, "Cortex-A76", 2.4, 8)),
    # Its processor, not its GPU: a client trains on the processor.
    "jetson-orin-nano": computed(
        "Orin Nano 8 GB", "LPDDR5, 128 bit", 68.0, Cores(6, "Cortex-A78AE", 1.5, 8)
    ),
    "phone-entry": computed(
        "Snapdragon 4 Gen 2", "LPDDR5X-6400, 32 bit", 25.6, Cores(2, "Cortex-A78", 2.2, 8)
    ),
    "phone-flagship": computed(
        "Snapdragon 8 Gen 2",
        "LPDDR5X-8400, 64 bit",
        67.2,
        Cores(1, "Cortex-X3", 3.2, 16),
        Cores(4, "Cortex-A715 and A710", 2.8, 8),
    ),
}


def device_named(name: str) -> Device:
    """The device of this name."""
    if name not in DEVICES:
        raise InvalidSetting(
            f"unknown device {name!r}{nearest(name, DEVICES)}; expected one of {', '.join(DEVICES)}"
        )
    return DEVICES[name]
