"""Packed weights: the same layers, faster, and afterwards the very same parameters."""

from __future__ import annotations

import tempfile
from weakref import ref

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

pytest.importorskip("transformers")

from generate_case import prompts_of, tiny
from packed_case import OWN_MIN_ELEMENTS, linear_layers, of_any_size, packed_layers  # noqa: F401 - a fixture

from pagedtree.integrations.transformers import generate, packed_weights
from pagedtree.integrations.transformers.packed_weights import PackedLinear, _dtypes

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def skip_without(dtype):
    if dtype not in _dtypes():
        pytest.skip(f"oneDNN computes in {dtype} on other machines")


def bits(tensor):
    return tensor.detach().view(BITS[tensor.dtype])


def layer_of(dtype, num_out=33, num_in=20, bias=True):
    torch.manual_seed(num_out)
    return nn.Linear(num_in, num_out, bias=bias).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_parameters_come_back_with_the_same_bits(dtype):
    skip_without(dtype)
    model = tiny(0, tie_word_embeddings=False).to(dtype)
    with torch.no_grad():  # all that a float can be
        special = torch.tensor([float("nan"), -0.0, float("inf"), torch.finfo(dtype).smallest_normal / 4], dtype=dtype)
        model.model.layers[0].mlp.up_proj.weight[7, :4] = special
        bits(model.model.layers[0].mlp.up_proj.weight)[8, 0] = -3  # a NaN of other bits
    model.model.layers[1].requires_grad_(False)
    before = {name: (ref(parameter), parameter.detach().clone()) for name, parameter in model.named_parameters()}
    gradients = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    with packed_weights(model) as count:
        assert count == len(packed_layers(model)) == 15
        assert packed_layers(model) == linear_layers(model)
        weights = {module.weight for module in model.modules() if type(module) is PackedLinear}
        assert all(weight.is_mkldnn and isinstance(weight, nn.Parameter) for weight in weights)
        shapes = {name: (weight.shape, weight.dtype) for name, weight in model.named_parameters()}
        assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == gradients
        # Nothing is there twice: the dense forms are gone.
        dense = [parameter() for parameter, _ in before.values() if parameter() not in set(model.parameters())]
        assert len(dense) == 15 and all(p.numel() == p.untyped_storage().nbytes() == 0 for p in dense)
    assert not packed_layers(model) and all(type(m) is nn.Linear for m in model.modules() if isinstance(m, nn.Linear))
    after = dict(model.named_parameters())
    assert after.keys() == before.keys() == shapes.keys()
    for name, (parameter, old) in before.items():
        assert after[name] is parameter() and shapes[name] == (old.shape, dtype)
        assert torch.equal(bits(after[name]), bits(old)) and after[name].is_contiguous()
        assert after[name].requires_grad == gradients[name]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_layer_computes_what_it_did(dtype, bias):
    layer = layer_of(dtype, bias=bias)
    shapes = [(20,), (0, 20), (2, 0, 20), (3, 4, 20), (2, 3, 1, 20)]
    shapes += [(rows, 20) for rows in (1, 2, 7, 16, 17, 33, 64)]
    inputs = [torch.randn(shape).to(dtype) for shape in shapes]
    x = torch.randn(20, 40).to(dtype)
    inputs += [x[:, :6].T, x[:, :1].T.expand(5, 20), x[:6, 1::2]]
    exact = [F.linear(x.double(), *(p.double() for p in layer.parameters())) for x in inputs]
    with torch.no_grad(), packed_weights(layer):
        found = [layer(x) for x in inputs]
        again = [layer(x) for x in inputs]
    tolerance = 4 * torch.finfo(dtype).eps
    for x, y, twice, expected in zip(inputs, found, again, exact, strict=True):
        assert y.shape == (*x.shape[:-1], 33) and y.dtype == dtype and y.layout is torch.strided
        torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)
        assert torch.equal(bits(y), bits(twice))


