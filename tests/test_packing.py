"""Packed linear layers give what ordinary ones give, for the weight that they have now, whatever happens to it."""

import copy
import logging as python_logging
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import fit_drafter, make_drafter, make_prompt, make_target, pilot_generate, plain_generate
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize, prune
from transformers import DynamicCache

from blockpilot_hf import BlockPilot, packing
from blockpilot_hf.checks import check_call
from blockpilot_hf.packing import PackedLinear, pack_linear_weights, packing_pays, unpack_linear_weights

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this build of torch cannot pack weights"
)
PROMPT = make_prompt(12)


def make_layer(in_features=48, out_features=96, *, bias=True, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Linear(in_features, out_features, bias=bias)


def make_rows(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def relative_error(result, expected):
    return float((result - expected).abs().max() / expected.abs().max())


@pytest.fixture
def products(monkeypatch):
    """Row counts of the packed products that were taken."""
    taken, product = [], packing._packed_product

    def record(input, *args):
        taken.append(input.numel() // input.shape[-1])
        return product(input, *args)

    monkeypatch.setattr(packing, "_packed_product", record)
    return taken


@torch.inference_mode()
def assert_up_to_date(layer, products, *, in_features=48):
    """Right at once, and by the packed product again two passes later at the latest."""
    rows = make_rows(3, in_features)
    with torch.no_grad():
        # Not through `layer.weight`: reading that is noted, and would hide what is tested here.
        weight, bias = layer._parameters["weight"], layer._parameters["bias"]
        expected = rows.double() @ weight.double().T + (0 if bias is None else bias.double())
    for _ in range(3):
        del products[:]
        assert relative_error(layer(rows).double(), expected) < 1e-5
    assert products == [3]


# The result


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1,), (8,), (64,), (1, 1), (1, 5), (2, 3), (2, 2, 2)], ids=str)
@pytest.mark.parametrize(("in_features", "out_features"), [(48, 96), (96, 48), (33, 7), (1, 1)])
def test_result_equals_the_ordinary_product(products, in_features, out_features, shape, bias):
    layer, rows = make_layer(in_features, out_features, bias=bias), make_rows(*shape, in_features)
    expected = layer(rows).detach()
    assert pack_linear_weights(layer) == 1
    with torch.inference_mode():
        result = layer(rows)
    assert products and result.shape == expected.shape and result.is_contiguous()
    assert relative_error(result, expected) < 1e-5


def test_result_does_not_depend_on_the_strides_of_the_input(products):
    """A slice of a batch of one keeps the stride of the whole."""
    layer, wide = make_layer(), make_rows(1, 9, 96)
    pack_linear_weights(layer)
    del products[:]
    for rows in (wide[:, 1:, :48], wide[..., ::2], wide[:, 3:4, 7:55], wide.view(9, 2, 48).transpose(0, 1)):
        with torch.inference_mode():
            result, expected = layer(rows), layer(rows.clone(memory_format=torch.contiguous_format))
        assert torch.equal(result, expected)
    assert len(products) == 8


def test_frozen_weights_are_enough_where_gradients_are_enabled(products):
    layer = make_layer().requires_grad_(False)
    pack_linear_weights(layer)
    del products[:]
    layer(make_rows(3, 48))
    assert products == [3]


@pytest.mark.parametrize(
    ("case", "shape"),
    [("many rows", (65, 48)), ("many rows", (5, 13, 48)), ("no rows", (0, 48)), ("one dimension", (48,))],
    ids=str,
)
def test_other_shapes_take_the_ordinary_product(products, case, shape):
    layer, rows = make_layer(), make_rows(*shape)
    expected = layer(rows).detach()
    pack_linear_weights(layer)
    del products[:]
    with torch.inference_mode():
        assert torch.equal(layer(rows), expected)
    assert products == []


def test_gradients_are_those_of_the_ordinary_layer(products):
    ordinary, layer = make_layer(), make_layer()
    pack_linear_weights(layer)
    del products[:]
    for module in (ordinary, layer):
        rows = make_rows(3, 48).requires_grad_()
        module(rows).square().sum().backward()
        module.rows_grad = rows.grad
    assert products == []
    assert torch.equal(layer.rows_grad, ordinary.rows_grad)
    assert torch.equal(layer.weight.grad, ordinary.weight.grad) and torch.equal(layer.bias.grad, ordinary.bias.grad)
    layer.requires_grad_(False)
    rows = make_rows(3, 48).requires_grad_()
    layer(rows).square().sum().backward()
    assert torch.equal(rows.grad, ordinary.rows_grad)


