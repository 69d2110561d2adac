"""Plans of passes in one direction: rank order, layouts, truncation. Values are tested with what runs them."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from gdn_cp import CPContext
from gdn_cp.affine import AffineMap
from gdn_cp.scan_plan import ScanPlan, active_frames, over_ranks

B, H, D = 2, 3, 4


def plan(rank: int, **changes: object) -> ScanPlan:
    base = ScanPlan(4, rank, False, ("kv", "z"), (B, H), D, torch.float64, torch.device("cpu"), True, 2)
    return dataclasses.replace(base, **changes)


def test_order_and_place_follow_the_states():
    assert [plan(rank).place for rank in range(4)] == [0, 1, 2, 3]
    assert [plan(rank, is_reversed=True).place for rank in range(4)] == [3, 2, 1, 0]
    assert list(plan(0, is_reversed=True).order) == [3, 2, 1, 0]


def test_layout_holds_what_the_pass_needs():
    layout = plan(0).layout("transition", "state", "final")
    assert layout.names == ("transition_kv", "transition_z", "state_kv", "state_z", "final_kv", "final_z")
    assert layout.shapes == ((B, H, D, D),) * 3 + ((B, H, D, 1), (B, H, D, D), (B, H, D, 1))
    assert plan(0, streams=("kv",)).layout("transition", "state").sizes == (B * H * D * D,) * 2


@pytest.mark.parametrize("is_reversed", [False, True])
def test_states_walk_the_ranks_and_gradients_walk_back(is_reversed):
    """Entry states and their gradients against autograd through the composition written out."""
    shapes = {"kv": (4, B, H, D, D), "z": (4, B, H, D, 1)}
    E = {s: torch.randn(4, B, H, D, D, dtype=torch.float64) for s in shapes}
    h = {s: torch.randn(shape, dtype=torch.float64, requires_grad=True) for s, shape in shapes.items()}
    plans = [plan(rank, is_reversed=is_reversed) for rank in range(4)]
    gathered = torch.stack(
        [p.publish({s: AffineMap(E[s][p.rank], h[s][p.rank].detach()) for s in shapes}) for p in plans]
    )
    gamma = {s: torch.randn_like(x) for s, x in h.items()}
    dfinal = {s: torch.randn_like(x) for s, x in h.items()}
    kept = [p.kept(gathered, gathered[p.rank]) for p in plans]
    back = torch.stack([
        p.publish_backward({s: gamma[s][p.rank] for s in shapes}, {s: dfinal[s][p.rank] for s in shapes}, own)
        for p, (_, own) in zip(plans, kept, strict=True)
    ])  # fmt: skip
    for s in shapes:
        state, loss = torch.zeros_like(h[s][0]), torch.zeros((), dtype=torch.float64)
        for rank in plans[0].order:
            entry, final = plans[rank].entries(gathered)
            assert torch.allclose(entry[s], state, rtol=1e-12, atol=1e-12)
            loss = loss + (state * gamma[s][rank]).sum()  # gamma is what a rank's own frames want of its entry
            state = E[s][rank] @ state + h[s][rank]
        assert torch.allclose(final[s], state, rtol=1e-12, atol=1e-12)
        loss = loss + sum((state * dfinal[s][rank]).sum() for rank in range(4))
        (expected,) = torch.autograd.grad(loss, h[s])
        for p, (transitions, _) in zip(plans, kept, strict=True):
            assert torch.allclose(p.exits(back, transitions)[s], expected[p.rank], rtol=1e-12, atol=1e-12)


def test_transitions_that_are_not_saved_are_sent_again():
    some = plan(1, save_transitions=False)
    maps = {"kv": AffineMap(torch.randn(B, H, D, D).double(), torch.zeros(B, H, D, D).double()),
            "z": AffineMap(torch.randn(B, H, D, D).double(), torch.zeros(B, H, D, 1).double())}  # fmt: skip
    buffer = some.publish(maps)
    gathered, own = some.kept(buffer[None].repeat(4, 1), buffer)
    assert gathered.numel() == 0
    sent = some.publish_backward({s: m.increment for s, m in maps.items()}, {"kv": None, "z": None}, own)
    blocks = some.layout("transition", "state", "final").unpack(sent)
    assert torch.equal(blocks["transition_z"], maps["z"].transition)
    assert not blocks["final_kv"].any()


def test_active_frames_are_counted_from_the_first_rank():
    assert [active_frames(5, False, 3, rank, 4) for rank in range(4)] == [3, 2, 0, 0]
    assert active_frames(None, True, 3, 1, 4) == 3


def test_truncation_errors():
    with pytest.raises(NotImplementedError, match="truncate_to_active is for states that pass from the first rank"):
        active_frames(2, True, 3, 0, 2)
    with pytest.raises(ValueError, match=r"truncate_to_active must lie in 1 ... T_local \* P = 6, got 7"):
        active_frames(7, False, 3, 0, 2)
    for given in (2.0, True):
        with pytest.raises(TypeError, match="truncate_to_active must be an int or None"):
            active_frames(given, False, 3, 0, 2)  # type: ignore[arg-type]


def test_one_rank_exchanges_with_itself():
    buffer = torch.rand(5)
    assert torch.equal(over_ranks(CPContext.single(), "op")([buffer], "forward"), buffer[None])
