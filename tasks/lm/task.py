"""Language modelling: the network, its recipe and its results."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from torchmetrics import Metric

from datamodules.tokenizers import Tokenizer
from modules.generation.sampling import GenerationConfig
from modules.kernels.cross_entropy import IGNORE_INDEX
from modules.models.gpt import Decoder, DecoderConfig
from tasks.base import Batch
from tasks.lm.architectures import Model, fitted, load_pretrained
from tasks.lm.writing import prompt_tokens, writers
from tasks.text import MeanOf, TextTask
from tasks.tracking.samples import Sample, Samples, write_samples
from tasks.training.optim import OptimConfig
from tasks.training.throughput import TokenCount, flops_per_token, matmul_peak


@dataclass(frozen=True)
class SampleConfig:
    """Texts that the model writes while it is trained, and one at the end.

    Args:
        every: Number of optimizer steps between them; null: none but the last.
        prompts: Their beginnings; empty: the beginning of a document, or of a line.
        generation: How tokens are drawn, and how many.
    """

    every: int | None = 500
    prompts: tuple[str, ...] = ("",)
    generation: GenerationConfig = GenerationConfig(max_new_tokens=200, temperature=0.8, top_p=0.95)

    def __post_init__(self) -> None:
        if self.every is not None and self.every < 1:
            raise ValueError(f"samples.every is {self.every}; it must be at least 1.")
        if not self.prompts:
            raise ValueError("samples.prompts is empty; leave it out, or give one.")
        if self.generation.beams > 1:
            raise ValueError("samples are drawn; leave samples.generation.beams out.")


class LMTask(TextTask):
    """Language modelling with a decoder (Radford 2019): each token from those before it.

    Args:
        net: The network. Number of tokens and context come from the data where they are null.
        optimizer: Optimizer, schedule and clipping.
        z_loss: Weight in training of the mean square of the logarithm of the softmax's denominator, which keeps it near
            1 (Chowdhery 2022, there 1e-4).
        samples: Texts that the model writes now and then.
        pretrained: Weights to go on from, tokenizer included: a checkpoint of `python -m tasks.lm`, `hf/<model>` of
            the Hugging Face hub, or a local folder of its layout; null starts from random weights.
        ema: Decay of a running average of the weights, per optimizer step, such as 0.999; evaluation and the saved
            weights use the average. Null keeps none.
        compile: Compile the network with torch.compile, in place.
    """

    name = "lm"
    train_names = (*TextTask.train_names, "perplexity", "bits_per_byte", "tokens_per_s", "mfu")
    peak = 0.0  # FLOP/s of one device

    def __init__(
        self,
        net: DecoderConfig = DecoderConfig(),
        optimizer: OptimConfig = OptimConfig(),
        z_loss: float = 0.0,
        samples: SampleConfig = SampleConfig(),
        pretrained: str | None = None,
        ema: float | None = None,
        compile: bool = False,
    ) -> None:
        super().__init__(optimizer, ema, compile)
        if z_loss < 0:
            raise ValueError(f"z_loss {z_loss} must not be negative")
        self.net_config, self.z_loss, self.sample_config, self.pretrained = (
            net,
            z_loss,
            samples,
            pretrained,
        )
        self.trained = TokenCount()

    def build(self, facts: Mapping[str, Any]) -> Decoder:
        """A decoder for the data's tokens and context."""
        net = Decoder(fitted(self.net_config, facts))
        if self.pretrained is not None and self.restored is None:
            load_pretrained(net, self.pretrained, facts)
        return net

    def configure_callbacks(self) -> list[pl.Callback]:
        """The shared ones, and texts every so many steps."""
        every = self.sample_config.every
        return [*super().configure_callbacks(), *([Samples(every)] if every else [])]

    def make_metrics(self) -> dict[str, Metric]:
        """Share of the tokens foreseen rightly, and how many bytes of text a token stands for."""
        return {name: MeanOf(name) for name in ("acc", "bytes_per_token")}

    @staticmethod
    def weight(targets: dict[str, Tensor]) -> Tensor:
        """Tokens of the batch that count, ()."""
        return targets["acc"]

    def derived(self, values: Mapping[str, Tensor], split: str) -> dict[str, Tensor]:
        """Perplexity, e to the mean loss of a token; and bits per byte of text, whatever the tokens are."""
        loss, size = values[f"{split}/loss"], values[f"{split}/bytes_per_token"]
        return {
            f"{split}/perplexity": loss.exp(),
            f"{split}/bits_per_byte": loss / size / torch.log(torch.tensor(2.0)),
        }

    def step(
        self, batch: Batch, training: bool
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """Loss (), figures by name and how many tokens each is the mean of, for a batch of tokens (B, T)."""
        targets = batch["targets"]
        hidden = self.net(
            batch["tokens"], positions=batch.get("positions"), documents=batch.get("documents")
        )
        loss, right = self.net.loss(hidden, targets, z_loss=self.z_loss if training else 0.0)
        count = (targets != IGNORE_INDEX).sum()
        figures = {"bytes_per_token": batch["bytes"].sum()}
        if training:
            self.trained.add(count, len(targets))
        else:
            figures["acc"] = right
        means = {name: value / count.clamp(min=1) for name, value in figures.items()}
        return loss, means, dict.fromkeys(("acc", *figures), count)

    def training_figures(self, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """How many bytes of text a token stands for."""
        return outputs

    def log_step(self, means: Mapping[str, Tensor]) -> None:
        """As in the base class, and what follows from the loss, z-loss included."""
        super().log_step(means)
        self.log_dict(
            self.derived({f"train/{name}": value for name, value in means.items()}, "train")
        )

    # Rates ----------------------------------------------------------------------------------------------------------

    def on_fit_start(self) -> None:
        """Measure what the device can do."""
        self.peak = matmul_peak(self.device, str(self.trainer.precision))
        self.flops = flops_per_token(self.net, self.facts["max_length"])

    def rates(self, samples_per_s: float) -> dict[str, float]:
        """Tokens/s without padding, and the share of the peak that their arithmetic is (model FLOP utilisation)."""
        tokens = samples_per_s * self.trained.per_sample()
        return {
            "train/tokens_per_s": tokens,
            "train/mfu": tokens * self.flops / self.peak / self.trainer.world_size,
        }

    # Samples --------------------------------------------------------------------------------------------------------

    def sample_texts(self) -> list[Sample]:
        """Each prompt, and how the network as it is now goes on; not compiled, whose texts grow."""
        config, training = self.sample_config, self.net.training
        model = Model(self.net.eval(), Tokenizer.from_json(self.facts["tokenizer"]), self.facts)
        tokens = [prompt_tokens(model, prompt)[-self.net.max_length :] for prompt in config.prompts]
        with torch.compiler.set_stance("force_eager"):
            texts = writers(model, tokens, config.generation).finish()
        self.net.train(training)
        return list(zip(config.prompts, texts, strict=True))

    def closing_texts(self, folder: Path) -> dict[str, str]:
        """A text by the tested network, kept as `samples/best.txt`; none where this process has a part of it only."""
        if hasattr(self.net, "unshard"):
            return {}
        self.net.to(self.trainer.strategy.root_device)
        found = self.sample_texts()
        write_samples(folder, "best", found)
        prompt, text = found[0]
        return {"sample": prompt + text}
