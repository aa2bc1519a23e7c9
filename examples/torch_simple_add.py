"""A user-defined operator over handlers that are registered with torch_xla at run time.

    PJRT_DEVICE=CPU python examples/torch_simple_add.py

Loading the shared library (`ctypes.CDLL(xla_attention.library_path(), ctypes.RTLD_GLOBAL)`) would register nothing:
the registry is in torch_xla's extension module, which exports no symbol for registration. `register_targets` finds the
registry.
"""

import os

os.environ.setdefault("PJRT_DEVICE", "CPU")

import torch
import torch_xla

import xla_attention.torch_xla


def main() -> None:
    """Define the operator, call it, and print the program."""
    print("handlers from", xla_attention.library_path().name, "for torch_xla", torch_xla.__version__)
    xla_attention.torch_xla.register_targets()

    lib = torch.library.Library("xla_gpu", "DEF")
    lib.define("simple_add(Tensor a, Tensor b) -> Tensor")

    @torch.library.impl(lib, "simple_add", "XLA")
    def simple_add_xla(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        arguments = ([a, b], "XlaGpuSimpleAdd", [list(a.shape)], [a.dtype], False, "", 4, {})
        return torch_xla._XLAC._xla_custom_call(*arguments)[0]

    a, b = torch.arange(8.0, device="xla"), torch.full((8,), 10.0, device="xla")
    out = torch.ops.xla_gpu.simple_add(a, b)
    program = torch_xla._XLAC._get_xla_tensors_hlo([out])
    print(next(line.strip() for line in program.splitlines() if "custom-call" in line))
    print(out.cpu().tolist())


if __name__ == "__main__":
    main()
