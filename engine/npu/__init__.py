"""Modules and experts that run on ops of torch_npu, which are registered (torch.ops.npu) once the device is open."""
