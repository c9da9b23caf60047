"""What stands later wins, and a wrong option is refused in one sentence."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks.cli.config_files import in_yaml, read_config
from tasks.cli.lightning_cli import TaskCLI
from tasks.cli.parsing import expand_macros, flat, join_values, merged, names_data, take_option
from tasks.errors import UsageError
from tests.tasks.command import run


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function from a command line to the options that `fit` would have, flat."""
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(TaskCLI, "fit", lambda self: seen.append(flat(self.options_to_save())))

    def parsed(line: str) -> dict[str, Any]:
        assert run(f"fit {line}") == 0
        return seen[-1]

    return parsed


def write(path: Path, **content: Any) -> Path:
    path.write_text(yaml.safe_dump(content))
    return path


def test_typed_wins_over_config_wins_over_preset(options: Any, tmp_path: Path) -> None:
    config = write(
        tmp_path / "c.yaml",
        preset="cifar_tiny",
        model={"net": {"stack": {"depth": 5, "drop_path": 0.25}}},
        data={},
    )
    preset = options("--preset cifar_tiny")
    both = options(f"--config {config}")
    typed = options(f"--config {config} --model.net.stack.depth 7")
    depth, width, drop = (
        "model.net.stack.depth",
        "model.net.stack.width",
        "model.net.stack.drop_path",
    )
    assert preset[depth] != 5 and preset[drop] != 0.25
    assert (both[depth], both[drop], both[width]) == (5, 0.25, preset[width])
    assert (typed[depth], typed[drop], typed[width]) == (7, 0.25, preset[width])


@pytest.mark.parametrize(
    "line, depth",
    [
        ("--config a.yaml --config b.yaml", 3),
        ("--config b.yaml --config=a.yaml", 2),
        ("--model.net.stack.depth 4 --config a.yaml", 4),
        ("--config a.yaml --model.net.stack.depth 4 --model.net.stack.depth 5", 5),
        ("--config a.yaml --preset digits", None),
    ],
)
def test_typed_wins_then_later_wins(
    line: str, depth: int | None, options: Any, tmp_path: Path
) -> None:
    for name, value in (("a", 2), ("b", 3)):
        write(tmp_path / f"{name}.yaml", model={"net": {"stack": {"depth": value}}})
    expected = options("--preset digits")["model.net.stack.depth"] if depth is None else depth
    assert options(line)["model.net.stack.depth"] == expected


def test_the_default_config_is_read_where_no_data_are_named(options: Any, tmp_path: Path) -> None:
    default = flat(read_config("configs/vit/digits.yaml"))
    plain = options("")
    assert all(plain[name] == value for name, value in default.items() if name != "preset")
    assert (
        options(f"--config {write(tmp_path / 'c.yaml', data={'source': 'digits'})}")[
            "model.optimizer.lr"
        ]
        == 1e-3
    )


def test_named_configs_come_with_the_package(tmp_path: Path) -> None:
    assert (
        read_config("configs/vit/digits.yaml")["data"]["source"] == "digits"
    )  # from another working directory
    assert names_data(["--config=configs/vit/digits.yaml"])
    assert not names_data(["--config=configs/logger/wandb.yaml", "--trainer.max_epochs=3"])


def test_compile_is_short_for_the_models(options: Any) -> None:
    assert options("--compile")["model.compile"] is True
    assert options("")["model.compile"] is False


def test_configs_are_put_below_what_is_typed() -> None:
    macros = {"--preset": lambda value: {"size": value}}
    line = ["--x", "1", "--preset", "big", "--preset=small", "--fast", "--slow=false"]
    assert expand_macros(join_values(line, ["--fast", "--slow"]), macros) == [
        '--config=# --preset big\n{"size": "big"}', '--config=# --preset small\n{"size": "small"}',
        "--x=1", "--fast=true", "--slow=false"
    ]  # fmt: skip
    for line in (["--preset"], ["--preset", "--x=1"], ["--preset="]):
        with pytest.raises(UsageError, match="--preset needs a value"):
            join_values(line)


def test_the_last_of_several_values_is_taken() -> None:
    assert take_option(["--a=1", "--r=x", "--r=y"], "--r") == ("y", ["--a=1"])
    assert take_option(["--a=1"], "--r") == (None, ["--a=1"])


def test_merged_and_flat() -> None:
    base = {"a": {"b": 1, "c": 2}, "d": [1]}
    assert merged(base, {"a": {"b": 3}, "d": [2]}) == {"a": {"b": 3, "c": 2}, "d": [2]}
    assert base["a"] == {"b": 1, "c": 2}
    assert flat({"a": {"b": {"c": 1}}, "d": {}}) == {"a.b.c": 1, "d": {}}


