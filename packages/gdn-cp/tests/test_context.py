"""What a context accepts, and what it is."""

import pytest
import torch.distributed as dist
from ranks import run_ranks

from gdn_cp import CPContext
from gdn_cp.context import as_context
from gdn_cp.cost_model import Link


def test_single_needs_no_distributed():
    context = CPContext.single()
    assert (context.rank, context.size, context.is_trivial, context.global_rank(0)) == (0, 1, True, 0)
    assert context.replace(tag="blocks.3").tag == "blocks.3"


def test_exactly_one_of_group_and_mesh():
    with pytest.raises(ValueError, match="exactly one of group and mesh"):
        CPContext()
    with pytest.raises(TypeError, match=r"group must be a torch.distributed.ProcessGroup, got str"):
        CPContext("world")
    with pytest.raises(ValueError, match="neither group nor mesh"):
        CPContext("world", alone=True)


@pytest.mark.parametrize(
    ("option", "allowed"),
    [("schedule", "'auto', 'all_gather', 'chain', 'doubling'"), ("validate", "'first', 'always'")],
)
def test_unknown_options_list_the_known_ones(option, allowed):
    with pytest.raises(ValueError, match=f"{option} must be one of {allowed}"):
        CPContext.single().replace(**{option: "sometimes"})


def test_links_are_named_or_given():
    for link in ("ethernet", Link("mine", 1.0, 10.0)):
        assert CPContext.single().replace(link=link).link == link
    with pytest.raises(ValueError, match="link must be a Link or one of 'nvlink', 'infiniband', 'ethernet', got 'usb'"):
        CPContext.single().replace(link="usb")
    with pytest.raises(TypeError, match="link must be a Link or the name of one, got int"):
        CPContext.single().replace(link=3)


@pytest.mark.ranks
def test_groups_and_meshes():
    """FC-D02: ranks are those of the group; an axis that is not ascending is refused; non-members are told."""

    def worker(rank: int) -> list[str]:
        said = []
        pair = dist.new_group([3, 1])
        if rank in (1, 3):
            context = CPContext(pair)
            assert [context.global_rank(i) for i in range(2)] == [1, 3]
            assert context.rank == (0 if rank == 1 else 1)
        else:
            with pytest.raises(RuntimeError, match="group that contains this rank") as caught:
                CPContext(pair)
            said.append(str(caught.value))
        mesh = dist.device_mesh.DeviceMesh("cpu", [[2, 0], [3, 1]], mesh_dim_names=("data", "frames"))
        with pytest.raises(RuntimeError, match="mesh axis 'frames' must list its ranks in ascending order"):
            CPContext(mesh=mesh, mesh_axis="frames")
        with pytest.raises(RuntimeError, match="mesh of 2 axes needs mesh_axis, one of 'data', 'frames'"):
            CPContext(mesh=mesh)
        with pytest.raises(RuntimeError, match="mesh_axis must be one of 'data', 'frames', got 'time'"):
            CPContext(mesh=mesh, mesh_axis="time")
        with pytest.raises(ValueError, match="exactly one of group and mesh"):
            CPContext(pair, mesh=mesh)
        return said

    assert [bool(said) for said in run_ranks(4, worker)] == [True, False, True, False]


@pytest.mark.ranks
def test_published_functions_take_a_group_or_a_context():
    def worker(rank: int) -> bool:
        context = CPContext(dist.group.WORLD, tag="blocks.3")
        made = as_context(dist.group.WORLD)
        return as_context(context) is context and (made.rank, made.size) == (rank, 2)

    assert run_ranks(2, worker) == [True, True]
    with pytest.raises(TypeError, match="group must be a torch.distributed.ProcessGroup or a CPContext, got str"):
        as_context("world")
