"""The simulation by itself: a run without the course, and the rules of CUDA's allocator."""

import copy
import doctest
import gc
import itertools
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Thread

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

import fake_cuda
from fake_cuda import (
    Allocator,
    Card,
    MiB,
    NotSimulated,
    Versions,
    engine,
    loading,
    refusals,
    rules_of,
    scratch,
    simulate,
    simulation,
)
from fake_cuda.values import known
from helpers import predict

PACKAGE = Path(fake_cuda.__file__).parent


def loop():
    model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.ReLU())
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.randn(64, 512)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


# --------------------------------------------------------------------------------------- by itself
def test_it_knows_nothing_of_the_course():
    for path in (*PACKAGE.glob("*.py"), *PACKAGE.glob("choices/*.py")):
        assert "helpers" not in path.read_text(), path.name
    code = "import sys, fake_cuda; sys.exit('helpers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("collects", [True, False])
def test_nothing_is_collected_while_a_module_loads(tmp_path, monkeypatch, collects):
    (tmp_path / "with_an_error.py").write_text("1 / NUMBER\n")
    (tmp_path / "loaded_there.py").write_text("import gc\nCOLLECTS = gc.isenabled()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    frozen = gc.get_freeze_count()
    try:
        (gc.enable if collects else gc.disable)()
        with pytest.raises(NameError):
            loading.load("with_an_error")
        assert not loading.load("loaded_there").COLLECTS
        assert gc.isenabled() == collects
        left = gc.get_freeze_count()  # what is frozen may go away: it is counted no more
        assert left <= frozen and bool(left) == bool(frozen)
    finally:
        gc.enable()
        sys.modules.pop("loaded_there", None)


def test_a_run_is_simulated_without_the_course():
    parameters = 4 * (512 * 2048 + 2048)
    found = simulate(loop, (7, 5))
    assert found.peak_by_category["parameters"] == found.peak_by_category["gradients"] == parameters
    assert 2 * parameters <= found.peak_by_category["optimizer states"] < 2.001 * parameters
    assert found.peak_reserved >= found.peak_allocated == sum(found.by_category.values())
    assert [name for _, name in found.phases] == ["forward", "backward", "optimizer step"]
    predicted = predict(loop, gpu="T4")
    for name in ("peak_allocated", "peak_reserved", "by_category", "phases"):
        assert getattr(found, name) == getattr(predicted, name), name
    assert (found.timeline == predicted.timeline).all()


def test_building_the_model_is_not_the_run():
    def wasteful():
        torch.empty(100 * MiB, dtype=torch.uint8)  # dies before the first forward pass
        loop()

    assert simulate(wasteful).peak_allocated == simulate(loop).peak_allocated


def test_a_layer_computed_again_is_part_of_the_backward_pass():
    def checkpointed():
        layer = torch.nn.Linear(64, 64)
        for _ in range(2):
            x = torch.ones(8, 64, requires_grad=True)
            checkpoint(layer, x, use_reentrant=False).sum().backward()
            torch.optim.SGD(layer.parameters()).step()

    found = simulate(checkpointed)
    assert [name for _, name in found.phases] == ["forward", "backward", "optimizer step"]


def test_values_that_a_fake_tensor_lacks():
    def asking():
        drawn = torch.randn(3)
        seen = [bool((drawn > 0).all()), drawn.sum().item(), drawn.long().sum().item()]
        assert [(type(value), value) for value in seen] == [(bool, False), (float, 1.0), (int, 1)]
        torch.nn.init.trunc_normal_(torch.empty(9))  # asks until the answer is False

    simulate(asking)


def test_values_of_small_tensors_that_numbers_make():
    def asking():
        ids = torch.tensor([[3, 7, 0], [7, 7, 0]])
        mask = ids.ne(0)
        mask[:, 0] = False
        assert (mask.sum().item(), bool(mask.all()), mask.sum(1).tolist()) == (2, False, [1, 1])
        assert torch.randn(2, 3, 8)[mask].shape == (2, 8)  # what a mask picks of unknown values
        assert torch.randn(2, 3).masked_select(ids == 7).shape == (3,)
        assert torch.ones_like(torch.randn(2, 3), dtype=torch.long).sum().item() == 6
        assert torch.tensor([ids.max(), ids.min()]).tolist() == [7, 0]
        assert torch.randn(3)[torch.randn(3) > 9].shape == (3,)  # of pictures or labels: all
        ids[0, 0] = torch.randn(3).argmax()  # from here on nobody knows, and 1 is the guess
        step = torch.tensor(0.0)
        torch._foreach_add_([step], 1.0)  # as optimizers count: no stale 0, by which they divide
        assert step.item() == 1.0

    simulate(asking)
    simulate(asking, None)


def test_a_gradient_is_added_in_place_on_a_cpu_too():
    def twice():
        x = torch.ones(256, 256, requires_grad=True) * 1
        sum((x * x).sum() for _ in range(8)).backward()

    with torch.profiler.profile(profile_memory=True) as profile:
        twice()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    sizes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    assert simulate(twice, None).peak_allocated == pytest.approx(
        max(itertools.accumulate(sizes)), abs=1000
    )


def test_autocast_for_cuda_is_autocast():
    def forward(device, dtype=None):
        layer = torch.nn.Linear(512, 512)
        with torch.autocast(device, dtype):
            layer(torch.ones(64, 512)).float().sum().backward()

    asked = simulate(partial(forward, "cuda"))
    assert asked.log == simulate(partial(forward, "cpu", torch.bfloat16)).log
    assert asked.peak_allocated > simulate(partial(forward, "cuda", torch.float32)).peak_allocated


def test_equal_runs_have_equal_logs():
    def layer():
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.ones(8, 64)).float().sum().backward()

    logs, others = [], []
    for _ in range(8):  # autocast frees its copies in the order of their addresses
        others.append([torch.empty(7 + k) for k in range(50 * len(others))][::2])
        logs.append(simulate(layer).log)
    assert all(log == logs[0] for log in logs)


