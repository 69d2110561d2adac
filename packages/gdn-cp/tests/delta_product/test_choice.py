"""Which backend is chosen, for what, and what is refused."""

import types

import fla_in_torch
import pytest
import torch

from gdn_cp.delta_product import FLAGatedDeltaProductCPBackend, TorchGatedDeltaProductCPBackend, choice, fla_functions
from gdn_cp.delta_product.choice import choose_backend


@pytest.fixture(autouse=True)
def forget():
    choice._fastest.cache_clear()
    yield
    choice._fastest.cache_clear()


def queries(dtype=torch.bfloat16, width=8, is_cuda=True):
    return types.SimpleNamespace(is_cuda=is_cuda, dtype=dtype, shape=torch.Size([1, 4, 2, width]))


def missing():
    raise ImportError("no fla-core")


def test_auto_takes_fla_only_for_what_it_runs(monkeypatch):
    monkeypatch.setattr(fla_functions, "load", fla_in_torch.functions)
    for q, kind in [
        (queries(), FLAGatedDeltaProductCPBackend),
        (queries(torch.float16, 256), FLAGatedDeltaProductCPBackend),
        (queries(torch.float32), TorchGatedDeltaProductCPBackend),
        (queries(is_cuda=False), TorchGatedDeltaProductCPBackend),
    ]:
        assert type(choose_backend("auto", q)) is kind
    assert type(choose_backend("torch", queries())) is TorchGatedDeltaProductCPBackend
    assert type(choose_backend("fla", queries(is_cuda=False))) is FLAGatedDeltaProductCPBackend


def test_auto_does_without_fla_and_a_name_does_not(monkeypatch):
    monkeypatch.setattr(fla_functions, "load", missing)
    assert type(choose_backend("auto", queries())) is TorchGatedDeltaProductCPBackend
    with pytest.raises(ImportError, match="no fla-core"):
        choose_backend("fla", queries())


def test_refuses_other_names():
    with pytest.raises(ValueError, match="backend must be one of 'auto', 'torch', 'fla', got 'triton'"):
        choose_backend("triton", queries())
    with pytest.raises(TypeError, match="backend must be a str, got NoneType"):
        choose_backend(None, queries())


@pytest.mark.parametrize("name", ["auto", "torch", "fla"])
def test_refuses_keys_that_no_backend_takes(name):
    with pytest.raises(ValueError, match="q must have K <= 256 for any backend, got K = 257; use narrower heads"):
        choose_backend(name, queries(width=257))


@pytest.mark.parametrize("name", ["auto", "fla"])
def test_compiled_it_imports_outside_the_graph(monkeypatch, name):
    compiling = []

    def load():
        compiling.append(torch.compiler.is_compiling())
        return fla_in_torch.functions()

    monkeypatch.setattr(fla_functions, "load", load)

    def choose(x, q):
        return x + 1.0, choose_backend(name, q)

    _, chosen = torch.compile(choose, backend="eager")(torch.zeros(1), queries())
    assert type(chosen) is FLAGatedDeltaProductCPBackend
    assert compiling == [False]
