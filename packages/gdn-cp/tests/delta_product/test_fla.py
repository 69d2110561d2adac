"""The FLA backend on the CPU: all of it that is not a kernel, with kernels by their equations."""

import ast
import dataclasses
import importlib.util
import inspect
import subprocess
import sys
import types
from pathlib import Path

import fla_in_torch
import pytest
import torch
from delta_product_shares import SCALE, Share, by_hand, error

from gdn_cp import CPContext
from gdn_cp.chunkwise import (
    CPBackwardPackedSummary,
    CPBackwardUnpackedSummary,
    CPForwardPackedSummary,
    CPForwardUnpackedSummary,
    CPSavedContext,
)
from gdn_cp.delta_product import fla, fla_functions
from gdn_cp.delta_product.common import GDPInputs, gdp_chunkwise_context_parallel
from gdn_cp.delta_product.torch import TorchGatedDeltaProductCPBackend

# kernels are exact but for the rounding of what they return: factors, chunk states, summaries, gradients to fp32
FP32 = 16 * torch.finfo(torch.float32).eps


@pytest.fixture
def backend(monkeypatch):
    found = fla_in_torch.functions()
    monkeypatch.setattr(fla_functions, "load", lambda: found)
    monkeypatch.setattr(fla, "_require_supported", lambda inputs: None)
    return fla.FLAGatedDeltaProductCPBackend()


SHARES = [
    Share((5,)),
    Share((9,), (4, 0, 5), states=False),
    Share((5, 4), steps=1),
    Share((70, 0, 75)),
    Share((70, 3, 75), steps=3, gated=False, heads=(1, 1)),
    Share((70, 0, 75), (100, 0, 5, 40), steps=3),
    Share((70, 0, 75), (145,), heads=(2, 2)),
    Share((70, 20, 75), (30, 100, 35), steps=3, heads=(2, 2), states=False),
    Share((64, 20, 0), (20, 64), steps=1, gated=False),
    Share((0, 30), (10, 20)),
    Share((0, 0, 3), heads=(2, 2)),
    Share((0, 9), gated=False, states=False),
]


@pytest.mark.parametrize("share", SHARES, ids=str)
def test_ranks_equal_the_recurrence(backend, share):
    exact, found = share.exact(torch.float32), by_hand(share, backend, torch.float32)
    assert set(found) == set(exact) - (set() if share.states else {"final_state"})
    for name, x in found.items():
        assert x.shape == exact[name].shape, name
        assert x.is_contiguous(), name
        assert error(x, exact[name]) <= FP32, f"{name}: {error(x, exact[name]):.1e}"


@pytest.mark.parametrize("share", [Share((3, 70, 20), steps=3), Share((3, 70, 20), (40, 53))], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_dtypes_of_16_bit_inputs(backend, share, dtype):
    found = by_hand(share, backend, dtype)
    leaves = share.leaves(dtype)
    assert found["output"].dtype == dtype
    assert found["final_state"].dtype == torch.float32
    assert {name: found[f"d{name}"].dtype for name in leaves} == {name: x.dtype for name, x in leaves.items()}


def test_summaries_are_those_of_the_torch_backend(backend):
    for share in (Share((0, 70, 20), steps=3), Share((3, 70, 20), (40, 53)), Share((0, 20), (20,))):
        leaves, place = share.leaves(torch.float32), share.place(1, "cpu")
        tokens = slice(share.counts[0], share.counts[0] + share.counts[1])
        rows = slice(tokens.start * share.steps, tokens.stop * share.steps)
        q, g = leaves["q"][:, tokens].contiguous(), leaves["g"][:, tokens].contiguous()
        k, v, beta = (leaves[name][:, rows].contiguous() for name in ("k", "v", "beta"))
        inputs = GDPInputs(q, k, v, g, beta, place["cu_seqlens"], share.steps, SCALE, bounds=place["bounds"])
        pairs = []
        for each in (backend, TorchGatedDeltaProductCPBackend()):
            forward, local = each.cp_forward_prepare(inputs)
            output, saved = each.cp_forward_apply(local, CPForwardPackedSummary(forward.packed[None][:0]))
            pairs.append((forward.packed, each.cp_backward_prepare(torch.ones_like(output), saved)[0].packed))
        for ours, theirs in zip(*pairs, strict=True):
            assert ours.shape == theirs.shape
            assert ours.dtype == theirs.dtype
            assert ours.is_contiguous()
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)  # the torch backend computes in fp32


