"""The frame-wise rule on a GPU: errors against fp64, every row of the launch table, sizes, graphs, compilations."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor

import pytest
import torch
from requirements import require_gpu

require_gpu()
import triton  # noqa: E402
from agreement import assert_same  # noqa: E402
from clips import (  # noqa: E402
    GRADIENTS,
    draw_clip,
    draw_gradient,
    errors,
    mix,
    output_and_gradients,
    relative_error,
)
from row_sweep import BOUNDS, DTYPES, Case, sweep  # noqa: E402
from run import captured  # noqa: E402
from shapes import Shape  # noqa: E402
from table_rows import MOST_ROWS  # noqa: E402
from triton_against_torch import LAYOUTS, Strided, one_number_expanded  # noqa: E402

from gdn_kernels import FrameState, frame_gdn  # noqa: E402

pytestmark = pytest.mark.gpu

WIDTHS = (16, 32, 64, 72, 96, 112, 128, 160, 256)
CASES = [Case(width, precision, row) for width in WIDTHS for precision in BOUNDS for row in range(MOST_ROWS)]
SMALL = Shape(1, 3, 100, 4, 112, "")
OPTIONS = {"chunk_starts": (0, 1), "precision": "bf16"}


def assert_within(found: dict[str, float], output: float, gradient: float) -> None:
    print(found)
    for name, error in found.items():
        assert error <= (output if name == "output" else gradient), f"{name}: {error:.2e}"


@pytest.mark.parametrize(("precision", "output"), [("bf16", 4e-3), ("tf32", 2e-3), ("ieee", 1.7e-3)])
def test_errors_of_a_bf16_clip_stay_within_their_bounds(precision: str, output: float) -> None:
    clip = draw_clip(Shape(1, 21, 880, 20, 112, ""), torch.bfloat16, "cuda")
    assert_within(errors(clip, draw_gradient(clip), "triton", precision=precision), output, 1e-2)


def test_errors_of_an_fp32_clip_stay_within_their_bounds() -> None:
    clip = draw_clip(Shape(1, 21, 880, 4, 112, ""), torch.float32, "cuda")
    assert_within(errors(clip, draw_gradient(clip), "triton", precision="ieee"), 2e-6, 1e-5)


def test_errors_of_an_fp16_clip_stay_within_those_of_bf16() -> None:
    clip = draw_clip(Shape(1, 5, 300, 4, 112, ""), torch.float16, "cuda")
    assert_within(errors(clip, draw_gradient(clip), "triton"), 4e-3, 1e-2)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_errors_of_one_direction_stay_within_the_bounds(direction: str) -> None:
    # The last frame of the reverse direction reads nothing: 0 / eps is 0 in both implementations.
    clip = draw_clip(Shape(2, 5, 300, 4, 112, ""), torch.bfloat16, "cuda")
    assert_within(errors(clip, draw_gradient(clip), "triton", direction), 4e-3, 1e-2)


@pytest.mark.parametrize("precision", BOUNDS)
def test_error_does_not_grow_over_120_frames(precision: str) -> None:
    short, long = (
        errors(draw_clip(Shape(1, frames, 880, 4, 112, ""), DTYPES[precision], "cuda"), None, "triton",
               precision=precision)["output"]
        for frames in (21, 120)
    )  # fmt: skip
    assert long <= 1.1 * short


@pytest.fixture(scope="module")
def swept() -> Iterator[dict[Case, Future[dict[str, object]]]]:
    """Start every case of the sweep, in processes side by side: nearly all of the time is compilation."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(12, os.cpu_count() or 1), mp_context=context) as pool:
        yield {case: pool.submit(sweep, case) for case in CASES}
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.width}-{case.precision}-row{case.row}")
def test_every_row_of_the_table_is_right_and_repeats_its_bits(
    case: Case, swept: dict[Case, Future[dict[str, object]]]
) -> None:
    found = swept[case].result(timeout=500)
    assert_within(found["errors"], *BOUNDS[case.precision])
    assert all(found["same"].values()), found["same"]


@pytest.mark.whole_gpu
def test_last_batch_row_beyond_two_to_the_31_elements_equals_the_row_alone() -> None:
    shape = Shape(109, 10, 880, 20, 112, "")  # the output alone has 2.15e9 elements, qkv three times that
    if torch.cuda.get_device_properties(0).total_memory < 80e9:
        pytest.skip("needs 80 GB of memory")
    torch.utils.deterministic.fill_uninitialized_memory = False  # NaN over all of it is only time
    alone = draw_clip(shape._replace(batch=1), torch.bfloat16, "cuda")
    doutput = draw_gradient(alone)
    many = alone._replace(
        **{name: getattr(alone, name).detach().expand(109, *getattr(alone, name).shape[1:]).contiguous()
           .requires_grad_() for name in ("qkv", "beta", "decay")}
    )  # fmt: skip
    with torch.no_grad():
        many.qkv[:-1] *= 0.5  # a row read from another's place is another row
    upstream = doutput.expand(109, *doutput.shape[1:]).contiguous()
    assert upstream.numel() > 2**31
    found = output_and_gradients(many, upstream, "triton")
    expected = output_and_gradients(alone, doutput, "triton")
    assert_same(found["output"][-1:], expected["output"])
    for name in ("dqkv", "dbeta", "ddecay"):
        assert relative_error(found[name][-1:], expected[name].double()) <= 1e-3, name


