"""PyTorch tensors, DataLoader workers and ranks for ``Loader``.

Only this package imports torch. ``Loader`` reads the shards and determines the order.
"""

from hexdata.extras import installed_by

with installed_by("torch", "hexdata.torch"):
    from hexdata.torch.dataset import LoaderDataset
    from hexdata.torch.device_loader import DeviceLoader
    from hexdata.torch.loader import TorchLoader
    from hexdata.torch.tensors import TensorBatch, as_tensors, expand_policy, to_device, unpack

__all__ = [
    "DeviceLoader",
    "LoaderDataset",
    "TensorBatch",
    "TorchLoader",
    "as_tensors",
    "expand_policy",
    "to_device",
    "unpack",
]
