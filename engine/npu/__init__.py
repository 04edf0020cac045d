"""What the engine does by ops of torch_npu alone; nothing here imports it: the open device has (torch.ops.npu)."""
