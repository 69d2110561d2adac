"""Every refusal: its class, and a message that names the argument, the rule and what came."""

import re

import pytest
import torch
from torch import Tensor

from gdn_kernels import FrameState, RotaryTables, frame_gdn, frame_gdn_numerator, frame_gdn_raw

B, H, F, S, D = 2, 7, 4, 5, 6  # different from one another and from the 3 of qkv
N = F * S


def arguments() -> dict[str, object]:
    """Return what `frame_gdn` and `frame_gdn_raw` accept."""
    return {
        "qkv": torch.randn(B, N, 3, H, D),
        "beta": torch.rand(B, H, F, S),
        "decay": torch.rand(B, H, F),
        "rope": RotaryTables(torch.ones(N, D // 2), torch.zeros(N, D // 2)),
        "q_norm_weight": torch.ones(H * D),
        "k_norm_weight": torch.ones(H * D),
        "frame_valid": torch.ones(B, F, dtype=torch.bool),
        "initial_state": FrameState(torch.zeros(B, H, D, D), torch.zeros(B, H, D)),
    }


def numerator_arguments() -> dict[str, object]:
    """Return what `frame_gdn_numerator` accepts."""
    q, k, v = torch.randn(3, B, N, H, D)
    given = {name: value for name, value in arguments().items() if name in ("beta", "decay", "frame_valid")}
    return {"q": q, "k": k, "v": v, **given, "initial_state": torch.zeros(B, H, D, D)}


def zeros(*shape: int, **options: object) -> Tensor:
    """Return a tensor that only has a shape, dtype or device worth looking at."""
    return torch.zeros(shape, **options)


STATE = (zeros(B, H, D, D), zeros(B, H, D))
META = {"device": "meta"}
T, V = TypeError, ValueError
BOTH = [  # refused by all three operations
    ("beta", [1.0], T, "beta must be a torch.Tensor, got list"),
    ("beta", zeros(B, H, N), V, "beta must have shape [B, H, F, S], got [2, 7, 20]"),
    ("beta", zeros(B, F, H, S), V, "beta must have shape [B, H, F, S] = [2, 7, 7, 5], got [2, 4, 7, 5]"),
    ("beta", zeros(B, H, F, S + 1), V, "must have N = F*S = 4*6 = 24 tokens, got 20"),
    ("beta", zeros(B, H, F, S).long(), V, "beta must have dtype float16, bfloat16, float32, float64, got int64"),
    ("beta", zeros(B, H, F, S, **META), V, "beta must be on the device of {owner} (cpu), got meta"),
    ("decay", None, T, "decay must be a torch.Tensor, got NoneType"),
    ("decay", zeros(B, H, F, 1), V, "decay must have shape [B, H, F] = [2, 7, 4], got [2, 7, 4, 1]"),
    ("decay", zeros(B, H, F).bool(), V, "decay must have dtype"),
    ("decay", zeros(B, H, F, **META), V, "decay must be on the device of {owner} (cpu), got meta"),
    ("frame_valid", [True], T, "frame_valid must be a torch.Tensor, got list"),
    ("frame_valid", zeros(B, N), V, "frame_valid must have shape [B, F] = [2, 4], got [2, 20]"),
    ("frame_valid", zeros(B, F).int(), V, "frame_valid must have dtype bool, float16"),
    ("frame_valid", zeros(B, F, **META), V, "frame_valid must be on the device of {owner} (cpu), got meta"),
    ("frame_valid", zeros(B, F, requires_grad=True), V, "frame_valid must not require a gradient"),
    ("direction", "backward", V, "direction must be one of 'forward', 'reverse', 'bidirectional', got 'backward'"),
    ("direction", None, T, "direction must be a str, got NoneType"),
    ("precision", "fp32", V, "precision must be one of 'bf16', 'tf32', 'ieee', got 'fp32'"),
    ("precision", 3, V, "precision must be one of 'bf16', 'tf32', 'ieee' or 0, 1, 2, got 3"),
    ("impl", "cuda", V, "impl must be one of 'auto', 'torch', 'triton', got 'cuda'"),
    ("impl", "triton", NotImplementedError, 'impl="triton" needs tensors on a GPU, got cpu; use impl="torch"'),
    ("chunk_starts", torch.tensor([0, 2]), T, "chunk_starts must be a tuple of ints or None, got Tensor"),
    ("chunk_starts", (0, 2, 2), V, "chunk_starts must be strictly increasing, got (0, 2, 2)"),
    ("chunk_starts", (0, 4), V, "chunk_starts must lie in 0 ... F - 1 = 3, got (0, 4)"),
]  # fmt: skip
FEATURES = [  # refused by the two that make features
    ("qkv", None, T, "qkv must be a torch.Tensor, got NoneType"),
    ("qkv", zeros(B, N, 3, H * D), V, "qkv must have shape [B, N, 3, H, D], got [2, 20, 3, 42]"),
    ("qkv", zeros(B, N, H, 3, D), V, "must have shape [B, N, 3, H, D] with H, D >= 1, got [2, 20, 7, 3, 6]"),
    ("qkv", zeros(B, N, 2, H, D), V, "must have shape [B, N, 3, H, D] with H, D >= 1, got [2, 20, 2, 7, 6]"),
    ("qkv", zeros(B, N, 3, 0, D), V, "with H, D >= 1, got [2, 20, 3, 0, 6]"),
    ("qkv", zeros(B, N, 3, H, 0), V, "with H, D >= 1, got [2, 20, 3, 7, 0]"),
    ("qkv", zeros(B, N, 3, H, D).to(torch.cfloat), V, "qkv must have dtype float16, bfloat16"),
    ("rope", zeros(N, D), T, "rope must be RotaryTables(cos, sin), got Tensor"),
    ("rope", RotaryTables(None, None), T, "rope.cos must be a torch.Tensor, got NoneType"),
    ("rope", RotaryTables(zeros(N, D), zeros(N, D)), V, "rope.cos must have shape [N, D/2] = [20, 3], got [20, 6]"),
    ("rope", RotaryTables(zeros(N, 3), zeros(1, 3)), V, "rope.sin must have shape [N, D/2] = [20, 3], got [1, 3]"),
    ("rope", RotaryTables(zeros(N, 3).half(), zeros(N, 3)), V, "rope.cos must have dtype float32, float64"),
    ("rope", RotaryTables(zeros(N, 3, **META), zeros(N, 3)), V, "rope.cos must be on the device of qkv"),
    ("rope", RotaryTables(zeros(N, 3), zeros(N, 3, requires_grad=True)), V, "rope.sin must not require a gradient"),
    ("q_norm_weight", 1.0, T, "q_norm_weight must be a torch.Tensor, got float"),
    ("q_norm_weight", zeros(D), V, "q_norm_weight must have shape [H*D] = [42], got [6]"),
    ("k_norm_weight", zeros(D, H), V, "k_norm_weight must have shape [H*D] = [42], got [6, 7]"),
    ("k_norm_weight", zeros(H * D).long(), V, "k_norm_weight must have dtype"),
    ("k_norm_weight", zeros(H * D, **META), V, "k_norm_weight must be on the device of qkv (cpu), got meta"),
    ("k_scale", 0.0, V, "k_scale must be a finite number > 0, got 0.0"),
    ("k_scale", torch.ones(()), T, "k_scale must be a number, got Tensor"),
    ("norm_eps", -1e-5, V, "norm_eps must be a finite number >= 0, got -1e-05"),
    ("initial_state", STATE, T, "initial_state must be a FrameState(kv, z), got tuple"),
    ("initial_state", STATE[0], T, "initial_state must be a FrameState(kv, z), got Tensor"),
    ("initial_state", FrameState(STATE[0], None), T, "initial_state.z must be a torch.Tensor, got NoneType"),
    ("initial_state", FrameState(STATE[0][:1], STATE[1]), V, "initial_state.kv must have shape [B, H, D, D] ="),
    ("initial_state", FrameState(STATE[0], STATE[1][..., None]), V, "initial_state.z must have shape [B, H, D] ="),
    ("initial_state", FrameState(STATE[0].half(), STATE[1]), V, "initial_state.kv must have dtype float32, got"),
    ("initial_state", FrameState(STATE[0], STATE[1].to("meta")), V, "initial_state.z must be on the device of"),
]  # fmt: skip
PREPARED = [  # refused by the numerator form
    ("q", zeros(B, N, H * D), V, "q must have shape [B, N, H, D], got [2, 20, 42]"),
    ("q", zeros(B, N, H, D).int(), V, "q must have dtype float16, bfloat16, float32, float64, got int32"),
    ("q", zeros(B, N, 0, D), V, "q must have shape [B, N, H, D] with H, D >= 1, got [2, 20, 0, 6]"),
    ("k", zeros(B, N, H, D + 2), V, "k must have shape [B, N, H, D] = [2, 20, 7, 6], got [2, 20, 7, 8]"),
    ("v", zeros(B, N, H, D).half(), V, "v must have dtype float32, got float16"),
    ("v", zeros(B, N, H, D, **META), V, "v must be on the device of q (cpu), got meta"),
    ("initial_state", FrameState(*STATE), T, "initial_state must be a torch.Tensor, got FrameState"),
    ("initial_state", STATE[1], V, "initial_state must have shape [B, H, D, D] = [2, 7, 6, 6], got [2, 7, 6]"),
    ("initial_state", STATE[0].double(), V, "initial_state must have dtype float32, got float64"),
    ("initial_state", STATE[0].to("meta"), V, "initial_state must be on the device of the inputs (cpu), got"),
]  # fmt: skip


def identity(row: object) -> str | None:
    """Name a row after its argument alone."""
    return row if isinstance(row, str) and row.isidentifier() else ""


@pytest.mark.parametrize("op", [frame_gdn, frame_gdn_raw])
@pytest.mark.parametrize("name, value, kind, message", BOTH + FEATURES, ids=identity)
def test_frame_gdn_refuses(op: object, name: str, value: object, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=re.escape(message.format(owner="qkv"))):
        op(**{**arguments(), name: value})


@pytest.mark.parametrize("name, value, kind, message", BOTH + PREPARED, ids=identity)
def test_frame_gdn_numerator_refuses(name: str, value: object, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=re.escape(message.format(owner="q"))):
        frame_gdn_numerator(**{**numerator_arguments(), name: value})


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_frame_gdn_refuses_an_eps_that_cannot_divide(value: float) -> None:
    with pytest.raises(ValueError, match="eps must be a finite number > 0, got"):
        frame_gdn(**arguments(), eps=value)


@pytest.mark.parametrize("op", [frame_gdn, frame_gdn_raw, frame_gdn_numerator])
def test_reverse_takes_and_gives_no_state(op: object) -> None:
    """FC-A06: a state given to a path that cannot use it raises."""
    given = numerator_arguments() if op is frame_gdn_numerator else arguments()
    with pytest.raises(ValueError, match=r'^initial_state needs the forward scan, which direction="reverse" does not'):
        op(**given, direction="reverse")
    given["initial_state"] = None
    with pytest.raises(ValueError, match="output_final_state needs the forward scan"):
        op(**given, direction="reverse", output_final_state=True)


def test_odd_widths_take_no_rotation() -> None:
    """FC-S13: the message says what must be even."""
    given = {"qkv": zeros(B, N, 3, H, 5), "beta": zeros(B, H, F, S), "decay": zeros(B, H, F)}
    with pytest.raises(ValueError, match="rope needs an even head width, got D = 5"):
        frame_gdn(**given, rope=RotaryTables(zeros(N, 2), zeros(N, 2)))


@pytest.mark.parametrize("op", [frame_gdn, frame_gdn_raw, frame_gdn_numerator])
def test_what_the_tables_start_from_is_accepted(op: object) -> None:
    """So each refusal above is due to the one argument that differs."""
    op(**(numerator_arguments() if op is frame_gdn_numerator else arguments()))


def test_chunk_starts_are_checked_in_every_direction() -> None:
    given = {**arguments(), "initial_state": None}
    for direction in ("forward", "reverse", "bidirectional"):
        with pytest.raises(ValueError, match="chunk_starts must lie in"):
            frame_gdn(**given, direction=direction, chunk_starts=(F,))


def test_all_axes_permuted_raise() -> None:
    """FC-S15: with pairwise different sizes no other order of the axes of qkv, beta or decay passes."""
    given = arguments()
    for name in ("qkv", "beta", "decay"):
        for a in range(given[name].ndim):
            for b in range(a):
                with pytest.raises(ValueError, match="must have"):
                    frame_gdn(**{**given, name: given[name].transpose(a, b)})