SENTENCES = {
    "--model.net.stack.detph 3": "unknown option --model.net.stack.detph: did you mean "
    "--model.net.stack.depth?",
    "--trainer.max_epoch 3": "unknown option --trainer.max_epoch: did you mean "
    "--trainer.max_epochs?",
    "--zzzzzzz 3": "unknown option --zzzzzzz: `--help` lists the options",
    "--config a.yaml": "unknown option --trainer.max_epoch: did you mean --trainer.max_epochs?",
    "--config b.yaml": "--trainer.max_epochs many: must be a whole number or null (in --config "
    "b.yaml)\n",
    "--config=c.yaml --config b.yaml": "--trainer.max_epochs many: must be a whole number or null "
    "(in --config b.yaml)",
    "--config b.yaml --config c.yaml --trainer.max_epochs 2": "--trainer.max_epochs many: must be "
    "a whole number or "
    "null (in --config b.yaml)",
    "--config d.yaml": "--data.dataset.mean [0.5, 'half']: must be a number or null (in --config "
    "d.yaml)",
    "--config c.yaml --trainer.max_epochs three": "--trainer.max_epochs three: must be a whole "
    "number or null\n",
    "--model.optimizer.lr fast": "--model.optimizer.lr fast: must be a number",
    "--model.net.stack.order pree": "--model.net.stack.order pree: must be pre, post or parallel: "
    "did you mean pre?",
    "--model.optimizer.optimizer adam": "--model.optimizer.optimizer adam: must be adamw or muon: "
    "did you mean adamw?",
    "--trainer.max_epochs": "--trainer.max_epochs needs a value",
    "--data.image_size 16": "--data.image_size cannot be set: it follows --model.net.image_size",
    "--preset tinny": "unknown preset 'tinny': did you mean 'tiny'?",
    "--model.net.stack.heads 5": "width 64 cannot be split into 5 heads; make width a multiple of "
    "heads.",
    "--model.net.patch_size 3": "image_size 8 is not a multiple of patch_size 3; change one of "
    "them.",
    "stray": "unexpected 'stray': options begin with --",
}


@pytest.mark.parametrize("line", SENTENCES)
def test_refusals(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "a.yaml", trainer={"max_epoch": 1})
    write(tmp_path / "b.yaml", trainer={"max_epochs": "many"})
    write(tmp_path / "c.yaml", trainer={"max_epochs": 1})
    write(tmp_path / "d.yaml", data={"dataset": {"mean": [0.5, "half"]}})
    assert run(f"fit {line}") == 2
    assert capsys.readouterr().err.startswith("error: " + SENTENCES[line])


def test_functions_refuse_alike(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("export --format timm") == 2
    assert capsys.readouterr().err == "error: --ckpt_path is missing\n"
    assert run("export --ckpt_path a --format tim") == 2
    assert "must be timm, onnx or safetensors: did you mean timm?" in capsys.readouterr().err
    assert run("export --ckpt_path a --formt timm") == 2
    assert "did you mean --format?" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ['a "quoted" \\ one\n\t\r', "zwölf \u2028 \x85 \x7f \ufffe", "hi 🙂🙃", "\udcff"]
)
def test_any_text_is_an_option(text: str) -> None:
    value = {"stop": [text, ""], text: 1}
    assert yaml.safe_load(in_yaml(value)) == value


def laughs(item: str, levels: int = 9) -> str:
    """YAML of a few hundred characters that stands for 10^levels values, each level being ten times
    the one below.
    """
    lines = [
        "a0: &a0 {x: 1}",
        *(f"a{n}: &a{n} {item.format(', '.join([f'*a{n - 1}'] * 10))}" for n in range(1, levels)),
    ]
    return "\n".join(lines) + "\n"


BOMBS = {
    "lists": laughs("[{}]"),
    "mappings": laughs("{{x: [{}]}}"),
    "merged": laughs("{{<<: [{}]}}"),
    "in itself": "model: &a {net: [*a]}\n",
    "long text": f"a: &a {'x' * 10**6}\nb: [{', '.join(['*a'] * 11)}]\n",
}


@pytest.mark.parametrize("bomb", BOMBS)
@pytest.mark.parametrize("option", ["--config", "--model.net"])
def test_aliases_that_make_a_config_immense_are_refused(
    bomb: str, option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bomb.yaml").write_text(BOMBS[bomb])
    assert run(f"fit {option} {tmp_path}/bomb.yaml") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "bomb.yaml" in error and len(error) < 500


def test_too_deep_a_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "deep.yaml").write_text("a: " + "[" * 5000 + "]" * 5000)
    with pytest.raises(UsageError, match="not valid YAML"):
        read_config(str(tmp_path / "deep.yaml"))


def test_aliases_of_a_sane_size_are_fine(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("base: &base {x: 1}\none: *base\ntwo: {<<: *base, y: 2}\n")
    assert read_config(str(tmp_path / "a.yaml")) == {
        "base": {"x": 1},
        "one": {"x": 1},
        "two": {"x": 1, "y": 2},
    }
