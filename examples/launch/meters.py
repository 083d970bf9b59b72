"""What a rank holds, and what it hands to collectives: operations of all ranks together."""

from collections import Counter

from torch import is_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def size(tensors):
    """Bytes of this rank's own pieces."""
    own = (t.to_local() if hasattr(t, "to_local") else t for t in tensors if is_tensor(t))
    return sum(t.nbytes for t in own)


class Collectives(TorchDispatchMode, Counter):
    """Bytes by collective, of what is whole: a tensor, or a list of pieces."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            self[function.name()] += max(size(tree_leaves(handed)) for handed in args)
        return function(*args, **(kwargs or {}))
