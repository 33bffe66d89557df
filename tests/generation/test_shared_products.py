"""Packed layers that read the same tensor: one product for all of them, and never the output of another tensor."""

from __future__ import annotations

import copy
from itertools import permutations
from weakref import ref

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from packed_case import OWN_MIN_ELEMENTS, of_any_size  # noqa: F401 - a fixture

from pagedtree.integrations.transformers import packed_linear, packed_weights
from pagedtree.integrations.transformers.packed_linear import PackedLinear, PackedRows
from pagedtree.integrations.transformers.packed_weights import MIN_ELEMENTS

pytestmark = pytest.mark.usefixtures("one_thread")

NAMES = ("q_proj", "k_proj", "v_proj")
SIZES = {"q_proj": 12, "k_proj": 4, "v_proj": 8}


def projections(bias=True, dtype=torch.float32, **sizes):
    torch.manual_seed(0)
    module = nn.Module()
    for name, size in {**SIZES, **sizes}.items():
        module.add_module(name, nn.Linear(20, size, bias=bias).to(dtype))
    return module


@pytest.fixture
def products(monkeypatch):
    """Records how many rows each product had."""
    found, multiply = [], packed_linear._multiply

    def counted(x, packed, bias):
        found.append(len(packed))
        return multiply(x, packed, bias)

    monkeypatch.setattr(packed_linear, "_multiply", counted)
    return found


def outputs_of(module, x, names=NAMES):
    return {name: getattr(module, name)(x) for name in names}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(20,), (0, 20), (1, 1, 20), (2, 7, 20), (33, 20)])
def test_one_product_gives_what_each_layer_gave(dtype, bias, shape, products):
    module, x = projections(bias, dtype), torch.randn(shape).to(dtype)
    expected = outputs_of(copy.deepcopy(module).double(), x.double())
    tolerance = 4 * torch.finfo(dtype).eps
    with torch.no_grad(), packed_weights(module) as count:
        assert count == 3
        for _ in range(2):
            for name, out in outputs_of(module, x).items():
                assert out.dtype == dtype
                torch.testing.assert_close(out.double(), expected[name], rtol=tolerance, atol=tolerance)
    assert products == [24, 24]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_layer_gets_the_output_of_its_own_input(mode, products):
    """Whatever the order of the calls, and however inputs change between them."""
    module = projections()
    dense = copy.deepcopy(module)
    with mode(), packed_weights(module):
        a, b = torch.randn(3, 20), torch.randn(5, 20)

        def check(*calls):
            for name, x in calls:
                torch.testing.assert_close(getattr(module, name)(x), getattr(dense, name)(x))

        check(*((name, a) for names in permutations(NAMES) for name in names))
        assert len(products) == 6
        check(*((name, x) for name in NAMES for x in (a, b)))  # as of two threads
        check(("q_proj", a), ("q_proj", a), ("k_proj", a.clone()), ("q_proj", a))
        a.mul_(2.0)
        check(("k_proj", a))
        a[1:].add_(1.0)
        check(("v_proj", a), ("q_proj", a))


def test_outputs_may_be_changed_in_place():
    module, x = projections(), torch.randn(3, 20)
    expected = outputs_of(module, x)
    for grad in (False, True):
        with torch.set_grad_enabled(grad), packed_weights(module):
            outs = {name: getattr(module, name)(x).mul_(2.0) for name in NAMES}
        for name, out in outs.items():
            torch.testing.assert_close(out, 2.0 * expected[name])


def test_weights_are_there_in_form_but_not_in_memory():
    module = projections()
    old = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    module.k_proj.requires_grad_(False)
    with packed_weights(module):
        for name in NAMES:
            weight = getattr(module, name).weight
            assert type(weight) is PackedRows and isinstance(weight, nn.Parameter) and weight.is_mkldnn
            assert weight.shape == old[f"{name}.weight"].shape and weight.dtype == torch.float32
            assert weight.requires_grad == (name != "k_proj")
            assert torch.equal(weight.detach().to_dense(), old[f"{name}.weight"])
            for use in (lambda w=weight: w[0], lambda w=weight: w + 1, lambda w=weight: w.numpy(), weight.bfloat16):
                with pytest.raises(RuntimeError):
                    use()
        module.q_proj.requires_grad_(False)
    assert [name for name in NAMES if getattr(module, name).weight.requires_grad] == ["v_proj"]
    assert all(torch.equal(parameter, old[name]) for name, parameter in module.named_parameters())
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in module.parameters())  # may be packed again


def test_a_weight_that_was_replaced_inside_stays():
    module, mine = projections(), nn.Parameter(torch.randn(4, 20))
    old = module.q_proj.weight.detach().clone()
    with packed_weights(module):
        module.k_proj.weight = mine
    assert module.k_proj.weight is mine and torch.equal(module.q_proj.weight, old)


def one_layer_in_two_places():
    model = nn.ModuleList([projections(), projections()])
    model[1].q_proj = model[0].q_proj
    return model


def one_weight_in_two_layers():
    module = projections(k_proj=12)
    module.k_proj.weight = module.q_proj.weight
    return module


def tied():
    module = projections()
    module.embed = nn.Embedding(12, 20)
    module.embed.weight = module.q_proj.weight
    return module


def without(name, layer):
    module = projections()
    setattr(module, name, layer)
    return module


ATTENTIONS = nn.ModuleDict({name: projections() for name in ("self_attn", "cross_attn", "encoder_attn")})


@pytest.mark.parametrize(
    ("model", "shared", "count"),
    [
        (projections(), 3, 3),
        (ATTENTIONS, 3, 9),
        (without("v_proj", nn.Linear(20, 8, bias=False)), 0, 3),
        (without("v_proj", nn.Linear(24, 8)), 0, 3),
        (without("v_proj", nn.Identity()), 2, 2),
        (without("v_proj", None), 2, 2),
        (one_layer_in_two_places(), 5, 5),
        (one_weight_in_two_layers(), 0, 3),
        (tied(), 3, 3),
    ],
)
def test_which_layers_share_a_product(model, shared, count):
    before = {name: (ref(p), p.detach().clone()) for name, p in model.named_parameters()}
    with packed_weights(model) as found:
        weights = [module.weight for module in model.modules() if type(module) is PackedLinear]
        assert len(weights) == found == count
        assert sum(type(weight) is PackedRows for weight in weights) == shared
    for name, parameter in model.named_parameters():
        assert parameter is before[name][0]() and torch.equal(parameter, before[name][1])


@pytest.mark.parametrize(("num_out", "count"), [(12287, 0), (12288, 2)])
def test_the_smallest_matrix_counts_all_its_rows(num_out, count, monkeypatch):
    monkeypatch.setitem(MIN_ELEMENTS, torch.float32, OWN_MIN_ELEMENTS[torch.float32])
    module = nn.Module()
    module.gate_proj, module.up_proj = nn.Linear(32, num_out), nn.Linear(32, 4096)
    with packed_weights(module) as found:
        assert found == count
