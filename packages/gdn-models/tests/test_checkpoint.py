"""Published checkpoints and caches: what loads, what is refused and how it is named, and the way back."""

from __future__ import annotations

import copy

import pytest
import torch
from camera_loops import poses
from comparison import error, randomize
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from gdn_models import (
    BidirectionalGDN,
    CameraBidirectionalGDN,
    CameraChunkCausalGDN,
    CameraFrameGDN,
    ChunkCausalGDN,
    FrameGDN,
    load_published,
    published_state_dict,
    state_from_published,
    state_to_published,
)
from gdn_models.cache import CameraState

C, H, D, K = 12, 2, 6, 4
W = 16  # width of blocks with a camera
# The table of the published blocks, by hand: name, shape, and the option without which it is absent.
TABLE = {
    "qkv.weight": ((3 * C, C), None), "qkv.bias": ((3 * C,), "qkv_bias"), "proj.weight": ((C, C), None),
    "proj.bias": ((C,), None), "q_norm.weight": ((C,), "qk_norm"), "k_norm.weight": ((C,), "qk_norm"),
    "beta_proj.weight": ((H, C), None), "beta_proj.bias": ((H,), None), "gate_proj.weight": ((H, C), None),
    "gate_proj.bias": ((H,), None), "A_log": ((H,), None), "dt_bias": ((H,), None),
    "output_gate.weight": ((C, C), "output_gate"), "output_gate.bias": ((C,), "output_gate"),
    "conv_k.weight": ((C, 1, K), "conv_size"), "conv_q.weight": ((C, 1, K), "conv_qv"),
    "conv_v.weight": ((C, 1, K), "conv_qv"), "recall_gate": ((1,), None),
}  # fmt: skip
# What the blocks with a camera branch have besides; their heads have 8 channels.
CAMERA_TABLE = {
    "q_proj_cam.weight": ((W, W), None), "q_proj_cam.bias": ((W,), None), "k_proj_cam.weight": ((W, W), None),
    "k_proj_cam.bias": ((W,), None), "v_proj_cam.weight": ((W, W), None), "v_proj_cam.bias": ((W,), None),
    "out_proj_cam.weight": ((W, W), None), "out_proj_cam.bias": ((W,), None), "q_norm_cam.weight": ((W,), "qk_norm"),
    "k_norm_cam.weight": ((W,), "qk_norm"), "conv_k_cam.weight": ((W, 1, K), "conv_size"),
    "conv_q_cam.weight": ((W, 1, K), "conv_qv"), "conv_v_cam.weight": ((W, 1, K), "conv_qv"),
}  # fmt: skip
DEFAULTS = {"qkv_bias": False, "qk_norm": True, "output_gate": True, "conv_size": K, "conv_qv": False}
CLASSES = [FrameGDN, BidirectionalGDN, ChunkCausalGDN]
CAMERA_CLASSES = [CameraFrameGDN, CameraBidirectionalGDN, CameraChunkCausalGDN]


def published(**options: object) -> dict[str, Tensor]:
    chosen = {**DEFAULTS, **options}
    names = [name for name, (_, needs) in TABLE.items() if needs is None or chosen[needs]]
    return {name: torch.randn(TABLE[name][0]) for name in names}


def published_with_camera(**options: object) -> dict[str, Tensor]:
    chosen, wide = {**DEFAULTS, **options}, {C: W, 3 * C: 3 * W}
    main = {name: tuple(wide.get(size, size) for size in value.shape) for name, value in published(**options).items()}
    own = {name: shape for name, (shape, needs) in CAMERA_TABLE.items() if needs is None or chosen[needs]}
    return {name: torch.randn(shape) for name, shape in {**main, **own}.items()}


@pytest.mark.parametrize(
    "options", [{}, {"qkv_bias": True}, {"conv_qv": True}, {"conv_size": 0}, {"qk_norm": False, "output_gate": False}]
)
@pytest.mark.parametrize("cls", [*CLASSES, *CAMERA_CLASSES])
def test_published_names_load_strictly(cls: type[nn.Module], options: dict[str, object]) -> None:
    seen = cls in CAMERA_CLASSES
    block = cls(dim=W if seen else C, heads=H, **options)
    given = published_with_camera(**options) if seen else published(**options)
    load_published(block, given)
    assert block.state_dict().keys() == given.keys() - {"recall_gate"}
    for name, value in block.state_dict().items():
        assert torch.equal(value, given[name]), name


