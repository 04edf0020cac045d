"""The engine's use of torch_npu's ops, apart from attention; torch.ops.npu exists once the device is open."""
