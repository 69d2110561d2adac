"""The autograd function and the entry point: with a recording backend, and every refusal."""

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from gdn_cp import CPContext, TokenPartition
from gdn_cp.chunkwise import CPBackwardPackedSummary, CPForwardPackedSummary, CPSavedContext
from gdn_cp.delta_product.common import GDPChunkwiseContextParallel, gdp_chunkwise_context_parallel
from gdn_cp.delta_product.torch import TorchGatedDeltaProductCPBackend
from gdn_cp.token_partition import PackedSequenceCPMetadata, build_packed_sequence_cp_metadata


class Recording:
    """A backend whose output is v's first value per token, and whose gradients are known constants."""

    autograd_function = GDPChunkwiseContextParallel

    def __init__(self):
        self.seen = {}

    def cp_forward_prepare(self, inputs):
        self.seen["inputs"] = inputs
        return CPForwardPackedSummary(torch.zeros(1, 1, 2)), inputs

    def cp_forward_apply(self, local_context, preceding_summaries):
        self.seen["preceding"] = len(preceding_summaries.packed)
        i = local_context
        return i.v[:, :: i.num_householder].clone(), CPSavedContext((i.q, i.k, i.v, i.beta), "kept")

    def cp_backward_prepare(self, output_grad, saved_context):
        assert saved_context.metadata == "kept"
        self.seen["contiguous"] = output_grad.is_contiguous()
        return CPBackwardPackedSummary(torch.zeros(1, 1, 2)), saved_context.tensors

    def cp_backward_apply(self, backward_context, following_summaries):
        self.seen["following"] = len(following_summaries.packed)
        q, k, v, beta = (torch.full_like(x, i + 1.0) for i, x in enumerate(backward_context))
        return q, k, v, None, beta


def shard(tokens=3, batch=1, steps=2):
    return dict(
        q=torch.rand(batch, tokens, 1, 2), k=torch.rand(batch, tokens * steps, 1, 2),
        v=torch.rand(batch, tokens * steps, 1, 2), g=None, beta=torch.rand(batch, tokens * steps, 1),
    )  # fmt: skip


def call(inputs=None, backend=None, **changes):
    arguments = dict(
        cu_seqlens=None, num_householder=2, scale=1.0, cp_group=None,
        backend=backend or TorchGatedDeltaProductCPBackend(), context=CPContext.single(),
    )  # fmt: skip
    return gdp_chunkwise_context_parallel(**(inputs or shard()), **{**arguments, **changes})


def test_gradients_reach_their_inputs_and_incoming_ones_are_made_contiguous():
    backend, inputs = Recording(), shard()
    leaves = [inputs[name].requires_grad_() for name in ("q", "k", "v", "beta")]
    output = call(inputs, backend)
    grads = torch.autograd.grad((output.mT * 2.0).sum(), leaves)
    assert [float(x.unique()) for x in grads] == [1.0, 2.0, 3.0, 4.0]
    assert backend.seen["contiguous"]
    assert (backend.seen["preceding"], backend.seen["following"]) == (0, 0)
    assert backend.seen["inputs"].forward_summary_needed is False
    assert backend.seen["inputs"].backward_summary_needed is False