def test_forward_mode_gradients_are_those_of_the_ordinary_layer():
    """The packed operator has none and says nothing: they would be zero."""
    layer, rows = make_layer().requires_grad_(False), make_rows(3, 48)
    expected = torch.func.jvp(layer, (rows,), (rows,))[1]
    pack_linear_weights(layer)
    with torch.no_grad():
        assert torch.equal(torch.func.jvp(layer, (rows,), (rows,))[1], expected)


def test_autocast_casts_as_before():
    layer, rows = make_layer(), make_rows(3, 48)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        expected = layer(rows)
        assert pack_linear_weights(layer) == 1
        assert torch.equal(layer(rows), expected) and expected.dtype == torch.bfloat16


def test_wrong_input_raises_as_before():
    layer = make_layer()
    pack_linear_weights(layer)
    with torch.inference_mode():
        for rows in (make_rows(3, 47), make_rows(3, 48).double()):
            with pytest.raises(RuntimeError) as expected:
                F.linear(rows, torch.zeros(96, 48), torch.zeros(96))
            with pytest.raises(RuntimeError) as found:
                layer(rows)
            assert str(found.value) == str(expected.value)


def test_compiled_and_traced_layers_hold_no_packed_weights():
    rows = make_rows(3, 48)
    layer = make_layer(bias=False).requires_grad_(False)
    pack_linear_weights(layer)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    traced = torch.jit.trace(lambda rows: layer(rows), (rows,))
    with torch.inference_mode():
        compiled(rows)
        layer.weight.data.mul_(2)
        expected = F.linear(rows, layer.weight)
        assert torch.equal(compiled(rows), expected) and torch.equal(traced(rows), expected)


def test_threads_share_a_layer(products):
    layer = make_layer(256, 256, bias=False)
    pack_linear_weights(layer)
    inputs = [make_rows(1 + i % 5, 256, seed=i) for i in range(40)]
    expected = [F.linear(rows, layer.weight.detach()) for rows in inputs]  # the read makes the threads pack anew

    @torch.inference_mode()
    def run(i):
        return max(relative_error(layer(inputs[i]), expected[i]) for _ in range(5))

    with ThreadPoolExecutor(8) as pool:
        assert max(pool.map(run, range(40))) < 1e-5
    assert len(products) > 100


# The weight changes


def replace(layer):
    layer.weight = nn.Parameter(make_rows(96, 48, seed=5))


def replace_memory(layer):
    layer._parameters["weight"].data = make_rows(96, 48, seed=5)


def transpose_memory(layer):
    square = layer._parameters["weight"]
    square.data = square.data.T


def narrow(layer):
    weight = layer._parameters["weight"]
    weight.data = weight.data[:90]
    layer._parameters["bias"].data = layer._parameters["bias"].data[:90]


@torch.no_grad()
def edit_one_element(layer):
    layer._parameters["weight"][5, 7] += 10


@torch.inference_mode()
def edit_in_inference_mode(layer):
    layer._parameters["weight"][5, 7] += 10


def edit_a_view(layer):
    layer._parameters["weight"].detach()[5].zero_()


def edit_one_element_through_data(layer):
    layer.weight.data[5, 7] += 10


def edit_one_element_through_numpy(layer):
    layer.weight.detach().numpy()[5, 7] += 10


def scale_every_parameter_through_data(layer):
    for parameter in layer.parameters():
        parameter.data.mul_(0.5)


def average_through_data(layer):
    for parameter in layer.parameters():
        parameter.data.copy_(0.9 * parameter.data + 0.1)


def load(layer):
    layer.load_state_dict(make_layer(seed=7).state_dict())


def load_by_assignment(layer):
    layer.load_state_dict(make_layer(seed=7).state_dict(), assign=True)


def edit_the_state_dict(layer):
    layer.state_dict()["weight"].mul_(-1)


def edit_the_bias(layer):
    layer.bias.data.add_(3)


def train(layer):
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    layer(make_rows(3, 48)).square().sum().backward()
    optimizer.step()