@pytest.mark.parametrize("cls", [*CLASSES, *CAMERA_CLASSES])
def test_every_single_missing_name_is_an_error_that_names_it(cls: type[nn.Module]) -> None:
    options, seen = {"qkv_bias": True, "conv_qv": True}, cls in CAMERA_CLASSES
    block = cls(dim=W if seen else C, heads=H, **options)
    given = published_with_camera(**options) if seen else published(**options)
    for name in given.keys() - {"recall_gate"}:
        with pytest.raises(ValueError, match=f"the checkpoint does not fit {cls.__name__}: missing {name}$"):
            load_published(block, {other: value for other, value in given.items() if other != name})


def test_the_way_out_is_the_way_in() -> None:
    block = FrameGDN(dim=C, heads=H)
    randomize(block)
    exported = published_state_dict(block)
    assert exported.keys() == published().keys()
    assert {name: value.shape for name, value in exported.items()} == {
        name: value.shape for name, value in published().items()
    }
    assert not exported["recall_gate"].any()
    other = ChunkCausalGDN(dim=C, heads=H)
    load_published(other, exported)
    assert all(torch.equal(p, q) for p, q in zip(block.parameters(), other.parameters(), strict=True))


def test_models_of_several_blocks_and_prefixes() -> None:
    model = nn.ModuleDict({"mixer": FrameGDN(dim=C, heads=H), "head": nn.Linear(C, C)})
    exported = {f"model.{name}": value for name, value in published_state_dict(model).items()}
    assert "model.mixer.recall_gate" in exported
    assert "model.head.recall_gate" not in exported
    other = nn.ModuleDict({"mixer": FrameGDN(dim=C, heads=H), "head": nn.Linear(C, C)})
    load_published(other, {**exported, "optimizer.step": torch.zeros(1)}, prefix="model.")
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"A_log": None}, "missing A_log"),
        ({"a_log": torch.zeros(H)}, "left over a_log"),
        ({"dt_bias": torch.zeros(H + 1)}, r"dt_bias must have shape \[2\], got \[3\]"),
        ({"q_norm.weight": None, "k_norm.weight": None}, "missing k_norm.weight, q_norm.weight"),
        ({f"more.{i}": torch.zeros(1) for i in range(20)}, ", ".join(sorted(f"more.{i}" for i in range(20))) + "$"),
    ],
)
def test_a_wrong_checkpoint_names_its_keys_and_changes_nothing(change: dict[str, Tensor | None], message: str) -> None:
    block = FrameGDN(dim=C, heads=H)
    before = {name: value.clone() for name, value in block.state_dict().items()}
    given = {name: value for name, value in {**published(), **change}.items() if value is not None}
    with pytest.raises(ValueError, match=f"the checkpoint does not fit FrameGDN: .*{message}"):
        load_published(block, given)
    assert all(torch.equal(value, before[name]) for name, value in block.state_dict().items())


def test_a_checkpoint_without_norms_loads_without_qk_norm_only() -> None:
    """A norm that nobody trained would be a silent change of the model."""
    given = published(qk_norm=False)
    load_published(FrameGDN(dim=C, heads=H, qk_norm=False), given)
    with pytest.raises(ValueError, match=r"missing k_norm.weight, q_norm.weight"):
        load_published(FrameGDN(dim=C, heads=H), given)


def test_convolutions_with_a_bias_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="convolutions with a bias are not supported, got conv_k.bias$"):
        load_published(FrameGDN(dim=C, heads=H), {**published(), "conv_k.bias": torch.zeros(C)})
    seeing = CameraFrameGDN(dim=16, heads=2)
    given = {**published_state_dict(seeing), "conv_k_cam.bias": torch.zeros(16), "conv_k.bias": torch.zeros(16)}
    with pytest.raises(NotImplementedError, match="got model.conv_k.bias, model.conv_k_cam.bias$"):
        load_published(nn.ModuleDict({"model": seeing}), {f"model.{name}": value for name, value in given.items()})


