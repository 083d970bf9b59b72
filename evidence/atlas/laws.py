"""How a quantity of a step grows with the length of a sample and with the samples.

Three micro-batches tell: a near one, one of twice its length, one of twice its samples.
"""

import inspect
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from evidence.atlas.pieces import NotAlike
from fake_cuda.replay import Events
from planner.changes import chunked_loss

CHUNK = inspect.signature(chunked_loss).parameters["size"].default  # tokens


class Point(NamedTuple):
    """A micro-batch: tokens of a sample, and samples."""

    length: int
    micro_batch: int

    @property
    def tokens(self) -> int:
        return self.length * self.micro_batch

    @property
    def chunks(self) -> int:
        """Those of a chunked loss; the last token of a sample predicts nothing.

        >>> Point(512, 1).chunks, Point(2048, 4).chunks
        (1, 16)
        """
        return -(-self.micro_batch * (self.length - 1) // CHUNK)

    def one_chunk_more(self) -> "Point":
        """Longer samples, as many.

        >>> Point(512, 4).one_chunk_more()
        Point(length=640, micro_batch=4)
        """
        return self._replace(length=self.length * (self.chunks + 1) // self.chunks)


class Seeds(NamedTuple):
    """The micro-batches that are simulated: a near one, a longer one and a wider one."""

    near: Point
    far: Point  # twice the length
    wide: Point  # twice the samples

    @classmethod
    def of(cls, length: int, samples: int) -> "Seeds":
        return cls(Point(length, samples), Point(2 * length, samples), Point(length, 2 * samples))

    @classmethod
    def of_samples(cls, length: int, samples: int) -> "Seeds":
        """For micro-batches of so many samples alone."""
        near = Point(length, samples)
        return cls(near, Point(2 * length, samples), near)

    @classmethod
    def only(cls, point: Point) -> "Seeds":
        """For a micro-batch that tells of itself alone."""
        return cls(point, point, point)

    @property
    def alone(self) -> bool:
        """Whether they tell of no other micro-batch."""
        return self.near == self.far == self.wide

    def at(self, point: Point, near, far, wide):
        """What stands at a point, from what stands at the three.

        A quantity is affine in the tokens, or a product of one that knows the length alone and one
        that is affine in the samples. With the length it grows as a line or, where it more than
        doubles with it, as a square and a line without a constant: scores that are written out.

        Args:
            point: a micro-batch.
            near, far, wide: numbers, or arrays of the same shape.

        >>> seeds = Seeds.of(512, 2)
        >>> seeds.at(Point(2048, 8), 512 * 2, 1024 * 2, 512 * 4) / 2048
        8.0
        >>> seeds.at(Point(2048, 8), 512**2 * 2, 1024**2 * 2, 512**2 * 4) / 2048**2
        8.0
        """
        near, far, wide = (np.asarray(x, dtype=np.float64) for x in (near, far, wide))
        longer = point.length / self.near.length
        more = point.micro_batch / self.near.micro_batch
        square = np.maximum(far - 2 * near, 0) / 2
        line = far - near - 3 * square
        of_length = near + line * (longer - 1) + square * (longer**2 - 1)
        of_tokens = near + (far - near) * (longer * more - 1)
        of_samples = 1 + np.divide(wide - near, near, out=np.zeros_like(near), where=near > 0) * (
            more - 1
        )
        by_tokens = (wide == far) & (wide != near)
        found = np.where(by_tokens, of_tokens, of_length * of_samples)
        return np.maximum(found, 0) if found.ndim else max(0.0, float(found))


def sizes_at(seeds: Seeds, three: Sequence[Events], point: Point) -> np.ndarray:
    """The sizes of a twin's storages at a point, from its logs at the three seeds.

    Raises:
        NotAlike: the logs differ by more than sizes.
    """
    if any(list(seen.events) != list(three[0].events) for seen in three):
        raise NotAlike("with more tokens more happens")
    return np.rint(seeds.at(point, *(seen.sizes for seen in three))).astype(np.int64)
