"""`python -m tasks.igpt`: image GPT on the command line."""

import sys

from tasks.cli.app import App
from tasks.cli.main import main

APP = App(
    name="igpt",
    title="Tessera iGPT: a language model of pixels, which samples and completes images",
    task="tasks.igpt.task:IGPTTask",
    data="datamodules.pixels:PixelData",
    presets="modules.models.gpt:IMAGEGPT_PRESETS",
    about_presets="modules.models.presets:IMAGE_GPT",
    sizes_of_data=("vocabulary", "output_vocabulary", "max_length"),
    pretrained="tasks.igpt.architectures:pretrained_options",
    default_config="configs/igpt/digits.yaml",
    extra_commands={
        "generate": ("sample images, or complete half of one", "tasks.igpt.generate:generate"),
        "look": ("show attention, heads and positions", "tasks.look.command:look_at_pixels"),
        "probe": ("classify images by the features of each layer", "tasks.igpt.probe:probe"),
        "export": (
            "write a checkpoint's weights for Hugging Face, ONNX or safetensors",
            "tasks.igpt.export:export",
        ),
        "profile": (
            "count and measure parameters, FLOP, memory and time",
            "tasks.profiling.command:profile_igpt",
        ),
    },
    examples=(
        "fit",
        "fit --config configs/igpt/cifar10_cpu.yaml --run_dir runs/igpt/cifar",
        "fit --preset cifar_cpu --data.path my_images --data.image_size 16",
        "generate --ckpt_path runs/igpt/latest/checkpoints/best.ckpt --samples 16",
        "generate --ckpt_path runs/igpt/latest/checkpoints/best.ckpt --input photo.png",
        "probe --ckpt_path runs/igpt/latest/checkpoints/best.ckpt",
    ),
    next_commands=(
        "generate --ckpt_path {best} --output grid.png",
        "generate --ckpt_path {best} --input FILE",
        "look --ckpt_path {best}",
        "probe --ckpt_path {best}",
        "export --ckpt_path {best} --format safetensors",
    ),
)

if __name__ == "__main__":
    sys.exit(main(APP))
