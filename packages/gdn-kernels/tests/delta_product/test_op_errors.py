"""Every refusal of the gated delta product: its class, and a message that names argument, rule and what came."""

import re

import pytest
import torch
from torch import Tensor

from gdn_kernels import gated_delta_product

B, T, R, H, HV, K, V = 2, 5, 3, 2, 4, 6, 7


def zeros(*shape: int, **options: object) -> Tensor:
    """Return a tensor that only has a shape, dtype or device worth looking at."""
    return torch.zeros(shape, **options)


def arguments() -> dict[str, object]:
    """Return what the operation accepts."""
    return {
        "q": zeros(B, T, H, K),
        "k": zeros(B, T * R, H, K),
        "v": zeros(B, T * R, HV, V),
        "beta": zeros(B, T * R, HV),
        "g": zeros(B, T, HV),
        "num_householder": R,
        "initial_state": zeros(B, HV, K, V),
    }


META = {"device": "meta"}
T_, V_ = TypeError, ValueError
FLOATS = "float16, bfloat16, float32, float64"
CASES = [
    ("q", [1.0], T_, "q must be a torch.Tensor, got list"),
    ("q", zeros(B, T, K), V_, "q must have shape [B, T, H, K], got [2, 5, 6]"),
    ("q", zeros(B, T, H, K).long(), V_, f"q must have dtype {FLOATS}, got int64"),
    ("q", zeros(B, T, 0, K), V_, "q must have shape [B, T, H, K] with H >= 1 and 1 <= K <= 256, got [2, 5, 0, 6]"),
    ("q", zeros(B, T, H, 257), V_, "q must have shape [B, T, H, K] with H >= 1 and 1 <= K <= 256, got [2, 5, 2, 257]"),
    ("num_householder", 2.0, T_, "num_householder must be an int, got float"),
    ("num_householder", True, T_, "num_householder must be an int, got bool"),
    ("num_householder", 0, V_, "num_householder must be >= 1, got 0"),
    ("num_householder", 2, V_, "k must have shape [B, T*R, H, K] = [2, 10, 2, 6], got [2, 15, 2, 6]"),
    ("k", None, T_, "k must be a torch.Tensor, got NoneType"),
    ("k", zeros(B, T * R, HV, K), V_, "k must have shape [B, T*R, H, K] = [2, 15, 2, 6], got [2, 15, 4, 6]"),
    ("k", zeros(B, T * R, H, K).half(), V_, "k must have dtype float32, got float16"),
    ("k", zeros(B, T * R, H, K, **META), V_, "k must be on the device of q (cpu), got meta"),
    ("v", 1, T_, "v must be a torch.Tensor, got int"),
    ("v", zeros(B, T * R, V), V_, "v must have shape [B, T*R, HV, V], got [2, 15, 7]"),
    ("v", zeros(B, T, HV, V), V_, "v must have shape [B, T*R, HV, V] = [2, 15, 4, 7], got [2, 5, 4, 7]"),
    ("v", zeros(B, T * R, 3, V), V_, "with HV a multiple of H = 2 and V >= 1, got [2, 15, 3, 7]"),
    ("v", zeros(B, T * R, 0, V), V_, "with HV a multiple of H = 2 and V >= 1, got [2, 15, 0, 7]"),
    ("v", zeros(B, T * R, HV, 0), V_, "with HV a multiple of H = 2 and V >= 1, got [2, 15, 4, 0]"),
    ("v", zeros(B, T * R, HV, V).double(), V_, "v must have dtype float32, got float64"),
    ("v", zeros(B, T * R, HV, V, **META), V_, "v must be on the device of q (cpu), got meta"),
    ("beta", None, T_, "beta must be a torch.Tensor, got NoneType"),
    ("beta", zeros(B, T, HV), V_, "beta must have shape [B, T*R, HV] = [2, 15, 4], got [2, 5, 4]"),
    ("beta", zeros(B, T * R, HV).int(), V_, f"beta must have dtype {FLOATS}, got int32"),
    ("beta", zeros(B, T * R, HV, **META), V_, "beta must be on the device of q (cpu), got meta"),
    ("g", 0.5, T_, "g must be a torch.Tensor, got float"),
    ("g", zeros(B, T * R, HV), V_, "g must have shape [B, T, HV] = [2, 5, 4], got [2, 15, 4]"),
    ("g", zeros(B, T, HV).bool(), V_, f"g must have dtype {FLOATS}, got bool"),
    ("g", zeros(B, T, HV, **META), V_, "g must be on the device of q (cpu), got meta"),
    ("scale", "1", T_, "scale must be a number, got str '1'"),
    ("scale", 0, V_, "scale must be a finite number > 0, got 0"),
    ("initial_state", 0.0, T_, "initial_state must be a torch.Tensor, got float"),
    ("initial_state", zeros(B, H, K, V), V_, "initial_state must have shape [N, HV, K, V] = [2, 4, 6, 7]"),
    ("initial_state", zeros(B, HV, K, V).half(), V_, "initial_state must have dtype float32, got float16"),
    ("initial_state", zeros(B, HV, K, V, **META), V_, "initial_state must be on the device of the inputs (cpu)"),
    ("cu_seqlens", (0, T), V_, "cu_seqlens needs B = 1, got B = 2"),
    ("chunk_size", 64.0, T_, "chunk_size must be an int, got float"),
    ("chunk_size", 0, V_, "chunk_size must be >= 1, got 0"),
    ("impl", 1, T_, "impl must be a str, got int 1"),
    ("impl", "cuda", V_, "impl must be one of 'auto', 'torch', 'triton', got 'cuda'"),
    (
        "impl",
        "triton",
        NotImplementedError,
        'impl="triton" does not run gated_delta_product; use impl="torch", or on a GPU the FLA backend of gdn_cp',
    ),
]


