from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from cocofl import InvalidSetting, KernelMissing, KernelPlan, Span, freeze, split
from cocofl.freeze.kernels import (
    KERNELS,
    REFERENCE,
    Geometry,
    Kernel,
    LinearMap,
    Prepared,
    available,
    kernel,
    safe_weight_bits,
    why_not,
)
from cocofl.freeze.kernels.base import is_x86
from cocofl.freeze.kernels.legacy import NATIVE
from cocofl.numerics import Codes, Grid, QuantizedWeight, quantize_on_the_fly, quantize_weight

CPU = torch.device("cpu")
IS_X86 = is_x86()
OTHERS = [k for k in available(CPU) if k is not REFERENCE]
INTEGER = [k for k in OTHERS if k.integer]

# Integer kernels round the same exact sum as the reference, so only ties and the order of float
# additions differ: one code. bfloat16 keeps 8 bits of every factor and of every sum it stores,
# which is as coarse as the codes themselves, and errors of a whole sum add up.
# The legacy operators and those of ONNX Runtime round a sum twice, first on a grid twice as coarse.
CODES_APART = {"bfloat16": 6}
TWICE_ROUNDED = ("legacy-fbgemm", "legacy-qnnpack", "onnxruntime")
CODES_APART_AFTER_ADDING = {"bfloat16": 6, **dict.fromkeys(TWICE_ROUNDED, 2)}
RELATIVE = {"bfloat16": 0.02}

# Sums saturate without VNNI and with 8-bit weights, so there the promise is about 7 bits.
BITS = {k.name: k.weight_bits() for k in OTHERS}

CONVOLUTIONS = {
    "1x1": ((6, 5, 1, 1), Geometry()),
    "3x3": ((5, 4, 3, 3), Geometry(padding=(1, 1))),
    "3x3 unpadded": ((5, 4, 3, 3), Geometry()),
    "5x3 padded unevenly": ((4, 3, 5, 3), Geometry(padding=(2, 0))),
    "3x3 strided": ((5, 4, 3, 3), Geometry((2, 2), (1, 1))),
    "2x2 strided unevenly": ((5, 4, 2, 2), Geometry((2, 1))),
    "7x7 strided": ((4, 3, 7, 7), Geometry((2, 2), (3, 3))),
    "1x1 strided": ((6, 5, 1, 1), Geometry((2, 2))),
    "depthwise": ((16, 1, 3, 3), Geometry((1, 1), (1, 1), (1, 1), 16)),
    "depthwise strided": ((16, 1, 3, 3), Geometry((2, 2), (1, 1), (1, 1), 16)),
    "depthwise 1x1": ((6, 1, 1, 1), Geometry(groups=6)),
    "depthwise with multiplier": ((8, 1, 3, 3), Geometry((1, 1), (1, 1), (1, 1), 4)),
    "grouped": ((8, 3, 3, 3), Geometry((1, 1), (1, 1), (1, 1), 2)),
    "dilated": ((5, 4, 3, 3), Geometry((1, 1), (2, 2), (2, 2))),
    "dilated on one axis": ((5, 4, 3, 3), Geometry((1, 1), (3, 1), (3, 1))),
}


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def convolution(
    case: str, zero_point: int, bits: int, *, bias: bool = True, relu: bool = False
) -> tuple[LinearMap, Codes]:
    shape, geometry = CONVOLUTIONS[case]
    channels = shape[1] * geometry.groups
    x = random(3, channels, 9, 8, seed=1).contiguous(memory_format=torch.channels_last)
    x = x.relu() if zero_point == 0 else x
    weight = quantize_weight(random(*shape, seed=2) * 0.2, bits)
    offset = random(shape[0], seed=3) if bias else None
    codes = quantize_on_the_fly(x, unsigned=zero_point == 0)
    return LinearMap(weight, offset, geometry, relu, zero_point, tuple(x.shape)), codes


