"""The worker half of the offload, beside the tensors of a rank."""
