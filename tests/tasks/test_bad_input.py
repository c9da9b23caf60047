"""Bad input of every task: an exit code, one line that names it, and nothing left behind."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from datamodules.tokenizers import Tokenizer, TokenizerConfig
from tests.helpers.command import Console, Patch
from tests.helpers.tiny import (
    SHORT,
    SMALL_LM,
    SMALL_S2S,
    write_corpus,
    write_images,
    write_pairs,
)

# Exit codes.
USER = 2
FAILED = 1

HUGE = "1" + "0" * 30
LONG = "x" * 300
ABBREVIATIONS = {  # first word of a case
    "vit": {
        "IMAGES": "fit --preset digits --model.net.channels null --data.source folder --data.path",
        "EARLY": "fit --trainer.callbacks+=EarlyStopping --trainer.callbacks.monitor",
        "PREDICT": "predict --ckpt_path vit.ckpt --input images",
        "EXPORT": "export --ckpt_path vit.ckpt",
        "RESUME": "fit --resume done --trainer.max_epochs 3",
    },
    "bert": {"FIT": "fit --preset tiny"},
    "igpt": {},
    "lm": {
        "FIT": f"fit {SMALL_LM} --data.path",
        "GENERATE": "generate --ckpt_path letters.ckpt",
        "SCORE": "score --ckpt_path letters.ckpt --input",
    },
    "seq2seq": {
        "FIT": f"fit {SMALL_S2S} --data.languages en-up --data.path",
        "TRANSLATE": "translate --ckpt_path translator.ckpt --text two",
        "ATTEND": "attend --ckpt_path translator.ckpt --text",
    },
}
CASES: dict[tuple[str, int], dict[str, str | tuple[str, ...]]] = {  # line: what the message names
    ("vit", USER): {
        "fti": "did you mean 'fit'?",
        "fit stray": "'stray'",
        "fit --zzzzzzz 3": "--zzzzzzz",
        "fit --zzzzzzz": "unknown option --zzzzzzz",
        "fit --data.path": "--data.path needs a value",
        "fit --preset --data.batch_size 3": "--preset needs a value",
        "fit --nrom rmsnorm": "did you mean --model.net.stack.norm?",
        "fit --trainer.accelerator gpu": ("--trainer.accelerator gpu", "cpu"),
        "fit --model.net.position_options {base: 100}": "position_options '{base: 100}'",
        "fit --model.net.position_options {base:100}": "'{name: value}'",
        "fit --model.net.position_options '{bse: 100}'": "--model.net.position_options: ",
        "fit --model.net.position_options '{base: x}'": "--model.net.position_options.base",
        "fit --model.net.stack.attention additive": "--model.net.position ",
        "fit --model.net.stack.causal true": "--model.net.stack.causal",
        "fit --modle.net.stack.depth 3": "--model.net.stack.depth",
        "fit --model.net.image_size 9": ("--model.net.image_size 9", "--model.net.patch_size 2"),
        "fit --model.net.stack.heads 7": "--model.net.stack.heads 7",
        "fit --model.net.stack.order pree": ("--model.net.stack.order ", "did you mean pre?"),
        "fit --model.net.num_classes 3": "--model.net.num_classes 3",
        "fit --model.augment.flip 2": "flip",
        "fit --model.ema 1": "--model.ema 1",
        "fit --model.optimizer.lr -1": "--model.optimizer.lr must be above 0",
        "fit --model.optimizer.lr fast": ("--model.optimizer.lr fast", "a number"),
        "fit --model.pretrained timm/vit_tiny_patch16_225": "'vit_tiny_patch16_224'",
        "fit --model.pretrained timm/resnet18": "resnet18",
        "fit --model.pretrained google/vit-base-patch16-224": "or hf/google/vit-base-patch16-224",
        "fit --model.pretrained timm/vit_tiny_patch16_224.nope": "augreg_in21k",
        "fit --model.pretrained nowhere.pth": "nowhere.pth",
        "fit --model.pretrained vit.ckpt --model.net.stack.depth 9": "leave out --preset",
        "fit --data.batch_size null": "--data.batch_size",
        "fit --data.image_size 16": ("--data.image_size", "--model.net.image_size"),
        "fit --data.path my_images": ("my_images does not exist", "train/CLASS/*.jpg (folder)"),
        "fit --config configs/vit/cifar10.yaml --data.path nowhere": "nowhere",
        "fit --seed_everything -1": "--seed_everything",
        "fit --seed_everything null": "--seed_everything",
        f"fit --seed_everything {HUGE}": "--seed_everything",
        "fit --config nowhere.yaml": "nowhere.yaml",
        "fit --config bad.yaml": "bad.yaml",
        "fit --config list.yaml": "list.yaml",
        "fit --config unknown.yaml": ("did you mean --trainer.max_epochs?", "unknown.yaml"),
        "fit --config many.yaml": ("--trainer.max_epochs many", "whole number", "many.yaml"),
        "fit --config many.yaml --trainer.max_epochs 2": "many.yaml",
        "fit --config mean.yaml": ("--data.dataset.mean [0.5, 'half']", "mean.yaml"),
        "fit --config .": "config file '.'",
        "fit --config pipe": "pipe",
        "fit -c /dev/zero": "/dev/zero",
        "fit --model.net pipe": "pipe",
        "fit --model.net section.yaml": ("model.net.stack is 5", "section.yaml"),
        "fit --model.net '{stack: {depth: 1, depth: 2}}'": ("--model.net", "'depth'"),
        "fit --model '{net: null}'": "model.net is null",
        "fit --model '{nett: {}}'": "did you mean --model.net?",
        "fit --data '{image_size: 16}'": "--data.image_size",
        "fit --trainer [1]": "trainer is a list",
        "fit --trainer.accelerator tpuu": "tpuu",
        "fit --trainer.strategy fsdp": "--trainer.strategy",
        "fit --config configs/trainer/fsdp.yaml": "--trainer.strategy",
        "fit --trainer.max_epochs": "--trainer.max_epochs",
        "fit --trainer.max_epochs 0": "--trainer.max_epochs is 0",
        "fit --trainer.num_nodes 2": "--trainer.num_nodes",
        "fit --trainer.enable_checkpointing false": "--trainer.enable_checkpointing",
        "fit --trainer.default_root_dir here": "--trainer.default_root_dir",
        "fit --trainer.barebones true": "--trainer.barebones",
        "fit --trainer.callbacks Nope": ("--trainer.callbacks Nope", "Callback"),
        "fit --trainer.callbacks+=torch.nn.Linear": "--trainer.callbacks torch.nn.Linear",
        "fit --trainer.callbacks '[5]'": "--trainer.callbacks [5]",
        "fit --trainer.callbacks '[LearningRateMonitor, Nope]'": ("--trainer.callbacks", "Nope"),
        "fit --trainer.callbacks+=EarlyStopping": "EarlyStopping needs --trainer.callbacks.monitor",
        "fit --trainer.callbacks '[LearningRateMonitor, EarlyStopping]'": "EarlyStopping needs",
        "fit --trainer.logger CSVLogger": "CSVLogger needs --trainer.logger.save_dir",
        "fit --trainer.precision fp16": ("must be 32-true", "16-mixed"),
        "EARLY val/loss --trainer.callbacks.nope 3": "--trainer.callbacks.nope 3",
        "EARLY val/loss --trainer.callbacks.patience x": "--trainer.callbacks.patience",
        "EARLY test/loss": ("EarlyStopping", "test/loss", "train/loss"),
        "fit --trainer.logger Nope": ("--trainer.logger Nope", "Logger"),
        "fit --config configs/logger/wandb.yaml --model.net.num_classes 3": "num_classes 3",
        "fit --checkpoint.monitor val/nope": ("--checkpoint.monitor val/nope", "train/loss"),
        "fit --checkpoint.monitor val/loss --trainer.limit_val_batches 0": "val/loss",
        "fit --run_dir bad.yaml/run": ("--run_dir", "bad.yaml"),
        f"fit --run_dir {LONG}": "--run_dir",
        "fit --model.ema 0.9 --trainer.precision bf16-true": "--model.ema",
        f"PREDICT --output new/{LONG}/run.csv": "--output",
        "fit --resume nowhere": "nowhere",
        "RESUME --model.net.stack.depth 3": "--model.net.stack.depth 3 (checkpoint: 1)",
        "RESUME --model.net.num_classes 3": "--model.net.num_classes 3",
        "RESUME --data.batch_size 32": "batch size 64",
        "RESUME --model.optimizer.optimizer muon": "optimizer",
        "RESUME --run_dir elsewhere": "--run_dir",
        "fit --resume done/checkpoints/best.ckpt": ("--resume done,", "--model.pretrained"),
        "fit --resume vit.ckpt": "run folder",
        "RESUME --model.pretrained timm/vit_tiny_patch16_224": "--model.pretrained",
        "RESUME --trainer.max_epochs 1": "--trainer.max_epochs 1",
        f"fit {SHORT} --run_dir done": ("--resume ", "done"),
        "test": "--ckpt_path runs/vit/latest/",
        "validate --ckpt_path none.ckpt": "none.ckpt",
        "predict --ckpt_path vit.onnx --input images": ("run folder", "In Python, tessera.load"),
        "test --ckpt_path theirs/model.safetensors": ("run folder", "In Python, tessera.load"),
        "test --ckpt_path vit.ckpt --model.net.stack.depth 3": "--model.net.stack.depth 3",
        "test --ckpt_path vit.ckpt --model.net.image_size 12": "image_size",
        "test --ckpt_path vit.ckpt --data.source folder --data.path images": ("cat", "10 classes"),
        "predict --ckpt_path vit.ckpt": "--input",
        "predict --ckpt_path vit.ckpt --input nowhere": "nowhere",
        "PREDICT --input=images": ("--input is given several times", "folder"),
        "predict --ckpt_path vit.ckpt --input nothing": "nothing",
        "PREDICT --output labels.txt": ("--output labels.txt", ".csv"),
        "PREDICT --output images": "--output images",
        "PREDICT --output bad.yaml/x.csv": "--output bad.yaml",
        "PREDICT --run_dir x": "did you mean --output?",
        "predict --ckpt_path vit.ckpt --data.predict_path a": "did you mean --input?",
        "predict --ckpt_path vit.ckpt --image a.png": "--image: did you mean --input?",
        "look --ckpt_path vit.ckpt --input a.png": "--input: did you mean --image?",
        "test --ckpt_path vit.ckpt --run_dir x": "did you mean --output?",
        "test --ckpt_path vit.ckpt --output out/test.csv": ("--output out/test.csv", "folder"),
        "validate --ckpt_path vit.ckpt --output val.json": ("--output val.json", "folder"),
        "fit --path x": "did you mean --data.path",
        "fit --lr 1": "did you mean --model.optimizer.lr?",
        "fit --epochs 3": "did you mean --trainer.max_epochs?",
        "fit --seed 3": "did you mean --seed_everything?",
        "fit --model.net.stack.dropout 2": "--model.net.stack.dropout is 2.0",
        "fit --model.optimizer.freeze 99": "--model.optimizer.freeze is 99",
        "fit --checkpoint.save_top_k -5": "--checkpoint.save_top_k=-5",
        "PREDICT --trainer.limit_predict_batches 0": "--trainer.limit_predict_batches",
        "PREDICT --trainer.logger true": "--trainer.logger",
        "export --format onnx": "--ckpt_path runs/vit/latest/",
        "export --ckpt_path pipe --format onnx": "pipe",
        "export --format timm --ckpt_path theirs.ckpt": "theirs.ckpt",
        "export --format timm --ckpt_path letters.ckpt": "python -m tasks.lm",
        "export --ckpt_path a --format tim": "did you mean timm?",
        "export --ckpt_path a --formt timm": "did you mean --format?",
        "EXPORT --format timm --output new/deep/x": ("timm", "cifar_small"),
        "EXPORT --format onnx --output vit.ckpt": ("--output vit.ckpt", "--ckpt_path vit.ckpt"),
        "EXPORT --format safetensors --output bad.yaml/x.safetensors": "--output",
        f"EXPORT --format safetensors --output {LONG}.safetensors": "--output",
    },
    ("vit", FAILED): {
        "fit --model.pretrained bad.yaml": "bad.yaml",
        "fit --model.pretrained list.pth": "list.pth",
        "fit --config configs/vit/cifar10.yaml": "--data.path FOLDER",
        "IMAGES broken": "broken.jpg",
        "test --ckpt_path half.ckpt": "half.ckpt",
    },
    ("bert", USER): {
        "fit --preset tini": "'tiny'",
        "fit --model.r_drop -1": "--model.r_drop -1",
        "fit --model.pretrained nowhere": "nowhere",
        "fit --model.pretrained vit.ckpt": "task 'vit'",
        "FIT --model.net.max_length 32 --data.max_length 64": "--data.max_length 64",
        "FIT --model.net.max_length 9 --model.net.pool flatten --model.net.position t5": "flatten",
        "FIT --data.label_fraction 2": "--data.label_fraction is 2",
        "FIT --model.net.vocabulary 20": "--model.net.vocabulary",
        "FIT --model.net.next_sentence true": "--model.net.next_sentence",
        "fit --model.net.num_classes 3": "num_classes",
        "predict --ckpt_path vit.ckpt --text x": "tasks.vit",
        "tokenize --text ' '": "--text",
        "tokenize --text x --tokenizer.file nowhere.json": "nowhere.json",
        "tokenize --text x --merges true --tokenizer.kind word": "no byte-level BPE merges",
        "tokenize --text x --max_length 0": "--max_length 0",
        "tokenize --text x --tokenizer.vocabulary 3": " --tokenizer.vocabulary is 3",
        "fit --data.batch_size -3": "--data.batch_size is -3",
        "fit --data.loading.eval_batch_size 0": "--data.loading.eval_batch_size is 0",
        "fit --data.max_length 2": "--data.max_length is 2",
        "fit --data.tokenizer.min_frequency 0": "--data.tokenizer.min_frequency is 0",
        "fit --model.pretrained nobody/model": "or hf/nobody/model for",
        "fit --model.pretrained runs/typo": ("runs/typo: no such file or folder; give", "json\n"),
        "fit --model.pretrained ./typo": ("./typo: no such file or folder; give", "json\n"),
    },
    ("lm", USER): {
        "FIT short.txt": "--data.max_length",
        "FIT texts --model.net.max_length 16": ("--data.max_length 32", "16"),
        "FIT texts --model.net.vocabulary 20": "20",
        "FIT texts --model.z_loss -1": "--model.z_loss -1.0",
        "FIT texts --model.samples.every 0": "--model.samples.every is 0",
        "FIT texts --preset gtp2": "did you mean 'gpt2'",
        "FIT texts --model.pretrained nowhere": "nowhere",
        "FIT texts --model.pretrained theirs": "mamba",
        "FIT texts --model.pretrained vit.ckpt": "'vit'",
        "FIT texts --model.pretrained run": ("--model.pretrained", "run"),
        "FIT texts --model.pretrained letters.ckpt --data.tokenizer.file t.json": "tokenizer",
        "fit --model.net.stack.attention additive": "default",
        "generate": "--ckpt_path runs/lm/latest/",
        "generate --ckpt_path nowhere.ckpt": "'nowhere.ckpt'",
        "generate --ckpt_path theirs": ("--ckpt_path", "mamba"),
        "generate --ckpt_path vit.ckpt": "python -m tasks.vit",
        "export --ckpt_path vit.ckpt": "python -m tasks.vit",
        "GENERATE --temprature 1": "did you mean --temperature",
        "GENERATE --temperature -0.5": "--temperature is -0.5",
        "GENERATE --temperature 0 --samples 2": "samples",
        "GENERATE --samples 99999999999": "samples is 99999999999",
        "GENERATE --samples ''": "--samples",
        "GENERATE --device=": "--device",
        "GENERATE --seed null": "seed",
        "GENERATE --beams 2 --samples 3": "beams",
        "GENERATE --beams 2 --stop x": "stop",
        "GENERATE --stop ''": "stop",
        "GENERATE --prompt über": "'ü' (U+00FC)",
        "GENERATE --prompt_file p.txt": "did you mean --input?",
        "GENERATE --seed_everything 3": "--seed_everything: did you mean --seed?",
        "GENERATE --trainer.accelerator cpu": "--trainer.accelerator: did you mean --device?",
        "score --ckpt_path a --data.path p.txt": "did you mean --input?",
        "GENERATE --input p.txt": "p.txt",
        "GENERATE --input fox.txt --input blank.txt": "--input is given several times",
        "GENERATE --input blank.txt": "blank.txt",
        "GENERATE --input bytes.txt": "line 2",
        "generate --ckpt_path gpt2": "a model of the hub is hf/gpt2",
        "score --ckpt_path me/gpt --input fox.txt": "a model of the hub is hf/me/gpt",
        "SCORE letter.txt": "one token",
        "SCORE bad.yaml": ("bad.yaml", "--input takes"),
        "SCORE fox.txt --output fox.txt": ("--output fox.txt", "--input fox.txt"),
        "GENERATE --input fox.txt --output ./fox.txt": ("--output ./fox.txt", "--input fox.txt"),
        "SCORE fox.txt --stride 33": ("stride is 33", "32"),
        "SCORE fox.txt --batch_size 0": "batch_size is 0",
    },
    ("igpt", USER): {
        "probe --path images": "unknown option --path: did you mean --data.path?",
    },
    ("lm", FAILED): {
        "SCORE umlaut.txt": "'ö' (U+00F6)",
        "generate --ckpt_path hf/someone/nothing": "--ckpt_path FOLDER",
    },
    ("seq2seq", USER): {
        "FIT pairs --model.net.source_vocabulary 9": "--model.net.source_vocabulary",
        "FIT pairs --model.net.position learned --model.net.max_length 16": "--data.max_length 24",
        "FIT pairs --data.tokenizer.joint false": ("--model.net.tying all", "target"),
        "FIT pairs --model.net.architecture prefx": "did you mean prefix",
        "FIT pairs --model.label_smoothing 1": "--model.label_smoothing 1.0",
        "FIT pairs --model.decoding.beams 0": "--model.decoding.beams is 0",
        "FIT pairs --model.decoding.val_beams 0": "--model.decoding.val_beams is 0",
        "FIT pairs --model.decoding.length_penalty 11": "--model.decoding.length_penalty is 11",
        "FIT pairs --model.decoding.max_new_tokens 0": "--model.decoding.max_new_tokens is 0",
        "FIT pairs --model.average 1": "--model.average 1",
        "FIT pairs --model.average 3 --model.ema 0.9": "one",
        "FIT pairs --model.pretrained nowhere": "nowhere",
        "translate --ckpt_path nowhere.ckpt --text a": "'nowhere.ckpt'",
        "translate --ckpt_path vit.ckpt --text a": "python -m tasks.vit",
        "translate --ckpt_path t5-small --text a": "a model of the hub is hf/t5-small",
        "translate --text a": "--ckpt_path runs/seq2seq/latest/",
        "TRANSLATE --beam 1": "did you mean --beams",
        "TRANSLATE --nbest 6": ("nbest is 6", "5 beams"),
        "TRANSLATE --beams 1 --nbest 2": "--nbest is 2",
        "TRANSLATE --batch_size 0": "--batch_size is 0",
        "TRANSLATE --temperature 1": "set beams to 1",
        "TRANSLATE --beams 1 --nbest 2 --temperature 1": ("nbest", "temperature"),
        "TRANSLATE --beams 1 --top_k 3": "temperature",
        "TRANSLATE --file a.txt": "did you mean --input?",
        "ATTEND two --out a.png": "did you mean --output?",
        "TRANSLATE --input a.txt": "--input a.txt",
        "TRANSLATE --input bytes.txt": "line 2",
        "TRANSLATE --input fox.txt --output fox.txt": ("--output fox.txt", "--input fox.txt"),
        "ATTEND ' '": "--text",
        "ATTEND two --beams 0": "--beams: beams is 0",
        "ATTEND two --output a/b.xyz": "--output a/b.xyz",
    },
}
NUMBERS = {  # of the Trainer, with values that make no sense
    "val_check_interval": ("0", "-1", "nan"),
    "overfit_batches": ("-1", "nan", "0.001", "0.05"),
    "limit_train_batches": ("0.0", "1.5", "-3", "0.001"),
    "limit_val_batches": ("-1", "nan"),
    "limit_test_batches": (HUGE, "0.001"),
    "log_every_n_steps": ("-1",),
    "max_time": ("abc", "00:00:00:00", "'{days: 1e300}'"),
    "accumulate_grad_batches": ("0", HUGE),
    "devices": ("0", "-1", "abc", "[0,0]", "1000000000"),
    "num_nodes": ("0",),
    "num_sanity_val_steps": ("-2",),
    "gradient_clip_val": ("-1", "1e300"),
    "check_val_every_n_epoch": ("0",),
    "max_epochs": ("-2", "9" * 5000),
    "min_epochs": ("-1",),
    "min_steps": ("-1",),
    "fast_dev_run": ("-1", "1e30"),
}
for name, values in NUMBERS.items():
    CASES["vit", USER] |= {f"fit --trainer.{name}={value}": name for value in values}
for name in ("run_dir", "resume", "preset", "config", "model.net", "trainer.callbacks", "compile"):
    CASES["vit", USER] |= {f"fit --{name}=": f"--{name}", f"fit --{name} '' {SHORT}": f"--{name}"}
ROWS = [(*key, line, named) for key, lines in CASES.items() for line, named in lines.items()]

FILES = {
    "bad.yaml": b"trainer: {max_epochs: 1\n",
    "list.yaml": b"- 1\n",
    "many.yaml": b"trainer: {max_epochs: many}\n",
    "unknown.yaml": b"trainer: {max_epoch: 1}\n",
    "mean.yaml": b"data: {dataset: {mean: [0.5, half]}}\n",
    "section.yaml": b"stack: 5\n",
    "blank.txt": b"\n \n",
    "bytes.txt": b"a\n\xff\n",
    "short.txt": b"a b c d",
    "letter.txt": b"T",
    "fox.txt": b"The lazy dog.",
    "umlaut.txt": "The lazy dög.".encode(),
    "theirs/config.json": b'{"model_type": "mamba"}',
    "theirs/model.safetensors": b"",
    "broken/train/cat/broken.jpg": b"\xff\xd8\xff\xe0 no image",
}


@pytest.fixture(scope="session")
def folder(
    finished: Path,
    best: Path,
    lm_letters: Path,
    translator: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """Data, checkpoints and config files, most of them bad; no case adds a file to them."""
    folder = tmp_path_factory.mktemp("bad")
    write_images(folder / "images")
    write_images(folder / "broken")
    write_pairs(folder / "pairs")
    (folder / "nothing").mkdir()
    write_corpus(folder / "texts")
    tokenizer = Tokenizer.train(["the lazy dog"], TokenizerConfig("bpe", 300))
    (folder / "t.json").write_text(tokenizer.to_json())
    for name, content in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    torch.save([torch.ones(2)], folder / "list.pth")
    torch.save({"weight": torch.ones(2)}, folder / "theirs.ckpt")
    (folder / "half.ckpt").write_bytes(best.read_bytes()[:100_000])
    os.mkfifo(folder / "pipe")
    (folder / "vit.ckpt").symlink_to(best)
    (folder / "letters.ckpt").symlink_to(lm_letters)
    (folder / "translator.ckpt").symlink_to(translator)
    (folder / "run").symlink_to(lm_letters.parents[1])
    shutil.copytree(finished, folder / "done")
    return folder


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.timeout(60)
@pytest.mark.plain_every(5, "--run_dir done")
@pytest.mark.parametrize(
    "task, code, line, named",
    ROWS,
    ids=lambda value: value[:70] if isinstance(value, str) else "",
)
def test_one_sentence_names_it(
    task: str, code: int, line: str, named: Any, folder: Path, console: Console, monkeypatch: Patch
) -> None:
    monkeypatch.delenv("TESSERA_DATA", raising=False)
    monkeypatch.chdir(folder)
    before = contents(folder / "done")
    first, _, rest = line.partition(" ")
    line = f"{ABBREVIATIONS[task].get(first, first)} {rest}"
    names = (named,) if isinstance(named, str) else named
    console.refused(line, *names, task=task, code=code)
    assert contents(folder / "done") == before
