"""The GPU kit, run on a CPU at tiny sizes; what it records is never lost and never a GPU's."""

import csv
import json
import sys
import types
from contextlib import nullcontext
from pathlib import Path

import psutil
import pynvml
import pytest
import torch

import helpers
from tools import gpu
from tools.shared import jobs
from tools.shared.announced import announced, workload_of
from tools.shared.measuring import PREDICTED, drawn_on_the_card

WITHOUT_TORCHAO = "^(?!.*adamw_torch_)"
ONE = {"per_device_train_batch_size": 1}


def rows(folder: Path) -> list[dict]:
    with (folder / "cpu.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def run(folder: Path, *arguments: str) -> int:
    return gpu.main([*arguments, "--device", "cpu", "--output", str(folder)])


def test_it_runs_from_end_to_end_on_a_cpu(tmp_path, monkeypatch, capsys):
    said = "import sys; print('ran', len(sys.argv))"
    monkeypatch.setattr(gpu, "COMMANDS", {"lessons": ["-c", said], "overhead": ["-c", said]})
    sections = ("classic", "matrix", "waterfalls")
    assert run(tmp_path, *sections, *gpu.COMMANDS, "--limit", "3") == 0
    found = rows(tmp_path)
    assert [row["section"] for row in found] == [name for name in sections for _ in range(3)]
    for row in found:
        assert row["outcome"] == "measured" and row["card"] == "cpu" and row["driver"] == ""
        # oneDNN's scratch space for bf16, which no fake tensor shows, weighs most at batch 1.
        assert abs(float(row["error_allocated"])) < (0.02 if "bf16" in row["settings"] else 0.005)
    assert not list((gpu.ROOT / "data" / "measurements").glob("cpu*"))
    said = capsys.readouterr().out
    assert [line.split()[:2] for line in said.splitlines() if "error_allocated" in line][:2] == [
        ["classic", "error_allocated"],
        ["matrix", "error_allocated"],
    ]


def test_the_small_ends_of_the_waterfalls(tmp_path, monkeypatch):
    names = ("bert-large-uncased + update inside backward", "llama-3.2-3b QLoRA")
    found = {job.run: job for job in jobs.waterfalls()}
    chosen = [found[name] for name in (*names, "llama-3.2-3b QLoRA + offloading")]
    monkeypatch.setattr(gpu, "SECTIONS", {"waterfalls": lambda: iter(chosen)})
    assert run(tmp_path, "waterfalls") == 0
    exact, half, offloaded = rows(tmp_path)
    assert abs(float(exact["error_allocated"])) < 0.005
    assert half["outcome"] == "measured"  # in 16 bits oneDNN's scratch space weighs at this size
    assert offloaded["outcome"].startswith("skipped: a CPU has nowhere to offload to")


def test_the_newer_sections_measure_or_say_why_not(tmp_path):
    assert (
        run(tmp_path, "small", "liger", "modern", "--limit", "2", "--match", WITHOUT_TORCHAO) == 0
    )
    found = {(row["section"], row["run"]): row["outcome"] for row in rows(tmp_path)}
    small = [outcome for (section, _), outcome in found.items() if section == "small"]
    assert small == ["measured", "measured"]
    plain, kernels = (found["liger", f"qwen3-0.6b {name}"] for name in ("own layers", "Liger"))
    assert plain == "measured" and kernels.startswith("skipped: ")


def test_predictions_are_written_down_before_a_card_is_there(tmp_path, capsys):
    options = ("--limit", "1", "--output", str(tmp_path))
    assert gpu.main(["small", "--predict", "H100", *options]) == 0
    path = tmp_path / "announced_h100.csv"
    ((key, row),) = announced(path).items()
    assert key == ("small", "bert-base-uncased short fp32") and row["outcome"] == "predicted"
    found = helpers.predict(workload_of(next(jobs.small())), gpu="H100", **ONE)
    assert int(row["predicted_allocated"]) == found.peak_allocated
    assert float(row["predicted_low"]) < float(row["predicted_seconds"]) == found.step_seconds
    before = path.read_text()
    assert gpu.main(["small", "--predict", "H100", *options]) == 0  # what stands there stays
    assert path.read_text() == before
    path.write_text(before.replace(torch.__version__, "2.0.0"))
    assert not announced(path)  # of other versions: they would judge something else
    assert gpu.main(["small", "--predict", "H1000", *options]) == 2
    assert "H1000" in capsys.readouterr().err


def test_what_was_predicted_before_is_held_against_the_run(tmp_path):
    job = next(jobs.small())
    blind = dict.fromkeys(PREDICTED, "") | {"predicted_allocated": "1000", "outcome": "predicted"}
    found = gpu.measure(job, True, blind)
    assert found["predicted_allocated"] == 1000
    assert found["error_allocated"] == 1000 / found["peak_allocated"] - 1
    refused = dict.fromkeys(PREDICTED, "") | {"outcome": "refused: why"}
    found = gpu.measure(job, True, refused)  # what was refused is measured all the same
    assert found["peak_allocated"] and found["error_allocated"] is None


def test_runs_that_share_a_card_record_no_times(tmp_path):
    assert run(tmp_path, "small", "--limit", "1", "--untimed") == 0
    (row,) = rows(tmp_path)
    assert row["peak_allocated"] and not row["seconds"] and not row["samples_per_second"]


def test_a_model_drawn_on_the_card_is_the_workload_otherwise():
    job = next(job for job in jobs.modern() if job.run == "smollm3-3b LoRA")
    drawn = drawn_on_the_card(workload_of(job, tiny=True))
    assert drawn.changed == ("bf16_weights", "lora")


def test_a_second_start_goes_on_and_appends(tmp_path):
    assert run(tmp_path, "classic", "--limit", "1") == 0
    first = (tmp_path / "cpu.csv").read_text()
    assert run(tmp_path, "classic", "--limit", "1") == 0
    assert (tmp_path / "cpu.csv").read_text() == first
    assert run(tmp_path, "classic", "--limit", "1", "--again") == 0
    assert (tmp_path / "cpu.csv").read_text().startswith(first) and len(rows(tmp_path)) == 2
    assert run(tmp_path, "classic", "--more", "1") == 0
    assert [row["run"] for row in rows(tmp_path)][:2] != [row["run"] for row in rows(tmp_path)][1:]
    assert len(rows(tmp_path)) == 3


def test_failures_are_rows(tmp_path, monkeypatch):
    outcomes = iter([torch.OutOfMemoryError("full"), RuntimeError("broken kernel")])

    def fail(*_, **__):
        raise next(outcomes)

    monkeypatch.setattr(helpers, "train", fail)
    assert run(tmp_path, "classic", "--limit", "2") == 0
    found = [row["outcome"] for row in rows(tmp_path)]
    assert found == ["out of memory", "failed: RuntimeError: broken kernel"]


def test_what_is_missing_is_named_and_skipped(tmp_path, monkeypatch, capsys):
    found = [
        gpu.Job("new", "large", {"a_keyword_of_tomorrow": True}),
        gpu.Job("needs", "large", {}, needs=("bitsandbytes",)),
    ]
    monkeypatch.setattr(gpu, "SECTIONS", {"matrix": lambda: iter(found)})
    monkeypatch.setattr(gpu, "missing", lambda names: [n for n in names if n == "bitsandbytes"])
    assert run(tmp_path, "matrix") == 0
    found = [row["outcome"] for row in rows(tmp_path)]
    assert found[0].startswith("skipped: a_keyword_of_tomorrow is missing")
    assert found[1].startswith("skipped: bitsandbytes is missing")
    said = capsys.readouterr().out
    assert "without 8-bit optimizers" in said and "matrix: complete" in said


def test_skipped_rows_are_tried_again(tmp_path):
    record = gpu.Record(tmp_path / "cpu.csv", {"torch": "1", "transformers": "1"})
    record.add("matrix", "a", outcome="skipped: nothing here")
    record.add("matrix", "b", outcome="measured")
    again = gpu.Record(tmp_path / "cpu.csv", {})
    assert again.done == {("matrix", "b", "1", "1")}


def test_a_row_in_which_the_process_died_is_not_tried_again(tmp_path, monkeypatch, capsys):
    def die(*_):
        raise SystemExit  # as a kill would, nothing is written

    monkeypatch.setattr(gpu, "measure", die)
    with pytest.raises(SystemExit):
        run(tmp_path, "classic", "--limit", "1")
    monkeypatch.setattr(gpu, "measure", lambda *_: {"outcome": "measured"})
    assert run(tmp_path, "classic", "--limit", "2") == 0
    assert run(tmp_path, "classic", "--limit", "2") == 0
    died, other = rows(tmp_path)
    assert died["outcome"].startswith("failed: the process died") and died["torch"]
    assert died["run"] != other["run"] and other["outcome"] == "measured"
    assert "--again tries it once more" in capsys.readouterr().out


def test_a_row_that_was_stopped_by_hand_is_measured_next_time(tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu, "measure", stop)
    with pytest.raises(SystemExit, match="stopped; the next start measures it"):
        run(tmp_path, "classic", "--limit", "1")
    monkeypatch.setattr(gpu, "measure", lambda *_: {"outcome": "measured"})
    assert run(tmp_path, "classic", "--limit", "1") == 0
    assert [row["outcome"] for row in rows(tmp_path)] == ["measured"]


@pytest.mark.parametrize("works", [True, False])
def test_a_card_that_no_longer_answers_costs_one_row(tmp_path, monkeypatch, works):
    """After an illegal access, say, all later calls of the process fail too."""

    def fail(*_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def synchronize():
        if not works:
            fail()

    record = gpu.Record(tmp_path / "card.csv", {"torch": "1", "transformers": "1"})
    options = types.SimpleNamespace(limit=2, more=None, again=False, match="", untimed=False)
    monkeypatch.setattr(gpu, "blind_table", lambda: tmp_path / "none.csv")
    monkeypatch.setattr(gpu, "measure", fail)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(torch, "ones", lambda *_, **__: torch.tensor(1))
    with nullcontext() if works else pytest.raises(SystemExit, match="start again to go on"):
        gpu.run_jobs("classic", record, False, options)
    failed = (tmp_path / "card.csv").read_text().count("failed: RuntimeError")
    assert failed == (2 if works else 1)


def test_a_driver_that_does_not_tell_its_version(monkeypatch):
    def refused():
        raise pynvml.NVMLError_NoPermission

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100-SXM4-40GB MIG 3g.20gb")
    monkeypatch.setattr(pynvml, "nvmlInit", refused)
    facts = gpu.machine("cuda")
    assert facts["card"].startswith("NVIDIA A100") and "driver" not in facts


def test_a_model_that_the_machines_memory_cannot_hold_is_skipped(tmp_path, monkeypatch):
    small = types.SimpleNamespace(available=8 * 2**30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: small)
    job = gpu.Job("3b", "llama-3.2-3b", {}, "language_modelling", 4096)
    outcome = gpu.measure(job, on_cpu=False)["outcome"]
    assert outcome.startswith("skipped: llama-3.2-3b is built in float32 in the machine's memory:")
    assert "GiB, of which 8.00 GiB are free" in outcome


def test_lessons_run_one_at_a_time_and_have_time():
    command = gpu.COMMANDS["lessons"]
    assert "-n0" in command and "--nbval-cell-timeout=1800" in command


def test_a_table_of_another_make_is_left_alone(tmp_path):
    (tmp_path / "cpu.csv").write_text("a,b\n1,2\n")
    with pytest.raises(SystemExit, match="move it away"):
        run(tmp_path, "classic", "--limit", "1")
    assert (tmp_path / "cpu.csv").read_text() == "a,b\n1,2\n"


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["nonsense"], "no section 'nonsense'"),
        (["--wheels", "nowhere"], "no wheels in nowhere"),
        (["classic", "--device", "cuda"], "no CUDA card here"),
    ],
)
def test_bad_input_gets_one_sentence(arguments, sentence, capsys):
    if torch.cuda.is_available():
        pytest.skip("for machines without a GPU")
    assert gpu.main(arguments) == 2
    assert sentence in capsys.readouterr().err


