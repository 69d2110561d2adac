"""Parameters of the blocks: names, shapes, initial values, dtypes, construction."""

import copy

import pytest
import torch
from comparison import assert_close, randomize
from torch import nn

from gdn_models import BidirectionalGDN, ChunkCausalGDN, FrameGDN, FrameGDNConfig

B, F, H, C, GRID = 2, 5, 3, 12, (5, 2, 1)


def test_parameters_have_the_published_names_shapes_and_initial_values() -> None:
    block = BidirectionalGDN(dim=12, heads=3, qkv_bias=True, conv_qv=True, conv_size=3)
    identity = torch.tensor([0.0, 0.0, 1.0]).expand(12, 1, 3)
    expected = {
        "qkv.weight": (36, 12), "qkv.bias": torch.zeros(36), "proj.weight": (12, 12), "proj.bias": torch.zeros(12),
        "q_norm.weight": torch.ones(12), "k_norm.weight": torch.ones(12),
        "beta_proj.weight": torch.zeros(3, 12), "beta_proj.bias": torch.full((3,), 5.0),
        "gate_proj.weight": torch.zeros(3, 12), "gate_proj.bias": torch.zeros(3),
        "A_log": torch.zeros(3), "dt_bias": torch.full((3,), -5.0),
        "output_gate.weight": torch.zeros(12, 12), "output_gate.bias": torch.full((12,), 1.278464542761074),
        "conv_q.weight": identity, "conv_k.weight": identity, "conv_v.weight": identity,
    }  # fmt: skip
    state = block.state_dict()
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, tuple):
            bound = (6 / sum(value)) ** 0.5  # Xavier uniform over [out, in]
            assert state[name].shape == value
            assert 0.9 * bound < state[name].abs().max() <= bound
        else:
            assert torch.equal(state[name], value), name
    assert float(nn.functional.silu(torch.tensor(1.278464542761074, dtype=torch.float64))) == pytest.approx(
        1, abs=1e-12
    )


def test_keys_of_absent_parts_are_absent() -> None:
    default = set(FrameGDN(dim=8, heads=2).state_dict())
    bare = FrameGDN(dim=8, heads=2, qk_norm=False, output_gate=False, conv_size=0).state_dict()
    assert default - set(bare) == {
        "q_norm.weight", "k_norm.weight", "output_gate.weight", "output_gate.bias", "conv_k.weight"
    }  # fmt: skip
    assert set(bare) <= default


def test_weights_move_between_the_classes() -> None:
    source = FrameGDN(dim=C, heads=H, conv_qv=True, qkv_bias=True).double()
    randomize(source)
    for cls in (BidirectionalGDN, ChunkCausalGDN):
        target = cls(source.config).double()
        target.load_state_dict(source.state_dict(), strict=True)
        assert all(torch.equal(p, source.state_dict()[name]) for name, p in target.state_dict().items())


def test_reset_parameters_is_idempotent_and_repairs_a_model_wide_initialisation() -> None:
    block = ChunkCausalGDN(dim=12, heads=3, qkv_bias=True, conv_qv=True)
    results = []
    for spoil in (lambda p: None, nn.init.normal_, nn.init.ones_):
        for parameter in block.parameters():
            spoil(parameter)
        torch.manual_seed(7)
        block.reset_parameters()
        results.append(copy.deepcopy(block.state_dict()))
    for other in results[1:]:
        assert all(torch.equal(value, other[name]) for name, value in results[0].items())


def test_at_initialisation_gates_hardly_forget_and_the_gate_and_the_convolution_are_neutral() -> None:
    block = BidirectionalGDN(dim=C, heads=H).double()
    plain = BidirectionalGDN(dim=C, heads=H, conv_size=0, output_gate=False).double()
    plain.load_state_dict({k: v for k, v in block.state_dict().items() if k in plain.state_dict()})
    x = torch.randn(B, F * 2, C, dtype=torch.float64)
    # the published bias is rounded to fp32 by the parameter: 1.278464542761074 within 2 ** -24 relative
    assert_close(block(x, GRID), plain(x, GRID), 2.0**-23)


def test_gate_parameters_stay_fp32_when_the_module_is_narrowed() -> None:
    """FC-N05: A_log and dt_bias are fp32 in a 16-bit module, values included; fp64 modules are fp64 throughout."""
    block = FrameGDN(dim=C, heads=H)
    randomize(block)
    before = block.A_log.detach().clone(), block.dt_bias.detach().clone()
    block.bfloat16().half().to(torch.bfloat16)
    assert {name for name, p in block.named_parameters() if p.dtype != torch.bfloat16} == {"A_log", "dt_bias"}
    assert torch.equal(block.A_log, before[0])
    assert torch.equal(block.dt_bias, before[1])
    assert {p.dtype for p in block.double().parameters()} == {torch.float64}
    assert {p.dtype for p in block.float().parameters()} == {torch.float32}
    assert block.no_weight_decay() == {"A_log", "dt_bias"} <= set(block.state_dict())
    direct = FrameGDN(dim=C, heads=H, dtype=torch.bfloat16)
    assert direct.A_log.dtype == direct.dt_bias.dtype == torch.float32
    assert direct.conv_k.weight.dtype == direct.q_norm.weight.dtype == torch.bfloat16
    assert FrameGDN(dim=C, heads=H, dtype=torch.float64).A_log.dtype == torch.float64


def test_block_is_made_on_meta_and_materialised() -> None:
    block = BidirectionalGDN(dim=C, heads=H, device="meta", dtype=torch.bfloat16)
    assert {p.device.type for p in block.parameters()} == {"meta"}
    block.to_empty(device="cpu")
    direct = BidirectionalGDN(dim=C, heads=H, dtype=torch.bfloat16)
    for made in (block, direct):
        torch.manual_seed(3)
        made.reset_parameters()
    for name, value in direct.state_dict().items():
        assert torch.equal(block.state_dict()[name], value)
        assert block.state_dict()[name].dtype == value.dtype


def test_config_or_fields_but_not_both() -> None:
    config = FrameGDNConfig(dim=8, heads=2, conv_size=2)
    assert FrameGDN(config).config == FrameGDN(dim=8, heads=2, conv_size=2).config
    for arguments, options, message in [
        ((config,), {"heads": 4}, r"FrameGDN takes a FrameGDNConfig or the fields of one, got both, with heads"),
        ((8,), {}, r"FrameGDN takes a FrameGDNConfig or the fields of one, got int"),
        ((), {"dim": 8}, "heads"),
        ((), {"dim": 8, "heads": 2, "head": 4}, "head"),
    ]:
        with pytest.raises(TypeError, match=message):
            FrameGDN(*arguments, **options)


def test_extra_repr_shows_what_differs_from_the_defaults() -> None:
    assert FrameGDN(dim=8, heads=2).extra_repr() == "dim=8, heads=2"
    block = ChunkCausalGDN(dim=8, heads=2, conv_qv=True, rope_theta=None, key_scale="dim", precision="ieee")
    assert block.extra_repr() == ("dim=8, heads=2, conv_qv=True, key_scale='dim', rope_theta=None, precision='ieee'")
    assert repr(block).startswith("ChunkCausalGDN(\n  dim=8, heads=2, conv_qv=True")
