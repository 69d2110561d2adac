"""Published adapters against loops over their documented entries, with every gradient and every error."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gdn_cp import CpFusedTransitionBundle, cp_scan_states_to_phase_c_states, phase_a_to_cp_scan_transitions

BH, T, D, BLOCK_D = 3, 2, 5, 8
NAMES = ("W_kv", "U_kv", "W_z", "U_z")


def operators(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """I_P_kv, A_kv, I_P_z, B_z and decay; nothing is symmetric, and the padding holds NaN."""
    found = []
    for shape in ((BH, T, BLOCK_D, BLOCK_D),) * 3 + ((BH, T, BLOCK_D),):
        x = torch.full(shape, float("nan"), dtype=dtype)
        x[(slice(None), slice(None), *(slice(D),) * (len(shape) - 2))] = torch.randn(
            *shape[:2], *(D,) * (len(shape) - 2), dtype=dtype
        )
        found.append(x)
    return [*found, torch.rand(BH, T, dtype=dtype)]


def expected_bundle(I_P_kv: Tensor, A_kv: Tensor, I_P_z: Tensor, B_z: Tensor, decay: Tensor) -> dict[str, Tensor]:
    """Entry by entry, as documented; ``decay [BH, T]``."""
    shapes = dict.fromkeys(NAMES, (BH, T, D, D)) | {"U_z": (BH, T, D)}
    found = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
    for bh in range(BH):
        for t in range(T):
            for i in range(D):
                found["U_z"][bh, t, i] = B_z[bh, t, i]
                for j in range(D):
                    found["W_kv"][bh, t, i, j] = decay[bh, t] * I_P_kv[bh, t, j, i]
                    found["U_kv"][bh, t, i, j] = A_kv[bh, t, j, i]
                    found["W_z"][bh, t, i, j] = decay[bh, t] * I_P_z[bh, t, i, j]
    return found


def test_transitions_are_the_documented_entries_and_padding_is_not_read():
    given = operators()
    bundle = phase_a_to_cp_scan_transitions(*given, head_dim=D)
    assert isinstance(bundle, CpFusedTransitionBundle)
    assert (bundle.block_d, bundle.head_dim) == (BLOCK_D, D)
    for name, x in expected_bundle(*given).items():
        found = getattr(bundle, name)
        assert torch.equal(found, x)
        assert found.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_transitions_are_made_in_fp32(dtype):
    given = operators(dtype)
    bundle = phase_a_to_cp_scan_transitions(*given, head_dim=D)
    wide = phase_a_to_cp_scan_transitions(*(x.float() for x in given), head_dim=D)
    for name in NAMES:
        assert getattr(bundle, name).dtype == torch.float32
        assert torch.equal(getattr(bundle, name), getattr(wide, name))


@pytest.mark.parametrize("shape", [(BH * T,), (1, BH, T), (BH, T, 1, 1), (BH, 1), (T,), ()], ids=str)
def test_decay_reshapes_or_broadcasts(shape):
    given = operators()
    decay = torch.rand(shape, dtype=torch.float64)
    full = decay.reshape(BH, T) if decay.numel() == BH * T else decay.expand(BH, T)
    bundle = phase_a_to_cp_scan_transitions(*given[:4], decay, head_dim=D)
    assert torch.equal(bundle.W_z, expected_bundle(*given[:4], full)["W_z"])


def test_skip_z_ignores_its_inputs():
    given = operators()
    placeholder = torch.empty(1)
    bundle = phase_a_to_cp_scan_transitions(*given[:2], placeholder, placeholder, given[4], head_dim=D, skip_z=True)
    assert torch.equal(bundle.W_kv, expected_bundle(*given)["W_kv"])
    assert bundle.W_z.numel() == bundle.U_z.numel() == 0
    assert bundle.W_z.dtype == bundle.U_z.dtype == torch.float64


def test_gradients_are_those_of_the_entries():
    """Every input, from strided incoming gradients; padding gets exact zeros."""
    given = [x.nan_to_num().requires_grad_() for x in operators()]
    bundle = phase_a_to_cp_scan_transitions(*given, head_dim=D)
    wanted = expected_bundle(*given)
    ups = {name: torch.randn(x.shape[::-1], dtype=torch.float64).permute(*range(x.ndim)[::-1])
           for name, x in wanted.items()}  # fmt: skip
    found = torch.autograd.grad([getattr(bundle, name) for name in NAMES], given, [ups[name] for name in NAMES])
    expected = torch.autograd.grad([wanted[name] for name in NAMES], given, [ups[name] for name in NAMES])
    for x, y in zip(found, expected, strict=True):
        assert torch.allclose(x, y, rtol=1e-12, atol=1e-14)
    assert not found[0][..., D:, :].any()
    assert not found[0][..., D:].any()
    only_z = torch.autograd.grad(phase_a_to_cp_scan_transitions(*given, head_dim=D).U_z.sum(), given, allow_unused=True)
    assert only_z[0] is None
    assert torch.equal(only_z[3][..., :D], torch.ones(BH, T, D, dtype=torch.float64))


def test_states_are_transposed_and_padded():
    S_kv, S_z = torch.randn(BH, T, D, D), torch.randn(BH, T, D)
    kv, z = cp_scan_states_to_phase_c_states(S_kv, S_z, block_d=BLOCK_D)
    assert kv.shape == (BH, T, BLOCK_D, BLOCK_D)
    assert z.shape == (BH, T, BLOCK_D)
    for i in range(BLOCK_D):
        for j in range(BLOCK_D):
            inside = i < D and j < D
            assert torch.equal(kv[..., i, j], S_kv[..., j, i] if inside else torch.zeros(BH, T))
        assert torch.equal(z[..., i], S_z[..., i] if i < D else torch.zeros(BH, T))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_states_keep_dtype_and_give_gradients_back(dtype):
    S_kv = torch.randn(BH, T, D, D).to(dtype).requires_grad_()
    S_z = torch.randn(BH, T, D).to(dtype).requires_grad_()
    kv, z = cp_scan_states_to_phase_c_states(S_kv, S_z, block_d=BLOCK_D)
    assert kv.dtype == z.dtype == dtype
    up_kv, up_z = torch.randn(kv.shape).to(dtype), torch.randn(z.shape).to(dtype)
    dkv, dz = torch.autograd.grad((kv, z), (S_kv, S_z), (up_kv, up_z))
    assert torch.equal(dkv, up_kv[..., :D, :D].mT)
    assert torch.equal(dz, up_z[..., :D])
    same, _ = cp_scan_states_to_phase_c_states(S_kv, S_z, block_d=D)
    assert torch.equal(same, S_kv.mT)


def test_adapter_and_states_are_inverse():
    """A bundle's U through the scan of one frame from zero is A, padded."""
    given = [x.nan_to_num() for x in operators()]
    bundle = phase_a_to_cp_scan_transitions(*given, head_dim=D)
    kv, z = cp_scan_states_to_phase_c_states(bundle.U_kv, bundle.U_z, block_d=BLOCK_D)
    assert torch.equal(kv, given[1])
    assert torch.equal(z, given[3])


