"""`python -m tasks.vit`: ViT image classification on the command line."""

import sys

from tasks.cli.app import App
from tasks.cli.main import main

APP = App(
    name="vit",
    title="Tessera ViT: image classification with a Vision Transformer",
    task="tasks.vit.task:ViTTask",
    data="datamodules.images:ImageData",
    presets="modules.models.vit:VIT_PRESETS",
    sizes_of_data=("num_classes", "channels"),
    pretrained="tasks.vit.architectures:pretrained_options",
    links={
        "model.problem_type": "data.dataset.problem_type",
        "model.net.image_size": "data.image_size",
        "model.net.channels": "data.dataset.channels",
    },
    default_config="configs/vit/digits.yaml",
    predict_input="an image, a folder of images, or a CSV or JSON Lines file that names images",
    extra_commands={
        "export": (
            "write a checkpoint's weights for timm, ONNX or safetensors",
            "tasks.vit.export:export",
        )
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
        "export --ckpt_path {best} --format onnx",
    ),
)

if __name__ == "__main__":
    sys.exit(main(APP))
