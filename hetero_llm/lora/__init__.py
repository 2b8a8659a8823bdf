"""LoRA adapters: readers of PEFT's files, host memory, slots on the device, products."""
