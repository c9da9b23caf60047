"""Language modelling: loss, metrics, rates and samples."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor
from torchmetrics import Metric

from datamodules.tokenizers import Tokenizer
from modules.config import require
from modules.generation.sampling import GenerationConfig
from modules.kernels.cross_entropy import IGNORE_INDEX
from modules.models.gpt import Decoder, DecoderConfig
from tasks.base import Batch, StepOutput
from tasks.errors import UsageError
from tasks.lm.architectures import NOT_CAUSAL, LanguageModel, fit_to_data, load_pretrained
from tasks.lm.streaming import prompt_tokens, stream_texts
from tasks.text import MeanOf, TextTask
from tasks.tracking.samples import Sample, Samples, write_samples
from tasks.training.throughput import TokenCount, flops_per_token, matmul_peak


@dataclass(frozen=True)
class SampleConfig:
    """Texts that the model generates during training, and after the test.

    Args:
        every: Optimizer steps between samples; null: only after the test.
        prompts: Prompts to continue; "" begins a document, or a
            line if no token begins documents.
        generation: How tokens are sampled, and how many.
    """

    every: int | None = 500
    prompts: tuple[str, ...] = ("",)
    generation: GenerationConfig = GenerationConfig(max_new_tokens=200, temperature=0.8, top_p=0.95)

    def __post_init__(self) -> None:
        every = self.every
        require(every is None or every >= 1, f"every is {every}; it must be at least 1.")
        require(bool(self.prompts), "prompts is empty; leave it out, or give one.")
        require(self.generation.beams == 1, "samples have no beam search; leave beams out.")


class LMTask(TextTask):
    """Language modelling with a decoder (Radford 2019): each token from those before it.

    Args:
        net: The network. Null `vocabulary` and `max_length` come from the data.
        z_loss: Coefficient of the z-loss in training; it is the mean of logsumexp(logits)^2
            (Chowdhery 2022, there 1e-4). `train/loss` includes it, so only evaluation logs
            perplexity then.
        samples: Texts that the model generates during training.
        kwargs: See `TextTask`.
    """

    name = "lm"
    needed_metadata = ("vocabulary", "max_length", "tokenizer_options")
    peak = 0.0  # FLOP/s of one device

    def __init__(
        self,
        net: DecoderConfig = DecoderConfig(),
        z_loss: float = 0.0,
        samples: SampleConfig = SampleConfig(),
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if z_loss < 0:
            raise ValueError(f"z_loss {z_loss} must not be negative")
        self.net_config = net
        self.z_loss = z_loss
        self.sample_config = samples
        self.token_count = TokenCount()

    def setup(self, stage: str) -> None:
        """As in the base class; refuses rows longer than the learned positions.

        Warns if there is no causal mask.
        """
        super().setup(stage)
        data = self.datamodule
        if data is not None and stage in ("validate", "test"):
            fit_to_data(self.net_config, {**data.metadata(), "max_length": data.max_length})
        if not self.net_config.stack.causal:
            rank_zero_warn(
                f"{NOT_CAUSAL}: its loss falls to about 0 and means nothing, and what it generates "
                "is garbage."
            )

    def describe_targets(self, room: int) -> str:
        """The length of rows, if it is not that of the training."""
        length = self.datamodule.max_length
        trained = self.metadata["max_length"]
        return "" if length == trained else f", {length:,} tokens each ({trained:,} in training)"

    def build(self, metadata: Mapping[str, Any]) -> Decoder:
        config = fit_to_data(self.net_config, metadata)
        if self.pretrained is None:
            return Decoder(config)
        return load_pretrained(config, self.pretrained, metadata)

    def configure_callbacks(self) -> list[pl.Callback]:
        callbacks = super().configure_callbacks()
        every = self.sample_config.every
        return callbacks if every is None else [*callbacks, Samples(every)]

    def train_metrics(self) -> list[str]:
        names = [*super().train_metrics(), "tokens_per_s", "mfu"]
        return names if self.z_loss else [*names, "perplexity", "bits_per_byte"]

    def make_metrics(self) -> dict[str, Metric]:
        """Accuracy of predicted tokens, and bytes of text per token."""
        return {name: MeanOf(name) for name in ("acc", "bytes_per_token")}

    def derived(self, values: Mapping[str, Tensor], split: str) -> dict[str, Tensor]:
        """Perplexity, and bits per byte of text; only these can be compared between tokenizers."""
        loss = values[f"{split}/loss"]
        bits_per_byte = loss / values[f"{split}/bytes_per_token"] / math.log(2)
        return {f"{split}/perplexity": loss.exp(), f"{split}/bits_per_byte": bits_per_byte}

    def step(self, batch: Batch, training: bool) -> StepOutput:
        """Returns the loss, a scalar, and other means over the targets of tokens (B, T)."""
        targets = batch["targets"]
        hidden = self.net(
            batch["tokens"], positions=batch.get("positions"), documents=batch.get("documents")
        )
        loss, correct = self.net.loss(hidden, targets, z_loss=self.z_loss if training else 0.0)
        count = (targets != IGNORE_INDEX).sum()
        means = {"bytes_per_token": batch["bytes"].sum() / count.clamp(min=1)}
        if training:
            self.token_count.add(count, len(targets))
            return StepOutput(loss, count, outputs=None, targets=None, extra_metrics=means)
        means["acc"] = correct / count.clamp(min=1)
        counts = {name: count for name in means}  # `MeanOf` weights each mean by its targets
        return StepOutput(loss, count, outputs=means, targets=counts)

    def log_step(self, means: Mapping[str, Tensor]) -> None:
        """Logs also perplexity and bits per byte, unless the loss includes a z-loss."""
        super().log_step(means)
        if self.z_loss == 0:
            values = {f"train/{name}": value for name, value in means.items()}
            self.log_dict(self.derived(values, "train"))

    # Rates ----------------------------------------------------------------------------------------

    def on_fit_start(self) -> None:
        self.peak = matmul_peak(self.device, str(self.trainer.precision))
        self.flops = flops_per_token(self.net, self.metadata["max_length"])

    def rates(self, samples_per_s: float) -> dict[str, float]:
        """Tokens/s over all devices, and MFU of one."""
        tokens_per_s = samples_per_s * self.token_count.per_sample()
        return {
            "train/tokens_per_s": tokens_per_s,
            "train/mfu": tokens_per_s * self.flops / self.peak / self.trainer.world_size,
        }

    # Samples --------------------------------------------------------------------------------------

    def sample_texts(self) -> list[Sample]:
        """Returns the prompts with the texts that the network generates now; its mode is kept.

        Leaves out, with a warning, prompts that the tokenizer cannot encode.
        """
        config = self.sample_config
        tokenizer = Tokenizer.from_json(self.metadata["tokenizer"])
        model = LanguageModel(self.net, tokenizer, self.metadata)
        tokens = {}
        for prompt in config.prompts:
            try:
                tokens[prompt] = prompt_tokens(model, prompt)[-self.net.max_length :]
            except UsageError as error:
                rank_zero_warn(
                    f"no text after the prompt {prompt!r} ({error}): set --model.samples.prompts"
                )
        if not tokens:
            return []
        was_training = self.net.training
        self.net.eval()  # no dropout
        with torch.compiler.set_stance("force_eager"):
            texts = stream_texts(model, list(tokens.values()), config.generation).finish()
        self.net.train(was_training)
        return list(zip(tokens, texts, strict=True))

    def closing_texts(self, folder: Path) -> dict[str, str]:
        """Returns a sample of the tested network and writes all; none if the network is sharded."""
        if hasattr(self.net, "unshard"):
            return {}
        self.net.to(self.trainer.strategy.root_device)  # after the test it is on the CPU
        samples = self.sample_texts()
        if not samples:
            return {}
        write_samples(folder, "best", samples)
        prompt, text = samples[0]
        return {"sample": prompt + text}
