"""Summaries, seeded runs and adjoints: each alone, and together as devices that own parts of a clip use them."""

from itertools import combinations_with_replacement, pairwise, product

import pytest
import torch
from agreement import assert_all_close, assert_close, assert_same, assert_zero
from frame_gdn_cases import DIRECTIONS, KINDS, MASK, upstream
from stage_cases import cut, entry_of, named_tensors, stage_inputs, stage_options
from torch import Tensor

from gdn_kernels.frame_gdn.stages import adjoint, apply, summarize
from gdn_kernels.types import FrameBoundary, FrameInputs, FrameOptions, FrameSummary

TOLERANCE = 1e-12
F = 5
NOTHING = FrameBoundary(None, None, None, None)
RESETS = [(), (2,), (0, 1, 4)]


def compose(first: FrameSummary, second: FrameSummary, resets: tuple[bool, bool]) -> FrameSummary:
    """Return the summary of two neighbouring runs; ``resets`` tells which of them holds one."""

    def pair(name: str, transition: str, reverse: bool) -> Tensor | None:
        one, two = getattr(first.increment, name), getattr(second.increment, name)
        if one is None or two is None:
            return None
        e_one, e_two = getattr(first, transition), getattr(second, transition)
        column = [(x if x.ndim == 4 else x[..., None]) for x in (one, two)]
        if reverse:
            total = column[0] + (0 if resets[0] else e_one.mT @ column[1])
        else:
            total = e_two @ column[0] + column[1]
        return total.reshape(one.shape)

    names = [("forward_kv", "transition_kv"), ("forward_z", "transition_z")]
    names += [("reverse_kv", "transition_kv"), ("reverse_z", "transition_z")]
    increment = FrameBoundary(*(pair(name, e, name.startswith("reverse")) for name, e in names))
    transition_z = None if first.transition_z is None else second.transition_z @ first.transition_z
    return FrameSummary(second.transition_kv @ first.transition_kv, transition_z, increment)


def flat(summary: FrameSummary) -> dict[str, Tensor]:
    """Name all tensors of a summary."""
    return named_tensors(
        {"transition_kv": summary.transition_kv, "transition_z": summary.transition_z}, summary.increment
    )


def after(summary: FrameSummary, entry: FrameBoundary, has_reset: bool) -> dict[str, Tensor]:
    """Apply a summary: exit = transition entry + increment, the reverse transition being E' or 0."""
    found = {}
    for name, state in named_tensors(entry).items():
        e = summary.transition_kv if name.endswith("kv") else summary.transition_z
        e = e if name.startswith("forward") else torch.zeros_like(e) if has_reset else e.mT
        column = state if state.ndim == 4 else state[..., None]
        found[name] = (e @ column).reshape(state.shape) + getattr(summary.increment, name)
    return found


