"""Text: transformers, padded sequences, buckets, masking collators, truncated backpropagation."""

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from pytorch_lightning import LightningDataModule, LightningModule
from pytorch_lightning.demos import Transformer
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler

VOCABULARY = 20


class Tokens(Dataset):
    """Blocks of a text, as Lightning's WikiText2."""

    def __init__(self, blocks=24, block_size=8):
        self.data = torch.arange(blocks * block_size + 1) * 7 % VOCABULARY
        self.block_size = block_size

    def __len__(self):
        return (len(self.data) - 1) // self.block_size

    def __getitem__(self, index):
        start = index * self.block_size
        return self.data[start : start + self.block_size], self.data[
            start + 1 : start + self.block_size + 1
        ]


class TokensData(LightningDataModule):
    """Shuffled blocks."""

    def train_dataloader(self):
        return DataLoader(Tokens(), batch_size=4, shuffle=True)

    def val_dataloader(self):
        return DataLoader(Tokens(8), batch_size=4)


class LanguageModel(LightningModule):
    """examples/pytorch/basics/transformer.py."""

    def __init__(self):
        super().__init__()
        self.model = Transformer(vocab_size=VOCABULARY, ninp=8, nhid=8, nlayers=1)

    def step(self, batch):
        input, target = batch
        return F.nll_loss(self.model(input, target), target.view(-1))

    def training_step(self, batch, batch_idx):
        loss = self.step(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.step(batch), prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class NanoGPTData(LightningDataModule):
    """Random crops of one array, whatever the index, as nanoGPT's get_batch.

    Its DataLoader has no collation.
    """

    def __init__(self, num_workers: int = 0):
        super().__init__()
        self.num_workers = num_workers

    class Crops(Dataset):
        def __init__(self):
            self.data = (np.arange(500) * 3 % VOCABULARY).astype(np.uint16)

        def __len__(self):
            return 10_000

        def __getitem__(self, index):
            ix = torch.randint(len(self.data) - 8, (4,))
            x = torch.stack([torch.from_numpy((self.data[i : i + 8]).astype(np.int64)) for i in ix])
            y = torch.stack(
                [torch.from_numpy((self.data[i + 1 : i + 9]).astype(np.int64)) for i in ix]
            )
            return x, y

    def train_dataloader(self):
        return DataLoader(self.Crops(), batch_size=None, num_workers=self.num_workers)


class NanoGPT(LightningModule):
    """Tied weights, decay by groups of parameters, warm-up and cosine set by hand in the step."""

    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.lm_head = nn.Linear(16, VOCABULARY, bias=False)
        self.lm_head.weight = self.wte.weight

    def training_step(self, batch, batch_idx):
        for group in self.optimizers().param_groups:
            group["lr"] = 1e-2 * min(1.0, (self.global_step + 1) / 10)
        x, y = batch
        mask = nn.Transformer.generate_square_subsequent_mask(x.size(1))
        logits = self.lm_head(self.block(self.wte(x), src_mask=mask, is_causal=True))
        return F.cross_entropy(logits.flatten(0, 1), y.flatten(), label_smoothing=0.1)

    def configure_optimizers(self):
        decay = [p for p in self.parameters() if p.dim() >= 2]
        no_decay = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), amsgrad=True)


class Sentences(Dataset):
    """Sentences of different lengths."""

    def __init__(self, size=48):
        self.lengths = [3 + (i * 5) % 9 for i in range(size)]

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, i):
        return {
            "input_ids": torch.arange(self.lengths[i]) * (i + 1) % VOCABULARY,
            "label": i % 2,
            "text": f"sentence {i}",
        }


def pad(batch):
    """Pad to the longest sentence."""
    return {
        "input_ids": pad_sequence([b["input_ids"] for b in batch], batch_first=True),
        "lengths": torch.tensor([len(b["input_ids"]) for b in batch]),
        "labels": torch.tensor([b["label"] for b in batch]),
        "text": [b["text"] for b in batch],
    }


class BucketBatchSampler(Sampler):
    """Batches of sentences of like length; shuffled again each epoch if set_epoch is called."""

    def __init__(self, lengths, batch_size):
        self.lengths, self.batch_size, self.epoch = lengths, batch_size, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(self.lengths) // self.batch_size

    def __iter__(self):
        rng = random.Random(self.epoch)
        order = sorted(range(len(self.lengths)), key=lambda i: (self.lengths[i], rng.random()))
        batches = [order[i : i + self.batch_size] for i in range(0, len(order), self.batch_size)]
        rng.shuffle(batches)
        return iter(batches)


@dataclass
class DataCollatorForLanguageModeling:
    """Dynamic masking, in the manner of Hugging Face's.

    It has a numpy generator of its own if `seed` is given.
    """

    seed: int | None = None
    mlm_probability: float = 0.3
    rng: Any = None

    def __call__(self, examples):
        batch = pad(examples)
        inputs = batch["input_ids"].clone()
        if self.seed is None:
            masked = torch.bernoulli(torch.full(inputs.shape, self.mlm_probability)).bool()
        else:
            self.rng = self.rng or np.random.default_rng(self.seed)
            masked = torch.from_numpy(self.rng.random(inputs.shape) < self.mlm_probability)
        batch["mlm_labels"] = torch.where(masked, inputs, -100)
        batch["input_ids"] = torch.where(masked, VOCABULARY - 1, inputs)
        return batch


