"""Shards -> evaluation batches: every sample exactly once on any number of processes."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from ssl_vit.data.images import Pixels
from ssl_vit.data.loader import loaded
from ssl_vit.data.samples import Chunk, Preprocess, Sample, SampleReader, Skip, bookkeeping, join, stacked
from ssl_vit.data.shards import ShardSet
from ssl_vit.interfaces import Batch, RunError, UserError


class EvaluationStream(IterableDataset[Chunk]):
    """Every sample exactly once over all ranks, in index order; all ranks get the same number of equal batches."""

    def __init__(
        self,
        shards: ShardSet,
        preprocess: Preprocess,
        *,
        batch_size: int,
        rank: int,
        ranks: int,
        workers: int,
        indices: np.ndarray | None = None,
        epoch: int = 0,
        worker_timeout: int = 600,
    ) -> None:
        self.shards, self.preprocess, self.batch_size, self.workers, self.epoch = (
            shards,
            preprocess,
            batch_size,
            workers,
            epoch,
        )
        self.worker_timeout = worker_timeout
        every = np.arange(shards.samples) if indices is None else np.unique(np.asarray(indices, dtype=np.int64))
        if len(every) == 0:
            raise UserError(f"{shards.spec}: there is no sample to evaluate on")
        self.own = every[rank * len(every) // ranks : (rank + 1) * len(every) // ranks]
        self.batches = math.ceil(math.ceil(len(every) / ranks) / batch_size)

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[Chunk]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        numbers = range(first, self.batches, step)
        batches = [self.own[n * self.batch_size : (n + 1) * self.batch_size] for n in numbers]
        mine = np.concatenate(batches) if batches else np.empty(0, dtype=np.int64)
        samples = self._samples(SampleReader(self.shards, self.preprocess, 0), mine)
        for batch in batches:
            state = torch.get_rng_state()
            try:
                chunk = self._chunk([next(samples) for _ in batch])
            except (UserError, RunError) as error:  # raised, it would cross the process border as a wall of text
                chunk = Chunk(error=error)
            torch.set_rng_state(state)
            yield chunk
            if chunk.error:
                return

    def _samples(self, reader: SampleReader, indices: np.ndarray) -> Iterator[Sample | Skip]:
        wanted = [(shard, members) for shard, members in enumerate(self.shards.members_of(indices)) if len(members)]
        for number, (shard, members) in enumerate(wanted):
            if number + 1 < len(wanted):
                reader.files.ahead(wanted[number + 1][0])
            for member in members.tolist():
                yield reader.sample(shard, member, self.epoch)

    def _chunk(self, items: list[Sample | Skip]) -> Chunk:
        good = [item for item in items if isinstance(item, Sample)]
        chunk = stacked(good or [self._blank()], self.batch_size)
        if not good:
            chunk.tensors["valid"][:], chunk.keys = False, []
        chunk.skipped = [item for item in items if isinstance(item, Skip)]
        return chunk

    def _blank(self) -> Sample:
        image = self.preprocess.transform(Pixels(torch.zeros(self.preprocess.channels, 8, 8, dtype=torch.uint8)))
        jitter = torch.ones(3) if any(self.preprocess.jitter) else None
        return Sample(image, -1, torch.zeros(self.preprocess.noise), False, jitter, -1, "")


def evaluation_batches(stream: EvaluationStream, device: torch.device) -> Iterator[tuple[Batch, Chunk]]:
    """The stream's batches on the device, `len(stream)` of them on every rank; padding is marked by `valid`."""
    for chunk in loaded(stream, stream.workers, device, prefetch=2, timeout=stream.worker_timeout):
        if chunk.error:
            raise chunk.error
        yield join([chunk], device, 0), bookkeeping([chunk])
