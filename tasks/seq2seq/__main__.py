"""`python -m tasks.seq2seq`: translation on the command line."""

import sys

from tasks.cli.app import App
from tasks.cli.main import main

APP = App(
    name="seq2seq",
    title="Tessera seq2seq: translation with an encoder-decoder",
    task="tasks.seq2seq.task:Seq2SeqTask",
    data="datamodules.translation:TranslationData",
    presets="modules.models.seq2seq:SEQ2SEQ_PRESETS",
    about_presets="modules.models.presets:SEQ2SEQ",
    pretrained="tasks.seq2seq.architectures:pretrained_options",
    default_config="configs/seq2seq/dates.yaml",
    epochs=10,
    extra_commands={
        "translate": (
            "translate texts, one sentence per line",
            "tasks.seq2seq.translate:translate",
        ),
        "attend": ("draw the cross-attention of a translation", "tasks.seq2seq.attend:attend"),
        "look": ("show attention, heads and positions", "tasks.look.command:look_at_pairs"),
        "export": (
            "write a checkpoint's weights for Hugging Face, ONNX or safetensors",
            "tasks.seq2seq.export:export",
        ),
        "profile": (
            "count and measure parameters, FLOP, memory and time",
            "tasks.profiling.command:profile_seq2seq",
        ),
    },
    examples=(
        "fit",
        "fit --config configs/seq2seq/multi30k_en_de.yaml --data.path FOLDER",
        'translate --ckpt_path runs/seq2seq/latest/checkpoints/best.ckpt --text "March 5, 2021"',
        "translate --ckpt_path runs/seq2seq/latest/checkpoints/best.ckpt --input FILE --beams 8 "
        "--nbest 3",
        'attend --ckpt_path runs/seq2seq/latest/checkpoints/best.ckpt --text "March 5, 2021"',
    ),
    next_commands=(
        'translate --ckpt_path {best} --text "..."',
        "look --ckpt_path {best}",
        "export --ckpt_path {best} --format safetensors",
    ),
)

if __name__ == "__main__":
    sys.exit(main(APP))