def test_wheels_are_installed_and_the_kit_starts_again_with_them(tmp_path, monkeypatch):
    (tmp_path / "a-1-py3-none-any.whl").touch()
    calls = []
    done = type("Done", (), {"returncode": 0})
    monkeypatch.setattr(gpu.subprocess, "run", lambda c, **k: calls.append((c, k)) or done)
    assert gpu.main(["classic", "--wheels", str(tmp_path), "--again"]) == 0
    assert "--no-index" in calls[0][0] and calls[0][0][-1].endswith("a-1-py3-none-any.whl")
    path = calls[1][1]["env"]["PYTHONPATH"]
    assert calls[1][0][1:] == ["-m", "tools.gpu", "classic", "--again"] and "from_wheels" in path
    assert calls[1][0][0] == sys.executable


def test_a_wheel_that_pip_refuses_is_one_sentence(tmp_path, monkeypatch, capfd):
    (tmp_path / "a-1-py3-none-any.whl").write_text("no wheel")
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    assert gpu.main(["classic", "--wheels", str(tmp_path)]) == 2
    assert (
        capfd.readouterr().err.splitlines()[-1].startswith("error: pip cannot install the wheels")
    )


def test_there_are_enough_configurations():
    assert len(list(jobs.classic())) == 18
    names = [job.run for job in jobs.matrix()]
    assert len(names) >= 40 and len(set(names)) == len(names)


def test_the_kit_and_the_solution_use_the_lessons_own_class():
    from evidence import waterfalls  # its function reads the lesson

    assert waterfalls.taught().in_backward.__code__.co_filename == "<lesson 16, recipe>"
    folder, cells = waterfalls.LESSON.parent, []
    for path in (waterfalls.LESSON, folder / "solutions" / waterfalls.LESSON.name):
        stored = json.loads(path.read_text(encoding="utf-8"))["cells"]
        cells += [cell["source"] for cell in stored if cell["id"] == "in-backward"]
    assert cells[0] == cells[1]