EDITS = [
    replace,
    replace_memory,
    narrow,
    edit_one_element,
    edit_in_inference_mode,
    edit_a_view,
    edit_one_element_through_data,
    edit_one_element_through_numpy,
    scale_every_parameter_through_data,
    average_through_data,
    load,
    load_by_assignment,
    edit_the_state_dict,
    edit_the_bias,
    train,
]


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
@pytest.mark.parametrize("before", [0, 1, 2])
def test_edited_weight_is_the_one_that_counts(products, edit, before):
    layer = make_layer()
    pack_linear_weights(layer)
    for _ in range(before):
        layer(make_rows(2, 48).requires_grad_(False))
    with torch.inference_mode():
        unedited = layer(make_rows(3, 48))
    edit(layer)
    assert layer(make_rows(3, 48)).shape != unedited.shape or not torch.allclose(layer(make_rows(3, 48)), unedited)
    assert_up_to_date(layer, products)


def test_transposed_weight_is_the_one_that_counts(products):
    """Same memory, same shape, same number of edits, same elements."""
    layer = make_layer(48, 48)
    pack_linear_weights(layer)
    transpose_memory(layer)
    rows = make_rows(3, 48)
    with torch.inference_mode():
        for _ in range(3):
            assert relative_error(layer(rows), F.linear(rows, layer._parameters["weight"], layer.bias)) < 1e-5


def test_second_parameter_over_the_same_memory_counts_its_own_edits(products):
    layer = make_layer()
    pack_linear_weights(layer)
    first = layer._parameters["weight"]
    layer._parameters["weight"] = nn.Parameter(first.data)  # as functional calls put it there
    with torch.no_grad():
        while layer._parameters["weight"]._version < first._version:
            layer._parameters["weight"][5, 7:8].add_(10)
        assert layer._parameters["weight"]._version == first._version
    assert_up_to_date(layer, products)


def test_weight_made_in_inference_mode_counts_no_edits_and_is_looked_at(products):
    with torch.inference_mode():
        layer = make_layer()
    assert layer.weight.is_inference()
    assert pack_linear_weights(layer) == 1
    assert_up_to_date(layer, products)
    with torch.inference_mode():
        next(iter(layer.parameters())).mul_(2)
    assert_up_to_date(layer, products)


def test_weight_that_is_read_before_every_pass_is_not_packed_in_vain(products, monkeypatch):
    layer = make_layer()
    pack_linear_weights(layer)
    del products[:]
    reorder = []
    monkeypatch.setattr(packing._Packing, "with_tensor", lambda self: reorder.append(self))
    for _ in range(4):
        with torch.inference_mode():
            layer(make_rows(3, 48).to(layer.weight.dtype))
    assert products == [] and reorder == []


def test_training_packs_nothing(monkeypatch):
    layer = make_layer()
    pack_linear_weights(layer)
    monkeypatch.setattr(packing._Packing, "with_tensor", lambda self: pytest.fail("packed while training"))
    train(layer)
    for _ in range(3):
        layer(make_rows(3, 48))


def test_cast_layer_computes_in_its_dtype_and_comes_back(products):
    layer, rows = make_layer(), make_rows(3, 48)
    pack_linear_weights(layer)
    layer.to(torch.bfloat16)
    assert layer._packing is None  # the memory is free at once
    with torch.inference_mode():
        assert torch.equal(layer(rows.bfloat16()), F.linear(rows.bfloat16(), layer.weight, layer.bias))
    assert_up_to_date(layer.float(), products)
    layer.to("meta")
    assert layer._packing is None and layer(rows.to("meta")).is_meta


def test_cast_to_the_same_dtype_keeps_the_packed_weight(products):
    layer = make_layer()
    pack_linear_weights(layer)
    packed = layer._packing
    assert layer.float().to("cpu")._packing is packed and packed.tensor is not None


def test_shared_memory_and_pruning_and_parametrisations_are_followed(products):
    layer = make_layer()
    pack_linear_weights(layer)
    layer.share_memory()
    assert_up_to_date(layer, products)
    prune.l1_unstructured(layer, "weight", amount=0.5)
    rows = make_rows(3, 48)
    with torch.inference_mode():
        assert torch.equal(layer(rows), F.linear(rows, layer.weight_orig * layer.weight_mask, layer.bias))
    prune.remove(layer, "weight")
    assert_up_to_date(layer, products)

    class Double(nn.Module):
        def forward(self, weight):
            return 2 * weight

    before = layer._parameters["weight"].clone()
    parametrize.register_parametrization(layer, "weight", Double())
    with torch.inference_mode():
        assert torch.equal(layer(rows), F.linear(rows, 2 * before, layer.bias))
    assert torch.equal(copy.deepcopy(layer)(rows), layer(rows))
    parametrize.remove_parametrizations(layer, "weight")
    assert_up_to_date(layer, products)
    assert unpack_linear_weights(layer) == 1 and type(layer) is nn.Linear


