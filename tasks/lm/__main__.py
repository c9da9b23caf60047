"""`python -m tasks.lm`: language models on the command line."""

import sys

from tasks.cli.app import App
from tasks.cli.main import main

APP = App(
    name="lm",
    title="Tessera LM: language models, from raw text to generated text",
    task="tasks.lm.task:LMTask",
    data="datamodules.corpus:CorpusData",
    presets="modules.models.gpt:DECODER_PRESETS",
    about_presets="modules.models.presets:DECODERS",
    sizes_of_data=("max_length",),
    pretrained="tasks.lm.architectures:pretrained_options",
    default_config="configs/lm/reference.yaml",
    epochs=10,
    extra_commands={
        "generate": ("generate texts that continue prompts", "tasks.lm.generate:generate"),
        "score": ("loss, perplexity and bits per byte of a text", "tasks.lm.score:score"),
        "look": ("show attention, heads and positions", "tasks.look.command:look_at_language"),
        "export": (
            "write a checkpoint's weights for Hugging Face, ONNX or safetensors",
            "tasks.lm.export:export",
        ),
        "profile": (
            "count and measure parameters, FLOP, memory and time",
            "tasks.profiling.command:profile_lm",
        ),
    },
    examples=(
        "fit",
        "fit --config configs/lm/shakespeare_char.yaml --data.path FILE_OR_FOLDER_OR_HUB_ID",
        "fit --model.pretrained hf/gpt2 --data.path my_texts",
        "generate --ckpt_path runs/lm/latest/checkpoints/best.ckpt "
        '--prompt "The" --temperature 0.8 --top_p 0.95',
        "score --ckpt_path runs/lm/latest/checkpoints/best.ckpt --input FILE",
        'score --ckpt_path runs/lm/latest/checkpoints/best.ckpt --text "The value is a list."',
    ),
    next_commands=(
        'generate --ckpt_path {best} --prompt "The"',
        "score --ckpt_path {best} --input FILE",
        "look --ckpt_path {best}",
        "export --ckpt_path {best} --format safetensors",
    ),
)

if __name__ == "__main__":
    sys.exit(main(APP))