class SentencesData(LightningDataModule):
    """A loader "pad", "bucket" (a batch sampler), "mask" or "mask-numpy" (a drawing collator)."""

    def __init__(self, kind: str = "pad", num_workers: int = 0):
        super().__init__()
        self.kind, self.num_workers = kind, num_workers

    def setup(self, stage):
        self.dataset = Sentences()

    def train_dataloader(self):
        if self.kind == "bucket":
            sampler = BucketBatchSampler(self.dataset.lengths, 4)
            return DataLoader(
                self.dataset, batch_sampler=sampler, collate_fn=pad, num_workers=self.num_workers
            )
        seed = 1 if self.kind == "mask-numpy" else None
        collate = DataCollatorForLanguageModeling(seed) if self.kind.startswith("mask") else pad
        return DataLoader(
            self.dataset, 4, shuffle=True, collate_fn=collate, num_workers=self.num_workers
        )


class LSTMClassifier(LightningModule):
    """Packed sequences through an LSTM with dropout."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8, padding_idx=0)
        self.lstm = nn.LSTM(8, 8, num_layers=2, dropout=0.2, batch_first=True)
        self.fc = nn.Linear(8, 2)

    def training_step(self, batch, batch_idx):
        packed = pack_padded_sequence(
            self.embedding(batch["input_ids"]),
            batch["lengths"],
            batch_first=True,
            enforce_sorted=False,
        )
        _, (hidden, _) = self.lstm(packed)
        loss = F.cross_entropy(self.fc(hidden[-1]), batch["labels"])
        self.log("train_loss", loss, batch_size=len(batch["text"]))
        return loss

    def on_train_epoch_start(self):
        sampler = self.trainer.train_dataloader.batch_sampler
        if isinstance(sampler, BucketBatchSampler):
            sampler.set_epoch(self.current_epoch)

    def configure_optimizers(self):
        return torch.optim.RMSprop(self.parameters(), lr=1e-3)


class MaskedLM(LightningModule):
    """Predicts masked tokens, with warm-up and a linear schedule, as Hugging Face's."""

    def __init__(self, warmup_steps: int = 4):
        super().__init__()
        self.save_hyperparameters()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 16, batch_first=True)
        self.head = nn.Linear(16, VOCABULARY)

    def training_step(self, batch, batch_idx):
        logits = self.head(self.layer(self.embedding(batch["input_ids"])))
        labels = batch["mlm_labels"]
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return loss / (labels != -100).sum().clamp(min=1)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=5e-3, eps=1e-8)
        total = self.trainer.estimated_stepping_batches
        warm = self.hparams.warmup_steps

        def lr_lambda(step):
            return (
                step / max(1, warm)
                if step < warm
                else max(0.0, (total - step) / max(1, total - warm))
            )

        scheduler = {
            "scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lr_lambda),
            "interval": "step",
        }
        return [optimizer], [scheduler]


class TruncatedBPTT(LightningModule):
    """The hidden state continues from batch to batch.

    Manual optimization, as in Lightning's documentation of 2.x.
    """

    def __init__(self, truncated_bptt_steps: int = 4):
        super().__init__()
        self.automatic_optimization = False
        self.truncated_bptt_steps = truncated_bptt_steps
        self.embedding, self.lstm = nn.Embedding(VOCABULARY, 8), nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, VOCABULARY)
        self.hidden = None

    def training_step(self, batch, batch_idx):
        x, y = batch
        opt = self.optimizers()
        for part, target in zip(
            x.split(self.truncated_bptt_steps, 1),
            y.split(self.truncated_bptt_steps, 1),
            strict=True,
        ):
            out, hidden = self.lstm(self.embedding(part), self.hidden)
            loss = F.cross_entropy(self.head(out).flatten(0, 1), target.flatten())
            opt.zero_grad()
            self.manual_backward(loss)
            opt.step()
            self.hidden = tuple(state.detach() for state in hidden)
        self.log("loss", loss)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Word2Vec(LightningModule):
    """A sparse embedding with SparseAdam.

    Negative samples come from a table by torch.multinomial.
    """

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.inputs = nn.Embedding(VOCABULARY, 8, sparse=True)
        self.outputs = nn.Linear(8, VOCABULARY)
        self.frequencies = torch.ones(VOCABULARY)

    def training_step(self, batch, batch_idx):
        x, y = batch[0].flatten(), batch[1].flatten()
        self.frequencies += torch.bincount(x, minlength=VOCABULARY)
        negative = torch.multinomial(self.frequencies**0.75, len(x), replacement=True)
        scores = self.outputs(self.inputs(x))
        rows = torch.arange(len(x))
        loss = F.softplus(-scores[rows, y]).mean() + F.softplus(scores[rows, negative]).mean()
        for opt in self.optimizers():
            opt.zero_grad()
        self.manual_backward(loss)
        for opt in self.optimizers():
            opt.step()

    def configure_optimizers(self):
        return [
            torch.optim.SparseAdam(self.inputs.parameters(), lr=1e-2),
            torch.optim.Adagrad(self.outputs.parameters(), lr=1e-1),
        ]