@pytest.mark.parametrize("name, value, kind, message", CASES)
def test_refusals_say_what_is_wrong(name: str, value: object, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        gated_delta_product(**{**arguments(), name: value})


@pytest.mark.parametrize(
    "cu_seqlens, kind, message",
    [
        (5, T_, "cu_seqlens must be a torch.Tensor, a tuple of ints or None, got int"),
        ((0, 5.0), T_, "cu_seqlens must be a torch.Tensor, a tuple of ints or None, got tuple"),
        ((False, 5), T_, "cu_seqlens must be a torch.Tensor, a tuple of ints or None, got tuple"),
        (torch.tensor([0.0, 5.0]), V_, "cu_seqlens must have dtype int32, int64, got float32"),
        (torch.tensor([[0, 5]]), V_, "cu_seqlens must have shape [N+1], got [1, 2]"),
        ((), V_, "cu_seqlens must rise from 0 to T = 5, got []"),
        ((1, 5), V_, "cu_seqlens must rise from 0 to T = 5, got [1, 5]"),
        (torch.tensor([0, 4]), V_, "cu_seqlens must rise from 0 to T = 5, got [0, 4]"),
        ((0, 4, 3, 5), V_, "cu_seqlens must rise from 0 to T = 5, got [0, 4, 3, 5]"),
    ],
)
def test_packed_sequences_must_cover_the_row(cu_seqlens: object, kind: type[Exception], message: str) -> None:
    one = {name: value[:1] if isinstance(value, Tensor) else value for name, value in arguments().items()}
    with pytest.raises(kind, match=re.escape(message)):
        gated_delta_product(**{**one, "initial_state": None, "cu_seqlens": cu_seqlens})
    packed = {**one, "cu_seqlens": (0, 2, 5)}
    with pytest.raises(ValueError, match=re.escape("initial_state must have shape [N, HV, K, V] = [2, 4, 6, 7]")):
        gated_delta_product(**packed)
