"""Products with INT8 and INT4 weights in Triton's interpreter equal float64."""

import re
from functools import partial

import numpy as np
import pytest
import torch
from kernel_cases import TOLERANCE, poisoned_memory
from kernel_launches import counted

import bass_kernels
from bass_core.loading import quantization
from bass_core.model import kernel_ops
from bass_kernels import Codes, reference, skinny

pytestmark = pytest.mark.interpreted
HALF = (torch.float16, torch.bfloat16)


@pytest.fixture(autouse=True)
def numbers():
    """Seed the numbers of each test: biases that cancel a product leave only its error."""
    torch.manual_seed(0)


def within_nan(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same numbers in memory with NaN (for codes: the largest code) before and after."""
    rows, columns = tensor.shape
    fill = float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max
    room = torch.full((rows + 4, columns), fill, dtype=tensor.dtype)
    room[2:-2] = tensor
    return room[2:-2]


def codes(columns: int, inputs: int, *, packed=False, group=None, dtype=torch.float16, seed=0) -> Codes:
    """Return random codes. Some scales are 0, and a packed unit has random codes after the last input."""
    generator = torch.Generator().manual_seed(seed)
    units = -(-inputs // 32)
    shape, kind = ((columns, 16 * units), torch.uint8) if packed else ((columns, inputs), torch.int8)
    weight = torch.randint(-128, 128, shape, generator=generator).to(torch.int8).view(kind)
    scale = torch.rand(columns, 1 if group is None else -(-inputs // group), generator=generator).to(dtype) / 64
    scale[torch.rand(scale.shape, generator=generator) < 0.1] = 0
    return Codes(within_nan(weight), within_nan(scale), group)


def activations(rows: int, inputs: int, dtype=torch.float16, seed=1) -> torch.Tensor:
    """Return activations [rows, inputs] with NaN around each row."""
    room = torch.full((rows + 2, inputs + 8), float("nan"), dtype=dtype)
    room[1:-1, :inputs] = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(seed))
    return room[1:-1, :inputs]


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm().clamp(min=1e-30))


FORMS = {  # formats of weights
    "int8": {}, "int8 in groups": {"group": 64}, "int4 in groups": {"packed": True, "group": 32},
    "int4 in long groups": {"packed": True, "group": 128}, "int4": {"packed": True},
}  # fmt: skip
SHAPES = [
    (1, 40, 96),
    (3, 7, 33),
    (16, 33, 560),
    (17, 64, 224),
    (33, 70, 1),
    (70, 5, 300),
    (128, 40, 65),
    (5, 1, 700),
    (130, 5, 300),
]


# Each shape with two formats, each format with every dtype and split.
PRODUCTS = [
    (shape, list(FORMS)[(at + more) % 5], HALF[(at + more) % 2] if shape[0] < 20 else HALF[0], (1, 3, None)[at % 3])
    for at, shape in enumerate(SHAPES)
    for more in (0, 2)
]


def test_rows_beyond_the_last_are_not_written():
    room = torch.full((4, 35), 7.0, dtype=torch.float16)

    class Activations(torch.Tensor):
        def new_empty(self, *shape, **options):
            return room[:3] if shape == (3, 35) else torch.empty(*shape, **options)

    bass_kernels.skinny_linear(activations(3, 64).as_subclass(Activations), codes(35, 64), splits=1)
    assert (room[3] == 7).all() and (room[:3] != 7).all()


@pytest.mark.parametrize(("shape", "form", "dtype", "splits"), PRODUCTS, ids=str)
def test_products_match_the_reference(shape, form, dtype, splits):
    rows, columns, inputs = shape
    x, weights = activations(rows, inputs, dtype), codes(columns, inputs, dtype=dtype, **FORMS[form])
    bias = torch.randn(columns).to(dtype)
    with poisoned_memory():
        found = bass_kernels.skinny_linear(x, weights, bias, splits=splits)
    assert found.dtype == dtype and found.shape == (rows, columns)
    assert error(found, reference.skinny_linear(x, weights, bias)) < TOLERANCE[dtype]


@pytest.mark.parametrize("activation", skinny.ACTIVATIONS)
@pytest.mark.parametrize(("form", "splits"), [("int8", 1), ("int4 in groups", 2)])
def test_product_epilogue_is_fused(form, activation, splits):
    x, form = activations(9, 290), FORMS[form]
    weights, gate, bias = codes(35, 290, **form), codes(35, 290, seed=2, **form), torch.randn(35)
    for options in ({"bias": bias}, {"gate": gate}):
        with poisoned_memory():
            found = bass_kernels.skinny_linear(x, weights, activation=activation, splits=splits, **options)
        expected = reference.skinny_linear(x, weights, activation=activation, **options)
        assert error(found, expected) < TOLERANCE[torch.float16]


def test_full_precision_does_not_round():
    for form in FORMS.values():
        x, weights = activations(5, 290, torch.float32), codes(35, 290, dtype=torch.float32, **form)
        found = bass_kernels.skinny_linear(x, weights, splits=2)
        assert error(found, reference.skinny_linear(x, weights)) < TOLERANCE[torch.float32]


def test_weights_of_bass_core_have_its_meaning():
    weight, x = torch.randn(40, 90), activations(4, 90, torch.float32)
    for kind, group in (("int8", None), ("int4", 32)):
        made = quantization.KINDS[kind](weight)
        wanted = x @ quantization.dequantized(*made, 90).T
        assert error(bass_kernels.skinny_linear(x, Codes(*made, group)), wanted.double()) < 2e-6


@pytest.mark.parametrize("kind", quantization.KINDS)
def test_operator_uses_the_kernel_for_few_rows_and_torch_for_many(kind):
    made = quantization.KINDS[kind](torch.randn(40, 90).half())
    bias = torch.randn(40).half()
    wanted = torch.nn.Linear(90, 40)
    wanted.weight.data, wanted.bias.data = quantization.dequantized(*made, 90).float(), bias.float()
    for shape, launches in (((2, 3, 90), 1), ((257, 90), 0), ((0, 90), 0)):
        x = torch.randn(*shape).half()
        with counted() as seen:
            found = kernel_ops.quantized_linear(x, *made, bias)
        assert seen["around"]["_multiply"] == launches
        assert found.shape == (*shape[:-1], 40)
        assert error(found, wanted(x.float()).detach().double()) < TOLERANCE[torch.float16]
    torch.library.opcheck(kernel_ops.quantized_linear, (torch.randn(2, 3, 90).half(), *made, bias))


def test_narrow_outputs_are_cut_and_wide_ones_are_not():
    tile = skinny.choose(8, packed=False)
    assert skinny.pieces(4096, 4096, tile) == skinny.pieces(4096, 14336, tile) == 4
    assert skinny.pieces(14336, 4096, tile) == 1
    assert skinny.pieces(32, 64, tile) == 1  # a single piece


@pytest.mark.parametrize("ptx, dtype", [(skinny.BFLOAT16, torch.bfloat16), (skinny.FLOAT16, torch.float16)], ids=str)
def test_ptx_unpacks_every_byte(ptx, dtype):
    scales, words = torch.rand(64, 4).to(dtype), np.arange(256, dtype=np.uint8).view(np.uint32).tolist()
    found = np.array([by_hand(ptx.value, word, pair_bits(scale)) for word, scale in zip(words, scales, strict=True)])
    low, high = found[:, :2].reshape(-1), found[:, 2:].reshape(-1)
    codes = torch.arange(256).to(torch.uint8).view(torch.int8)
    for bits, wanted in ((low, codes << 4 >> 4), (high, codes >> 4)):
        numbers = torch.from_numpy(bits.astype(np.uint32).view(np.int16).copy()).view(dtype)
        assert torch.equal(numbers, (wanted.float() * scales.flatten().float()).to(dtype))


def pair_bits(numbers: torch.Tensor) -> list[int]:
    return numbers.view(torch.int16).numpy().view(np.uint32).tolist()


def by_hand(ptx: str, word: int, scales: list[int]) -> list[int]:
    registers = {"$4": word, "$5": scales[0], "$6": scales[1]}
    for line in re.findall(r"(?<=[\s;])((?:mov|prmt|shr|lop3|fma)[^;]*);", ptx):
        operator, operands = line.split(" ", 1)
        to, *names = [name.strip() for name in operands.split(",")]
        given = [registers[name] if name in registers else int(name, 0) for name in names]
        match operator.partition(".")[0]:
            case "mov":
                (result,) = given
            case "prmt":
                both = given[0].to_bytes(4, "little") + given[1].to_bytes(4, "little")
                result = int.from_bytes([both[given[2] >> 4 * at & 7] for at in range(4)], "little")
            case "shr":
                result = given[0] >> given[1]
            case "lop3":
                a, b, c, truth = given
                places = [4 * (a >> at & 1) + 2 * (b >> at & 1) + (c >> at & 1) for at in range(32)]
                result = sum((truth >> place & 1) << at for at, place in enumerate(places))
            case "fma":
                dtype = torch.bfloat16 if operator.endswith("bf16x2") else torch.float16
                halves = np.array(given, np.uint32).view(np.int16).reshape(3, 2)
                a, b, c = torch.from_numpy(halves).view(dtype).double()
                (result,) = pair_bits((a * b + c).to(dtype))
        registers[to] = result
    return [registers[f"${at}"] for at in range(4)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": activations(257, 64)}, "may have at most 256 rows, got 257"),
        ({"x": activations(2, 64).double()}, "x must be one of"),
        ({"x": activations(64, 2).T}, "K contiguous"),
        ({"x": activations(2, 65)}, "weight must be .5, 65. and contiguous for 65 inputs, got .5, 64."),
        ({"codes": codes(5, 64)._replace(group=48)}, "multiple of 32, got 48"),
        ({"codes": codes(5, 64)._replace(group=32)}, "scale must be .5, 2."),
        ({"codes": Codes(torch.ones(5, 64), torch.ones(5, 1))}, "must be int8"),
        ({"activation": "relu"}, "activation must be one of none, silu"),
        ({"bias": torch.ones(4)}, "bias must be .5."),
        ({"bias": torch.ones(5), "gate": codes(5, 64)}, "takes no bias"),
        ({"gate": codes(6, 64)}, "gate must have the shape"),
    ],
)
def test_unfit_arguments_are_refused(change, message):
    call = partial(bass_kernels.skinny_linear, **{"x": activations(2, 64), "codes": codes(5, 64)} | change)
    with pytest.raises(ValueError, match=message):
        call()