def test_thirty_numbers_of_frames_compile_nothing_new() -> None:
    compiled: list[str] = []

    def step(frames: int, spatial: int, heads: int, batch: int) -> None:
        clip = draw_clip(Shape(batch, frames, spatial, heads, 112, ""), torch.bfloat16, "cuda")
        output_and_gradients(clip, draw_gradient(clip), "triton")

    step(2, 64, 4, 2)
    kept = triton.knobs.runtime.jit_post_compile_hook
    triton.knobs.runtime.jit_post_compile_hook = lambda *_, **named: compiled.append(named["repr"])
    try:
        for frames in range(1, 31):
            step(frames, 64, 4, 2)
        for spatial, heads, batch in ((1, 4, 2), (65, 4, 2), (64, 1, 2), (64, 5, 1), (920, 20, 1)):
            step(3, spatial, heads, batch)
        within = list(compiled)
        clip = draw_clip(Shape(1, 2, 64, 2, 24, ""), torch.bfloat16, "cuda")
        mix(clip, "triton")
    finally:
        triton.knobs.runtime.jit_post_compile_hook = kept
    assert not within
    assert compiled  # the hook does see compilations: another width needs them


def test_captured_forward_and_backward_replay_on_new_values() -> None:
    clip = draw_clip(SMALL, torch.bfloat16, "cuda", seed=0)
    doutput = draw_gradient(clip)
    kept: dict[str, torch.Tensor] = {}

    def step() -> None:
        kept.update(output_and_gradients(clip, doutput, "triton", **OPTIONS))

    graph = captured(step)
    fresh = draw_clip(SMALL, torch.bfloat16, "cuda", seed=5)
    with torch.no_grad():
        for old, new in zip(clip.leaves(), fresh.leaves(), strict=True):
            old.copy_(new)
        doutput.copy_(draw_gradient(fresh, seed=6))
    graph.replay()
    torch.cuda.synchronize()
    expected = output_and_gradients(fresh, doutput, "triton", **OPTIONS)
    for name, value in expected.items():
        assert_same(kept[name], value, name)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_call_and_its_backward_never_wait_for_the_device() -> None:
    clip = draw_clip(SMALL, torch.bfloat16, "cuda")
    doutput = draw_gradient(clip)
    expected = output_and_gradients(clip, doutput, "triton", **OPTIONS)  # compiles, and keeps what it copies
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = output_and_gradients(clip, doutput, "triton", **OPTIONS)
        with pytest.raises(RuntimeError):
            found["output"].sum().item()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_same(found["output"], expected["output"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_operands_and_incoming_gradients_may_have_any_strides(layout: Strided) -> None:
    clip = draw_clip(SMALL._replace(batch=2), torch.bfloat16, "cuda")
    strided = clip._replace(qkv=layout(clip.qkv.detach()).requires_grad_())
    plain = clip._replace(qkv=strided.qkv.detach().clone(memory_format=torch.contiguous_format).requires_grad_())
    doutput = layout(draw_gradient(clip))
    found = output_and_gradients(strided, doutput, "triton")
    expected = output_and_gradients(plain, doutput.contiguous(), "triton")
    for name in ("output", *GRADIENTS):
        assert relative_error(found[name], expected[name].double()) <= 1e-3, name


def test_gradient_of_a_sum_has_no_strides_and_is_taken_as_it_is() -> None:
    clip = draw_clip(SMALL, torch.bfloat16, "cuda")
    doutput = one_number_expanded(draw_gradient(clip))
    assert_within(errors(clip, doutput, "triton"), 4e-3, 1e-2)


@torch.no_grad()
def test_streaming_in_steps_with_the_state_gives_the_whole_clip() -> None:
    clip = draw_clip(Shape(1, 6, 100, 4, 112, ""), torch.float32, "cuda")
    state, outputs = None, []
    for start, stop in ((0, 1), (1, 3), (3, 6)):
        tokens = slice(start * 100, stop * 100)
        result = frame_gdn(
            clip.qkv[:, tokens], clip.beta[:, :, start:stop], clip.decay[:, :, start:stop], k_scale=clip.k_scale,
            initial_state=state, output_final_state=True, impl="triton",
        )  # fmt: skip
        outputs.append(result.output)
        state = result.final_state
        assert isinstance(state, FrameState)
    exact = frame_gdn(
        clip.qkv.double(), clip.beta.double(), clip.decay.double(), k_scale=clip.k_scale, output_final_state=True,
        impl="torch",
    )  # fmt: skip
    assert state is not None
    assert exact.final_state is not None
    assert relative_error(torch.cat(outputs, 1), exact.output) <= 2e-6
    assert relative_error(state.kv, exact.final_state.kv) <= 2e-6


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what the compiler imports
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiled_call_equals_the_eager_one(dynamic: bool) -> None:
    torch._dynamo.reset()
    call = torch.compile(mix, fullgraph=True, dynamic=dynamic)
    for frames in (3, 5):
        clip = draw_clip(SMALL._replace(frames=frames), torch.bfloat16, "cuda")
        doutput = draw_gradient(clip)
        eager = output_and_gradients(clip, doutput, "triton")
        output = call(clip, "triton")
        gradients = torch.autograd.grad(output, clip.leaves(), doutput)
        for name, value in zip(("output", *GRADIENTS), (output, *gradients), strict=True):
            assert_same(value.detach(), eager[name], name)