def apart(found: Codes | Tensor, expected: Codes | Tensor) -> float:
    """How many codes two results differ by, or how far two float results are apart."""
    assert type(found) is type(expected)
    if isinstance(found, Codes):
        assert found.grid == expected.grid
        assert found.values.shape == expected.values.shape
        assert found.values.dtype == torch.uint8
        return float((found.values.int() - expected.values.int()).abs().max())
    assert found.shape == expected.shape
    assert found.dtype == torch.float32
    return float((found - expected).norm() / expected.norm())


def compare(
    other: Kernel, linear_map: LinearMap, x: Codes, out: Grid | None, addend: Codes | None = None
) -> Codes | Tensor:
    inputs = [c.values.clone() for c in (x, addend) if c is not None]
    expected = REFERENCE.prepare(linear_map)(x, out, addend)
    found = other.prepare(linear_map)(x, out, addend)
    codes = CODES_APART if addend is None else CODES_APART_AFTER_ADDING
    limit = RELATIVE.get(other.name, 1e-5) if out is None else codes.get(other.name, 1)
    assert apart(found, expected) <= limit
    for kept, given in zip(inputs, [c for c in (x, addend) if c is not None], strict=True):
        assert torch.equal(kept, given.values), "an input was overwritten"
    return expected


def grid_of(linear_map: LinearMap, x: Codes, zero_point: int) -> Grid:
    y = REFERENCE.prepare(linear_map)(x, None, None)
    return quantize_on_the_fly(y, unsigned=zero_point == 0).grid


@pytest.mark.parametrize("other", OTHERS, ids=lambda k: k.name)
@pytest.mark.parametrize("case", CONVOLUTIONS)
@pytest.mark.parametrize("zero_point", [0, 128])
def test_a_convolution(case, zero_point, other):
    for bias, relu in ((True, False), (False, True)):
        linear_map, x = convolution(case, zero_point, BITS[other.name], bias=bias, relu=relu)
        grid = grid_of(linear_map, x, 0 if relu else 128)
        expected = compare(other, linear_map, x, grid)
        used = expected.values.unique()
        assert len(used) > 50, "the codes of this test should be spread out"
        compare(other, linear_map, x, None)


@pytest.mark.parametrize("other", OTHERS, ids=lambda k: k.name)
@pytest.mark.parametrize("case", ["1x1", "3x3", "3x3 strided", "depthwise", "grouped", "dilated"])
@pytest.mark.parametrize("zero_point", [0, 128])
def test_a_convolution_with_an_addend(case, zero_point, other):
    for relu in (False, True):
        linear_map, x = convolution(case, zero_point, BITS[other.name], relu=relu)
        plain = REFERENCE.prepare(linear_map)(x, None, None)
        for signed in (False, True):
            skip = random(*plain.shape, seed=4).contiguous(memory_format=torch.channels_last)
            addend = quantize_on_the_fly(skip if signed else skip.relu(), unsigned=not signed)
            total = REFERENCE.prepare(linear_map)(x, None, addend)
            grid = quantize_on_the_fly(total, unsigned=relu).grid
            compare(other, linear_map, x, grid, addend)
            compare(other, linear_map, x, None, addend)


@pytest.mark.parametrize("other", OTHERS, ids=lambda k: k.name)
@pytest.mark.parametrize("zero_point", [0, 128])
def test_codes_saturate_at_both_ends(zero_point, other):
    linear_map, x = convolution("3x3", zero_point, BITS[other.name])
    grid = grid_of(linear_map, x, 128)
    expected = compare(other, linear_map, x, Grid(grid.scale / 4, 128))
    assert {0, 255} <= set(expected.values.unique().tolist())


@pytest.mark.parametrize("other", INTEGER, ids=lambda k: k.name)
@pytest.mark.parametrize("case", ["1x1", "3x3", "depthwise", "depthwise strided", "grouped"])
def test_the_largest_codes_do_not_overflow(case, other):
    linear_map, x = convolution(case, 0, BITS[other.name])
    extreme = Codes(torch.where(x.values > 20, 255, 0).to(torch.uint8), x.grid)
    compare(other, linear_map, extreme, grid_of(linear_map, extreme, 128))


