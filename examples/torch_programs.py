"""Three ways to verify that the operator is one custom call in the program.

PJRT_DEVICE=CPU python examples/torch_programs.py
"""

import os

os.environ.setdefault("PJRT_DEVICE", "CPU")

import torch
import torch_xla
from torch_xla.debug import metrics
from torch_xla.stablehlo import exported_program_to_stablehlo

from xla_attention.torch import paged_attention


def operands(device: str) -> list[torch.Tensor]:
    """Operands for a sequence of 20 tokens, of which the last four are new."""
    torch.manual_seed(0)
    query, kv_cache = torch.randn(4, 8, 64), torch.randn(4, 16, 4, 64)
    indices = ([20], [[2, 0]], [0, 4], [1])
    return [x.to(device) for x in (query, kv_cache, *(torch.tensor(i, dtype=torch.int32) for i in indices))]


class Attention(torch.nn.Module):
    """A module to export."""

    def forward(self, *operands: torch.Tensor) -> torch.Tensor:
        """Attend over the pages."""
        return paged_attention(*operands, scale=0.125)


def main() -> None:
    """Print the program in each way."""
    print("1. StableHLO, for any PJRT program:")
    exported = torch.export.export(Attention(), tuple(operands("cpu")))
    text = exported_program_to_stablehlo(exported).get_stablehlo_text()
    print("  ", next(line.strip()[:230] for line in text.splitlines() if "custom_call" in line), "...")

    print("2. The program that torch_xla compiles:")
    out = paged_attention(*operands("xla"), scale=0.125)
    hlo = torch_xla._XLAC._get_xla_tensors_hlo([out])
    print("  ", next(line.strip()[-260:] for line in hlo.splitlines() if " custom-call(" in line))

    print("3. The metrics:")
    tensors = operands("xla")
    torch_xla.sync()
    for step in range(4):
        if step == 1:
            metrics.clear_all()
        out = paged_attention(tensors[0] + torch.full((1,), step).to("xla"), *tensors[1:], scale=0.125)
        torch_xla.sync()
        assert torch.isfinite(out.cpu()).all()
    fallbacks = [name for name in metrics.counter_names() if name.startswith("aten::")]
    print(
        "   fallbacks:",
        fallbacks,
        " compilations after the first step:",
        (metrics.metric_data("CompileTime") or [0])[0],
    )


if __name__ == "__main__":
    main()
