"""nvidia-smi's output for our two queries."""

from ranktable_tools.devices.nvidia_smi import Gpu, GpuProcess, parse_gpu_processes, parse_gpus


def test_gpus_are_read() -> None:
    text = (
        "0, GPU-5c6a8f6e-7a3b-9a0e-1111-222233334444, NVIDIA H200, 570.86.15, 1024, 143771\n"
        "1, GPU-6d7b9f7f-8b4c-0b1f-5555-666677778888, NVIDIA GB10, 580.95.05, [N/A], [N/A]\n"
    )

    assert parse_gpus(text) == [
        Gpu("0", "GPU-5c6a8f6e-7a3b-9a0e-1111-222233334444", "NVIDIA H200", "570.86.15", 1024, 143771),
        Gpu("1", "GPU-6d7b9f7f-8b4c-0b1f-5555-666677778888", "NVIDIA GB10", "580.95.05", None, None),
    ]


def test_a_process_may_have_commas_in_its_name() -> None:
    text = "GPU-5c6a8f6e-7a3b-9a0e-1111-222233334444, 4711, 512, /opt/a,b/python3\n"

    assert parse_gpu_processes(text) == [
        GpuProcess("GPU-5c6a8f6e-7a3b-9a0e-1111-222233334444", 4711, 512, "/opt/a,b/python3")
    ]


def test_text_lines_are_not_gpus() -> None:
    answer = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver, mind you, a, b, c.\n"

    assert parse_gpus(answer) == []
    assert parse_gpu_processes("No devices were found\n") == []
