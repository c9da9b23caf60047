"""What tasks on texts share: the tokenizer beside the checkpoints, and how much of an epoch is padding."""

from pathlib import Path

from tasks.base import Task
from tasks.run_folder import write_text


class TextTask(Task):
    """A task whose data are a `TextData`; arguments as `Task`."""

    def keep_files(self, folder: Path) -> None:
        """Write `tokenizer.json`."""
        write_text(folder / "tokenizer.json", self.facts["tokenizer"])

    def on_train_epoch_end(self) -> None:
        """Log the share of the epoch's cells that are padding; over ranks, the mean of theirs."""
        self.log("train/padding", self.datamodule.padding_share(), sync_dist=True)
