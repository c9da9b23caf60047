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
from modules.pretrained.timm import timm_arguments
from modules.pretrained.vit import TIMM
from tasks.checkpoints.exporting import new_file, save_weights, write_safetensors
from tasks.checkpoints.reading import KEY, load_config, net_weights, read_checkpoint
from tasks.errors import UsageError

Format = Literal["timm", "onnx", "safetensors"]


def export(ckpt_path: str, format: Format, output: str | None = None) -> None:
    """Write a checkpoint's weights for timm, ONNX Runtime or any reader of safetensors.

    Args:
        ckpt_path: Checkpoint that `fit` wrote.
        format: timm: safetensors with timm's names; onnx: a graph from pixels in [0, 1] to logits,
            of any batch size; safetensors: our own names, config and class names in the header.
        output: File to write; null: beside the checkpoint.
    """
    checkpoint = read_checkpoint(ckpt_path, "vit")
    net = ViT(load_config(ViTConfig, checkpoint[KEY]["net"]))
    net.load_state_dict(net_weights(checkpoint))
    endings = {"timm": ".timm.safetensors", "onnx": ".onnx", "safetensors": ".safetensors"}
    target = Path(output) if output else Path(ckpt_path).with_suffix(endings[format])
    if format != "onnx" and target.suffix != ".safetensors":
        raise UsageError(f"--output {output} must end with .safetensors: readers check the suffix")
    with new_file(target) as partial:
        hint = WRITERS[format](net.eval(), checkpoint[KEY]["metadata"], partial)
    print(f"wrote {target}\n{hint.format(file=target)}")


def write_timm(net: ViT, metadata: dict[str, Any], path: Path) -> str:
    """Writes weights under timm's names; returns the code that loads them."""
    try:
        name, options = timm_call(net.config)
        state = TIMM.weights_to_external(net.state_dict(), net.config)
    except ValueError as error:
        reason = str(error).rstrip(".")
        raise UsageError(f"timm has no such model ({reason}): use onnx or safetensors") from error
    save_weights(state, path, config=json.dumps(asdict(net.config)), metadata=json.dumps(metadata))
    arguments = "".join(f", {key}={value!r}" for key, value in options.items())
    return f"timm.create_model('{name}', checkpoint_path='{{file}}'{arguments})"


def timm_call(config: ViTConfig) -> tuple[str, dict[str, Any]]:
    """Returns the name and arguments with which `timm.create_model` builds the same model."""
    stack = config.stack
    require(stack.norm_eps == 1e-6, f"its models have norm_eps 1e-06, this one {stack.norm_eps}")
    defaults = timm_arguments(ViTConfig(stack=StackConfig(768, 12, 12)))
    defaults["fc_norm"] = config.pool != "cls"
    size = {(192, 3): "tiny", (384, 6): "small"}.get((stack.width, stack.heads), "base")
    if size != "base":
        defaults |= {"embed_dim": stack.width, "num_heads": stack.heads}
    arguments = timm_arguments(config)
    changed = {name: value for name, value in arguments.items() if value != defaults[name]}
    return f"vit_{size}_patch16_224", changed


class FromPixels(nn.Module):
    """A network with the normalisation of its data in front."""

    def __init__(self, net: ViT, metadata: dict[str, Any]) -> None:
        super().__init__()
        self.net = net
        self.mean = metadata["mean"]
        self.std = metadata["std"]

    def forward(self, images: Tensor) -> Tensor:
        """Returns logits (B, K) of pixels (B, C, H, W) in [0, 1]."""
        return self.net(normalise(images * 255, self.mean, self.std))


def write_onnx(net: ViT, metadata: dict[str, Any], path: Path) -> str:
    """Writes a graph from "images", float32 (B, C, H, W) in [0, 1], to "logits" (B, K)."""
    try:
        import onnx
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UsageError("onnx is not installed: pip install -e '.[export]'") from error
    example = torch.rand(2, net.embed.shape[0], net.config.image_size, net.config.image_size)
    program = torch.onnx.export(
        FromPixels(net, metadata).eval(),
        (example,),
        dynamo=True,
        verbose=False,
        input_names=["images"],
        output_names=["logits"],
        dynamic_shapes={"images": {0: "batch"}},
    )
    assert program is not None
    model = program.model_proto
    onnx.helper.set_model_props(model, {"class_names": json.dumps(metadata["class_names"])})
    onnx.save(model, path)
    return (
        "run it with onnxruntime.InferenceSession('{file}').run(None, {{'images': pixels_in_0_1}})"
    )


WRITERS: dict[str, Callable[[ViT, dict[str, Any], Path], str]] = {
    "timm": write_timm,
    "onnx": write_onnx,
    "safetensors": write_safetensors,
}