def test_the_autograd_function(backend):
    """Operands of any strides, through FLA's guards; gradients as by hand; once differentiable."""
    share = Share((9,), states=False)
    leaves = share.leaves(torch.float32)
    strided = {name: x.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for name, x in leaves.items()}
    assert not strided["q"].is_contiguous()
    output = gdp_chunkwise_context_parallel(
        *(strided[name] for name in ("q", "k", "v", "g", "beta")), None, 2, SCALE, None, backend,
        context=CPContext.single(),
    )  # fmt: skip
    expected = by_hand(share, backend, torch.float32)
    assert torch.equal(output, expected["output"])
    arriving = share.weights(torch.float32)[0].requires_grad_()
    found = torch.autograd.grad(output, list(strided.values()), arriving, create_graph=True)
    for name, x in zip(strided, found, strict=True):
        assert torch.equal(x, expected[f"d{name}"]), name
    for x in strided.values():  # saved in other tensors, some of them
        with pytest.raises(NotImplementedError, match="differentiable once"):
            torch.autograd.grad(found[0].sum(), x, retain_graph=True)
    with pytest.raises(NotImplementedError, match="differentiable once"):
        found[0].sum().backward()


def test_what_is_saved(backend):
    """9 tensors packed, 7 unpacked; of the states only the first, unless some were given."""
    for share, count, states in (
        (Share((9,)), 7, 2),
        (Share((9,), (4, 5)), 9, 2),
        (Share((9,), (4, 5), states=False), 9, 1),
        (Share((9,), states=False, gated=False), 7, 2),
    ):
        leaves, place = share.leaves(torch.float32), share.place(0, "cpu")
        inputs = GDPInputs(
            leaves["q"], leaves["k"], leaves["v"], leaves.get("g"), leaves["beta"], place["cu_seqlens"], 2, SCALE,
            leaves.get("initial_state"), bounds=place["bounds"],
        )  # fmt: skip
        summary, local = backend.cp_forward_prepare(inputs)
        _, saved = backend.cp_forward_apply(local, CPForwardPackedSummary(summary.packed[None][:0]))
        assert len(saved.tensors) == count
        assert len(saved.tensors[6]) == states
        gate = torch.float32 if share.gated else None
        assert saved.metadata == fla.GDPSavedMetadata(2, SCALE, count == 9, gate, True, share.states)
        restored, g, a, initial, chunks = fla._restore_saved_context(saved)
        assert initial.shape == fla._state_shape(restored.q, restored.v, restored.cu_seqlens_dp)
        assert a.shape == (*restored.beta.shape, 64)
        assert (g is None) == (gate is None)
        assert (chunks is None) == (count == 7)
        with pytest.raises(ValueError, match=f"saved_context must hold {count} tensors, got {count - 1}"):
            fla._restore_saved_context(CPSavedContext(saved.tensors[:-1], saved.metadata))
        with pytest.raises(TypeError, match="must come from the FLA backend, got metadata NoneType"):
            fla._restore_saved_context(CPSavedContext(saved.tensors))


def test_tables_are_kept_by_value():
    device = torch.device("cpu")
    cu, rows, chunks, chunks_dp = fla_functions.chunk_tables((0, 64, 64, 100), 3, device)
    assert cu.tolist() == [0, 64, 64, 100]
    assert rows.tolist() == [0, 192, 192, 300]
    assert chunks.tolist() == [[0, 0], [2, 0]]
    assert chunks_dp.tolist() == [[0, 0], [0, 1], [0, 2], [2, 0], [2, 1]]
    assert all(x.dtype == torch.int32 for x in (cu, rows, chunks, chunks_dp))
    assert fla_functions.chunk_tables((0, 64, 64, 100), 3, device)[0] is cu
    assert fla_functions.chunk_tables((0,), 3, device)[2].shape == (0, 2)
    with torch.inference_mode():
        assert not any(x.is_inference() for x in fla_functions.chunk_tables((0, 7), 2, device))
    assert fla._expand_cu_seqlens(cu, 1) is cu
    assert fla._expand_cu_seqlens(cu, 2).tolist() == [0, 128, 128, 200]


def test_changing_cu_seqlens_in_place_reaches_the_next_call(backend):
    share = Share((9,), (4, 5), states=False)
    leaves = share.leaves(torch.float32)
    operands = [leaves[name] for name in ("q", "k", "v", "g", "beta")]
    cu, outputs = torch.tensor([0, 4, 9], dtype=torch.int32), []
    for cut in (4, 6):
        cu[1] = cut
        found = gdp_chunkwise_context_parallel(*operands, cu, 2, SCALE, None, backend, context=CPContext.single())
        outputs.append(found)
        exact = dataclasses.replace(share, lengths=(cut, 9 - cut)).exact(torch.float32)["output"]
        assert error(found, exact) <= FP32
    assert not torch.equal(*outputs)


