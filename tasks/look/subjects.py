"""What `fit --look_every` looks at: one sample, and how the network of each task reads it."""

from typing import Any

from torch import Tensor

from datamodules.tokenizers import Tokenizer
from modules.activations import attention_parts
from modules.kernels.cross_entropy import IGNORE_INDEX
from modules.measures import patch_distance, token_distance
from modules.models.swin import Swin
from tasks.look.inspector import AttentionLayers
from tasks.look.pictures import stages_of, window_layers, with_last_key
from tasks.look.views import Heads
from tasks.seq2seq.attend import token_labels
from tasks.vit.attend import grid_labels, patch_labels

LONGEST = 512  # tokens that are read: the weights of all layers are in memory together


class Subject:
    """The sample of a task.

    Args:
        task: The LightningModule.
        batch: One sample, as a batch of the datamodule, on the device of the network.
    """

    unit = "tokens"  # of distances

    def __init__(self, task: Any, batch: dict[str, Any]) -> None:
        self.task = task
        self.net = task.net
        self.batch = {name: x for name, x in batch.items() if isinstance(x, Tensor)}

    def run(self) -> None:
        """Calls the network with the sample."""
        raise NotImplementedError

    def attention_layers(self) -> list[AttentionLayers]:
        """The kinds of attention, with labels of the tokens."""
        tokenizer = Tokenizer.from_json(self.task.metadata["tokenizer"])
        names = token_labels(tokenizer, self.batch["tokens"][0].tolist())
        return [AttentionLayers("", names, names)]

    def distance(self, weights: Tensor, layers: AttentionLayers) -> Tensor:
        """Mean distance of self-attention: (L, H, N, N) -> (L, H)."""
        return token_distance(weights)

    def heads(
        self, title: str, weights: Tensor, layers: AttentionLayers, steps: list[str]
    ) -> Heads:
        """A view of weights (S, L, H, N, M) of S steps, which may lack the last tokens."""
        queries, keys = weights.shape[-2:]
        return Heads(title, weights, layers.queries[:queries], layers.keys[:keys], steps)

    def cut(self, is_token: Tensor, *names: str) -> None:
        """Leaves out the padding of some entries (1, N), and what is longer than LONGEST."""
        kept = is_token[0].nonzero()[:LONGEST, 0]  # (S,)
        self.batch |= {name: x[:, kept] for name, x in self.batch.items() if name in names}


class ImageSubject(Subject):
    """An image, all of whose patches a classifier or the encoder of an autoencoder reads."""

    unit = "pixels"

    def run(self) -> None:
        self.net.tokens(self.task.normalised(self.batch["image"]))

    def attention_layers(self) -> list[AttentionLayers]:
        names = patch_labels(self.net.config)
        return [AttentionLayers("", names, names)]

    def distance(self, weights: Tensor, layers: AttentionLayers) -> Tensor:
        return patch_distance(weights, self.net.config.grid, self.net.config.patch_size)

    def heads(
        self, title: str, weights: Tensor, layers: AttentionLayers, steps: list[str]
    ) -> Heads:
        image = self.batch["image"][0].cpu()
        grid = self.net.config.grid
        return Heads(title, weights, layers.queries, layers.keys, steps, image, grid)


class WindowSubject(ImageSubject):
    """An image for a Swin: attention in windows, of each stage in the grid of its own."""

    def run(self) -> None:
        self.net.features(self.task.normalised(self.batch["image"]))

    def attention_layers(self) -> list[AttentionLayers]:
        return window_layers(self.net)

    def distance(self, weights: Tensor, layers: AttentionLayers) -> Tensor:
        return stages_of(self.net)[layers.part].distance(weights)

    def heads(
        self, title: str, weights: Tensor, layers: AttentionLayers, steps: list[str]
    ) -> Heads:
        stage = stages_of(self.net)[layers.part]
        image = stage.picture(self.batch["image"][0].cpu())
        return Heads(title, weights, layers.queries, layers.keys, steps, image, stage.grid)


class PixelSubject(Subject):
    """An image for a language model of pixels: the queries are the pixels that it predicts."""

    unit = "pixels"

    def __init__(self, task: Any, batch: dict[str, Any]) -> None:
        super().__init__(task, batch)
        self.tokens = task.model.palette.encode(self.batch["image"])  # (1, N)
        self.grid = (task.model.size, task.model.size)

    def run(self) -> None:
        self.net(self.task.model.inputs(self.tokens))

    def attention_layers(self) -> list[AttentionLayers]:
        names = grid_labels(*self.grid)
        return [AttentionLayers("", names, ["start", *names])]

    def distance(self, weights: Tensor, layers: AttentionLayers) -> Tensor:
        return patch_distance(with_last_key(weights), self.grid, 1)

    def heads(
        self, title: str, weights: Tensor, layers: AttentionLayers, steps: list[str]
    ) -> Heads:
        weights = with_last_key(weights)
        image = self.task.model.palette.decode(self.tokens.cpu())[0]
        return Heads(title, weights, layers.queries, layers.keys, steps, image, self.grid)


class EncoderSubject(Subject):
    """A text of a text classifier or of a masked language model."""

    def __init__(self, task: Any, batch: dict[str, Any]) -> None:
        super().__init__(task, batch)
        self.cut(self.batch["padding_mask"], "tokens", "padding_mask", "segments")

    def run(self) -> None:
        self.net.encoder(self.batch["tokens"], segments=self.batch.get("segments"))


class LanguageSubject(Subject):
    """The beginning of a text for a language model."""

    def __init__(self, task: Any, batch: dict[str, Any]) -> None:
        super().__init__(task, batch)
        is_token = self.batch["targets"].ne(IGNORE_INDEX)
        self.cut(is_token, "tokens", "targets", "positions", "documents")

    def run(self) -> None:
        more = {name: self.batch.get(name) for name in ("positions", "documents")}
        self.net(self.batch["tokens"], **more)


class PairSubject(Subject):
    """A sentence and its translation, which the decoder reads."""

    def __init__(self, task: Any, batch: dict[str, Any]) -> None:
        super().__init__(task, batch)
        self.cut(self.batch["source_padding_mask"], "source", "source_padding_mask")
        self.cut(self.batch["targets"].ne(IGNORE_INDEX), "tokens", "targets")

    def run(self) -> None:
        self.net(self.batch["source"], self.batch["tokens"])

    def attention_layers(self) -> list[AttentionLayers]:
        pair = self.task.tokenizer
        source = token_labels(pair.source, self.batch["source"][0].tolist())
        read = token_labels(pair.target, self.batch["tokens"][0].tolist())
        predicted = token_labels(pair.target, self.batch["targets"][0].tolist())
        if "" in attention_parts(self.net):  # a prefix language model
            both = source + read
            return [AttentionLayers("", both, both)]
        return [
            AttentionLayers("cross", predicted, source),
            AttentionLayers("encoder", source, source),
            AttentionLayers("decoder", read, read),
        ]


def subject_of(task: Any, batch: dict[str, Any]) -> Subject:
    """The subject of a task; arguments as of `Subject`."""
    if isinstance(task.net, Swin):
        return WindowSubject(task, batch)
    return SUBJECTS[task.name](task, batch)


SUBJECTS: dict[str, type[Subject]] = {
    "vit": ImageSubject,
    "mae": ImageSubject,
    "bert": EncoderSubject,
    "mlm": EncoderSubject,
    "lm": LanguageSubject,
    "igpt": PixelSubject,
    "seq2seq": PairSubject,
}
