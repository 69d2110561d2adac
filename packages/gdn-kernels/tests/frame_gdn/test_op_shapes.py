"""Sizes and layouts: around tile boundaries, nothing to do, odd widths, views."""

import pytest
import torch
from agreement import assert_all_close, assert_same, assert_zero
from frame_gdn_cases import DIRECTIONS, KINDS, NO_GRADIENT, Case, draw, gradients, leaves, run, run_sequential, upstream
from torch import Tensor

from gdn_kernels import FrameState, frame_gdn, frame_gdn_numerator, frame_gdn_raw

TOLERANCE = 1e-12
Sizes = tuple[int, int, int, int, int]


def check(sizes: Sizes, direction: str = "bidirectional") -> None:
    """Compare a call of ``sizes``, tensors inside NaN guard bands, with the loop: results and every gradient."""
    case = guarded(draw(sizes))
    copy = leaves(case)
    found, expected = run("raw", case, direction), run_sequential("raw", copy, direction)
    assert_all_close(found, expected, TOLERANCE)
    incoming = upstream(expected)
    assert_all_close(gradients(found, incoming, case), gradients(expected, incoming, copy), TOLERANCE)


def guarded(case: Case) -> Case:
    """Return the same case, every tensor a window of a buffer that holds NaN before and after it."""
    found = {}
    for name, value in case.items():
        buffer = torch.full((value.numel() + 128,), torch.nan, dtype=value.dtype)
        window = buffer[64:-64].view(value.shape)
        window.copy_(value.detach())
        found[name] = window.requires_grad_(name not in NO_GRADIENT)
    return found


@pytest.mark.parametrize("spatial", [1, 2, 7, 8, 15])
@pytest.mark.parametrize("width", [1, 4, 8])
def test_fewer_rows_than_any_tile(width: int, spatial: int) -> None:
    """FC-S03."""
    check((1, 2, 3, spatial, width))


@pytest.mark.parametrize("spatial", [16, 17, 31, 32, 33, 63, 64, 65, 127])
def test_last_tile_partly_filled(spatial: int) -> None:
    """FC-S05: no read past the end, and the last live row has all its gradient."""
    check((1, 1, 2, spatial, 4))


@pytest.mark.parametrize("spatial", [880, 920])
def test_frames_of_real_size(spatial: int) -> None:
    """FC-S05."""
    check((1, 1, 2, spatial, 6))


@pytest.mark.parametrize("frames", [1, 2, 3, 11, 21, 80])
def test_clips_of_every_length(frames: int) -> None:
    """FC-S08: one frame takes no other path."""
    check((1, 2, frames, 3, 4))


@pytest.mark.parametrize("width", [40, 72, 80, 96, 100, 112, 160, 200, 256])
def test_widths_that_are_no_power_of_two_or_large(width: int) -> None:
    """FC-S16."""
    check((1, 2, 2, 3, width))


@pytest.mark.parametrize("sizes", [(1, 1, 4, 2, 9), (2, 1, 2, 3, 5), (1, 3, 2, 5, 7), (3, 20, 2, 1, 2)])
def test_odd_numbers_of_heads_and_channels(sizes: Sizes) -> None:
    """FC-S13."""
    check(sizes)


@pytest.mark.parametrize("sizes", [(2, 3, 0, 5, 4), (2, 3, 5, 0, 4), (0, 3, 5, 2, 4), (2, 3, 0, 0, 4)], ids=str)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_to_do(kind: str, direction: str, sizes: Sizes) -> None:
    """FC-S08: empty results of the right shape; the state passes, decayed once a frame, and so does its gradient."""
    batch, heads, frames, spatial, _ = sizes
    case = draw(sizes, without=("kv", "z") if direction == "reverse" else ())
    found = run(kind, case, direction, frame_valid=torch.ones(batch, frames))
    for name, value in found.items():
        if not name.startswith("final"):
            shape = (batch, heads, frames * spatial) if name == "denominator" else case["qkv"][:, :, 0].shape
            assert value.shape == shape
    incoming = upstream(found)
    grads = gradients(found, incoming, case)
    for name in ("qkv", "beta", "decay"):
        assert grads[name] is None or grads[name].shape == case[name].shape
    if direction != "reverse":
        fade = case["decay"].detach().prod(-1)[..., None, None]
        assert_all_close({"kv": found["final_kv"]}, {"kv": case["kv"] * fade}, TOLERANCE)
        assert_all_close({"kv": grads["kv"]}, {"kv": incoming["final_kv"] * fade}, TOLERANCE)
        if not frames:
            assert_same(found["final_kv"], case["kv"])
            assert_same(grads["kv"], incoming["final_kv"])


