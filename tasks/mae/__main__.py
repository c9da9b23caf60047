"""`python -m tasks.mae`: masked autoencoders of images on the command line."""

import sys

from tasks.cli.app import App
from tasks.cli.main import main

APP = App(
    name="mae",
    title="Tessera MAE: pretraining of a Vision Transformer by reconstructing masked patches",
    task="tasks.mae.task:MAETask",
    data="datamodules.images:UnlabelledImageData",
    presets="modules.models.mae:MAE_PRESETS",
    about_presets="modules.models.presets:MAE",
    sizes_of_data=("channels",),
    pretrained="tasks.mae.pretrained:pretrained_options",
    links={
        "model.net.image_size": "data.image_size",
        "model.net.channels": "data.dataset.channels",
    },
    default_config="configs/mae/digits.yaml",
    extra_commands={
        "look": ("show attention, heads and positions", "tasks.look.command:look_at_encoders"),
        "export": (
            "write a checkpoint's weights for Hugging Face, ONNX or safetensors",
            "tasks.mae.export:export",
        ),
        "profile": (
            "count and measure parameters, FLOP, memory and time",
            "tasks.profiling.command:profile_mae",
        ),
    },
    examples=(
        "fit",
        "fit --config configs/mae/cifar10_cpu.yaml --run_dir runs/mae/cifar",
        "fit --preset base --data.path my_images --model.net.mask_ratio 0.6",
        "fit --resume runs/mae/latest",
        "export --ckpt_path runs/mae/latest/checkpoints/best.ckpt --format safetensors",
    ),
    next_commands=(
        "look --ckpt_path {best}",
        "export --ckpt_path {best} --format safetensors",
    ),
    pretrains="vit",
)

if __name__ == "__main__":
    sys.exit(main(APP))