class Patches(nn.Module):
    """A model's own convolution with a bias, and an entry of its own that is called as the unused one of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_in = nn.Conv1d(C, C, 1)
        self.recall_gate = nn.Parameter(torch.rand(1))
        self.mixer = FrameGDN(dim=C, heads=H)


def test_what_lies_outside_the_blocks_is_the_models_own() -> None:
    model, other = Patches(), Patches()
    load_published(other, published_state_dict(model))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def test_blocks_in_checkpoint_wrappers_and_under_two_names() -> None:
    """The wrapper is in no key, and the published code has an entry for each of the names."""
    model = nn.ModuleDict({"first": checkpoint_wrapper(FrameGDN(dim=C, heads=H)), "head": nn.Linear(C, C)})
    model["again"] = model["first"]
    plain = nn.ModuleDict({name: FrameGDN(dim=C, heads=H) for name in ("first", "again")} | {"head": nn.Linear(C, C)})
    exported = published_state_dict(model)
    assert exported.keys() == published_state_dict(plain).keys()
    for target in (plain, copy.deepcopy(model)):
        load_published(target, exported)
        assert all(torch.equal(value, exported[name]) for name, value in target.state_dict().items())
    assert published_state_dict(model["first"]).keys() == published().keys()
    with pytest.raises(NotImplementedError, match="got again.conv_k.bias$"):
        load_published(model, {**exported, "again.conv_k.bias": torch.zeros(C)})


def test_the_meta_device_is_refused_before_anything_is_loaded() -> None:
    block = FrameGDN(dim=C, heads=H, device="meta")
    with pytest.raises(ValueError, match=r"^FrameGDN must not be on the meta device, got A_log, .*; call module"):
        load_published(block, published())
    given = published()
    load_published(block.to_empty(device="cpu"), given)
    before = {name: value.clone() for name, value in block.state_dict().items()}
    assert all(torch.equal(value, given[name]) for name, value in before.items())
    changed = {**published(), "proj.bias": torch.zeros(C, device="meta")}
    with pytest.raises(ValueError, match=r"^the checkpoint must not be on the meta device, got proj.bias there; load"):
        load_published(block, changed)
    with pytest.raises(TypeError, match="^proj.bias must be a torch.Tensor, got list$"):
        load_published(block, {**published(), "proj.bias": [0.0] * C})
    assert all(torch.equal(value, before[name]) for name, value in block.state_dict().items())


# ---- caches


def cache() -> list[Tensor | None]:
    return [
        torch.randn(2, H, D, D),
        torch.randn(2, H, D, 1),
        None,
        None,
        torch.randn(2 * 5, K - 1, C),
        None,
        torch.ones(1),
    ]


def test_published_states_convert_both_ways() -> None:
    """The main state is value-first there, the camera's is not; neither need be symmetric."""
    given = cache()
    state = state_from_published(given, frames=7)
    for key in range(D):
        for value in range(D):
            assert torch.equal(state.kv[:, :, key, value], given[0][:, :, value, key])
    assert torch.equal(state.z, given[1][..., 0])
    for sample in range(2):
        for position in range(5):
            assert torch.equal(state.conv[1][sample, :, position], given[4][sample * 5 + position])
    assert state.conv[0] is state.conv[2] is state.camera is None
    assert state.frames == 7
    for slot, back in zip(given, state_to_published(state), strict=False):
        assert (slot is None and back is None) or torch.equal(slot, back)
    given[2], given[4] = torch.randn(2, H, D, D), None
    state = state_from_published(given, frames=0)
    assert torch.equal(state.camera.kv, given[2])
    assert torch.equal(state_to_published(state)[2], given[2])


@pytest.mark.parametrize("seen", [False, True], ids=["main", "camera"])
def test_a_converted_state_continues_the_stream(seen: bool) -> None:
    """With a camera too, whose state is key-first there as here; published caches have no tail of its convolution."""
    block = CameraFrameGDN(dim=16, heads=2, conv_size=0) if seen else FrameGDN(dim=C, heads=H)
    randomize(block)
    x, camera = torch.randn(2, 4 * 5, block.config.dim), poses(2, 4)
    first, last = ((camera[:, :3],), (camera[:, 3:],)) if seen else ((), ())
    _, state = block(x[:, :15], (3, 5, 1), *first, state=block.init_state(2, (0, 5, 1)))
    cache = state_to_published(state)
    again = state_from_published(cache, frames=3)
    expected, _ = block(x[:, 15:], (1, 5, 1), *last, state=state)
    found, _ = block(x[:, 15:], (1, 5, 1), *last, state=again)
    assert torch.equal(found, expected)
    if seen:
        cache[2] = cache[2].mT
        wrong, _ = block(x[:, 15:], (1, 5, 1), *last, state=state_from_published(cache, frames=3))
        assert error(wrong, expected) > 1e-4


