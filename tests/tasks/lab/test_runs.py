"""Budgets, several jobs, a run before the grid, and evaluations, with real processes."""

import json
from pathlib import Path
from typing import Any

import pytest

from datamodules.reviews import ReviewData
from datamodules.tokenizers import TokenizerConfig
from tasks.lab.cost import step_cost
from tasks.lab.plan import make_plan
from tasks.lab.spec import read_lab
from tests.helpers.labs import rows, start, write_lab
from tests.helpers.results import summary
from tests.helpers.tiny import NET, write_reviews


def write_texts(path: str = "texts.csv", count: int = 256) -> None:
    """Reviews of 1 to 64 words."""
    texts = [f"{'very ' * (i * 37 % 64)}good,{i % 2}" for i in range(count)]
    Path(path).write_text("\n".join(["text,label", *texts]))


def finish(line: str, code: int = 0) -> str:
    """What a laboratory prints that ends with an exit code."""
    process = start(line)
    out, err = process.communicate(timeout=500)
    assert process.returncode == code, err
    return out


def test_a_step_costs_six_flops_per_weight_and_token() -> None:
    """Kaplan 2020, section 2.1. An image has 16 patches, and a class token that is no patch."""
    options = "--config configs/vit/digits.yaml --model.net.stack.width 96"
    cost = step_cost("vit", [*options.split(), "--trainer.accumulate_grad_batches", "2"])
    assert cost.tokens == 2 * 64 * 16
    assert 0.95 < cost.flops / (6 * cost.parameters * cost.tokens) < 1.25
    two = step_cost("vit", [*options.split(), "--trainer.devices", "2"])
    assert two.tokens == 2 * 64 * 16 and two.flops == pytest.approx(cost.flops)


def test_tokens_of_a_step_are_a_mean_over_texts_of_all_lengths() -> None:
    write_texts()
    options = "--data.path texts.csv --data.tokenizer.vocabulary 300 --data.batch_size 8"
    cost = step_cost("bert", f"{options} {NET}".split())
    data = ReviewData(path="texts.csv", batch_size=8, tokenizer=TokenizerConfig(vocabulary=300))
    data.prepare_data()
    data.setup("fit")
    counts = [batch["tokens"].numel() for batch in data.train_dataloader()]
    assert max(counts) > 4 * min(counts)
    assert cost.tokens == pytest.approx(sum(counts) / len(counts), rel=0.05)


@pytest.mark.slow
def test_equal_budgets_in_all_units_and_two_jobs() -> None:
    budgets: dict[str, dict[str, Any]] = {
        "steps": {"budget.steps": 4},
        "tokens": {"budget.tokens": 4 * 1024},
        "flops": {"budget.flops": 0.0},
        "minutes": {
            "budget.minutes": 0.05,
            "model.optimizer.schedule": "constant",
            "model.optimizer.warmup": 1,
        },
    }
    write_lab()
    plan = make_plan(read_lab("lab.yaml"), Path("out"), [])
    budgets["flops"]["budget.flops"] = 4 * plan.runs[0].step_flops
    write_lab(axes={"budget": budgets}, compare={})
    finish("run lab.yaml --output out --jobs 2")
    found = {row["budget"]: row for row in rows()}
    for unit in ("steps", "tokens", "flops"):
        assert summary(f"out/runs/budget={unit},seed=0")["steps"] == 4
    for unit, row in found.items():
        steps = summary(f"out/runs/budget={unit},seed=0")["steps"]
        assert int(row["steps"]) == steps > 0
        assert int(row["tokens"]) == steps * 1024
        assert float(row["flops"]) == pytest.approx(steps * plan.runs[0].step_flops, rel=1e-6)
    assert int(found["minutes"]["steps"]) != 4
    first, second = (Path(f"out/runs/budget={unit},seed=0") for unit in ("steps", "tokens"))
    started = (second / "config.yaml").stat().st_mtime
    assert started < (first / "summary.json").stat().st_mtime  # at the same time


@pytest.mark.slow
def test_a_run_before_the_grid_and_evaluations_that_are_tried_again() -> None:
    write_reviews(Path("hub"))
    write_texts()
    common = {
        "data.tokenizer.vocabulary": 70,
        "data.batch_size": 8,
        "model.net.stack.width": 32,
        "model.net.stack.depth": 1,
        "model.net.stack.heads": 2,
    }
    before = {"data.source": "hub", "data.path": "hub", "preset": "tiny", "data.max_length": 48}
    lab: dict[str, Any] = {
        "task": "bert",
        "options": {"data.path": "texts.csv", "data.max_length": 48, "data.batch_size": 8},
        "before": {"task": "mlm", "options": {**common, **before}, "budget": {"steps": 3}},
        "axes": {"start": {"pretrained": {"model.pretrained": "{before}/checkpoints/last.ckpt"}}},
        "evaluations": {"same": {}, "other": {"data.path": "other.csv"}},
        "compare": {},
    }
    write_lab(**lab)
    finish("run lab.yaml --output out", code=1)  # its only run has failed
    assert summary("out/runs/before")["steps"] == 3
    config = Path("out/runs/start=pretrained,seed=0/config.yaml").read_text()
    assert str(Path("out/runs/before/checkpoints/last.ckpt").resolve()) in config
    (row,) = rows()
    assert row["state"] == "failed" and "other.csv" in row["error"]
    assert float(row["test/loss same"]) > 0
    trained = Path("out/runs/start=pretrained,seed=0/summary.json").stat().st_mtime_ns
    write_texts("other.csv", 64)
    finish("run lab.yaml --output out")
    assert Path("out/runs/start=pretrained,seed=0/summary.json").stat().st_mtime_ns == trained
    (row,) = rows()
    assert row["state"] == "finished" and row["error"] == ""
    for name in ("same", "other"):
        path = Path(f"out/runs/start=pretrained,seed=0/test_{name}/test.json")
        assert float(row[f"test/loss {name}"]) == json.loads(path.read_text())["test/loss"]
    assert row["test/loss same"] != row["test/loss other"]


@pytest.mark.slow
def test_a_test_that_the_network_refuses_is_no_failure_and_not_tried_again() -> None:
    options = {
        "config": ["configs/lm/reference.yaml", "configs/lab/base/reference.yaml"],
        "data.tokenizer.vocabulary": 300,
        "data.max_length": 16,
        "trainer.limit_val_batches": 1,
        "trainer.limit_test_batches": 1,
    }
    write_lab(
        task="lm",
        options=options,
        axes={"model.net.position": ["none", "learned"]},
        evaluations={"short": {}, "long": {"data.max_length": 32}},
        compare={"model.net.position": "none"},
    )
    out = finish("run lab.yaml --output out")
    assert "2 of 2 runs are finished" in out and "failed" not in out
    none, learned = rows()
    assert none["state"] == learned["state"] == "finished"
    assert float(none["test/loss long"]) > 0 and none["refused"] == ""
    assert float(learned["test/loss short"]) > 0 and learned["test/loss long"] == "nan"
    assert "--data.max_length 32 exceeds the 16 learned positions" in learned["refused"]
    report = Path("out/report.md").read_text()
    assert "| learned | short | none | 1 |" in report and "| learned | long | none | 0 |" in report
    assert f"| position=learned,seed=0 | long | {learned['refused']} |" in report
    logs = {path: path.read_bytes() for path in Path("out/logs").iterdir()}
    assert finish("run lab.yaml --output out").count("2 of 2 runs are finished already") == 1
    assert {path: path.read_bytes() for path in Path("out/logs").iterdir()} == logs