@pytest.mark.parametrize("other", INTEGER, ids=lambda k: k.name)
@pytest.mark.parametrize("geometry", [None, Geometry()], ids=["linear", "1x1"])
def test_sums_of_the_largest_products_are_exact(geometry, other):
    largest = 2 ** (BITS[other.name] - 1) - 1
    codes = torch.full((8, 32), largest, dtype=torch.int8)
    codes[::2] *= -1
    shape = (4, 32)
    if geometry is not None:
        codes, shape = codes.view(8, 32, 1, 1), (4, 32, 3, 3)
    weight = QuantizedWeight(codes, torch.full((8,), 0.01))
    linear_map = LinearMap(weight, None, geometry, False, 0, shape)
    x = Codes(torch.full(shape, 255, dtype=torch.uint8), Grid(0.01, 0))
    compare(other, linear_map, x, grid_of(linear_map, x, 128))
    compare(other, linear_map, x, None)


@pytest.mark.parametrize("other", OTHERS, ids=lambda k: k.name)
@pytest.mark.parametrize("batch", [1, 2, 5])
def test_a_batch_of_another_size_than_the_one_packed_for(batch, other):
    for case in ("1x1", "3x3 strided", "depthwise"):
        linear_map, x = convolution(case, 128, BITS[other.name])
        values = torch.cat([x.values, x.values])[:batch]
        values = values.contiguous(memory_format=torch.channels_last)
        compare(other, linear_map, Codes(values, x.grid), grid_of(linear_map, x, 128))


@pytest.mark.parametrize("other", OTHERS, ids=lambda k: k.name)
def test_one_packed_weight_serves_inputs_of_many_scales(other):
    linear_map, x = convolution("3x3", 128, BITS[other.name])
    run, reference = other.prepare(linear_map), REFERENCE.prepare(linear_map)
    for factor in (1.0, 0.125, 16.0):  # a scale on the fly is another one in every batch
        scaled = Codes(x.values, Grid(x.grid.scale * factor, 128))
        grid = quantize_on_the_fly(reference(scaled, None, None)).grid
        found, expected = run(scaled, grid, None), reference(scaled, grid, None)
        assert apart(found, expected) <= CODES_APART.get(other.name, 1)


@pytest.mark.parametrize("other", OTHERS, ids=lambda k: k.name)
def test_any_memory_layout(other):
    linear_map, x = convolution("3x3", 128, BITS[other.name])
    grid = grid_of(linear_map, x, 128)
    turned = x.values.transpose(2, 3).contiguous().transpose(2, 3)
    for values in (x.values.contiguous(), turned):
        compare(other, linear_map, Codes(values, x.grid), grid)


def linear(
    shape: tuple[int, ...], zero_point: int, bits: int, *, bias: bool, relu: bool
) -> LinearMap:
    weight = quantize_weight(random(7, shape[-1], seed=2), bits)
    return LinearMap(weight, random(7, seed=3) if bias else None, None, relu, zero_point, shape)


@pytest.mark.parametrize("other", OTHERS, ids=lambda k: k.name)
@pytest.mark.parametrize("shape", [(5, 12), (2, 6, 12), (2, 3, 4, 12)])
@pytest.mark.parametrize("zero_point", [0, 128])
def test_a_linear_layer(shape, zero_point, other):
    values = random(*shape, seed=1)
    x = quantize_on_the_fly(values if zero_point else values.relu(), unsigned=not zero_point)
    for bias, relu in ((True, False), (False, True)):
        linear_map = linear(shape, zero_point, BITS[other.name], bias=bias, relu=relu)
        grid = grid_of(linear_map, x, 0 if relu else 128)
        addend = quantize_on_the_fly(random(*shape[:-1], 7, seed=4))
        for out in (grid, None):
            compare(other, linear_map, x, out)
            compare(other, linear_map, x, out, addend)
        smaller = Codes(x.values[:1], x.grid)
        compare(other, linear_map, smaller, grid)


