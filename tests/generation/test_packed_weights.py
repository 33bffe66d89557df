"""Packed weights leave layers and texts equal, and become parameters of the same bits again."""

from __future__ import annotations

import threading
from functools import partial
from weakref import ref

import pytest
import torch
from safetensors.torch import load_file
from support.drafters import Subject
from support.models import LENGTHS, NEW_TOKENS, lists, prompts_of, tiny
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from transformers import LlamaForCausalLM

from pagedtree.integrations.transformers import generate, packed_weights
from pagedtree.integrations.transformers.packed_weights import MIN_ELEMENTS, PackedLinear, _dtypes
from pagedtree.integrations.transformers.turns import in_turn

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch):
    """Packs small models, too."""
    for dtype in DTYPES:
        monkeypatch.setitem(MIN_ELEMENTS, dtype, 1)


def packed_layers(model):
    return {name for name, module in model.named_modules() if type(module) is PackedLinear}


def linear_layers(model):
    return {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}


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
    with torch.no_grad():  # every class of float
        special = torch.tensor([float("nan"), -0.0, float("inf"), torch.finfo(dtype).smallest_normal / 4], dtype=dtype)
        model.model.layers[0].mlp.up_proj.weight[7, :4] = special
        bits(model.model.layers[0].mlp.up_proj.weight)[8, 0] = -3  # a NaN of other bits
    model.model.layers[1].requires_grad_(False)
    model.lm_head.weight.mark = "kept"
    before = {name: (ref(parameter), parameter.detach().clone()) for name, parameter in model.named_parameters()}
    gradients = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    with packed_weights(model) as count:
        assert packed_layers(model) == linear_layers(model) and count == 15
        weights = {module.weight for module in model.modules() if type(module) is PackedLinear}
        assert all(weight.is_mkldnn and isinstance(weight, nn.Parameter) for weight in weights)
        shapes = {name: (weight.shape, weight.dtype) for name, weight in model.named_parameters()}
        assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == gradients
        # The dense forms are freed.
        freed = {name for name, (parameter, _) in before.items() if parameter() is None}
        assert freed == {f"{name}.weight" for name in packed_layers(model)}
    assert not packed_layers(model) and all(type(m) is nn.Linear for m in model.modules() if isinstance(m, nn.Linear))
    after = dict(model.named_parameters())
    assert after.keys() == before.keys() == shapes.keys() and after["lm_head.weight"].mark == "kept"
    for name, (parameter, old) in before.items():
        assert (parameter() is None or parameter() is after[name]) and shapes[name] == (old.shape, dtype)
        assert torch.equal(bits(after[name]), bits(old)) and after[name].is_contiguous()
        assert after[name].requires_grad == gradients[name]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
def test_packed_layer_matches_plain_layer(dtype, bias):
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
    """Layers that are not packed, by reason."""
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
    whole = torch.randn(2, 8, 8)
    layer.weight = nn.Parameter(whole[0])
    return whole


def memory_of_another_layer(layer):
    other = nn.Linear(8, 8)
    other.weight.data = layer.weight.data
    return other


def gradient(layer):
    layer.weight.grad = torch.ones(8, 8)


