"""`python -m tasks.mlm`: masked-language-model pretraining on the command line."""

import sys

from tasks.cli.app import App
from tasks.cli.main import main

APP = App(
    name="mlm",
    title="Tessera MLM: pretraining of a Transformer encoder by predicting masked tokens",
    task="tasks.mlm.task:MaskedLMTask",
    data="datamodules.masked_text:MaskedTextData",
    presets="modules.models.bert:BERT_PRESETS",
    about_presets="modules.models.presets:BERT",
    pretrained="tasks.bert.architectures:pretrained_options",
    default_config="configs/mlm/reference.yaml",
    extra_commands={
        "fill_mask": (
            "print the likeliest tokens for the masks of a text",
            "tasks.mlm.fill_mask:fill_mask",
        ),
        "look": ("show attention, heads and positions", "tasks.look.command:look_at_masks"),
        "export": (
            "write a checkpoint's weights for Hugging Face, ONNX or safetensors",
            "tasks.bert.export:export",
        ),
        "profile": (
            "count and measure parameters, FLOP, memory and time",
            "tasks.profiling.command:profile_mlm",
        ),
    },
    examples=(
        "fit",
        "fit --config configs/mlm/imdb.yaml --run_dir runs/mlm/imdb",
        "fit --config configs/mlm/imdb.yaml --preset base --model.mask.whole_words true",
        "fit --resume runs/mlm/latest",
        'fill_mask --ckpt_path runs/mlm/latest/checkpoints/best.ckpt --text "the film is [MASK]"',
        "export --ckpt_path runs/mlm/latest/checkpoints/best.ckpt --format hf",
    ),
    next_commands=(
        'fill_mask --ckpt_path {best} --text "a [MASK] of words"',
        "look --ckpt_path {best}",
        "export --ckpt_path {best} --format onnx",
    ),
    pretrains="bert",
)

if __name__ == "__main__":
    sys.exit(main(APP))