@pytest.mark.parametrize(
    "slot, value, message",
    [
        (0, None, "cache must hold the main state in slots 0 and 1"),
        (0, torch.zeros(2, H, D, D + 1), r"slot 0 must have shape \[B, H, D, D\]"),
        (1, torch.zeros(2, H, D), r"slot 1 must have shape \[B, H, D, 1\]"),
        (2, torch.zeros(1, H, D, D), r"slot 2 must have shape \[B, H, D, D\]"),
        (4, torch.zeros(5, K - 1, C), "slot 4 must have a multiple of B = 2 rows, got 5"),
        (4, torch.zeros(10, K - 1, C + 1), r"slot 4 must have shape \[B\*S, K-1, C = H\*D\] = \[10, 3, 12\]"),
        (0, torch.zeros(2, H, D, D).int(), "slot 0 must have dtype"),
        (1, torch.zeros(2, H, D, 1).double(), "slot 1 must have dtype float16, bfloat16, float32, got float64"),
        (2, torch.zeros(2, H, D, D).bool(), "slot 2 must have dtype"),
        (4, torch.zeros(10, K - 1, C).long(), "slot 4 must have dtype"),
        (1, torch.zeros(2, H, D, 1, device="meta"), r"slot 1 must be on the device of slot 0 \(cpu\), got meta"),
        (4, torch.zeros(10, K - 1, C, device="meta"), r"slot 4 must be on the device of slot 0 \(cpu\), got meta"),
    ],
)
def test_a_wrong_cache_is_refused(slot: int, value: Tensor | None, message: str) -> None:
    given = cache()
    given[slot] = value
    with pytest.raises(ValueError, match=message):
        state_from_published(given, frames=0)


@pytest.mark.parametrize(
    "frames, kind, message",
    [
        (-1, ValueError, "frames must be >= 0, got -1"),
        (2.0, TypeError, "frames must be an int, got float"),
        (True, TypeError, "frames must be an int, got bool"),
    ],
)
def test_a_wrong_count_of_frames_is_refused(frames: object, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=f"^{message}$"):
        state_from_published(cache(), frames=frames)


def test_a_slot_that_is_no_tensor_and_a_state_that_is_none_are_refused() -> None:
    given = cache()
    given[1] = [0.0]
    with pytest.raises(TypeError, match="^slot 1 must be a torch.Tensor, got list$"):
        state_from_published(given, frames=0)
    with pytest.raises(TypeError, match="^state must be a GDNState, got tuple$"):
        state_to_published((1, 2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_converted_matrices_are_wide_and_tails_keep_their_dtype(dtype: torch.dtype) -> None:
    given = [slot if slot is None else slot.to(dtype) for slot in cache()]
    given[2] = torch.randn(2, H, D, D).to(dtype)
    state = state_from_published(given, frames=0)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert (state.kv.dtype, state.z.dtype, state.camera.kv.dtype, state.conv[1].dtype) == (wide, wide, wide, dtype)
    assert torch.equal(state.kv, given[0].mT.to(wide))


def test_a_batch_of_none_converts_without_a_tail() -> None:
    given = [torch.zeros(0, H, D, D), torch.zeros(0, H, D, 1), None, None, None]
    state = state_from_published(given, frames=3)
    assert (state.kv.shape, state.z.shape) == ((0, H, D, D), (0, H, D))
    given[4] = torch.zeros(0, K - 1, C)
    with pytest.raises(ValueError, match="^slot 4 must be None for B = 0: it does not say how many tok"):
        state_from_published(given, frames=3)


def test_conversions_share_no_memory() -> None:
    """Published code writes into its caches; heads of one channel, one tap and one token transpose without a copy."""
    for batch, heads, width, taps, tokens in ((2, H, D, K - 1, 5), (1, 2, 1, 1, 1)):
        square = torch.ones(batch, heads, width, width)
        given = [square, torch.ones(batch, heads, width, 1), square.clone(), None]
        given.append(torch.ones(batch * tokens, taps, heads * width))
        for transposed in (given, [square.mT.contiguous().mT, *given[1:]]):
            state = state_from_published(transposed, frames=0)
            back = state_to_published(state)
            for slot in (*transposed, *back):
                if slot is not None:
                    slot.zero_()
            assert all(x.all() for x in (state.kv, state.z, state.camera.kv, state.conv[1]))
            for slot in transposed:
                if slot is not None:
                    slot.fill_(1)


def test_a_short_cache_and_homeless_tails_are_refused() -> None:
    with pytest.raises(ValueError, match="cache must have at least 5 slots, got 2"):
        state_from_published(cache()[:2], frames=0)
    state = state_from_published(cache(), frames=0)
    for other in (
        state._replace(conv=(state.conv[1], None, None)),
        state._replace(camera=CameraState(state.kv, (None, state.conv[1], None))),
    ):
        with pytest.raises(NotImplementedError, match="published caches hold the tail"):
            state_to_published(other)
