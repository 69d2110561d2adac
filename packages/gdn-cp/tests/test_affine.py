"""The algebra of affine maps."""

import torch

from gdn_cp import AffineMap, affine


def maps(count: int, columns: int = 3) -> list[AffineMap]:
    shape = (2, 3, 4)
    return [
        AffineMap(torch.randn(*shape, 4, dtype=torch.float64), torch.randn(*shape, columns, dtype=torch.float64))
        for _ in range(count)
    ]


def test_compose_is_application_in_turn_and_associative():
    a, b, c = maps(3)
    state = torch.randn(2, 3, 4, 3, dtype=torch.float64)
    torch.testing.assert_close(affine.apply(affine.compose(b, a), state), affine.apply(b, affine.apply(a, state)))
    one, other = affine.compose(affine.compose(c, b), a), affine.compose(c, affine.compose(b, a))
    torch.testing.assert_close(one.transition, other.transition)
    torch.testing.assert_close(one.increment, other.increment)
    assert not torch.allclose(affine.compose(a, b).transition, affine.compose(b, a).transition)


def test_identity_changes_nothing():
    (m,) = maps(1)
    unit = affine.identity(m)
    for both in (affine.compose(m, unit), affine.compose(unit, m)):
        assert torch.equal(both.transition, m.transition)
        assert torch.equal(both.increment, m.increment)


def test_fold_and_exclusive_walk_the_maps_in_order():
    chain, state = maps(4), torch.randn(2, 3, 4, 3, dtype=torch.float64)
    between = affine.exclusive(chain, state)
    assert len(between) == 4
    assert torch.equal(between[0], state)
    for m, before, after in zip(chain, between, [*between[1:], affine.fold(chain, state)], strict=True):
        assert torch.equal(affine.apply(m, before), after)
    assert torch.equal(affine.fold([], state), state)


def test_adjoint_is_the_gradient():
    (m,) = maps(1)
    state = torch.randn(2, 3, 4, 3, dtype=torch.float64, requires_grad=True)
    upstream, gamma = torch.randn(2, 2, 3, 4, 3, dtype=torch.float64).unbind(0)
    ((affine.apply(m, state) * upstream).sum() + (state * gamma).sum()).backward()
    torch.testing.assert_close(affine.apply(affine.adjoint(m, gamma), upstream), state.grad)


def test_fp32_maps_are_folded_wide_and_rounded_once():
    """The result of a long fold is the fp64 one rounded, whatever the global switch for products says."""
    chain = [AffineMap(*(x.float() for x in m)) for m in maps(6)]
    state = torch.randn(2, 3, 4, 3)
    exact = affine.fold([AffineMap(*(x.double() for x in m)) for m in chain], state.double())
    assert torch.equal(affine.fold(chain, state), exact.float())


def test_product_is_wide_and_rounded_once():
    left, right = torch.randn(2, 4, 5), torch.randn(2, 5, 3)
    assert torch.equal(affine.product(left, right), (left.double() @ right.double()).float())
    assert affine.product(left.bfloat16(), right).dtype == torch.bfloat16
