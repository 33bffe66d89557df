"""Cache ops and merging, against torch's indexing and arithmetic."""

from __future__ import annotations

import torch
from named_trees import longest_path, tree_named
from suite import Mismatch, Op, Problem, Shape, Way, check_close
from torch import Tensor

import pagedtree

COPIES = 4
MOST_ACCEPTED = 8


def random(generator: torch.Generator, dtype: str, *sizes: int) -> Tensor:
    return torch.randn(sizes, generator=generator, device=generator.device, dtype=getattr(torch, dtype))


class Append(Problem):
    copies = COPIES

    def make(self) -> None:
        generator = self.generator()
        rows, page_size, heads, head_dim = (self.shape[key] for key in ("tokens", "page_size", "kv_heads", "head_dim"))
        dtype = self.shape["dtype"]
        self.k, self.v = (random(generator, dtype, COPIES, rows, heads, head_dim) for _ in range(2))
        pages = -(-2 * rows // page_size)
        self.caches = random(generator, dtype, 2, pages, page_size, heads, head_dim)
        self.slots = torch.randperm(pages * page_size, generator=generator, device=self.device)[:rows]
        self.bytes = 4 * self.k[0].numel() * self.k.element_size()

    def op(self, copy: int) -> Tensor:
        pagedtree.append_kv(self.k[copy], self.v[copy], *self.caches, self.slots)
        return self.caches

    def torch_ops(self, copy: int) -> Tensor:
        for cache, rows in zip(self.caches, (self.k[copy], self.v[copy]), strict=True):
            cache.view(-1, *cache.shape[2:]).index_copy_(0, self.slots, rows)
        return self.caches


class Rope(Problem):
    """Rotates Q and K, and appends K and V to random pages."""

    copies = COPIES

    def make(self) -> None:
        generator = self.generator()
        sizes = ("tokens", "page_size", "q_heads", "kv_heads", "head_dim")
        rows, page_size, heads, kv_heads, head_dim = (self.shape[key] for key in sizes)
        dtype, cache_dtype = self.shape["dtype"], getattr(torch, self.shape["cache_dtype"])
        self.rows = random(generator, dtype, COPIES, rows, heads + 2 * kv_heads, head_dim)
        self.split = [heads, kv_heads, kv_heads]
        pages = -(-2 * rows // page_size)
        self.caches = random(generator, dtype, 2, pages, page_size, kv_heads, head_dim).to(cache_dtype)
        self.slots = torch.randperm(pages * page_size, generator=generator, device=self.device)[:rows]
        self.positions = torch.randint(4096, (rows,), generator=generator, device=self.device)
        angles = torch.rand(4096, head_dim // 2, generator=generator, device=self.device) * 6.3
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
        self.bytes = 2 * rows * (heads + kv_heads) * head_dim * self.rows.element_size()
        self.bytes += rows * kv_heads * head_dim * (self.rows.element_size() + self.caches.element_size())
        self.flops = 3 * rows * (heads + kv_heads) * head_dim

    def op(self, copy: int) -> Tensor:
        q, k, v = self.rows[copy].split(self.split, dim=1)
        return pagedtree.rope_append(q, k, v, self.positions, self.cos_sin, *self.caches, self.slots)

    def torch_ops(self, copy: int) -> Tensor:
        """Rotates in float32, as transformers does."""
        q, k, v = self.rows[copy].split(self.split, dim=1)
        cos, sin = (part[:, None] for part in self.cos_sin[self.positions].chunk(2, dim=1))

        def rotated(x: Tensor) -> Tensor:
            first, second = x.float().chunk(2, dim=2)
            return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=2).to(x.dtype)

        for cache, rows in zip(self.caches, (rotated(k), v), strict=True):
            flat, new = cache.view(-1, *cache.shape[2:]), rows.to(cache.dtype)
            if cache.dtype == torch.float8_e4m3fn:  # torch copies no fp8 rows by index
                flat, new = flat.view(torch.uint8), new.view(torch.uint8)
            flat.index_copy_(0, self.slots, new)
        return rotated(q)


class Compact(Problem):
    """Moves the deepest path to the front, in all layers."""

    def make(self) -> None:
        generator = self.generator()
        batch, page_size = self.shape["batch"], self.shape["page_size"]
        tree = tree_named(self.shape["tree"])
        path = longest_path(tree)[: MOST_ACCEPTED + 1]
        self.accepted = len(path) - 1
        pages = -(-(page_size + tree.num_nodes) // page_size)
        table = torch.randperm(batch * pages, generator=generator, device=self.device).view(batch, pages)
        self.table = table.int()
        self.start = torch.full((batch,), page_size // 2, dtype=torch.int32, device=self.device)
        self.accept_index = torch.tensor([path] * batch, dtype=torch.int32, device=self.device)
        self.num_accepted = torch.full((batch,), self.accepted, dtype=torch.int32, device=self.device)
        self.caches = [
            random(generator, self.shape["dtype"], batch * pages, page_size, *self.row)
            for _ in range(2 * self.shape["layers"])
        ]
        row_bytes = self.row[0] * self.row[1] * self.caches[0].element_size()
        self.bytes = 2 * len(self.caches) * batch * self.accepted * row_bytes

    @property
    def row(self) -> tuple[int, int]:
        return self.shape["kv_heads"], self.shape["head_dim"]

    def op(self, copy: int) -> list[Tensor]:
        pagedtree.compact_kv(self.caches, self.table, self.start, self.accept_index, self.num_accepted)
        return self.caches

    def torch_ops(self, copy: int) -> list[Tensor]:
        step = torch.arange(1, self.accepted + 1, device=self.device)
        source, target = self.start[:, None] + self.accept_index[:, 1:], self.start[:, None] + step
        page_size = self.shape["page_size"]
        source, target = (
            (self.table.gather(1, (at // page_size).long()) * page_size + at % page_size).flatten().long()
            for at in (source, target)
        )
        for cache in self.caches:
            rows = cache.view(-1, *self.row)
            rows.index_copy_(0, target, rows.index_select(0, source))
        return self.caches


class Merge(Problem):
    copies = COPIES

    def make(self) -> None:
        generator = self.generator()
        sizes = (self.shape["tokens"], self.shape["q_heads"])
        self.out = random(generator, self.shape["dtype"], COPIES, 2, *sizes, self.shape["head_dim"])
        self.lse = random(generator, "float32", COPIES, 2, *sizes)
        self.bytes = 3 * self.out[0, 0].numel() * self.out.element_size() + 3 * self.lse[0, 0].numel() * 4
        self.flops = 3 * self.out[0, 0].numel()

    def op(self, copy: int) -> tuple[Tensor, Tensor]:
        (out_a, out_b), (lse_a, lse_b) = self.out[copy], self.lse[copy]
        return pagedtree.merge_states(out_a, lse_a, out_b, lse_b)

    def torch_ops(self, copy: int) -> tuple[Tensor, Tensor]:
        (out_a, out_b), (lse_a, lse_b) = self.out[copy], self.lse[copy]
        lse = torch.logaddexp(lse_a, lse_b)
        weight_a, weight_b = (torch.exp(part - lse)[..., None] for part in (lse_a, lse_b))
        return (weight_a * out_a.float() + weight_b * out_b.float()).to(out_a.dtype), lse


def check_caches(problem: Append | Rope | Compact, ours: Way, theirs: Way) -> None:

    def clones() -> list[Tensor]:
        return [cache.clone() for cache in problem.caches]

    before = clones()
    found = ours.run(0)
    expected = clones()
    for cache, old in zip(problem.caches, before, strict=True):
        cache.copy_(old)
    same = theirs.run(0)
    if isinstance(problem, Rope) and not torch.equal(found, same):
        raise Mismatch("the queries differ")
    if not all(torch.equal(cache, want) for cache, want in zip(problem.caches, expected, strict=True)):
        raise Mismatch("the caches differ")


def row_bytes(shape: Shape) -> int:
    return shape["head_dim"] * getattr(torch, shape["dtype"]).itemsize


ROW = {"kv_heads": 8, "head_dim": 128, "page_size": 16, "dtype": "bfloat16"}
OPS = [
    Op(
        name="append_kv",
        base={"tokens": 512, **ROW},
        axes={
            "tokens": [1, 32, 4096, 32768],
            "page_size": [1, 64, 256],
            "head_dim": [64, 256],
            "dtype": ["float16", "float32"],
        },
        quick={"tokens": 256},
        problem=Append,
        memory=lambda shape: 16 * shape["tokens"] * shape["kv_heads"] * row_bytes(shape),
        check=check_caches,
    ),
    Op(
        name="rope_append",
        base={"tokens": 64, "q_heads": 32, **ROW, "cache_dtype": "bfloat16"},
        axes={
            "tokens": [1, 8, 512, 4096],
            "head_dim": [64, 256],
            "dtype": ["float16"],
            "cache_dtype": ["float8_e4m3fn"],
        },
        quick={"tokens": 16},
        problem=Rope,
        memory=lambda shape: 16 * shape["tokens"] * (shape["q_heads"] + shape["kv_heads"]) * row_bytes(shape),
        check=check_caches,
    ),
    Op(
        name="compact_kv",
        base={"batch": 8, "tree": "Medusa 64", "layers": 32, **ROW},
        axes={
            "batch": [1, 2, 4, 16, 32, 64],
            "tree": ["chain 8", "EAGLE-2 60", "Sequoia 128", "binary 255"],
            "page_size": [1, 64, 256],
        },
        quick={"batch": 2, "layers": 8},
        problem=Compact,
        memory=lambda shape: (
            6 * shape["layers"] * shape["batch"] * (2 * shape["page_size"] + 256) * shape["kv_heads"] * row_bytes(shape)
        ),
        check=check_caches,
    ),
    Op(
        name="merge_states",
        base={"tokens": 256, "q_heads": 32, "head_dim": 128, "dtype": "bfloat16"},
        axes={"tokens": [1, 32, 2048, 8192], "q_heads": [8, 64], "head_dim": [64, 256], "dtype": ["float16"]},
        quick={"tokens": 64},
        problem=Merge,
        memory=lambda shape: 16 * shape["tokens"] * shape["q_heads"] * row_bytes(shape),
        check=check_close,
    ),
]
