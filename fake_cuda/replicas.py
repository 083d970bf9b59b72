"""What replicas do for all weights at once: passages of a log that do not repeat with the layers.

`DistributedDataParallel` sends all weights in groups as it wraps a model, and after the first
backward pass that it reduces it puts gradients into new buckets; `ZeroRedundancyOptimizer` shares
weights out. All of it follows from the weights' sizes and from the order in which gradients are
ready, by the rules of torch 2.13: `broadcast_coalesced` in
torch/csrc/distributed/c10d/comm.cpp, `compute_bucket_assignment_by_size` and `rebuild_buckets` in
reducer.cpp there, and `_partition_parameters` in torch/distributed/optim.
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

from .passages import Irregular, Passage, Token

MIB = 2**20
TOGETHER = 250 * MIB  # bytes of weights that are sent at once, of which two may be on their way
FIRST, BUCKET = 1 * MIB, 25 * MIB  # bytes from which on a bucket is full
FLOAT = 4  # bytes: trained weights are in float32, and so are gradients and states
DIVIDED = "backward", "stream", (), False, "mul"
VIEW, VIEW_BACK = (
    (Token((by, "view", (), False, ""), (0, 0, 0.0)), None) for by in ("forward", "backward")
)


class Weights(NamedTuple):
    """Those of a model that is wrapped.

    Args:
        sent: bytes and type of each parameter, and then of each buffer.
        trained: how many values each weight has that is trained, all in float32.
        views: whether gradients lie in their buckets; else they are copied there and back.
        share: the rank and over how many the states of whole weights are shared, or None.
        buckets: bytes from which on the first bucket of gradients is full, and the others.
    """

    sent: Sequence[tuple[int, Hashable]]
    trained: Sequence[int]
    views: bool = False
    share: tuple[int, int] | None = None
    buckets: tuple[int, int] = (FIRST, BUCKET)

    def passages(self, tokens: Sequence[Token]) -> list[Passage]:
        """A `passages.Rule`: what follows from the weights, and from the order in which their
        gradients were ready."""
        phases = list(_phases(tokens))
        ready = next((found for name, found in phases if name == "backward" and found), [])
        if sorted(ready) != sorted(self.trained):
            raise Irregular("gradients that are not those of the weights")
        groups = in_groups([(FLOAT * n, "float") for n in ready], self.buckets)
        buckets = [[ready[i] for i in group] for group in groups]
        own = shares(self.trained, self.share[1])[self.share[0]] if self.share else []
        found, reduced, steps, bucketed = [_sent(self.sent)], 0, 0, False
        for name, gradients in phases:
            if name == "forward" and reduced and not bucketed:
                found.append(_bucketed(buckets))
                bucketed = True
            elif name == "backward" and gradients:
                reduced += 1
                found += [_taken(buckets)] if reduced > 1 and not self.views else []
            elif name == "optimizer step" and own:
                found.append([*([] if steps else _states(own)), *_update(own)])
                steps += 1
        return found


def in_groups(tensors: Sequence[tuple[int, Hashable]], limits: Sequence[int]) -> list[list[int]]:
    """Indices of tensors of one type that reach together so many bytes: the first group of each
    type the first limit, those after the last one the last. What is left makes groups, too.

    >>> in_groups([(3, "a"), (3, "b"), (3, "a"), (9, "a")], [4, 20])
    [[0, 2], [1], [3]]
    """
    found: list[list[int]] = []
    begun: dict[Hashable, list[int]] = {}
    full: Counter[Hashable] = Counter()
    for i, (_, kind) in enumerate(tensors):
        group = begun.setdefault(kind, [])
        group.append(i)
        if sum(tensors[k][0] for k in group) >= limits[min(full[kind], len(limits) - 1)]:
            found.append(begun.pop(kind))
            full[kind] += 1
    return found + list(begun.values())


def shares(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """The weights of each rank: the largest first, each to who has least.

    >>> shares([2, 5, 3, 2], 2)
    [[5, 2], [3, 2]]
    """
    found: list[list[int]] = [[] for _ in range(ranks)]
    for size in sorted(sizes, reverse=True):
        min(found, key=sum).append(size)
    return found


def _phases(tokens: Sequence[Token]) -> Iterator[tuple[str, list[int]]]:
    """The phases, with the values of each gradient that is reduced in the order in which they are
    ready: each is divided into its bucket, for which no memory is asked."""
    name, found, before = "", [], Token((False,))
    for token in tokens:
        if len(token.what) == 1:
            yield name, found
            name, found = token.what[0], []
        elif token.what == DIVIDED and not _is_birth(before):
            found.append(token.sizes[0] // (2 * FLOAT))  # bytes that it read and wrote
        before = token
    yield name, found


def _is_birth(token: Token) -> bool:
    return len(token.what) == 2 and token.what[0] is True


def _sent(tensors: Sequence[tuple[int, Hashable]]) -> Passage:
    """Several tensors are sent as one, and copied back."""
    flying: list[list[int]] = []
    found = [VIEW] * len(tensors)
    groups = ([tensors[i][0] for i in group] for group in sorted(in_groups(tensors, [TOGETHER])))
    for group in groups:
        if len(flying) == 2:
            found += _arrived(flying)
        found += [VIEW] * len(group)
        if len(group) > 1:
            found += [_born("temporaries", sum(group)), _did("scatter", "cat", 2 * sum(group))]
        flying.append(group)
    while flying:
        found += _arrived(flying)
    return found


def _arrived(flying: list[list[int]]) -> Passage:
    """The first of those that are on their way."""
    group = flying.pop(0)
    found = [VIEW] * (2 * len(group)) + [_did("stream", "copy_", 2 * size) for size in group]
    if len(group) == 1:
        return found
    younger = sum(len(other) > 1 and sum(other) == sum(group) for other in flying)
    return [*found, _died("temporaries", sum(group), younger)]


def _bucketed(buckets: list[list[int]]) -> Passage:
    """The bucket of all gradients is given up for others."""
    found = [_died("gradients", FLOAT * sum(map(sum, buckets)))]
    for bucket in buckets:
        found += [_born("gradients", FLOAT * sum(bucket)), *[VIEW] * (1 + len(bucket))]
    return found


def _taken(buckets: list[list[int]]) -> Passage:
    """Gradients are copied back from their buckets."""
    found = []
    for bucket in buckets:
        copies = [_did("stream", "copy_", 2 * FLOAT * n, by="backward") for n in bucket]
        found += [VIEW_BACK] * len(bucket) + copies
    return found


def _states(own: list[int]) -> Passage:
    """Those of AdamW: a count, and two averages of each weight's gradient."""
    found = []
    for n in own:
        average = FLOAT * n, "zeros_like", 2 * FLOAT * n
        for size, name, moved in ((4, "zeros", 4), average, average):
            found += [_born("optimizer states", size), _did("stream", name, moved, by="update")]
    return found


def _update(own: list[int]) -> Passage:
    """By the fused AdamW: of each value four numbers are read, and three written."""
    counts = _did("stream", "_foreach_add_", 8 * len(own), len(own), by="update")
    moved = 7 * FLOAT * sum(own) + 4 * len(own)
    return [counts, _did("stream", "_fused_adamw_", moved, 5 * len(own), by="update")]


def _born(kind: str, size: int) -> tuple[Token, None]:
    return Token((True, (kind, 0)), (size,)), None


def _died(kind: str, size: int, younger: int = 0) -> tuple[Token, int]:
    return Token((False, (kind, 0)), (size,)), younger


def _did(
    kind: str, name: str, moved: int, listed: int = 0, by: str = "forward"
) -> tuple[Token, None]:
    return Token((by, kind, (), False, name), (moved, listed, 0.0)), None
