"""Reading a clip in several calls: equal to one call, gradients included, however the clip is cut."""

from __future__ import annotations

import copy
import io
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from comparison import assert_close, assert_gradients_close, gradients, randomize
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from gdn_models import BidirectionalGDN, CameraFrameGDN, ChunkCausalGDN, FrameGDN, GatedDeltaProduct, GDNState
from gdn_models.cache import CameraState

B, H, D, ROWS, COLUMNS = 2, 2, 6, 2, 1
C, S, F = H * D, ROWS * COLUMNS, 13
TOLERANCE = 1e-10


def make(cls: type[nn.Module], dtype: torch.dtype = torch.float64, **options: object) -> nn.Module:
    block = cls(**{"dim": C, "heads": H, "conv_qv": True, **options}).to(dtype)
    randomize(block)
    return block


def stream(
    block: nn.Module, x: Tensor, cuts: Sequence[int], starts: Sequence[int] | None = None
) -> tuple[Tensor, GDNState]:
    """Read the clip in calls that end at ``cuts``."""
    state, outputs = block.init_state(x.shape[0], (0, ROWS, COLUMNS), dtype=x.dtype), []
    for first, last in pairwise([0, *cuts]):
        own = {} if starts is None else {"chunk_starts": [s - first for s in starts if first <= s < last]}
        y, state = block(x[:, first * S : last * S], (last - first, ROWS, COLUMNS), state=state, **own)
        outputs.append(y)
    return torch.cat(outputs, 1), state


