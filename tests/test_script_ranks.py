"""A script that is one process of one: torchrun's, and one that names a second card."""

import re
import textwrap

import pytest

from fake_cuda import simulate
from fake_cuda.card import Card
from fake_cuda.scripts import Script, group, ranks
from fake_cuda.scripts.verdict import ONE_PROCESS
from fake_cuda.scripts.words import SEVERAL, SEVERAL_CARDS

T4 = Card("T4", (7, 5), 40, 320e9, {"fp32": 4.35e12, "fp16": 41.9e12})
MIB = 2**20
WORKSPACES = 2 * 8.125 * MIB  # of cuBLAS, which a CPU has not
ALONE = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="29500")
BEGIN = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("nccl")
"""
UPDATES = """
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(5):
    model(torch.randn(4, 1024).cuda()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
NET = """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        layers = [torch.nn.Linear(1024, 1024, bias=False) for _ in range(8)]
        self.used = torch.nn.Sequential(*layers)
        self.spare = torch.nn.Linear(1024, 1024, bias=False) if SPARE else None
    def forward(self, x):
        return self.used(x)
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ALONE:
        monkeypatch.delenv(name, raising=False)

    def write(*texts):
        path = tmp_path / "train.py"
        path.write_text("".join(textwrap.dedent(text) for text in texts))
        return str(path)

    return write


def test_values_on_the_host_pass_through_a_group_of_one(write, monkeypatch):
    for name, value in ALONE.items():
        monkeypatch.setenv(name, value)
    path = write(
        BEGIN,
        """
        assert dist.is_nccl_available() and dist.is_initialized() and dist.get_backend() == "nccl"
        assert dist.get_rank() == 0 and dist.get_world_size() == 1
        dist.barrier(device_ids=[0])
        for given in (torch.arange(4.0), torch.ones(4).cuda()):
            into = [torch.zeros_like(given) for _ in range(6)]
            dist.all_reduce(given, async_op=True).wait()
            dist.broadcast(given, 0)
            dist.reduce(given, dst=0)
            dist.all_gather(into[:1], given)
            dist.gather(given, into[1:2], dst=0)
            dist.scatter(into[2], [given], src=0)
            dist.all_gather_into_tensor(into[3], given)
            dist.reduce_scatter_tensor(into[4], given)
            dist.all_to_all_single(into[5], given)
            assert {out.device for out in into} == {given.device}
            assert given.is_cuda or all(out.tolist() == [0, 1, 2, 3] for out in into)
        everyone = [None]
        dist.all_gather_object(everyone, {"loss": 2})
        assert everyone == [{"loss": 2}]
        dist.broadcast_object_list(everyone, src=0)
        group = dist.new_group([0], backend="gloo")
        dist.monitored_barrier(group)
        dist.all_reduce(torch.ones(1), group=group)
        assert dist.get_backend(group) == "gloo" and dist.get_world_size(group) == 1
        model = torch.nn.Linear(1024, 4).cuda()
        """,
        UPDATES.replace("5", "1"),
        "dist.destroy_process_group()\nassert not dist.is_initialized()",
    )
    script = Script(path)
    simulate(script, card=T4)
    assert ranks.NCCL in script.note and ONE_PROCESS not in script.note


WRAPPED = {  # MiB: the peak of a real process of one with gloo on a CPU, by helpers.measure
    "model.cuda()": 64.03,
    "DDP(model.cuda(), device_ids=[0])": 96.03,
    "DDP(model.cuda(), gradient_as_bucket_view=True)": 68.16,
    "DDP(model.cuda(), device_ids=[0], gradient_as_bucket_view=True, static_graph=True)": 96.03,
    "DDP(model.cuda(), device_ids=['cuda:0'], bucket_cap_mb=100)": 96.03,
}


@pytest.mark.parametrize("wrapped", WRAPPED)
def test_buckets_of_gradients_are_counted(write, wrapped):
    path = write(BEGIN, "SPARE = False", NET, f"model = Net()\nmodel = {wrapped}\n", UPDATES)
    script = Script(path)
    found = simulate(script, card=T4)
    assert found.peak_allocated - WORKSPACES == pytest.approx(WRAPPED[wrapped] * MIB, abs=0.1 * MIB)
    assert ONE_PROCESS in script.note  # nobody said how many there are


@pytest.mark.parametrize("of_buckets", [False, True])
@pytest.mark.parametrize("cap", [None, 3])
def test_buckets_are_those_of_the_reducers_arithmetic(write, cap, of_buckets, monkeypatch):
    """Eight weights of 4 MiB, which at first share one bucket. After the first backward pass they
    fill buckets in its order, each until it is full: the first with 1 MiB, the others with 25, or
    all with `bucket_cap_mb` (kDefaultFirstBucketBytes in reducer.hpp, rebuild_buckets and
    compute_bucket_assignment_by_size in reducer.cpp, torch/csrc/distributed/c10d). A gradient is a
    second tensor besides, or a view of its bucket that one at a time is copied into."""
    sizes, filled = [], 0
    for number in range(8):
        filled += 4
        if filled >= (cap or (25 if sizes else 1)) or number == 7:
            sizes.append(filled)
            filled = 0
    assert sizes == ([4] * 8 if cap else [4, 28])

    def told(self, tensors, options=None):
        print("REDUCED", tensors[0].numel() * 4 // MIB)
        return group._done(tensors)

    monkeypatch.setattr(group.Rank, "allreduce", told)
    options = f", bucket_cap_mb={cap}" if cap else ""
    options += ", gradient_as_bucket_view=True" if of_buckets else ""
    wrapped = f"model = DDP(Net().cuda(){options})\n"
    script = Script(write(BEGIN, "SPARE = False", NET, wrapped, UPDATES))
    found = simulate(script, card=T4)
    reduced = [int(size) for size in re.findall(r"REDUCED (\d+)", script.printed)]
    assert reduced == [32, *sizes]  # in the first update, and in the second
    beside = 4 if of_buckets else 32
    expected = (32 + sum(sizes) + beside) * MIB
    assert found.peak_allocated - WORKSPACES == pytest.approx(expected, abs=0.2 * MIB)


def test_unused_parameters_have_buckets_and_no_gradients(write):
    wrapped = "model = DDP(Net().cuda(), device_ids=[0], find_unused_parameters=True)\n"
    found = simulate(Script(write(BEGIN, "SPARE = True", NET, wrapped, UPDATES)), card=T4)
    assert found.peak_allocated - WORKSPACES == pytest.approx(104.03 * MIB, abs=0.1 * MIB)
    assert found.by_category["gradients"] == pytest.approx(68 * MIB, abs=0.1 * MIB)


def test_gradients_are_accumulated_without_a_reduction(write):
    loop = UPDATES.replace(
        "    model(", "    with model.no_sync():\n        one()\n    one()\n    #"
    )
    one = "def one():\n    model(torch.randn(4, 1024).cuda()).sum().backward()\n"
    wrapped = "SPARE = False", NET, "model = DDP(Net().cuda(), device_ids=[0])\n"
    found = simulate(Script(write(BEGIN, *wrapped, one, loop)), card=T4)
    assert found.peak_allocated - WORKSPACES == pytest.approx(100.16 * MIB, abs=0.1 * MIB)


def test_a_mesh_of_one_card(write):
    path = write(
        """
        import torch
        mesh = torch.distributed.device_mesh.init_device_mesh("cuda", (1,))
        assert mesh.size() == 1
        model = torch.nn.Linear(1024, 4).cuda()
        """,
        UPDATES,
    )
    script = Script(path)
    simulate(script, card=T4)
    assert script.updates == 2 and ONE_PROCESS in script.note


@pytest.mark.parametrize("count, card", [("torch.cuda.device_count()", True), ("2", False)])
def test_one_spawned_process_runs_here(write, count, card):
    path = write(f"""
        import torch, torch.distributed as dist
        def main(rank, world):
            dist.init_process_group("nccl", "tcp://localhost:1234", rank=rank, world_size=world)
            torch.cuda.set_device(rank)
            model = torch.nn.Linear(8, 8).to(rank)
            model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[rank])
            optimizer = torch.optim.SGD(model.parameters())
            for _ in range(3):
                model(torch.randn(4, 8, device=rank)).sum().backward()
                optimizer.step()
        if __name__ == "__main__":
            torch.multiprocessing.spawn(main, args=({count},), nprocs={count})
    """)
    script = Script(path)
    if card:
        simulate(script, card=T4)
        assert script.updates == 2
    else:
        with pytest.raises(ValueError, match=SEVERAL[:30]):
            simulate(script, card=T4)


@pytest.mark.parametrize(
    "begin", ['("nccl", rank=0, world_size=2)', '("gloo", "tcp://h:1?world_size=2&rank=0")', "()"]
)
def test_several_processes_are_refused(write, monkeypatch, begin):
    for name, value in (ALONE | dict(WORLD_SIZE="2")).items():
        monkeypatch.setenv(name, value)
    path = write(f"import torch\ntorch.distributed.init_process_group{begin}")
    with pytest.raises(ValueError, match=SEVERAL[:30]):
        simulate(Script(path), card=T4)


def test_what_a_script_does_without_an_environment_is_its_own(write):
    path = write(
        """
        import torch
        try:
            torch.distributed.init_process_group("nccl")
        except ValueError:
            model = torch.nn.Linear(1024, 4).cuda()
        """,
        UPDATES,
    )
    script = Script(path)
    simulate(script, card=T4)
    assert script.note == ""


@pytest.mark.parametrize(
    "asks",
    [
        """
        if os.environ.get("LOCAL_RANK") is None:
            raise ValueError("LOCAL_RANK must be set before selecting a local device.")
        """,
        "assert 'RANK' in os.environ\n",
        "rank = int(os.environ.get('RANK'))\n",
        "assert os.environ.get('WORLD_SIZE'), 'run me with torchrun'\n",
        "if os.environ.get('MASTER_ADDR') is None: raise SystemExit('start it with torchrun')\n",
        """
        try:
            rank = int(os.environ["RANK"])
        except KeyError as error:
            raise RuntimeError("no launcher") from error
        """,
    ],
)
def test_who_asks_for_torchruns_variables_is_told_them(write, asks):
    path = write("import os, torch\n", asks, "model = torch.nn.Linear(1024, 4).cuda()\n", UPDATES)
    script = Script(path)
    simulate(script, card=T4)
    assert script.updates == 2 and script.note == ONE_PROCESS


@pytest.mark.parametrize(
    "asks, said",
    [
        ("raise KeyError('GRANK')\n", "fails by itself in line 2 of train.py: .*: KeyError"),
        (
            """
            try:
                rank = int(os.environ["RANK"])
            except KeyError:
                raise ValueError("one process, and no data")
            """,
            "one process, and no data",
        ),
    ],
)
def test_another_mistake_is_told_and_not_tried_with_torchruns_variables(write, asks, said):
    seen = "print('RANK' in os.environ)\n"
    script = Script(write("import os; " + seen, asks))
    with pytest.raises(ValueError, match=said):
        simulate(script, card=T4)
    assert script.printed.startswith("False")


def test_how_many_processes_there_are_stays_as_it_was_said(write, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=SEVERAL[:30]):
        simulate(Script(write(BEGIN)), card=T4)


def test_data_parallel_takes_its_input_to_the_card(write):
    lines = "import torch\nmodel = torch.nn.Linear(1024, 4).cuda()\n"
    loop = UPDATES.replace("4, 1024", "40_000, 1024")
    known = simulate(Script(write(lines, loop)), card=T4)
    wrap = "model = torch.nn.DataParallel(model)\n"
    found = simulate(Script(write(lines, wrap, loop.replace(").cuda()", ")"))), card=T4)
    assert found.peak_allocated == pytest.approx(known.peak_allocated, rel=1e-3)


SECOND = """
model.cuda(1); torch.ones(1).cuda(device=1); model.to(1); torch.ones(1, device=torch.device(1))
torch.Generator("cuda:1")
model.to("cuda:1"); torch.cuda.set_device(1); torch.cuda.set_device("cuda:1")
torch.cuda.device(1).__enter__(); torch.set_default_device("cuda:1")
torch.load("x", map_location="cuda:1"); torch.load("x", map_location={"cuda:0": "cuda:1"})
torch.load("x", map_location=lambda storage, place: storage.cuda(1))
torch.nn.DataParallel(model, device_ids=[0, 1]); torch.zeros_like(model.weight, device="cuda:1")
"""


@pytest.mark.parametrize(
    "line", [one for text in SECOND.split("\n") for one in text.split("; ") if one]
)
def test_a_second_card_is_refused_however_it_is_named(write, line):
    save = 'torch.save(torch.ones(1).cuda(), "x")' if "load" in line else ""
    path = write(
        f"import torch\nmodel = torch.nn.Linear(1024, 4).cuda()\n{save}\n{line}\n", UPDATES
    )
    with pytest.raises(ValueError, match=SEVERAL_CARDS.format("cuda:1")):
        simulate(Script(path), card=T4)


def test_cards_may_be_listed_counted_and_hidden(write):
    path = write(
        """
        import os, torch
        os.environ["CUDA_VISIBLE_DEVICES"] = "1"
        devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
        spare = torch.device("cuda:1")
        model = torch.nn.Linear(1024, 4).to(devices[0])
        if torch.cuda.device_count() > 1:
            model.to(spare)
        """,
        UPDATES,
    )
    assert simulate(Script(path), card=T4).peak_allocated > 0


@pytest.mark.parametrize("environment", [{}, ALONE])
def test_accelerate_is_one_process(write, monkeypatch, environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    path = write("""
        import torch
        from accelerate import Accelerator
        accelerator = Accelerator()
        assert accelerator.device.type == "cuda" and accelerator.num_processes == 1
        model = torch.nn.Linear(1024, 4)
        optimizer = torch.optim.SGD(model.parameters())
        data = torch.utils.data.DataLoader(torch.randn(64, 1024), 8)
        model, optimizer, data = accelerator.prepare(model, optimizer, data)
        for batch in data:
            with accelerator.accumulate(model):
                loss = model(batch).sum()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            accelerator.gather_for_metrics(loss.detach())
        accelerator.wait_for_everyone()
    """)
    script = Script(path)
    simulate(script, card=T4)
    assert script.updates == 2


@pytest.mark.parametrize("strategy, buckets", [("auto", 0), ("ddp", 1)])
def test_lightning_on_one_card(write, strategy, buckets):
    pytest.importorskip("lightning")
    path = write(f"""
        import lightning, torch
        class Module(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(1024, 1024, bias=False)
            def training_step(self, batch, _):
                return self.layer(batch).sum()
            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters())
        trainer = lightning.Trainer(accelerator="gpu", devices=1, strategy="{strategy}")
        trainer.fit(Module(), torch.utils.data.DataLoader(torch.randn(64, 1024), 8))
    """)
    found = simulate(Script(path), card=T4)
    assert found.by_category["gradients"] == pytest.approx((1 + buckets) * 4 * MIB, abs=MIB)
