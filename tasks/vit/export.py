"""`python -m tasks.vit export`: a checkpoint's weights for other programs."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from datamodules.vision.augment import normalise
from modules.config import StackConfig, require
from modules.models.vit import ViT, ViTConfig
from modules.pretrained.timm_configs import timm_arguments
from modules.pretrained.vit import from_tessera
from tasks.checkpoints.exporting import new_file, save_weights, write_safetensors
from tasks.checkpoints.reading import KEY, load_config, net_weights, read_checkpoint
from tasks.errors import UsageError

Format = Literal["timm", "onnx", "safetensors"]


def export(ckpt_path: str, format: Format, output: str | None = None) -> None:
    """Write a checkpoint's weights for timm, ONNX Runtime or any reader of safetensors.

    Args:
        ckpt_path: Checkpoint that `fit` wrote.
        format: timm: safetensors with timm's names; onnx: a graph from pixels in [0, 1] to logits, batch size free;
            safetensors: our own names, configuration and class names in the header.
        output: File to write; null puts it beside the checkpoint.
    """
    checkpoint = read_checkpoint(ckpt_path, "vit")
    net = ViT(load_config(ViTConfig, checkpoint[KEY]["net"]))
    net.load_state_dict(net_weights(checkpoint))
    endings = {"timm": ".timm.safetensors", "onnx": ".onnx", "safetensors": ".safetensors"}
    target = Path(output) if output else Path(ckpt_path).with_suffix(endings[format])
    if format != "onnx" and target.suffix != ".safetensors":
        raise UsageError(f"--output {output} must end with .safetensors: readers go by the name")
    with new_file(target) as partial:
        hint = WRITERS[format](net.eval(), checkpoint[KEY]["facts"], partial)
    print(f"wrote {target}\n{hint.format(file=target)}")


def write_timm(net: ViT, facts: dict[str, Any], path: Path) -> str:
    """timm's names; the header says which network it is, and the hint builds the timm model that loads the file."""
    try:
        name, options = timm_call(net.config)
        state = from_tessera("timm", net.state_dict(), net.config)
    except ValueError as error:
        raise UsageError(
            f"this model cannot become a timm model ({str(error).rstrip('.')}): export to onnx or safetensors"
        ) from error
    save_weights(state, path, config=json.dumps(asdict(net.config)), facts=json.dumps(facts))
    arguments = "".join(f", {key}={value!r}" for key, value in options.items())
    return f"timm.create_model('{name}', checkpoint_path='{{file}}'{arguments})"


def timm_call(config: ViTConfig) -> tuple[str, dict[str, Any]]:
    """Name and keyword arguments with which `timm.create_model` builds the same architecture.

    Raises:
        ValueError: an option that timm's ViT does not have.
    """
    stack, usual = config.stack, timm_arguments(ViTConfig(stack=StackConfig(768, 12, 12)))
    require(
        stack.norm_eps == 1e-6,
        f"timm models have norm_eps 1e-06, but this one has {stack.norm_eps}",
    )
    usual["fc_norm"] = config.pool != "cls"
    name = {(192, 3): "tiny", (384, 6): "small"}.get((stack.width, stack.heads), "base")
    if name != "base":
        usual |= {"embed_dim": stack.width, "num_heads": stack.heads}
    options = timm_arguments(config)
    return f"vit_{name}_patch16_224", {k: v for k, v in options.items() if usual[k] != v}


class FromPixels(nn.Module):
    """A network that takes pixels in [0, 1] instead of normalised ones.

    Args:
        net: The network.
        facts: The data's, with `mean` and `std`.
    """

    def __init__(self, net: ViT, facts: dict[str, Any]) -> None:
        super().__init__()
        self.net, self.mean, self.std = net, facts["mean"], facts["std"]

    def forward(self, images: Tensor) -> Tensor:
        """Pixels in [0, 1], (B, C, Y, X), to logits (B, K)."""
        return self.net(normalise(images * 255, self.mean, self.std))


def write_onnx(net: ViT, facts: dict[str, Any], path: Path) -> str:
    """A graph from "images", float32 (B, C, Y, X) in [0, 1], to "logits" (B, K); class names in its metadata."""
    try:
        import onnx
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UsageError(
            "export to onnx needs two more packages: pip install -e '.[export]'"
        ) from error
    example = torch.rand(2, net.embed.shape[0], net.config.image_size, net.config.image_size)
    program = torch.onnx.export(
        FromPixels(net, facts).eval(),
        (example,),
        dynamo=True,
        verbose=False,
        input_names=["images"],
        output_names=["logits"],
        dynamic_shapes={"images": {0: "batch"}},
    )
    assert program is not None
    model = program.model_proto
    onnx.helper.set_model_props(model, {"class_names": json.dumps(facts["class_names"])})
    onnx.save(model, path)
    return (
        "run it with onnxruntime.InferenceSession('{file}').run(None, {{'images': pixels_in_0_1}})"
    )


WRITERS: dict[str, Callable[[ViT, dict[str, Any], Path], str]] = {
    "timm": write_timm,
    "onnx": write_onnx,
    "safetensors": write_safetensors,
}