# Copies


@pytest.mark.parametrize(
    "make_copy",
    [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer)), copy.copy],
    ids=["deep", "pickle", "shallow"],
)
def test_copy_goes_its_own_way(products, make_copy):
    layer = make_layer()
    pack_linear_weights(layer)
    other = make_copy(layer)
    assert_up_to_date(other, products)
    replace(other)
    assert_up_to_date(other, products)
    assert_up_to_date(layer, products)


def test_state_dict_is_that_of_an_ordinary_layer():
    layer = make_layer()
    expected = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    pack_linear_weights(layer)
    assert layer.state_dict().keys() == expected.keys()
    assert all(torch.equal(layer.state_dict()[name], tensor) for name, tensor in expected.items())
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"] and not list(layer.buffers())


# What is packed


def test_only_float32_layers_of_the_class_itself_are_packed():
    class Other(nn.Linear):
        pass

    hooked = make_layer()
    hooked.forward = hooked.forward
    layers = {
        "plain": make_layer(),
        "subclass": Other(4, 4),
        "in bfloat16": make_layer().bfloat16(),
        "in float64": make_layer().double(),
        "on meta": make_layer().to("meta"),
        "empty": nn.Linear(0, 4),
        "hooked": hooked,
        "other": nn.Conv1d(4, 4, 1),
    }
    types = {name: type(layer) for name, layer in layers.items()}
    model = nn.ModuleDict(layers)
    assert pack_linear_weights(model) == 1
    assert [name for name, layer in layers.items() if type(layer) is not types[name]] == ["plain"]
    assert isinstance(layers["plain"], nn.Linear)
    assert pack_linear_weights(model) == 1  # a second call packs anew
    assert unpack_linear_weights(model) == 1
    assert {name: type(layer) for name, layer in layers.items()} == types
    assert unpack_linear_weights(model) == 0


def test_model_in_bfloat16_stays_as_it_is(caplog):
    target = make_target().bfloat16()
    assert not packing_pays(target) and pack_linear_weights(target) == 0
    assert caplog.records == []


@pytest.fixture
def warnings(monkeypatch):
    said = []
    monkeypatch.setattr(python_logging.Logger, "warning_once", lambda self, message: said.append(message))
    return said


def test_without_the_operators_nothing_is_packed(monkeypatch, warnings):
    model = nn.Sequential(make_layer(), make_layer(96, 4))
    monkeypatch.setattr(packing.torch.ops, "mkldnn", object())
    assert pack_linear_weights(model) == 0
    assert len(warnings) == 1 and "has no attribute '_reorder_linear_weight'" in warnings[0]
    assert [type(layer) for layer in model] == [nn.Linear, nn.Linear]
    assert not packing_pays(make_target())


def test_operators_that_compute_something_else_are_not_used(monkeypatch, warnings, products):
    """The second kind of layer fails; the first one is not left packed."""
    model = nn.Sequential(make_layer(), make_layer(96, 4))
    product = packing._packed_product
    off = lambda rows, packed, bias: product(rows, packed, bias) * (1 if rows.shape[-1] == 48 else 1.001)  # noqa: E731
    monkeypatch.setattr(packing, "_packed_product", off)
    assert pack_linear_weights(model) == 0
    assert len(warnings) == 1 and "a weight of shape (4, 96) gave a result that is off by" in warnings[0]
    assert [type(layer) for layer in model] == [nn.Linear, nn.Linear]
    monkeypatch.setattr(packing, "_packed_product", product)
    assert pack_linear_weights(model) == 2


def test_packing_leaves_the_random_state():
    before = torch.random.get_rng_state()
    pack_linear_weights(make_layer())
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(("machine", "pays"), [("x86_64", True), ("AMD64", True), ("aarch64", False), ("arm64", False)])
def test_packing_pays_where_it_was_measured(monkeypatch, machine, pays):
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert packing_pays(make_target()) is pays


# Whole models


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def packed(request):
    """A tiny target, and the same one packed."""
    ordinary, target = (make_target(tie_word_embeddings=request.param) for _ in range(2))
    assert pack_linear_weights(target) == 4 * 7 + 1
    assert (target.lm_head.weight is target.model.embed_tokens.weight) is request.param
    return ordinary, target


