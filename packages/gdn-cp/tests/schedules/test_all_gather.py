"""All maps to all ranks: states and gradients between ranks from their recursions."""

import pytest
from schedule_cases import Case, check


@pytest.mark.parametrize("size", [1, 2, 3, 6])
@pytest.mark.parametrize("save_transitions", [True, False])
def test_states_between_ranks(size, save_transitions):
    for direction in ("forward", "reverse", "bidirectional"):
        for has_z in (True, False):
            check(Case(size, "all_gather", 1, direction, has_z, (1,), True, save_transitions))
            check(Case(size, "all_gather", 1, direction, has_z, (), False, save_transitions))
