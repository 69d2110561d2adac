"""The operations with ``impl="triton"`` in the interpreter against torch in fp64: every flag, width and stride."""

from __future__ import annotations

import pytest
import torch
from agreement import assert_same
from frame_gdn_cases import DIRECTIONS, KINDS, cast, draw, gradients, run, upstream
from requirements import require_interpreter
from torch import Tensor
from triton_against_torch import LAYOUTS, Strided, assert_triton_agrees, leaves_in, one_number_expanded

require_interpreter()
from gdn_kernels.frame_gdn import tiles  # noqa: E402

pytestmark = pytest.mark.interpret

SIZES = (1, 1, 3, 5, 8)  # B, H, F, S, D
EPS = 0.1  # a random denominator may come near zero; what 1 / x then does to rounding is not what is tested
STATE = ("kv", "z")
WEIGHTS = ("q_norm_weight", "k_norm_weight")
TABLES = ("cos", "sin")
MASK = torch.tensor([[True, False, True]])


def options_of(kind: str, **options: object) -> dict[str, object]:
    return {**options, "eps": EPS} if kind == "output" else options


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_triton_agrees_in_every_direction(kind: str, direction: str) -> None:
    assert_triton_agrees(kind, draw((2, 2, 2, 3, 8), dtype=torch.float32), direction, **options_of(kind))


@pytest.mark.parametrize("starts", [(0, 1, 2), (2,)])
@pytest.mark.parametrize("direction", ["reverse", "bidirectional"])
@pytest.mark.parametrize("kind", KINDS)
def test_triton_agrees_with_chunks_and_masked_frames(kind: str, direction: str, starts: tuple[int, ...]) -> None:
    case = draw(SIZES, dtype=torch.float32, without=STATE)
    assert_triton_agrees(kind, case, direction, **options_of(kind, chunk_starts=starts, frame_valid=MASK))


@pytest.mark.parametrize("mask", [MASK.float(), ~MASK, torch.zeros(1, 3)], ids=["float", "middle", "none"])
def test_triton_agrees_with_any_mask(mask: Tensor) -> None:
    assert_triton_agrees("output", draw(SIZES, dtype=torch.float32), "bidirectional", eps=EPS, frame_valid=mask)


@pytest.mark.parametrize("without", [(), TABLES], ids=["rope", "plain"])
@pytest.mark.parametrize("absent", [(), WEIGHTS[:1], WEIGHTS[1:], WEIGHTS], ids=["both", "k", "q", "none"])
@pytest.mark.parametrize("kind", ["output", "raw"])
def test_triton_agrees_with_and_without_norm_weights_and_tables(
    kind: str, absent: tuple[str, ...], without: tuple[str, ...]
) -> None:
    case = draw((1, 2, 1, 5, 8), dtype=torch.float32, without=(*absent, *without, *STATE))
    assert_triton_agrees(kind, case, "bidirectional", **options_of(kind))


@pytest.mark.parametrize("width", [1, 8, 16, 40, 136])
@pytest.mark.parametrize("kind", ["output", "numerator"])
def test_triton_agrees_at_widths_of_part_of_a_block_and_of_two_blocks(kind: str, width: int) -> None:
    case = draw((1, 1, 2, 3, width), dtype=torch.float32)
    assert_triton_agrees(kind, case, "bidirectional", **options_of(kind, chunk_starts=(1,)))


@pytest.mark.parametrize("spatial", [1, 7, 16, 17, 33])
def test_triton_agrees_at_frames_of_part_of_a_tile_and_of_many_tiles(spatial: int) -> None:
    case = draw((1, 1, 2, spatial, 8), dtype=torch.float32)
    assert_triton_agrees("output", case, "bidirectional", eps=EPS)


@pytest.mark.parametrize("programs", [1, 6])
def test_triton_agrees_however_many_programs_share_a_frame(monkeypatch: pytest.MonkeyPatch, programs: int) -> None:
    monkeypatch.setattr(tiles, "_multiprocessors", lambda device: programs)
    case = draw((1, 1, 1, 70, 8), dtype=torch.float32)
    assert_triton_agrees("output", case, "bidirectional", eps=EPS)