@torch.inference_mode()
def assert_same_logits(target, ordinary):
    for ids in (PROMPT, PROMPT[:, :1], PROMPT):
        assert relative_error(target(ids).logits, ordinary(ids).logits) < 1e-4


def test_packed_model_gives_the_same_logits_and_saves_the_same_files(packed, tmp_path):
    ordinary, target = packed
    assert_same_logits(target, ordinary)
    for name, model in (("ordinary", ordinary), ("packed", target)):
        model.save_pretrained(tmp_path / name)
    files = {path.name: path.read_bytes() for path in (tmp_path / "ordinary").iterdir()}
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "packed").iterdir()}
    loaded = type(target).from_pretrained(tmp_path / "packed")
    assert not any(isinstance(module, PackedLinear) for module in loaded.modules())
    assert_same_logits(loaded, ordinary)
    assert_same_logits(copy.deepcopy(target), ordinary)


def test_resized_model_uses_its_new_rows(packed):
    for model in packed:
        torch.manual_seed(0)
        model.resize_token_embeddings(80, mean_resizing=False)
    assert packed[1].lm_head.out_features == 80
    assert_same_logits(packed[1], packed[0])
    with torch.no_grad():
        for model in packed:
            model.get_input_embeddings().weight[70] = 3.0
    assert_same_logits(packed[1], packed[0])


def test_scaling_a_tied_embedding_through_data_scales_the_head():
    ordinary, target = (make_target(tie_word_embeddings=True) for _ in range(2))
    pack_linear_weights(target)
    for model in (ordinary, target):
        model.model.embed_tokens.weight.data.mul_(0.7)
    assert_same_logits(target, ordinary)


@pytest.mark.parametrize("when", ["before", "after"])
def test_adapters_merge_into_packed_layers(packed, when):
    """PEFT merges through `.data`."""
    peft = pytest.importorskip("peft")
    models = []
    for model in packed:
        is_packed = any(isinstance(module, PackedLinear) for module in model.modules())
        unpack_linear_weights(model)
        if is_packed and when == "before":
            pack_linear_weights(model)
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        adapted = peft.get_peft_model(model, config).eval()
        if is_packed and when == "after":
            assert pack_linear_weights(adapted) > 4 * 7 + 1
        models.append(adapted)
    ordinary, target = models
    with torch.inference_mode():
        plain = target.get_base_model().model.layers[0].self_attn.q_proj.base_layer
        assert isinstance(plain, PackedLinear)
    assert_same_logits(target, ordinary)
    for model in models:
        model.merge_adapter()
    assert_same_logits(target, ordinary)
    for model in models:
        model.unmerge_adapter()
    assert_same_logits(target, ordinary)
    assert_same_logits(target.merge_and_unload(), ordinary.merge_and_unload())


def test_packed_target_is_not_refused(packed):
    _, target = packed
    config = copy.deepcopy(target.generation_config)
    config.max_length = 20
    check_call(target, config, {"cache": DynamicCache(config=target.config)}, 1)


@pytest.mark.parametrize(
    ("is_tied", "settings"),
    [(True, {"do_sample": False}), (False, {"do_sample": True, "temperature": 0.8})],
    ids=["greedy", "sampled"],
)
def test_packed_pair_gives_plain_generates_text(products, is_tied, settings):
    target = make_target(tie_word_embeddings=is_tied)
    drafter = make_drafter(target)
    known = plain_generate(target, PROMPT, max_new_tokens=30, do_sample=False)
    fit_drafter(target, drafter, known, steps=30)
    assert (pack_linear_weights(target), pack_linear_weights(drafter)) == (4 * 7 + 1, 2 * 7 + 1)
    plain = plain_generate(target, PROMPT, max_new_tokens=24, **settings)
    for block_size in (1, 3, 8):
        del products[:]
        output = pilot_generate(
            BlockPilot(drafter),
            target,
            PROMPT,
            block_size=block_size,
            max_new_tokens=24,
            return_dict_in_generate=True,
            **settings,
        )
        assert torch.equal(output.sequences, plain)
        steps = output.blockpilot.steps
        assert settings["do_sample"] or block_size == 1 or max(step.num_accepted for step in steps) > 0
        # Target and head in every step, and drafter and head where there is a draft.
        assert len(products) >= (4 * 7 + 1) * len(steps) + (2 * 7 + 2) * sum(bool(step.draft_ids) for step in steps)
