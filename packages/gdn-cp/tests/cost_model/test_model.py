"""The model's table, the choice it makes, the number of blocks against a search, and every error."""

import dataclasses
import math

import pytest

from gdn_cp.cost_model import (
    INFINIBAND,
    LINKS,
    NVLINK,
    SCHEDULES,
    Link,
    as_link,
    chain_blocks,
    choose_schedule,
    message_bytes,
    predict,
    resolve_schedule,
)

SIZES = (2, 4, 8, 16, 32, 64)
BYTES = message_bytes(112, 20)
# microseconds, worked out apart from this code, both directions
TABLE = {
    "nvlink": ["32/22/33", "67/67/66", "137/149/99", "277/297/132", "556/573/165", "1114/1104/198"],
    "infiniband": ["119/51/100", "306/154/200", "680/304/300", "1429/569/400", "2927/1059/501", "5922/1982/601"],
}
CHOICES = {
    "nvlink": ["chain", "all_gather", "all_gather", "doubling", "doubling", "doubling"],
    "infiniband": ["chain", "chain", "doubling", "doubling", "doubling", "doubling"],
}


def test_bytes_are_those_of_the_wire():
    assert message_bytes(6, 4, batch=2, itemsize=8) == (8 * 8 * 2 * 36, 8 * 8 * (36 + 6))
    assert message_bytes(6, 4, streams=1) == (4 * 4 * 36, 4 * 4 * 36)


@pytest.mark.parametrize("name", TABLE)
def test_predictions_as_a_table(name):
    rows = ["/".join(f"{predict(s, size, *BYTES, LINKS[name]):.0f}" for s in SCHEDULES) for size in SIZES]
    assert rows == TABLE[name]


@pytest.mark.parametrize("name", CHOICES)
def test_choices_as_a_table(name):
    assert [choose_schedule(size, *BYTES, LINKS[name]) for size in SIZES] == CHOICES[name]


def test_all_gather_wins_ties_one_rank_and_final_states():
    assert choose_schedule(1, *BYTES, INFINIBAND) == "all_gather"
    assert choose_schedule(64, *BYTES, INFINIBAND, has_final=True) == "all_gather"
    slower = Link("no bandwidth to speak of, folds for nothing", 1.0, 1e6, 0.0, 0.0)
    assert choose_schedule(4, *BYTES, slower) == "all_gather"


def test_one_direction_is_cheaper_for_all_gather_only():
    for schedule in SCHEDULES:
        one, both = (predict(schedule, 8, *BYTES, NVLINK, directions=n) for n in (1, 2))
        assert (one < both) == (schedule == "all_gather")
        assert predict(schedule, 1, *BYTES, NVLINK) == 0


def test_a_backward_pass_sends_transitions_where_its_schedule_does():
    """A gather kept those of the forward pass, unless it was told not to; a chain never sends any."""

    def times(schedule: str, **options: bool) -> tuple[float, float]:
        forward = predict(schedule, 8, *BYTES, NVLINK)
        return forward, predict(schedule, 8, *BYTES, NVLINK, backward=True, **options)

    forward, backward = times("all_gather")
    assert forward - backward == pytest.approx(NVLINK.transfer(7 * BYTES[0]))
    assert forward == predict("all_gather", 8, *BYTES, NVLINK, save_transitions=False)
    for schedule, options in (("all_gather", {"save_transitions": False}), ("chain", {}), ("doubling", {})):
        forward, backward = times(schedule, **options)
        assert forward == backward


def test_each_schedule_has_its_own_time_per_map():
    def slower(schedule: str) -> list[str]:
        base = predict(schedule, 4, *BYTES, NVLINK)
        names = ("fold", "compose", "advance")
        return [n for n in names if predict(schedule, 4, *BYTES, dataclasses.replace(NVLINK, **{n: 99.0})) > base]

    found = [slower(schedule) for schedule in ("all_gather", "doubling", "chain")]
    assert found == [["fold"], ["compose"], ["advance"]]


@pytest.mark.parametrize("name", LINKS)
def test_blocks_are_those_of_a_search(name):
    """Rounding the continuous minimum costs at most 5 percent of the best whole number."""
    for size in range(2, 65):
        for scale in (0.01, 0.1, 1, 10):
            state, link = scale * BYTES[1], LINKS[name]
            times = [predict("chain", size, 0, state, link, blocks=n) for n in range(1, 9)]
            assert predict("chain", size, 0, state, link) <= 1.05 * min(times)
            assert 1 <= chain_blocks(size, state, link) <= 8


def test_blocks_at_the_ends():
    assert chain_blocks(2, BYTES[1], INFINIBAND) == 1
    assert chain_blocks(64, 1e12, NVLINK) == 8
    assert chain_blocks(3, 1e6, Link("no latency", 0.0, 1.0)) == 8


def test_auto_is_settled_and_other_schedules_are_taken_as_named():
    assert resolve_schedule("auto", 4, *BYTES, INFINIBAND) == ("chain", chain_blocks(4, BYTES[1], INFINIBAND))
    assert resolve_schedule("auto", 4, *BYTES, INFINIBAND, has_final=True) == ("all_gather", 1)
    for schedule in SCHEDULES:
        assert resolve_schedule(schedule, 4, *BYTES, NVLINK).schedule == schedule
    for schedule in ("chain", "doubling"):
        with pytest.raises(NotImplementedError, match=f"schedule='{schedule}' does not bring the final state to every"):
            resolve_schedule(schedule, 4, *BYTES, NVLINK, has_final=True)
    with pytest.raises(ValueError, match="schedule must be one of 'auto', 'all_gather', 'chain', 'doubling', got 'st"):
        resolve_schedule("star", 4, *BYTES, NVLINK)
    with pytest.raises(ValueError, match="schedule must be one of 'all_gather', 'chain', 'doubling', got 'auto'"):
        predict("auto", 4, *BYTES, NVLINK)


def test_links_are_checked():
    assert as_link("infiniband") is INFINIBAND
    assert as_link(NVLINK) is NVLINK
    with pytest.raises(ValueError, match="link must be a Link or one of 'nvlink', 'infiniband', 'ethernet', got 'usb'"):
        as_link("usb")
    with pytest.raises(TypeError, match="link must be a Link or the name of one, got float"):
        as_link(1.0)  # type: ignore[arg-type]
    for field in ("latency", "fold", "compose", "advance"):
        with pytest.raises(ValueError, match=rf"{field} must be a finite number >= 0, got -1"):
            Link(**{"name": "x", "latency": 1.0, "bandwidth": 1.0, field: -1.0})
    for bandwidth in (0.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="bandwidth must be a finite number > 0"):
            Link("x", 1.0, bandwidth)
