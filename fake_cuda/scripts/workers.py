"""Workers of data loaders: the script's own process stands in for all of them."""

from collections.abc import Iterator

from torch.utils.data import DataLoader, dataloader
from torch.utils.data._utils import worker

# Arguments of DataLoader that may be given by their place.
PLACES = ("batch_size", "shuffle", "sampler", "batch_sampler", "num_workers", "collate_fn")
PLACES += ("pin_memory", "drop_last", "timeout", "worker_init_fn")


def workers() -> Iterator[tuple]:
    """(owner, name, value): datasets that ask who they are hear that they are a worker."""
    begin = DataLoader.__init__

    def init(self, dataset, *given, **options):
        options |= dict(zip(PLACES, given, strict=False))
        asked = options.pop("num_workers", 0)
        begin(self, dataset, **options | dict(timeout=0))  # which one without workers cannot have
        object.__setattr__(self, "asked_workers", asked)

    yield DataLoader, "__init__", init
    yield dataloader, "_SingleProcessDataLoaderIter", Worker


class Worker(dataloader._SingleProcessDataLoaderIter):
    """It is each worker in turn: one that shards its data goes on with the next shard."""

    def __init__(self, loader):
        super().__init__(loader)
        self.workers, self.me = getattr(loader, "asked_workers", 0), -1
        self.init = loader.worker_init_fn

    def _next_data(self):
        if not self.workers:
            return super()._next_data()
        try:
            return self.work()
        except StopIteration:
            whole = self._dataset_kind != dataloader._DatasetKind.Iterable
            if whole or self.me + 1 >= self.workers:
                raise
            self.me += 1
            return self.work(anew=True)

    def work(self, anew: bool = False):
        """The next batch, fetched as the worker `me`."""
        started = self.me < 0
        self.me = max(self.me, 0)
        seed = self._base_seed + self.me
        worker._worker_info = worker.WorkerInfo(
            id=self.me, num_workers=self.workers, seed=seed, dataset=self._dataset
        )
        try:
            if started or anew:
                if self.init is not None:
                    self.init(self.me)
                self._dataset_fetcher = dataloader._DatasetKind.create_fetcher(
                    self._dataset_kind, self._dataset, self._auto_collation,
                    self._collate_fn, self._drop_last,
                )  # fmt: skip
            return super()._next_data()
        finally:
            worker._worker_info = None
