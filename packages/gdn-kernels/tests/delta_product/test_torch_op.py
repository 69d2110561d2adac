"""The two library operators under ``torch.library.opcheck``, and a compiled call that equals an eager one."""

import pytest
import torch
from agreement import assert_all_close, assert_same
from delta_product_cases import Case, gradients, make_case, upstream
from torch import Tensor

from gdn_kernels import gated_delta_product, l2_normalize

CASES = {
    "batch": make_case(2, group=2),
    "packed": make_case(3, gated=False, bounds=(0, 3, 3, 8)),
    "stateless": make_case(1, state=False, dtype=torch.float32),
}


def flat(case: Case) -> tuple[object, ...]:
    """Return the arguments of the forward operator."""
    bounds = case.bounds
    lengths = [case.q.shape[1]] * case.q.shape[0]
    if bounds is not None:
        lengths = [stop - start for start, stop in zip(bounds, bounds[1:], strict=False)]
    return (*case[:6], lengths, case.steps, 2, 0.5)


@pytest.mark.parametrize("name", CASES)
def test_forward_operator_passes_opcheck(name: str) -> None:
    torch.library.opcheck(torch.ops.gdn_kernels.delta_product_torch.default, flat(CASES[name]))


@pytest.mark.parametrize("name", CASES)
def test_backward_operator_passes_opcheck(name: str) -> None:
    arguments = [x.detach() if isinstance(x, Tensor) else x for x in flat(CASES[name])]
    results = torch.ops.gdn_kernels.delta_product_torch(*arguments)
    given = upstream(dict(zip("os", results, strict=True)))
    if name == "packed":
        given[0] = None
    torch.library.opcheck(
        torch.ops.gdn_kernels.delta_product_torch_bwd.default,
        (*arguments[:6], *given, *arguments[6:]),
        test_utils=("test_schema", "test_faketensor"),  # it has no derivative
    )


def test_compiled_calls_are_one_graph_and_equal_eager_ones() -> None:
    def call(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, state: Tensor) -> dict[str, Tensor]:
        found = gated_delta_product(
            q, l2_normalize(k), v, beta, g, num_householder=2, initial_state=state, output_final_state=True,
            cu_seqlens=(0, 3, 3, 8),
        )  # fmt: skip
        assert found.final_state is not None
        return {"output": found.output, "final_state": found.final_state}

    case = make_case(2, group=2, bounds=(0, 3, 3, 8))
    expected = call(*case[:6])
    found = torch.compile(call, fullgraph=True, backend="aot_eager")(*case[:6])
    assert_all_close(gradients(found, case), gradients(expected, case), 1e-14)  # the norm is the compiler's
    for name, value in expected.items():
        assert_same(found[name], value, name)


def test_a_compiled_call_takes_other_sequences_in_the_same_graph() -> None:
    """The second call is compiled again, with offsets that may be any ints; later ones of as many sequences are not."""
    bounds = [(0, 3, 8), (0, 5, 8), (0, 4, 8), (0, 8, 8)]
    case = make_case(2, group=2, bounds=bounds[0])
    graphs = 0

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        nonlocal graphs
        graphs += 1
        return graph

    def call(cu_seqlens: tuple[int, ...], *tensors: Tensor) -> dict[str, Tensor]:
        found = gated_delta_product(
            *tensors[:5], num_householder=2, initial_state=tensors[5], output_final_state=True, cu_seqlens=cu_seqlens
        )
        assert found.final_state is not None
        return {"output": found.output, "final_state": found.final_state}

    counted = torch.compile(call, fullgraph=True, backend=count)
    for given in bounds:
        counted(given, *(x.detach() for x in case[:6]))
    assert graphs == 2
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for given in bounds:
        expected, found = call(given, *case[:6]), compiled(given, *case[:6])
        for name, value in expected.items():
            assert_same(found[name], value, name)
        given_back = gradients(found, case)
        for name, value in gradients(expected, case).items():
            assert_same(given_back[name], value, name)