def test_no_frames_and_no_state_end_in_zeros() -> None:
    """FC-S08."""
    case = draw((2, 3, 0, 5, 4), without=("kv", "z"))
    found = run("raw", case)
    assert_zero(found["final_kv"], "kv")
    assert_zero(found["final_z"], "z")


def transposed(x: Tensor) -> Tensor:
    """The same values with the memory order of all dims reversed."""
    order = tuple(reversed(range(x.ndim)))
    return x.permute(order).contiguous().permute(order)


def every_second(x: Tensor) -> Tensor:
    """The same values as every second entry of a buffer full of NaN."""
    wide = torch.full((*x.shape, 2), torch.nan, dtype=x.dtype)
    wide[..., 0] = x
    return wide[..., 0]


def of_a_wider_buffer(x: Tensor) -> Tensor:
    """The same values inside a buffer that is larger in every dim."""
    wide = torch.full([size + 2 for size in x.shape], torch.nan, dtype=x.dtype)
    window = wide[tuple(slice(1, -1) for _ in x.shape)]
    return window.copy_(x)


def offset_by_one(x: Tensor) -> Tensor:
    """The same values from the second element of the storage on."""
    return torch.cat((x.new_full((1,), torch.nan), x.flatten()))[1:].view(x.shape)


LAYOUTS = {
    "transposed": transposed,
    "every-second": every_second,
    "of-a-wider-buffer": of_a_wider_buffer,
    "offset-by-one": offset_by_one,
    "heads-first": lambda x: x.movedim(-2, 0).contiguous().movedim(0, -2) if x.ndim > 1 else x.clone(),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_views_give_what_contiguous_tensors_give(kind: str, layout: object) -> None:
    """FC-S12: bit for bit, gradients too; strided gates, weights, tables and states included."""
    case = draw(without=("q_norm_weight", "z", "cos", "sin") if kind == "numerator" else ())
    views = {name: layout(value.detach()) for name, value in case.items()}
    views = {name: value.requires_grad_(name not in NO_GRADIENT) for name, value in views.items()}
    plain, found = (run(kind, x, "bidirectional") for x in (case, views))
    incoming = upstream(plain)
    for name, value in plain.items():
        assert_same(found[name], value, name)
    grads, wanted = gradients(found, incoming, views), gradients(plain, incoming, case)
    for name, value in wanted.items():
        assert value is None or assert_same(grads[name], value, name) is None


def test_expanded_inputs_give_what_their_copies_give() -> None:
    """FC-S12: heads and batch that share memory, and gradients that add up over them."""
    base = draw((1, 1, 5, 7, 4), without=("q_norm_weight", "k_norm_weight"))
    shape = {"qkv": (2, -1, -1, 3, -1), "kv": (2, 3, -1, -1), "z": (2, 3, -1), "beta": (2, 3, -1, -1)}
    shape["decay"] = (2, 3, -1)
    views = {name: value.expand(shape[name]) if name in shape else value for name, value in base.items()}
    copies = leaves({name: value.contiguous() for name, value in views.items()})
    found, expected = run("output", views, "bidirectional"), run("output", copies, "bidirectional")
    for name, value in expected.items():
        assert_same(found[name], value, name)
    incoming = upstream(expected)
    grads, wanted = gradients(found, incoming, base), gradients(expected, incoming, copies)
    for name in shape:
        dims = (0, 3) if name == "qkv" else (0, 1)
        assert_all_close({name: grads[name]}, {name: wanted[name].sum(dims, keepdim=True)}, TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_states_of_another_dtype_are_refused(dtype: torch.dtype) -> None:
    """FC-S14: fp32 states, fp64 ones with fp64 inputs only."""
    case = draw(dtype=torch.float32)
    qkv, beta, decay = case["qkv"], case["beta"], case["decay"]
    state = FrameState(case["kv"].to(dtype), case["z"].to(dtype))
    for op in (frame_gdn, frame_gdn_raw):
        with pytest.raises(ValueError, match=r"initial_state\.kv must have dtype float32, got"):
            op(qkv, beta, decay, initial_state=state)
    with pytest.raises(ValueError, match="initial_state must have dtype float32, got"):
        frame_gdn_numerator(*qkv.unbind(2), beta, decay, initial_state=state.kv)
    with pytest.raises(ValueError, match=r"initial_state\.z must have dtype float32, got"):
        frame_gdn(qkv, beta, decay, initial_state=FrameState(case["kv"], state.z))
    with pytest.raises(ValueError, match=r"initial_state\.kv must have dtype float64, got float32"):
        frame_gdn(qkv.double(), beta, decay, initial_state=FrameState(case["kv"], case["z"]))