@pytest.mark.parametrize("other", OTHERS, ids=lambda k: k.name)
def test_a_linear_layer_on_strided_input(other):
    linear_map = linear((6, 5, 12), 128, BITS[other.name], bias=True, relu=False)
    x = quantize_on_the_fly(random(5, 6, 12, seed=1))
    grid = grid_of(linear_map, x, 128)
    strided = [x.values.transpose(0, 1), x.values[:, :1].expand(5, 6, 12), x.values[::2]]
    for values in strided:
        assert not values.is_contiguous()
        compare(other, linear_map, Codes(values, x.grid), grid)


@pytest.mark.parametrize("other", INTEGER, ids=lambda k: k.name)
def test_seven_bit_weights_leave_every_kernel_at_the_reference(other):
    linear_map, x = convolution("3x3", 0, 7)
    assert int(linear_map.weight.codes.abs().max()) == 63
    compare(other, linear_map, x, grid_of(linear_map, x, 128))


def small_chain():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU())
    return split(model, torch.zeros(2, 2, 8, 8))


def test_the_reference_has_the_seven_bit_switch():
    chain, x = small_chain(), random(2, 2, 8, 8, seed=5)
    eight, seven = (
        freeze(chain, Span(1, 2), backend="reference", weight_bits=bits)(x).detach()
        for bits in (8, 7)
    )
    exact = freeze(chain, Span(1, 2), variant="ff")(x).detach()
    assert 0 < float((eight - exact).norm()) < float((seven - exact).norm())
    assert float((seven - exact).norm() / exact.norm()) < 0.02


@pytest.mark.parametrize(
    ("features", "onednn", "fbgemm"),
    [
        ({"avx512_vnni": True, "avx_vnni": False}, 8, 8),
        ({"avx512_vnni": False, "avx_vnni": True}, 8, 7),
        ({"avx512_vnni": False, "avx_vnni": False}, 7, 7),
        ({"avx2": True}, 7, 7),
    ],
)
def test_x86_kernels_without_vnni_get_seven_bits(features, onednn, fbgemm, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: features)
    found = {name: k.weight_bits() for name, k in KERNELS.items()}
    assert found == {
        "reference": 8, "bfloat16": 8, "onednn": onednn, "legacy-fbgemm": fbgemm,
        "legacy-qnnpack": 8, "onnxruntime": onednn,
    }  # fmt: skip
    if IS_X86:  # elsewhere none of them can be tried
        assert safe_weight_bits() == min(found[k.name] for k in available(CPU))
    assert safe_weight_bits("reference") == 8


