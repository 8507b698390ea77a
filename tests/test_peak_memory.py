"""Peak memory of a call: what is freed before its end counts, what was there before it does not."""

import pytest
import torch

from blockpilot_hf import peak_memory as module
from blockpilot_hf.peak_memory import KERNEL, memory_source, peak_memory

CPU = torch.device("cpu")
MB = 2**20  # the kernel counts pages, and a few of them late

counted = pytest.mark.skipif(memory_source(CPU) is None, reason="nothing counts memory of processes here")


@counted
def test_what_is_freed_before_the_end_counts_and_what_was_there_does_not():
    before = torch.ones(64 * MB // 4)
    with peak_memory(CPU) as peak:
        torch.ones(48 * MB // 4)
    assert 47 * MB <= peak.num_bytes < 64 * MB
    assert before[0] == 1


@counted
def test_a_second_call_starts_anew():
    with peak_memory(CPU) as first:
        torch.ones(64 * MB // 4)
    with peak_memory(CPU) as second:
        torch.ones(16 * MB // 4)
    assert first.num_bytes >= 63 * MB
    assert 15 * MB <= second.num_bytes < 32 * MB
    assert memory_source(CPU) == KERNEL


@pytest.mark.parametrize("name", ["_RESET", "_STATUS"])
def test_where_nothing_counts_there_is_no_figure(monkeypatch, tmp_path, name):
    monkeypatch.setattr(module, name, tmp_path / "nowhere" / "file")
    assert memory_source(CPU) is None
    with peak_memory(CPU) as peak:
        torch.ones(MB)
    assert peak.num_bytes is None


@pytest.mark.gpu
def test_on_a_gpu_the_allocator_counts():
    device = torch.device("cuda")
    torch.ones(1, device=device)
    with peak_memory(device) as peak:
        torch.ones(64 * MB // 4, device=device)
    assert 64 * MB <= peak.num_bytes < 65 * MB
