"""Into the grid and back: layouts, dtypes and strides. Values are those of test_delta_product_chunks."""

import pytest
import torch
from agreement import assert_same
from delta_product_cases import make_case

from gdn_kernels.reference.delta_product_chunks import ChunkGradients
from gdn_kernels.reference.delta_product_grid import chunk_grid
from gdn_kernels.reference.delta_product_operands import (
    gradients_to_streams,
    operands_on_grid,
    output_gradient_on_grid,
    output_to_stream,
)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_operands_are_wide_and_gradients_come_back_in_shape_and_dtype_of_inputs(dtype: torch.dtype) -> None:
    case = make_case(3, group=2, dtype=dtype)
    grid = chunk_grid([7, 7], 4)
    given = tuple(None if x is None else x.detach() for x in (case.q, case.k, case.v, case.beta, case.g))
    x = operands_on_grid(*given, grid, 3)
    assert {y.dtype for y in (*x[:4], *x.decay, *x.factors)} == {torch.promote_types(dtype, torch.float32)}
    g_chunks = x.decay.entry.log()  # stands for a gradient of the shape of g
    gradients = ChunkGradients(x.q, x.k, x.v, x.beta, g_chunks, torch.zeros(0))
    for found, expected in zip(gradients_to_streams(gradients, grid, *given)[:4], given[:4], strict=True):
        assert_same(found, expected)
    dg = gradients_to_streams(gradients, grid, *given)[4]
    assert dg.shape == case.g.shape
    assert dg.dtype == case.g.dtype
    assert gradients_to_streams(gradients._replace(dg=None), grid, *given[:4], None)[4] is None


def test_outputs_come_back_and_their_gradients_may_have_any_strides() -> None:
    case = make_case(2, group=2)
    grid = chunk_grid([7, 7], 4)
    x = operands_on_grid(case.q, case.k, case.v, case.beta, None, grid, 2)
    doutput = torch.randn(3, 4, 7, 2, dtype=torch.float64).permute(3, 2, 1, 0)
    chunks = output_gradient_on_grid(doutput, grid, x)
    assert chunks.shape == (4, 2, 2, 4, 3)
    assert_same(output_to_stream(chunks, grid, case.q, case.v), doutput)
