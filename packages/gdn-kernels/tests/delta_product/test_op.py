"""The public gated delta product against the dense transitions of an independent loop, and what it promises besides."""

import pytest
import torch
from agreement import assert_all_close, assert_close, assert_same, assert_zero
from delta_product_cases import Case, dense_delta_product, gradients, make_case
from torch import Tensor

from gdn_kernels import gated_delta_product, l2_normalize

TOLERANCE = 1e-12


def run(case: Case, **options: object) -> dict[str, Tensor]:
    """Return output and final state of the operation, by name."""
    result = gated_delta_product(
        case.q, case.k, case.v, case.beta, case.g,
        **{
            "num_householder": case.steps, "initial_state": case.initial_state, "output_final_state": True,
            "cu_seqlens": case.bounds, **options,
        },
    )  # fmt: skip
    return {"output": result.output, "final_state": result.final_state}


def expect(case: Case, scale: float | None = None) -> dict[str, Tensor]:
    """Return what the loop says."""
    return dict(zip(("output", "final_state"), dense_delta_product(case, scale), strict=True))


@pytest.mark.parametrize("bounds", [None, (0, 3, 3, 8), (0, 0, 5)])
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "ungated"])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_values_and_every_gradient_agree_with_dense_transitions(
    steps: int, gated: bool, group: int, bounds: tuple[int, ...] | None
) -> None:
    case = make_case(steps, gated=gated, group=group, bounds=bounds)
    found, expected = run(case, chunk_size=4), expect(case)
    assert_all_close(found, expected, TOLERANCE)
    assert_all_close(gradients(found, case), gradients(expected, case), TOLERANCE)


@pytest.mark.parametrize("chunk_size", [1, 2, 5, 64, 1000])
def test_chunk_size_changes_nothing(chunk_size: int) -> None:
    case = make_case(2, tokens=11)
    expected, found = run(case), run(case, chunk_size=chunk_size)
    assert_all_close(found, expected, TOLERANCE)
    assert_all_close(gradients(found, case), gradients(expected, case), TOLERANCE)


def test_defaults_are_one_step_no_gate_no_state_and_the_root_of_the_width() -> None:
    case = make_case(1, gated=False, state=False)
    result = gated_delta_product(case.q, case.k, case.v, case.beta)
    assert result.final_state is None
    assert_close(result.output, expect(case)["output"], TOLERANCE)
    assert_close(run(case, scale=2)["output"], expect(case, 2.0)["output"], TOLERANCE)


@pytest.mark.parametrize("name", ["output", "final_state"])
def test_a_loss_on_one_result_gives_every_input_its_gradient(name: str) -> None:
    case = make_case(2, group=2, bounds=(0, 3, 8))
    found, expected = ({name: results[name]} for results in (run(case), expect(case)))
    given = gradients(found, case)
    assert_all_close(given, gradients(expected, case), TOLERANCE)
    if name == "final_state":
        assert_zero(given["q"])