HOLDERS = {
    "variable": lambda layer: layer.weight,
    "module": in_another_module,
    "optimizer": lambda layer: torch.optim.SGD(layer.parameters(), lr=0.1),
    "data": lambda layer: layer.weight.data,
    "array": lambda layer: layer.weight.detach().numpy(),
    "state": lambda layer: layer.state_dict(),
    "view": lambda layer: layer.weight[1:],
    "graph": lambda layer: layer(torch.randn(3, 8, requires_grad=True)),
    "shared memory": nn.Module.share_memory,
    "part": part_of_a_tensor,
    "another layer": memory_of_another_layer,
    "gradient": gradient,
    "hook": lambda layer: layer.weight.register_hook(lambda grad: grad),
    "later hook": lambda layer: layer.weight.register_post_accumulate_grad_hook(lambda weight: None),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_a_weight_that_others_hold_stays(name):
    layer = nn.Linear(8, 8)
    holder = HOLDERS[name](layer)  # noqa: F841 - held
    parameter, address, x = ref(layer.weight), layer.weight.data_ptr(), torch.randn(3, 8)
    expected = layer(x).detach()

    def check():
        dense = parameter()
        assert dense.data_ptr() == address and (name != "gradient" or dense.grad is not None)
        torch.testing.assert_close(F.linear(x, dense, layer.bias), expected)
        torch.testing.assert_close(layer(x), expected)

    with torch.no_grad(), pytest.raises(KeyError), packed_weights(layer) as count:
        assert count == 1
        check()
        raise KeyError
    check()
    assert layer.weight is parameter()


@pytest.mark.parametrize("kind", ["embedding", "layer", "place"])
def test_shared_weights_stay_shared(kind):
    model = nn.ModuleList([nn.Embedding(8, 8) if kind == "embedding" else nn.Linear(8, 8), nn.Linear(8, 8)])
    if kind == "place":
        model.append(model[1])
    else:
        model[1].weight = model[0].weight
    x = torch.randn(3, 8)
    expected = model[1](x).detach()
    with torch.no_grad(), packed_weights(model) as count:
        assert count == (1 if kind == "embedding" else 2)
        torch.testing.assert_close(model[1](x), expected)
    assert model[-1].weight is model[1 if kind == "place" else 0].weight
    assert torch.equal(model[1](x), expected)


def test_small_weights_stay(monkeypatch):
    monkeypatch.setitem(MIN_ELEMENTS, torch.float32, 64)
    with packed_weights(nn.Linear(8, 7), nn.Linear(8, 8)) as count:
        assert count == 1


def test_a_weight_that_was_replaced_inside_stays():
    layers, mine = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)]), nn.Parameter(torch.randn(8, 8))
    old = layers[1].weight.detach().clone()
    with packed_weights(layers):
        layers[0].weight = mine
    assert layers[0].weight is mine and torch.equal(layers[1].weight, old)


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
    with packed_weights(layer), pytest.raises(RuntimeError, match=r"input: expected torch\.float32 and 20 columns"):
        layer(x)


def test_without_onednn_nothing_is_packed():
    model = tiny(0)
    with torch.backends.mkldnn.flags(enabled=False), packed_weights(model) as count:
        assert count == 0 and not packed_layers(model)


def test_only_modules_are_packed():
    with pytest.raises(TypeError, match=r"models: expected torch.nn.Module, got list"):
        packed_weights([nn.Linear(8, 8)]).__enter__()


NETWORKS = {"combined": 8, "EAGLE": 8, "block": 15}


@pytest.mark.parametrize("name", NETWORKS)
def test_texts_are_as_of_dense_weights(name):
    subject = Subject(partial(tiny, 0))
    model, drafter, texts = subject.model, subject.drafter(name), subject.texts
    networks = [net for net in drafter.networks if isinstance(net, nn.Module)]
    with packed_weights(model, *networks) as count:
        assert count == len(linear_layers(model)) + NETWORKS[name]
        sequences, _ = generate(model, prompts_of(LENGTHS), drafter=drafter, max_new_tokens=NEW_TOKENS)
    assert lists(sequences) == texts


@pytest.mark.parametrize("load", ["as stored", "converted", "state", "assigned"])
def test_a_loaded_model_is_not_copied(load, tmp_path):
    """transformers keeps weights in a private mapping of their file, which no conversion copies."""
    tiny(0).save_pretrained(tmp_path)
    if load in ("as stored", "converted"):
        dtype = torch.float32 if load == "as stored" else torch.bfloat16
        model = LlamaForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    else:
        model = tiny(1)
        model.load_state_dict(load_file(tmp_path / "model.safetensors"), assign=load == "assigned")
    weights = [ref(module.weight) for module in model.modules() if isinstance(module, nn.Linear)]
    with packed_weights(model) as count:
        assert count == len(weights) and not any(weight() is not None for weight in weights)


@pytest.mark.parametrize("part", ["", "model.layers.1.mlp"])
def test_packing_and_unpacking_wait_for_calls_in_other_threads(part):
    """The other call may be of another model that shares a layer."""
    model, packed, leave, unpacked = tiny(0), threading.Event(), threading.Event(), threading.Event()
    module = model.get_submodule(part)

    def hold():
        with packed_weights(model):
            packed.set()
            leave.wait(60)
        unpacked.set()

    thread = threading.Thread(target=hold)
    with in_turn(module):
        thread.start()
        assert not packed.wait(0.1) and not packed_layers(model)
    assert packed.wait(60)
    with in_turn(module):
        leave.set()
        assert not unpacked.wait(0.1) and packed_layers(model) == linear_layers(model)
    assert unpacked.wait(60) and not packed_layers(model)
    thread.join()
