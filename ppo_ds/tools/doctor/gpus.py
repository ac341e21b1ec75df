"""Peak rates and memory of GPUs, from the vendor's data sheets.

Peaks are those of dense matrix products; data sheets often quote twice as much, for 2:4 sparsity. Data sheets
state the bandwidth of NVLink and PCIe as the sum of both directions; the table has the bandwidth of one
direction. ``memory_gib`` is the capacity in torch's out-of-memory errors, which is below the nominal
capacity.

``network`` is the network bandwidth of each GPU in NVIDIA's own systems: DGX A100 has one adapter of 200
Gbit/s per GPU, DGX H100, H200 and B200 have one of 400 Gbit/s. For cards without such a system, one adapter
of 100 Gbit/s per node is assumed. Cards use PCIe if they have no NVLink, or only bridges between two cards.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ppo_ds.errors import UserError


@dataclass(frozen=True)
class Device:
    """Peak rates of the device of one rank: TFLOPS of dense matrix products, links in GB/s per direction."""

    name: str
    memory_gib: float
    bf16: float  # also fp16; products of 16-bit numbers, accumulated in fp32
    fp32: float
    tf32: float  # products of fp32 numbers, where torch may round them to TF32
    bandwidth: float  # GB/s of the device's memory, for reading or writing
    node_link: float  # to the other GPUs of the node
    host_link: float  # to CPU memory
    network: float  # to other nodes, for each GPU
    per_node: int  # GPUs of a node
    source: str

    def flops(self, dtype: str, tf32: bool = False) -> float:
        """Returns the peak FLOPs per second of matrix products."""
        return 1e12 * ((self.tf32 if tf32 else self.fp32) if dtype == "fp32" else self.bf16)


PCIE4, PCIE5 = 32, 64  # GB/s of 16 lanes
SHARED_100G = 12.5 / 8  # GB/s of an adapter of 100 Gbit/s for each of 8 GPUs
H100_SHEET = "https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet"
A100_SHEET = (
    "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/"
    "nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf"
)
ADA_PAPER = (
    "https://images.nvidia.com/aem-dam/Solutions/Data-Center/l4/"
    "nvidia-ada-gpu-architecture-whitepaper-v2.1.pdf"
)
AMPERE_PAPER = "https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf"

# fmt: off
_TABLE = (
    #      name         GiB    bf16   fp32   tf32   memory  node   host   network      per node  source
    Device("b200",      178.3, 2250,  75,    1125,  8000,   900,   PCIE5, 50,          8,
           "https://resources.nvidia.com/en-us-dgx-systems/dgx-b200-datasheet"),
    Device("h200",      139.8, 989.5, 67,    494.7, 4800,   450,   PCIE5, 50,          8,
           "https://nvdam.widen.net/s/nb5zzzsjdf/hpc-datasheet-sc23-h200-datasheet-3002446"),
    Device("h100",      79.2,  989.5, 67,    494.7, 3350,   450,   PCIE5, 50,          8, H100_SHEET),
    Device("h100-pcie", 79.2,  756.5, 51,    378,   2000,   PCIE5, PCIE5, SHARED_100G, 8, H100_SHEET),
    Device("a100",      79.1,  312,   19.5,  156,   2039,   300,   PCIE4, 25,          8, A100_SHEET),
    Device("a100-40gb", 39.4,  312,   19.5,  156,   1555,   300,   PCIE4, 25,          8, A100_SHEET),
    # like the A100, but with an NVLink of 400 GB/s instead of 600
    Device("a800",      79.1,  312,   19.5,  156,   2039,   200,   PCIE4, 25,          8, A100_SHEET),
    Device("l40s",      44.4,  362,   91.6,  183,   864,    PCIE4, PCIE4, SHARED_100G, 8,
           "https://resources.nvidia.com/en-us-l40s/l40s-datasheet-28413"),
    Device("a6000",     47.5,  154.8, 38.7,  77.4,  768,    PCIE4, PCIE4, SHARED_100G, 8, AMPERE_PAPER),
    Device("a10g",      22.1,  70,    31.5,  35,    600,    PCIE4, PCIE4, SHARED_100G, 8,
           "https://d1.awsstatic.com/product-marketing/ec2/NVIDIA_AWS_A10G_DataSheet_FINAL_02_17_2022.pdf"),
    Device("rtx4090",   23.5,  165.2, 82.6,  82.6,  1008,   PCIE4, PCIE4, SHARED_100G, 8, ADA_PAPER),
    Device("rtx3090",   23.5,  71,    35.6,  35.6,  936,    PCIE4, PCIE4, SHARED_100G, 8, AMPERE_PAPER),
)
# fmt: on
GPUS = {device.name: device for device in _TABLE}
# end of a name from torch.cuda.get_device_name -> a row of the table
_MARKETING = {
    "B200": "b200", "H200": "h200", "H100 PCIe": "h100-pcie", "H100 80GB HBM3": "h100",
    "A100-SXM4-80GB": "a100", "A100-SXM4-40GB": "a100-40gb", "A800-SXM4-80GB": "a800", "L40S": "l40s",
    "RTX A6000": "a6000", "A10G": "a10g", "RTX 4090": "rtx4090", "RTX 3090": "rtx3090",
}  # fmt: skip


def find_gpu(name: str) -> Device:
    """Returns the GPU of the table for --gpu NAME, such as "H100 SXM". Raises UserError if it has none."""
    plain = re.sub(r"nvidia|geforce|rtx|tesla|sxm\d?|80gb|[^a-z0-9]", "", name.lower())
    rows = {row.replace("rtx", "").replace("-", ""): device for row, device in GPUS.items()}
    if plain not in rows:
        raise UserError(f"--gpu={name}: unknown; the table has {', '.join(GPUS)}")
    return rows[plain]


def recognized(device_name: str) -> Device | None:
    """Returns the GPU of the table that torch.cuda.get_device_name calls ``device_name``, or None."""
    return next((GPUS[row] for end, row in _MARKETING.items() if device_name.endswith(end)), None)