def test_layouts():
    x = torch.randn(2, 3, 4, 5)
    rows = fla._interleave_last_update(x, 3)
    assert rows.shape == (2, 9, 4, 5)
    assert rows.is_contiguous()
    assert torch.equal(rows[:, 2::3], x)
    assert rows.count_nonzero() == x.count_nonzero()
    assert fla._interleave_last_update(x, 1) is x
    q, v = torch.empty(2, 3, 1, 5), torch.empty(2, 6, 4, 7)
    assert fla._state_shape(q, v, None) == (2, 4, 5, 7)
    assert fla._state_shape(q, v, torch.tensor([0, 1, 2, 3])) == (3, 4, 5, 7)


def test_folds_and_boundary_states(backend):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    maps = normal(3, 2, 4, 5 + 4)  # [b | M] of three ranks

    def fold(order, part):
        state = torch.zeros(*part.shape[1:-1], 5, dtype=torch.float64)
        for rank in order:
            state = part[rank, ..., 5:].double() @ state + part[rank, ..., :5].double()
        return state.float()

    for packed in (maps, normal(3, 2, 2, 4, 9)):
        for forward, order in ((True, (0, 1, 2)), (False, (2, 1, 0))):
            out = torch.full((*packed.shape[1:-1], 5), float("nan"))
            found = fla._merge_affine_summaries(packed, out, forward)
            assert found is out
            torch.testing.assert_close(out, fold(order, packed))
            assert not fla._merge_affine_summaries(packed[:0], out, forward).any()
    q, v, cu = torch.empty(1, 6, 2, 4), torch.empty(1, 6, 2, 5), torch.tensor([0, 2, 6], dtype=torch.int32)
    given = normal(2, 2, 4, 5)
    given[0] = 0.0  # continues another rank's
    inputs = GDPInputs(q, q, v, None, torch.empty(1, 6, 2), cu, 1, 1.0, given)
    found = fla._build_initial_state(inputs, CPForwardPackedSummary(maps))
    torch.testing.assert_close(found, torch.stack([fold((0, 1, 2), maps), given[1]]))
    assert torch.equal(fla._build_initial_state(inputs, CPForwardPackedSummary(maps[:0])), given)
    saved = fla.GDPSavedInputs(q, q, v, torch.empty(1, 6, 2), cu, 1, 1.0, None)
    found = fla._build_final_state_grad(saved, CPBackwardPackedSummary(maps), given)
    torch.testing.assert_close(found, torch.stack([given[0], given[1] + fold((2, 1, 0), maps)]))
    assert not fla._build_final_state_grad(saved, CPBackwardPackedSummary(maps[:0])).any()
    pair = (maps[..., 5:], maps[..., :5])
    with pytest.raises(TypeError, match="must be a CPForwardPackedSummary, got CPForwardUnpackedSummary"):
        fla._merge_forward_summaries(CPForwardUnpackedSummary(*pair), maps[0])
    with pytest.raises(TypeError, match="must be a CPBackwardPackedSummary, got CPBackwardUnpackedSummary"):
        fla._merge_backward_summaries(CPBackwardUnpackedSummary(*pair), maps[0])


def test_operands_of_summaries_are_checked():
    def run(k, values):
        found = []
        for call in (
            lambda: fla._compute_fragment_summary(k, k, values, None, None),
            lambda: fla._compute_backward_fragment_summary(k, k, k, None, values, values, 1.0, None),
        ):
            with pytest.raises(ValueError) as caught:  # noqa: PT011, the caller reads the message
                call()
            found.append(str(caught.value))
        assert found[0] == found[1]
        return found[0]

    empty = torch.empty
    assert run(empty(1, 4, 2, 8), empty(1, 5, 2, 8)) == "keys and values must have as many rows, got 4 and 5"
    assert run(empty(1, 4, 2, 8), empty(1, 4, 3, 8)) == "HV must be a multiple of H = 2, got 3"
    assert run(empty(1, 4, 2, 257), empty(1, 4, 2, 8)) == "K must be <= 256, got 257"