class Scaled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def other_kinds():
    """Layers that stay as they are, by why."""
    patched, transposed, parametrized, mixed = (nn.Linear(8, 8) for _ in range(4))
    patched.forward = lambda x: x
    transposed.weight = nn.Parameter(torch.randn(8, 8).T)
    parametrize.register_parametrization(parametrized, "weight", nn.Tanh())
    mixed.bias = nn.Parameter(torch.randn(8, dtype=torch.bfloat16))
    attention, mamba = nn.Module(), nn.Module()
    attention.kv_b_proj, mamba.dt_proj = nn.Linear(8, 8), nn.Linear(8, 8)
    return {
        "subclass": Scaled(8, 8),
        "forward of its own": patched,
        "transposed": transposed,
        "parametrized": parametrized,
        "weight norm": nn.utils.weight_norm(nn.Linear(8, 8)),
        "bias of another dtype": mixed,
        "fp64": nn.Linear(8, 8).double(),
        "meta": nn.Linear(8, 8, device="meta"),
        "empty": nn.Linear(0, 8),
        "latent": attention,
        "mamba": mamba,
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", other_kinds())
def test_other_layers_stay_as_they_are(kind):
    layer = other_kinds()[kind]
    before = [(module, type(module), dict(module._parameters)) for module in layer.modules()]
    with packed_weights(layer) as count:
        assert count == 0
        for module, old_type, parameters in before:
            assert type(module) is old_type
            assert all(module._parameters[name] is parameter for name, parameter in parameters.items())


def in_another_module(layer):
    other = nn.Linear(8, 8)
    other.weight = layer.weight
    return other


def part_of_a_tensor(layer):
    layer.weight = nn.Parameter(torch.randn(2, 8, 8)[0])


def array_of_another_layer(layer):
    array = np.zeros((8, 8), np.float32)
    layer.weight, layer.other = (nn.Parameter(torch.from_numpy(array)) for _ in range(2))


def file_of_other_processes(layer):
    with tempfile.TemporaryFile() as file:
        layer.weight = nn.Parameter(torch.from_numpy(np.memmap(file, np.float32, shape=(8, 8))))


HOLDERS = {
    "variable": lambda layer: layer.weight,
    "module": in_another_module,
    "optimizer": lambda layer: torch.optim.SGD(layer.parameters(), lr=0.1),
    "data": lambda layer: layer.weight.data,
    "array": lambda layer: layer.weight.detach().numpy(),
    "storage": lambda layer: layer.weight.untyped_storage(),
    "state": lambda layer: layer.state_dict(),
    "view": lambda layer: layer.weight[1:],
    "graph": lambda layer: layer(torch.randn(3, 8, requires_grad=True)),
    "shared memory": nn.Module.share_memory,
    "file": file_of_other_processes,
    "part": part_of_a_tensor,
    "another layer": array_of_another_layer,
}


@pytest.mark.parametrize("copy_held", [False, True])
@pytest.mark.parametrize("name", HOLDERS)
def test_a_weight_that_others_hold_keeps_its_memory(name, copy_held):
    layer = nn.Linear(8, 8)
    holder = HOLDERS[name](layer)  # noqa: F841 - held
    parameter, address, x = ref(layer.weight), layer.weight.data_ptr(), torch.randn(3, 8)
    expected = layer(x).detach()

    def check():
        dense = parameter()
        assert dense.data_ptr() == address and dense.untyped_storage().nbytes() >= dense.nbytes
        torch.testing.assert_close(F.linear(x, dense, layer.bias), expected)
        torch.testing.assert_close(layer(x), expected)

    with torch.no_grad(), pytest.raises(KeyError), packed_weights(layer, copy_held=copy_held) as count:
        assert count == copy_held
        check()
        raise KeyError
    check()
    assert layer.weight is parameter()


def test_an_exception_while_packing_undoes(monkeypatch):
    model = tiny(0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    names, make = [], PackedLinear.__setattr__

    def limited(self, name, value):
        names.append(name)
        if len(names) == 4:
            raise MemoryError("no more")
        make(self, name, value)

    monkeypatch.setattr(nn.Linear, "__setattr__", limited, raising=False)
    with pytest.raises(MemoryError, match="no more"), packed_weights(model):
        raise AssertionError("packing went on")
    monkeypatch.undo()
    assert not packed_layers(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_blocks_may_be_nested():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with packed_weights(model[0]) as first:
        outer = model[0].weight
        with packed_weights(model) as second:
            assert (first, second) == (1, 1) and model[0].weight is outer
        assert packed_layers(model) == {"0"} and model[0].weight is outer
    assert not packed_layers(model)


def test_there_are_no_gradients():
    layer, x = layer_of(torch.float32), torch.randn(3, 20, requires_grad=True)
    expected = layer(x).detach()
    with packed_weights(layer):
        out = layer(x)  # as passes without torch.no_grad() are common
        torch.testing.assert_close(out.detach(), expected)
        with pytest.raises(RuntimeError, match="packed_weights: packed linear layers have no gradients"):
            out.sum().backward()
    assert layer.weight.grad is None and x.grad is None
    layer(x).sum().backward()
    assert layer.weight.grad.shape == layer.weight.shape


@pytest.mark.parametrize("x", [torch.randn(3, 19), torch.randn(3, 20).bfloat16(), torch.tensor(1.0)])
def test_inputs_that_do_not_fit(x):
    layer = layer_of(torch.float32)
    with packed_weights(layer), pytest.raises(RuntimeError, match=r"expected input of torch.float32 and 20 columns"):
        layer(x)


def test_without_onednn_nothing_is_packed():
    model = tiny(0)
    with torch.backends.mkldnn.flags(enabled=False):
        with packed_weights(model) as count:
            assert count == 0 and not packed_layers(model)
        with pytest.raises(ValueError, match="pack_weights: expected a torch that has oneDNN's packed linear layers"):
            generate(model, prompts_of((3,)), max_new_tokens=2, pack_weights=True)


def test_only_modules_are_packed():
    with pytest.raises(TypeError, match=r"models: expected torch.nn.Module, got list"):
        packed_weights([nn.Linear(8, 8)]).__enter__()