def test_arm_sums_in_int32_and_keeps_eight_bits(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    assert safe_weight_bits() == 8


X86_INTEGER = [k.name for k in INTEGER if IS_X86 and k.name != "legacy-qnnpack"]


@pytest.mark.parametrize("backend", X86_INTEGER)
def test_freeze_uses_seven_bits_where_eight_would_saturate(backend, monkeypatch):
    chain, x = small_chain(), random(2, 2, 8, 8, seed=5)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_vnni": True})
    seven = freeze(chain, Span(1, 2), backend=backend, weight_bits=7)(x)
    eight = freeze(chain, Span(1, 2), backend=backend)(x)
    assert not torch.equal(seven, eight)
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    assert torch.equal(freeze(chain, Span(1, 2), backend=backend)(x), seven)


@pytest.mark.parametrize("backend", [*X86_INTEGER, "auto"] if X86_INTEGER else [])
def test_eight_bits_are_refused_where_they_would_saturate(backend, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    with pytest.raises(InvalidSetting, match=f"8, but .* '{backend}' saturate with more than 7"):
        freeze(small_chain(), Span(1, 2), backend=backend, weight_bits=8)


def test_an_unknown_kernel_is_named_beside_those_there_are():
    with pytest.raises(KernelMissing, match="no kernel 'cudnn'; known are reference, bfloat16"):
        kernel("cudnn")


def test_a_missing_kernel_says_why_and_what_to_do(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    with pytest.raises(KernelMissing, match=r"'onednn' cannot run here: .* has no oneDNN.*auto"):
        freeze(small_chain(), Span(1, 2), backend="onednn")
    assert "onednn" not in [k.name for k in available(CPU)]


def test_onednn_is_left_alone_where_it_ends_the_process(monkeypatch):
    for bits, is_there in ((256, True), (512, False)):
        monkeypatch.setattr(torch.cpu, "get_capabilities", {"sve_max_length": bits}.copy)
        assert (KERNELS["onednn"].missing() is None) is is_there


NEEDS_LEGACY = pytest.mark.skipif(why_not(NATIVE) is not None, reason=f"no {NATIVE.name} here")


@NEEDS_LEGACY
def test_a_missing_engine_says_so(monkeypatch):
    monkeypatch.setattr(type(torch.backends.quantized), "supported_engines", [])
    with pytest.raises(KernelMissing, match=r"has no (fbgemm|qnnpack)"):
        freeze(small_chain(), Span(1, 2), backend="legacy")


def test_auto_falls_back_to_what_there_is(monkeypatch):
    for k in KERNELS.values():
        if k is not REFERENCE:
            monkeypatch.setitem(
                KERNELS, k.name, Kernel(k.name, k.prepare, lambda: "gone", integer=k.integer)
            )
    net = freeze(small_chain(), Span(1, 2), backend="auto", plan=KernelPlan())
    assert {row.kernel for row in net.describe()} == {"reference", "float32"}
    assert net(random(2, 2, 8, 8, seed=5)).shape == (2, 4, 4, 4)


@NEEDS_LEGACY
def test_legacy_means_the_engine_of_this_processor():
    assert kernel("legacy") is NATIVE
    expected = "legacy-fbgemm" if platform.machine() == "x86_64" else "legacy-qnnpack"
    assert NATIVE.name == expected


def test_the_legacy_kernels_leave_the_chosen_engine_alone():
    before = torch.backends.quantized.engine
    for other in INTEGER:
        linear_map, x = convolution("3x3", 0, BITS[other.name])
        other.prepare(linear_map)(x, Grid(0.1, 128), None)
    assert torch.backends.quantized.engine == before


def broken_kernel(how: str, when: str) -> Kernel:
    def prepare(linear_map: LinearMap) -> Prepared:
        sound = REFERENCE.prepare(linear_map)
        many_channels = len(linear_map.input_shape) == 4 and linear_map.input_shape[1] > 8
        if when == "on some maps" and not many_channels:
            return sound
        if how == "raises":
            raise RuntimeError("unknown architecture")
        return lambda x, out, addend: sound(
            x._replace(grid=Grid(1.01 * x.grid.scale, x.grid.zero_point)), out, addend
        )

    return Kernel(f"{how} {when}", prepare, lambda: None, integer=True)


@pytest.mark.parametrize("when", ["always", "on some maps"])
@pytest.mark.parametrize(
    ("how", "why"),
    [("raises", "unknown architecture"), ("errs", r"off by 0\.01 of the reference's result")],
)
def test_a_kernel_that_fails_is_left_out_and_said_so(
    how: str, why: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = broken_kernel(how, when)
    monkeypatch.setitem(KERNELS, broken.name, broken)
    chain = split(
        nn.Sequential(nn.Conv2d(3, 10, 3), nn.Conv2d(10, 4, 3), nn.Flatten(), nn.Linear(64, 2)),
        torch.randn(2, 3, 8, 8),
        fine=True,
    )
    with pytest.warns(RuntimeWarning, match=why) as said:
        net = freeze(chain, Span(0, 1), backend="auto", plan=KernelPlan())
    assert len([line for line in said if broken.name in str(line.message)]) == 1
    assert net(torch.randn(2, 3, 8, 8)).shape == (2, 2)
    if when == "always":
        assert broken.name not in {row.kernel for row in net.describe()}
        with pytest.raises(KernelMissing, match=why):
            kernel(broken.name)


def test_fbgemm_is_left_to_x86() -> None:
    assert NATIVE.name == ("legacy-fbgemm" if IS_X86 else "legacy-qnnpack")
    if not IS_X86:
        assert KERNELS["legacy-fbgemm"].missing()


@pytest.mark.parametrize("faster", ["int8", "float32"])
@pytest.mark.parametrize("span", [Span(2, 3), Span(0, 1)])
def test_a_region_is_computed_in_what_the_plan_found_faster(
    faster: str, span: Span, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 4))
    x = torch.randn(2, 3, 8, 8)
    chain = split(model, x)
    assert len(chain) == 3
    measuring = KernelPlan(regions=True)
    freeze(chain, span, plan=measuring)
    (region,) = [key for key in measuring.choices if key.startswith("region")]
    plan = KernelPlan(measuring.choices | {region: faster}, fixed=True, regions=True)
    net = freeze(chain, span, plan=plan)
    kernels = {line.kernel for line in net.describe() if line.role != "trained"}
    assert ("float32" in kernels and len(kernels) == 1) == (faster == "float32")
    # Either way norms are folded: the same function, up to rounding.
    other = freeze(chain, span, backend="reference")
    plan.save(tmp_path / "plan.json")
    again = freeze(chain, span, plan=KernelPlan.load(tmp_path / "plan.json"))
    assert again.describe() == net.describe()
    assert (net(x) - other(x)).norm() < 0.05 * other(x).norm()
    net(x).sum().backward()
    # A simulation shows what int8 does to training.
    simulated = freeze(chain, span, plan=KernelPlan(plan.choices, fixed=True))
    assert {line.kernel for line in simulated.describe() if line.role != "trained"} != {"float32"}


def test_everything_goes_on_without_the_legacy_kernels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plan = KernelPlan({"linear 8>8 on 2x8": NATIVE.name, "linear 4>4 on 2x4": "reference"})
    plan.save(tmp_path / "plan.json")
    monkeypatch.setenv("COCOFL_WITHOUT", "legacy reference")
    assert REFERENCE in available(CPU), "nothing is defined without it"
    assert not any(k.name.startswith("legacy") for k in available(CPU))
    with pytest.raises(KernelMissing, match="'legacy' cannot run here: COCOFL_WITHOUT names it"):
        kernel("legacy")
    net = freeze(small_chain(), Span(1, 2), backend="auto", plan=KernelPlan())
    assert not any(row.kernel.startswith("legacy") for row in net.describe())
    # What a machine remembers of better times is forgotten; a run's own plan is not.
    again = KernelPlan.load(tmp_path / "plan.json", fixed=False)
    assert again.choices == {"linear 4>4 on 2x4": "reference"}
    assert KernelPlan.load(tmp_path / "plan.json").choices == plan.choices


def test_a_kernel_to_do_without_that_is_none_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COCOFL_WITHOUT", "legacy legcy")
    with pytest.warns(RuntimeWarning, match="names 'legcy'.*mean legacy"):
        available(CPU)


def test_a_kernel_that_rounds_wrongly_is_left_out() -> None:
    def prepare(linear_map: LinearMap) -> Prepared:
        sound = REFERENCE.prepare(linear_map)

        def run(x: Codes, out: Grid | None, addend: Codes | Tensor | None) -> Codes | Tensor:
            y = sound(x, out, addend)
            return y if isinstance(y, Tensor) else y._replace(values=y.values.roll(1))

        return run

    wrong = Kernel("rounds wrongly", prepare, lambda: None, integer=True)
    with pytest.warns(RuntimeWarning, match=r"off by .* of the reference's result"):
        assert why_not(wrong)