def test_unsupported_inputs():
    def stand_in(dtype, width=64, gate=torch.float32):
        q = types.SimpleNamespace(is_cuda=True, dtype=dtype, device="cuda:0", shape=(1, 2, 3, width))
        return types.SimpleNamespace(q=q, beta=types.SimpleNamespace(dtype=gate), g=None)

    for dtype in (torch.bfloat16, torch.float16):
        fla._require_supported(stand_in(dtype, 256))
    with pytest.raises(
        NotImplementedError,
        match="bfloat16 or float16 on a CUDA device, got float32 on cuda:0; use the torch backend for others, or auto",
    ):
        fla._require_supported(stand_in(torch.float32))
    with pytest.raises(NotImplementedError, match="K <= 256, got K = 257; use narrower heads"):
        fla._require_supported(stand_in(torch.bfloat16, 257))
    with pytest.raises(NotImplementedError, match="beta and g in float32 or 16 bits, got float64; cast them, or"):
        fla._require_supported(stand_in(torch.bfloat16, gate=torch.float64))
    x = torch.zeros(1, 2, 1, 4, dtype=torch.bfloat16)
    inputs = GDPInputs(x, x, x, None, x[..., 0], None, 1, 1.0)
    with pytest.raises(NotImplementedError, match="on a CUDA device, got bfloat16 on cpu"):
        fla.FLAGatedDeltaProductCPBackend.cp_forward_prepare(None, inputs)


def test_a_missing_function_is_named(monkeypatch):
    monkeypatch.setattr(fla_functions, "_FUNCTIONS", (("math", "chunk_sum"),))
    load = fla_functions.load.__wrapped__
    monkeypatch.setattr(fla_functions.importlib.metadata, "version", lambda name: "0.9.9")
    with pytest.raises(ImportError, match=r"needs math.chunk_sum, fla-core 0.9.9 is installed; install gdn-cp\[fla\]"):
        load()


BLOCKED = """
import sys
sys.modules["fla"] = sys.modules["triton"] = None
import importlib.metadata
def version(name):
    raise importlib.metadata.PackageNotFoundError(name)
importlib.metadata.version = version
import gdn_cp
from gdn_cp.delta_product import FLAGatedDeltaProductCPBackend
try:
    FLAGatedDeltaProductCPBackend()
except ImportError as error:
    print(error)
"""


def test_importing_needs_neither_fla_nor_triton():
    done = subprocess.run([sys.executable, "-c", BLOCKED], capture_output=True, text=True, timeout=120, check=False)
    expected = "needs fla.utils.input_guard, fla-core is not installed; install gdn-cp[fla] or use the torch backend"
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout


def test_published_names():
    fields = {
        fla.GDPLocalContext: "inputs g_cumsum g_interleaved A w u cu_seqlens_dp chunk_indices chunk_indices_dp",
        fla.GDPSavedInputs: "q k v beta cu_seqlens_dp num_householder scale g_dtype",
        fla.GDPSavedMetadata: "num_householder scale has_cu_seqlens g_dtype",
        fla.GDPBackwardContext: "inputs g_interleaved A initial_state chunk_indices_dp q_interleaved "
        "output_grad_interleaved w h v_new dv",
    }
    for kind, names in fields.items():
        found = [field.name for field in dataclasses.fields(kind)]
        assert found[: len(names.split())] == names.split(), kind
        assert all(x.default is not dataclasses.MISSING for x in dataclasses.fields(kind)[len(names.split()) :])
    signatures = {
        "_expand_cu_seqlens": "cu_seqlens num_householder", "_prepare_fla_forward": "inputs",
        "_compute_fragment_summary": "k w u g cu_seqlens",
        "_compute_backward_fragment_summary": "q k w g do dv scale cu_seqlens",
        "_merge_affine_summaries": "packed_summaries output forward", "_merge_forward_summaries": "summaries output",
        "_merge_backward_summaries": "summaries output_grad", "_state_shape": "q v cu_seqlens",
        "_build_initial_state": "inputs summaries", "_build_final_state_grad": "inputs summaries",
        "_restore_saved_context": "saved_context", "_interleave_last_update": "tensor num_householder",
        "_apply_fla_backward": "context final_state_grad",
    }  # fmt: skip
    for name, names in signatures.items():
        found = list(inspect.signature(getattr(fla, name)).parameters)
        assert found[: len(names.split())] == names.split(), name
    assert fla.FLAGatedDeltaProductCPBackend.autograd_function is fla.FLAGDPChunkwiseContextParallel


@pytest.mark.skipif(importlib.util.find_spec("fla") is None, reason="needs the package fla-core")
@pytest.mark.parametrize(("module", "name"), [x for x in fla_functions._FUNCTIONS if x[0].startswith("fla.ops")])
def test_fla_takes_what_its_stand_in_takes(module, name):
    """Read from its source: to import it takes seconds, and a GPU."""
    spec = importlib.util.find_spec("fla")
    path = Path(spec.submodule_search_locations[0], *module.split(".")[1:]).with_suffix(".py")
    (found,) = (x for x in ast.parse(path.read_text()).body if isinstance(x, ast.FunctionDef) and x.name == name)
    theirs = {x.arg for x in (*found.args.args, *found.args.kwonlyargs)}
    assert set(inspect.signature(getattr(fla_in_torch, name)).parameters) <= theirs