def test_double_backward_is_refused():
    inputs = shard()
    q = inputs["q"].requires_grad_()
    (dq,) = torch.autograd.grad((call(inputs) ** 2).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        dq.sum().backward()


def test_a_compiled_call_breaks_its_graph_once():
    graphs, compiling = [], []

    class Watching(Recording):
        def cp_forward_prepare(self, inputs):
            compiling.append(torch.compiler.is_compiling())
            return super().cp_forward_prepare(inputs)

    def around(q, k, v, beta):
        return 2.0 * call({"q": q, "k": k, "v": v + 1.0, "g": None, "beta": beta}, Watching())

    def keep(graph, inputs):
        graphs.append(graph)
        return graph

    inputs = [x for x in shard().values() if x is not None]
    assert torch.equal(torch.compile(around, backend=keep)(*inputs), around(*inputs))
    assert len(graphs) == 2
    assert compiling == [False, False]


@pytest.mark.ranks
def test_slices_are_those_of_the_sequence():
    def worker(rank):
        backend, metadata = Recording(), TokenPartition((3, 3, 3)).packed((0, 1, 5, 9), rank, "cpu")
        inputs = shard()
        inputs["q"].requires_grad_()
        call(inputs, backend, context=CPContext(dist.group.WORLD), metadata=metadata).sum().backward()
        return backend.seen["preceding"], backend.seen["following"]

    assert run_ranks(3, worker) == [(0, 1), (1, 1), (1, 0)]


@pytest.mark.ranks
def test_ranks_that_disagree_fail_together():
    def worker(rank):
        said = []
        crossing = (0, 2, 3) if rank else (0, 3)
        changes = {
            "R": dict(num_householder=2 - rank),
            "backend": dict(backend=Recording() if rank else None),
            "any_crossing": dict(metadata=TokenPartition((2, 1)).packed(crossing, rank, "cpu")),
        }
        for name, change in changes.items():
            steps = 2 - rank if name == "R" else 2
            inputs = shard(2 - rank if name == "any_crossing" else 3, steps=steps)
            with pytest.raises(RuntimeError, match=f"ranks disagree on {name}"):
                call(inputs, context=CPContext(dist.group.WORLD), **change)
            said.append(name)
        return said

    assert run_ranks(2, worker) == [["R", "backend", "any_crossing"]] * 2


def test_arguments_that_do_not_fit_are_named():
    cu, state = torch.tensor([0, 3], dtype=torch.int32), torch.zeros(1, 1, 2, 2)
    metadata = TokenPartition((3,)).packed((0, 3), 0, "cpu")
    with pytest.raises(ValueError, match="following_rank_stop <= 1, got 0 and 2"):
        call(following_rank_stop=2)
    with pytest.raises(ValueError, match="following_rank_stop <= 1, got 1 and 1"):
        call(preceding_rank_start=1)
    with pytest.raises(ValueError, match=r"cu_seqlens must be None or metadata.local_cu_seqlens"):
        call(cu_seqlens=cu, metadata=metadata)
    with pytest.raises(TypeError, match="metadata must be a PackedSequenceCPMetadata or None, got int"):
        call(metadata=3)
    with pytest.raises(ValueError, match="cu_seqlens needs B = 1, got B = 2"):
        call(shard(batch=2), cu_seqlens=cu)
    with pytest.raises(ValueError, match="initial_state must have N = B = 1 states, got 2"):
        call(initial_state=torch.zeros(2, 1, 2, 2))
    with pytest.raises(ValueError, match="initial_state of packed sequences needs metadata"):
        call(cu_seqlens=cu, initial_state=state)
    with pytest.raises(ValueError, match="a state for sequence 1, got N = 1"):
        call(metadata=TokenPartition((3,)).packed((0, 2, 3), 0, "cpu"), initial_state=state)
    with pytest.raises(ValueError, match="initial_state must have dtype float32, got float64"):
        call(initial_state=state.double())
    with pytest.raises(ValueError, match="k must have shape"):
        call(num_householder=3)


@pytest.mark.parametrize(
    "changes, kind, message",
    [
        ({"cu_seqlens": (0, 3)}, TypeError, "cu_seqlens must be a torch.Tensor, got tuple"),
        ({"cu_seqlens": torch.zeros(2)}, ValueError, "cu_seqlens must have dtype int32, int64, got float32"),
        ({"cu_seqlens": torch.tensor(3)}, ValueError, r"cu_seqlens must have shape \[fragments \+ 1\], got \[\]"),
        ({"initial_state": 0.0}, TypeError, "initial_state must be a torch.Tensor, got float"),
        ({"initial_state": torch.tensor(0.0)}, ValueError, r"initial_state must have shape \[N, HV, K, V\], got \[\]"),
        ({"backend": "fla"}, TypeError, "backend must be a GDPChunkwiseCPBackend, as choose_backend makes .* got str"),
        (
            {"backend": TorchGatedDeltaProductCPBackend},
            TypeError,
            "backend must be a GDPChunkwiseCPBackend, .* got the class TorchGatedDeltaProductCPBackend",
        ),
    ],
)
def test_arguments_of_a_wrong_type_are_named(changes, kind, message):
    with pytest.raises(kind, match=message):
        call(**changes)


def test_sequences_without_a_state_are_refused():
    state = torch.zeros(2, 1, 2, 2)
    for ids, message in [
        ((-1, 0, 1), "sequences must be numbered >= 0 when initial_state is given, got -1"),
        ((0, 1, 2), "initial_state must have a state for sequence 2, got N = 2"),
    ]:
        metadata = build_packed_sequence_cp_metadata(torch.tensor([ids], dtype=torch.int32), 0, 1)
        with pytest.raises(ValueError, match=message):
            call(metadata=metadata, initial_state=state)
        assert call(metadata=metadata).shape == (1, 3, 1, 2)


def test_metadata_that_name_no_rank_are_taken():
    """Code for the published fields makes its own."""
    cu = torch.tensor([0, 1, 3], dtype=torch.int32)
    metadata = PackedSequenceCPMetadata(torch.tensor([[0, 1, 1]], dtype=torch.int32), cu, 0, 1)
    assert torch.equal(call(inputs := shard(), metadata=metadata), call(inputs, cu_seqlens=cu))


@pytest.mark.ranks
def test_metadata_of_another_rank_are_refused_on_all():
    partition = TokenPartition((3, 3))

    def worker(rank):
        own, other = (partition.packed((0, 3, 6), r, "cpu") for r in (rank, 1 - rank))
        context = CPContext(dist.group.WORLD, validate="always")
        with pytest.raises(ValueError, match=r"for this rank, . of 2 ranks, got those of rank . of 2"):
            call(context=context, metadata=other)
        with pytest.raises(ValueError, match="of 2 ranks, got those of rank 0 of 3"):
            call(context=context, metadata=own if rank else TokenPartition((3, 3, 1)).packed((0, 7), 0, "cpu"))
        return call(context=context, metadata=own).shape

    assert run_ranks(2, worker) == [(1, 3, 1, 2)] * 2
