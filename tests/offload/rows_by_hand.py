"""Rows as plain slices of copies of the cache's storages: no columns, no kernels."""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from kvconnect.offload.index.budgets import ArenaPlan, RowClass


class Image:
    """A copy of every byte behind a cache's tensors, wherever they are."""

    def __init__(self, table, tensors):
        self.table = table
        self.storages = {}
        for cache in tensors.values():
            storage = cache.tensor.untyped_storage()
            raw = torch.empty(0, dtype=torch.uint8, device=cache.tensor.device).set_(storage)
            self.storages[storage.data_ptr()] = raw.cpu().numpy().copy()

    def pages(self, group, block):
        """Views of the pages of a logical block, in the order of a row."""
        ratio = self.table.geometry()[group].blocks_per_kv_block
        for region in self.table.regions:
            if region.group != group:
                continue
            base = max(base for base in self.storages if base <= region.address)
            for page in range(block * ratio, block * ratio + ratio):
                at = region.address - base + page * region.block_stride
                yield self.storages[base][at : at + region.page_bytes]

    def row(self, group, block):
        found = list(self.pages(group, block))
        return np.concatenate(found) if found else np.zeros(0, dtype=np.uint8)

    def write(self, group, block, row):
        for page in self.pages(group, block):
            page[:], row = row[: len(page)], row[len(page) :]

    def same_as(self, other):
        return all(np.array_equal(data, other.storages[base]) for base, data in self.storages.items())


def plan_rows(row_bytes, num_rows):
    """A class for each group, so many rows in each."""
    classes, at = [], 0
    for length in row_bytes.values():
        classes.append(RowClass(length, num_rows, at))
        at = classes[-1].end_bytes
    index = {group: number for number, group in enumerate(row_bytes)}
    return ArenaPlan(tuple(classes), index, dict.fromkeys(row_bytes, num_rows), at)


def rows_of(arena, group):
    """All rows of a group's class, shape ``(rows, row_bytes)``; a view."""
    rows = arena.plan.row_class(group)
    raw = (ctypes.c_uint8 * (rows.num_rows * rows.row_bytes)).from_address(arena.address + rows.offset_bytes)
    return np.frombuffer(raw, dtype=np.uint8).reshape(rows.num_rows, rows.row_bytes)


def copy_out(image, rows, copies):
    """Do by hand what a snapshot does: ``rows`` are arrays by group."""
    for one in copies:
        for block, row in zip(one.block_ids, one.rows, strict=True):
            found = image.row(one.group, block)
            rows[one.group][row, : len(found)] = found


def copy_back(image, rows, copies):
    """Do by hand what a restore does."""
    for one in copies:
        for block, row in zip(one.block_ids, one.rows, strict=True):
            image.write(one.group, block, rows[one.group][row])