@pytest.mark.parametrize("resets", RESETS)
@pytest.mark.parametrize("mask", [None, MASK], ids=["all", "mask"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("kind", ["raw", "numerator"])
def test_summary_predicts_the_exit_states(
    kind: str, direction: str, mask: Tensor | None, resets: tuple[int, ...]
) -> None:
    """In particular E reversed is E' exactly where no reset lies in the run, and 0 where one does."""
    inputs, options = stage_inputs(kind, mask=mask), stage_options(kind, direction, resets=resets)
    entry = entry_of(inputs, options)
    exits = named_tensors(apply(inputs, options, entry)[2])
    assert_all_close(after(summarize(inputs, options), entry, bool(options.resets)), exits, TOLERANCE)


@pytest.mark.parametrize("resets", RESETS)
@pytest.mark.parametrize("kind", ["raw", "numerator"])
def test_summaries_compose_on_every_run_cut_anywhere(kind: str, resets: tuple[int, ...]) -> None:
    inputs, options = stage_inputs(kind, mask=MASK), stage_options(kind, "bidirectional", resets=resets)
    of = {(a, b): summarize(*cut(inputs, options, a, b)) for a in range(F + 1) for b in range(a, F + 1)}

    def holds(a: int, b: int) -> bool:
        return any(a <= f < b for f in resets)

    for a, m, b in combinations_with_replacement(range(F + 1), 3):
        found = compose(of[a, m], of[m, b], (holds(a, m), holds(m, b)))
        assert_all_close(flat(found), flat(of[a, b]), TOLERANCE)
    for m, n in of:
        x, y, z = of[0, m], of[m, n], of[n, F]
        has = holds(0, m), holds(m, n), holds(n, F)
        left = compose(compose(x, y, has[:2]), z, (has[0] or has[1], has[2]))
        right = compose(x, compose(y, z, has[1:]), (has[0], has[1] or has[2]))
        assert_all_close(flat(left), flat(right), TOLERANCE)


@pytest.mark.parametrize("frames_spatial", [(0, 3), (2, 0), (0, 0)])
@pytest.mark.parametrize("kind", KINDS)
def test_stages_of_an_empty_run_are_the_identity_or_pure_decay(kind: str, frames_spatial: tuple[int, int]) -> None:
    """FC-S08: no frames hand every state on bit for bit; frames without tokens only decay it."""
    frames, spatial = frames_spatial
    inputs, options = stage_inputs(kind, (2, 3, frames, spatial, 4)), stage_options(kind, "bidirectional")
    entry = entry_of(inputs, options)
    decay = inputs.decay.detach().prod(-1)[..., None]
    summary = summarize(inputs, options)
    assert_close(summary.transition_kv, torch.eye(4, dtype=torch.float64) * decay[..., None], 1e-15)
    for name, part in named_tensors(summary.increment).items():
        assert_zero(part, name)
    result, denominator, exits = apply(inputs, options, entry)
    assert result.shape == (2, 0, 3, 4)
    assert denominator is None or denominator.shape == (2, 3, 0)
    backward = adjoint(inputs, options, entry, torch.zeros_like(result), None)
    arrived = upstream(named_tensors(exits))
    grads = backward.finish(FrameBoundary(**{**NOTHING._asdict(), **arrived}), [True] * 11)
    assert grads.beta.shape == inputs.beta.shape
    for name, state in named_tensors(entry).items():
        factor = decay if state.ndim == 3 else decay[..., None]
        assert_close(getattr(exits, name), state * factor, 1e-15, name)
        assert_zero(getattr(backward.gamma, name), name)
    if not frames:
        for name, state in named_tensors(entry).items():
            assert_same(getattr(exits, name), state, name)


def test_stages_of_no_batch() -> None:
    """FC-S08: B = 0."""
    inputs, options = stage_inputs("raw", (0, 3, 5, 7, 4)), stage_options("raw", "bidirectional", resets=(2,))
    entry = entry_of(inputs, options)
    result, denominator, _ = apply(inputs, options, entry)
    backward = adjoint(inputs, options, entry, result.detach(), denominator.detach())
    grads = backward.finish(backward.gamma, [True] * 11)
    assert summarize(inputs, options).transition_z.shape == (0, 3, 4, 4)
    assert grads.qkv.shape == inputs.qkv.shape
    assert_zero(grads.q_norm_weight, "a sum over nothing")


def reference_gradients(
    inputs: FrameInputs, entry: FrameBoundary, results: dict[str, Tensor], incoming: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return what autograd of one `apply` gives for every leaf."""
    leaves = {name: value for name, value in named_tensors(inputs, entry).items() if value.requires_grad}
    live = [name for name in incoming if results[name].requires_grad]
    found = torch.autograd.grad(
        [results[name] for name in live], list(leaves.values()), [incoming[name] for name in live],
        materialize_grads=True, allow_unused=True, retain_graph=True,
    )  # fmt: skip
    return dict(zip(leaves, found, strict=True))


@pytest.mark.parametrize("resets", RESETS)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_adjoint_gives_what_autograd_gives_and_touches_nothing(
    kind: str, direction: str, resets: tuple[int, ...]
) -> None:
    """FC-A02: gamma is the entries' gradient without the exits'; finish is everything else with it; twice the same."""
    inputs, options = stage_inputs(kind, mask=MASK), stage_options(kind, direction, resets=resets, eps=0.05)
    entry = entry_of(inputs, options)
    before = {name: value.detach().clone() for name, value in named_tensors(inputs, entry).items()}
    result, denominator, exits = apply(inputs, options, entry)
    results = named_tensors({"result": result, "denominator": denominator}, exits)
    incoming = upstream({k: v for k, v in results.items() if not (kind == "output" and k == "denominator")})
    of_results = {name: value for name, value in incoming.items() if name in ("result", "denominator")}
    backward = adjoint(inputs, options, entry, incoming["result"], incoming.get("denominator"))
    without = reference_gradients(inputs, entry, results, of_results)
    assert_all_close(named_tensors(backward.gamma), {name: without[name] for name in named_tensors(entry)}, TOLERANCE)
    exit_gradient = FrameBoundary(*(incoming.get(name) for name in FrameBoundary._fields))
    found = named_tensors(backward.finish(exit_gradient, [True] * 11))
    expected = reference_gradients(inputs, entry, results, incoming)
    assert_all_close(found, {name: expected[name] for name in found}, TOLERANCE)
    assert found.keys() == {name for name in expected if name not in FrameBoundary._fields}
    for name, value in named_tensors(backward.finish(exit_gradient, [True] * 11)).items():
        assert_same(value, found[name], name)
    for name, value in named_tensors(inputs, entry).items():
        assert_same(value.detach(), before[name], name)
        assert value.grad is None


def test_adjoint_gives_only_what_is_needed_and_zeros_where_nothing_arrives() -> None:
    """FC-A05: each subset of needs; None as incoming gradient counts as zero."""
    inputs, options = stage_inputs("raw"), stage_options("raw", "bidirectional")
    plain = FrameInputs(*(x if x is None else x.detach() for x in inputs))  # needs decide, not requires_grad
    entry = entry_of(inputs, options)
    dresult = upstream({"result": apply(inputs, options, entry)[0]})["result"]
    backward = adjoint(plain, options, entry, dresult, None)
    everything = backward.finish(NOTHING, [True] * 11)
    assert not any(x.requires_grad for x in named_tensors(plain).values()), "inputs keep their flag"
    for needs in product([False, True], repeat=5):
        wanted = [needs[0], False, False, False, *needs[1:], False, False, False]
        found = backward.finish(NOTHING, wanted)
        assert [x is not None for x in found] == wanted
        for name, value in named_tensors(found).items():
            assert_same(value, getattr(everything, name), name)
    silent = adjoint(plain, options, entry, None, None)
    for name, value in named_tensors(silent.gamma, silent.finish(NOTHING, [True] * 11)).items():
        assert_zero(value, name)
    for name, value in named_tensors(plain).items():
        gradient = getattr(everything, name)
        assert (gradient is None) == (name in ("rope_cos", "rope_sin"))
        assert gradient is None or gradient.shape == value.shape


def run_on_ranks(
    inputs: FrameInputs, options: FrameOptions, counts: tuple[int, ...], entry: FrameBoundary,
    incoming: dict[str, Tensor],
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:  # fmt: skip
    """Run a clip of which rank r owns ``counts[r]`` frames, there and back; return its results and gradients."""
    ends = [sum(counts[:r]) for r in range(len(counts) + 1)]
    locals_ = [cut(inputs, options, a, b) for a, b in pairwise(ends)]
    ranks = range(len(counts))
    summaries = [summarize(*local) for local in locals_]
    has = [bool(local[1].resets) for local in locals_]
    entries: list[dict[str, Tensor]] = [{} for _ in ranks]
    sides = {"forward": (list(ranks), entry._asdict()), "reverse": (list(ranks)[::-1], entry._asdict())}
    exits = {}
    for side, (order, state) in sides.items():
        state = {name: value for name, value in state.items() if value is not None and name.startswith(side)}
        for r in order:
            entries[r].update(state)
            state = after(summaries[r], FrameBoundary(**{**NOTHING._asdict(), **state}), has[r])
        exits.update(state)
    bounds = [FrameBoundary(**{**NOTHING._asdict(), **values}) for values in entries]
    outcomes = [apply(*local, bound) for local, bound in zip(locals_, bounds, strict=True)]
    results = {"result": torch.cat([x[0] for x in outcomes], 1), **exits}
    if outcomes[0][1] is not None:
        results["denominator"] = torch.cat([x[1] for x in outcomes], 2)

    spatial = inputs.beta.shape[3]
    adjoints = []
    for (local, bound), (a, b) in zip(zip(locals_, bounds, strict=True), pairwise(ends), strict=True):
        tokens = slice(a * spatial, b * spatial)
        dden = incoming["denominator"][:, :, tokens] if "denominator" in incoming else None
        adjoints.append(adjoint(*local, bound, incoming["result"][:, tokens], dden))
    dexits: list[dict[str, Tensor]] = [{} for _ in ranks]
    gradients = {}
    for side, order in (("forward", list(ranks)[::-1]), ("reverse", list(ranks))):
        state = {name: incoming[name] for name in exits if name.startswith(side)}
        for r in order:
            dexits[r].update(state)
            back = {}
            for name, value in state.items():
                e = summaries[r].transition_kv if name.endswith("kv") else summaries[r].transition_z
                e = e.mT if side == "forward" else torch.zeros_like(e) if has[r] else e
                column = value if value.ndim == 4 else value[..., None]
                back[name] = (e @ column).reshape(value.shape) + getattr(adjoints[r].gamma, name)
            state = back
        gradients.update(state)
    parts = [
        backward.finish(FrameBoundary(**{**NOTHING._asdict(), **d}), [True] * 11)
        for backward, d in zip(adjoints, dexits, strict=True)
    ]
    for name in ("qkv", "q", "k", "v"):
        if getattr(inputs, name) is not None:
            gradients[name] = torch.cat([getattr(part, name) for part in parts], 1)
    for name in ("beta", "decay"):
        gradients[name] = torch.cat([getattr(part, name) for part in parts], 2)
    for name in ("q_norm_weight", "k_norm_weight"):
        if getattr(inputs, name) is not None:
            gradients[name] = sum(getattr(part, name) for part in parts)
    return results, gradients


def shares(frames: int, ranks: int) -> list[tuple[int, ...]]:
    """Return every way to own ``frames`` frames, empty ranks included."""
    return [counts for counts in product(range(frames + 1), repeat=ranks) if sum(counts) == frames]


@pytest.mark.parametrize("last_only", [False, True], ids=["loss-everywhere", "loss-on-last"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("kind", ["raw", "numerator"])
def test_every_cut_of_a_clip_into_ranks_equals_one_run(kind: str, ranks: int, last_only: bool) -> None:
    """Uneven, empty, too many ranks; a chunk straddles ranks, starts on a boundary, and in a frame that is masked."""
    frames = 4
    mask = MASK[:, 1:]
    inputs = stage_inputs(kind, (2, 3, frames, 2, 6), mask=mask)
    options = stage_options(kind, "bidirectional", resets=(2,))
    entry = entry_of(inputs, options)
    result, denominator, exits = apply(inputs, options, entry)
    expected = named_tensors({"result": result, "denominator": denominator}, exits)
    for counts in shares(frames, ranks):
        incoming = upstream(expected)
        if last_only:
            tokens = 2 * (frames - counts[-1])
            incoming = {name: torch.zeros_like(value) for name, value in incoming.items()}
            incoming["result"][:, tokens:] = upstream(expected)["result"][:, tokens:]
        wanted = reference_gradients(inputs, entry, expected, incoming)
        found, gradients = run_on_ranks(inputs, options, counts, entry, incoming)
        assert_all_close(found, {name: expected[name] for name in found}, TOLERANCE)
        assert gradients.keys() == wanted.keys()
        assert_all_close(gradients, {name: wanted[name] for name in gradients}, TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
def test_exit_states_chain_into_entry_states_for_every_cut(kind: str) -> None:
    """The forward direction needs no summaries: the next call starts where the last one ended."""
    inputs, options = stage_inputs(kind), stage_options(kind, "forward")
    entry = entry_of(inputs, options)
    result, _, exits = apply(inputs, options, entry)
    for m in range(F + 1):
        first = apply(*cut(inputs, options, 0, m), entry)
        second = apply(*cut(inputs, options, m, F), first[2])
        assert_close(torch.cat((first[0], second[0]), 1), result, TOLERANCE)
        assert_all_close(named_tensors(second[2]), named_tensors(exits), TOLERANCE)