def test_accelerate_in_fp16_is_not_float32():
    def loop(precision):
        accelerator = Accelerator(mixed_precision=precision, cpu=True)
        layer = accelerator.prepare(torch.nn.Linear(512, 512))
        accelerator.backward(layer(torch.ones(64, 512)).sum())

    half, brain, full = (simulate(partial(loop, name), (7, 5)) for name in ("fp16", "bf16", "no"))
    assert half.log == brain.log and half.peak_allocated > full.peak_allocated
    assert simulate(partial(loop, "fp16"), None).log == simulate(partial(loop, "no"), None).log


def step(layer, optimizer, batch=None):
    layer(torch.ones(8, 64) if batch is None else batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_gradient_scaler_does_not_skip_the_step():
    def scaled():
        layer, scaler = torch.nn.Linear(64, 64), torch.amp.GradScaler("cpu")
        optimizer = torch.optim.Adam(layer.parameters())
        scaler.scale(layer(torch.ones(8, 64)).sum()).backward()
        scaler.step(optimizer)

    assert simulate(scaled).by_category["optimizer states"] >= 2 * 4 * 64 * 64


def test_workers_and_pinned_memory_are_left_out():
    def loaded():
        options = {"num_workers": 2, "prefetch_factor": 2, "persistent_workers": True}
        data = DataLoader([torch.ones(64)] * 4, batch_size=2, pin_memory=True, **options)
        layer = torch.nn.Linear(64, 64)
        for batch in data:
            step(layer, torch.optim.Adam(layer.parameters()), batch.pin_memory())
        torch.cuda.synchronize()

    assert simulate(loaded).phases[-1][1] == "optimizer step"


def test_a_copy_has_no_gradients():
    def averaged():
        layer = torch.nn.Linear(64, 64)
        layer(torch.ones(8, 64)).sum().backward()
        other = copy.deepcopy(layer)
        other.bias.detach()  # still alive at the end
        assert all(p.grad is None and p.requires_grad for p in other.parameters())
        assert copy.deepcopy([other.bias] * 2)[1].shape == (64,)

    simulate(averaged)


KNOWN_BUFFERS = {
    "arange": lambda: torch.arange(1024),
    "positions": lambda: torch.arange(1024).expand((1, -1)),  # as BERT's
    "ones": lambda: torch.ones(1024),
    "counts": lambda: torch.zeros(1024, dtype=torch.long),
    "listed": lambda: torch.tensor([8.0, 16.0, 32.0]),
    "repeated": lambda: torch.ones(8).expand(1024, -1),  # its storage is copied, not its view
    "random": lambda: torch.rand(1024),
}


class Buffered(torch.nn.Module):
    def __init__(self, buffer):
        super().__init__()
        self.layer = torch.nn.Linear(16, 16)
        self.register_buffer("values", buffer())


@pytest.mark.parametrize("name", KNOWN_BUFFERS)
def test_a_copied_buffer_is_counted_and_independent(name):
    def run(copies):
        def copied():
            model = Buffered(KNOWN_BUFFERS[name])
            model.layer(torch.ones(2, 16)).sum().backward()
            kept = [copy.deepcopy(model) for _ in range(copies)]
            for other in kept:
                assert other.values.stride() == model.values.stride()
                if name != "random":
                    assert known(other.values).equal(known(model.values))
            if copies and name in ("arange", "ones", "counts", "listed"):
                before = model.values.clone()
                kept[0].values.add_(1)
                assert known(model.values).equal(known(before))
                assert known(kept[0].values).equal(known(before + 1))
            del kept

        return simulate(copied).peak_allocated

    size = Buffered(KNOWN_BUFFERS[name]).values.untyped_storage().nbytes()
    weights = 16 * 16 * 4 + 512  # a bias takes a block of 512 bytes
    assert run(3) - run(1) == 2 * (weights + -(-size // 512) * 512)


def test_views_of_one_buffer_stay_views_of_one_copy():
    def views():
        base = torch.arange(1024)
        one, two = copy.deepcopy([base, base[:512]])
        one.add_(1)
        assert known(two).tolist() == [*range(1, 513)]
        assert known(base).tolist() == [*range(1024)]
        with pytest.raises(RuntimeError, match="graph leaves"):
            copy.deepcopy(torch.ones(2, requires_grad=True) * 2)

    simulate(views)


def bert():
    config = BertConfig(
        vocab_size=64,
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    return BertModel(config), lambda model: model(torch.ones(2, 8, dtype=torch.long))[0]


def convolutional():
    layers = torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.SiLU()
    model = torch.nn.Sequential(*layers)
    model.register_buffer("stride", torch.tensor([8.0, 16.0, 32.0]))
    return model, lambda model: model(torch.ones(2, 3, 16, 16))


def averaged(model):  # ultralytics' ModelEMA: a copy, and its update by the state's names
    average = copy.deepcopy(model).eval()
    for parameter in average.parameters():
        parameter.requires_grad_(False)

    def update():
        now = model.state_dict()
        for name, value in average.state_dict().items():
            if value.dtype.is_floating_point:
                value *= 0.999
                value += 0.001 * now[name].detach()

    return average, update


def swa(model):  # torch's own
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999), use_buffers=True)
    return average, lambda: average.update_parameters(model)


def nothing(model):
    return model, lambda: None


@pytest.mark.parametrize("make", [bert, convolutional])
@pytest.mark.parametrize("keep", [averaged, swa])
def test_an_average_of_the_weights_is_counted(make, keep):
    def training(keep):
        def run():
            model, forward = make()
            model.train()
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            average, update = keep(model)
            for _ in range(2):
                forward(model).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                update()
            forward(average)

        return run

    model, _ = make()
    state = [*model.parameters(), *model.buffers()]
    blocks = sum(-(-t.untyped_storage().nbytes() // 512) * 512 for t in state)
    with_it, without = simulate(training(keep)), simulate(training(nothing))
    extra = with_it.peak_allocated - without.peak_allocated
    assert 0.9 * blocks <= extra <= 1.5 * blocks


def test_the_kernel_that_a_caller_chooses():
    def attention(*kernels):
        q = torch.ones(2, 8, 512, 64, dtype=torch.bfloat16, requires_grad=True)
        with sdpa_kernel(list(kernels)):
            F.scaled_dot_product_attention(q, q, q).sum().backward()

    math, flash = SDPBackend.MATH, SDPBackend.FLASH_ATTENTION
    plain, fused = (simulate(partial(attention, kernel)).peak_allocated for kernel in (math, flash))
    assert plain > fused + 2 * 8 * 512 * 512 * 2
    with pytest.raises(RuntimeError, match="No available kernel"):  # before Hopper
        simulate(partial(attention, SDPBackend.CUDNN_ATTENTION))


def test_attention_by_the_names_of_its_arguments():
    def attention():
        q = torch.zeros(2, 8, 64, 64, requires_grad=True)
        F.scaled_dot_product_attention(query=q, key=q, value=q, scale=0.5).sum().backward()

    assert simulate(attention).peak_allocated > 0


@pytest.mark.parametrize(("order", "copies"), [((0, 1, 2), 0), ((0, 2, 1), 0), ((2, 1, 0), 1)])
def test_a_product_copies_what_cublas_cannot_read(order, copies):
    n = 256

    def product():
        x = torch.zeros(n, n, n).permute(order)
        with torch.no_grad():
            return torch.bmm(x, torch.zeros(n, n, 1))

    one = 4 * n**3
    assert simulate(product).peak_allocated == pytest.approx(one * (1 + copies), rel=0.15)


def test_rms_norm_is_one_kernel():
    size, width = 2 * 2**20 * 128, 128

    def norm():
        layer = torch.nn.RMSNorm(width, dtype=torch.bfloat16)
        optimizer = torch.optim.SGD(layer.parameters())
        x = torch.zeros(2**20, width, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(2):
            layer(x).backward(torch.zeros(()).expand(x.shape).bfloat16())
            optimizer.step()

    on_a_card, on_a_cpu = simulate(norm).peak_allocated, simulate(norm, None).peak_allocated
    rows = 4 * size // 2 // width  # one number in float32 each
    # Its input and that one's gradient; its output and that one's; a new gradient, to be added.
    assert on_a_card == pytest.approx(5 * size + rows, rel=0.01)
    assert on_a_cpu > 1.5 * on_a_card


def test_questions_about_cudas_autocast_are_answered():
    def asking():
        with torch.autocast("cuda"):
            assert torch.is_autocast_enabled() and torch.is_autocast_enabled("cuda")
            assert torch.get_autocast_dtype("cuda") == torch.float16
        assert not torch.is_autocast_enabled()

    simulate(asking)


def test_sums_under_autocast_cast_as_they_read():
    def summed():
        many = torch.ones(2**20, dtype=torch.bfloat16)
        with torch.autocast("cuda", torch.bfloat16):
            assert many.sum().dtype == torch.float32

    assert simulate(summed).by_category["temporaries"] < 20 * MiB  # the workspace and 2 MiB


@pytest.mark.parametrize(
    ("function", "more"),
    [
        (partial(F.softmax, dim=-1), 64 * 64 * 64),  # the gradient times the output
        (partial(F.log_softmax, dim=-1), 0),
        (partial(F.group_norm, num_groups=16), 3 * 64 * 64 + 2 * 64 * 16),
    ],
)
def test_backward_kernels_on_cuda_take_more_than_their_result(function, more):
    def run():
        x = torch.ones(64, 64, 64, requires_grad=True)
        function(x).backward(torch.ones_like(x))

    on_gpu, on_cpu = (simulate(run, card).peak_allocated for card in ((8, 0), None))
    assert on_gpu - on_cpu == 4 * more


def test_what_a_run_sets_for_the_process_is_put_back():
    def sets():
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)

    simulate(sets)
    assert torch.get_default_dtype() == torch.float32 and torch.is_grad_enabled()


def test_a_refused_compilation_leaves_python_as_it_was():
    """Frames that TorchDynamo evaluates hold their arguments longer, and with them tensors."""

    def inner(x):
        x = x.relu()
        return x.relu()

    def run():
        inner(torch.ones(1000).relu())

    before = simulate(run).log
    for _ in range(2):
        with pytest.raises(NotSimulated, match="uses torch.compile's CUDA graphs"):
            simulate(lambda: torch.compile(inner, mode="reduce-overhead")(torch.ones(2, 4)))
        assert simulate(run).log == before
    assert torch.equal(torch.compile(inner, backend="eager")(torch.ones(2)), torch.ones(2))


def test_a_compilation_of_the_user_that_failed_moves_no_prediction():
    """TorchDynamo then stays where frames are evaluated; a process of its own is left with that."""
    code = """
import torch
from fake_cuda import simulate

def inner(x):
    x = x.relu()
    return x.relu()

def run():
    inner(torch.ones(1000).relu())

def broken(graph, inputs):
    raise TypeError("no backend")

before = simulate(run).log
try:
    torch.compile(inner, backend=broken)(torch.ones(2))
except Exception as error:
    print(type(error).__name__)
print(simulate(run).log == before)
print(torch.equal(torch.compile(inner, backend="eager")(torch.ones(2)), torch.ones(2)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["BackendCompilerFailed", "True", "True"]


def test_flex_attention_that_is_not_compiled_is_refused():
    def attention():
        q = torch.ones(1, 1, 8, 8, requires_grad=True)
        flex_attention(q, q, q).sum().backward()

    with pytest.raises(ValueError, match="flex attention that is not compiled"):
        simulate(attention)


def test_parameters_without_a_module():
    def bare():
        weight = torch.nn.Parameter(torch.ones(512, 512))
        optimizer = torch.optim.Adam([weight])
        for _ in range(2):
            weight.sum().backward()
            optimizer.step()

    assert simulate(bare).by_category["parameters"] == 4 * 512 * 512


def test_sparse_gradients():
    def embed():
        table = torch.nn.Embedding(1000, 64, sparse=True)
        table(torch.zeros(8, dtype=torch.long)).sum().backward()

    assert simulate(embed).peak_by_category["parameters"] == 4 * 1000 * 64


def test_two_optimizers_share_a_step():
    def shared():
        layers = [torch.nn.Linear(64, 64) for _ in range(2)]
        optimizers = [torch.optim.SGD(layer.parameters()) for layer in layers]
        for _ in range(2):
            layers[1](layers[0](torch.ones(8, 64))).sum().backward()
            for optimizer in optimizers:
                optimizer.step()

    phases = [name for _, name in simulate(shared).phases]
    assert phases == ["forward", "backward", "optimizer step", "optimizer step"]


def test_an_optimizer_inside_of_the_backward_pass():
    def fused():
        layers = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
        for parameter in layers.parameters():
            own = torch.optim.SGD([parameter])
            parameter.register_post_accumulate_grad_hook(lambda _, own=own: own.step() and None)
        end = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
        for _ in range(2):
            layers(torch.ones(8, 256)).sum().backward()
            end.step()

    found = simulate(fused)
    assert [name for _, name in found.phases] == ["forward", "backward", "optimizer step"]
    assert found.timeline.sum(axis=1).max() == found.peak_allocated


def test_training_in_another_thread_is_not_counted():
    def beside():
        other = Thread(target=loop)  # hooks see its tensors too, which are real
        other.start()
        other.join()
        loop()

    assert simulate(beside).log == simulate(loop).log


def test_simulations_in_threads_do_not_mix():
    def layer(width):
        torch.nn.Linear(width, width)(torch.ones(8, width)).sum().backward()

    runs = [partial(layer, width) for width in (64, 128, 256)] * 3
    with ThreadPoolExecutor() as pool:
        together = list(pool.map(simulate, runs))
    assert [found.log for found in together] == [simulate(run).log for run in runs]
    assert "fake_cuda" not in F.scaled_dot_product_attention.__module__


@pytest.mark.parametrize(
    "run, message",
    [
        (lambda: torch.ones(3, 3)[torch.randn(3, 3) > 0], "picks by tensors' values"),
        (lambda: torch.equal(torch.randn(3), torch.randn(3)), "picks by tensors' values"),
        (lambda: torch.ones(4).view(3 - int(torch.randn(3).sum()), 3), "with a guess in its place"),
        (lambda: GPT2LMHeadModel(GPT2Config(n_layer=1)).generate(), "picks by tensors' values"),
        (lambda: torch.nn.Linear(2, 2).to("cuda"), "a GPU: leave the model on the CPU"),
    ],
)
def test_what_cannot_be_simulated_is_one_sentence(run, message):
    with pytest.raises(ValueError, match=message) as caught:
        simulate(run)
    assert "\n" not in str(caught.value)


def test_a_cpu_has_no_caching_allocator():
    found = simulate(loop, None)
    assert found.peak_reserved is None
    assert found.peak_allocated == sum(found.by_category.values())


def test_a_newer_card_takes_a_larger_workspace():
    ampere, hopper = (simulate(loop, capability) for capability in ((8, 0), (9, 0)))
    assert hopper.peak_allocated - ampere.peak_allocated == 2 * (32 * MiB - 8519680)


# --------------------------------------------------------------------------------------- allocator
def reserved(*sizes):
    allocator = Allocator()
    for i, size in enumerate(sizes):
        allocator.malloc(i, size)
    return allocator.reserved


@pytest.mark.parametrize(
    "size, segment",
    [
        (1, 2 * MiB),
        (MiB, 2 * MiB),
        (MiB + 1, 20 * MiB),
        (10 * MiB - 512, 20 * MiB),
        (10 * MiB, 10 * MiB),
        (10 * MiB + 1, 12 * MiB),
        (33 * MiB, 34 * MiB),
    ],
)
def test_segments(size, segment):
    assert reserved(size) == segment


def test_sizes_are_rounded_to_512_bytes():
    assert reserved(*[512] * 4096) == 2 * MiB  # the segment is full to the last byte
    assert reserved(*[1] * 4096) == 2 * MiB
    assert reserved(*[1] * 4097) == 4 * MiB
    assert reserved(*[513] * 2048) == 2 * MiB
    assert reserved(*[513] * 2049) == 4 * MiB


def test_small_and_large_blocks_do_not_share_segments():
    assert reserved(2 * MiB, 512) == 22 * MiB
    assert reserved(2 * MiB, 2 * MiB) == 20 * MiB


def test_a_large_block_is_split_if_more_than_a_mebibyte_remains():
    def after(size):  # a free block of 12 MiB is asked for `size`, then for 1 MiB and a bit
        allocator = Allocator()
        allocator.malloc(0, 12 * MiB)
        allocator.release(0)
        allocator.malloc(1, size)
        allocator.malloc(2, MiB + 512)
        return allocator.reserved

    assert after(11 * MiB - 512) == 12 * MiB
    assert after(11 * MiB) == (12 + 20) * MiB  # the rest could serve nobody


def test_neighbours_merge_when_they_are_freed():
    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2], [0, 2, 1]):
        allocator = Allocator()
        for i in range(3):
            allocator.malloc(i, 6 * MiB)
        for i in order:
            allocator.release(i)
        allocator.malloc(3, 20 * MiB - 512)
        assert (allocator.reserved, allocator.peak) == (20 * MiB, 20 * MiB), order


def test_a_hole_between_used_blocks_is_not_enough():
    allocator = Allocator()
    for i in range(3):
        allocator.malloc(i, 6 * MiB)
    allocator.release(0)
    allocator.release(2)
    allocator.malloc(3, 9 * MiB)  # 14 MiB are free, but in two pieces
    assert allocator.reserved == 40 * MiB


def test_the_best_fit_is_reused_and_nothing_is_returned():
    allocator = Allocator()
    for i, size in enumerate([30, 14, 22]):
        allocator.malloc(i, size * MiB)
    for i in range(3):
        allocator.release(i)
    assert allocator.reserved == allocator.peak == 66 * MiB
    allocator.malloc(3, 14 * MiB)
    allocator.malloc(4, 22 * MiB)
    allocator.malloc(5, 30 * MiB)  # each found its own block, so the largest is still whole
    assert allocator.reserved == 66 * MiB


def test_an_emptied_cache_gives_back_whole_segments_only():
    allocator = Allocator()
    for i, size in enumerate([30 * MiB, 6 * MiB, 6 * MiB, 512]):
        allocator.malloc(i, size)
    for i in (0, 1, 3):
        allocator.release(i)
    assert allocator.reserved == (30 + 20 + 2) * MiB
    allocator.empty_cache()
    assert allocator.reserved == 20 * MiB  # a block of 6 MiB keeps its segment
    allocator.malloc(4, 6 * MiB)
    assert (allocator.reserved, allocator.peak) == (20 * MiB, 52 * MiB)
    allocator.malloc(5, 30 * MiB)
    assert allocator.reserved == 50 * MiB


# ---------------------------------------------------------------------------------------- versions
def test_versions_are_a_value_of_the_simulation():
    plain = simulate(loop, (12, 0), versions=Versions(torch="2.11.0")).peak_allocated
    assert simulate(loop, (12, 0), versions=Versions(torch="2.12.1")).peak_allocated > plain
    with rules_of(torch="2.11.0"):
        assert simulate(loop, (12, 0)).peak_allocated == plain
        assert simulate(loop, (12, 0), versions=Versions(torch="2.12.1")).peak_allocated > plain
    assert simulate(loop, (12, 0)).log == simulate(loop, (12, 0), versions=Versions()).log
    before = [size for _, size in simulate(loop, (8, 0), versions=Versions("1.10.2")).log]
    assert 8519680 in [size for _, size in simulate(loop, (8, 0)).log] and 8519680 not in before


def test_what_versions_decide():
    assert not Versions("2.4.0").cudnn_first and Versions("2.11.0+cu130").cudnn_first
    assert Versions("2.11.0", cudnn=91002).cudnn_first is False
    assert [Versions(v).wide_cudnn for v in ("2.14.1", "2.15.0.dev1")] == [False, True]
    assert [Versions(v).efficient_reads_groups for v in ("2.9.1", "2.14.0")] == [False, True]
    assert Versions().torch == torch.__version__
    with pytest.raises(ValueError, match="torch='new' is no version of torch, such as 2.4.0"):
        Versions("new")


def test_log_and_phases_name_what_they_tell():
    found = simulate(loop)
    born, *_ = found.log
    assert born.tensor == 0 and born.size > 0 and sum(entry.size for entry in found.log) >= 0
    dead = {entry.tensor for entry in found.log if entry.size < 0}
    assert dead < {entry.tensor for entry in found.log if entry.size > 0}
    starts = [start.row for start in found.phases]
    assert found.phases[0].name == "forward" and starts == sorted(starts)
    assert starts[-1] < len(found.timeline)


def test_a_card_is_one_value():
    assert simulate(loop, Card.like((8, 0))).log == simulate(loop, (8, 0)).log == simulate(loop).log
    facts = {"sms": 108, "bandwidth_gb_s": 1555, "fp32_tflops": 19.5}
    timed = simulate(loop, Card.of("A100", (8, 0), facts))
    assert timed.step_seconds and timed.shares and timed.limited_by == "host"
    bytes_only = simulate(loop, (8, 0))
    assert bytes_only.step_seconds is bytes_only.shares is bytes_only.limited_by is None


# ---------------------------------------------------------------------------------------- refusals
def no_driver():
    """What a build for CUDA says where there is no driver; a build for the CPU never asks."""
    raise RuntimeError("Found no NVIDIA driver on your system. Please check that you have one")


def through_another_process():
    """As datasets' and torch's workers raise anew what one of them raised: its text is left."""
    raise RuntimeError(f"worker 0 failed: NotSimulated: the run uses {refusals.GPU}")


def flex():
    q = torch.ones(1, 1, 8, 8, requires_grad=True)
    flex_attention(q, q, q).sum().backward()


LAYER = torch.nn.Linear(2, 2)
WITHOUT_CUDA = not torch.backends.cuda.is_built()
PROVOKED = {
    "linked with support for cuda": lambda: torch.ones(2).cuda(),
    "Torch not compiled with CUDA": torch.cuda.init,
    "Found no NVIDIA driver": no_driver,
    f"the run uses {refusals.GPU}": through_another_process,
}


@pytest.mark.parametrize("words", PROVOKED)
def test_what_only_torch_can_say_is_understood(words):
    if words in ("linked with support for cuda", "Torch not compiled with CUDA"):
        if not WITHOUT_CUDA:
            pytest.skip("a build for CUDA says it in other words")
    with pytest.raises(NotSimulated, match="^the run uses ") as caught:
        simulate(PROVOKED[words])
    assert words in str(caught.value.__cause__)
    assert str(caught.value) == f"the run uses {refusals.GPU}"


def test_each_message_of_torchs_is_provoked():
    assert set(PROVOKED) == set(refusals.MESSAGES)


@pytest.mark.parametrize(
    ("run", "card", "what", "original"),
    [
        (lambda: LAYER(torch.ones(1, 2)), (8, 0), refusals.OUTSIDE, AssertionError),
        (flex, None, refusals.FLEX, NotImplementedError),
        (lambda: torch.compile(flex)(), None, refusals.FLEX, NotImplementedError),
    ],
    ids=["a model made outside", "flex attention", "flex attention, compiled"],
)
def test_what_a_function_of_torchs_finds_is_raised_there(run, card, what, original):
    """By its place, whatever torch says: the text of its error may change."""
    with pytest.raises(NotSimulated) as caught:
        simulate(run, card)
    assert caught.value.what == what and str(caught.value) == f"the run uses {what}"
    assert isinstance(caught.value.__cause__, original)


def test_an_error_of_the_runs_own_is_not_ours():
    for error in (ValueError("of the run"), RuntimeError("of the run")):

        def run(error=error):
            raise error

        with pytest.raises(type(error), match="^of the run$") as caught:
            simulate(run)
        assert not isinstance(caught.value, NotSimulated)


def test_what_we_refuse_is_told_by_its_type():
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=9))
    with pytest.raises(NotSimulated) as caught:
        simulate(model.generate)
    assert str(caught.value) != str(caught.value.__cause__)


# ---------------------------------------------------------------------------- what kernels allocate
# Shape, the dimensions summed over, and by hand from setReduceConfig of Reduce.cuh: the blocks that
# share an output, the threads of one across outputs, the values that each loads, the grid.
A100, T4 = Card.like((8, 0)), Card.like((7, 5), 40)
SUMS = [
    (A100, (4096, 64), [0], (32, 16, 4, 1)),  # 16 values a thread, and no more blocks than that
    (A100, (4096, 1024), [0], (64, 32, 4, 8)),
    (A100, (8192, 1024), [0], (128, 32, 4, 8)),
    (A100, (2, 4096, 1024), [0, 1], (128, 32, 4, 8)),
    (A100, (8192, 4096), [0], (54, 32, 4, 32)),  # as many blocks as the card holds
    (A100, (4096, 1023), [0], (14, 32, 1, 32)),  # loads of single values
    (A100, (65536, 10), [0], (64, 4, 2, 2)),
    (T4, (4096, 1024), [0], (40, 32, 4, 8)),  # half as many threads on a multiprocessor
    (A100, (512, 1024), [0], None),  # too few to be shared among blocks
    (A100, (4096, 1024), [1], None),  # the dimension that lies close
    (A100, (0, 1024), [0], None),
]


@pytest.mark.parametrize(("card", "shape", "dims", "blocks"), SUMS)
def test_partial_sums(card, shape, dims, blocks):
    x, expected = torch.empty(shape, device="meta"), []
    if blocks:
        ctas_per_output, block_width, output_vec_size, grid = blocks
        expected = [4 * shape[-1] * ctas_per_output * block_width * output_vec_size, 4 * grid]
    assert scratch.scratch(torch.ops.aten.sum.dim_IntList, (x, dims), card) == expected


def test_gradients_that_are_added_up_unseen_are_an_error(monkeypatch):
    monkeypatch.setattr(engine.aten, "add", torch.ops.aten.sub)
    with pytest.raises(RuntimeError, match="adds gradients in a way that is not seen here"):
        engine.alone.__wrapped__()


def test_the_example_of_simulate_runs():
    found = doctest.testmod(simulation, extraglobs={"simulate": simulate, "torch": torch})
    assert found.attempted >= 3 and not found.failed
