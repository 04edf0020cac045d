"""Modules and experts by ops of torch_npu, which exist (torch.ops.npu) once the device is open."""
