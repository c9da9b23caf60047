"""`python -m tasks.bert`: text classification on the command line."""

import sys

from tasks.cli.app import App
from tasks.cli.main import main

APP = App(
    name="bert",
    title="Tessera BERT: text classification with a Transformer encoder",
    task="tasks.bert.task:BertTask",
    data="datamodules.reviews:ReviewData",
    presets="modules.models.bert:BERT_PRESETS",
    about_presets="modules.models.presets:BERT",
    pretrained="tasks.bert.architectures:pretrained_options",
    links={"model.problem_type": "data.dataset.problem_type"},
    default_config="configs/bert/reviews.yaml",
    predict_input="a file with a text on each line, a table (.csv, .jsonl, .parquet), or - for "
    "standard input",
    takes_text=True,
    epochs=5,
    extra_commands={
        "look": ("show attention, heads and positions", "tasks.look.command:look_at_reviews"),
        "export": (
            "write a checkpoint's weights for Hugging Face, ONNX or safetensors",
            "tasks.bert.export:export",
        ),
        "tokenize": ("show the tokens of a text", "tasks.bert.tokenize:tokenize"),
        "profile": (
            "count and measure parameters, FLOP, memory and time",
            "tasks.profiling.command:profile_bert",
        ),
    },
    examples=(
        "fit",
        "fit --config configs/bert/imdb.yaml --run_dir runs/bert/imdb",
        "fit --config configs/bert/imdb.yaml --model.pretrained "
        "runs/mlm/latest/checkpoints/best.ckpt",
        'predict --ckpt_path runs/bert/latest/checkpoints/best.ckpt --text "the film is not bad"',
        'tokenize --text "the film is not bad"',
    ),
    next_commands=(
        "predict --ckpt_path {best} --input FILE",
        "look --ckpt_path {best}",
        "export --ckpt_path {best} --format onnx",
    ),
)

if __name__ == "__main__":
    sys.exit(main(APP))