def clip(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(B, F * S, C, dtype=torch.float64).to(dtype).requires_grad_()


def assert_streams_as_one_call(
    block: nn.Module, cuts: Sequence[int], starts: Sequence[int] | None = None, tolerance: float = TOLERANCE
) -> None:
    """Compare outputs, final states and every gradient, of the output and of the state."""
    x, whole = clip(), copy.deepcopy(block)
    copied = x.detach().clone().requires_grad_()
    y, state = stream(block, x, cuts, starts)
    expected, final = stream(whole, copied, [F], starts)
    alone = whole(copied, (F, ROWS, COLUMNS), **({} if starts is None else {"chunk_starts": starts}))
    assert_close(expected, alone, tolerance, "one call with a state")
    assert state.frames == final.frames == F
    upstream = torch.randn_like(y)
    total = []
    for result, end in ((y, state), (expected, final)):
        tails = [tail for tail in end.conv if tail is not None]
        total.append((result * upstream).sum() + sum(p.square().sum() for p in (end.kv, end.z, *tails)))
    assert_close(y, expected, tolerance, "output")
    for name, one, other in zip(("kv", "z", "q", "k", "v"), (*state[:2], *state.conv), (*final[:2], *final.conv)):
        assert (one is None) == (other is None)
        if one is not None:
            assert_close(one, other, tolerance, name)
    total[0].backward()
    total[1].backward()
    assert_close(x.grad, copied.grad, tolerance, "gradient of x")
    assert_gradients_close(gradients(block), gradients(whole), tolerance)


@pytest.mark.parametrize("length", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("conv", [{}, {"conv_qv": False}, {"conv_qv": False, "conv_size": 0}], ids=["qkv", "k", "none"])
def test_causal_stream_equals_one_call(length: int, conv: dict[str, object]) -> None:
    """Calls shorter than the convolution's reach keep its tail full."""
    assert_streams_as_one_call(make(FrameGDN, **conv), [*range(length, F, length), F])


@pytest.mark.parametrize("length", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("per_call", [1, 2])
def test_chunk_causal_stream_equals_one_call(length: int, per_call: int) -> None:
    starts = tuple(range(0, F, length))
    cuts = [*starts[per_call::per_call], F]
    assert_streams_as_one_call(make(ChunkCausalGDN), cuts, starts)


def test_calls_of_mixed_lengths_and_without_frames() -> None:
    assert_streams_as_one_call(make(FrameGDN), [1, 3, 3, 4, 7, 7, F])


def test_without_rotation_norm_and_gate() -> None:
    block = make(FrameGDN, rope_theta=None, qk_norm=False, output_gate=False, qkv_bias=True)
    assert_streams_as_one_call(block, [2, 5, F])


@pytest.mark.parametrize("autocast", [False, True], ids=["bf16", "autocast"])
def test_streams_in_16_bits(autocast: bool) -> None:
    """States stay fp32; the tails have the dtype of the tokens."""
    block = make(FrameGDN, torch.float32 if autocast else torch.bfloat16)
    x = clip(torch.float32 if autocast else torch.bfloat16).detach()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), torch.no_grad():
        y, state = stream(block, x, [2, 6, F])
        expected = block(x, (F, ROWS, COLUMNS))
    assert state.kv.dtype == state.z.dtype == torch.float32
    assert all(tail.dtype == torch.bfloat16 for tail in state.conv)
    assert_close(y, expected, 4 * 2.0**-8, "output")  # rounded at the same places, sums in another order


def test_the_same_state_serves_several_calls() -> None:
    """Several denoising passes over one chunk start from one state: nothing writes into it."""
    block, x = make(FrameGDN), clip().detach()
    _, state = block(x[:, : 4 * S], (4, ROWS, COLUMNS), state=block.init_state(B, (0, ROWS, COLUMNS)))
    kept = [p.clone() for p in (state.kv, state.z, *state.conv)]
    first, _ = block(x[:, 4 * S :], (F - 4, ROWS, COLUMNS), state=state)
    second, _ = block(x[:, 4 * S :], (F - 4, ROWS, COLUMNS), state=state)
    assert torch.equal(first, second)
    assert all(torch.equal(p, q) for p, q in zip(kept, (state.kv, state.z, *state.conv), strict=True))


def test_tails_do_not_keep_the_call_alive() -> None:
    block = make(FrameGDN)
    _, state = block(clip(), (F, ROWS, COLUMNS), state=block.init_state(B, (0, ROWS, COLUMNS)))
    for tail in state.conv:
        assert tail.untyped_storage().nbytes() == tail.numel() * tail.element_size()


def test_state_is_a_pytree_and_detaches() -> None:
    block = make(FrameGDN)
    _, state = block(clip(), (F, ROWS, COLUMNS), state=block.init_state(B, (0, ROWS, COLUMNS)))
    leaves, structure = tree_flatten(state)
    assert tree_unflatten(leaves, structure) == state
    assert state.kv.requires_grad
    cut = state._replace(camera=CameraState(state.kv, state.conv)).detach()
    assert cut.camera is not None
    parts = [cut.kv, cut.z, *cut.conv, cut.camera.kv, *cut.camera.conv]
    assert not any(p.requires_grad for p in parts)
    assert cut.frames == F


@pytest.mark.parametrize("kind", ["main", "camera", "tokens"])
def test_saved_states_load_as_they_were(kind: str) -> None:
    """`torch.load` unpickles allowed classes only, by default; a named tuple is one that has to be allowed."""
    if kind == "tokens":
        state = GatedDeltaProduct(dim=16, heads=2, head_dim=8).init_state(B)
    else:
        state = (CameraFrameGDN if kind == "camera" else FrameGDN)(dim=16, heads=2).init_state(B, (0, ROWS, COLUMNS))
    leaves, structure = tree_flatten(state)
    state = tree_unflatten([torch.randn_like(x) if isinstance(x, Tensor) else x for x in leaves], structure)
    file = io.BytesIO()
    torch.save({"layers": [state]}, file)
    file.seek(0)
    found = torch.load(file)["layers"][0]
    assert type(found) is type(state)
    found_leaves, found_structure = tree_flatten(found)
    assert found_structure == structure
    for one, other in zip(found_leaves, tree_flatten(state)[0], strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


# ---- errors


@pytest.mark.parametrize(
    "change, kind, message",
    [
        ({"batch": -1}, ValueError, "batch must be >= 0, got -1"),
        ({"batch": 2.0}, TypeError, "batch must be an int, got float"),
        ({"grid": (0, -1, 2)}, ValueError, r"grid must be three sizes >= 0, got \(0, -1, 2\)"),
        ({"dtype": torch.int64}, ValueError, "dtype must be one of float16, bfloat16, float32, float64, got int64"),
        ({"dtype": "float32"}, TypeError, "dtype must be a torch.dtype or None, got str"),
    ],
)
@pytest.mark.parametrize("cls", [FrameGDN, CameraFrameGDN])
def test_a_state_that_cannot_be_made_is_refused(
    cls: type[nn.Module], change: dict[str, object], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=f"^{message}$"):
        cls(dim=16, heads=2).init_state(**{"batch": B, "grid": (0, ROWS, COLUMNS), **change})


def test_whether_a_stream_has_cameras_is_a_bool() -> None:
    with pytest.raises(TypeError, match="^camera must be a bool, got Tensor$"):
        CameraFrameGDN(dim=16, heads=2).init_state(B, (0, ROWS, COLUMNS), camera=torch.ones(B, 1, 20))


def call(block: nn.Module, state: object, **options: object) -> None:
    block(torch.zeros(B, 2 * S, C, dtype=torch.float64), (2, ROWS, COLUMNS), state=state, **options)


def wrong_states() -> list[tuple[dict[str, object], type[Exception], str]]:
    good = make(FrameGDN).init_state(B, (0, ROWS, COLUMNS))
    q, k, v = good.conv
    return [
        ({"kv": good.kv[:, :1]}, ValueError, r"state.kv must have shape \[B, H, D, D\]"),
        ({"kv": good.kv[:1]}, ValueError, r"state.kv must have shape \[B, H, D, D\] = \[2, .*, got \[1, 2, 6, 6\]"),
        ({"kv": good.kv.to("meta")}, ValueError, r"state.kv must be on the device of x \(cpu\), got meta"),
        ({"conv": (q, k, v.to("meta"))}, ValueError, r"state.conv of v must be on the device of x \(cpu\), got meta"),
        ({"conv": (q.int(), k, v)}, ValueError, "state.conv of q must have dtype float16, bfloat16, float32, float64"),
        ({"kv": good.kv.float()}, ValueError, "state.kv must have dtype float64, got float32"),
        ({"z": None}, ValueError, "state.z must be a tensor: kv and z go together"),
        ({"z": good.z[..., :3]}, ValueError, r"state.z must have shape \[B, H, D\]"),
        ({"conv": (q, None, v)}, ValueError, "state.conv of k must be a tensor for this block"),
        ({"conv": (q, k[:, :1], v)}, ValueError, r"state.conv of k must have shape \[B, K-1, S, C\]"),
        ({"conv": [q, k, v]}, TypeError, "state.conv must be a tuple of three tails, got list"),
        ({"camera": CameraState(good.kv, good.conv)}, ValueError, "state.camera must be None for FrameGDN"),
        ({"frames": -1}, ValueError, "state.frames must be >= 0, got -1"),
        ({"frames": 1.0}, TypeError, "state.frames must be an int, got float"),
        ({"spatial": 2}, TypeError, r"state.spatial must be a tuple \(h, w\) or None, got 2"),
        ({"spatial": (2, 1, 1)}, TypeError, r"state.spatial must be a tuple \(h, w\) or None, got \(2, 1, 1\)"),
    ]


@pytest.mark.parametrize("index", range(len(wrong_states())))
def test_a_state_of_another_block_is_refused(index: int) -> None:
    change, kind, message = wrong_states()[index]
    block = make(FrameGDN)
    state = block.init_state(B, (0, ROWS, COLUMNS))
    call(block, state)
    with pytest.raises(kind, match=message):
        call(block, state._replace(**change))


def test_a_state_is_a_gdn_state() -> None:
    with pytest.raises(TypeError, match="state must be a GDNState or None, got tuple"):
        call(make(FrameGDN), (1, 2))


@pytest.mark.parametrize("cls", [FrameGDN, ChunkCausalGDN, CameraFrameGDN])
@pytest.mark.parametrize("conv_size", [0, 4])
@pytest.mark.parametrize("other", [(1, 6), (3, 2), (1, 1), (2, 4)])
def test_rows_and_columns_are_those_of_the_first_call(
    cls: type[nn.Module], conv_size: int, other: tuple[int, int]
) -> None:
    """As many tokens in another order, or without convolutions any number, would run with wrong positions and scale."""
    block = cls(dim=16, heads=2, conv_size=conv_size)

    def read(spatial: tuple[int, int], state: GDNState) -> GDNState:
        seen = (torch.ones(B, 2, 20),) if cls is CameraFrameGDN else ()
        return block(torch.ones(B, 2 * spatial[0] * spatial[1], 16), (2, *spatial), *seen, state=state)[1]

    fresh = block.init_state(B, (0, 2, 3))
    assert fresh.spatial == (2, 3)
    after = read((2, 3), fresh)
    assert after.spatial == after.detach().spatial == (2, 3)
    assert after.detach().frames == 2
    for state in (fresh, after):
        message = (
            rf"^grid must have the h and w of the stream, \(2, 3\), in every call, got \({other[0]}, {other[1]}\)$"
        )
        with pytest.raises(ValueError, match=message):
            read(other, state)


def test_a_state_that_does_not_know_its_rows_and_columns_learns_them() -> None:
    """Those of converted caches, and of files from before states had them."""
    block = make(FrameGDN)
    state = GDNState(*block.init_state(B, (0, ROWS, COLUMNS))[:5])
    assert state.spatial is None
    x = torch.zeros(B, 2 * S, C, dtype=torch.float64)
    assert block(x, (2, ROWS, COLUMNS), state=state)[1].spatial == (ROWS, COLUMNS)


def test_a_tail_that_no_convolution_reads_is_refused() -> None:
    state = make(FrameGDN).init_state(B, (0, ROWS, COLUMNS))
    with pytest.raises(ValueError, match="state.conv of q must be None for this block"):
        call(make(FrameGDN, conv_qv=False), state)


def test_what_streams_do_not_support_says_so() -> None:
    block = make(FrameGDN)
    state = block.init_state(B, (0, ROWS, COLUMNS))
    with pytest.raises(NotImplementedError, match="state together with frame_valid"):
        call(block, state, frame_valid=torch.ones(B, 2))
    whole = make(BidirectionalGDN)
    with pytest.raises(NotImplementedError, match="BidirectionalGDN reads the whole clip both ways"):
        call(whole, state)
    with pytest.raises(NotImplementedError, match="has no streaming form"):
        whole.init_state(B, (0, ROWS, COLUMNS))


def test_streams_run_on_one_rank() -> None:
    from gdn_cp import CPContext, FramePartition

    block = make(FrameGDN)
    state = block.init_state(B, (0, ROWS, COLUMNS))
    block.attach_context(CPContext.single())
    call(block, state)
    with pytest.raises(NotImplementedError, match="state under context parallelism"):
        call(block, state, partition=FramePartition((2,)))
