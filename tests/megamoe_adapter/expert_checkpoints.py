"""Small expert checkpoints in every source format, and their values worked out without the package's own maths.

Not a test file: `Checkpoint` is what the tests of experts, arrivals, reference and kernel share. Values are decoded
here by table look-ups and Kronecker products, so that a mistake in the package's decoding cannot hide in what is
expected of it.
"""

from __future__ import annotations

import torch

PROJECTIONS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
# Every (format, source) pair that can be built, and how far values may be from the checkpoint's: relative L2 per shard.
PAIRS = {
    ("sm100_bf16", "bf16"): 0.0,
    ("sm100_mxfp8", "mxfp8"): 0.0,
    ("sm100_mxfp8", "block_fp8_ue8m0"): 0.0,
    ("sm100_mxfp8", "block_fp8"): 0.04,  # 2.5 % on average; a shard here has two block scales, at worst 3.8 % each
    ("sm100_mxfp8", "bf16"): 0.03,
    ("sm100_mxfp4", "mxfp4_ct"): 0.0,
    ("sm100_mxfp4", "mxfp4_dsv4"): 0.0,
    ("sm100_nvfp4", "nvfp4_modelopt"): 0.0,
    ("sm90_fp8", "block_fp8"): 0.0,
    ("sm90_fp8", "block_fp8_ue8m0"): 0.0,
    ("sm90_fp8", "bf16"): 0.03,
}
SIZES = {
    "sm100": (256, 128),
    "sm90": (512, 256),
}  # (hidden, intermediate): the smallest that each kernel's layout takes
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def sizes_of(fmt):
    return SIZES[fmt.partition("_")[0]]


class Checkpoint:
    """Experts of one layer: `tensors` by checkpoint name, `values[expert][shard]` in float32.

    The expert "shared" is the shared expert. Gate and up are of different scale, so that swapping them shows.
    """

    def __init__(self, source, hidden, intermediate, experts, *, seed=0, prefix="mlp", pow2=False):
        self.source = source
        self.prefix = prefix
        self.tensors = {}
        self.values = {}
        generator = torch.Generator().manual_seed(seed)
        for expert in experts:
            globals_ = (0.5 + torch.rand(2, generator=generator)).tolist()  # one for gate and up, one for down
            self.values[expert] = {}
            for projection, shard in PROJECTIONS.items():
                shape = (hidden, intermediate) if shard == "w2" else (intermediate, hidden)
                size = {"w1": 0.08, "w2": 0.03, "w3": 0.04}[shard]
                scale = globals_[shard == "w2"]
                tensors, value = make(source, shape, size, generator, global_scale=scale, pow2=pow2)
                self.values[expert][shard] = value
                path = self.path(expert, projection)
                self.tensors.update({f"{path}.{suffix}": tensor for suffix, tensor in tensors.items()})

    def path(self, expert, projection):
        owner = "shared_experts" if expert == "shared" else f"experts.{expert}"
        if self.source == "mxfp4_dsv4":
            projection = PROJECTIONS[projection]
        return f"{self.prefix}.{owner}.{projection}"

    def of_expert(self, expert):
        start = self.path(expert, "gate_proj").rpartition(".")[0] + "."
        return {name: tensor for name, tensor in self.tensors.items() if name.startswith(start)}


def make(source, shape, size, generator, *, global_scale=1.0, pow2=False):
    """Tensors of one projection by suffix, and its values."""
    rows, columns = shape
    x = torch.randn(shape, generator=generator) * size
    if source == "bf16":
        x = x.bfloat16()
        return {"weight": x}, x.float()
    codes = (x / size * 60).to(torch.float8_e4m3fn)
    if source in ("block_fp8", "block_fp8_ue8m0"):
        blocks = size / 60 * (0.5 + torch.rand(rows // 128, columns // 128, generator=generator))
        if source == "block_fp8_ue8m0" or pow2:
            exponent = blocks.log2().round()
            blocks = 2.0**exponent
        tensors = {"weight": codes}
        if source == "block_fp8":
            tensors["weight_scale_inv"] = blocks
        else:
            tensors["scale"] = (exponent + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
        return tensors, blockwise(codes.float(), blocks, 128, 128)
    if source == "mxfp8":
        exponent = torch.randint(110, 116, (rows, columns // 32), generator=generator)
        return (
            {"weight": codes, "weight_scale": exponent.to(torch.uint8)},
            blockwise(codes.float(), 2.0 ** (exponent.float() - 127), 1, 32),
        )
    packed = torch.randint(0, 256, (rows, columns // 2), generator=generator).to(torch.uint8)
    if source == "nvfp4_modelopt":
        scale = (size * (0.25 + 0.5 * torch.rand(rows, columns // 16, generator=generator))).to(torch.float8_e4m3fn)
        tensors = {
            "weight": packed,
            "weight_scale": scale,
            "weight_scale_2": torch.tensor(global_scale),
            "input_scale": torch.rand((), generator=generator) * 0.02 + 0.02,
        }
        return tensors, blockwise(decode_fp4(packed), scale.float(), 1, 16) * tensors["weight_scale_2"]
    exponent = torch.randint(120, 124, (rows, columns // 32), generator=generator)
    value = blockwise(decode_fp4(packed), 2.0 ** (exponent.float() - 127), 1, 32)
    if source == "mxfp4_ct":
        return {"weight_packed": packed, "weight_scale": exponent.to(torch.uint8)}, value
    return {"weight": packed.view(torch.int8), "scale": exponent.to(torch.uint8).view(torch.float8_e8m0fnu)}, value


def blockwise(codes, scales, rows, columns):
    return codes * torch.kron(scales, torch.ones(rows, columns))


def decode_fp4(packed):
    table = torch.tensor([sign * value for sign in (1, -1) for value in E2M1])
    value = torch.empty(packed.shape[0], packed.shape[1] * 2)
    value[:, 0::2] = table[(packed % 16).long()]
    value[:, 1::2] = table[(packed // 16).long()]
    return value


def relative_l2(value, expected):
    return ((value.float() - expected.float()).norm() / expected.float().norm()).item()


def bytes_of(tensor):
    """In logical order, whatever the strides."""
    return tensor.detach().contiguous().flatten().view(torch.uint8).clone()


def byte_image(module):
    """Every parameter's bytes by name."""
    return {name: bytes_of(param) for name, param in module.named_parameters()}


def assert_same_bytes(got, expected):
    assert got.keys() == expected.keys()
    for name in got:
        assert torch.equal(got[name], expected[name]), f"{name} differs"


def dense_moe(values, x, topk_ids, topk_weights, *, clamp=None):
    """The layer in float32, token by token; -1 adds nothing; an expert named "shared" takes every token."""
    y = torch.zeros(x.shape[0], values[next(iter(values))]["w2"].shape[0])
    for token in range(x.shape[0]):
        for expert, weight in zip(topk_ids[token].tolist(), topk_weights[token].tolist(), strict=True):
            if expert >= 0:
                y[token] += weight * dense_expert(values[expert], x[token].float(), clamp)
        if "shared" in values:
            y[token] += dense_expert(values["shared"], x[token].float(), clamp)
    return y


def dense_expert(value, x, clamp):
    gate, up = value["w1"] @ x, value["w3"] @ x
    if clamp is not None:
        gate, up = torch.minimum(gate, torch.tensor(clamp)), torch.clip(up, -clamp, clamp)
    return value["w2"] @ (gate / (1 + torch.exp(-gate)) * up)
