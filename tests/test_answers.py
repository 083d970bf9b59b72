"""What torch.cuda says of a card that is not there: to a script as on a pretended card."""

import textwrap
from dataclasses import replace

import pytest
import torch

from fake_cuda import simulate
from fake_cuda.card import Card
from fake_cuda.scripts import Script
from fake_cuda.scripts.answers import KEPT, PLACES, Memory, answers
from tools.shared.pretended import pretended

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real card")
MiB = 2**20
T4, H100 = Card("Tesla T4", (7, 5), 40), Card("NVIDIA H100 80GB HBM3", (9, 0), 132)

# Asked of a T4 on which nothing lies yet.
ASKED = """
    import torch
    cuda, accelerator = torch.cuda, torch.accelerator
    assert cuda.is_available() and cuda.device_count() == accelerator.device_count() == 1
    assert accelerator.current_accelerator() == torch.device("cuda")
    assert cuda.get_device_name(0) == "Tesla T4" == cuda.get_device_properties("cuda:0").name
    assert cuda.get_device_capability() == (7, 5) and cuda.get_device_properties(0).major == 7
    assert cuda.is_bf16_supported() and not cuda.is_bf16_supported(including_emulation=False)
    assert not cuda.is_tf32_supported() and torch.version.cuda.split(".")
    assert cuda.memory_allocated(device=0) == accelerator.memory.memory_allocated() == 0
    free, total = cuda.mem_get_info(device=0)
    assert total == cuda.get_device_properties(0).total_memory

    held = torch.empty(4 * 2**20, dtype=torch.uint8, device="cuda")
    stats = cuda.memory_stats(device=0)
    assert stats == accelerator.memory_stats() and stats["num_alloc_retries"] == 0
    assert stats["allocated_bytes.all.current"] == cuda.memory_allocated() == held.nbytes
    assert stats["inactive_split_bytes.all.current"] == 16 * 2**20
    assert free - cuda.mem_get_info()[0] == cuda.max_memory_reserved(0) == 20 * 2**20
    assert "Allocated memory" in cuda.memory_summary()
    del held
    cuda.memory.empty_cache()
    cuda.reset_peak_memory_stats(device=0)
    assert cuda.max_memory_allocated() == accelerator.max_memory_reserved() == 0

    cuda.set_per_process_memory_fraction(2**30 / total, device=0)
    for wrong, error in ((1, TypeError), (1.5, ValueError)):
        try:
            cuda.set_per_process_memory_fraction(wrong)
            raise SystemExit("it took a wrong fraction")
        except error:
            pass
    try:
        torch.empty(2**31, dtype=torch.uint8, device="cuda")
        raise SystemExit("there was no limit")
    except torch.OutOfMemoryError as error:
        assert "Tried to allocate 2048.00 MiB" in str(error)
    stats = cuda.memory_stats()
    assert stats["num_ooms"] == stats["num_alloc_retries"] == 1
    assert cuda.memory_reserved() == 0
    cuda.set_per_process_memory_fraction(1.0)

    stream, start, end = cuda.Stream(device=0), cuda.Event(enable_timing=True), cuda.Event()
    with cuda.stream(stream), cuda.stream(None), cuda.device(0):
        start.record()
        stream.wait_event(stream.record_event(end))
    assert stream.query() and end.query() and start.elapsed_time(end) > 0
    assert not cuda.current_stream().is_capturing() and isinstance(stream, cuda.Stream)
    state = cuda.get_rng_state(device="cuda")
    cuda.set_rng_state(state)
    assert len(cuda.get_rng_state_all()) == 1 and state.dtype == torch.uint8
    cuda.synchronize(0)
"""
TRAINED = """
    model = torch.nn.Linear(32, 4).cuda()
    for _ in range(3):
        model(torch.randn(16, 32, device="cuda")).sum().backward()
        with torch.no_grad():
            for weight in model.parameters():
                weight -= weight.grad
"""


def test_the_pretended_card_answers():
    with pretended("T4"):
        exec(textwrap.dedent(ASKED), {})


def test_the_card_of_a_script_answers_the_same(tmp_path):
    (tmp_path / "train.py").write_text(textwrap.dedent(ASKED) + textwrap.dedent(TRAINED))
    script = Script(str(tmp_path / "train.py"), seconds=60)
    simulate(script, card=replace(T4, memory=15 * 2**30))
    assert script.updates == 2 and "ran out of memory once" in script.note


def test_an_answer_is_to_a_function_that_torch_has():
    functions = {name for owner in PLACES for name in vars(owner)}
    assert answers(T4, Memory(2**30, 0)).keys() | KEPT <= functions


def test_a_card_has_its_own_properties():
    told = [answers(card, Memory(2**34, 0))["get_device_properties"] for card in (T4, H100)]
    assert [card.L2_cache_size // MiB for card in told] == [4, 50]
    assert [card.max_threads_per_multi_processor for card in told] == [1024, 2048]
    assert [card.shared_memory_per_block_optin // 1024 for card in told] == [64, 227]


def test_a_full_card_empties_its_cache_and_then_runs_out():
    memory = Memory(total=100 * MiB, taken=60 * MiB)
    memory.malloc(0, 30 * MiB)
    memory.release(0)
    memory.malloc(1, 36 * MiB)
    assert (memory.retries, memory.ran_out, memory.reserved) == (1, 0, 36 * MiB)
    assert memory.peak == 36 * MiB == memory.most
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 6.00 MiB"):
        memory.malloc(2, 6 * MiB)
    assert (memory.retries, memory.ran_out, memory.reserved) == (2, 1, 36 * MiB)
    assert memory.peak == 36 * MiB and memory.free_and_total() == (4 * MiB, 100 * MiB)


def test_a_card_without_a_limit_tells_how_much_would_be_needed():
    memory = Memory(total=100 * MiB, taken=60 * MiB, limited=False)
    memory.malloc(0, 200 * MiB)
    assert memory.peak == memory.most == 200 * MiB and memory.retries == 0
