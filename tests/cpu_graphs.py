"""CUDA graphs on a CPU: a replacement of torch.cuda.make_graphed_callables() that records operations and repeats them.

As in a CUDA graph, Python's values are frozen, all tensors are read and written where they were, a number cannot be
read from a tensor, and graphs of one pool overwrite each other's memory. So an input that is not copied, a tensor that
moves, or a pool that is shared by mistake shows up as a wrong number.
"""

from collections import defaultdict
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import arg_tree_leaves, tree_flatten, tree_leaves, tree_map_only, tree_unflatten


class Recording(TorchDispatchMode):
    """Operations of a call, to repeat on the tensors that they read and wrote."""

    def __init__(self):
        super().__init__()
        self.calls, self.made = [], {}  # made: new tensors by address

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("a graph cannot read a number from the device")
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
            new = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
            self.made |= {x.data_ptr(): x for x in new if x.untyped_storage().data_ptr() not in given}
            writes = any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)
            args, kwargs = tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs or {}))  # fixed addresses
            self.calls.append((func, args, kwargs, [] if writes else new))
        return out

    def replay(self):
        for func, args, kwargs, new in self.calls:
            for old, value in zip(new, (x for x in tree_leaves(func(*args, **kwargs)) if isinstance(x, torch.Tensor))):
                if old.data_ptr() != value.data_ptr():
                    old.copy_(value)


class Graph:
    """Forward and backward of a function of tensors."""

    def __init__(self, func, args, allow_unused: bool, pool: list):
        self.args, self.pool = args, pool
        for _ in range(2):  # the first call is not recorded, and changes what the function changes
            self.forward, self.backward = Recording(), Recording()
            with self.forward:
                result = func(*args)
            self.outs, self.spec = tree_flatten(result)
            outs = [x for x in self.outs if x.requires_grad]
            self.out_grads = [torch.zeros_like(x) if x.requires_grad else None for x in self.outs]
            grads = iter(())
            if outs:
                with self.backward:
                    grads = iter(torch.autograd.grad(
                        outs, [x for x in args if x.requires_grad], [x for x in self.out_grads if x is not None],
                        allow_unused=allow_unused))  # fmt: skip
        self.arg_grads = [next(grads) if x.requires_grad and outs else None for x in args]
        kept = {x.data_ptr() for x in (*self.outs, *self.arg_grads) if x is not None}
        self.scratch = [x for recording in (self.forward, self.backward) for address, x in recording.made.items()
                        if address not in kept and x.is_floating_point()]  # fmt: skip
        pool.append(self)

    def run(self, *inputs):
        graph = self

        class Replay(torch.autograd.Function):
            @staticmethod
            def forward(ctx, *inputs):
                for other in graph.pool:
                    for x in other.scratch if other is not graph else ():
                        x.fill_(float("nan"))
                for static, given in zip(graph.args, inputs):
                    if static.data_ptr() != given.data_ptr():
                        static.data.copy_(given)
                graph.forward.replay()
                return tuple(x.detach() for x in graph.outs)

            @staticmethod
            def backward(ctx, *grads):
                for static, given in zip(graph.out_grads, grads):
                    if static is not None:
                        static.copy_(given)
                graph.backward.replay()
                return tuple(None if x is None else x.detach() for x in graph.arg_grads)

        return tree_unflatten(Replay.apply(*arg_tree_leaves(*inputs)), self.spec)


@contextmanager
def graphs_on_cpu():
    """Replace CUDA graphs. Yields the graphs by pool."""
    pools = defaultdict(list)

    def make(func, args, allow_unused_input=False, pool=None):
        return Graph(func, args, allow_unused_input, pools[pool]).run

    with patch("torch.cuda.make_graphed_callables", make), patch("torch.cuda.graph_pool_handle", object):
        yield pools
