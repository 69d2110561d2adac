"""The Gated Delta Product layer against loops over tokens and steps: values, gradients, streams, errors."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from comparison import assert_close, assert_gradients_close, gradients, randomize
from torch import Tensor, nn

from gdn_models import DeltaProductState, GatedDeltaProduct, GatedDeltaProductConfig

C, H, K, T = 10, 2, 4, 9
TOLERANCE = 1e-10
VARIANTS = {
    "default": {}, "one step": {"num_householder": 1}, "three steps": {"num_householder": 3},
    "grouped values": {"value_heads": 4, "expand_v": 1.5}, "no forget gate": {"forget_gate": False},
    "no output gate": {"output_gate": False}, "no convolution": {"conv_size": 0},
    "positive": {"allow_neg_eigval": False},
}  # fmt: skip


def make(dtype: torch.dtype = torch.float64, **options: object) -> GatedDeltaProduct:
    layer = GatedDeltaProduct(**{"dim": C, "heads": H, "head_dim": K, **options}).to(dtype)
    randomize(layer)
    return layer


def convolved(x: Tensor, weight: Tensor | None, first: int) -> Tensor:
    """One token after another, from the first of its sequence on."""
    if weight is None:
        return x * x.sigmoid()
    taps, rows = weight.shape[2], []
    for t in range(x.shape[0]):
        total = torch.zeros_like(x[0])
        for back in range(taps):
            if t - back >= first:
                total = total + weight[:, 0, taps - 1 - back] * x[t - back]
        rows.append(total * total.sigmoid())
    return torch.stack(rows) if rows else x


def sequence_by_loops(p: dict[str, Tensor], x: Tensor, config: GatedDeltaProductConfig) -> Tensor:
    """One sequence ``[T, C]``, written from the equations; shares no code with the package."""
    steps, values, width = config.num_householder, config.value_heads or config.heads, int(config.expand_v * K)
    q, k, v = (convolved(x @ p[f"{n}_proj.weight"].T, p.get(f"{n}_conv1d.weight"), 0) for n in "qkv")
    beta = torch.sigmoid(x @ p["b_proj.weight"].T) * (2 if config.allow_neg_eigval else 1)
    group, outputs = values // config.heads, []
    states = [torch.zeros(K, width, dtype=x.dtype) for _ in range(values)]
    for t in range(x.shape[0]):
        heads = []
        for h in range(values):
            if "a_proj.weight" in p:
                drive = x[t] @ p["a_proj.weight"][h] + p["dt_bias"][h]
                states[h] = torch.exp(-torch.exp(p["A_log"][h]) * torch.log(1 + torch.exp(drive))) * states[h]
            for j in range(steps):
                start = (j * config.heads + h // group) * K
                key = k[t, start : start + K]
                key = key / torch.sqrt((key * key).sum() + 1e-6)
                value = v[t, (j * values + h) * width : (j * values + h + 1) * width]
                error = value - key @ states[h]
                states[h] = states[h] + beta[t, j * values + h] * torch.outer(key, error)
            query = q[t, h // group * K : (h // group + 1) * K]
            o = (query / torch.sqrt((query * query).sum() + 1e-6)) @ states[h] / math.sqrt(K)
            o = o / torch.sqrt((o * o).mean() + config.norm_eps) * p["o_norm.weight"]
            if "g_proj.weight" in p:
                gate = x[t] @ p["g_proj.weight"][h * width : (h + 1) * width].T
                o = o * gate * gate.sigmoid()
            heads.append(o)
        outputs.append(torch.cat(heads) @ p["o_proj.weight"].T)
    return torch.stack(outputs)


def by_loops(layer: GatedDeltaProduct, x: Tensor, bounds: list[int] | None) -> tuple[Tensor, dict[str, Tensor]]:
    p = {name: value.detach().clone().requires_grad_() for name, value in layer.named_parameters()}
    if bounds is None:
        return torch.stack([sequence_by_loops(p, row, layer.config) for row in x]), p
    parts = [sequence_by_loops(p, x[0, a:b], layer.config) for a, b in itertools.pairwise(bounds) if b > a]
    return torch.cat(parts)[None], p


@pytest.mark.parametrize("bounds", [None, [0, 4, 4, 5, T]], ids=["rows", "packed"])
@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_layer_equals_the_equations(options: dict[str, object], bounds: list[int] | None) -> None:
    layer = make(**options)
    x = torch.randn(1 if bounds else 2, T, C, dtype=torch.float64).requires_grad_()
    copied = x.detach().clone().requires_grad_()
    y = layer(x, cu_seqlens=bounds)
    expected, parameters = by_loops(layer, copied, bounds)
    assert_close(y, expected, TOLERANCE, "output")
    upstream = torch.randn_like(expected)
    y.backward(upstream)
    expected.backward(upstream)
    assert_close(x.grad, copied.grad, TOLERANCE, "gradient of x")
    assert_gradients_close(gradients(layer), {name: p.grad for name, p in parameters.items()}, TOLERANCE)


def test_parameters_have_the_names_and_shapes_of_the_published_layer() -> None:
    """At the published defaults, which are large: on the meta device."""
    layer = GatedDeltaProduct(dim=128, heads=6, value_heads=12, device="meta")
    assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == {
        "q_proj.weight": (1536, 128), "k_proj.weight": (3072, 128), "v_proj.weight": (12288, 128),
        "b_proj.weight": (24, 128), "a_proj.weight": (12, 128), "A_log": (12,), "dt_bias": (12,),
        "q_conv1d.weight": (1536, 1, 4), "k_conv1d.weight": (3072, 1, 4), "v_conv1d.weight": (12288, 1, 4),
        "g_proj.weight": (6144, 128), "o_norm.weight": (512,), "o_proj.weight": (128, 6144),
    }  # fmt: skip


def test_initial_values() -> None:
    torch.manual_seed(0)
    layer = GatedDeltaProduct(dim=64, heads=64, head_dim=4)
    assert torch.all((layer.A_log.exp() > 1e-3) & (layer.A_log.exp() < 16))
    step = nn.functional.softplus(layer.dt_bias)
    assert torch.all((step > 0.999e-3) & (step < 0.1001))
    assert layer.A_log.exp().median() > 4  # uniform, where log-uniform would have a median of 0.13
    assert step.median() < 0.03  # log-uniform, where uniform would have 0.05
    bound = 2**-2.5 * math.sqrt(6 / (64 + 256))
    assert 0.9 * bound < layer.q_proj.weight.abs().max() <= bound
    assert torch.equal(layer.o_norm.weight, torch.ones(8))
    assert layer.no_weight_decay() == {"A_log", "dt_bias"}
    assert GatedDeltaProduct(dim=8, heads=1, head_dim=4, forget_gate=False).no_weight_decay() == set()


def test_gates_stay_wide() -> None:
    layer = make(torch.float32).to(torch.bfloat16)
    assert layer.A_log.dtype == layer.dt_bias.dtype == torch.float32
    assert layer.q_proj.weight.dtype == torch.bfloat16
    assert layer(torch.randn(1, T, C, dtype=torch.bfloat16)).dtype == torch.bfloat16


# ---- compiled


def test_compiled_layer_is_one_graph_also_for_other_sequences_and_streams() -> None:
    layer = make(backend="torch")
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(1, T, C, dtype=torch.float64)
    for bounds in (None, (0, 4, T), (0, 6, T), (0, 2, 7, T)):
        assert_close(compiled(x, cu_seqlens=bounds), layer(x, cu_seqlens=bounds), TOLERANCE, str(bounds))
    state = layer(x, state=layer.init_state(1))[1].detach()
    assert_close(compiled(x, state=state)[0], layer(x, state=state)[0], TOLERANCE, "stream")


# ---- streams


@pytest.mark.parametrize("length", [1, 2, 3, 5])
@pytest.mark.parametrize("options", [{}, {"conv_size": 0}, {"forget_gate": False, "value_heads": 4}], ids=str)
def test_stream_equals_one_call(length: int, options: dict[str, object]) -> None:
    layer = make(**options)
    x = torch.randn(2, T, C, dtype=torch.float64)
    state, outputs = layer.init_state(2), []
    for first in range(0, T, length):
        y, state = layer(x[:, first : first + length], state=state)
        outputs.append(y)
    whole, final = layer(x, state=layer.init_state(2))
    assert_close(torch.cat(outputs, 1), layer(x), TOLERANCE, "output")
    assert_close(whole, layer(x), TOLERANCE, "one call with a state")
    for found, expected in zip((state.recurrent, *state.conv), (final.recurrent, *final.conv), strict=True):
        assert (found is None) == (expected is None)
        if found is not None:
            assert_close(found, expected, TOLERANCE, "state")


def test_gradients_flow_through_a_state_until_it_is_detached() -> None:
    layer = make()
    x = torch.randn(1, T, C, dtype=torch.float64, requires_grad=True)
    whole = x.detach().clone().requires_grad_()
    _, state = layer(x[:, :5], state=layer.init_state(1))
    layer(x[:, 5:], state=state)[0].sum().backward()
    layer(whole)[:, 5:].sum().backward()
    assert_close(x.grad, whole.grad, TOLERANCE, "through the state")
    x.grad = None
    _, state = layer(x[:, :5], state=layer.init_state(1))
    layer(x[:, 5:], state=state.detach())[0].sum().backward()
    assert not x.grad[:, :5].any()


@pytest.mark.parametrize("conv_size", [0, 1, 4])
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("shape", [(2, 0), (0, T), (2, 1)])
def test_the_smallest_sizes_give_every_parameter_a_gradient(
    shape: tuple[int, int], streams: bool, conv_size: int
) -> None:
    """Zeros where nothing was read: wrappers that average over ranks wait for all of them."""
    layer = make(conv_size=conv_size)
    x = torch.randn(*shape, C, dtype=torch.float64, requires_grad=True)
    state = layer.init_state(shape[0])
    state = state._replace(conv=tuple(tail if tail is None else torch.randn_like(tail) for tail in state.conv))
    y = layer(x)
    if streams:
        y, after = layer(x, state=state)
        if not shape[1]:
            for tail, before in zip(after.conv, state.conv, strict=True):
                assert tail is before is None or torch.equal(tail, before)
    assert y.shape == x.shape
    y.square().sum().backward()
    found = gradients(layer)
    assert all(gradient.isfinite().all() for gradient in found.values())
    assert x.numel() or not any(gradient.any() for gradient in found.values())


# ---- errors


def test_config_refuses() -> None:
    for options, kind, message in [
        ({"heads": 0}, ValueError, "heads must be >= 1, got 0"),
        ({"head_dim": 257}, ValueError, "head_dim must be <= 256 for any backend, got 257; use more heads"),
        ({"value_heads": 3}, ValueError, "value_heads must be a multiple of heads = 2, got 3"),
        ({"expand_v": 0.3}, ValueError, "expand_v must make head_dim"),
        ({"num_householder": 0}, ValueError, "num_householder must be >= 1, got 0"),
        ({"forget_gate": 1}, TypeError, "forget_gate must be a bool, got int"),
        ({"backend": "cuda"}, ValueError, "backend must be one of 'auto', 'torch', 'fla', got 'cuda'"),
        ({"backend": None}, TypeError, "backend must be a str, got NoneType"),
        ({"gate": True}, TypeError, "gate"),
    ]:
        with pytest.raises(kind, match=message):
            GatedDeltaProductConfig(**{"dim": C, "heads": H, "head_dim": K, **options})
    config = GatedDeltaProductConfig(dim=C, heads=H, num_householder=3)
    assert config.differences() == "dim=10, heads=2, num_householder=3"
    assert GatedDeltaProduct(config).extra_repr() == config.differences()
    with pytest.raises(TypeError, match="takes a GatedDeltaProductConfig or the fields of one, got both, with heads"):
        GatedDeltaProduct(config, heads=2)


@pytest.mark.parametrize(
    "x, options, kind, message",
    [
        ((2, T), {}, ValueError, r"x must have shape \[B, T, C\]"),
        ((2, T, C + 1), {}, ValueError, r"x must have shape \[B, T, C = dim\]"),
        ((1, T, C), {"cu_seqlens": torch.tensor([0, T])}, TypeError, "cu_seqlens must be a tuple of ints, got Tensor"),
        (
            (1, T, C),
            {"cu_seqlens": [0, T - 1]},
            ValueError,
            "cu_seqlens must start at 0, not decrease and end at T = 9",
        ),
        ((1, T, C), {"cu_seqlens": [0, 5, 4, T]}, ValueError, "cu_seqlens must start at 0, not decrease"),
        ((2, T, C), {"cu_seqlens": [0, T]}, ValueError, "cu_seqlens need B = 1, all sequences in one row, got B = 2"),
        ((1, T, C), {"state": (1, 2)}, TypeError, "state must be a DeltaProductState or None, got tuple"),
    ],
)
def test_layer_refuses(x: tuple[int, ...], options: dict[str, object], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        make()(torch.zeros(x, dtype=torch.float64), **options)


def test_layer_refuses_dtypes_and_states_of_others() -> None:
    layer, x = make(), torch.zeros(1, T, C, dtype=torch.float64)
    with pytest.raises(ValueError, match="x must have dtype float64, got float32"):
        layer(x.float())
    state = layer.init_state(1)
    for change, message in [
        ({"recurrent": state.recurrent[:, :1]}, r"state.recurrent must have shape \[B, HV, K, V\]"),
        ({"recurrent": state.recurrent.float()}, "state.recurrent must have dtype float64"),
        ({"conv": (None, *state.conv[1:])}, "state.conv of q must be a tensor"),
        ({"conv": (state.conv[0][:, :1], *state.conv[1:])}, r"state.conv of q must have shape"),
        ({"recurrent": state.recurrent.to("meta")}, r"state.recurrent must be on the device of x \(cpu\), got meta"),
        ({"conv": (*state.conv[:2], state.conv[2].to("meta"))}, r"state.conv of v must be on the device of x \(cpu\)"),
        ({"conv": (*state.conv[:2], state.conv[2].long())}, "state.conv of v must have dtype float16, .*, got int64"),
        ({"conv": state.conv[:2]}, "state.conv must hold the tails of q, k and v, got 2"),
    ]:
        with pytest.raises(ValueError, match=message):
            layer(x, state=state._replace(**change))
    for conv, message in [
        (list(state.conv), "state.conv must be a tuple of the tails of q, k and v, got list"),
        ((*state.conv[:2], 0.0), "state.conv of v must be a torch.Tensor, got float"),
    ]:
        with pytest.raises(TypeError, match=message):
            layer(x, state=state._replace(conv=conv))
    with pytest.raises(NotImplementedError, match="state together with cu_seqlens"):
        layer(x, state=state, cu_seqlens=(0, T))
    assert isinstance(state, DeltaProductState)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"batch": -1}, ValueError, "batch must be >= 0, got -1"),
        ({"batch": True}, TypeError, "batch must be an int, got bool"),
        ({"dtype": torch.bool}, ValueError, "dtype must be one of float16, bfloat16, float32, float64, got bool"),
        ({"dtype": "half"}, TypeError, "dtype must be a torch.dtype or None, got str"),
    ],
)
def test_a_state_that_cannot_be_made_is_refused(change: dict, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=f"^{message}$"):
        make().init_state(**{"batch": 1, **change})
