"""The comparison of schedules can fail."""

import pytest
import schedule_cases
import torch
from schedule_cases import Case, check


def test_a_wrong_state_is_found(monkeypatch):
    case = Case(3, "all_gather")
    check(case)
    wrong = schedule_cases.expected(case)
    wrong["J_z"][2] = wrong["J_z"][2] + 1e-9 * torch.ones_like(wrong["J_z"][2])
    monkeypatch.setattr(schedule_cases, "expected", lambda case: wrong)
    with pytest.raises(AssertionError, match="J_z of rank 2"):
        check(case)