def test_errors():
    I_P, A, I_Pz, B_z, decay = operators()
    call = phase_a_to_cp_scan_transitions
    with pytest.raises(TypeError, match=r"I_P_kv must be a torch.Tensor, got NoneType"):
        call(None, A, I_Pz, B_z, decay, head_dim=D)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"I_P_kv must have shape \[B\*H, T_local, .*\], got \[2, 8, 8\]"):
        call(I_P[0], A, I_Pz, B_z, decay, head_dim=D)
    with pytest.raises(ValueError, match=r"I_P_kv must have shape .* = \[3, 2, 8, 8\], got \[3, 2, 7, 8\]"):
        call(I_P[..., 1:, :], A, I_Pz, B_z, decay, head_dim=D)
    for head_dim in (0, 9):
        with pytest.raises(ValueError, match=rf"head_dim must lie in 1 ... BLOCK_D = 8, got {head_dim}"):
            call(I_P, A, I_Pz, B_z, decay, head_dim=head_dim)
    with pytest.raises(ValueError, match=r"A_kv must have shape .* got \[3, 1, 8, 8\]"):
        call(I_P, A[:, :1], I_Pz, B_z, decay, head_dim=D)
    with pytest.raises(ValueError, match=r"I_P_z must have shape"):
        call(I_P, A, I_Pz[0], B_z, decay, head_dim=D)
    with pytest.raises(ValueError, match=r"B_z must have shape"):
        call(I_P, A, I_Pz, B_z[..., 0], decay, head_dim=D)
    with pytest.raises(ValueError, match=r"decay must reshape or broadcast to \[B\*H, T_local\] = \[3, 2\], got \[5\]"):
        call(I_P, A, I_Pz, B_z, torch.rand(5), head_dim=D)
    S_kv, S_z = torch.rand(BH, T, D, D), torch.rand(BH, T, D)
    states = cp_scan_states_to_phase_c_states
    with pytest.raises(ValueError, match=r"S_kv must have shape \[B\*H, T_local, D, D\], got \[2, 5, 5\]"):
        states(S_kv[0], S_z, block_d=8)
    with pytest.raises(ValueError, match=r"S_kv must have shape .* = \[3, 2, 5, 5\], got \[3, 2, 4, 5\]"):
        states(S_kv[..., 1:, :], S_z, block_d=8)
    with pytest.raises(ValueError, match="block_d must be >= D = 5, got 4"):
        states(S_kv, S_z, block_d=4)
    with pytest.raises(ValueError, match=r"S_z must have shape \[B\*H, T_local, D\] = \[3, 2, 5\], got \[3, 2, 4\]"):
        states(S_kv, S_z[..., 1:], block_d=8)
