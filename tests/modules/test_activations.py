"""Named activations are those of other libraries, and changed as these change them."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from scipy.spatial.distance import cdist
from scipy.stats import entropy as scipy_entropy
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from modules.activations import (
    ablation,
    activation_names,
    changed,
    patch,
    patching,
    recorded,
)
from modules.measures import (
    cosine_similarity,
    entropy,
    grid_distances,
    induction_score,
    logit_lens,
    mean_distance,
    nearest,
    patch_distance,
    previous_token_score,
    repeated_tokens,
    rollout,
    token_distance,
    token_losses,
)
from modules.models.gpt import Decoder, DecoderConfig, StackConfig
from modules.models.seq2seq import Seq2Seq
from modules.models.vit import ViT
from modules.pretrained.decoder import FAMILIES
from modules.record import AttentionRecord
from tests.helpers.tiny_models import LENGTH, MODELS, SOURCE, VOCAB, close, random_tokens, tiny
from tests.modules.test_parity_torch import copy_stack

KINDS = [*MODELS]


def outputs(net: Any, row: int = 0) -> Tensor:
    """The logits of a model of any kind for one of three inputs."""
    torch.manual_seed(row)
    if isinstance(net, ViT):
        return net(torch.randn(1, 1, 8, 8))
    tokens = random_tokens(1, 7)
    if isinstance(net, Seq2Seq):
        return net.logits(net(SOURCE[:1], tokens))
    if isinstance(net, Decoder):
        return net.logits(net(tokens))
    return net(tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_recording_changes_nothing_and_sees_all(kind: str) -> None:
    net = tiny(kind)
    expected = outputs(net)
    with recorded(net, "*") as found:
        close(outputs(net), expected)
    assert list(found) == activation_names(net)
    close(found["logits"], expected)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in net.modules())
    for name, value in found.items():
        if name.endswith(".heads"):  # what the output layer makes of all heads is the sub-layer
            module = net.get_submodule("stack") if hasattr(net, "stack") else None
            if module is not None:
                attention = module.get_submodule(name.removesuffix(".heads"))
                close(attention.output(value.flatten(2)), found[name.removesuffix(".heads")])


def test_logits_of_two_heads_are_their_mean() -> None:
    net = tiny("vit", distillation_token=True)
    images = torch.rand(2, 1, 8, 8)
    with recorded(net, "logits") as found:
        logits = net(images)
    close(found["logits"], logits)


def test_weights_are_those_of_torch() -> None:
    net = tiny("bert", feedforward="relu").encoder.stack
    layer = nn.TransformerEncoderLayer(24, 4, 20, 0.0, batch_first=True, norm_first=True)
    theirs = nn.TransformerEncoder(layer, 2, nn.LayerNorm(24), enable_nested_tensor=False).eval()
    copy_stack(net, theirs)
    holder = nn.Module()
    holder.stack = net
    holder.head = nn.Identity()
    x = torch.randn(2, 9, 24)
    y = x
    seen = []
    for block in theirs.layers:
        normed = block.norm1(y)
        seen.append(block.self_attn(normed, normed, normed, average_attn_weights=False)[1])
        y = block(y)
    with recorded(holder, "*.weights", "blocks.?") as found:
        net(x)
    close([found[f"blocks.{i}.attention.weights"] for i in range(2)], seen)
    close(found["blocks.1"], y)


@pytest.mark.parametrize("kind", KINDS)
def test_an_ablated_head_is_one_without_weights(kind: str) -> None:
    """The columns of the output layer that read the head are zero in a copy."""
    net = tiny(kind)
    part = "encoder" if kind == "encoder_decoder" else ""
    with changed(net, ablation(net, 1, 2, part)):
        found = outputs(net)
    whole = outputs(net)
    assert not torch.allclose(found, whole)
    stack = net.encoder.stack if part else [m for m in net.modules() if hasattr(m, "blocks")][0]
    with torch.no_grad():
        stack.blocks[1].attention.output.weight[:, 12:18] = 0  # (E, H D), heads of 6
    close(found, outputs(net))
    with changed(net, ablation(net, 0, None, part)):
        found = outputs(net)
    block = stack.blocks[0]
    for part in (block.attention.output, block.feedforward.down):
        nn.init.zeros_(part.weight)
        nn.init.zeros_(part.bias)
    close(found, outputs(net))


def test_ablated_and_patched_cross_attention() -> None:
    net: Any = tiny("encoder_decoder")
    whole = outputs(net)
    block = net.decoder.stack.blocks[1]
    weight = block.cross_attention.output.weight
    original = weight.detach().clone()
    with changed(net, ablation(net, 1, 2, "cross")):
        without_head = outputs(net)
    with changed(net, ablation(net, 1, None, "cross")):
        without_all = outputs(net)
    tokens = random_tokens(1, 7)
    with recorded(net, "*") as other:
        net(random_tokens(1, 4), tokens)  # a source of another length
    with changed(net, patching(net, other, 1, None, "cross")):
        patched = outputs(net)
    with changed(net, {"decoder.blocks.1.cross_attention": lambda x: x * 0 + 1}):
        assert not torch.allclose(outputs(net), patched)
    with torch.no_grad():
        weight[:, 12:18] = 0  # (E, H D), heads of 6
        close(without_head, outputs(net))
        weight.copy_(original)
        add = other["decoder.blocks.1.cross_attention"]
        handle = block.cross_attention.register_forward_hook(lambda *_: add)
        close(patched, outputs(net))
        handle.remove()
        nn.init.zeros_(weight)
        nn.init.zeros_(block.cross_attention.output.bias)
        close(without_all, outputs(net))
    assert not torch.allclose(without_head, whole) and not torch.allclose(patched, whole)


@pytest.mark.parametrize("index", [..., (..., 2, slice(None)), (slice(None), 6)])
def test_activations_of_another_length_are_refused(index: Any) -> None:
    """Also of one token, which torch would repeat; a part that both have is fine."""
    net = tiny("gpt")
    name = "blocks.0.attention.heads"
    for length in (1, 5):
        with recorded(net, name) as found:
            net(random_tokens(1, length))
        with pytest.raises(ValueError), changed(net, {name: patch(found[name], index)}):
            outputs(net)
        with changed(net, {name: patch(found[name], (slice(None), -1))}):
            outputs(net)
    with recorded(net, name) as found:
        net(random_tokens(1, 7))
    with changed(net, {name: patch(found[name], index)}), recorded(net, name) as seen:
        net(random_tokens(3, 7))  # one for all of a batch
    close(seen[name][:, 6, 2], found[name][:, 6, 2].expand(3, -1))


def test_weights_can_be_replaced() -> None:
    net = tiny("gpt")
    with recorded(net, "*.weights") as first:
        expected = outputs(net, 1)
    names = [name for name in first if name.endswith("weights")]
    even = {name: patch(1 / 7) for name in names}
    with changed(net, even), recorded(net, "*.weights", "*.heads") as found:
        assert not torch.allclose(outputs(net, 1), expected)
    close(found[names[0]], torch.full((1, 4, 7, 7), 1 / 7))
    close(found["blocks.1.attention.heads"].std(1), torch.zeros(1, 4, 6))  # all tokens read alike
    with changed(net, {name: patch(first[name]) for name in names}):
        close(outputs(net, 1), expected)
    record = AttentionRecord()  # both look at once
    torch.manual_seed(1)
    with changed(net, even):
        net(random_tokens(1, 7), cache=record)
    close(record.self_attn[1], torch.full((1, 4, 7, 7), 1 / 7))


def test_unknown_names_are_refused() -> None:
    net = tiny("gpt")
    for wrong in ("blocks.2", "blocks.1.mlp", "*.cross_attention"):
        with pytest.raises(ValueError), recorded(net, wrong):
            pass
    for layer, head in ((2, 0), (-1, None), (0, 4), (1, -1)):
        with pytest.raises(ValueError):
            ablation(net, layer, head)
    with pytest.raises(ValueError):
        ablation(net, 0, 0, "encoder")
    with pytest.raises(ValueError):
        ablation(tiny("encoder_decoder"), 0, 0)
    with pytest.raises(ZeroDivisionError), changed(net, ablation(net, 0)):
        1 / 0  # noqa: B018
    assert not any(part._forward_hooks for part in net.modules())


def gpt2() -> tuple[Decoder, GPT2LMHeadModel]:
    """A model and the same one of transformers."""
    stack = StackConfig(24, 3, 4, feedforward="gelu_tanh", causal=True)
    net = Decoder(DecoderConfig(VOCAB, LENGTH, stack=stack)).eval()
    torch.nn.init.normal_(net.position.table, std=1)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    family = FAMILIES["gpt2"]
    config = family.config_to_external(net.config, {})
    theirs = GPT2LMHeadModel(GPT2Config(**config)).eval()
    theirs.load_state_dict(family.weights_to_external(net.state_dict(), net.config), strict=False)
    return net, theirs


def test_lens_and_patching_are_those_of_transformer_lens(tmp_path: Path) -> None:
    reason = "compares with transformer_lens: pip install transformer-lens"
    lens = pytest.importorskip("transformer_lens.model_bridge", reason=reason)
    ours, exported = gpt2()
    exported.save_pretrained(tmp_path)
    words = WordLevel({str(number): number for number in range(VOCAB)}, unk_token="0")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), bos_token="1")
    tokenizer.save_pretrained(tmp_path)
    theirs = lens.TransformerBridge.boot_transformers(str(tmp_path), device="cpu")
    clean, other = random_tokens(2, 9).split(1)
    logits, cache = theirs.run_with_cache(clean)
    with recorded(ours, "*") as found:
        close(ours.logits(ours(clean)), logits, atol=1e-4)
    for layer in range(3):
        block = f"blocks.{layer}"
        close(found[f"{block}.attention.weights"], cache["pattern", layer], atol=1e-4)
        close(found[f"{block}.attention.heads"], cache["z", layer], atol=1e-4)
        close(found[f"{block}.attention"], cache["attn_out", layer], atol=1e-4)
        close(found[f"{block}.feedforward"], cache["mlp_out", layer], atol=1e-4)
        close(found[block], cache["resid_post", layer], atol=1e-4)
        expected = theirs.unembed(theirs.ln_final(cache["resid_post", layer]))
        close(logit_lens(ours, found[block]), expected, atol=1e-4)
    close(found["embedding"], cache["resid_pre", 0], atol=1e-4)
    head = (slice(None), slice(None), 2)

    def hook(z: Tensor, hook: Any) -> Tensor:
        z[head] = cache["z", 1][head]
        return z

    expected = theirs.run_with_hooks(other, fwd_hooks=[("blocks.1.attn.hook_z", hook)])
    name = "blocks.1.attention.heads"
    for changes in ({name: patch(found[name], head)}, patching(ours, found, 1, 2)):
        with changed(ours, changes):
            close(ours.logits(ours(other)), expected, atol=1e-4)


def test_lens_and_patching_are_those_of_transformers() -> None:
    ours, theirs = gpt2()
    clean, other = random_tokens(2, 9).split(1)
    hidden = theirs(clean, output_hidden_states=True).hidden_states  # the last one is normed
    with recorded(ours, "*") as found:
        ours(clean)
    for layer in range(2):
        expected = theirs.lm_head(theirs.transformer.ln_f(hidden[layer + 1]))
        close(logit_lens(ours, found[f"blocks.{layer}"]), expected, atol=1e-4)
    handle = theirs.transformer.h[1].mlp.register_forward_hook(
        lambda module, inputs, output: found["blocks.1.feedforward"]
    )
    expected = theirs(other).logits
    handle.remove()
    with changed(ours, {"blocks.1.feedforward": patch(found["blocks.1.feedforward"])}):
        close(ours.logits(ours(other)), expected, atol=1e-4)
    block = theirs.transformer.h[1]
    attention = found["blocks.1.attention"]
    handles = [
        block.attn.register_forward_hook(lambda module, inputs, output: (attention, *output[1:])),
        block.mlp.register_forward_hook(lambda *_: found["blocks.1.feedforward"]),
    ]
    expected = theirs(other).logits
    for handle in handles:
        handle.remove()
    with changed(ours, patching(ours, found, 1)):
        close(ours.logits(ours(other)), expected, atol=1e-4)


def test_entropy_and_distance_are_scipys() -> None:
    weights = torch.rand(2, 3, 4, 6).softmax(-1)
    weights[0, 0, 0] = torch.eye(6)[0]
    close(entropy(weights), torch.from_numpy(scipy_entropy(weights.numpy(), axis=-1)))
    points = torch.rand(6, 2)
    distances = grid_distances(points)
    close(distances, torch.from_numpy(cdist(points, points)).float())
    square = torch.rand(2, 6, 6).softmax(-1)
    expected = [(one * distances).sum() / 6 for one in square]
    close(mean_distance(square, distances), torch.stack(expected))
    places = [[i, j] for i in range(2) for j in range(3)]
    tokens = torch.from_numpy(cdist([[i] for i in range(6)], [[i] for i in range(6)])).float()
    close(token_distance(square), mean_distance(square, tokens))
    patches = 4 * torch.from_numpy(cdist(places, places)).float()  # of 4 x 4 pixels
    close(patch_distance(square, (2, 3), 4), mean_distance(square, patches))
    longer = F.pad(0.5 * square, (1, 0, 1, 0), value=0.5)  # a class token takes half of it
    close(patch_distance(longer, (2, 3), 4), mean_distance(square, patches))


def test_scores_of_planted_heads() -> None:
    tokens = repeated_tokens(50, 8)
    assert tokens.shape == (1, 16) and tokens[0, :8].tolist() == tokens[0, 8:].tolist()
    previous = torch.diag(torch.ones(15), -1)
    assert float(previous_token_score(previous)) == 1
    assert float(induction_score(previous, 8)) == 0
    planted = torch.zeros(16, 16)
    planted[torch.arange(8, 16), torch.arange(8, 16) - 7] = 1
    assert float(induction_score(planted, 8)) == 1
    assert float(previous_token_score(planted)) == 0
    close(induction_score(torch.full((3, 16, 16), 1 / 16), 8), torch.full((3,), 1 / 16))


def test_rollout_is_the_papers() -> None:
    layers = torch.rand(3, 2, 4, 5, 5).softmax(-1)  # (L, B, H, N, N)
    expected = torch.eye(5).expand(2, 5, 5)
    for weights in layers:
        step = 0.5 * weights.mean(1) + 0.5 * torch.eye(5)
        expected = torch.einsum("bij,bjk->bik", step, expected)
    close(rollout([*layers]), expected)
    close(rollout([*layers]).sum(-1), torch.ones(2, 5))


def test_rows_are_divided_by_their_sums() -> None:
    layers = torch.rand(3, 2, 4, 5, 5).softmax(-1)  # (L, B, H, N, N)
    smaller = layers * torch.rand(3, 2, 4, 5, 1)
    close(rollout([*smaller]), rollout([*layers]))
    close(entropy(smaller), entropy(layers))
    assert not entropy(torch.zeros(2, 5, 5)).any()


def test_losses_and_neighbours() -> None:
    logits = torch.randn(6, VOCAB)
    tokens = torch.randint(VOCAB, (6,))
    close(token_losses(logits, tokens).mean(), F.cross_entropy(logits, tokens))
    table = torch.randn(20, 5)
    similar = F.cosine_similarity(table[:, None], table[None], dim=-1)
    close(cosine_similarity(table), similar)
    rows = torch.tensor([3, 11])
    values, found = nearest(table, rows, 4)
    similar.fill_diagonal_(-2)
    close(values, similar[rows].sort(descending=True).values[:, :4])
    assert found.tolist() == similar[rows].argsort(descending=True)[:, :4].tolist()
