"""What replicas do for all weights at once, by our rules and by torch's own functions."""

import inspect
import random

import pytest
import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import distributed

from fake_cuda.depth import deeper
from fake_cuda.passages import Irregular, Log, Seen, Token, cut, put_back
from fake_cuda.replay import Events
from fake_cuda.replicas import BUCKET, FIRST, TOGETHER, Weights, in_groups, shares

A, B, C = (Token((name, "view"), (0,)) for name in "abc")


@pytest.mark.parametrize("limits", ([40], [10, 40], [8, 24, 60]))
@pytest.mark.parametrize("ready", (False, True))
def test_groups_are_those_of_torch(limits, ready):
    draw = random.Random(len(limits))
    kinds = [torch.float32] if ready else [torch.float32, torch.bfloat16]
    for _ in range(20):
        tensors = [
            torch.zeros(draw.randint(1, 12), dtype=draw.choice(kinds))
            for _ in range(draw.randint(1, 20))
        ]
        given = [(t.nbytes, t.dtype) for t in tensors]
        # With indices of readiness torch keeps that order; else groups are sorted.
        order = [*range(len(tensors))] if ready else []
        theirs, _ = dist._compute_bucket_assignment_by_size(
            tensors, limits, [False] * len(tensors), order
        )
        ours = in_groups(given, limits)
        assert (ours if ready else sorted(ours)) == theirs


@pytest.mark.parametrize("ranks", (2, 3, 8))
def test_weights_are_shared_out_as_by_torch(ranks):
    draw = random.Random(ranks)
    for _ in range(20):
        sizes = [draw.randint(1, 9) for _ in range(draw.randint(ranks, 20))]
        zero = object.__new__(ZeroRedundancyOptimizer)
        vars(zero).update(world_size=ranks, _partition_parameters_cache=[])
        zero.param_groups = [{"params": [torch.zeros(n) for n in sizes]}]
        theirs = [
            [p.numel() for group in groups for p in group["params"]]
            for groups in zero._partition_parameters()
        ]
        assert shares(sizes, ranks) == theirs


def test_gradients_have_to_be_those_of_the_weights():
    divided = Token(("backward", "stream", (), False, "mul"), (2 * 4 * 7, 0, 0.0))
    tokens = [Token(("backward",)), divided]
    assert len(Weights([(28, "float")], [7]).passages(tokens)) == 1
    with pytest.raises(Irregular, match="gradients"):
        Weights([(28, "float")], [8]).passages(tokens)
    # What a product's result is multiplied by is no gradient: memory is asked for it.
    born = Token((True, ("temporaries", 0)), (28,))
    assert Weights([(28, "float")], []).passages([tokens[0], born, divided])


def test_a_passage_is_cut_where_it_stands_and_put_back():
    log = Log([A, B, C, B, C, A], {4: 1})
    rule = lambda tokens: [[(B, None), (C, 1)]]  # noqa: E731
    short = cut(log, rule)
    assert [t for t in short.tokens if t in (A, B, C)] == [A, B, C, A] and short.younger == {}
    whole = put_back([(t, short.younger.get(k)) for k, t in enumerate(short.tokens)], rule)
    assert whole == [(A, None), (B, None), (C, None), (B, None), (C, 1), (A, None)]
    with pytest.raises(Irregular):
        cut(log, lambda tokens: [[(B, None), (C, 2)]])


def test_each_log_has_a_rule_of_its_own():
    """Of three layers one tensor follows, of four two, and of eight what its own rule says."""

    def seen(*sizes):
        events = [*range(len(sizes)), "forward"]
        events = Events(events, ["parameters"] * len(sizes), [*sizes], 0, [0] * len(sizes))
        return Seen(events, ["building the model", "forward"], [], {})

    def rule(*sizes):
        born = [(Token((True, ("parameters", 0)), (n,)), None) for n in sizes]
        return lambda tokens: [born]

    logs = seen(7, 2, 2, 2, 9), seen(7, 2, 2, 2, 2, 9, 5)
    deep = deeper(logs, 8, [rule(9), rule(9, 5), rule(9, 6, 4)])
    assert deep.events.sizes == [7, *[2] * 8, 9, 6, 4]
    with pytest.raises(Irregular, match="told by a rule"):
        deeper(logs, 8, [rule(9), rule(9, 6), rule(9, 6, 4)])
    with pytest.raises(Irregular, match="other passages"):
        deeper(logs, 8, [rule(9), rule(9, 5), lambda tokens: []])


def test_sizes_of_groups_are_those_of_torch():
    assert inspect.getsource(distributed).count("broadcast_bucket_size = 250 * 1024 * 1024") == 1
    usual = distributed._BucketCapacityConfig.create(None, None, False)
    assert (usual.first_bucket_bytes_cap, usual.bucket_bytes_cap) == (FIRST, BUCKET)
    own = distributed._BucketCapacityConfig.create(7, None, False)
    assert {own.first_bucket_bytes_cap, own.bucket_bytes_cap} == {7 * 2**20}
    assert TOGETHER == 250 * 2**20