@pytest.mark.parametrize("sizes", [(1, 2, 0, 4, 8), (0, 2, 2, 4, 8), (1, 2, 1, 4, 8), (1, 2, 2, 0, 8)], ids=str)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_triton_agrees_on_empty_and_single_frames(
    kind: str, direction: str, sizes: tuple[int, int, int, int, int]
) -> None:
    assert_triton_agrees(kind, draw(sizes, dtype=torch.float32), direction, **options_of(kind))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_triton_reads_operands_of_any_strides(kind: str, layout: Strided) -> None:
    case = draw((2, 1, 2, 3, 8), dtype=torch.float32, without=STATE)
    case["qkv"] = layout(case["qkv"].detach())
    assert_triton_agrees(kind, leaves_in(case), "bidirectional", **options_of(kind))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_triton_reads_gates_weights_tables_and_states_of_any_strides(layout: Strided) -> None:
    case = draw((2, 2, 2, 3, 8), dtype=torch.float32)
    for name in ("beta", "decay", "cos", "sin", "kv", "z"):
        case[name] = layout(case[name].detach()) if case[name].ndim > 2 else case[name].detach().mT.contiguous().mT
    assert_triton_agrees("output", leaves_in(case), "bidirectional", eps=EPS)


@pytest.mark.parametrize("layout", [*LAYOUTS, one_number_expanded])
@pytest.mark.parametrize("kind", KINDS)
def test_triton_reads_incoming_gradients_of_any_strides(kind: str, layout: Strided) -> None:
    case = draw((2, 1, 2, 3, 8), dtype=torch.float32)
    assert_triton_agrees(kind, case, "forward", layout=layout, **options_of(kind))


@pytest.mark.parametrize(
    ("kind", "silent"),
    [
        ("output", ("output",)), ("output", ("final_kv", "final_z")), ("output", ("final_kv",)),
        ("output", ("final_z",)),
        ("raw", ("numerator",)), ("raw", ("denominator",)), ("raw", ("numerator", "denominator")),
        ("numerator", ("numerator",)), ("numerator", ("final_kv",)),
    ],
)  # fmt: skip
def test_triton_takes_a_missing_incoming_gradient_for_zero(kind: str, silent: tuple[str, ...]) -> None:
    case = draw((1, 2, 2, 3, 8), dtype=torch.float32)
    assert_triton_agrees(kind, case, "forward", silent=silent, **options_of(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_triton_agrees_on_half_precision_operands_and_gates(kind: str) -> None:
    case = draw((1, 2, 2, 5, 8), dtype=torch.float32)
    case = cast(case, torch.float16, "qkv", "beta", "decay", "q_norm_weight", "k_norm_weight")
    assert_triton_agrees(kind, case, "bidirectional", **options_of(kind))


def test_triton_is_differentiable_once() -> None:
    case = draw((1, 1, 1, 2, 8), dtype=torch.float32)
    output = run("output", case, impl="triton")["output"]
    (gradient,) = torch.autograd.grad(output.square().sum(), case["qkv"], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        gradient.sum().backward()


def test_triton_refuses_a_head_wider_than_its_limit() -> None:
    case = draw((1, 1, 1, 1, 264), dtype=torch.float32)
    with pytest.raises(NotImplementedError, match="D up to 256, got D = 264"):
        run("output", case, impl="triton")


def test_triton_leaves_its_arguments_as_they_were() -> None:
    case = draw((1, 2, 2, 3, 8), dtype=torch.float32)
    before = {name: value.detach().clone() for name, value in case.items()}
    results = run("output", case, "bidirectional", impl="triton", frame_valid=MASK[:, :2])
    incoming = upstream(results)
    kept = {name: value.clone() for name, value in incoming.items()}
    gradients(results, incoming, case)
    for name, value in before.items():
        assert_same(case[name].detach(), value, name)
    for name, value in kept.items():
        assert_same(incoming[name], value, name)
