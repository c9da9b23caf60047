"""Each entry of a ViT's config.json changed in turn: equal logits to transformers, or refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from modules.models.vit import ViT
from modules.pretrained.weights import load_weights
from tasks.errors import UsageError
from tasks.vit.pretrained import find_model
from tests.helpers.model_folders import vit_folder
from tests.parity.test_config_entries import change_entries
from tests.parity.vit import randomise

Settings = dict[str, Any]
KIND = transformers.ViTForImageClassification
# Entries that older files, or the code of transformers, also know; null in ours.
MORE: Settings = {
    "head_dim": None,
    "interpolate_pos_encoding": None,
    "attention_bias": False,
    "is_decoder": False,
    "add_cross_attention": False,
    "pruned_heads": {},
    "quantization_config": None,
    "per_layer_config": None,
    "pooler_output_size": 64,
    "torch_dtype": "float32",
    "num_labels": 3,
}
FOLDER = Path("model")


def outcome() -> str:
    """ "equal", "refused" by us, "theirs" if transformers refuses the folder, or what is wrong."""
    try:
        model = find_model("model")
        net = ViT(model.config()).eval()
        missing = load_weights(net, model.weights(net.config), ("head.linear.",))
    except (UsageError, ValueError):
        return "refused"
    if missing:
        return "refused"  # the command says which
    images = torch.randn(2, net.config.channels or 0, *2 * [net.config.image_size])
    try:
        theirs, info = KIND.from_pretrained("model", output_loading_info=True, dtype=torch.float32)
        with torch.no_grad():
            expected = theirs.eval()(images).logits
    except Exception:
        return "theirs"
    if any(info.values()):
        return "we take weights that they lack or leave out"
    with torch.no_grad():
        far = (net(images) - expected).abs().max().item()
    return "equal" if far <= 1e-5 else f"logits differ by {far:.1e}"


def save(settings: Settings) -> None:
    """A new model of a config, the config word for word."""
    config = KIND.config_class.from_dict({**settings})
    randomise(KIND(config)).save_pretrained(FOLDER.resolve())
    (FOLDER / "config.json").write_text(json.dumps(settings))


@pytest.mark.slow
def test_every_entry() -> None:
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    transformers.utils.logging.disable_progress_bar()
    vit_folder(FOLDER)
    base = json.loads((FOLDER / "config.json").read_text())
    taken = change_entries(base, MORE | base, save, outcome)
    assert {"hidden_size", "num_attention_heads", "image_size", "qkv_bias", "hidden_act"} <= taken
    assert {"initializer_range", "dtype", "encoder_stride", "pooler_act"} <= taken


@pytest.mark.parametrize("name, shape", [
    ("vit.embeddings.position_embeddings", ()), ("vit.embeddings.position_embeddings", (1, 17)),
    ("vit.embeddings.position_embeddings", (2, 17, 64)), ("vit.embeddings.cls_token", (1, 1, 32)),
    ("vit.embeddings.cls_token", ()), ("vit.layernorm.weight", (32,)), ("vit.surprise", (1,)),
])  # fmt: skip
def test_damaged_weights(name: str, shape: tuple[int, ...]) -> None:
    vit_folder(FOLDER)
    weights = load_file(FOLDER / "model.safetensors")
    save_file({**weights, name: torch.zeros(shape)}, FOLDER / "model.safetensors")
    model = find_model("model")
    with pytest.raises(UsageError, match=name.removeprefix("vit.").rpartition(".")[2][:4]):
        load_weights(ViT(model.config()), model.weights(model.config()))
