"""`python -m tasks.vit`: ViT image classification on the command line."""

import sys

from tasks.cli.app import App
from tasks.cli.main import main

APP = App(
    name="vit",
    title="Tessera ViT: image classification with a Vision Transformer or a relative",
    task="tasks.vit.task:ViTTask",
    data="datamodules.images:ImageData",
    presets="modules.models.images:IMAGE_PRESETS",
    about_presets="modules.models.presets:IMAGES",
    sizes_of_data=("num_classes", "channels"),
    pretrained="tasks.vit.architectures:pretrained_options",
    links={
        "model.problem_type": "data.dataset.problem_type",
        "model.net.image_size": "data.image_size",
        "model.net.channels": "data.dataset.channels",
    },
    default_config="configs/vit/digits.yaml",
    predict_input="an image, a folder of images, or a CSV or JSON Lines file that names them",
    extra_commands={
        "look": ("show attention, heads and positions", "tasks.look.command:look_at_images"),
        "export": (
            "write a checkpoint's weights for timm, Hugging Face, ONNX or safetensors",
            "tasks.vit.export:export",
        ),
        "profile": (
            "count and measure parameters, FLOP, memory and time",
            "tasks.profiling.command:profile_vit",
        ),
        "probe": (
            "classify frozen features: linear probe and k-nearest neighbours",
            "tasks.vit.probe:probe_images",
        ),
        "compare": (
            "a table of parameters, FLOP, images/s and test accuracy of several models",
            "tasks.vit.compare:compare",
        ),
    },
    examples=(
        "fit",
        "fit --config configs/vit/cifar10.yaml --run_dir runs/vit/cifar",
        "fit --config configs/vit/imagefolder.yaml --data.path my_images",
        "fit --resume runs/vit/latest --trainer.max_epochs 80",
        "predict --ckpt_path runs/vit/latest/checkpoints/best.ckpt --input photo.jpg",
    ),
    next_commands=(
        "predict --ckpt_path {best} --input FILE_OR_FOLDER",
        "look --ckpt_path {best}",
        "export --ckpt_path {best} --format onnx",
    ),
    library_formats=("timm", "hf"),
)

if __name__ == "__main__":
    sys.exit(main(APP))