@pytest.mark.parametrize("name", ["q", "k", "v", "beta", "g", "state"])
def test_an_input_alone_gets_its_gradient(name: str) -> None:
    case = make_case(2)
    expected = gradients(run(case), case)[name]
    fields = {"state": "initial_state"}
    alone = Case(*(x.detach() if isinstance(x, Tensor) else x for x in case))
    leaf = case.leaves()[name].detach().clone().requires_grad_()
    alone = alone._replace(**{fields.get(name, name): leaf})
    results = run(alone)
    assert_same(gradients(results, case._replace(**{fields.get(name, name): leaf}))[name], expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_narrow_inputs_are_computed_in_fp32_and_rounded_once(dtype: torch.dtype) -> None:
    case = make_case(2, group=2, tokens=20, dtype=dtype)
    wide = Case(*(x.detach().double().requires_grad_() if isinstance(x, Tensor) else x for x in case))
    found, expected = run(case), expect(wide)
    fp32 = case.k.shape[1] * torch.finfo(torch.float32).eps  # steps contract: their roundings add up at most
    rounded = torch.finfo(dtype).eps / 2 + fp32
    assert found["output"].dtype == dtype
    assert found["final_state"].dtype == torch.float32
    assert_close(found["output"], expected["output"], rounded)
    assert_close(found["final_state"], expected["final_state"], fp32)
    doutput = torch.randn(found["output"].shape).to(dtype)
    given = torch.autograd.grad(found["output"], list(case.leaves().values()), doutput)
    exact = torch.autograd.grad(expected["output"], list(wide.leaves().values()), doutput.double())
    for name, dx, dwide in zip(case.leaves(), given, exact, strict=True):
        assert dx.dtype == case.leaves()[name].dtype
        assert_close(dx, dwide, torch.finfo(dx.dtype).eps / 2 + 8 * fp32, name)  # forward and backward, longer sums


def test_autocast_has_no_effect() -> None:
    case = make_case(2, dtype=torch.float32)
    expected = run(case)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = run(case)
        given = gradients(found, case)
    assert_same(found["output"], expected["output"])
    for name, value in gradients(expected, case).items():
        assert_same(given[name], value, name)


def test_strides_of_inputs_and_of_gradients_do_not_matter() -> None:
    case = make_case(2, group=2)
    expected = run(case)
    odd = Case(*(
        x.detach().mT.contiguous().mT.requires_grad_() if isinstance(x, Tensor) else x for x in case
    ))  # fmt: skip
    assert not odd.k.is_contiguous()
    found = run(odd)
    assert_same(found["output"], expected["output"])
    shape = found["output"].shape
    for doutput in (torch.randn(shape[::-1], dtype=torch.float64).permute(3, 2, 1, 0), torch.ones(()).expand(shape)):
        upstream = doutput.double()
        a = torch.autograd.grad(found["output"], odd.k, upstream, retain_graph=True)[0]
        b = torch.autograd.grad(expected["output"], case.k, upstream.contiguous(), retain_graph=True)[0]
        assert_same(a, b)


def test_calls_that_hand_the_state_on_equal_one_call() -> None:
    case = make_case(2, tokens=12)
    whole, state, outputs = run(case, chunk_size=6), case.initial_state, []
    for start, stop in ((0, 5), (5, 5), (5, 6), (6, 12)):
        rows = slice(2 * start, 2 * stop)
        part = gated_delta_product(
            case.q[:, start:stop], case.k[:, rows], case.v[:, rows], case.beta[:, rows], case.g[:, start:stop],
            num_householder=2, initial_state=state, output_final_state=True, chunk_size=6,
        )  # fmt: skip
        state, outputs = part.final_state, [*outputs, part.output]
    found = {"output": torch.cat(outputs, dim=1), "final_state": state}
    assert_all_close(found, whole, TOLERANCE)
    assert_all_close(gradients(found, case), gradients(whole, case), TOLERANCE)


@pytest.mark.parametrize("as_tensor", [torch.int32, torch.int64, None])
def test_a_sequence_neither_sees_nor_moves_its_neighbours(as_tensor: torch.dtype | None) -> None:
    case = make_case(2, bounds=(0, 4, 4, 9, 12))
    bounds = case.bounds if as_tensor is None else torch.tensor(case.bounds, dtype=as_tensor)
    before = run(case, cu_seqlens=bounds, chunk_size=6)
    v = case.v.detach().clone()
    v[:, 8:18] = torch.nan  # of the third sequence
    after = run(case._replace(v=v.requires_grad_()), cu_seqlens=bounds, chunk_size=6)
    for name, kept, part in (("output", slice(0, 4), 1), ("output", slice(9, 12), 1), ("final_state", [0, 1, 3], 0)):
        index = (slice(None),) * part + (kept,)
        assert_same(after[name][index], before[name][index], name)
    assert after["output"][:, 4:9].isnan().all()


@pytest.mark.parametrize("batch, tokens, bounds", [(0, 5, None), (2, 0, None), (1, 0, (0,)), (1, 0, (0, 0, 0))])
def test_empty_calls_hand_states_and_gradients_on(batch: int, tokens: int, bounds: tuple[int, ...] | None) -> None:
    case = make_case(3, batch=batch, tokens=tokens, bounds=bounds)
    found = run(case)
    assert found["output"].shape == (*case.q.shape[:2], *case.v.shape[2:])
    assert_same(found["final_state"], case.initial_state)
    given = gradients(found, case)
    assert all(given[name].shape == leaf.shape for name, leaf in case.leaves().items())
    if case.initial_state.numel():
        assert given["state"].abs().sum() > 0


def test_strong_decays_and_equal_keys_stay_finite_and_right() -> None:
    case = make_case(2, tokens=40, group=2, width=4)
    with torch.no_grad():
        case.g[:, 3], case.g[:, 17:21], case.g[:, 30] = -100.0, -20.0, -1e4
        case.k[:, 20:60] = l2_normalize(torch.ones(4, dtype=torch.float64))
        case.beta[:, 20:60] = 1.999
        case.k[:, 70:] = 0.0
    found, expected = run(case), expect(case)
    assert_all_close(found, expected, 1e-11)
    assert_all_close(gradients(found, case), gradients(expected, case), 1e-11)


def test_it_is_once_differentiable_and_writes_into_no_input() -> None:
    case = make_case(2)
    kept = {name: leaf.detach().clone() for name, leaf in case.leaves().items()}
    output = run(case)["output"]
    grads = torch.autograd.grad(output.square().sum(), list(case.leaves().values()), create_graph=True)
    for name, leaf in case.leaves().items():
        assert_same(leaf.detach(), kept[name], name)
    with pytest.raises(RuntimeError, match="differentiable once"):
        grads[0].sum().backward()


def test_auto_is_torch() -> None:
    case = make_case(2)
    for impl in ("auto", "torch"):
        assert_same(run(case, impl=impl)["output"], run(case)["output"])
