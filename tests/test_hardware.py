"""This machine and the cards of `data/gpus.csv`; cards that are not here are mocked."""

import shutil
import types

import pytest
import torch

from fake_cuda import files
from helpers import describe, device, gpu, hardware, supports
from helpers.hardware import data_file, suggest

MiB = 2**20


# -------------------------------------------------------------------------------------- known cards
def test_a_card_by_name():
    card = gpu("T4")
    assert (card.name, card.capability) == ("T4", (7, 5))
    assert 14 * 2**30 < card.memory <= 16 * 2**30
    assert card.facts["bandwidth_gb_s"] == 320 and card.facts["source"]
    assert gpu("t4") == card and gpu("rtx 4090").name == "RTX 4090"


def test_what_is_unknown_is_none():
    assert gpu("T4").facts["tf32_tflops"] is None
    assert gpu("V100").context == 1343 * MiB
    assert any(card.context is None for card in hardware.cards().values())


@pytest.mark.parametrize(
    "word, nearest",
    [("A100", "A100-40GB"), ("B20", "B200"), ("RTX4090", "RTX 4090"), ("V10", "V100")],
)
def test_an_unknown_card_suggests_the_nearest(word, nearest):
    with pytest.raises(ValueError, match=f"'{word}' is not a known GPU: did you mean '{nearest}'"):
        gpu(word)


def test_a_hopeless_name_lists_all_cards():
    with pytest.raises(ValueError, match="choose from P100, V100.*B200"):
        gpu("???")
    with pytest.raises(ValueError, match=r"V100, .*A10G\*, .* \(\* rates unknown"):
        gpu("???")


def test_suggestions():
    assert suggest("tin", ["tiny", "large"], "size") == (
        "'tin' is not a known size: did you mean 'tiny'?"
    )
    assert suggest(7, ["a", "b"], "size") == "7 is not a known size: choose from a, b"


# ----------------------------------------------------------------------------------------- features
@pytest.mark.parametrize(
    "name, features",
    [
        ("P100", ""),
        ("V100", "fp16"),
        ("T4", "fp16"),  # its bf16 is emulated
        ("RTX 3090", "fp16 bf16 tf32 flash_attention"),
        ("A100-80GB", "fp16 bf16 tf32 flash_attention"),
        ("L4", "fp16 bf16 tf32 flash_attention fp8"),
        ("H200", "fp16 bf16 tf32 flash_attention fp8"),
        ("RTX 5090", "fp16 bf16 tf32 flash_attention fp8"),
    ],
)
def test_a_card_supports_what_its_hardware_does(name, features):
    found = {feature for feature in hardware.FEATURES if supports(feature, gpu(name))}
    assert found == set(features.split())


def test_a_cpu_supports_bf16_alone(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(hardware, "device", lambda: torch.device("cpu"))
    assert [feature for feature in hardware.FEATURES if supports(feature)] == ["bf16"]


def test_this_machines_card_decides(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    assert supports("fp16") and not supports("bf16")
    assert supports("bf16", gpu("L4"))


def test_an_unknown_feature_suggests_the_nearest():
    with pytest.raises(ValueError, match="'bf1' is not a known feature: did you mean 'bf16'"):
        supports("bf1", gpu("T4"))


# ------------------------------------------------------------------------------------- this machine
@pytest.mark.parametrize(
    "name, mebibytes, capability",
    [
        ("Tesla T4", 15095, (7, 5)),
        ("NVIDIA H200", 143156, (9, 0)),
        ("NVIDIA A100-SXM4-80GB", 81051, (8, 0)),
        ("NVIDIA H100 PCIe", 81008, (9, 0)),
        ("NVIDIA GeForce RTX 4080 SUPER", 16376, (8, 9)),  # has the memory of the RTX 4080
    ],
)
def test_this_card_is_what_the_driver_says(name, mebibytes, capability, monkeypatch):
    found = types.SimpleNamespace(name=name, total_memory=mebibytes * MiB)
    found.major, found.minor = capability
    found.multi_processor_count = 80
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: found)
    card = hardware.this_gpu()
    assert (card.name, card.memory, card.capability) == (name, mebibytes * MiB, capability)
    # Facts of a card that is only alike would be wrong here: no name of the table, no bandwidth.
    assert card.name not in hardware.cards()
    assert card.facts == {"sms": 80} and card.context is None
    assert supports("bf16", card) == (capability >= (8, 0))


@pytest.mark.parametrize(
    "name, mebibytes, capability, sms, row",
    [
        ("Tesla T4", 15095, (7, 5), 40, "T4"),
        ("NVIDIA A100-SXM4-80GB", 81051, (8, 0), 108, "A100-80GB"),
        ("NVIDIA A100 80GB PCIe", 81051, (8, 0), 108, None),  # slower than the row's, of SXM4
        ("NVIDIA H100 80GB HBM3", 81008, (9, 0), 132, "H100"),
        ("NVIDIA H100 PCIe", 81008, (9, 0), 114, "H100-PCIe"),
        ("Tesla V100-SXM2-32GB", 32494, (7, 0), 80, "V100-32GB"),
        ("NVIDIA GeForce RTX 4080 SUPER", 16376, (8, 9), 80, None),
        ("NVIDIA GeForce RTX 3090", 24124, (8, 6), 82, "RTX 3090"),
    ],
)
def test_this_card_has_the_rates_of_its_row(name, mebibytes, capability, sms, row, monkeypatch):
    found = types.SimpleNamespace(name=name, total_memory=mebibytes * MiB)
    (found.major, found.minor), found.multi_processor_count = capability, sms
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: found)
    assert hardware.this_gpu().facts == (gpu(row).facts if row else {"sms": sms})


def test_describe_is_one_line_and_data():
    found = describe()
    assert "\n" not in str(found)
    assert str(found).startswith(f"{found.device}: {found.name}, ")
    for version in (found.versions["torch"], found.versions["transformers"]):
        assert version in str(found)
    assert found.device == device().type
    assert 0 < found.free <= found.memory
    assert torch.__version__.startswith(found.versions["torch"])
    assert set(found.features) <= set(hardware.FEATURES)
    assert {"python", "torch", "transformers", "accelerate"} <= set(found.versions)


def test_describe_a_card(monkeypatch):
    monkeypatch.setattr(hardware, "device", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (14 * 2**30, 15 * 2**30))
    text = str(describe())
    assert text.startswith("cuda: Tesla T4, 15.00 GiB (14.00 GiB free), compute capability 7.5")
    assert "hardware for fp16," in text and "cards" not in text
    monkeypatch.setattr(hardware.pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(hardware.pynvml, "nvmlDeviceGetCount", lambda: 2)
    assert ", the first of 2 cards, compute" in str(describe())


# --------------------------------------------------------------------------------- finding the data
def test_data_is_found_from_any_folder_below(tmp_path, monkeypatch):
    (tmp_path / "notebooks" / "solutions").mkdir(parents=True)
    (tmp_path / "data").mkdir()
    shutil.copy(data_file("gpus.csv"), tmp_path / "data")
    monkeypatch.chdir(tmp_path / "notebooks" / "solutions")
    assert data_file("configs", "x.json") == tmp_path / "data" / "configs" / "x.json"


def test_a_missing_data_folder_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(files, "__file__", str(tmp_path / "site-packages" / "fake_cuda" / "x.py"))
    with pytest.raises(FileNotFoundError, match="data/gpus.csv was not found") as caught:
        data_file("gpus.csv")
    assert "\n" not in str(caught.value)
